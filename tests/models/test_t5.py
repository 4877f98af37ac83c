"""T5 against NumPy; relative positions, padding, shifted targets, published sizes.

Compiles the forward pass for its numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import layers_of, rms_norm, softmax, weights_of
from family_cases import call, config_of, draw_batch, make, small
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jax.models import parameter_count
from fsdp_jax.models.losses import text_to_text_loss
from fsdp_jax.models.t5 import PRESETS, T5, preset, relative_buckets

VERSIONS = pytest.mark.parametrize("name", ["t5", pytest.param("t5-v1_1", marks=pytest.mark.long)])


def some_batch() -> dict[str, np.ndarray]:
    return draw_batch(*config_of("t5"))


def numpy_bucket(distance: int, *, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """The published rule, for one distance, in exact numbers."""
    first = 0
    if bidirectional:
        buckets //= 2
        first, distance = (buckets if distance > 0 else 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    # the largest step whose start, exact * (max / exact)^(step / steps), is not above the distance
    steps = buckets - exact
    starts = [exact * (max_distance / exact) ** (step / steps) for step in range(steps)]
    return first + exact + sum(start <= distance + 1e-9 for start in starts) - 1


@settings(deadline=None)
@given(
    st.integers(-5000, 5000),
    st.booleans(),
    st.sampled_from([(32, 128), (8, 20), (64, 1000), (8, 10)]),
)
def test_buckets_are_the_published_ones(distance, bidirectional, sizes):
    rule = {"bidirectional": bidirectional, "buckets": sizes[0], "max_distance": sizes[1]}
    found = relative_buckets(np.asarray([distance]), **rule)
    assert found.dtype == np.int32
    assert found[0] == numpy_bucket(distance, **rule)
    assert 0 <= found[0] < sizes[0]


def numpy_forward(
    model: T5, inputs: np.ndarray, mask: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """One example, [S] and [T] to [T, V], in float64, head by head."""
    config, weights = model.config, weights_of(model)
    K = config.head_dim

    def norm(x, scale):
        return rms_norm(x, scale, config.norm_epsilon)

    def attend(w, x, seen, allowed, table=None, bidirectional=True):
        out = []
        for h in range(config.heads):
            q, k, v = (
                y @ w[name]["kernel"][:, h * K : (h + 1) * K]
                for name, y in (("q", x), ("k", seen), ("v", seen))
            )
            scores = q @ k.T
            if table is not None:
                rule = {
                    "bidirectional": bidirectional,
                    "buckets": config.buckets,
                    "max_distance": config.max_distance,
                }
                rows = [
                    [numpy_bucket(s - t, **rule) for s in range(len(seen))] for t in range(len(x))
                ]
                scores = scores + table[np.asarray(rows), h]
            out.append(softmax(np.where(allowed, scores, -np.inf)) @ v)
        return np.concatenate(out, axis=-1) @ w["o"]["kernel"]

    def mlp(w, x):
        if config.gated:
            gate = x @ w["wi_0"]["kernel"]
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            return gate * (x @ w["wi_1"]["kernel"]) @ w["down"]["kernel"]
        return np.maximum(x @ w["up"]["kernel"], 0) @ w["down"]["kernel"]

    table = weights["embed"]["embedding"]
    x, stack, seen = table[inputs], weights["encoder"], mask[None].astype(bool)
    for w in layers_of(stack["blocks"], config.layers):
        y = norm(x, w["attn_norm"])
        x = x + attend(w["attn"], y, y, seen, stack["relative_bias"]["embedding"])
        x = x + mlp(w["mlp"], norm(x, w["mlp_norm"]))
    encoded = norm(x, stack["norm"])
    x, stack, T = table[targets], weights["decoder"], len(targets)
    for w in layers_of(stack["blocks"], config.decoder_layers):
        y = norm(x, w["attn_norm"])
        x = x + attend(
            w["attn"], y, y, np.tri(T, dtype=bool), stack["relative_bias"]["embedding"], False
        )
        x = x + attend(w["cross"], norm(x, w["cross_norm"]), encoded, seen)
        x = x + mlp(w["mlp"], norm(x, w["mlp_norm"]))
    x = norm(x, stack["norm"])
    return x / np.sqrt(config.width) @ table.T if config.tie_head else x @ weights["head"]["kernel"]


@VERSIONS
def test_logits_are_those_of_numpy(name):
    model, batch = small(name), some_batch()
    columns = (batch["inputs"], batch["inputs_mask"], batch["targets"])
    whole = model.model(model.params)
    expected = np.stack([numpy_forward(whole, *row) for row in zip(*columns, strict=True)])
    assert np.std(expected) > 0.3
    logits = model.logits(model.params, batch)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


def test_padding_does_not_matter():
    model, batch = small("t5"), some_batch()
    expected = model.logits(model.params, batch)
    other = np.where(batch["inputs_mask"] == 1, batch["inputs"], (batch["inputs"] + 5) % 32)
    assert not np.array_equal(other, batch["inputs"])
    logits = model.logits(model.params, batch | {"inputs": other})
    np.testing.assert_array_equal(expected, logits)
    for row in range(2):
        length = int(batch["inputs_mask"][row].sum())
        alone = batch["inputs"][row : row + 1, :length], batch["targets"][row : row + 1]
        short = call(model.model(model.params), *alone)
        np.testing.assert_allclose(short[0], expected[row], rtol=1e-4, atol=1e-5)


PUBLISHED = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1_1-small": 76_961_152,
    "t5-v1_1-base": 247_577_856,
    "t5-v1_1-large": 783_150_080,
    "t5-v1_1-xl": 2_849_757_184,
    "t5-v1_1-xxl": 11_135_332_352,
}


@pytest.mark.parametrize(
    "names", [["t5-3b", "t5-v1_1-small"], pytest.param(list(PUBLISHED), marks=pytest.mark.long)]
)
def test_parameter_counts_are_the_published_ones(names):
    found = {name: parameter_count(PRESETS[name]) for name in names}
    assert found == {name: PUBLISHED[name] for name in names}


@pytest.mark.long
def test_sizes_that_others_measured_have_their_parameter_counts():
    # as PyTorch wrote them
    measured = {"t5-611m": (611, 1e6), "t5-2.28b": (228, 1e7), "t5-11.3b": (113, 1e8)}
    assert {
        name: (round(parameter_count(PRESETS[name]) / unit), unit)
        for name, (_, unit) in measured.items()
    } == measured


@pytest.mark.long
@VERSIONS
def test_weights_start_from_the_documented_scales(name):
    _, config = config_of(name, width=128, heads=4, head_dim=32, hidden=256)
    found = nnx.to_pure_dict(jax.jit(lambda: nnx.state(T5(config, rngs=nnx.Rngs(0))))())
    attn, mlp = found["encoder"]["blocks"]["attn"], found["decoder"]["blocks"]["mlp"]
    scales = {
        (128 * 32) ** -0.5: [attn["q"]["kernel"]],
        128**-0.5: [
            attn["k"]["kernel"],
            attn["v"]["kernel"],
            mlp["wi_1" if config.gated else "up"]["kernel"],
        ]
        + ([found["head"]["kernel"]] if config.gated else []),
        (4 * 32) ** -0.5: [attn["o"]["kernel"]],
        256**-0.5: [mlp["down"]["kernel"]],
        1.0: [found["embed"]["embedding"]],
    }
    for scale, leaves in scales.items():
        for leaf in leaves:
            assert np.std(leaf) == pytest.approx(scale, rel=0.05)
    assert np.std(found["decoder"]["relative_bias"]["embedding"]) == pytest.approx(
        128**-0.5, rel=0.25
    )
    assert not np.array_equal(attn["q"]["kernel"][0], attn["q"]["kernel"][1])


def test_the_decoder_reads_the_targets_shifted_right():
    model, batch = make("t5"), some_batch()
    loss = nnx.jit(text_to_text_loss)
    total, count = loss(model, batch)
    shifted = np.concatenate([np.zeros((2, 1), np.int32), batch["targets"][:, :-1]], axis=1)
    same = small("t5")
    logits = np.asarray(same.logits(same.params, batch | {"targets": shifted}), np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    by_hand = -np.take_along_axis(logp, batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(total, (by_hand * batch["mask"]).sum(), rtol=1e-5)
    assert (total.dtype, count.dtype, float(count)) == (
        jnp.float32,
        jnp.float32,
        batch["mask"].sum(),
    )
    bare = {"inputs": batch["inputs"], "targets": batch["targets"]}
    full = bare | {"inputs_mask": np.ones_like(batch["inputs"]), "mask": np.ones((2, 8))}
    np.testing.assert_allclose(loss(model, bare), loss(model, full), rtol=1e-6)


def test_targets_of_weight_zero_may_be_any_number():
    model, batch = make("t5"), some_batch()
    batch["mask"][:, -2:] = 0
    loss = nnx.jit(text_to_text_loss)
    expected = loss(model, batch)
    for other in (-100, 31):
        targets = np.where(np.arange(8)[None] >= 6, other, batch["targets"])
        found = loss(model, batch | {"targets": targets})
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: preset("t5-tiny", decoder_layers=0), "decoder_layers must be at least 1, got 0"),
        (lambda: preset("t5-tiny", buckets=7), "buckets must be even and at least 4, got 7"),
        (
            lambda: preset("t5-tiny", max_distance=16),
            "max_distance must be above 16, buckets / 2, got 16",
        ),
        (
            lambda: make("t5")(jnp.zeros((1, 13), int), jnp.zeros((1, 8), int)),
            "at most 12 inputs .inputs_length., got 13",
        ),
        (
            lambda: make("t5")(jnp.zeros((1, 8), int), jnp.zeros((1, 9), int)),
            "at most 8 targets .targets_length., got 9",
        ),
    ],
)
def test_mistakes_are_explained(call, says):
    with pytest.raises(ValueError, match=says):
        call()
