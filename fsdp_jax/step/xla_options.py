"""The XLA options that a step is compiled with: for overlap with compute, and for offloading."""

import os
import warnings
from collections import Counter
from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import jax

from fsdp_jax.errors import ArgumentError, SlowerWarning
from fsdp_jax.prefetch.rewrite import PrefetchReport
from fsdp_jax.step.plan import StepPlan, report_of

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


def compile_overlapped(
    lowered: Any, plan: StepPlan, also: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Compiles a lowered step with its `compiler_options` and the options of `also`.

    Warns:
        SlowerWarning: this release of XLA no longer knows the plan's options.
    """
    options = compiler_options(plan, report_of(lowered).prefetch)
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


def compiler_options(plan: StepPlan, report: PrefetchReport) -> dict[str, Any]:
    """Returns XLA options for `lowered.compile`, for the platform of the plan's mesh.

    On a GPU one collective runs at a time, and a layer has more parameters than kernels to hide
    their gathers behind. So all gathers of a layer are combined into one, and so are its gradients:
    the threshold is the size of one layer. XLA's own, 30 MiB, leaves the first small gathers of
    every layer exposed. The latency-hiding scheduler is asked for by name: before Hopper XLA does
    without it, and nothing at all is hidden.
    """
    needed = offload_options(plan)
    if not on_gpu(plan) or not report.prefetched:
        return needed
    # Of a unit, or of one layer where layers are stacked.
    unit_bytes: Counter[str | None] = Counter()
    for path in report.prefetched:
        comm, leaf = plan.comms[path], plan.layout.by_path[path]
        itemsize = max(comm.transform.wire.itemsize, comm.transform.reduce.itemsize)
        elements = max(prod(leaf.stored_shape), prod(leaf.grad_shape))
        layers = prod(leaf.shape[: comm.stacked])
        unit_bytes[comm.unit] += elements // max(layers, 1) * itemsize
    largest = max(unit_bytes.values())
    return needed | {
        "xla_gpu_all_gather_combine_threshold_bytes": largest,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": largest,
        "xla_gpu_enable_latency_hiding_scheduler": True,
    }


def offload_options(plan: StepPlan) -> dict[str, Any]:
    """Returns XLA options without which what is offloaded gives wrong gradients; see ANNOTATOR."""
    return {"xla_disable_hlo_passes": ANNOTATOR} if on_gpu(plan) and plan.offloads else {}


def check_options_of_caller(plan: StepPlan) -> None:
    """Raises ValueError if a step that the caller compiles would lack an option that it needs."""
    if offload_options(plan) and ANNOTATOR not in os.environ.get("XLA_FLAGS", ""):
        raise ArgumentError(
            "a step that offloads needs an option of XLA on GPUs, or its gradients are wrong",
            where="offload",
            fix=f"XLA_FLAGS=--xla_disable_hlo_passes={ANNOTATOR}, or make_train_step",
        )


def on_gpu(plan: StepPlan) -> bool:
    """Returns whether the devices of the plan's mesh are GPUs, also ones compiled for only."""
    return plan.layout.mesh.devices.flat[0].platform in GPU
