"""ViT against NumPy; pixels, patches, the loss of a classifier, published sizes.

Compiles the forward pass for its numbers.
"""

from typing import Any

import family_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import layer_norm, layers_of, linear, mlp, patches, softmax, weights_of
from family_cases import call, config_of, draw_batch
from flax import nnx

from fsdp_jax.models import parameter_count
from fsdp_jax.models.losses import classification_loss
from fsdp_jax.models.vit import PRESETS, ViT, preset

LOSS = nnx.jit(classification_loss)


def make(**overrides: Any) -> ViT:
    return family_cases.make("vit", **overrides)


def some_batch(rows: int = 2) -> dict[str, np.ndarray]:
    return draw_batch(*config_of("vit"), rows)


def floats(images: np.ndarray) -> np.ndarray:
    return (images / 127.5 - 1).astype(np.float32)


def numpy_forward(model: ViT, image: np.ndarray) -> np.ndarray:
    """One image, [H, W, 3] to [classes], in float64, patch by patch and head by head."""
    config, weights = model.config, weights_of(model)
    x = patches(image, weights["patches"], config.patch)
    x = np.concatenate([weights["class_token"][0], x]) + weights["positions"][0]
    K = config.width // config.heads
    for w in layers_of(weights["blocks"], config.layers):
        y, attended = layer_norm(x, w["attn_norm"], config.norm_epsilon), []
        for h in range(config.heads):
            q, k, v = (linear(y, w["attn"][name])[:, h * K : (h + 1) * K] for name in "qkv")
            attended.append(softmax(q @ k.T / np.sqrt(K)) @ v)
        x = x + linear(np.concatenate(attended, axis=-1), w["attn"]["o"])
        x = x + mlp(layer_norm(x, w["mlp_norm"], config.norm_epsilon), w["mlp"])
    return linear(layer_norm(x[0], weights["norm"], config.norm_epsilon), weights["head"])


def test_logits_are_those_of_numpy():
    model, images = make(), floats(some_batch()["images"])
    expected = np.stack([numpy_forward(model, image) for image in images])
    assert np.std(expected) > 0.3
    np.testing.assert_allclose(call(model, images), expected, rtol=2e-4, atol=2e-4)


def test_pixels_are_normalised_by_the_config():
    """Each colour by its own mean and deviation; floats are nobody's business but the caller's."""
    images, mean, std = some_batch()["images"], (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    expected = ((images / 255 - np.array(mean)) / np.array(std)).astype(np.float32)
    model = make(mean=mean, std=std)
    plain = make()
    np.testing.assert_allclose(call(model, images), call(plain, expected), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(call(model, expected), call(plain, expected))
    by_default = call(plain, images)
    np.testing.assert_allclose(by_default, call(plain, floats(images)), rtol=1e-4, atol=1e-4)
    assert np.abs(call(model, images) - by_default).max() > 0.1
    batch = {"images": images, "labels": some_batch()["labels"]}
    by_hand = LOSS(plain, batch | {"images": expected})[0]
    np.testing.assert_allclose(LOSS(model, batch)[0], by_hand, rtol=1e-4)


def test_patches_are_a_convolution():
    model, images = make(), floats(some_batch()["images"])
    kernel, bias = model.patches.kernel[...], model.patches.bias[...]
    dims = ("NHWC", "HWIO", "NHWC")
    expected = jax.lax.conv_general_dilated(images, kernel, (4, 4), "VALID", dimension_numbers=dims)
    expected = expected.reshape(2, 9, 16) + bias[None, None]
    np.testing.assert_allclose(model.patches(images), expected, rtol=1e-4, atol=1e-5)


def test_parameter_counts_are_the_published_ones():
    published = {
        "vit-s16": 22_050_664,
        "vit-b16": 86_567_656,
        "vit-l16": 304_326_632,
        "vit-h14": 632_045_800,
    }
    assert {name: parameter_count(PRESETS[name]) for name in published} == published
    assert parameter_count(PRESETS["vit-g14"]) == pytest.approx(1_012.61e6, rel=1e-5)


def test_loss_is_the_masked_sum_and_the_count():
    model = make()
    batch = some_batch(6) | {"mask": np.float32([1, 0, 1, 1, 0, 1])}
    total, count = LOSS(model, batch)
    logits = np.asarray(call(model, floats(batch["images"])), np.float64)
    by_hand = np.log(np.exp(logits).sum(-1)) - logits[np.arange(6), batch["labels"]]
    np.testing.assert_allclose(total, (by_hand * batch["mask"]).sum(), rtol=1e-5)
    assert (total.dtype, count.dtype, float(count)) == (jnp.float32, jnp.float32, 4)
    other = batch | {"labels": np.where(batch["mask"] == 0, -1, batch["labels"])}
    np.testing.assert_array_equal(LOSS(model, other)[0], total)
    # floats are taken as they are
    bare = {"images": floats(batch["images"]), "labels": batch["labels"]}
    total, count = LOSS(model, bare)
    np.testing.assert_allclose(total, by_hand.sum(), rtol=1e-5)
    assert float(count) == 6


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: preset("vit-tiny", heads=3), "width 128, heads 3"),
        (lambda: preset("vit-tiny", patch=5), "image_size 32, patch 5"),
        (lambda: preset("vit-tiny", classes=0), "classes must be at least 1, got 0"),
        (
            lambda: make()(jnp.zeros((1, 8, 12, 3))),
            r"images as uint8 or floats \[B, 12, 12, 3\], got float32 \[1, 8",
        ),
        (lambda: make()(jnp.zeros((1, 12, 12, 3), jnp.int32)), r"got int32 \[1, 12, 12, 3\]"),
        (lambda: preset("vit-tiny", mean=(0.5,)), r"ViTConfig.mean must be 3 numbers, got"),
        (lambda: preset("vit-tiny", std=(0.5, 0.0, 0.5)), r"ViTConfig.std must be above 0"),
    ],
)
def test_mistakes_are_explained(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_the_mean_and_deviation_of_pixels_may_be_lists():
    config = preset("vit-tiny", mean=[0.5, 0.4, 0.3])
    assert config.mean == (0.5, 0.4, 0.3)
    assert parameter_count(config) == parameter_count(preset("vit-tiny"))
