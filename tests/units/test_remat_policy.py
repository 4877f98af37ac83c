"""Policies of recomputation choose among activations, never among gathered weights.

What is saved and computed again is read in the trace. That no policy changes a number is not seen
there: for it, two steps of one small model are compiled.
"""

import re
from functools import cache, partial

import flax.linen as nn
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from reference import (
    CASES,
    Case,
    Chain,
    LinenTransformer,
    by_path,
    covering_params,
    gpt,
    linen_loss,
    losses_of,
    on_eight,
    squares,
    traffic,
)
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.attention import make_attention
from fsdp_jax.models.gpt import Block
from fsdp_jax.models.layers import blockwise_attention, split_qkv
from fsdp_jax.program.equations import all_eqns
from fsdp_jax.units.remat import Activations

POLICIES = jax.checkpoint_policies
TOKENS = {"tokens": jax.ShapeDtypeStruct((16, 9), jnp.int32)}


def shard(model, units, remat, **settings):
    mesh = fsdp.make_mesh(data=8)
    return fsdp.fully_shard(
        model, optax.adam(1e-3), mesh, units=units, min_size=8, remat=remat, **settings
    )


@pytest.mark.parametrize(
    ("policy", "scan", "local_batch"),
    [
        (POLICIES.everything_saveable, True, True),
        (POLICIES.dots_with_no_batch_dims_saveable, False, False),
        pytest.param(POLICIES.everything_saveable, False, False, marks=pytest.mark.long),
    ],
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


def count(jaxpr, primitive):
    inner = [each for eqn in jaxpr.eqns for each in jex.jaxprs_in_params(eqn.params)]
    own = sum(eqn.primitive.name == primitive for eqn in jaxpr.eqns)
    return own + sum(count(each, primitive) for each in inner)


def test_a_weight_is_not_saved_by_its_name_and_an_activation_is():
    def program(remat):
        step = shard(
            lambda rngs: Chain([Named(rngs), Named(rngs)]), [Named], remat
        ).make_train_step(squares)
        jaxpr = step.trace({"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}).jaxpr
        return count(jaxpr, "optimization_barrier"), count(jaxpr, "dot_general")

    gathers, matmuls = program("full")
    assert program(POLICIES.save_only_these_names("weight")) == (gathers, matmuls)
    assert program(POLICIES.save_only_these_names("hidden"))[1] == matmuls - 2


class Halves(Named):
    """Splits an activation, and a gathered weight."""

    def __call__(self, x):
        up, gate = jnp.split(x @ self.kernel[...], 2, axis=-1)
        first, second = jnp.split(self.back[...], 2)
        return x + (up * gate) @ first + jnp.tanh(gate) @ second


class HalvesInAScan(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=2)(nnx.vmap(Halves))(rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.layers)


def halves_one_by_one(rngs):
    return Chain([Halves(rngs), Halves(rngs)])


@pytest.mark.parametrize(
    ("model", "rows", "splits"),
    # each layer splits two arrays forward, and those again in its backward pass that are not saved
    [(halves_one_by_one, 8, 2 * 4), (halves_one_by_one, 32, 2 * 3), (HalvesInAScan, 32, 4)],
)
def test_parts_of_a_large_activation_are_saved_outside_a_scan(model, rows, splits):
    step = shard(lambda rngs: model(rngs), [Halves], "none").make_train_step(squares)
    jaxpr = step.trace({"x": jax.ShapeDtypeStruct((rows, 8), jnp.float32)}).jaxpr
    assert count(jaxpr, "split") == splits


@pytest.mark.parametrize(("frozen", "remat"), [((), "dots"), (("blocks/",), "none")])
def test_no_copy_of_a_stored_parameter_is_saved(frozen, remat):
    """The stack of all layers would be: on devices with 1/8 of each parameter that is 1/8 more."""
    sharded = on_eight(gpt(True, layers=3), units=[Block], remat=remat, frozen=frozen)
    jaxpr = sharded.make_train_step(next_token_loss).trace(TOKENS).jaxpr
    stacks = {leaf.shape for leaf in sharded.layout.by_path.values() if leaf.stacked}
    forward = next(eqn for eqn in all_eqns(jaxpr) if eqn.primitive.name == "scan")
    saved = {v.aval.shape for v in forward.outvars}
    assert len(saved) > 2
    assert saved.isdisjoint(stacks)


class Halved(nnx.Module):
    """Halves in float32, and multiplies in bfloat16 by a kernel that is cast twice."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (16, 16)))

    def __call__(self, x):
        half = x.astype(jnp.float32) / 2
        kernel = self.kernel[...].astype(jnp.float32).astype(jnp.bfloat16)
        return x + half.astype(jnp.bfloat16) @ kernel


class HalvedScan(HalvesInAScan):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Halved))(rngs)


def test_an_activation_as_large_as_a_kernel_is_saved_in_bfloat16_and_no_kernel_is():
    """On each device 4 rows of 4 tokens: as many as the model is wide."""
    precision = fsdp.Precision(compute="bfloat16")
    sharded = on_eight(HalvedScan, units=[Halved], remat="none", precision=precision)

    def loss(model, batch):
        return squares(model, {"x": batch["x"].astype(jnp.bfloat16)})

    step = sharded.make_train_step(loss, local_batch=True)
    jaxpr = step.trace({"x": jax.ShapeDtypeStruct((32, 4, 16), jnp.float32)}).jaxpr
    forward = next(eqn for eqn in all_eqns(jaxpr) if eqn.primitive.name == "scan")
    saved = [(str(v.aval.dtype), v.aval.shape) for v in forward.outvars if v.aval.ndim == 4]
    assert ("bfloat16", (3, 4, 4, 16)) in saved
    assert ("float32", (3, 4, 4, 16)) not in saved
    assert (3, 16, 16) not in {v.aval.shape for v in forward.outvars}


def test_a_function_that_makes_policies_is_no_policy():
    step = shard(gpt(True), [Block], POLICIES.save_from_both_policies).make_train_step(
        next_token_loss
    )
    with refused("makes a policy", where="remat", fix="call it"):
        step.trace(TOKENS)


# Names of policies: what each computes again


@cache
def forward_matmuls(remat, scan=False):
    """The matmuls of a traced step, forward, backward and again, for each of its two blocks."""
    model = gpt(scan, sequence_length=32)
    step = shard(model, [Block], remat).make_train_step(next_token_loss)
    jaxpr = step.trace({"tokens": jax.ShapeDtypeStruct((16, 33), jnp.int32)}).jaxpr
    return count(jaxpr, "dot_general")


AGAIN = {
    "full": ["qkv", "scores", "attended", "out", "up"],
    "dots": ["scores", "attended"],
    "selective": ["scores"],
    fsdp.RematPolicy(save=("mlp", "attention_out")): ["qkv", "scores", "attended"],
    fsdp.RematPolicy(save=("qkv", "attention")): ["scores", "out", "up"],
    fsdp.RematPolicy("dots", save=("attention",)): ["scores"],
}


def test_a_policy_computes_again_what_it_does_not_save():
    expected = {remat: 2 * len(again) for remat, again in AGAIN.items()}
    saved = forward_matmuls("none")
    assert {remat: forward_matmuls(remat) - saved for remat in AGAIN} == expected


@pytest.mark.parametrize(
    "remats",
    [
        [fsdp.RematPolicy("dots", save=("attention",))],
        pytest.param(list(AGAIN), marks=pytest.mark.long),
    ],
)
def test_in_a_scan_it_computes_the_same_again(remats):
    expected = {remat: len(AGAIN[remat]) for remat in remats}
    saved = forward_matmuls("none", scan=True)
    assert {remat: forward_matmuls(remat, scan=True) - saved for remat in remats} == expected


@pytest.mark.parametrize(
    ("activations", "kernels"),
    [
        (Activations("full"), 4),
        (Activations("dots"), 4),
        (Activations("selective"), 3),
        (Activations("full", save=("attention",)), 3),
    ],
    ids=str,
)
def test_a_fused_kernel_that_is_saved_runs_once(activations, kernels):
    """Forward, and two kernels backward; one more where the first runs again."""
    attention = make_attention("flash", "cuda")
    policy = activations.checkpoint_policy

    def loss(x):
        return jax.checkpoint(partial(attention, is_causal=True), policy=policy)(x, x, x).sum()

    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.float32)
    program = jax.make_jaxpr(jax.grad(loss))(x)
    assert count(program.jaxpr, "pallas_call") == kernels


def test_every_second_block_is_recomputed():
    saved, full = forward_matmuls("none"), forward_matmuls("full")
    assert forward_matmuls(fsdp.RematPolicy(every=2)) == (saved + full) / 2
    assert forward_matmuls(fsdp.RematPolicy(every=1)) == full


# Units that own no parameters


class Around(Chain):
    """Owns no parameters: its two units own them all."""

    def __init__(self, rngs):
        super().__init__([Named(rngs), Named(rngs)])


def stages(remat, units):
    return shard(lambda rngs: Chain([Around(rngs), Around(rngs)]), units, remat)


def test_a_unit_without_parameters_is_recomputed():
    """Of two units inside it only the input of the first is saved: it runs once more."""

    def matmuls(remat, units):
        rows = {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
        step = stages(remat, units).make_train_step(squares)
        return count(step.trace(rows).jaxpr, "dot_general")

    assert matmuls("full", [Around, Named]) == matmuls("full", [Named]) + 2 * 2
    assert matmuls("none", [Around, Named]) == matmuls("none", [Named])


@pytest.mark.long
def test_a_unit_without_parameters_changes_no_number():
    x, found = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32), []
    for units in ([Named], [Around, Named]):
        sharded = stages("full", units)
        _, metrics = sharded.make_train_step(squares)(sharded.init(0), {"x": x})
        found.append({name: float(x) for name, x in metrics.items()})
    assert found[1] == pytest.approx(found[0], rel=1e-6)


# Numbers


class NamedBlock(nn.Module):
    """Names its activations as GPT's block does."""

    width: int

    @nn.compact
    def __call__(self, x, _=None):
        heads = split_qkv(nn.Dense(3 * self.width)(nn.LayerNorm()(x)), self.width // 2)
        attended = blockwise_attention(*heads, is_causal=True).reshape(x.shape)
        x = x + checkpoint_name(nn.Dense(self.width)(attended), "attention_out")
        hidden = checkpoint_name(nn.Dense(4 * self.width)(nn.LayerNorm()(x)), "mlp")
        return x + nn.Dense(self.width)(nn.gelu(hidden)), None


def linen_case(scan):
    return Case(LinenTransformer(scan, block=NamedBlock), linen_loss, (NamedBlock,))


MODELS = {
    "nnx-scanned": CASES["nnx-gpt-scanned"],
    "nnx-unrolled": CASES["nnx-gpt-unrolled"],
    "linen-scanned": linen_case(True),
    "linen-unrolled": linen_case(False),
}
REMATS = {
    "full": "full",
    "dots": "dots",
    "selective": "selective",
    "names": fsdp.RematPolicy(save=("qkv", "mlp")),
    "every": fsdp.RematPolicy("selective", every=2),
    "jax's": POLICIES.dots_with_no_batch_dims_saveable,
}
OFFLOADS = {
    "": fsdp.Offload(),
    "inputs": fsdp.Offload(activations=True),
    "attention": fsdp.Offload(activation_names=("attention",)),
}
WAYS = ["global", "local", "pre", "post"]
STRATEGIES = ["full_shard", "zero1", "hybrid_shard"]


def possible(model, remat, offload, way, strategy):
    return not (remat == "every" and "unrolled" not in model) and (
        strategy != "zero1" or way in ("global", "local")
    )


@cache
def run(model, remat, offload, way="global", strategy="full_shard"):
    """Two steps of gradient descent: (losses, parameters)."""
    case = MODELS[model]
    mesh = fsdp.make_mesh(data=4, replica=2)
    prefetch = way if way in ("pre", "post") else "none"
    offload = OFFLOADS[offload]
    sharded = fsdp.fully_shard(
        case.model,
        optax.sgd(0.1),
        mesh,
        strategy,
        case.units,
        min_size=8,
        remat=REMATS.get(remat, remat),
        offload=offload,
        prefetch=prefetch,
        **case.inputs,
    )
    step = sharded.make_train_step(case.loss, local_batch=way != "global")
    losses, state = losses_of(step, sharded.init(0), map(case.batch, range(2)))
    return losses, by_path(state.params)


QUICK = [("nnx-scanned", "names", "inputs", "pre", "full_shard")]


@pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")
@pytest.mark.parametrize(
    ("model", "remat", "offload", "way", "strategy"),
    covering_params(
        [MODELS, REMATS, OFFLOADS, WAYS, STRATEGIES], first=QUICK, possible=possible, quick=1
    ),
)
def test_no_policy_changes_a_number(model, remat, offload, way, strategy):
    losses, params = run(model, remat, offload, way, strategy)
    expected_losses, expected = run(model, "none", "")
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for path, value in expected.items():
        np.testing.assert_allclose(params[path], value, rtol=1e-6, atol=1e-6, err_msg=path)


@pytest.mark.long
def test_offloaded_activations_change_no_bit():
    losses, params = run("nnx-scanned", "full", "inputs", "pre")
    expected_losses, expected = run("nnx-scanned", "full", "", "pre")
    assert losses == expected_losses
    assert all((params[path] == value).all() for path, value in expected.items())


# Refusals


def test_a_policy_that_cannot_be_is_refused():
    every = fsdp.RematPolicy(every=2), fsdp.RematPolicy(every=3)
    for remat, scan, fields in (
        ("dot", False, {"what": "unknown remat 'dot'", "fix": "did you mean 'dots'?"}),
        (every[0], True, {"what": "inside a layer scan", "got": "'blocks'", "fix": "scan_layers"}),
        (every[1], False, {"what": "not 3 units of a class", "got": "2 of Block"}),
    ):
        with refused(**fields):
            shard(gpt(scan), [Block], remat)


def test_a_policy_that_means_nothing_is_refused():
    for settings, fields in (
        ({"every": 0}, {"where": "remat.every", "expected": "1 or more"}),
        ({"save": "attention"}, {"fix": 'RematPolicy(save=("attention",))'}),
        ({"save": None}, {"what": "no names of activations"}),
        ({"save": 3}, {"what": "no names of activations"}),
        ({"policy": "none", "every": 2}, {"what": "nothing is recomputed"}),
        ({"policy": "fulll"}, {"where": "remat.policy", "fix": "did you mean 'full'"}),
        ({"policy": jax.checkpoint}, {"what": "not a policy of rematerialization"}),
        ({"policy": ["mlp"]}, {"fix": "RematPolicy(save=('mlp',))"}),
    ):
        with refused(**fields):
            fsdp.RematPolicy(**settings)


def test_a_name_that_nothing_has_is_refused():
    def lower(remat="full", **settings):
        shard(gpt(True), [Block], remat, **settings).make_train_step(next_token_loss).lower(TOKENS)

    with refused("'attn'", where="remat.save", fix="did you mean 'attention'"):
        lower(fsdp.RematPolicy(save=("qkv", "attn")))
    with refused("'mlpp'", where="offload.activation_names", fix="mean 'mlp'"):
        lower(offload=fsdp.Offload(activation_names=("mlpp",)))


def test_inputs_of_the_whole_model_are_not_offloaded():
    with refused("the whole model is the unit", fix="units=[Block]"):
        shard(gpt(True), "model", "full", offload=fsdp.Offload(activations=True))
