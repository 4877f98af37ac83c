"""Errors and their messages: the failure, its place, the expected and the found, and the fix."""

import difflib
import errno
import traceback
from asyncio import CancelledError
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Exit codes of the command line, beside 0 and 75; a shell reports SIGINT as the last.
FAILED, UNUSABLE, BROKEN, LOST, OUT_OF_MEMORY, INTERRUPTED = 1, 2, 3, 69, 71, 130
UNREAD = 141  # as a shell reports SIGPIPE

PACKAGE = __name__.partition(".")[0]
OWN_FOLDER = Path(__file__).parent
STANDARD_LIBRARY = f"{Path(traceback.__file__).parent}/"
LONGEST_FIELD = 4000  # characters of a field of a message
# Errors that Python raises where code is wrong; others come from the machine or from a library.
_OF_BUGS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RecursionError),
    *(NotImplementedError, TypeError, ValueError),
)


class ReadableError(Exception):
    """An error whose text is for the user, and whose parts a program can read.

    Attributes:
        what: the failure, in a line.
        where: the argument, key, path or file; empty if unknown, as the other fields.
        expected: a description of right values.
        got: the value or state that was found.
        fix: an action that ends the failure.
        caused_elsewhere: another process of the run failed, which has its own error.

    """

    caused_elsewhere = False

    def __init__(
        self,
        what: object,
        *,
        where: object = "",
        expected: object = "",
        got: object = "",
        fix: str = "",
    ) -> None:
        super().__init__(what)
        # As text: an error outlives the arrays that it is about.
        self.what, self.where = _as_text(what), _as_text(where)
        self.expected, self.got, self.fix = _as_text(expected), _as_text(got), fix

    def __str__(self) -> str:
        fields = {"where": self.where, "expected": self.expected, "got": self.got, "fix": self.fix}
        return message(self.what, **fields)


class ArgumentError(ReadableError, ValueError):
    """An argument, a model or a file of the user's that cannot be used; a ValueError."""


class ConfigError(ArgumentError):
    """Unusable arguments or configuration of a run; the command line exits with 2."""


class FitError(ReadableError, ValueError):
    """No requested plan fits the memory of the machine; the command line exits with 3."""


class OutOfMemoryError(ReadableError, RuntimeError):
    """A device is out of memory; the command line exits with 71, or 1 if the step alone fits.

    Attributes:
        details: tables below the message: what holds the memory, and what would fit.
        step_fits: the step alone fits, so that a restart may help.

    """

    def __init__(
        self, what: object, *, details: str = "", step_fits: bool = False, **fields: str
    ) -> None:
        super().__init__(what, **fields)
        self.details, self.step_fits = details, step_fits

    def __str__(self) -> str:
        return "\n\n".join(part for part in (super().__str__(), self.details) if part)


class CheckpointError(ReadableError, RuntimeError):
    """A file of a run cannot be written or read, by a full or failing disk; not a user error."""


class DamageError(CheckpointError):
    """A file of any kind is not as it was written, or breaks its format; exit code 3."""


class DirectoryLostError(CheckpointError):
    """The directory of a run was removed, moved or replaced while the run wrote to it."""


class ProcessLostError(ReadableError, RuntimeError):
    """Another process of the run has ended or never came; the command line exits with 69."""


class MissingPackageError(ReadableError, ImportError):
    """A package that is part of an extra is not installed; the command line exits with 2."""


class SlowerWarning(UserWarning):
    """A requested optimization was not applied; the message states its cost."""


class Message(str):
    """The text of an error for the user, as `message` returns it."""

    __slots__ = ()


def message(
    what: str, *, where: object = "", expected: object = "", got: object = "", fix: str = ""
) -> Message:
    """Formats an error or a warning: the failure, then a line for each field."""
    fields = {"where": where, "expected": expected, "got": got, "fix": fix}
    shown = {name: _shorten(value) for name, value in fields.items()}
    lines = [f"  {name + ':':<9} {text}" for name, text in shown.items() if text]
    return Message("\n".join([_shorten(what), *lines]))


def _as_text(value: object) -> str:
    """Converts a value to text."""
    try:
        return str(value)
    except ValueError:  # Python prints no number of more than 4300 digits
        return "a number of thousands of digits"


