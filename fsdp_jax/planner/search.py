"""Searches for the fastest settings of a batch on a machine: estimates all, compiles the best."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from fsdp_jax.errors import ConfigError, FitError, human_bytes
from fsdp_jax.planner.estimates import Work, analytic_plan, compiled_plan
from fsdp_jax.planner.machines.fake_devices import fake_devices
from fsdp_jax.planner.machines.hardware import Hardware
from fsdp_jax.planner.machines.topology import Topology, check_not_virtual, topologies_by_size
from fsdp_jax.planner.plan import Plan
from fsdp_jax.planner.settings import OFFLOADS, REMATS, MakeStep, StepSettings, budget_text
from fsdp_jax.prefetch.rewrite import Prefetch
from fsdp_jax.sharding.offload import NO_OFFLOAD, Offload
from fsdp_jax.sharding.strategy import STRATEGIES, get_strategy
from fsdp_jax.tables import text_table
from fsdp_jax.units.keep_gathered import KeepGathered

FINALISTS = 4  # how many candidates that fit are compiled
OFFLOADED = 6  # how many candidates that are too large are tried with offload
# Where the fastest waits for collectives for more than this share of its step, it is tried with
# units that stay gathered, until so much of the memory is in use.
WAITS, FILLED = 0.03, 0.9
MARGIN = 1.1
"""Candidates whose estimated peak is above this multiple of the usable memory are not compiled.

For stacked layers an estimate is within 10% of the compiled peak; see "how far to trust a plan" in
docs/planning.md for the exceptions.
"""

Progress = Callable[[str], None]  # receives the progress of a search, a line at a time


def _kept_text(keep: KeepGathered) -> str:
    """Formats the units that stay gathered, as the settings have them."""
    return str(keep) if isinstance(keep, int | str) else "+".join(map(str, keep)) or "none"


def _offloaded_parts(offload: Offload) -> list[str]:
    """Lists the kinds of memory in a plan's breakdown that are kept on the host."""
    return [part for part in ("params", "optimizer", "activations") if getattr(offload, part)]


@dataclass(frozen=True)
class Candidate:
    """Settings, and the plan of the step with them."""

    settings: StepSettings
    plan: Plan

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite where XLA refuses to compile."""
        return self.plan.time.step_s if self.plan.time else float("inf")

    @property
    def costs(self) -> tuple[float, int, int]:
        """Seconds, bytes at the peak and bytes sent."""
        return self.seconds, self.plan.peak_bytes, self.plan.wire_bytes

    @property
    def may_fit(self) -> bool:
        """Whether the peak fits, within the error of an estimate."""
        return self.may_fit_with(NO_OFFLOAD)

    def may_fit_with(self, offload: Offload) -> bool:
        """Tells whether it may fit if all that is offloaded is not on the device at the peak."""
        saved = sum(self.plan.breakdown.get(part, 0) for part in _offloaded_parts(offload))
        return self.plan.peak_bytes - saved <= MARGIN * self.plan.usable_bytes

    def cells(self) -> dict[str, str]:
        """Formats column -> text of the settings and of the plan's figures, for a table."""
        settings, plan = self.settings, self.plan
        speed = plan.tokens_per_s_per_device
        return {
            "strategy": settings.strategy,
            "replica": str(settings.replica),
            "remat": settings.remat,
            "prefetch": settings.prefetch,
            "kept": _kept_text(settings.keep_gathered),
            "accumulation": str(settings.accumulation),
            "offload": "+".join(_offloaded_parts(settings.offload)) or "none",
            "peak": human_bytes(plan.peak_bytes),
            "step": f"{1000 * self.seconds:.0f} ms",
            "tokens/s/device": f"{speed:.0f}" if speed else "-",
            "sent": human_bytes(plan.wire_bytes),
            "basis": plan.basis["peak_bytes"],
        }

    def dominates(self, other: "Candidate") -> bool:
        """Compares costs: whether none is higher than another's, and one is lower."""
        pairs = zip(self.costs, other.costs, strict=True)
        return self.costs != other.costs and all(mine <= theirs for mine, theirs in pairs)

    def __str__(self) -> str:
        peak = human_bytes(self.plan.peak_bytes)
        return f"{self.settings}: {peak}, {1000 * self.seconds:.0f} ms, estimated"


