"""Validates plans against step times of published runs, and against a real GPU's allocator.

    python scripts/validate_plan.py [--rows NAME ...] [--json FILE]      published runs
    python scripts/validate_plan.py --estimates [--json FILE]            analytic and compiled peaks
    python scripts/validate_plan.py --allocator [--json FILE]            on an NVIDIA GPU, 8 minutes

The first two need the compilers and no device.

Conventions
- Published: tokens per second and device of the plan over the published ones; above 1 the plan is
  too fast. Each run's model, sequence, devices and recomputation are built from our own families,
  compiled for its topology and simulated by the planner; MFU is proportional to tokens per second,
  so the ratio is that of MFU too.
- `recomputed` is the share of a block's FLOPs that the run computes twice. Between 0 and 1 the plan
  is the mean of no and full recomputation, so weighted; on TPUs, where the plan without it does not
  fit, the full plan less the forward loop's time so weighted.
- `batch` is rows of a device at once. Where the published one does not fit ours (no chunked loss,
  no selective recomputation yet) it is smaller, which the row states; a token then costs as much,
  but more is sent for it.
- `attention` is the share of peak of the run's own kernel: 0.46 cuDNN on an H100, 0.30
  FlashAttention-2 or Triton on an H100, 0.52 and 0.45 on an A100.
- The efficiency `matmul` of h100, a100 and of the TPUs is fitted on the rows marked fit. Ratios of
  the rows marked test measure the planner. Exit code 3 if fewer than eight of them are within 15%.
- Allocator: `peak_bytes_in_use` of jax's allocator over the plan's peak, for one of eight mocked
  H100s or for one GPU.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent.parent / "configs" / "llama2_7b.yaml"
WITHIN = 0.15
LEAST = 8


@dataclass(frozen=True)
class Row:
    """A published run.

    Attributes:
        name: of the row.
        source: who published it.
        topology: ours for it.
        model: overrides of configs/llama2_7b.yaml.
        batch: rows of a device at once.
        recomputed: see above.
        attention: see above.
        tokens: per second and device, as published.
        fit: whether constants are fitted on it.
        note: in what ours differs.

    """

    name: str
    source: str
    topology: str
    model: str
    batch: int
    recomputed: float
    attention: float
    tokens: float
    fit: bool = False
    note: str = ""


_LLAMA4K = "--data.sequence_length 4096"
_LLAMA8K = "--data.sequence_length 8192"
_FLOAT32 = "--precision.reduce float32"
_7B = "--model.preset llama2-7b"
_13B = "--model.preset llama2-13b"
_70B = "--model.preset llama2-70b"
_HYBRID = "--strategy hybrid_shard --mesh.replica 64"
_BATCH_6 = "batch 6 there"
_464 = "464 GPUs there, which divide no dim"


def _mpt(
    chip: str,
    size: str,
    shape: tuple[int, int, int],
    sequence: int,
    batch: int,
    recomputed: float,
    tokens: float,
    note: str = "",
) -> Row:
    """Returns a run of MosaicML's; `shape` is (layers, width, heads)."""
    layers, width, heads = shape
    model = "--model.family gpt --model.preset gpt2 --units.classes Block"
    model += f" --model.layers {layers} --model.width {width} --model.heads {heads}"
    model += f" --data.sequence_length {sequence} {_FLOAT32}"
    name = f"MPT {size} {sequence} {chip}"
    attention = 0.30 if chip == "h100" else 0.45
    topology = f"{chip}:8"
    return Row(name, "MosaicML", topology, model, batch, recomputed, attention, tokens, True, note)


