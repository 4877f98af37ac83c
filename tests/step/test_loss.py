"""What a loss returns and takes: metrics of the user's own, and random keys.

Steps of two matmuls are compiled and run for the numbers of metrics and keys; what is refused is
read from traces.
"""

import functools
import operator
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusals import not_refused, refused

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
# Each setting with one of the strategies.
CASES = [(name, SETTINGS[number % 5]) for number, name in enumerate(STRATEGIES)]
CASES[5:7] = [pytest.param(*case, marks=pytest.mark.long) for case in CASES[5:7]]


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


def test_a_metric_of_each_row_is_refused_whatever_a_microbatch_is(sharded):
    def by_row(with_count):
        def loss(model, batch):
            rows = (model(batch["x"]) ** 2).sum(-1)
            return rows.sum(), 1, {"rows": (rows, len(rows)) if with_count else rows}

        return loss

    calls = {}
    for number, settings in enumerate(SETTINGS):
        rows = 32 // settings.get("accumulation", 1) // (8 if "local_batch" in settings else 1)
        step = sharded.make_train_step(by_row(number % 2), **settings)
        fields = {"what": f"has {rows} values, as many as", "where": "metrics['rows'] of loss_fn"}
        calls[str(settings)] = (
            lambda step=step: step.lower(BATCH),
            fields | {"fix": "add it up, x.sum(0); or if its values are of something else"},
        )
    for with_count in (False, True):
        step = sharded.make_eval_step(by_row(with_count))
        calls[f"evaluation {with_count}"] = (
            lambda step=step: step.lower(BATCH),
            {"fix": "x[None]"},
        )
    assert not_refused(calls) == {}


def test_metrics_of_an_evaluation_add_up_over_batches(sharded):
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


def test_a_loss_that_returns_something_else_is_told_what_to_return():
    x, number = np.ones(3, np.float32), np.float32(3)
    alone, no_number = {"what": "a number alone"}, {"what": "not a number"}
    cases = [
        (jnp.float32(3), alone | {"expected": "(sum, count, metrics)", "got": "float32[]"}),
        (0.5, alone | {"fix": "return losses.sum(), losses.size; or mean * n"}),
        ((number, {"a": 1}), {"what": "metrics and no count", "fix": "(accuracy * n, n)"}),
        ((x, 1), {"what": "something else", "got": "(float32[3], int)", "fix": "the summed loss"}),
        ((number, x), {"what": "something else"}),
        ([number, 1], {"what": "something else", "got": "list"}),
        (
            (np.int32(3), 1),
            {"what": "a sum of integers", "got": "(int32, int)", "fix": "hits.sum()"},
        ),
        ((jnp.bool_(True), 1), {"what": "a sum of integers"}),
        ((3, 1), {"what": "a sum of integers"}),
        ((number, True), {"what": "the count of the loss is no number", "got": "bool"}),
        ((number, jnp.bool_(True)), {"what": "the count of the loss", "fix": "mask.sum()"}),
        ((number, -96), {"what": "the count of the loss", "got": "-96"}),
        ((number, np.float32(-0.5)), {"what": "the count of the loss", "expected": "0 or more"}),
        ((number, 1, x), {"what": "not a dict", "got": "float32[3]", "fix": "losses.size, {"}),
        ((number, 1, {"loss": 1}), {"what": "two metrics are called 'loss'", "fix": "'my_loss'"}),
        ((number, 1, {"a/b": 1, "a": {"b": 2}}), {"what": "two metrics are called 'a/b'"}),
        (
            (number, 1, {"a": "text"}),
            no_number | {"where": "metrics['a'] of loss_fn", "got": "str"},
        ),
        ((number, 1, {"a": {"b": None}}), no_number | {"where": "metrics['a/b'] of loss_fn"}),
        ((number, 1, {"a": [1, 2]}), no_number | {"fix": "hits.size)"}),
        ((number, 1, {"a": jax.random.key(0)}), no_number | {"got": "a random key"}),
        ((number, 1, {"a": (1, 2, 3)}), no_number | {"got": "(int, int, int)"}),
        ((number, 1, {"a": (x, x[:2])}), no_number | {"expected": "arrays of one shape"}),
        ((number, 1, {"a": 1j}), no_number | {"got": "complex"}),
    ]
    calls = {
        str(given): (lambda given=given: as_loss(lambda model, batch: given)(None, None), fields)
        for given, fields in cases
    }
    assert not_refused(calls) == {}


def test_an_evaluation_may_sum_integers():
    sums = as_loss(lambda model, batch: (np.int32(3), 8), trains=False)(None, None)
    assert (float(sums.total), float(sums.counted)) == (3, 8)


