"""The step and its state: sharded from the start, shardings fixed, steps skipped if not finite.

Steps are compiled and run where donation, numbers that are not finite, or what is counted across
steps is tested; a small model and one step for several tests. Refusals are read before a trace.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from reference import CASES, CNN, gpt, make_model, on_eight
from refusals import not_refused, refused
from small import SMALL, Stack, by_hand, in_the_same_memory

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.tree import flatten

pytestmark = pytest.mark.releases


@pytest.fixture(scope="module")
def sharded():
    mesh = fsdp.make_mesh(data=4, replica=2)
    return fsdp.fully_shard(
        SMALL.model, optax.adamw(1e-3), mesh, "full_shard", SMALL.units, min_size=8
    )


@pytest.fixture(scope="module")
def step(sharded):
    """A compiled step that no test has skip anything."""
    made = sharded.make_train_step(SMALL.loss)
    made(sharded.init(0), SMALL.batch(0))
    return made


@pytest.fixture(scope="module")
def images():
    case, mesh = CASES["nnx-cnn-batchnorm"], fsdp.make_mesh(data=8)
    return fsdp.fully_shard(
        make_model(case), optax.adam(1e-3), mesh, "full_shard", case.units, min_size=8
    )


def test_state_is_created_sharded_with_the_values_of_one_device(sharded):
    state = sharded.init(seed=3)
    key, _ = jax.random.split(jax.random.key(3))
    alone = nnx.state(SMALL.model(nnx.Rngs(key)), nnx.Param)
    kernel, expected = (x["blocks"]["up"]["kernel"] for x in (state.params, alone))
    # One is compiled: the last bit may differ.
    np.testing.assert_allclose(kernel, expected[...], rtol=1e-6)
    _same_shardings(sharded, state)


def _same_shardings(sharded, state):
    def check(array, expected):
        assert array.sharding.is_equivalent_to(expected.sharding, array.ndim), expected

    jax.tree.map(check, state, sharded.abstract_state())


def test_a_step_keeps_every_sharding_and_donates_the_old_state(sharded, step):
    """Donation that fails silently would double the state: nearly all of it must be aliased."""
    old = sharded.init(0)
    state, metrics = step(old, SMALL.batch(0))
    _same_shardings(sharded, state)
    assert old.params["enter"]["kernel"].is_deleted(), "donated"
    assert int(state.step) == 1
    assert set(metrics) == {"loss", "grad_norm", "count", "skipped", "skipped_in_a_row"}
    stats = step.compiled.memory_analysis()
    assert stats.alias_size_in_bytes >= 0.95 * sharded.layout.per_device()
    with refused("donated to an earlier step", where="state", fix="state, metrics = step"):
        step(old, SMALL.batch(0))


def test_donated_arrays_are_refused_by_name_wherever_a_state_is_used(sharded, step, tmp_path):
    """XLA ends the process where a program on several devices is passed one of them."""
    old = sharded.init(0)
    partly = dataclasses.replace(sharded.init(1), params=old.params)
    step(old, SMALL.batch(0))
    whole = {"what": "this state was donated", "fix": "jax.tree.map(jnp.copy"}
    count = len(flatten(old.params))
    some = {"what": f"{count} of {len(flatten(old))} arrays", "got": "params/blocks/down/kernel"}
    store = CheckpointStore(tmp_path)
    calls = {
        "step": lambda state: step(state, SMALL.batch(0)),
        "evaluation": lambda state: sharded.make_eval_step(SMALL.loss)(state, SMALL.batch(0)),
        "apply": lambda state: sharded.apply(lambda model: model)(state),
        "model": sharded.model,
        "to_checkpoint": sharded.to_checkpoint,
        "save": lambda state: store.save(1, (state,), data={}, metadata={}),
    }
    cases = {}
    for name, call in calls.items():
        cases[f"{name}, whole"] = functools.partial(call, old), whole
        cases[f"{name}, partly"] = functools.partial(call, partly), some
    cases["init"] = (lambda: sharded.init(0, old.params), {"where": "params", "got": "enter/bias"})
    assert not_refused(cases) == {}


def test_parameters_that_another_state_holds_are_copied(sharded, step):
    first = sharded.init(0)
    second = sharded.init(1, first.params)
    _, expected = step(first, SMALL.batch(0))
    _, metrics = step(second, SMALL.batch(0))
    assert float(metrics["loss"]) == float(expected["loss"])


def test_one_array_at_two_places_of_a_state_is_refused(sharded, step):
    state = sharded.init(0)
    first, second = state.opt_state[0].mu["enter"], state.opt_state[0].nu["enter"]
    fields = {"where": "opt_state/0/mu/enter/kernel", "got": "0/nu/"}
    for again in (lambda x: x, in_the_same_memory):
        second["kernel"] = again(first["kernel"])
        with refused("one array is at two places", **fields):
            step(state, SMALL.batch(0))
    # Two states that share memory have it at one place each.
    state, _ = step(sharded.init(0), SMALL.batch(0))
    params = state.params | {"leave": jax.tree.map(in_the_same_memory, state.params["leave"])}
    step(dataclasses.replace(state, params=params), SMALL.batch(1))
    assert state.params["leave"]["kernel"].is_deleted()


def test_an_array_of_the_state_in_the_batch_is_refused(sharded):
    other = sharded.on(fsdp.make_mesh(data=8))
    step, state = other.make_train_step(SMALL.loss), other.init(0)
    kernel = state.params["leave"]["kernel"]
    assert kernel.sharding.is_equivalent_to(step.batch_sharding, kernel.ndim)
    for again in (lambda x: x, in_the_same_memory):
        with refused("an array of the state that the batch has too", where="batch/x"):
            step(state, SMALL.batch(0, rows=16) | {"x": again(kernel)})


def test_a_state_of_another_optimizer_is_refused(sharded, step):
    """Before the first program and after it; adam's state has the arrays of adamw's."""
    mesh, first = sharded.layout.mesh, sharded.make_train_step(SMALL.loss)
    adam, sgd = (sharded.on(mesh, tx=tx(1e-3)) for tx in (optax.adam, optax.sgd))
    pure, predict = sharded.pure_step(SMALL.loss), sharded.apply(lambda model, x: model(x))
    arrays, structure = {"where": "opt_state/0/count"}, {"where": "opt_state", "got": "EmptyState"}
    cases = {}
    for name, other, fields in (("sgd", sgd, arrays), ("adam", adam, structure)):
        state, batch = other.init(0), SMALL.batch(0)
        calls = {
            "first": functools.partial(first, state, batch),
            "later": functools.partial(step, state, batch),
            "pure": functools.partial(pure, other.abstract_state(), batch),
            "apply": functools.partial(predict, state, batch["x"]),
        }
        cases |= {f"{name}, {call}": (fn, fields) for call, fn in calls.items()}
    assert not_refused(cases) == {}


def test_a_compiled_step_inside_a_trace_points_to_one_that_may_be_traced(sharded, step):
    state, batch = sharded.init(0), SMALL.batch(0)
    evaluate = sharded.make_eval_step(SMALL.loss)
    calls = {
        "jit": (lambda: jax.jit(step)(state, batch), "pure_step"),
        "jit of a batch": (lambda: jax.jit(lambda batch: step(state, batch))(batch), "pure_step"),
        "scan": (lambda: jax.lax.scan(lambda s, _: step(s, batch), state, length=2), "pure_step"),
        "eval_shape": (lambda: jax.eval_shape(step, state, batch), "pure_step"),
        "evaluation": (lambda: jax.jit(evaluate)(state, batch), "sharded.apply(loss_fn)"),
    }
    assert not_refused({name: (call, {"fix": fix}) for name, (call, fix) in calls.items()}) == {}


def test_a_loss_that_closes_over_another_state_is_refused_once_that_was_trained(sharded, step):
    """The step has the numbers of before as constants."""
    state, other = sharded.init(0), sharded.init(1)
    teacher = sharded.model(other)

    def loss(model, batch):
        return ((model(batch["x"]) - teacher.leave(teacher.enter(batch["x"]))) ** 2).sum(), 32

    distill = sharded.make_train_step(loss)
    state, _ = distill(state, SMALL.batch(0))
    state, _ = distill(state, SMALL.batch(1))
    step(other, SMALL.batch(0))
    calls = [
        lambda: distill(state, SMALL.batch(2)),
        lambda: sharded.make_train_step(loss).lower(SMALL.batch(0)),
    ]
    what = "closes over arrays that were donated"
    fields = {"what": what, "where": "loss_fn", "fix": "others={'teacher': sharded}"}
    assert not_refused({str(n): (call, fields) for n, call in enumerate(calls)}) == {}


def test_a_negative_count_trains_nothing(sharded, step):
    state, batch = sharded.init(0), SMALL.batch(0)
    before = np.asarray(state.params["enter"]["kernel"])
    state, metrics = step(state, batch | {"weight": -batch["weight"]})
    assert (int(metrics["skipped"]), float(metrics["count"])) == (1, -batch["weight"].sum())
    np.testing.assert_array_equal(state.params["enter"]["kernel"], before)
    with pytest.warns(fsdp.SkippedStepWarning, match="count of 0 or less"):
        step.finish()
    step(state, batch)
    step.finish()


def poisoned(case, step):
    batch = case.batch(step)
    return batch | {"x": batch["x"] * np.nan}


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(images):
    case = CASES["nnx-cnn-batchnorm"]
    step, state = images.make_train_step(case.loss), images.init(0)
    state, _ = step(state, case.batch(0))
    before = jax.device_get((state.params, state.opt_state, state.model_state))
    state, metrics = step(state, poisoned(case, 1))
    assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (1, 1)
    assert not np.isfinite(float(metrics["grad_norm"]))
    jax.tree.map(
        np.testing.assert_array_equal,
        before,
        jax.device_get((state.params, state.opt_state, state.model_state)),
    )
    state, metrics = step(state, case.batch(2))
    assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"]), int(state.step)) == (1, 0, 3)


def spoils_the_state_from(step, rate=1e-2):
    """An optimizer whose learning rate is infinite after so many steps."""
    return optax.adam(lambda count: jnp.where(count >= step, jnp.inf, rate))


@pytest.mark.parametrize(
    ("strategy", "way"), [("full_shard", {}), ("zero1", {"local_batch": True})]
)
def test_an_update_that_would_spoil_the_state_is_skipped(strategy, way):
    sharded = on_eight(
        SMALL.model,
        spoils_the_state_from(1),
        strategy=strategy,
        units=SMALL.units,
        precision=fsdp.Precision(compute="bfloat16"),
        min_size=16,
    )
    step, state = sharded.make_train_step(SMALL.loss, abort_after=2, **way), sharded.init(0)
    state, _ = step(state, SMALL.batch(0))
    before = jax.device_get((state.params, state.copies, state.opt_state))
    state, metrics = step(state, SMALL.batch(1))
    assert np.isfinite([float(metrics["loss"]), float(metrics["grad_norm"])]).all()
    assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (1, 1)
    # All but the optimizer's counts: the schedule goes on.
    before = jax.tree.map(lambda x: x + (x.dtype == np.int32), before)
    after = jax.device_get((state.params, state.copies, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    step(state, SMALL.batch(2))
    with (
        pytest.warns(fsdp.SkippedStepWarning, match=r"loss is \d.*make the state infinite or NaN"),
        pytest.raises(fsdp.NonFiniteError, match="their loss, gradients or new state were not"),
    ):
        step.finish()


@pytest.mark.filterwarnings("ignore:step 1 was skipped:fsdp_jax.SkippedStepWarning")
def test_an_update_that_spoils_some_numbers_keeps_these():
    def spoil(updates, params):
        return jax.tree.map(lambda u: u.at[(0,) * u.ndim].set(jnp.nan), updates)

    tx = optax.chain(optax.adam(1e-2), optax.stateless(spoil))
    sharded = fsdp.fully_shard(SMALL.model, tx, fsdp.make_mesh(data=8), min_size=16)
    step, state = sharded.make_train_step(SMALL.loss), sharded.init(0)
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, SMALL.batch(0))
    assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (1, 1)
    step.finish()
    after = flatten(jax.device_get((state.params, state.opt_state)))
    for path, old in flatten(before).items():
        new = after[path]
        assert np.isfinite(new).all(), path
        if path.endswith("count"):
            assert new == old + 1
            continue
        first = (0,) * new.ndim
        assert new[first] == old[first], path
        assert (new != old).mean() > 0.8, path


class Scaled(nnx.Module):
    """Multiplies by a parameter, after it has added another, by default 0."""

    def __init__(self, shift=(0.0, 0.0, 0.0, 0.0)):
        self.scale, self.shift = nnx.Param(jnp.ones((1, 4))), nnx.Param(jnp.array([shift]))

    def __call__(self, x):
        return x * self.scale[...] + self.shift[...]


def sum_of_squares(model, batch):
    y = model(batch["x"])
    return jnp.sum(jnp.where(jnp.isinf(y), 0, y) ** 2), len(y)


@pytest.mark.filterwarnings("ignore:step 2 was skipped:fsdp_jax.SkippedStepWarning")
def test_counts_of_an_optimizer_move_where_numbers_are_kept():
    """Accumulated gradients were cleared, and the next one applied as a whole update."""
    tx = optax.MultiSteps(optax.sgd(1e30), 2).gradient_transformation()
    sharded = fsdp.fully_shard(lambda rngs: Scaled(), tx, fsdp.make_mesh(data=8))
    step, state = sharded.make_train_step(lambda m, b: (m(b["x"]).sum(), 8)), sharded.init(0)
    small, large = {}, {}
    small["x"] = np.full((8, 4), 1e-32, np.float32)
    large["x"] = small["x"] + np.array([[1e9, 0, 0, 0]], np.float32)
    state, _ = step(state, small)
    state, metrics = step(state, large)
    assert int(metrics["skipped"]) == 1
    # The first number would have become -infinity.
    np.testing.assert_allclose(state.params["scale"], [[1, 0.99, 0.99, 0.99]])
    assert (int(state.opt_state.mini_step), int(state.opt_state.gradient_step)) == (0, 1)
    state, _ = step(state, small)
    np.testing.assert_allclose(state.params["scale"], [[1, 0.99, 0.99, 0.99]])
    state, metrics = step(state, small)
    np.testing.assert_allclose(state.params["scale"], [[0.99, 0.98, 0.98, 0.98]])
    assert int(metrics["skipped"]) == 1
    step.finish()


def test_a_parameter_with_moments_may_be_infinite_from_the_start():
    """AdamW's update of -infinity is NaN."""
    tx = optax.adamw(1e-2, weight_decay=0.1)
    model = lambda rngs: Scaled((0.0, 0.0, -jnp.inf, 0.0))  # noqa: E731
    sharded = fsdp.fully_shard(model, tx, fsdp.make_mesh(data=8), min_size=1)
    step, state = sharded.make_train_step(sum_of_squares, abort_after=2), sharded.init(0)
    for number in range(3):
        x = np.random.default_rng(number).normal(size=(8, 4)).astype(np.float32)
        state, metrics = step(state, {"x": x})
        assert int(metrics["skipped"]) == 0
    step.finish()
    (shift,) = np.asarray(state.params["shift"])
    assert shift[2] == -np.inf
    assert np.isfinite(shift[[0, 1, 3]]).all()
    assert shift[[0, 1, 3]].all(), "they have moved"


