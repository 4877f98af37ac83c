"""`certify` finds what differs from a run on one device, and names the likely cause.

Compiles and runs a tiny model for each certificate: what is tested is a comparison of numbers.
"""

import dataclasses
import json
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attack_losses import CLASSES, NOT_SUMS, SUMS, Tiny, make_batch, make_model
from flax import nnx
from jax.sharding import PartitionSpec
from reference import CASES
from reference import make_model as make_case
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax import planner
from fsdp_jax.certify.certificate import Certificate, CertifyError, Tolerance
from fsdp_jax.certify.unsharded import _init_linen
from fsdp_jax.step import train_step as steps
from fsdp_jax.testing import certify
from fsdp_jax.units.linen import LinenModel
from fsdp_jax.units.nnx import NnxModel

SUM = SUMS["cross-entropy"]
KEY = jax.random.key(0)


def found(loss, rows=32, make=make_model, batch=None, **settings) -> Certificate:
    """The certificate, whether it holds or not."""
    try:
        return certify(make, loss, batch or make_batch(rows), **settings)
    except CertifyError as error:
        return error.certificate


def quick(loss, **settings) -> Certificate:
    """One strategy, one step on each batch, without a run of state in host memory."""
    few = {"strategies": ["full_shard"], "accumulation": [1], "steps": 1, "rows": 8}
    return found(loss, **few | {"offloaded": False} | settings)


@pytest.mark.long
@pytest.mark.parametrize("name", SUMS | NOT_SUMS)
def test_every_loss_is_that_of_one_device_or_found_out(name):
    """By default every loss holds; with local batches those that are sums over examples do.

    One row on each device is the strictest test: only a sum is the sum of its single rows.
    """
    loss = (SUMS | NOT_SUMS)[name]
    default, local = quick(loss, local_batch=True, units="model").rows
    assert default.holds, default.failures
    assert local.holds == (name in SUMS), local.failures


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("in-batch negatives", "rows are compared"),
        pytest.param("batch normalisation", "a statistic over the batch", marks=pytest.mark.long),
        pytest.param("penalty on parameters", "a term stands beside", marks=pytest.mark.long),
        ("mean for one", "a mean where a sum is expected"),
        pytest.param(
            "dropout from a constant key", "random numbers from a constant", marks=pytest.mark.long
        ),
        ("dropout from the model", "each device draws its own numbers"),
        ("dot with a constant", "refused with local batches"),
    ],
)
def test_a_loss_that_is_not_a_sum_is_explained(name, words):
    certificate = quick(NOT_SUMS[name], local_batch=True, units="model")
    default, local = certificate.rows
    assert default.holds
    assert words in local.failures[0].cause, local.failures


def test_a_difference_that_needs_one_row_per_device_is_found():
    certificate = quick(NOT_SUMS["if more than one row"], local_batch=True, rows=32)
    assert [row.holds for row in certificate.rows] == [True, True, False]
    assert certificate.rows[-1].setting.one_row
    assert "one row on each device is treated in another way" in certificate.failures[0].cause


class Normed(nnx.Module):
    def __init__(self, *, rngs):
        self.tiny = Tiny(rngs=rngs)
        self.norm = nnx.BatchNorm(CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.tiny(x))


def test_batch_norm_holds_only_by_default():
    default, local = quick(SUM, make=lambda rngs: Normed(rngs=rngs), local_batch=True, steps=2).rows
    assert default.holds
    assert default.differences["model state"][0] < 1e-5
    assert "refused with local batches" in local.failures[0].cause
    assert "norm/mean" in str(local.failures[0])


def test_metrics_and_keys_are_compared_too():
    def loss(model, batch, key):
        total, count = SUM(model, batch)
        noise = jax.random.uniform(key)
        return total * noise, count, {"mask": batch["mask"].sum(), "none": (0.0, 0)}

    (row,) = quick(loss, rows=32, accumulation=[4], steps=2).rows
    assert row.holds, row.failures
    assert row.differences["metrics"][0] < 1e-6


