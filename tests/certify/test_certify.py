"""`certify` finds what differs from a run on one device, and names the likely cause."""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attack_losses import ATTACKS, CLASSES, NOT_SUMS, SUMS, Tiny, make_batch, make_model
from flax import nnx
from reference import CASES
from reference import make_model as make_case

import fsdp_jax as fsdp
from fsdp_jax.certify.certificate import Certificate, CertifyError, Tolerance
from fsdp_jax.certify.comparison import certify
from fsdp_jax.step import train_step as steps

SUM = SUMS["cross-entropy"]


def found(loss, rows=32, make=make_model, **settings) -> Certificate:
    """The certificate, whether it holds or not."""
    try:
        return certify(make, loss, make_batch(rows), **settings)
    except CertifyError as error:
        return error.certificate


def quick(loss, **settings) -> Certificate:
    """One strategy, one step."""
    return found(
        loss,
        **{"strategies": ["full_shard"], "accumulation": [1], "steps": 1, "rows": 8} | settings,
    )


def test_no_attack_was_dropped():
    assert len(NOT_SUMS) >= 114
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


@pytest.mark.long
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_every_loss_is_that_of_one_device_or_found_out(attack):
    """By default every loss holds; with local batches those that are sums over examples do.

    One row on each device is the strictest test: only a sum is the sum of its single rows.
    """
    default, local = quick(attack.loss, local_batch=True).rows
    assert default.holds, default.failures
    assert local.holds == attack.is_sum, local.failures


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("in-batch negatives", "rows are compared"),
        ("batch normalisation", "a statistic over the batch"),
        ("penalty on parameters", "a term stands beside the sum"),
        ("mean for one", "a mean where a sum is expected"),
        ("over the rows", "a mean where a sum is expected"),
        ("dropout from a constant key", "random numbers from a constant key"),
        ("dropout from the model", "each device draws its own numbers"),
        ("dot with a constant", "refused with local batches"),
    ],
)
def test_a_loss_that_is_not_a_sum_is_explained(name, words):
    certificate = quick(NOT_SUMS[name], local_batch=True)
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
    default, local = quick(SUM, make=lambda rngs: Normed(rngs=rngs), local_batch=True, steps=3).rows
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
    table = str(quick(SUM))
    assert "metrics" not in table


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

    with pytest.raises(ValueError, match=r"a metric is not a number\n.*metrics\['three'\]"):
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
def test_dropout_by_default_draws_the_masks_of_one_device():
    settings = {"inputs": (jnp.zeros((1, 4)),), "accumulation": [4], "rows": 32, "steps": 3}
    certificate = quick(SUM, make=Dropped(), **settings)
    assert certificate.holds
    certificate = quick(NOT_SUMS["dropout from the model"], accumulation=[4], rows=32, steps=3)
    assert certificate.holds


@pytest.mark.releases
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name == "nnx-gpt-unrolled")) for name in CASES],
)
def test_the_reference_models_hold(name):
    case = CASES[name]
    tx = optax.adamw(1e-3)  # its eps of 1e-8 turns rounding into steps, where gradients are zero
    settings = {"tx": tx, "units": case.units, "accumulation": [1], **case.inputs}
    certificate = certify(
        make_case(case), case.loss, case.batch(0), strategies=["hybrid_shard"], **settings
    )
    assert certificate.holds
    assert certificate.rows[0].differences["gradients"][0] > 0


@pytest.mark.long
def test_every_strategy_and_setting_holds():
    certificate = certify(make_model, SUM, make_batch(32), tx=optax.adam(1e-2), local_batch=True)
    settings = [row.setting for row in certificate.rows]
    assert {setting.strategy for setting in settings} == set(fsdp.STRATEGIES)
    assert len(settings) == 6 * (2 + 2 + 1) + 1
    assert {setting.rows for setting in settings if setting.one_row} == {8}


PLANTED_AT = "hybrid_shard_zero2"


def norm_scaled_by_replicas(plan, state, batch):
    """Counts the gradients of every replica."""
    new, metrics = steps.train_step(plan, state, batch)
    replicas = dict(plan.layout.mesh.shape)["replica"]
    return new, {**metrics, "grad_norm": metrics["grad_norm"] * np.sqrt(replicas)}


def planted_gradients(change):
    right = steps._gradients_of_loss

    def wrong(plan, *arguments):
        gradients, sums, rest = right(plan, *arguments)
        return change(plan, gradients), sums, rest

    return wrong


def lost(plan, gradients):
    zero = {"up": {**gradients["up"], "kernel": jnp.zeros_like(gradients["up"]["kernel"])}}
    return {**gradients, **zero} if plan.layout.strategy.name == PLANTED_AT else gradients


def rescaled(plan, gradients):
    return jax.tree.map(lambda g: g / plan.accumulation, gradients)


def averaged_twice(plan, gradients):
    return jax.tree.map(lambda g: g / plan.layout.mesh.size, gradients)


def updated_twice(plan, state, *arguments):
    params, *others = RIGHT_UPDATE(plan, state, *arguments)
    return jax.tree.map(lambda new, old: new + 0.01 * (new - old), params, state.params), *others


