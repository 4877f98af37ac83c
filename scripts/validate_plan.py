"""Plans against what others measured: step times of published runs, and the peak of a real GPU's
allocator.

    python scripts/validate_plan.py [--rows NAME ...] [--json FILE]      published runs; needs the compilers, no device
    python scripts/validate_plan.py --estimates [--json FILE]            analytic peaks against compiled ones
    python scripts/validate_plan.py --allocator [--json FILE]            needs an NVIDIA GPU; under eight minutes

Conventions
- Published: tokens per second and device of the plan over the published ones; above 1 the plan is
  too fast. Each run's model, sequence, devices and recomputation are built from our own families,
  compiled for its topology and played by the planner; MFU is proportional to tokens per second, so
  the ratio is that of MFU too.
- `recomputed` is the share of a block's FLOPs that the run computes twice. Between 0 and 1 the plan
  is the mean of no and full recomputation, so weighted; on TPUs, where the plan without it does not
  fit, the full plan less the forward loop's time so weighted.
- `batch` is rows of a device at once. Where the published one does not fit ours (no chunked loss,
  no selective recomputation yet) it is smaller, which the row says; a token then costs as much, but
  more is sent for it.
- `attention` is the share of peak of the run's own kernel: 0.46 cuDNN on an H100, 0.30
  FlashAttention-2 or Triton on an H100, 0.52 and 0.45 on an A100.
- Constants are fitted on the rows marked fit: `product` of h100, a100 and of the TPUs. Ratios of
  the rows marked test are what the planner is worth. Exit code 3 where fewer than eight of them are
  within 15%.
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
_FEWER = "batch 6 there"
_7B, _13B, _70B = (
    "--model.preset llama2-7b",
    "--model.preset llama2-13b",
    "--model.preset llama2-70b",
)
_464 = "464 GPUs there, which divide no dim"


def _mpt(
    chip: str, size: str, shape: tuple[int, int, int], sequence: int, batch: int, recomputed: float, tokens: float,
    note: str = "",
) -> Row:  # fmt: skip
    layers, width, heads = shape
    model = f"--model.family gpt --model.preset gpt2 --units.classes Block --model.layers {layers} --model.width {width}"
    model += f" --model.heads {heads} --data.sequence_length {sequence} {_FLOAT32}"
    attention = 0.30 if chip == "h100" else 0.45
    name = f"MPT {size} {sequence} {chip}"
    return Row(
        name,
        "MosaicML",
        f"{chip}:8",
        model,
        batch,
        recomputed,
        attention,
        tokens,
        fit=True,
        note=note,
    )


ROWS = (
    _mpt("h100", "760M", (24, 1536, 12), 2048, 24, 0, 63147),
    _mpt("h100", "1B", (24, 2048, 16), 2048, 14, 0, 45455),
    _mpt("h100", "3B", (32, 2560, 20), 4096, 5, 0, 20964),
    _mpt("h100", "7B", (32, 4096, 32), 2048, 4, 0, 10643, _FEWER),
    _mpt("h100", "7B", (32, 4096, 32), 4096, 16, 1, 8611),
    _mpt("h100", "13B", (40, 5120, 40), 4096, 10, 1, 4717),
    _mpt("a100-80gb", "1B", (24, 2048, 16), 2048, 14, 0, 20513),
    _mpt("a100-80gb", "3B", (32, 2560, 20), 2048, 10, 0, 10811),
    _mpt("a100-80gb", "7B", (32, 4096, 32), 2048, 4, 0, 4641, _FEWER),
    _mpt("a100-80gb", "7B", (32, 4096, 32), 4096, 16, 1, 3684),
    _mpt("a100-80gb", "13B", (40, 5120, 40), 4096, 10, 1, 2060),
    Row("Llama 3.1 8B", "Trillium recipes", "v6e:2x4", f"--model.preset llama3-8b {_LLAMA8K}", 2, 0.85, 0, 7138.9,
        fit=True, note="batch 3 there"),
    Row("Llama 2 7B", "JAX-Toolbox", "h100:8", f"{_7B} {_LLAMA4K}", 2, 0, 0.46, 11361),
    Row("Llama 2 7B", "MaxText", "h100:8", f"{_7B} {_LLAMA4K}", 2, 0, 0.46, 10677, note="batch 4 there"),
    Row("Llama 2 7B", "fms-fsdp", "h100:64x8", f"{_7B} {_LLAMA4K} --strategy hybrid_shard --mesh.replica 64", 2, 0,
        0.30, 9500, note=_464),
    Row("Llama 2 13B", "fms-fsdp", "h100:64x8", f"{_13B} {_LLAMA4K}", 2, 0.47, 0.30, 4820, note=_464),
    Row("Llama 2 70B", "fms-fsdp", "h100:64x8", f"{_70B} {_LLAMA4K}", 2, 1, 0.30, 890, note=_464),
    Row("Llama 2 13B", "fms-fsdp", "a100-80gb:16x8", f"{_13B} {_LLAMA4K}", 2, 0.47, 0.52, 2120),
    Row("Llama 2 70B", "fms-fsdp", "a100-80gb:16x8", f"{_70B} {_LLAMA4K}", 2, 1, 0.52, 407),
    Row("Llama 2 13B", "torchtitan", "a100-80gb:8x8", f"{_13B} {_LLAMA4K} {_FLOAT32}", 2, 0, 0.52, 2162),
    Row("Llama 2 70B", "torchtitan", "a100-80gb:8x8", f"{_70B} {_LLAMA4K} {_FLOAT32}", 2, 1, 0.52, 353),
    Row("Llama 2 70B", "MaxText", "v5p:4x8x8", f"{_70B} {_LLAMA4K}", 4, 0.58, 0, 692),
    Row("Llama 3.1 8B", "Trillium recipes", "v6e:16x16", f"--model.preset llama3-8b {_LLAMA8K}", 3, 0.85, 0, 7207.3,
        note="batch 4 there"),
    Row("Llama 3.1 70B", "Trillium recipes", "v6e:16x16", f"--model.preset llama3-70b {_LLAMA8K}", 1, 0.90, 0, 960.2,
        note="batch 5 there"),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What playing a row with a chip's product constant gives, and how it changes with it."""

    row: Row
    product: float
    step: float
    compute: float

    @property
    def ratio(self) -> float:
        """Our tokens per second over the published ones."""
        tokens = self.row.batch * int(self.row.model.split("--data.sequence_length ")[1].split()[0])
        return tokens / self.step / self.row.tokens


