"""Types of numbers with limits, as settings have them: `Annotated[int, Range(1)]`."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from fsdp_jax.errors import ArgumentError


@dataclass(frozen=True)
class Range:
    """Smallest and largest value of a number, as in `Annotated[int, Range(1)]`."""

    least: float
    most: float = math.inf

    def check(self, value: float, where: str, error: type[ArgumentError] = ArgumentError) -> None:
        """Raises `error` for a number out of the range."""
        if not value >= self.least:
            what, expected = "a value is too small", f"{self.least} or more"
            raise error(what, where=where, expected=expected, got=value)
        if not value <= self.most:
            what, expected = "a value is too large", f"{self.most:,} or less"
            raise error(what, where=where, expected=expected, got=value)


@dataclass(frozen=True)
class KeyNote:
    """What the command knows of a setting besides its type: a note in the `Annotated` of its field.

    Attributes:
        aliases: words that stand for its key on a command line, such as `lr`; those that people try
            without a section.
        may_differ: whether the processes of a run may set it differently, as a path of their own.

    """

    aliases: tuple[str, ...] = ()
    may_differ: bool = False


# Steps, rows and tokens are counted in int32; bytes and parameters in int64.
INT32, INT64 = 2**31 - 1, 2**63 - 1
Positive = Annotated[int, Range(1, INT32)]
NonNegative = Annotated[int, Range(0, INT32)]
Size = Annotated[int, Range(1, INT64)]
NonNegativeFloat = Annotated[float, Range(0)]
Devices = Annotated[int, Range(1, 4096)]  # virtual ones; each has a thread of its own
MeshSize = Annotated[int, Range(-1, INT32)]


def check_fields(settings: Any, where: str, error: type[ArgumentError] = ArgumentError) -> None:
    """Raises `error` for a field of a dataclass that is no bool or number of its type.

    `where`: the argument that has the dataclass. Fields of other types are not checked.
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value, field = getattr(settings, name), f"{where}.{name}"
        if hint is bool and not isinstance(value, bool):
            raise error("not a bool", where=field, expected="True or False", got=value)
        limited = [part for part in (hint, *get_args(hint)) if get_origin(part) is Annotated]
        if not limited or (value is None and type(None) in get_args(hint)):
            continue
        kind, limits, *_ = get_args(limited[0])
        numbers = Integral if kind is int else Real
        if isinstance(value, bool) or not isinstance(value, numbers):
            expected = "a whole number" if kind is int else "a number"
            raise error("not a number", where=field, expected=expected, got=value)
        limits.check(value, field, error)
