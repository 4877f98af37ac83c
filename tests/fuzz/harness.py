"""Reads many inputs of a target in a forked worker, and tells what must not happen.

Hypothesis draws the inputs, and reduces one that fails. The worker lets the command's `main` read
each, compares what was accepted with an independent reader, and looks whether any other file has
changed. A worker that does not answer is killed.
"""

import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, given
from hypothesis import strategies as st

from fsdp_jax.cli import commands, main
from fsdp_jax.cli.options import RUN

PROBLEMS = ("traceback", "hang", "disagreement", "outside")
MEMORY = 3 << 30  # bytes that one worker may map, beyond what it has at its start
START = 300.0  # seconds that a worker may take to write the valid files


class RefusedError(Exception):
    """The reference reader does not accept an input."""


@dataclass
class Case:
    """One input.

    Attributes:
        folder: its files; what is read must not change.
        seeds: the valid files of which it was made.
        draw: draws a value of a strategy; only where the input is made.
        done: what was done to the valid files, one text each; empty for a valid input.

    """

    folder: Path
    seeds: Path
    draw: Callable[[st.SearchStrategy], Any] | None = None
    done: list[str] = field(default_factory=list)

    def pick(self, options: Sequence[Any]) -> Any:
        """Draws one of the options; the first is the simplest."""
        assert self.draw is not None
        return self.draw(st.sampled_from(options))

    def chance(self, percent: int) -> bool:
        """Draws whether something happens that does so in this share of the cases."""
        assert self.draw is not None
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def change(self, *ways: tuple[int, Callable[[], str]]) -> None:
        """Does one of the ways, drawn by weight, and notes what it says was done."""
        way = self.pick([way for weight, way in ways for _ in range(weight)])
        self.done.append(way())

    def damage(self, *ways: tuple[int, Callable[[], str]]) -> None:
        """Leaves a twentieth of the inputs valid, and changes the others in one of the ways."""
        if self.chance(95):
            self.change(*ways)


class Target(ABC):
    """Something that reads what a user wrote, or files that may be damaged.

    Attributes:
        name: on the command line.
        may_write: paths in the folder of an input that the reader may change.

    """

    name: str
    may_write: tuple[str, ...] = ()

    def prepare(self, seeds: Path) -> None:  # noqa: B027, most override it
        """Writes valid files, once."""

    def start(self) -> None:  # noqa: B027
        """Prepares a worker, once."""

    @abstractmethod
    def make(self, case: Case) -> None:
        """Writes an input into the folder of the case; a valid one where each draw is simplest."""

    def argv(self, case: Case) -> list[str]:
        """Returns the command line that reads the input; by default one that calls `read`."""
        return [PROBE, str(case.folder)]

    @abstractmethod
    def read(self, case: Case) -> Any:
        """Reads the input with the package; raises as it does. Returns plain data."""

    @abstractmethod
    def reference(self, case: Case) -> Any:
        """Reads an accepted input in another way. Raises RefusedError if it is not valid."""


@dataclass(frozen=True)
class Outcome:
    """What became of one input; `problem` is one of PROBLEMS, or "" if all is well."""

    accepted: bool = False
    code: int = 0
    problem: str = ""
    text: str = ""
    done: tuple[str, ...] = ()
    seconds: float = 0.0


PROBE = "probe"


@dataclass(frozen=True)
class Probe:
    """Reads the input of a target, as a command of its own."""

    folder: Annotated[str, RUN]

    def run(self) -> int:
        """Returns 0, or the exit code that the target has returned."""
        result = Running.target.read(Running.case)
        if isinstance(result, ExitCode):
            return result.code
        Running.result = result
        return 0


@dataclass(frozen=True)
class ExitCode:
    """Returned by `Target.read` where a command has refused the input and said why."""

    code: int


class Running:
    """The input that a worker is reading, and what the reader has returned."""

    target: Target
    case: Case
    result: Any = None


NOTHING = object()  # no result


class ProblemError(Exception):
    """An input met one of PROBLEMS."""


