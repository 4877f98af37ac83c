"""Compares what each strategy sends per step on H100s and TPU pods with the least it can send.

    python scripts/bench_contract.py [--models llama2_7b gpt2_xl] [--topologies h100:8 ...]
                                     [--strategies full_shard ...] [--prefetch none] [--local-batch]
                                     [--attention blockwise flash] [--layers N] [--rows 1]
                                     [--gather float8_e4m3fn] [--scatter int8] [--unrolled]
                                     [--json FILE]

Steps are compiled for machines that need not exist here, from configs/llama2_7b.yaml and so on:
scanned layers, full recomputation, bfloat16 compute, float32 AdamW, one sequence per device
(--rows).

Conventions
- Sent bytes are read from the compiled program, loop trips counted, by a ring: (n-1)/n of an array
  to gather it or to reduce-scatter it, twice that to all-reduce it. Padding by the compiler is
  counted.
- Without --local-batch XLA chooses the collectives by sharding annotations, and may send
  activations in place of a parameter; then the limit is an upper bound. With it they are explicit.
- The limit is the strategy's arithmetic in the declared dtypes (fsdp_jax/contract/expected.py):
  6 bytes per parameter for full_shard, less 2 for what is gathered once for forward and backward
  (embedding and head); 4 for the others.
- --gather float8_e4m3fn sends the blocks' kernels in float8, one byte per parameter and gather.
- --scatter int8 sends their gradients in int8 by all-to-alls, 260 bytes for 256 elements; needs
  --local-batch. They are no reduce-scatters: their hidden bytes are those of `scatters` here.
- Hidden bytes: a GEMM, a convolution or an attention kernel runs between start and done. `loop`
  counts the layer loop; with --unrolled, where there is none, all collectives of layers, the first
  gather and the last scatter included, beside which nothing can run.
- Peak is that of a plan: what XLA allocates in the memory of one device, state included.
- Hybrid strategies: 2 replicas on 8 devices, one replica per host of h100:64x8, 16 x 16 on
  v5e:16x16.
- XLA refuses to compile for a TPU a program that does not fit its memory: then 4 layers are
  compiled, and the row says so.
- Each program is compiled in a process of its own; --json keeps the rows, and a second run
  continues from them.
- Exit code 3 if a ratio exceeds 1.02 or a contract does not hold.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_jax.sharding.precision import GATHER_FORMATS
from fsdp_jax.sharding.strategy import STRATEGIES

CONFIGS = Path(__file__).parent.parent / "configs"
MODELS = ("llama2_7b", "gpt2_xl")
ATTENTION = ("blockwise", "flash")
"""Kernels, where the family has them. cuDNN's is in no row: tracing it needs cuDNN installed."""
TOPOLOGIES = {"h100:8": 2, "h100:64x8": 64, "v5e:16x16": 16, "v5p:2x2x2": 2}
"""Topology -> replicas of the hybrid strategies."""
FEW_LAYERS = "4"
MOST = 1.02
GIB = 2.0**30


class RowProgram(NamedTuple):
    """The program of one row."""

    model: str
    topology: str
    strategy: str
    attention: str
    local_batch: bool
    prefetch: str = "none"
    rows: int = 1
    layers: str = ""
    gather: str = ""
    unrolled: bool = False
    scatter: str = ""


def unsupported_attention(model: str) -> Collection[str]:
    """Returns the kernels that the family of a configuration cannot use."""
    from fsdp_jax.models import FAMILIES
    from fsdp_jax.train.config_file import load_config

    family = load_config(CONFIGS / f"{model}.yaml").model.family
    return FAMILIES[family].unsupported_attention


def compile_one(program: RowProgram) -> dict[str, Any]:
    """Compiles one program and returns its row."""
    from fsdp_jax.contract.contract import check_program
    from fsdp_jax.planner import parse_topology
    from fsdp_jax.planner.compiled.buffer_assignment import DEFAULT
    from fsdp_jax.planner.compiled.program import compile_step
    from fsdp_jax.train.build import build
    from fsdp_jax.train.config_file import load_config

    machine = parse_topology(program.topology)
    replicas = TOPOLOGIES.get(program.topology, 2) if STRATEGIES[program.strategy].hybrid else 1
    overrides = {
        "--strategy": program.strategy,
        "--prefetch": program.prefetch,
        "--mesh.replica": replicas,
        "--model.attention": program.attention,
        "--train.global_batch_size": machine.size * program.rows,
        "--train.accumulation": 1,
        "--train.deferred_reduction": False,
        "--train.local_batch": program.local_batch,
    }
    overrides |= {"--model.layers": program.layers} if program.layers else {}
    overrides |= {"--model.scan_layers": False} if program.unrolled else {}
    overrides |= {"--precision.gather": program.gather} if program.gather else {}
    overrides |= {"--precision.scatter": program.scatter} if program.scatter else {}
    arguments = [str(each) for pair in overrides.items() for each in pair]
    run = build(load_config(CONFIGS / f"{program.model}.yaml", arguments), machine.devices())
    compiled = compile_step(run.step, run.batch, machine, None)
    if compiled.report is None:
        raise SystemExit(f"RESOURCE_EXHAUSTED: {compiled.refused_bytes} bytes")
    contract = check_program(run.step.plan, compiled.text)
    hidden = dict.fromkeys(("all-gather", "reduce-scatter"), 0)
    in_loop = dict(hidden)
    of_layers = {path for path, comm in run.step.plan.comms.items() if comm.unit}
    for each in contract.collectives:
        counts = bool(each.loop)
        if program.unrolled:
            counts = not of_layers.isdisjoint(each.paths)
        op = "reduce-scatter" if each.op == "all-to-all" else each.op
        if counts and op in in_loop:
            hidden[op] += each.hidden
            in_loop[op] += each.bytes
    return {
        **program._asdict(),
        "replicas": replicas,
        "devices": machine.size,
        "wire_bytes": contract.wire_bytes,
        "wire_bytes_limit": contract.wire_bytes_limit,
        "ratio": contract.wire_bytes / contract.wire_bytes_limit,
        "holds": contract.holds,
        "violations": [str(violation) for violation in contract.violations] + list(contract.unread),
        "choices": list(contract.choices),
        "loop_hidden_bytes": hidden,
        "loop_bytes": in_loop,
        "peak_bytes": compiled.report.spaces[DEFAULT],
        "state_bytes": run.sharded.layout.per_device(),
        "compile_s": compiled.seconds,
        "collectives": contract.rows(),
    }


