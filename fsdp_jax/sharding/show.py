"""Shows one array on the devices: `fsdp_jax.show`."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from fsdp_jax.compat.flax_boxes import array_in_box
from fsdp_jax.errors import ArgumentError
from fsdp_jax.sharding.layout import Leaf, spec_text
from fsdp_jax.sharding.mesh import axes_of
from fsdp_jax.views.array_slices import ArraySlices, Slice


def show(x: Any) -> ArraySlices:
    """Shows which slice of an array each device holds, for any rank and any mesh.

    `print` it, or let a notebook show it; `.slices` is {slice: device ids}, and `.save` writes a
    file. Devices of an abstract mesh have the numbers of their places in it.

    Args:
        x: a jax.Array, a ShapeDtypeStruct with a sharding, a variable of Flax; a Leaf of a
            `Layout`; or (shape, sharding).

    Raises:
        ValueError: anything else, a traced array, or a sharding that does not divide the shape.

    """
    if isinstance(x, Leaf):
        return _slices_of_leaf(x)
    if isinstance(x, tuple) and len(x) == 2:
        (shape, sharding), dtype = x, None
    else:
        x = array_in_box(x)
        if isinstance(x, jax.core.Tracer):
            raise ArgumentError(
                "a traced array is not on devices",
                where="show",
                got=x.aval,
                fix="call it outside of jit; inside, jax.debug.inspect_array_sharding",
            )
        # A variable of NNX has names of axes as its `sharding`.
        if hasattr(x, "get_value"):
            x = x.get_value()
        shape, sharding, dtype = (getattr(x, name, None) for name in ("shape", "sharding", "dtype"))
    if not isinstance(sharding, Sharding):
        raise ArgumentError(
            "there is no sharding to show",
            where="show",
            expected="a jax.Array, a Leaf of a layout, or (shape, NamedSharding)",
            got=type(x).__name__,
            fix="fsdp_jax.show(array), or fsdp_jax.show(((64, 128), sharding))",
        )
    spec, mesh = PartitionSpec(), {}
    text = type(sharding).__name__
    if isinstance(sharding, NamedSharding):
        spec, mesh = sharding.spec, dict(sharding.mesh.shape)
        text = spec_text(spec)
    return _array_slices(tuple(shape), dtype, sharding, spec, mesh, text=text)


def _slices_of_leaf(leaf: Leaf) -> ArraySlices:
    """Shows a leaf of a layout, in the user's names of mesh axes."""
    spec = leaf.axes.user_spec(leaf.spec)
    *_, rule, reason = leaf.cells()
    return _array_slices(
        leaf.stored_shape,
        leaf.dtype,
        leaf.on_device,
        spec,
        leaf.axes.shape,
        name=leaf.path,
        text=spec_text(spec),
        note=f"{rule}: {reason}",
    )


def _array_slices(
    shape: tuple[int, ...],
    dtype: np.dtype | None,
    sharding: Sharding,
    spec: PartitionSpec,
    mesh: Mapping[str, int],
    *,
    text: str,
    name: str = "",
    note: str = "",
) -> ArraySlices:
    """Makes the view; `spec` and `mesh` have the names to show, and `text` is the spec's."""
    dtype_text, item_bytes = "", 0
    if dtype is not None:
        dtype_text, item_bytes = str(dtype), dtype.itemsize
    devices: set[Any] = set()
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
        devices = sharding.device_set
    return ArraySlices(
        name=name,
        shape=shape,
        dtype=dtype_text,
        item_bytes=item_bytes,
        spec=text,
        axes=mesh,
        dim_axes=tuple(map(axes_of, (*spec, *[None] * (len(shape) - len(spec))))),
        slices=slices_by_device(shape, sharding),
        processes={device.id: device.process_index for device in devices},
        note=note,
    )


def slices_by_device(shape: tuple[int, ...], sharding: Sharding) -> dict[Slice, tuple[int, ...]]:
    """Finds the slice that each device holds: {slice: device ids}, in the array's order.

    A slice has (start, stop) for each dim.
    """
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
        raise ArgumentError(
            "the spec has more dims than the shape", where="show", got=f"{shape}, {sharding.spec}"
        )
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise ArgumentError(
            "the sharding does not divide the shape",
            where="show",
            got=f"{shape}, {sharding}",
            fix="a Leaf of a layout is shown as it is stored, with padding",
        ) from error
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        held = _slices_on_abstract_mesh(shape, sharding.spec, sharding.mesh)
    else:
        parts: Mapping[Any, Any] = sharding.devices_indices_map(shape)
        held = {
            device.id: tuple(
                part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
            )
            for device, index in parts.items()
        }
    devices: dict[Slice, list[int]] = defaultdict(list)
    for device, index in held.items():
        devices[index].append(device)
    return {index: tuple(sorted(devices[index])) for index in sorted(devices)}


def _slices_on_abstract_mesh(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: AbstractMesh
) -> dict[int, Slice]:
    """Computes {place in the mesh: slice}; jax asks for devices, which this mesh has not."""
    held = {}
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    for device, place in enumerate(np.ndindex(*mesh.axis_sizes)):
        at = dict(zip(mesh.axis_names, place, strict=True))
        index = []
        for size, axes in zip(shape, map(axes_of, entries), strict=True):
            # the number of the part, in which the first axis changes slowest
            part, parts = 0, 1
            for axis in axes:
                part = part * mesh.shape[axis] + at[axis]
                parts *= mesh.shape[axis]
            index.append((part * size // parts, (part + 1) * size // parts))
        held[device] = tuple(index)
    return held
