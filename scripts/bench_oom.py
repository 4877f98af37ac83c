"""Explains programs that do not fit: how much of the peak is named, and whether the advice fits.

    JAX_PLATFORMS=cpu python scripts/bench_oom.py --json oom.json [--only v5e] [--resume]

Twenty programs, made from five models on `v5e:4x4`, `v6e:4x4` and `h100:8`: fewer layers, so that
they compile soon, and larger batches than a device holds. libtpu refuses those of TPUs; a GPU's is
compiled, and its peak compared with the limit. Of each: the share of the bytes at the peak that
have the path of a parameter or a module, the share that has a line of the model, and the first
advice, which is compiled. No accelerator is needed; a program takes one to five minutes of two
cores.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_jax.errors import human_bytes
from fsdp_jax.planner import parse_topology
from fsdp_jax.planner.out_of_memory import MemoryExplanation, explain_out_of_memory
from fsdp_jax.tables import text_table
from fsdp_jax.train.build import build, start_devices
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.planning import remaking_of

GOAL = 0.9  # share of the bytes that have a path
STATE = ("params", "optimizer", "gradients", "gathered")  # which have a path in place of a line
COLUMNS = (
    *("program", "peak", "limit", "named", "with line"),
    *("first advice", "its peak", "step", "took"),
)


@dataclass(frozen=True)
class Program:
    """A configuration, changed so that it does not fit a machine."""

    topology: str
    config: str
    words: str

    @property
    def name(self) -> str:
        """The command line that plans it."""
        return f"{self.config} on {self.topology} {self.words}".strip()


BATCHES = {  # the largest that each of three kinds of devices is asked for, and how
    "v5e:4x4": (
        ("gpt2", "--train.global_batch_size 1024 --remat none"),
        ("gpt2", "--train.global_batch_size 2048 --remat selective"),
        ("llama3_2_1b", "--train.global_batch_size 256 --model.layers 4 --remat none"),
        ("llama3_2_1b", "--train.global_batch_size 512 --model.layers 4 --remat full"),
        ("llama2_7b", "--train.global_batch_size 256 --model.layers 4 --remat none"),
        ("vit_l16", "--train.global_batch_size 12288 --model.layers 4 --remat none"),
        ("t5_base", "--train.global_batch_size 4096 --model.layers 2 --remat none"),
    ),
    "v6e:4x4": (
        ("gpt2", "--train.global_batch_size 2048 --remat none"),
        ("llama3_2_1b", "--train.global_batch_size 512 --model.layers 4 --remat none"),
        ("llama3_2_1b", "--train.global_batch_size 1024 --model.layers 4 --remat full"),
        ("llama2_7b", "--train.global_batch_size 512 --model.layers 4 --remat none"),
        ("vit_l16", "--train.global_batch_size 24576 --model.layers 4 --remat none"),
        ("t5_base", "--train.global_batch_size 8192 --model.layers 2 --remat none"),
    ),
    "h100:8": (
        ("gpt2", "--train.global_batch_size 2048 --remat none"),
        ("gpt2", "--train.global_batch_size 3072 --remat selective"),
        ("llama3_2_1b", "--train.global_batch_size 512 --model.layers 4 --remat none"),
        ("llama2_7b", "--train.global_batch_size 512 --model.layers 4 --remat none"),
        ("llama2_7b", "--train.global_batch_size 8 --strategy no_shard --remat full"),
        ("vit_l16", "--train.global_batch_size 24576 --model.layers 4 --remat none"),
        ("t5_base", "--train.global_batch_size 16384 --model.layers 2 --remat none"),
    ),
}
PROGRAMS = [Program(topology, *of) for topology, programs in BATCHES.items() for of in programs]


def explain(program: Program) -> MemoryExplanation:
    """Explains a program; nothing but its first advice is compiled beside it."""
    topology = parse_topology(program.topology)
    config = load_config(program.config, program.words.split())
    run = build(config, topology.devices())
    return explain_out_of_memory(
        run.step,
        run.batch,
        remaking=remaking_of(config, run),
        topology=topology,
        say=lambda line: print(f"  {line}", flush=True),
    )


def measure(program: Program) -> dict[str, Any]:
    """Measures the explanation of a program, as a record of the JSON."""
    started = time.perf_counter()
    found = explain(program)
    peak = found.peak_bytes or 0
    lines = sum(one.bytes for one in found.buffers if one.line or one.kind in STATE)
    first = found.advice[0] if found.advice else None
    return {
        "program": program.name,
        "peak_bytes": peak,
        "limit_bytes": found.limit_bytes,
        "fits": found.fits,
        "named_share": found.named_share,
        "line_share": lines / peak if peak else 0.0,
        "advice": first.change if first else "",
        "advice_peak_bytes": first.peak_bytes if first else None,
        "slower": first.slower if first else None,
        "seconds": time.perf_counter() - started,
        "explanation": found.to_json(),
    }


def row(record: dict[str, Any]) -> tuple[str, ...]:
    """Formats a record as a row of the table."""
    advised = record["advice_peak_bytes"]
    slower = record["slower"]
    return (
        record["program"],
        human_bytes(record["peak_bytes"]),
        human_bytes(record["limit_bytes"]),
        f"{record['named_share']:.1%}",
        f"{record['line_share']:.1%}",
        record["advice"] or "none",
        human_bytes(advised) if advised else "-",
        "-" if slower is None else f"{slower:+.0%}",
        f"{record['seconds']:.0f} s",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("bench_oom.json"))
    parser.add_argument("--only", default="", help="of the programs whose name has this text")
    parser.add_argument("--resume", action="store_true", help="keep the records of the file")
    options = parser.parse_args()
    start_devices(None)
    records = {}
    if options.resume and options.json.exists():
        records = {each["program"]: each for each in json.loads(options.json.read_text())}
    for number, program in enumerate(PROGRAMS, 1):
        if options.only not in program.name or program.name in records:
            continue
        print(f"{number} of {len(PROGRAMS)}: {program.name}", flush=True)
        record = measure(program)
        records[program.name] = record
        print("  " + "  ".join(row(record)[1:]), flush=True)
        options.json.write_text(json.dumps(list(records.values()), indent=1))
    print(text_table(COLUMNS, [row(each) for each in records.values()]))
    too_large = [each for each in records.values() if not each["fits"]]
    named = [each for each in too_large if each["named_share"] >= GOAL]
    advised = [
        each for each in too_large if (each["advice_peak_bytes"] or 2**63) <= each["limit_bytes"]
    ]
    total = sum(each["peak_bytes"] for each in too_large)
    share = sum(each["named_share"] * each["peak_bytes"] for each in too_large) / max(total, 1)
    print(
        f"{len(too_large)} of {len(records)} do not fit; {len(named)} of them name {GOAL:.0%} or "
    )
    print(f"more of the bytes ({share:.1%} in all); of {len(advised)} the first advice fits")


if __name__ == "__main__":
    main()
