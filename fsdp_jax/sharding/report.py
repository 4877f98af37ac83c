"""A layout for people and for programs: how every array is sharded, why, and its bytes."""

from collections.abc import Iterable
from typing import Any

from fsdp_jax.errors import human_bytes
from fsdp_jax.sharding.layout import COLUMNS, PARTS, Layout, Leaf
from fsdp_jax.sharding.mesh import axes_of
from fsdp_jax.tables import shortened, text_table

LARGEST = 5  # replicated leaves shown first
WIDTH = 140  # columns of the terminal that a row may take
LEAF_COLUMNS = COLUMNS[1:]


def layout_json(layout: Layout) -> dict[str, Any]:
    """Converts a layout to JSON: `inspect --json` prints it, a run writes it to `layout.json`."""
    return {
        "mesh": layout.axes.shape,
        "strategy": layout.strategy.name,
        "leaves": [_leaf_json(leaf) for leaf in layout],
        "totals": _bytes_by_part(layout),
    }


def _leaf_json(leaf: Leaf) -> dict[str, Any]:
    """Converts a leaf to JSON; `spec` has a list of mesh axes, or None, for each dim."""
    spec = [list(axes_of(entry)) or None for entry in leaf.axes.user_spec(leaf.spec)]
    return {
        "path": leaf.path,
        "part": leaf.part,
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "spec": spec + [None] * (len(leaf.shape) - len(spec)),
        "rule": leaf.rule,
        "reason": leaf.padding + leaf.reason,
        "memory": "host" if leaf.on_host else "device",
        "bytes": leaf.bytes,
        "bytes_per_device": leaf.bytes_per_device,
    }


def _bytes_by_part(layout: Layout) -> dict[str, dict[str, int]]:
    """Counts bytes: {part: {"bytes": ..., ...}}, and of all parts as `total`.

    Bytes of the unsharded state, on each device, and in host memory for each device.
    """
    return {
        part or "total": {
            "bytes": layout.total(part),
            "bytes_per_device": layout.per_device(part),
            "host_bytes_per_device": layout.per_device(part, host=True),
        }
        for part in (*PARTS, None)
    }


def totals_table(layout: Layout) -> str:
    """Formats a table of the bytes per device of each part, against a replicated run."""
    columns = ["state", "per device", "on the host", "replicated", "ratio"]
    rows = []
    for part, counts in _bytes_by_part(layout).items():
        replicated, sharded, host = counts.values()
        stored = sharded + host
        ratio = f"{replicated / stored:.2f}" if stored else "-"
        rows.append([part, *map(human_bytes, (sharded, host, replicated)), ratio])
    if not layout.per_device(host=True):
        for row in (columns, *rows):
            del row[2]
    return text_table(columns, rows, right=columns[1:])


def layout_report(layout: Layout) -> str:
    """Formats the report of `inspect`: totals, the largest replicated leaves, then every leaf."""
    blocks = [
        layout.summary(),
        totals_table(layout),
        "largest replicated leaves\n" + _leaf_table(largest_replicated(layout)),
        "parameters\n" + _leaf_table(layout.by_bytes("params")),
        "optimizer state (leaves alike in all but their path share a row)\n"
        + _leaf_table(layout.by_bytes("optimizer"), grouped=True),
        "other state\n" + _leaf_table(layout.by_bytes("other")),
    ]
    return "\n\n".join(blocks)


def layout_html(layout: Layout) -> str:
    """Renders the layout's tree as an HTML page."""
    return layout.tree().page()


def largest_replicated(layout: Layout, count: int = LARGEST) -> list[Leaf]:
    """Finds the largest leaves that every device holds in full, scalars excepted."""
    if layout.mesh.size == 1:
        return []
    leaves = [leaf for leaf in layout if leaf.is_replicated and leaf.shape]
    return sorted(leaves, key=lambda leaf: (-leaf.bytes, leaf.path))[:count]


def _leaf_table(leaves: Iterable[Leaf], *, grouped: bool = False) -> str:
    """Formats a table no wider than WIDTH; reasons are cut, the JSON has them in full.

    `grouped`: leaves alike in all but their path share a row, `0/mu/a (+3)`, and add up.
    """
    groups: dict[tuple[str, ...], list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.cells()[1:] if grouped else (leaf.path,), []).append(leaf)
    if not groups:
        return "none"
    rows: list[tuple[str, ...]] = [LEAF_COLUMNS]
    for group in groups.values():
        path, *left, _, rule, reason = group[0].cells()
        more = f" (+{len(group) - 1})" if len(group) > 1 else ""
        total = human_bytes(sum(leaf.bytes_per_device for leaf in group))
        rows.append((path + more, *left, total, rule, reason))
    *widths, _ = (max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    width = max(20, WIDTH - sum(widths))
    fitted = [(*cells, shortened(reason, width)) for *cells, reason in rows[1:]]
    return text_table(LEAF_COLUMNS, fitted, right=("per device",))
