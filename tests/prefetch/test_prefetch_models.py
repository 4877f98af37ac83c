"""Prefetch of models as users write them.

The layers are found, and every gather that is not moved is named: in traces. That gradients are
right is not seen there; a few models, the rest in `make test-long`, are compiled and compared with
an unsharded run.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import Case, check, make_model, train, train_unsharded

import fsdp_jax as fsdp
from fsdp_jax.sharding.mesh import mesh_axes, split_data

pytestmark = pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")

WIDTH, STEPS = 16, 2


@dataclass(frozen=True)
class Toy(Case):
    """A model of [rows, WIDTH] floats."""

    units: Any = ("Layer",)

    def batch(self, step: int, rows: int = 16) -> dict[str, np.ndarray]:
        random = np.random.default_rng(step)
        return {"x": random.normal(size=(rows, WIDTH)).astype(np.float32)}


def loss(model, batch):
    return jnp.sum((model(batch["x"]) - jnp.flip(batch["x"], 1)) ** 2), batch["x"].shape[0]


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up, self.scale = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x, gain=1.0):
        return x + jnp.tanh(self.up(x)) * self.scale[...][None] * gain

    def gate(self):
        return jnp.mean(self.scale[...])


def stack(count, rngs):
    return nnx.vmap(lambda keys: Layer(keys), in_axes=0, out_axes=0)(rngs.split(count))


def carried(layer, x):
    return layer(x), None


def scanned(layers, x, **settings):
    return nnx.scan(carried, in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), **settings)(
        layers, x
    )[0]


class Base(nnx.Module):
    """Layers in a list, or in a stack."""

    layers = 3
    stacked = False

    def __init__(self, rngs):
        self.inner = (
            stack(self.layers, rngs)
            if self.stacked
            else nnx.List([Layer(rngs) for _ in range(self.layers)])
        )
        self.bias = nnx.Param(jnp.full(WIDTH, 0.1))

    def __call__(self, x):
        if self.stacked:
            return scanned(self.inner, x) + self.bias[...][None]
        for layer in self.inner:
            x = layer(x)
        return x + self.bias[...][None]


class Stacked(Base):
    stacked = True


class One(Base):
    layers = 1


class OneStacked(Stacked):
    layers = 1


class Two(Base):
    layers = 2


class TwoStacked(Stacked):
    layers = 2


class Reversed(Stacked):
    def __call__(self, x):
        return scanned(self.inner, x, reverse=True)


class InsAndOuts(Stacked):
    """Each layer has its own input and output, carries an integer and closes over a bias."""

    def __call__(self, x):
        bias = self.bias[...][None]

        def body(layer, carry, gain):
            (x, count), before = carry, carry[0]
            x = layer(x, gain) + bias
            return (x, count + 1), (x * gain, before.sum(1), count)

        gains = jnp.linspace(0.5, 1.5, self.layers) * self.bias[...][0]
        scan = nnx.scan(body, in_axes=(0, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        (x, count), (outs, sums, counts) = scan(self.inner, (x, jnp.int32(0)), gains)
        return x + outs.sum(0) + 0.1 * sums.mean(0)[:, None] * (count + counts.sum())


class Keys(Stacked):
    """A random key is carried through the scan."""

    def __call__(self, x):
        def body(layer, carry):
            x, key = carry
            key, now = jax.random.split(key)
            return (layer(x) * jax.random.bernoulli(now, 0.5, (WIDTH,))[None], key), None

        scan = nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
        return scan(self.inner, (x, jax.random.key(7)))[0][0]


class Nested(nnx.Module):
    """A scan over groups of a scan over layers."""

    def __init__(self, rngs):
        make = nnx.vmap(
            nnx.vmap(lambda keys: Layer(keys), in_axes=0, out_axes=0), in_axes=0, out_axes=0
        )
        self.inner = make(rngs.split((2, 3)))

    def __call__(self, x):
        def group(layers, x):
            return scanned(layers, x) * 0.9, None

        return nnx.scan(group, in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))(self.inner, x)[0]


class InPairs(Stacked):
    """The body of the scan calls two layers, slices of its argument."""

    layers = 4

    def __call__(self, x):
        graphdef, state = nnx.split(self.inner)
        pairs = jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), state)

        def body(x, pair):
            for i in range(2):
                x = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], pair))(x)
            return x, None

        return jax.lax.scan(body, x, pairs)[0]


class Grouped(Base):
    """The user's own checkpoint around two layers each."""

    layers = 4

    def __call__(self, x):
        for first, second in ((0, 1), (2, 3)):
            x = nnx.remat(lambda a, b, x: b(a(x)))(self.inner[first], self.inner[second], x)
        return x


