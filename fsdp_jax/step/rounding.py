"""Adds updates to parameters in bfloat16, with stochastic rounding.

A bfloat16 number has 8 bits, so that an update below 1/512 of it is lost when rounded to nearest:
a parameter near 1 never moves by a learning rate of 1e-3.
"""

import jax
import jax.numpy as jnp
import optax

from fsdp_jax.sharding.rounding import Seed, path_seed, round_stochastically
from fsdp_jax.tree import PyTree, map_with_path

_ROUNDING = 2**32 - 2  # folded into the key of a step; microbatches count from 0


def step_seed(rng: jax.Array, step: jax.Array) -> Seed:
    """Returns the seed of a step's rounding, from the key of the run."""
    key = jax.random.fold_in(jax.random.fold_in(rng, step), _ROUNDING)
    one, other = jax.random.bits(key, (2,), jnp.uint32)
    return one, other


def apply_updates(params: PyTree, updates: PyTree, seed: Seed | None) -> PyTree:
    """Returns `optax.apply_updates`; with a seed added in float32 and rounded stochastically.

    Args:
        params: bfloat16 with a seed; nested dicts.
        updates: of the same structure.
        seed: of the step, from `step_seed`; None rounds to nearest.

    """
    if seed is None:
        return optax.apply_updates(params, updates)

    def add(path: str, param: jax.Array, update: jax.Array) -> jax.Array:
        total = param.astype(jnp.float32) + update.astype(jnp.float32)
        return round_stochastically(total, path_seed(seed, path))

    return map_with_path(add, params, updates)
