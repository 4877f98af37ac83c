"""`params_ema` is the recurrence of an average, in every layout of its state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import Chain, on_eight, squares
from refusals import fields, not_refused

import fsdp_jax as fsdp
from fsdp_jax import optim
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.tree import flatten

DECAY = 0.9


def chain(rngs):
    return Chain([nnx.Linear(12, 20, rngs=rngs), nnx.Linear(20, 12, rngs=rngs)])


def batch(step, rows=112):
    return {"x": np.random.default_rng(step).normal(size=(rows, 12)).astype(np.float32)}


def values(sharded, state):
    params = flatten(sharded.to_checkpoint(state).params)
    return {path: np.asarray(x, np.float64) for path, x in params.items()}


def trained_with(tx, devices=8, replica=1, steps=6, spoiled=None, accumulation=1, **settings):
    """Trains with an average, and by hand averages the parameters after each step in float64.

    Returns (sharded, state, the average by hand).
    """
    mesh = fsdp.make_mesh(-1, replica, devices=jax.devices()[:devices])
    sharded = fsdp.fully_shard(chain, tx, mesh, units="model", min_size=8, **settings)
    state = sharded.init(seed=0)
    step = sharded.make_train_step(squares, accumulation=accumulation)
    average = values(sharded, state)
    for number in range(steps):
        rows = batch(number)
        if number == spoiled:
            rows["x"][0, 0] = np.inf
        state, metrics = step(state, rows)
        if number != spoiled:
            new = values(sharded, state)
            average = {path: DECAY * average[path] + (1 - DECAY) * new[path] for path in new}
    assert metrics["skipped"] == (spoiled is not None)
    return sharded, state, average


def difference(sharded, state, expected):
    """The largest difference from an average, in parts of each array's largest value."""
    found = values(sharded, sharded.averaged(state))
    return max(
        np.abs(found[path] - expected[path]).max() / np.abs(expected[path]).max() for path in found
    )


LAYOUTS = {
    "full_shard": {"accumulation": 2},
    "shard_grad_op": {},
    "zero1": {"devices": 7},  # padded
    "full_shard of 7": {"strategy": "full_shard", "devices": 7},
    "no_shard": {},
    "hybrid_shard": {"replica": 2},
    "hybrid_shard_zero2": {"replica": 2},
    "hybrid_shard_optimizer": {"replica": 2},
    "offloaded": {"offload": fsdp.Offload(params=True, optimizer=True), "strategy": "full_shard"},
    "copies": {"precision": fsdp.Precision(compute="bfloat16"), "strategy": "zero1"},
}


@pytest.mark.filterwarnings("ignore::fsdp_jax.SkippedStepWarning")
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_average_is_that_of_float64_without_a_skipped_step(name):
    settings = {"strategy": name} | LAYOUTS[name]
    tx = optax.chain(optax.adam(1e-2), optim.params_ema(DECAY))
    sharded, state, expected = trained_with(tx, spoiled=3, **settings)
    assert difference(sharded, state, expected) < 1e-6

    # It is sharded like the optimizer's other state, and what evaluates with it.
    average, mu = (
        {path.partition(f"/{key}/")[2]: leaf.spec for path, leaf in by_path.items() if key in path}
        for by_path in [flatten(sharded.layout.optimizer)]
        for key in ("average", "mu")
    )
    assert average == mu
    rows = batch(9)
    total, _ = sharded.make_eval_step(squares, weights="ema")(state, rows)
    of_copy, _ = sharded.make_eval_step(squares)(sharded.averaged(state), rows)
    of_params, _ = sharded.make_eval_step(squares)(state, rows)
    assert total == of_copy != of_params