@dataclass(frozen=True)
class SearchResult:
    """The results of a search, fastest first. `print(result)` shows the Pareto table."""

    topology: Topology
    compiled: Sequence[Candidate]  # the finalists that fit
    unfit: Sequence[Candidate]  # those that do not fit, compiled too
    estimated: Sequence[Candidate]  # all whose estimate fits
    tried: int  # how many were estimated

    @property
    def best(self) -> Candidate:
        """The fastest that fits."""
        return self.compiled[0]

    def pareto(self) -> list[Candidate]:
        """Finds fitting candidates that no other dominates in time, memory and bytes sent."""
        compiled = {candidate.settings for candidate in (*self.compiled, *self.unfit)}
        estimated = [each for each in self.estimated if each.settings not in compiled]
        fitting = [*self.compiled, *estimated]
        return [each for each in fitting if not any(other.dominates(each) for other in fitting)]

    def __str__(self) -> str:
        compiled = [*self.compiled, *self.unfit]
        fit = f"{len(self.estimated)} estimated to fit, {len(compiled)} compiled"
        head = (
            f"{self.tried} settings on {self.topology.name}: {fit};"
            " below them, estimates that no other dominates in everything"
        )
        rows = []
        for each in [*compiled, *(each for each in self.pareto() if each not in compiled)]:
            note = "does not fit" if each in self.unfit else ""
            rows.append((*each.cells().values(), "best" if each is self.best else note))
        columns = (*self.best.cells(), "")
        table = text_table(columns, rows, right=("peak", "step", "tokens/s/device", "sent"))
        return f"{head}\n{table}\n\nbest: {self.best.settings}"


