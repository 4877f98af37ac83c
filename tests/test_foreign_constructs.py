"""Constructs of other people's models, each model held against an unsharded control.

Compiles and runs a step for each: that a construct means what it means on one device shows in
numbers.

tests/units/test_linen.py has Linen's wrapped methods and classes, test_repeats.py units in loops.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from reference import Case, check, linen_loss, on_eight, train, train_unsharded

import fsdp_jax as fsdp

WIDTH, VOCABULARY = 16, 32


class Residual:
    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Block(Residual, nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)


class Model(nnx.Module):
    """An embedding, two blocks and a head; subclasses change the blocks and how they are called."""

    block = Block

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([self.block(rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, tokens):
        return self.head(self.run(self.embed(tokens)))


# Attributes


class Counted(Model):
    """Counts its calls in a Python number."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.calls, self.scale = 0, 1.0

    def __call__(self, tokens):
        self.calls += 1
        return super().__call__(tokens) * self.scale


def test_a_number_that_a_step_changes_is_told():
    sharded = on_eight(Counted)
    step, batch = sharded.make_train_step(linen_loss), Case(None, linen_loss, ()).batch(0)
    with pytest.warns(UserWarning, match=r"the step sets 'calls'.* from 0 to 1, .*nnx\.Variable"):
        step.lower(batch)


class Tabled(Block):
    """Holds a table, a list of them, a key and a counter as plain attributes."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.table = jnp.linspace(0.5, 1.0, WIDTH)
        self.scales = nnx.List([jnp.full((), 2.0)])
        self.key = jax.random.key(7)
        self.calls = jnp.zeros(())

    def __call__(self, x):
        self.calls = self.calls + 1
        mask = jax.random.bernoulli(self.key, 0.5, x.shape)
        scale = self.scales[0] * self.table / self.calls
        return x + jnp.tanh(self.linear(x)) * mask * jnp.broadcast_to(scale, x.shape)


class TabledModel(Model):
    block = Tabled


class ScannedTables(Model):
    """The same blocks, stacked by `nnx.vmap`: a table gets a layer dim as a parameter does."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: Tabled(rngs=rngs))(rngs.split(2))

    def run(self, x):
        scan = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(self.blocks, x)


# Wrapped and unusual methods


class Wrapped(Block):
    """Is entered by methods of several kinds, one inherited; the parent calls each."""

    @nnx.jit
    def jitted(self, x):
        return x + jnp.tanh(self.linear(x))

    @jax.named_scope("scoped")
    def scoped(self, x):
        return nnx.remat(type(self)._private)(self, x)

    def _private(self, x):
        return x + jnp.sin(self.linear(x))

    def scaled(self, scale, x):
        return x + scale * self.linear(x)

    doubled = functools.partialmethod(scaled, 2.0)
    static = staticmethod(jnp.tanh)


class WrappedModel(Model):
    block = Wrapped

    @nnx.jit
    def run(self, x):
        first, second = self.blocks
        x = second.scoped(first.jitted(first(x)))
        return first.static(second.doubled(first._private(x)))


# Statistics, sown values, and arrays that a call leaves in a module


class Normed(Block):
    axis_name: str | None = None

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, axis_name=self.axis_name, rngs=rngs)

    def __call__(self, x):
        hidden = self.norm(jnp.tanh(self.linear(x)))
        self.sow(nnx.Intermediate, "power", jnp.mean(hidden**2))
        self.last = hidden
        return x + jnp.tanh(hidden)


class NormedOverAxis(Normed):
    axis_name = "batch"


class NormedModel(Model):
    block = Normed


class NormedOverAxisModel(Model):
    block = NormedOverAxis


def loss_with_sown(model, batch):
    total, count = linen_loss(model, batch)
    sown = jax.tree.leaves(nnx.pop(model, nnx.Intermediate))
    assert len(sown) == 2, "one of each block"
    return total + count * (sum(sown) + jnp.mean(model.blocks[1].last ** 2)), count


# Shared modules and keys at call time


class Dropping(Block):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs, key):
        noise = jax.random.normal(key, x.shape)
        return x + self.dropout(jnp.tanh(self.linear(x) + noise), rngs=rngs)


class SharingModel(Model):
    """Uses one block twice; every use draws from the streams that the caller gave."""

    block = Dropping

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.blocks.append(self.blocks[0])

    def __call__(self, tokens, *, rngs, key):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rngs, key)
        return self.embed.attend(x)


