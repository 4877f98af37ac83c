"""The XLA options that a step is compiled with: for overlap with compute, and for offloading."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

import jax

from fsdp_jax.compat import error_texts, xla_flags
from fsdp_jax.compat.jax_devices import slice_index
from fsdp_jax.errors import ArgumentError
from fsdp_jax.prefetch.rewrite import Prefetch, PrefetchReport
from fsdp_jax.sharding.mesh import shards_of
from fsdp_jax.step.kept_programs import compile_kept
from fsdp_jax.step.step_plan import StepPlan, report_of
from fsdp_jax.units.comm import AxesAtOnce

GPU = ("gpu", "cuda")
_Unit = tuple[str, str | None]  # name of another model or "", and the unit's path


def compile_overlapped(
    lowered: Any,
    plan: StepPlan,
    also: Mapping[str, Any] = MappingProxyType({}),
    *,
    name: str = "",
) -> Any:
    """Compiles a lowered step with its `compiler_options` and the options of `also`.

    With a `name`, such as `the train step`, it is taken from the programs that the run keeps.

    On CPUs, a step with loops or branches is not read from jax's cache; see
    `compat.compilation_cache`. Raises ValueError if this release of XLA lacks an option.
    """
    options = {**compiler_options(plan, report_of(lowered).prefetch), **also}
    try:
        return compile_kept(name, lowered, plan.layout.mesh, options)
    except jax.errors.JaxRuntimeError as error:
        if refused := error_texts.NO_OPTION.found_in(error):
            raise ArgumentError(
                "XLA does not know an option that the step is compiled with",
                where="make_train_step",
                got=refused[1],
                fix="the releases of jax and its plugin that fsdp_jax asks for",
            ) from error
        if not error_texts.NO_TILES.found_in(error):
            raise
    options |= xla_flags.WITHOUT_TRITON
    return compile_kept(name, lowered, plan.layout.mesh, options)


def compiler_options(plan: StepPlan, report: PrefetchReport) -> dict[str, Any]:
    """Chooses XLA options for `lowered.compile`, for the platform of the plan's mesh.

    On a GPU one collective runs at a time, and a layer has more parameters than kernels to hide
    their gathers behind. So all gathers of a layer are combined into one, and so are its gradients:
    the threshold is the size of one layer. XLA's default, 30 MiB, leaves the first small gathers of
    every layer exposed. A larger threshold combines the gradients of several layers outside a loop:
    they would be scattered only when the last of them is computed.

    A TPU whose SparseCores run the collectives gets the options of its kind, with explicit
    collectives for SparseCores and with sharding annotations. With annotations every TPU also gets
    the option not to turn large matmuls and their gathers into loops.
    """
    needed = offload_options(plan)
    if plan.layout.mesh.devices.flat[0].platform == "tpu":  # present, or only compiled for
        if not plan.local_batch:
            needed |= xla_flags.WITHOUT_WINDOWED_MATMULS
        if on_sparse_cores(plan) or (not plan.local_batch and _has_sparse_cores(plan)):
            needed |= xla_flags.OF_TPU[_device_kind(plan)]
        return needed
    if not on_gpu(plan) or not report.moved:
        return needed
    # Bytes of a unit, or of one layer if layers are stacked; for gradients, of a device's shards.
    gathered, scattered = Counter[_Unit](), Counter[_Unit]()
    for path in report.moved:
        comm, leaf = plan.traced[path]
        dtypes, unit = comm.transform, (comm.model, comm.unit)
        layers = max(prod(leaf.shape[: comm.stacked]), 1)
        shards = prod(shards_of(comm.mesh, entry) for entry in leaf.grad_spec)
        gathered[unit] += prod(leaf.stored_shape) // layers * dtypes.wire.itemsize
        if comm.trained:
            elements = prod(leaf.grad_shape) // layers // shards
            scattered[unit] += elements * dtypes.reduce.itemsize
    return needed | xla_flags.combine_collectives(
        max(gathered.values()), max(scattered.values(), default=1)
    )


def with_prefetch(plan: StepPlan, asked: Prefetch, *, as_on_gpus: bool = False) -> StepPlan:
    """Chooses the prefetch of a step, and lets SparseCores run its collectives if they can.

    `as_on_gpus`: choose as if the devices were GPUs.
    """
    # On one device there is nothing to communicate, and so nothing to prefetch.
    if plan.layout.axes.batch_shards == 1:
        return plan
    if asked != "auto":
        plan = replace(plan, prefetch=asked)
    elif prefetches_by_default(plan, as_on_gpus=as_on_gpus):
        plan = replace(plan, prefetch="pre", prefetch_asked=False)
    return with_sparse_cores(plan)


def prefetches_by_default(plan: StepPlan, *, as_on_gpus: bool = False) -> bool:
    """Tells whether `prefetch="auto"` means `pre`: on GPUs, if the strategy gathers by units.

    On TPUs a step without prefetch is as fast within some percent, needs less memory, and compiles
    in a fraction of the time; on CPUs nothing overlaps with a collective. See docs/evidence.md.
    """
    return (as_on_gpus or on_gpu(plan)) and plan.per_unit and not plan.layout.axes.explicit_axes


def with_sparse_cores(plan: StepPlan) -> StepPlan:
    """Lets SparseCores run a step's collectives on such chips; explicit ones only if units gather.

    A collective then goes along all dims of the torus at once, which uses all links, and overlaps
    with others. This requires the options of `compiler_options`: without them it would send twice
    the bytes.
    """
    if not _has_sparse_cores(plan) or (plan.local_batch and not plan.per_unit):
        return plan
    return _with_axes_at_once(plan, "sparse_cores")


def _with_axes_at_once(plan: StepPlan, choice: AxesAtOnce) -> StepPlan:
    comms = {path: replace(comm, axes_at_once=choice) for path, comm in plan.comms.items()}
    others = {
        name: replace(other, plan=_with_axes_at_once(other.plan, choice))
        for name, other in plan.others.items()
    }
    return replace(plan, comms=comms, others=others)


def on_sparse_cores(plan: StepPlan) -> bool:
    """Tells whether a TPU's SparseCores run the collectives of a step."""
    return any(comm.axes_at_once == "sparse_cores" for comm in plan.comms.values())


