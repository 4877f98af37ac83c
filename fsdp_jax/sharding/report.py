"""A layout for people and for programs: where every array lies, why, and what it costs on each
device.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from jax.sharding import PartitionSpec

from fsdp_jax.errors import human_bytes
from fsdp_jax.sharding.layout import Layout, Leaf, Part
from fsdp_jax.sharding.mesh import axes_of, known_spec, shape_of
from fsdp_jax.tables import text_table

PARTS: tuple[Part, ...] = ("params", "optimizer", "other")
LARGEST = 5  # replicated leaves shown first
WIDTH = 130  # columns that a row may take


def layout_json(layout: Layout) -> dict[str, Any]:
    """`inspect --json`, and `layout.json` of a run. A spec has an entry per dim: its axes, or null."""
    return {
        "mesh": shape_of(layout.mesh),
        "strategy": layout.strategy.name,
        "leaves": [
            {
                "path": leaf.path,
                "part": leaf.part,
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "spec": [list(axes_of(entry)) or None for entry in entries(leaf)],
                "rule": leaf.rule,
                "reason": leaf.reason,
                "bytes": leaf.bytes,
                "bytes_per_device": leaf.bytes_per_device,
            }
            for leaf in layout
        ],
        "totals": {
            part: {"bytes": whole, "bytes_per_device": held} for part, whole, held in totals(layout)
        },
    }


def entries(leaf: Leaf) -> list[str | tuple[str, ...] | None]:
    """The spec, as long as the shape."""
    spec = known_spec(leaf.mesh, leaf.spec)
    return [*spec, *[None] * (len(leaf.shape) - len(spec))]


def totals(layout: Layout) -> list[tuple[str, int, int]]:
    """(part, bytes replicated, bytes per device) of each part, and of all of it."""
    rows = [(str(part), layout.total(part), layout.per_device(part)) for part in PARTS]
    return [*rows, ("total", layout.total(), layout.per_device())]


def totals_table(layout: Layout) -> str:
    """What a device holds of each part against a replicated run."""
    columns = ("state", "per device", "replicated", "times less")
    rows = [
        (part, human_bytes(held), human_bytes(whole), f"{whole / held:.2f}" if held else "-")
        for part, whole, held in totals(layout)
    ]
    return text_table(columns, rows, right=columns[1:])


def layout_report(layout: Layout) -> str:
    """Totals, then the largest replicated leaves, then every leaf."""
    whole = largest_replicated(layout)
    blocks = [
        layout.summary(),
        totals_table(layout),
        "largest replicated leaves\n" + (_leaf_table(whole) if whole else "none"),
        "parameters\n" + _leaf_table(_by_bytes(layout, "params")),
        "optimizer state (leaves alike in all but their path share a row)\n"
        + _grouped(_by_bytes(layout, "optimizer")),
        "other state\n" + _leaf_table(_by_bytes(layout, "other")),
    ]
    return "\n\n".join(blocks)


def layout_html(layout: Layout) -> str:
    """The layout's table as a page of its own."""
    title = escape(layout.summary())
    return (
        f"<!doctype html>\n<html lang='en'><meta charset='utf-8'><title>{title}</title>\n"
        f"<style>body{{font-family:sans-serif}}td,th{{padding:0 1em 0 0}}</style>\n{layout._repr_html_()}\n</html>\n"
    )


def largest_replicated(layout: Layout, count: int = LARGEST) -> list[Leaf]:
    """What costs most for being whole on every device, counters aside."""
    if layout.mesh.size == 1:
        return []
    whole = [leaf for leaf in layout if leaf.replicated and leaf.shape]
    return sorted(whole, key=lambda leaf: (-leaf.bytes, leaf.path))[:count]


def _by_bytes(layout: Layout, part: str) -> list[Leaf]:
    leaves = [leaf for leaf in layout if leaf.part == part]
    return sorted(leaves, key=lambda leaf: (-leaf.bytes_per_device, leaf.path))


COLUMNS = ("path", "shape", "dtype", "spec", "per device", "rule", "reason")


def _leaf_table(leaves: Sequence[Leaf]) -> str:
    return _fitted([(leaf.path, *_cells(leaf)) for leaf in leaves])


def _cells(leaf: Leaf) -> tuple[str, ...]:
    shape = "x".join(map(str, leaf.shape)) or "scalar"
    return (
        shape,
        str(leaf.dtype),
        spec_text(known_spec(leaf.mesh, leaf.spec)),
        human_bytes(leaf.bytes_per_device),
        leaf.rule,
        leaf.reason,
    )


def _grouped(leaves: Iterable[Leaf]) -> str:
    """Moments of one parameter, and of parameters of one shape, in one row: `0/mu/a (+3)`."""
    groups: dict[tuple[str, ...], list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(_cells(leaf), []).append(leaf)
    rows = []
    for cells, members in groups.items():
        more = f" (+{len(members) - 1})" if len(members) > 1 else ""
        total = f"{human_bytes(sum(leaf.bytes_per_device for leaf in members))}"
        rows.append((members[0].path + more, *cells[:3], total, *cells[4:]))
    return _fitted(rows)


def _fitted(rows: Sequence[tuple[str, ...]]) -> str:
    """A table no wider than WIDTH: reasons give way, the JSON has them whole."""
    if not rows:
        return "none"
    widths = [max(len(row[i]) for row in (COLUMNS, *rows)) + 2 for i in range(len(COLUMNS) - 1)]
    room = max(20, WIDTH - sum(widths))
    cut = [
        (*row[:-1], row[-1] if len(row[-1]) <= room else row[-1][: room - 1] + "…") for row in rows
    ]
    return text_table(COLUMNS, cut, right=("per device",))


def spec_text(spec: PartitionSpec) -> str:
    """As in `-, data`: the axes of each dim."""
    return ", ".join("+".join(axes_of(entry)) or "-" for entry in spec) or "replicated"
