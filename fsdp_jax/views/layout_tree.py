"""The layout as a tree: parameters by path, what belongs to each beside it, bytes as bars."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar

from fsdp_jax.errors import human_bytes
from fsdp_jax.tables import fitted_table, shortened
from fsdp_jax.tree import unflatten
from fsdp_jax.views.array_slices import shape_text
from fsdp_jax.views.page import View, number_ranges

BAR = 10  # characters
NAME = 44  # longest name of a row in a terminal
NUMBERED = re.compile(r"([^/]*?)(\d+)(/.*)?")  # the first part of a name ends in a number
OPEN_ROWS = 60  # a page with more rows begins with the lower levels closed


@dataclass(frozen=True)
class StateArray:
    """One array of the state, as a view shows it.

    `kind`: empty for a parameter; `mu`, `nu`, `copies` for what belongs to one. `axes`: the mesh
    axes that it is sharded along. `bytes`: on each device. `stacked`: leading dims of layers.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    axes: tuple[str, ...]
    bytes: int
    reason: str = field(compare=False)  # it may have the array's path, and layers are alike
    stacked: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The dtype and shape: `float32[4,8]`."""
        return self.dtype + shape_text(self.shape)


@dataclass(frozen=True)
class TreeNode:
    """A row of the tree: `count` subtrees alike in all but their number, or one array.

    `arrays`: at the ends of the tree a parameter, then what belongs to it.
    """

    name: str
    arrays: tuple[StateArray, ...] = ()
    children: tuple["TreeNode", ...] = ()
    count: int = 1

    @cached_property
    def flat(self) -> tuple[StateArray, ...]:
        """All arrays in it, each as often as it is there."""
        inner = tuple(array for child in self.children for array in child.flat)
        return (self.arrays + inner) * self.count

    @cached_property
    def stacked(self) -> tuple[int, ...]:
        """The dims that stack layers, if all arrays in it have the same."""
        dims = {array.stacked for array in self.flat if not array.kind}
        return dims.pop() if len(dims) == 1 else ()


@dataclass(frozen=True)
class Segment:
    """A part of a row's bar: bytes per device of arrays that are sharded along the same axes.

    `own`: of parameters; else of what belongs to them.
    """

    axes: tuple[str, ...]
    own: bool
    bytes: int

    @property
    def text(self) -> str:
        """What it is, in words."""
        what = "parameters" if self.own else "beside them"
        where = f"sharded along {' and '.join(self.axes)}" if self.axes else "replicated"
        return f"{what}, {where}: {human_bytes(self.bytes)}"


@dataclass(frozen=True)
class TreeRow:
    """A row as it is shown: a node at a path, `level` steps from the left.

    `times`: how many identical rows it stands for. `layers`: the dims that stack layers, where the
    row around it does not state them.
    """

    node: TreeNode
    path: str
    level: int = 0
    times: int = 1
    layers: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The name, with the number of identical subtrees or of stacked layers."""
        count = f" x {self.node.count}" if self.node.count > 1 else ""
        layers = f" x {prod(self.layers)} (stacked)" if self.layers else ""
        return self.node.name + count + layers

    @cached_property
    def children(self) -> list["TreeRow"]:
        """The rows below it."""
        rows = []
        for node in self.node.children:
            layers = () if self.node.stacked else node.stacked
            path = f"{self.path}/{node.name}" if self.level else node.name
            rows.append(TreeRow(node, path, self.level + 1, self.times * node.count, layers))
        return rows

    @cached_property
    def segments(self) -> list[Segment]:
        """The parts of its bar: parameters first, and replicated arrays last."""
        sizes: dict[tuple[tuple[str, ...], bool], int] = {}
        for array in self.node.flat:
            key = array.axes, not array.kind
            sizes[key] = sizes.get(key, 0) + array.bytes * self.times // self.node.count
        order = sorted(sizes, key=lambda key: (not key[1], not key[0], key[0]))
        return [Segment(*key, sizes[key]) for key in order]

    @property
    def own_bytes(self) -> int:
        """Bytes per device of the parameters in it."""
        return sum(segment.bytes for segment in self.segments if segment.own)

    @property
    def other_bytes(self) -> int:
        """Bytes per device of what belongs to the parameters in it."""
        return sum(segment.bytes for segment in self.segments if not segment.own)

    @property
    def array(self) -> str:
        """Dtype and shape of its parameter, with how many there are; empty for inner rows."""
        if not self.node.arrays:
            return ""
        times = f"{self.times} x " if self.times > 1 else ""
        return times + self.node.arrays[0].text

    @property
    def others(self) -> list[str]:
        """Lines of what belongs to its parameter, in other shapes, dtypes or specs than its own."""
        own, *others = self.node.arrays
        return [
            f"{array.kind} {array.text} {array.spec}"
            for array in others
            if (array.text, array.spec) != (own.text, own.spec)
        ]

    @property
    def spec(self) -> str:
        """The spec of its parameter, and of what belongs to it where it is another."""
        if not self.node.arrays:
            return ""
        own, *others = self.node.arrays
        kinds: dict[str, list[str]] = {}
        for array in others:
            if array.spec != own.spec:
                kinds.setdefault(array.spec, []).append(array.kind)
        more = [f"{', '.join(dict.fromkeys(names))} {spec}" for spec, names in kinds.items()]
        return "; ".join([own.spec, *more])

    @property
    def reason(self) -> str:
        """Why its arrays are sharded so, each reason once."""
        return "; ".join(dict.fromkeys(array.reason for array in self.node.arrays))


