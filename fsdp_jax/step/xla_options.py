"""What XLA must be told so that the collectives that prefetch has moved run beside compute."""

import re
import warnings
from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as jex

from fsdp_jax.errors import SlowerWarning
from fsdp_jax.step.train_step import StepPlan
from fsdp_jax.units.collectives import SITE

GPU = ("gpu", "cuda")

# Without a GPU to try tiles on, XLA takes the first for each product, and for some there is none,
# as for the odd number of positions of a vision transformer. With one, it takes cuBLAS there; so is
# all of the program compiled then.
UNTILED = "find output tile sizes"
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}


def compile_overlapped(
    lowered: Any, plan: StepPlan, also: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Compiles with these options, and others.

    Warns:
        SlowerWarning: this release of XLA knows them no more.

    """
    return _compiled(lowered, compiler_options(plan), also)


def _compiled(lowered: Any, options: Mapping[str, Any], also: Mapping[str, Any]) -> Any:
    try:
        return lowered.compile(compiler_options={**options, **also})
    except jax.errors.JaxRuntimeError as error:
        if UNTILED in str(error) and not WITHOUT_TRITON.items() <= options.items():
            return _compiled(lowered, {**options, **WITHOUT_TRITON}, also)
        if "No such compile option" not in str(error) or options.keys() <= WITHOUT_TRITON.keys():
            raise
        cost = "small gathers of every layer are not hidden behind compute"
        warnings.warn(
            f"this XLA does not know {' or '.join(options)}: {cost}", SlowerWarning, stacklevel=3
        )
        return _compiled(lowered, {}, also)


def compiler_options(plan: StepPlan) -> dict[str, Any]:
    """XLA options for `lowered.compile`, for the platform that the plan's mesh is of.

    On a GPU one collective runs at a time, and a layer has more parameters than kernels to hide
    them behind. So all that is gathered for a layer is sent as one, and so are its gradients: the
    threshold is what one layer weighs. XLA's own, 30 MiB, leaves the first small gathers of every
    layer exposed. The scheduler that hides latencies is asked for by name: before Hopper XLA does
    without it, and nothing at all is hidden.
    """
    if plan.layout.mesh.devices.flat[0].platform not in GPU or not plan.report.prefetched:
        return {}
    largest = max(_unit_bytes(plan).values())
    combined = {
        f"xla_gpu_{op}_combine_threshold_bytes": largest for op in ("all_gather", "reduce_scatter")
    }
    return {**combined, "xla_gpu_enable_latency_hiding_scheduler": True}


def _unit_bytes(plan: StepPlan) -> dict[str, int]:
    """{unit: bytes of its parameters as they travel}, of one layer where layers are stacked."""
    units: dict[str, int] = {}
    for path in plan.report.prefetched:
        comm, leaf = plan.comms[path], plan.layout.by_path[path]
        elements = leaf.bytes // leaf.dtype.itemsize
        for size in leaf.shape[: comm.stacked]:
            elements //= size
        width = max(comm.transform.wire.itemsize, comm.transform.reduce.itemsize)
        units[str(comm.unit)] = units.get(str(comm.unit), 0) + elements * width
    return units


def warn_of_left(plan: StepPlan) -> None:
    """Names what prefetch was asked for and could not move.

    Warns:
        SlowerWarning: with the paths and the reason.

    """
    if plan.prefetch == "none" or not plan.per_unit:
        return
    left = plan.report.not_prefetched
    if left:
        path, why = next(iter(left.items()))
        warnings.warn(
            f"prefetch: {len(left)} parameters are gathered where they are used, such as '{path}': {why}",
            SlowerWarning,
            stacklevel=2,
        )
    elif not plan.report.prefetched:
        fix = "two units or more, such as units=[Block] or units='scan'"
        warnings.warn(
            f"prefetch: there is no unit after another to gather ahead; {fix}",
            SlowerWarning,
            stacklevel=2,
        )


_GATHERED = re.compile(re.escape(SITE).replace(re.escape("{}"), "(.*?)"))


def warn_of_repeats(plan: StepPlan, program: jex.Jaxpr) -> None:
    """Names units that run inside a loop of the model's own, such as one over time: each turn
    gathers them again.

    Args:
        plan: of the step.
        program: the traced step.

    Warns:
        SlowerWarning: with the unit, and how often.

    """
    if not plan.per_unit or plan.layout.mesh.size == 1:
        return
    repeats: dict[str, int | None] = {}
    for path, operand, turns in _gathers(program, 1):
        comm, leaf = plan.comms[path], plan.layout.by_path[path]
        layers = prod(
            leaf.shape[: max(0, comm.ndim - operand.ndim)]
        )  # a layer scan is no repetition
        times = None if turns is None else turns // (plan.accumulation * layers)
        if comm.unit is not None and (times is None or times > 1) and any(comm.param_spec):
            repeats.setdefault(comm.unit, times)
    for unit, times in repeats.items():
        often = (
            "in every turn of a while loop"
            if times is None
            else f"{times} times in each forward and backward"
        )
        warnings.warn(
            f"unit '{unit}' is gathered {often}, because it runs inside a loop of the model's own; "
            "make the module around the loop the unit, and it is gathered once",
            SlowerWarning,
            stacklevel=3,
        )


def _gathers(program: jex.Jaxpr, turns: int | None) -> Iterator[tuple[str, Any, int | None]]:
    """(path, operand, how often it runs) of every gather of a parameter; None inside a while loop."""
    for eqn in program.eqns:
        name = eqn.primitive.name
        found = _GATHERED.search(str(eqn.source_info.name_stack))
        if found and name in ("all_gather", "optimization_barrier"):
            yield found.group(1), eqn.invars[0].aval, turns
        inside = turns
        if name == "while":
            inside = None
        elif name == "scan" and turns is not None:
            inside = turns * eqn.params["length"]
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from _gathers(inner, inside)
