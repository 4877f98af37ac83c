"""Reads tensors of files into quantized parameters, part by part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax.checkpoint.bitsandbytes_read import CodedTensor
from fsdp_jax.errors import ArgumentError
from fsdp_jax.io.boxes import Box, box_sizes, box_view, relative_box
from fsdp_jax.io.safetensors import StoredTensor
from fsdp_jax.io.sharded_read import HostBuffer, ShardReader, aligned_zeros, targets_of
from fsdp_jax.io.tensor_mapping import TensorMapping
from fsdp_jax.sharding.padding import stored_shape
from fsdp_jax.sharding.quantized import Blocks, QuantizedStruct


def read_quantized(
    reader: ShardReader, leaf: QuantizedStruct, mappings: Sequence[TensorMapping]
) -> jax.Array:
    """Reads the mapped tensors into an array of stored blocks, padded as it is stored.

    Of the parameter in floating point, as much is held at once as half of the reader's budget has
    room for, or one index of a dim. The blocks of this process are held on the host until all are
    read. Codes are copied where `keeps_codes` says so.
    """
    blocks, sharding = leaf.blocks, leaf.sharding
    assert sharding is not None, "callers check that a target has shardings"
    shape = stored_shape(leaf)
    targets = targets_of(sharding, shape)
    stored = aligned_zeros([box_sizes(box) for box in targets], leaf.dtype)
    read = _read_values
    if keeps_codes(reader.tensors, mappings, blocks):
        read = _read_codes

    # Cut all shards along one dim, so that each cut is read from the files once.
    sizes = box_sizes(next(iter(targets)))
    dim = max((dim for dim in range(len(shape)) if dim != blocks.dim), key=sizes.__getitem__)
    held = sum(prod(box_sizes(blocks.model_box(box))) for box in targets) * blocks.dtype.itemsize
    step = max(1, sizes[dim] * (reader.budget // 2) // max(held, 1))
    for first in range(0, sizes[dim], step):
        parts = [_cut(box, dim, first, step) for box in targets]
        own = [blocks.model_box(part) for part in parts]
        encoded = read(reader, blocks, own, mappings)
        for box, part, of_model, out in zip(targets, parts, own, stored, strict=True):
            if all(box_sizes(of_model)):  # else it has nothing but padding
                made = np.asarray(encoded(of_model))
                starts = [lo for lo, _ in relative_box(part, box)]
                ends = map(sum, zip(starts, made.shape, strict=True))
                box_view(out, tuple(zip(starts, ends, strict=True)))[...] = made

    # Make one array of the shards.
    buffers_of = zip(stored, targets.values(), strict=True)
    arrays = [array for each, to in buffers_of for array in HostBuffer(each, to).arrays()]
    jax.block_until_ready(arrays)  # a transfer holds host memory until it is done
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _cut(box: Box, dim: int, first: int, count: int) -> Box:
    """Cuts a box along a dim to `count` indices from its `first`."""
    lo, hi = box[dim]
    return (*box[:dim], (min(lo + first, hi), min(lo + first + count, hi)), *box[dim + 1 :])


def keeps_codes(
    tensors: Mapping[str, StoredTensor], mappings: Sequence[TensorMapping], blocks: Blocks
) -> bool:
    """Tells whether all mapped tensors have the codes and blocks of the stored parameter."""
    base = blocks.base
    for mapping in mappings:
        tensor = tensors[mapping.name]
        if not isinstance(tensor, CodedTensor) or not tensor.has_whole_blocks:
            return False
        if (base.format, base.scales, base.block) != ("nf4", "float32", tensor.block):
            return False
        if mapping.dims[blocks.dim] != tensor.block_dim:
            return False
    return True


def _read_values(
    reader: ShardReader, blocks: Blocks, boxes: Sequence[Box], mappings: Sequence[TensorMapping]
) -> Callable[[Box], jax.Array]:
    """Reads boxes of the parameter: box -> its blocks, quantized on the host."""
    values = _fill(reader, boxes, mappings, reader.tensors, blocks.dtype)

    def encoded(box: Box) -> jax.Array:
        stored, finite = _encode(blocks, _on_host(values[box]))
        if not finite:
            raise ArgumentError(
                "a weight that is to be quantized is not finite",
                where=f"{mappings[0].name}, and {len(mappings) - 1} more of this parameter",
                got=f"inf or nan, which would make its block of {blocks.base.block} nan",
                fix="weights that are finite, or a base.kernels that leaves this one out",
            )
        return stored

    return encoded


def _read_codes(
    reader: ShardReader, blocks: Blocks, boxes: Sequence[Box], mappings: Sequence[TensorMapping]
) -> Callable[[Box], jax.Array]:
    """Reads codes and scales of boxes of the parameter: box -> its blocks, on the host."""
    tensors = {each.name: cast(CodedTensor, reader.tensors[each.name]) for each in mappings}
    of_codes = {name: each.codes for name, each in tensors.items()}
    codes = _fill(reader, boxes, mappings, of_codes, np.dtype(np.uint8))
    # A block along its dim has one scale.
    of_scales = {name: each.scales for name, each in tensors.items()}
    dim, block = blocks.dim, blocks.base.block
    scale_mappings = [
        replace(
            each,
            size=(*each.size[:dim], each.size[dim] // block, *each.size[dim + 1 :]),
            shape=of_scales[each.name].shape,
        )
        for each in mappings
    ]
    scale_boxes = {
        box: (*box[:dim], (box[dim][0] // block, box[dim][1] // block), *box[dim + 1 :])
        for box in boxes
    }
    scales = _fill(
        reader, list(scale_boxes.values()), scale_mappings, of_scales, np.dtype(np.float32)
    )
    return lambda box: _pack(blocks, _on_host(codes[box]), _on_host(scales[scale_boxes[box]]))


def _fill(
    reader: ShardReader,
    boxes: Sequence[Box],
    mappings: Sequence[TensorMapping],
    tensors: Mapping[str, StoredTensor],
    dtype: np.dtype,
) -> dict[Box, np.ndarray]:
    """Reads boxes of an array from tensors, cast to the dtype: {box: values}."""
    values = aligned_zeros([box_sizes(box) for box in boxes], dtype)
    buffers = {box: HostBuffer(each, []) for box, each in zip(boxes, values, strict=True)}
    reader.fill_buffers(buffers, mappings, tensors)
    return {box: buffer.values for box, buffer in buffers.items()}


def _on_host(values: np.ndarray) -> jax.Array:
    """Puts values on a CPU device."""
    return jax.device_put(values, jax.local_devices(backend="cpu")[0])


@partial(jax.jit, static_argnums=0)
def _encode(blocks: Blocks, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes a part of a parameter: (its blocks, whether all values are finite)."""
    return blocks.encode(values), jnp.isfinite(values).all()


@partial(jax.jit, static_argnums=0)
def _pack(blocks: Blocks, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Stores codes and scales of a part of a parameter."""
    return blocks.pack(codes, scales)
