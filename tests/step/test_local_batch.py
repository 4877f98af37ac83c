"""The meaning of a step: by default it is that of one device.

With local batches it is, if the loss is a sum over examples. Numbers are compared in steps that are
compiled and run; what is refused, and which collectives there are, is read from traces.
"""

import itertools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import Case, Chain, by_path, check, on_eight, squares, train, train_unsharded
from refusals import not_refused, refused
from small import SMALL

import fsdp_jax as fsdp
from fsdp_jax.sharding.mesh import mesh_axes, split_data

pytestmark = [
    pytest.mark.releases,
    pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning"),
]

WIDTH = 16


def shard(model=None, mesh=None, units=SMALL.units, strategy="full_shard", tx=None, **settings):
    make, mesh = model or SMALL.model, mesh or fsdp.make_mesh(data=8)
    return fsdp.fully_shard(
        make, tx or optax.adam(1e-3), mesh, strategy, units, min_size=8, **settings
    )


def mesh_for(strategy):
    return fsdp.make_mesh(data=4, replica=2) if "hybrid" in strategy else fsdp.make_mesh(data=8)


# Settings


@pytest.mark.parametrize(
    ("settings", "asked", "name"),
    [
        ({}, {"accumulation": 2, "deferred_reduction": True}, "deferred_reduction=True"),
        (
            {"precision": fsdp.Precision(compute="bfloat16", reduce="float32")},
            {},
            "Precision(compute='bfloat16', reduce='float32')",
        ),
    ],
)
def test_settings_that_need_local_batches_are_refused_without(settings, asked, name):
    sharded = shard(**settings)
    fix = "local_batch=True) if loss_fn is a sum over examples"
    with refused(f"{name} needs local_batch=True", fix=fix):
        sharded.make_train_step(SMALL.loss, **asked)
    assert sharded.make_train_step(SMALL.loss, local_batch=True, **asked).plan.local_batch


def test_reducing_in_the_compute_dtype_needs_no_local_batches():
    precision = fsdp.Precision(compute="bfloat16", reduce="bfloat16")
    assert not shard(precision=precision).make_train_step(SMALL.loss).plan.local_batch


def test_settings_of_a_step_are_checked():
    cases = {
        "local_batch": (None, {"what": "not a bool", "where": "local_batch"}),
        "deferred_reduction": ("no", {"what": "not a bool", "where": "deferred_reduction"}),
        "abort_after": (0, {"what": "abort_after is a whole number"}),
    }
    calls = {
        name: (lambda given={name: value}: shard().make_train_step(SMALL.loss, **given), fields)
        for name, (value, fields) in cases.items()
    }
    assert not_refused(calls) == {}


def test_one_device_ignores_settings_of_communication():
    mesh = fsdp.make_mesh(data=1, allow_fewer=True)
    settings = {"accumulation": 2, "deferred_reduction": True, "local_batch": True}
    plan = shard(mesh=mesh, prefetch="pre").make_train_step(SMALL.loss, **settings).plan
    assert (plan.local_batch, plan.deferred, plan.prefetch) == (False, False, "none")


# The model's own state


class Stateful(nnx.Module):
    """A stack of layers with a constant, and an average that `update` computes of their outputs."""

    def __init__(self, update, rngs):
        def layer(keys):
            made = nnx.Linear(WIDTH, WIDTH, rngs=keys)
            made.gain = nnx.BatchStat(jnp.ones(WIDTH))
            return made

        self.layers = nnx.vmap(layer, in_axes=0, out_axes=0)(rngs.split(3))
        self.ema, self.update = nnx.BatchStat(jnp.ones(WIDTH)), update

    def __call__(self, x):
        def body(layer, x):
            return jnp.tanh(layer(x)) * layer.gain[...][None], None

        x = nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))(self.layers, x)[0]
        self.ema[...] = self.update(self.ema[...], x)
        return x


ROWS = {"x": np.random.default_rng(0).normal(size=(32, WIDTH)).astype(np.float32)}