def play(row: Row, product: float | None = None) -> Measured:
    """A row's step, with another product constant if given."""
    from fsdp_jax.planner import parse_topology
    from fsdp_jax.planner.machines.efficiency import Efficiency, efficiency_of

    topology = parse_topology(row.topology)
    constants = efficiency_of(topology.hardware).constants
    constants = replace(
        constants,
        attention=row.attention or constants.attention,
        product=product or constants.product,
    )
    efficiency = Efficiency(topology.hardware, constants)
    tpu = topology.hardware.platform == "tpu"
    full = _played(row, "full", efficiency) if row.recomputed or tpu else None
    none = _played(row, "none", efficiency) if row.recomputed < 1 and not tpu else None
    if tpu and full is not None:
        seconds = full["step"] - (1 - row.recomputed) * full["forward"]
        return Measured(row, constants.product, seconds, full["compute"])
    f = row.recomputed
    step, compute = (
        f * (full or {key: 0.0})[key] + (1 - f) * (none or {key: 0.0})[key]
        for key in ("step", "compute")
    )
    return Measured(row, constants.product, step, compute)


def _played(row: Row, remat: str, efficiency: Any) -> dict[str, float]:
    from fsdp_jax.planner.planner import player_of

    module, sent, plan = _program(row, remat)
    player = player_of(module, sent, plan, efficiency)
    whole = player.whole()
    loops = [trips * played.seconds for trips, played in player.loops.values() if trips > 8]
    return {"step": whole.seconds, "compute": whole.compute, "forward": min(loops, default=0.0)}