def test_a_metric_that_is_a_mean_is_found_and_explained():
    def loss(model, batch):
        return *SUM(model, batch), {"good": batch["mask"].sum(), "mean": batch["mask"].mean()}

    default, local = quick(loss, local_batch=True).rows
    assert default.holds
    (failure,) = local.failures
    assert (failure.what, failure.path) == ("metrics", "mean")
    assert "the metric is not a sum over examples" in failure.cause


def test_metrics_that_are_none_are_told_as_in_a_step():
    def loss(model, batch):
        return *SUM(model, batch), {"three": (1, 2, 3)}

    with refused("a metric is not a number", where="metrics['three'] of loss_fn"):
        quick(loss)


class Decoder(nn.Module):
    """Computes something else where a cache is mutable, as decoders do."""

    @nn.compact
    def __call__(self, x):
        decodes = self.is_mutable_collection("cache")
        return nn.Dense(CLASSES)(x) * (2.0 if decodes else 1.0)


def test_a_decoder_is_trained_and_certified_without_a_cache():
    x = make_batch(8)["x"]
    (row,) = quick(SUM, make=Decoder(), inputs=(x,), units="model").rows
    assert row.holds, row.failures


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(nn.Dropout(0.5, deterministic=False)(nn.Dense(16)(x)))


@pytest.mark.releases
@pytest.mark.parametrize(
    ("loss", "model"),
    [
        (SUM, {"make": Dropped(), "inputs": (jnp.zeros((1, 4)),)}),
        pytest.param(NOT_SUMS["dropout from the model"], {}, marks=pytest.mark.long),
    ],
)
def test_dropout_by_default_draws_the_masks_of_one_device(loss, model):
    settings = {"accumulation": [4], "rows": 32, "steps": 2, "trials": 0}
    assert quick(loss, **settings, **model).holds


@pytest.mark.releases
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name != "nnx-gpt-unrolled"])
def test_the_reference_models_hold(name):
    case = CASES[name]
    tx = optax.adamw(1e-3)  # its eps of 1e-8 turns rounding into steps, where gradients are zero
    settings = {"tx": tx, "units": case.units, "accumulation": [1], **case.inputs}
    few = {"strategies": ["hybrid_shard"], "offloaded": False, "trials": 1, "steps": 2}
    certificate = certify(make_case(case), case.loss, case.batch(0), **few, **settings)
    assert certificate.holds
    assert certificate.rows[0].differences["gradients"][0] > 0
    assert 0 <= certificate.rows[0].differences["initial values"][0] < 1e-5


def test_three_strategies_hold():
    strategies = ["zero1", "full_shard", "hybrid_shard_zero2"]
    certificate = quick(SUM, strategies=strategies, accumulation=[1, 2], rows=16, trials=1)
    assert certificate.holds
    assert {row.setting.strategy for row in certificate.rows} == set(strategies)
    assert {row.setting.accumulation for row in certificate.rows} == {1, 2}


@pytest.mark.long
def test_every_strategy_and_setting_holds():
    certificate = certify(make_model, SUM, make_batch(32), tx=optax.adam(1e-2), local_batch=True)
    settings = [row.setting for row in certificate.rows]
    assert {setting.strategy for setting in settings} == set(fsdp.STRATEGIES)
    assert len(settings) == len(fsdp.STRATEGIES) * (2 + 2 + 1) + 1 + 1
    assert [str(each) for each in settings if each.offload] == ["no_shard, accumulation 1, offload"]
    assert {setting.rows for setting in settings if setting.one_row} == {8}


PLANTED_AT = "hybrid_shard_zero2"


def norm_scaled_by_replicas(plan, state, batch):
    """Counts the gradients of every replica."""
    (new, metrics), report = steps.train_step(plan, state, batch)
    replicas = dict(plan.layout.mesh.shape)["replica"]
    changed = {**metrics, "grad_norm": metrics["grad_norm"] * np.sqrt(replicas)}
    return (new, changed), report


def planted_gradients(change):
    right = steps._gradients_of_loss

    def wrong(plan, *arguments):
        computed = right(plan, *arguments)
        return computed._replace(gradients=change(plan, computed.gradients))

    return wrong


def lost(plan, gradients):
    zero = {"up": {**gradients["up"], "kernel": jnp.zeros_like(gradients["up"]["kernel"])}}
    return {**gradients, **zero} if plan.layout.strategy.name == PLANTED_AT else gradients


