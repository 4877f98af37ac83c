"""The chips that a plan may speak of: memory, bandwidths and peak rates of one jax device, each
with its source.

Rates are the vendor's peaks without structured sparsity. Bandwidths count one direction: what a
device sends while it receives as much. Vendors mostly print the sum of both directions, which is
halved here.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jax.typing import DTypeLike

GIB = 2**30
TERA = 1e12
GIGA = 1e9


@dataclasses.dataclass(frozen=True)
class CudaTarget:
    """What XLA's CUDA compiler asks about a GPU, beside its memory. Sizes in bytes.

    From the files that each chip's `source` names in XLA's `xla/backends/gpu/target_config/specs`;
    what is equal in all of them is in `target_config`. `capability` is (major, minor).
    """

    capability: tuple[int, int]
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    l2_cache_size: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device as jax counts them: a GPU, or a TPU chip.

    Attributes:
        name: as topologies are written, `h100`.
        platform: of jax: cuda, tpu or cpu.
        device_kinds: what `jax.Device.device_kind` says of it.
        memory_bytes: of the device; what the driver keeps for itself is not taken off.
        memory_bandwidth: bytes/s between the device and its own memory.
        peak_flops: FLOP/s of matrix products by operand dtype; `float8` stands for all its kinds.
            `float32` is what jax's default matmul precision runs: TF32 on GPUs that have it. A
            dtype that has no matrix unit, or whose rate the vendor does not tell, is absent.
        link_bandwidth: bytes/s that one device sends over its fast links together: NVLink, or all
            links of the torus.
        torus_dims: physical dims of a TPU slice; 0 where a switch joins all devices of a host.
        network_bandwidth: bytes/s that one device sends out of its host (GPU) or slice (TPU), where
            each has its share of the vendor's reference system.
        reserved_bytes: of the memory, what a program cannot have: on GPUs the driver's context and
            NCCL's buffers, as much as is usually in use beside jax's own; on TPUs what XLA's
            compiler leaves free (15.75 of 16 GiB).
        host_devices: the most devices of one host.
        slice_devices: the most devices of one TPU slice; of GPUs, there is no such bound.
        source: the documents that the figures come from.
        cuda: for the CUDA compiler.

    """

    name: str
    platform: str
    device_kinds: tuple[str, ...]
    source: str
    memory_bytes: int | None = None
    memory_bandwidth: float | None = None
    peak_flops: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    link_bandwidth: float | None = None
    torus_dims: int = 0
    network_bandwidth: float | None = None
    reserved_bytes: int = 0
    host_devices: int | None = None
    slice_devices: int | None = None
    cuda: CudaTarget | None = None

    @property
    def axis_bandwidth(self) -> float | None:
        """Bytes/s that one device sends along one torus dim, over its two links; None off a torus.

        A dim that does not close into a ring leaves half of it to the devices at its ends.
        """
        return (
            self.link_bandwidth / self.torus_dims
            if self.link_bandwidth and self.torus_dims
            else None
        )


_AMPERE = {"bfloat16": 312 * TERA, "float16": 312 * TERA, "float32": 156 * TERA, "int8": 624 * TERA}
# The datasheets print twice these, with sparsity; the white paper has them as they are here.
_HOPPER = {
    "bfloat16": 989.4 * TERA,
    "float16": 989.4 * TERA,
    "float32": 494.7 * TERA,
    "float8": 1978.9 * TERA,
    "int8": 1978.9 * TERA,
}
_BLACKWELL = {
    "bfloat16": 2250 * TERA,
    "float16": 2250 * TERA,
    "float32": 1100 * TERA,
    "float8": 4500 * TERA,
    "int8": 4500 * TERA,
}
_HOPPER_CUDA = CudaTarget((9, 0), 132, 128, 1.98, 52428800, 233472, 232448)
_AMPERE_CUDA = CudaTarget((8, 0), 108, 64, 1.41, 41943040, 167936, 166912)

