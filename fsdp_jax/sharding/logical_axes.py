"""Logical axis names of a model, and the tables that map them to the axes of a mesh.

A table is what Flax takes as `logical_axis_rules`: ordered (name, mesh axes) pairs. T5X makes such
tables and MaxText has them in YAML; a dict is one too. They are read as Flax reads them: for each
array, an entry gives its mesh axes to the dim of that name, unless the dim has been served by an
entry before it, or another dim of the array has one of the axes. Axes that the mesh lacks are left
out of the table. All that is dropped is reported. A name on two dims of an annotation is refused,
as Flax refuses it (`Rules.lint`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import PartitionSpec

from fsdp_jax.errors import ArgumentError, did_you_mean, join_fixes
from fsdp_jax.sharding.mesh import FSDP, Entry, axes_of, entry_of, spec_of

LogicalAxes = Mapping[str, Entry] | Sequence[Sequence[Any]]
Table = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Dropped:
    """A name of an annotation or a rule that shards its dim along fewer mesh axes than it says.

    `kind`: an unknown axis is a name without an entry in the table, or without an axis of the mesh;
    where an axis is missing, others of the name are in the mesh; a repeated axis shards another dim
    of the array already.
    """

    name: str
    axes: tuple[str, ...]  # those of the table that the mesh lacks
    kind: Literal["unknown axis", "missing axis", "repeated axis"]

    def __str__(self) -> str:
        if self.kind == "repeated axis":
            return f"'{self.name}', whose mesh axis another dim has"
        if not self.axes:
            return f"'{self.name}', neither a mesh axis nor in logical_axes"
        return f"{' and '.join(map(repr, self.axes))} of '{self.name}', not in the mesh"


@dataclass(frozen=True)
class Assigned:
    """The mesh axes that the names of one array stand for, and what was dropped."""

    spec: PartitionSpec
    dropped: tuple[Dropped, ...]

    @property
    def keeps_meaning(self) -> bool:
        """Whether anything is left of the names; False where all of their axes were dropped."""
        return bool(self.spec) or not self.dropped


def read_logical_axes(logical_axes: LogicalAxes | None) -> Table:
    """Reads a dict or a table of logical axes as (name, mesh axes) pairs, in order.

    Raises ValueError for entries that are not such pairs.
    """
    what = "logical axes are (name, mesh axes) pairs, or a dict"
    where = "logical_axes"
    fix = 'such as [("embed", "fsdp"), ("mlp", None), ("heads", ("fsdp", "tensor"))]'
    if isinstance(logical_axes, Mapping):
        logical_axes = tuple(logical_axes.items())
    if isinstance(logical_axes, str) or not isinstance(logical_axes, Iterable | None):
        raise ArgumentError(what, where=where, got=repr(logical_axes), fix=fix)
    table = []
    for pair in () if logical_axes is None else logical_axes:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ArgumentError(what, where=where, got=repr(pair), fix=fix)
        name, entry = pair
        if not is_entry(entry):
            where = f"{where}['{name}']"
            raise ArgumentError(
                what, where=where, expected="a mesh axis, several, or None", got=entry, fix=fix
            )
        table.append((name, axes_of(entry)))
    return tuple(table)


def check_logical_axes(table: Table, mesh_axes: Sequence[str]) -> None:
    """Raises ValueError where a table names axes, and the mesh has none of them."""
    known = (*mesh_axes, FSDP)
    named = [(name, axis) for name, axes in table for axis in axes]
    if named and not any(axis in known for _, axis in named):
        name, axis = named[0]
        raise ArgumentError(
            f"the mesh has no axis '{axis}', nor any other that logical_axes names",
            where=f"logical_axes['{name}']",
            expected=tuple(mesh_axes),
            fix=join_fixes(
                did_you_mean(axis, known), "leave logical_axes out: arrays go by their size"
            ),
        )


def is_entry(entry: Any) -> bool:
    """Tells whether a value can be an entry of a PartitionSpec: a name, several, or None."""
    if isinstance(entry, tuple | list):
        return all(isinstance(name, str) for name in entry)
    return entry is None or isinstance(entry, str)


def expand_fsdp(
    axes: tuple[str, ...], mesh_axes: Sequence[str], fsdp: tuple[str, ...]
) -> tuple[str, ...]:
    """Replaces the name `fsdp` by the axes that it stands for, each axis once.

    `fsdp`: these axes. Where the mesh has an axis of that name, nothing is replaced.
    """
    if FSDP in mesh_axes:
        return axes
    parts = [part for axis in axes for part in (fsdp if axis == FSDP else (axis,))]
    return tuple(dict.fromkeys(parts))


def assign_axes(
    names: Iterable[Entry], table: Table, mesh_axes: Sequence[str], fsdp: tuple[str, ...]
) -> Assigned:
    """Finds the PartitionSpec that the names of an array's dims stand for, and the dropped names.

    `names` has an entry per dim: a name, several, or None. A name is one of the table, or else a
    mesh axis, or `fsdp`, which stands for the axes `fsdp` unless the mesh has one of that name.
    """
    # The table's entries, in order: each serves the first dim of its name that has none yet,
    # unless the mesh has none of its axes.
    dims = [axes_of(entry) for entry in names]
    slots = [(dim, name) for dim, entry in enumerate(dims) for name in entry]
    assigned: dict[tuple[int, str], tuple[str, ...]] = {}
    taken: set[str] = set()
    for name, entry in table:
        axes = expand_fsdp(entry, mesh_axes, fsdp)
        kept = {axis for axis in axes if axis in mesh_axes}
        slot = next((s for s in slots if s[1] == name and s not in assigned), None)
        if slot is not None and taken.isdisjoint(kept) and (kept or not axes):
            assigned[slot] = axes
            taken |= kept

    # Axes of the mesh stay; a name without an entry may be a mesh axis.
    entries: list[list[str]] = [[] for _ in dims]
    dropped = []
    first_entry = dict(reversed(table))
    for slot in slots:
        dim, name = slot
        axes = expand_fsdp(first_entry.get(name, (name,)), mesh_axes, fsdp)
        axes = assigned.get(slot, axes)
        here = [axis for axis in axes if axis in mesh_axes]
        absent = tuple(axis for axis in axes if axis not in mesh_axes)
        if slot not in assigned and not taken.union(*entries[:dim]).isdisjoint(here):
            dropped.append(Dropped(name, (), "repeated axis"))
            continue
        entries[dim] += here
        if not here and name not in first_entry:
            dropped.append(Dropped(name, (), "unknown axis"))
        elif absent:
            dropped.append(Dropped(name, absent, "missing axis" if here else "unknown axis"))
    spec = spec_of(entry_of(list(dict.fromkeys(entry))) for entry in entries)
    return Assigned(spec, tuple(dropped))