def test_states_of_optimizers_may_be_infinite_or_numbers_of_python():
    def init(params):
        numbers = {"count": jnp.int32(3), "rate": jnp.float32(2.0), "done": jnp.bool_(False)}
        return numbers | {"best": jnp.float32(jnp.inf), "mask": jnp.array([0.0, -jnp.inf])}

    def update(updates, state, params=None):
        return updates, state | {"count": 4, "rate": 0.5, "done": True}

    tx = optax.chain(optax.sgd(1e-2), optax.GradientTransformation(init, update))
    sharded = fsdp.fully_shard(lambda rngs: Scaled(), tx, fsdp.make_mesh(data=8), min_size=16)
    step, state = sharded.make_train_step(sum_of_squares), sharded.init(0)
    state, metrics = step(state, {"x": np.ones((8, 4), np.float32)})
    assert int(metrics["skipped"]) == 0
    found = jax.device_get(state.opt_state[1])
    assert (found["count"], found["done"], found["rate"], found["best"]) == (4, True, 0.5, np.inf)
    np.testing.assert_array_equal(found["mask"], [0, -np.inf])


def test_too_many_skipped_steps_in_a_row_abort(sharded):
    step, state = sharded.make_train_step(SMALL.loss, abort_after=3), sharded.init(0)
    before = jax.device_get(state.params)
    states = []

    def run(state, count):
        for number in range(count):
            state, _ = step(state, poisoned(SMALL, number))
            states.append(state)

    with (
        pytest.warns(fsdp.SkippedStepWarning, match="step 1 was"),
        pytest.raises(fsdp.NonFiniteError, match="3 steps in a row were skipped"),
    ):
        run(state, 10)
    assert len(states) < 6
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(states[-1].params))
    # Counters that are still in flight.
    run(sharded.init(0), 3)
    with pytest.raises(fsdp.NonFiniteError, match="3 steps in a row"):
        step.finish()


