"""Models of one of Flax's libraries with modules of the other, by `nnx.bridge`."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import Chain, on_eight, squares

X = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(8)(x))


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


class LinenNet(nn.Module):
    def make(self, name):
        return nnx.bridge.to_linen(Block, name=name)

    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = self.make(f"block_{number}")(x)
        return x


class OwnLinenNet(LinenNet):
    def make(self, name):
        return nnx.bridge.ToLinen(Block, name=name)


def to_nnx(rngs):
    blocks = [nnx.bridge.ToNNX(LinenBlock(), rngs=rngs).lazy_init(X["x"]) for _ in range(2)]
    return Chain(blocks)


MODELS = {
    "ToNNX": (to_nnx, {}),
    "to_linen": (LinenNet(), {"inputs": (X["x"],)}),
    "ToLinen": (OwnLinenNet(), {"inputs": (X["x"],)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_the_other_library_are_units(name):
    model, inputs = MODELS[name]
    sharded = on_eight(model, **inputs)
    whole = on_eight(model, units="model", **inputs)
    for local_batch in (False, True):
        program = str(sharded.make_train_step(squares, local_batch=local_batch).trace(X))
        assert program.count("fsdp_gather[") > 4  # of four arrays, and again in the backward pass
    norms = [
        one.make_train_step(squares)(one.init(0), X)[1]["grad_norm"] for one in (sharded, whole)
    ]
    np.testing.assert_allclose(*norms, rtol=1e-6)
