"""Device meshes of two axes: `data`, along which state is sharded, and `replica`, along which it
may be repeated.

The batch is split over both. The sharding factor of PyTorch FSDP is the size of `data`.

[Note: the axes behind `data`] A TPU reduces and scatters along one dim of its torus at a time, or
else not at all: asked for all of a torus at once it sends twice the bytes. And a dim that does not
divide by all devices may divide by the hosts, and another dim by the devices of one. So inside the
library `data` may be several mesh axes, `data_0`, `data_1`, ..., one per physical dim in the order
of the devices. `split_data` makes them; to the user they stay `data` in rules and reports.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from math import prod

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fsdp_jax.errors import did_you_mean, message

REPLICA = "replica"
DATA = "data"
AXES = (REPLICA, DATA)
_PART = re.compile(rf"{DATA}_\d+")


def make_mesh(
    data: int = -1,
    replica: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
    allow_fewer: bool = False,
) -> Mesh:
    """A mesh of `replica` x `data` devices with Auto axes, `data` on the fast links.

    Args:
        data: size of the axis that state is sharded along; -1 takes what `replica` leaves.
        replica: size of the axis that hybrid strategies repeat state along; -1 takes what `data`
            leaves.
        devices: all of the run's devices where absent; compile-only devices are welcome.
        allow_fewer: permit a mesh that leaves devices idle.

    Raises:
        ValueError: sizes that do not fit the devices; more devices asked for than there are.

    """
    devices = list(jax.devices() if devices is None else devices)
    shape = _resolve(replica, data, len(devices), allow_fewer)
    return Mesh(_ordered(devices[: prod(shape)], shape), AXES, axis_types=(AxisType.Auto,) * 2)


def _resolve(replica: int, data: int, available: int, allow_fewer: bool) -> tuple[int, int]:
    """Sizes with the -1 filled in, checked against the devices."""
    sizes = {REPLICA: replica, DATA: data}
    got = f"replica={replica}, data={data} on {available} devices"
    if (
        any(size < 1 and size != -1 for size in sizes.values())
        or list(sizes.values()).count(-1) > 1
    ):
        raise ValueError(
            message("mesh sizes are positive, and at most one is -1", where="mesh", got=got)
        )
    known = prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if available % known:
            divisors = [n for n in range(1, available + 1) if available % n == 0]
            raise ValueError(
                message(
                    "the mesh does not divide the devices",
                    where="mesh",
                    got=got,
                    fix=f"use a divisor, one of {divisors}",
                )
            )
        sizes = {name: available // known if size == -1 else size for name, size in sizes.items()}
    needed = prod(sizes.values())
    if needed > available:
        fix = "ask for fewer; or, before jax starts, fsdp_jax.launch.use_virtual_devices(n) (train.devices in a config)"
        raise ValueError(
            message(
                "the mesh has more devices than there are",
                where="mesh",
                expected=f"{needed} devices",
                got=got,
                fix=fix,
            )
        )
    if needed < available and not allow_fewer:
        fix = "set one size to -1, or pass allow_fewer=True to leave devices idle"
        raise ValueError(
            message(
                "the mesh would leave devices idle",
                where="mesh",
                expected=f"{available} devices",
                got=got,
                fix=fix,
            )
        )
    return sizes[REPLICA], sizes[DATA]


def _ordered(devices: list[jax.Device], shape: tuple[int, int]) -> np.ndarray:
    """[replica, data] devices: neighbours along `data` share a slice first, then a host.

    On a TPU each of the two axes runs through whole dims of the torus where the sizes fall so,
    `data` through the last of them. Where they do not, or devices are left out of the torus, the
    order is the best that is left.
    """
    devices = sorted(devices, key=lambda d: (_slice(d), d.process_index, d.id))
    if devices[0].platform == "tpu":
        along = _torus_dims([_place(device) for device in devices], shape[1])
        if along is not None:
            outer = [dim for dim in range(len(_place(devices[0]))) if dim not in along]
            devices.sort(key=lambda d: [_place(d)[dim] for dim in (*outer, *along)])
    return np.array(devices).reshape(shape)


def _place(device: jax.Device) -> tuple[int, ...]:
    """Of a TPU's core: slice, then where it is in the torus."""
    return (_slice(device), *device.coords, device.core_on_chip)


def _torus_dims(places: Sequence[tuple[int, ...]], size: int) -> tuple[int, ...] | None:
    """The dims that `data` of this size runs through, the last ones that fit; None where none do."""
    sizes = [len(set(along)) for along in zip(*places, strict=True)]
    if prod(sizes) != len(places):  # a box with holes
        return None
    dims = [dim for dim, length in enumerate(sizes) if length > 1]
    subsets = [subset for count in range(len(dims) + 1) for subset in combinations(dims, count)]
    return max(
        (subset for subset in subsets if prod(sizes[dim] for dim in subset) == size), default=None
    )


def _slice(device: jax.Device) -> int:
    return getattr(device, "slice_index", None) or 0


