"""Finds the largest GPT that trains on this device with and without offload, and its speed.

    python scripts/gpu/offload.py [--toy] [--seconds 450] [--layers N] [--json FILE]

Each trial is a process of its own, so that one that runs out of memory does not end the others. A
size is tried that should fit by arithmetic; what does not fit is tried again with an eighth fewer
blocks, and what fits is the row.

Conventions
- A GPT of width 4096 and 32 heads, sequences of 1024 tokens, 4 a step, every block recomputed;
  float32 parameters and AdamW, bfloat16 compute. Its size is the number of blocks.
- Without offload a parameter takes 16 bytes of device memory in a step: itself, its gradient and
  two moments. `optimizer` keeps the moments in host memory (8 there, 8 on the device), `all` the
  parameters and a bfloat16 copy too (14 there, 4 on the device).
- Tokens per second: the median of the steps after the first two. Peak: `peak_bytes_in_use` of the
  allocator. GiB are 2^30 bytes.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trials import finish, median_seconds, peak_bytes, run_trial

SIZES = {"vocab_size": 50304, "sequence_length": 1024, "width": 4096, "heads": 32}
TOY = {"vocab_size": 512, "sequence_length": 64, "width": 64, "heads": 2}
BLOCK = 12 * SIZES["width"] ** 2
EMBEDDINGS = (SIZES["vocab_size"] + SIZES["sequence_length"]) * SIZES["width"]
ROWS = 4
# (bytes of a parameter on the device, on the host)
BYTES = {"none": (16, 0), "optimizer": (8, 8), "all": (4, 14)}
USABLE = 0.9  # of the memory, beside activations and what the system needs
ACTIVATIONS = 6 * 2**30


def device_and_host_bytes() -> tuple[int, int]:
    """Returns the memory of the device and of the host; asks in a process that then lets go."""
    code = "import jax; s = jax.local_devices()[0].memory_stats() or {}; "
    code += "print(s.get('bytes_limit', 0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(done.stdout.split()[-1]), host


def layers_that_fit(offload: str, device: int, host: int) -> int:
    """Returns the number of blocks that should fit by arithmetic."""
    on_device, on_host = BYTES[offload]
    parameters = (device * USABLE - ACTIVATIONS) / on_device
    if on_host:
        parameters = min(parameters, host * 0.75 / on_host)
    return max(1, int((parameters - EMBEDDINGS) // BLOCK))


def measured(trial: dict[str, Any]) -> dict[str, Any]:
    """Trains a GPT of `layers` blocks for a few steps; returns the fields of its row."""
    import jax
    import numpy as np
    import optax

    import fsdp_jax as fsdp
    from fsdp_jax.models import next_token_loss
    from fsdp_jax.models.gpt import GPT, GPTConfig

    sizes: dict[str, Any] = TOY if trial["toy"] else SIZES
    config = GPTConfig(layers=trial["layers"], **sizes)
    policy = {
        "none": None,
        "optimizer": fsdp.Offload(optimizer=True),
        "all": fsdp.Offload(params=True, optimizer=True),
    }[trial["offload"]]
    sharded = fsdp.fully_shard(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-4),
        fsdp.make_mesh(data=1, allow_fewer=True),
        precision=fsdp.Precision(compute="bfloat16"),
        remat="full",
        offload=policy,
    )
    step = sharded.make_train_step(next_token_loss)
    state = sharded.init(0)
    random, length = np.random.default_rng(0), config.sequence_length
    tokens = random.integers(0, config.vocab_size, (ROWS, length + 1)).astype(np.int32)
    batch = step.put({"tokens": tokens, "mask": np.ones((ROWS, length), np.float32)})

    metrics: dict[str, Any] = {}

    def one() -> None:
        nonlocal state, metrics
        state, metrics = step(state, batch)
        jax.block_until_ready(state)

    seconds = median_seconds(one, steps=4)
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "tokens_per_second": ROWS * length / seconds,
        "peak_bytes": peak_bytes(),
        "host_bytes": sharded.layout.per_device(host=True),
        "loss": float(metrics["loss"]),
    }


def largest(trial: dict[str, Any], deadline: float) -> dict[str, Any] | None:
    """Returns the row of the largest model that trains, from `layers` blocks downwards."""
    while trial["layers"] >= 1:
        row = run_trial(__file__, trial, deadline - time.monotonic())
        if "failed" not in row:
            return row
        print(f"  {trial['offload']}: {row['layers']} blocks: {row['failed']}", file=sys.stderr)
        if time.monotonic() > deadline:
            return None
        trial = trial | {"layers": min(row["layers"] - 1, row["layers"] * 7 // 8)}
    return None


def main() -> int:
    """Runs the trials, prints the table and a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="two small blocks, for a CPU")
    parser.add_argument("--seconds", type=float, default=450, help="for all trials")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--layers", type=int, help="blocks to begin with, in place of arithmetic")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trial is not None:
        print(json.dumps(measured(json.loads(arguments.trial))))
        return 0

    deadline = time.monotonic() + arguments.seconds
    device, host = device_and_host_bytes()
    given = 2 if arguments.toy else arguments.layers
    if not device and given is None:
        print("this device does not tell its memory: give --layers", file=sys.stderr)
        return 2
    rows = []
    for number, offload in enumerate(BYTES):
        layers = given or layers_that_fit(offload, device, host)
        share = (deadline - time.monotonic()) / (len(BYTES) - number)
        trial = {"offload": offload, "layers": layers, "toy": arguments.toy}
        row = largest(trial, time.monotonic() + share)
        rows += [row | {"device_memory": device, "host_memory": host}] if row else []

    columns = ("offload", "blocks", "parameters", "tokens/s", "peak GiB", "host GiB", "loss")
    cells = [
        (
            row["offload"],
            row["layers"],
            f"{row['parameters'] / 1e9:.2f} B",
            f"{row['tokens_per_second']:.0f}",
            f"{row['peak_bytes'] / 2**30:.1f}",
            f"{row['host_bytes'] / 2**30:.1f}",
            f"{row['loss']:.3f}",
        )
        for row in rows
    ]
    finish("gpu_offload", columns, cells, rows, arguments.json)
    return 0 if len(rows) == len(BYTES) else 3


if __name__ == "__main__":
    sys.exit(main())
