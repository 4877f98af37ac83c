"""How long a collective takes: its bytes over the links that its group of devices has, and the
latency of its steps.

A ring sends what `inspect.collectives` counts, over the slowest link of the ring; between hosts
that is the network, which all devices of a host share out. All-reduces may go up and down a tree
instead, with fewer steps. On a torus each dim that the group runs along has links of its own.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import log2

import jax
import numpy as np
from jax.sharding import Mesh

from fsdp_jax.planner.machines.efficiency import Efficiency, Protocol
from fsdp_jax.planner.machines.hardware import Hardware

WRAPS = {"v5e": 16, "v6e": 16}
"""Chips that a torus dim needs to close into a ring; 4 of the other TPUs, whose slices are made of 4x4x4 cubes."""


@dataclass(frozen=True)
class Group:
    """The devices that one collective joins.

    Attributes:
        size: how many.
        hosts: over how many hosts, or slices of a TPU, they lie.
        dims: of a TPU: (chips, whether it closes into a ring) of each torus dim that they run
            along.

    """

    size: int
    hosts: int
    dims: tuple[tuple[int, bool], ...] = ()

    @property
    def local(self) -> int:
        """Devices of it on one host, or in one slice."""
        return self.size // self.hosts


class Network:
    """The links behind a mesh."""

    def __init__(self, mesh: Mesh, chip: Hardware, efficiency: Efficiency):
        self.mesh, self.chip, self.efficiency = mesh, chip, efficiency
        self.group = cache(self._group)
        self._whole = self._extents(list(mesh.devices.flat)) if chip.torus_dims else ()

    def _group(self, axes: str) -> Group:
        """The devices along mesh axes, joined by "+" as a `Collective` has them; all of them where
        it is unknown.
        """
        names = [axis for axis in axes.split("+") if axis in self.mesh.axis_names]
        index = tuple(
            slice(None) if not names or axis in names else 0 for axis in self.mesh.axis_names
        )
        devices = list(np.asarray(self.mesh.devices[index]).flat)
        tpu = self.chip.torus_dims > 0
        hosts = len({_home(device, tpu) for device in devices})
        return Group(len(devices), hosts, self._dims(devices) if tpu else ())

    def _dims(self, devices: list[jax.Device]) -> tuple[tuple[int, bool], ...]:
        ring = WRAPS.get(self.chip.name, 4)
        both = zip(
            self._extents(devices), self._whole, strict=True
        )  # a part of a dim does not close
        return tuple(
            (extent, extent == whole and extent % ring == 0) for extent, whole in both if extent > 1
        )

    @staticmethod
    def _extents(devices: list[jax.Device]) -> tuple[int, ...]:
        return tuple(
            len(set(along)) for along in zip(*(device.coords for device in devices), strict=True)
        )

    def seconds(self, op: str, sent: int, axes: str) -> float:
        """Of one execution.

        Args:
            op: as a `Collective` names it.
            sent: bytes that a device sends, by a ring.
            axes: mesh axes joined by "+".

        """
        group = self.group(axes)
        if group.size < 2 or not sent:
            return 0.0
        return min(
            self._takes(op, sent, group, protocol)
            for protocol in self.efficiency.constants.protocols
        )

    def _takes(self, op: str, sent: int, group: Group, protocol: Protocol) -> float:
        if op == "permute":
            step = protocol.link if group.hosts == 1 else protocol.network
            along = replace(
                group, dims=group.dims and (max(group.dims, key=lambda dim: dim[1]),)
            )  # to a neighbour
            return protocol.base + step + sent / (self._rate(along, 1) * protocol.share)
        if op == "all-to-all":
            return (
                protocol.base
                + _ring_steps(group, op, protocol)
                + self._exchange(sent, group) / protocol.share
            )
        rate = self._rate(group, group.local) * protocol.share
        ring = protocol.base + _ring_steps(group, op, protocol) + sent / rate
        if op != "all-reduce" or group.dims:
            return ring
        # Up and down a chain in each host and a double binary tree between hosts, as NCCL has it.
        steps = (group.local - 1) * protocol.link + log2(group.hosts) * protocol.network
        return min(ring, protocol.base + 2 * steps + sent / (rate * self.efficiency.constants.tree))

    def _exchange(self, sent: int, group: Group) -> float:
        """Seconds of an all-to-all's bytes, which no ring passes on.

        What goes to another host leaves by one's own port. On a torus it passes through the chips
        between: a dim's links carry a quarter of its length times what one chip has, the middle of
        an open one twice that.
        """
        constants, away = self.efficiency.constants, (group.size - group.local) / (group.size - 1)
        if group.dims:
            assert self.chip.axis_bandwidth is not None
            through = max(extent / (4 if closed else 2) for extent, closed in group.dims)
            fast = (
                sent
                * group.size
                / (group.size - 1)
                * through
                / (self.chip.axis_bandwidth * constants.link)
            )
        else:
            fast = sent * (1 - away) / (self._links(group) * constants.link)
        if group.hosts == 1:
            return fast
        assert self.chip.network_bandwidth is not None
        return max(fast, sent * away / (self.chip.network_bandwidth * constants.network))

    def _rate(self, group: Group, shared: int) -> float:
        """Bytes/s of the ring's slowest link; `shared`: devices of a host whose network ports the
        ring has.
        """
        constants = self.efficiency.constants
        fast = self._links(group) * constants.link
        if group.hosts == 1:
            return fast
        assert self.chip.network_bandwidth is not None
        across = self.chip.network_bandwidth * constants.network * shared
        return across if group.local == 1 else min(fast, across)

    def _links(self, group: Group) -> float:
        chip = self.chip
        assert chip.link_bandwidth is not None, f"{chip.name} has no links"
        if chip.axis_bandwidth is None:
            return chip.link_bandwidth
        each = (
            chip.axis_bandwidth
        )  # both directions of a dim; at the ends of an open one there is half of it
        return sum(each if closed else each / 2 for _, closed in group.dims) or chip.link_bandwidth


def _ring_steps(group: Group, op: str, protocol: Protocol) -> float:
    """Seconds of a ring's steps, one after the other; on a torus both ways around at once."""
    across = group.hosts - 1
    within = sum(extent / 2 if closed else extent - 1 for extent, closed in group.dims)
    steps = (
        within if group.dims else group.size - 1 - across
    ) * protocol.link + across * protocol.network
    return (2 if op == "all-reduce" else 1) * steps


def _home(device: jax.Device, tpu: bool) -> int:
    return int(getattr(device, "slice_index", 0) or 0) if tpu else int(device.process_index)
