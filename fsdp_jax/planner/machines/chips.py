"""The table of chips: each entry has all that the planner knows about one chip, with its sources.

To add a chip, add an entry here. Efficiencies are measurements of others, or by analogy where an
entry says so; two constants are fitted: the matmul rates of H100 and A100.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from fsdp_jax.errors import message
from fsdp_jax.planner.machines.hardware import CudaTarget, Efficiency, Hardware, Protocol

GIB = 2**30
TERA = 1e12
GIGA = 1e9
MICRO = 1e-6
_ADA = 8.9  # the first compute capability with float8, NVIDIA Ada GPU Architecture white paper
_IRONWOOD = "TPU7"  # 4614 TFLOP/s in float8, 2307 in bfloat16, Cloud TPU documentation, TPU7x

# NCCL's own tuning table (src/graph/tuning.cc): LL128 and Simple rings, NVLink and network.
_NCCL = (
    Protocol(14.0 * MICRO, 1.9 * MICRO, 4.0 * MICRO, 0.92),
    Protocol(8.4 * MICRO, 3.4 * MICRO, 14.0 * MICRO, 1.0),
)
# "How To Scale Your Model": about 1 us a hop; slices are joined through their hosts.
_ICI = (Protocol(3 * MICRO, 1 * MICRO, 30 * MICRO, 1.0),)

_H100 = Efficiency(
    matmul=0.57,
    tiles=((128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.8), (64, 64, 0.6)),  # cuBLAS's kernels
    cores=132,
    ramp=128,
    attention=0.46,
    memory=0.88,
    link=370 / 450,
    network=0.92,
    tree=0.92,
    protocols=_NCCL,
    launch=1.8 * MICRO,
    host=0.87,
    source="matmul: fitted on MosaicML's runs; alone such matmuls reach 0.70-0.80 (ml-engineering's"
    " accelerator benchmarks), but within a step power limits the chip; attention: cuDNN in"
    " FlashAttention-3's figures (causal, head dim 128, T 4k, both ways); memory: BabelStream"
    " triad, Azure ND_H100_v5 (0.87-0.95); link: 370 GB/s of 450, nccl-tests issue 212; network:"
    " 46-48 GB/s of a 400 Gb port, nccl-tests issue 290; launch: How To Scale Your Model, GPUs;"
    " host: 55.6 of 64 GB/s, nvbandwidth's host_to_device_memcpy_ce in NVIDIA's blog; GPUs behind"
    " one PCIe switch share its link to the host, which is not modelled",
)
_A100 = replace(
    _H100,
    matmul=0.78,
    cores=108,
    attention=0.52,
    memory=0.81,
    link=230 / 300,
    host=0.80,
    source="matmul: fitted on MosaicML's runs; alone 0.80-0.87 (ml-engineering, Azure"
    " ND_A100_v4); attention: FlashAttention-2, section 4; memory: BabelStream, Azure ND_A100_v4"
    " (0.79-0.86); link: 230 GB/s of 300, nccl-tests issue 149; network: 96 of 100, nccl-tests"
    " issue 119; host: about 25 of 32 GB/s, by analogy with h100; not measured",
)
_TPU = Efficiency(
    matmul=0.92,
    tiles=((8, 128, 1.0),),
    cores=1,
    ramp=128,
    attention=0.50,
    memory=0.88,
    link=0.85,
    network=0.8,
    tree=1.0,
    protocols=_ICI,
    launch=1.5 * MICRO,
    host=0.9,
    source="matmul: 80-90% of simple kernels, JAX's Pallas TPU matmul tutorial, XLA above it; link:"
    " 0.82 measured on an open v5e axis, How To Scale Your Model, sharding; host: by analogy with"
    " h100; not measured",
)

_AMPERE_PEAKS = {
    "bfloat16": 312 * TERA,
    "float16": 312 * TERA,
    "float32": 156 * TERA,
    "int8": 624 * TERA,
}
# The datasheets print twice these, with sparsity; the white paper has them as they are here.
_HOPPER_PEAKS = {
    "bfloat16": 989.4 * TERA,
    "float16": 989.4 * TERA,
    "float32": 494.7 * TERA,
    "float8": 1978.9 * TERA,
    "int8": 1978.9 * TERA,
}
_BLACKWELL_PEAKS = {
    "bfloat16": 2250 * TERA,
    "float16": 2250 * TERA,
    "float32": 1100 * TERA,
    "float8": 4500 * TERA,
    "int8": 4500 * TERA,
}
_HOPPER_TARGET = CudaTarget((9, 0), 132, 128, 1.98, 52428800, 233472, 232448)
_AMPERE_TARGET = CudaTarget((8, 0), 108, 64, 1.41, 41943040, 167936, 166912)

# Memory and its bandwidth are as the CUDA driver reports them, from the same files of XLA as
# `CudaTarget`.
_A100_40GB = Hardware(
    name="a100-40gb",
    platform="cuda",
    device_kinds=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
    source="NVIDIA A100 Tensor Core GPU datasheet (A100 40GB SXM); DGX A100 user guide; XLA"
    " a100_sxm_40",
    memory_bytes=42331013120,
    memory_bandwidth=1555200000000,
    peak_flops=_AMPERE_PEAKS,
    link_bandwidth=300 * GIGA,  # 12 NVLink 3 links, 600 GB/s in both directions
    network_bandwidth=25 * GIGA,  # one 200 Gb/s ConnectX-6 for each GPU
    reserved_bytes=2 * GIB,
    host_devices=16,  # the largest NVSwitch board
    host_bandwidth=32 * GIGA,  # PCIe 4, 16 lanes
    host_memory_bytes=1024 * GIB,  # DGX A100 320GB
    efficiency=_A100,
    cuda=_AMPERE_TARGET,
)

_GPUS = [
    Hardware(
        name="h100",
        platform="cuda",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        source="NVIDIA H100 Tensor Core GPU Architecture white paper (H100 SXM5); DGX H100"
        " datasheet; XLA h100_sxm",
        memory_bytes=84942979072,
        memory_bandwidth=3352320000000,
        peak_flops=_HOPPER_PEAKS,
        link_bandwidth=450 * GIGA,  # 18 NVLink 4 links, 900 GB/s in both directions
        network_bandwidth=50 * GIGA,  # one 400 Gb/s ConnectX-7 for each GPU
        reserved_bytes=2 * GIB,
        host_devices=8,
        host_bandwidth=64 * GIGA,  # PCIe 5, 16 lanes
        host_memory_bytes=2048 * GIB,  # DGX H100
        efficiency=_H100,
        cuda=_HOPPER_TARGET,
    ),
    Hardware(
        name="h200",
        platform="cuda",
        device_kinds=("NVIDIA H200",),
        source="NVIDIA H200 Tensor Core GPU datasheet (H200 SXM); DGX H200 datasheet; XLA h200",
        memory_bytes=151397597184,
        memory_bandwidth=4800000000000,
        peak_flops=_HOPPER_PEAKS,
        link_bandwidth=450 * GIGA,  # as h100
        network_bandwidth=50 * GIGA,  # as h100
        reserved_bytes=2 * GIB,
        host_devices=8,
        host_bandwidth=64 * GIGA,  # as h100
        host_memory_bytes=2048 * GIB,  # DGX H200
        efficiency=replace(
            _H100,
            memory=0.86,
            source=f"{_H100.source}; memory: BabelStream, Azure ND_H200_v5",
        ),
        cuda=_HOPPER_TARGET,
    ),
    Hardware(
        name="b200",
        platform="cuda",
        device_kinds=("NVIDIA B200",),
        source="NVIDIA Blackwell Architecture Technical Brief (HGX B200); DGX B200 datasheet; XLA"
        " b200",
        memory_bytes=191514411008,
        memory_bandwidth=7672320000000,
        peak_flops=_BLACKWELL_PEAKS,
        link_bandwidth=900 * GIGA,  # 18 NVLink 5 links, 1.8 TB/s in both directions
        network_bandwidth=50 * GIGA,  # one 400 Gb/s ConnectX-7 for each GPU
        reserved_bytes=2 * GIB,
        host_devices=8,
        host_bandwidth=64 * GIGA,  # PCIe 5, 16 lanes, as the hosts of DGX B200 have it
        host_memory_bytes=2048 * GIB,  # DGX B200
        efficiency=replace(
            _H100,
            cores=148,
            attention=0.45,
            memory=0.90,
            link=650 / 900,
            source="by analogy with h100, whose matmuls alone reach as much (0.776,"
            " ml-engineering); not measured",
        ),
        cuda=CudaTarget((10, 0), 148, 128, 1.965, 132644864, 233472, 232448),
    ),
    _A100_40GB,
    replace(
        _A100_40GB,
        name="a100-80gb",
        device_kinds=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        source="NVIDIA A100 Tensor Core GPU datasheet (A100 80GB SXM); DGX A100 user guide; XLA"
        " a100_sxm_80",
        memory_bytes=85100068864,
        memory_bandwidth=2039040000000,
        host_memory_bytes=2048 * GIB,  # DGX A100 640GB
    ),
    Hardware(
        name="v100",
        platform="cuda",
        device_kinds=("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-16GB"),
        source="NVIDIA V100 Tensor Core GPU datasheet (V100 SXM2, 32 GB); DGX-1 datasheet; XLA"
        " v100",
        # of the 32 GB part, as TensorFlow's device log prints it; XLA's file is for 16 GB
        memory_bytes=int(31.75 * GIB),
        memory_bandwidth=898048000000,
        peak_flops={"float16": 125 * TERA, "float32": 15.7 * TERA},  # neither bfloat16 nor TF32
        link_bandwidth=150 * GIGA,  # 6 NVLink 2 links, 300 GB/s in both directions
        network_bandwidth=6.25 * GIGA,  # four 100 Gb/s ports for eight GPUs
        reserved_bytes=2 * GIB,
        host_devices=8,
        host_bandwidth=16 * GIGA,  # PCIe 3, 16 lanes
        host_memory_bytes=512 * GIB,  # DGX-1
        efficiency=replace(
            _A100,
            matmul=0.72,
            tiles=((128, 128, 1.0), (64, 128, 0.85), (64, 64, 0.65)),
            cores=80,
            attention=0.30,
            memory=0.85,
            link=120 / 150,
            network=0.9,
            source="matmul: alone 101 of 112 TFLOP/s on a PCIe card, an NVIDIA forum thread,"
            " reduced as a100's is from its rate alone; link: 6 of NCCL's 20 GB/s; others by"
            " analogy with a100",
        ),
        # It is 7.0, which CUDA 13 no longer compiles for. Buffers and collectives are those of 7.5;
        # kernels may not be.
        cuda=CudaTarget((7, 5), 80, 64, 1.53, 6291456, 98304, 98304),
    ),
]

# TPUs have no float16 and no separate float32 rate: a float32 matmul at jax's default precision
# runs in bfloat16.
_TPUS = [
    Hardware(
        name="v4",
        platform="tpu",
        device_kinds=("TPU v4",),
        source="Cloud TPU documentation, TPU v4; Jouppi et al., TPU v4, ISCA 2023, table 4; How To"
        " Scale Your Model",
        memory_bytes=32 * GIB,
        memory_bandwidth=1200 * GIGA,
        peak_flops={"bfloat16": 275 * TERA, "float32": 275 * TERA, "int8": 275 * TERA},
        # 6 links of 50 GB/s (ISCA); How To Scale Your Model assumes 45
        link_bandwidth=300 * GIGA,
        torus_dims=3,
        network_bandwidth=6.25 * GIGA,  # 25 GB/s for a host of four chips (How To Scale Your Model)
        reserved_bytes=GIB // 4,
        host_devices=4,
        host_bandwidth=16 * GIGA,  # PCIe, How To Scale Your Model
        host_memory_bytes=407 * 10**9,  # ct4p-hightpu-4t
        slice_devices=4096,
        efficiency=_TPU,
        # the runtime joins a chip's two cores into one device; the compiler does when told to
        topology_options={"chip_config_name": "megacore"},
    ),
    Hardware(
        name="v5e",
        platform="tpu",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        source="Cloud TPU documentation, TPU v5e",
        memory_bytes=16 * GIB,
        memory_bandwidth=819 * GIGA,
        peak_flops={"bfloat16": 197 * TERA, "float32": 197 * TERA, "int8": 393 * TERA},
        link_bandwidth=200 * GIGA,  # 4 links, 400 GB/s in both directions
        torus_dims=2,
        ring_chips=16,
        network_bandwidth=3.125 * GIGA,  # two 100 Gb/s ports for eight chips; 6.4 Tb/s a pod
        reserved_bytes=GIB // 4,
        host_devices=8,
        host_bandwidth=16 * GIGA,  # PCIe, How To Scale Your Model
        host_memory_bytes=384 * 10**9,  # ct5lp-hightpu-8t
        slice_devices=256,
        efficiency=_TPU,
    ),
    Hardware(
        name="v5p",
        platform="tpu",
        device_kinds=("TPU v5", "TPU v5p"),
        source="Cloud TPU documentation, TPU v5p and TPU7x (Ironwood), table of specifications",
        memory_bytes=95 * GIB,
        memory_bandwidth=2765 * GIGA,
        peak_flops={
            "bfloat16": 459 * TERA,
            "float32": 459 * TERA,
            "float8": 459 * TERA,
            "int8": 918 * TERA,
        },
        link_bandwidth=600 * GIGA,  # 6 links, 1200 GB/s in both directions
        torus_dims=3,
        network_bandwidth=6.25 * GIGA,  # 50 Gb/s a chip
        reserved_bytes=GIB // 4,
        host_devices=4,
        host_bandwidth=16 * GIGA,  # PCIe, How To Scale Your Model
        host_memory_bytes=448 * 10**9,  # ct5p-hightpu-4t
        slice_devices=8960,
        efficiency=_TPU,
    ),
    Hardware(
        name="v6e",
        platform="tpu",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        source="Cloud TPU documentation, TPU v6e and TPU7x (Ironwood), table of specifications",
        memory_bytes=32 * GIB,
        memory_bandwidth=1638 * GIGA,
        peak_flops={
            "bfloat16": 918 * TERA,
            "float32": 918 * TERA,
            "float8": 918 * TERA,
            "int8": 1836 * TERA,
        },
        link_bandwidth=400 * GIGA,  # 4 links, 800 GB/s in both directions
        torus_dims=2,
        ring_chips=16,
        network_bandwidth=12.5 * GIGA,  # 100 Gb/s a chip
        reserved_bytes=GIB // 4,
        host_devices=8,
        host_bandwidth=32 * GIGA,  # PCIe, How To Scale Your Model
        host_memory_bytes=1440 * 10**9,  # ct6e-standard-8t
        slice_devices=256,
        efficiency=replace(_TPU, tiles=((8, 256, 1.0),), ramp=256, attention=0.35),
    ),
]

_CPU = Hardware(
    "cpu",
    "cpu",
    ("cpu",),
    source="virtual devices share one host: no rate or size is that of a device",
)

HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {chip.name: chip for chip in [*_GPUS, *_TPUS, _CPU]}
)
"""Every chip by its name in a topology."""


def hardware_of(device_kind: str) -> Hardware | None:
    """Returns the chip that `jax.Device.device_kind` names; None if it is not in the table."""
    return next((chip for chip in HARDWARE.values() if device_kind in chip.device_kinds), None)


def peak_flops(device_kind: str, dtype: DTypeLike) -> float | None:
    """Returns the peak FLOP/s of matmuls of `dtype` on a live device; None if unknown.

    `float32` is at jax's default matmul precision: TF32 on GPUs, bfloat16 on TPUs.
    """
    chip = hardware_of(device_kind)
    if chip is None:
        return None
    name = jnp.dtype(dtype).name
    return chip.peak_flops.get("float8" if name.startswith("float8") else name)


def check_float8_matmuls(device: Any) -> None:
    """Refuses a chip without matrix units for float8, by the name of what it has in their place.

    Args:
        device: live, or of a topology. Virtual CPU devices pass: they compute the same numbers.

    Raises:
        ValueError: it multiplies float8 no faster than bfloat16.

    """
    kind = device.device_kind
    chip = hardware_of(kind)
    if chip is None:
        capability = str(getattr(device, "compute_capability", ""))
        is_cuda = re.fullmatch(r"\d+\.\d+", capability) is not None  # AMD's is a name
        has_units = (is_cuda and float(capability) >= _ADA) or kind.startswith(_IRONWOOD)
        got = "a chip that is not in the table, of no known kind"
    else:
        has_units = chip.platform == "cpu" or chip.has_float8_units
        rates = {name: chip.peak_flops.get(name, 0) for name in ("float8", "bfloat16")}
        got = ", ".join(f"{rate / TERA:.0f} TFLOP/s in {name}" for name, rate in rates.items())
    if not has_units:
        known = [each.name for each in HARDWARE.values() if each.has_float8_units]
        raise ValueError(
            message(
                f"{chip.name if chip else kind} has no matrix units for float8",
                where="precision.matmul",
                expected=f"{', '.join(known)}, an Ada GPU, or TPU7x",
                got=got,
                fix="leave matmul out; gather='float8_e4m3fn' alone sends half of the bytes",
            )
        )
