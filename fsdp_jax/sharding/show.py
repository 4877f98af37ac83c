"""Shows an array on the devices, and a tree of arrays with their specs: `fsdp_jax.show`."""

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from fsdp_jax.compat.flax_boxes import array_in_box, is_box
from fsdp_jax.errors import ArgumentError, human_bytes
from fsdp_jax.sharding.layout import Leaf, spec_text
from fsdp_jax.sharding.mesh import axes_of, spec_axes
from fsdp_jax.tables import counted
from fsdp_jax.tree import PyTree, flatten
from fsdp_jax.views.array_slices import ArraySlices, Slice, shape_text
from fsdp_jax.views.layout_tree import LayoutTree, StateArray


def show(
    x: Any, specs: Any = None, mesh: Mesh | AbstractMesh | None = None
) -> ArraySlices | LayoutTree:
    """Shows which slice of an array each device holds, or a tree of arrays with their specs.

    `print` it, or let a notebook show it; `.save` writes a file. Devices of an abstract mesh have
    the numbers of their places in it.

    Args:
        x: a jax.Array, a ShapeDtypeStruct with a sharding, a variable of Flax; a Leaf of a
            `Layout`; or (shape, sharding). Or a pytree of arrays, or of shapes.
        specs: PartitionSpecs, or shardings, in the same tree, as `partition_specs` makes them; by
            default each array's own sharding.
        mesh: of the PartitionSpecs.

    Returns:
        A view: of one array its slices, `.slices` being {slice: device ids}; of a pytree a tree
        with the bytes that each device holds of every array.

    Raises:
        ValueError: anything else, a traced array, specs of another tree, or a sharding that does
            not divide the shape.

    Example:
        >>> fsdp.show(state.params["out"]["bias"]).slices  # {(start, stop) of each dim: devices}
        {((0, 8),): (0, 1, 2, 3, 4, 5, 6, 7)}

    """
    if isinstance(x, Leaf):
        return _slices_of_leaf(x)
    if isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], Sharding):
        (shape, sharding), dtype = x, None
    elif not jax.tree_util.all_leaves([x], is_leaf=is_box):
        return _tree(x, specs, mesh)
    else:
        array = _array(x, "show")
        sharding = _sharding(array, specs, mesh, "show")
        shape, dtype = array.shape, array.dtype
    spec, axes = PartitionSpec(), {}
    if isinstance(sharding, NamedSharding):
        spec, axes = sharding.spec, dict(sharding.mesh.shape)
    return _array_slices(tuple(shape), dtype, sharding, spec, axes, text=_spec_text(sharding))


def _array(leaf: Any, where: str) -> Any:
    """Takes the array, or the shape, out of a box of Flax."""
    array = array_in_box(leaf)
    if isinstance(array, jax.core.Tracer):
        raise ArgumentError(
            "a traced array is not on devices",
            where=where,
            got=array.aval,
            fix="call it outside of jit; inside, jax.debug.inspect_array_sharding",
        )
    # A variable of NNX has names of axes as its `sharding`.
    if hasattr(array, "get_value"):
        array = array.get_value()
    return array


def _sharding(array: Any, spec: Any, mesh: Mesh | AbstractMesh | None, where: str) -> Sharding:
    """Finds the sharding of an array: that of its spec, else its own."""
    sharding = getattr(array, "sharding", None) if spec is None else spec
    if isinstance(sharding, PartitionSpec):
        if mesh is None:
            raise ArgumentError(
                "a PartitionSpec says nothing of devices without a mesh",
                where=where,
                got=sharding,
                fix="fsdp_jax.show(params, specs, mesh)",
            )
        sharding = NamedSharding(mesh, sharding)
    if not isinstance(sharding, Sharding) or not hasattr(array, "dtype"):
        raise ArgumentError(
            "there is no sharding to show",
            where=where,
            expected="a jax.Array, a Leaf of a layout, (shape, NamedSharding), or a tree of arrays",
            got=type(array).__name__,
            fix="fsdp_jax.show(array), fsdp_jax.show(((64, 128), sharding)), or "
            "fsdp_jax.show(params, specs, mesh)",
        )
    return sharding


