"""float16: the loss is scaled, steps that overflow are skipped, and the scale adapts."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.sharding.mesh import make_mesh
from fsdp_jax.sharding.precision import LossScale, Precision
from fsdp_jax.step.loss_scaling import counts_as_skipped, loss_factor, next_scale, start_scale
from fsdp_jax.train.config import CheckpointConfig
from fsdp_jax.train.resume import ResumePoint, Resumer
from fsdp_jax.tree import flatten
from tests.reference import CASES, STEPS, by_path, control, make_model, optimizer, train

CASE = CASES["nnx-gpt-scanned"]
HALF = Precision(compute="float16")


def make_sharded(precision, strategy="full_shard", data=8):
    model, tx = make_model(CASE), optimizer()
    return fsdp.fully_shard(
        model,
        tx,
        make_mesh(data, devices=jax.devices()[:data]),
        strategy,
        CASE.units,
        min_size=8,
        precision=precision,
    )


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_a_step_that_overflows_is_skipped_until_the_scale_fits_and_then_it_grows():
    scaling = LossScale(initial=2.0**31, backoff=2.0**-12, growth_interval=3)
    sharded = make_sharded(Precision(compute="float16", loss_scale=scaling))
    step = sharded.make_train_step(CASE.loss, local_batch=True, abort_after=2)
    state = sharded.init(seed=0)
    scales, in_a_row = [], []
    for number in range(9):
        before = bits((state.params, state.opt_state))
        skipped = int(state.skipped)
        state, metrics = step(state, CASE.batch(number))
        scales.append(float(metrics["loss_scale"]))
        in_a_row.append(int(metrics["skipped_in_a_row"]))
        is_same = bits((state.params, state.opt_state)) == before
        assert is_same == (int(metrics["skipped"]) > skipped)
    step.finish()
    falls = int(metrics["skipped"])
    assert falls == 2, "the scale was too large"
    expected = [2.0 ** (31 - 12 * min(number, falls)) for number in range(falls + 3)]
    assert scales[: falls + 4] == [*expected, 2 * expected[-1]]
    assert in_a_row == [0] * 9, "above the minimum nothing counts towards an abort"


def test_steps_skipped_at_the_smallest_scale_abort():
    scaling = LossScale(initial=2.0**40, minimum=2.0**39)
    sharded = make_sharded(Precision(compute="float16", loss_scale=scaling))
    step = sharded.make_train_step(CASE.loss, local_batch=True, abort_after=2)
    state, counted = sharded.init(seed=0), []
    for number in range(3):
        state, metrics = step(state, CASE.batch(number))
        counted.append(int(metrics["skipped_in_a_row"]))
    assert counted == [0, 1, 2]
    with (
        pytest.warns(fsdp.SkippedStepWarning, match="step 2 was skipped"),  # the scale fell at 1
        pytest.raises(fsdp.NonFiniteError, match="2 steps in a row"),
    ):
        step.finish()


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("full_shard", {}),
        ("full_shard", {"local_batch": True, "prefetch": "pre", "accumulation": 2, "clip": 1.0}),
        ("hybrid_shard", {"local_batch": True, "deferred": True, "accumulation": 2}),
        pytest.param("zero1", {"local_batch": True}, marks=pytest.mark.long),
        pytest.param("shard_grad_op", {"accumulation": 2, "clip": 1.0}, marks=pytest.mark.long),
        ("no_shard", {"local_batch": True, "deferred": True, "accumulation": 2}),
        pytest.param("hybrid_shard_zero2", {"local_batch": True}, marks=pytest.mark.long),
    ],
)
def test_float16_trains_as_one_device_in_float32(strategy, settings):
    replica = 2 if strategy.startswith("hybrid") else 1
    mesh = make_mesh(8 // replica, replica)
    found, step = train(CASE, mesh, strategy, precision=HALF, **settings)
    wanted = control("nnx-gpt-scanned", settings.get("accumulation", 1), settings.get("clip"))
    assert step.plan.precision.scaling == LossScale()
    np.testing.assert_allclose(found[0], wanted[0], rtol=3e-5)
    # Adam moves a parameter by the learning rate at most: a skipped step would show in the mean.
    differences = [np.abs(found[1][path] - value).ravel() for path, value in wanted[1].items()]
    assert np.concatenate(differences).mean() < 2e-5
    assert np.concatenate(differences).max() < STEPS * 1e-3 / 4


def test_a_scale_is_saved_and_restored_exactly(tmp_path):
    scaling = LossScale(initial=2.0**31, backoff=2.0**-12, growth_interval=100)
    precision = Precision(compute="float16", loss_scale=scaling)
    sharded, fewer = make_sharded(precision), make_sharded(precision, "zero1", data=4)
    step = sharded.make_train_step(CASE.loss, local_batch=True)
    state = sharded.init(seed=0)
    for number in range(5):
        state, _ = step(state, CASE.batch(number))
    assert 0 < int(state.loss_scale["good_steps"]) < 5
    with CheckpointStore(tmp_path) as store:
        store.save(5, sharded.to_checkpoint(state), data={}, metadata={})
        restored, *_ = store.restore(5, fewer.checkpoint_target())
        with pytest.raises(ValueError, match=r"loss_scale/scale: expected nothing, got float32"):
            store.restore(5, make_sharded(None).checkpoint_target())
    restored = fewer.from_checkpoint(restored)
    assert bits(restored.loss_scale) == bits(state.loss_scale)
    assert by_path(restored.params).keys() == by_path(state.params).keys()


@pytest.mark.parametrize(("saved", "resumed"), [(HALF, None), (None, HALF), (HALF, HALF)])
def test_a_resumed_run_may_turn_scaling_on_or_off_and_a_line_says_so(tmp_path, saved, resumed):
    before, after = make_sharded(saved), make_sharded(resumed)
    said = []
    with CheckpointStore(tmp_path) as store:
        store.save(0, before.to_checkpoint(before.init(0)), data={}, metadata={})
        point = ResumePoint(0, {})
        state = Resumer(store, CheckpointConfig(), said.append).restore(point, after)
    assert jax.tree.structure(state) == jax.tree.structure(after.abstract_state())
    assert ("loss_scale" in str(flatten(state))) == (resumed is HALF)
    assert any("scale" in line for line in said) == (saved is not resumed)
    if resumed is HALF:
        assert float(state.loss_scale["scale"]) == LossScale().initial


def test_without_scaling_the_state_has_no_scale():
    state = make_sharded(Precision(compute="bfloat16")).abstract_state()
    assert state.loss_scale == {}


def test_a_scale_never_becomes_infinite():
    scaling = LossScale(growth_interval=1)
    scale = start_scale(scaling) | {"scale": np.float32(2.0**127)}
    assert np.isfinite(next_scale(scaling, scale, True)["scale"])


def test_the_factor_is_the_scale_over_the_rows_as_a_power_of_two():
    scale = start_scale(LossScale(initial=1024.0))
    assert [float(loss_factor(scale, rows)) for rows in (1, 2, 3, 32)] == [1024, 512, 256, 32]
    assert loss_factor({}, 32) is None


def test_a_number_is_a_scale_that_stays():
    scaling = Precision(compute="float16", loss_scale=512).scaling
    scale = start_scale(scaling)
    for finite in (True, False):
        assert float(next_scale(scaling, scale, np.bool_(finite))["scale"]) == 512


@pytest.mark.parametrize(
    ("scaling", "counts"),
    [(LossScale(), 0), (LossScale(initial=1.0), 1), (LossScale(backoff=1.0), 1)],
)
def test_skipped_steps_count_where_the_scale_does_not_fall(scaling, counts):
    assert int(counts_as_skipped(scaling, start_scale(scaling))) == counts


@pytest.mark.parametrize("precision", [Precision(), Precision(compute="bfloat16")])
def test_other_dtypes_are_not_scaled(precision):
    assert precision.scaling is None
    assert Precision(compute="bfloat16", reduce="float16").scaling == LossScale()


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: LossScale(backoff=2.0), r"loss_scale\.backoff"),
        (lambda: LossScale(growth=0.5), r"loss_scale\.growth"),
        (lambda: LossScale(initial=0.5), r"loss_scale\.initial"),
        (lambda: LossScale(growth_interval=0), r"loss_scale\.growth_interval"),
        (lambda: Precision(loss_scale=-1.0), r"loss_scale\n  expected: above 0"),
        (lambda: LossScale(initial=1e300), r"loss_scale\.initial"),
        (lambda: LossScale(minimum=0.0), r"loss_scale\.minimum"),
        (lambda: Precision(loss_scale="dynamic"), r"not a loss scale"),
        (lambda: Precision(param="float16"), r"precision\.param"),
    ],
)
def test_scales_out_of_their_limits_are_refused(make, where):
    with pytest.raises(ValueError, match=where):
        make()


def test_a_metric_of_the_loss_cannot_take_the_scales_name():
    def loss(model, batch):
        total, count = CASE.loss(model, batch)
        return total, count, {"loss_scale": total}

    step = make_sharded(HALF).make_train_step(loss)
    with pytest.raises(ValueError, match="two metrics are called 'loss_scale'"):
        step.lower(CASE.batch(0))


def test_optimizers_see_gradients_that_are_not_scaled():
    sharded = fsdp.fully_shard(
        make_model(CASE), optax.sgd(1.0), make_mesh(8), units=CASE.units, precision=HALF
    )
    state = sharded.init(seed=0)
    before = by_path(state.params)
    state, metrics = sharded.make_train_step(CASE.loss)(state, CASE.batch(0))
    moved = [np.sum((before[path] - x) ** 2) for path, x in by_path(state.params).items()]
    np.testing.assert_allclose(np.sqrt(sum(moved)), float(metrics["grad_norm"]), rtol=1e-3)


def test_parameters_that_the_model_makes_in_float16_are_refused():
    def make_model(rngs):
        return nnx.Linear(8, 8, param_dtype="float16", rngs=rngs)

    with pytest.raises(ValueError, match=r"float16(?s:.*)kernel|bias(?s:.*)param="):
        fsdp.fully_shard(
            make_model,
            optax.adam(1e-3),
            make_mesh(8),
            units="model",
            precision=Precision(param=None, compute="float16"),
        )
