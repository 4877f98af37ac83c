"""Devices of an absent machine, without a compiler: enough to lay out a step and to trace it."""

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

from fsdp_jax.compat.jax_devices import FakeDevice
from fsdp_jax.planner.machines.topology import Topology

_HOST = (2, 2)  # chips of a TPU host along the first two dims of the torus
# With several slices, the ids of the first start here, those of the second at twice that.
_SLICE_IDS = 100_000


def fake_devices(topology: Topology) -> list[Any]:
    """Makes one device for each of the machine, by id; for `make_mesh(devices=...)`.

    Hosts, slices and torus coordinates are those of the devices that `topology.devices()` makes.
    """
    chip = topology.hardware
    if chip.platform == "tpu":
        return list(_tpu_chips(topology))
    platform, capability = chip.platform, ""
    if chip.cuda is not None:  # what a jax device reports
        platform, capability = "gpu", "{}.{}".format(*chip.cuda["capability"])
    return [
        FakeDevice(
            id=number,
            process_index=number // topology.host_devices,
            platform=platform,
            device_kind=chip.device_kinds[0],
            compute_capability=capability,
        )
        for number in range(topology.size)
    ]


def _tpu_chips(topology: Topology) -> Iterator[FakeDevice]:
    """Yields the devices of each chip, by id; a host has a box of chips, not a run of ids."""
    kind, cores = topology.hardware.device_kinds[0], topology.hardware.chip_devices
    # three dims, as coordinates have; the last is 1 where the torus has two
    sizes = (*topology.shape, *[1] * (3 - len(topology.shape)))
    hosts = [size // part for size, part in zip(sizes, (*_HOST, 1), strict=True)]
    # the first dim changes fastest
    coordinates = [reverse[::-1] for reverse in product(*map(range, sizes[::-1]))]
    for index in range(topology.slices):
        first_id = 0
        if topology.slices > 1:
            first_id = _SLICE_IDS * (index + 1)
        places = product(coordinates, range(cores))
        for number, ((x, y, z), core) in enumerate(places, first_id):
            host = x // _HOST[0] + hosts[0] * (y // _HOST[1] + hosts[1] * z)
            process = host + index * prod(hosts)
            yield FakeDevice(number, process, "tpu", kind, index, (x, y, z), core)
