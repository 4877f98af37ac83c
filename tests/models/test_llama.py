"""Llama against NumPy; rotary positions, attention in blocks, published sizes.

Compiles the forward pass and attention for their numbers.
"""

from functools import partial
from typing import Any

import family_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import layers_of, linear, rms_norm, softmax, weights_of
from family_cases import call, config_of, draw_batch

from fsdp_jax.models import layers, parameter_count
from fsdp_jax.models.llama import (
    PRESETS,
    Llama,
    RopeScaling,
    apply_rotary,
    preset,
    rotary_frequencies,
)


def make(**overrides: Any) -> Llama:
    return family_cases.make("llama", **{"rope_theta": 100.0} | overrides)


def numpy_rotary(x: np.ndarray, theta: float) -> np.ndarray:
    """One head, [T, K], as multiplication of the complex numbers x[i] + j x[i + K/2]."""
    T, K = x.shape
    angle = np.arange(T)[:, None] * theta ** (-2 * np.arange(K // 2) / K)
    turned = (x[:, : K // 2] + 1j * x[:, K // 2 :]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def numpy_forward(model: Llama, tokens: np.ndarray) -> np.ndarray:
    """One sequence, [T] to [T, V], in float64, head by head."""
    config, weights = model.config, weights_of(model)
    K = config.width // config.heads

    def head(y, w, h):
        return linear(y, w)[:, h * K : (h + 1) * K]

    x = weights["embed"]["embedding"][tokens]
    for w in layers_of(weights["blocks"], config.layers):
        y, attn, attended = rms_norm(x, w["attn_norm"], config.norm_epsilon), w["attn"], []
        for h in range(config.heads):
            g = h // (config.heads // config.kv_heads)
            q = numpy_rotary(head(y, attn["q"], h), config.rope_theta)
            k = numpy_rotary(head(y, attn["k"], g), config.rope_theta)
            scores = np.where(np.tri(len(tokens), dtype=bool), q @ k.T / np.sqrt(K), -np.inf)
            attended.append(softmax(scores) @ head(y, attn["v"], g))
        x = x + linear(np.concatenate(attended, axis=-1), attn["o"])
        y, mlp = rms_norm(x, w["mlp_norm"], config.norm_epsilon), w["mlp"]
        gate = linear(y, mlp["gate"])
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, mlp["up"]), mlp["down"])
    x = rms_norm(x, weights["norm"], config.norm_epsilon)
    return x @ weights["embed"]["embedding"].T if config.tie_head else linear(x, weights["head"])


@pytest.mark.parametrize(
    "overrides", [{}, pytest.param({"tie_head": True, "kv_heads": 1}, marks=pytest.mark.long)]
)
def test_logits_are_those_of_numpy(overrides):
    model, tokens = make(**overrides), draw_batch(*config_of("llama"))["tokens"][:, :-1]
    expected = np.stack([numpy_forward(model, row) for row in tokens])
    assert np.std(expected) > 0.3
    np.testing.assert_allclose(call(model, tokens), expected, rtol=2e-4, atol=2e-4)


def test_rotated_scores_depend_on_the_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 6))
    turned_q, turned_k = (
        np.asarray(
            apply_rotary(jnp.broadcast_to(x, (1, 8, 1, 6)), rotary_frequencies(6, 100.0))[0, :, 0],
            np.float64,
        )
        for x in (q, k)
    )
    scores = turned_q @ turned_k.T
    for distance in range(-7, 8):
        same = np.diagonal(scores, distance)
        np.testing.assert_allclose(same, same[0], rtol=1e-4, atol=1e-5)
    assert np.ptp(scores[:, 0]) > 0.1
    np.testing.assert_array_equal(turned_q[0], q)


def test_rotary_is_computed_in_float32():
    x = jax.random.normal(jax.random.key(0), (1, 4096, 1, 8)).astype(jnp.bfloat16)
    turned = apply_rotary(x, rotary_frequencies(8, 10_000.0))
    assert turned.dtype == jnp.bfloat16
    expected = numpy_rotary(np.asarray(x[0, :, 0], np.float64), 10_000.0)
    # half a unit in the last place of bfloat16, and the float32 angle's error at position 4095
    np.testing.assert_allclose(
        np.asarray(turned[0, :, 0], np.float64), expected, rtol=2**-8, atol=4e-3
    )


def test_parameter_counts_are_the_published_ones():
    published = {
        "llama2-7b": 6_738_415_616,
        "llama2-13b": 13_015_864_320,
        "llama2-70b": 68_976_648_192,
        "llama3-8b": 8_030_261_248,
    }
    assert {name: parameter_count(PRESETS[name]) for name in published} == published


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: preset("llama-tiny", heads=3), "width 128, heads 3"),
        (lambda: preset("llama-tiny", width=12), "multiple of 2 x heads"),
        (lambda: preset("llama-tiny", kv_heads=3), "heads 4, kv_heads 3"),
        (lambda: preset("llama-tiny", hidden=0), "hidden must be at least 1, got 0"),
        (lambda: preset("llama-tiny", rope_theta=0.0), "rope_theta must be above 0, got 0.0"),
        (lambda: make()(jnp.zeros((1, 9), int)), "at most 8 tokens .sequence_length., got 9"),
    ],
)
def test_mistakes_are_explained(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.long)])
def test_attention_in_blocks_is_attention(causal):
    random, T = np.random.default_rng(0), 3 * layers.QUERY_BLOCK
    query, weight = random.normal(size=(2, 1, T, 2, 8)).astype(np.float32)
    key, value = random.normal(size=(2, 1, T, 1, 8)).astype(np.float32)

    @partial(jax.jit, static_argnums=0)
    def run(attention, *args):
        def loss(*args):
            return (attention(*args, is_causal=causal) * weight).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(*args)

    blocks = run(layers.blockwise_attention, query, key, value)
    whole = run(jax.nn.dot_product_attention, query, key, value)
    for ours, theirs in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


def test_llama_3_scales_the_slow_frequencies_alone():
    scaling = RopeScaling(factor=8.0)
    plain, stretched = (
        np.asarray(rotary_frequencies(128, 500_000.0, s), np.float64) for s in (None, scaling)
    )
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_array_equal(stretched[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(stretched[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (turns >= 1) & (turns <= 4)
    assert between.any()
    # the published code, in wavelengths
    wavelength = 2 * np.pi / plain[between]
    smooth = (8192 / wavelength - 1) / 3
    np.testing.assert_allclose(
        stretched[between], (1 - smooth) * plain[between] / 8 + smooth * plain[between], rtol=1e-5
    )


@pytest.mark.parametrize("wrong", [{"factor": 0.5}, {"factor": 8.0, "low_frequency_factor": 5.0}])
def test_an_impossible_scaling_is_refused(wrong):
    with pytest.raises(ValueError, match="RopeScaling"):
        RopeScaling(**wrong)
