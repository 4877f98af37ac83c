"""Devices of a machine that is not there, without a compiler for it: enough to lay out a step on,
and to trace it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from fsdp_jax.planner.machines.topology import Topology

_HOST = (2, 2)  # the chips of a TPU host along the first two dims of the torus
_SLICE_IDS = (
    100_000  # with several slices, the ids of the first start here, of the second at twice that
)


@dataclass(frozen=True, order=True)
class StandIn:
    """What jax and `make_mesh` ask of a device before anything is compiled. Nothing can be put on
    it.
    """

    id: int
    process_index: int
    platform: str
    device_kind: str
    slice_index: int = 0
    client: None = None

    @property
    def local_hardware_id(self) -> int:
        """Not known of a machine that is not there."""
        return 0

    def default_memory(self) -> "StandInMemory":
        """The device's own."""
        return StandInMemory()

    def addressable_memories(self) -> Sequence["StandInMemory"]:
        """Its own alone."""
        return [self.default_memory()]


@dataclass(frozen=True, order=True)
class StandInChip(StandIn):
    """A TPU chip, at its place in the torus."""

    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


@dataclass(frozen=True)
class StandInMemory:
    """The memory of a device."""

    kind: str = "device"


def stand_ins(topology: Topology) -> list[Any]:
    """One for each device, in the order of their ids; for `make_mesh(devices=...)`.

    Hosts, slices and places in the torus are those of the devices that `topology.devices()` makes.
    """
    kind, platform = topology.hardware.device_kinds[0], topology.hardware.platform
    if platform == "tpu":
        return list(_chips(topology, kind))
    hosts = topology.shape[1] if platform == "cuda" else topology.size
    platform = "gpu" if platform == "cuda" else platform  # as jax says it of a device
    return [StandIn(number, number // hosts, platform, kind) for number in range(topology.size)]


def _chips(topology: Topology, kind: str) -> list[StandInChip]:
    sizes = (*topology.shape, *[1] * (3 - len(topology.shape)))
    hosts = [size // part for size, part in zip(sizes, (*_HOST, 1), strict=True)]
    places = [at[::-1] for at in product(*map(range, sizes[::-1]))]  # the first dim changes fastest
    chips = []
    for number in range(topology.slices):
        first = _SLICE_IDS * (number + 1) if topology.slices > 1 else 0
        for at, (x, y, z) in enumerate(places, first):
            host = x // _HOST[0] + hosts[0] * (y // _HOST[1] + hosts[1] * z)
            process = host + number * prod(hosts)
            chips.append(StandInChip(at, process, "tpu", kind, number, coords=(x, y, z)))
    return chips