def _has_sparse_cores(plan: StepPlan) -> bool:
    """Tells whether the mesh is one slice of TPUs whose SparseCores can run collectives."""
    slices = {slice_index(device) for device in plan.layout.mesh.devices.flat}
    return len(slices) == 1 and _device_kind(plan) in xla_flags.OF_TPU


def _device_kind(plan: StepPlan) -> str:
    return str(plan.layout.mesh.devices.flat[0].device_kind)


def offload_options(plan: StepPlan) -> dict[str, Any]:
    """Chooses the XLA options without which offloaded arrays get wrong gradients."""
    if not on_gpu(plan) or not plan.offloads:
        return {}
    return {xla_flags.WITHOUT_PASS: xla_flags.ANNOTATOR}


def compiled_by_caller(plan: StepPlan) -> StepPlan:
    """Plans a step that the caller compiles, without the options of `make_train_step`.

    Its collectives do not use SparseCores. Raises ValueError if it offloads on GPUs, and XLA_FLAGS
    lacks the option that this needs.
    """
    flags = " ".join(xla_flags.environment_flags().values())
    if offload_options(plan) and xla_flags.ANNOTATOR not in flags:
        raise ArgumentError(
            "a step that offloads needs an option of XLA on GPUs, or its gradients are wrong",
            where="offload",
            fix=f"XLA_FLAGS=--{xla_flags.WITHOUT_PASS}={xla_flags.ANNOTATOR}, or make_train_step",
        )
    return _with_axes_at_once(plan, "one") if on_sparse_cores(plan) else plan


def on_gpu(plan: StepPlan) -> bool:
    """Tells whether the plan's mesh has GPUs, present or only compiled for."""
    return plan.layout.mesh.devices.flat[0].platform in GPU
