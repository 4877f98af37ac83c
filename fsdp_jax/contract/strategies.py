"""Strategies side by side: what each keeps and reduces on a device, and what a step sends."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

import jax.numpy as jnp

from fsdp_jax.contract.expected import expected_traffic
from fsdp_jax.errors import human_bytes
from fsdp_jax.sharding.layout import COPIES, Layout
from fsdp_jax.sharding.mesh import shards_of, spec_axes
from fsdp_jax.step.step_plan import StepPlan
from fsdp_jax.tree import flatten
from fsdp_jax.views.bars import BarRow, Bars, Kind

PARAMS, OPTIMIZER, GRADIENTS, OTHER = "params", "optimizer", "gradients", "copies, other state"
KEPT = "kept gathered"
# The colours of the same kinds of memory in plans.
SYMBOLS = {"P": PARAMS, "O": OPTIMIZER, "G": GRADIENTS, "C": "copies to compute with"}
KINDS = (
    *(Kind(PARAMS, 0), Kind(OPTIMIZER, 1), Kind(GRADIENTS, 3), Kind(KEPT, 4)),
    Kind(OTHER, None),
)


def strategy_bars(plans: Sequence[StepPlan]) -> Bars:
    """Makes a bar for each step's plan, with a mark at the formula of its strategy.

    All are of one model and mesh. Gradients are those that the optimizer reads, in the dtypes of
    the parameters. Bytes in host memory are left out.
    """
    layout = plans[0].layout
    whole = {
        "P": layout.total("params"),
        "O": layout.total("optimizer"),
        "G": _gradient_bytes(layout)[0],
    }
    rows = []
    for plan in plans:
        shards = _shards_by_formula(plan.layout)
        if "C" in shards:
            whole["C"] = _copied_bytes(plan.layout)
        sent = sum(each.bytes for each in expected_traffic(plan))
        row = BarRow(
            plan.layout.strategy.name,
            _bytes_by_kind(plan),
            sum(whole[symbol] // count for symbol, count in shards.items()),
            (human_bytes(sent), _formula(shards)),
        )
        rows.append(row)
    mesh = " x ".join(f"{axis}={size}" for axis, size in layout.axes.shape.items())
    symbols = [f"{each} = {human_bytes(size)} of {SYMBOLS[each]}" for each, size in whole.items()]
    within = "gradients are there within a step alone"
    if any(row.parts[KEPT] for row in rows):
        within = "gradients, and units that stay gathered, are there within a step alone"
    return Bars(
        summary=f"strategies on {mesh}: bytes of a device",
        kinds=KINDS,
        bars=rows,
        size="per device",
        expected="by formula",
        columns=("sent per step", "formula"),
        notes=[
            f"{', '.join(symbols)}; {within}",
            "above the formula: what is replicated, padded or kept; sent: as the strategy declares",
        ],
        axes=layout.axes.shape,
    )


def _bytes_by_kind(plan: StepPlan) -> dict[str, int]:
    """Counts the bytes in a device's memory by kind."""
    layout = plan.layout
    return {
        PARAMS: layout.per_device("params"),
        OPTIMIZER: layout.per_device("optimizer"),
        GRADIENTS: _gradient_bytes(layout)[1],
        KEPT: sum(comm.kept_bytes for comm in plan.comms.values()),
        OTHER: layout.per_device("other"),
    }


def _gradient_bytes(layout: Layout) -> tuple[int, int]:
    """Counts the bytes of all gradients: (unsharded, on a device once they are reduced)."""
    total: Counter[str] = Counter()
    for leaf in layout.by_path.values():
        if leaf.trainable and jnp.issubdtype(leaf.dtype, jnp.floating):
            shards = shards_of(layout.mesh, spec_axes(leaf.grad_spec))
            total["whole"] += leaf.bytes
            total["device"] += prod(leaf.grad_shape) * leaf.dtype.itemsize // shards
    return total["whole"], total["device"]


def _copied_bytes(layout: Layout) -> int:
    """Counts the bytes of the copies that a step computes with, unsharded."""
    return sum(leaf.bytes for leaf in flatten(layout.other.get(COPIES, {})).values())


def _shards_by_formula(layout: Layout) -> dict[str, int]:
    """Counts the shards of each of `SYMBOLS` that a device has a part of, if all are sharded."""
    strategy, axes = layout.strategy, layout.axes
    n = shards_of(axes.mesh, strategy.shard_axes(axes))
    has_copies = _copied_bytes(layout) > 0
    shards = dict.fromkeys("POG", 1)
    if strategy.shards_params or has_copies:
        shards["P"] = n
    if strategy.shards_optimizer:
        shards |= {"O": n, "G": n}
    if strategy.updates_over_replicas:
        shards["O"] = axes.batch_shards
    if has_copies:
        shards["C"] = n
        if strategy.gathers_updates:
            shards["C"] = 1
    return shards


def _formula(shards: Mapping[str, int]) -> str:
    """Formats what a device has: `P + (O + G)/8`."""
    terms: dict[int, list[str]] = {}
    for symbol, count in shards.items():
        terms.setdefault(count, []).append(symbol)
    parts = []
    for count, symbols in terms.items():
        term = " + ".join(symbols)
        if count > 1 and len(symbols) > 1:
            term = f"({term})"
        parts.append(term + f"/{count}" * (count > 1))
    return " + ".join(parts)
