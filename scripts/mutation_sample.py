"""Changes random lines of the package, one at a time, and runs the tests that execute them.

    python -m pip install coverage pytest-cov
    python scripts/mutation_sample.py --measure          # which test executes which line: once
    python scripts/mutation_sample.py --count 40 --seed 0 --json FILE

A change is one operator, constant or condition: `<` for `<=`, `+` for `-`, `and` for `or`, 2 for 1,
True for False, `not` before a condition or taken away. Changes are drawn from all that the package
has, but for those in docstrings, annotations and texts. `make test`'s tests that execute the line
run first, those of the package's own folder before others, then the same of `make test-long`. A
line that is executed as its module is imported meets all tests of that folder.

A change is caught if a test fails or does not end. Each that is not has to be looked at by hand: it
may not change what the package does.
"""

import argparse
import ast
import json
import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from mutation_check import ROOT, copy_repository

PACKAGE = ROOT / "fsdp_jax"
COVERAGE = ROOT / "output" / "mutation_sample"
TIERS = {"make test": "not long", "make test-long": "long and not exhaustive"}
PATIENCE = 900  # seconds for the tests of one change
SWAPS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}


@dataclass(frozen=True)
class Change:
    """A part of a line, from one column to another, and the text in its place."""

    file: str
    line: int
    start: int
    end: int
    new: str

    def apply(self, text: str) -> str:
        """Changes the text of the file."""
        lines = text.splitlines(keepends=True)
        raw = lines[self.line - 1].encode()  # columns of `ast` count bytes
        lines[self.line - 1] = (raw[: self.start] + self.new.encode() + raw[self.end :]).decode()
        return "".join(lines)


@dataclass(frozen=True)
class Result:
    """What the tests said of a change."""

    file: str
    line: int
    old: str
    new: str
    caught_by: str  # "make test", "make test-long" or ""
    failed_test: str
    tests: int
    seconds: float


class _Finder(ast.NodeVisitor):
    """Collects the changes of one file."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.lines = file, [line.encode() for line in text.splitlines()]
        self.found: list[Change] = []

    def _between(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> None:
        """Adds the swap of an operator that stands between two expressions of one line."""
        if left.end_lineno != right.lineno or type(operator) not in SWAPS:
            return
        old, new = SWAPS[type(operator)]
        assert left.end_col_offset is not None
        gap = self.lines[right.lineno - 1][left.end_col_offset : right.col_offset].decode()
        if gap.count(old) == 1:
            start = left.end_col_offset + len(gap.partition(old)[0].encode())
            self.found.append(Change(self.file, right.lineno, start, start + len(old), new))

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self._between(left, right, operator)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(isinstance(part, ast.JoinedStr) for part in (node.left, node.right))
        if not is_text:
            self._between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, node.op)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            new = str(not node.value)
        elif isinstance(node.value, int | float) and node.lineno == node.end_lineno:
            new = repr(node.value + 1)
        else:
            return
        assert node.end_col_offset is not None
        place = (node.lineno, node.col_offset, node.end_col_offset)
        self.found.append(Change(self.file, *place, new))

    def _condition(self, test: ast.expr) -> None:
        if test.lineno != test.end_lineno or test.end_col_offset is None:
            return
        start, end = test.col_offset, test.end_col_offset
        text = self.lines[test.lineno - 1][start:end].decode()
        new = text.removeprefix("not ") if text.startswith("not ") else f"not ({text})"
        self.found.append(Change(self.file, test.lineno, start, end, new))

    def visit_If(self, node: ast.If) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skips texts."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """Skips annotations."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in [*node.decorator_list, node.args, *node.body]:
            self.visit(part)


