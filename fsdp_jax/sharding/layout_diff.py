"""What two layouts place otherwise, in bytes on each device, and why."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_jax.errors import ArgumentError, human_bytes
from fsdp_jax.sharding.layout import Layout
from fsdp_jax.sharding.report import layout_json
from fsdp_jax.tables import shortened, text_table

WIDTH = 60  # columns of a reason in the table; the JSON has it in full
_COMPARED = ("shape", "dtype", "spec", "memory")
# what a layout in JSON, and each of its leaves, has
_FIELDS: dict[str, type] = {"mesh": Mapping, "strategy": str}
_LEAF: dict[str, type] = dict.fromkeys(("path", "part", "dtype", "memory", "rule", "reason"), str)
_LEAF |= {"shape": list, "spec": list, "bytes_per_device": int}


@dataclass(frozen=True)
class ChangedLeaf:
    """An array that is in one layout only, or that the two place otherwise.

    Attributes:
        path: of the array.
        part: `params`, `optimizer` or `other`.
        before: its entry in the first layout, as `layout.json` has it; None where it has none.
        after: the same in the second.

    """

    path: str
    part: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None

    @property
    def more_bytes(self) -> int:
        """The bytes that a device holds more of it in the second layout."""
        return _bytes(self.after) - _bytes(self.before)

    @property
    def changes(self) -> tuple[str, ...]:
        """Says what differs, a text for each: `spec P('data') -> P()`."""
        if self.before is None or self.after is None:
            return ("only in the second" if self.before is None else "only in the first",)
        return tuple(
            f"{name} {_text(self.before, name)} -> {_text(self.after, name)}"
            for name in _COMPARED
            if self.before[name] != self.after[name]
        )

    @property
    def reason(self) -> str:
        """Says why each layout places it as it does, once where both say the same."""
        reasons = [
            f"{leaf['rule']}: {leaf['reason']}" for leaf in (self.before, self.after) if leaf
        ]
        return " -> ".join(dict.fromkeys(reasons))


@dataclass(frozen=True)
class LayoutDiff:
    """The differences of two layouts; `print` it.

    Attributes:
        meshes: axis sizes of both.
        strategies: of both.
        totals: {part: bytes that a device holds of it, in both}.
        leaves: what the two place otherwise, by how many bytes more or less a device holds.

    """

    meshes: tuple[Mapping[str, int], Mapping[str, int]]
    strategies: tuple[str, str]
    totals: Mapping[str, tuple[int, int]]
    leaves: tuple[ChangedLeaf, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the two are the same layout."""
        is_same = self.meshes[0] == self.meshes[1] and self.strategies[0] == self.strategies[1]
        return is_same and not self.leaves

    def to_json(self) -> dict[str, Any]:
        """Converts the differences to JSON."""
        leaves = [
            asdict(leaf) | {"changes": leaf.changes, "bytes_per_device": leaf.more_bytes}
            for leaf in self.leaves
        ]
        return {
            "mesh": self.meshes,
            "strategy": self.strategies,
            "totals": self.totals,
            "leaves": leaves,
        }

    def __str__(self) -> str:
        meshes = [
            " x ".join(f"{axis}={size}" for axis, size in mesh.items()) for mesh in self.meshes
        ]
        if self.is_empty:
            return f"no difference: {self.strategies[0]} on {meshes[0]}"
        head = [
            f"{name}: {' -> '.join(dict.fromkeys(values))}"
            for name, values in (("mesh", meshes), ("strategy", self.strategies))
        ]
        totals = [
            (part, human_bytes(before), human_bytes(after), signed_bytes(after - before))
            for part, (before, after) in self.totals.items()
        ]
        columns = ("state a device", "first", "second", "difference")
        blocks = ["\n".join(head), text_table(columns, totals, right=columns[1:])]
        if self.leaves:
            blocks.append(self._leaf_table())
        return "\n\n".join(blocks)

    def _leaf_table(self) -> str:
        """Formats what is placed otherwise; arrays alike in all but their paths share a row."""
        groups: dict[tuple[str, ...], list[ChangedLeaf]] = {}
        for leaf in self.leaves:
            groups.setdefault((leaf.part, *leaf.changes, leaf.reason), []).append(leaf)
        rows = []
        for group in groups.values():
            first, more = group[0], f" (+{len(group) - 1})" if len(group) > 1 else ""
            size = signed_bytes(sum(leaf.more_bytes for leaf in group))
            reason = shortened(first.reason, WIDTH)
            rows.append((first.part, first.path + more, size, ", ".join(first.changes), reason))
        columns = ("part", "path", "bytes a device", "change", "why")
        return text_table(columns, rows, right=("bytes a device",))