# Memory and its bandwidth are as the CUDA driver reports them, from the same files of XLA as
# `CudaTarget`.
_GPUS = [
    Hardware(
        name="h100",
        platform="cuda",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        source="NVIDIA H100 Tensor Core GPU Architecture white paper (H100 SXM5); DGX H100 datasheet; XLA h100_sxm",
        memory_bytes=84942979072,
        memory_bandwidth=3352320000000,
        peak_flops=_HOPPER,
        link_bandwidth=450 * GIGA,  # 18 NVLink 4 links, 900 GB/s in both directions
        network_bandwidth=50 * GIGA,  # one 400 Gb/s ConnectX-7 for each GPU
        reserved_bytes=2 * GIB,
        host_devices=8,
        cuda=_HOPPER_CUDA,
    ),
    Hardware(
        name="h200",
        platform="cuda",
        device_kinds=("NVIDIA H200",),
        source="NVIDIA H200 Tensor Core GPU datasheet (H200 SXM); DGX H200 datasheet; XLA h200",
        memory_bytes=151397597184,
        memory_bandwidth=4800000000000,
        peak_flops=_HOPPER,
        link_bandwidth=450 * GIGA,  # as h100
        network_bandwidth=50 * GIGA,  # as h100
        reserved_bytes=2 * GIB,
        host_devices=8,
        cuda=_HOPPER_CUDA,
    ),
    Hardware(
        name="b200",
        platform="cuda",
        device_kinds=("NVIDIA B200",),
        source="NVIDIA Blackwell Architecture Technical Brief (HGX B200); DGX B200 datasheet; XLA b200",
        memory_bytes=191514411008,
        memory_bandwidth=7672320000000,
        peak_flops=_BLACKWELL,
        link_bandwidth=900 * GIGA,  # 18 NVLink 5 links, 1.8 TB/s in both directions
        network_bandwidth=50 * GIGA,  # one 400 Gb/s ConnectX-7 for each GPU
        reserved_bytes=2 * GIB,
        host_devices=8,
        cuda=CudaTarget((10, 0), 148, 128, 1.965, 132644864, 233472, 232448),
    ),
    Hardware(
        name="a100-40gb",
        platform="cuda",
        device_kinds=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        source="NVIDIA A100 Tensor Core GPU datasheet (A100 40GB SXM); DGX A100 user guide; XLA a100_sxm_40",
        memory_bytes=42331013120,
        memory_bandwidth=1555200000000,
        peak_flops=_AMPERE,
        link_bandwidth=300 * GIGA,  # 12 NVLink 3 links, 600 GB/s in both directions
        network_bandwidth=25 * GIGA,  # one 200 Gb/s ConnectX-6 for each GPU
        reserved_bytes=2 * GIB,
        host_devices=16,  # the largest NVSwitch board
        cuda=_AMPERE_CUDA,
    ),
    Hardware(
        name="a100-80gb",
        platform="cuda",
        device_kinds=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        source="NVIDIA A100 Tensor Core GPU datasheet (A100 80GB SXM); DGX A100 user guide; XLA a100_sxm_80",
        memory_bytes=85100068864,
        memory_bandwidth=2039040000000,
        peak_flops=_AMPERE,
        link_bandwidth=300 * GIGA,  # as a100-40gb
        network_bandwidth=25 * GIGA,  # as a100-40gb
        reserved_bytes=2 * GIB,
        host_devices=16,  # as a100-40gb
        cuda=_AMPERE_CUDA,
    ),
    Hardware(
        name="v100",
        platform="cuda",
        device_kinds=("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-16GB"),
        source="NVIDIA V100 Tensor Core GPU datasheet (V100 SXM2, 32 GB); DGX-1 datasheet; XLA v100",
        memory_bytes=int(
            31.75 * GIB
        ),  # of the 32 GB part, as TensorFlow's device log prints it; XLA's file is 16 GB
        memory_bandwidth=898048000000,
        peak_flops={"float16": 125 * TERA, "float32": 15.7 * TERA},  # neither bfloat16 nor TF32
        link_bandwidth=150 * GIGA,  # 6 NVLink 2 links, 300 GB/s in both directions
        network_bandwidth=6.25 * GIGA,  # four 100 Gb/s ports for eight GPUs
        reserved_bytes=2 * GIB,
        host_devices=8,
        # It is 7.0, which CUDA 13 no longer compiles for. Buffers and collectives are those of 7.5;
        # kernels may not be.
        cuda=CudaTarget((7, 5), 80, 64, 1.53, 6291456, 98304, 98304),
    ),
]