class Jitted(Base):
    def __call__(self, x):
        for layer in self.inner:
            x = nnx.jit(lambda layer, x: layer(x))(layer, x)
        return x


class Shared(Base):
    """A layer that is used twice."""

    def __call__(self, x):
        for i in (0, 1, 0, 2):
            x = self.inner[i](x)
        return x


class EncoderDecoder(nnx.Module):
    def __init__(self, rngs):
        self.encoder = nnx.List([Layer(rngs) for _ in range(2)])
        self.decoder = stack(3, rngs)

    def __call__(self, x):
        seen = x
        for layer in self.encoder:
            seen = layer(seen)

        def body(layer, y):
            return layer(y) + 0.1 * seen, None

        return nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))(self.decoder, x)[0]


class Skips(Base):
    """Every layer reads the outputs of all layers before it."""

    def __call__(self, x):
        made = [x]
        for layer in self.inner:
            made.append(layer(sum(made)))
        return made[-1] + made[1] * self.bias[...][None]


# Models without a warning: every parameter of a unit is prefetched.
PREFETCHED = [
    *(Base, Stacked, Two, TwoStacked, Reversed, InsAndOuts, Keys, Nested, Grouped),
    *(Jitted, Shared, EncoderDecoder, Skips),
]


def report_of(step):
    """What the step tells of its gathers, in which each parameter of a unit is named."""
    report = step.report.prefetch
    in_units = {path for path, comm in step.plan.comms.items() if comm.unit is not None}
    assert report.prefetched | set(report.not_prefetched) == in_units
    return report


def traced(model, prefetch, warning=None, **settings):
    """What the trace of a step tells of its gathers."""
    case = Toy(model, loss)
    sharded = fsdp.fully_shard(
        make_model(case),
        optax.sgd(0.1),
        fsdp.make_mesh(data=8),
        units=case.units,
        min_size=8,
        prefetch=prefetch,
    )
    step = sharded.make_train_step(loss, local_batch=True, **settings)
    warns = pytest.warns(fsdp.SlowerWarning, match=warning) if warning else nullcontext()
    with warns:
        step.lower(case.batch(0))
    return report_of(step)


def run(model, prefetch, warning=None, **settings):
    """The same of a step that is run, and gives what an unsharded one does."""
    case, mesh = Toy(model, loss), fsdp.make_mesh(data=8)
    settings |= {"steps": STEPS, "local_batch": True, "prefetch": prefetch}
    warns = pytest.warns(fsdp.SlowerWarning, match=warning) if warning else nullcontext()
    with warns:
        found, step = train(case, mesh, **settings)
    check(found, train_unsharded(case, settings.get("accumulation", 1), steps=STEPS))
    return report_of(step)


LONG, EXHAUSTIVE = pytest.mark.long, pytest.mark.exhaustive


def test_layers_of_any_model_are_prefetched():
    left = {model: traced(model, "pre").not_prefetched for model in PREFETCHED}
    left |= {f"{model}, post": traced(model, "post").not_prefetched for model in (Base, Nested)}
    assert not any(left.values()), left


DEFERRED = {"accumulation": 2, "deferred": True, "remat": "full"}


@pytest.mark.parametrize(
    ("model", "prefetch", "settings"),
    [
        (InsAndOuts, "pre", {}),
        (EncoderDecoder, "post", {}),
        pytest.param(Shared, "pre", DEFERRED, marks=LONG),
        pytest.param(Nested, "pre", DEFERRED, marks=LONG),
        pytest.param(InsAndOuts, "post", {}, marks=LONG),
        *(pytest.param(each, "pre", {}, marks=LONG) for each in (EncoderDecoder, Keys, Skips)),
        *(
            pytest.param(each, "pre", {}, marks=EXHAUSTIVE)
            for each in PREFETCHED
            if each not in (InsAndOuts, EncoderDecoder, Keys, Skips)
        ),
        *(pytest.param(each, "post", {}, marks=EXHAUSTIVE) for each in (Base, Nested, Shared)),
        pytest.param(InsAndOuts, "pre", DEFERRED, marks=EXHAUSTIVE),
    ],
)
def test_layers_that_are_prefetched_have_the_same_gradients(model, prefetch, settings):
    report = run(model, prefetch, **settings)
    assert report.prefetched
    assert not report.not_prefetched


# Gathers that cannot be moved


class Conditional(Base):
    """The last layer runs on a condition."""

    def __call__(self, x):
        for layer in self.inner[:2]:
            x = layer(x)
        return nnx.cond(
            self.bias[...][0] > 0, lambda layer, x: layer(x), lambda layer, x: x, self.inner[2], x
        )


