"""The XLA options that a step is compiled with: for overlap with compute, and for offloading."""

from collections import Counter
from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import jax

from fsdp_jax.compat import error_texts, xla_flags
from fsdp_jax.errors import ArgumentError
from fsdp_jax.prefetch.rewrite import PrefetchReport
from fsdp_jax.step.step_plan import StepPlan, report_of

GPU = ("gpu", "cuda")


def compile_overlapped(
    lowered: Any, plan: StepPlan, also: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Compiles a lowered step with its `compiler_options` and the options of `also`."""
    options = {**compiler_options(plan, report_of(lowered).prefetch), **also}
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if not error_texts.NO_TILES.found_in(error):
            raise
    return lowered.compile(compiler_options={**options, **xla_flags.WITHOUT_TRITON})


def compiler_options(plan: StepPlan, report: PrefetchReport) -> dict[str, Any]:
    """Chooses XLA options for `lowered.compile`, for the platform of the plan's mesh.

    On a GPU one collective runs at a time, and a layer has more parameters than kernels to hide
    their gathers behind. So all gathers of a layer are combined into one, and so are its gradients:
    the threshold is the size of one layer. XLA's own, 30 MiB, leaves the first small gathers of
    every layer exposed.
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
    return needed | xla_flags.combine_gathers(largest)


def offload_options(plan: StepPlan) -> dict[str, Any]:
    """Chooses XLA options without which offloaded arrays give wrong gradients."""
    if not on_gpu(plan) or not plan.offloads:
        return {}
    return {xla_flags.WITHOUT_PASS: xla_flags.ANNOTATOR}


def check_options_of_caller(plan: StepPlan) -> None:
    """Raises ValueError if a step that offloads on GPUs needs an option that XLA_FLAGS lacks.

    For `pure_step`, which the caller compiles: `make_train_step` passes the option itself.
    """
    flags = " ".join(xla_flags.environment_flags().values())
    if offload_options(plan) and xla_flags.ANNOTATOR not in flags:
        raise ArgumentError(
            "a step that offloads needs an option of XLA on GPUs, or its gradients are wrong",
            where="offload",
            fix=f"XLA_FLAGS=--{xla_flags.WITHOUT_PASS}={xla_flags.ANNOTATOR}, or make_train_step",
        )


def on_gpu(plan: StepPlan) -> bool:
    """Tells whether the devices of the plan's mesh are GPUs, also ones compiled for only."""
    return plan.layout.mesh.devices.flat[0].platform in GPU
