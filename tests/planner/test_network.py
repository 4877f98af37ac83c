"""Seconds of collectives on meshes of absent machines, against rings and ports by hand."""

from functools import cache
from math import log2, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jax.planner import fake_devices, parse_topology
from fsdp_jax.planner.machines.chips import HARDWARE
from fsdp_jax.planner.machines.network import DeviceGroup, Network
from fsdp_jax.sharding.mesh import make_mesh, mesh_axes, split_data

LARGE = 2**42  # bytes whose latency is nothing
OPS = ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"]


@cache
def network(name: str, replica: int = 1, *, split: bool = False) -> Network:
    topology = parse_topology(name)
    mesh = make_mesh(-1, replica, devices=fake_devices(topology))
    return Network(mesh_axes(mesh).mesh if split else mesh, topology.hardware)


def rate(name: str, op: str, axes: str, replica: int = 1) -> float:
    """Returns bytes/s of a large collective."""
    return LARGE / network(name, replica).seconds(op, LARGE, axes)


@pytest.mark.parametrize(
    ("name", "replica", "axes", "group"),
    [
        ("h100:8", 1, "data", DeviceGroup(8, 1)),
        ("h100:64x8", 1, "data", DeviceGroup(512, 64)),
        ("h100:64x8", 64, "data", DeviceGroup(8, 1)),  # hybrid: a host
        ("h100:64x8", 64, "replica", DeviceGroup(64, 64)),  # one GPU of each host
        ("h100:64x8", 64, "replica+data", DeviceGroup(512, 64)),
        ("h100:2x4", 4, "data", DeviceGroup(2, 1)),
        ("h100:2x4", 4, "replica", DeviceGroup(4, 2)),
        ("h100:64x8", 64, "?", DeviceGroup(512, 64)),  # not known: all of them
        ("h100:64x8", 64, "", DeviceGroup(512, 64)),
        ("v5p:2x2x2", 1, "data", DeviceGroup(8, 1, ((2, False),) * 3)),
        ("v5p:4x4x8", 1, "data", DeviceGroup(128, 1, ((4, True), (4, True), (8, True)))),
        ("v5e:16x16", 1, "data", DeviceGroup(256, 1, ((16, True), (16, True)))),
        ("v5e:8x16", 1, "data", DeviceGroup(128, 1, ((8, False), (16, True)))),
        ("v5e:16x16*2", 2, "data", DeviceGroup(256, 1, ((16, True), (16, True)))),
        ("v5e:16x16*2", 2, "replica", DeviceGroup(2, 2)),  # one chip of each slice
        ("v5e:16x16*2", 1, "data", DeviceGroup(512, 2, ((16, True), (16, True)))),
        ("v5e:16x16*2", 2, "?", DeviceGroup(512, 2, ((16, True), (16, True)))),
        ("gb200:18x4", 1, "data", DeviceGroup(72, 1)),  # NVLink joins a rack of hosts
        ("gb200:36x4", 1, "data", DeviceGroup(144, 2)),
        ("gb200:40x4", 1, "data", DeviceGroup(160, 3, smallest=16)),  # 72, 72 and 16
        ("gb200:40x4", 40, "replica", DeviceGroup(40, 3, smallest=4)),
        ("gb300:36x4", 36, "replica", DeviceGroup(36, 2)),
        ("b300:2x8", 1, "data", DeviceGroup(16, 2)),
        ("tpu7x:2x2x2", 1, "data", DeviceGroup(16, 1, ((2, False),) * 3)),
    ],
)
def test_the_devices_of_a_group(name, replica, axes, group):
    assert network(name, replica).devices_along(axes) == group


@pytest.mark.parametrize(
    ("name", "replica", "axes", "links"),
    [
        ("v5p:2x4x4", 1, "data_0", (0,)),
        ("v5p:2x4x4", 1, "data_2", (2,)),
        ("v5p:2x4x4", 1, "data_0+data_2", (0, 2)),
        ("v5p:2x4x4", 2, "replica", (0,)),
        ("v5e:4x4*2", 2, "data_0", (0,)),
        ("v5e:4x4*2", 2, "replica", (0, 1)),  # between slices
        ("h100:2x8", 2, "replica", (0,)),
        ("h100:2x8", 2, "data", (0,)),  # a GPU runs one collective at a time
    ],
)
def test_each_dim_of_a_torus_has_links_of_its_own(name, replica, axes, links):
    topology = parse_topology(name)
    mesh = make_mesh(-1, replica, devices=fake_devices(topology))
    assert Network(split_data(mesh_axes(mesh)).mesh, topology.hardware).links(axes) == links