def test_the_first_skipped_step_in_a_row_is_a_warning(sharded, step):
    other = sharded.make_train_step(SMALL.loss, abort_after=4)
    state, _ = step(sharded.init(0), SMALL.batch(0))  # steps are numbered in the state
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in (1, 2):
            state, _ = other(state, poisoned(SMALL, number))
        state, _ = other(state, SMALL.batch(3))
        assert [str(each.message).splitlines()[0] for each in caught] == [
            "step 2 was skipped: its loss is nan; the state stays as it was"
        ]
        # Where the call is, with the fix.
        assert caught[0].filename == __file__
        assert "4 in a row end the run" in str(caught[0].message)
        state, _ = other(state, poisoned(SMALL, 4))
        other.finish()
    assert [str(each.message)[:6] for each in caught] == ["step 2", "step 5"]


def test_a_step_whose_gradients_alone_are_not_finite_says_so(sharded):
    def infinite_slope(model, batch):
        total, count = SMALL.loss(model, batch)
        return total + jnp.sqrt(0 * model.leave.bias[...]).sum(), count

    step = sharded.make_train_step(infinite_slope)
    step(sharded.init(0), SMALL.batch(0))
    with pytest.warns(fsdp.SkippedStepWarning, match=r"loss is \d.*norm of its gradients nan"):
        step.finish()


