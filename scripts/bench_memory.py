"""Compares the memory levers: memory, FLOPs, traffic and predicted time of each, in one table.

    python scripts/bench_memory.py [--models gpt2_xl llama2_7b] [--topology h100:8] [--rows 2]
                                   [--levers remat=none offload=all ...] [--analytic] [--json FILE]

Each row is a configuration of configs/ with overrides, compiled for a machine that need not exist
here; `--analytic` estimates it from its trace.

Conventions
- Basis: `full_shard`, float32 parameters and AdamW, bfloat16 compute, `prefetch: pre`, flash
  attention, `--rows` sequences of 2048 tokens (GPT-2: 1024) a device, and `remat: full`, unless the
  lever says otherwise.
- Bytes are per device. Peak: the most device memory of a step; between steps: the state alone;
  host: what the step keeps in host memory. Sent: by a ring, loop trips counted; to and from the
  host: read from the compiled program.
- FLOPs: every matmul of the program on one device, recomputation included; not model FLOPs.
- Time: the planner's roofline over the compiled schedule; not measured.
- A lever whose keys this release does not have is named on stderr, and has no row.
- Each row is compiled in a process of its own; --json keeps the rows, and a second run continues.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent.parent / "configs"
MODELS = {"gpt2_xl": 1024, "llama2_7b": 2048}
"""Configuration -> tokens of a sequence."""
LEVERS: dict[str, str] = {
    "remat=none": "--remat none",
    "remat=dots": "--remat dots",
    "remat=selective": "--remat selective",
    "remat=full": "--remat full",
    "offload=optimizer": "--offload.optimizer 1",
    "offload=params": "--offload.params True --offload.optimizer 1",
    "offload=activations": "--offload.activations True",
    "offload=all": "--offload.params True --offload.optimizer 1 --offload.activations True",
    "gather=fp8": "--precision.gather float8_e4m3fn",
    "moments=int8": "--optimizer.moments int8",
    "loss_chunk": "--train.loss_chunk 8192",
}
"""Name -> overrides of the configuration."""
COLUMNS = (
    *("model", "lever", "fits", "peak", "between steps", "host", "TFLOP", "sent", "exposed"),
    *("from host", "to host", "hidden", "step", "tokens/s", "remarks"),
)
RIGHT = COLUMNS[3:14]


def plan_one(model: str, lever: str, topology: str, rows: int, *, analytic: bool) -> dict[str, Any]:
    """Plans one row; its fields are those of `plan --json`, with the lever and the FLOPs.

    Raises:
        ConfigError: a key that this release does not have.

    """
    from fsdp_jax.planner import cache_folder, parse_topology
    from fsdp_jax.train.config_file import load_config
    from fsdp_jax.train.planning import plan_of

    machine = parse_topology(topology)
    words = "--strategy full_shard --remat full --prefetch pre --model.attention flash"
    words += f" --data.sequence_length {MODELS[model]}"
    words += f" --train.global_batch_size {rows * machine.size} {LEVERS[lever]}"
    config = load_config(CONFIGS / f"{model}.yaml", words.split())
    plan = plan_of(config, machine, analytic=analytic, cache=cache_folder())
    flops = None
    if plan.hfu is not None and plan.time is not None:
        peaks = machine.hardware.peak_flops
        flops = plan.hfu * plan.time.step_s * (peaks.get("bfloat16") or peaks["float16"])
    fields = plan.to_json()
    for long in ("collectives", "buffers", "fixes"):
        del fields[long]
    return fields | {"model": model, "lever": lever, "rows": rows, "flops": flops}


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns a row of the table."""
    from fsdp_jax.errors import human_bytes

    time = row["time"]
    hidden = "-"
    if time and time["host_s"]:
        hidden = f"{max(0.0, 1 - time['host_exposed_s'] / time['host_s']):.0%}"
    speed = row["tokens_per_s_per_device"]
    return (
        row["model"],
        row["lever"],
        "yes" if row["fits"] else "NO",
        *(human_bytes(row[name]) for name in ("peak_bytes", "valley_bytes", "host_bytes")),
        f"{row['flops'] / 1e12:.3g}" if row["flops"] else "-",
        *(human_bytes(row[name]) for name in ("wire_bytes", "exposed_bytes")),
        *(human_bytes(row[name]) for name in ("from_host_bytes", "to_host_bytes")),
        hidden,
        f"{1000 * time['step_s']:.0f} ms" if time else "-",
        f"{speed:.0f}" if speed else "-",
        "memory cliff" if row["cliff"] else "",
    )


def compile_apart(arguments: argparse.Namespace, model: str, lever: str) -> dict[str, Any] | None:
    """Plans one row in a process of its own; None where the release does not have the key."""
    command = [sys.executable, __file__, "--one", model, lever, "--topology", arguments.topology]
    command += ["--rows", str(arguments.rows), *["--analytic"] * arguments.analytic]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    lines = done.stderr.strip().splitlines() or ["no message"]
    first = next((n for n, line in enumerate(lines) if line.startswith("fsdp_jax.errors")), -1)
    why = " ".join(line.strip() for line in lines[first:])
    print(f"{model}, {lever}: no row: {why}", file=sys.stderr, flush=True)
    return None


def main() -> int:
    """Prints the table; with --json also writes the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--topology", default="h100:8")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--levers", nargs="+", default=list(LEVERS), choices=list(LEVERS))
    parser.add_argument("--analytic", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        from fsdp_jax.planner import choose_platforms

        choose_platforms()
        model, lever = arguments.one
        row = plan_one(
            model, lever, arguments.topology, arguments.rows, analytic=arguments.analytic
        )
        print(json.dumps(row))
        return 0
    # Continue from the rows of an earlier run.
    rows: list[dict[str, Any]] = []
    if arguments.json and arguments.json.is_file():
        rows = json.loads(arguments.json.read_text())
    done = {(row["model"], row["lever"], row["topology"], row["rows"]) for row in rows}
    for model in arguments.models:
        for lever in arguments.levers:
            if (model, lever, arguments.topology, arguments.rows) in done:
                continue
            row_or_none = compile_apart(arguments, model, lever)
            if row_or_none is not None:
                rows.append(row_or_none)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")

    from fsdp_jax.tables import text_table

    print(text_table(COLUMNS, [cells(row) for row in rows], right=RIGHT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
