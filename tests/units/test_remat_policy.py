"""A checkpoint policy as `remat`: it chooses among activations, never among gathered weights."""

import re

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from reference import CASES, check, gpt, traffic, train, train_unsharded

import fsdp_jax as fsdp
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import Block

POLICIES = jax.checkpoint_policies
TOKENS = {"tokens": jax.ShapeDtypeStruct((16, 9), jnp.int32)}


def shard(model, units, remat):
    return fsdp.fully_shard(
        model, optax.adam(1e-3), fsdp.make_mesh(data=8), units=units, min_size=8, remat=remat
    )


@pytest.mark.parametrize("local_batch", [True, False])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    "policy", [POLICIES.everything_saveable, POLICIES.dots_with_no_batch_dims_saveable]
)
def test_weights_are_gathered_again_whatever_the_policy_saves(policy, scan, local_batch):
    sharded = shard(gpt(scan, layers=2), [Block], policy)
    step = sharded.make_train_step(next_token_loss, local_batch=local_batch)
    one = "all_gather" if local_batch else "optimization_barrier"
    kernels = {
        path: times
        for (operation, path), times in traffic(sharded, step, TOKENS).items()
        if operation == one and re.search("blocks.*kernel", path)
    }
    assert kernels
    assert set(kernels.values()) == {4 if scan else 2}


class Named(nnx.Module):
    """Names a gathered weight, and what it computes from it."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 16)))
        self.back = nnx.Param(jax.random.normal(rngs.params(), (16, 8)))

    def __call__(self, x):
        weight = checkpoint_name(self.kernel[...], "weight")
        return x + jnp.tanh(checkpoint_name(x @ weight, "hidden")) @ self.back[...]


class Chain(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Named(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def chain_loss(model, batch):
    return jnp.sum(model(batch["x"]) ** 2), batch["x"].shape[0]


def count(jaxpr, primitive):
    inner = [each for eqn in jaxpr.eqns for each in jex.jaxprs_in_params(eqn.params)]
    own = sum(eqn.primitive.name == primitive for eqn in jaxpr.eqns)
    return own + sum(count(each, primitive) for each in inner)


def test_a_weight_is_not_saved_by_its_name_and_an_activation_is():
    def program(remat):
        step = shard(lambda rngs: Chain(rngs), [Named], remat).make_train_step(chain_loss)
        jaxpr = step.trace({"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}).jaxpr
        return count(jaxpr, "optimization_barrier"), count(jaxpr, "dot_general")

    gathers, matmuls = program("full")
    assert program(POLICIES.save_only_these_names("weight")) == (gathers, matmuls)
    assert program(POLICIES.save_only_these_names("hidden"))[1] == matmuls - 2


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("nnx-gpt-scanned", {"local_batch": True, "prefetch": "pre"}),
        ("nnx-gpt-unrolled", {"local_batch": True, "prefetch": "post"}),
        ("nnx-gpt-unrolled", {}),
        ("linen-transformer", {"accumulation": 2}),
        ("linen-transformer", {"local_batch": True, "prefetch": "pre"}),
    ],
)
def test_a_policy_changes_no_number(name, settings):
    policy = POLICIES.dots_with_no_batch_dims_saveable
    found, _ = train(CASES[name], fsdp.make_mesh(data=8), steps=3, remat=policy, **settings)
    check(found, train_unsharded(CASES[name], settings.get("accumulation", 1), steps=3))


def test_a_function_that_makes_policies_is_no_policy():
    step = shard(gpt(True), [Block], POLICIES.save_from_both_policies).make_train_step(
        next_token_loss
    )
    with pytest.raises(ValueError, match=r"makes a policy(.*\n)+.*remat\n(.*\n)*.*call it"):
        step.lower(TOKENS)
