"""Checks a step by its traced program."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.extend.core as jex

from fsdp_jax.errors import ArgumentError, SlowerWarning
from fsdp_jax.program.equations import (
    all_eqns,
    bodies,
    eqns_inside,
    own_batched,
    own_comm,
    recomputes,
    scopes_of,
    trips_of,
)
from fsdp_jax.program.primitives import CHECKPOINT, WHILE, primitive_of
from fsdp_jax.sharding.offload import NO_OFFLOAD
from fsdp_jax.step.compute_dtype import check_compute_dtype
from fsdp_jax.step.device_varying import check_local_program
from fsdp_jax.step.matrix_stacks import matrix_stacks
from fsdp_jax.step.step_plan import StepPlan, StepReport, report_of
from fsdp_jax.step.train_step import run_model, tell_batch_split
from fsdp_jax.step.xla_options import on_gpu
from fsdp_jax.tree import PyTree, flatten
from fsdp_jax.units.collectives import gather, path_of_gather
from fsdp_jax.units.remat import check_named_activations
from fsdp_jax.units.shard_reads import reads_outside_units


def check_traced(plan: StepPlan, traced: Any) -> None:
    """Checks a step by its traced program, and warns of missed optimizations.

    `traced`: a `jax.stages.Traced`. Raises ValueError for names of activations that the model has
    not, for a step with local batches on which devices disagree, for units that were to stay
    gathered and do not, and for matmuls in a wider dtype than was asked for if the plan is strict.
    """
    program = traced.jaxpr.jaxpr
    check_named_activations(plan.activations, program)
    if plan.local_batch:
        check_local_program(program, list(flatten(plan.layout.other["model_state"])))
    for each in (plan, *(other.plan for other in plan.others.values())):
        check_compute_dtype(each, program)
    _check_kept(plan, program)
    warn_of_missed_optimizations(plan, traced)


def warn_of_missed_optimizations(plan: StepPlan, traced: Any) -> None:
    """Warns of requested overlaps and savings that a traced step does not have."""
    for missed in _missed_optimizations(plan, traced.jaxpr.jaxpr, report_of(traced)):
        warnings.warn(missed, SlowerWarning, stacklevel=3)


def _check_kept(plan: StepPlan, program: jex.Jaxpr) -> None:
    """Raises ValueError for a unit that was to stay gathered, and is gathered again."""
    if not any(comm.keeps for comm in plan.comms.values()):
        return
    for eqn in all_eqns(program):
        if path_of_gather(eqn) and own_comm(eqn).keeps_some:
            comm = own_comm(eqn)
            raise ArgumentError(
                "some layers of a unit were to stay gathered, and no scan runs them one by one",
                where=f"keep_gathered, unit '{comm.unit}'",
                expected=f"a scan over the {comm.layers} layers, or all of them kept",
                got=f"{comm.keeps} of them",
                fix=f"keep_gathered=['{comm.unit}'], or leave it out",
            )
        if primitive_of(eqn) is not CHECKPOINT or not recomputes(eqn):
            continue
        again = [each for each in eqns_inside(eqn) if path_of_gather(each)]
        kept = next((own_comm(each) for each in again if own_comm(each).kept), None)
        if kept is not None:
            raise ArgumentError(
                "a unit was to stay gathered, and a jax.checkpoint around it gathers it again",
                where=f"keep_gathered, unit '{kept.unit}'",
                expected="a model that leaves rematerialization to fully_shard",
                got=f"'{kept.path}' among what is computed again",
                fix="remat='full' in place of the model's own; or leave keep_gathered out",
            )


def params_read_outside(plan: StepPlan, batch: PyTree) -> dict[str, str]:
    """Finds the parameters that a loss reads outside their units; traces it once more.

    Such a parameter is the sharded array in the dtype that it is stored in, which XLA gathers if
    what reads it needs all of it. `batch`: shapes of a microbatch. Returns {path: the line that
    reads it first}; none for a strategy that gathers once per step.
    """
    if not plan.per_unit or plan.local_batch:  # an error there, as the step is traced
        return {}
    comms = {path: comm for path, (comm, _) in plan.traced.items()}
    params = {
        path: jax.ShapeDtypeStruct(comm.shape, comm.transform.param) for path, comm in comms.items()
    }
    model_state = jax.tree.map(lambda leaf: leaf.own, plan.layout.other["model_state"])
    of_others = {
        name: jax.tree.map(lambda leaf: leaf.own, other.plan.layout.other["model_state"])
        for name, other in plan.others.items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))

    def loss(params: dict[str, jax.Array], others: dict[str, PyTree], *args: Any) -> Any:
        gathered = {
            path: gather(comm, params[path])
            for path, comm in comms.items()
            if comm.unit is None or comm.already_gathered
        }
        run = partial(run_model, plan, params | gathered, *args, others=others)
        return run(training=True, device=None)[0]

    rows = jax.tree.leaves(batch)[0].shape[0]
    with plan.layout.axes.ambient(), tell_batch_split(plan, rows):
        closed = jax.make_jaxpr(loss)(params, of_others, model_state, batch, key)
    # The parameters are the first of the arguments.
    others = [None] * (len(closed.jaxpr.invars) - len(params))
    in_units = [path if comms[path].unit else None for path in sorted(params)]
    return reads_outside_units(closed.jaxpr, [*in_units, *others])


def _missed_optimizations(plan: StepPlan, program: jex.Jaxpr, report: StepReport) -> Iterator[str]:
    """Yields a warning's text for each requested overlap or saving that a step does not have."""
    repeated = repeated_gathers(plan, program)
    for unit, often in list(repeated.items())[:1]:
        more = f" (as are {len(repeated) - 1} more units)" if len(repeated) > 1 else ""
        text = f"unit '{unit}' is gathered {often}{more}, because it runs inside a loop of the "
        text += "model's own; make the module around the loop the unit, or units='model', and it "
        yield text + "is gathered once"
    if plan.prefetch != "none" and plan.prefetch_asked and plan.per_unit:
        unprefetched = report.prefetch.not_prefetched
        for path, reason in list(unprefetched.items())[:1]:
            text = f"prefetch: {len(unprefetched)} parameters are gathered where they are used, "
            yield text + f"such as '{path}': {reason}"
        if plan.layout.axes.explicit_axes:
            text = "prefetch: parameters are gathered where they are used, since the model names "
            yield text + "Explicit mesh axes; train it with Auto axes, or leave prefetch out"
        elif not unprefetched and not report.prefetch.prefetched:
            fix = "two units or more, such as units=[Block] or units='scan'"
            yield f"prefetch: no unit follows another, so none is gathered ahead; {fix}"
    # Outside a loop XLA:GPU sends activations just before they are fetched again.
    unrolled = [comm.unit for comm in plan.comms.values() if comm.unit and not comm.stacked]
    if unrolled and plan.activations.offload and on_gpu(plan):
        text = f"offload.activations saves little memory in unrolled units, such as '{unrolled[0]}'"
        text += ": XLA:GPU sends their activations to the host in the backward pass only; "
        yield text + "stack the layers (scan_layers=True, jax.lax.scan), or leave it out"
    # State that is updated in groups is not spread; see `matrix_stacks`.
    if report.streaming.groups and (stacks := matrix_stacks(replace(plan, offload=NO_OFFLOAD))):
        text = f"optim.muon: {sum(stack.count for stack in stacks)} matrices are sent in each of "
        text += "their iterations, as by optax, and not once, since state in host memory is "
        yield text + "updated in groups; leave offload.optimizer and offload.params out"