def test_a_part_of_a_torus_dim_is_no_ring():
    halves = network("v5p:4x4x8", 2)  # the dim of 8 is cut in two
    assert halves.devices_along("data") == DeviceGroup(64, 1, ((4, True), (4, True), (4, False)))


def test_one_dim_of_a_torus_has_its_own_links():
    split = network("v5e:16x16", split=True)
    assert [
        split.devices_along(axis)
        for axis in split.mesh.axis_names
        if split.devices_along(axis).size > 1
    ] == [DeviceGroup(16, 1, ((16, True),))] * 2
    one, both = (split.seconds("all-gather", LARGE, axes) for axes in ("data_0", "data_0+data_1"))
    assert one / both == pytest.approx(2, rel=1e-2)


def test_a_ring_runs_at_its_slowest_link():
    links = 450e9 * HARDWARE["h100"].efficiency.link
    ports = 50e9 * HARDWARE["h100"].efficiency.network
    assert rate("h100:8", "all-gather", "data") == pytest.approx(links, rel=2e-2)
    # eight ports
    assert rate("h100:64x8", "all-gather", "data") == pytest.approx(min(links, 8 * ports), rel=1e-2)
    assert rate("h100:2x4", "all-gather", "data") == pytest.approx(4 * ports, rel=2e-2)
    # of domains of 72, 72 and 16 GPUs, the ports of the smallest
    assert rate("gb200:19x4", "all-gather", "data") == pytest.approx(4 * ports, rel=5e-2)
    # each its own port
    assert rate("h100:64x8", "all-gather", "replica", 64) == pytest.approx(ports, rel=2e-2)


def test_a_torus_has_two_links_in_each_closed_dim():
    share = HARDWARE["v5p"].efficiency.link
    assert rate("v5p:4x4x4", "all-gather", "data") == pytest.approx(600e9 * share, rel=1e-2)
    assert rate("v5p:2x2x2", "all-gather", "data") == pytest.approx(300e9 * share, rel=1e-2)
    assert rate("v5e:8x16", "all-gather", "data") == pytest.approx((50e9 + 100e9) * share, rel=1e-2)
    assert rate("v5e:16x16*2", "all-gather", "replica", 2) == pytest.approx(
        3.125e9 * HARDWARE["v5e"].efficiency.network, rel=1e-2
    )


def test_a_permute_goes_to_a_neighbour():
    share = HARDWARE["v5p"].efficiency.link
    assert rate("v5p:4x4x4", "permute", "data") == pytest.approx(200e9 * share, rel=1e-2)
    assert rate("v5p:2x2x2", "permute", "data") == pytest.approx(100e9 * share, rel=1e-2)
    assert rate("h100:8", "permute", "data") == pytest.approx(
        450e9 * HARDWARE["h100"].efficiency.link, rel=1e-2
    )
    assert rate("h100:2x8", "permute", "data") == pytest.approx(
        50e9 * HARDWARE["h100"].efficiency.network, rel=1e-2
    )


def test_an_all_to_all_uses_one_port_and_passes_through_a_torus():
    constants = HARDWARE["h100"].efficiency
    assert rate("h100:8", "all-to-all", "data") == pytest.approx(450e9 * constants.link, rel=2e-2)
    away = 8 / 15  # of what is sent to 15 others, eight are elsewhere
    assert rate("h100:2x8", "all-to-all", "data") == pytest.approx(
        50e9 * constants.network / away, rel=2e-2
    )
    # 256 chips: 256/255 of what is sent is what one has; a ring of 16 carries 16/4 of it over both
    # links of a dim
    assert rate("v5e:16x16", "all-to-all", "data") == pytest.approx(
        100e9 * 0.85 * 255 / 256 / 4, rel=1e-2
    )


def test_a_scalar_is_reduced_within_tens_of_microseconds():
    """By NCCL's LL protocol, and by a tree between the hosts of an NVLink domain."""
    for name, most in (("h100:8", 20e-6), ("gb300:16x4", 50e-6), ("h100:64x8", 100e-6)):
        assert 5e-6 < network(name).seconds("all-reduce", 8, "data") < most, name


def test_sending_nothing_takes_no_time():
    assert network("h100:8").seconds("all-gather", LARGE, "replica") == 0
    assert network("h100:8").seconds("all-gather", 0, "data") == 0


