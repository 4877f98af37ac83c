"""What a traced step gathers in loops and branches, and what it neither overlaps nor saves."""

import re
from collections.abc import Iterator
from math import prod
from typing import Any

import jax.extend.core as jex

from fsdp_jax.jaxprs import all_eqns
from fsdp_jax.step.train_step import StepPlan
from fsdp_jax.step.xla_options import on_gpu
from fsdp_jax.units.collectives import REDUCED, SITE

GATHER_SCOPE, REDUCE_SCOPE = (
    re.compile(re.escape(scope).replace(re.escape("{}"), "(.*?)")) for scope in (SITE, REDUCED)
)


def missed_optimizations(plan: StepPlan, program: jex.Jaxpr) -> Iterator[str]:
    """Yields the text of a warning for what a step was asked to overlap or save, and does not."""
    for unit, often in repeated_gathers(plan, program).items():
        text = f"unit '{unit}' is gathered {often}, because it runs inside a loop of the model's "
        yield text + "own; make the module around the loop the unit, and it is gathered once"
    if plan.prefetch != "none" and plan.per_unit:
        unprefetched = plan.report.not_prefetched
        for path, reason in list(unprefetched.items())[:1]:
            text = f"prefetch: {len(unprefetched)} parameters are gathered where they are used, "
            yield text + f"such as '{path}': {reason}"
        if not unprefetched and not plan.report.prefetched:
            fix = "two units or more, such as units=[Block] or units='scan'"
            yield f"prefetch: no unit follows another, so none is gathered ahead; {fix}"
    # Outside a loop XLA:GPU sends activations just before they are fetched again.
    unrolled = [comm.unit for comm in plan.comms.values() if comm.unit and not comm.stacked]
    if unrolled and plan.activations.offload and on_gpu(plan):
        text = f"offload.activations saves little memory in unrolled units, such as '{unrolled[0]}'"
        text += ": XLA:GPU sends their activations to the host in the backward pass only; "
        yield text + "stack the layers (scan_layers=True, jax.lax.scan), or leave it out"


def repeated_gathers(plan: StepPlan, program: jex.Jaxpr) -> dict[str, str]:
    """Returns {unit: how often it is gathered} for the units inside a loop of the model's own."""
    if not plan.per_unit or plan.layout.axes.batch_shards == 1:
        return {}
    repeated: dict[str, str] = {}
    for path, ndim, executions in _gathers(program, 1):
        comm, leaf = plan.comms[path], plan.layout.by_path[path]
        if comm.unit is None or not comm.axes.batch_spec_axes(comm.param_spec):
            continue
        if executions is None:
            repeated.setdefault(comm.unit, "in every turn of a while loop")
            continue
        layers = prod(leaf.shape[: max(0, comm.ndim - ndim)])  # a layer scan does not repeat one
        times = executions // (plan.accumulation * layers)
        if times > 1:
            repeated.setdefault(comm.unit, f"{times} times in each forward and backward")
    return repeated


def gathers_in_branches(program: jex.Jaxpr) -> set[str]:
    """Returns paths of parameters gathered inside a branch, which a device may not take."""
    conds = [eqn for eqn in all_eqns(program) if eqn.primitive.name == "cond"]
    branches = [branch for eqn in conds for branch in jex.jaxprs_in_params(eqn.params)]
    return {path for branch in branches for path, _, _ in _gathers(branch, 1)}


def _gathers(program: jex.Jaxpr, executions: int | None) -> Iterator[tuple[str, int, int | None]]:
    """Yields (path, dims of the shard, executions) of every gather in a traced program.

    `executions`: of the program itself; None, also of what is yielded, inside a while loop.
    """
    for eqn in program.eqns:
        name = eqn.primitive.name
        scope = GATHER_SCOPE.search(str(eqn.source_info.name_stack))
        if scope and name in ("all_gather", "optimization_barrier"):
            operand: Any = eqn.invars[0].aval
            yield scope.group(1), operand.ndim, executions
        inside = executions
        if name == "while":
            inside = None
        elif name == "scan" and executions is not None:
            inside = executions * eqn.params["length"]
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from _gathers(inner, inside)
