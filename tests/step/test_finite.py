"""The check that a new state stays finite: the same result, no matmul and no memory more."""

import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fsdp_jax import optim
from fsdp_jax.jaxprs import all_eqns
from fsdp_jax.planner import parse_topology
from fsdp_jax.step.finite import checked_update, stays_finite
from fsdp_jax.train.build import build
from fsdp_jax.train.config_file import load

CONFIGS = Path(__file__).parents[2] / "configs"


def leaves_out_floats():
    """An optimizer with a state of no array, of a mask with infinities, and of an integer."""

    def update(gradients, state, params):
        return jax.tree.map(lambda g: -0.1 * g, gradients), {**state, "scale": 0.0}

    def init(params):
        mask = jnp.array([0.0, -jnp.inf])
        return {"scale": jnp.zeros(()), "mask": mask, "count": jnp.int32(0)}

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "adamw int8": lambda: optim.adamw(0.1, moments="int8", block=8),
    "muon": lambda: optax.contrib.muon(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "accumulated": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "infinities": leaves_out_floats,
}


# Multiplications of arrays that element-wise updates of a matrix and a vector need at least.
DOUBLED = dict.fromkeys(OPTIMIZERS, 2) | {"adamw": 12, "lamb": 12, "accumulated": 0, "adafactor": 0}


def updated(tx):
    def update(old, gradients):
        params, state = old
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return update


def start(tx):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 8)), "b": rng.normal(size=8), "s": rng.normal(size=())}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return (params, tx.init(params)), jax.tree.map(jnp.cos, params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_has_its_bits_and_the_check_its_answer(name):
    tx = OPTIMIZERS[name]()
    old, gradients = start(tx)
    update = updated(tx)
    twice = [True for _ in jax.tree.leaves(old)]
    checked = jax.jit(lambda old, *args: checked_update(update, old, twice, *args))
    plain = jax.jit(update)

    new, finite = checked(old, gradients)
    expected = plain(old, gradients)
    jax.tree.map(np.testing.assert_array_equal, new, expected)
    assert finite
    # One number of one gradient.
    for path in gradients:
        bad = gradients | {path: gradients[path].at[...].multiply(jnp.nan)}
        new, finite = checked(old, bad)
        expected = plain(old, bad)
        jax.tree.map(np.testing.assert_array_equal, new, expected)
        assert bool(finite) == bool(stays_finite(old, expected)) is False


def operations(fn, *args):
    return Counter(eqn.primitive.name for eqn in all_eqns(jax.make_jaxpr(fn)(*args).jaxpr))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_element_wise_updates_alone_are_computed_twice(name):
    tx = OPTIMIZERS[name]()
    old, gradients = start(tx)
    update = updated(tx)

    def checked_once(old, gradients):
        new = update(old, gradients)
        return new, stays_finite(old, new)

    def checked(both):
        def fn(old, gradients):
            return checked_update(update, old, [both for _ in jax.tree.leaves(old)], gradients)

        return operations(fn, old, gradients)

    once, twice = operations(checked_once, old, gradients), checked(True)
    for primitive in ("dot_general", "reduce_sum", "reduce_max", "while", "scan", "cond"):
        assert twice[primitive] == once[primitive], primitive
    assert twice["optimization_barrier"] == 1
    assert twice["mul"] - once["mul"] >= DOUBLED[name], twice - once
    # What is sharded otherwise is checked as it is written.
    assert checked(False)["mul"] == once["mul"]


@pytest.mark.long
@pytest.mark.needs_plugin
def test_no_new_state_is_kept_for_the_check():
    """XLA:GPU kept 1.1 GiB of it, of layers that are many and large."""
    settings = ["--prefetch", "pre", "--train.local_batch", "True", "--mesh.replica", "1"]
    settings += ["--model.attention", "blockwise", "--train.accumulation", "1"]
    settings += ["--train.deferred_reduction", "False", "--train.global_batch_size", "8"]
    run = build(load(CONFIGS / "llama2_7b.yaml", settings), parse_topology("h100:8").devices())
    program = run.step.compile(run.batch).as_text()
    results = re.findall(r"= (\(.*?\)) fusion\(", program)
    checks = [each for each in results if "pred[" in each]
    assert len(checks) > 4
    stacks = re.compile(r"(f32|bf16)\[32,\d+,\d+\]")  # [layers, ...]
    assert not [each for each in checks if stacks.search(each)]
