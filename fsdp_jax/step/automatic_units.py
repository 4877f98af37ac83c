"""Traces a step by the units that were chosen for the user, or by the whole model where they fail.

[Note: units that the user did not choose] Whatever runs with the whole model as the unit must run
without `units` too, with the same result. What `fully_shard` chooses by the model's structure can
be wrong for a loss, which is known only when a step is traced: it reads a block's weight itself, or
calls the block in a loop of its own, which would gather it in every turn, or in a branch, which one
device may take and another not, so that a collective would never end. Such a step is traced once
more, with the whole model as its unit. With local batches an error stands: a penalty on a
parameter would count once per device.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import jax

from fsdp_jax.errors import SlowerWarning, human_bytes
from fsdp_jax.sharding.layout import Layout
from fsdp_jax.sharding.mesh import shards_of
from fsdp_jax.sharding.rules import LARGE_BYTES
from fsdp_jax.step.compute_dtype import check_compute_dtype
from fsdp_jax.step.device_varying import check_local_program
from fsdp_jax.step.traced_gathers import gathers_in_branches, missed_optimizations, repeated_gathers
from fsdp_jax.step.train_step import StepPlan
from fsdp_jax.tree import flatten
from fsdp_jax.units.collectives import ParamComm
from fsdp_jax.units.remat import check_named_activations

BY_DEFAULT = (
    "The units were found by default. units='model' (in a configuration units.whole_model) gathers "
    "the whole model at once: for a loss that reads parameters outside their blocks and is a sum "
    "over examples all the same."
)


def trace_by_units(plan: StepPlan, trace: Callable[[StepPlan], Any]) -> tuple[StepPlan, Any]:
    """Returns (the plan that was used, `trace(plan)`, a `jax.stages.Traced`); see the note."""
    if plan.whole_model is None:
        return plan, trace(plan)
    try:
        traced = trace(plan)
        problem = _reason_against_units(plan, traced)
    except Warning:  # where warnings are errors
        raise
    except Exception as error:
        if plan.local_batch:  # see the note
            error.add_note(BY_DEFAULT)
            raise
        first_line = next(iter(str(error).splitlines()), "")
        problem = f"by units it fails: {type(error).__name__}: {first_line}"
    else:
        if not problem:
            return plan, traced
    # If the error is the user's own, it is raised again here.
    whole = plan.whole_model(problem)
    traced = trace(whole)
    warn_whole_model(whole.layout, whole.comms, problem, stacklevel=5)
    return whole, traced


def call_by_units(plan: StepPlan, fn: Callable[..., Any], *args: Any, check: bool = False) -> Any:
    """Returns `fn(plan, *args)`, run by the units or by the whole model; called in a trace.

    See the note. `check`: by `check_traced` too.
    """
    jitted = functools.cache(lambda plan: jax.jit(functools.partial(fn, plan)))
    used, traced = trace_by_units(plan, lambda plan: jitted(plan).trace(*args))
    if check:
        check_traced(used, traced)
    return jitted(used)(*args)


def check_traced(plan: StepPlan, traced: Any) -> None:
    """Checks a traced step for what only its program shows, and warns of missed optimizations.

    `traced`: a `jax.stages.Traced`. Raises ValueError for names of activations that the model has
    not, for a step with local batches on which devices disagree, and for matmuls in a wider dtype
    than was asked for if the plan is strict.
    """
    program = traced.jaxpr.jaxpr
    check_named_activations(plan.activations, program)
    if plan.local_batch:
        check_local_program(program, list(flatten(plan.layout.other["model_state"])))
    check_compute_dtype(plan, program)
    for missed in missed_optimizations(plan, program):
        warnings.warn(missed, SlowerWarning, stacklevel=2)


def _reason_against_units(plan: StepPlan, traced: Any) -> str:
    """Returns why a traced step shall not run by automatic units; empty if it may."""
    program = traced.jaxpr.jaxpr
    for unit, often in repeated_gathers(plan, program).items():
        return f"unit '{unit}' is gathered {often}, inside a loop of the model's own"
    branches = gathers_in_branches(program) if plan.local_batch else set()
    return f"'{min(branches)}' is gathered inside a branch" if branches else ""


def warn_whole_model(
    layout: Layout, comms: Mapping[str, ParamComm], why: str, *, stacklevel: int
) -> None:
    """Warns of a large model that is gathered at once though the user did not ask for it.

    `why`: no units were used; `stacklevel`: as in `warnings.warn`.
    """
    gathered = sum(
        prod(layout.by_path[path].shape) * comm.transform.wire.itemsize
        for path, comm in comms.items()
        if shards_of(layout.axes.mesh, layout.axes.batch_spec_axes(comm.param_spec)) > 1
    )
    if layout.strategy.gathers_per_unit and gathered >= LARGE_BYTES:
        warnings.warn(
            f"the whole model is gathered at once, {human_bytes(gathered)} on every device: {why}; "
            "units=[YourBlock] gathers block by block, units='model' says that it is meant "
            "(in a configuration units.classes, units.whole_model)",
            SlowerWarning,
            stacklevel=stacklevel,
        )