RIGHT_UPDATE = steps._update_or_keep
GRADIENTS = "step.train_step._gradients_of_loss"


@pytest.mark.releases
@pytest.mark.parametrize(
    ("name", "bug", "strategies", "expected", "explanation"),
    [
        pytest.param(
            "api.train_step",
            norm_scaled_by_replicas,
            [PLANTED_AT, "zero1"],
            (PLANTED_AT, 1, "gradient norm"),
            "the root of 2",
            id="norm-off-by-replicas",
        ),
        pytest.param(
            GRADIENTS,
            lost,
            [PLANTED_AT, "full_shard"],
            (PLANTED_AT, 1, "gradients"),
            "the gradient is lost",
            id="lost-under-one-strategy",
        ),
        pytest.param(
            GRADIENTS,
            rescaled,
            ["zero1"],
            ("zero1", 4, "gradients"),
            "each of the 4 microbatches",
            id="scale-per-microbatch",
        ),
        pytest.param(
            GRADIENTS,
            averaged_twice,
            ["zero1"],
            ("zero1", 1, "gradients"),
            "the number of devices (8)",
            id="averaged-twice",
        ),
        pytest.param(
            "step.train_step._update_or_keep",
            updated_twice,
            ["full_shard"],
            ("full_shard", 1, "parameters"),
            "the sharded optimizer gives a different update",
            id="update",
        ),
    ],
)
def test_planted_bugs_are_found_and_explained(
    monkeypatch, name, bug, strategies, expected, explanation
):
    monkeypatch.setattr(f"fsdp_jax.{name}", planted_gradients(bug) if name == GRADIENTS else bug)
    strategy, accumulation, what = expected
    numbers = sorted({1, accumulation})
    certificate = quick(SUM, strategies=strategies, accumulation=numbers, rows=32)
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


def test_a_lost_gradient_is_named(monkeypatch):
    monkeypatch.setattr("fsdp_jax.step.train_step._gradients_of_loss", planted_gradients(lost))
    (failure, *_) = [
        f for f in quick(SUM, strategies=[PLANTED_AT]).failures if f.what == "gradients"
    ]
    assert failure.path == "up/kernel"
    assert failure.others == 0


def test_bfloat16_is_compared_loosely_and_not_blindly(monkeypatch):
    precision = fsdp.Precision(compute="bfloat16", reduce="float32")
    assert quick(SUM, precision=precision, local_batch=True, steps=2).holds
    monkeypatch.setattr(
        "fsdp_jax.step.train_step._gradients_of_loss", planted_gradients(averaged_twice)
    )
    assert not quick(SUM, precision=precision).holds


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
        (penalised, "refused with local batches: the loss reads parameters"),
        (centred, "not finite and was not applied"),
    ],
)
def test_an_update_that_is_not_applied_is_found(loss, cause):
    default, local = quick(loss, units=[nnx.Linear], local_batch=True).rows
    assert default.holds
    assert cause in local.failures[0].cause


def test_the_certificate_as_json():
    certificate = quick(NOT_SUMS["all pairs"], local_batch=True)
    assert str(certificate.failures[0]).startswith(
        "full_shard, accumulation 1, local_batch: loss: off by "
    )
    read = json.loads(json.dumps(certificate.to_json(), allow_nan=False))
    assert (read["holds"], read["devices"], len(read["rows"])) == (False, 8, 2)
    assert read["rows"][1]["differences"]["gradients"]["difference"] > read["tolerance"]["gradient"]
    assert read["failures"][0]["setting"] == "full_shard, accumulation 1, local_batch"


def test_inputs_that_cannot_be_certified_are_refused():
    with pytest.raises(ValueError, match=r"cannot be split evenly(.|\n)*a multiple of 32 rows"):
        certify(make_model, SUM, make_batch(8))
    with pytest.raises(ValueError, match="nothing is sharded on one device"):
        certify(make_model, SUM, make_batch(8), mesh=fsdp.make_mesh(data=1, allow_fewer=True))
    with pytest.raises(ValueError, match="not finite on one device"):
        quick(lambda model, batch: (jnp.log(-jnp.abs(model(batch["x"]))).sum(), 1))
    with pytest.raises(ValueError, match="loss_fn returned a number alone"):
        quick(lambda model, batch: model(batch["x"]).sum())


@pytest.mark.releases
def test_linen_models_are_certified():
    settings = {"make": nn.Dense(CLASSES), "inputs": (jnp.zeros((1, 4)),), "local_batch": True}
    assert quick(SUM, **settings).holds
    failures = quick(NOT_SUMS["all pairs"], **settings).failures
    assert [failure.path for failure in failures if failure.what == "gradients"] == ["bias"]


def test_the_tolerance_can_be_set():
    strict = dataclasses.replace(Tolerance(), gradient=1e-20)
    with pytest.raises(
        CertifyError, match=r"^the model differs from a run on one device\nzero1, .*tolerance 1e-20"
    ) as caught:
        certify(
            make_model, SUM, make_batch(8), strategies=["zero1"], accumulation=[1], tolerance=strict
        )
    certificate = caught.value.certificate
    assert not certificate.holds
    assert str(caught.value).splitlines()[1] == str(certificate.failures[0])
    assert str(certificate) in str(caught.value)