def rescaled(plan, gradients):
    return jax.tree.map(lambda g: g / plan.accumulation, gradients)


def averaged_twice(plan, gradients):
    return jax.tree.map(lambda g: g / plan.layout.mesh.size, gradients)


def updated_twice(plan, state, *arguments):
    updated = RIGHT_UPDATE(plan, state, *arguments)
    twice = lambda new, old: new + 0.01 * (new - old)  # noqa: E731
    return updated._replace(params=jax.tree.map(twice, updated.params, state.params))


RIGHT_UPDATE = steps.update_or_keep
GRADIENTS = "step.train_step._gradients_of_loss"


UPDATE = "step.train_step.update_or_keep"
# {name: (what is replaced, by what, strategies, which fails with how many microbatches, why)}
PLANTED = {
    "norm-off-by-replicas": (
        "api.train_step", norm_scaled_by_replicas, [PLANTED_AT, "zero1"],
        (PLANTED_AT, 1, "gradient norm"), "the root of 2",
    ),
    "lost-under-one-strategy": (
        GRADIENTS, lost, [PLANTED_AT, "full_shard"],
        (PLANTED_AT, 1, "gradients"), "the gradient is lost",
    ),
    "scale-per-microbatch": (
        GRADIENTS, rescaled, ["zero1"], ("zero1", 4, "gradients"), "each of the 4 microbatches",
    ),
    "averaged-twice": (
        GRADIENTS, averaged_twice, ["zero1"],
        ("zero1", 1, "gradients"), "the number of devices (8)",
    ),
    "update": (
        UPDATE, updated_twice, ["full_shard"],
        ("full_shard", 1, "parameters"), "the sharded optimizer gives a different update",
    ),
}  # fmt: skip


@pytest.mark.releases
@pytest.mark.parametrize(
    "planted",
    [pytest.param(name, marks=[pytest.mark.long] * (name == "averaged-twice")) for name in PLANTED],
)
def test_planted_bugs_are_found_and_explained(monkeypatch, planted):
    name, bug, strategies, expected, explanation = PLANTED[planted]
    monkeypatch.setattr(f"fsdp_jax.{name}", planted_gradients(bug) if name == GRADIENTS else bug)
    strategy, accumulation, what = expected
    numbers = sorted({1, accumulation})
    certificate = quick(SUM, strategies=strategies, accumulation=numbers, rows=32, trials=0)
    failures = {
        (f.setting.strategy, f.setting.accumulation, f.what): f for f in certificate.failures
    }
    assert expected in failures
    assert {key[:2] for key in failures} == {(strategy, accumulation)}, "no other setting fails"
    failure = failures[expected]
    assert explanation in failure.cause, failure
    if what in ("gradients", "parameters"):
        assert failure.path in ("up/kernel", "up/bias", "head/kernel", "head/bias")
    assert strategy in str(failure)
    if bug is lost:
        assert (failure.path, failure.others) == ("up/kernel", 0)


@pytest.mark.long
def test_bfloat16_is_compared_loosely_and_not_blindly(monkeypatch):
    precision = fsdp.Precision(compute="bfloat16", reduce="float32")
    assert quick(SUM, precision=precision, local_batch=True, steps=2, trials=1).holds
    monkeypatch.setattr(
        "fsdp_jax.step.train_step._gradients_of_loss", planted_gradients(averaged_twice)
    )
    assert not quick(SUM, precision=precision, trials=0).holds


def penalised(model, batch):
    total, count = SUM(model, batch)
    return total + count * sum(
        jnp.square(leaf).sum() for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))
    ), count


def centred(model, batch):
    """NaN where a device sees one row."""
    total, count = SUM(model, batch)
    return total + 0 * jnp.sqrt(batch["x"][:, 0].std() - 1e-6), count


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        pytest.param(
            penalised, "used outside its unit, as a penalty on it does", marks=pytest.mark.long
        ),
        (centred, "not finite and was not applied"),
    ],
)
def test_an_update_that_is_not_applied_is_found(loss, cause):
    default, local = quick(loss, units=[nnx.Linear], local_batch=True, trials=0).rows
    assert default.holds
    assert cause in local.failures[0].cause


