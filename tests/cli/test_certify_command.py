"""`fsdp-jax certify`: a small version of a configuration."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest
from flax import nnx

import fsdp_jax as fsdp
from fsdp_jax.certify.certificate import Certificate, CertifyError, Failure, Row, Setting, Tolerance
from fsdp_jax.cli import certify as command
from fsdp_jax.cli.main import main
from fsdp_jax.models import FAMILIES, parameter_count
from fsdp_jax.train.config import Config, ModelConfig
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.model_config import make_model_config
from fsdp_jax.train.shapes import batch_shapes, length_fields
from fsdp_jax.units.remat import RematPolicy

CONFIGS = Path(__file__).parents[2] / "configs"
SETTING = Setting("full_shard", 1, 32)
HOLDS = Certificate((Row(SETTING, {"loss": (1e-7, "")}, ()),), 8, 3, Tolerance())
FAILURE = Failure(
    SETTING, "gradients", "head/kernel", 2, float("inf"), 1e-4, "the gradient is lost"
)
FAILS = dataclasses.replace(
    HOLDS, rows=(Row(SETTING, {"gradients": (float("inf"), "head/kernel")}, (FAILURE,)),)
)


@pytest.fixture
def quickstart(monkeypatch):
    """The arguments of `Sharded.certify`, which is replaced, and `sharded`, the object.

    It returns or raises `certificate`.
    """
    called = {}

    def certify(sharded, loss_fn, batch, **settings):
        called.update(settings, sharded=sharded, loss_fn=loss_fn, batch=batch)
        if called["certificate"].holds:
            return called["certificate"]
        raise CertifyError(called["certificate"])

    monkeypatch.setattr(fsdp.Sharded, "certify", certify)
    return called


@pytest.mark.parametrize("certificate", [HOLDS, FAILS], ids=["holds", "fails"])
def test_the_exit_code_says_whether_it_holds(quickstart, certificate, capsys):
    quickstart["certificate"] = certificate
    argv = ["certify", str(CONFIGS / "quickstart.yaml"), "--train.devices", "8"]
    code = 0 if certificate.holds else 3
    assert main(argv) == code
    cause = "gradients of head/kernel (and 2 more); likely cause: the gradient is lost"
    assert (cause in capsys.readouterr().out) != certificate.holds
    assert main([*argv, "--json"]) == code
    read = json.loads(capsys.readouterr().out)
    assert read["holds"] == certificate.holds
    assert not quickstart["local_batch"]
    assert quickstart["accumulation"] == (1, 4)


def test_the_keys_of_a_run_are_heeded(quickstart):
    quickstart["certificate"] = HOLDS
    overrides = "--train.devices 8 --train.local_batch True --precision.compute bfloat16 "
    overrides += "--remat full --offload.optimizer 1.0"
    config = load_config(CONFIGS / "quickstart.yaml", overrides.split())
    command.certify_small(config)
    assert quickstart["local_batch"]
    sharded = quickstart["sharded"]
    assert sharded.arguments.precision.compute == "bfloat16"
    assert sharded.arguments.remat == RematPolicy("full")
    assert sharded.arguments.offload.optimizer == 1
    assert sharded.arguments.prefetch == "auto"  # which `certify` takes for what it is on GPUs
    command.certify_small(load_config(CONFIGS / "quickstart.yaml", ["--prefetch", "none"]))
    assert quickstart["sharded"].arguments.prefetch == "none"
    assert any(leaf.spec for leaf in sharded.layout.by_path.values())


def test_refusals_are_errors_of_the_configuration(capsys):
    overrides = "--train.devices 8 --units.classes Blok"
    assert main(["certify", str(CONFIGS / "quickstart.yaml"), *overrides.split()]) == 2
    assert "did you mean 'Block'?" in capsys.readouterr().err


def test_every_preset_has_a_small_version():
    traced = set()
    for family, preset in ((name, each) for name in FAMILIES for each in FAMILIES[name].presets):
        task = FAMILIES[family].task
        config = Config(model=ModelConfig(family=family, preset=preset))
        kind = config.data.kind if task.is_text else "images"
        data = dataclasses.replace(config.data, kind=kind)
        shape = make_model_config(config.model, data)
        packing = task.name == "text"
        data = dataclasses.replace(data, sequence_length=command.LENGTH, packing=packing)
        shape = FAMILIES[family].shrink(shape, **length_fields(FAMILIES[family], data))
        batch = command.random_batch(batch_shapes(FAMILIES[family], shape, data, 4), shape, data)
        assert parameter_count(shape) < 300_000, preset
        if (family, repr(shape)) in traced:  # the small versions of most presets are equal
            continue
        traced.add((family, repr(shape)))
        assert loss_shape(FAMILIES[family], shape, batch) == (), preset


def loss_shape(family, shape, batch):
    def loss():
        return family.loss(family.model(shape, rngs=nnx.Rngs(0)), batch, train=True)

    return jax.eval_shape(loss)[0].shape


@pytest.mark.exhaustive
def test_the_quickstart_is_certified():
    words = "--train.devices 8 --precision.compute bfloat16 --precision.reduce float32"
    config = load_config(CONFIGS / "quickstart.yaml", words.split())
    certificate = command.certify_small(config, ["hybrid_shard_zero2"])
    assert certificate.holds
    assert len(certificate.rows) == (2 + 2 + 1) + 1 + 1
    assert certificate.left_out == ()