# Batches and states that are refused


def test_a_batch_with_other_names_is_refused(sharded, step):
    with refused("another signature", where="batch/y", expected="float32", got="nothing"):
        step(sharded.init(0), {"x": SMALL.batch(1)["x"], "weight": SMALL.batch(1)["weight"]})


def test_another_models_state_names_the_leaf(sharded, images):
    step = sharded.make_train_step(SMALL.loss)
    with refused("another signature", where="model_state/norm/mean", expected="nothing"):
        step(images.init(0), SMALL.batch(0))


def test_a_batch_that_does_not_divide_is_refused(sharded):
    step = sharded.make_train_step(SMALL.loss, accumulation=2)
    fields = {
        "what": "cannot be split evenly",
        "where": "batch",
        "expected": "16 rows: 8 devices of this process x accumulation 2",
        "fix": "16 or 32",
    }
    cases = {
        f"{rows} rows": (
            lambda rows=rows: step.put(SMALL.batch(0, rows)),
            fields | {"got": str(rows)},
        )
        for rows in (0, 7, 12)
    }
    assert not_refused(cases) == {}


def test_padded_rows_count_for_nothing_in_an_evaluation(sharded):
    batch = {"tokens": np.arange(10.0).reshape(5, 2), "weights": np.array([1, 1, 1, 2, 2])}
    padded, mask = fsdp.pad_rows(batch, 8)
    assert padded["tokens"].shape == (8, 2)
    assert mask.tolist() == [True] * 5 + [False] * 3
    assert padded["tokens"][5:].tolist() == [[0, 1]] * 3
    assert fsdp.pad_rows(padded, 8)[1].all()

    def loss(model, batch):
        del model
        rows = batch["tokens"].sum(1) * batch["weights"]
        return jnp.sum(jnp.where(batch["mask"], rows, 0)), jnp.sum(batch["mask"])

    step = sharded.make_eval_step(loss)
    total, count = step(sharded.init(0), padded | {"mask": mask})
    assert (total, count) == (1 + 5 + 9 + 13 * 2 + 17 * 2, 5)
    with refused("not rows", where="batch"):
        fsdp.pad_rows({"a": np.ones(3), "b": np.ones(2)}, 8)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_arrays_on_devices_do_not_pass_through_the_host(sharded, step, monkeypatch, accumulation):
    batch = SMALL.batch(0)
    if accumulation > 1:
        step = sharded.make_train_step(SMALL.loss, accumulation=accumulation)
    expected = jax.tree.map(np.asarray, step.put(batch).leaves)
    rows = NamedSharding(fsdp.make_mesh(data=8), PartitionSpec("data"))
    kinds = {
        "placed": jax.device_put(batch, rows),
        "on one": jax.device_put(batch, jax.devices()[3]),
    }
    kinds["mixed"] = kinds["placed"] | {"x": batch["x"]}

    def refuse(*_, **__):
        raise AssertionError("through the host")

    with monkeypatch.context() as patch:
        patch.setattr(type(jnp.ones(1)), "__array__", refuse)
        found = {kind: step.put(given).leaves for kind, given in kinds.items()}
    for leaves in found.values():
        jax.tree.map(np.testing.assert_array_equal, leaves, expected)
    if accumulation == 1:
        before, after = (
            leaves["x"].addressable_data(5) for leaves in (kinds["placed"], found["placed"])
        )
        assert before.unsafe_buffer_pointer() == after.unsafe_buffer_pointer()
        _, metrics = step(sharded.init(0), kinds["placed"])
        _, same = step(sharded.init(0), batch)
        assert float(metrics["loss"]) == float(same["loss"])


