"""What NNX decides by types and attributes that it does not document."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from mend import relied_on

from fsdp_jax.compat.flax_nnx import (
    CALL,
    TracedStream,
    noted_shapes,
    own_attributes,
    set_class,
    swap_streams,
    take_noted_shape,
    traced_arrays_are_state,
)

pytestmark = pytest.mark.releases


class Counter(nnx.Module):
    def __init__(self, start):
        self.count = nnx.Param(jnp.asarray(start))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


class DoubleCounter(Counter):
    pass


def test_traced_arrays_are_state():
    seen = {}

    def inside(x):
        seen["before"] = nnx.is_data(x)
        with traced_arrays_are_state():
            seen["jit"] = nnx.is_data(x)
            jax.grad(lambda y: seen.update(grad=nnx.is_data(y)) or y.sum())(x)
            jax.vmap(lambda y: seen.update(vmap=nnx.is_data(y)) or y)(x)
        seen["after"] = nnx.is_data(x)
        return x

    name = "flax_nnx.traced_arrays_are_state"
    with relied_on("flax", name, "DATA_REGISTRY, the types of arrays that are state"):
        jax.eval_shape(inside, jnp.ones(3))
        assert all(seen[where] for where in ("jit", "grad", "vmap")), seen
        assert not seen["after"], "the registry is as before"
    with relied_on("flax", name, "tracers are no state: if they are, drop the function"):
        assert not seen["before"]


def test_set_class():
    model = Counter(0)

    def inside(x):
        set_class(model, DoubleCounter)
        return x

    with relied_on("flax", "flax_nnx.set_class", "an object whose class is set in a transform"):
        jax.eval_shape(inside, 1.0)
        assert type(model) is DoubleCounter
        assert isinstance(nnx.merge(*nnx.split(model)), DoubleCounter)


def draws(kind, count=3):
    """A function of a key that returns the keys drawn from streams of a class."""

    def draw(key):
        rngs = nnx.Rngs(key)
        swap_streams([("", rngs.default)], nnx.RngStream, kind)
        return [jax.random.key_data(rngs.params()) for _ in range(count)]

    return draw


def test_traced_stream():
    key = jax.random.key(3)
    with relied_on("flax", "flax_nnx.TracedStream", "how a stream makes a key of its count"):
        plain, ours = draws(nnx.RngStream)(key), draws(TracedStream)(key)
        for a, b in zip(plain, ours, strict=True):
            assert (a == b).all()


def test_swap_streams():
    model = Counter(0)
    nodes = [("", model), ("dropout/rngs", model.dropout.rngs)]
    with relied_on("flax", "flax_nnx.swap_streams", "the class of random streams, `RngStream`"):
        swap_streams(nodes, nnx.RngStream, TracedStream)
        assert type(model.dropout.rngs) is TracedStream
        swap_streams(nodes, TracedStream, nnx.RngStream)
        assert type(model.dropout.rngs) is nnx.RngStream
    assert type(model) is Counter


def test_own_attributes():
    with relied_on("flax", "flax_nnx.own_attributes", "`_pytree__` before what NNX keeps"):
        assert [name for name, _ in own_attributes(Counter(0))] == ["count", "dropout"]
        assert len(vars(Counter(0))) > 2


def test_call():
    module = nnx.bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 4)))
    with relied_on("flax", "flax_nnx.CALL", "an attribute that ToNNX takes for no variable"):
        setattr(module, CALL, object())
        assert module(jnp.ones((1, 4))).shape == (1, 4)


def test_noted_shapes():
    made = []

    def make(key):
        model = nnx.vmap(nnx.vmap(lambda rngs: nnx.Linear(4, 8, rngs=rngs)))(
            nnx.Rngs(key).split((3, 2))
        )
        made.append(take_noted_shape(model.kernel))
        assert take_noted_shape(model.kernel) is None
        return model.kernel.get_value()

    before = nnx.Variable.__init__
    with relied_on("flax", "flax_nnx.noted_shapes", "metadata of what is made in `nnx.vmap` stays"):
        with noted_shapes():
            assert jax.eval_shape(make, jax.random.key(0)).shape == (3, 2, 4, 8)
        jax.eval_shape(lambda key: make(key), jax.random.key(0))
        assert made == [(4, 8), None]
    assert nnx.Variable.__init__ is before
