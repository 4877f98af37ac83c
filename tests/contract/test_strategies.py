"""Strategies side by side: bytes of the layouts, of the formulas, and of the declared traffic."""

import math

import jax
import optax
import pytest
from pages import Outline
from reference import gpt
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.models import next_token_loss


@pytest.fixture(scope="module")
def sharded():
    model = gpt(True, vocab_size=384, sequence_length=64, layers=2, width=128)
    mesh = jax.make_mesh((2, 4), ("copies", "shards"))
    named = {"data": "shards", "replica": "copies"}
    return fsdp.fully_shard(model, optax.adamw(1e-3), mesh, min_size=1, **named)


def test_bytes_are_those_of_the_layouts_and_of_the_formulas(sharded):
    shown = sharded.compare_strategies(accumulation=2)
    assert [bar.name for bar in shown.bars] == list(fsdp.STRATEGIES)
    formulas = dict(zip(fsdp.STRATEGIES, (bar.cells[1] for bar in shown.bars), strict=True))
    assert formulas["no_shard"] == "P + O + G"
    assert formulas["zero1"] == "P + (O + G)/8"
    assert formulas["full_shard"] == "(P + O + G)/8"
    assert formulas["hybrid_shard"] == "(P + O + G)/4"
    assert formulas["hybrid_shard_optimizer"] == "(P + G)/4 + O/8"
    for bar in shown.bars:
        layout = sharded.on(sharded.arguments.mesh, strategy=bar.name).layout
        assert bar.parts["params"] == layout.per_device("params")
        assert bar.parts["optimizer"] == layout.per_device("optimizer")
        # all of this model is sharded, but the optimizer's count
        assert math.isclose(bar.total, bar.expected, rel_tol=1e-3)
    step = sharded.make_train_step(next_token_loss, accumulation=2)
    from fsdp_jax.contract.expected import expected_traffic

    declared = sum(each.bytes for each in expected_traffic(step.plan))
    (full,) = [bar for bar in shown.bars if bar.name == "full_shard"]
    assert full.cells[0] == fsdp.errors.human_bytes(declared)
    Outline(shown.page())
    assert "full_shard" in str(shown)


def test_copies_to_compute_with_are_in_the_formula(sharded):
    precision = fsdp.Precision(compute="bfloat16")
    shown = sharded.on(sharded.arguments.mesh, precision=precision).compare_strategies(["zero1"])
    (bar,) = shown.bars
    assert bar.cells[1] == "(P + O + G)/8 + C"
    assert math.isclose(bar.total, bar.expected, rel_tol=0.02)  # norms have no copy
    assert "of copies to compute with" in str(shown)


def test_axes_whose_roles_are_given_twice_are_refused(sharded):
    with refused(where="mesh", fix="sharded.arguments.mesh"):
        sharded.on(sharded.layout.axes)


def test_an_unknown_strategy_is_refused(sharded):
    with refused("zero9", where="strategy"):
        sharded.compare_strategies(["zero9"])
