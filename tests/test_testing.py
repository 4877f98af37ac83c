"""The assertions that users test their own models with.

Compiles a step of two layers with each kind of collectives: the contract is of compiled programs.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from reference import gpt, squares

import fsdp_jax as fsdp
from fsdp_jax.errors import ConfigError
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import Block
from fsdp_jax.testing import assert_contract, mesh_of

pytest_plugins = ["pytester"]
BATCH = {"x": jax.ShapeDtypeStruct((8, 16), jnp.float32)}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def step(model, units, loss_fn, **settings):
    sharded = fsdp.fully_shard(model, optax.sgd(0.1), mesh_of("cpu:8"), units=units, min_size=8)
    return sharded.make_train_step(loss_fn, **settings)


def test_a_contract_that_holds_is_returned():
    contract = assert_contract(
        step(lambda rngs: Model(rngs), [nnx.Linear], squares, local_batch=True), BATCH
    )
    assert contract.holds
    assert "a device sends" in contract._repr_html_()
    shown = contract._repr_html_().count("<div class='bar'>")
    assert shown == len(contract.by_parameter().bars) > 1


def test_a_broken_contract_raises_with_its_violations_first():
    batch = {"tokens": jax.ShapeDtypeStruct((8, 9), jnp.int32)}
    with pytest.raises(AssertionError) as caught:
        assert_contract(step(gpt(True), [Block], next_token_loss), batch)
    first, on_cpu, *violations = str(caught.value).partition("\n\n")[0].splitlines()
    assert first == "the contract does not hold"
    assert "compiled for CPUs" in on_cpu
    assert all(": +" in line for line in violations)
    assert any(
        "reduced by an all-reduce, declared a reduce-scatter: +" in line for line in violations
    )
    assert "DOES NOT HOLD" in str(caught.value)


def test_mesh_of_a_named_machine():
    assert dict(mesh_of("cpu:8", replica=2).shape) == {"replica": 2, "data": 4}
    with pytest.raises(ConfigError, match="unknown hardware 'h10'"):
        mesh_of("h10:8")


def test_the_topology_mesh_fixture_in_another_suite(pytester):
    pytester.makeconftest('pytest_plugins = ["fsdp_jax.testing"]')
    pytester.makepyfile(
        "def test(topology_mesh):\n    assert topology_mesh('cpu:8', data=8).size == 8"
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