def test_bfloat16_parameters_are_averaged_before_they_are_rounded():
    precision = fsdp.Precision(param="bfloat16", stochastic_rounding=True)
    tx = optax.chain(optax.adam(1e-2), optim.params_ema(DECAY))
    sharded, state, expected = trained_with(tx, precision=precision, steps=12)
    assert difference(sharded, state, expected) < 2**-7
    averages = optim.params_ema(DECAY).init({"x": jnp.ones(3, jnp.bfloat16)}).average
    assert averages["x"].dtype == jnp.float32


def test_an_average_in_bfloat16_moves_as_far_in_the_mean():
    """Rounded to nearest it would stay at 1: a hundredth of 1% of it is lost in every step."""
    params = {"x": jnp.ones(4096)}
    tx = optim.params_ema(0.9999, dtype="bfloat16")
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(200):
        _, state = update({"x": jnp.full(4096, 0.5)}, state, params)
    expected = 1.5 - 0.5 * 0.9999**200
    assert abs(float(state.average["x"].astype(jnp.float32).mean()) - expected) < 1e-3
    assert state.average["x"].dtype == jnp.bfloat16


def test_every_and_warmup():
    tx = optim.params_ema(0.9, every=2, warmup=10)
    params = {"x": jnp.zeros(1)}
    state, expected = tx.init(params), 0.0
    for number in range(1, 9):
        _, state = tx.update({"x": jnp.full(1, float(number))}, state, params)
        if number % 2 == 0:
            averaging = number // 2 - 1
            decay = min(0.9, (1 + averaging) / (10 + averaging))
            expected = decay * expected + (1 - decay) * number
        np.testing.assert_allclose(state.average["x"], expected, rtol=1e-6)


def test_frozen_parameters_stay_what_they_are():
    tx = optax.chain(optax.sgd(0.1), optim.params_ema(DECAY))
    sharded = on_eight(chain, tx, frozen=("layers/0",))
    state, _ = sharded.make_train_step(squares)(sharded.init(0), batch(0))
    params, averaged = (flatten(each.params) for each in (state, sharded.averaged(state)))
    np.testing.assert_array_equal(params["layers/0/kernel"], averaged["layers/0/kernel"])
    assert not np.array_equal(params["layers/1/kernel"], averaged["layers/1/kernel"])
    model = sharded.model(state, weights="ema")
    np.testing.assert_array_equal(model.layers[1].kernel[...], averaged["layers/1/kernel"][:20])


def test_an_optimizer_may_see_variables_around_the_parameters():
    """As a mask in Linen's form has it; started from a state of an optimizer without arrays."""
    before = on_eight(chain, optax.sgd(0.1))
    state = before.init(0)
    mask = {"params": jax.tree.map(lambda _: True, state.params)}
    decayed = optax.masked(optax.add_decayed_weights(0.1), mask)
    tx = optax.chain(optax.chain(optax.sgd(0.1), decayed), optim.params_ema(DECAY))
    sharded = on_eight(chain, tx)
    step, start = sharded.make_train_step(squares), values(before, state)
    state, _ = step(sharded.init(0), batch(0))
    new = values(sharded, state)
    mean = {path: DECAY * start[path] + (1 - DECAY) * new[path] for path in new}
    assert difference(sharded, state, mean) < 1e-6

    from_sgd = on_eight(chain, optax.chain(optax.sgd(0.1), optim.params_ema(DECAY)))
    saved = before.to_checkpoint(before.init(0))
    with pytest.warns(UserWarning, match="has no average of the parameters; it starts from them"):
        started = from_sgd.from_checkpoint(saved)
    assert jax.tree.structure(started) == jax.tree.structure(from_sgd.init(0))


