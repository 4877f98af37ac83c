"""Before the first step that offloads its activations: gradients are the same without.

The canary is a program that is compiled and run, and so are the steps that it runs before.
"""

import jax
import numpy as np
import optax
import pytest
from reference import on_eight
from refusals import refused
from small import SMALL

import fsdp_jax as fsdp
from fsdp_jax.step import compiled_step, offload_canary


@pytest.fixture(autouse=True)
def asked_again():
    offload_canary.check_offload.cache_clear()
    yield
    offload_canary.check_offload.cache_clear()


def test_gradients_are_the_same_with_inputs_on_the_host():
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
    fix = "another release of jax"
    with refused("other gradients", where="offload", got=f"jax {jax.__version__}", fix=fix):
        offload_canary.check_offload("cpu", ())


def test_only_a_step_that_runs_and_offloads_asks(monkeypatch):
    asked = []
    monkeypatch.setattr(compiled_step, "check_offload", lambda *x: asked.append(x))

    def shard(**offload):
        return on_eight(
            SMALL.model,
            optax.adam(0.1),
            units=SMALL.units,
            remat="full",
            offload=fsdp.Offload(**offload),
        )

    for offload in ({"params": True}, {"optimizer": 0.5}):
        assert shard(**offload).make_train_step(SMALL.loss).plan.offloads
    batch, found = SMALL.batch(0), []
    for sharded in (shard(), shard(activations=True)):
        step = sharded.make_train_step(SMALL.loss)
        step.compile(batch)
        found.append(len(asked))
        step(sharded.init(0), batch)
    assert found == [0, 0]
    assert asked == [("cpu", ())]
