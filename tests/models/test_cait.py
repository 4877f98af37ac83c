"""CaiT against NumPy; class attention, LayerScale, published sizes and FLOPs.

Compiles the forward pass for its numbers.
"""

import dataclasses
from typing import Any

import family_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import layer_norm, layers_of, linear, mlp, patches, softmax, weights_of
from family_cases import call, config_of
from flax import nnx

from fsdp_jax.models import parameter_count
from fsdp_jax.models.cait import PRESETS, CaiT, flops_per_example, preset


def make(**overrides: Any) -> CaiT:
    return family_cases.make("cait", **overrides)


def some_images(rows: int = 2) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(rows, 12, 12, 3)).astype(np.float32)


def numpy_forward(model: CaiT, image: np.ndarray) -> np.ndarray:
    """One image, [H, W, 3] to [classes], in float64, patch by patch and head by head."""
    config, weights = model.config, weights_of(model)
    H, K = config.heads, config.width // config.heads

    def norm(x, w):
        return layer_norm(x, w, config.norm_epsilon)

    def head(x, h):
        return x[:, h * K : (h + 1) * K]

    def talking(x, w):
        q, k, v = np.split(linear(x, w["qkv"]), 3, axis=-1)
        scores = [head(q, h) @ head(k, h).T / np.sqrt(K) for h in range(H)]
        mixed = [
            sum(w["proj_l"]["kernel"][h, g] * scores[h] for h in range(H)) + w["proj_l"]["bias"][g]
            for g in range(H)
        ]
        seen = [softmax(each) for each in mixed]
        again = [
            sum(w["proj_w"]["kernel"][h, g] * seen[h] for h in range(H)) + w["proj_w"]["bias"][g]
            for g in range(H)
        ]
        return linear(np.concatenate([again[h] @ head(v, h) for h in range(H)], axis=-1), w["o"])

    def of_class(x, w):
        q, k, v = linear(x[:1], w["q"]), linear(x, w["k"]), linear(x, w["v"])
        out = [softmax(head(q, h) @ head(k, h).T / np.sqrt(K)) @ head(v, h) for h in range(H)]
        return linear(np.concatenate(out, axis=-1), w["o"])

    x = patches(image, weights["patches"], config.patch) + weights["positions"][0]
    for w in layers_of(weights["blocks"], config.layers):
        x = x + w["gamma_1"] * talking(norm(x, w["attn_norm"]), w["attn"])
        x = x + w["gamma_2"] * mlp(norm(x, w["mlp_norm"]), w["mlp"])
    token = weights["class_token"][0]
    for w in layers_of(weights["class_blocks"], config.class_layers):
        seen = norm(np.concatenate([token, x]), w["attn_norm"])
        token = token + w["gamma_1"] * of_class(seen, w["attn"])
        token = token + w["gamma_2"] * mlp(norm(token, w["mlp_norm"]), w["mlp"])
    return linear(norm(token[0], weights["norm"]), weights["head"])


def test_logits_are_those_of_numpy():
    model, images = make(), some_images()
    expected = np.stack([numpy_forward(model, image) for image in images])
    assert np.std(expected) > 0.3
    np.testing.assert_allclose(call(model, images), expected, rtol=5e-4, atol=5e-4)


def test_layer_scale_starts_by_depth():
    for depth, scale in ((18, 0.1), (19, 1e-5), (24, 1e-5), (36, 1e-6)):
        assert config_of("cait", layers=depth)[1].initial_scale == scale, depth
    _, config = config_of("cait", layers=19)

    @jax.jit
    def gammas():
        model = CaiT(config, rngs=nnx.Rngs(0))
        both = model.blocks, model.class_blocks
        return [gamma[...] for each in both for gamma in (each.gamma_1, each.gamma_2)]

    for gamma in gammas():
        np.testing.assert_allclose(gamma, 1e-5, rtol=1e-6)
    assert dataclasses.replace(config, layer_scale=0.5).initial_scale == 0.5


def test_parameter_counts_are_the_published_ones():
    published = {
        "cait-xxs24-224": 11.96,
        "cait-s24-224": 46.92,
        "cait-s36-384": 68.37,
        "cait-m36-384": 271.22,
        "cait-m48-448": 356.46,
    }
    assert {name: round(parameter_count(PRESETS[name]) / 1e6, 2) for name in published} == published


def test_flops_per_example_are_the_papers():
    # the paper's table 3 counts multiplications and additions together as one, of a forward pass,
    # in units of 1e9
    paper = {
        "cait-xxs24-224": 2.5,
        "cait-s24-224": 9.4,
        "cait-s36-384": 48.0,
        "cait-m36-384": 173.3,
    }
    for name, flops in paper.items():
        assert flops_per_example(PRESETS[name]) / 6e9 == pytest.approx(flops, rel=0.02)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: preset("cait-tiny", heads=3), "CaiTConfig.width must be a multiple of heads, got"),
        (lambda: preset("cait-tiny", patch=5), "image_size 32, patch 5"),
        (lambda: preset("cait-tiny", class_layers=0), "class_layers must be at least 1, got 0"),
        (lambda: preset("cait-tiny", layer_scale=0.0), "layer_scale must be above 0, got 0.0"),
        (
            lambda: make()(jnp.zeros((1, 16, 16, 3))),
            r"images as uint8 or floats \[B, 12, 12, 3\], got float32 \[1, 16",
        ),
    ],
)
def test_mistakes_are_explained(call, says):
    with pytest.raises(ValueError, match=says):
        call()
