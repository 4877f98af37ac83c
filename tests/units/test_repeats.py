"""A unit inside a loop of the model's own is gathered in every iteration, with a warning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import gpt, on_eight, squares

import fsdp_jax as fsdp
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import Block

pytestmark = pytest.mark.releases


class Cell(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, carry, x):
        return jnp.tanh(self.linear(carry + x)), carry


class Recurrent(nnx.Module):
    def __init__(self, rngs, loop):
        self.cell, self.loop = Cell(rngs), loop

    def __call__(self, x_BTD):
        start = jnp.zeros_like(x_BTD[:, 0])
        if self.loop == "while":
            turns = jax.lax.while_loop(
                lambda c: c[1] < x_BTD.shape[1],
                lambda c: (self.cell(c[0], x_BTD[:, 0])[0], c[1] + 1),
                (start, 0),
            )
            return turns[0]
        step = nnx.scan(
            lambda carry, cell, x: cell(carry, x),
            in_axes=(nnx.Carry, None, 1),
            out_axes=(nnx.Carry, 1),
        )
        return step(start, self.cell, x_BTD)[0]


@pytest.mark.parametrize(("local_batch", "accumulation"), [(True, 2), (False, 1)])
def test_a_unit_inside_a_loop_over_time(local_batch, accumulation):
    batch = {"x": np.ones((16, 5, 8), np.float32)}

    def step(units):
        sharded = on_eight(lambda rngs: Recurrent(rngs, "scan"), units=units)
        return sharded.make_train_step(squares, local_batch=local_batch, accumulation=accumulation)

    with pytest.warns(
        fsdp.SlowerWarning,
        match=r"unit 'cell' is gathered 5 times in each .* module around the loop",
    ):
        step([Cell]).lower(batch)
    step("model").lower(batch)  # a warning would be an error


def test_a_unit_inside_a_while_loop():
    sharded = on_eight(lambda rngs: Recurrent(rngs, "while"), units=[Cell])
    batch = {"x": np.ones((16, 5, 8), np.float32)}
    with pytest.warns(
        fsdp.SlowerWarning, match="unit 'cell' is gathered in every turn of a while loop"
    ):
        sharded.make_eval_step(squares).lower(batch)


@pytest.mark.parametrize("scan", [True, False])
def test_a_layer_scan_repeats_nothing(scan, recwarn):
    sharded = on_eight(gpt(scan), units=[Block])
    batch = {"tokens": jax.ShapeDtypeStruct((32, 9), "int32")}
    sharded.make_train_step(next_token_loss, accumulation=4).lower(batch)
    assert [str(warning.message) for warning in recwarn] == []
