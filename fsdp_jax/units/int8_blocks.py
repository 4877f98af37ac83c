"""Gradients in int8 for an all-to-all: blocks of 256 elements, each with a float32 scale.

[Note: why int8, to the nearest] A block is divided by its largest magnitude over 127 and rounded to
the nearest integer, so each element is off by at most 1/254 of the block's largest. For normally
distributed gradients that is a quarter of the error of float8_e4m3 at the same bytes: inside a
block, precision matters more than the range of float8. Rounding to the nearest has half of the
largest error of stochastic rounding, needs no key, and is reproducible. The scales travel in the
same array as the integers: one collective, 260 bytes for 256 elements.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 256  # elements that share a scale
SCALE_BYTES = 4
_LEAST_SCALE = float(np.finfo(np.float32).tiny)  # below it a float32 is flushed to zero


def packed_bytes(elements: int) -> int:
    """Counts the bytes of this many elements with the scales of their blocks."""
    return -(-elements // BLOCK) * (BLOCK + SCALE_BYTES)


def pack(parts: jax.Array) -> jax.Array:
    """Quantizes rows of numbers, [n, elements]: int8 [n, packed_bytes(elements)].

    A block with an infinity or a NaN has a scale that is not finite.
    """
    count, elements = parts.shape
    padded = jnp.pad(parts.astype(jnp.float32), ((0, 0), (0, -elements % BLOCK)))
    blocks = padded.reshape(count, -1, BLOCK)
    scales = jnp.maximum(jnp.abs(blocks).max(-1) / 127, _LEAST_SCALE)
    integers = jnp.round(blocks * (1 / scales)[..., None]).astype(jnp.int8)
    scale_bytes = lax.bitcast_convert_type(scales, jnp.int8)
    return jnp.concatenate([integers.reshape(count, -1), scale_bytes.reshape(count, -1)], axis=1)


def unpack(packed: jax.Array, elements: int) -> jax.Array:
    """Computes the float32 numbers from the result of `pack`: [n, elements].

    The numbers of a block whose scale is not finite are infinities or NaNs.
    """
    count = len(packed)
    blocks = -(-elements // BLOCK)
    integers = packed[:, : blocks * BLOCK].reshape(count, blocks, BLOCK)
    scale_bytes = packed[:, blocks * BLOCK :].reshape(count, blocks, SCALE_BYTES)
    scales = lax.bitcast_convert_type(scale_bytes, jnp.float32)
    values = integers.astype(jnp.float32) * scales[..., None]
    return values.reshape(count, -1)[:, :elements]
