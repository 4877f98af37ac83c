"""Regular expressions of paths: whether they are any, what they match, and for how long.

[Note: slow patterns] Engines of Python's syntax backtrack: `(a|aa)+$` takes years for a path of
sixty characters that it does not match. The package `regex` reads the same syntax and ends a search
after a time limit, in any thread. An engine in linear time (RE2) would need no limit, but has no
lookahead, and "freeze all but the head" is written `^(?!head)`.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from types import MappingProxyType

import regex

from fsdp_jax.errors import ConfigError, did_you_mean

SECONDS = 5.0  # what the slow searches of one pattern may take together
SLOW = 1e-3  # seconds; a search takes some microseconds
LONGEST = 2000  # characters of a pattern
# Product of the counts in a pattern: `regex` writes (a{100}){100} out as 10,000 letters before any
# search, and would take all memory for larger counts.
REPEATS = 100_000
COUNTS = re.compile(r"\{(?:\d*,)?(\d+),?\}")
_spent: defaultdict[str, float] = defaultdict(float)  # seconds of slow searches, by pattern


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
        if len(pattern) > LONGEST:
            raise ConfigError(
                "a regular expression is too long",
                where=where,
                expected=f"{LONGEST} characters at most",
                got=f"{len(pattern)} characters: {pattern[:60]}…",
            )
        if _repeats(pattern) > REPEATS:
            raise ConfigError(
                "a regular expression repeats too much",
                where=where,
                expected=f"counts whose product is {REPEATS:,} at most",
                got=pattern,
                fix="`+` or `*` in place of a count",
            )
        try:
            regex.compile(pattern)
        except (regex.error, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"not a regular expression: {error}", where=where, got=pattern
            ) from None


def _repeats(pattern: str) -> int:
    """Computes the product of the counts in a pattern: 6 for `(a{2}b){,3}`."""
    # In the verbose mode, `(?x)`, spaces and comments may stand between digits.
    dense = ("".join(pattern.split()), re.sub(r"#.*\n|\s", "", pattern))
    counts = [[int(text.lstrip("0")[:20] or 1) for text in COUNTS.findall(each)] for each in dense]
    return max(map(prod, counts))


@lru_cache(maxsize=2**16)
def search(pattern: str, text: str, *, at_start: bool = False) -> bool:
    """Tells whether a regular expression is found in a text, such as a path, or at its start.

    Raises ConfigError for one whose slow searches take longer than `SECONDS`.
    """
    find = regex.match if at_start else regex.search
    started = time.monotonic()
    try:
        found = find(pattern, text, timeout=max(SECONDS - _spent[pattern], SLOW))
    except TimeoutError:
        raise ConfigError(
            f"a regular expression takes longer than {SECONDS:g} s",
            where=f"pattern '{pattern}'",
            fix="no repetition of what is itself repeated, as in (a+)+; one .* in place of several",
        ) from None
    finally:
        elapsed = time.monotonic() - started
        if elapsed > SLOW:
            _spent[pattern] += elapsed
    return found is not None


def search_any(patterns: Iterable[str], text: str) -> bool:
    """Tells whether any of these regular expressions is found in a text; raises as `search`."""
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
