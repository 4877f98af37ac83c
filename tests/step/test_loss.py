"""What a loss returns and takes: metrics of the user's own, and random keys."""

import functools
import operator
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax as fsdp
from fsdp_jax.sharding.strategy import STRATEGIES
from fsdp_jax.step.loss import as_loss, takes_key

BATCH = {
    "x": np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32),
    "mask": (np.arange(32) % 5 < np.arange(32) // 8).astype(np.float32),  # uneven in every part
}


class Block(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        self.linear = nnx.Linear(8, 8, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Model(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        self.one, self.two = Block(rngs, dtype), Block(rngs, dtype)

    def __call__(self, x):
        return self.two(self.one(x))


def shard(strategy="full_shard", units=(Block,)):
    mesh = fsdp.make_mesh(data=4, replica=2)
    return fsdp.fully_shard(
        lambda rngs: Model(rngs), optax.sgd(0.1), mesh, strategy, units, min_size=8
    )


@pytest.fixture(scope="module")
def sharded():
    return shard()


def test_metrics_are_any_mappings_with_any_names(sharded):
    def numbered(model, batch):
        rows = (model(batch["x"]) ** 2).sum(-1)
        metrics = {1: rows.sum(), "a": MappingProxyType({2: (rows.sum(), None)})}
        return rows.sum(), rows.size, metrics

    step = sharded.make_train_step(numbered)
    _, metrics = step(sharded.init(0), BATCH)
    assert float(metrics["1"]) == float(metrics["loss"])
    np.testing.assert_allclose(metrics["a/2"], metrics["loss"] * 32, rtol=1e-5)


def loss(model, batch):
    y, mask = model(batch["x"]), batch["mask"]
    rows = (y**2).sum(-1) * mask
    large = (rows > 8).sum()
    metrics = {
        "large": large,
        "by_feature": (y * mask[:, None]).sum(0)[None],  # in some cases as many as rows
        "moe": {"own": (rows.sum(), mask.size), "parts": {"total": (large, None)}},
        "empty": (0.0, 0),
        "of_features": ((y * mask[:, None]).sum(0)[None], jnp.full((1, 8), 2.0)),
    }
    return rows.sum(), mask.sum(), metrics


@functools.cache
def expected(parts):
    """The same metrics of one device, from `parts` microbatches."""
    key, _ = jax.random.split(jax.random.key(0))
    y = np.asarray(Model(nnx.Rngs(key))(BATCH["x"]), np.float64)
    mask = BATCH["mask"]
    rows = (y**2).sum(-1) * mask
    large, features = (rows > 8).sum(), (y * mask[:, None]).sum(0)
    return {
        "loss": rows.sum() / mask.sum(),
        "count": mask.sum(),
        "large": large / mask.sum(),
        "by_feature": features[None] / mask.sum(),
        "moe/own": rows.sum() / 32,
        "moe/parts/total": large,
        "empty": np.nan,
        "of_features": features[None] / (2 * parts),
    }


SETTINGS = [
    {},
    {"accumulation": 4},
    {"local_batch": True},
    {"local_batch": True, "accumulation": 4},
    {"local_batch": True, "accumulation": 4, "deferred_reduction": True},
]
CASES = [(name, SETTINGS[number % 5]) for number, name in enumerate(STRATEGIES)]
CASES += [("full_shard", settings) for settings in SETTINGS]


@pytest.mark.parametrize(("strategy", "settings"), CASES)
def test_metrics_are_those_of_one_device(strategy, settings):
    sharded = shard(strategy)
    _, metrics = sharded.make_train_step(loss, **settings)(sharded.init(0), BATCH)
    parts = settings.get("accumulation", 1) * (8 if settings.get("local_batch") else 1)
    control = expected(parts)
    assert metrics.keys() == control.keys() | {"grad_norm", "skipped", "skipped_in_a_row"}
    for name, value in control.items():
        assert metrics[name].dtype == jnp.float32
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    assert int(metrics["skipped"]) == 0, "a count of zero is no reason to skip the step"


@pytest.mark.parametrize("settings", [*SETTINGS[:4], {"local_batch": True, "accumulation": 2}])
@pytest.mark.parametrize("with_count", [False, True])
def test_a_metric_of_each_row_is_refused_whatever_a_microbatch_is(sharded, settings, with_count):
    def by_row(model, batch):
        rows = (model(batch["x"]) ** 2).sum(-1)
        return rows.sum(), 1, {"rows": (rows, len(rows)) if with_count else rows}

    rows = 32 // settings.get("accumulation", 1) // (8 if "local_batch" in settings else 1)
    said = (
        rf"has {rows} values, as many as.*rows\n.*metrics\['rows'\](.*\n)*.*x.sum\(0\).*x\[None\]"
    )
    with pytest.raises(ValueError, match=said):
        sharded.make_train_step(by_row, **settings).lower(BATCH)
    if not settings:
        with pytest.raises(ValueError, match=said):
            sharded.make_eval_step(by_row).lower(BATCH)


def test_metrics_of_an_evaluation_are_sums_that_add_up_over_batches(sharded):
    step, state = sharded.make_eval_step(loss), sharded.init(0)
    halves = [step(state, {name: rows[part::2] for name, rows in BATCH.items()}) for part in (0, 1)]
    total, count, metrics = jax.tree.map(operator.add, *halves)
    control = expected(1)
    np.testing.assert_allclose(total / count, control["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["large"][0] / metrics["large"][1], control["large"])
    np.testing.assert_allclose(operator.truediv(*metrics["moe/own"]), control["moe/own"], rtol=1e-5)
    assert metrics["moe/parts/total"] == (control["moe/parts/total"], None)
    without = sharded.make_eval_step(lambda model, batch: loss(model, batch)[:2])(state, BATCH)
    assert len(without) == 2


X = jnp.ones(3)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (X.sum(), r"a number alone\n.*\n.*\(sum, count, metrics\)\n.*float32\[\]\n.*losses.size"),
        (0.5, r"a number alone\n(.*\n)*.*fix: +return losses.sum\(\), losses.size; or mean \* n"),
        ((X.sum(), {"a": 1}), r"metrics and no count\n(.*\n)*.*hits.sum.*\(accuracy \* n, n\)"),
        ((X, 1), r"something else\n.*\n.*\n.*\(float32\[3\], int\)\n.*the summed loss"),
        ((X.sum(), X), r"something else\n"),
        ([X.sum(), 1], r"something else\n(.*\n)*.*got: +list"),
        ((X.sum(), 1, X), r"not a dict\n.*\n.*\n.*float32\[3\]\n.*losses.size, \{"),
        ((X.sum(), 1, {"loss": 1}), r"two metrics are called 'loss'\n(.*\n)*.*'my_loss'"),
        ((X.sum(), 1, {"a/b": 1, "a": {"b": 2}}), r"two metrics are called 'a/b'\n"),
        ((X.sum(), 1, {"a": "text"}), r"not a number\n.*metrics\['a'\](.*\n)*.*str\n"),
        ((X.sum(), 1, {"a": {"b": None}}), r"not a number\n.*metrics\['a/b'\]"),
        ((X.sum(), 1, {"a": [1, 2]}), r"not a number\n(.*\n)*.*hits.size\)"),
        ((X.sum(), 1, {"a": jax.random.key(0)}), r"not a number\n(.*\n)*.*a random key"),
        ((X.sum(), 1, {"a": (1, 2, 3)}), r"not a number\n(.*\n)*.*\(int, int, int\)"),
        ((X.sum(), 1, {"a": (X, X[:2])}), r"not a number\n.*\n.*arrays of one shape"),
        ((X.sum(), 1, {"a": 1j}), r"not a number\n(.*\n)*.*complex"),
    ],
)
def test_a_loss_that_returns_something_else_is_told_what_to_return(returned, said):
    with pytest.raises(ValueError, match=said):
        as_loss(lambda model, batch: returned)(None, None)


def test_the_message_is_the_same_where_the_whole_model_is_the_unit():
    step = shard(units="model").make_train_step(lambda m, b: (m(b["x"]).sum(), 1, {"name": "text"}))
    with pytest.raises(ValueError, match=r"a metric is not a number\n.*'name'"):
        step.lower(BATCH)


# Keys


class Callable:
    def __call__(self, model, batch, key):
        raise NotImplementedError

    def method(self, model, batch, key):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        (lambda m, b: 0, False),
        (lambda m, b, key: 0, True),
        (lambda m, b, key=None: 0, False),
        (lambda m, b, /, *, scale=1.0: 0, False),
        (lambda *args: 0, False),
        (lambda m, *args, **kwargs: 0, False),
        (lambda m, b, key, more=1: 0, True),
        (functools.partial(lambda config, m, b: 0, 1), False),
        (functools.partial(lambda m, b, key, config: 0, config=1), True),
        (functools.partial(lambda m, b, key: 0, key=None), False),
        (Callable(), True),
        (Callable().method, True),
        (jax.jit(lambda m, b, key: 0), True),
        (max, False),  # no signature
    ],
)
@pytest.mark.filterwarnings("ignore:.*gets no random key")
def test_a_third_required_parameter_is_a_key(loss_fn, expected):
    assert takes_key(loss_fn) is expected


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda m, b, key, more: 0,
        lambda m: 0,
        lambda m, b, *, scale: 0,
        "loss",
        functools.partial(lambda m, b, key, more: 0, b=1),
    ],
)
def test_a_loss_that_takes_other_arguments_is_refused_at_once(sharded, loss_fn):
    with pytest.raises(ValueError, match=r"loss_fn\n.*loss_fn\(model, batch, key\)\n"):
        sharded.make_train_step(loss_fn)


