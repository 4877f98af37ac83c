"""Rules about paths: a pattern, and the spec of what it matches."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from fsdp_jax.errors import ArgumentError
from fsdp_jax.sharding.logical_axes import is_entry
from fsdp_jax.sharding.mesh import Entry, axes_of
from fsdp_jax.sharding.patterns import check_regexes, search
from fsdp_jax.tree import SEPARATOR

Pattern = str | tuple[str, ...]
Spec = PartitionSpec | Sequence[Entry] | None
Rule = tuple[Pattern, Spec]
_NUMBER = re.compile(r"(?<![^/_])\d+(?=/)")  # of a layer: a part of a path, or the end of one


def read_rules(rules: Any) -> tuple[tuple[Pattern, tuple[Entry, ...]], ...]:
    """Reads rules as pairs of a pattern and a spec with an entry per dim.

    Raises ValueError for what is not such a pair, with one that is.
    """
    # A dict stands for its items; a text, or what cannot be iterated, for one rule, refused below.
    if isinstance(rules, Mapping):
        rules = tuple(rules.items())
    if isinstance(rules, str) or not isinstance(rules, Iterable | None):
        rules = (rules,)
    pairs = []
    for rule in () if rules is None else rules:
        # The pattern: a regular expression, or a tuple of them for adjoining parts of a path.
        is_pair = isinstance(rule, tuple | list) and len(rule) == 2
        if not is_pair or not isinstance(rule[0], str | tuple | list):
            raise ArgumentError(
                "rules are (pattern, spec) pairs",
                where="rules",
                got=repr(rule),
                fix='a list of pairs, such as [("kernel", ("fsdp",))]',
            )
        pattern, spec = rule
        patterns = [pattern] if isinstance(pattern, str) else pattern
        pattern = pattern if isinstance(pattern, str) else tuple(pattern)
        where = f"rule '{pattern_name(pattern)}'"
        check_regexes(patterns, where)
        # The spec: an entry for each dim, with each mesh axis once.
        spec = () if spec is None else spec
        if isinstance(spec, str) or not isinstance(spec, Iterable) or not all(map(is_entry, spec)):
            raise ArgumentError(
                "a spec has one entry per dim",
                where=where,
                got=repr(spec),
                fix="a PartitionSpec or a tuple of mesh axes, such as " + _suggested_spec(spec),
            )
        twice = [entry for entry in spec if len(set(axes_of(entry))) < len(axes_of(entry))]
        if twice:
            raise ArgumentError(
                "a dim names an axis twice", where=where, got=repr(spec), fix="leave one out"
            )
        pairs.append((pattern, tuple(spec)))
    return tuple(pairs)


def _suggested_spec(spec: Any) -> str:
    """Guesses, as text, the spec that was meant by a value that is none."""
    if isinstance(spec, str):
        return f"({spec!r},). A table of logical names goes into logical_axes"
    if hasattr(spec, "spec"):  # a NamedSharding
        return f"its spec: {spec.spec}"
    return '(None, "fsdp")'


def pattern_name(pattern: Pattern) -> str:
    """Formats a pattern for messages; the parts of a tuple are slash-joined."""
    return pattern if isinstance(pattern, str) else SEPARATOR.join(map(str, pattern))


def rule_text(path: str, spec: PartitionSpec, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Writes, as text, the rule that gives a spec to a parameter, in all layers where it is alike.

    `shapes`: those of all parameters, by path. The paths of layers differ in numbers.
    """
    pattern = _NUMBER.sub(r"\\d+", re.escape(path))
    if any(shapes[path] != shape for one, shape in shapes.items() if re.fullmatch(pattern, one)):
        pattern = re.escape(path)
    return f"(r'^{pattern}$', {tuple(spec)})"


def matches(pattern: Pattern, path: str) -> bool:
    """Matches a regular expression in a path, or a tuple of them in adjoining parts."""
    if isinstance(pattern, str):
        return search(pattern, path)
    parts = path.split(SEPARATOR)
    starts = range(len(parts) - len(pattern) + 1)
    return any(
        all(
            search(f"{one}$", part, at_start=True)
            for one, part in zip(pattern, parts[start:], strict=False)
        )
        for start in starts
    )
