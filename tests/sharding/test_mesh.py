"""Meshes: sizes, the order of devices, checks of foreign meshes, and the parts of `data`."""

import random
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import jax
import numpy as np
import pytest
from for_each import for_each
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from refusals import refused

from fsdp_jax.sharding.mesh import (
    AXES,
    DATA,
    REPLICA,
    MeshAxes,
    axes_of,
    count_hosts,
    entry_of,
    make_mesh,
    mesh_axes,
    mesh_like,
    replicated,
    shards_of,
    spec_of,
    split_data,
)

pytestmark = pytest.mark.releases


@dataclass(frozen=True)
class FakeDevice:
    """As much of a device as a mesh looks at."""

    id: int
    process_index: int
    slice_index: int = 0
    platform: str = "gpu"
    device_kind: str = "fake"
    coords: tuple[int, ...] = (0, 0, 0)
    core_on_chip: int = 0


def hosts(count: int, each: int) -> list[FakeDevice]:
    devices = [FakeDevice(id=i, process_index=i // each) for i in range(count * each)]
    random.Random(0).shuffle(devices)
    return devices


def tpu_slices(count: int) -> list[FakeDevice]:
    """Slices of eight chips, 2 x 2 x 2."""
    devices = [
        FakeDevice(8 * s + i, 2 * s + i // 4, s, "tpu", "TPU v5", (i % 2, i // 2 % 2, i // 4))
        for s in range(count)
        for i in range(8)
    ]
    random.Random(0).shuffle(devices)
    return devices


def auto_mesh(*names: str) -> Mesh:
    shape = {2: (4, 2), 3: (2, 2, 2)}.get(len(names), (8,))
    return Mesh(
        np.array(jax.devices()).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names)
    )


@for_each(
    ("sizes", "shape"),
    [
        ({}, (1, 8)),
        ({"data": -1, "replica": 2}, (2, 4)),
        ({"data": 4, "replica": -1}, (2, 4)),
        ({"data": 2, "replica": 4}, (4, 2)),
        ({"data": 1, "replica": -1}, (8, 1)),
    ],
)
def test_a_size_of_minus_one_is_filled_in(sizes, shape):
    mesh = make_mesh(**sizes)
    assert mesh.axis_names == AXES
    assert tuple(mesh.shape.values()) == shape
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert {device.id for device in mesh.devices.flat} == {device.id for device in jax.devices()}


@for_each(
    ("sizes", "text"),
    [
        ({"data": 16}, "more devices than there are"),
        ({"data": 4, "replica": 3}, "more devices than there are"),
        ({"data": 4}, "leave devices idle"),
        ({"replica": 3}, r"not divisible by the mesh.*\[1, 2, 4, 8\]"),
        ({"replica": 16}, "not divisible by the mesh"),
        ({"data": -1, "replica": -1}, "at most one is -1"),
        ({"data": 0}, "sizes are positive"),
        ({"data": -2}, "sizes are positive"),
    ],
)
def test_sizes_that_do_not_fit_are_named_with_the_devices(sizes, text):
    with pytest.raises(ValueError, match=f"(?s){text}") as error:
        make_mesh(**sizes)
    assert "on 8 devices" in str(error.value)


def test_idle_devices_are_an_opt_in():
    assert make_mesh(data=4, allow_fewer=True).size == 4
    assert make_mesh(data=2, devices=jax.devices()[:2]).size == 2


@settings(deadline=None)
@given(available=st.integers(1, 64), known=st.integers(1, 64), on_data=st.booleans())
def test_a_mesh_contains_every_device_once_or_is_refused(available, known, on_data):
    devices = [FakeDevice(id=i, process_index=i // 8) for i in range(available)]
    sizes = {"data": known, "replica": -1} if on_data else {"replica": known}
    if available % known:
        with refused("not divisible by the mesh"):
            make_mesh(**sizes, devices=devices)
        return
    mesh = make_mesh(**sizes, devices=devices)
    assert mesh.shape[DATA if on_data else REPLICA] == known
    assert sorted(device.id for device in mesh.devices.flat) == list(range(available))


@settings(deadline=None)
@given(data=st.integers(1, 16), replica=st.integers(1, 16), available=st.integers(1, 64))
def test_fewer_devices_only_when_allowed(data, replica, available):
    devices = [FakeDevice(id=i, process_index=0) for i in range(available)]
    if data * replica > available:
        with refused("more devices"):
            make_mesh(data, replica, devices=devices, allow_fewer=True)
        return
    assert make_mesh(data, replica, devices=devices, allow_fewer=True).devices.shape == (
        replica,
        data,
    )


@for_each(("data", "replica"), [(8, 2), (4, 4), (2, 8), (1, 16)])
def test_data_stays_within_a_host(data, replica):
    mesh = make_mesh(data, replica, devices=hosts(count=2, each=8))
    assert {device.id for device in mesh.devices.flat} == set(range(16))
    for row in mesh.devices:
        assert len({device.process_index for device in row}) == 1


def test_processes_of_one_host_stay_in_one_row_of_data():
    # Two hosts of four processes with two devices each, numbered in turns.
    devices = [FakeDevice(number, number // 2) for number in range(16)]
    hosts = {process: process % 2 for process in range(8)}
    assert (count_hosts(devices), count_hosts(devices, hosts)) == (8, 2)
    rows = make_mesh(replica=2, devices=devices, hosts=hosts).devices
    for host, row in enumerate(rows):
        assert {hosts[device.process_index] for device in row} == {host}
    with refused("no host of process 7"):
        make_mesh(replica=2, devices=devices, hosts=dict.fromkeys(range(7), 0))


def test_of_several_slices_the_slices_count():
    devices = [FakeDevice(number, number // 2, number // 4) for number in range(8)]
    assert count_hosts(devices) == 2


def test_data_over_two_hosts_crosses_between_them_once():
    (row,) = make_mesh(devices=hosts(count=2, each=8)).devices
    crossings = sum(a.process_index != b.process_index for a, b in pairwise(row))
    assert crossings == 1


@for_each(("data", "replica"), [(8, 2), (4, 4), (2, 8)])
def test_data_stays_within_a_tpu_slice_and_on_its_links(data, replica):
    mesh = make_mesh(data, replica, devices=tpu_slices(2))
    assert {device.id for device in mesh.devices.flat} == set(range(16))
    for row in mesh.devices:
        assert len({device.slice_index for device in row}) == 1
    if data == 2:
        for one, other in mesh.devices:
            apart = sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))
            assert apart == 1


@for_each("grid", [(4, 4, 1), (4, 8, 1), (4, 4, 4), (2, 2, 3)])
def test_every_size_that_divides_a_torus_has_a_mesh(grid):
    x, y, _ = grid
    devices = [
        FakeDevice(i, i // 4, 0, "tpu", "TPU v5", (i % x, i // x % y, i // x // y))
        for i in range(prod(grid))
    ]
    for data in (n for n in range(1, len(devices) + 1) if len(devices) % n == 0):
        mesh = make_mesh(data, -1, devices=devices)
        assert sorted(device.id for device in mesh.devices.flat) == list(range(len(devices)))


@for_each(("data", "replica"), [(16, 1), (6, 1), (3, 2)])
def test_shapes_that_fit_no_slice_keep_slices_contiguous(data, replica):
    mesh = make_mesh(
        data, replica, devices=sorted(tpu_slices(2), key=lambda d: d.id), allow_fewer=True
    )
    order = [device.slice_index for device in mesh.devices.flat]
    assert order == sorted(order)


def test_slices_come_before_hosts():
    devices = [FakeDevice(id=i, process_index=i % 2, slice_index=i // 4) for i in range(8)]
    mesh = make_mesh(4, 2, devices=devices)
    assert [{d.slice_index for d in row} for row in mesh.devices] == [{0}, {1}]


@for_each(
    ("names", "given", "data", "replica", "model"),
    [
        ((REPLICA, DATA), {}, (DATA,), (REPLICA,), ()),
        ((DATA, REPLICA), {}, (DATA,), (REPLICA,), ()),
        (("fsdp",), {}, ("fsdp",), (), ()),
        ((DATA, "tensor"), {}, (DATA,), (), ("tensor",)),
        (("fsdp", "tensor"), {}, ("fsdp",), (), ("tensor",)),
        (("fsdp", "tensor"), {"data": "fsdp"}, ("fsdp",), (), ("tensor",)),
        (("dp", "fsdp"), {"data": "fsdp", "replica": "dp"}, ("fsdp",), ("dp",), ()),
        (("x", "y"), {"data": ("x", "y")}, ("x", "y"), (), ()),
        ((REPLICA, DATA), {"data": DATA, "replica": ()}, (DATA,), (), (REPLICA,)),
    ],
)
def test_axes_of_any_mesh_are_named_others_are_the_models(names, given, data, replica, model):
    axes = mesh_axes(auto_mesh(*names), **given)
    assert (axes.data, axes.replica, axes.model) == (data, replica, model)
    assert axes.batch == tuple(name for name in names if name not in model)
    assert axes.batch_shards * axes.model_shards == 8
    assert axes.shape == dict(auto_mesh(*names).shape)


def test_axes_of_any_type_become_auto():
    for kind in (AxisType.Explicit, AxisType.Manual, AxisType.Auto):
        mesh = Mesh(np.array(jax.devices()), (DATA,), axis_types=(kind,))
        assert mesh_axes(mesh).mesh.axis_types == (AxisType.Auto,)
    assert mesh_axes(jax.make_mesh((8,), (DATA,))).mesh == auto_mesh(DATA)


def test_repeated_axis_names_are_refused_though_jax_accepts_them():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), (DATA, DATA))
    with refused("axis names repeat"):
        mesh_axes(mesh)


@for_each(
    ("names", "given", "text"),
    [
        ((DATA, "fsdp"), {}, "shards the state(?s:.*)data='fsdp', replica='data'$"),
        ((DATA, "fsdp", "x"), {"replica": "x"}, r"data='fsdp', replica=\('x', 'data'\)$"),
        (("dp", "tp"), {}, "which mesh axis shards the state(?s:.*)data='dp'"),
        ((REPLICA,), {}, "which mesh axis shards the state(?s:.*)make_mesh"),
        (("fsdp", "tensor"), {"data": "fdsp"}, "no axis 'fdsp'(?s:.*)did you mean 'fsdp'"),
        ((DATA,), {"replica": "dp"}, "no axis 'dp'(?s:.*)replica"),
        ((DATA,), {"data": DATA, "replica": DATA}, "'data' is in both data and replica"),
        ((DATA,), {"data": ()}, "not mesh axes"),
        (("x",), {"data": ("x", "x")}, "not mesh axes"),
        (("dp", "fsdp"), {"data": "dp"}, "'fsdp' neither shards nor replicates"),
    ],
)
def test_meshes_whose_axes_do_not_tell_their_parts_are_refused(names, given, text):
    with pytest.raises(ValueError, match=text):
        mesh_axes(auto_mesh(*names), **given)


def test_entries_of_a_spec():
    mesh = make_mesh(4, 2)
    assert [axes_of(entry) for entry in (None, DATA, (REPLICA, DATA))] == [
        (),
        (DATA,),
        (REPLICA, DATA),
    ]
    assert [shards_of(mesh, entry) for entry in (None, DATA, REPLICA, (REPLICA, DATA))] == [
        1,
        4,
        2,
        8,
    ]
    assert [entry_of(axes) for axes in ((), (DATA,), [REPLICA, DATA])] == [None, DATA, AXES]
    assert spec_of([None, DATA, None]) == PartitionSpec(None, DATA)
    assert replicated(mesh) == NamedSharding(mesh, PartitionSpec())


def test_only_the_batch_axes_shard_the_batch():
    """A mesh with an axis of tensor parallelism has fewer shards of the batch than devices."""
    axes = mesh_axes(Mesh(np.array(jax.devices()).reshape(4, 2), (DATA, "tensor")))
    assert axes.batch == (DATA,)
    assert (axes.mesh.size, axes.batch_shards) == (8, 4)
    spec = PartitionSpec("tensor", None, (DATA, "tensor"))
    assert axes.model_spec(spec) == PartitionSpec("tensor", None, "tensor")
    assert axes.batch_spec_axes(spec) == (DATA,)


@for_each("replica", [1, 2])
def test_other_devices_get_a_mesh_of_the_same_axes(replica):
    names = ("dp", "tensor", "fsdp")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), names)
    axes = mesh_axes(mesh, data="fsdp", replica="dp")
    other = mesh_like(axes, hosts(2, 8), replica)
    assert other.axis_names == names
    assert dict(other.shape) == {"dp": replica, "tensor": 2, "fsdp": 8 // replica}
    by_tensor = np.moveaxis(other.devices, 1, -1).reshape(-1, 2)
    assert all(a.process_index == b.process_index for a, b in by_tensor), "neighbours"
    with refused("not divisible by the mesh"):
        mesh_like(axes, hosts(1, 3), 1)


# The mesh axes that `data` is split into


def torus(*sizes: int, slices: int = 1, cores: int = 1) -> list[FakeDevice]:
    """Chips in row-major order of their places, slices first, cores last."""
    places = product(range(slices), *map(range, sizes), range(cores))
    devices = []
    for number, (where, *coords, core) in enumerate(places):
        at = (*coords, *[0] * (3 - len(coords)))
        devices.append(FakeDevice(number, number // 4, where, "tpu", "TPU v5", at, core))
    return devices


def row_mesh(devices: list[FakeDevice], replica: int = 1) -> Mesh:
    return Mesh(np.array(devices).reshape(replica, -1), AXES, axis_types=(AxisType.Auto,) * 2)


def split(devices: list[FakeDevice], replica: int = 1) -> MeshAxes:
    return mesh_axes(row_mesh(devices, replica))


def parts(axes: MeshAxes) -> tuple[int, ...]:
    return tuple(axes.mesh.shape[axis] for axis in axes.data)


@for_each(
    ("devices", "replica", "sizes"),
    [
        (torus(16, 16), 1, (16, 16)),
        (torus(2, 2, 2), 1, (2, 2, 2)),
        (torus(4, 1, 8), 1, (4, 8)),
        (torus(8), 1, (8,)),
        (torus(4, 4, slices=2), 1, (2, 4, 4)),
        (torus(4, 4, slices=2), 2, (4, 4)),
        (torus(2, 2, cores=2), 1, (2, 2, 2)),
        (torus(4, 4), 4, (4,)),
        (sorted(hosts(2, 8), key=lambda d: d.id), 1, (2, 8)),
        (sorted(hosts(2, 8), key=lambda d: d.id), 2, (8,)),
        (sorted(hosts(1, 8), key=lambda d: d.id), 1, (8,)),
        (sorted(hosts(4, 1), key=lambda d: d.id), 1, (4,)),
    ],
)
def test_data_has_an_axis_for_every_physical_dim(devices, replica, sizes):
    axes = split(devices, replica)
    assert parts(axes) == sizes
    assert [d.id for d in axes.mesh.devices.flat] == [d.id for d in devices]


def test_a_slow_dim_comes_first_whichever_coordinate_it_is():
    devices = sorted(torus(4, 2), key=lambda d: (d.coords[1], d.coords[0]))
    assert parts(split(devices)) == (2, 4)


@for_each(
    ("devices", "replica"),
    [
        (random.Random(1).sample(torus(4, 4), 16), 1),
        (random.Random(1).sample(torus(4, 4), 16), 2),
        ([d for d in torus(3, 3) if d.coords != (1, 1, 0)], 1),  # a hole
        ([FakeDevice(id=i, process_index=int(i > 2)) for i in range(8)], 1),  # unequal hosts
    ],
)
def test_devices_that_form_no_torus_stay_one_axis(devices, replica):
    assert split(devices, replica).mesh == row_mesh(devices, replica)


@for_each("grid", [(4, 4, 1), (4, 8, 1), (4, 4, 4), (2, 2, 1)])
def test_splitting_data_keeps_the_order_of_devices(grid):
    mesh = make_mesh(devices=torus(*grid))
    axes = mesh_axes(mesh)
    assert prod(parts(axes)) == prod(grid)
    assert [d.id for d in axes.mesh.devices.flat] == [d.id for d in mesh.devices.flat]


def test_a_split_mesh_is_one_axis_to_the_user():
    mesh = make_mesh(data=4, replica=2)
    axes = split_data(mesh_axes(mesh), (2, 2))
    names = (REPLICA, "data_0", "data_1")
    assert axes.mesh.axis_names == axes.batch == names
    assert mesh_axes(axes) is split_data(axes, (4,)) is axes, "once is enough"
    assert axes.user_data == (DATA,)
    assert axes.batch_shards == 8
    assert axes.shape == {REPLICA: 2, DATA: 4}
    assert axes.user_name(names) == axes.user_name((REPLICA, "data_1")) == "replica+data"
    assert axes.named_by_user(("data", "replica")) == names
    spec = PartitionSpec(None, ("data_0", "data_1"), names)
    assert axes.user_spec(spec) == PartitionSpec(None, DATA, (REPLICA, DATA))
    assert axes.user_spec(PartitionSpec("data_1", "data_0")) == PartitionSpec("data_1", "data_0")


def test_data_stays_one_axis_beside_axes_of_the_models():
    devices = sorted(hosts(2, 8), key=lambda d: d.id)
    mesh = Mesh(np.array(devices).reshape(4, 4), ("fsdp", "tensor"))
    assert mesh_axes(mesh, data="fsdp").data == ("fsdp",)