def drawn(model, batch, key):
    x = batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)
    total, count = (model(x) ** 2).sum(), x.shape[0]
    return total, count, {"draw": (jax.random.uniform(key), None)}


def test_no_key_is_used_twice_where_accumulation_changes(sharded):
    def draws(model, batch, key):
        value = jax.random.uniform(key)
        return (
            (model(batch["x"]) ** 2).sum(),
            16,
            {"sum": (value, None), "square": (value**2, None)},
        )

    four, one = (sharded.make_train_step(draws, accumulation=k) for k in (4, 1))
    state, first = four(sharded.init(0), BATCH)
    key = jax.random.fold_in(sharded.init(0).rng, 0)
    keys = [jax.random.fold_in(jax.random.fold_in(key, i), 2) for i in range(4)]
    drawn_first = [float(jax.random.uniform(each)) for each in keys]
    np.testing.assert_allclose(first["sum"], sum(drawn_first), rtol=1e-5)
    _, second = one(state, BATCH)
    assert all(abs(float(second["sum"]) - each) > 1e-6 for each in drawn_first)


@pytest.mark.parametrize("settings", SETTINGS[1::2])
def test_keys_are_new_in_each_microbatch_and_the_same_in_a_resumed_run(sharded, settings):
    step, state = sharded.make_train_step(drawn, **settings), sharded.init(0)
    devices = range(8) if settings.get("local_batch") else [None]

    def expected(number):
        draws = []
        for index in range(4):
            key = jax.random.fold_in(jax.random.fold_in(state.rng, number), index)
            keys = [key if i is None else jax.random.fold_in(key, i) for i in devices]
            draws += [jax.random.uniform(jax.random.fold_in(each, 2)) for each in keys]
        assert len({float(draw) for draw in draws}) == 4 * len(devices)
        return sum(draws)

    wanted = [expected(number) for number in range(2)]
    state, first = step(state, BATCH)
    saved = jax.tree.map(jnp.copy, state)
    state, second = step(state, BATCH)
    np.testing.assert_allclose([first["draw"], second["draw"]], wanted, rtol=1e-5)
    _, again = step(saved, BATCH)
    assert float(again["loss"]) == float(second["loss"])


