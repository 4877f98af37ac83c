"""The traffic that a step must send, and its time, by the strategy's arithmetic alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_jax.contract.expected import ExpectedTraffic, expected_traffic
from fsdp_jax.planner.machines.network import Network
from fsdp_jax.step.step_plan import StepPlan
from fsdp_jax.tree import SEPARATOR

EXPOSED_GATHERS = 0.44
"""Fraction of gathers that XLA leaves exposed without prefetch.

From `scripts/bench_contract.py`, Llama 2 7B on h100:8.
"""


@dataclass(frozen=True)
class TrafficEstimate:
    """The traffic that one device sends in one step, and the time that its links are busy."""

    rows: Sequence[dict[str, Any]]  # as in `inspect --json`
    overlapped_s: float  # seconds that links are busy and compute can run beside them
    exposed_s: float  # the other seconds that they are busy

    @property
    def bytes(self) -> int:
        """Bytes sent."""
        return sum(row["bytes"] for row in self.rows)

    @property
    def seconds(self) -> float:
        """Seconds that links are busy."""
        return self.overlapped_s + self.exposed_s


def estimate_traffic(plan: StepPlan, network: Network) -> TrafficEstimate:
    """Estimates the traffic that a step must send, and for how long links are busy and exposed."""
    declared = expected_traffic(plan)
    # Prefetch gathers all parameters of a unit as one, so that they share a latency.
    groups: dict[tuple[str, ...], list[ExpectedTraffic]] = {}
    for expected in declared:
        unit = _unit(plan, expected)
        together = expected.path
        if plan.per_unit and plan.prefetch != "none" and unit is not None:
            together = unit
        group = (expected.op, expected.axis, expected.role, together)
        groups.setdefault(group, []).append(expected)
    # The time of each group, and how much of it is exposed.
    overlapped = exposed = 0.0
    for (op, axis, *_), members in groups.items():
        times = max(expected.times for expected in members)
        sent = sum(expected.bytes for expected in members) // times
        mesh_axes = "+".join(plan.layout.axes.named_by_user(axis.split("+")))
        seconds = times * network.seconds(op, sent, mesh_axes)
        share = _exposed_fraction(plan, members[0])
        overlapped += (1 - share) * seconds
        exposed += share * seconds
    # The table of the traffic, as a compiled plan has it.
    rows = [
        {
            "op": expected.op,
            "dtype": expected.dtype,
            "axis": expected.axis,
            "count": expected.times,
            "bytes": expected.bytes,
            "overlapped_bytes": 0,
            "where": expected.path,
        }
        for expected in declared
    ]
    return TrafficEstimate(rows, overlapped, exposed)


def _unit(plan: StepPlan, expected: ExpectedTraffic) -> str | None:
    """Finds the unit that traffic is of; None for that of no unit, such as of the update."""
    if expected.role == "update":
        return None
    comm, _ = plan.traced[expected.path]
    if comm.model and comm.unit is not None:  # its units are not those of the model itself
        return f"{comm.model}{SEPARATOR}{comm.unit}"
    return comm.unit


def _exposed_fraction(plan: StepPlan, expected: ExpectedTraffic) -> float:
    """Estimates the fraction of the time of this traffic that no compute can overlap."""
    # gathered before the model runs, or reduced after it
    if not plan.per_unit or _unit(plan, expected) is None:
        return 1.0
    # without prefetch XLA overlaps only some of the gathers
    if expected.role == "gather" and plan.prefetch == "none":
        return EXPOSED_GATHERS
    return 0.0
