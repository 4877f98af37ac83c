"""CPU seconds of each test, with its compiles and the processes that it starts.

    python scripts/suite_costs.py [--json FILE] [--top N] -- -n 2 -m "not long"

Runs pytest with the arguments after `--` and prints three tables: folders, tests, and the programs
that were compiled. CPU seconds are user and system time of the worker (all its threads) and of
the processes that it waited for, set-up and teardown included: a fixture counts for the first test
that asks for it. Compile seconds are by the clock. A program that the persistent cache held is a
hit, not a compile; "saved s" is what it took to compile when it was stored, so that CPU s and
saved s are together what a run with an empty cache takes. Exit code: pytest's.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent
RECORDS = "FSDP_JAX_SUITE_COSTS"  # the folder that workers write their records to
COMPILE = "/jax/core/compile/backend_compile_duration"
HIT = "/jax/compilation_cache/cache_hits"
SAVED = "/jax/compilation_cache/compile_time_saved_sec"
STARTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"}


@dataclass
class Cost:
    """What one test took; times in seconds."""

    test: str
    cpu: float = 0.0
    children_cpu: float = 0.0
    clock: float = 0.0
    compiles: int = 0
    compile_s: float = 0.0
    hits: int = 0
    saved_s: float = 0.0
    processes: int = 0
    programs: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """CPU seconds of the worker and its children."""
        return self.cpu + self.children_cpu


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Recorder:
    """A pytest plugin: one record per test, written by the worker that ran it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{os.getpid()}.jsonl"
        self.now = Cost("")  # outside any test

    def count_compile(self, event: str, duration_secs: float, **about: Any) -> None:
        """A listener of jax.monitoring for durations."""
        if event == SAVED:
            self.now.saved_s += duration_secs
        if event != COMPILE:
            return
        self.now.compiles += 1
        self.now.compile_s += duration_secs
        name = str(about.get("fun_name", "?"))
        times, so_far = self.now.programs.get(name, (0, 0.0))
        self.now.programs[name] = (times + 1, so_far + duration_secs)

    def count_hit(self, event: str, **_: Any) -> None:
        """A listener of jax.monitoring for events."""
        self.now.hits += event == HIT

    def count_process(self, event: str, _: Any) -> None:
        """An audit hook of Python."""
        self.now.processes += event in STARTS

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measures set-up, call and teardown of a test."""
        self.now = cost = Cost(item.nodeid)
        clock, cpu, children = time.monotonic(), time.process_time(), _children_cpu()
        try:
            return (yield)
        finally:
            cost.clock = time.monotonic() - clock
            cost.cpu = time.process_time() - cpu
            cost.children_cpu = _children_cpu() - children
            cost.compiles -= cost.hits  # the event of a compile covers a hit
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(cost)) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest where this file is loaded as a plugin."""
    import jax.monitoring  # after conftest has set jax's environment

    recorder = Recorder(Path(os.environ[RECORDS]))
    jax.monitoring.register_event_duration_secs_listener(recorder.count_compile)
    jax.monitoring.register_event_listener(recorder.count_hit)
    sys.addaudithook(recorder.count_process)
    config.pluginmanager.register(recorder, "suite_costs_recorder")


def read(folder: Path) -> list[Cost]:
    """The records of all workers."""
    lines = (line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines())
    return [Cost(**json.loads(line)) for line in lines]


def _sum(name: str, costs: Iterable[Cost]) -> list[str]:
    costs = list(costs)
    return [
        name,
        f"{len(costs)}",
        f"{sum(cost.total for cost in costs):.1f}",
        f"{sum(cost.compiles for cost in costs)}",
        f"{sum(cost.compile_s for cost in costs):.1f}",
        f"{sum(cost.hits for cost in costs)}",
        f"{sum(cost.saved_s for cost in costs):.1f}",
        f"{sum(cost.processes for cost in costs)}",
    ]


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in [head, *rows]:
        figures = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *figures]))
    return "\n".join(lines)


def folder_of(test: str) -> str:
    """The folder below tests/ of a test, or its file where it lies in none."""
    parts = Path(test.partition("::")[0]).parts
    return parts[1].removesuffix(".py")


def report(costs: list[Cost], top: int) -> str:
    """The three tables as text."""
    head = ["", "tests", "CPU s", "compiles", "compile s", "hits", "saved s", "processes"]
    by_folder, by_test = defaultdict(list), defaultdict(list)
    programs: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for cost in costs:
        by_folder[folder_of(cost.test)].append(cost)
        by_test[cost.test.partition("[")[0]].append(cost)
        for name, (times, took) in cost.programs.items():
            programs[name] += times
            seconds[name] += took

    def sums(groups: dict[str, list[Cost]]) -> list[list[str]]:
        ranked = sorted(groups.items(), key=lambda item: -sum(cost.total for cost in item[1]))
        return [_sum(name, group) for name, group in ranked]

    longest = sorted(seconds, key=lambda name: -seconds[name])[:top]
    compiled = [[name, f"{programs[name]}", f"{seconds[name]:.1f}"] for name in longest]
    return "\n\n".join(
        [
            _table(["folder", *head[1:]], [*sums(by_folder), _sum("all", costs)]),
            _table(["test", *head[1:]], sums(by_test)[:top]),
            _table(["program", "times", "s"], compiled),
        ]
    )


def main() -> int:
    """Runs the suite, then prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all records to this file")
    parser.add_argument(
        "--top", type=int, default=40, help="rows of the tables of tests and programs"
    )
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
        variables = os.environ | {
            RECORDS: folder,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        command = [sys.executable, "-m", "pytest", "-p", "suite_costs", *arguments.pytest]
        code = subprocess.run(command, env=variables).returncode
        costs = read(Path(folder))
    print(report(costs, arguments.top))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cost) for cost in costs]), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
