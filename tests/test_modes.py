"""Which way of saying it serves a step: proven, promised or refused; what is lost is said, and nothing else is."""

import contextlib
import dataclasses
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from reference import CASES, gpt, image_loss

import fsdp_jax as fsdp
from fsdp_jax.mesh import split_data
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import Block
from fsdp_jax.overlap import compiler_options, warn_of_left

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning")]

BATCH = {"tokens": jax.ShapeDtypeStruct((16, 9), jnp.int32)}
MIXED = fsdp.Precision(compute="bfloat16", reduce="float32")
BF16 = fsdp.Precision(compute="bfloat16")


def contrastive(model, batch):
    """Each example's logits are compared with those of all others: no sum over examples."""
    logits = model(batch["tokens"][:, :-1]).mean(1)
    found = jax.nn.log_softmax(logits @ logits.T)
    return -jnp.trace(found), found.shape[0]


def shard(mesh=None, model=None, units=(Block,), **settings):
    mesh = fsdp.make_mesh(data=8) if mesh is None else mesh
    return fsdp.fully_shard(model or gpt(True), optax.adam(1e-3), mesh, "full_shard", units, min_size=8, **settings)


def settled(sharded, loss=next_token_loss, batch=BATCH, *, warns=None, **asked):
    """The plan of the step, once it is lowered; and what was said on the way."""
    step = sharded.train_step(loss, **asked)
    assert step.plan is None
    with pytest.warns(fsdp.SlowerWarning, match=warns) if warns else contextlib.nullcontext():
        step.lower(batch)
    return step.plan


def mode(plan):
    (found,) = {route.mode for route in plan.routes.values()}
    assert plan.manual == (found == "manual")
    return found


def test_a_sum_over_examples_is_proven_and_run_by_name():
    plan = settled(shard(precision=MIXED, prefetch="pre"), accumulation=2, deferred_reduction=True)
    assert mode(plan) == "manual"
    assert plan.deferred


@pytest.mark.parametrize(
    ("settings", "asked", "cost"),
    [
        ({"precision": MIXED}, {}, "gradients are reduced in bfloat16, not float32"),
        ({"prefetch": "pre"}, {}, "gradients of a unit are reduced before the next one computes"),
        ({"prefetch": "post"}, {}, "gradients of a unit are reduced before the next one computes"),
        (
            {},
            {"accumulation": 2, "deferred_reduction": True},
            "gradients are reduced after each of 2 microbatches, up to 68.5 KiB each",
        ),
        ({"mesh": (2, 4)}, {}, "gradients travel as all-reduces, not reduce-scatters, up to 34.2 KiB more per step"),
    ],
)
@pytest.mark.parametrize(
    ("loss", "local_batch", "why"),
    [
        (next_token_loss, False, "local_batch=False keeps the whole batch together"),
        (
            contrastive,
            None,
            r"loss_fn is not proven to be a sum over examples \(.*test_modes.py:.*; .*local_batch=True\)",
        ),
    ],
)
def test_what_is_lost_is_said_with_its_reason(settings, asked, cost, loss, local_batch, why):
    settings = dict(settings)
    if "mesh" in settings:
        settings["mesh"] = split_data(fsdp.make_mesh(data=8), settings["mesh"])
    plan = settled(shard(**settings), loss, warns=f"^{why}: {cost}$", local_batch=local_batch, **asked)
    assert mode(plan) == "annotate"
    assert not plan.deferred
    assert not any(route.hops for route in plan.routes.values())