class FixedPoint(Base):
    """A frozen layer in a while loop."""

    def __call__(self, x):
        graphdef, state = nnx.split(self.inner[0])
        state = jax.lax.stop_gradient(state)

        def turn(carry):
            count, x = carry
            return count + 1, 0.5 * nnx.merge(graphdef, state)(x)

        x = jax.lax.while_loop(lambda carry: carry[0] < 3, turn, (0, x))[1]
        return self.inner[2](self.inner[1](x))


class Gated(Base):
    """The weights of the second layer are computed from the first's."""

    def __call__(self, x):
        gate = self.inner[0].gate()
        x = self.inner[0](x)
        graphdef, state = nnx.split(self.inner[1])
        x = nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.where(gate > 0, leaf, leaf), state))(
            x
        )
        return self.inner[2](x)


class UnitAfterStack(Stacked):
    """One unit follows the stack, with none before or after it in a chain."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.last = Layer(rngs)

    def __call__(self, x):
        return self.last(scanned(self.inner, x))


def test_a_shard_that_is_changed_before_its_gather_is_refused():
    """It is reshaped, computed with, or gathered in a `while`: a device has a part of it."""
    for model in (InPairs, FixedPoint, Gated):
        with pytest.raises(ValueError, match=r"used outside its unit(.*\n)+.*inner/"):
            traced(model, "pre")


UNMOVED = {
    Conditional: ("inner/2", "gathered inside a `cond`"),
    UnitAfterStack: ("last", "no other unit is run just before or after"),
}


@pytest.mark.parametrize(
    ("model", "report_by"),
    [
        (Conditional, traced),
        (UnitAfterStack, traced),
        pytest.param(Conditional, run, marks=LONG),
    ],
)
def test_a_gather_that_cannot_be_moved_is_named_and_correct(model, report_by):
    left, why = UNMOVED[model]
    told = rf"gathered where they are used, such as '{left}/.*': .*{why}"
    report = report_by(model, "pre", told)
    assert {path.rsplit("/", 1)[0].removesuffix("/up") for path in report.not_prefetched} == {left}


@pytest.mark.parametrize(
    ("model", "report_by"),
    [
        (One, traced),
        (OneStacked, traced),
        pytest.param(OneStacked, run, marks=LONG),
    ],
)
def test_a_single_layer_warns_that_nothing_is_prefetched(model, report_by):
    report_by(model, "pre", "no unit follows another|gathered where they are used")


@pytest.mark.long
def test_frozen_layers_are_prefetched():
    case = Toy(Stacked, loss)
    mesh = fsdp.make_mesh(data=8)
    start, _ = train(case, mesh, steps=0)
    frozen, step = train(
        case, mesh, steps=STEPS, local_batch=True, prefetch="pre", frozen=["up/kernel"]
    )
    plain, _ = train(case, mesh, steps=STEPS, frozen=["up/kernel"])
    check(frozen, plain)
    assert any("up/kernel" in path for path in step.report.prefetch.prefetched)
    for path in (path for path in start[1] if "up/kernel" in path):
        np.testing.assert_array_equal(frozen[1][path], start[1][path])


# Tori


class Odd(nnx.Module):
    """No dim of its kernels is divisible by 8 devices; one is by 2 and the other by 4."""

    def __init__(self, rngs):
        self.inner = nnx.List([nnx.Linear(6, 20, rngs=rngs), nnx.Linear(20, 6, rngs=rngs)])

    def __call__(self, x):
        y = self.inner[1](jnp.tanh(self.inner[0](x[:, :6])))
        return jnp.concatenate([x[:, 6:], y], 1)


@pytest.mark.parametrize(
    ("prefetch", "local_batch"),
    [
        ("pre", True),
        pytest.param("none", False, marks=LONG),
    ],
)
def test_a_kernel_sharded_over_two_axes_of_a_torus(prefetch, local_batch):
    case = Toy(Odd, loss, (nnx.Linear,))
    mesh = split_data(mesh_axes(fsdp.make_mesh(data=8)), (2, 4))
    found, step = train(case, mesh, steps=STEPS, prefetch=prefetch, local_batch=local_batch)
    check(found, train_unsharded(case, steps=STEPS))
    specs = [tuple(step.plan.comms[f"inner/{i}/kernel"].shard_spec) for i in range(2)]
    assert specs == [("data_0", "data_1"), ("data_1", "data_0")]


@pytest.mark.parametrize(
    ("sizes", "entry", "steps"),
    [
        ((2, 4), "data", 0),
        ((2, 2, 2), "fsdp", 0),
        ((2, 4), "mine", 0),
        pytest.param((2, 2, 2), "mine", STEPS, marks=LONG),
    ],
)
def test_rules_and_reports_name_the_axes_of_a_torus_as_one(sizes, entry, steps):
    mesh, case = split_data(mesh_axes(fsdp.make_mesh(data=8)), sizes), Toy(Base, loss)
    rules = [("up/kernel", (None, entry)), ("up/bias", (entry,))]
    settings = {"rules": rules, "logical_axes": {"mine": "data"}, "prefetch": "pre"}
    if steps:
        found, _ = train(case, mesh, steps=steps, local_batch=True, **settings)
        check(found, train_unsharded(case, steps=steps))
    layout = fsdp.fully_shard(
        make_model(case), optax.sgd(0.1), mesh, units=case.units, min_size=8, **settings
    ).layout
    text = str(layout) + repr(layout) + layout._repr_html_()
    assert "data=8" in text
    assert "P(None, 'data')" in text.replace("&#x27;", "'")
    assert "data_0" not in text


class Measured(nn.Module):
    """A block with an output beside, whose derivative is infinite."""

    @nn.compact
    def __call__(self, x, _=None):
        y = x + nn.Dense(16)(x)
        return y, jnp.sqrt((0 * y).sum())


class MeasuredLayers(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, x):
        if self.scan:
            lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, measured = nn.scan(Measured, length=3, **lifted)()(x, None)
            return x, measured
        # The head is read before the layers, and gathered after them.
        head = self.param("head", nn.initializers.ones, (16, 16))
        blocks = [Measured() for _ in range(3)]
        before = nn.Dense(16)(x)
        x, first = blocks[0](before)
        measured = [first]
        for block in blocks[1:]:
            measured.append(jnp.sqrt((0 * before).sum()))
            x, each = block(x)
            measured.append(each)
        return x @ head, jnp.stack(measured)


class MeasuredCarry(nn.Module):
    """As `Measured`, the sum of what is measured carried from layer to layer."""

    @nn.compact
    def __call__(self, carry, _=None):
        x, measured = carry
        y, more = Measured()(x)
        return (y, measured + more), None


class CarryingLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        layers = nn.scan(MeasuredCarry, length=3, **lifted)()
        return layers((x, jnp.zeros(())), None)[0]


def reported(model, batch):
    y, measured = model(batch["x"])
    return (y**2).sum(), 16, {"measured": (measured.sum(), None)}


def unread(model, batch):
    return (model(batch["x"])[0] ** 2).sum(), 16


def looped(model, batch):
    """In a scan around the model, whose carry has the sum of what is measured."""

    def turn(carry, _):
        y, measured = model(carry[0])
        return (y / 2, carry[1] + measured.sum()), None

    return (jax.lax.scan(turn, (batch["x"], 0.0), length=2)[0][0] ** 2).sum(), 16


def constant(model, batch):
    """By what jax differentiates as constants, some of it in a branch."""
    y, measured = model(batch["x"])
    factor = jnp.where(measured.max() > 10, 2, 1) + jnp.argmax(measured) + jnp.sign(measured).sum()
    branches = [
        lambda y, measured: y * jax.lax.stop_gradient(measured).sum(),
        lambda y, measured: y,
    ]
    y = jax.lax.switch(jnp.argmax(measured) + 1, branches, y, measured)
    return (y**2).sum() * (factor + jax.lax.stop_gradient(measured).sum()), 16


@pytest.mark.filterwarnings("ignore:unit 'ScanMeasured_0' is gathered 2 times")
@pytest.mark.parametrize(
    ("model", "loss_fn", "modes"),
    [
        (MeasuredLayers(True), constant, ("pre",)),
        (MeasuredLayers(False), reported, ("pre",)),
        pytest.param(CarryingLayers(), reported, ("pre", "post"), marks=LONG),
        pytest.param(MeasuredLayers(True), looped, ("pre", "post"), marks=LONG),
        pytest.param(MeasuredLayers(False), unread, ("pre", "post"), marks=EXHAUSTIVE),
    ],
)
def test_what_the_loss_does_not_depend_on_is_not_differentiated(model, loss_fn, modes):
    """Zero times an infinite derivative would be NaN, and the step skipped."""
    batch = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}
    norms = []
    for prefetch in ("none", *modes):
        sharded = fsdp.fully_shard(
            model,
            optax.sgd(0.1),
            fsdp.make_mesh(),
            units=["Measured", "MeasuredCarry"][isinstance(model, CarryingLayers) :][:1],
            inputs=(batch["x"],),
            min_size=8,
            prefetch=prefetch,
        )
        step = sharded.make_train_step(loss_fn, local_batch=True)
        norms.append(float(step(sharded.init(0), batch)[1]["grad_norm"]))
        assert bool(step.report.prefetch.prefetched) == (prefetch != "none")
    assert norms[0] > 0
    np.testing.assert_allclose(norms[1:], norms[0], rtol=1e-5)