def test_batch_leaves_without_rows_of_numbers_are_refused(sharded):
    step, batch = sharded.make_train_step(SMALL.loss), SMALL.batch(0)
    key = {"what": "a random key in the batch", "fix": "the model's own streams"}
    leaves = {
        "a number": (
            3.5,
            {"what": "a scalar in the batch", "got": "float64[]", "fix": "numpy.full(rows, value)"},
        ),
        "a shape": (jax.ShapeDtypeStruct((), "int32"), {"what": "a scalar in the batch"}),
        "a key": (jax.random.key(0), key),
        "keys": (jax.random.split(jax.random.key(0), 32), key),
        "text": (np.array(["text"] * 32), {"what": "text in the batch"}),
        "a text": ("text", {"what": "text in the batch"}),
        "objects": (np.array([None] * 32), {"what": "not numbers in the batch", "got": "object"}),
        "long": (np.ones(32, np.longdouble), {"what": "not numbers in the batch"}),
        "masked": (np.ma.ones(32), {"what": "a masked array", "fix": "x.filled(0) and ~x.mask"}),
    }
    cases = {
        f"{name}, {use.__name__}": (
            lambda use=use, leaf=leaf: use(batch | {"extra": leaf}),
            fields | {"where": "batch/extra"},
        )
        for name, (leaf, fields) in leaves.items()
        for use in (step.put, step.lower)
    }
    cases["other rows"] = (
        lambda: step.put(batch | {"y": batch["y"][:8]}),
        {"what": "differ in their rows", "where": "batch", "fix": "close over it in the loss"},
    )
    mixed = {"what": "keys that cannot be sorted", "where": "batch"}
    cases["keys of two types"] = lambda: step.put(batch | {1: batch["x"]}), mixed
    cases["the same in a call"] = lambda: step(sharded.init(0), batch | {1: batch["x"]}), mixed
    assert not_refused(cases) == {}
    swapped = batch | {"x": batch["x"].astype(">f4")}
    np.testing.assert_array_equal(step.put(swapped).leaves["x"], batch["x"])