def test_an_evaluation_has_the_same_key_each_time(sharded):
    step, state = sharded.make_eval_step(drawn), sharded.init(0)
    results = [jax.device_get(step(state, BATCH)) for _ in range(2)]
    assert results[0] == results[1]


def test_labels_as_a_third_argument_are_told_from_a_key(sharded):
    def labelled(model, x, y):
        return ((model(x["x"]) - y) ** 2).sum(), 1

    said = r"computes with a random key\n(.*\n)*.*labels belong in the batch, \{'x': x, 'y': y\}"
    with pytest.raises(ValueError, match=said):
        sharded.make_train_step(labelled).lower(BATCH)


def test_a_pair_as_the_batch_of_a_loss_of_three_is_explained(sharded):
    def labelled(model, x, y):
        return ((model(x) - y) ** 2).sum(), 1

    with pytest.raises(Exception, match="x, y = batch"):  # a note of the model's own error
        sharded.make_train_step(labelled).lower((BATCH["x"], BATCH["x"]))


def test_a_key_that_is_returned_is_told_from_a_weight(sharded):
    def weighted(model, x, weight):
        return model(x["x"]).sum(), weight

    said = r"returned a random key\n(.*\n)*.*\(float32\[\], a random key\)"
    said += r"\n.*weights and labels belong in the"
    with pytest.raises(ValueError, match=said):
        sharded.make_train_step(weighted).lower(BATCH)


