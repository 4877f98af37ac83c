"""CaiT against the same mathematics in NumPy, by what it does, and sharded over 8 devices."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import Case, check, train, train_unsharded

import fsdp_jax as fsdp
from fsdp_jax.models.cait import (
    PRESETS,
    CaiT,
    CaiTBlock,
    CaiTConfig,
    ClassAttentionBlock,
    flops_per_example,
    parameter_count,
    preset,
)
from fsdp_jax.models.vision import classification_loss

pytestmark = pytest.mark.core

CONFIG = CaiTConfig(image_size=12, patch=4, classes=8, layers=3, width=16, heads=2, hidden=24)
BOTH = pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unrolled"])


def make(seed: int = 0, **overrides) -> CaiT:
    """With weights large enough that every part of the model shows in the logits."""
    model = CaiT(dataclasses.replace(CONFIG, **overrides), rngs=nnx.Rngs(params=seed))
    leaves, tree = jax.tree.flatten(nnx.state(model))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        leaf + 0.3 * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(tree, drawn))
    return model


def some_images(rows: int = 2) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(rows, 12, 12, 3)).astype(np.float32)


def some_batch(rows: int = 2, seed: int = 7) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, CONFIG.classes, rows).astype(np.int32)
    images = (random.integers(0, 128, (rows, 12, 12, 3)) + 16 * labels[:, None, None, None]).astype(
        np.uint8
    )
    return {"images": images, "labels": labels}


def numpy_forward(model: CaiT, image: np.ndarray) -> np.ndarray:
    """One image, [H, W, 3] to [classes], in float64, patch by patch and head by head."""
    config, P = model.config, model.config.patch
    weights = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(model))
    )
    H, K = config.heads, config.width // config.heads

    def norm(x, w):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_epsilon)
        return scaled * w["scale"] + w["bias"]

    def linear(x, w):
        return x @ w["kernel"] + w["bias"]

    def head(x, h):
        return x[:, h * K : (h + 1) * K]

    def softmax(x):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)

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

    def mlp(x, w):
        y = linear(x, w["up"])
        return linear(0.5 * y * (1 + np.vectorize(math.erf)(y / np.sqrt(2))), w["down"])

    def layers(name, count):
        return [jax.tree.map(lambda leaf, i=i: leaf[i], weights[name]) for i in range(count)]

    side = range(0, config.image_size, P)
    patches = [image[i : i + P, j : j + P] for i in side for j in side]
    x = np.stack(
        [np.einsum("ijc,ijcd->d", patch, weights["patches"]["kernel"]) for patch in patches]
    )
    x = x + weights["patches"]["bias"] + weights["positions"][0]
    for w in layers("blocks", config.layers):
        x = x + w["gamma_1"] * talking(norm(x, w["attn_norm"]), w["attn"])
        x = x + w["gamma_2"] * mlp(norm(x, w["mlp_norm"]), w["mlp"])
    token = weights["class_token"][0]
    for w in layers("class_blocks", config.class_layers):
        token = token + w["gamma_1"] * of_class(
            norm(np.concatenate([token, x]), w["attn_norm"]), w["attn"]
        )
        token = token + w["gamma_2"] * mlp(norm(token, w["mlp_norm"]), w["mlp"])
    return linear(norm(token[0], weights["norm"]), weights["head"])


@pytest.mark.long
def test_logits_are_those_of_numpy():
    model, images = make(), some_images()
    expected = np.stack([numpy_forward(model, image) for image in images])
    assert np.std(expected) > 0.3
    np.testing.assert_allclose(model(images), expected, rtol=5e-4, atol=5e-4)


def test_pixels_are_normalised_by_the_config():
    images, (mean, std) = some_batch()["images"], ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    expected = ((images / 255 - np.array(mean)) / np.array(std)).astype(np.float32)
    model = make(mean=mean, std=std)
    np.testing.assert_allclose(model(images), make()(expected), rtol=1e-4, atol=1e-4)
    assert np.abs(model(images) - make()(images)).max() > 0.1


@pytest.mark.long
def test_the_class_token_reads_every_patch_and_changes_none():
    model, images = make(), some_images()
    before = model(images)
    for i in range(0, 12, 4):
        changed = images.copy()
        changed[:, i : i + 4, :4] += 1
        assert np.all(np.any(before != model(changed), axis=-1))
    blocks = make(scan_layers=False).class_blocks
    patches = jax.random.normal(jax.random.key(0), (2, 9, 16))
    assert blocks[0](jnp.ones((2, 1, 16)), patches=patches).shape == (2, 1, 16)


@pytest.mark.parametrize(("depth", "scale"), [(18, 0.1), (19, 1e-5), (24, 1e-5), (36, 1e-6)])
def test_layer_scale_starts_by_depth(depth, scale):
    model = CaiT(dataclasses.replace(CONFIG, layers=depth), rngs=nnx.Rngs(0))
    for blocks in (model.blocks, model.class_blocks):
        np.testing.assert_allclose(blocks.gamma_1[...], scale, rtol=1e-6)
        np.testing.assert_allclose(blocks.gamma_2[...], scale, rtol=1e-6)
    assert dataclasses.replace(CONFIG, layers=depth, layer_scale=0.5).initial_scale == 0.5


def test_scanned_equals_unrolled_given_the_same_weights():
    scanned, unrolled = make(scan_layers=True), make(seed=5, scan_layers=False)
    weights = nnx.to_pure_dict(nnx.state(scanned))
    for name, count in (("blocks", CONFIG.layers), ("class_blocks", CONFIG.class_layers)):
        weights[name] = {
            i: jax.tree.map(lambda leaf, i=i: leaf[i], weights[name]) for i in range(count)
        }
    nnx.update(unrolled, weights)
    np.testing.assert_allclose(
        scanned(some_images()), unrolled(some_images()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count_is_the_real_count(name):
    config = preset(name)
    state = nnx.state(nnx.eval_shape(lambda: CaiT(config, rngs=nnx.Rngs(0))))
    assert parameter_count(config) == sum(leaf.size for leaf in jax.tree.leaves(state))


def test_parameter_counts_are_the_published_ones():
    published = {
        "cait-xxs24-224": 11.96,
        "cait-s24-224": 46.92,
        "cait-s36-384": 68.37,
        "cait-m36-384": 271.22,
        "cait-m48-448": 356.46,
    }
    assert {name: round(parameter_count(PRESETS[name]) / 1e6, 2) for name in published} == published


def test_flops_per_example_is_three_times_what_the_forward_pass_does():
    config = preset("cait-tiny", scan_layers=False)
    graph, state = nnx.split(nnx.eval_shape(lambda: CaiT(config, rngs=nnx.Rngs(0))))
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    cost = (
        jax.jit(lambda state, images: nnx.merge(graph, state)(images))
        .lower(state, images)
        .cost_analysis()
    )
    # the compiler also counts softmax, gelu and norms, a few per cent at this width
    assert cost["flops"] == pytest.approx(flops_per_example(config) / 3, rel=0.1)
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


@BOTH
def test_gradients_reach_every_parameter_of_every_layer(scan_layers):
    graph, params = nnx.split(make(scan_layers=scan_layers))
    grads = jax.jit(
        jax.grad(lambda params: classification_loss(nnx.merge(graph, params), some_batch())[0])
    )(params)
    for path, leaf in nnx.to_flat_state(grads):
        layers = (
            leaf[...] if scan_layers and path[0] in ("blocks", "class_blocks") else leaf[...][None]
        )
        # adding to every score changes no weight, so the gradients of these biases are rounding
        # alone
        no_effect = path[-2:] in (("k", "bias"), ("proj_l", "bias"))
        assert no_effect or np.all(np.abs(layers).reshape(len(layers), -1).max(-1) > 1e-6), path


@BOTH
@pytest.mark.parametrize("keep_norms", [True, False])
def test_bfloat16_weights_give_a_bfloat16_stream(scan_layers, keep_norms):
    model, images = make(scan_layers=scan_layers), some_images()
    expected = model(images)

    def cast(path, leaf):
        norm = any("norm" in str(key) for key in path)
        return leaf if norm and keep_norms else leaf.astype(jnp.bfloat16)

    nnx.update(model, jax.tree_util.tree_map_with_path(cast, nnx.state(model)))
    logits = model(images)
    assert keep_norms or logits.dtype == jnp.bfloat16
    assert np.mean(np.abs(logits.astype(jnp.float32) - expected)) < 0.05 * np.std(expected)


def test_a_compute_dtype_in_the_config_casts_without_touching_the_parameters():
    model = make(dtype="bfloat16")
    assert model(some_images()).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: preset("cait-s24"), "unknown preset 'cait-s24'; did you mean 'cait-s24-224'"),
        (lambda: preset("cait-tiny", head=3), "CaiTConfig field 'head'; did you mean 'heads'"),
        (
            lambda: preset("cait-tiny", heads=3),
            "CaiTConfig.width must be a multiple of heads, got width 128, heads 3",
        ),
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


# Sharded


@dataclasses.dataclass(frozen=True)
class Images(Case):
    def batch(self, step: int, rows: int = 16) -> dict[str, np.ndarray]:
        return some_batch(rows, step)


def case(**overrides: Any) -> Images:
    config = dataclasses.replace(CONFIG, **overrides)
    return Images(
        lambda rngs: CaiT(config, rngs=rngs), classification_loss, (CaiTBlock, ClassAttentionBlock)
    )


CASES = {"scanned": case(), "unrolled": case(scan_layers=False)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "prefetch"), [("scanned", "none"), ("scanned", "pre"), ("unrolled", "pre")]
)
def test_sharded_training_is_training(name, prefetch):
    local_batch = prefetch != "none"
    found, step = train(
        CASES[name], fsdp.make_mesh(data=8), steps=2, local_batch=local_batch, prefetch=prefetch
    )
    check(found, train_unsharded(CASES[name], steps=2))
    gathered = {path for path, comm in step.plan.comms.items() if comm.unit is not None}
    assert {path.split("/")[0] for path in gathered} == {"blocks", "class_blocks"}
    assert prefetch == "none" or (
        step.plan.report.prefetched == gathered and not step.plan.report.not_prefetched
    )


@pytest.mark.long
def test_sharded_training_in_bfloat16_stays_near():
    precision = fsdp.Precision(compute="bfloat16")
    found, _ = train(CASES["scanned"], fsdp.make_mesh(data=8), steps=2, precision=precision)
    np.testing.assert_allclose(found[0], train_unsharded(CASES["scanned"], steps=2)[0], rtol=2e-2)
