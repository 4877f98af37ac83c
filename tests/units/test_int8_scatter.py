"""Gradients that are scattered in int8: error, values that are not finite, training, refusals.

Compiles one training run, for the distance of its losses from float32: a trace has no rounding.
"""

import jax
import numpy as np
import pytest
from reference import CASES, control, next_token_loss, train
from refusals import refused
from test_float8 import sharded_gpt

import fsdp_jax as fsdp
from fsdp_jax.units import int8_blocks

SCATTER = {"scatter": "int8"}


def there_and_back(values):
    packed = jax.jit(int8_blocks.pack)(values)
    return packed, np.asarray(
        jax.jit(int8_blocks.unpack, static_argnums=1)(packed, values.shape[1])
    )


def test_an_element_is_off_by_half_a_step_of_its_block():
    sizes = np.float32([1e-38, 1e-20, 1.0, 1e30]).repeat(3)[:, None]
    for elements in (1, 255, 256, 1000):
        values = np.random.default_rng(elements).standard_normal((12, elements)) * sizes
        values = values.astype(np.float32)
        packed, found = there_and_back(values)
        assert packed.shape == (12, int8_blocks.packed_bytes(elements))
        for start in range(0, elements, int8_blocks.BLOCK):
            block = values[:, start : start + int8_blocks.BLOCK].astype(np.float64)
            largest = np.abs(block).max(1, keepdims=True)
            bound = np.maximum(largest / 254 * (1 + 1e-5), np.finfo(np.float32).tiny)
            off = np.abs(np.float64(found[:, start : start + int8_blocks.BLOCK]) - block)
            assert (off <= bound).all(), elements


def test_what_is_not_finite_arrives_as_not_finite():
    values = np.ones((4, 600), np.float32)
    values[1:, 300] = np.inf, -np.inf, np.nan
    _, found = there_and_back(values)
    assert not np.isfinite(found[1:, 300]).any()
    assert np.isfinite(found[0]).all()
    assert np.isfinite(found[:, :256]).all()


@pytest.mark.parametrize(
    ("case", "strategy", "settings"),
    [
        ("nnx-gpt-scanned", "hybrid_shard", {"prefetch": "pre"}),
        pytest.param("nnx-gpt-unrolled", "full_shard", {"accumulation": 2}, marks=pytest.mark.long),
        pytest.param("linen-transformer", "zero1", {}, marks=pytest.mark.long),
    ],
)
def test_losses_stay_close_to_float32(case, strategy, settings):
    mesh = fsdp.make_mesh(data=4, replica=2) if "hybrid" in strategy else fsdp.make_mesh(data=8)
    precision = fsdp.Precision(**SCATTER)
    (losses, _), step = train(
        CASES[case], mesh, strategy, steps=4, local_batch=True, precision=precision, **settings
    )
    assert any(comm.int8_scatter for comm in step.plan.comms.values())
    expected = control(case, settings.get("accumulation", 1))[0][:4]
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert losses != expected


@pytest.mark.long
def test_certify_allows_for_its_rounding():
    model = sharded_gpt(prefetch="pre", precision=fsdp.Precision(**SCATTER))
    tokens = np.random.default_rng(0).integers(0, 32, (16, 9)).astype(np.int32)
    few = {"strategies": ["full_shard"], "accumulation": [1], "trials": 1, "steps": 1}
    batch = {"tokens": tokens}
    found = model.certify(next_token_loss, batch, local_batch=True, offloaded=False, **few)
    exact, rounded = (row.differences["gradients"][0] for row in found.rows[:2])
    assert exact < 1e-4 < rounded < found.tolerance.gradient == 5e-2


def test_what_scatters_nothing_in_int8_is_refused():
    for strategy, local_batch, what in (
        ("full_shard", False, "needs local_batch=True"),
        ("no_shard", True, "no_shard scatters the gradient of no kernel"),
    ):
        sharded = sharded_gpt(fsdp.Precision(**SCATTER), strategy=strategy)
        with refused(what):
            sharded.make_train_step(next_token_loss, local_batch=local_batch)
