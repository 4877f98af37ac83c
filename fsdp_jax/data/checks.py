"""Errors and checks of arguments that the modules of this package share."""

from collections.abc import Mapping
from typing import Any, get_args

from fsdp_jax.errors import ConfigError


def check_positive(where: str, value: int) -> None:
    """Raises ConfigError if a size is less than 1."""
    if value < 1:
        raise ConfigError("a size is not positive", where=where, expected="at least 1", got=value)


def check_seed(seed: int) -> None:
    """Raises ConfigError if `seed` does not fit the 32 bits that every generator here accepts."""
    if not 0 <= seed < 2**32:
        what = "the seed is out of range"
        raise ConfigError(what, where="train.seed", expected="0 to 2**32 - 1", got=seed)


def check_held_out_share(held_out: float) -> None:
    """Raises ConfigError if the held-out share is not 0 to 0.5."""
    if not 0 <= held_out <= 0.5:
        what = "the held-out share is out of range"
        raise ConfigError(what, where="data.held_out", expected="0 to 0.5", got=held_out)


def check_equal(
    what: str,
    saved: Mapping[str, object],
    current: Mapping[str, object],
    *,
    where: str = "",
    fix: str,
) -> None:
    """Raises ConfigError, naming each value that differs from the saved one, or is missing.

    `what`, `where` (put before the names) and `fix` are those of the `message`.
    """
    names = dict.fromkeys([*current, *saved])
    both = {name: (saved.get(name, "missing"), current.get(name, "missing")) for name in names}
    differing = {name: (old, new) for name, (old, new) in both.items() if old != new}
    if differing:
        expected = ", ".join(f"{name} {old}" for name, (old, _) in differing.items())
        got = ", ".join(f"{name} {new}" for name, (_, new) in differing.items())
        where += ", ".join(differing)
        raise ConfigError(what, where=where, expected=f"{expected} (saved)", got=got, fix=fix)


def check_choice(key: str, got: str, choices: Any) -> None:
    """Raises ConfigError if `data.{key}` is not one of the `choices`, a Literal."""
    if got not in get_args(choices):
        expected = ", ".join(get_args(choices))
        raise ConfigError("not a valid choice", where=f"data.{key}", expected=expected, got=got)


def ignored_key_error(where: str, got: object, fix: str = "leave it out") -> ConfigError:
    """Returns the error for a key or an option, `where`, that is set and has no effect."""
    key = where.rpartition(".")[2].removeprefix("--")
    return ConfigError(f"{key} would be ignored", where=where, got=got, fix=fix)
