"""States to save that no step has computed, so that no step is compiled for them."""

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.tree import flatten


def random_state(sharded):
    """Random numbers in the shapes that a checkpoint has, replicated over all devices.

    So releases without padding saved every array.
    """
    draw = np.random.default_rng(0)
    everywhere = jax.NamedSharding(jax.make_mesh((8,), ("all",)), jax.P())

    def make(leaf):
        if is_prng_key(leaf):
            value = jax.random.key(5)
        elif jnp.issubdtype(leaf.dtype, jnp.floating):
            value = draw.normal(size=leaf.shape).astype(leaf.dtype)
        else:
            value = draw.integers(0, 100, leaf.shape).astype(leaf.dtype)
        return jax.device_put(value, everywhere)

    return jax.tree.map(make, sharded.checkpoint_target())


def restore(store, step, sharded):
    """The state of a step, as a run of `sharded` has it."""
    plan = store.preflight(step, sharded.checkpoint_target())
    assert (plan.differences, plan.casts) == ((), ())
    found, *_ = store.restore(step, sharded.checkpoint_target())
    state = sharded.from_checkpoint(found)
    wanted = jax.tree.leaves(sharded.abstract_state())
    for leaf, want in zip(jax.tree.leaves(state), wanted, strict=True):
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
    return state


def bits(tree):
    """{path: (dtype, shape, bytes)} of arrays in their own shapes."""
    arrays = {
        path: np.asarray(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)
        for path, leaf in flatten(tree).items()
    }
    return {path: (x.dtype.name, x.shape, x.tobytes()) for path, x in arrays.items()}
