"""Finds the largest GPT that trains on this device with and without offload, and its speed.

    python scripts/gpu/offload.py [--seconds 480] [--json FILE]

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WIDTH, HEADS, VOCAB, SEQUENCE, ROWS = 4096, 32, 50304, 1024, 4
BLOCK = 12 * WIDTH**2
EMBEDDINGS = (VOCAB + SEQUENCE) * WIDTH
# (bytes of a parameter on the device, on the host)
BYTES = {"none": (16, 0), "optimizer": (8, 8), "all": (4, 14)}
USABLE = 0.9  # of the memory, beside activations and what the system needs
ACTIVATIONS = 6 * 2**30
STEPS = 6


@dataclass(frozen=True)
class Row:
    """The largest model found for one way to keep the state."""

    offload: str
    layers: int
    parameters: int
    tokens_per_second: float
    peak_bytes: int
    host_bytes: int
    loss: float


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


def trial(layers: int, offload: str) -> dict[str, Any]:
    """Trains a GPT of so many blocks for a few steps; returns the fields of its row."""
    import jax
    import numpy as np
    import optax

    import fsdp_jax as fsdp
    from fsdp_jax.models import next_token_loss
    from fsdp_jax.models.gpt import GPT, GPTConfig

    config = GPTConfig(
        vocab_size=VOCAB, sequence_length=SEQUENCE, layers=layers, width=WIDTH, heads=HEADS
    )
    policy = {
        "none": None,
        "optimizer": fsdp.Offload(optimizer=True),
        "all": fsdp.Offload(params=True, optimizer=True),
    }[offload]
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
    random = np.random.default_rng(0)
    batch = step.put(
        {
            "tokens": random.integers(0, VOCAB, (ROWS, SEQUENCE + 1)).astype(np.int32),
            "mask": np.ones((ROWS, SEQUENCE), np.float32),
        }
    )
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "tokens_per_second": ROWS * SEQUENCE / float(np.median(seconds[2:])),
        "peak_bytes": stats.get("peak_bytes_in_use", 0),
        "host_bytes": sharded.layout.per_device(host=True),
        "loss": float(metrics["loss"]),
    }


def largest(offload: str, layers: int, deadline: float) -> Row | None:
    """Returns the row of the largest model that trains, from this size downwards."""
    while layers >= 1:
        left = deadline - time.monotonic()
        if left < 30:
            print(f"  {offload}: no time left for {layers} blocks", file=sys.stderr)
            return None
        command = [sys.executable, __file__, "--trial", str(layers), "--offload", offload]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=left
            )
        except subprocess.TimeoutExpired:
            print(f"  {offload}: {layers} blocks took too long", file=sys.stderr)
            return None
        if done.returncode == 0:
            return Row(offload, layers, **json.loads(done.stdout.splitlines()[-1]))
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        print(f"  {offload}: {layers} blocks: {reason[0][:200]}", file=sys.stderr)
        layers = min(layers - 1, layers * 7 // 8)
    return None


def main() -> int:
    """Runs the trials, prints the table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=450, help="for all trials")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--layers", type=int, help="blocks to begin with, in place of arithmetic")
    parser.add_argument("--trial", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--offload", default="none", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trial is not None:
        print(json.dumps(trial(arguments.trial, arguments.offload)))
        return 0

    deadline = time.monotonic() + arguments.seconds
    device, host = device_and_host_bytes()
    if not device and arguments.layers is None:
        print("this device does not tell its memory: give --layers", file=sys.stderr)
        return 2
    rows = []
    for number, offload in enumerate(BYTES):
        layers = arguments.layers or layers_that_fit(offload, device, host)
        share = (deadline - time.monotonic()) / (len(BYTES) - number)
        row = largest(offload, layers, time.monotonic() + share)
        rows += [row] if row else []

    from fsdp_jax.tables import text_table

    columns = ("offload", "blocks", "parameters", "tokens/s", "peak GiB", "host GiB", "loss")
    cells = [
        (
            row.offload,
            row.layers,
            f"{row.parameters / 1e9:.2f} B",
            f"{row.tokens_per_second:.0f}",
            f"{row.peak_bytes / 2**30:.1f}",
            f"{row.host_bytes / 2**30:.1f}",
            f"{row.loss:.3f}",
        )
        for row in rows
    ]
    print(text_table(columns, cells, right=columns[1:]))
    record = {
        "device_bytes": device,
        "host_bytes": host,
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(record))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if len(rows) == len(BYTES) else 3


if __name__ == "__main__":
    sys.exit(main())