def test_evaluation_keeps_the_state_and_switches_to_inference(images):
    case = CASES["nnx-cnn-batchnorm"]
    state, evaluate = images.init(0), images.make_eval_step(case.loss)
    total, count = evaluate(state, case.batch(0))
    again, _ = evaluate(state, case.batch(0))
    assert float(total) == float(again)
    assert float(count) == 32
    running = nnx.merge(*nnx.split(images.model(state)))
    running.eval()
    expected, _ = jax.jit(lambda batch: case.loss(running, batch))(case.batch(0))
    np.testing.assert_allclose(float(total), float(expected), rtol=1e-5)


def test_apply_runs_any_function_of_the_model(sharded):
    state, x = sharded.init(0), SMALL.batch(0)["x"]
    found = sharded.apply(lambda model, x: model(x))(state, x)
    np.testing.assert_allclose(found, by_hand(state.params, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scan", [True, False])
def test_apply_inside_a_loop_of_the_users(scan):
    """In mixed precision and with dropout, whose streams the loop may not write: by its trace."""
    case, precision = CASES["nnx-gpt-scanned"], fsdp.Precision(compute="bfloat16")
    sharded = fsdp.fully_shard(
        gpt(scan, dropout=0.5),
        optax.adam(1e-3),
        fsdp.make_mesh(data=8),
        units=case.units,
        precision=precision,
    )

    def twice(model, tokens):
        return jax.lax.fori_loop(
            0, 2, lambda _, t: jnp.argmax(model(t), -1).astype(t.dtype), tokens
        )

    tokens = case.batch(0)["tokens"][:, :-1]
    found = jax.eval_shape(sharded.apply(twice), sharded.abstract_state(), tokens)
    assert found.shape == tokens.shape


def test_a_line_search_is_refused_with_the_fix():
    sharded = fsdp.fully_shard(SMALL.model, optax.lbfgs(), fsdp.make_mesh(data=8))
    with refused("wants to evaluate the loss again", where="optimizer", fix="linesearch=None"):
        sharded.make_train_step(SMALL.loss).lower(SMALL.batch(0))


def test_invalid_settings_are_refused(sharded):
    def shard(**settings):
        arguments = {"tx": optax.adam(1e-3), "mesh": fsdp.make_mesh(data=4, replica=2)}
        return fsdp.fully_shard(**{"model": SMALL.model, **arguments, **settings})

    class_fix = {"what": "a class, not a model", "fix": "lambda rngs: Stack("}
    replicas = {"rules": [("enter", ("replica",))], "strategy": "hybrid_shard"}
    cases = [
        ({"strategy": "ful_shard"}, {"what": "unknown strategy 'ful_shard'", "fix": "full_shard"}),
        ({"remat": "ful"}, {"what": "unknown remat 'ful'", "fix": "'full'? Or a policy"}),
        ({"units": []}, {"what": "no units", "where": "units"}),
        ({"precision": "bfloat16"}, {"what": "not a Precision"}),
        ({"tx": 1e-3}, {"what": "not an optax transformation", "where": "tx"}),
        ({"mesh": 8}, {"what": "not a mesh"}),
        ({"loss_spikes": True}, {"what": "not a LossSpikes"}),
        ({"strict": "no"}, {"what": "not a bool"}),
        ({"model": Stack}, class_fix),
        ({"frozen": ["embod"]}, {"what": "matches no parameter", "where": "frozen"}),
        ({"frozen": "embed"}, {"what": "not a sequence of patterns"}),
        (replicas, {"what": "hybrid_shard replicates along 'replica'"}),
    ]
    calls = {str(given): (lambda given=given: shard(**given), text) for given, text in cases}
    for name, value in [("clip", 0.0), ("clip", -1.0), ("accumulation", 0), ("accumulation", 2.0)]:
        calls[f"{name} {value}"] = (
            lambda given={name: value}: sharded.make_train_step(SMALL.loss, **given),
            {"what": name},
        )
    assert not_refused(calls) == {}


def test_a_model_that_cannot_be_made_in_shards_is_refused():
    mesh = fsdp.make_mesh(data=8)
    model = CNN(rngs=nnx.Rngs(0))
    for made in (model, lambda rngs: model):  # the seed would have no effect on the second
        with refused("in memory, unsharded", fix="CNN(rngs=rngs)"):
            fsdp.fully_shard(made, optax.adam(1e-3), mesh)
    with refused("needs example inputs", fix="inputs="):
        fsdp.fully_shard(CASES["linen-transformer"].model, optax.adam(1e-3), mesh)


def test_a_batch_put_for_another_step_is_refused(sharded):
    four = sharded.make_train_step(SMALL.loss, accumulation=4).put(SMALL.batch(0))
    with refused("cut for another step", where="batch", expected="1 microbatches", got="4"):
        sharded.make_eval_step(SMALL.loss)(sharded.init(0), four)


@pytest.mark.parametrize("table", [np.arange, jnp.arange])
def test_tables_that_are_plain_attributes(table):
    """NumPy arrays are constants of the model; JAX arrays are state."""

    class Rotary(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.table = nnx.Linear(4, 4, rngs=rngs), table(4.0)[None]

        def __call__(self, x):
            return {
                "y": self.linear(x * self.table),
                "name": "a unit may return what is not an array",
            }

    def loss(model, batch):
        return (model(batch["x"])["y"] ** 2).sum(), batch["x"].shape[0]

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner = Rotary(rngs)

        def __call__(self, x):
            return self.inner(x)

    sharded = fsdp.fully_shard(
        lambda rngs: Model(rngs), optax.sgd(0.1), fsdp.make_mesh(data=8), units=[Rotary]
    )
    _, metrics = sharded.make_train_step(loss)(sharded.init(0), {"x": np.ones((8, 4), np.float32)})
    assert np.isfinite(float(metrics["loss"]))
