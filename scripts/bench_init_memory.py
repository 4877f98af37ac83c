"""Measures the peak host memory of initialising a sharded state, against the bytes of the state.

    python scripts/bench_init_memory.py [--layers 28] [--width 1024] [--strategy full_shard]

`fully_shard(...).init()` makes a GPT of about 400M parameters (GPT-2 medium with four more layers)
and its AdamW state, float32, 12 bytes a parameter, over 8 virtual CPU devices.

Conventions
- It runs in a child process of its own. Peak is the child's largest resident set (`ru_maxrss`) when
  the state is ready, less its resident set after imports and the start of the devices. Compilation
  is included.
- All 8 devices share this machine's memory, so the least possible is the state's bytes, summed over
  devices; what is replicated counts once for each device that holds it.
- Exit code 1 above the target.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

DEVICES = 8
TARGET = 1.25
GIB = 2**30


def resident() -> int:
    """Returns the bytes of this process in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak() -> int:
    """Returns the most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def measure(layers: int, width: int, vocab: int, strategy: str) -> dict[str, Any]:
    """Initialises a state in this process; returns sizes and memory."""
    import time

    import jax
    import optax

    import fsdp_jax
    from fsdp_jax.launch import use_virtual_devices
    from fsdp_jax.models import GPT, GPTConfig, parameter_count

    use_virtual_devices(DEVICES)
    config = GPTConfig(
        vocab_size=vocab, sequence_length=1024, layers=layers, width=width, heads=width // 64
    )
    mesh = fsdp_jax.make_mesh(devices=jax.devices("cpu"))
    jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(8))())  # the compiler has been loaded
    sharded = fsdp_jax.fully_shard(
        lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), mesh, strategy, "scan"
    )
    before = resident()
    before_peak = peak()
    start = time.perf_counter()
    state = jax.block_until_ready(sharded.init())
    seconds = time.perf_counter() - start
    # what the shards on every device take
    placed = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(state)
        if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        for shard in leaf.addressable_shards
    )
    return {
        "bench": "init_memory",
        "strategy": strategy,
        "parameters": parameter_count(config),
        "layers": layers,
        "width": width,
        "devices": DEVICES,
        "state_bytes": sharded.layout.total(),
        "placed_bytes": placed,
        "before_bytes": before,
        "before_peak_bytes": before_peak,
        "peak_bytes": peak(),
        "after_bytes": resident(),
        "seconds": seconds,
        "jax": jax.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--strategy", default="full_shard")
    parser.add_argument(
        "--in-process", action="store_true", help="measure here and print JSON alone"
    )
    args = parser.parse_args()
    if args.in_process:
        print(json.dumps(measure(args.layers, args.width, args.vocab, args.strategy)))
        return 0

    child = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--in-process"],
        stdout=subprocess.PIPE,
        check=True,
    )
    record = json.loads(child.stdout.splitlines()[-1])
    above = record["peak_bytes"] - record["before_bytes"]
    ratio = above / record["placed_bytes"]
    record |= {"above_baseline_bytes": above, "ratio": ratio, "target": TARGET}
    print(
        f"GPT of {record['parameters'] / 1e6:.0f}M parameters, AdamW, float32, "
        f"{record['strategy']} over {DEVICES} virtual CPU devices; "
        f"init took {record['seconds']:.0f} s\n"
    )
    for label, key in (
        ("state", "state_bytes"),
        ("state, all devices together", "placed_bytes"),
        ("resident before init", "before_bytes"),
        ("peak", "peak_bytes"),
        ("peak above the baseline", "above_baseline_bytes"),
        ("resident after init", "after_bytes"),
    ):
        print(f"{label:<34}{record[key] / GIB:>8.2f} GiB")
    print(f"{'peak above baseline / state':<34}{ratio:>8.2f}      (target at most {TARGET})")
    print(json.dumps(record))
    return 0 if ratio <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
