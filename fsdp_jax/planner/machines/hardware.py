"""What `chips.toml` tells of a chip: peak rates, and the fractions of them that are achieved."""

import dataclasses
from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Any, NamedTuple


class Protocol(NamedTuple):
    """Latencies and bandwidth of one protocol; a collective uses the fastest for its size."""

    base: float  # seconds of any collective
    link: float  # seconds of a step inside a host, or to the next chip
    network: float  # seconds of a step between hosts, or slices
    share: float  # of the bandwidth that the protocol reaches


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Fractions of a chip's peaks that programs achieve: the constants of the roofline.

    `matmul` of some chips is fitted on published runs: `scripts/validate_plan.py` names them, and
    the runs that it is compared with.
    """

    matmul: float  # of the peak rate, for a matmul that fills the chip
    # (m, n, fraction of `matmul`) of the tiles that a matmul is cut into; the best is taken
    tiles: tuple[tuple[int, int, float], ...]
    cores: int  # how many tiles run at once
    collective_cores: int  # of these, what a collective takes while it runs
    ramp: int  # length of k at which filling and draining takes half of a tile's time
    # of the peak rate, for an attention kernel on long sequences, counted by its algorithm (5
    # matmuls in the backward pass)
    attention: float
    attention_ramp: int  # keys of a query, in the mean, at which it reaches half of that rate
    memory: float  # of the memory bandwidth, for fused elementwise chains
    link: float  # of the link bandwidth, for large rings
    network: float  # of the network bandwidth
    tree: float  # of a ring's rate, for an all-reduce over trees
    protocols: tuple[Protocol, ...]
    launch: float  # seconds of overhead per kernel
    host: float  # of the bandwidth between device and host memory, for large pinned buffers
    source: str  # where the numbers come from


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device as jax counts them: a GPU, a TPU chip, or one of the two chiplets of a TPU7x.

    Rates are the vendor's peaks without structured sparsity. Bandwidths count one direction, half
    of the number that vendors mostly print: a device sends as much as it receives meanwhile.
    """

    name: str  # as in a topology, `h100`
    platform: str  # jax's name: cuda, tpu or cpu
    device_kinds: tuple[str, ...]  # values of `jax.Device.device_kind` for this chip
    source: str  # the documents that the numbers come from
    memory_bytes: int | None = None  # device memory, including what the driver reserves
    memory_bandwidth: float | None = None  # bytes/s between the device and its own memory
    # FLOP/s of matmuls by operand dtype; `float8` stands for all float8 dtypes. `float32` is what
    # jax's default matmul precision runs: TF32 on GPUs that have it. A dtype without a matrix unit,
    # or whose rate is not published, is absent
    peak_flops: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    # bytes/s that a GPU or a TPU chip sends over all fast links: NVLink, or the torus
    link_bandwidth: float | None = None
    torus_dims: int = 0  # physical dims of a TPU slice; 0 where a switch joins a host's devices
    ring_chips: int = 4  # a torus dim closes into a ring where its length is a multiple of this
    # bytes/s that one device sends out of its host (GPU) or slice (TPU): its share in the vendor's
    # reference system
    network_bandwidth: float | None = None
    chip_devices: int = 1  # devices of one TPU chip, which share its links
    # memory that a program cannot use: on GPUs the driver's context and NCCL's buffers, as much as
    # is typical; on TPUs what XLA's compiler leaves free (15.75 of 16 GiB)
    reserved_bytes: int = 0
    host_devices: int | None = None  # the most devices of one host
    domain_devices: int | None = None  # GPUs that NVLink joins; None: those of a host
    host_bandwidth: float | None = None  # bytes/s read from host memory while as much is written
    # memory of a host with `host_devices` devices in the vendor's reference system; a machine that
    # is rented may have another; None where it is not published
    host_memory_bytes: int | None = None
    slice_devices: int | None = None  # the most devices of one TPU slice; None for GPUs
    # fractions of the peaks that programs achieve; None for virtual CPU devices
    efficiency: Efficiency | None = None
    # what XLA's CUDA compiler asks about a GPU, except its memory: `capability` (major, minor), and
    # fields of `gpu_target.pbtxt`, sizes in bytes; None for others
    cuda: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    # options of the compiler plugin for this chip
    topology_options: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def usable_bytes(self) -> int:
        """Device memory that a program can use."""
        assert self.memory_bytes is not None
        return self.memory_bytes - self.reserved_bytes

    @property
    def axis_bandwidth(self) -> float | None:
        """Bytes/s that one chip sends along one torus dim, over its two links; None off a torus.

        In a dim that does not close into a ring, the chips at the ends have half of it.
        """
        if not self.link_bandwidth or not self.torus_dims:
            return None
        return self.link_bandwidth / self.torus_dims


def target_config(chip: Hardware) -> str:
    """Writes the text proto (XLA's `GpuTargetConfigProto`) that describes an absent GPU to XLA."""
    assert chip.cuda is not None, f"{chip.name} is not a GPU"
    # sm_90a and sm_100a: instructions of that one generation, as XLA selects them for a live GPU
    major, minor = chip.cuda["capability"]
    accelerated = ""
    if major >= 9:
        accelerated = " feature_extension: ACCELERATED_FEATURES"
    file = resources.files("fsdp_jax.planner.machines").joinpath("gpu_target.pbtxt")
    return Template(file.read_text(encoding="utf-8")).substitute(
        chip.cuda,
        memory_bandwidth=f"{chip.memory_bandwidth:.0f}",
        memory_bytes=chip.memory_bytes,
        capability=f"major: {major} minor: {minor}{accelerated}",
        device_kind=chip.device_kinds[0],
    )