@dataclass(frozen=True)
class Search:
    """A search for the settings that run a batch of so many rows fastest."""

    make_step: MakeStep
    rows: int  # of the global batch, which stays as it is
    work: Work
    cache: Path | None  # folder of compiled programs; None does not cache
    progress: Progress

    def run(self, topology: Topology) -> SearchResult:
        """Finds the fastest settings on a machine: estimates all, compiles the fastest that fit.

        Raises ConfigError if the batch cannot be split evenly or no settings can be built, and
        FitError if nothing fits.
        """
        if self.rows < topology.size or self.rows % topology.size:
            raise ConfigError(
                "the batch cannot be split evenly",
                where="train.global_batch_size",
                expected=f"a multiple of {topology.size}, the devices of {topology.name}",
                got=self.rows,
                fix=f"use {max(1, self.rows // topology.size) * topology.size}, or another machine",
            )
        # Estimate all settings, each from a trace; compile only the fastest of those that fit.
        estimated = self._estimate_all(topology)
        estimated += self._estimate_offloaded(estimated, topology)
        fitting = [candidate for candidate in estimated if candidate.may_fit]
        fitting.sort(key=lambda candidate: candidate.seconds)
        compiled, unfit = self._compile_fastest(fitting, topology)
        for candidate in self._compile_kept(compiled, topology):
            (compiled if candidate.plan.fits else unfit).append(candidate)
        compiled.sort(key=lambda candidate: candidate.seconds)
        # Nothing fits: tell how much the leanest of all lacks.
        if not compiled:
            chip = topology.hardware.name
            least = min(estimated, key=lambda candidate: candidate.plan.peak_bytes)
            raise FitError(
                f"no setting fits {topology.name}",
                where="search",
                expected=f"{human_bytes(least.plan.usable_bytes)} of a {chip}",
                got=f"{human_bytes(least.plan.peak_bytes)} at least, with {least.settings}",
                fix=(
                    f"more devices (--topology {chip} finds how many), a smaller "
                    "train.global_batch_size or data.sequence_length, or a smaller model"
                ),
            )
        return SearchResult(topology, tuple(compiled), tuple(unfit), tuple(fitting), len(estimated))

    def smallest_topology(self, chip: Hardware, devices: int | None = None) -> Topology:
        """Finds the smallest machine of a chip that fits, by the leanest settings' estimate.

        With exactly so many `devices`, if given. Raises ConfigError if there is no such machine,
        and FitError if it fits none.
        """
        # Machines whose devices divide the batch, the smallest first.
        check_not_virtual(chip, chip.name)
        topologies = [
            topology
            for topology in topologies_by_size(chip)
            if self.rows % topology.size == 0 and devices in (None, topology.size)
        ]
        if not topologies:
            what, got = "no machine for this batch", f"train.global_batch_size {self.rows}"
            expected = f"at least one row for each {chip.name}"
            if devices:
                expected = f"a machine of {devices} {chip.name}"
            raise ConfigError(
                what,
                where="devices",
                expected=expected,
                got=got,
                fix=(
                    "a number of devices that fills every host, and a train.global_batch_size that "
                    "is a multiple of it"
                ),
            )
        # On each, estimate the leanest settings without offload.
        errors: list[str] = []
        for topology in topologies:
            strategy = "no_shard" if topology.size == 1 else "full_shard"
            # more microbatches need not use less memory: their gradients are accumulated
            for accumulation in reversed(_accumulations_to_try(topology, self.rows)):
                settings = StepSettings(strategy, 1, "full", "none", accumulation)
                candidate = self._estimate(settings, topology, errors)
                fits = candidate is not None and candidate.may_fit
                if fits:
                    break
            least = human_bytes(candidate.plan.peak_bytes) if candidate else "-"
            verdict = "fits" if fits else "too small"
            self.progress(f"{topology.name}: {verdict}, {least} with {settings}")
            if fits:
                return topology
        # No machine fits. If steps could not be built at all, report that instead.
        if errors:
            raise ConfigError(errors[0])
        raise FitError(
            "it fits no machine whose number of devices divides the batch",
            where="devices",
            got=topologies[-1].name,
            fix=f"raise train.global_batch_size above {self.rows}: more devices may divide it",
        )

    def _estimate(
        self, settings: StepSettings, topology: Topology, errors: list[str]
    ) -> Candidate | None:
        """Estimates a step; None if it cannot be built, with the reason in `errors`.

        An optimizer that a strategy cannot shard is one reason.
        """
        try:
            step, batch = self.make_step(settings, fake_devices(topology))
            return Candidate(settings, analytic_plan(step, batch, topology, self.work))
        except ValueError as error:
            errors.append(str(error))
            return None

    def _estimate_all(self, topology: Topology) -> list[Candidate]:
        """Estimates all settings that can be built, except hopeless ones."""
        estimated: list[Candidate] = []
        errors: list[str] = []
        all_settings = list(candidate_settings(topology, self.rows))
        for number, settings in enumerate(all_settings, 1):
            if any(_is_hopeless(settings, known) for known in estimated):
                continue
            candidate = self._estimate(settings, topology, errors)
            if candidate is not None:
                estimated.append(candidate)
                self.progress(f"{number} of {len(all_settings)}: {candidate}")
        if not estimated:
            raise ConfigError(errors[0])
        return estimated

    def _estimate_offloaded(
        self, estimated: Sequence[Candidate], topology: Topology
    ) -> list[Candidate]:
        """Estimates with offload what would be faster than all that fits, if it fitted.

        Offload makes no step faster, so the estimate without it bounds the time from below. The
        fastest are tried, each with as little in host memory as makes it fit.
        """
        fitting = [candidate.seconds for candidate in estimated if candidate.may_fit]
        best = min(fitting, default=float("inf"))
        too_large = [candidate for candidate in estimated if not candidate.may_fit]
        offloaded: list[Candidate] = []
        # The fastest first, until one cannot beat what fits already.
        for without in sorted(too_large, key=lambda one: one.seconds)[:OFFLOADED]:
            if without.seconds >= best:
                break
            for offload in OFFLOADS[1:]:
                if not without.may_fit_with(offload):
                    continue
                settings = replace(without.settings, offload=offload)
                candidate = self._estimate(settings, topology, [])
                if candidate is None:
                    continue
                offloaded.append(candidate)
                self.progress(str(candidate))
                if candidate.may_fit:
                    best = min(best, candidate.seconds)
                    break
        return offloaded

    def _compile_fastest(
        self, fitting: Sequence[Candidate], topology: Topology
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Compiles the fastest; returns those that fit, fastest first, and those that do not."""
        compiled: list[Candidate] = []
        unfit: list[Candidate] = []
        for settings in (candidate.settings for candidate in fitting):
            if len(compiled) == FINALISTS or len(compiled) + len(unfit) == 2 * FINALISTS:
                break
            if any(_is_hopeless(settings, known) for known in unfit):
                continue
            self.progress(f"compiling {settings}")
            step, batch = self.make_step(settings, topology.devices())
            plan = compiled_plan(step, batch, topology, self.work, self.cache)
            (compiled if plan.fits else unfit).append(Candidate(settings, plan))
        return sorted(compiled, key=lambda candidate: candidate.seconds), unfit

    def _compile_kept(
        self, compiled: Sequence[Candidate], topology: Topology
    ) -> Iterator[Candidate]:
        """Compiles the fastest with as many units gathered as its memory has room for.

        Only where its step waits for collectives: an estimate takes those of a prefetch as hidden.
        """
        fastest = min(compiled, key=lambda candidate: candidate.seconds, default=None)
        if fastest is None or not get_strategy(fastest.settings.strategy).gathers_per_unit:
            return
        plan = fastest.plan
        budget = budget_text(FILLED * plan.usable_bytes - plan.peak_bytes)
        if not budget or not plan.time or plan.time.exposed_s < WAITS * plan.time.step_s:
            return
        settings = replace(fastest.settings, keep_gathered=budget)
        self.progress(f"compiling {settings}")
        try:
            step, batch = self.make_step(settings, topology.devices())
        except ValueError:  # such as a budget in which no unit fits
            return
        yield Candidate(settings, compiled_plan(step, batch, topology, self.work, self.cache))


def candidate_settings(topology: Topology, rows: int) -> Iterator[StepSettings]:
    """Yields all settings worth an estimate; the leanest of a kind first, to rule out others."""
    hosts = topology.shape[0] if topology.hardware.platform == "cuda" else topology.slices
    for name in STRATEGIES:
        strategy = get_strategy(name)
        if (strategy.hybrid and hosts < 2) or (topology.size == 1 and name != "no_shard"):
            continue
        replicas = {1}
        if strategy.hybrid:  # as many as hosts, or a half or a quarter of them
            replicas = {hosts // k for k in (1, 2, 4) if hosts % k == 0 and hosts // k > 1}
        prefetches: tuple[Prefetch, ...] = ("none",)
        if strategy.gathers_per_unit:
            prefetches = ("none", "pre")
        accumulations = _accumulations_to_try(topology, rows)
        choices = product(sorted(replicas), accumulations, REMATS, prefetches)
        for replica, accumulation, remat, prefetch in choices:
            yield StepSettings(name, replica, remat, prefetch, accumulation)


def _accumulations_to_try(topology: Topology, rows: int) -> list[int]:
    """Lists the numbers of microbatches that divide a batch of `rows` evenly, the most first."""
    return [k for k in (8, 4, 2, 1) if rows // topology.size % k == 0]


def _is_hopeless(settings: StepSettings, known: Candidate) -> bool:
    """Tells whether settings use no less memory than a candidate that is far too large."""
    other = known.settings
    if known.may_fit or (settings.strategy, settings.replica) != (other.strategy, other.replica):
        return False
    # accumulated gradients take memory of their own
    if (settings.accumulation == 1) != (other.accumulation == 1):
        return False
    # with offload the other may fit, and a step that recomputes less would be faster
    if settings.remat != other.remat and any(map(known.may_fit_with, OFFLOADS)):
        return False
    return (
        settings.accumulation <= other.accumulation
        and REMATS.index(settings.remat) >= REMATS.index(other.remat)
        and settings.prefetch in (other.prefetch, "pre")
    )