def search(
    target: Target, inputs: int, seed: int, *, limit: float = 10.0, keep: Path | None = None
) -> list[Outcome]:
    """Reads inputs until one fails; then reduces it, and copies the smallest that fails to `keep`.

    Args:
        target: what reads them.
        inputs: how many to draw.
        seed: of what is drawn.
        limit: seconds for one input.
        keep: a folder, for the input that fails.

    Returns:
        The outcome of each input, those of reducing included; the last is of the smallest.

    """
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_memory()) as name:
        worker = Worker(target, Path(name), limit)

        @st.composite
        def cases(draw: Any) -> Case:
            case = worker.new_case(draw)
            target.make(case)
            return case

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=inputs,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        @given(cases())
        def is_read_or_refused(case: Case) -> None:
            outcome = worker.read(case)
            outcomes.append(outcome)
            if outcome.problem:
                if keep is not None:
                    _keep(case, keep, outcome)
                raise ProblemError(outcome.problem)

        try:
            is_read_or_refused()
        except (ProblemError, hypothesis.errors.Flaky):
            pass
        finally:
            worker.stop()
    return outcomes


def _memory() -> str | None:
    """Returns a file system in memory, where folders come and go faster, if it has room."""
    place = Path("/dev/shm")
    roomy = place.is_dir() and shutil.disk_usage(place).free > 1 << 30
    return str(place) if roomy and os.access(place, os.W_OK) else None


class Worker:
    """A forked process that reads one input after another, and is replaced when it dies."""

    def __init__(self, target: Target, root: Path, limit: float):
        self.target, self.root, self.limit = target, root, limit
        self.process: Any = None
        self.start()

    def start(self) -> None:
        """Starts the process, and waits until it has written the valid files."""
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        sys.stdout.flush()
        self.process = fork.Process(
            target=_work, args=(self.target, self.root, theirs, self.pipe), daemon=True
        )
        self.process.start()
        theirs.close()
        ready = self.pipe.poll(START) and self._receive()
        assert ready, f"{self.target.name}: no valid files\n{self._output()}"

    def new_case(self, draw: Any) -> Case:
        """Returns a case with an empty folder."""
        case = Case(self.root / "case", self.root / "seeds", draw)
        shutil.rmtree(case.folder, ignore_errors=True)
        case.folder.mkdir()
        return case

    def read(self, case: Case) -> Outcome:
        """Lets the process read an input."""
        if not self.process.is_alive():
            self.start()
        self.pipe.send(case.done)
        problem, text = "hang", f"no answer after {self.limit:.0f} s"
        if self.pipe.poll(self.limit):
            outcome = self._receive()
            if outcome is not None:
                return outcome
            self.process.join()
            problem, text = "traceback", f"the process died, status {self.process.exitcode}"
            text = f"{text}\n{self._output()}"
            is_own = self.process.exitcode == 1  # an exception outside of the command
            assert not is_own, f"{self.target.name} {case.done}: the harness itself fails\n{text}"
        self.stop()
        return Outcome(problem=problem, text=text, done=tuple(case.done))

    def stop(self) -> None:
        self.process.kill()
        self.process.join()

    def _receive(self) -> Any:
        """Returns what the process has sent; None if it has died."""
        try:
            return self.pipe.recv()
        except EOFError:
            return None

    def _output(self) -> str:
        return (self.root / "output").read_text(errors="replace")[-2000:]


def _keep(case: Case, keep: Path, outcome: Outcome) -> None:
    """Copies a failing input, but for pipes, sockets and large files."""
    shutil.rmtree(keep, ignore_errors=True)
    shutil.copytree(case.folder, keep, symlinks=True, ignore=cannot_be_copied)
    (keep / "OUTCOME").write_text(f"{outcome}\n")


def cannot_be_copied(folder: str, names: list[str]) -> list[str]:
    """Returns the names of pipes, sockets and large files."""
    paths = [Path(folder, name) for name in names]
    return [
        path.name
        for path in paths
        if not path.is_symlink() and not path.is_dir()
        if not path.is_file() or path.stat().st_size > 1 << 24
    ]


# In the worker