@pytest.mark.parametrize("prefetch", ["none", "pre"])
def test_state_that_all_devices_agree_on_is_updated(prefetch):
    """A scan passes constants on; what changes is not computed from rows."""
    model = lambda rngs: Stateful(lambda ema, x: ema * 0.5, rngs)  # noqa: E731
    sharded = shard(model, units=[nnx.Linear], prefetch=prefetch)
    step = sharded.make_train_step(squares, accumulation=2, local_batch=True)
    state, _ = step(sharded.init(0), ROWS)
    np.testing.assert_array_equal(state.model_state["ema"], np.full(WIDTH, 0.25))
    np.testing.assert_array_equal(state.model_state["layers"]["gain"], np.ones((3, WIDTH)))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_state_computed_from_rows_is_refused_with_local_batches(accumulation):
    """By default it is that of the global batch."""
    model = lambda rngs: Stateful(lambda ema, x: x.mean(0), rngs)  # noqa: E731
    sharded = shard(model, units=[nnx.Linear])
    with refused("computed from the batch", where="ema", fix="leave local_batch out"):
        sharded.make_train_step(squares, accumulation=accumulation, local_batch=True).lower(ROWS)
    state, _ = sharded.make_train_step(squares, accumulation=accumulation)(sharded.init(0), ROWS)
    copies = [np.asarray(each.data) for each in state.model_state["ema"].addressable_shards]
    for copy in copies[1:]:
        np.testing.assert_array_equal(copy, copies[0])


# Branches


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class StochasticDepth(nnx.Module):
    """Layers that run only where `keep(key, x)` is true."""

    def __init__(self, keep, rngs):
        self.layers, self.rngs, self.keep = nnx.List([Layer(rngs) for _ in range(2)]), rngs, keep

    def __call__(self, x):
        for layer in self.layers:
            graphdef, state = nnx.split(layer)
            run = partial(lambda graphdef, state, x: nnx.merge(graphdef, state)(x), graphdef, state)
            x = jax.lax.cond(self.keep(self.rngs.dropout(), x), run, lambda x: x, x)
        return x


KEEPS = {
    "random": lambda key, x: jax.random.bernoulli(key),
    "batch": lambda key, x: x.sum() > 0,
    "all": lambda key, x: jnp.asarray(0) == 0,
}


def deep(keep):
    return lambda rngs: StochasticDepth(KEEPS[keep], rngs)


@pytest.mark.parametrize("keep", ["random", "batch"])
def test_a_unit_that_some_devices_may_skip_is_refused(keep):
    """Some devices would wait in its gather for others that never come."""
    step = shard(deep(keep), units=[Layer]).make_train_step(squares, local_batch=True)
    with refused("devices may take this branch differently", fix="leave local_batch out"):
        step.lower(ROWS)


def test_a_unit_in_a_branch_that_all_devices_take_runs():
    sharded = shard(deep("all"), units=[Layer])
    _, local = sharded.make_train_step(squares, local_batch=True)(sharded.init(0), ROWS)
    _, default = sharded.make_train_step(squares)(sharded.init(0), ROWS)
    np.testing.assert_allclose(local["loss"], default["loss"], rtol=1e-5)


def test_stochastic_depth_by_default_is_that_of_one_device():
    sharded = shard(deep("random"), units=[Layer])
    state, step = sharded.init(0), sharded.make_train_step(squares)
    params = by_path(state.params)
    layers = [
        {name: params[f"layers/{n}/linear/{name}"] for name in ("kernel", "bias")} for n in range(2)
    ]
    possible = []
    for kept in itertools.product([0, 1], repeat=2):
        x = ROWS["x"]
        for layer, keep in zip(layers, kept, strict=True):
            x = x + keep * np.tanh(x @ layer["kernel"] + layer["bias"])
        possible.append(float((x**2).sum() / len(x)))
    _, metrics = step(state, ROWS)
    assert min(abs(float(metrics["loss"]) / loss - 1) for loss in possible) < 1e-5


