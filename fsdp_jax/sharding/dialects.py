"""Rules in the dialects of other trainers: a table of what matched what, and the way back.

The way in needs no translation. `partition_specs` takes tables of paths (T5X, EasyLM, the examples
of Flax and transformers) as `rules`, and tables of logical names (Flax, T5X, MaxText) as
`logical_axes`; it reads the names that `nn.with_partitioning` and `nnx.with_partitioning` gave.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from fsdp_jax.sharding.findings import Finding, dropped_finding
from fsdp_jax.sharding.logical_axes import Dropped, LogicalAxes, expand_fsdp
from fsdp_jax.sharding.mesh import Entry, entry_of, spec_axes
from fsdp_jax.sharding.param_leaves import ParamLeaf, read_leaves
from fsdp_jax.sharding.path_rules import Pattern, Rule, Spec
from fsdp_jax.sharding.rules import (
    HEURISTIC,
    MIN_SIZE,
    Rules,
    make_rules,
)
from fsdp_jax.tables import html_table, shortened, text_table
from fsdp_jax.tree import PyTree, flatten

WIDTH = 40  # of a reason in the text; `rows` and the HTML have it in full
COLUMNS = ("path", "shape", "names", "rule", "spec", "dropped", "reason")


@dataclass(frozen=True)
class MatchTable:
    """What matched what: a row for every parameter. `print(table)` shows it.

    `notes` tell of what does no harm, and may be a mistake: names that no parameter has, names and
    axes that shard nothing.
    """

    rows: tuple[tuple[str, ...], ...]  # as COLUMNS; `names` are those of the annotation
    findings: tuple[Finding, ...]  # what `lint` finds, for which `partition_specs` raises
    notes: tuple[Finding, ...]

    def summary(self) -> str:
        """Counts, in a line, the parameters that follow a rule, an annotation, or their size."""
        rule = COLUMNS.index("rule")
        counts = Counter(
            row[rule] if row[rule] in (HEURISTIC, "annotation") else "rules" for row in self.rows
        )
        parts = [f"{counts[name]} by {name}" for name in ("rules", "annotation", HEURISTIC)]
        return f"{len(self.rows)} parameters: {', '.join(parts)}; findings: {len(self.findings)}"

    def __str__(self) -> str:
        lines = [str(finding) for finding in (*self.findings, *self.notes)]
        rows = [(*cells, shortened(reason, WIDTH)) for *cells, reason in self.rows]
        return "\n".join([self.summary(), text_table(COLUMNS, rows), *lines])

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{escape(str(one))}</li>" for one in (*self.findings, *self.notes))
        return html_table(COLUMNS, self.rows, caption=self.summary()) + f"<ul>{items}</ul>"


def match_table(
    params: PyTree,
    rules: Sequence[Rule] | Mapping[Pattern, Spec],
    mesh: Mesh | AbstractMesh,
    *,
    logical_axes: LogicalAxes | None = None,
    min_size: int = MIN_SIZE,
    strict: bool = False,
    axes: str | tuple[str, ...] | None = None,
) -> MatchTable:
    """Lists each parameter's spec by `partition_specs`, and why; also where that would raise.

    Raises ValueError for malformed rules, or axes to shard along that the mesh lacks.
    """
    chosen, mesh = make_rules(
        mesh, rules, logical_axes=logical_axes, min_size=min_size, strict=strict, axes=axes
    )
    leaves = read_leaves(params)
    findings = chosen.lint(leaves, mesh)
    refused = {finding.where: finding for finding in findings}
    rows = []
    for path, leaf in leaves.items():
        names = "-" if leaf.names is None else str(leaf.names)
        row = (path, str(leaf.shape).replace(" ", ""), names)
        if path in refused:
            rows.append((*row, "refused", "-", "-", str(refused[path])))
            continue
        place = chosen.place_leaf(path, leaf, mesh)
        spec = str(place.spec).replace("PartitionSpec", "P")
        rows.append((*row, place.rule, spec, ", ".join(place.dropped) or "-", place.reason))
    return MatchTable(tuple(rows), tuple(findings), _notes_on_dropped(chosen, leaves, mesh))


def _notes_on_dropped(
    rules: Rules, leaves: Mapping[str, ParamLeaf], mesh: Mesh
) -> tuple[Finding, ...]:
    """Makes the notes of a table: names that no parameter has, and one for each `Dropped`.

    Parameters that drop the same share a note.
    """
    specs = [leaf.names or () for leaf in leaves.values()] + [spec for _, spec in rules.pairs]
    used = {name for spec in specs for name in spec_axes(spec)}
    notes = []
    unused = sorted({name for name, _ in rules.table} - used)
    if unused:
        text = f"no dim of a parameter has these names: {', '.join(unused)}"
        notes.append(Finding("unused names", "logical_axes", text))
    by_drop: dict[Dropped, list[str]] = {}
    for path, leaf in leaves.items():
        for drop in rules.assigned_axes(path, leaf, mesh).dropped:
            by_drop.setdefault(drop, []).append(path)
    for drop, paths in by_drop.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        notes.append(dropped_finding(drop, paths[0] + more, dict(rules.table)))
    return tuple(notes)


def to_logical_axis_rules(
    logical_axes: LogicalAxes, mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...] | None = None
) -> list[tuple[str, Entry]]:
    """Converts logical axes to Flax's `logical_axis_rules`, (name, mesh axes) pairs of this mesh.

    Args:
        logical_axes: a dict or a table.
        mesh: axes that it lacks are left out, and so are pairs of which no axis is left.
        axes: what `fsdp` stands for, as in `partition_specs`.
    """
    rules, mesh = make_rules(mesh, logical_axes=logical_axes, axes=axes)
    table = []
    for name, entry in rules.table:
        parts = expand_fsdp(entry, mesh.axis_names, rules.axes)
        kept = [axis for axis in parts if axis in mesh.axis_names]
        if kept or not parts:
            table.append((name, entry_of(kept)))
    return table


def to_path_rules(specs: PyTree) -> list[tuple[str, PartitionSpec]]:
    """Converts a tree of specs to a list of (regular expression, spec), one for each path.

    It is for trainers that take such tables; `partition_specs` makes the same specs of it.
    """
    by_path = flatten(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    return [(f"^{re.escape(path)}$", spec) for path, spec in by_path.items()]
