"""Device meshes of two axes: `data`, which shards state, and `replica`, which may replicate it.

The batch is sharded along both. The sharding factor of PyTorch FSDP is the size of `data`.

[Note: the mesh axes that `data` is split into] A TPU reduces and scatters along one dim of its
torus at a time, or else not at all: asked for all of a torus at once it sends twice the bytes. And
a dim that is not divisible by the number of all devices may be divisible by the number of hosts,
and another dim by the number of devices of a host. So inside the library `data` may be several mesh
axes, `data_0`, `data_1`, ..., one per physical dim in the order of the devices. `split_data` makes
them; to the user they stay `data` in rules and reports.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from math import prod

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fsdp_jax.errors import did_you_mean, message

REPLICA = "replica"
DATA = "data"
AXES = (REPLICA, DATA)  # of a mesh, in order
BATCH_AXES = (REPLICA, DATA)  # those that shard the batch; an axis of tensor parallelism would not
_PART = re.compile(rf"{DATA}_\d+")
Entry = str | tuple[str, ...] | None  # of a PartitionSpec


def make_mesh(
    data: int = -1,
    replica: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
    allow_fewer: bool = False,
) -> Mesh:
    """Returns a mesh of `replica` x `data` devices with Auto axes, `data` on the fast links.

    Args:
        data: size of the axis that state is sharded along; -1 for what `replica` leaves.
        replica: size of the axis that hybrid strategies replicate state along; -1 for what `data`
            leaves.
        devices: all of the run's devices by default; compile-only devices are welcome.
        allow_fewer: permit a mesh that leaves devices idle.

    Raises:
        ValueError: sizes that do not fit the devices; more devices asked for than there are.

    """
    devices = list(jax.devices() if devices is None else devices)
    shape = _resolve_sizes(replica, data, len(devices), allow_fewer)
    return Mesh(_ordered(devices[: prod(shape)], shape), AXES, axis_types=(AxisType.Auto,) * 2)


def _resolve_sizes(replica: int, data: int, available: int, allow_fewer: bool) -> tuple[int, int]:
    """Returns (replica, data) with the -1 filled in, checked against the devices."""
    sizes = [replica, data]
    got = f"replica={replica}, data={data} on {available} devices"
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        what = "mesh sizes are positive, and at most one is -1"
        raise ValueError(message(what, where="mesh", got=got))

    # Fill in the -1.
    known = prod(size for size in sizes if size != -1)
    if -1 in sizes:
        if available % known:
            divisors = [n for n in range(1, available + 1) if available % n == 0]
            fix = f"use a divisor, one of {divisors}"
            what = "the number of devices is not divisible by the mesh"
            raise ValueError(message(what, where="mesh", got=got, fix=fix))
        sizes[sizes.index(-1)] = available // known

    # Compare with the devices.
    needed = prod(sizes)
    if needed > available:
        expected = f"{needed} devices"
        fix = (
            "ask for fewer; or, before jax starts, fsdp_jax.launch.use_virtual_devices(n) "
            "(train.devices in a config)"
        )
        what = "the mesh has more devices than there are"
        raise ValueError(message(what, where="mesh", expected=expected, got=got, fix=fix))
    if needed < available and not allow_fewer:
        expected = f"{available} devices"
        fix = (
            "set one size to -1, which takes all devices; "
            "make_mesh(allow_fewer=True) leaves devices idle on purpose"
        )
        what = "the mesh would leave devices idle"
        raise ValueError(message(what, where="mesh", expected=expected, got=got, fix=fix))
    return sizes[0], sizes[1]


def _ordered(devices: list[jax.Device], shape: tuple[int, int]) -> np.ndarray:
    """Returns devices [replica, data]: neighbours along `data` share a slice first, then a host.

    On a TPU each of the two axes runs through whole dims of the torus where the sizes allow it,
    `data` through the last of them. Where they do not, or devices are left out of the torus, the
    order is by slice, host and id.
    """
    devices = sorted(devices, key=lambda d: (_slice(d), d.process_index, d.id))
    if devices[0].platform == "tpu":
        dims = _torus_dims([_coordinates(device) for device in devices], shape[1])
        if dims is not None:
            others = [dim for dim in range(len(_coordinates(devices[0]))) if dim not in dims]
            devices.sort(key=lambda d: [_coordinates(d)[dim] for dim in (*others, *dims)])
    return np.array(devices).reshape(shape)


def _coordinates(device: jax.Device) -> tuple[int, ...]:
    """Returns (slice, coordinates in the torus, core) of a TPU core."""
    return (_slice(device), *device.coords, device.core_on_chip)


def _slice(device: jax.Device) -> int:
    return getattr(device, "slice_index", None) or 0


def _torus_dims(coordinates: Sequence[tuple[int, ...]], size: int) -> tuple[int, ...] | None:
    """Returns the last torus dims whose product is the size of `data`; None if none are."""
    sizes = [len(set(values)) for values in zip(*coordinates, strict=True)]
    if prod(sizes) != len(coordinates):  # a box with holes
        return None
    dims = [dim for dim, length in enumerate(sizes) if length > 1]
    subsets = [subset for count in range(len(dims) + 1) for subset in combinations(dims, count)]
    fitting = (subset for subset in subsets if prod(sizes[dim] for dim in subset) == size)
    return max(fitting, default=None)


def check_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh made elsewhere if the library can use it.

    Raises:
        ValueError: a repeated or unknown axis name, no `data` axis, or axes that are not Auto.

    """
    names = list(mesh.axis_names)
    if DATA not in names:
        names = list(dict.fromkeys(DATA if axis in data_axes(mesh) else axis for axis in names))
    if len(set(names)) < len(names):
        fix = "give every axis a name of its own"
        raise ValueError(message("axis names repeat", where="mesh", got=names, fix=fix))
    for name in names:
        if name not in AXES:
            what = f"unknown mesh axis '{name}'"
            fix = f"{did_you_mean(str(name), AXES)} make_mesh makes both"
            raise ValueError(message(what, where="mesh", expected=list(AXES), got=names, fix=fix))
    if DATA not in names:
        what = "the mesh has no axis 'data'"
        raise ValueError(message(what, where="mesh", expected=list(AXES), got=names))
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        got = [str(kind) for kind in mesh.axis_types]
        fix = "use fsdp_jax.make_mesh, or axis_types=(AxisType.Auto,) * n"
        raise ValueError(message("mesh axes must be Auto", where="mesh", got=got, fix=fix))
    return mesh


