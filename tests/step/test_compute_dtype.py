"""The compute dtype that was asked for is the one that runs, or a step says what runs instead.

Traces show it; the bytes on a GPU are read from a program that is compiled for one.
"""

import re
import warnings
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from reference import Chain, squares
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.contract.contract import check_contract
from fsdp_jax.testing import mesh_of

pytestmark = pytest.mark.releases

WIDTH = 64
HALF = fsdp.Precision(compute="bfloat16")
BATCH = {"x": jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)}
INPUTS = (jax.ShapeDtypeStruct((2, WIDTH), jnp.float32),)


def lowered(model, precision=HALF, loss=squares, batch=BATCH, mesh=None, **settings):
    """A step that is lowered, with its warnings as errors."""
    of_step = {name: settings.pop(name) for name in ("local_batch",) if name in settings}
    if isinstance(model, nn.Module):
        settings, make = {"inputs": INPUTS} | settings, model
    else:
        make = lambda rngs: model(rngs=rngs)  # noqa: E731
    mesh = mesh or fsdp.make_mesh(data=8)
    sharded = fsdp.fully_shard(
        make, optax.sgd(0.1), mesh, precision=precision, min_size=8, **settings
    )
    step = sharded.make_train_step(loss, **of_step)
    step.lower(batch)
    return step


def warnings_of(*args, **settings):
    """The texts of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lowered(*args, **settings)
    return [str(each.message) for each in caught]


def said(*args, **settings):
    """The text of the one warning."""
    with pytest.warns(fsdp.SlowerWarning) as caught:
        lowered(*args, **settings)
    (text,) = {str(each.message) for each in caught}
    return text


# Models with a dtype of their own, float32 by default, as published ones have it


class Block(nnx.Module):
    def __init__(self, dtype, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Net(Chain):
    def __init__(self, rngs, dtype=jnp.float32):
        super().__init__([Block(dtype, rngs) for _ in range(2)])


@dataclass
class Config:
    dtype: jnp.dtype = jnp.float32


class Configured(Net):
    def __init__(self, config, rngs):
        super().__init__(rngs, config.dtype)


class LinenBlock(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.gelu(nn.Dense(2 * WIDTH, dtype=self.dtype)(x))
        return x + nn.Dense(WIDTH, dtype=self.dtype)(y), None


class LinenNet(nn.Module):
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x, _ = LinenBlock(self.dtype)(x)
        return x


class LinenScan(nn.Module):
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return stack(self.dtype)(x.astype(self.dtype))[0]


MODELS = {  # name -> (model of a dtype, number of weights, the module and the way out)
    "nnx": (
        lambda dtype: partial(Net, dtype=dtype),
        4,
        "'layers/0/down' (Linear) is made with dtype=float32: make the model with "
        "dtype=jnp.bfloat16, an argument of Net",
    ),
    "nnx, by a configuration": (
        lambda dtype: lambda rngs: Configured(Config(dtype), rngs),
        4,
        "'layers/0/down' (Linear) is made with dtype=float32: give dtype=jnp.bfloat16 to Block, "
        "where Configured makes it",
    ),
    "linen": (
        LinenNet,
        4,
        "'LinenBlock_0/Dense_0' (Dense) is made with dtype=float32: make the model with "
        "dtype=jnp.bfloat16, an argument of LinenNet",
    ),
    "linen, scanned": (
        LinenScan,
        2,
        "an argument of LinenScan",
    ),
}
SETTINGS = [{}, {"units": "model"}, {"remat": "full"}, {"local_batch": True}]


@pytest.mark.parametrize(("name", "settings"), list(zip(MODELS, SETTINGS, strict=True)))
def test_a_models_own_dtype_is_told_with_the_way_out(name, settings):
    make, weights, way_out = MODELS[name]
    text = said(make(jnp.float32), **settings)
    what = f"compute='bfloat16' was asked for, and the matmuls of {weights} of {weights} weights"
    assert text.startswith(what)
    assert way_out in text
    assert ("gradients are reduced in it" in text) == ("local_batch" not in settings)
    lowered(make(jnp.bfloat16), **settings)


@pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")
def test_it_is_told_of_kernels_that_are_gathered_ahead_in_float8():
    precision = fsdp.Precision(compute="bfloat16", gather="float8_e4m3fn")
    settings = {"units": ["LinenBlock"], "prefetch": "pre", "precision": precision}
    text = said(LinenScan(jnp.float32), **settings)
    assert "the matmuls of 2 of 2 weights run in a wider dtype" in text


@pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")
@pytest.mark.parametrize("prefetch", ["none", "pre"])
def test_it_does_not_warn_of_kernels_that_are_multiplied_in_float8(prefetch):
    precision = fsdp.Precision(compute="bfloat16", gather="float8_e4m3fn", matmul="float8")
    lowered(LinenScan(jnp.float32), precision, units=["LinenBlock"], prefetch=prefetch)


@pytest.mark.parametrize("name", ["nnx", "linen", "linen, scanned"])
def test_it_is_an_error_if_the_model_is_strict(name):
    make, _, way_out = MODELS[name]
    rules = [("kernel", (None, "fsdp") if name != "linen, scanned" else (None, None, "fsdp"))]
    strict = {"rules": [*rules, (".*", None)], "strict": True}
    with refused("was asked for", expected="bfloat16", fix=way_out):
        lowered(make(jnp.float32), **strict)
    lowered(make(jnp.bfloat16), **strict)


class Apart(nnx.Module):
    """Weights that reach their matmul or convolution by other operations."""

    def __init__(self, rngs):
        key, init = rngs.params(), nnx.initializers.lecun_normal()
        self.stack = nnx.Param(init(key, (2, WIDTH, WIDTH)))
        self.query = nnx.Param(init(key, (WIDTH, WIDTH)))
        self.value = nnx.Param(init(key, (WIDTH, WIDTH)))
        self.heads = nnx.Param(init(key, (WIDTH, 8, WIDTH // 8)))
        self.filters = nnx.Conv(1, 8, (3,), dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        x = x.astype(jnp.float32)
        x = jnp.tanh(x @ self.stack[...][0]) @ self.stack[...][1].T
        both = x @ jnp.concatenate([self.query[...], self.value[...]], axis=1)
        y = jnp.einsum("bd,dhk->bhk", both[:, :WIDTH], self.heads[...]).reshape(x.shape)
        return y + self.filters(both[:, WIDTH:, None]).mean(-1)


def test_weights_are_followed_to_their_matmuls():
    text = said(Apart, units="model")
    assert "the matmuls of 5 of 5 weights run in a wider dtype: 'stack' (float32)" in text
    assert "Apart has no dtype of its own, and its inputs are wide: cast them" in text


# What is meant to be in float32, or costs nothing


class Meant(nnx.Module):
    """Attention, a norm, a softmax and logits in float32, and a head that adds up in it."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.key = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = self.norm(x)
        query, key = self.query(x).astype(jnp.float32), self.key(x).astype(jnp.float32)
        weights = jax.nn.softmax(query @ key.T)
        mixed = (weights @ x.astype(jnp.float32)).astype(x.dtype)
        return jnp.dot(mixed, self.head.kernel[...], preferred_element_type=jnp.float32)


