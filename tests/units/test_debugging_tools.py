"""jax's tools for debugging work on a step, or an error says what to do instead."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback
from reference import Chain, on_eight, squares
from refusals import refused

X = {"x": jnp.ones((8, 8))}


class Quantized(nnx.Module):
    """Adds a frozen table in a small dtype."""

    def __init__(self, rngs, dtype):
        self.table = nnx.Param(jnp.ones((8, 8), dtype))
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.dense(x @ self.table.astype(jnp.float32))


class LinenChain(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = nn.Dense(8, name=f"layer_{number}")(x)
        return x


class Scanned(nnx.Module):
    """Three layers in one scan."""

    def __init__(self, rngs):
        self.blocks = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(rngs.split(3))

    def __call__(self, x):
        run = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return run(self.blocks, x)


def quantized(dtype):
    return lambda rngs: Chain([Quantized(rngs, dtype) for _ in range(2)])


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_a_unit_leaves_no_array_of_its_trace_behind(framework):
    inputs = {"inputs": (X["x"],)} if framework == "linen" else {}
    with jax.checking_leaks():
        sharded = on_eight(LinenChain() if inputs else quantized("float32"), **inputs)
        sharded.make_train_step(squares).trace(X)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (Scanned, {"prefetch": "pre"}),
        (Scanned, {"prefetch": "post"}),
        (Scanned, {"keep_gathered": 1, "prefetch": "none"}),
        (quantized("float32"), {"prefetch": "pre"}),
    ],
)
def test_a_rewritten_step_leaves_no_array_of_its_trace_behind(model, settings):
    with jax.checking_leaks():
        on_eight(model, **settings).make_train_step(squares).trace(X)


def test_disabled_jit_is_refused_by_name():
    make = quantized("int8")
    sharded = on_eight(make, frozen=("table",))
    step = sharded.make_train_step(squares)
    for call in (lambda: on_eight(make), sharded.init, lambda: step.trace(X)):
        with jax.disable_jit(), refused("jax.disable_jit() is set"):
            call()


@pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn"])
def test_elements_below_a_byte_are_refused_by_path(dtype):
    sharded = on_eight(quantized(dtype), frozen=("table",))
    with refused("smaller than a byte", where="state/params/layers/0/table", got=dtype):
        sharded.make_train_step(squares)(sharded.init(0), X)


def effect(kind, x):
    if kind == "io_callback":
        io_callback(np.sum, None, jax.lax.stop_gradient(x))
        return x
    if kind == "debug":
        jax.debug.callback(lambda x: None, x)
        return x
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = x
    return ref[...]


class Effectful(nnx.Module):
    def __init__(self, rngs, kind):
        self.dense, self.kind = nnx.Linear(8, 8, rngs=rngs), kind

    def __call__(self, x):
        return effect(self.kind, self.dense(x))


class LinenEffectful(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x):
        return effect(self.kind, nn.Dense(8)(x))


class LinenEffects(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = LinenEffectful(self.kind, name=f"block_{number}")(x)
        return x


@pytest.mark.parametrize("framework", ["nnx", "linen"])
@pytest.mark.parametrize("local_batch", [False, True])
def test_side_effects_in_units_are_refused_with_the_line(framework, local_batch):
    told = {
        "io_callback": "a unit has a side effect",
        "ref": "makes a mutable array",
        "debug": None,
    }
    places = []
    for kind, what in told.items():
        if framework == "linen":
            sharded = on_eight(LinenEffects(kind), inputs=(X["x"],))
        else:
            sharded = on_eight(
                lambda rngs, kind=kind: Chain([Effectful(rngs, kind) for _ in range(2)])
            )
        step = sharded.make_train_step(squares, local_batch=local_batch)
        if what is None:
            step.trace(X)
            continue
        with refused(what) as caught:
            step.trace(X)
        places.append(caught.value.where)
    if not local_batch:  # whose trace is evaluated again without the model's Python
        assert all(", line " in place for place in places)
