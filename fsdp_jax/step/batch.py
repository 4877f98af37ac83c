"""Places a batch on the devices: checks its rows, moves them, cuts them into microbatches."""

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype  # NumPy's float64 arrives as float32
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax.compat.error_texts import first_line
from fsdp_jax.errors import ArgumentError
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.sharding.mesh import MeshAxes
from fsdp_jax.tree import PyTree, array_text, flatten

_ARRAYS = (np.ndarray, jax.Array, jax.ShapeDtypeStruct)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GlobalBatch:
    """A batch on the devices.

    Attributes:
        leaves: arrays [rows, ...], or [accumulation, rows of a microbatch, ...].
        accumulation: microbatches per step.

    """

    leaves: PyTree
    accumulation: int = field(metadata={"static": True})


class BatchPlacement:
    """Turns a process's rows into a `GlobalBatch` for a mesh.

    Attributes:
        processes: number of processes that have devices of the mesh.
        sharding: of each leaf of the `GlobalBatch`.

    """

    def __init__(self, axes: MeshAxes, accumulation: int) -> None:
        self._accumulation = accumulation
        self._axes = axes
        self.processes = len({device.process_index for device in axes.mesh.devices.flat})
        self._rows = NamedSharding(axes.mesh, PartitionSpec(axes.batch))
        self.sharding = self._rows
        if accumulation > 1:
            self.sharding = NamedSharding(axes.mesh, PartitionSpec(None, axes.batch))
        self._cut_on_devices = jax.jit(
            lambda leaves: [self._as_microbatches(leaf) for leaf in leaves],
            out_shardings=self.sharding,
        )

    def place(self, batch: PyTree) -> GlobalBatch:
        """Places arrays [rows, ...] on the devices as a batch; errors as of `CompiledStep.put`."""
        if isinstance(batch, GlobalBatch):
            if batch.accumulation == self._accumulation:
                return batch
            raise ArgumentError(
                "the batch was cut for another step",
                where="batch",
                expected=f"{self._accumulation} microbatches",
                got=batch.accumulation,
                fix="put the batch with the step that takes it",
            )
        leaves, tree = self._checked_leaves(batch, local=True)
        self._check_kinds(batch, leaves)
        return GlobalBatch(jax.tree.unflatten(tree, self._to_devices(leaves)), self._accumulation)

    def abstract(self, batch: PyTree) -> GlobalBatch:
        """Describes a placed batch of global rows: its shapes, dtypes and shardings."""
        k = self._accumulation

        def placed(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, canonicalize_dtype(dtype), sharding=self.sharding)

        if isinstance(batch, GlobalBatch):
            leaves = jax.tree.map(lambda leaf: placed(leaf.shape, leaf.dtype), batch.leaves)
            return GlobalBatch(leaves, k)
        leaves, tree = self._checked_leaves(batch)
        cut = [
            placed((k, x.shape[0] // k, *x.shape[1:]) if k > 1 else x.shape, x.dtype)
            for x in leaves
        ]
        return GlobalBatch(jax.tree.unflatten(tree, cut), k)

    def global_shapes(self, batch: PyTree) -> PyTree:
        """Finds the shapes [global rows, ...] of a batch as `place` takes it, placed or not.

        Raises ValueError for what a step does not take, as `abstract` does.
        """
        if isinstance(batch, GlobalBatch):
            cut = 1 if self._accumulation == 1 else 2
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((prod(x.shape[:cut]), *x.shape[cut:]), x.dtype),
                batch.leaves,
            )
        processes = self._axes.batch_shards // len(self.local_shards) if self.processes > 1 else 1

        def whole(leaf: Any) -> jax.ShapeDtypeStruct:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            array = leaf if isinstance(leaf, _ARRAYS) else np.asarray(leaf)
            if not array.ndim:  # refused below
                return jax.ShapeDtypeStruct((), array.dtype)
            rows = array.shape[0] * (processes if self.is_local(array) else 1)
            return jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)

        shapes = jax.tree.map(whole, batch)
        self._checked_leaves(shapes)
        return shapes

    @cached_property
    def local_shards(self) -> tuple[int, ...]:
        """Numbers of the batch's shards that this process's devices hold.

        Devices along the model's own axes hold the same rows.
        """
        mesh = self._axes.mesh
        dims = [mesh.axis_names.index(axis) for axis in (*self._axes.batch, *self._axes.model)]
        devices = mesh.devices.transpose(dims).reshape(self._axes.batch_shards, -1)
        process = jax.process_index()
        return tuple(
            n for n, row in enumerate(devices) if process in {d.process_index for d in row}
        )

    def cut(self, batch: PyTree) -> PyTree:
        """Cuts a traced batch [global rows, ...] into [accumulation, microbatch rows, ...]."""
        leaves, tree = self._checked_leaves(batch)
        cut = [leaf.reshape(self._accumulation, -1, *leaf.shape[1:]) for leaf in leaves]
        sharding = NamedSharding(self._rows.mesh, PartitionSpec(None, *self._rows.spec))
        return jax.tree.unflatten(tree, jax.lax.with_sharding_constraint(cut, sharding))

    def is_local(self, leaf: Any) -> bool:
        """Tells whether a leaf holds this process's rows alone, not those of the global batch."""
        return isinstance(leaf, np.ndarray) or (self.processes > 1 and leaf.is_fully_addressable)

    def _to_devices(self, leaves: list[Any]) -> list[jax.Array]:
        """Moves leaves to the devices, as arrays [rows, ...] or cut into microbatches.

        They are moved in one call: a call each takes several times as long.
        """
        local = [self._as_microbatches(leaf) for leaf in leaves if self.is_local(leaf)]
        if self.processes == 1:
            from_local = iter(jax.device_put(local, self.sharding))
        else:
            from_local = iter(jax.make_array_from_process_local_data(self.sharding, local))
        if len(local) == len(leaves):
            return list(from_local)
        placed = jax.device_put([x for x in leaves if not self.is_local(x)], self._rows)
        if self._accumulation > 1:
            with self._axes.ambient():  # not the user's, which may have Explicit axes
                placed = self._cut_on_devices(placed)
        from_global = iter(placed)
        return [next(from_local if self.is_local(leaf) else from_global) for leaf in leaves]

    def _check_kinds(self, batch: PyTree, leaves: list[Any]) -> None:
        """Raises ValueError where microbatches would be cut from rows that do not belong together.

        In several processes they are cut from this process's rows of a NumPy array, and from all
        rows of a global one.
        """
        if self.processes == 1 or self._accumulation == 1:
            return
        local = [
            path for path, leaf in zip(flatten(batch), leaves, strict=True) if self.is_local(leaf)
        ]
        if 0 < len(local) < len(leaves):
            raise ArgumentError(
                "the batch mixes this process's rows with global arrays",
                where="batch",
                expected=f"one kind of arrays, to be cut into {self._accumulation} microbatches",
                got=f"of this process alone: {', '.join(local)}",
                fix="pass NumPy arrays alone, or make all of them global by "
                "jax.make_array_from_process_local_data",
            )

    def _as_microbatches(self, leaf: Any) -> Any:
        """Cuts [rows, ...] into [accumulation, microbatch rows, ...], if there are several."""
        k = self._accumulation
        return leaf.reshape(k, -1, *leaf.shape[1:]) if k > 1 else leaf

    def _checked_leaves(self, batch: PyTree, *, local: bool = False) -> tuple[list[Any], Any]:
        """Checks the rows of a batch: (its leaves as arrays, its tree structure).

        `local`: the rows are those of this process, and not of the global batch.

        Raises:
            ValueError: no leaves, a leaf without rows or of no numbers, leaves that differ in their
                rows, or a number of rows that is not divisible by shards x accumulation.
        """
        # The leaves as arrays: there is at least one, and each has rows and numbers.
        leaves, tree = flatten_batch(batch)
        if not leaves:
            raise ArgumentError(
                "the batch is empty", where="batch", expected="arrays [rows, ...]", got=batch
            )
        leaves = [leaf if isinstance(leaf, _ARRAYS) else np.asarray(leaf) for leaf in leaves]
        for number, leaf in enumerate(leaves):
            if not (leaf.ndim and _is_numeric(leaf)):
                raise _bad_leaf_error(list(flatten(batch))[number], leaf)
        leaves = [_in_native_order(leaf) for leaf in leaves]
        # A global array counts with the share of its rows that these devices hold.
        shards = len(self.local_shards) if local else self._axes.batch_shards
        share = shards / self._axes.batch_shards
        rows = [
            leaf.shape[0] if share == 1 or self.is_local(leaf) else leaf.shape[0] * share
            for leaf in leaves
        ]
        # Each leaf has as many rows, and these divide evenly.
        if len(set(rows)) != 1:
            raise ArgumentError(
                "leaves of the batch differ in their rows",
                where="batch",
                got={path: int(count) for path, count in zip(flatten(batch), rows, strict=True)},
                fix=(
                    "an array of no rows, such as the weights of classes, is no part of the batch: "
                    "close over it in the loss, as a NumPy array, or repeat it for each row"
                ),
            )
        parts = shards * self._accumulation
        if rows[0] == 0 or rows[0] % parts:
            which = "devices" if self._axes.model_shards == 1 else "shards of the batch"
            got = int(rows[0])
            near = max(parts, got // parts * parts)
            raise ArgumentError(
                "the batch cannot be split evenly",
                where="batch",
                expected=(
                    f"a multiple of {parts} rows: {shards} {which}"
                    + " of this process" * local
                    + f" x accumulation {self._accumulation}"
                ),
                got=got,
                fix=f"use {near} or {near + parts} rows, or fsdp_jax.pad_rows(batch, {parts})",
            )
        return leaves, tree


def flatten_batch(batch: PyTree) -> tuple[list[Any], Any]:
    """Flattens a batch as `jax.tree.flatten` does.

    Raises ValueError for a dict with keys of several types, which jax cannot sort.
    """
    try:
        return jax.tree.flatten(batch)
    except ValueError as error:
        raise ArgumentError(
            "a dict of the batch has keys that cannot be sorted",
            where="batch",
            expected="keys of one type",
            got=first_line(error),
            fix="name its arrays by text: {'x': x, 'y': y}",
        ) from error


def _is_numeric(leaf: Any) -> bool:
    """Tells whether an array has numbers of a dtype that jax knows, none of them masked."""
    if isinstance(leaf, np.ma.MaskedArray) or not isinstance(leaf.dtype, np.dtype):
        return False
    kinds = (jnp.number, jnp.bool_)
    is_known = leaf.dtype not in (np.longdouble, np.clongdouble)
    return is_known and any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)


