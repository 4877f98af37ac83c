"""Trains random models with random settings, and compares each with plain Flax and optax.

    python scripts/fuzz_steps.py [--cases 500] [--seed 0] [--processes 1] [--json FILE]
    python scripts/fuzz_steps.py --seed 0 --case 17   # one case, with what it is

A case is a model (NNX or Linen; scanned, unrolled, shared or tied), a loss, an optimizer, a
precision, perhaps LoRA or frozen parameters, and a setting of `fully_shard` and `make_train_step`
on 1 to 8 virtual CPU devices; in a third of the cases a checkpoint and a second setting follow. The
seed and the number of a case determine it.

Conventions
- float32: each loss, norm of the gradient, metric, statistic and parameter may differ by 1e-5 of
  the largest value of its array, and of at least 1e-2; a bias of attention's keys, which begins at
  zero and has no gradient but rounding's, by 1e-5. With Lion, elements whose sign hangs on
  rounding in the control (below 1e-4 of the largest) are left out, and the others may differ by
  1e-4.
- Lower precision: the control rounds in the same dtype, at other places. A loss may differ by the
  tolerance of the dtype (`LOW` in fuzz_steps_run.py), and the change of a parameter by a share of
  its norm. Gathers in float8 are compared with the library's own step on one device.
- Refused: the library raised an ArgumentError; counted by message. Raised: any other error. Died:
  the process has ended, or took longer than `--limit`.
- The table has, of the cases with a setting, the largest difference over its tolerance, and the
  largest relative difference in float32.
- Exit code 1 if a case is different, raised or died, or if 15% are refused.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

DEVICES = 8
FLAGS = (
    f"--xla_force_host_platform_device_count={DEVICES}",
    "--xla_backend_optimization_level=0",  # compiles in half of the time
    "--xla_cpu_max_isa=AVX",  # a number does not depend on what is fused with what
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
# The older code generators, in one module, compile in half of the time again.
OLDER = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
MOST_REFUSED = 0.15
FAILED = ("different", "raised", "died")
Row = dict[str, Any]


def main() -> int:
    """Runs the cases, prints the tables, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, default=None, help="run this one here, and print it")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one case")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.seed)
    if options.case is not None:
        set_environment(os.environ)
        return show(run_number(options.seed, options.case))

    started = time.perf_counter()
    numbers = range(options.first, options.first + options.cases)
    rows = run_all(options.seed, numbers, options.processes, options.limit)
    report = summary(rows, options.seed)
    report["wall_s"] = round(time.perf_counter() - started, 1)
    print_tables(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    refused = report["outcomes"].get("refused", 0)
    return int(bool(report["failed"]) or refused >= MOST_REFUSED * max(len(rows), 7))


def set_environment(environment: Any) -> None:
    """Sets what jax reads as it starts."""
    environment["JAX_PLATFORMS"] = "cpu"
    environment["NPROC"] = str(4 * DEVICES)
    environment["XLA_FLAGS"] = " ".join(FLAGS + OLDER * version("jaxlib").startswith("0.10."))


# One case


def run_number(seed: int, number: int) -> Row:
    """Runs a case in this process."""
    from fuzz_steps_cases import draw_case
    from fuzz_steps_run import run_case

    case = draw_case(seed, number)
    result = run_case(case)
    again = f"python scripts/fuzz_steps.py --seed {seed} --case {number}"
    return {
        "case": number,
        **asdict(result),
        "labels": [*case.labels()],
        "python": repr(case),
        "again": again,
    }


def show(row: Row) -> int:
    """Prints a case."""
    print(row["python"])
    shares = sorted(row["shares"].items(), key=lambda item: -item[1])
    for name, share in shares[:12]:
        print(f"  {share:9.3g} of the tolerance  {name}")
    print(f"{row['outcome']}, {row['seconds']:.1f} s of CPU time. {row['text']}")
    return int(row["outcome"] in FAILED)


def work(seed: int) -> int:
    """Runs the cases whose numbers come in, a line each."""
    import jax

    for line in sys.stdin:
        row = run_number(seed, int(line))
        print(json.dumps(row), flush=True)
        jax.clear_caches()  # no case runs a program of another
    return 0


# All cases


def run_all(seed: int, numbers: range, processes: int, limit: float) -> list[Row]:
    """Runs cases in worker processes; one that dies is replaced."""
    left = iter(numbers)
    lock = threading.Lock()
    rows: list[Row] = []

    def drive() -> None:
        worker = None
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                break
            if worker is None:
                worker = _start_worker(seed)
            row = _answer(worker, number, limit)
            if row is None:
                worker.kill()
                worker.wait()
                row = _died(seed, number, worker.returncode)
                worker = None
            with lock:
                rows.append(row)
                _tell(row, len(rows))
        if worker is not None:
            worker.stdin.close()
            worker.wait()

    threads = [threading.Thread(target=drive) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(rows, key=lambda row: row["case"])


def _start_worker(seed: int) -> Any:
    environment = dict(os.environ)
    set_environment(environment)
    command = [sys.executable, __file__, "--worker", "--seed", str(seed)]
    return subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def _answer(worker: Any, number: int, limit: float) -> Row | None:
    """Lets a worker run a case; None if it ends, or takes too long."""
    timer = threading.Timer(limit, worker.kill)
    timer.start()
    try:
        worker.stdin.write(f"{number}\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except BrokenPipeError:
        line = ""
    finally:
        timer.cancel()
    return json.loads(line) if line else None


def _died(seed: int, number: int, code: int) -> Row:
    from fuzz_steps_cases import draw_case

    case = draw_case(seed, number)
    return {
        "case": number,
        "outcome": "died",
        "text": f"the process ended with {code}",
        "worst": 0.0,
        "float32": 0.0,
        "where": "",
        "seconds": 0.0,
        "shares": {},
        "labels": [*case.labels()],
        "python": repr(case),
        "again": f"python scripts/fuzz_steps.py --seed {seed} --case {number}",
    }


def _tell(row: Row, count: int) -> None:
    text = f"{count}: case {row['case']} {row['outcome']}, {row['worst']:.2g}"
    print(f"{text}, {row['seconds']:.1f} s {_first_line(row)}", file=sys.stderr, flush=True)


def _first_line(row: Row) -> str:
    if row["outcome"] == "equal":
        return ""
    lines = row["text"].strip().splitlines() or [""]
    return str(lines[-1] if row["outcome"] == "raised" else lines[0])[:200]


def summary(rows: list[Row], seed: int) -> Row:
    """Counts outcomes, settings, refusals and failures."""
    settings: dict[str, Counter[str]] = defaultdict(Counter)
    worst: dict[str, float] = defaultdict(float)
    float32: dict[str, float] = defaultdict(float)
    for row in rows:
        for label in row["labels"]:
            settings[label][row["outcome"]] += 1
            if row["outcome"] in ("equal", "different"):
                worst[label] = max(worst[label], row["worst"])
                float32[label] = max(float32[label], row["float32"])
    refused = Counter(_message(row["text"]) for row in rows if row["outcome"] == "refused")
    failed = [
        {name: row[name] for name in ("case", "outcome", "text", "python", "again")}
        for row in rows
        if row["outcome"] in FAILED
    ]
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    return {
        "seed": seed,
        "cases": len(rows),
        "environment": {
            "python": sys.version.split()[0],
            **{name: version(name) for name in packages},
            "flags": list(FLAGS),
        },
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "cpu_s": round(sum(row["seconds"] for row in rows), 1),
        "slowest_s": round(max((row["seconds"] for row in rows), default=0.0), 1),
        "settings": {
            label: {
                "compared": counts["equal"] + counts["different"],
                **counts,
                "worst": worst[label],
                "float32": float32[label],
            }
            for label, counts in sorted(settings.items())
        },
        "refused": dict(refused.most_common()),
        "failed": failed,
    }


def _message(text: str) -> str:
    """Shortens a refusal to what is common to all of its kind."""
    first = (text.strip().splitlines() or [""])[0]
    return re.sub(r"'[^']*'|\d+", "…", first)[:120]


def print_tables(report: Row) -> None:
    """Prints the settings, the refusals and the failures."""
    from fsdp_jax.tables import text_table

    columns = ["setting", "compared", "refused", "failed", "worst / tolerance", "float32"]
    cells = [
        [
            label,
            str(counts["compared"]),
            str(counts.get("refused", 0)),
            str(sum(counts.get(outcome, 0) for outcome in FAILED)),
            f"{counts['worst']:.2g}",
            f"{counts['float32']:.1e}",
        ]
        for label, counts in report["settings"].items()
    ]
    print(text_table(columns, cells))
    for message, count in report["refused"].items():
        print(f"refused {count}: {message}")
    for row in report["failed"]:
        print(f"\n{row['outcome']}: {row['again']}\n{row['python']}\n{row['text']}")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in report["outcomes"].items())
    print(f"\nseed {report['seed']}, {report['cases']} cases: {counts}; {report['cpu_s']} s of CPU")


if __name__ == "__main__":
    sys.exit(main())
