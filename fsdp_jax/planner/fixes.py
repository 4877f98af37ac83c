"""Changes of a step's settings that lower its peak memory, with their savings and costs.

A plan lists many, estimated. Where a run has failed for want of memory few are advised, each
compiled: an estimate may be wrong by the tenth that is missing.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import jax

from fsdp_jax.errors import human_bytes
from fsdp_jax.planner.estimates import Work, analytic_plan, compiled_plan
from fsdp_jax.planner.machines.fake_devices import fake_devices
from fsdp_jax.planner.machines.topology import Topology, topologies_by_size
from fsdp_jax.planner.plan import Fix, Plan, Speedup
from fsdp_jax.planner.remaking import Remaking
from fsdp_jax.planner.settings import OFFLOADS, REMATS, MakeStep, StepSettings, budget_text
from fsdp_jax.sharding.offload import NO_OFFLOAD
from fsdp_jax.sharding.strategy import get_strategy

LOSS_CHUNK = 16384  # the vocabulary chunk size that a plan proposes
# Faster settings are proposed where so much of the memory is free, and where they take less than
# this share of the time; so many are estimated.
SPARE, GAIN, CHANGES = 0.2, 0.97, 3
KEPT = 0.85  # of the memory may be in use where units stay gathered
OFFLOAD_COSTS = "transfers to the host and back every step"
# Of changes that are compiled: so many are advised, the second if the first took less time than
# this, and so many are compiled, of estimates up to this multiple of the memory.
ADVISED, ADVICE_SECONDS, MOST_COMPILED, MARGIN = 2, 60.0, 12, 1.2


@dataclass(frozen=True)
class Advice:
    """A change with which a step was compiled, and fits.

    Attributes:
        change: what to set, as on the command line or in a call.
        peak_bytes: of the compiled step.
        slower: seconds of a step over those without the change, less 1; None if unknown.
        costs: the price of the change.
        settings: with the change; None where these stay.

    """

    change: str
    peak_bytes: int
    slower: float | None
    costs: str
    settings: StepSettings | None = None


@dataclass(frozen=True)
class _Change:
    """Settings on a machine, and what an analytic plan says of them; None without one."""

    settings: StepSettings
    costs: str
    topology: Topology
    peak_bytes: int | None
    step_s: float | None


def propose_fixes(
    plan: Plan, settings: StepSettings, make_step: MakeStep, topology: Topology, work: Work
) -> tuple[Fix, ...]:
    """Finds changes that lower the peak of a plan, the one of the lowest peak first.

    Savings are differences of analytic plans; where there is none, of bytes at the peak.
    """
    try:
        step, batch = make_step(settings, fake_devices(topology))
        before = analytic_plan(step, batch, topology, work)
    except ValueError:  # such as a step of sharding annotations
        return tuple(_offload_fixes_by_arithmetic(plan))
    results: list[Fix] = []

    def try_change(change: str, changed: StepSettings, costs: str, where: Topology) -> None:
        """Adds a change to `results` if a step can be made with it and its peak is lower."""
        try:
            after = analytic_plan(*make_step(changed, fake_devices(where)), where, work)
        # such as a batch that cannot be split evenly, or an optimizer that cannot be sharded
        except ValueError:
            return
        peak, saves = after.peak_bytes, before.peak_bytes - after.peak_bytes
        if saves > 0:
            seconds = after.time.step_s if after.time else None
            fits = peak <= plan.usable_bytes
            results.append(Fix(change, saves, peak, fits, costs, step_s=seconds))

    # Try each leaner setting alone, on the same machine.
    rows = jax.tree.leaves(batch)[0].shape[0]
    microbatch = rows // (topology.size * settings.accumulation)
    prefetches = step.plan.prefetch != "none"
    for leaner, costs in _leaner_settings(settings, microbatch, work.vocab, prefetches=prefetches):
        try_change(" ".join(leaner.flags(since=settings)), leaner, costs, topology)
    # a larger machine shares out the state, and the batch
    larger = (one for one in topologies_by_size(topology.hardware) if one.size >= 2 * topology.size)
    machine = next((one for one in larger if rows % one.size == 0), None)
    if machine is not None:
        change = f"more devices: --topology {machine.name}"
        try_change(change, settings, f"{machine.size} devices", machine)
    return tuple(sorted(results, key=lambda fix: fix.peak_bytes))


def propose_faster(
    plan: Plan, settings: StepSettings, make_step: MakeStep, topology: Topology, work: Work
) -> tuple[Speedup, ...]:
    """Finds changes that use free memory to shorten the step, the fastest first.

    None where less than `SPARE` of the memory is free. The likeliest `CHANGES` are estimated, a
    second each. Times and peaks are the plan's own, changed as the analytic ones change; a change
    must leave a tenth of the memory free.
    """
    if plan.time is None or plan.usable_bytes - plan.peak_bytes < SPARE * plan.usable_bytes:
        return ()
    found: list[Speedup] = []
    changes = list(_roomier_settings(settings, plan))[:CHANGES]
    before: Plan | None = None
    if plan.basis["peak_bytes"] == "analytic":
        before = plan
    else:
        changes.insert(0, settings)  # what the changes are compared with
    for changed in changes:
        try:
            after = analytic_plan(*make_step(changed, fake_devices(topology)), topology, work)
        except ValueError:  # such as a step of sharding annotations
            if before is None:
                return ()
            continue
        if before is None:  # the plan's own settings
            before = after
        if before.time is None or after.time is None:
            return ()
        step_s = plan.time.step_s * after.time.step_s / before.time.step_s
        if changed.keep_gathered != settings.keep_gathered and before is not plan:
            step_s = _with_fewer_gathers(plan, before, after)
        peak = plan.peak_bytes + after.peak_bytes - before.peak_bytes
        if step_s < GAIN * plan.time.step_s and peak < 0.9 * plan.usable_bytes:
            found.append(Speedup(" ".join(changed.flags(since=settings)), step_s, peak))
    return tuple(sorted(found, key=lambda one: one.step_s))


def _with_fewer_gathers(plan: Plan, before: Plan, after: Plan) -> float:
    """Estimates the seconds of a compiled plan's step with fewer gathers.

    Estimates take what is prefetched as hidden, but the plan knows how long its step waits: by the
    seconds that the links are busy with the gathers left out, it waits less. `before`, `after`: the
    estimates.
    """
    assert plan.time is not None
    assert before.time is not None
    assert after.time is not None
    left_out = 1 - after.wire_bytes / before.wire_bytes
    saved = min(plan.time.exposed_s, left_out * plan.time.collective_s)
    other = [time.step_s - time.exposed_s for time in (before.time, after.time)]
    return plan.time.step_s - saved + other[1] - other[0]


def _roomier_settings(settings: StepSettings, plan: Plan) -> Iterator[StepSettings]:
    """Yields settings of more memory and less work or waiting, the likeliest gain first."""
    per_unit = get_strategy(settings.strategy).gathers_per_unit
    # As many units stay gathered as fit: first where the step waits for gathers.
    budget = budget_text(KEPT * plan.usable_bytes - plan.peak_bytes)
    waits = plan.time is not None and plan.time.exposed_s > (1 - GAIN) * plan.time.step_s
    if per_unit and waits and budget and not settings.keep_gathered:
        yield replace(settings, keep_gathered=budget)
    if settings.offload != NO_OFFLOAD:
        yield replace(settings, offload=NO_OFFLOAD)
    if settings.remat in REMATS:
        for remat in REMATS[REMATS.index(settings.remat) + 1 :]:
            yield replace(settings, remat=remat)
    if settings.prefetch == "none" and per_unit:
        yield replace(settings, prefetch="pre")
    if settings.accumulation % 2 == 0:
        yield replace(settings, accumulation=settings.accumulation // 2)
    if settings.strategy == "full_shard":
        yield replace(settings, strategy="shard_grad_op")


def describe_best_fix(fixes: Sequence[Fix], free_bytes: int) -> str:
    """Describes the fix that frees so many bytes with the shortest step.

    Where none frees as much, it is the one that frees most; "" without fixes.
    """
    if not fixes:
        return ""
    most = min(fixes, key=lambda fix: fix.peak_bytes)
    enough = [fix for fix in fixes if fix.saves_bytes >= free_bytes] or [most]
    best = min(enough, key=lambda fix: (fix.step_s or 0.0, fix.peak_bytes))
    return f"{best.change}, which frees {human_bytes(best.saves_bytes)}"


def compiled_fixes(
    plan: Plan,
    remaking: Remaking,
    topology: Topology,
    *,
    limit: int,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Advice, ...]:
    """Finds the changes of least cost with which a step fits, and compiles each.

    Changes are tried in the order of their estimated step time; one that does not fit rules out
    those whose estimated peak is no lower. More devices come last. None where nothing fits.

    Args:
        plan: of the step as it is, compiled.
        remaking: how it is made with other settings.
        topology: its machine.
        limit: bytes that a device has.
        say: receives the progress, a line at a time.

    """
    settings, make_step, work = remaking.settings, remaking.make_step, remaking.work
    before: Plan | None = None
    with suppress(ValueError):  # such as a step of sharding annotations
        step, batch = make_step(settings, fake_devices(topology))
        before = analytic_plan(step, batch, topology, work)
    found: list[Advice] = []
    too_large = float("inf")  # estimated bytes of what was compiled and does not fit
    started, compiled = time.perf_counter(), 0
    for change in _changes_by_cost(settings, make_step, topology, work, limit):
        is_late = time.perf_counter() - started > ADVICE_SECONDS
        if compiled >= MOST_COMPILED or len(found) >= ADVISED or (found and is_late):
            break
        if change.peak_bytes is not None and change.peak_bytes >= too_large:
            continue
        text = remaking.describe(change.settings, settings)
        if change.topology is not topology:
            if found:
                break
            machine = f"{change.topology.size} devices ({change.topology.name})"
            text = " and ".join(filter(None, (machine, text)))
        say(f"compiling with {text}")
        compiled += 1
        try:
            step, batch = make_step(change.settings, change.topology.devices())
            after = compiled_plan(step, batch, change.topology, work, None)
        # such as a batch that cannot be split, or a program that the compiler fails on
        except (ValueError, jax.errors.JaxRuntimeError):
            continue
        if after.peak_bytes <= limit:
            slower = _relative_time(plan, before, change, after)
            found.append(Advice(text, after.peak_bytes, slower, change.costs, change.settings))
        elif change.peak_bytes is not None:
            too_large = min(too_large, change.peak_bytes)
    return tuple(found)


def _relative_time(plan: Plan, before: Plan | None, change: _Change, after: Plan) -> float | None:
    """Computes how much longer a step takes with a change, of two plans of one basis."""
    if plan.time is not None and after.time is not None and plan.basis["time"] == "compiled":
        return after.time.step_s / plan.time.step_s - 1
    if before is None or before.time is None or change.step_s is None:
        return None
    return change.step_s / before.time.step_s - 1


def _changes_by_cost(
    settings: StepSettings, make_step: MakeStep, topology: Topology, work: Work, limit: int
) -> Iterator[_Change]:
    """Yields changes that may fit, those of the shortest step first, and last more devices."""

    def estimated(changed: StepSettings, costs: str, where: Topology) -> _Change | None:
        """Estimates a change; None if a step cannot be made so, or is far too large."""
        try:
            step, batch = make_step(changed, fake_devices(where))
        except ValueError:
            return None
        try:
            after = analytic_plan(step, batch, where, work)
        except ValueError:  # such as a step of sharding annotations
            return _Change(changed, costs, where, None, None)
        if after.peak_bytes > MARGIN * limit:
            return None
        seconds = after.time.step_s if after.time else None
        return _Change(changed, costs, where, after.peak_bytes, seconds)

    step, batch = make_step(settings, fake_devices(topology))
    rows, prefetches = jax.tree.leaves(batch)[0].shape[0], step.plan.prefetch != "none"
    microbatch = rows // (topology.size * settings.accumulation)
    leaner = list(_leaner_settings(settings, microbatch, work.vocab, prefetches=prefetches))
    combined = _combined_settings(settings, microbatch, work.vocab)
    options = dict[StepSettings, str]()
    for changed, costs in (*leaner, *combined):
        options.setdefault(changed, costs)
    changes = [estimated(changed, costs, topology) for changed, costs in options.items()]
    known = [change for change in changes if change is not None]
    yield from sorted(known, key=lambda change: (change.step_s or 0.0, change.peak_bytes or 0))
    leanest = list(options)[-1] if options else settings
    for machine in topologies_by_size(topology.hardware):
        if machine.size <= topology.size or rows % machine.size:
            continue
        costs = "more devices"
        for changed in dict.fromkeys((settings, leanest)):
            if change := estimated(changed, costs, machine):
                yield change


def _combined_settings(
    settings: StepSettings, microbatch: int, vocab: int | None
) -> Iterator[tuple[StepSettings, str]]:
    """Yields (settings, cost) of several changes together, the leanest last."""
    leanest = replace(
        settings,
        strategy="full_shard",
        replica=1,
        keep_gathered=(),
        remat="full",
        prefetch="none",
    )
    if vocab and vocab > LOSS_CHUNK:
        leanest = replace(leanest, loss_chunk=LOSS_CHUNK)
    counts = [settings.accumulation * k for k in (1, 2, 4, 8, 16) if microbatch % k == 0]
    offloads = OFFLOADS if settings.offload == NO_OFFLOAD else (settings.offload,)
    for offload in (each for each in offloads if each.activations == settings.offload.activations):
        for accumulation in dict.fromkeys((counts[0], counts[-1])):
            changed = replace(leanest, accumulation=accumulation, offload=offload)
            if changed != settings:
                yield changed, "those of its parts"


def _leaner_settings(
    settings: StepSettings, microbatch: int, vocab: int | None, *, prefetches: bool
) -> Iterator[tuple[StepSettings, str]]:
    """Yields (settings, cost) that use less memory: one change each, and last several together.

    `microbatch`: rows of one device; `vocab`: size of the vocabulary; None for none; `prefetches`:
    whether the step does, which `auto` decides by the machine.
    """
    sharded = replace(settings, strategy="full_shard", replica=1, keep_gathered=())
    accumulations = [settings.accumulation * k for k in (2, 4, 8, 16) if microbatch % k == 0]
    # Single changes.
    leaner_remats = REMATS[: REMATS.index(settings.remat)] if settings.remat in REMATS else ()
    for remat in leaner_remats:
        cost = "what is cheap to recompute runs twice"
        if remat == "full":
            cost = "the forward pass of each unit runs twice: about a third more FLOPs"
        yield replace(settings, remat=remat), cost
    if not (settings.offload.state or settings.offload.saves_activations):
        for offload in OFFLOADS[1:]:
            yield replace(settings, offload=offload), OFFLOAD_COSTS
    for accumulation in accumulations:
        cost = "gathers are sent again for each microbatch"
        yield replace(settings, accumulation=accumulation), cost
    if settings.keep_gathered:
        cost = "units that stayed gathered are gathered again in the backward pass"
        yield replace(settings, keep_gathered=()), cost
    if settings.strategy != "full_shard":
        yield sharded, "parameters are gathered in forward and in backward"
    if prefetches:
        yield replace(settings, prefetch="none"), "the next unit's gather is exposed"
    if vocab and vocab > LOSS_CHUNK:
        cost = "logits are recomputed in the backward pass"
        yield replace(settings, loss_chunk=LOSS_CHUNK), cost
    # Several changes together, which may fit where no single one does.
    accumulation = accumulations[0] if accumulations else settings.accumulation
    combined = replace(sharded, remat="full", accumulation=accumulation)
    if len(combined.flags(since=settings)) > 1:
        yield combined, "those of its parts"


def _offload_fixes_by_arithmetic(plan: Plan) -> Iterator[Fix]:
    """Yields offload as a fix of a step that cannot be estimated, by the plan's own breakdown.

    Buffers on the device that stage the update are not counted.
    """
    changes = {"optimizer": "--offload.optimizer 1", "params": "--offload.params True"}
    for part, change in changes.items():
        saves = plan.breakdown[part]
        peak = plan.peak_bytes - saves
        if saves > 0:
            yield Fix(change, saves, peak, peak <= plan.usable_bytes, OFFLOAD_COSTS)
