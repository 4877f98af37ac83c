"""Parameters that qwix has quantized, into the stored form of `QuantizedBase`.

`quantize_params` and `quantize_model` put a QArray in the place of a kernel: codes (`qvalue`), one
an element, and scales (`scale`) of as many dims, each divided by a tile. It is found by these
names, in any tree: of NNX, of Linen, or restored as dicts.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fsdp_jax.checkpoint.arrays import leaves_of
from fsdp_jax.checkpoint.export import raise_if_misfits
from fsdp_jax.io.array_specs import describe_array
from fsdp_jax.sharding.padding import mark_padded
from fsdp_jax.sharding.quantized import Blocks, QuantizedStruct
from fsdp_jax.tree import SEPARATOR, PyTree, flatten, unflatten

CODES, SCALE, ZERO_POINT = "qvalue", "scale", "zero_point"
# dtype of codes -> the format; qwix stores nf4 in uint4, and int2 and int3 in int4.
FORMATS = {"uint4": "nf4", "int4": "int4", "int8": "int8", "float8_e4m3fn": "float8"}


def import_qwix(params: PyTree, target: PyTree) -> PyTree:
    """Packs kernels that qwix has quantized as the target stores them, bit for bit.

    Each kernel is packed on the devices that hold it; other parameters are returned as they are. A
    kernel's values are code * scale in float32; qwix multiplies in the scale's dtype, which is the
    same with float32.

    Args:
        params: of `qwix.quantize_params`, or of `nnx.state(model, nnx.Param)` of a quantized model.
        target: `sharded.checkpoint_target().params`, of `fully_shard(base=QuantizedBase(...))` with
            qwix's format and a block that divides its tiles.

    Returns:
        A nested dict for `sharded.init(params=)`.

    Raises:
        ConfigError: codes of another format or shape than the target's, with a zero point, or whose
            tiles are not whole blocks: all at once, by path.

    """
    flat, leaves = flatten(params), leaves_of(target)
    heads = [
        path.removesuffix(SEPARATOR + CODES) for path in flat if path.endswith(SEPARATOR + CODES)
    ]
    lines, packed = [], {}
    for head in heads:
        parts = {
            name: flat.pop(f"{head}/{name}")
            for name in (CODES, SCALE, ZERO_POINT)
            if flat.get(f"{head}/{name}") is not None
        }
        path = head.removesuffix("/array")  # a field of qwix's WithAux, which may hold the QArray
        problem = _problem(leaves.get(path), parts)
        if problem:
            lines.append(f"{path}: {problem}")
        else:
            stored = _pack(leaves[path].blocks, parts[CODES], parts[SCALE])
            packed[path] = mark_padded(stored, leaves[path])
    raise_if_misfits("import_qwix", lines)
    return unflatten(flat | packed)


def _problem(leaf: Any, parts: Mapping[str, Any]) -> str:
    """Says why codes do not fit a leaf of the target; empty where they do."""
    codes, scale = parts[CODES], parts.get(SCALE)
    if leaf is None:
        return "no such parameter in the target"
    if scale is None or scale.ndim != codes.ndim:
        return "no scale of as many dims beside its codes"
    form = FORMATS.get(codes.dtype.name)
    if form is None:
        return f"codes in {codes.dtype.name}, known are {', '.join(FORMATS)}"
    if not isinstance(leaf, QuantizedStruct):
        stored = describe_array(leaf)
        return f"codes of {form}, but it is stored as {stored}: base=QuantizedBase('{form}')"
    blocks = leaf.blocks
    if form != blocks.base.format or codes.shape != blocks.shape:
        return f"codes of {form}{list(codes.shape)}, expected {blocks.text}"
    if ZERO_POINT in parts:
        return "a zero point, which QuantizedBase does not have"
    if jnp.promote_types(scale.dtype, blocks.base.scales) != jnp.dtype(blocks.base.scales):
        return f"scales in {scale.dtype}, which {blocks.base.scales} cannot hold"
    if any(size % count for size, count in zip(codes.shape, scale.shape, strict=True)):
        return f"scales {list(scale.shape)} do not divide codes {list(codes.shape)}"
    tile = codes.shape[blocks.dim] // scale.shape[blocks.dim]
    if tile % blocks.base.block:
        return (
            f"tiles of {tile} elements along dim {blocks.dim} are not whole blocks of "
            f"{blocks.base.block}: QuantizedBase(block={tile}), or tile_size={blocks.base.block}"
        )
    return ""


def _pack(blocks: Blocks, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Stores codes and scales; a scale of a larger tile is repeated for each of its blocks."""
    if jnp.issubdtype(codes.dtype, jnp.unsignedinteger):
        as_bytes = codes.astype(jnp.uint8)
    elif jnp.issubdtype(codes.dtype, jnp.integer):
        as_bytes = lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8)
    else:
        as_bytes = lax.bitcast_convert_type(codes, jnp.uint8)
    for dim, size in enumerate(codes.shape):
        count = blocks.count if dim == blocks.dim else size
        scale = jnp.repeat(scale, count // scale.shape[dim], axis=dim)
    return blocks.pack(as_bytes, scale.astype(blocks.base.scales))
