"""Device meshes of two axes: `data`, along which state is sharded, and `replica`, along which it may be repeated.

The batch is split over both. The sharding factor of PyTorch FSDP is the size of `data`.
"""

from collections.abc import Sequence
from math import prod

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fsdp_jax.errors import did_you_mean, message

REPLICA = "replica"
DATA = "data"
AXES = (REPLICA, DATA)


def make_mesh(
    data: int = -1, replica: int = 1, *, devices: Sequence[jax.Device] | None = None, allow_fewer: bool = False
) -> Mesh:
    """A mesh of `replica` x `data` devices with Auto axes, `data` on the fast links.

    Args:
        data: size of the axis that state is sharded along; -1 takes what `replica` leaves.
        replica: size of the axis that hybrid strategies repeat state along; -1 takes what `data` leaves.
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
    if any(size < 1 and size != -1 for size in sizes.values()) or list(sizes.values()).count(-1) > 1:
        raise ValueError(message("mesh sizes are positive, and at most one is -1", where="mesh", got=got))
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
                "the mesh has more devices than there are", where="mesh", expected=f"{needed} devices", got=got, fix=fix
            )
        )
    if needed < available and not allow_fewer:
        fix = "set one size to -1, or pass allow_fewer=True to leave devices idle"
        raise ValueError(
            message(
                "the mesh would leave devices idle", where="mesh", expected=f"{available} devices", got=got, fix=fix
            )
        )
    return sizes[REPLICA], sizes[DATA]


def _ordered(devices: list[jax.Device], shape: tuple[int, int]) -> np.ndarray:
    """[replica, data] devices: neighbours along `data` share a slice first, then a host.

    A TPU slice is a torus, so its order along `data` follows the physical links. Where the sizes do not fall on whole
    axes of the torus, or devices are left out of it, the order is the best that is left.
    """
    by_slice: dict[int, list[jax.Device]] = {}
    for device in sorted(devices, key=lambda d: (_slice(d), d.process_index, d.id)):
        by_slice.setdefault(_slice(device), []).append(device)
    if devices[0].platform == "tpu":
        size = len(next(iter(by_slice.values())))
        inner = (max(1, size // shape[1]), min(size, shape[1]))
        if prod(inner) == size and all(len(part) == size and _fills_a_box(part) for part in by_slice.values()):
            parts = [
                mesh_utils.create_device_mesh(inner, devices=part, allow_split_physical_axes=True)
                for part in by_slice.values()
            ]
            return np.concatenate([part.ravel() for part in parts]).reshape(shape)
    return np.array([device for part in by_slice.values() for device in part]).reshape(shape)


def _slice(device: jax.Device) -> int:
    return getattr(device, "slice_index", None) or 0


def _fills_a_box(devices: list[jax.Device]) -> bool:
    """Whether TPU devices are a cuboid of the torus without holes."""
    places = [(*device.coords, device.core_on_chip) for device in devices]
    return prod(max(along) - min(along) + 1 for along in zip(*places, strict=True)) == len(devices)


def check_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh made elsewhere if the library can use it.

    Raises:
        ValueError: a repeated or unknown axis name, no `data` axis, or axes that are not Auto.

    """
    names = list(mesh.axis_names)
    if len(set(names)) < len(names):
        raise ValueError(message("axis names repeat", where="mesh", got=names, fix="give every axis a name of its own"))
    for name in names:
        if name not in AXES:
            fix = f"{did_you_mean(str(name), AXES)} make_mesh makes both"
            raise ValueError(
                message(f"unknown mesh axis '{name}'", where="mesh", expected=list(AXES), got=names, fix=fix)
            )
    if DATA not in names:
        raise ValueError(message("the mesh has no axis 'data'", where="mesh", expected=list(AXES), got=names))
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        fix = "use fsdp_jax.make_mesh, or axis_types=(AxisType.Auto,) * n"
        raise ValueError(
            message("mesh axes must be Auto", where="mesh", got=[str(k) for k in mesh.axis_types], fix=fix)
        )
    return mesh


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