# Penalties


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda keys: Layer(keys), in_axes=0, out_axes=0)(rngs.split(2))

    def __call__(self, x):
        scan = nnx.scan(
            lambda layer, x: (layer(x), None), in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0)
        )
        return scan(self.layers, x)[0]


def chain(rngs):
    return Chain([Layer(rngs), Layer(rngs)])


class Toy(Case):
    def batch(self, step, rows=32):
        return ROWS


def penalised(model, batch):
    total, count = squares(model, batch)
    return total + sum(jnp.sum(p**2) for p in jax.tree.leaves(nnx.state(model, nnx.Param))), count


EVERY_STRATEGY = dict(zip(fsdp.STRATEGIES, itertools.cycle([Stack, chain]), strict=False))
QUICK = ("full_shard", "hybrid_shard", "no_shard")


def strategies(*, quick):
    return [
        pytest.param(name, model, marks=[pytest.mark.long] * (name not in quick))
        for name, model in EVERY_STRATEGY.items()
    ]


@pytest.mark.parametrize(("strategy", "model"), strategies(quick=("full_shard", "hybrid_shard")))
def test_a_penalty_on_the_parameters_is_exact_by_default(strategy, model):
    case = Toy(lambda rngs: model(rngs), penalised, (Layer,))
    check(train(case, mesh_for(strategy), strategy, steps=2)[0], train_unsharded(case, steps=2))


@pytest.mark.parametrize(("strategy", "model"), strategies(quick=QUICK))
def test_a_penalty_on_the_parameters_is_refused_with_local_batches(strategy, model):
    """A device would see its own shards, or count replicated ones again: tracing fails."""
    more = {"full_shard": ["pre"], "hybrid_shard": ["post"]}.get(strategy, [])
    for prefetch in ("none", *more):
        sharded = shard(
            lambda rngs: model(rngs), mesh_for(strategy), [Layer], strategy, prefetch=prefetch
        )
        for deferred in (True, False):
            step = sharded.make_train_step(
                penalised, accumulation=2, deferred_reduction=deferred, local_batch=True
            )
            with refused("used outside its unit, as a penalty", fix="leave local_batch out"):
                step.lower(ROWS)


@pytest.mark.parametrize(
    "shrink", [lambda p: jnp.where(jnp.abs(p) > 0.1, p, 0), jnp.nansum, jnp.linalg.norm]
)
def test_any_arithmetic_on_raw_parameters_is_refused(shrink):
    def loss(model, batch):
        total, count = squares(model, batch)
        return total + sum(
            jnp.sum(shrink(p)) for p in jax.tree.leaves(nnx.state(model, nnx.Param))
        ), count

    sharded = shard(chain, mesh_for("full_shard"), [Layer])
    with refused("used outside its unit", got="used at ") as caught:
        sharded.make_train_step(loss, local_batch=True).lower(ROWS)
    assert caught.value.where.startswith("layers/0")


class OwnKey(nnx.Module):
    def __init__(self, rngs, writes):
        self.layer, self.writes = Layer(rngs), writes
        self.key = nnx.RngKey(jax.random.key(0), tag="own")

    def __call__(self, x):
        kept, drawn = jax.random.split(self.key[...])
        if self.writes:
            self.key[...] = kept
        return self.layer(x) + jax.random.normal(drawn, x.shape)


def test_a_random_key_that_the_model_writes_is_refused():
    """A stream advances by a counter; a key of the model's own would differ between devices."""
    with refused("random key of its own", where="key"):
        lower(lambda rngs: OwnKey(rngs, True))
    lower(lambda rngs: OwnKey(rngs, False))


def lower(model):
    shard(model, units=[Layer]).make_train_step(squares, local_batch=True).lower(ROWS)


# Collectives