def test_the_message_is_the_same_where_the_whole_model_is_the_unit():
    step = shard(units="model").make_train_step(lambda m, b: (m(b["x"]).sum(), 1, {"name": "text"}))
    with refused("a metric is not a number", where="metrics['name'] of loss_fn"):
        step.lower(BATCH)


# Keys


class Callable:
    def __call__(self, model, batch, key):
        raise NotImplementedError

    def method(self, model, batch, key):
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore:.*gets no random key")
def test_a_third_required_parameter_is_a_key():
    cases = [
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
    ]
    wrong = [n for n, (loss_fn, expected) in enumerate(cases) if takes_key(loss_fn) != expected]
    assert wrong == []


def test_a_loss_that_takes_other_arguments_is_refused_at_once(sharded):
    given = {
        "two more": lambda m, b, key, more: 0,
        "no batch": lambda m: 0,
        "by name": lambda m, b, *, scale: 0,
        "no function": "loss",
        "bound": functools.partial(lambda m, b, key, more: 0, b=1),
    }
    fields = {"where": "loss_fn", "expected": "loss_fn(model, batch, key)"}
    calls = {
        name: (lambda loss_fn=loss_fn: sharded.make_train_step(loss_fn), fields)
        for name, loss_fn in given.items()
    }
    assert not_refused(calls) == {}


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
def test_keys_are_new_in_each_microbatch_and_the_same_resumed(sharded, settings):
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

    fix = "labels belong in the batch, {'x': x, 'y': y}"
    with refused("computes with a random key", fix=fix):
        sharded.make_train_step(labelled).lower(BATCH)


def test_a_pair_as_the_batch_of_a_loss_of_three_is_explained(sharded):
    def labelled(model, x, y):
        return ((model(x) - y) ** 2).sum(), 1

    with pytest.raises(Exception, match="x, y = batch"):  # a note of the model's own error
        sharded.make_train_step(labelled).lower((BATCH["x"], BATCH["x"]))


def test_a_key_that_is_returned_is_told_from_a_weight(sharded):
    def weighted(model, x, weight):
        return model(x["x"]).sum(), weight

    fix = "weights and labels belong in the batch"
    with refused("returned a random key", got="(float32[], a random key)", fix=fix):
        sharded.make_train_step(weighted).lower(BATCH)


def test_a_key_with_a_default_is_warned_of(sharded):
    for loss_fn in (lambda m, b, key=None: 0, lambda m, b, rngs=None, more=1: 0):
        with pytest.warns(UserWarning, match="gets no random key.*leave the default out"):
            sharded.make_train_step(loss_fn)


# Dtypes


def squared_norm(model, batch):
    rows = (model(batch["x"]) ** 2).sum(-1)
    return rows.sum(), rows.size, {"large": (rows > 8).sum()}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(each, marks=[pytest.mark.long] * (n not in (1, 4)))
        for n, each in enumerate(SETTINGS)
    ],
)
def test_a_model_in_float64_loses_nothing(settings):
    """Sums, counts, the norm and metrics are in float64: equal to one device to 1e-14."""
    with jax.enable_x64(True):
        mesh = fsdp.make_mesh(data=4, replica=2)
        make = functools.partial(Model, dtype=jnp.float64)
        sharded = fsdp.fully_shard(make, optax.sgd(0.1), mesh, units=[Block], min_size=8)
        state, batch = sharded.init(0), {"x": BATCH["x"].astype(np.float64) * 1e-3}
        graphdef, params = nnx.split(make(nnx.Rngs(jax.random.split(jax.random.key(0))[0])))
        alone = lambda params: squared_norm(nnx.merge(graphdef, params), batch)[0]  # noqa: E731
        total, grads = jax.jit(jax.value_and_grad(alone))(params)
        # Three rows in a hundred are no number of float32.
        scaled = sharded.make_train_step(
            lambda model, batch: (squared_norm(model, batch)[0], 0.03 * 32, {}), **settings
        )
        parts = settings.get("accumulation", 1) * (8 if settings.get("local_batch") else 1)
        _, metrics = scaled(state, batch)
        np.testing.assert_allclose(metrics["loss"], total / (0.03 * 32 * parts), rtol=1e-14)
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads))) / (
            0.03 * 32 * parts
        )
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-14)
        assert {metrics[name].dtype.name for name in ("loss", "grad_norm", "count")} == {"float64"}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_model_in_float32_has_metrics_in_float32_also_under_x64(accumulation):
    with jax.enable_x64(True):
        sharded = shard()
        step = sharded.make_train_step(squared_norm, accumulation=accumulation)
        _, metrics = step(sharded.init(0), BATCH)
    assert {metrics[name].dtype.name for name in ("loss", "count", "large")} == {"float32"}