def check_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh made elsewhere if the library can use it.

    Raises:
        ValueError: a repeated or unknown axis name, no `data` axis, or axes that are not Auto.

    """
    names = [DATA if axis in data_axes(mesh) else axis for axis in mesh.axis_names]
    names = list(dict.fromkeys(names)) if DATA not in mesh.axis_names else names
    if len(set(names)) < len(names):
        raise ValueError(
            message(
                "axis names repeat",
                where="mesh",
                got=names,
                fix="give every axis a name of its own",
            )
        )
    for name in names:
        if name not in AXES:
            fix = f"{did_you_mean(str(name), AXES)} make_mesh makes both"
            raise ValueError(
                message(
                    f"unknown mesh axis '{name}'",
                    where="mesh",
                    expected=list(AXES),
                    got=names,
                    fix=fix,
                )
            )
    if DATA not in names:
        raise ValueError(
            message("the mesh has no axis 'data'", where="mesh", expected=list(AXES), got=names)
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        fix = "use fsdp_jax.make_mesh, or axis_types=(AxisType.Auto,) * n"
        raise ValueError(
            message(
                "mesh axes must be Auto",
                where="mesh",
                got=[str(k) for k in mesh.axis_types],
                fix=fix,
            )
        )
    return mesh


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes that `data` is made of; see the note."""
    parts = tuple(axis for axis in mesh.axis_names if _PART.fullmatch(str(axis)))
    return parts or tuple(axis for axis in mesh.axis_names if axis == DATA)


def split_data(mesh: Mesh, sizes: Sequence[int] | None = None) -> Mesh:
    """The same devices with `data` as several axes of these sizes, or of the machine's own; see the
    note.
    """
    if DATA not in mesh.axis_names:
        return mesh
    at = mesh.axis_names.index(DATA)
    sizes = _physical(np.moveaxis(mesh.devices, at, -1)) if sizes is None else sizes
    if len(sizes) < 2:
        return mesh
    assert prod(sizes) == mesh.shape[DATA], (sizes, mesh.shape)
    shape = (*mesh.devices.shape[:at], *sizes, *mesh.devices.shape[at + 1 :])
    names = [f"{DATA}_{number}" for number in range(len(sizes))]
    axes = (*mesh.axis_names[:at], *names, *mesh.axis_names[at + 1 :])
    return Mesh(mesh.devices.reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))


def _physical(devices: np.ndarray) -> tuple[int, ...]:
    """Sizes of the physical dims that the last dim of `devices` runs through, slowest first; one
    size where none fit.

    For a TPU the slice, the dims of the torus and the cores of a chip; for other machines the hosts
    and their devices.
    """
    rows = {_sizes(list(row)) for row in devices.reshape(-1, devices.shape[-1])}
    return rows.pop() if len(rows) == 1 else (devices.shape[-1],)


def _sizes(row: Sequence[jax.Device]) -> tuple[int, ...]:
    places = (
        [_place(d) for d in row]
        if row[0].platform == "tpu"
        else _numbered([d.process_index for d in row])
    )
    values = [sorted(set(along)) for along in zip(*places, strict=True)]
    # A dim that changes slowly comes first; the devices must run through the box of all values in
    # that order.
    changes = {
        dim: next(i for i, place in enumerate(places) if place[dim] != places[0][dim])
        for dim, along in enumerate(values)
        if len(along) > 1
    }
    varying = sorted(changes, key=lambda dim: -changes[dim])
    grid = list(product(*(values[dim] for dim in varying)))
    fits = [tuple(place[dim] for dim in varying) for place in places] == grid
    return tuple(len(values[dim]) for dim in varying) if fits and varying else (len(row),)


def _numbered(hosts: Sequence[int]) -> list[tuple[int, ...]]:
    """(host, number on that host) of each device."""
    seen: Counter[int] = Counter()
    places: list[tuple[int, ...]] = []
    for host in hosts:
        places.append((host, seen[host]))
        seen[host] += 1
    return places


def shape_of(mesh: Mesh) -> dict[str, int]:
    """{axis: size} as the user knows the mesh: `data` is one axis."""
    parts = data_axes(mesh)
    rest = {str(axis): size for axis, size in mesh.shape.items() if axis not in parts}
    return rest | {DATA: prod(mesh.shape[axis] for axis in parts)}


def known_as(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Mesh axes as the user knows them: all parts of `data` are `data`; one of them keeps its
    number.
    """
    parts = data_axes(mesh)
    if len(parts) < 2 or not set(parts) <= set(axes):
        return tuple(axes)
    return tuple(dict.fromkeys(DATA if axis in parts else axis for axis in axes))


def known_spec(mesh: Mesh, spec: PartitionSpec) -> PartitionSpec:
    """A spec in the user's words."""
    known = [known_as(mesh, axes_of(entry)) for entry in spec]
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in known))


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes that the batch is split over: all of the mesh."""
    return tuple(mesh.axis_names)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """One entry of a PartitionSpec as a tuple of mesh axes."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def shards_of(mesh: Mesh, entry: str | tuple[str, ...] | None) -> int:
    """Into how many parts one entry of a PartitionSpec splits a dim."""
    return prod(mesh.shape[axis] for axis in axes_of(entry))
