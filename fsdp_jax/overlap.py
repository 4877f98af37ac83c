"""What XLA must be told so that the collectives that prefetch has moved run beside compute."""

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from fsdp_jax.errors import SlowerWarning
from fsdp_jax.step import StepPlan

GPU = ("gpu", "cuda")

# Without a GPU to try tiles on, XLA takes the first for each product, and for some there is none, as for the odd number
# of positions of a vision transformer. With one, it takes cuBLAS there; so is all of the program compiled then.
UNTILED = "find output tile sizes"
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}


def compile_overlapped(lowered: Any, plan: StepPlan, also: Mapping[str, Any] = MappingProxyType({})) -> Any:
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
        warnings.warn(f"this XLA does not know {' or '.join(options)}: {cost}", SlowerWarning, stacklevel=3)
        return _compiled(lowered, {}, also)


def compiler_options(plan: StepPlan) -> dict[str, Any]:
    """XLA options for `lowered.compile`, for the platform that the plan's mesh is of.

    On a GPU one collective runs at a time, and a layer has more parameters than kernels to hide them behind. So all
    that is gathered for a layer is sent as one, and so are its gradients: the threshold is what one layer weighs.
    XLA's own, 30 MiB, leaves the first small gathers of every layer exposed. The scheduler that hides latencies is
    asked for by name: before Hopper XLA does without it, and nothing at all is hidden.
    """
    if plan.layout.mesh.devices.flat[0].platform not in GPU or not plan.report.moved:
        return {}
    largest = max(_unit_bytes(plan).values())
    combined = {f"xla_gpu_{op}_combine_threshold_bytes": largest for op in ("all_gather", "reduce_scatter")}
    return {**combined, "xla_gpu_enable_latency_hiding_scheduler": True}


def _unit_bytes(plan: StepPlan) -> dict[str, int]:
    """{unit: bytes of its parameters as they travel}, of one layer where layers are stacked."""
    units: dict[str, int] = {}
    for path in plan.report.moved:
        route, leaf = plan.routes[path], plan.layout.by_path[path]
        elements = leaf.bytes // leaf.dtype.itemsize
        for size in leaf.shape[: route.stacked]:
            elements //= size
        width = max(route.compute.itemsize, route.reduce.itemsize)
        units[str(route.unit)] = units.get(str(route.unit), 0) + elements * width
    return units


def warn_of_left(plan: StepPlan) -> None:
    """Names what prefetch was asked for and could not move.

    Warns:
        SlowerWarning: with the paths and the reason.

    """
    if plan.prefetch == "none" or not plan.per_unit:
        return
    left = plan.report.left
    if left:
        path, why = next(iter(left.items()))
        warnings.warn(
            f"prefetch: {len(left)} parameters are gathered where they are used, such as '{path}': {why}",
            SlowerWarning,
            stacklevel=2,
        )
    elif not plan.report.moved:
        fix = "two units or more, such as units=[Block] or units='scan'"
        warnings.warn(f"prefetch: there is no unit after another to gather ahead; {fix}", SlowerWarning, stacklevel=2)