@cache
def _program(row: Row, remat: str) -> tuple[Any, Any, Any]:
    """(module, what it sends, the step's plan), compiled once."""
    from fsdp_jax.hlo.collectives import read_program
    from fsdp_jax.hlo.parser import parse
    from fsdp_jax.planner import cache_folder, parse_topology
    from fsdp_jax.planner.compiled.program import compile_step
    from fsdp_jax.train.build import build, topology_devices
    from fsdp_jax.train.config_file import load

    topology = parse_topology(row.topology)
    words = [*row.model.split(), "--remat", remat, "--model.attention", "flash"]
    words += ["--train.global_batch_size", str(row.batch * topology.size)]
    run = build(load(CONFIG, words), topology_devices(row.topology))
    program = compile_step(run.step, run.batch, topology, cache_folder())
    assert run.step.plan is not None
    if not program.text:
        raise SystemExit(
            f"{row.name} on {row.topology} does not fit: {program.refused_bytes} bytes"
        )
    sent = read_program(program.text, run.step.plan.layout.mesh.shape)
    return parse(program.text), sent, run.step.plan


def fitted(rows: list[Row]) -> float:
    """The product constant for which the geometric mean of these rows' ratios is 1."""
    low, high = 0.2, 1.2
    for _ in range(18):
        middle = (low + high) / 2
        error = sum(log(play(row, middle).ratio) for row in rows)
        low, high = (low, middle) if error > 0 else (middle, high)
    return (low + high) / 2


def published(names: list[str]) -> list[dict[str, Any]]:
    """A row for each run."""
    found = []
    for row in ROWS:
        if names and not any(
            name.lower() in f"{row.name} {row.source} {row.topology}".lower() for name in names
        ):
            continue
        measured = play(row)
        found.append(
            {
                "run": row.name, "source": row.source, "topology": row.topology, "batch": row.batch,
                "recomputed": row.recomputed, "role": "fit" if row.fit else "test", "published": row.tokens,
                "plan": measured.ratio * row.tokens, "ratio": measured.ratio, "note": row.note,
            }
        )  # fmt: skip
        print(markdown([found[-1]]).splitlines()[-1], file=sys.stderr, flush=True)
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """As in the README."""
    lines = [
        "| run | by | topology | | tokens/s a device | plan | ratio | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['run']} | {r['source']} | {r['topology']} | {r['role']} | {r['published']:.0f} | {r['plan']:.0f} "
        f"| {r['ratio']:.2f} | {r['note']} |"
        for r in rows
    ]
    return "\n".join(lines)


def estimates() -> list[dict[str, Any]]:
    """The analytic peak over the compiled one, for the models of scripts/bench_contract.py on
    H100s.
    """
    from fsdp_jax.planner import cache_folder, parse_topology
    from fsdp_jax.sharding.strategy import STRATEGIES
    from fsdp_jax.train.config_file import load
    from fsdp_jax.train.planning import plan_of

    rows = []
    for model in ("llama2_7b", "gpt2_xl"):
        for name, replica in (("h100:8", 2), ("h100:64x8", 64)):
            for strategy in STRATEGIES:
                topology = parse_topology(name)
                words = ["--strategy", strategy, "--train.global_batch_size", str(topology.size)]
                words += ["--mesh.replica", str(replica)] if strategy.startswith("hybrid") else []
                config = load(CONFIG.with_name(f"{model}.yaml"), words)
                guess = plan_of(config, topology, analytic=True).peak_bytes
                real = plan_of(config, topology, cache=cache_folder()).peak_bytes
                rows.append({"model": model, "topology": name, "strategy": strategy, "analytic": guess,
                             "compiled": real, "ratio": guess / real})  # fmt: skip
                print(f"| {model} | {name} | {strategy} | {guess / 2**30:.2f} | {real / 2**30:.2f} "
                      f"| {guess / real:.3f} |", flush=True)  # fmt: skip
    return rows


