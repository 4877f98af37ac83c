"""Model state with local batches: constants pass, state computed from the batch is refused.

All is traced, but for attributes that a unit writes, whose values the next call reads.
"""

import re
from itertools import product

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import losses_of, on_eight
from refusals import refused

import fsdp_jax as fsdp

pytestmark = pytest.mark.releases

BATCH = {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
ALONG_LAYERS = {"params": 0, "constants": 0, "batch_stats": 0}


def loss(model, batch):
    return jnp.sum(model(batch["x"]) ** 2), batch["x"].size


class LinenBlock(nn.Module):
    norm: bool = False

    @nn.compact
    def __call__(self, x):
        table = self.variable("constants", "table", lambda: jnp.linspace(0.0, 1.0, 8))
        x = nn.Dense(8)(x) + jnp.broadcast_to(table.value, x.shape)
        return nn.BatchNorm(use_running_average=False)(x) if self.norm else x


class LinenModel(nn.Module):
    norm: bool
    wrap: str

    @nn.compact
    def __call__(self, x):
        kind = {"jit": nn.jit, "remat": nn.remat}.get(self.wrap, lambda kind: kind)(LinenBlock)
        if self.wrap != "scan":
            return kind(self.norm, name="two")(kind(self.norm, name="one")(x))
        layers = nn.scan(
            lambda module, x, _: (module(x), None),
            length=2,
            variable_axes=ALONG_LAYERS,
            split_rngs={"params": True},
        )
        return layers(kind(self.norm, name="layers"), x, None)[0]


class NnxBlock(nnx.Module):
    def __init__(self, norm, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.table = nnx.Variable(jnp.linspace(0.0, 1.0, 8))
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else lambda x: x

    def __call__(self, x):
        return self.norm(self.dense(x) + jnp.broadcast_to(self.table[...], x.shape))


class NnxModel(nnx.Module):
    def __init__(self, norm, wrap, rngs):
        self.wrap = {"jit": nnx.jit, "remat": nnx.remat}.get(wrap, lambda fn: fn)
        self.scan = wrap == "scan"
        if self.scan:
            self.layers = nnx.vmap(lambda rngs: NnxBlock(norm, rngs), in_axes=0)(rngs.split(2))
        else:
            self.one, self.two = NnxBlock(norm, rngs), NnxBlock(norm, rngs)

    def __call__(self, x):
        def run(block, x):
            return block(x)

        if self.scan:
            return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)
        return self.wrap(run)(self.two, self.wrap(run)(self.one, x))


def step(library, norm, wrap):
    mesh, tx = fsdp.make_mesh(data=8), optax.adam(1e-3)
    if library == "nnx":
        sharded = fsdp.fully_shard(
            lambda rngs: NnxModel(norm, wrap, rngs), tx, mesh, units=[NnxBlock], min_size=8
        )
    else:
        model = LinenModel(norm, wrap)
        sharded = fsdp.fully_shard(
            model, tx, mesh, units=[LinenBlock], inputs=(BATCH["x"],), min_size=8
        )
    return sharded.make_train_step(loss, accumulation=2, local_batch=True)


WRAPPED = pytest.mark.parametrize(
    "models",
    [
        (("linen", "scan"), ("linen", "jit"), ("nnx", ""), ("nnx", "remat")),
        pytest.param(
            (("linen", ""), ("linen", "remat"), ("nnx", "jit"), ("nnx", "scan")),
            marks=pytest.mark.long,
        ),
    ],
)


@WRAPPED
def test_a_constant_is_no_batch_state(models):
    """It is accepted, with explicit collectives."""
    for library, wrap in models:
        assert "all_gather" in step(library, False, wrap).lower(BATCH).as_text(), (library, wrap)


@WRAPPED
def test_batch_statistics_are_refused_by_their_path(models):
    paths = {"linen": "batch_stats/.*/mean", "nnx": ".*norm/mean"}
    for library, wrap in models:
        with refused("computed from the batch", fix="local_batch") as caught:
            step(library, True, wrap).lower(BATCH)
        assert re.fullmatch(paths[library], caught.value.where), (library, wrap)


class Making(nnx.Module):
    """Two blocks, which `make` changes in every call."""

    class Block(nnx.Module):
        def __init__(self, make, rngs):
            self.make = make
            self.dense = nnx.Linear(8, 8, rngs=rngs)
            self.last = None
            self.sizes = (0,)

        def __call__(self, x):
            y = x + self.dense(x)
            self.make(self, y)
            return y * (1 + self.sizes[0])

    def __init__(self, make, rngs):
        self.blocks = nnx.List([self.Block(make, rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x * sum(block.sizes[0] for block in self.blocks)


def making(make, units):
    return on_eight(lambda rngs: Making(make, rngs), optax.sgd(1e-3), units=units)


def losses_with(make, units, steps=2):
    sharded = making(make, units)
    batches = [{"x": np.ones((16, 8), np.float32)}] * steps
    return losses_of(sharded.make_train_step(loss), sharded.init(0), batches)[0]


MAKES = {
    "a Variable": lambda block, y: setattr(block, "mean", nnx.BatchStat(y.mean())),
    "a Param": lambda block, y: setattr(block, "weight", nnx.Param(y.mean())),
    "an array for None": lambda block, y: setattr(block, "last", nnx.data(y.mean())),
}


def test_state_that_a_call_makes_is_refused():
    """The next step would not have it."""
    for name, units in product(MAKES, ("model", "auto", ["Block"])):
        step = making(MAKES[name], units).make_train_step(loss)
        with pytest.raises((ValueError, AttributeError)) as caught:
            step.trace(BATCH)
        assert re.search(r"makes new state|static attribute", str(caught.value)), (name, units)


def test_attributes_that_a_unit_writes_are_there_after_its_call():
    def write(block, y):
        block.sizes = (y.shape[1],)

    whole = losses_with(write, "model")
    assert whole[0] > 0
    for units in ("auto", ["Block"]):
        np.testing.assert_allclose(losses_with(write, units), whole, rtol=1e-6)


class Numbers(nnx.Module):
    def __init__(self, rngs, scale=1.0):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.scale = nnx.Param(scale)
        self.calls = nnx.Variable(1)

    def __call__(self, x):
        self.calls[...] += 1
        return self.dense(x) * self.scale[...]


class LinenNumbers(nn.Module):
    @nn.compact
    def __call__(self, x):
        calls = self.variable("state", "calls", lambda: 0)
        calls.value += 1
        return nn.Dense(8)(x) * self.param("scale", lambda key: 1.0)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_python_numbers_of_variables_are_arrays(kind):
    """They are trained, counted and laid out as Flax's own transforms treat them."""
    model, settings = (lambda rngs: Numbers(rngs)), {}
    if kind == "linen":
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        model, settings = LinenNumbers(), {"inputs": (x,)}
    sharded = fsdp.fully_shard(model, optax.sgd(0.1), fsdp.make_mesh(data=8), **settings)
    state = sharded.init(0)
    step = sharded.make_train_step(lambda model, x: ((model(x) ** 2).sum(), len(x)))
    found = jax.tree.map(lambda x: (x.shape, x.dtype.name), (state.params, state.model_state))
    assert found[0]["scale"] == ((), "float32")
    assert jax.tree.leaves(state.model_state) == [1], "made, and in Linen called once"
    state, _ = step(state, np.ones((8, 8), np.float32))
    assert jax.tree.leaves(state.model_state) == [2]
    assert float(state.params["scale"]) != 1.0


@pytest.mark.parametrize("value", [{"a": jnp.ones(2)}, (jnp.ones(2), jnp.ones(3)), None, "text"])
def test_a_variable_of_something_other_than_an_array_is_refused_for_what_it_is(value):
    with refused("an nnx.Param holds", where="scale", got=type(value).__name__, fix="nnx.Dict"):
        fsdp.fully_shard(
            lambda rngs: Numbers(rngs, scale=value), optax.sgd(0.1), fsdp.make_mesh(data=8)
        )


class Told(nnx.Module):
    """Calls a function with what it computes."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x, tell):
        x = self.dense(x)
        tell(x)
        return x


class Telling(nnx.Module):
    """Writes what its blocks tell, by a method of its own or by a function."""

    def __init__(self, rngs, how):
        self.blocks = nnx.List([Told(rngs) for _ in range(2)])
        self.last, self.how = nnx.BatchStat(jnp.zeros((16, 8))), how

    def write(self, x):
        self.last[...] = x

    def __call__(self, x):
        for block in self.blocks:
            x = block(x, self.write if self.how == "method" else lambda y: self.write(y))
        return x


@pytest.mark.parametrize("how", ["method", "function"])
def test_a_function_that_writes_outside_the_unit_names_the_unit(how):
    sharded = on_eight(lambda rngs: Telling(rngs, how), units=[Told])
    with refused("writes to state outside the unit", where="blocks/0", fix="leave Told out"):
        sharded.make_train_step(loss).lower(BATCH)


class LinenTold(nn.Module):
    @nn.compact
    def __call__(self, x, tell):
        x = nn.Dense(8)(x)
        tell(x)
        return x


class LinenTelling(nn.Module):
    @nn.compact
    def __call__(self, x):
        last = self.variable("stats", "last", lambda: jnp.zeros((16, 8)))

        def write(x):
            last.value = x

        return LinenTold()(x, write)


def test_a_linen_variable_that_is_written_inside_another_unit_is_refused():
    sharded = on_eight(LinenTelling(), inputs=(jnp.ones((16, 8)),), units=[LinenTold])
    with refused(
        "another trace", fix="write a variable of another module where the unit is called"
    ):
        sharded.make_train_step(loss).lower(BATCH)