def _work(target: Target, root: Path, pipe: Connection, theirs: Connection) -> None:
    """Reads one input after another, and sends the outcome of each."""
    theirs.close()
    capture = os.open(root / "output", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(capture, 1)
    os.dup2(capture, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    commands.COMMANDS[PROBE] = Probe
    if not (root / "sentinel").exists():
        _make_sentinel(root / "sentinel")
        (root / "seeds").mkdir()
        target.prepare(root / "seeds")
    target.start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere memory has no such limit
        limit = _mapped() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    pipe.send("ready")
    while True:
        case = Case(root / "case", root / "seeds", done=pipe.recv())
        pipe.send(_read_case(target, case, root, capture))


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _make_sentinel(folder: Path) -> None:
    folder.mkdir()
    (folder / "file").write_text("nobody's\n")
    (folder / "link").symlink_to("file")
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_text("nobody's\n")


def _read_case(target: Target, case: Case, root: Path, capture: int) -> Outcome:
    before = _snapshot(root)

    # Read it as the command does.
    os.chdir(case.folder)
    os.ftruncate(capture, 0)
    os.lseek(capture, 0, os.SEEK_SET)
    Running.target, Running.case, Running.result = target, case, NOTHING
    started = time.perf_counter()
    raised = ""
    try:
        code = main.main(target.argv(case))
    except BaseException as error:
        code, raised = 1, f"{type(error).__name__} came through main: {error}"
    seconds = time.perf_counter() - started
    sys.stdout.flush()
    sys.stderr.flush()
    output = os.pread(capture, 1 << 20, 0).decode(errors="replace")

    # Judge it.
    os.chdir(root)
    accepted = code == 0 or Running.result is not NOTHING
    problem, text = "traceback", raised or _fault_of_output(code, accepted, output)
    if not text:
        problem, text = "outside", _touched(before, _snapshot(root), target.may_write)
    if text and problem == "outside":
        shutil.rmtree(root / "sentinel", ignore_errors=True)
        _make_sentinel(root / "sentinel")
    if not text:
        problem, text = "disagreement", _disagreement(target, case, accepted, code, output)
    if text:
        return Outcome(accepted, code, problem, text[:2000], tuple(case.done), seconds)
    return Outcome(accepted, code, done=tuple(case.done), seconds=seconds)


def _fault_of_output(code: int, accepted: bool, output: str) -> str:
    """Returns what is wrong with an exit code and what was printed; "" if nothing is."""
    if not accepted and code not in (2, 3):
        return f"exit code {code}\n{output}"
    for sign in ("Traceback (most recent call last)", "panicked at", "Exception ignored in"):
        if sign in output:
            return f"{sign!r} in\n{output}"
    blocks = sum(line.startswith("error: ") for line in output.split("\n"))
    if not accepted and blocks != 1:
        return f"exit code {code} with {blocks} error blocks\n{output}"
    return ""


def _disagreement(target: Target, case: Case, accepted: bool, code: int, output: str) -> str:
    """Returns in what the reader and the reference differ; "" if in nothing."""
    if not accepted:
        return "" if case.done else f"a valid input is refused, exit code {code}\n{output}"
    try:
        expected = target.reference(case)
    except RefusedError as error:
        return f"accepted, but the reference refuses it: {error}"
    return _difference(Running.result, expected)


def _difference(got: Any, expected: Any, where: str = "") -> str:
    """Returns the first difference of two trees of plain data and arrays; "" if there is none."""
    if isinstance(got, Mapping) and isinstance(expected, Mapping):
        if got.keys() != expected.keys():
            return f"{where}: keys {sorted(map(str, got.keys() ^ expected.keys()))[:5]} differ"
        pairs = [(got[key], expected[key], f"{where}/{key}") for key in got]
    elif isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        if len(got) != len(expected):
            return f"{where}: {len(got)} entries, expected {len(expected)}"
        pairs = [(a, b, f"{where}/{i}") for i, (a, b) in enumerate(zip(got, expected, strict=True))]
    elif isinstance(got, np.ndarray) and isinstance(expected, np.ndarray):
        same = (got.dtype, got.shape) == (expected.dtype, expected.shape)
        same = same and got.tobytes() == expected.tobytes()
        return "" if same else f"{where}: other arrays"
    else:
        same = type(got) is type(expected) and (got == expected or repr(got) == repr(expected))
        return "" if same else f"{where}: {got!r:.200}, expected {expected!r:.200}"
    return next((text for each in pairs if (text := _difference(*each))), "")


def _snapshot(root: Path) -> dict[str, tuple]:
    """Returns {path: what tells whether it was written to} of all files but the harness's own."""
    found: dict[str, tuple] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if path == "output":
                    continue
                stat = entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    found[path] = (stat.st_mode, stat.st_ino)
                    folders.append(path)
                else:
                    found[path] = (stat.st_mode, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


def _touched(before: dict[str, tuple], after: dict[str, tuple], may_write: tuple[str, ...]) -> str:
    """Returns which files were created, changed or deleted, but for those that may be."""
    allowed = tuple(f"case/{path}" for path in may_write)
    changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    wrong = [
        path for path in changed if not any(path == a or path.startswith(f"{a}/") for a in allowed)
    ]
    return f"files were touched: {', '.join(sorted(wrong)[:5])}" if wrong else ""
