"""Settings of a step that do not change what it computes, and what changing them saves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_jax.planner.machines.fake_devices import fake_devices
from fsdp_jax.planner.machines.topology import Topology
from fsdp_jax.planner.make_plan import Work, analytic_plan
from fsdp_jax.planner.plan import Fix, Plan
from fsdp_jax.prefetch.rewrite import Prefetch
from fsdp_jax.sharding.strategy import get_strategy
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.tree import PyTree
from fsdp_jax.units.remat import RematName

LOSS_CHUNK = 16384
"""The vocabulary chunk size that a plan proposes."""


@dataclass(frozen=True)
class StepSettings:
    """Settings of a step with a given global batch; accumulation determines the microbatch.

    `loss_chunk` is the vocabulary chunk size of the loss; None leaves it as it is configured.
    """

    strategy: str
    replica: int = 1
    remat: RematName = "none"
    prefetch: Prefetch = "none"
    accumulation: int = 1
    loss_chunk: int | None = None

    def keys(self) -> dict[str, str]:
        """Returns the settings by their configuration keys."""
        keys = {
            "strategy": self.strategy,
            "mesh.replica": str(self.replica),
            "remat": self.remat,
            "prefetch": self.prefetch,
            "train.accumulation": str(self.accumulation),
        }
        if self.loss_chunk is not None:
            keys["train.loss_chunk"] = str(self.loss_chunk)
        return keys

    def flags(self, since: "StepSettings | None" = None) -> list[str]:
        """Returns the settings as command-line flags; only those that differ from `since`."""
        before = since.keys() if since else {}
        return [
            f"--{key} {value}" for key, value in self.keys().items() if before.get(key) != value
        ]

    def __str__(self) -> str:
        return " ".join(self.flags())


MakeStep = Callable[[StepSettings, Sequence[Any]], tuple[CompiledStep, PyTree]]
"""Returns a step with these settings on these devices, and the shapes of its global batch."""


def fixes(
    plan: Plan, settings: StepSettings, make_step: MakeStep, topology: Topology, work: Work
) -> tuple[Fix, ...]:
    """Returns changes that lower the peak of a plan, available ones first, then the lowest peak.

    Savings are differences of analytic plans; those of unavailable ones, bytes at the peak.

    Args:
        plan: of the step with `settings`.
        settings: to change.
        make_step: builds a step.
        topology: to run on.
        work: what a step computes.

    """
    devices = fake_devices(topology)

    def analytic_peak(changed: StepSettings) -> int | None:
        """Returns None for a step that cannot be built, which is then no fix."""
        try:
            step, batch = make_step(changed, devices)
            return analytic_plan(step, batch, topology, work).peak_bytes
        # such as a batch that cannot be split evenly, or an optimizer that cannot be sharded
        except ValueError:
            return None

    results = [fix for fix in _unavailable_fixes(plan) if fix.saves_bytes]
    before = analytic_peak(settings)
    _, batch = make_step(settings, devices)
    rows = next(iter(batch.values())).shape[0] if isinstance(batch, dict) else 1
    microbatch = int(rows) // (topology.size * settings.accumulation)
    for leaner, cost in _leaner_settings(settings, microbatch, work.vocab):
        peak = analytic_peak(leaner)
        if before is not None and peak is not None and peak < before:
            change = " ".join(leaner.flags(since=settings))
            results.append(Fix(change, before - peak, peak, peak <= plan.usable_bytes, cost))
    return tuple(sorted(results, key=lambda fix: (not fix.available, fix.peak_bytes)))


def _leaner_settings(
    settings: StepSettings, microbatch: int, vocab: int | None
) -> Iterator[tuple[StepSettings, str]]:
    """Yields settings that use less memory, with their cost, and then most of them combined."""
    sharded = replace(settings, strategy="full_shard", replica=1)
    accumulations = [settings.accumulation * k for k in (2, 4, 8, 16) if microbatch % k == 0]
    if settings.remat == "none":
        cost = "the forward pass of each unit runs twice: about a third more FLOPs"
        yield replace(settings, remat="full"), cost
    for accumulation in accumulations:
        cost = "gathers are sent again for each microbatch"
        yield replace(settings, accumulation=accumulation), cost
    if settings.strategy != "full_shard":
        yield sharded, "parameters are gathered in forward and in backward"
    if settings.prefetch != "none":
        yield replace(settings, prefetch="none"), "the next unit's gather is exposed"
    if vocab and vocab > LOSS_CHUNK:
        cost = "logits are recomputed in the backward pass"
        yield replace(settings, loss_chunk=LOSS_CHUNK), cost
    accumulation = accumulations[0] if accumulations else settings.accumulation
    combined = replace(sharded, remat="full", accumulation=accumulation)
    if len(combined.flags(since=settings)) > 1:
        yield combined, "those of its parts"


def _unavailable_fixes(plan: Plan) -> Iterator[Fix]:
    """Yields fixes that this release does not support; transfers in flight are not counted."""

    def fix(change: str, saves: int, costs: str) -> Fix:
        peak = plan.peak_bytes - saves
        return Fix(change, saves, peak, peak <= plan.usable_bytes, costs, available=False)

    for part, name in (("optimizer", "optimizer state"), ("params", "parameters")):
        costs = "transfers to the host and back every step"
        yield fix(f"{name} in the host's memory", plan.breakdown[part], costs)


def replica_counts(strategy: str, hosts: int) -> tuple[int, ...]:
    """Returns the replica counts to try: for hybrid strategies hosts, hosts / 2 and hosts / 4."""
    if not get_strategy(strategy).hybrid or hosts < 2:
        return (1,)
    fewer = {hosts // k for k in (2, 4) if hosts % k == 0 and hosts // k > 1}
    return tuple(sorted({hosts} | fewer))