class Routed(nnx.Module):
    """A router in float32, as is usual: a hundredth of the weights at most."""

    def __init__(self, rngs):
        self.router = nnx.Linear(WIDTH, 8, use_bias=False, dtype=jnp.float32, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 16 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(16 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        gate = jax.nn.softmax(self.router(x)).max(-1, keepdims=True)
        return gate.astype(x.dtype) * self.down(jnp.tanh(self.up(x)))


class Headed(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.body(x)))


@pytest.mark.parametrize("model", [Meant, Routed])
def test_what_is_meant_to_be_in_float32_is_not_told(model):
    assert warnings_of(model, units="model") == []


def test_a_module_in_float32_is_declared_as_the_message_says():
    text = said(Headed, units="model")
    assert "the matmuls of 1 of 2 weights run in a wider dtype: 'head/kernel' (float32);" in text
    kept = eval(re.search(r"keep_float32=(\(.*\))", text)[1])
    assert kept == ("[Nn]orm", "^head/")
    declared = fsdp.Precision(compute="bfloat16", keep_float32=kept)
    assert warnings_of(Headed, units="model", precision=declared) == []


@pytest.mark.parametrize("precision", [None, fsdp.Precision(), fsdp.Precision(compute=None)])
def test_float32_that_was_asked_for_is_not_told(precision):
    assert warnings_of(Net, precision=precision) == []


def test_a_pure_step_tells_it_too():
    mesh = fsdp.make_mesh(data=8)
    sharded = fsdp.fully_shard(
        lambda rngs: Net(rngs), optax.sgd(0.1), mesh, precision=HALF, min_size=8
    )
    step = sharded.pure_step(squares)
    with pytest.warns(fsdp.SlowerWarning, match="the matmuls of 4 of 4 weights"):
        jax.jit(step).trace(sharded.abstract_state(), BATCH)


@pytest.mark.needs_plugin
def test_the_bytes_that_are_told_are_those_that_a_gpu_sends():
    def wire_bytes(dtype):
        sharded = fsdp.fully_shard(
            lambda rngs: Net(rngs, dtype),
            optax.sgd(0.1),
            mesh_of("h100:8"),
            precision=HALF,
            min_size=128,
        )
        batch = {"x": jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)}
        return check_contract(sharded.make_train_step(squares), batch).wire_bytes

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fsdp.SlowerWarning)
        more = wire_bytes(jnp.float32) - wire_bytes(jnp.bfloat16)
    (text,) = (str(each.message) for each in caught)
    kernels = 4 * 2 * WIDTH**2
    assert f"{kernels * 2 * 7 / 8 / 1024:.3g} KiB per step above what the layout declares" in text
    assert more == pytest.approx(kernels * 2 * 7 / 8, rel=0.05)
