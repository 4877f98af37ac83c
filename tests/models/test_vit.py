"""ViT against NumPy; pixels, patches, the loss of a classifier, published sizes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fsdp_jax.models import parameter_count
from fsdp_jax.models.losses import classification_loss
from fsdp_jax.models.vit import (
    PRESETS,
    ViT,
    ViTConfig,
    preset,
)

CONFIG = ViTConfig(image_size=12, patch=4, classes=8, layers=3, width=16, heads=2, hidden=24)


def make(seed: int = 0, **overrides) -> ViT:
    """With weights large enough that every part of the model shows in the logits."""
    model = ViT(
        dataclasses.replace(CONFIG, **overrides), rngs=nnx.Rngs(params=seed, dropout=seed + 1)
    )
    leaves, tree = jax.tree.flatten(nnx.state(model, nnx.Param))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        leaf + 0.2 * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(tree, drawn))
    return model


def some_batch(rows: int = 2, seed: int = 7) -> dict[str, np.ndarray]:
    random, side = np.random.default_rng(seed), CONFIG.image_size
    labels = random.integers(0, CONFIG.classes, rows).astype(np.int32)
    images = (
        random.integers(0, 128, (rows, side, side, 3)) + 16 * labels[:, None, None, None]
    ).astype(np.uint8)
    return {
        "images": images,
        "labels": labels,
        "mask": (random.random(rows) < 0.7).astype(np.float32),
    }


def floats(images: np.ndarray) -> np.ndarray:
    return (images / 127.5 - 1).astype(np.float32)


def numpy_forward(model: ViT, image: np.ndarray) -> np.ndarray:
    """One image, [H, W, 3] to [classes], in float64, patch by patch and head by head."""
    config, P = model.config, model.config.patch
    weights = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(model))
    )

    def norm(x, w):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_epsilon)
        return scaled * w["scale"] + w["bias"]

    def linear(x, w):
        return x @ w["kernel"] + w["bias"]

    side = range(0, config.image_size, P)
    patches = [image[i : i + P, j : j + P] for i in side for j in side]
    embedded = [np.einsum("ijc,ijcd->d", patch, weights["patches"]["kernel"]) for patch in patches]
    x = np.concatenate([weights["class_token"][0], np.stack(embedded) + weights["patches"]["bias"]])
    x = x + weights["positions"][0]
    for i in range(config.layers):
        w = jax.tree.map(lambda leaf, i=i: leaf[i], weights["blocks"])
        y, attended, K = norm(x, w["attn_norm"]), [], config.width // config.heads
        for h in range(config.heads):
            q, k, v = (linear(y, w["attn"][name])[:, h * K : (h + 1) * K] for name in "qkv")
            scores = np.exp(q @ k.T / np.sqrt(K))
            attended.append(scores / scores.sum(-1, keepdims=True) @ v)
        x = x + linear(np.concatenate(attended, axis=-1), w["attn"]["o"])
        y = linear(norm(x, w["mlp_norm"]), w["mlp"]["up"])
        x = x + linear(0.5 * y * (1 + np.vectorize(math.erf)(y / np.sqrt(2))), w["mlp"]["down"])
    return linear(norm(x[0], weights["norm"]), weights["head"])


def test_logits_are_those_of_numpy():
    model, images = make(), floats(some_batch()["images"])
    expected = np.stack([numpy_forward(model, image) for image in images])
    assert np.std(expected) > 0.3
    np.testing.assert_allclose(model(images), expected, rtol=2e-4, atol=2e-4)


def test_pixels_are_normalised_by_the_config():
    """Each colour by its own mean and deviation; floats are nobody's business but the caller's."""
    images, mean, std = some_batch()["images"], (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    expected = ((images / 255 - np.array(mean)) / np.array(std)).astype(np.float32)
    model = make(mean=mean, std=std)
    np.testing.assert_allclose(model(images), make()(expected), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(model(expected), make()(expected))
    np.testing.assert_allclose(make()(images), make()(floats(images)), rtol=1e-4, atol=1e-4)
    assert np.abs(model(images) - make()(images)).max() > 0.1
    batch = {"images": images, "labels": some_batch()["labels"]}
    by_hand = classification_loss(make(), batch | {"images": expected})[0]
    np.testing.assert_allclose(classification_loss(model, batch)[0], by_hand, rtol=1e-4)


def test_patches_are_a_convolution():
    model, images = make(), floats(some_batch()["images"])
    kernel, bias = model.patches.kernel[...], model.patches.bias[...]
    dims = ("NHWC", "HWIO", "NHWC")
    expected = jax.lax.conv_general_dilated(images, kernel, (4, 4), "VALID", dimension_numbers=dims)
    expected = expected.reshape(2, 9, 16) + bias[None, None]
    np.testing.assert_allclose(model.patches(images), expected, rtol=1e-4, atol=1e-5)


def test_every_patch_reaches_the_class_token():
    model, images = make(), floats(some_batch()["images"])
    before = model(images)
    for i in range(0, 12, 4):
        for j in range(0, 12, 4):
            changed = images.copy()
            changed[:, i : i + 4, j : j + 4] += 1
            assert np.all(np.any(before != model(changed), axis=-1))


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
    model, batch = make(), some_batch(6)
    assert 0 < batch["mask"].sum() < 6
    total, count = classification_loss(model, batch)
    logits = np.asarray(model(floats(batch["images"])), np.float64)
    by_hand = np.log(np.exp(logits).sum(-1)) - logits[np.arange(6), batch["labels"]]
    np.testing.assert_allclose(total, (by_hand * batch["mask"]).sum(), rtol=1e-5)
    assert (total.dtype, count.dtype, float(count)) == (
        jnp.float32,
        jnp.float32,
        batch["mask"].sum(),
    )
    other = batch | {"labels": np.where(batch["mask"] == 0, -1, batch["labels"])}
    np.testing.assert_array_equal(classification_loss(model, other)[0], total)
    bare = {
        "images": floats(batch["images"]),
        "labels": batch["labels"],
    }  # floats are taken as they are
    np.testing.assert_allclose(classification_loss(model, bare)[0], by_hand.sum(), rtol=1e-5)
    assert float(classification_loss(model, bare)[1]) == 6


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: preset("vit-b32"), "unknown preset 'vit-b32'; did you mean 'vit-b16'"),
        (lambda: preset("vit-tiny", head=3), "ViTConfig field 'head'; did you mean 'heads'"),
        (lambda: preset("vit-tiny", heads=3), "width 128, heads 3"),
        (lambda: preset("vit-tiny", patch=5), "image_size 32, patch 5"),
        (lambda: preset("vit-tiny", classes=0), "classes must be at least 1, got 0"),
        (lambda: preset("vit-tiny", norm_epsilon=0.0), "norm_epsilon must be above 0, got 0.0"),
        (lambda: preset("vit-tiny", dropout=1.0), "below 1, got 1.0"),
        (
            lambda: make()(jnp.zeros((1, 8, 12, 3))),
            r"images as uint8 or floats \[B, 12, 12, 3\], got float32 \[1, 8",
        ),
        (lambda: make()(jnp.zeros((1, 12, 12, 3), jnp.int32)), r"got int32 \[1, 12, 12, 3\]"),
        (
            lambda: preset("vit-tiny", mean=(0.5,)),
            r"ViTConfig.mean must be 3 numbers, got \(0.5,\)",
        ),
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