@pytest.mark.parametrize("loss_fn", [lambda m, b, key=None: 0, lambda m, b, rngs=None, more=1: 0])
def test_a_key_with_a_default_is_warned_of(sharded, loss_fn):
    with pytest.warns(UserWarning, match="gets no random key.*leave the default out"):
        sharded.make_train_step(loss_fn)


# Dtypes


def squared_norm(model, batch):
    rows = (model(batch["x"]) ** 2).sum(-1)
    return rows.sum(), rows.size, {"large": (rows > 8).sum()}


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_model_in_float64_loses_nothing(settings):
    """Sums, counts, the norm and metrics are in float64: equal to one device to 1e-14."""
    with jax.enable_x64(True):
        mesh = fsdp.make_mesh(data=4, replica=2)
        make = functools.partial(Model, dtype=jnp.float64)
        sharded = fsdp.fully_shard(make, optax.sgd(0.1), mesh, units=[Block], min_size=8)
        state, batch = sharded.init(0), {"x": BATCH["x"].astype(np.float64) * 1e-3}
        model = make(nnx.Rngs(jax.random.split(jax.random.key(0))[0]))
        total, grads = nnx.value_and_grad(lambda model: squared_norm(model, batch)[0])(model)
        # Three rows in a hundred are no number of float32.
        scaled = sharded.make_train_step(
            lambda model, batch: (squared_norm(model, batch)[0], 0.03 * 32, {}), **settings
        )
        parts = settings.get("accumulation", 1) * (8 if settings.get("local_batch") else 1)
        _, metrics = scaled(state, batch)
        np.testing.assert_allclose(metrics["loss"], total / (0.03 * 32 * parts), rtol=1e-14)
        norm = optax.tree.norm(grads) / (0.03 * 32 * parts)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-14)
        assert {metrics[name].dtype.name for name in ("loss", "grad_norm", "count")} == {"float64"}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_model_in_float32_has_metrics_in_float32_also_under_x64(accumulation):
    with jax.enable_x64(True):
        sharded = shard()
        step = sharded.make_train_step(squared_norm, accumulation=accumulation)
        _, metrics = step(sharded.init(0), BATCH)
    assert {metrics[name].dtype.name for name in ("loss", "count", "large")} == {"float32"}