def _spec_text(sharding: Sharding) -> str:
    """Formats the spec of a sharding, or the kind of another sharding."""
    if isinstance(sharding, NamedSharding):
        return spec_text(sharding.spec)
    return type(sharding).__name__


def _tree(tree: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh | None) -> LayoutTree:
    """Shows a tree of arrays, each with the part of it that a device holds."""
    leaves = flatten(tree, is_leaf=is_box)
    given: Mapping[str, Any] = dict.fromkeys(leaves)
    if specs is not None:
        given = flatten(specs, is_leaf=lambda x: isinstance(x, PartitionSpec | Sharding))
    if not leaves:
        raise ArgumentError("there are no arrays to show", where="show", got=type(tree).__name__)
    if given.keys() != leaves.keys():
        path = min(given.keys() ^ leaves.keys())
        raise ArgumentError(
            "the specs are of another tree than the arrays",
            where=f"show, {path}",
            expected=f"a spec for each of {len(leaves)} arrays",
            got="an array without a spec" if path in leaves else "a spec without an array",
            fix="fsdp_jax.show(params, fsdp_jax.partition_specs(params, mesh), mesh)",
        )
    shown: dict[str, tuple[StateArray, ...]] = {}
    axes: dict[str, int] = {}
    whole = replicated = 0
    for path, leaf in leaves.items():
        where = f"show, {path}"
        array = _array(leaf, where)
        sharding = _sharding(array, given[path], mesh, where)
        held = shard_shape(array.shape, sharding, where)
        parts = prod(array.shape) // max(prod(held), 1)
        along: tuple[str, ...] = ()
        if isinstance(sharding, NamedSharding):
            sizes = dict(sharding.mesh.shape)
            axes |= sizes
            along = tuple(axis for axis in spec_axes(sharding.spec) if sizes[axis] > 1)
        whole += prod(array.shape) * array.dtype.itemsize
        size = prod(held) * array.dtype.itemsize
        replicated += size * (parts == 1)
        shown[path] = (
            StateArray(
                kind="",
                shape=tuple(array.shape),
                dtype=str(array.dtype),
                spec=_spec_text(sharding),
                axes=along,
                bytes=size,
                reason=f"each device holds {shape_text(held)}, 1 of {parts} slices",
            ),
        )
    total = sum(array.bytes for (array,) in shown.values())
    on = " x ".join(f"{axis}={size}" for axis, size in axes.items()) or "one device"
    ratio = whole / max(total, 1)
    return LayoutTree(
        summary=f"{counted(len(shown), 'array')} on {on}: "
        f"{human_bytes(total)} per device ({human_bytes(whole)} replicated, {ratio:.2f}x)",
        cards=[
            ("per device", human_bytes(total), f"{human_bytes(whole)} replicated"),
            ("sharded", human_bytes(total - replicated), "of a device"),
            ("replicated", human_bytes(replicated), "on every device"),
        ],
        axes=axes,
        sections={"arrays": shown},
    )


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
    shard_shape(shape, sharding, "show")
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


def shard_shape(shape: tuple[int, ...], sharding: Sharding, where: str) -> tuple[int, ...]:
    """Computes the shape that each device holds; the error names `where`."""
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
        raise ArgumentError(
            "the spec has more dims than the shape", where=where, got=f"{shape}, {sharding.spec}"
        )
    try:
        return sharding.shard_shape(shape)
    except ValueError as error:
        raise ArgumentError(
            "the sharding does not divide the shape",
            where=where,
            got=f"{shape}, {sharding}",
            fix="a Leaf of a layout is shown as it is stored, with padding",
        ) from error


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