def in_child(program: RowProgram) -> dict[str, Any]:
    """Runs `compile_one` in a process of its own: a compiler that crashes loses one row."""
    command = [sys.executable, __file__, "--one", json.dumps(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "RESOURCE_EXHAUSTED" in done.stderr and not program.layers:
        return in_child(program._replace(layers=FEW_LAYERS))
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return program._asdict() | {"error": lines[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| model | attention | topology | strategy | by | sent GiB | limit GiB | ratio "
        "| loop gathers, scatters hidden | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        size = f", {row['layers']} layers" if row["layers"] else ""
        size += f", gathered in {row['gather']}" if row.get("gather") else ""
        size += f", scattered in {row['scatter']}" if row.get("scatter") else ""
        size += ", unrolled" if row.get("unrolled") else ""
        by = "explicit collectives" if row["local_batch"] else "annotations"
        names = [row[name] for name in ("attention", "topology", "strategy")]
        where = f"| {' | '.join([row['model'] + size, *names, by])} "
        if "error" in row:
            lines.append(f"{where}| failed: {row['error'][:80]} | | | | |")
            continue
        shares = []
        for op in ("all-gather", "reduce-scatter"):
            hidden, total = row["loop_hidden_bytes"][op], row["loop_bytes"][op]
            shares.append(f"{100 * hidden / total:.0f}%" if total else "-")
        verdict = "" if row["holds"] else " (contract broken)"
        sent, limit, peak = (
            row[name] / GIB for name in ("wire_bytes", "wire_bytes_limit", "peak_bytes")
        )
        ratio = f"{row['ratio']:.3f}{verdict}"
        lines.append(
            f"{where}| {sent:.2f} | {limit:.2f} | {ratio} | {', '.join(shares)} | {peak:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, help="of configs/")
    parser.add_argument("--topologies", nargs="+", default=tuple(TOPOLOGIES))
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES], choices=STRATEGIES)
    parser.add_argument(
        "--attention", nargs="+", default=("blockwise",), choices=("blockwise", "flash")
    )
    parser.add_argument(
        "--local-batch", action="store_true", help="explicit collectives, in place of annotations"
    )
    parser.add_argument("--prefetch", default="none", choices=("none", "post", "pre"))
    parser.add_argument("--layers", default="", help="in place of the configuration's")
    parser.add_argument("--rows", type=int, default=1, help="sequences or images per device")
    parser.add_argument(
        "--gather", default="", choices=("", *GATHER_FORMATS), help="dtype that kernels are sent in"
    )
    parser.add_argument(
        "--scatter", default="", choices=("", "int8"), help="dtype that gradients are scattered in"
    )
    parser.add_argument("--unrolled", action="store_true", help="layers that are not in a scan")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compile_one(RowProgram(*json.loads(options.one)))))
        return 0
    done = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    asked = {row.pop("asked"): row for row in done if "error" not in row}
    programs = [
        RowProgram(
            model=model,
            topology=topology,
            strategy=strategy,
            attention=attention,
            local_batch=options.local_batch,
            prefetch=options.prefetch,
            rows=options.rows,
            layers=options.layers,
            gather=options.gather,
            unrolled=options.unrolled,
            scatter=options.scatter,
        )
        for model in options.models
        for attention in options.attention
        if attention not in unsupported_attention(model)
        for topology in options.topologies
        for strategy in options.strategies
    ]
    rows = []
    for program in programs:
        key = json.dumps(program)
        asked[key] = asked.get(key) or in_child(program)
        rows.append(asked[key])
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        if options.json:
            saved = [{"asked": key} | row for key, row in asked.items()]
            options.json.write_text(json.dumps(saved, indent=1))
    print(table(rows))
    if not options.json:
        for row in rows:
            row.pop("collectives", None)
        print(json.dumps(rows))
    broken = [row for row in rows if "error" in row or not row["holds"] or row["ratio"] > MOST]
    return 3 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