def test_latency_is_that_of_the_faster_protocol():
    hops, protocols = 7, HARDWARE["h100"].efficiency.protocols
    least = min(protocol.base + hops * protocol.link for protocol in protocols)
    assert network("h100:8").seconds("all-gather", 1, "data") == pytest.approx(least, rel=1e-3)
    assert network("h100:8").seconds("all-reduce", 1, "data") == pytest.approx(
        min(protocol.base + 2 * hops * protocol.link for protocol in protocols), rel=1e-3
    )


def test_a_ring_steps_within_and_between_hosts():
    protocols = HARDWARE["h100"].efficiency.protocols
    ring = min(one.base + (512 - 64) * one.link + 63 * one.network for one in protocols)
    assert network("h100:64x8").seconds("all-gather", 1, "data") == pytest.approx(ring, rel=1e-3)
    [ici] = HARDWARE["v5e"].efficiency.protocols  # both ways around each dim
    assert network("v5e:16x16").seconds("all-gather", 1, "data") == pytest.approx(
        ici.base + 2 * 8 * ici.link, rel=1e-3
    )
    assert network("v5e:4x4").seconds("all-gather", 1, "data") == pytest.approx(
        ici.base + 2 * 3 * ici.link, rel=1e-3
    )


def test_the_devices_of_a_chip_share_its_links():
    """A ring over all passes through a chip once; two rings of one device a chip pass twice."""
    share = HARDWARE["tpu7x"].efficiency.link
    assert rate("tpu7x:4x4x4", "all-gather", "data") == pytest.approx(600e9 * share, rel=1e-2)
    links = network("tpu7x:4x4x4")
    whole, half = DeviceGroup(128, 1, ((4, True),) * 3), DeviceGroup(64, 1, ((4, True),) * 3, (), 2)
    assert links._group_link_rate(whole) == 2 * links._group_link_rate(half)
    assert network("tpu7x:4x4x4", 64).devices_along("data") == DeviceGroup(2, 1)  # a chip


def test_a_small_all_reduce_over_many_hosts_takes_a_tree():
    protocols = HARDWARE["h100"].efficiency.protocols
    tree = min(one.base + 2 * (7 * one.link + log2(64) * one.network) for one in protocols)
    assert network("h100:64x8").seconds("all-reduce", 1, "data") == pytest.approx(tree, rel=1e-3)


NAMES = [
    "h100:8",
    "a100-80gb:16x8",
    "v100:4x8",
    "b200:2x8",
    "v4:4x4x4",
    "v5e:4x4",
    "v5e:16x16*4",
    "v5p:2x2x2",
    "v6e:2x4",
    "gb200:36x4",
    "rtx4090:8",
    "tpu7x:2x2x2",
]


@settings(deadline=None)
@given(
    name=st.sampled_from(NAMES),
    op=st.sampled_from(OPS),
    sent=st.integers(1, 2**36),
    more=st.integers(0, 2**36),
)
def test_more_bytes_take_longer(name, op, sent, more):
    links = network(name)
    first, second = links.seconds(op, sent, "data"), links.seconds(op, sent + more, "data")
    assert 0 < first <= second
    peak = links.chip.link_bandwidth
    assert first > sent / peak  # no faster than all links together


@settings(deadline=None)
@given(op=st.sampled_from(OPS), size=st.integers(1, 2**34), hosts=st.integers(0, 5))
def test_more_hosts_take_longer(op, size, hosts):
    """With the bytes that a ring of so many devices sends."""

    def seconds(hosts: int) -> float:
        devices = 8 * hosts
        passes = 2 if op == "all-reduce" else 1
        sent = size if op == "permute" else size * (devices - 1) // devices * passes
        return network(f"h100:{hosts}x8").seconds(op, sent, "data")

    assert seconds(2**hosts) <= seconds(2 ** (hosts + 1)) * 1.000001


@settings(deadline=None)
@given(sent=st.integers(1, 2**34))
def test_a_hybrid_mesh_gathers_faster_than_a_flat_one(sent):
    hybrid, flat = network("h100:16x8", 16), network("h100:16x8")
    assert hybrid.seconds("all-gather", sent, "data") < flat.seconds("all-gather", sent, "data")


@pytest.mark.parametrize(
    "chip", [chip for chip in HARDWARE.values() if chip.platform != "cpu"], ids=lambda one: one.name
)
def test_every_chip_has_links(chip):
    shape = "2x4" if chip.platform == "cuda" else "x".join("2" * chip.torus_dims)
    links = network(f"{chip.name}:{shape}")
    size = prod(map(int, shape.split("x"))) * chip.chip_devices
    assert links.devices_along("data").size == size
    assert all(0 < links.seconds(op, 2**20, "data") < 1e-3 for op in OPS)