def test_what_is_refused():
    sharded = on_eight(chain)
    state = sharded.init(0)
    cases = {
        "decay 1": (lambda: optim.params_ema(1.0), fields("1.0")),
        "every 0": (lambda: optim.params_ema(0.9, every=0), {"where": "every"}),
        "warmup": (lambda: optim.params_ema(0.9, warmup=1.5), {"where": "warmup"}),
        "dtype": (lambda: optim.params_ema(0.9, dtype="float16"), {"where": "dtype"}),
        "name": (lambda: sharded.make_eval_step(squares, weights="emaa"), {"fix": "'ema'"}),
        "no average": (lambda: sharded.averaged(state), {"where": "weights"}),
        "first": (
            lambda: on_eight(chain, optax.chain(optim.params_ema(DECAY), optax.sgd(0.1))),
            {"where": "tx", "got": "1 more after it"},
        ),
        "alone": (lambda: optim.params_ema(0.9).update({}, None), {"where": "params"}),
    }
    assert not not_refused(cases)


def test_a_checkpoint_without_an_average_starts_it_from_its_parameters(tmp_path):
    """On 6 devices, where shards are padded; the next checkpoint has it, on 8 bit by bit."""
    before = on_eight(chain, optax.adam(1e-2))
    state, _ = before.make_train_step(squares)(before.init(0), batch(0))
    with CheckpointStore(tmp_path) as store:
        store.save(1, before.to_checkpoint(state), data={}, metadata={})
        tx = optax.chain(optax.adam(1e-2), optim.params_ema(DECAY))
        sharded = before.on(fsdp.make_mesh(devices=jax.devices()[:6]), tx=tx)
        saved, *_ = store.restore(1, sharded.checkpoint_target())
        with pytest.warns(UserWarning, match="has no average of the parameters"):
            state = sharded.from_checkpoint(saved)
        expected = values(sharded, state)
        assert difference(sharded, state, expected) == 0

        step = sharded.make_train_step(squares)
        state, _ = step(state, batch(1, 108))
        store.save(2, sharded.to_checkpoint(state), data={}, metadata={})
        again = sharded.on(fsdp.make_mesh(), strategy="zero1")
        restored = again.from_checkpoint(store.restore(2, again.checkpoint_target())[0])
    new = values(sharded, state)
    mean = {path: DECAY * expected[path] + (1 - DECAY) * new[path] for path in new}
    assert difference(sharded, state, mean) < 1e-6
    assert difference(again, restored, values(sharded, sharded.averaged(state))) == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((optax.adam(1e-2),), optax.adam(1e-2)),
        ((optax.clip(1.0), optax.adam(1e-2)), optax.chain(optax.clip(1.0), optax.adam(1e-2))),
        ((optax.sgd(1e-2),), optax.sgd(1e-2)),
    ],
)
def test_a_checkpoint_with_an_average_names_it_where_it_is_left_out(tmp_path, before, after):
    averaged = on_eight(chain, optax.chain(*before, optim.params_ema(DECAY)))
    (number, own) = len(before), averaged.on(fsdp.make_mesh(), tx=after)
    with CheckpointStore(tmp_path) as store:
        store.save(1, averaged.to_checkpoint(averaged.init(0)), data={}, metadata={})
        cases = {
            "the average": (
                lambda: store.restore(1, own.checkpoint_target()),
                {"got": f"1 differing paths\n            opt_state/{number}: expected nothing, got "
                 "an average of the parameters", "fix": "optax.chain(tx, optim.params_ema(decay))"},
            ),
            "another optimizer too": (
                lambda: store.restore(
                    1, own.on(fsdp.make_mesh(), tx=optax.lion(1e-2)).checkpoint_target()
                ),
                {"got": "opt_state/0/mu/layers/0/bias", "fix": "start elsewhere"},
            ),
        }  # fmt: skip
        assert not_refused(cases) == {}


def test_certify_compares_the_average():
    tx = optax.chain(optax.sgd(0.1), optim.params_ema(DECAY))
    settings = {"strategies": ["full_shard"], "accumulation": (1,), "trials": 0, "offloaded": False}
    certificate = on_eight(chain, tx, units="model").certify(squares, batch(0), **settings)
    assert "average" in str(certificate)
    assert "average" not in str(
        on_eight(chain, units="model").certify(squares, batch(0), **settings)
    )
