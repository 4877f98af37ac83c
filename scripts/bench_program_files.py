"""Measures how long a start takes to read the train step of a large model from its file.

The step of a configuration is compiled for virtual CPU devices and written; then it is traced,
lowered and read as a start does, in the same process. Nothing runs and no parameter is allocated,
so that a model of any size fits; the compiler needs the memory. A program with loops is not read on
CPUs: layers are unrolled, and sequences have 1024 tokens, whose attention is one block.

    python scripts/bench_program_files.py                # Llama 2 7B on 8 devices
    python scripts/bench_program_files.py --layers 2     # a part of it, in half a minute

Convention: seconds by the clock. `text, digests`: StableHLO as text, and the SHA-256 of it and of
the file; `key`: jax's of the program; `read by XLA`: with the copy of the program that jax reads.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from fsdp_jax.launch import use_virtual_devices
from fsdp_jax.step import kept_programs
from fsdp_jax.step.kept_programs import THE_STEP, KeptPrograms, keeping
from fsdp_jax.step.program_files import program_files
from fsdp_jax.step.xla_options import compile_overlapped
from fsdp_jax.tables import text_table
from fsdp_jax.train.build import build
from fsdp_jax.train.config_file import load_config

# Functions of `kept_programs` that a start calls -> what they do.
TIMED = {"key_of_program": "key", "read_program": "file", "read_compiled": "read by XLA"}


def main() -> int:
    """Compiles, reads, and prints a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="configs/llama2_7b.yaml")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--devices", type=int, default=8)
    options = parser.parse_args()
    use_virtual_devices(options.devices)
    words = ["--model.scan_layers", "false", "--data.sequence_length", "1024"]
    if options.layers is not None:
        words += ["--model.layers", str(options.layers)]
    run = build(load_config(options.config, words))
    seconds: dict[str, float] = {}

    def timed(part: str, work: Callable[..., Any], *args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = work(*args, **named)
        seconds[part] = time.perf_counter() - began
        return result

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        starts = {
            "compiled and written": KeptPrograms(folder, "write", {}),
            "start": KeptPrograms(folder, "require", {}),
        }
        for whole, programs in starts.items():
            jax.clear_caches()  # as in a process that has just started
            lowered = timed("trace, lower", run.step.lower, run.batch)
            with keeping(programs):
                timed(whole, compile_overlapped, lowered, run.step.plan, name=THE_STEP)
            for function, part in TIMED.items():
                work = getattr(kept_programs, function)
                setattr(kept_programs, function, partial(timed, part, work))
        (file,) = program_files(folder)
        size = file.stat().st_size
    seconds["text, digests"] = seconds.pop("start") - sum(seconds[part] for part in TIMED.values())
    rows = [[part, f"{each:.2f}"] for part, each in seconds.items()]
    print(text_table(["part", "s"], rows, right=["s"]))
    settings = {"config": options.config, "layers": options.layers, "devices": options.devices}
    found = {part: round(each, 3) for part, each in seconds.items()}
    print(json.dumps({**settings, "bytes": size, "seconds": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
