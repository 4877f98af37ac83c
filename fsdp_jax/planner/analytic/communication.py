"""What a step must send, and how long that takes, by the strategy's arithmetic alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fsdp_jax.contract.expected import Expected, expected_of
from fsdp_jax.planner.machines.network import Network
from fsdp_jax.sharding.mesh import batch_axes, data_axes
from fsdp_jax.step.train_step import StepPlan

LEFT = 0.44
"""Of gathers without prefetch, what XLA leaves exposed: `scripts/bench_contract.py`, Llama 2 7B on h100:8."""


@dataclass(frozen=True)
class Traffic:
    """Of one step, on one device.

    Attributes:
        rows: as of `inspect --json`.
        bytes: sent.
        seconds: that links are busy.
        hidden_s: of them, what can run beside compute.
        exposed_s: the rest.

    """

    rows: Sequence[dict[str, Any]]
    bytes: int
    seconds: float
    hidden_s: float
    exposed_s: float


def expected_traffic(plan: StepPlan, network: Network) -> Traffic:
    """What is declared, as it is scheduled: a unit's parameters together where they are prefetched,
    else one by one.
    """
    groups: dict[tuple[str, ...], list[Expected]] = {}
    for one in expected_of(plan):
        unit = str(plan.comms[one.path].unit) if _ahead(plan, one) else one.path
        groups.setdefault((one.op, one.axis, one.role, unit), []).append(one)
    hidden = exposed = 0.0
    for (op, axis, *_), members in groups.items():
        times = max(_times(plan, one) for one in members)
        seconds = times * network.seconds(
            op, sum(one.bytes for one in members) // times, _axes(plan, axis)
        )
        share = _share_exposed(plan, members[0])
        hidden, exposed = hidden + (1 - share) * seconds, exposed + share * seconds
    sent = sum(one.bytes for one in expected_of(plan))
    rows = [
        {
            "op": one.op,
            "dtype": one.dtype,
            "axis": one.axis,
            "count": _times(plan, one),
            "bytes": one.bytes,
            "overlapped_bytes": 0,
            "where": one.path,
        }
        for one in expected_of(plan)
    ]
    return Traffic(rows, sent, hidden + exposed, hidden, exposed)


def _ahead(plan: StepPlan, one: Expected) -> bool:
    """Whether prefetch moves it."""
    return plan.per_unit and plan.prefetch != "none" and plan.comms[one.path].unit is not None


def _times(plan: StepPlan, one: Expected) -> int:
    """How often a step sends it: each layer of a stack, each microbatch, forward and backward."""
    leaf = plan.layout.by_path[one.path]
    layers = prod(leaf.shape[: leaf.stacked]) if plan.per_unit else 1
    if one.role == "reduce":
        return layers * (1 if plan.deferred else plan.accumulation)
    again = 2 if plan.per_unit and plan.comms[one.path].unit is not None else 1
    return layers * again * (plan.accumulation if plan.per_unit else 1)


def _share_exposed(plan: StepPlan, one: Expected) -> float:
    """Of its time, what nothing can run beside: what is gathered before the model is entered or as
    it is left.
    """
    if not plan.per_unit or plan.comms[one.path].unit is None:
        return 1.0
    return LEFT if one.role == "gather" and plan.prefetch == "none" else 0.0


def _axes(plan: StepPlan, axis: str) -> str:
    """Mesh axes behind the user's words."""
    mesh = plan.layout.mesh
    known = [name for name in axis.split("+") if name in mesh.axis_names]
    if "data" in axis.split("+") and "data" not in mesh.axis_names:
        known += data_axes(mesh)
    return "+".join(name for name in batch_axes(mesh) if name in known)