# The mesh axes that `data` is split into; see the note.


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes that `data` is made of."""
    parts = tuple(axis for axis in mesh.axis_names if _PART.fullmatch(str(axis)))
    return parts or tuple(axis for axis in mesh.axis_names if axis == DATA)


def split_data(mesh: Mesh, sizes: Sequence[int] | None = None) -> Mesh:
    """Returns a mesh of the same devices in which `data` is several axes.

    `sizes`: of these axes; by default those of the machine's physical dims.
    """
    if DATA not in mesh.axis_names:
        return mesh
    dim = mesh.axis_names.index(DATA)
    if sizes is None:
        sizes = _physical_sizes(np.moveaxis(mesh.devices, dim, -1))
    if len(sizes) < 2:
        return mesh
    assert prod(sizes) == mesh.shape[DATA], (sizes, mesh.shape)
    shape = (*mesh.devices.shape[:dim], *sizes, *mesh.devices.shape[dim + 1 :])
    names = [f"{DATA}_{number}" for number in range(len(sizes))]
    axes = (*mesh.axis_names[:dim], *names, *mesh.axis_names[dim + 1 :])
    return Mesh(mesh.devices.reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))


def _physical_sizes(devices: np.ndarray) -> tuple[int, ...]:
    """Returns sizes of the physical dims along the last dim of `devices`, slowest first.

    For a TPU these are the slice, the dims of the torus and the cores of a chip; for other machines
    the hosts and their devices. One size where the devices are in no such order.
    """
    sizes = {_box_sizes(list(row)) for row in devices.reshape(-1, devices.shape[-1])}
    return sizes.pop() if len(sizes) == 1 else (devices.shape[-1],)


def _box_sizes(row: Sequence[jax.Device]) -> tuple[int, ...]:
    if row[0].platform == "tpu":
        places = [_coordinates(device) for device in row]
    else:
        places = _host_coordinates([device.process_index for device in row])
    values = [sorted(set(along)) for along in zip(*places, strict=True)]

    # A dim that changes slowly comes first.
    first_change = {
        dim: next(i for i, place in enumerate(places) if place[dim] != places[0][dim])
        for dim, along in enumerate(values)
        if len(along) > 1
    }
    dims = sorted(first_change, key=lambda dim: -first_change[dim])

    # The devices must run through the box of all values in that order.
    box = list(product(*(values[dim] for dim in dims)))
    fits = [tuple(place[dim] for dim in dims) for place in places] == box
    return tuple(len(values[dim]) for dim in dims) if fits and dims else (len(row),)


def _host_coordinates(hosts: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns (host, number on that host) of each device."""
    counts: Counter[int] = Counter()
    places: list[tuple[int, ...]] = []
    for host in hosts:
        places.append((host, counts[host]))
        counts[host] += 1
    return places


def shape_of(mesh: Mesh) -> dict[str, int]:
    """Returns {axis: size} as the user knows the mesh: `data` is one axis."""
    parts = data_axes(mesh)
    sizes = {str(axis): size for axis, size in mesh.shape.items() if axis not in parts}
    return sizes | {DATA: prod(mesh.shape[axis] for axis in parts)}


def user_axes(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns mesh axes as the user knows them: `data` for all its parts, `data_1` for one."""
    parts = data_axes(mesh)
    if len(parts) < 2 or not set(parts) <= set(axes):
        return tuple(axes)
    return tuple(dict.fromkeys(DATA if axis in parts else axis for axis in axes))


def user_spec(mesh: Mesh, spec: PartitionSpec) -> PartitionSpec:
    """Returns a spec with the axes that the user knows."""
    return PartitionSpec(*(entry_of(user_axes(mesh, axes_of(entry))) for entry in spec))


# The batch


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes that shard the batch."""
    parts = data_axes(mesh)
    return tuple(a for a in mesh.axis_names if (DATA if a in parts else a) in BATCH_AXES)


def batch_shards(mesh: Mesh) -> int:
    """Returns the number of shards of the batch."""
    return shards_of(mesh, batch_axes(mesh))


# Specs


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds in full."""
    return NamedSharding(mesh, PartitionSpec())


def axes_of(entry: Entry) -> tuple[str, ...]:
    """Returns one entry of a PartitionSpec as a tuple of mesh axes."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def entry_of(axes: Sequence[str]) -> Entry:
    """Returns mesh axes as an entry of a PartitionSpec; the inverse of `axes_of`."""
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else tuple(axes)


def spec_of(entries: Iterable[Entry]) -> PartitionSpec:
    """Returns a PartitionSpec without entries of None at its end."""
    entries = list(entries)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def shards_of(mesh: Mesh, entry: Entry) -> int:
    """Returns the number of shards that one entry of a PartitionSpec cuts a dim into."""
    return prod(mesh.shape[axis] for axis in axes_of(entry))