def _in_native_order(leaf: Any) -> Any:
    """Copies an array of NumPy whose bytes are in another order than the machine's."""
    if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
        return leaf.astype(leaf.dtype.newbyteorder("="))
    return leaf


def pad_rows(batch: PyTree, multiple: int) -> tuple[PyTree, np.ndarray]:
    """Pads the last rows of a dataset to a number that the devices divide.

    The added rows repeat the first one, so that no model meets values that it could not meet else.
    A loss leaves them out by the mask: `sum(where(mask, losses, 0)), sum(mask)`.

    Args:
        batch: arrays [rows, ...] of NumPy, with at least one row.
        multiple: of which the padded rows are one: devices, or devices x accumulation.

    Returns:
        The arrays, [padded rows, ...], and the mask, bool [padded rows], True for rows of `batch`.

    Example:
        >>> padded, mask = fsdp.pad_rows({"x": np.zeros((13, 64))}, 8)
        >>> padded["x"].shape, int(mask.sum())
        ((16, 64), 13)

    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    if not leaves or not all(leaf.ndim and len(leaf) == len(leaves[0]) > 0 for leaf in leaves):
        shapes = {path: np.shape(leaf) for path, leaf in flatten(batch).items()}
        raise ArgumentError(
            "not rows", where="batch", expected="arrays with as many rows, 1 or more", got=shapes
        )
    rows = len(leaves[0])
    indices = np.zeros(-(-rows // multiple) * multiple, np.int64)
    indices[:rows] = np.arange(rows)
    mask = np.arange(len(indices)) < rows
    return jax.tree.map(lambda leaf: np.asarray(leaf)[indices], batch), mask


def _bad_leaf_error(path: str, leaf: Any) -> ValueError:
    """Makes the error for a leaf of a batch, at this path, that has no rows or no numbers."""
    if is_prng_key(leaf):
        what = "a random key in the batch"
        fix = "leave it out: dropout draws from the model's own streams, a new key each step; "
        fix += "loss_fn(model, batch, key) is given one too"
    elif isinstance(leaf, np.ma.MaskedArray):
        what = "a masked array in the batch"
        fix = "pass two arrays, x.filled(0) and ~x.mask, and multiply by the second in the loss"
    elif not _is_numeric(leaf):
        what = "not numbers in the batch"
        if leaf.dtype.kind in "SU":
            what = "text in the batch"
        fix = "leave it out, or encode it as numbers of a dtype that jax has"
    else:
        what = "a scalar in the batch"
        fix = "repeat it for each row: numpy.full(rows, value); if it is in a list of numbers, "
        fix += "make the list an array, numpy.asarray(values)"
    where = "/".join(filter(None, ("batch", path)))
    got = array_text(leaf)
    return ArgumentError(what, where=where, expected="numbers, [rows, ...]", got=got, fix=fix)