def test_the_certificate_as_json():
    certificate = quick(NOT_SUMS["all pairs"], local_batch=True)
    assert "metrics" not in str(certificate)
    assert str(certificate.failures[0]).startswith(
        "full_shard, accumulation 1, local_batch: loss: off by "
    )
    read = json.loads(json.dumps(certificate.to_json(), allow_nan=False))
    assert (read["holds"], read["devices"], len(read["rows"])) == (False, 8, 2)
    assert read["rows"][1]["differences"]["gradients"]["difference"] > read["tolerance"]["gradient"]
    assert read["failures"][0]["setting"] == "full_shard, accumulation 1, local_batch"


def test_inputs_that_cannot_be_certified_are_refused():
    with refused("cannot be split evenly", expected="a multiple of 32 rows"):
        certify(make_model, SUM, make_batch(8))
    with refused("nothing is sharded on one device", where="certify"):
        certify(make_model, SUM, make_batch(8), mesh=fsdp.make_mesh(data=1, allow_fewer=True))
    with refused(where="trials", got="-1"):
        quick(SUM, trials=-1)
    with refused("not finite on one device", where="certify"):
        quick(lambda model, batch: (jnp.log(-jnp.abs(model(batch["x"]))).sum(), 1))
    with refused("loss_fn returned a number alone"):
        quick(lambda model, batch: model(batch["x"]).sum())


def test_the_tolerance_can_be_set():
    strict = dataclasses.replace(Tolerance(), gradient=1e-20)
    few = {"strategies": ["zero1"], "accumulation": [1], "steps": 1, "trials": 0}
    with pytest.raises(
        CertifyError, match=r"^the model differs from a run on one device\nzero1, .*tolerance 1e-20"
    ) as caught:
        certify(make_model, SUM, make_batch(8), offloaded=False, tolerance=strict, **few)
    certificate = caught.value.certificate
    assert not certificate.holds
    assert str(caught.value).splitlines()[1] == str(certificate.failures[0])
    assert str(certificate) in str(caught.value)


# What is certified is what trains


def lost_where(condition):
    """Loses the gradient of one kernel in steps whose plan meets a condition."""

    def change(plan, gradients):
        zero = {"up": {**gradients["up"], "kernel": jnp.zeros_like(gradients["up"]["kernel"])}}
        return {**gradients, **zero} if condition(plan) else gradients

    return planted_gradients(change)


def test_a_fault_in_the_units_that_are_found_is_found_by_default(monkeypatch):
    fault = lost_where(lambda plan: "up" in plan.boundaries and plan.boundaries["up"].unit)
    monkeypatch.setattr(f"fsdp_jax.{GRADIENTS}", fault)
    assert quick(SUM, units="model", trials=0).holds
    failures = quick(SUM, trials=0).failures
    assert ("gradients", "up/kernel") in {(each.what, each.path) for each in failures}


def sharded_as(**settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fsdp.ReplicationWarning)
        return fsdp.fully_shard(
            make_model, optax.sgd(0.1), fsdp.make_mesh(), min_size=1, **settings
        )


def test_an_object_is_certified_with_its_own_settings(monkeypatch):
    plans = []

    def recorded(plan, state, batch):
        plans.append(plan)
        return steps.train_step(plan, state, batch)

    monkeypatch.setattr("fsdp_jax.api.train_step", recorded)
    precision = fsdp.Precision(compute="bfloat16", reduce="float32")
    sharded = sharded_as(
        units=[nnx.Linear],
        remat="full",
        precision=precision,
        offload=fsdp.Offload(params=True),
        prefetch="post",
        frozen=["head/bias"],
    )
    few = {"strategies": ["full_shard"], "accumulation": [1], "trials": 1, "steps": 1}
    certificate = sharded.certify(SUM, make_batch(8), local_batch=True, **few)
    assert [str(row.setting) for row in certificate.rows] == [
        "full_shard, accumulation 1",
        "full_shard, accumulation 1, offload",
        "full_shard, accumulation 1, offload, local_batch",
    ]
    assert [plan.offload.params for plan in plans] == [False, True, True]
    assert [plan.prefetch for plan in plans] == ["post"] * 3
    assert [plan.precision for plan in plans] == [fsdp.Precision(compute="bfloat16")] * 2 + [
        precision
    ]
    for plan in plans:
        assert plan.boundaries["up"].unit == "up"
        assert plan.boundaries["up"].activations.policy
        assert "head/bias" not in plan.trained


