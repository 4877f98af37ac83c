"""Errors and their messages: what went wrong, where, what was expected, and what to do about it."""

import difflib
import re
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """Unusable arguments or configuration; the command line exits with 2."""


class FitError(ValueError):
    """Nothing that was asked for fits the memory of the machine; the command line exits with 3."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read: a full disk, a damaged file; not a user error."""


class DamageError(CheckpointError):
    """A checkpoint differs from what was written; the command line exits with 3."""


class SlowerWarning(UserWarning):
    """A requested optimization was not applied; the message states its cost."""


def message(
    what: str, *, where: str = "", expected: object = "", got: object = "", fix: str = ""
) -> str:
    """Returns one readable block. Empty fields are left out; the order never changes."""
    fields = {"where": where, "expected": expected, "got": got, "fix": fix}
    lines = [f"  {name + ':':<9} {value}" for name, value in fields.items() if value != ""]
    return "\n".join([what, *lines])


def first_lines(lines: Sequence[str], limit: int) -> str:
    """Returns the first `limit` lines and the count of the others, as one field of a message."""
    more = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n            ".join([*lines[:limit], *more])


def check_regexes(patterns: Sequence[str], where: str) -> None:
    """Raises ConfigError unless these are a sequence of regular expressions."""
    if isinstance(patterns, str):  # its letters would each be a pattern
        fix = f"({patterns!r},)"
        raise ConfigError(message("not a sequence of patterns", where=where, got=patterns, fix=fix))
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            what = f"not a regular expression: {error}"
            raise ConfigError(message(what, where=where, got=pattern)) from None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns `did you mean 'full_shard'?`, or the list of choices if none is close."""
    choices = sorted(set(choices))
    close = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return "one of: " + ", ".join(choices) if choices else ""


def either(first: str, second: str) -> str:
    """Returns two ways to mend something, as sentences."""
    if not first:
        return second
    return f"{first} Or {second}" if first.endswith("?") else f"{first}. Or {second}"


def human_bytes(count: float) -> str:
    """Returns a size in binary units, of three significant digits: `1.25 GiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(count) >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    whole = units[0] == "B" or count >= 999.5
    return f"{count:.0f} {units[0]}" if whole else f"{count:.3g} {units[0]}"
