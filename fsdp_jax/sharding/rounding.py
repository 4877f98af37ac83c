"""Stochastic rounding: up or down at random, so that the mean is exact.

Rounded to nearest, a change that is smaller than half of the distance of two numbers is lost, in
every step anew: a parameter in bfloat16 near 1 never moves by a learning rate of 1e-3. Rounded up
with the probability of the remainder, a number moves as far in the mean.

[Note: the same bits everywhere] The noise of an element is a hash of a seed, the path, the
element's place in its row (in a vector: in it) and the number that is rounded. So it depends on no
sharding, and a layer of a stack draws what it draws within the whole.
"""

import zlib

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fsdp_jax.tree import PyTree, map_with_path

_ROUNDING = 2**32 - 2  # folded into the key of a step; microbatches count from 0

Seed = tuple[jax.Array, jax.Array]
"""Two uint32 numbers."""


def step_seed(rng: jax.Array, step: jax.Array) -> Seed:
    """Derives the seed of a step's rounding from the key of the run."""
    key = jax.random.fold_in(jax.random.fold_in(rng, step), _ROUNDING)
    one, other = jax.random.bits(key, (2,), jnp.uint32)
    return one, other


def apply_updates(params: PyTree, updates: PyTree, seed: Seed | None) -> PyTree:
    """Applies updates as `optax.apply_updates`; with a seed, in float32, rounded stochastically."""
    if seed is None:
        return optax.apply_updates(params, updates)

    def add(path: str, param: jax.Array, update: jax.Array) -> jax.Array:
        total = param.astype(jnp.float32) + update.astype(jnp.float32)
        return round_stochastically(total, path_seed(seed, path))

    return map_with_path(add, params, updates)


def path_seed(seed: Seed, path: str) -> Seed:
    """Derives the seed for the array at a path from the seed of a step."""
    return seed[0] ^ jnp.uint32(zlib.crc32(path.encode())), seed[1]


def round_stochastically(value: jax.Array, seed: Seed) -> jax.Array:
    """Rounds float32 values to bfloat16, each up or down so that the mean is exact.

    What bfloat16 holds exactly, infinities and NaN stay as they are. `seed`: of this array.
    """
    assert value.dtype == jnp.float32, value.dtype
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    # A float32 is a bfloat16 and 16 bits more; noise carries into it as often as they are large.
    rounded = ((bits + (random_bits(value, seed) >> 16)) >> 16).astype(jnp.uint16)
    return jnp.where(
        jnp.isfinite(value),
        lax.bitcast_convert_type(rounded, jnp.bfloat16),
        value.astype(jnp.bfloat16),
    )


def random_bits(value: jax.Array, seed: Seed) -> jax.Array:
    """Draws uniform uint32 numbers, one for each element of a float32 array; see the note.

    `seed`: of this array, as `path_seed` returns it.
    """
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    return _hash_bits(
        _hash_bits(_hash_bits(bits) ^ _places_in_rows(value.shape) ^ seed[0]) + seed[1]
    )


def _places_in_rows(shape: tuple[int, ...]) -> jax.Array:
    """Numbers the elements of each row of an array of this shape, uint32, modulo 2^32.

    A row is all that follows dim 0, in C order; a vector is one row.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        if dim or len(shape) == 1:
            place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, dim)
    return place


def _hash_bits(x: jax.Array) -> jax.Array:
    """Hashes uint32 numbers ("lowbias32"): a bit of input changes half of the output."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
