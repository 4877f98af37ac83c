"""Spikes of the loss: detected by a robust z-score, and skipped if that is asked for.

Two steps of a model without matmuls are compiled: the window is filled step by step.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusals import not_refused

import fsdp_jax as fsdp
from fsdp_jax.step import loss_spikes

WINDOW = 8


class Line(nnx.Module):
    def __init__(self, *, rngs):
        self.weight = nnx.Param(jnp.ones((8, 8)))


def loss_fn(model, batch):
    """Falls a little with every step, and is as large as the batch says."""
    return (batch["scale"] * (1 + 1e-3 * model.weight.sum())).sum(), batch["scale"].size


def trained(scales, **settings):
    """Returns the metrics of each step, and the weights after it."""
    mesh = fsdp.make_mesh(data=8)
    make = lambda rngs: Line(rngs=rngs)  # noqa: E731
    spikes = fsdp.LossSpikes(window=WINDOW, **settings)
    sharded = fsdp.fully_shard(make, optax.sgd(1e-3), mesh, loss_spikes=spikes, min_size=0)
    step, state = sharded.make_train_step(loss_fn), sharded.init(0)
    metrics, weights = [], []
    for scale in scales:
        state, each = step(state, {"scale": np.full(8, scale, np.float32)})
        metrics.append({name: float(value) for name, value in each.items()})
        weights.append(np.asarray(state.params["weight"]))
    return metrics, weights, state


def expected_z_score(losses, loss):
    """The definition of Iglewicz and Hoaglin, in NumPy."""
    median = np.median(losses)
    return 0.6745 * (loss - median) / np.median(np.abs(losses - median))


def noise(count):
    return 1 + 0.01 * np.random.default_rng(0).standard_normal(count)


def test_a_spike_is_reported_once_the_window_is_full():
    scales = noise(WINDOW + 6)
    scales[3] = 9.0  # the window is not full yet
    scales[WINDOW + 2] = 3.0
    metrics, weights, _ = trained(scales)
    losses = [each["loss"] for each in metrics]
    scores = [each["loss_z_score"] for each in metrics]
    assert scores[:WINDOW] == [0.0] * WINDOW
    for step in range(WINDOW, len(scales)):
        expected = expected_z_score(np.array(losses[step - WINDOW : step]), losses[step])
        assert scores[step] == pytest.approx(expected, rel=1e-3)
    assert [step for step, score in enumerate(scores) if score > 8] == [WINDOW + 2]
    # Reported alone: every update is applied.
    assert metrics[-1]["skipped"] == 0
    assert all((a != b).any() for a, b in itertools.pairwise(weights))


def test_a_spike_is_skipped_if_that_is_asked_for():
    scales = noise(WINDOW + 4)
    scales[WINDOW + 1] = 3.0
    with pytest.warns(fsdp.SkippedStepWarning, match=r"step 10 .*its loss, \d.*, is a spike"):
        metrics, weights, _ = trained(scales, skip=True)
    assert [each["skipped"] for each in metrics][-3:] == [1, 1, 1]
    assert metrics[WINDOW + 1]["skipped_in_a_row"] == 1
    np.testing.assert_array_equal(weights[WINDOW], weights[WINDOW + 1])
    assert (weights[WINDOW + 1] != weights[WINDOW + 2]).any()


def test_a_loss_that_is_not_finite_does_not_enter_the_window():
    state = loss_spikes.start_losses(fsdp.LossSpikes(window=WINDOW))
    for loss in (1.0, jnp.nan, jnp.inf, 2.0):
        state = loss_spikes.add_loss(state, jnp.float32(loss))
    assert int(state["count"]) == 2
    np.testing.assert_array_equal(state["losses"], [1, 2] + [0] * (WINDOW - 2))


def z_scores(recent, losses):
    recent = {"losses": np.asarray(recent, np.float32), "count": np.int32(WINDOW)}
    score = jax.jit(jax.vmap(loss_spikes.z_score, (None, 0)))
    return score(recent, np.asarray(losses, np.float32))


def test_a_loss_that_is_not_finite_is_no_spike():
    assert not z_scores(range(WINDOW), [np.inf, -np.inf, np.nan]).any()


def test_after_equal_losses_a_rise_of_a_percent_is_a_spike():
    same, more = z_scores([2.0] * WINDOW, [2.0, 2.02])
    assert same == 0
    assert more == pytest.approx(10, rel=1e-3)


def test_settings_out_of_range_are_refused():
    given = [{"window": 7}, {"threshold": 0.0}, {"threshold": float("nan")}]
    calls = {
        str(settings): (
            lambda settings=settings: fsdp.LossSpikes(**settings),
            {"where": f"loss_spikes.{next(iter(settings))}"},
        )
        for settings in given
    }
    assert not_refused(calls) == {}
