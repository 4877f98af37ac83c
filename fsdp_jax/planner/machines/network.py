"""How long a collective takes: its bytes over the links of its devices, plus latencies.

A ring sends the bytes that `hlo.collectives` counts, over its slowest link; between hosts that is
the network, whose ports all devices of a host share. All-reduces may use a tree instead, with fewer
steps. On a torus each dim that the group spans has links of its own.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from math import log2

import jax
import numpy as np
from jax.sharding import Mesh

from fsdp_jax.compat.jax_devices import slice_index
from fsdp_jax.planner.machines.hardware import Hardware, Protocol


@dataclass(frozen=True)
class DeviceGroup:
    """The devices that one collective joins."""

    size: int
    hosts: int  # or NVLink domains, or TPU slices, that they span
    # of TPUs: (chips, whether it closes into a ring) of each torus dim that they span
    dims: tuple[tuple[int, bool], ...] = ()
    extents: tuple[int, ...] = field(default=(), compare=False)  # chips along every torus dim
    # groups that use a chip's links at once: each has one of the chip's devices
    sharing: int = 1
    smallest: int = 0  # devices in the smallest of these hosts, domains or slices; 0: all are equal

    @property
    def local(self) -> int:
        """Devices of the group on one host, or in one slice; of unequal ones, on the smallest.

        A ring passes through all of them with as many ports as that has.
        """
        return self.smallest or self.size // self.hosts


class Network:
    """The links between the devices of a mesh, and how long collectives take over them."""

    def __init__(self, mesh: Mesh, chip: Hardware) -> None:
        assert chip.efficiency is not None
        assert chip.link_bandwidth is not None
        assert chip.network_bandwidth is not None
        self.mesh = mesh
        self.chip = chip
        self.efficiency = chip.efficiency
        self.devices_along = cache(self._devices_along)
        self._link_rate = chip.link_bandwidth * chip.efficiency.link
        self._axis_rate = (chip.axis_bandwidth or 0.0) * chip.efficiency.link
        self._port_rate = chip.network_bandwidth * chip.efficiency.network

    def _devices_along(self, axes: str) -> DeviceGroup:
        """Finds the group along mesh axes joined by "+", as in `Collective`; all if unknown."""
        names = [axis for axis in axes.split("+") if axis in self.mesh.axis_names]
        index = tuple(
            slice(None) if not names or axis in names else 0 for axis in self.mesh.axis_names
        )
        devices = list(np.asarray(self.mesh.devices[index]).flat)
        # behind a switch only hosts matter, on a torus where the chips are
        if not self.chip.torus_dims:
            # The NVLink domain of a device is its host, or the rack that its host is in.
            host = self.chip.host_devices or 1
            hosts = (self.chip.domain_devices or host) // host
            sizes = Counter(device.process_index // hosts for device in devices).values()
            smallest = min(sizes)
            if smallest == max(sizes):
                smallest = 0
            return DeviceGroup(len(devices), len(sizes), smallest=smallest)
        slices = set(map(slice_index, devices))
        own = _extents(devices)
        extents = zip(own, _extents(self.mesh.devices.flat), strict=True)
        # a part of a dim does not close into a ring
        dims = tuple(
            (extent, extent == full and extent % self.chip.ring_chips == 0)
            for extent, full in extents
            if extent > 1
        )
        of_a_chip = Counter((slice_index(device), *device.coords) for device in devices)
        sharing = self.chip.chip_devices // max(of_a_chip.values())
        return DeviceGroup(len(devices), len(slices), dims, tuple(own), sharing)

    def links(self, axes: str) -> tuple[int, ...]:
        """Lists the links that collectives along mesh axes use: of a torus, those of its dims.

        Behind a switch there is one for all, and on a torus what leaves the slice uses all.
        """
        dims = tuple(range(max(self.chip.torus_dims, 1)))
        group = self.devices_along(axes)
        if not group.dims or group.hosts > 1:
            return dims
        spanned = tuple(dim for dim, extent in enumerate(group.extents) if extent > 1)
        return spanned or dims

    def seconds(self, op: str, sent: int, axes: str) -> float:
        """Computes the seconds of one collective; `sent`: bytes that a device sends by a ring.

        `op` and `axes` are as in `Collective`.
        """
        group = self.devices_along(axes)
        if group.size < 2 or not sent:
            return 0.0
        return min(
            self._seconds_by_protocol(op, sent, group, protocol)
            for protocol in self.efficiency.protocols
        )

    def _seconds_by_protocol(
        self, op: str, sent: int, group: DeviceGroup, protocol: Protocol
    ) -> float:
        """Computes the seconds with one protocol: the latency of its steps, and bytes over rate."""
        if op == "permute":  # to a neighbor, along one dim
            step = protocol.network
            if group.hosts == 1:
                step = protocol.link
            dims = group.dims and (max(group.dims, key=lambda dim: dim[1]),)
            rate = self._ring_rate(replace(group, dims=dims), ports=1)
            return protocol.base + step + sent / (rate * protocol.share)
        latency = protocol.base + _ring_latency(group, op, protocol)
        if op == "all-to-all":
            return latency + self._all_to_all_seconds(sent, group) / protocol.share
        # every other collective by a ring, which is all that a torus has
        rate = self._ring_rate(group, ports=group.local) * protocol.share
        ring = latency + sent / rate
        if op != "all-reduce" or group.dims:
            return ring
        # NCCL's tree: a chain in each host and a double binary tree between hosts, up and down
        chain = min(group.local, self.chip.host_devices or group.local)
        within = chain - 1 + log2(group.local / chain)
        steps = within * protocol.link + log2(group.hosts) * protocol.network
        tree = protocol.base + 2 * steps + sent / (rate * self.efficiency.tree)
        return min(ring, tree)

    def _all_to_all_seconds(self, sent: int, group: DeviceGroup) -> float:
        """Computes the seconds of an all-to-all's bytes, which go straight to their receivers.

        What goes to another host leaves by the sender's own port. On a torus it passes through the
        chips between: a dim's links carry a quarter of its length times the bytes of one chip, the
        middle of an open dim twice that.
        """
        # the share of the receivers that are on other hosts
        remote = (group.size - group.local) / (group.size - 1)
        if group.dims:
            load = max(extent / (4 if closed else 2) for extent, closed in group.dims)
            load *= self.chip.chip_devices
            local_s = sent * group.size / (group.size - 1) * load / self._axis_rate
        else:
            local_s = sent * (1 - remote) / self._group_link_rate(group)
        if group.hosts == 1:
            return local_s
        return max(local_s, sent * remote / self._port_rate)

    def _ring_rate(self, group: DeviceGroup, ports: int) -> float:
        """Computes bytes/s of the ring's slowest link; it uses `ports` network ports per host."""
        links = self._group_link_rate(group)
        if group.hosts == 1:
            return links
        network = ports * self._port_rate
        if group.local == 1:  # no link inside a host is used
            return network
        return min(links, network)

    def _group_link_rate(self, group: DeviceGroup) -> float:
        """Computes bytes/s of the links that a group uses: of a torus, those of its dims."""
        if not group.dims:
            return self._link_rate
        # a closed dim has both directions; at the ends of an open one there is one
        rates = (self._axis_rate / (1 if closed else 2) for _, closed in group.dims)
        return sum(rates) / group.sharing


def _extents(devices: Iterable[jax.Device]) -> list[int]:
    """Counts the different coordinates of the devices along each torus dim."""
    coordinates = zip(*(device.coords for device in devices), strict=True)
    return [len(set(along)) for along in coordinates]


def _ring_latency(group: DeviceGroup, op: str, protocol: Protocol) -> float:
    """Computes the seconds of a ring's steps in sequence; a torus goes both ways around at once."""
    # n devices take n - 1 steps, of which some cross from host to host
    between_hosts = group.hosts - 1
    within: float = group.size - 1 - between_hosts
    if group.dims:
        within = sum(extent / 2 if closed else extent - 1 for extent, closed in group.dims)
    latency = within * protocol.link + between_hosts * protocol.network
    if op == "all-reduce":  # a reduce-scatter, and then an all-gather
        return 2 * latency
    return latency
