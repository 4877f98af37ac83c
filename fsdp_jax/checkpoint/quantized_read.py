"""Reads tensors of files into quantized parameters, part by part."""

from collections.abc import Sequence
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from fsdp_jax.errors import ArgumentError
from fsdp_jax.io.boxes import Box, box_of_index, box_sizes, box_view, relative_box
from fsdp_jax.io.sharded_read import HostBuffer, ShardReader, aligned_zeros
from fsdp_jax.io.tensor_mapping import TensorMapping
from fsdp_jax.sharding.padding import stored_shape
from fsdp_jax.sharding.quantized import Blocks, QuantizedStruct


def read_quantized(
    reader: ShardReader, leaf: QuantizedStruct, mappings: Sequence[TensorMapping]
) -> jax.Array:
    """Reads the mapped tensors into an array of stored blocks, padded as it is stored.

    Of the parameter in floating point, as much is held at once as half of the reader's budget has
    room for, or one index of a dim. The blocks of this process are held on the host until all are
    read.
    """
    blocks, sharding = leaf.blocks, leaf.sharding
    assert sharding is not None, "callers check that a target has shardings"
    # Which devices hold which part; replicas share a buffer.
    shape = stored_shape(leaf)
    targets: dict[Box, list[SingleDeviceSharding]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        targets.setdefault(box_of_index(index, shape), []).append(target)
    stored = aligned_zeros([box_sizes(box) for box in targets], leaf.dtype)

    # Cut all shards along one dim, so that each cut is read from the files once.
    sizes = box_sizes(next(iter(targets)))
    dim = max((dim for dim in range(len(shape)) if dim != blocks.dim), key=sizes.__getitem__)
    held = sum(prod(box_sizes(blocks.model_box(box))) for box in targets) * blocks.dtype.itemsize
    step = max(1, sizes[dim] * (reader.budget // 2) // max(held, 1))
    for first in range(0, sizes[dim], step):
        parts = [_cut(box, dim, first, step) for box in targets]
        own = [blocks.model_box(part) for part in parts]
        values = aligned_zeros([box_sizes(box) for box in own], blocks.dtype)
        buffers = {box: HostBuffer(each, []) for box, each in zip(own, values, strict=True)}
        reader.fill_buffers(buffers, mappings)
        for box, part, of_model, out in zip(targets, parts, own, stored, strict=True):
            if not all(box_sizes(of_model)):  # it has nothing but padding
                continue
            finite = write_blocks(out, blocks, relative_box(part, box), buffers[of_model].values)
            if not finite:
                raise ArgumentError(
                    "a weight that is to be quantized is not finite",
                    where=_names(mappings),
                    got=f"inf or nan, which would make its block of {blocks.base.block} nan",
                    fix="weights that are finite, or leave it out of base.kernels",
                )

    # Make one array of the shards.
    buffers_of = zip(stored, targets.values(), strict=True)
    arrays = [array for each, to in buffers_of for array in HostBuffer(each, to).arrays()]
    jax.block_until_ready(arrays)  # a transfer holds host memory until it is done
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _cut(box: Box, dim: int, first: int, count: int) -> Box:
    """Cuts a box along a dim to `count` indices from its `first`."""
    lo, hi = box[dim]
    return (*box[:dim], (min(lo + first, hi), min(lo + first + count, hi)), *box[dim + 1 :])


def _names(mappings: Sequence[TensorMapping]) -> str:
    """Names the tensors that a parameter is read from."""
    first, *others = (mapping.name for mapping in mappings)
    return f"{first} or {len(others)} more" if others else first


def write_blocks(stored: np.ndarray, blocks: Blocks, box: Box, values: np.ndarray) -> bool:
    """Quantizes values on the host, and writes their blocks to the start of a box of `stored`.

    Returns whether all values are finite.
    """
    host = jax.local_devices(backend="cpu")[0]
    encoded, finite = map(np.asarray, _encode(blocks, jax.device_put(values, host)))
    part = tuple((lo, lo + size) for (lo, _), size in zip(box, encoded.shape, strict=True))
    box_view(stored, part)[...] = encoded
    return bool(finite)


@partial(jax.jit, static_argnums=0)
def _encode(blocks: Blocks, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes a part of a parameter: (its blocks, whether it is finite)."""
    return blocks.encode(values), jnp.isfinite(values).all()