ALLOCATED = (
    "--model.layers 4 --remat full", "--model.layers 4 --remat none", "--model.layers 8 --remat full",
    "--model.layers 4 --remat full --strategy shard_grad_op --prefetch none",
    "--model.layers 4 --remat full --train.accumulation 2", "--model.layers 2 --remat none --strategy no_shard",
)  # fmt: skip
"""Overrides of configs/llama2_7b.yaml."""


def allocator() -> list[dict[str, Any]]:
    """Each configuration in a process of its own, whose allocator has seen nothing else."""
    rows = []
    for words in ALLOCATED:
        command = [sys.executable, __file__, "--one", words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | _GPU
        )
        if done.returncode:
            raise SystemExit(f"{words}\n{done.stderr[-3000:]}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{words}: {rows[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    return rows


_GPU = {
    "JAX_PLATFORMS": "cuda,cpu",
    "JAX_MOCK_GPU_TOPOLOGY": "1x1x8",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def one_allocation(words: str) -> dict[str, Any]:
    """The peak of this process's GPU, which stands for one of eight, against the plan for eight
    that are not there.
    """
    import jax

    from fsdp_jax.planner import compiled_plan, parse_topology
    from fsdp_jax.planner.machines.chips import hardware_of
    from fsdp_jax.train.build import build
    from fsdp_jax.train.config_file import load

    device = jax.local_devices()[0]
    chip = hardware_of(device.device_kind)
    assert chip is not None, f"{device.device_kind} is not in the hardware table"
    devices = jax.device_count()
    topology = parse_topology(f"{chip.name}:{devices}")
    config = load(CONFIG, [*words.split(), "--train.global_batch_size", str(2 * devices)])
    there = build(config, topology.devices())
    plan = compiled_plan(there.step, there.batch, topology, there.work, None)
    run = build(config, jax.devices())
    state, rows = run.sharded.init(0), 2 * len(jax.local_devices())
    batch = {
        name: jax.numpy.zeros((rows, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in run.batch.items()
    }
    for _ in range(2):
        state, metrics = run.step(state, batch)
    jax.block_until_ready(metrics)
    stats = device.memory_stats()
    real = stats["peak_bytes_in_use"]
    return {
        "config": words,
        "devices": devices,
        "real": real,
        "plan": plan.peak_bytes,
        "ratio": plan.peak_bytes / real,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", nargs="*", default=[], help="words that a row's name, source or topology has"
    )
    parser.add_argument(
        "--fit", nargs="*", metavar="CHIP", help="fit the constants again and print them"
    )
    parser.add_argument(
        "--estimates", action="store_true", help="analytic peaks against compiled ones"
    )
    parser.add_argument("--allocator", action="store_true", help="on a GPU: the allocator's peak")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(one_allocation(options.one)))
        return 0
    if options.fit is not None:
        for chip in options.fit or ("h100", "a100-80gb", "v6e"):
            of = [row for row in ROWS if row.fit and row.topology.partition(":")[0] == chip]
            print(f"{chip}: product {fitted(of):.3f}")
        return 0
    rows = (
        estimates()
        if options.estimates
        else allocator()
        if options.allocator
        else published(options.rows)
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.estimates:
        return 0 if all(abs(r["ratio"] - 1) < 0.10 for r in rows) else 3
    if options.allocator:
        print(
            "\n".join(
                f"| {r['config']} | {r['real']} | {r['plan']} | {r['ratio']:.3f} |" for r in rows
            )
        )
        return 0 if all(abs(r["ratio"] - 1) < 0.05 for r in rows) else 3
    print(markdown(rows))
    near = [r for r in rows if r["role"] == "test" and abs(log(r["ratio"])) < log(1 + WITHIN)]
    test = [r for r in rows if r["role"] == "test"]
    mean = exp(sum(log(r["ratio"]) for r in test) / max(1, len(test)))
    print(
        f"{len(near)} of {len(test)} test rows are within {WITHIN:.0%}; their geometric mean is {mean:.2f}"
    )
    return 0 if len(near) >= min(LEAST, len(test)) else 3


if __name__ == "__main__":
    sys.exit(main())