def test_all_that_is_lost_is_said_at_once():
    mesh = split_data(fsdp.make_mesh(data=8), (2, 4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = shard(mesh, precision=MIXED, prefetch="pre").train_step(
            next_token_loss, accumulation=2, deferred_reduction=True, local_batch=False
        )
        step.lower(BATCH)
    (text,) = [str(each.message) for each in said if each.category is fsdp.SlowerWarning]
    assert text.count(";") == 3


@pytest.mark.parametrize("loss", [next_token_loss, contrastive])
@pytest.mark.parametrize("local_batch", [None, False])
def test_where_nothing_is_lost_nothing_is_said(loss, local_batch):
    """Warnings are errors here. bfloat16 throughout, one reduction per microbatch: annotations do it all."""
    plan = settled(shard(precision=BF16), loss, local_batch=local_batch)
    assert mode(plan) == ("manual" if loss is next_token_loss and local_batch is None else "annotate")


def test_a_promise_is_taken():
    assert mode(settled(shard(precision=MIXED, prefetch="pre"), contrastive, local_batch=True)) == "manual"


@pytest.mark.parametrize("local_batch", [None, True])
def test_batch_statistics_outweigh_a_promise(local_batch):
    case = CASES["nnx-cnn-batchnorm"]
    images = shard(model=lambda rngs: case.model(rngs=rngs), units=case.units, precision=MIXED)
    plan = settled(images, image_loss, case.batch(0), warns=r"keeps state \('norm/\w+'\)", local_batch=local_batch)
    assert mode(plan) == "annotate"


def test_one_device_has_no_one_to_send_to():
    mesh = fsdp.make_mesh(data=1, allow_fewer=True)
    plan = settled(shard(mesh, precision=MIXED), accumulation=2, deferred_reduction=True)
    assert mode(plan) == "annotate"


def test_a_loss_that_raises_raises_as_it_is():
    def broken(model, batch):
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        shard().train_step(broken).lower(BATCH)


def test_a_loss_of_one_size_only_is_run_on_the_whole_batch():
    def rigid(model, batch):
        assert batch["tokens"].shape[0] == 16, "made for 16 rows"
        return next_token_loss(model, batch)

    plan = settled(shard(precision=MIXED), rigid, warns=r"cannot be traced with \d+ examples: made for 16 rows")
    assert mode(plan) == "annotate"


def test_what_reads_parameters_behind_a_unit_is_no_sum():
    def penalised(model, batch):
        total, count = next_token_loss(model, batch)
        return total + count * sum(jnp.sum(p**2) for p in jax.tree.leaves(nnx.state(model, nnx.Param))), count

    assert mode(settled(shard(), penalised)) == "annotate"
    assert mode(settled(shard(), penalised, local_batch=True)) == "manual"


# What prefetch could not move, and what XLA is told


def test_one_unit_has_none_after_it():
    plan = settled(
        shard(units="model", prefetch="pre"), warns="there is no unit after another to gather ahead; two units"
    )
    assert not plan.report.moved


def test_what_is_gathered_once_a_step_has_nothing_to_prefetch():
    mesh = fsdp.make_mesh(data=8)
    sharded = fsdp.fully_shard(gpt(True), optax.adam(1e-3), mesh, "shard_grad_op", (Block,), min_size=8, prefetch="pre")
    plan = settled(sharded)
    warn_of_left(plan)  # a warning would be an error
    assert not plan.report.moved
    assert not plan.report.left


@dataclasses.dataclass(frozen=True)
class Gpu:
    platform: str = "gpu"
    process_index: int = 0


def on_gpu(plan):
    """The plan, as if its mesh were of GPUs."""

    class Mesh:
        devices = fsdp.make_mesh(data=8).devices.astype(object)

    Mesh.devices.fill(Gpu())
    layout = dataclasses.replace(plan.layout)
    object.__setattr__(layout, "mesh", Mesh)
    return dataclasses.replace(plan, layout=layout)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("layers", [2, 3])
def test_on_a_gpu_all_of_a_layer_is_sent_as_one(scan, layers):
    """A layer of GPT has 12 D^2 + 13 D parameters."""
    plan = settled(shard(model=gpt(scan, layers=layers), precision=BF16, prefetch="pre"))
    norms, width = 4 * 16, 2
    layer = (12 * 16**2 + 13 * 16 - norms) * width + norms * 4
    assert compiler_options(on_gpu(plan)) == {
        "xla_gpu_all_gather_combine_threshold_bytes": layer,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": layer,
        "xla_gpu_enable_latency_hiding_scheduler": True,
    }
    assert compiler_options(plan) == {}, "the CPU knows no such option"


def test_a_gradient_wider_than_its_parameter_counts():
    plan = settled(shard(precision=MIXED, prefetch="pre"))
    options = compiler_options(on_gpu(plan))
    assert {options[name] for name in options if "threshold" in name} == {(12 * 16**2 + 13 * 16) * 4}


def test_without_prefetch_xla_decides():
    assert compiler_options(on_gpu(settled(shard()))) == {}
