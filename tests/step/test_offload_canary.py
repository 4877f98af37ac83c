"""Before the first step that offloads its activations: gradients are the same without."""

import jax
import numpy as np
import optax
import pytest
from reference import CASES, gpt

import fsdp_jax as fsdp
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import Block
from fsdp_jax.step import compiled_step, offload_canary


@pytest.fixture(autouse=True)
def asked_again():
    offload_canary.check_offload.cache_clear()
    yield
    offload_canary.check_offload.cache_clear()


def test_the_gradients_of_a_scan_are_the_same_with_its_inputs_on_the_host():
    inputs = jax.device_put(offload_canary._inputs())
    saved, sent = (offload_canary._run_gradients(each, {}, inputs) for each in (False, True))
    np.testing.assert_array_equal(saved, sent)
    assert np.abs(saved).min(axis=(1, 2)).all()
    text = offload_canary._gradients.trace(True, *inputs).jaxpr
    assert f"f32<host>{list(inputs[2].shape)}".replace(" ", "") in str(text)
    offload_canary.check_offload("cpu", ())


def test_other_gradients_are_an_error_that_names_the_release(monkeypatch):
    run = offload_canary._run_gradients
    monkeypatch.setattr(
        offload_canary, "_run_gradients", lambda offload, *x: run(False, *x) + offload
    )
    with pytest.raises(
        ValueError, match=rf"other gradients(.*\n)+.*jax {jax.__version__}.*\n.*fix"
    ):
        offload_canary.check_offload("cpu", ())


@pytest.mark.parametrize(
    "offload", [{"activations": True}, {"params": True}, {"optimizer": 0.5}, {}], ids=str
)
def test_only_a_step_that_runs_and_offloads_asks(monkeypatch, offload):
    asked = []
    monkeypatch.setattr(compiled_step, "check_offload", lambda *x: asked.append(x))
    sharded = fsdp.fully_shard(
        gpt(True),
        optax.adam(0.1),
        fsdp.make_mesh(data=8),
        units=[Block],
        min_size=8,
        remat="full",
        offload=fsdp.Offload(**offload),
    )
    step = sharded.make_train_step(next_token_loss)
    batch = CASES["nnx-gpt-scanned"].batch(0)
    step.compile(batch)
    assert asked == []
    step(sharded.init(0), batch)
    assert asked == [("cpu", ())] * bool(offload)