# TPUs have no float16 and no separate float32 rate: a float32 product at jax's default precision is
# one of bfloat16.
_TPUS = [
    Hardware(
        name="v4",
        platform="tpu",
        device_kinds=("TPU v4",),
        source="Cloud TPU documentation, TPU v4; Jouppi et al., TPU v4, ISCA 2023, table 4; How To Scale Your Model",
        memory_bytes=32 * GIB,
        memory_bandwidth=1200 * GIGA,
        peak_flops={"bfloat16": 275 * TERA, "float32": 275 * TERA, "int8": 275 * TERA},
        link_bandwidth=300
        * GIGA,  # 6 links of 50 GB/s (ISCA); How To Scale Your Model reckons with 45
        torus_dims=3,
        network_bandwidth=6.25 * GIGA,  # 25 GB/s for a host of four chips (How To Scale Your Model)
        reserved_bytes=GIB // 4,
        host_devices=4,
        slice_devices=4096,
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
        network_bandwidth=3.125 * GIGA,  # two 100 Gb/s ports for eight chips; 6.4 Tb/s a pod
        reserved_bytes=GIB // 4,
        host_devices=8,
        slice_devices=256,
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
        slice_devices=8960,
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
        network_bandwidth=12.5 * GIGA,  # 100 Gb/s a chip
        reserved_bytes=GIB // 4,
        host_devices=8,
        slice_devices=256,
    ),
]

_CPU = Hardware(
    "cpu",
    "cpu",
    ("cpu",),
    source="virtual devices share a host: none of its figures is that of one",
)

HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {chip.name: chip for chip in [*_GPUS, *_TPUS, _CPU]}
)
"""Every chip by its name in a topology."""


def hardware_of(device_kind: str) -> Hardware | None:
    """The chip that `jax.Device.device_kind` names; None for one that is not in the table."""
    return next((chip for chip in HARDWARE.values() if device_kind in chip.device_kinds), None)


def peak_flops(device_kind: str, dtype: DTypeLike) -> float | None:
    """FLOP/s of matrix products of that dtype on a live device, after its `device_kind`; None where
    unknown.

    `float32` is at jax's default matmul precision: TF32 on GPUs, bfloat16 on TPUs.
    """
    chip, name = hardware_of(device_kind), jnp.dtype(dtype).name
    return chip.peak_flops.get("float8" if name.startswith("float8") else name) if chip else None


def target_config(chip: Hardware) -> str:
    """The text proto (XLA's `GpuTargetConfigProto`) from which the CUDA compiler knows a GPU that
    is not there.
    """
    assert chip.cuda is not None, f"{chip.name} is no GPU"
    gpu = chip.cuda
    # sm_90a and sm_100a: instructions of that one generation, as XLA takes them for a live GPU
    major, minor = gpu.capability
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_optin}
  threads_per_core_limit: 2048
  core_count: {gpu.core_count}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  clock_rate_ghz: {gpu.clock_rate_ghz}
  l2_cache_size: {gpu.l2_cache_size}
  memory_bandwidth: {chip.memory_bandwidth:.0f}
  device_memory_size: {chip.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.device_kinds[0]}"
"""