def repeated_gathers(plan: StepPlan, program: jex.Jaxpr) -> dict[str, str]:
    """Finds units that a loop of the model's own gathers repeatedly: {unit: how often}."""
    if not plan.per_unit or plan.layout.axes.batch_shards == 1:
        return {}
    repeated: dict[str, str] = {}
    for path, ndim, executions in _gathers(program, 1):
        comm, _ = plan.traced[path]
        if comm.unit is None or not comm.axes.batch_spec_axes(comm.shard_spec):
            continue
        if executions is None:
            repeated.setdefault(comm.unit, "in every turn of a while loop")
            continue
        layers = prod(comm.shape[: max(0, comm.ndim - ndim)])  # a layer scan does not repeat one
        times = executions // (plan.accumulation * layers)
        if times > 1:
            repeated.setdefault(comm.unit, f"{times} times in each forward and backward")
    return repeated


def _gathers(program: jex.Jaxpr, executions: int | None) -> Iterator[tuple[str, int, int | None]]:
    """Yields (path, dims of the shard, executions) of every gather in a traced program.

    `executions`: of the program itself; None, also of what is yielded, inside a while loop.
    """
    for eqn in program.eqns:
        primitive = primitive_of(eqn)
        if path := path_of_gather(eqn):
            operand: Any = eqn.invars[0].aval
            yield path, operand.ndim - own_batched(eqn), executions
        inside = None
        if primitive is not WHILE and executions is not None:
            inside = executions * trips_of(eqn)
        for inner in bodies(eqn):
            yield from _gathers(inner, inside)


def with_traced_others(plan: StepPlan, program: jex.Jaxpr) -> StepPlan:
    """Notes which other models the traced program of a step gathers in its backward pass too."""
    if not plan.others:
        return plan
    found = set(_gathered_backward(program, is_backward=False))
    others = {
        name: replace(other, in_backward=name in found) for name, other in plan.others.items()
    }
    return replace(plan, others=others)


def _gathered_backward(program: jex.Jaxpr, *, is_backward: bool) -> Iterator[str]:
    """Yields the names of other models whose parameters a backward pass gathers."""
    for eqn in program.eqns:
        backward = is_backward or "transpose(" in scopes_of(eqn)
        if backward and path_of_gather(eqn):
            yield own_comm(eqn).model
        for inner in bodies(eqn):
            yield from _gathered_backward(inner, is_backward=backward)
