"""Stochastic rounding: unbiased, and the same bits on any number of devices and of any slice.

The rounding is compiled and run, alone and as the update of a small model: its bits are tested.
"""

import hypothesis.extra.numpy as arrays
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import CASES, by_path
from refusals import refused
from small import SMALL

import fsdp_jax as fsdp
from fsdp_jax.sharding.mesh import make_mesh
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.sharding.rounding import (
    apply_updates,
    path_seed,
    round_stochastically,
    step_seed,
)

GPT = CASES["nnx-gpt-scanned"]
ROUNDED = Precision(param="bfloat16", compute="bfloat16", stochastic_rounding=True)
SEED = jax.jit(lambda: step_seed(jax.random.key(0), jnp.int32(3)))()
rounded_by = jax.jit(round_stochastically)


def neighbours(values):
    """The bfloat16 numbers below and above each float32, in magnitude."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    below = bits & 0xFFFF0000
    above = np.where(bits == below, below, below + 0x10000)
    return below.view(np.float32), above.astype(np.uint32).view(np.float32)


@given(arrays.arrays(np.float32, 64, elements=st.floats(width=32)))
def test_every_number_becomes_one_of_its_neighbours(values):
    rounded = np.asarray(rounded_by(values, SEED), np.float32)
    below, above = neighbours(values)
    with np.errstate(invalid="ignore"):
        is_neighbour = (rounded == below) | (rounded == above)
    nearest = np.asarray(jnp.asarray(values).astype(jnp.bfloat16), np.float32)
    same = np.array_equal(rounded, nearest, equal_nan=True)
    finite = np.isfinite(values)
    assert is_neighbour[finite].all()
    assert same or finite.any()
    np.testing.assert_array_equal(rounded[~finite], nearest[~finite])


@pytest.mark.parametrize("value", [1.0 + 1 / 1024, -3.0 - 1 / 300, 1e-3, 7e-39])
def test_the_mean_is_exact(value):
    count = 200_000
    rounded = np.asarray(rounded_by(np.full(count, value, np.float32), SEED), np.float64)
    below, above = (float(x) for x in neighbours(np.float32(value)))
    share = (np.float64(np.float32(value)) - below) / (above - below)
    limit = 5 * abs(above - below) * np.sqrt(share * (1 - share) / count)
    assert abs(rounded.mean() - np.float32(value)) < limit


def test_updates_that_rounding_to_nearest_loses_are_kept():
    params = {"x": np.ones(4096, "bfloat16")}
    updates = {"x": np.full(4096, 1e-3, np.float32)}

    @jax.jit
    def update(params, step):
        return apply_updates(params, updates, step_seed(jax.random.key(0), step))

    lost, kept = apply_updates(params, updates, None)["x"], params
    for step in range(50):
        kept = update(kept, np.int32(step))
    assert (lost == 1).all()
    assert np.mean(np.asarray(kept["x"], np.float32)) == pytest.approx(1.05, abs=1e-3)


def test_a_slice_of_a_stack_is_rounded_as_within_the_whole():
    value = np.random.default_rng(0).normal(size=(6, 8, 4)).astype(np.float32)

    @jax.jit
    def rounded(value):
        seeds = path_seed(SEED, "blocks/kernel"), path_seed(SEED, "other")
        return [round_stochastically(value, seed) for seed in seeds]

    whole, other = map(np.asarray, rounded(value))
    np.testing.assert_array_equal(whole[2:5], rounded(value[2:5])[0])
    assert (whole[0] != other[0]).any()


def test_noise_differs_between_steps_paths_and_neighbours():
    count = 2**16
    # Half way, so that up is as likely as down.
    value = 1 + np.arange(128)[:, None] / 128 + np.full((1, 512), 2**-8)
    value = value.astype(np.float32)
    seeds = [SEED, path_seed(SEED, "a"), step_seed(jax.random.key(0), jnp.int32(4))]
    rounded = [np.asarray(rounded_by(value, seed), np.float32) for seed in seeds]
    up = [(each > value).ravel() - 0.5 for each in rounded]
    pairs = [(up[0], up[1]), (up[0], up[2]), (up[0][:-1], up[0][1:]), (up[0][:-512], up[0][512:])]
    for one, other in pairs:
        assert abs(4 * np.mean(one * other)) < 5 / np.sqrt(count)


def make_sharded(case=SMALL, data=8, precision=ROUNDED):
    mesh = make_mesh(data, devices=jax.devices()[:data])
    tx = optax.adamw(1e-3)
    return fsdp.fully_shard(case.model, tx, mesh, units=case.units, min_size=8, precision=precision)


def test_rounded_updates_have_the_same_bits_on_any_devices():
    results = []
    for data in (1, 8):
        sharded = make_sharded(data=data)
        params = sharded.init(seed=0).params
        shardings = sharded.state_shardings().params
        updates = jax.tree.map(lambda x: np.full(x.shape, 1e-3, np.float32), params)
        updates = jax.device_put(updates, shardings)
        apply = jax.jit(
            lambda params, updates: apply_updates(params, updates, SEED), out_shardings=shardings
        )
        compiled = apply.lower(params, updates).compile()
        results.append(by_path(compiled(params, updates)))
        assert "all-" not in compiled.as_text(), "no communication"
    for path, value in results[0].items():
        np.testing.assert_array_equal(results[1][path], value, err_msg=path)


@pytest.mark.long
def test_a_run_in_bfloat16_follows_one_in_float32():
    losses = {}
    for name, precision in {"float32": None, "rounded": ROUNDED}.items():
        sharded = make_sharded(GPT, precision=precision)
        step, state = sharded.make_train_step(GPT.loss, local_batch=True), sharded.init(seed=0)
        for _ in range(25):
            state, metrics = step(state, GPT.batch(0))
        losses[name] = float(metrics["loss"])
    assert losses["rounded"] == pytest.approx(losses["float32"], abs=0.01)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim} == {
        "float32"
    }
    one, other = (step(sharded.init(seed=0), GPT.batch(0))[0].params for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("param", ["float32", None])
def test_only_bfloat16_is_rounded(param):
    with refused("only parameters in bfloat16", fix='param="bfloat16"'):
        Precision(param=param, stochastic_rounding=True)
