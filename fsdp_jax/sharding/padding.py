"""Padded storage: an array whose dims its devices do not divide is stored with zeros behind it.

jax asks for divisible dims where an array enters or leaves a jitted function, and nowhere else. So
between steps such an array has the next larger divisible shape, and a step cuts it to its own as it
begins and pads it as it ends, both of them on each device alone. The model, the optimizer and the
checkpoints see the array's own shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fsdp_jax.sharding.mesh import shards_of, spec_of
from fsdp_jax.sharding.quantized import QuantizedStruct


def padded_shape(
    shape: Sequence[int],
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh,
    granules: Sequence[int] = (),
) -> tuple[int, ...]:
    """Computes the shape that an array is stored in: each dim a multiple of its shards.

    `shape`: the array's own; `spec`: how it is sharded over the mesh; `granules`: for each dim, the
    elements that a shard must not cut, by default 1.
    """
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    counts = [shards_of(mesh, entry) for entry in entries]
    units = [n * g for n, g in zip(counts, granules or [1] * len(shape), strict=True)]
    return tuple(-(-size // unit) * unit for size, unit in zip(shape, units, strict=True))


def divisible_spec(
    spec: PartitionSpec, shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Drops the entries of a spec that do not divide an array of this shape."""
    pairs = zip(spec, shape, strict=False)
    return spec_of(e if size % shards_of(mesh, e) == 0 else None for e, size in pairs)


def stored_shape(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Computes the shape that an array is stored in, by the sharding of its own shape."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return tuple(leaf.shape)
    granules = leaf.blocks.stored_granules if isinstance(leaf, QuantizedStruct) else ()
    return padded_shape(leaf.shape, sharding.spec, sharding.mesh, granules)


def as_stored(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Makes the shape, dtype and sharding of the array that is stored for a leaf's own shape."""
    return jax.ShapeDtypeStruct(stored_shape(leaf), leaf.dtype, sharding=leaf.sharding)


def pad(array: jax.Array | np.ndarray, shape: tuple[int, ...]) -> jax.Array:
    """Puts zeros behind each dim of an array, up to `shape`; returns it as is if it has that."""
    if array.shape == shape:
        return jnp.asarray(array)
    behind = [(0, size - own) for size, own in zip(shape, array.shape, strict=True)]
    return jnp.pad(array, behind)


def unpad(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Cuts the padding off an array, to `shape`; returns it as is if it has that."""
    if array.shape == shape:
        return array
    return lax.slice(array, (0,) * len(shape), shape)


@dataclass(frozen=True, eq=False)
class Padded:
    """An array that is stored padded, outside a state: in what is saved, restored, imported, given.

    No pytree, but a leaf. `np.asarray` copies the array of its own shape to the host.

    Attributes:
        array: as it is stored, with zeros beyond `shape`.
        shape: its own.
        stored_as: what the bytes of a quantized parameter are; empty for others.

    """

    array: jax.Array
    shape: tuple[int, ...]
    stored_as: str = ""

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array."""
        return self.array.dtype

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The sharding of `array`, which need not divide `shape`."""
        return self.array.sharding

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array in its own shape, on the host."""
        own = np.asarray(self.array)[tuple(map(slice, self.shape))]
        # Contiguous: safetensors writes the memory of any other array in a wrong order.
        return np.array(np.ascontiguousarray(own), dtype, copy=copy)


def mark_padded(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array | Padded:
    """Marks a stored array for a checkpoint: as `Padded`, if `leaf` is smaller or quantized."""
    stored_as = getattr(leaf, "stored_as", "")
    if array.shape == tuple(leaf.shape) and not stored_as:
        return array
    return Padded(array, tuple(leaf.shape), stored_as)


def stored_array(leaf: Any) -> Any:
    """Takes the array that a `Padded` leaf is stored in; any other leaf as it is."""
    return leaf.array if isinstance(leaf, Padded) else leaf
