"""XLA options that let prefetched collectives overlap with compute, and warnings where none do."""

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as jex

from fsdp_jax.errors import SlowerWarning, message
from fsdp_jax.jaxprs import all_eqns
from fsdp_jax.step.train_step import StepPlan
from fsdp_jax.units.collectives import SITE

GPU = ("gpu", "cuda")

# Without a GPU to try tile sizes on, XLA takes the first valid size for each matmul. For some there
# is none, such as those over the odd number of positions of a vision transformer. With a GPU, XLA
# uses cuBLAS for those; without one, all matmuls of such a program are compiled for cuBLAS.
NO_TILES = "find output tile sizes"
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}

# XLA:GPU reads what a loop over layers has in host memory, parameters and saved activations, by
# strides that it derives from the loop, and takes those of the backward loop for ascending ones:
# silently wrong gradients (openxla/xla#46231). Without this pass it computes the index.
ANNOTATOR = "dynamic-slice-annotator"

_GATHER_SCOPE = re.compile(re.escape(SITE).replace(re.escape("{}"), "(.*?)"))


def compile_overlapped(
    lowered: Any, plan: StepPlan, also: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Compiles with `compiler_options(plan)` and the options of `also`.

    Warns:
        SlowerWarning: this release of XLA no longer knows the plan's options.

    """
    options = compiler_options(plan)
    while True:
        try:
            return lowered.compile(compiler_options={**options, **also})
        except jax.errors.JaxRuntimeError as error:
            if NO_TILES in str(error) and not WITHOUT_TRITON.items() <= options.items():
                options = {**options, **WITHOUT_TRITON}
                continue
            unknown = "No such compile option" in str(error)
            needed = offload_options(plan)
            if not unknown or options.keys() <= {*WITHOUT_TRITON, *needed}:
                raise
        cost = "small gathers of every layer are not hidden behind compute"
        warning = f"this XLA does not know {' or '.join(options)}: {cost}"
        warnings.warn(warning, SlowerWarning, stacklevel=2)
        options = needed


def compiler_options(plan: StepPlan) -> dict[str, Any]:
    """Returns XLA options for `lowered.compile`, for the platform of the plan's mesh.

    On a GPU one collective runs at a time, and a layer has more parameters than kernels to hide
    their gathers behind. So all gathers of a layer are combined into one, and so are its gradients:
    the threshold is the size of one layer. XLA's own, 30 MiB, leaves the first small gathers of
    every layer exposed. The latency-hiding scheduler is asked for by name: before Hopper XLA does
    without it, and nothing at all is hidden.
    """
    needed = offload_options(plan)
    if not _on_gpu(plan) or not plan.report.prefetched:
        return needed
    # Of a unit, or of one layer where layers are stacked.
    unit_bytes: Counter[str | None] = Counter()
    for path in plan.report.prefetched:
        comm, leaf = plan.comms[path], plan.layout.by_path[path]
        itemsize = max(comm.transform.wire.itemsize, comm.transform.reduce.itemsize)
        unit_bytes[comm.unit] += prod(leaf.shape[comm.stacked :]) * itemsize
    largest = max(unit_bytes.values())
    return needed | {
        "xla_gpu_all_gather_combine_threshold_bytes": largest,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": largest,
        "xla_gpu_enable_latency_hiding_scheduler": True,
    }


def offload_options(plan: StepPlan) -> dict[str, Any]:
    """Returns XLA options without which what is offloaded gives wrong gradients; see ANNOTATOR."""
    return {"xla_disable_hlo_passes": ANNOTATOR} if _on_gpu(plan) and plan.offloads else {}


def check_options_of_caller(plan: StepPlan) -> None:
    """Raises ValueError for a step that the caller compiles, without options that it needs."""
    if offload_options(plan) and ANNOTATOR not in os.environ.get("XLA_FLAGS", ""):
        what = "a step that offloads needs an option of XLA on GPUs, or its gradients are wrong"
        fix = f"XLA_FLAGS=--xla_disable_hlo_passes={ANNOTATOR}, or make_train_step"
        raise ValueError(message(what, where="offload", fix=fix))


def _on_gpu(plan: StepPlan) -> bool:
    return plan.layout.mesh.devices.flat[0].platform in GPU


def costs(plan: StepPlan, program: jex.Jaxpr) -> Iterator[str]:
    """Yields what a traced step was asked to overlap or to save and does not, each as a text."""
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
    if unrolled and plan.activations.offload and _on_gpu(plan):
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
    """Returns the parameters that are gathered inside a branch, which a device may not take."""
    conds = [eqn for eqn in all_eqns(program) if eqn.primitive.name == "cond"]
    branches = [branch for eqn in conds for branch in jex.jaxprs_in_params(eqn.params)]
    return {path for branch in branches for path, _, _ in _gathers(branch, 1)}


def _gathers(program: jex.Jaxpr, executions: int | None) -> Iterator[tuple[str, int, int | None]]:
    """Yields (path, dims of the shard, executions) of every gather; None inside a while loop."""
    for eqn in program.eqns:
        name = eqn.primitive.name
        scope = _GATHER_SCOPE.search(str(eqn.source_info.name_stack))
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
