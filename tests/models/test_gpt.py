"""GPT: published sizes, the padded vocabulary, the loss by hand, dropout, sampling.

Compiles small models for their numbers; shapes are traced.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import call
from flax import nnx

from fsdp_jax.models import parameter_count
from fsdp_jax.models.gpt import (
    GPT,
    PRESETS,
    Block,
    GPTConfig,
    preset,
)
from fsdp_jax.models.losses import cross_entropy, next_token_loss
from fsdp_jax.models.sampling import sample

CONFIG = GPTConfig(vocab_size=19, sequence_length=8, layers=3, width=16, heads=2)
LOSS = nnx.jit(next_token_loss, static_argnames="train")


@functools.cache
def drawn(**overrides):
    """(graph, state) of a model, made in one compiled program."""
    config = dataclasses.replace(CONFIG, **overrides)

    def init():
        return nnx.split(GPT(config, rngs=nnx.Rngs(params=0, dropout=1)))

    graph, _ = nnx.split(nnx.eval_shape(lambda: nnx.merge(*init())))
    return graph, jax.jit(lambda: init()[1])()


def make(**overrides) -> GPT:
    graph, state = drawn(**overrides)
    return nnx.merge(graph, state, copy=True)


def some_tokens(rows: int = 2, length: int = 8) -> jax.Array:
    return jax.random.randint(jax.random.key(7), (rows, length), 0, CONFIG.vocab_size, jnp.int32)


def layer(model: GPT, i: int) -> Block:
    blocks = model.blocks
    return blocks[i] if isinstance(blocks, nnx.List) else jax.tree.map(lambda leaf: leaf[i], blocks)


def test_scanned_layers_start_from_different_weights():
    model = make(width=64, heads=4)
    qkv, out = model.blocks.attn.qkv.kernel[...], model.blocks.attn.out.kernel[...]
    assert qkv.shape == (3, 64, 192)
    assert not np.array_equal(qkv[0], qkv[1])
    assert np.std(qkv) == pytest.approx(0.02, rel=0.05)
    assert np.std(out) == pytest.approx(0.02 / np.sqrt(2 * 3), rel=0.05)


def test_parameter_counts_are_the_published_ones():
    published = {
        "gpt2": 124_439_808,
        "gpt2-medium": 354_823_168,
        "gpt2-large": 774_030_080,
        "gpt2-xl": 1_557_611_200,
    }
    assert {name: parameter_count(preset(name, pad_vocab_to=1)) for name in published} == published
    assert parameter_count(PRESETS["gpt2"]) == published["gpt2"] + 47 * 768
    assert parameter_count(PRESETS["tiny"]) == pytest.approx(0.84e6, rel=0.01)
    assert parameter_count(PRESETS["small"]) == pytest.approx(10.8e6, rel=0.05)


@pytest.mark.parametrize(("vocab", "rows"), [(50257, 50304), (256, 256), (19, 128)])
def test_the_vocabulary_is_padded_to_rows_that_divide(vocab, rows):
    def plain(**settings):
        config = dataclasses.replace(CONFIG, vocab_size=vocab, **settings)
        return GPT(config, rngs=nnx.Rngs(0))

    model = nnx.eval_shape(lambda: plain(tie_head=False))
    assert model.config.padded_vocab_size == rows
    assert model.embed.embedding.shape == (rows, 16)
    assert model.head.kernel.shape == (16, rows)
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    assert jax.eval_shape(lambda tokens: plain()(tokens), tokens).shape == (2, 8, vocab)


@pytest.mark.parametrize("tie_head", [True, pytest.param(False, marks=pytest.mark.long)])
def test_padded_rows_change_no_loss_and_get_no_gradient(tie_head):
    padded, V = make(tie_head=tie_head), CONFIG.vocab_size
    exact = make(tie_head=tie_head, pad_vocab_to=1)
    weights = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(padded)))
    embedding = weights["embed"]["embedding"]
    weights["embed"]["embedding"] = embedding[:V]
    if not tie_head:
        weights["head"]["kernel"] = weights["head"]["kernel"][:, :V]
    nnx.update(exact, weights)
    embedding[V:] = 1e3
    padded.embed.embedding.set_value(jnp.asarray(embedding))
    batch = {"tokens": some_tokens(length=9)}
    run = nnx.jit(nnx.value_and_grad(lambda model: next_token_loss(model, batch)[0]))
    loss, grads = run(padded)
    np.testing.assert_allclose(loss, LOSS(exact, batch)[0], rtol=1e-6)
    tables = [grads["embed"]["embedding"][...]] + (
        [] if tie_head else [grads["head"]["kernel"][...].T]
    )
    for table in tables:
        assert table.shape == (128, 16)
        assert np.all(table[V:] == 0)
        assert np.any(table[:V] != 0)


def numpy_loss(logits, targets) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(logp, np.asarray(targets)[..., None], -1)[..., 0]


def test_loss_is_the_sum_computed_by_hand_and_the_count():
    model, tokens = make(), some_tokens(length=9)
    total, count = LOSS(model, {"tokens": tokens})
    by_hand = numpy_loss(call(model, tokens[:, :-1]), tokens[:, 1:])
    np.testing.assert_allclose(total, by_hand.sum(), rtol=1e-5)
    assert (total.dtype, count.dtype, float(count)) == (jnp.float32, jnp.float32, 16.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bool_])
def test_the_mask_weighs_the_loss(dtype):
    model, tokens = make(), some_tokens(length=9)
    mask = np.zeros((2, 8))
    mask[0, 2], mask[1, 7] = 1, 1
    total, count = LOSS(model, {"tokens": tokens, "mask": jnp.asarray(mask, dtype)})
    by_hand = numpy_loss(call(model, tokens[:, :-1]), tokens[:, 1:])
    np.testing.assert_allclose(total, (by_hand * mask).sum(), rtol=1e-5)
    assert float(count) == 2.0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cross_entropy_and_its_gradient_by_hand(dtype):
    logits = (8 * jax.random.normal(jax.random.key(1), (2, 8, 19))).astype(dtype)
    targets = some_tokens()
    run = jax.jit(jax.value_and_grad(lambda logits: cross_entropy(logits, targets).sum()))
    loss, grad = run(logits)
    wide = np.asarray(logits, np.float64)
    softmax = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    np.testing.assert_allclose(loss, numpy_loss(wide, targets).sum(), rtol=1e-5)
    assert grad.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(grad, np.float64),
        softmax - np.eye(19)[targets],
        atol=1e-6 if dtype == jnp.float32 else 4e-3,
    )


def test_the_gradient_of_the_loss_scatters_into_no_array_of_logits():
    x, head = (
        jax.ShapeDtypeStruct((1, 64, 16), jnp.bfloat16),
        jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16),
    )
    targets = jnp.zeros((1, 64), jnp.int32)
    lowered = jax.jit(
        jax.grad(lambda x, head: cross_entropy(x @ head, targets).sum(), (0, 1))
    ).lower(x, head)
    assert "scatter" not in lowered.as_text()


@pytest.mark.parametrize("target", [-1, 19])
def test_a_target_outside_the_vocabulary_is_nan_unless_masked(target):
    model, tokens = make(), some_tokens(length=9).at[1, 8].set(target)
    assert np.isnan(LOSS(model, {"tokens": tokens})[0])
    masked = {"tokens": tokens, "mask": jnp.ones((2, 8)).at[1, 7].set(0)}
    graph, params = nnx.split(model)
    loss, grads = jax.jit(
        jax.value_and_grad(lambda params: next_token_loss(nnx.merge(graph, params), masked)[0])
    )(params)
    assert np.isfinite(loss)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.long)])
def test_dropout_differs_across_layers(scan_layers):
    model = make(scan_layers=scan_layers, dropout=0.5)
    dropouts = [layer(model, i).dropout for i in range(CONFIG.layers)] + [model.dropout]
    masks = [dropout(jnp.ones((4, 16)), deterministic=False) for dropout in dropouts]
    assert len({np.asarray(mask).tobytes() for mask in masks}) == CONFIG.layers + 1


def test_a_model_without_dropout_needs_no_stream_and_has_no_state():
    model = nnx.eval_shape(lambda: GPT(CONFIG, rngs=nnx.Rngs(params=0)))
    assert not jax.tree.leaves(nnx.state(model, nnx.RngState))
    batch = {"tokens": some_tokens(length=9)}
    assert LOSS(make(), batch, train=True)[0] == LOSS(make(), batch)[0]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_sampling_agrees_with_calling_the_model_token_by_token(temperature):
    model, key = make(), jax.random.key(3)
    tokens = sample(model, jnp.asarray([1, 2]), 9, temperature=temperature, key=key, window=8)
    assert (tokens.shape, tokens.dtype) == ((11,), jnp.int32)
    expected = [1, 2]
    while len(expected) < 11:
        seen = expected[-8:]
        logits = call(model, np.asarray([seen + [0] * (8 - len(seen))]))[0, len(seen) - 1]
        drawn = jax.random.categorical(jax.random.fold_in(key, len(expected)), logits)
        expected.append(int(drawn if temperature else jnp.argmax(logits)))
    assert tokens.tolist() == expected


def test_sampling_under_jit():
    graph, state = nnx.split(make())
    draw = jax.jit(
        lambda state, key: sample(
            nnx.merge(graph, state), jnp.asarray([1]), 5, temperature=0.8, key=key
        )
    )
    assert draw(state, jax.random.key(0)).shape == (6,)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: preset("gpt2-x1"), "did you mean 'gpt2-xl'"),
        (lambda: preset("??"), "one of: gpt-1t, gpt2"),
        (lambda: preset("tiny", layer=3), "did you mean 'layers'"),
        (lambda: preset("tiny", heads=5), "width 128, heads 5"),
        (lambda: preset("tiny", dropout=1.0), "below 1, got 1.0"),
        (lambda: preset("tiny", pad_vocab_to=0), "pad_vocab_to must be at least 1, got 0"),
        (lambda: preset("tiny", layers=0), "layers must be at least 1, got 0"),
        (lambda: make()(some_tokens(length=9)), "at most 8 tokens .sequence_length., got 9"),
        (lambda: sample(make(), jnp.zeros((0,)), 1, temperature=0, key=None), "P at least 1"),
    ],
)
def test_mistakes_are_explained(call, says):
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        call()


def test_a_subclass_of_a_configuration_is_of_its_family():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Extended(GPTConfig):
        experts: int = 0

    config = Extended(**dataclasses.asdict(CONFIG))
    assert parameter_count(config) == parameter_count(CONFIG)
    with pytest.raises(ValueError, match=r"Extended\.layers must be at least 1, got 0"):
        dataclasses.replace(config, layers=0)
