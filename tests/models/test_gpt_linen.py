"""GPT-2 in Linen is GPT-2 in NNX: names, shapes, logits, losses, and training over 8 devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import CASES, by_path, check, optimizer

import fsdp_jax as fsdp
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import GPT, Block, GPTConfig
from fsdp_jax.models.gpt_linen import LinenBlock, LinenGPT
from fsdp_jax.tree import flatten, unflatten

pytestmark = pytest.mark.releases

CONFIG = GPTConfig(vocab_size=32, sequence_length=8, layers=3, width=16, heads=2, pad_vocab_to=40)
BOTH = pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unrolled"])


def pair(**overrides: Any) -> tuple[GPT, LinenGPT, dict[str, Any]]:
    """The model in NNX, the same in Linen, and the former's parameters as Linen has them."""
    config = dataclasses.replace(CONFIG, **overrides)
    model = GPT(config, rngs=nnx.Rngs(params=0, dropout=1))
    return model, LinenGPT(config), unflatten(by_path(nnx.state(model, nnx.Param)))


def some_tokens(length: int = 8) -> jax.Array:
    return jax.random.randint(jax.random.key(7), (2, length), 0, CONFIG.vocab_size, jnp.int32)


@BOTH
@pytest.mark.parametrize("tie_head", [True, False])
def test_parameters_have_the_same_names_shapes_and_scales(scan_layers, tie_head):
    _, linen, params = pair(scan_layers=scan_layers, tie_head=tie_head, width=64)
    own = by_path(linen.init(jax.random.key(0), some_tokens())["params"])
    params = flatten(params)
    assert {path: leaf.shape for path, leaf in own.items()} == {
        path: leaf.shape for path, leaf in params.items()
    }
    for path, leaf in own.items():
        assert np.std(leaf) == pytest.approx(np.std(params[path]), rel=0.1), path


@BOTH
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_logits_are_those_of_nnx(scan_layers, dtype):
    model, linen, params = pair(scan_layers=scan_layers, dtype=dtype)
    tokens = some_tokens()
    found, expected = linen.apply({"params": params}, tokens), model(tokens)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found.astype(float), expected.astype(float), rtol=1e-6, atol=1e-6)
    assert np.std(expected) > 0.01


@BOTH
def test_packed_documents_are_read_apart(scan_layers):
    model, linen, params = pair(scan_layers=scan_layers)
    batch = {
        "tokens": some_tokens(9),
        "segments": jnp.asarray([[0] * 3 + [1] * 5, [0] * 8], jnp.int32),
        "positions": jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 4], list(range(8))], jnp.int32),
    }
    found, expected = (
        next_token_loss(linen.bind({"params": params}), batch),
        next_token_loss(model, batch),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert expected[0] != next_token_loss(model, {"tokens": batch["tokens"]})[0]


@BOTH
def test_gradients_are_those_of_nnx(scan_layers):
    model, linen, params = pair(scan_layers=scan_layers)
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    batch = {"tokens": some_tokens(9)}
    expected = jax.grad(lambda state: next_token_loss(nnx.merge(graph, state, rest), batch)[0])(
        state
    )
    found = jax.grad(lambda params: next_token_loss(linen.bind({"params": params}), batch)[0])(
        params
    )
    found, expected = by_path(found), by_path(expected)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_allclose(found[path], leaf, rtol=1e-4, atol=1e-6, err_msg=path)


@BOTH
def test_dropout_differs_across_keys_and_layers_and_deterministic_repeats(scan_layers):
    _, linen, params = pair(scan_layers=scan_layers, dropout=0.5)

    def called(seed, **settings):
        return linen.apply(
            {"params": params}, some_tokens(), rngs={"dropout": jax.random.key(seed)}, **settings
        )

    assert not np.array_equal(called(0, deterministic=False), called(1, deterministic=False))
    np.testing.assert_array_equal(called(0, deterministic=False), called(0, deterministic=False))
    np.testing.assert_array_equal(called(0), called(1))


def test_a_sequence_that_is_too_long_is_refused():
    _, linen, params = pair()
    with pytest.raises(ValueError, match=r"at most 8 tokens .sequence_length., got 9"):
        linen.apply({"params": params}, some_tokens(9))


# Sharded


def trained(
    model: Any, units: Any, start: dict[str, np.ndarray], prefetch: Any, **inputs: Any
) -> Any:
    """Two steps over 8 devices from these parameters: (losses, parameters)."""
    sharded = fsdp.fully_shard(
        model,
        optimizer(),
        fsdp.make_mesh(data=8),
        "full_shard",
        units,
        min_size=8,
        prefetch=prefetch,
        **inputs,
    )
    step = sharded.make_train_step(next_token_loss, local_batch=prefetch != "none")
    state, losses = sharded.init(seed=0), []
    placed = jax.tree.map(
        lambda new, old: jax.device_put(new, old.sharding), unflatten(start), state.params
    )
    state = dataclasses.replace(state, params=placed)
    for i in range(2):
        state, metrics = step(state, CASES["nnx-gpt-scanned"].batch(i))
        losses.append(float(metrics["loss"]))
    return losses, by_path(state.params)


@pytest.mark.long
@pytest.mark.parametrize(
    ("scan_layers", "prefetch"), [(True, "none"), (True, "pre"), (False, "none")]
)
def test_sharded_training_is_that_of_nnx(scan_layers, prefetch):
    model, linen, params = pair(scan_layers=scan_layers, layers=2)
    start = flatten(params)
    shape = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    found = trained(linen, [LinenBlock], start, prefetch, inputs=(shape,))
    expected = trained(lambda rngs: GPT(model.config, rngs=rngs), [Block], start, prefetch)
    check(found, expected)
    assert any(not np.array_equal(found[1][path], value) for path, value in start.items())
