"""Blocks that return other things than arrays in a pytree train as they do without units."""

import collections
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import Chain, on_eight
from refusals import refused

WIDTH = 8
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


@dataclass
class Output:
    value: Any
    name: str = "output"


class Bag(dict):
    pass


class Slots:
    __slots__ = ("value",)


def with_slots(x):
    slots = Slots()
    slots.value = x
    return slots


# (how a block returns an array, how its caller reads it)
KINDS = {
    "dataclass": (Output, lambda out: out.value),
    "namespace": (lambda x: SimpleNamespace(value=x), lambda out: out.value),
    "nested": (lambda x: {"all": [Output({"one": x})]}, lambda out: out["all"][0].value["one"]),
    "beside a set": (lambda x: ({"a", "b"}, x), lambda out: out[1]),
}
HIDDEN = {
    "function": lambda x: lambda: x,
    "iterator": lambda x: {"last": iter([x])},
    "generator": lambda x: (each for each in [x]),
    "function in a dataclass": lambda x: Output(lambda: x),
    "slots": with_slots,
    "subclass of dict": lambda x: Bag(value=x),
    "deque": lambda x: collections.deque([x]),
    "partial": lambda x: functools.partial(jnp.multiply, x),
}


class Block(nnx.Module):
    def __init__(self, rngs, pack, unpack):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.pack, self.unpack = pack, unpack

    def __call__(self, x):
        return self.pack(jnp.tanh(self.dense(x)))


class Net(nnx.Module):
    def __init__(self, rngs, kinds):
        self.blocks = nnx.List([Block(rngs, *kind) for kind in kinds])

    def __call__(self, x):
        for block in self.blocks:
            x = x + block.unpack(block(x))
        return x


class LinenBlock(nn.Module):
    pack: Any

    @nn.compact
    def __call__(self, x):
        return self.pack(jnp.tanh(nn.Dense(WIDTH)(x)))


class LinenNet(nn.Module):
    kinds: Any

    @nn.compact
    def __call__(self, x):
        for number, (pack, unpack) in enumerate(self.kinds):
            x = x + unpack(LinenBlock(pack, name=f"block_{number}")(x))
        return x


def loss(model, x):
    return jnp.sum(jnp.square(model(x))), len(x)


def sharded_net(framework, kinds):
    if framework == "linen":
        return on_eight(LinenNet(tuple(kinds)), inputs=(X,))
    return on_eight(lambda rngs: Net(rngs, kinds))


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_blocks_that_return_objects_train_as_on_one_device(framework):
    sharded = sharded_net(framework, KINDS.values())
    state = sharded.init(0)
    params = jax.tree.map(np.asarray, state.params)
    state, metrics = sharded.make_train_step(loss)(state, X)

    def plain(params):
        x = X
        for number in range(len(KINDS)):
            if framework == "nnx":
                dense = params["blocks"][number]["dense"]
            else:
                dense = params[f"block_{number}"]["Dense_0"]
            x = x + jnp.tanh(x @ dense["kernel"] + dense["bias"][None])
        return jnp.sum(jnp.square(x)) / len(X)

    value, gradient = jax.value_and_grad(plain)(params)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradient), rtol=1e-5)


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_what_hides_its_arrays_is_refused_by_the_units_path(framework):
    for pack in HIDDEN.values():
        sharded = sharded_net(framework, [(pack, lambda out: 0.0)] * 2)
        where = "blocks/0" if framework == "nnx" else "block_0"
        with refused("hides the arrays", where=where):
            sharded.make_train_step(loss).trace(X)


class Tying(nnx.Module):
    """Returns an array with its own Variable, a module, and an object that holds another."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scale = nnx.Param(jnp.full(WIDTH, 2.0))

    def __call__(self, x):
        return self.dense(x), self.scale, Output(self.dense)


def test_a_block_returns_its_own_variables_and_modules():
    def tied(model, x):
        total = jnp.zeros(())
        for block in model.layers:
            x, scale, output = block(x)
            same.append(scale is block.scale and output.value is block.dense)
            total += jnp.sum(jnp.square(output.value(x))) * jnp.sum(scale[...])
        return total, len(x)

    def make(rngs):
        model = nnx.Module()
        model.layers = nnx.List([Tying(rngs) for _ in range(2)])
        return model

    same = []
    norms = []
    for units in ("auto", "model"):
        sharded = on_eight(make, units=units)
        norms.append(sharded.make_train_step(tied)(sharded.init(0), X)[1]["grad_norm"])
    assert all(same)
    np.testing.assert_allclose(*norms, rtol=1e-6)


class Recorder:
    last = None


class Recording(Block):
    def __call__(self, x, recorder):
        recorder.last = super().__call__(x)
        return recorder.last


def test_a_block_that_puts_an_array_into_an_object_of_the_caller_is_refused():
    def recorded(model, x):
        recorder = Recorder()
        for block in model.blocks:
            x = block(x, recorder)
        return jnp.sum(recorder.last), len(x)

    sharded = on_eight(
        lambda rngs: nnx.Dict(
            blocks=nnx.List([Recording(rngs, lambda x: x, None) for _ in range(2)])
        )
    )
    with refused("changes a list, a dict or another object", where="blocks/0"):
        sharded.make_train_step(recorded).trace(X)


class Kernel(Block):
    """A block that is used by an operator and by properties."""

    def __matmul__(self, x):
        return jnp.tanh(x @ self.dense.kernel[...])

    @property
    def size(self):
        return jnp.sum(jnp.square(self.dense.kernel[...]))

    @property
    def inner(self):
        return self.dense

    @property
    def width(self):
        return WIDTH


def test_operators_and_properties_gather_with_local_batches():
    def by_operators(model, x):
        for block in model.layers:
            x = (block @ x) * block.size / block.width
            assert block.inner is block.dense
        return jnp.sum(jnp.square(x)), len(x)

    sharded = on_eight(lambda rngs: Chain([Kernel(rngs, None, None) for _ in range(2)]))
    norms = [
        sharded.make_train_step(by_operators, local_batch=local)(sharded.init(0), X)[1]["grad_norm"]
        for local in (False, True)
    ]
    np.testing.assert_allclose(*norms, rtol=1e-5)