def _shorten(value: object) -> str:
    """Converts a value to text, of a length that can be read."""
    text = _as_text(value)
    if len(text) <= LONGEST_FIELD:
        return text
    return f"{text[:LONGEST_FIELD]}… ({len(text):,} characters)"


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Names, where an import inside fails, the `pip install` that brings the package.

    The base install is the library alone: the dependencies of the command, of pages and of Hugging
    Face's formats are extras of it.

    Raises:
        MissingPackageError: the package that is imported is not installed.

    """
    try:
        yield
    except ModuleNotFoundError as error:
        # A module of ours that is missing is a bug, and no extra has it.
        package = (error.name or "").partition(".")[0]
        if package in ("", PACKAGE):
            raise
        what, fix = f"the package '{package}' is not installed", f"pip install '{PACKAGE}[{name}]'"
        raise MissingPackageError(what, fix=fix) from error


def is_failure(error: BaseException) -> bool:
    """Tells whether an error is a failure, and no interrupt or request to exit.

    A panic of a library in Rust derives from BaseException, so that `except Exception` misses it.
    """
    return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | CancelledError)


def exit_code(error: BaseException) -> int:
    """Chooses the exit code of the command for an error that ends it.

    LOST for a lost process, OUT_OF_MEMORY for a step that a device has too little memory for,
    BROKEN for damage or what fits nowhere, UNUSABLE for what the user gave and can mend, FAILED for
    all else.
    """
    # The most specific first: some are of two kinds.
    if isinstance(error, ProcessLostError):
        return LOST
    if isinstance(error, OutOfMemoryError):
        return FAILED if error.step_fits else OUT_OF_MEMORY
    if isinstance(error, DamageError | FitError):
        return BROKEN
    is_refusal = isinstance(error, ValueError | MissingPackageError) and _is_readable(error)
    # The system's own error, or the reason of one that says what could not be written.
    reasons = [each for each in (error, error.__cause__) if isinstance(each, OSError)]
    is_long_path = any(each.errno in (errno.ENAMETOOLONG, errno.ELOOP) for each in reasons)
    if is_refusal or is_long_path:
        return UNUSABLE
    return FAILED


def error_block(error: BaseException, *, of_command: bool = True) -> str:
    """Formats an error as the block that the command prints, without control characters.

    Where it is not the command that prints it, there is no advice about its options.
    """
    text = _error_text(error, of_command=of_command)
    return "\n".join(printable(line) for line in text.split("\n"))


def _error_text(error: BaseException, *, of_command: bool) -> str:
    """Formats an error for the user: its own text if readable, else type, place and fix."""
    text = _shorten(error).strip() or "no message"
    # Errors of ours and of the system, which need no place in the code.
    if _is_readable(error):
        return f"error: {error}"
    if isinstance(error, OSError):
        what = "the system refuses it"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "the disk is full"
        return message(f"error: {what}", where=str(error.filename or ""), got=text)
    if isinstance(error, MemoryError):
        fix = "a smaller model, batch or sequence"
        return message("error: this machine has too little memory", got=text, fix=fix)
    # Others, which are bugs of ours if our code raised them.
    fixes = ["run again with --debug for the traceback"] * of_command
    name = type(error).__name__
    where, is_ours = _last_frame(error)
    if is_ours and type(error).__module__ == "builtins" and isinstance(error, _OF_BUGS):
        what = f"error: a bug of {PACKAGE}, or of a library that it uses: {name}: {text}"
        return message(what, where=where, fix=", and ".join([*fixes, "report it"]))
    return message(f"error: {name}: {text}", where=where, fix="".join(fixes))


def _is_readable(error: BaseException) -> bool:
    """Tells whether an error's text is for the user: of a type of ours, or a `Message`."""
    is_ours = type(error).__module__.partition(".")[0] == PACKAGE
    return is_ours or bool(error.args and isinstance(error.args[0], Message))


def _last_frame(error: BaseException) -> tuple[str, bool]:
    """Finds the file, line and function where an error was raised, and whether they are ours.

    An error from inside a library counts for its caller: this package, or a user's own code.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "", True
    # Our own frames may be in site-packages too.
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(OWN_FOLDER)]
    callers = [frame for frame in frames if frame in ours or not _is_library(frame)]
    frame = (callers or frames)[-1]
    shown = f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return shown, frame in ours or not callers


def _is_library(frame: traceback.FrameSummary) -> bool:
    """Tells whether a stack frame is of an installed package, or of Python itself."""
    installed = {"site-packages", "dist-packages"} & {*Path(frame.filename).parts}
    return bool(installed) or frame.filename.startswith((STANDARD_LIBRARY, "<frozen "))


def place_in_model(error: BaseException) -> str:
    """Finds the file, line and function of the model or loss that an error comes from.

    That is the last frame which is neither ours, nor of JAX, Flax, optax or Python.
    """
    skipped = (f"{OWN_FOLDER}/", STANDARD_LIBRARY, "<frozen ")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_named_so = {"jax", "flax", "optax"} & {*Path(frame.filename).parts}
        if is_named_so and _is_library(frame):
            continue
        if not frame.filename.startswith(skipped):
            return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return ""


def printable(text: str) -> str:
    """Escapes the control characters of a line, which would otherwise reach the terminal."""
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text)


def first_lines(lines: Sequence[str], limit: int) -> str:
    """Joins the first `limit` lines and the count of the others, as a field of `message`."""
    shown = list(lines[:limit])
    if len(lines) > limit:
        shown.append(f"and {len(lines) - limit} more")
    return "\n            ".join(shown)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Suggests the closest choice, `did you mean 'full_shard'?`, or lists all if none is close."""
    choices = sorted(set(choices))
    if not choices:
        return ""
    # Half of the letters alike, as difflib measures it.
    close = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"one of: {', '.join(choices)}"


def join_fixes(first: str, second: str) -> str:
    """Joins two fixes, as `first. Or second`; `first` may be empty."""
    if not first:
        return second
    if not first.endswith("?"):
        first += "."
    return f"{first} Or {second}"


def human_bytes(count: float) -> str:
    """Formats a size in binary units, of three significant digits: `1.25 GiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(count) >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    # Three digits of 1000 would be written with an exponent.
    if units[0] == "B" or count >= 999.5:
        return f"{count:.0f} {units[0]}"
    return f"{count:.3g} {units[0]}"