ROWS = (
    _mpt("h100", "760M", (24, 1536, 12), 2048, 24, 0, 63147),
    _mpt("h100", "1B", (24, 2048, 16), 2048, 14, 0, 45455),
    _mpt("h100", "3B", (32, 2560, 20), 4096, 5, 0, 20964),
    _mpt("h100", "7B", (32, 4096, 32), 2048, 4, 0, 10643, _BATCH_6),
    _mpt("h100", "7B", (32, 4096, 32), 4096, 16, 1, 8611),
    _mpt("h100", "13B", (40, 5120, 40), 4096, 10, 1, 4717),
    _mpt("a100-80gb", "1B", (24, 2048, 16), 2048, 14, 0, 20513),
    _mpt("a100-80gb", "3B", (32, 2560, 20), 2048, 10, 0, 10811),
    _mpt("a100-80gb", "7B", (32, 4096, 32), 2048, 4, 0, 4641, _BATCH_6),
    _mpt("a100-80gb", "7B", (32, 4096, 32), 4096, 16, 1, 3684),
    _mpt("a100-80gb", "13B", (40, 5120, 40), 4096, 10, 1, 2060),
    # name, source, topology, model, batch, recomputed, attention, tokens, fit, note
    Row("Llama 3.1 8B", "Trillium recipes", "v6e:2x4", f"--model.preset llama3-8b {_LLAMA8K}",
        2, 0.85, 0, 7138.9, True, "batch 3 there"),
    Row("Llama 2 7B", "JAX-Toolbox", "h100:8", f"{_7B} {_LLAMA4K}", 2, 0, 0.46, 11361),
    Row("Llama 2 7B", "MaxText", "h100:8", f"{_7B} {_LLAMA4K}",
        2, 0, 0.46, 10677, False, "batch 4 there"),
    Row("Llama 2 7B", "fms-fsdp", "h100:64x8", f"{_7B} {_LLAMA4K} {_HYBRID}",
        2, 0, 0.30, 9500, False, _464),
    Row("Llama 2 13B", "fms-fsdp", "h100:64x8", f"{_13B} {_LLAMA4K}",
        2, 0.47, 0.30, 4820, False, _464),
    Row("Llama 2 70B", "fms-fsdp", "h100:64x8", f"{_70B} {_LLAMA4K}",
        2, 1, 0.30, 890, False, _464),
    Row("Llama 2 13B", "fms-fsdp", "a100-80gb:16x8", f"{_13B} {_LLAMA4K}", 2, 0.47, 0.52, 2120),
    Row("Llama 2 70B", "fms-fsdp", "a100-80gb:16x8", f"{_70B} {_LLAMA4K}", 2, 1, 0.52, 407),
    Row("Llama 2 13B", "torchtitan", "a100-80gb:8x8", f"{_13B} {_LLAMA4K} {_FLOAT32}",
        2, 0, 0.52, 2162),
    Row("Llama 2 70B", "torchtitan", "a100-80gb:8x8", f"{_70B} {_LLAMA4K} {_FLOAT32}",
        2, 1, 0.52, 353),
    Row("Llama 2 70B", "MaxText", "v5p:4x8x8", f"{_70B} {_LLAMA4K}", 4, 0.58, 0, 692),
    Row("Llama 3.1 8B", "Trillium recipes", "v6e:16x16", f"--model.preset llama3-8b {_LLAMA8K}",
        3, 0.85, 0, 7207.3, False, "batch 4 there"),
    Row("Llama 3.1 70B", "Trillium recipes", "v6e:16x16", f"--model.preset llama3-70b {_LLAMA8K}",
        1, 0.90, 0, 960.2, False, "batch 5 there"),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """The simulated step of a row, with some `matmul` efficiency of its chip.

    Attributes:
        row: the published run.
        step: seconds of a step.

    """

    row: Row
    step: float

    @property
    def ratio(self) -> float:
        """Our tokens per second over the published ones."""
        tokens = self.row.batch * int(self.row.model.split("--data.sequence_length ")[1].split()[0])
        return tokens / self.step / self.row.tokens


def simulate(row: Row, matmul: float | None = None) -> Measured:
    """Simulates a row's step, with another `matmul` efficiency if given."""
    from fsdp_jax.planner import parse_topology

    chip = parse_topology(row.topology).hardware
    assert chip.efficiency is not None
    efficiency = replace(
        chip.efficiency,
        attention=row.attention or chip.efficiency.attention,
        matmul=matmul or chip.efficiency.matmul,
    )
    chip = replace(chip, efficiency=efficiency)
    if chip.platform == "tpu":
        step, forward = _step_and_forward(row, "full", chip)
        return Measured(row, step - (1 - row.recomputed) * forward)
    step = 0.0
    for remat, share in (("full", row.recomputed), ("none", 1 - row.recomputed)):
        if share:
            step += share * _step_and_forward(row, remat, chip)[0]
    return Measured(row, step)


def _step_and_forward(row: Row, remat: str, chip: Any) -> tuple[float, float]:
    """Returns the seconds of a step and of its forward loop."""
    from fsdp_jax.planner.compiled.timeline import ScheduleSimulator

    module, collectives, mesh = _program(row, remat)
    simulator = ScheduleSimulator(module, collectives, mesh, chip)
    step = simulator.simulate_step()
    loops = [trips * body.seconds for trips, body in simulator.loops.values() if trips > 8]
    return step.seconds, min(loops, default=0.0)


@cache
def _program(row: Row, remat: str) -> tuple[Any, Any, Any]:
    """Compiles a row's step once; returns (module, collectives, mesh)."""
    from fsdp_jax.hlo.collectives import read_collectives
    from fsdp_jax.hlo.parser import parse_program
    from fsdp_jax.planner import cache_folder, parse_topology
    from fsdp_jax.planner.compiled.program import compile_step
    from fsdp_jax.train.build import build, topology_devices
    from fsdp_jax.train.config_file import load_config

    topology = parse_topology(row.topology)
    overrides = [*row.model.split(), "--remat", remat, "--model.attention", "flash"]
    overrides += ["--train.global_batch_size", str(row.batch * topology.size)]
    run = build(load_config(CONFIG, overrides), topology_devices(row.topology))
    program = compile_step(run.step, run.batch, topology, cache_folder())
    if not program.text:
        needs = f"{program.refused_bytes} bytes"
        raise SystemExit(f"{row.name} on {row.topology} does not fit: {needs}")
    mesh = run.step.plan.layout.mesh
    return parse_program(program.text), read_collectives(program.text, mesh.shape).collectives, mesh


def fitted(rows: list[Row]) -> float:
    """Returns the efficiency at which the geometric mean of these rows' ratios is 1."""
    low, high = 0.2, 1.2
    for _ in range(18):
        middle = (low + high) / 2
        error = sum(log(simulate(row, middle).ratio) for row in rows)
        low, high = (low, middle) if error > 0 else (middle, high)
    return (low + high) / 2


def published(names: list[str]) -> list[dict[str, Any]]:
    """Returns a record for each run; those that match a name, if any are given."""
    records = []
    for row in ROWS:
        label = f"{row.name} {row.source} {row.topology}".lower()
        if names and not any(name.lower() in label for name in names):
            continue
        ratio = simulate(row).ratio
        record = {
            "run": row.name,
            "source": row.source,
            "topology": row.topology,
            "batch": row.batch,
            "recomputed": row.recomputed,
            "role": "fit" if row.fit else "test",
            "published": row.tokens,
            "plan": ratio * row.tokens,
            "ratio": ratio,
            "note": row.note,
        }
        records.append(record)
        print(markdown([record]).splitlines()[-1], file=sys.stderr, flush=True)
    return records


def markdown(records: list[dict[str, Any]]) -> str:
    """Returns the table of the README."""
    lines = [
        "| run | by | topology | | tokens/s a device | plan | ratio | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['run']} | {r['source']} | {r['topology']} | {r['role']} | {r['published']:.0f} "
        f"| {r['plan']:.0f} | {r['ratio']:.2f} | {r['note']} |"
        for r in records
    ]
    return "\n".join(lines)


def estimates() -> list[dict[str, Any]]:
    """Compares analytic and compiled peaks of the models of scripts/bench_contract.py on H100s."""
    from fsdp_jax.planner import cache_folder, parse_topology
    from fsdp_jax.sharding.strategy import STRATEGIES
    from fsdp_jax.train.config_file import load_config
    from fsdp_jax.train.planning import plan_of

    gib = 2**30
    records = []
    machines = (("h100:8", 2), ("h100:64x8", 64))
    for model, (name, replica), strategy in product(("llama2_7b", "gpt2_xl"), machines, STRATEGIES):
        topology = parse_topology(name)
        overrides = ["--strategy", strategy, "--train.global_batch_size", str(topology.size)]
        overrides += ["--mesh.replica", str(replica)] if strategy.startswith("hybrid") else []
        config = load_config(CONFIG.with_name(f"{model}.yaml"), overrides)
        analytic = plan_of(config, topology, analytic=True).peak_bytes
        compiled = plan_of(config, topology, cache=cache_folder()).peak_bytes
        ratio = analytic / compiled
        records.append(
            {
                "model": model,
                "topology": name,
                "strategy": strategy,
                "analytic": analytic,
                "compiled": compiled,
                "ratio": ratio,
            }
        )
        peaks = f"{analytic / gib:.2f} | {compiled / gib:.2f}"
        print(f"| {model} | {name} | {strategy} | {peaks} | {ratio:.3f} |", flush=True)
    return records


ALLOCATED = (
    "--model.layers 4 --remat full",
    "--model.layers 4 --remat none",
    "--model.layers 8 --remat full",
    "--model.layers 4 --remat full --strategy shard_grad_op --prefetch none",
    "--model.layers 4 --remat full --train.accumulation 2",
    "--model.layers 2 --remat none --strategy no_shard",
)
"""Overrides of configs/llama2_7b.yaml."""
_GPU = {
    "JAX_PLATFORMS": "cuda,cpu",
    "JAX_MOCK_GPU_TOPOLOGY": "1x1x8",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def allocator() -> list[dict[str, Any]]:
    """Runs each configuration in a process of its own, with a fresh allocator."""
    records = []
    for overrides in ALLOCATED:
        command = [sys.executable, __file__, "--one", overrides]
        env = os.environ | _GPU
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise SystemExit(f"{overrides}\n{done.stderr[-3000:]}")
        records.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{overrides}: {records[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    return records


def one_allocation(overrides: str) -> dict[str, Any]:
    """Compares the peak of this process's GPU, mocked to be one of eight, with the plan."""
    import jax

    from fsdp_jax.planner import compiled_plan, hardware_of, parse_topology
    from fsdp_jax.train.build import build
    from fsdp_jax.train.config_file import load_config

    device = jax.local_devices()[0]
    chip = hardware_of(device.device_kind)
    assert chip is not None, f"{device.device_kind} is not in the table of chips"
    devices = jax.device_count()
    topology = parse_topology(f"{chip.name}:{devices}")
    config = load_config(
        CONFIG, [*overrides.split(), "--train.global_batch_size", str(2 * devices)]
    )
    # the plan, for devices that are absent
    planned = build(config, topology.devices())
    plan = compiled_plan(planned.step, planned.batch, topology, planned.work, None)
    # two real steps
    run = build(config, jax.devices())
    state = run.sharded.init(0)
    rows = 2 * len(jax.local_devices())
    batch = {
        name: jax.numpy.zeros((rows, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in run.batch.items()
    }
    for _ in range(2):
        state, metrics = run.step(state, batch)
    jax.block_until_ready(metrics)
    real = device.memory_stats()["peak_bytes_in_use"]
    return {
        "config": overrides,
        "devices": devices,
        "real": real,
        "plan": plan.peak_bytes,
        "ratio": plan.peak_bytes / real,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", default=[], help="part of a name, source or topology")
    parser.add_argument("--fit", nargs="*", metavar="CHIP", help="fit the efficiencies, print them")
    parser.add_argument("--estimates", action="store_true", help="analytic and compiled peaks")
    parser.add_argument("--allocator", action="store_true", help="on a GPU: the allocator's peak")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(one_allocation(options.one)))
        return 0
    if options.fit is not None:
        for chip in options.fit or ("h100", "a100-80gb", "v6e"):
            rows = [row for row in ROWS if row.fit and row.topology.partition(":")[0] == chip]
            print(f"{chip}: matmul {fitted(rows):.3f}")
        return 0
    if options.estimates:
        records = estimates()
        holds = all(abs(r["ratio"] - 1) < 0.10 for r in records)
    elif options.allocator:
        records = allocator()
        for r in records:
            print(f"| {r['config']} | {r['real']} | {r['plan']} | {r['ratio']:.3f} |")
        holds = all(abs(r["ratio"] - 1) < 0.05 for r in records)
    else:
        records = published(options.rows)
        print(markdown(records))
        logs = [log(r["ratio"]) for r in records if r["role"] == "test"]
        near = sum(abs(each) < log(1 + WITHIN) for each in logs)
        mean = exp(sum(logs) / max(1, len(logs)))
        print(
            f"{near} of {len(logs)} test rows are within {WITHIN:.0%};"
            f" their geometric mean is {mean:.2f}"
        )
        holds = near >= min(LEAST, len(logs))
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))
    return 0 if holds else 3


if __name__ == "__main__":
    sys.exit(main())
