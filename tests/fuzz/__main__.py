"""`python -m fuzz`: prints a line per target, and an input that fails, reduced."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from fsdp_jax.tables import text_table
from fuzz.harness import PROBLEMS, Outcome, search
from fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=500, help="of each target")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--target", choices=list(TARGETS), default=None, help="default: all")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for one input")
    parser.add_argument("--keep", type=Path, default=Path("output/fuzz"), help="of failing inputs")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    rows, failed = [], 0
    for name in TARGETS if options.target is None else [options.target]:
        started = time.perf_counter()
        keep = options.keep.absolute() / f"{name}-{options.seed}"
        outcomes = search(
            TARGETS[name](), options.inputs, options.seed, limit=options.limit, keep=keep
        )
        failing = [outcome for outcome in outcomes if outcome.problem]
        if failing:
            failed += 1
            text = failing[-1].text.strip().replace("\n", "\n    ")
            print(f"{failing[-1].problem}: {'; '.join(failing[-1].done) or 'a valid input'}")
            print(f"    {text}\n    its files: {keep}")
            print(f"    again: make fuzz TARGET={name} SEED={options.seed} N={options.inputs}")
        rows.append(_row(name, outcomes, time.perf_counter() - started))
        print(json.dumps(dict(zip(COLUMNS, rows[-1], strict=True))), flush=True)
    print(text_table(COLUMNS, rows))
    return 1 if failed else 0


COLUMNS = [
    "target", "inputs", "accepted", "refused: 2", "refused: 3", "other codes", "tracebacks",
    "hangs", "disagreements", "outside", "seconds", "slowest",
]  # fmt: skip


def _row(name: str, outcomes: list[Outcome], seconds: float) -> list[str]:
    problems = Counter(outcome.problem for outcome in outcomes)
    accepted = sum(outcome.accepted for outcome in outcomes)
    refused = [o for o in outcomes if not o.accepted and o.problem not in ("hang", "traceback")]
    codes = Counter(outcome.code for outcome in refused)
    others = codes.total() - codes[2] - codes[3]
    counts = [len(outcomes), accepted, codes[2], codes[3], others]
    counts += [problems[problem] for problem in PROBLEMS]
    slowest = max(outcome.seconds for outcome in outcomes)
    return [name, *map(str, counts), f"{seconds:.1f}", f"{slowest:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