def diff_layouts(
    first: Layout | Mapping[str, Any], second: Layout | Mapping[str, Any]
) -> LayoutDiff:
    """Finds what two layouts place otherwise, in bytes on each device, and why.

    Args:
        first: a layout, or what `layout_json` or a run's `layout.json` has of it.
        second: the same of another.

    Raises:
        ValueError: neither a layout nor its JSON.

    Example:
        >>> rows = sharded.on(mesh, rules=[("out/kernel", (None, "data"))])
        >>> print(fsdp.diff_layouts(sharded.layout, rows.layout))  # doctest: +ELLIPSIS
        mesh: ...

    """
    sides = layout_as_json(first, "first"), layout_as_json(second, "second")
    before, after = (
        {(leaf["part"], leaf["path"]): leaf for leaf in side["leaves"]} for side in sides
    )
    changed = []
    for part, path in {**before, **after}:
        leaf = ChangedLeaf(path, part, before.get((part, path)), after.get((part, path)))
        if leaf.changes:
            changed.append(leaf)
    changed.sort(key=lambda leaf: (-abs(leaf.more_bytes), leaf.path))
    totals = {
        part: (_held(sides[0]["totals"].get(part, {})), _held(sides[1]["totals"].get(part, {})))
        for part in {**sides[0]["totals"], **sides[1]["totals"]}
    }
    return LayoutDiff(
        meshes=(sides[0]["mesh"], sides[1]["mesh"]),
        strategies=(sides[0]["strategy"], sides[1]["strategy"]),
        totals=totals,
        leaves=tuple(changed),
    )


def signed_bytes(count: int) -> str:
    """Formats a difference of bytes, with its sign: `+1.5 GiB`."""
    return f"{'-' if count < 0 else '+'}{human_bytes(abs(count))}"


def layout_as_json(layout: Layout | Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Converts a layout to JSON. Raises ValueError for anything else than that or its JSON."""
    if isinstance(layout, Layout):
        return layout_json(layout)
    if isinstance(layout, Mapping) and _is_layout(layout):
        return layout
    raise ArgumentError(
        "not a layout, or a damaged one",
        where=where,
        got=type(layout).__name__,
        fix="sharded.layout, or what layout.json of a run or `inspect --json` has",
    )


def _is_layout(fields: Mapping[str, Any]) -> bool:
    """Tells whether an object of JSON is a layout that can be compared."""
    totals, leaves = fields.get("totals"), fields.get("leaves")
    if not (_has(fields, _FIELDS) and isinstance(totals, Mapping) and isinstance(leaves, list)):
        return False
    if not all(isinstance(part, Mapping) for part in totals.values()):
        return False
    counts = [count for part in totals.values() for count in part.values()]
    return all(isinstance(count, int) for count in counts) and all(
        _has(leaf, _LEAF) and all(isinstance(names, list | None) for names in leaf["spec"])
        for leaf in leaves
    )


def _has(fields: Any, types: Mapping[str, type]) -> bool:
    """Tells whether an object of JSON has values of these types."""
    return isinstance(fields, Mapping) and all(
        isinstance(fields.get(name), kind) for name, kind in types.items()
    )


def _bytes(leaf: Mapping[str, Any] | None) -> int:
    """Counts the bytes of an array on each device; 0 without one."""
    return 0 if leaf is None else int(leaf["bytes_per_device"])


def _held(counts: Mapping[str, int]) -> int:
    """Counts the bytes of a part for each device, those in host memory too."""
    return counts.get("bytes_per_device", 0) + counts.get("host_bytes_per_device", 0)


def _text(leaf: Mapping[str, Any], name: str) -> str:
    """Formats a field of an array's entry; a spec as jax prints it, without None at its end."""
    if name == "shape":
        return str(tuple(leaf[name]))
    if name != "spec":
        return str(leaf[name])
    entries = list(leaf[name])
    while entries and not entries[-1]:
        entries.pop()
    names = [[*each] if each else [None] for each in entries]
    texts = [repr(tuple(each)) if len(each) > 1 else repr(each[0]) for each in names]
    return f"P({', '.join(texts)})"