def test_other_strategies_follow_the_one_that_trains():
    certificate = sharded_as(strategy="hybrid_shard").certify(
        SUM, make_batch(8), accumulation=[1], trials=0, steps=1, offloaded=False
    )
    names = [row.setting.strategy for row in certificate.rows]
    assert names[0] == "hybrid_shard"
    assert sorted(names) == sorted(fsdp.STRATEGIES)
    assert (certificate.steps, certificate.batches) == (1, ("the given one",))
    count = len(fsdp.STRATEGIES)
    told = f"all {count} settings equal one device on this batch: the given one"
    assert told in str(certificate)


def test_a_fault_of_offload_is_found_and_named(monkeypatch):
    monkeypatch.setattr(f"fsdp_jax.{GRADIENTS}", lost_where(lambda plan: plan.offload.params))
    few = {"strategies": ["zero1"], "accumulation": [1], "trials": 0, "steps": 1}
    for offload in (None, fsdp.Offload(params=True)):
        with pytest.raises(CertifyError) as caught:
            sharded_as(strategy="zero1", offload=offload).certify(SUM, make_batch(8), **few)
        resident, offloaded = caught.value.certificate.rows
        assert str(offloaded.setting) == "zero1, accumulation 1, offload"
        assert resident.holds
        assert {each.cause for each in offloaded.failures} == {
            "offload to host memory: without it the step equals one device"
        }


def test_what_devices_or_strategies_refuse_is_said(monkeypatch):
    rules = [(".*kernel", PartitionSpec(None, "replica"))]
    few = {"accumulation": [1], "trials": 0, "steps": 1}
    sharded = sharded_as(strategy="zero1", rules=rules)
    monkeypatch.setattr("fsdp_jax.sharding.offload.HOST", "nowhere")
    tried = {name: fsdp.STRATEGIES[name] for name in ("hybrid_shard", "zero1")}
    monkeypatch.setattr("fsdp_jax.certify.certify_sharded.STRATEGIES", tried)
    certificate = sharded.certify(SUM, make_batch(8), **few)
    assert [row.setting.strategy for row in certificate.rows] == ["zero1"]
    hybrid, offload = certificate.left_out
    assert hybrid.startswith("hybrid_shard, accumulation 1: hybrid_shard replicates along")
    assert offload.startswith("zero1, accumulation 1, offload: these devices cannot reach host")
    with pytest.raises(ValueError, match="hybrid_shard replicates along 'replica'"):
        sharded.certify(SUM, make_batch(8), strategies=["zero1", "hybrid_shard"], **few)


def test_devices_that_are_not_of_this_process_are_refused():
    machine = planner.parse_topology("h100:8")
    mesh = fsdp.make_mesh(devices=planner.fake_devices(machine))
    with refused("not all devices of the mesh are of this process", where="mesh"):
        sharded_as().on(mesh).certify(SUM, make_batch(8))


# On more than one batch


def any_zero(model, batch):
    total, count = SUM(model, batch)
    return total * jax.lax.cond((batch["y"] == 0).any(), lambda: 2.0, lambda: 1.0), count


def any_three(model, batch):
    total, count = SUM(model, batch)
    return total * jnp.where((batch["y"] == 3).any(), 2.0, 1.0), count


def test_a_question_about_the_whole_batch_is_found():
    """Both halves of the given batch give one answer: it shows on another batch alone."""
    mesh = fsdp.make_mesh(devices=jax.devices()[:2])
    certificate = quick(any_zero, mesh=mesh, local_batch=True, min_size=2)
    assert certificate.rows[0].holds
    failure = certificate.failures[0]
    assert failure.what == "loss"
    assert failure.batch.startswith("its rows sorted by ")
    assert f", on {failure.batch}; likely cause: the loss is not a sum" in str(failure)
    found = "2 of 3 settings DIFFER from one device on these 7 batches: the given one; its rows so"
    assert found in str(certificate)
    assert certificate.to_json()["batches"][0] == "the given one"