def loss_with_keys(model, batch):
    rngs = nnx.Rngs(dropout=jax.random.key(batch["tokens"][0, 0]))
    call = functools.partial(model, rngs=rngs, key=jax.random.key(3))
    total, count = linen_loss(call, batch)
    assert rngs.dropout.count[...].shape == ()
    return total + rngs.dropout.count[...], count  # 3, one for each use


# Linen


class LinenBlock(nn.Module):
    """Holds an array as a field, another in `setup`, a third as a variable; has a norm; sows."""

    table: jax.Array
    axis_name: str | None = None

    def setup(self):
        self.linear = nn.Dense(WIDTH)
        self.scale = jnp.linspace(0.5, 1.0, WIDTH)
        self.shift = self.variable("constants", "shift", lambda: jnp.ones(WIDTH))
        self.norm = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)

    def _inner(self, x):
        by_width = self.table * self.scale + self.shift.value
        return jnp.tanh(self.linear(x) * jnp.broadcast_to(by_width, x.shape))

    @nn.nowrap
    def doubled(self, x):
        return 2 * x

    def __call__(self, x, key):
        hidden = self.norm(self._inner(x) + jax.random.normal(key, x.shape))
        self.sow("intermediates", "power", jnp.mean(hidden**2))
        return x + self.doubled(hidden)


class LinenModel(nn.Module):
    """Hands one block to a module that uses it twice, and ties its head to its embedding."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, WIDTH)
        shared = LinenBlock(jnp.linspace(0.5, 1.0, WIDTH))
        x = Twice(shared)(embed(tokens), jax.random.key(5))
        x = LinenBlock(jnp.ones(WIDTH), self.axis_name)(x, jax.random.key(6))
        return nn.Dense(VOCABULARY).apply(
            {"params": {"kernel": embed.variables["params"]["embedding"].T, "bias": jnp.zeros(32)}},
            x,
        )


class Twice(nn.Module):
    block: nn.Module

    def __call__(self, x, key):
        return self.block(self.block(x, key), jax.random.fold_in(key, 1))


# Model, its control where that is another, loss, units, strategy, replicas.
RUNS = {
    "arrays": (TabledModel, None, linen_loss, [Tabled], "full_shard", 1),
    "stacked arrays": (ScannedTables, None, linen_loss, [Tabled], "hybrid_shard", 2),
    "wrapped methods": (WrappedModel, None, linen_loss, [Wrapped], "full_shard", 1),
    "sown": (NormedOverAxisModel, NormedModel, loss_with_sown, [Normed], "hybrid_shard", 2),
    "keys": (SharingModel, None, loss_with_keys, [Dropping], "full_shard", 1),
    "linen": (LinenModel("batch"), LinenModel(), linen_loss, [LinenBlock], "full_shard", 1),
}


ALIKE = ("arrays", "stacked arrays", "keys")


@pytest.mark.filterwarnings("ignore:.*Module.sow:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:unit .* runs inside a loop:fsdp_jax.SlowerWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in ALIKE)) for name in RUNS]
)
def test_trains_as_unsharded(name):
    model, control, loss, units, strategy, replica = RUNS[name]
    mesh = fsdp.make_mesh(data=8 // replica, replica=replica)
    run, _ = train(Case(model, loss, units), mesh, strategy, steps=2, accumulation=2)
    check(run, train_unsharded(Case(control or model, loss, ()), accumulation=2, steps=2))


# What cannot run says what to do


class Closing(Block):
    """Keeps an array of its constructor in a closure, where no step can find it."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        table = jnp.ones(WIDTH)
        self.scale = lambda x: x * table


class ClosingModel(Model):
    block = Closing


def loss_over_axis(model, batch):
    total, count = linen_loss(model, batch)
    return jax.lax.pmean(total, "batch"), count


REFUSED = {
    "closure": (ClosingModel, linen_loss, False, r"holds a JAX array\n.*blocks/0/scale\n.*NumPy"),
    "key": (TabledModel, linen_loss, True, r"random key .*\n.*blocks/0/key\n.*\n.*nnx\.Rngs"),
    "pmean": (Model, loss_over_axis, False, r"nothing binds\n.*\n.*batch\n.*global batch"),
    "norm": (NormedOverAxisModel, linen_loss, True, r"nothing binds\n.*\n.*batch\n.*local_batch"),
}


@pytest.mark.filterwarnings("ignore:.*Module.sow:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_names_the_fix(name):
    model, loss, local_batch, said = REFUSED[name]
    make, batch = (lambda rngs: model(rngs=rngs)), Case(None, loss, ()).batch(0)
    with pytest.raises(ValueError, match=said):
        on_eight(make, units=[Block]).make_train_step(loss, local_batch=local_batch).lower(batch)
