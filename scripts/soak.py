"""Trains for many steps and measures what a long run accumulates, in memory and in Python.

    python scripts/soak.py [--steps 10000] [--every 500]

Runs `fsdp-jax train configs/quickstart.yaml` in this process with a small model (width 32, one
layer, two virtual CPU devices), which evaluates and saves every `--every` steps.

Conventions
- Every two seconds, between steps or in one: resident memory (`VmRSS`); the bytes of it that the C
  library has allocated (`mallinfo2`, all arenas), the rest is free memory that it keeps; live
  Python objects that the garbage collector follows, after a collection; open file descriptors;
  threads.
- Growth is the slope of a least-squares line through the second half of the samples: a run needs
  some thousand steps until caches and the C library's allocator have what they keep.
- Exit code 1 where Python objects, descriptors or threads grow: by more than one in 10 steps. Not
  counted are `OF_TENSORSTORE` objects a save: orbax logs tensorstore's metrics with each, whose
  conversion to Python leaves some lists behind (6 a call of
  `tensorstore.experimental_collect_matching_metrics`, 0.1.86).
"""

import argparse
import ctypes
import gc
import json
import os
import resource
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

from fsdp_jax.cli.main import main as run_command

SECONDS = 2.0  # between samples
OF_TENSORSTORE = 30  # objects that a save leaves behind
MEMORY = ("resident_kb", "allocated_kb")
COUNTS = ("objects", "descriptors", "threads")
SMALL = {
    "model.width": 32,
    "model.heads": 2,
    "model.layers": 1,
    "data.sequence_length": 16,
    "train.global_batch_size": 8,
    "train.devices": 2,
    "train.eval_batches": 2,
    "train.sample": 0,
}
Sample = dict[str, int]


class Mallinfo(ctypes.Structure):
    """The result of `mallinfo2` of glibc 2.33 and newer, in bytes."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple(zip(_names.split(), [ctypes.c_size_t] * 10, strict=True))


def allocated_bytes() -> int:
    """Counts the bytes that this process has allocated by `malloc` and not freed."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def take_sample(step: int) -> Sample:
    """Counts what this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "step": step,
        "resident_kb": pages * resource.getpagesize() // 1024,
        "allocated_kb": allocated_bytes() // 1024,
        "objects": len(gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def watch(metrics: Path, samples: list[Sample], ended: threading.Event) -> None:
    """Adds samples until the run has ended."""
    while not ended.wait(SECONDS):
        if metrics.exists():
            samples.append(take_sample(metrics.read_bytes().count(b"\n")))  # a line a step


def growth(samples: list[Sample], count: str) -> float:
    """Computes how much a count grows per step over the second half of the samples."""
    late = samples[len(samples) // 2 : -1]  # the last is of the run's end
    slope, _ = np.polyfit([x["step"] for x in late], [x[count] for x in late], 1)
    return float(slope)


def main() -> int:
    """Runs, prints the samples and their growth as a table and as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500)
    options = parser.parse_args()

    samples: list[Sample] = []
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        keys = SMALL | {
            "train.steps": options.steps,
            "train.eval_every": options.every,
            "checkpoint.every": options.every,
            "output": output,
        }
        overrides = [str(part) for key, value in keys.items() for part in (f"--{key}", value)]
        arguments = output / "metrics.jsonl", samples, ended
        thread = threading.Thread(target=watch, args=arguments, daemon=True)
        thread.start()
        code = run_command(["train", "configs/quickstart.yaml", *overrides])
        ended.set()
        thread.join()
    if code:
        return code

    print(
        f"\n{'step':>8}" + "".join(f"{count:>14}" for count in (*MEMORY, *COUNTS)), file=sys.stderr
    )
    for sample in samples[:: max(1, len(samples) // 12)]:
        row = "".join(f"{sample[count]:>14,}" for count in (*MEMORY, *COUNTS))
        print(f"{sample['step']:>8,}{row}", file=sys.stderr)
    grown = {count: growth(samples, count) for count in (*MEMORY, *COUNTS)}
    print("per step" + "".join(f"{each:>14.4f}" for each in grown.values()), file=sys.stderr)
    print(json.dumps({"steps": options.steps, "every": options.every, "per_step": grown}))
    allowed = {"objects": 0.1 + OF_TENSORSTORE / options.every}
    return int(any(grown[count] > allowed.get(count, 0.1) for count in COUNTS))


if __name__ == "__main__":
    sys.exit(main())
