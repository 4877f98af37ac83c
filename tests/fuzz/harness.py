"""Runs a target on many inputs in forked workers, and counts what must not happen.

An input is a function of (seed, target, number) alone. A worker makes it in a folder of its own,
lets the command's `main` read it, compares what was accepted with an independent reader, and looks
whether any other file has changed. The parent kills a worker that does not answer.
"""

import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
from tyro.conf import Suppress

from fsdp_jax.cli import commands, main
from fsdp_jax.cli.options import RUN

PROBLEMS = ("traceback", "hang", "disagreement", "outside")
MEMORY = 3 << 30  # bytes that one worker may map, beyond what it has at its start
BROKEN_HARNESS = 99  # exit code of a worker whose target or reference reader fails
START = 300.0  # seconds that a worker may take to write the valid files


class RefusedError(Exception):
    """The reference reader does not accept an input."""


@dataclass
class Case:
    """One input.

    Attributes:
        folder: its files; what is read must not change.
        seeds: the valid files of which it was made.
        rng: draws it.
        number: of the input.
        done: what was done to the valid files, one text each; empty for a valid input.

    """

    folder: Path
    seeds: Path
    rng: Random
    number: int = 0
    done: list[str] = field(default_factory=list)


class Target(ABC):
    """Something that reads what a user wrote, or files that may be damaged.

    Attributes:
        name: on the command line.
        may_write: paths in the folder of an input that the reader may change.
        codes: exit codes of a refusal.

    """

    name: str
    may_write: tuple[str, ...] = ()
    codes: tuple[int, ...] = (2, 3)

    def prepare(self, seeds: Path) -> None:  # noqa: B027, most override it
        """Writes valid files, once."""

    def start(self) -> None:  # noqa: B027
        """Prepares a worker, once."""

    @abstractmethod
    def make(self, case: Case) -> None:
        """Writes an input into the folder of the case."""

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

    number: int
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

    folder: Annotated[str, RUN, Suppress]

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


def run_target(
    target: Target,
    seed: int,
    numbers: Iterable[int],
    *,
    limit: float = 10.0,
    keep: Path | None = None,
) -> Iterator[Outcome]:
    """Yields the outcome of each input, in order; failing ones are copied to `keep`."""
    numbers = list(numbers)
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_memory()) as name:
        root = Path(name)
        while numbers:
            folder = None if keep is None else keep / f"{target.name}-{seed}"
            for outcome in _from_worker(target, seed, numbers, root, limit, folder):
                del numbers[0]
                yield outcome


def _memory() -> str | None:
    """Returns a file system in memory, where folders come and go faster, if it has room."""
    place = Path("/dev/shm")
    roomy = place.is_dir() and shutil.disk_usage(place).free > 1 << 30
    return str(place) if roomy and os.access(place, os.W_OK) else None


def _from_worker(
    target: Target, seed: int, numbers: list[int], root: Path, limit: float, keep: Path | None
) -> Iterator[Outcome]:
    """Yields the outcomes of one worker, which may be killed or die before the last input."""
    numbers = list(numbers)
    readable, writable = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(readable)
            _work(target, seed, numbers, root, writable, keep)
            code = 0
        except BaseException:
            traceback.print_exc()
            code = BROKEN_HARNESS
        finally:
            os._exit(code)
    os.close(writable)
    with os.fdopen(readable, "rb", buffering=0) as pipe:
        ready = False
        for line in _lines(pipe, START, limit):
            if not ready and line:
                assert json.loads(line) == "ready", line
                ready = True
            elif line:
                del numbers[0]
                yield Outcome(**json.loads(line))
            else:
                os.kill(child, signal.SIGKILL)
                assert ready, f"{target.name}: no valid files after {START:.0f} s"
                _, status = os.waitpid(child, 0)
                text = f"no answer after {limit:.0f} s; done: {_note(root)}"
                yield _keep(root / "case", keep, Outcome(numbers[0], problem="hang", text=text))
                return
    _, status = os.waitpid(child, 0)
    if numbers:
        output = (root / "output").read_text(errors="replace")[-2000:]
        broken = not ready or os.waitstatus_to_exitcode(status) == BROKEN_HARNESS
        assert not broken, f"{target.name} {numbers[0]}: the harness itself fails\n{output}"
        text = f"the process died, status {status}; done: {_note(root)}\n{output}"
        yield _keep(root / "case", keep, Outcome(numbers[0], problem="traceback", text=text))


