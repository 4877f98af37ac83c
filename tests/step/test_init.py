"""A state that starts from parameters that the caller has filled.

Initial values are drawn by small compiled programs; one step shows what stays frozen.
"""

import re

import jax
import numpy as np
import optax
import pytest
from refusals import not_refused
from small import SMALL, in_the_same_memory

import fsdp_jax as fsdp
from fsdp_jax.tree import flatten, unflatten

pytestmark = pytest.mark.releases
KERNEL = "blocks/up/kernel"


@pytest.fixture(scope="module")
def sharded():
    return shard()


def shard(**settings):
    mesh, units = fsdp.make_mesh(data=8), SMALL.units
    return fsdp.fully_shard(
        SMALL.model, optax.adamw(1e-3), mesh, units=units, min_size=16, **settings
    )


@pytest.fixture(scope="module")
def drawn(sharded):
    return flatten(sharded.init(0).params)


def test_a_printed_state_has_no_numbers_of_arrays(sharded):
    shown = repr(sharded.init(0))
    assert re.match(r"TrainState\(params: [\d,]+ numbers in 7 arrays; opt_state: ", shown)
    assert len(shown) < 200


def test_only_parameters_that_are_not_given_are_drawn(sharded, drawn):
    mine = jax.device_put(np.full(drawn[KERNEL].shape, 2, np.float32), drawn[KERNEL].sharding)
    for params in ({KERNEL: mine}, unflatten({KERNEL: mine})):
        state = sharded.init(0, params)
        for name, leaf in flatten(state.params).items():
            np.testing.assert_array_equal(leaf, mine if name == KERNEL else drawn[name])
        assert jax.tree.structure(state) == jax.tree.structure(sharded.abstract_state())


def test_all_parameters_can_be_given_on_any_device(sharded, drawn):
    doubled = {path: 2 * np.asarray(leaf) for path, leaf in drawn.items()}
    placed = {path: jax.device_put(x, drawn[path].sharding) for path, x in doubled.items()}
    for given in (placed, doubled, jax.device_put(doubled, jax.devices()[0])):
        for path, leaf in flatten(sharded.init(0, given).params).items():
            np.testing.assert_array_equal(leaf, doubled[path])
            assert leaf.sharding == sharded.layout.by_path[path].sharding


def test_arrays_of_the_caller_are_copied(sharded):
    leaves = sharded.layout.by_path
    path = next(path for path, leaf in leaves.items() if not any(leaf.spec))  # replicated
    numbers = np.ones(leaves[path].shape, np.float32)
    mine = jax.device_put(numbers, jax.devices()[0])
    flatten(sharded.init(0, {path: mine}).params)[path].delete()  # as donation does
    np.testing.assert_array_equal(mine, 1)
    state = sharded.init(0, {path: numbers})
    numbers[...] = 2
    np.testing.assert_array_equal(flatten(state.params)[path], 1)


def test_one_array_for_two_parameters_is_no_shared_buffer(sharded):
    leaves = sharded.layout.by_path
    names = (KERNEL, "blocks/down/kernel")
    for again in (lambda x: x, in_the_same_memory):
        ones = np.ones(leaves[KERNEL].shape, np.float32)
        ones = jax.device_put(ones, leaves[KERNEL].sharding)
        state = sharded.init(0, dict(zip(names, (ones, again(ones)), strict=True)))
        other = sharded.init(1, {KERNEL: again(flatten(state.params)[KERNEL])})
        first, second = (flatten(state.params)[name] for name in names)
        first.delete()  # as donation does, which would abort the process for one buffer twice
        np.testing.assert_array_equal(second, 1)
        np.testing.assert_array_equal(flatten(other.params)[KERNEL], 1)


def test_a_given_parameter_that_does_not_fit_is_refused(sharded, drawn):
    kernel, fits = drawn[KERNEL], "a parameter does not fit"
    cases = {
        "a typing error": ({"blocks/upp/kernel": kernel}, {"fix": f"did you mean '{KERNEL}'"}),
        "a slice": ({KERNEL: kernel[:1]}, {"what": fits, "where": KERNEL}),
        "bfloat16": (
            {KERNEL: kernel.astype("bfloat16")},
            {"what": fits, "where": KERNEL, "fix": "astype('float32')"},
        ),
        "lists": ({KERNEL: kernel.tolist()}, {"what": "no such parameter", "where": "params"}),
        "text": (
            {KERNEL: "weights"},
            {"what": "not an array", "where": KERNEL, "fix": "checkpoint_target"},
        ),
    }
    calls = {
        name: (lambda given=given: sharded.init(0, given), fields)
        for name, (given, fields) in cases.items()
    }
    assert not_refused(calls) == {}


def test_frozen_parameters_are_stored_in_a_dtype_of_their_own():
    precision = fsdp.Precision(compute="bfloat16", frozen="bfloat16")
    made = shard(precision=precision, frozen=["blocks"])
    state = made.init(0)
    dtypes = {path: str(leaf.dtype) for path, leaf in flatten(state.params).items()}
    frozen = {path for path in dtypes if "blocks" in path}
    assert {path for path, dtype in dtypes.items() if dtype == "bfloat16"} == frozen
    before = {path: np.asarray(leaf) for path, leaf in flatten(state.params).items()}
    state, metrics = made.make_train_step(SMALL.loss)(state, SMALL.batch(0))
    assert np.isfinite(float(metrics["loss"]))
    same = {
        path for path, leaf in flatten(state.params).items() if np.array_equal(leaf, before[path])
    }
    assert same == frozen


def test_a_seed_and_its_keys_give_the_same_state(sharded, drawn):
    on_one_device = jax.device_put(jax.random.key(0), jax.devices()[3])
    for seed in (np.int64(0), jax.random.key(0), jax.random.PRNGKey(0), on_one_device):
        state = sharded.init(seed)
        for path, leaf in flatten(state.params).items():
            np.testing.assert_array_equal(leaf, drawn[path])
        assert state.rng.dtype == sharded.abstract_state().rng.dtype
    other = flatten(sharded.init(jax.random.key(1)).params)
    assert (np.asarray(other[KERNEL]) != np.asarray(drawn[KERNEL])).any()


def test_what_is_neither_a_seed_nor_a_key_is_refused(sharded):
    seeds = {
        "0.5": 0.5,
        "True": True,
        "None": None,
        "key<fry>[2]": jax.random.split(jax.random.key(0), 2),
        "uint32[3]": np.zeros(3, np.uint32),
        "key<rbg>[]": jax.random.key(0, impl="rbg"),
    }
    fields = {"what": "neither a seed", "where": "seed", "expected": "one key", "fix": "init(0)"}
    calls = {
        got: (lambda seed=seed: sharded.init(seed), fields | {"got": got})
        for got, seed in seeds.items()
    }
    too_long = {"what": "more than 64 bits", "where": "seed", "got": str(2**70)}
    calls["too long"] = lambda: sharded.init(2**70), too_long
    assert not_refused(calls) == {}
