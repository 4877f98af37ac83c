"""Kernels that qwix has quantized, against its own dequantization."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx
from qwix._src.core import qarray

import fsdp_jax as fsdp
from fsdp_jax.weights import import_qwix

FORMATS = {"nf4": "nf4", "int4": "int4", "int8": "int8", "float8_e4m3fn": "float8"}


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(256, 24, rngs=rngs)
        self.down = nnx.Linear(24, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@pytest.mark.parametrize("tile", [64, None])
@pytest.mark.parametrize("qtype", FORMATS)
def test_kernels_are_those_of_qwix(qtype, tile):
    """Bit for bit, with tiles and with one scale a column; the other parameters as they are."""
    rule = qwix.QuantizationRule(module_path="up", weight_qtype=qtype, tile_size=tile)
    x = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    theirs = qwix.quantize_model(Dense(nnx.Rngs(0)), qwix.PtqProvider([rule]), jnp.asarray(x))
    sharded = fsdp.fully_shard(
        lambda rngs: Dense(rngs),
        optax.sgd(0.1),
        fsdp.make_mesh(),
        units="model",
        frozen=["up/kernel"],
        base=fsdp.QuantizedBase(FORMATS[qtype], kernels="up/kernel"),
        min_size=1,
    )
    params = import_qwix(nnx.state(theirs, nnx.Param), sharded.checkpoint_target().params)
    state = sharded.init(params=params)
    ours = sharded.model(state)
    expected = qarray.dequantize(qarray.QArray(*_parts(theirs.up.kernel.array), qtype=qtype))
    np.testing.assert_array_equal(np.asarray(ours.up.kernel[...]), np.asarray(expected))
    found = sharded.apply(lambda model, x: model(x))(state, x)
    np.testing.assert_allclose(np.asarray(found), np.asarray(theirs(x)), rtol=1e-5, atol=1e-5)


def _parts(array):
    """The arrays of a QArray, out of their variables."""
    return [each[...] for each in (array.qvalue, array.scale)]
