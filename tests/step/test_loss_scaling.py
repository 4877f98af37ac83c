"""float16: the loss is scaled, steps that overflow are skipped, and the scale adapts.

Steps are compiled and run: that float16 overflows, and what is then kept, no trace shows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import CASES, STEPS, by_path, control, optimizer, train
from refusals import not_refused, refused
from small import SMALL

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.sharding.mesh import make_mesh
from fsdp_jax.sharding.precision import LossScale, Precision
from fsdp_jax.step.loss_scaling import (
    counts_as_skipped,
    loss_factor,
    next_scale,
    start_scale,
    within_limits,
)
from fsdp_jax.train.config import CheckpointConfig
from fsdp_jax.train.resume import ResumePoint, Resumer
from fsdp_jax.tree import flatten

CASE = CASES["nnx-gpt-scanned"]
HALF = Precision(compute="float16")
TOO_LARGE = Precision(
    compute="float16",
    loss_scale=LossScale(initial=2.0**31, backoff=2.0**-12, growth_interval=3),
)


def make_sharded(precision, strategy="full_shard", data=8, tx=None):
    mesh = make_mesh(data, devices=jax.devices()[:data])
    return fsdp.fully_shard(
        SMALL.model,
        tx or optimizer(),
        mesh,
        strategy,
        SMALL.units,
        min_size=8,
        precision=precision,
    )


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def too_large():
    """A sharded model and its step, whose scale is too large at first."""
    sharded = make_sharded(TOO_LARGE)
    return sharded, sharded.make_train_step(SMALL.loss, local_batch=True, abort_after=2)


def test_overflows_are_skipped_until_the_scale_fits_and_it_grows(too_large):
    sharded, step = too_large
    state = sharded.init(seed=0)
    scales, in_a_row = [], []
    for number in range(9):
        before = bits((state.params, state.opt_state))
        skipped = int(state.skipped)
        state, metrics = step(state, SMALL.batch(number))
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
    step = sharded.make_train_step(SMALL.loss, local_batch=True, abort_after=2)
    state, counted = sharded.init(seed=0), []
    for number in range(3):
        state, metrics = step(state, SMALL.batch(number))
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
        ("full_shard", {"local_batch": True, "prefetch": "pre", "accumulation": 2, "clip": 1.0}),
        pytest.param("full_shard", {}, marks=pytest.mark.long),
        pytest.param("zero1", {"local_batch": True}, marks=pytest.mark.long),
        pytest.param("shard_grad_op", {"accumulation": 2, "clip": 1.0}, marks=pytest.mark.long),
        pytest.param(
            "hybrid_shard",
            {"local_batch": True, "deferred": True, "accumulation": 2},
            marks=pytest.mark.long,
        ),
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


def test_a_scale_is_saved_and_restored_exactly(tmp_path, too_large):
    sharded, step = too_large
    fewer = make_sharded(TOO_LARGE, "zero1", data=4)
    state = sharded.init(seed=0)
    for number in range(4):
        state, _ = step(state, SMALL.batch(number))
    assert int(state.loss_scale["good_steps"]) == 2
    with CheckpointStore(tmp_path) as store:
        store.save(4, sharded.to_checkpoint(state), data={}, metadata={})
        restored, *_ = store.restore(4, fewer.checkpoint_target())
    restored = fewer.from_checkpoint(restored)
    assert bits(restored.loss_scale) == bits(state.loss_scale)
    assert by_path(restored.params).keys() == by_path(state.params).keys()


@pytest.mark.parametrize(("saved", "resumed"), [(HALF, None), (None, HALF), (HALF, HALF)])
def test_a_resumed_run_may_turn_scaling_on_or_off(tmp_path, saved, resumed):
    before, after = make_sharded(saved), make_sharded(resumed)
    said = []
    with CheckpointStore(tmp_path) as store:
        store.save(0, before.to_checkpoint(before.init(0)), data={}, metadata={})
        point = ResumePoint(0, {})
        state = Resumer(store, CheckpointConfig(), said.append).restore(point, after)
        restored, *_ = store.restore(0, after.checkpoint_target())
    own = jax.tree.structure(after.abstract_state())
    assert jax.tree.structure(state) == jax.tree.structure(after.from_checkpoint(restored)) == own
    assert ("loss_scale" in str(flatten(state))) == (resumed is HALF)
    assert any("scale" in line for line in said) == (saved is not resumed)
    if resumed is HALF:
        assert float(state.loss_scale["scale"]) == LossScale().initial


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (LossScale(initial=64.0, minimum=16.0), 2.0**15),
        (LossScale(initial=2.0**20, minimum=2.0**18), 2.0**18),
        (LossScale(initial=64.0, growth=1.0), 64.0),
        (LossScale(initial=2.0**20, backoff=1.0), 2.0**20),
        (Precision(loss_scale=8.0).scaling, 8.0),
    ],
)
def test_a_restored_scale_is_within_the_limits_of_the_run(scaling, expected):
    saved = {"scale": jnp.float32(2.0**15), "good_steps": jnp.int32(7)}
    assert within_limits(scaling, saved) == saved | {"scale": expected}


def test_a_fixed_scale_counts_on_resume_and_is_told(tmp_path):
    before = make_sharded(HALF)
    after = make_sharded(Precision(compute="float16", loss_scale=8.0))
    said = []
    with CheckpointStore(tmp_path) as store:
        store.save(0, before.to_checkpoint(before.init(0)), data={}, metadata={})
        resumer = Resumer(store, CheckpointConfig(), said.append)
        scale = resumer.restore(ResumePoint(0, {}), after).loss_scale["scale"]
    assert float(scale) == 8.0
    assert scale.sharding == after.state_shardings().loss_scale["scale"]
    assert said[-1].startswith("note: the loss scale is 8,")
    assert "65536" in said[-1]


def test_a_store_restores_what_was_saved_with_other_options(tmp_path):
    """Spikes and scales come and go between runs: `from_checkpoint` takes them, or starts anew."""
    kinds = {
        "neither": make_sharded(None),
        "scale": make_sharded(HALF),
        "spikes": make_sharded(None).on(make_mesh(8), loss_spikes=fsdp.LossSpikes(window=16)),
        "window": make_sharded(HALF).on(make_mesh(8), loss_spikes=fsdp.LossSpikes(window=20)),
    }
    with CheckpointStore(tmp_path) as store:
        for step, kind in enumerate(["neither", "window"]):
            state = kinds[kind].init(0)
            store.save(step, kinds[kind].to_checkpoint(state), data={}, metadata={})
        for step in range(2):
            for name, sharded in kinds.items():
                target = sharded.checkpoint_target()
                assert store.preflight(step, target).differences == (), (step, name)
        restored, *_ = store.restore(1, kinds["spikes"].checkpoint_target())
    state = kinds["spikes"].from_checkpoint(restored)
    assert jax.tree.structure(state) == jax.tree.structure(kinds["spikes"].abstract_state())


def test_other_dtypes_are_not_scaled():
    assert make_sharded(Precision(compute="bfloat16")).abstract_state().loss_scale == {}
    assert Precision().scaling is None
    assert Precision(compute="bfloat16").scaling is None
    assert Precision(compute="bfloat16", reduce="float16").scaling == LossScale()


def test_a_scale_never_becomes_infinite():
    scaling = LossScale(growth_interval=1)
    scale = start_scale(scaling) | {"scale": np.float32(2.0**127)}
    assert np.isfinite(next_scale(scaling, scale, True)["scale"])


def test_the_factor_is_the_scale_over_a_power_of_two_of_rows():
    scale = start_scale(LossScale(initial=1024.0))
    assert [float(loss_factor(scale, rows)) for rows in (1, 2, 3, 32)] == [1024, 512, 256, 32]
    assert loss_factor({}, 32) is None


def test_a_number_is_a_scale_that_stays():
    scaling = Precision(compute="float16", loss_scale=512).scaling
    scale = start_scale(scaling)
    for finite in (True, False):
        assert float(next_scale(scaling, scale, np.bool_(finite))["scale"]) == 512


def test_skipped_steps_count_where_the_scale_does_not_fall():
    counts = {LossScale(): 0, LossScale(initial=1.0): 1, LossScale(backoff=1.0): 1}
    found = {scaling: int(counts_as_skipped(scaling, start_scale(scaling))) for scaling in counts}
    assert found == counts


def test_scales_out_of_their_limits_are_refused():
    of_scale = [{"backoff": 2.0}, {"growth": 0.5}, {"initial": 0.5}, {"growth_interval": 0}]
    of_scale += [{"initial": 1e300}, {"minimum": 0.0}]
    cases = {
        str(given): (
            lambda given=given: LossScale(**given),
            {"where": f"precision.loss_scale.{next(iter(given))}"},
        )
        for given in of_scale
    }
    of_precision = {
        "below 0": ({"loss_scale": -1.0}, "loss_scale", "above 0"),
        "text": ({"loss_scale": "dynamic"}, "loss_scale", ""),
        "parameters": ({"param": "float16"}, "param", ""),
    }
    cases |= {
        name: (
            lambda given=given: Precision(**given),
            {"where": f"precision.{where}", "expected": expected},
        )
        for name, (given, where, expected) in of_precision.items()
    }
    assert not_refused(cases) == {}


def test_a_metric_of_the_loss_cannot_take_the_scales_name():
    def loss(model, batch):
        total, count = SMALL.loss(model, batch)
        return total, count, {"loss_scale": total}

    with refused("two metrics are called 'loss_scale'", where="loss_fn"):
        make_sharded(HALF).make_train_step(loss).lower(SMALL.batch(0))


def test_optimizers_see_gradients_that_are_not_scaled():
    sharded = make_sharded(Precision(compute="float16", loss_scale=512), tx=optax.sgd(1.0))
    state = sharded.init(seed=0)
    before = by_path(state.params)
    state, metrics = sharded.make_train_step(SMALL.loss)(state, SMALL.batch(0))
    moved = [np.sum((before[path] - x) ** 2) for path, x in by_path(state.params).items()]
    np.testing.assert_allclose(np.sqrt(sum(moved)), float(metrics["grad_norm"]), rtol=1e-3)


def test_parameters_that_the_model_makes_in_float16_are_refused():
    def make_model(rngs):
        return nnx.Linear(8, 8, param_dtype="float16", rngs=rngs)

    precision = Precision(param=None, compute="float16")
    for given in (precision, None):
        with refused("float16", where="bias", got="kernel: float16", fix='param="float32"'):
            fsdp.fully_shard(make_model, optax.adam(1e-3), make_mesh(8), precision=given)
