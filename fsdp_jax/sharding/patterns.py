"""Regular expressions of paths: whether they are any, and what they match."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from fsdp_jax.errors import ConfigError, did_you_mean


def check_regexes(patterns: Sequence[str], where: str) -> None:
    """Raises ConfigError unless these are a sequence of regular expressions.

    `where`: the argument that has them, for the error.
    """
    if isinstance(patterns, str):  # its letters would each be a pattern
        raise ConfigError(
            "not a sequence of patterns", where=where, got=patterns, fix=f"({patterns!r},)"
        )
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(
                "not a regular expression", where=where, expected="text", got=repr(pattern)
            )
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"not a regular expression: {error}", where=where, got=pattern
            ) from None


@lru_cache(maxsize=2**16)
def search(pattern: str, text: str, *, at_start: bool = False) -> bool:
    """Tells whether a regular expression is found in a text, such as a path, or at its start."""
    find = re.match if at_start else re.search
    return find(pattern, text) is not None


def search_any(patterns: Iterable[str], text: str) -> bool:
    """Tells whether any of these regular expressions is found in a text."""
    return any(search(pattern, text) for pattern in patterns)


def matched(
    patterns: Sequence[str],
    names: Iterable[str],
    where: str,
    kind: str = "parameter",
    *,
    aliases: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> set[str]:
    """Lists the names that any pattern is found in. Raises ConfigError for one found in none.

    `where`: the argument with the patterns; `kind`: what the names are of; both for the error.
    `aliases`: other names of some: a pattern that is found in one of them counts.
    """
    check_regexes(patterns, where)
    by_name = {name: (name, *aliases.get(name, ())) for name in names}
    names = {alias for each in by_name.values() for alias in each}
    for pattern in patterns:
        if not any(search(pattern, name) for name in names):
            raise ConfigError(
                f"pattern '{pattern}' matches no {kind}",
                where=where,
                fix=did_you_mean(pattern, names),
            )
    return {
        name for name, each in by_name.items() if any(search_any(patterns, alias) for alias in each)
    }
