"""Arrays in float8, each with a scale of its own, and the matmul that takes them.

[Note: scales] An array is divided by a scale that brings its largest magnitude into the range of
the format: one scale for the whole array, computed as it is cast ("current" or dynamic scaling per
tensor), so that there is no state to keep. The scale is a power of two. Then scaling rounds
nothing, in any float dtype, and what was cast once is cast again to the same values: a weight that
came in float8 is rounded once, although the matmul casts it too.
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

Dims = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""As in `lax.dot_general`: ((contracted dims of left, right), (batch dims of left, right))."""


def quantize(x: jax.Array, dtype: np.dtype, axes: Sequence[str] = ()) -> tuple[jax.Array, Any]:
    """Returns (`x` divided by a scale, in a float8 dtype; the scale, a float32 scalar).

    Infinities and NaNs become NaN or infinity, so that a step that has them is still skipped.

    `axes`: of the mesh, along which each device has a part of the array; the scale is of all.
    """
    magnitude = jnp.abs(x).max().astype(jnp.float32)
    if axes:
        magnitude = lax.pmax(magnitude, tuple(axes))
    # The largest value of either format is 1.75 * 2**top: the exponent of a larger significand is
    # rounded up, by a carry out of the mantissa.
    top = frexp(float(jnp.finfo(dtype).max))[1] - 1
    bits = lax.bitcast_convert_type(magnitude, jnp.uint32)
    exponent = jnp.maximum((bits + np.uint32(0x1FFFFF)) >> 23, np.uint32(top + 1)) - np.uint32(top)
    inverse = _power_of_two(np.uint32(254) - exponent)
    return (x.astype(jnp.float32) * inverse).astype(dtype), _power_of_two(exponent)


def _power_of_two(biased_exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(biased_exponent << 23, jnp.float32)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def dequantize(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns what `quantize` scaled, in a wider float dtype.

    No gradient flows through it. As one operation on a float8 array, the policy of a checkpoint
    knows it from a model's own arithmetic; see `units.unit`.
    """
    return (x.astype(jnp.float32) * scale).astype(dtype)


@dequantize.defjvp
def _dequantize_jvp(dtype: np.dtype, primals: Any, _: Any) -> tuple[jax.Array, jax.Array]:
    out = dequantize(*primals, dtype)
    return out, jnp.zeros_like(out)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dot(left: jax.Array, right: jax.Array, dims: Dims, dtype: np.dtype) -> jax.Array:
    """Returns `lax.dot_general` of both in float8, in `dtype`; so are the matmuls of its VJP.

    What is saved for the backward pass are the operands as they came, as with any matmul.
    """
    return _dot(quantize(left, WEIGHT), quantize(right, WEIGHT), dims, dtype)


def _forward(left: jax.Array, right: jax.Array, dims: Dims, dtype: np.dtype) -> Any:
    return dot(left, right, dims, dtype), (left, right)


def _backward(dims: Dims, dtype: np.dtype, operands: Any, cotangent: jax.Array) -> Any:
    left, right = operands
    (contracted_left, contracted_right), (batch_left, batch_right) = dims
    of_left = _Operand(left.ndim, contracted_left, batch_left)
    of_right = _Operand(right.ndim, contracted_right, batch_right)
    # A result's dims: batch, those of the left that are left over, those of the right.
    batch = range(len(batch_left))
    kept_left = range(len(batch), len(batch) + len(of_left.kept))
    kept_right = range(kept_left.stop, cotangent.ndim)
    scaled = quantize(cotangent, GRADIENT)
    to_left_dims = (kept_right, of_right.kept), (batch, batch_right)
    to_right_dims = (kept_left, of_left.kept), (batch, batch_left)
    to_left = _dot(scaled, quantize(right, WEIGHT), to_left_dims, left.dtype)
    to_right = _dot(scaled, quantize(left, WEIGHT), to_right_dims, right.dtype)
    return (
        of_left.in_its_order(to_left, contracted_right),
        of_right.in_its_order(to_right, contracted_left),
    )


dot.defvjp(_forward, _backward)


class _Operand:
    """The dims of one operand of a matmul."""

    def __init__(self, ndim: int, contracted: Sequence[int], batch: Sequence[int]) -> None:
        self.contracted, self.batch = contracted, batch
        self.kept = [dim for dim in range(ndim) if dim not in (*contracted, *batch)]

    def in_its_order(self, gradient: jax.Array, others_contracted: Sequence[int]) -> jax.Array:
        """Returns a gradient [batch, kept, contracted as in the other operand] in its own order."""
        contracted = [self.contracted[i] for i in np.argsort(others_contracted)]
        order = np.argsort([*self.batch, *self.kept, *contracted])
        return lax.transpose(gradient, [int(i) for i in order])


def _dot(
    left: tuple[jax.Array, Any], right: tuple[jax.Array, Any], dims: Any, dtype: np.dtype
) -> jax.Array:
    """Returns the product of two scaled arrays.

    Sums of bfloat16 are summed in float32 and rounded once: a power of two then scales exactly.
    Their dtype is that of the result, since a sum over devices is sent in it.
    """
    (x, scale_x), (y, scale_y) = left, right
    summed = dtype if dtype == jnp.bfloat16 else jnp.dtype("float32")
    out = lax.dot_general(x, y, dims, preferred_element_type=summed)
    return (out.astype(jnp.float32) * (scale_x * scale_y)).astype(dtype)