@pytest.mark.parametrize("local_batch", [True, False])
def test_collectives_are_explicit_only_with_local_batches(local_batch):
    """With annotations only what XLA cannot partition, such as kernels, is mapped over devices."""
    sharded = shard(chain, split_data(mesh_axes(fsdp.make_mesh(data=8)), (2, 4)), [Layer])
    step = sharded.make_train_step(squares, accumulation=2, local_batch=local_batch)
    text = str(step.trace(ROWS))
    for name in ("shard_map", "all_gather", "reduce_scatter", "psum"):
        assert (name in text) == local_batch, name
    assert {comm.axes_at_once for comm in step.plan.comms.values()} == {"one"}


# Losses over the batch


def contrastive(model, batch):
    """Each example's logits are compared with those of all others: no sum over examples."""
    logits = model(batch["x"])
    return -jnp.trace(jax.nn.log_softmax(logits @ logits.T)), logits.shape[0]


def test_a_loss_over_the_batch_is_exact_by_default_alone():
    case, mesh = Toy(chain, contrastive, (Layer,)), fsdp.make_mesh(data=8)
    check(train(case, mesh, steps=2)[0], train_unsharded(case, steps=2))
    (promised,), _ = train(case, mesh, steps=1, local_batch=True)[0]
    assert promised < 0.9 * train_unsharded(case, steps=2)[0][0], "a device sees 4 of 32 examples"


# Accumulation


@pytest.mark.parametrize(("local_batch", "deferred"), [(False, False), (True, False), (True, True)])
def test_many_microbatches_are_summed_in_float32(local_batch, deferred):
    """A gradient that is the mean of the inputs. Summed in bfloat16 it would stop growing."""
    means = np.linspace(0.3, 0.9, WIDTH, dtype=np.float32)
    model = lambda rngs: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)  # noqa: E731
    precision = fsdp.Precision(compute="bfloat16")
    sharded = shard(model, units="model", tx=optax.sgd(1.0), precision=precision)

    def total(model, batch):
        return jnp.sum(model(batch["x"])), batch["x"].shape[0]

    step = sharded.make_train_step(
        total, accumulation=256, deferred_reduction=deferred, local_batch=local_batch
    )
    state = sharded.init(0)
    before = np.asarray(state.params["kernel"])
    state, _ = step(state, {"x": np.tile(means, (8 * 256, 1))})
    found = before - np.asarray(state.params["kernel"])
    np.testing.assert_allclose(found, np.tile(means[:, None], (1, WIDTH)), rtol=1e-2)


@pytest.mark.parametrize("local_batch", [True, False])
def test_the_model_is_traced_once_for_all_microbatches(local_batch):
    calls = []

    class Counted(Layer):
        def __call__(self, x):
            calls.append(x.shape)
            return super().__call__(x)

    sharded = shard(lambda rngs: Counted(rngs), units=[nnx.Linear])
    counts = []
    for accumulation in (1, 4):
        calls.clear()
        sharded.make_train_step(squares, accumulation=accumulation, local_batch=local_batch).lower(
            ROWS
        )
        counts.append(len(calls))
    assert counts[0] == counts[1] == 1


class LinenLayer(nn.Module):
    def setup(self):
        self.kernel = self.param("kernel", nn.initializers.ones, (8, 8))

    def __call__(self, x):
        return x @ self.kernel

    def __matmul__(self, x):
        return self.kernel @ x

    @property
    def size(self):
        return jnp.sum(self.kernel**2)


class ReadingLayer(nn.Module):
    how: str

    def setup(self):
        self.layer = LinenLayer()

    def __call__(self, x):
        x = self.layer(x)
        return x * self.layer.size if self.how == "property" else (self.layer @ x.T).T


def test_a_linen_unit_is_gathered_by_its_operators_and_not_by_its_properties():
    """Linen intercepts methods: a property is refused with the line and the fix."""
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32)

    def lower(how):
        sharded = on_eight(ReadingLayer(how), inputs=(x,), units=[LinenLayer])
        step = sharded.make_train_step(
            lambda model, x: (jnp.sum(model(x) ** 2), len(x)), local_batch=True
        )
        step.lower(x)

    lower("operator")
    with refused("used outside its unit", where="layer/kernel", fix="make it a method"):
        lower("property")
