"""The best way to run a batch on a machine: every setting estimated, the best of them compiled."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import get_args

from fsdp_jax.errors import ConfigError, FitError, human_bytes, message
from fsdp_jax.planner.machines.fake_devices import stand_ins
from fsdp_jax.planner.machines.hardware import Hardware
from fsdp_jax.planner.machines.topology import Topology, parse_topology
from fsdp_jax.planner.plan import Plan
from fsdp_jax.planner.planner import Work, analytic_plan, compiled_plan
from fsdp_jax.planner.settings import Knobs, Make, replicas_of
from fsdp_jax.prefetch.rewrite import Prefetch
from fsdp_jax.sharding.strategy import STRATEGIES, get_strategy
from fsdp_jax.tables import text_table
from fsdp_jax.units.unit import Remat

FINALISTS = 4
"""How many are compiled."""
MARGIN = 1.1
"""An estimate of the peak is within a tenth of the compiled one: what is estimated above this is not compiled."""
COLUMNS = (
    "strategy",
    "replica",
    "remat",
    "prefetch",
    "accumulation",
    "peak",
    "step",
    "tokens/s/device",
    "sent",
    "basis",
    "",
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """Knobs, and the plan that they make."""

    knobs: Knobs
    plan: Plan

    @property
    def seconds(self) -> float:
        """Of a step; endless where XLA refuses to compile."""
        return self.plan.time.step_s if self.plan.time else float("inf")


@dataclass(frozen=True)
class Found:
    """What a search found, fastest first. `print(found)` shows the Pareto table.

    Attributes:
        compiled: the finalists that fit, compiled.
        unfit: those that do not.
        estimated: all that were estimated to fit.
        tried: how many were estimated.

    """

    topology: Topology
    compiled: Sequence[Candidate]
    unfit: Sequence[Candidate]
    estimated: Sequence[Candidate]
    tried: int

    @property
    def best(self) -> Candidate:
        """The fastest that fits."""
        return self.compiled[0]

    def pareto(self) -> list[Candidate]:
        """Of what was compiled or estimated to fit, what nothing else beats in time, memory and
        bytes sent at once.
        """
        done = {one.knobs for one in (*self.compiled, *self.unfit)}
        every = [*self.compiled, *(one for one in self.estimated if one.knobs not in done)]
        return [one for one in every if not any(_beats(other, one) for other in every)]

    def rows(self) -> list[tuple[str, ...]]:
        """All that was compiled, and of what was estimated what nothing beats."""
        left = [one for one in self.pareto() if one not in self.compiled]
        verdicts = [(one, "best" if one is self.best else "") for one in self.compiled]
        return [
            *((*_row(one), verdict) for one, verdict in verdicts),
            *((*_row(one), "does not fit") for one in self.unfit),
            *((*_row(one), "") for one in left),
        ]

    def __str__(self) -> str:
        said = f"{self.tried} settings on {self.topology.name}: {len(self.estimated)} estimated to fit, "
        said += f"{len(self.compiled) + len(self.unfit)} compiled; behind them estimates that nothing beats in all"
        return f"{said}\n{text_table(COLUMNS, self.rows(), right=COLUMNS[4:9])}\n\nbest: {self.best.knobs}"


def search(
    make: Make,
    topology: Topology,
    rows: int,
    work: Work,
    cache: Path | None,
    say: Say = lambda line: None,
) -> Found:
    """Estimates every setting and compiles the fastest of those that fit.

    Args:
        make: builds a step.
        topology: to run on.
        rows: of the global batch, which stays as it is.
        work: what a step does.
        cache: of compiled programs.
        say: told of the progress, a line at a time.

    Raises:
        ConfigError: a batch that does not divide, or no setting can be built.
        FitError: nothing fits.

    """
    every = list(candidates(topology, rows))
    if not every:
        raise ConfigError(_indivisible(topology, rows))
    tried = _estimated(every, make, topology, work, say)
    fitting = sorted((one for one in tried if _may_fit(one.plan)), key=lambda one: one.seconds)
    compiled, unfit = _finalists(fitting, make, topology, work, cache, say)
    if not compiled:
        raise FitError(_unfit(topology, tried))
    return Found(topology, tuple(compiled), tuple(unfit), tuple(fitting), len(tried))


def _estimated(
    every: Sequence[Knobs], make: Make, topology: Topology, work: Work, say: Say
) -> list[Candidate]:
    """Each setting with its estimate, but for those that cannot be built or take no less than what
    is far too large.
    """
    tried: list[Candidate] = []
    refused: dict[str, str] = {}
    for number, knobs in enumerate(every, 1):
        if any(_hopeless(knobs, known) for known in tried):
            continue
        plan = _estimate(make, knobs, topology, work, refused)
        if plan is not None:
            tried.append(Candidate(knobs, plan))
            took = f"{human_bytes(plan.peak_bytes)}, {1000 * tried[-1].seconds:.0f} ms"
            say(f"{number} of {len(every)}: {knobs}: {took}, estimated")
    if not tried:
        raise ConfigError(next(iter(refused.values())))
    return tried


def _finalists(
    fitting: Sequence[Candidate],
    make: Make,
    topology: Topology,
    work: Work,
    cache: Path | None,
    say: Say,
) -> tuple[list[Candidate], list[Candidate]]:
    """The fastest, compiled: those that fit, fastest first, and those that do not."""
    compiled: list[Candidate] = []
    unfit: list[Candidate] = []
    for one in fitting:
        if len(compiled) == FINALISTS or len(compiled) + len(unfit) == 2 * FINALISTS:
            break
        if any(_hopeless(one.knobs, known) for known in unfit):
            continue
        say(f"compiling {one.knobs}")
        plan = compiled_plan(*make(one.knobs, topology.devices()), topology, work, cache)
        (compiled if plan.fits else unfit).append(Candidate(one.knobs, plan))
    return sorted(compiled, key=lambda one: one.seconds), unfit


def candidates(topology: Topology, rows: int) -> Iterator[Knobs]:
    """Every setting worth an estimate: leaner ones first of each kind, so that what is hopeless
    shows early.
    """
    parts = rows // topology.size
    if parts < 1 or rows % topology.size:
        return
    hosts = topology.shape[0] if topology.hardware.platform == "cuda" else topology.slices
    for strategy in STRATEGIES:
        if (get_strategy(strategy).hybrid and hosts < 2) or (
            topology.size == 1 and strategy != "no_shard"
        ):
            continue
        for replica in replicas_of(strategy, hosts):
            for accumulation in (k for k in (8, 4, 2, 1) if parts % k == 0):
                ahead: tuple[Prefetch, ...] = (
                    ("none", "pre") if get_strategy(strategy).gathers_per_unit else ("none",)
                )
                for remat, prefetch in product(get_args(Remat)[::-1], ahead):
                    yield Knobs(strategy, replica, remat, prefetch, accumulation)


def _hopeless(knobs: Knobs, known: Candidate) -> bool:
    """Whether it takes no less than what is known to be far too large."""
    other = known.knobs
    if _may_fit(known.plan) or (knobs.strategy, knobs.replica) != (other.strategy, other.replica):
        return False
    if (knobs.accumulation == 1) != (
        other.accumulation == 1
    ):  # what is accumulated takes memory of its own
        return False
    no_leaner = (knobs.remat in (other.remat, "none"), knobs.prefetch in (other.prefetch, "pre"))
    return knobs.accumulation <= other.accumulation and all(no_leaner)


def _estimate(
    make: Make, knobs: Knobs, topology: Topology, work: Work, refused: dict[str, str]
) -> Plan | None:
    """None of what cannot be built, such as an optimizer that a strategy cannot shard; the reason
    goes to `refused`.
    """
    try:
        return analytic_plan(*make(knobs, stand_ins(topology)), topology, work)
    except ValueError as error:
        refused.setdefault(knobs.strategy, str(error))
        return None


def _may_fit(plan: Plan) -> bool:
    return plan.peak_bytes <= MARGIN * plan.usable_bytes


def smallest(
    make: Make,
    chip: Hardware,
    rows: int,
    work: Work,
    say: Say = lambda line: None,
    devices: int | None = None,
) -> Topology:
    """The smallest machine of these chips that a batch fits, by the leanest setting's estimate.

    Args:
        make: builds a step.
        chip: of the hardware table.
        rows: of the global batch; a machine has no more devices than that.
        work: what a step does.
        say: told of the progress.
        devices: just so many, if given.

    Raises:
        ConfigError: no such machine.
        FitError: it fits none.

    """
    if chip.memory_bytes is None:
        what, fix = (
            "virtual CPU devices have no memory or speed of their own",
            "a chip such as h100 or v5e",
        )
        raise ConfigError(message(what, where="topology", got=chip.name, fix=fix))
    sizes = [one for one in machines(chip) if one.size <= rows and rows % one.size == 0]
    sizes = [one for one in sizes if devices in (None, one.size)]
    if not sizes:
        expected = (
            f"a machine of {devices} {chip.name}"
            if devices
            else f"at least one row for each {chip.name}"
        )
        fix = "a whole number of hosts, and a train.global_batch_size that divides by the devices"
        got = f"train.global_batch_size {rows}"
        raise ConfigError(
            message(
                "no machine for this batch", where="devices", expected=expected, got=got, fix=fix
            )
        )
    refused: dict[str, str] = {}
    for topology in sizes:
        lean, plan, fits = Knobs("full_shard"), None, False
        for lean in _lean(
            topology, rows
        ):  # more microbatches need not take less: their gradients are kept
            plan = _estimate(make, lean, topology, work, refused)
            fits = plan is not None and _may_fit(plan)
            if fits:
                break
        least = human_bytes(plan.peak_bytes) if plan else "-"
        say(f"{topology.name}: {'fits' if fits else 'too small'}, {least} with {lean}")
        if fits:
            return topology
    if refused:
        raise ConfigError(next(iter(refused.values())))
    fix = f"raise train.global_batch_size above {rows}, so that it divides by more devices"
    raise FitError(
        message(
            "it fits no machine that the batch divides by",
            where="devices",
            got=sizes[-1].name,
            fix=fix,
        )
    )


def machines(chip: Hardware) -> Iterator[Topology]:
    """Machines of these chips by size: powers of two, whole hosts, and of TPUs the squarest torus."""
    if chip.platform == "cuda":
        assert chip.host_devices is not None
        for power in range(13):
            size, host = 2**power, min(8, chip.host_devices)
            yield parse_topology(
                f"{chip.name}:{size}" if size <= host else f"{chip.name}:{size // host}x{host}"
            )
        return
    shape = [2, 2, *[1] * (chip.torus_dims - 2)]
    most = chip.slice_devices or 0
    while shape[0] * shape[1] * (shape[2] if len(shape) > 2 else 1) <= most:
        yield parse_topology(f"{chip.name}:{'x'.join(map(str, shape))}")
        least = max(range(len(shape)), key=lambda dim: (-shape[dim], dim))
        shape[least] *= 2


def _lean(topology: Topology, rows: int) -> Iterator[Knobs]:
    parts = rows // topology.size
    for accumulation in (k for k in (1, 2, 4, 8) if parts % k == 0):
        yield Knobs(
            "no_shard" if topology.size == 1 else "full_shard", 1, "full", "none", accumulation
        )


def _beats(one: Candidate, other: Candidate) -> bool:
    mine = (one.seconds, one.plan.peak_bytes, one.plan.wire_bytes)
    theirs = (other.seconds, other.plan.peak_bytes, other.plan.wire_bytes)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def _row(one: Candidate) -> tuple[str, ...]:
    plan, knobs = one.plan, one.knobs
    speed = f"{plan.tokens_per_s_per_device:.0f}" if plan.tokens_per_s_per_device else "-"
    return (
        knobs.strategy,
        str(knobs.replica),
        knobs.remat,
        knobs.prefetch,
        str(knobs.accumulation),
        human_bytes(plan.peak_bytes),
        f"{1000 * one.seconds:.0f} ms",
        speed,
        human_bytes(plan.wire_bytes),
        plan.basis["peak_bytes"],
    )


def _indivisible(topology: Topology, rows: int) -> str:
    fix = f"use {max(1, rows // topology.size) * topology.size}, or another machine"
    expected = f"a multiple of {topology.size}, the devices of {topology.name}"
    return message(
        "the batch does not divide",
        where="train.global_batch_size",
        expected=expected,
        got=rows,
        fix=fix,
    )


def _unfit(topology: Topology, tried: Sequence[Candidate]) -> str:
    least = min(tried, key=lambda one: one.plan.peak_bytes)
    got = f"{human_bytes(least.plan.peak_bytes)} at least, with {least.knobs}"
    expected = f"{human_bytes(least.plan.usable_bytes)} of a {topology.hardware.name}"
    fix = "more devices, a smaller train.global_batch_size or data.sequence_length, or a smaller model"
    return message(
        f"no setting fits {topology.name}", where="search", expected=expected, got=got, fix=fix
    )
