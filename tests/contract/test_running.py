"""`read_communication`: a user's own step, whose program is read beside the steps."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import on_eight
from refusals import refused

from fsdp_jax.contract import Contract, read_communication, running


@pytest.fixture(scope="module")
def stepped():
    """A step that ran once."""
    model = on_eight(lambda rngs: nnx.Linear(64, 64, rngs=rngs), min_size=1)
    step = model.make_train_step(lambda model, x: (jnp.sum(model(x) ** 2), x.size))
    with refused(where="read_communication", fix="call the step once before"):
        read_communication(step)
    step(model.init(0), np.ones((8, 64), np.float32))
    return step


def test_a_step_of_ones_own_is_read_in_the_background(stepped, monkeypatch):
    """As if the virtual devices were accelerators."""
    monkeypatch.setattr(running, "NOT_JUDGED", ())
    said = []
    reading = read_communication(stepped, said.append)
    contract = reading.wait(60)
    assert isinstance(contract, Contract)
    assert said == ["\n".join(reading.lines())]
    assert said[0].startswith(f"communication: {running.summary(contract)}")
    assert contract.wire_bytes > 0


def test_on_cpus_nothing_is_judged(stepped, capsys):
    reading = read_communication(stepped)
    assert capsys.readouterr().out == "communication: not judged on CPU\n"
    assert reading.wait() is None
