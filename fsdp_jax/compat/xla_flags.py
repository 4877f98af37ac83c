"""Options and environment variables of XLA that only its source explains."""

import os
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

THREADS_PER_DEVICE = 4  # of virtual CPU devices

WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
"""Compiles all matmuls for cuBLAS.

Without a GPU to try tile sizes on, XLA takes the first valid size for each matmul. For some there
is none, such as those over the odd number of positions of a vision transformer. With a GPU, XLA
uses cuBLAS for those.
"""

WITHOUT_PASS = "xla_disable_hlo_passes"
ANNOTATOR = "dynamic-slice-annotator"
"""The pass of XLA:GPU that reads what a loop over layers has in host memory by strides.

They are of parameters and saved activations; it derives them from the loop, and takes those of the
backward loop for ascending ones: silently wrong gradients (openxla/xla#46231). Without it XLA
computes the index.
"""


_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
SPARSE_CORE: Mapping[str, Any] = MappingProxyType(
    dict.fromkeys(
        [
            *(f"xla_tpu_enable_sparse_core_collective_offload_{op}" for op in _COLLECTIVES),
            # ... and those along several dims of the torus at once
            "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather",
            "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather",
            "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter",
            "xla_tpu_enable_concurrent_sparse_core_offloading",
            "xla_tpu_use_tc_device_shape_on_sc",
            "xla_sc_disable_megacore_partitioning",
        ],
        True,
    )
    | dict.fromkeys(
        [
            # the other way to overlap, inside the fusions of matmuls, excludes this one
            *(f"xla_tpu_enable_async_collective_fusion_fuse_{op}" for op in _COLLECTIVES),
            "xla_sc_enable_instruction_fusion",
        ],
        False,
    )
    | {"xla_max_concurrent_async_all_gathers": 3, "xla_max_concurrent_async_reduce_scatters": 3}
)
"""Has a TPU's SparseCores run collectives, several at a time, while its TensorCore multiplies.

By default XLA waits for each collective of a scanned layer, and makes a reduce-scatter along
several dims of the torus at once an all-reduce, which sends twice the bytes.
"""
WITHOUT_WINDOWED_MATMULS: Mapping[str, Any] = MappingProxyType(
    dict.fromkeys(
        (
            "xla_tpu_enable_windowed_einsum_for_all_gather",
            "xla_tpu_enable_windowed_einsum_for_reduce_scatter",
        ),
        False,
    )
)
"""Has XLA:TPU gather a parameter before the matmul that reads it, and scatter a gradient after.

By default its partitioner makes one loop of a large matmul and its gather, which multiplies with a
shard while a collective-permute brings the next. That sends more bytes, around a ring of all
devices, and hides fewer than SparseCores do. Explicit collectives are not made into such loops.
"""


OF_TPU: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    dict.fromkeys(("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e"), SPARSE_CORE)
)
"""Device kind -> options by which collectives overlap with compute; no other TPU was tried."""


def environment_flags() -> dict[str, str]:
    """Reads the environment variables that decide on what is compiled; "" for one not set."""
    return {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}


def combine_collectives(gathered: int, scattered: int) -> dict[str, Any]:
    """Makes options by which XLA:GPU combines gathers, and reductions, of up to so many bytes.

    XLA counts the bytes of results: of gathers whole arrays, of reduce-scatters a device's shards.
    The latency-hiding scheduler is asked for by name: before Hopper XLA does without it, and
    nothing at all is hidden.
    """
    return {
        "xla_gpu_all_gather_combine_threshold_bytes": gathered,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": scattered,
        "xla_gpu_enable_latency_hiding_scheduler": True,
    }


def set_virtual_devices(count: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the environment in which XLA:CPU, once it starts, runs `count` devices.

    `environment`: this process's own, or that of one to start.

    A collective blocks a thread, and XLA has as many in all as NPROC says, by default one a device.
    A device blocks one thread, and one more for each loop with collectives that runs at that time:
    if all are blocked in different collectives, XLA aborts the process after the time below. Four a
    device suffice for a loop over microbatches with one over layers in it.

    Neither flags nor threads help a program that XLA has read from a cache without the order of its
    collectives: `fsdp_jax.compat.compilation_cache.without_cache_on_cpus`.
    """
    environment.setdefault("NPROC", str(THREADS_PER_DEVICE * count))
    flags = {
        # Agrees with jax's own setting, for processes that inherit the environment.
        "--xla_force_host_platform_device_count": count,
        # A busy machine may delay one device's thread; the default aborts after 40 s.
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
        "--xla_cpu_collective_call_terminate_timeout_seconds": 600,
    }
    present = environment.get("XLA_FLAGS", "").split()
    others = [flag for flag in present if flag.partition("=")[0] not in flags]
    added = [f"{name}={value}" for name, value in flags.items()]
    environment["XLA_FLAGS"] = " ".join([*others, *added])
