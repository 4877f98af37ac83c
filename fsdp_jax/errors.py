"""Messages for the user: what went wrong, where, what was expected, what was found, and what to do
about it.
"""

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """Unusable arguments or configuration; the command line exits with 2."""


class FitError(ValueError):
    """Nothing that was asked for fits the memory of the machine; the command line exits with 3."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read: a full disk, a damaged file. Not a mistake of
    the user.
    """


class DamageError(CheckpointError):
    """A checkpoint that is not as it was written; the command line exits with 3."""


class SlowerWarning(UserWarning):
    """A requested optimization was not applied; the message states its cost."""


def message(
    what: str, *, where: str = "", expected: object = "", got: object = "", fix: str = ""
) -> str:
    """One readable block. Empty fields are left out; the order never changes."""
    fields = {"where": where, "expected": expected, "got": got, "fix": fix}
    return "\n".join(
        [what, *(f"  {name + ':':<9} {value}" for name, value in fields.items() if value != "")]
    )


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`did you mean 'full_shard'?`, or the list of choices where nothing is close."""
    choices = sorted(set(choices))
    close = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return "one of: " + ", ".join(choices) if choices else ""


def human_bytes(count: float) -> str:
    """Binary units, three significant digits: `1.25 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return (
                f"{count:.0f} {unit}"
                if unit == "B"
                else f"{count:.3g} {unit}"
                if count < 999.5
                else f"{count:.0f} {unit}"
            )
        count /= 1024
    raise AssertionError("unreachable")


def first_lines(lines: Sequence[str], limit: int) -> str:
    """Returns the first `limit` lines and the count of the others, as one field of a message."""
    more = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n            ".join([*lines[:limit], *more])
