"""`python -m fuzz`: prints a line per target, the failing inputs, and how to repeat each."""

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
from fuzz.harness import PROBLEMS, Outcome, run_target
from fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=500, help="of each target")
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--target", choices=list(TARGETS), default=None, help="default: all")
    parser.add_argument("--case", type=int, default=None, help="the number of one input to repeat")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for one input")
    parser.add_argument("--keep", type=Path, default=Path("output/fuzz"), help="of failing inputs")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    numbers = range(options.inputs) if options.case is None else [options.case]
    names = list(TARGETS) if options.target is None else [options.target]
    print(f"seed {seed}", flush=True)
    rows, failed = [], 0
    for name in names:
        started = time.perf_counter()
        outcomes = []
        for outcome in run_target(
            TARGETS[name](), seed, numbers, limit=options.limit, keep=options.keep.absolute()
        ):
            outcomes.append(outcome)
            if outcome.problem:
                failed += 1
                _print_failure(name, seed, outcome)
            elif options.case is not None:
                print(outcome)
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
    slowest = max((outcome.seconds for outcome in outcomes), default=0.0)
    return [name, *map(str, counts), f"{seconds:.1f}", f"{slowest:.2f}"]


def _print_failure(name: str, seed: int, outcome: Outcome) -> None:
    text = outcome.text.strip().replace("\n", "\n    ")
    done = "; ".join(outcome.done) or "see the text"
    again = f"make fuzz TARGET={name} SEED={seed} CASE={outcome.number}"
    print(f"{outcome.problem}: {name} {outcome.number}: {done}\n    {text}\n    again: {again}")


if __name__ == "__main__":
    sys.exit(main())