def test_a_batch_of_the_users_own_is_compared_too():
    rare = make_batch(8)
    batch = {**rare, "y": np.minimum(rare["y"], 2)}
    settings = {"local_batch": True, "tx": optax.sgd(1e-3), "trials": 1}
    certificate = quick(any_three, batch=batch, batches=[rare], **settings)
    default, local = certificate.rows
    assert default.holds
    assert {failure.batch for failure in local.failures} == {"batches[0]"}
    assert "on batches[0]; likely cause" in str(certificate.failures[0])


def test_rows_that_one_device_cannot_compute_with_are_left_out():
    def loss(model, batch):
        ordered = (jnp.diff(batch["mask"]) >= 0).all()
        total, count = SUM(model, batch)
        return jnp.where(ordered, jnp.nan, 1.0) * total, count

    certificate = quick(loss, rows=32)
    assert certificate.holds
    left_out = "its rows sorted by mask, one for each device: not finite on one device"
    assert certificate.left_out == (left_out,)
    assert str(certificate).endswith(f"not compared: {left_out}")
    assert certificate.to_json()["left_out"] == [left_out]


# Causes that the step knows


def test_parameters_that_are_read_outside_their_units_are_named(monkeypatch):
    monkeypatch.setattr(f"fsdp_jax.{GRADIENTS}", lost_where(lambda plan: True))
    outside = {f"{name}/kernel": f"model.py:{n}" for n, name in enumerate(["up", "head", "a", "b"])}
    reads = "fsdp_jax.certify.comparison.params_read_outside"
    monkeypatch.setattr(reads, lambda plan, batch: outside)
    causes = {each.what: each.cause for each in quick(SUM, trials=0).failures}
    named = "; parameters that are read outside their units: up/kernel (model.py:0), "
    named += "head/kernel (model.py:1), a/kernel (model.py:2) and 1 more"
    assert causes["gradients"] == f"the gradient is lost: it is zero in all elements{named}"
    assert causes["gradient norm"] == f"the loss reads shards, not whole parameters{named}"


# Initial values


class LinenNormed(nn.Module):
    centred: bool = False

    @nn.compact
    def __call__(self, x):
        if self.centred:
            x = x - self.variable("stats", "mean", lambda: x.mean(0, keepdims=True)).value
        return nn.LayerNorm(name="norm")(nn.Dense(CLASSES)(x))


@pytest.mark.parametrize(
    "settings",
    [
        {"make": LinenNormed(), "inputs": (jax.ShapeDtypeStruct((8, 4), np.float32),)},
        pytest.param({"make": lambda rngs: Normed(rngs=rngs)}, marks=pytest.mark.long),
    ],
)
def test_initial_values_are_those_of_the_models_own_library(monkeypatch, settings):
    for adapter in (LinenModel, NnxModel):
        right = adapter.init

        def halved(self, *args, right=right):
            params, rest = right(self, *args)
            return {**params, "norm": jax.tree.map(lambda x: x / 2, params["norm"])}, rest

        monkeypatch.setattr(adapter, "init", halved)
    (row,) = quick(SUM, trials=0, **settings).rows
    assert [(each.what, each.path) for each in row.failures] == [("initial values", "norm/scale")]
    assert row.failures[0].difference == pytest.approx(0.5, abs=1e-3)
    assert "the model is made of something else" in row.failures[0].cause


def test_a_linen_models_control_is_initialized_from_the_inputs():
    x = make_batch(8)["x"]
    made = _init_linen(LinenNormed(True), {"x": x}, (), KEY)
    np.testing.assert_allclose(made["stats/mean"][0], x.mean(0), rtol=1e-6)
    zeros = _init_linen(LinenNormed(True), (jax.ShapeDtypeStruct((8, 4), np.float32),), (), KEY)
    assert (
        made.keys()
        == zeros.keys()
        == {"Dense_0/kernel", "Dense_0/bias", "norm/scale", "norm/bias", "stats/mean"}
    )
    assert not zeros["stats/mean"].any()
