"""The step as a pure function, inside a `jax.jit` of the user's own.

Two runs are compiled: a scan over steps has other carries and shardings than a step has.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from reference import by_path, losses_of
from refusals import refused
from small import SMALL

import fsdp_jax as fsdp
from fsdp_jax.contract import check_contract
from fsdp_jax.testing import assert_contract

pytestmark = pytest.mark.usefixtures("without_cache")


def shard(strategy="full_shard", **settings):
    mesh = fsdp.make_mesh(data=8)
    return fsdp.fully_shard(SMALL.model, optax.adamw(1e-3), mesh, strategy, min_size=8, **settings)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("full_shard", {"accumulation": 2, "local_batch": True}), ("zero1", {"clip": 1.0})],
)
def test_a_scan_over_steps_is_the_same_run(strategy, settings):
    sharded = shard(strategy)
    step = sharded.make_train_step(SMALL.loss, **settings)
    expected, end = losses_of(step, sharded.init(0), map(SMALL.batch, range(3)))
    pure = sharded.pure_step(SMALL.loss, **settings)
    rows = NamedSharding(sharded.layout.mesh, PartitionSpec(None, "data"))
    state = sharded.state_shardings()
    run = jax.jit(
        lambda state, batches: jax.lax.scan(pure, state, batches),
        in_shardings=(state, rows),
        out_shardings=(state, None),
        donate_argnums=0,
    )
    batches = jax.tree.map(lambda *rows: np.stack(rows), *map(SMALL.batch, range(3)))
    after, metrics = run(sharded.init(0), batches)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    for path, value in by_path(end.params).items():
        np.testing.assert_allclose(by_path(after.params)[path], value, rtol=1e-4, atol=1e-5)
    for leaf, sharding in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_a_batch_that_does_not_divide_is_refused_while_tracing():
    sharded = shard()
    pure = sharded.pure_step(SMALL.loss, accumulation=2)
    with refused("cannot be split evenly", where="batch"):
        jax.jit(pure).lower(sharded.abstract_state(), SMALL.batch(0, rows=8))


@pytest.mark.parametrize("check", [check_contract, assert_contract])
def test_a_contract_of_a_pure_step_is_refused_with_what_to_pass(check):
    with refused("not a step", got="function", fix="make_train_step"):
        check(shard().pure_step(SMALL.loss), SMALL.batch(0))


def test_units_that_a_step_cannot_run_by_are_given_up():
    def loss(model, batch):
        penalty = jnp.sum(model.blocks.up.kernel[...] ** 2)
        total, count = SMALL.loss(model, batch)
        return total + penalty, count

    sharded = shard()
    assert "Layer" in sharded.layout.units
    pure = jax.jit(sharded.pure_step(loss))
    _, metrics = pure(sharded.init(0), SMALL.batch(0))
    _, expected = sharded.make_train_step(loss)(sharded.init(0), SMALL.batch(0))
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dense(x))


def test_local_batches_are_checked_as_in_a_compiled_step():
    sharded = fsdp.fully_shard(lambda rngs: Normed(rngs), optax.sgd(0.1), fsdp.make_mesh(data=8))
    step = sharded.pure_step(lambda m, b: ((m(b["x"]) ** 2).sum(), 16), local_batch=True)
    with refused("computed from the batch", where="norm/mean"):
        jax.jit(step).lower(sharded.abstract_state(), {"x": np.ones((16, 8), np.float32)})
