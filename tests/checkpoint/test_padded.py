"""Arrays that the devices do not divide: checkpoints, exports and imports have their own shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.sharding.padding import Padded
from fsdp_jax.tree import flatten

pytestmark = pytest.mark.releases

WIDTH, HIDDEN, LAYERS = 40, 56, 3
OPTIMIZERS = {
    "adam": optax.adamw(0.01),
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=8),
}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.wide = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.narrow = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.narrow(jnp.tanh(self.wide(x)))


class Model(nnx.Module):
    """Scanned layers, and a table of which seven and eight devices have shards of zeros alone."""

    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (9, 9)))
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))
        self.blocks = make(rngs)

    def __call__(self, x):
        layers = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return layers(x, self.blocks).sum() + jnp.sum(self.table[...] ** 2)


@functools.cache
def sharded(devices, optimizer="adam"):
    mesh = fsdp.make_mesh(data=devices, devices=jax.devices()[:devices])
    tx = OPTIMIZERS[optimizer]
    return fsdp.fully_shard(lambda rngs: Model(rngs), tx, mesh, "full_shard", [Block], min_size=8)


def trained(devices, optimizer):
    """A state after two steps: the optimizer's arrays are not zero."""
    model = sharded(devices, optimizer)
    step = model.train_step(lambda model, batch: (model(batch), batch.shape[0]))
    state = model.init(seed=3)
    for seed in range(2):
        batch = jax.random.normal(jax.random.key(seed), (devices, WIDTH))
        state, _ = step(state, batch)
    return state


def bits(tree):
    """{path: (dtype, shape, bytes)} of arrays in their own shapes."""
    arrays = {
        path: np.asarray(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)
        for path, leaf in flatten(tree).items()
    }
    return {path: (x.dtype.name, x.shape, x.tobytes()) for path, x in arrays.items()}


def padded_of(tree):
    return {path: leaf for path, leaf in flatten(tree).items() if isinstance(leaf, Padded)}


def assert_zeros_behind(padded):
    for path, leaf in padded.items():
        whole = np.array(leaf.array)
        assert whole.shape != leaf.shape
        whole[tuple(map(slice, leaf.shape))] = 0
        assert not whole.view(np.uint8).any(), path


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bits_survive_any_number_of_devices(tmp_path, optimizer):
    model = sharded(8, optimizer)
    state = trained(8, optimizer)
    expected = bits(model.to_checkpoint(state))
    counts = []
    with CheckpointStore(tmp_path, keep=99) as store:
        store.save(0, model.to_checkpoint(state), data={}, metadata={})
        for step, devices in enumerate((6, 7, 5, 8, 7), 1):
            model = sharded(devices, optimizer)
            plan = store.preflight(step - 1, model.checkpoint_target())
            assert (plan.differences, plan.casts) == ((), ())
            found, *_ = store.restore(step - 1, model.checkpoint_target())
            state = model.from_checkpoint(found)
            saved = model.to_checkpoint(state)
            assert bits(saved) == expected, devices
            padded = padded_of(saved)
            counts.append(len(padded))
            assert_zeros_behind(padded)
            wanted = jax.tree.leaves(model.abstract_state())
            for leaf, want in zip(jax.tree.leaves(state), wanted, strict=True):
                assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
                assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
            store.save(step, saved, data={}, metadata={})
    assert min(counts) > 0, counts
