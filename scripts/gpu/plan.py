"""Compares plans with real allocator peaks and step times, for six configurations.

    python scripts/gpu/plan.py [--toy] [--seconds 450] [--json FILE]

One GPU. With --toy on a CPU, whose allocator does not tell its peak: the plan is an analytic one
for an H100, so that its ratios mean nothing. A plan is made in a process
without the GPU, a measurement in one with it.

Conventions
- Planned peak: `fsdp-jax plan` for one device of the chip that is there, of the table of chips;
  measured: `peak_bytes_in_use` of the allocator after 8 steps of the program compiled here.
- Step: the median of the steps after the first two, each waited for; planned: that of the plan.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from trials import environment, finish, load, median_seconds, peak_bytes, run_trial

# (model, sequence, rows, words)
CONFIGURATIONS = [
    ("gpt2-124m", 1024, 16, "--remat none"),
    ("gpt2-124m", 1024, 32, "--remat full"),
    ("gpt2-124m", 1024, 32, "--remat none --train.accumulation 4"),
    ("llama-1b", 2048, 4, "--remat none"),
    ("llama-1b", 4096, 4, "--remat full"),
    ("llama-1b", 4096, 4, "--remat full --train.loss_chunk 16384"),
]
TOPOLOGIES = {"NVIDIA H100 80GB HBM3": "h100:1", "NVIDIA H200": "h200:1"}


def planned(trial: dict[str, Any], config: Any) -> dict[str, Any]:
    """Plans a configuration; GPUs that are here are not touched."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from fsdp_jax.planner import choose_platforms, parse_topology
    from fsdp_jax.train.planning import plan_of

    choose_platforms()
    topology = parse_topology(trial["topology"])
    plan = plan_of(config, topology, analytic=trial["toy"])
    seconds = None if plan.time is None else plan.time.step_s
    return {"peak_bytes": plan.peak_bytes, "step_s": seconds}


def measured(config: Any) -> dict[str, Any]:
    """Trains a few steps on what is here."""
    import jax
    import numpy as np

    from fsdp_jax.train.build import build

    run = build(config)
    state = run.sharded.init(0)
    batch = run.step.put(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), run.batch))

    def step() -> None:
        nonlocal state
        state, _ = run.step(state, batch)
        jax.block_until_ready(state)

    return {"step_s": median_seconds(step, steps=6), "peak_bytes": peak_bytes()}


def ratio(above: float | None, below: float | None) -> str:
    """Formats a ratio; `-` where one is not known."""
    if not above or not below:
        return "-"
    return f"{above / below:.3f}"


def main() -> int:
    """Runs the trials, prints the table and a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="small models, for a CPU")
    parser.add_argument("--seconds", type=float, default=450, help="for all trials")
    parser.add_argument("--attention", help="cudnn, flash or blockwise")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trial is not None:
        trial = json.loads(arguments.trial)
        sizes = (trial["model"], trial["sequence"], trial["rows"], trial["words"])
        config = load(*sizes, toy=trial["toy"])
        row = planned(trial, config) if trial["what"] == "plan" else measured(config)
        print(json.dumps(row))
        return 0

    deadline = time.monotonic() + arguments.seconds
    device = environment()["device"]
    topology = "h100:1" if arguments.toy else TOPOLOGIES.get(device)
    if topology is None:
        print(f"the planner's table has no '{device}'", file=sys.stderr)
        return 2
    attention = arguments.attention or ("blockwise" if arguments.toy else "flash")
    configurations = CONFIGURATIONS
    if arguments.toy:
        configurations = [("gpt2-124m", 64, 4, "--remat none")]
    rows, cells = [], []
    for model, sequence, count, words in configurations:
        trial = {"model": model, "sequence": sequence, "rows": count, "toy": arguments.toy}
        trial |= {"words": f"{words} --model.attention {attention}", "topology": topology}
        sides = {
            what: run_trial(__file__, trial | {"what": what}, deadline - time.monotonic())
            for what in ("plan", "measure")
        }
        rows.append({**trial, **sides})
        for side in sides.values():
            if "failed" in side:
                print(f"{model} {words}: {side['what']}: {side['failed']}", file=sys.stderr)
        values = [sides[s].get(k) for k in ("peak_bytes", "step_s") for s in ("plan", "measure")]
        peaks = ["-" if not x else f"{x / 2**30:.2f}" for x in values[:2]]
        times = ["-" if not x else f"{x * 1e3:.1f}" for x in values[2:]]
        both = (*peaks, ratio(*values[:2]), *times, ratio(*values[2:]))
        cells.append((model, f"{count} x {sequence}", words, *both))
    names = ("planned GiB", "measured GiB", "ratio", "planned ms", "measured ms", "ratio ")
    finish("gpu_plan", ("model", "rows", "settings", *names), cells, rows, arguments.json)
    return (
        0 if all("failed" not in row[side] for row in rows for side in ("plan", "measure")) else 3
    )


if __name__ == "__main__":
    sys.exit(main())
