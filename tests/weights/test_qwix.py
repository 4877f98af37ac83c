"""Kernels that qwix has quantized, stored as `QuantizedBase` stores them, bit for bit."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.errors import ConfigError
from fsdp_jax.sharding.quantized import NF4
from fsdp_jax.tree import flatten, unflatten
from fsdp_jax.weights import import_qwix

pytestmark = pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")

INPUTS, OUTPUTS = 128, 24
DTYPES = {
    "nf4": jnp.uint4,
    "int4": jnp.int4,
    "int8": jnp.int8,
    "float8": jnp.float8_e4m3fn,
}


class Array(NamedTuple):
    """Stands for qwix's QArray: a node of a pytree with these names."""

    qvalue: Any
    scale: Any
    zero_point: Any = None


class WithAux(NamedTuple):
    """Stands for qwix's class around it."""

    array: Array


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(INPUTS, OUTPUTS, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


class LinenStack(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(OUTPUTS, name="up")(x)


def coded(form, tile=64, *, dtype=jnp.float32, stack=(), seed=0):
    """(Array, its values in float32) with random codes."""
    draw = np.random.default_rng(seed)
    shape = (*stack, INPUTS, OUTPUTS)
    low, high = {"nf4": (0, 16), "int4": (-8, 8), "int8": (-128, 128), "float8": (-448, 448)}[form]
    codes = jnp.asarray(draw.integers(low, high, shape), jnp.float32).astype(DTYPES[form])
    scale = jnp.asarray(draw.uniform(0.5, 2, (*stack, INPUTS // (tile or INPUTS), OUTPUTS)), dtype)
    numbers = np.asarray(codes.astype(jnp.float32))
    if form == "nf4":
        numbers = np.array(NF4, np.float32)[numbers.astype(int)]
    whole = np.repeat(np.asarray(scale, np.float32), tile or INPUTS, axis=-2)
    return Array(codes, scale), numbers * whole


def shard(model, form="int8", devices=8, **base):
    mesh = fsdp.make_mesh(data=devices, devices=jax.devices()[:devices])
    more = {"inputs": (np.zeros((1, INPUTS), np.float32),)} if isinstance(model, nn.Module) else {}
    return fsdp.fully_shard(
        model,
        optax.sgd(0.1),
        mesh,
        units="model",
        frozen=["kernel"],
        base=fsdp.QuantizedBase(form, kernels="up/kernel", **base),
        min_size=1,
        **more,
    )


def nnx_dense(rngs):
    return Dense(rngs)


@pytest.mark.parametrize("form", DTYPES)
def test_codes_are_packed_bit_for_bit(form):
    """Of NNX and Linen, padded on seven devices; as qwix's classes, and as dicts of them."""
    found, values = coded(form)
    bias = np.arange(OUTPUTS, dtype=np.float32)
    trees = [
        {"up": {"kernel": WithAux(found), "bias": bias}},
        {"up": {"kernel": {"qvalue": found.qvalue, "scale": found.scale}, "bias": bias}},
    ]
    for tree, model, devices in zip(trees, (nnx_dense, LinenStack()), (8, 7), strict=True):
        sharded = shard(model, form, devices)
        state = sharded.init(params=import_qwix(tree, sharded.checkpoint_target().params))
        assert state.params["up"]["kernel"].dtype == np.uint8
        given = sharded.model(state)
        kernel = given.up.kernel[...] if devices == 8 else given.variables["params"]["up"]["kernel"]
        np.testing.assert_array_equal(np.asarray(kernel), values)
        np.testing.assert_array_equal(np.asarray(state.params["up"]["bias"])[:OUTPUTS], bias)


def test_a_scale_of_a_column_or_of_several_blocks():
    """qwix has one for all inputs where no tile is given: it is repeated for each block."""
    for tile, dtype in ((None, jnp.float32), (128, jnp.bfloat16), (32, jnp.bfloat16)):
        found, values = coded("int8", tile, dtype=dtype)
        sharded = shard(nnx_dense, block=32)
        read = import_qwix({"up": {"kernel": found}}, sharded.checkpoint_target().params)
        kernel = sharded.model(sharded.init(params=read)).up.kernel[...]
        np.testing.assert_array_equal(np.asarray(kernel), values)


def test_codes_that_do_not_fit_are_refused():
    target = shard(nnx_dense).checkpoint_target().params
    whole, _ = coded("int8")
    cases = {
        "codes of int4[128, 24], expected int8": coded("int4")[0],
        "tiles of 32 elements along dim 0 are not whole blocks of 64: QuantizedBase(block=32)": (
            coded("int8", 32)[0]
        ),
        "a zero point": whole._replace(zero_point=jnp.zeros((2, OUTPUTS), jnp.int8)),
        "no scale of as many dims": whole._replace(scale=whole.scale[0]),
        "codes in float8_e5m2": whole._replace(qvalue=whole.qvalue.astype(jnp.float8_e5m2)),
        "scales [3, 24] do not divide": whole._replace(scale=jnp.ones((3, OUTPUTS))),
    }
    for said, found in cases.items():
        with refused(error=ConfigError, where="import_qwix", got=f"up/kernel: {said}"):
            import_qwix({"up": {"kernel": found}}, target)
    with refused(error=ConfigError, got="down/kernel: no such parameter in the target"):
        import_qwix({"down": {"kernel": whole}}, target)
    with refused(error=ConfigError, got="which bfloat16 cannot hold"):
        import_qwix(
            {"up": {"kernel": whole}},
            shard(nnx_dense, scales="bfloat16").checkpoint_target().params,
        )
    plain = {"up": {"kernel": jax.ShapeDtypeStruct((INPUTS, OUTPUTS), np.float32)}}
    with refused(error=ConfigError, got="base=QuantizedBase('int8')"):
        import_qwix({"up": {"kernel": whole}}, plain)


def test_other_parameters_that_are_called_scale_stay(tmp_path):
    tree = {"norm": {"scale": np.ones(3)}, "up": {"bias": np.zeros(2)}}
    assert flatten(import_qwix(tree, unflatten({"a": np.ones(1)}))).keys() == flatten(tree).keys()