def changes() -> Iterator[Change]:
    """All changes of the package that still parse."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        finder = _Finder(str(path.relative_to(ROOT)), text)
        finder.visit(ast.parse(text))
        yield from (each for each in finder.found if _parses(each.apply(text)))


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def measure() -> None:
    """Runs each tier once, and keeps which test executes which line."""
    COVERAGE.mkdir(parents=True, exist_ok=True)
    config = COVERAGE / "coveragerc"
    config.write_text("[run]\nsource = fsdp_jax\nrelative_files = true\n", encoding="utf-8")
    for number, marks in enumerate(TIERS.values()):
        words = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q"]
        words += ["-m", marks, "--cov", f"--cov-config={config}", "--cov-context=test"]
        environment = os.environ | {"COVERAGE_FILE": str(COVERAGE / f"tier{number}")}
        subprocess.run([*words, "--cov-report="], cwd=ROOT, env=environment, check=False)


def tests_of(change: Change, number: int) -> list[str]:
    """The tests of a tier that execute the changed line, those of its own folder first."""
    from coverage import CoverageData

    data = CoverageData(str(COVERAGE / f"tier{number}"))
    data.read()
    names = data.contexts_by_lineno(change.file).get(change.line, [])
    # Module-level lines have the empty context, or that of the test that imported the module.
    tests = {name.partition("|")[0] for name in names if name}
    return sorted(tests, key=lambda test: (not test.startswith(own_tests(change)), test))


def own_tests(change: Change) -> str:
    """The folder of a package's tests, or the file of a module's."""
    name = Path(change.file).parts[1]
    return f"tests/test_{name}" if name.endswith(".py") else f"tests/{name}"


def run(root: Path, marks: str, tests: list[str]) -> str:
    """Runs tests in `root` until one fails; returns its name, "" if all pass."""
    existing = [test for test in tests if (root / test.partition("::")[0]).exists()]
    if not existing:
        return ""
    listed = root / "tests_to_run"
    listed.write_text("\n".join(existing), encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache")}
    environment = cache | os.environ | {"PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            [*words, "-m", marks, f"@{listed}"],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return "no test: they do not end"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode in (0, 5):  # 5: all of them belong to the other tier
        return ""
    # Of tests that were renamed since `--measure` none run, of others with new parameters all.
    gone = set(re.findall(r"not found: \S*?(tests/.*)", done.stdout + done.stderr))
    if gone:
        names = dict.fromkeys(
            test.partition("[")[0] if test.partition("[")[0] in gone else test
            for test in tests
            if test not in gone
        )
        return run(root, marks, list(names))
    if "while loading conftest" in done.stderr:
        return "all: the package cannot be imported"
    if not lines:
        said = (done.stdout + done.stderr)[-3000:]
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{said}")
    return lines[0].partition(" ")[2].partition(" - ")[0]


def judge(change: Change, root: Path, tiers: list[str]) -> Result:
    """Applies a change in a copy of the repository, and runs its tests."""
    started, path = time.monotonic(), root / change.file
    text = path.read_text(encoding="utf-8")
    count, failed, caught_by = 0, "", ""
    path.write_text(change.apply(text), encoding="utf-8")
    try:
        for number, tier in enumerate(TIERS):
            if tier not in tiers:
                continue
            tests = tests_of(change, number) or [own_tests(change)]
            count += len(tests)
            failed = run(root, TIERS[tier], tests)
            if failed:
                caught_by = tier
                break
    finally:
        path.write_text(text, encoding="utf-8")
    old, new = (each.splitlines()[change.line - 1].strip() for each in (text, change.apply(text)))
    seconds = round(time.monotonic() - started, 1)
    return Result(change.file, change.line, old, new, caught_by, failed, count, seconds)


def main() -> int:
    """Draws changes, and prints what caught each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="run both tiers for their coverage")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="changes that are tried at a time")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of those drawn")
    parser.add_argument("--tiers", nargs="*", default=list(TIERS), choices=list(TIERS))
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    if arguments.measure:
        measure()
        return 0
    drawn = random.Random(arguments.seed).sample(list(changes()), arguments.count)
    results = []
    roots: queue.Queue[Path] = queue.Queue()  # copies of the repository that no change is in

    def judge_in_a_copy(change: Change) -> Result:
        root = roots.get()
        try:
            return judge(change, root, arguments.tiers)
        finally:
            roots.put(root)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for number in range(arguments.jobs):
            roots.put(copy_repository(Path(folder) / str(number)))
        for result in pool.map(judge_in_a_copy, drawn[arguments.skip :]):
            results.append(result)
            print(f"{result.caught_by or 'NOT CAUGHT':15} {result.seconds:6.1f} s", end="  ")
            print(f"{result.file}:{result.line} ({result.tests} tests)")
            print(f"    - {result.old}\n    + {result.new}\n    {result.failed_test}", flush=True)
            if arguments.json:
                rows = [asdict(each) for each in results]
                arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for tier in TIERS:
        print(f"{sum(each.caught_by == tier for each in results)} caught by {tier}")
    print(f"{sum(not each.caught_by for each in results)} of {len(results)} not caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