@dataclass(frozen=True, repr=False)
class LayoutTree(View):
    """A layout as a tree; `print` it, let a notebook show it, or `save` it.

    Attributes:
        summary: the layout in one line.
        cards: (name, value, note) of the totals.
        axes: {mesh axis: size}.
        sections: {name: {path: arrays}}: a parameter with what belongs to it, or one other array.
        footer: further lines.
        reasons: whether the text says why each array is sharded so; pages always do.

    """

    summary: str
    cards: Sequence[tuple[str, str, str]]
    axes: Mapping[str, int]
    sections: Mapping[str, Mapping[str, tuple[StateArray, ...]]]
    footer: Sequence[str] = ()
    reasons: bool = False

    template: ClassVar[str] = "layout_tree.html.jinja"

    @property
    def title(self) -> str:
        """The layout in one line."""
        return self.summary

    @cached_property
    def roots(self) -> list[TreeRow]:
        """A row for each section that has arrays."""
        return [
            TreeRow(TreeNode(name, children=tuple(_grouped(_nodes(unflatten(arrays))))), name)
            for name, arrays in self.sections.items()
            if arrays
        ]

    @cached_property
    def total(self) -> int:
        """Bytes per device of all arrays; the length of the longest possible bar."""
        return max(1, sum(root.own_bytes + root.other_bytes for root in self.roots))

    @cached_property
    def kinds(self) -> str:
        """What belongs to the parameters, such as `mu, nu`."""
        arrays = (array for root in self.roots for array in root.node.flat)
        return ", ".join(dict.fromkeys(array.kind for array in arrays if array.kind))

    @cached_property
    def combinations(self) -> list[tuple[str, ...]]:
        """The mesh axes that arrays are sharded along, each combination once."""
        return sorted({array.axes for root in self.roots for array in root.node.flat})

    @cached_property
    def open_levels(self) -> int:
        """How many levels of a page are open at first: all of a small tree."""
        rows = sum(1 for _ in self.rows())
        return 100 if rows <= OPEN_ROWS else 2

    def rows(self) -> Iterator[TreeRow]:
        """Yields all rows, from top to bottom."""

        def walk(rows: Iterable[TreeRow]) -> Iterator[TreeRow]:
            for row in rows:
                yield row
                yield from walk(row.children)

        return walk(self.roots)

    def lines(self, *, whole: bool, width: int | None = None) -> tuple[list[str], str, list[str]]:
        """Formats the tree with a bar for each row, of its part of the bytes per device."""
        columns = ["per device", "bytes", "share", "spec", "array"] + ["reason"] * self.reasons
        rows = []
        for row in self.rows():
            sizes = row.own_bytes, row.other_bytes
            filled = round(BAR * sum(sizes) / self.total)
            bar = "█" * filled + "·" * (BAR - filled)
            name = shortened("  " * row.level + row.label, NAME)
            texts = [human_bytes(size) if size else "" for size in sizes]
            cells = [name, texts[0], bar, row.spec, row.array] + [row.reason] * self.reasons
            if self.kinds:
                cells.insert(2, texts[1])
            rows.append(cells)
        if self.kinds:
            columns.insert(2, self.kinds)
        table, left_out = fitted_table(
            columns,
            rows,
            right=("bytes", self.kinds),
            width=width,
            optional=["reason"] * self.reasons + ["array", "share"],
        )
        below = [*self.footer]
        if left_out:
            below.insert(0, f"in a wider window also: {'; '.join(left_out)}")
        return [self.summary], table, below


def _node(name: str, tree: Any) -> TreeNode:
    """Makes the node of nested dicts of arrays; a chain of single children is one node."""
    if isinstance(tree, tuple):
        return TreeNode(name, tree)
    children = _grouped(_nodes(tree))
    if len(children) == 1:
        (child,) = children
        return replace(child, name=f"{name}/{child.name}")
    return TreeNode(name, children=tuple(children))


def _nodes(tree: Mapping[str, Any]) -> list[TreeNode]:
    """Makes a node for each entry of nested dicts."""
    return [_node(name, inner) for name, inner in tree.items()]


def _grouped(nodes: Iterable[TreeNode]) -> list[TreeNode]:
    """Puts nodes together that are alike in all but a number in their names: `0-31`, 32 times."""
    groups: dict[Any, list[tuple[int, TreeNode]]] = {}
    for node in nodes:
        match = NUMBERED.fullmatch(node.name)
        if match is None:
            groups[node.name] = [(0, node)]
        else:
            stem, number, rest = match.groups("")
            groups.setdefault((stem, rest, replace(node, name="")), []).append((int(number), node))
    grouped = []
    for key, members in groups.items():
        numbers, alike = zip(*members, strict=True)
        # `layers/0` and `layers/1` are two layers; `ln_1` and `ln_2` rather two names
        if len(alike) > 2 or (len(alike) == 2 and not key[0]):
            name = f"{key[0]}{number_ranges(numbers)}{key[1]}"
            grouped.append(replace(alike[0], name=name, count=alike[0].count * len(alike)))
        else:
            grouped += alike
    return grouped