def _lines(pipe: Any, first: float, later: float) -> Iterator[bytes]:
    """Yields the lines of a pipe up to its end; b"" and nothing more when none comes in time.

    `first` and `later` are seconds that the first line, and each of the others, may take.
    """
    pending, limit = b"", first
    while True:
        ready, _, _ = select.select([pipe], [], [], limit)
        if not ready:
            yield b""
            return
        block = pipe.read(1 << 16)
        if not block:
            return
        *lines, pending = (pending + block).split(b"\n")
        yield from lines
        limit = later if lines else limit


def _note(root: Path) -> str:
    return (root / "note").read_text()


def _keep(case: Path, keep: Path | None, outcome: Outcome) -> Outcome:
    """Copies a failing input; pipes, sockets and terabytes are only named. Returns the outcome."""
    if keep is None or not outcome.problem:
        return outcome
    to = keep / str(outcome.number)
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    (to / "OUTCOME").write_text(json.dumps(asdict(outcome), indent=1) + "\n")
    for path in sorted(case.rglob("*")):
        copy = to / path.relative_to(case)
        if path.is_symlink():
            copy.symlink_to(path.readlink())
        elif path.is_dir():
            copy.mkdir(exist_ok=True)
        elif path.is_file() and path.stat().st_size < 1 << 24:
            shutil.copy(path, copy)
        else:
            copy.with_name(f"{copy.name}.{path.stat().st_mode:o}").touch()
    return outcome


# In the worker


def _work(
    target: Target, seed: int, numbers: list[int], root: Path, pipe: int, keep: Path | None
) -> None:
    """Reads one input after another, and writes a line of JSON about each."""
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
    os.write(pipe, b'"ready"\n')
    for number in numbers:
        outcome = _run_case(target, seed, number, root, capture)
        _keep(root / "case", keep, outcome)
        os.write(pipe, json.dumps(asdict(outcome)).encode() + b"\n")


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _make_sentinel(folder: Path) -> None:
    folder.mkdir()
    (folder / "file").write_text("nobody's\n")
    (folder / "link").symlink_to("file")
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_text("nobody's\n")


def _run_case(target: Target, seed: int, number: int, root: Path, capture: int) -> Outcome:
    case = Case(root / "case", root / "seeds", Random(f"{seed} {target.name} {number}"), number)
    os.chdir(root)
    shutil.rmtree(case.folder, ignore_errors=True)
    case.folder.mkdir()
    target.make(case)
    (root / "note").write_text("; ".join(case.done) or "nothing")
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
    problem, text = "traceback", raised or _fault_of_output(target, code, accepted, output)
    if not text:
        problem, text = "outside", _touched(before, _snapshot(root), target.may_write)
    if text and problem == "outside":
        shutil.rmtree(root / "sentinel", ignore_errors=True)
        _make_sentinel(root / "sentinel")
    if not text:
        problem, text = "disagreement", _disagreement(target, case, accepted, code, output)
    if text:
        return Outcome(number, accepted, code, problem, text[:2000], tuple(case.done), seconds)
    return Outcome(number, accepted, code, done=tuple(case.done), seconds=seconds)


def _fault_of_output(target: Target, code: int, accepted: bool, output: str) -> str:
    """Returns what is wrong with an exit code and what was printed; "" if nothing is."""
    if not accepted and code not in target.codes:
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
                if path in ("output", "note"):
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
