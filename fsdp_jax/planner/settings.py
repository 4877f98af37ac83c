"""What can be turned about a step without changing what it computes, and what turning it would
save.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_jax.planner.figures import Fix
from fsdp_jax.planner.machines.fake_devices import stand_ins
from fsdp_jax.planner.machines.topology import Topology
from fsdp_jax.planner.plan import Plan
from fsdp_jax.planner.planner import Work, analytic_plan, logits_bytes
from fsdp_jax.prefetch.rewrite import Prefetch
from fsdp_jax.sharding.strategy import get_strategy
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.tree import PyTree
from fsdp_jax.units.unit import Remat


@dataclass(frozen=True)
class Knobs:
    """Of a step over a batch of a given number of rows; the microbatch is what accumulation leaves
    of it.
    """

    strategy: str
    replica: int = 1
    remat: Remat = "none"
    prefetch: Prefetch = "none"
    accumulation: int = 1

    def keys(self) -> dict[str, str]:
        """As configuration keys."""
        return {
            "strategy": self.strategy,
            "mesh.replica": str(self.replica),
            "remat": self.remat,
            "prefetch": self.prefetch,
            "train.accumulation": str(self.accumulation),
        }

    def __str__(self) -> str:
        return " ".join(f"--{key} {value}" for key, value in self.keys().items())


Make = Callable[[Knobs, Sequence[Any]], tuple[CompiledStep, PyTree]]
"""A step with these knobs on these devices, which need not be there, and the shapes of its global batch."""


def fixes(plan: Plan, knobs: Knobs, make: Make, topology: Topology, work: Work) -> tuple[Fix, ...]:
    """What would take less memory, most first: by analytic plans with and without it, or arithmetic
    on what is held.
    """
    before = _peak(knobs, make, topology, work)
    found = [
        _held_less(plan, change, size, cost)
        for change, size, cost in _elsewhere(plan, work)
        if size
    ]
    for changed, cost in _leaner(knobs, _microbatch(knobs, make, topology)):
        peak = _peak(changed, make, topology, work)
        if before is not None and peak is not None and peak < before:
            found.append(
                Fix(_words(knobs, changed), before - peak, peak, peak <= plan.usable_bytes, cost)
            )
    return tuple(sorted(found, key=lambda fix: (not fix.available, fix.peak_bytes)))


def _peak(knobs: Knobs, make: Make, topology: Topology, work: Work) -> int | None:
    """The analytic peak; None of what cannot be built, which is then no fix."""
    try:
        return analytic_plan(*make(knobs, stand_ins(topology)), topology, work).peak_bytes
    except ValueError:  # a batch that does not divide, an optimizer that a strategy cannot shard
        return None


def _microbatch(knobs: Knobs, make: Make, topology: Topology) -> int:
    """Rows of a device at once."""
    _, batch = make(knobs, stand_ins(topology))
    rows = next(iter(batch.values())).shape[0] if isinstance(batch, dict) else 1
    return int(rows) // (topology.size * knobs.accumulation)


def _leaner(knobs: Knobs, microbatch: int) -> Iterator[tuple[Knobs, str]]:
    """Knobs that take less, each with its price, and the most of them together."""
    sharded = replace(knobs, strategy="full_shard", replica=1)
    cut = [
        replace(knobs, accumulation=knobs.accumulation * k)
        for k in (2, 4, 8, 16)
        if microbatch % k == 0
    ]
    if knobs.remat == "none":
        yield (
            replace(knobs, remat="full"),
            "each unit's forward runs twice: about a third more FLOPs",
        )
    for each in cut:
        yield each, "gathers are sent again for each microbatch"
    if knobs.strategy != "full_shard":
        yield sharded, "parameters are gathered in forward and in backward"
    if knobs.prefetch != "none":
        yield replace(knobs, prefetch="none"), "the next unit's gather is waited for"
    together = replace(
        sharded, remat="full", accumulation=cut[0].accumulation if cut else knobs.accumulation
    )
    if len(_words(knobs, together).split("--")) > 2:
        yield together, "all of these"


def _words(old: Knobs, new: Knobs) -> str:
    changed = {key: value for key, value in new.keys().items() if old.keys()[key] != value}
    return " ".join(f"--{key} {value}" for key, value in changed.items())


def _elsewhere(plan: Plan, work: Work) -> Iterator[tuple[str, int, str]]:
    """What this release cannot do: (change, bytes that it takes away, cost); what is on its way is
    not in them.
    """
    for part, name in (("optimizer", "optimizer state"), ("params", "parameters")):
        yield (
            f"{name} in the host's memory",
            plan.breakdown[part],
            "cross to the host and back every step",
        )
    if work.vocab:
        logits = logits_bytes(plan.buffers, work.vocab)
        yield "loss in chunks of tokens", logits, "logits are computed again in the backward"


def _held_less(plan: Plan, change: str, size: int, cost: str) -> Fix:
    left = plan.peak_bytes - size
    return Fix(change, size, left, left <= plan.usable_bytes, cost, available=False)


def replicas_of(strategy: str, hosts: int) -> tuple[int, ...]:
    """Replicas worth trying: one a host, and fewer, of strategies that make them."""
    if not get_strategy(strategy).hybrid or hosts < 2:
        return (1,)
    return tuple(
        sorted({hosts, *(hosts // k for k in (2, 4) if hosts % k == 0 and hosts // k > 1)})
    )
