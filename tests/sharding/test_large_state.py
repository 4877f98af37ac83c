"""Large state of a model that is no parameter: placed by a rule or its annotation, or reported.

Compiles small steps: that sharded state has the values of one device is not seen in a trace.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from for_each import for_each
from reference import losses_of

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.tree import flatten

ROWS = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}
BY_RULE = {"rules": [("^bank$", ("fsdp",))]}


class Memory(nnx.Module):
    """Reads a bank of vectors, and moves it towards the mean of the batch."""

    def __init__(self, rngs, written=True, metadata=None):
        start = jnp.linspace(-1.0, 1.0, 32 * 8).reshape(32, 8)
        self.bank = nnx.Variable(start, **(metadata or {}))
        self.inner, self.written = nnx.Linear(8, 8, rngs=rngs), written

    def __call__(self, x):
        scores = jax.nn.softmax(self.inner(x) @ self.bank[...].T)
        if self.written:
            self.bank.set_value(0.9 * self.bank[...] + 0.1 * (scores.T @ x) / 16)
        return scores @ self.bank[...]


class LinenMemory(nn.Module):
    @nn.compact
    def __call__(self, x):
        start = nn.with_partitioning(lambda: jnp.zeros((32, 8)), ("data", None))
        bank = self.variable("memory", "bank", start)
        scores = jax.nn.softmax(nn.Dense(8)(x) @ bank.value.T)
        bank.value = 0.9 * bank.value + 0.1 * (scores.T @ x) / 16
        return scores @ bank.value


def loss(model, batch):
    return jnp.sum((model(batch["x"]) - batch["x"]) ** 2), batch["x"].shape[0]


def shard(model=Memory, strategy="full_shard", min_size=64, **settings):
    if not isinstance(model, nn.Module):
        make = model
        model = lambda rngs: make(rngs)  # noqa: E731
    mesh = fsdp.make_mesh(data=8)
    return fsdp.fully_shard(model, optax.sgd(0.1), mesh, strategy, min_size=min_size, **settings)


def bank_of(sharded):
    (leaf,) = [leaf for leaf in sharded.layout if leaf.path.endswith("bank")]
    return leaf


def train(sharded, state=None, steps=3, **settings):
    step = sharded.make_train_step(loss, **settings)
    return losses_of(step, state or sharded.init(0), [ROWS] * steps)


def control(steps, written=True):
    """(losses, bank) on one device, in plain JAX."""
    model = Memory(nnx.Rngs(jax.random.split(jax.random.key(0))[0]), written)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    losses = []
    for _ in range(steps):

        def mean_loss(params, rest=rest):
            model = nnx.merge(graphdef, params, rest, copy=True)
            total, count = loss(model, ROWS)
            return total / count, nnx.state(model, nnx.Not(nnx.Param))

        (value, rest), gradients = jax.value_and_grad(mean_loss, has_aux=True)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        losses.append(float(value))
    return losses, np.asarray(rest["bank"].get_value())


# With local batches, state that is computed from the batch is refused.
@for_each(
    ("rules", "local_batch", "written"),
    [(BY_RULE, False, True), (BY_RULE, True, False), ({}, True, False)],
)
def test_a_sharded_bank_is_the_same_bank(rules, local_batch, written):
    sharded = shard(lambda rngs: Memory(rngs, written), **rules)
    leaf = bank_of(sharded)
    assert leaf.bytes_per_device == leaf.bytes // (8 if rules else 1)
    expected, bank = control(3, written)
    losses, state = train(sharded, local_batch=local_batch)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(state.model_state["bank"], bank, rtol=1e-5, atol=1e-6)
    assert state.model_state["bank"].sharding.is_equivalent_to(leaf.sharding, 2)


def test_annotations_of_nnx_and_linen_place_it():
    annotated = shard(lambda rngs: Memory(rngs, metadata={"out_sharding": ("data", None)}))
    linen = shard(LinenMemory(), inputs=(ROWS["x"],))
    for sharded in (annotated, linen):
        assert bank_of(sharded).rule == "annotation"
        assert bank_of(sharded).bytes_per_device == 32 * 8 * 4 // 8
    losses, _ = train(linen)
    np.testing.assert_allclose(
        losses, train(shard(LinenMemory(), "no_shard", inputs=(ROWS["x"],)))[0], rtol=1e-5
    )


def test_rules_for_parameters_stay_rules_for_parameters():
    assert bank_of(shard(strategy="zero1", **BY_RULE)).is_replicated
    assert bank_of(shard(min_size=1024, rules=[(".*", ())])).reason == "small state is replicated"
    strict = [("kernel|bias", ())]
    assert bank_of(shard(rules=strict, strict=True)).is_replicated
    with pytest.raises(ValueError, match=r"bank.*rule '\^bank\$'"):
        shard(rules=[("^bank$", (None, None, "fsdp"))])


def test_a_rule_replicates_state_that_it_does_not_fit():
    class Masked(Memory):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.mask = nnx.Variable(jnp.zeros((1, 15, 15)))

    with pytest.warns(fsdp.ReplicationWarning, match="mask(?s:.*)indivisible dim for this rule"):
        sharded = shard(Masked, rules=[("bias", None), (".*", ("fsdp",))])
    (mask,) = [leaf for leaf in sharded.layout if leaf.path.endswith("mask")]
    assert (mask.spec, mask.rule, mask.missed_shards) == (jax.P(), ".*", 8)
    assert bank_of(sharded).bytes_per_device == 32 * 8 * 4 // 8
    with pytest.raises(ValueError, match="indivisible dim: mask"):
        shard(Masked, rules=[("mask", ("fsdp",))])


def test_it_is_restored_into_another_layout(tmp_path):
    saved = shard(**BY_RULE)
    _, state = train(saved, steps=2)
    other = shard(strategy="zero1")
    with CheckpointStore(tmp_path) as store:
        store.save(0, saved.to_checkpoint(state), data={}, metadata={})
        restored, *_ = store.restore(0, other.checkpoint_target())
    restored = other.from_checkpoint(restored)
    losses, after = train(other, restored, steps=1)
    expected, bank = control(3)
    np.testing.assert_allclose(losses, expected[2:], rtol=1e-5)
    np.testing.assert_allclose(after.model_state["bank"], bank, rtol=1e-5, atol=1e-6)


def test_large_state_that_nothing_places_is_reported():
    class Large(Memory):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.bank = nnx.Variable(jnp.zeros((2**21, 8)))

    assert "no rule or annotation places this state: replicated, 1 KiB on every" in str(
        shard().layout
    )
    with pytest.warns(fsdp.ReplicationWarning, match=r"64 MiB of .* state .*'bank'.*\('fsdp',\)"):
        shard(Large)
    for settings in (BY_RULE, {"strategy": "no_shard"}):  # a warning would be an error
        assert "bank" in flatten(shard(Large, **settings).layout.other["model_state"])
