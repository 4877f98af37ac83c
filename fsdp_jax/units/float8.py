"""Arrays in float8, each with a separate scale, and the matmul that takes them.

[Note: scales] An array is divided by a scale that brings its largest magnitude into the range of
the format. One scale holds for the whole array, and is computed when the array is cast ("current"
or dynamic scaling per tensor), so there is no state to keep. The scale is a power of two. Scaling
therefore rounds nothing, in any float dtype, and casting a second time gives the same values: a
weight that was gathered in float8 is rounded once, even if a matmul casts it again.

[Note: bytes] Values that a backward pass may save are passed as bytes. `jax.checkpoint` applies
`lax.reduce_precision` to the floats that it saves, with the exponent of IEEE's formats: of
float8_e4m3fn, which has no infinities, it makes NaN of what is above 240.
"""

from collections.abc import Sequence
from functools import partial
from math import frexp
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WEIGHT = jnp.dtype("float8_e4m3fn")
"""Of weights and activations; gradients have more range and less precision."""
GRADIENT = jnp.dtype("float8_e5m2")

HOLD_SCALED = ("float32", "bfloat16")
"""Dtypes that have the products of `WEIGHT`'s values and a scale; float16 rounds and overflows."""

Dims = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""As in `lax.dot_general`: ((contracted dims of left, right), (batch dims of left, right))."""
Scaled = tuple[jax.Array, jax.Array]
"""Values in float8, and their scale, as `quantize` returns them."""
Sent = tuple[jax.Array, jax.Array]
"""Float8 values as bytes (uint8), and their scale; see the note on bytes."""


def scale_of(x: jax.Array, dtype: np.dtype, axes: Sequence[str] = ()) -> jax.Array:
    """Chooses the scale of an array in a float8 dtype: a power of two, a float32 scalar.

    `axes`: mesh axes along which each device holds a part of the array; the parts share one scale.
    """
    magnitude = jnp.abs(x).max().astype(jnp.float32)
    if axes:
        magnitude = lax.pmax(magnitude, tuple(axes))
    # The largest value of either format is 1.75 * 2**top. If the significand is larger, the
    # exponent is rounded up, by a carry out of the mantissa.
    top = frexp(float(jnp.finfo(dtype).max))[1] - 1
    bits = lax.bitcast_convert_type(magnitude, jnp.uint32)
    exponent = jnp.maximum((bits + np.uint32(0x1FFFFF)) >> 23, np.uint32(top + 1)) - np.uint32(top)
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def quantize(x: jax.Array, dtype: np.dtype, scale: jax.Array | None = None) -> Scaled:
    """Scales to a float8 dtype: (`x` divided by a scale, the scale, a float32 scalar).

    Infinities and NaNs become NaN or infinity, so that a step that has them is still skipped.

    `scale`: that of the array that `x` is a part of; without it, `scale_of` x.
    """
    if scale is None:
        scale = scale_of(x, dtype)
    # Its inverse by the exponents alone: on GPUs XLA's division is not exact.
    bits = np.uint32(254 << 23) - lax.bitcast_convert_type(scale, jnp.uint32)
    inverse = lax.bitcast_convert_type(bits, jnp.float32)
    return (x.astype(jnp.float32) * inverse).astype(dtype), scale


def as_bytes(values: jax.Array) -> jax.Array:
    """Converts values in float8 to uint8, bit for bit."""
    return lax.bitcast_convert_type(values, jnp.uint8)


def dequantize(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Multiplies the values of `quantize` by their scale, in a wider float dtype."""
    return (x.astype(jnp.float32) * scale).astype(dtype)


def dot(
    left: jax.Array,
    right: jax.Array,
    dims: Dims,
    dtype: np.dtype,
    sent: Sequence[Sent | None] = (None, None),
) -> jax.Array:
    """Computes `lax.dot_general` of both in float8, in `dtype`; its VJP uses float8 matmuls too.

    An operand is saved for the backward pass in its own dtype, as with any matmul.

    `sent`: for each operand its float8 values, as bytes, and their scale, or None. Where given,
    they are multiplied and saved; the operand itself then only receives the gradient.
    """
    dtypes = left.dtype, right.dtype, dtype
    return _dot((left, right), tuple(sent), dims, dtypes)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dot(operands: tuple[jax.Array, jax.Array], sent: Any, dims: Dims, dtypes: Any) -> jax.Array:
    """Computes `dot`; `dtypes`: of the operands and of the result."""
    left, right = map(_scaled, operands, sent)
    return _dot_scaled(left, right, dims, dtypes[2])


def _scaled(x: jax.Array, sent: Sent | None) -> Scaled:
    """Casts an operand to float8, unless it was cast before."""
    if sent is None:
        return quantize(x, WEIGHT)
    values, scale = sent
    return lax.bitcast_convert_type(values, WEIGHT), scale


def _dot_forward(operands: Any, sent: Any, dims: Dims, dtypes: Any) -> Any:
    """Computes `dot`, and returns what the backward pass needs: each operand, or `sent`."""
    saved = [
        (x, None) if each is None else (None, each) for x, each in zip(operands, sent, strict=True)
    ]
    return _dot(operands, sent, dims, dtypes), saved


def _dot_backward(dims: Dims, dtypes: Any, saved: Any, cotangent: jax.Array) -> Any:
    """Computes both gradients of `dot`, each a float8 matmul of the cotangent and an operand."""
    contracted, batch = dims
    operands = [_scaled(*each) for each in saved]
    scaled = quantize(cotangent, GRADIENT)
    # Dims that are neither batch nor contracted: a result has the batch dims, then the left
    # operand's, then the right's.
    kept = [
        [dim for dim in range(values.ndim) if dim not in (*contracted[side], *batch[side])]
        for side, (values, _) in enumerate(operands)
    ]
    n_batch, n_left = len(batch[0]), len(batch[0]) + len(kept[0])
    in_result = range(n_batch, n_left), range(n_left, cotangent.ndim)
    gradients = []
    for side, other in (0, 1), (1, 0):
        result_dims = (in_result[other], kept[other]), (range(n_batch), batch[other])
        gradient = _dot_scaled(scaled, operands[other], result_dims, dtypes[side])
        # [batch, kept, contracted as in the other operand], in the order of the operand's dims.
        last = [contracted[side][i] for i in np.argsort(contracted[other])]
        order = np.argsort([*batch[side], *kept[side], *last])
        gradients.append(lax.transpose(gradient, [int(i) for i in order]))
    return tuple(gradients), None


_dot.defvjp(_dot_forward, _dot_backward)


def _dot_scaled(left: Scaled, right: Scaled, dims: Any, dtype: np.dtype) -> jax.Array:
    """Computes the product of two arrays, each with its scale as `quantize` returned it.

    A bfloat16 result is summed in float32 and rounded once; a power of two then scales it exactly.
    Its dtype is the result's, because a sum over devices is sent in that dtype.
    """
    (x, scale_x), (y, scale_y) = left, right
    summed = dtype if dtype == jnp.bfloat16 else jnp.dtype("float32")
    out = lax.dot_general(x, y, dims, preferred_element_type=summed)
    return (out.astype(jnp.float32) * (scale_x * scale_y)).astype(dtype)
