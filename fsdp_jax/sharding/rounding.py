"""Stochastic rounding: up or down at random, so that the mean is exact.

Rounded to nearest, a change that is smaller than half of the distance of two numbers is lost, in
every step anew. Rounded up with the probability of the remainder, a number moves as far in the
mean.

[Note: the same bits everywhere] The noise of an element is a hash of a seed, the path, the
element's place in its row (in a vector: in it) and the number that is rounded. So it depends on no
sharding, and a layer of a stack draws what it draws within the whole.
"""

import zlib

import jax
import jax.numpy as jnp
from jax import lax

Seed = tuple[jax.Array, jax.Array]
"""Two uint32 numbers."""


def path_seed(seed: Seed, path: str) -> Seed:
    """Returns the seed of one array."""
    return seed[0] ^ jnp.uint32(zlib.crc32(path.encode())), seed[1]


def round_stochastically(value: jax.Array, seed: Seed) -> jax.Array:
    """Returns float32 values in bfloat16, each rounded up or down so that the mean is exact.

    What bfloat16 holds exactly, infinities and NaN stay as they are. `seed`: of this array.
    """
    assert value.dtype == jnp.float32, value.dtype
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    # A float32 is a bfloat16 and 16 bits more; noise carries into it as often as they are large.
    rounded = ((bits + (noise(value, seed) >> 16)) >> 16).astype(jnp.uint16)
    return jnp.where(
        jnp.isfinite(value),
        lax.bitcast_convert_type(rounded, jnp.bfloat16),
        value.astype(jnp.bfloat16),
    )


def noise(value: jax.Array, seed: Seed) -> jax.Array:
    """Returns uniform uint32 numbers for the elements of a float32 array; see the note."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    return _mixed(_mixed(_mixed(bits) ^ _place(value.shape) ^ seed[0]) + seed[1])


def _place(shape: tuple[int, ...]) -> jax.Array:
    """Returns each element's place in its row, of several dims, uint32 and modulo 2^32."""
    place = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        if dim or len(shape) == 1:
            place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, dim)
    return place


def _mixed(x: jax.Array) -> jax.Array:
    """Returns a hash of uint32, of each bit of which half of the bits depend ("lowbias32")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
