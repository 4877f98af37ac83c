"""A state that starts from parameters that the caller has filled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import gpt

import fsdp_jax as fsdp
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import Block
from fsdp_jax.tree import flatten, unflatten

pytestmark = pytest.mark.releases


@pytest.fixture(scope="module")
def sharded():
    return fsdp.fully_shard(gpt(True), optax.adamw(1e-3), fsdp.make_mesh(data=8), units=[Block])


@pytest.fixture(scope="module")
def drawn(sharded):
    return flatten(sharded.init(0).params)


def test_a_printed_state_has_no_numbers_of_arrays(sharded):
    shown = repr(sharded.init(0))
    assert re.match(r"TrainState\(params: [\d,]+ numbers in 16 arrays; opt_state: ", shown)
    assert len(shown) < 200


def test_only_parameters_that_are_not_given_are_drawn(sharded, drawn):
    path = "blocks/mlp/up/kernel"
    mine = jax.device_put(jnp.full_like(drawn[path], 2.0), drawn[path].sharding)
    for params in ({path: mine}, unflatten({path: mine})):
        state = sharded.init(0, params)
        for name, leaf in flatten(state.params).items():
            np.testing.assert_array_equal(leaf, mine if name == path else drawn[name])
        assert jax.tree.structure(state) == jax.tree.structure(sharded.abstract_state())


@pytest.mark.parametrize("given", [lambda x: jax.device_put(x, x.sharding), np.asarray, jnp.array])
def test_all_parameters_can_be_given_on_any_device(sharded, drawn, given):
    doubled = {path: given(2 * leaf) for path, leaf in drawn.items()}
    for path, leaf in flatten(sharded.init(0, doubled).params).items():
        np.testing.assert_array_equal(leaf, 2 * drawn[path])
        assert leaf.sharding == sharded.layout.by_path[path].sharding


def test_arrays_of_the_caller_are_copied(sharded):
    first, devices = jax.devices()[0], sharded.layout.by_path
    path = next(path for path, leaf in devices.items() if not any(leaf.spec))  # replicated
    mine = jax.device_put(jnp.ones(devices[path].shape), first)
    numbers = np.ones(devices[path].shape, np.float32)
    flatten(sharded.init(0, {path: mine}).params)[path].delete()  # as donation does
    np.testing.assert_array_equal(mine, 1)
    state = sharded.init(0, {path: numbers})
    numbers[...] = 2
    np.testing.assert_array_equal(flatten(state.params)[path], 1)


def test_one_array_for_two_parameters_is_no_shared_buffer(sharded):
    leaves = sharded.layout.by_path
    names = ("blocks/ln_1/scale", "blocks/ln_2/scale")
    ones = jax.device_put(jnp.ones(leaves[names[0]].shape), leaves[names[0]].sharding)
    params = flatten(sharded.init(0, dict.fromkeys(names, ones)).params)
    first, second = (params[name] for name in names)
    first.delete()  # as donation does, which would abort the process for one buffer twice
    np.testing.assert_array_equal(second, 1)


@pytest.mark.parametrize(
    ("path", "change", "text"),
    [
        ("blocks/mlp/upp/kernel", lambda x: x, "did you mean 'blocks/mlp/up/kernel'"),
        ("blocks/mlp/up/kernel", lambda x: x[:1], "a parameter does not fit"),
        ("blocks/mlp/up/kernel", lambda x: x.astype("bfloat16"), r"astype\('float32'\)"),
        ("blocks/mlp/up/kernel", lambda x: x.tolist(), "no such parameter"),
        ("blocks/mlp/up/kernel", lambda x: "weights", "not an array(.*\\n)+.*checkpoint_target"),
    ],
)
def test_a_given_parameter_that_does_not_fit_is_refused(sharded, drawn, path, change, text):
    with pytest.raises(ValueError, match=text):
        sharded.init(0, {path: change(drawn["blocks/mlp/up/kernel"])})


def test_frozen_parameters_are_stored_in_a_dtype_of_their_own():
    precision = fsdp.Precision(compute="bfloat16", frozen="bfloat16")
    made = fsdp.fully_shard(
        gpt(True),
        optax.adamw(1e-3),
        fsdp.make_mesh(data=8),
        units=[Block],
        precision=precision,
        frozen=["mlp"],
    )
    dtypes = {path: str(leaf.dtype) for path, leaf in flatten(made.init(0).params).items()}
    assert {path for path, dtype in dtypes.items() if dtype == "bfloat16"} == {
        path for path in dtypes if "mlp" in path
    }
    step = made.make_train_step(next_token_loss)
    tokens = np.arange(8 * 9, dtype=np.int32).reshape(8, 9) % 32
    before = {path: np.asarray(leaf) for path, leaf in flatten(made.init(0).params).items()}
    state, metrics = step(made.init(0), {"tokens": tokens})
    assert np.isfinite(float(metrics["loss"]))
    same = {
        path for path, leaf in flatten(state.params).items() if np.array_equal(leaf, before[path])
    }
    assert same == {path for path in dtypes if "mlp" in path}


def test_a_seed_and_its_keys_give_the_same_state(sharded, drawn):
    on_one_device = jax.device_put(jax.random.key(0), jax.devices()[3])
    for seed in (np.int64(0), jax.random.key(0), jax.random.PRNGKey(0), on_one_device):
        state = sharded.init(seed)
        for path, leaf in flatten(state.params).items():
            np.testing.assert_array_equal(leaf, drawn[path])
        assert state.rng.dtype == sharded.abstract_state().rng.dtype
    other = flatten(sharded.init(jax.random.key(1)).params)
    assert (other["blocks/mlp/up/kernel"] != drawn["blocks/mlp/up/kernel"]).any()


@pytest.mark.parametrize(
    ("seed", "got"),
    [
        (0.5, "0.5"),
        (True, "True"),
        (None, "None"),
        (jax.random.split(jax.random.key(0), 2), r"key<fry>\[2\]"),
        (jnp.zeros(3, jnp.uint32), r"uint32\[3\]"),
        (jax.random.key(0, impl="rbg"), r"key<rbg>\[\]"),
    ],
)
def test_what_is_neither_a_seed_nor_a_key_is_refused(sharded, seed, got):
    with pytest.raises(ValueError, match=rf"neither a seed(.*\n)+.*one key.*\n.*{got}\n.*fix"):
        sharded.init(seed)
