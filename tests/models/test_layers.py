"""What layers save for the backward pass, attention kernels, and the chunked loss.

Compiles single layers for their numbers and their memory.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl

from fsdp_jax.models import layers
from fsdp_jax.models.attention import make_attention
from fsdp_jax.models.losses import cross_entropy


def saved(fn, *args):
    """Shapes of what the backward pass of a function saves."""
    _, backward = jax.vjp(fn, *args)
    return sorted(
        tuple(leaf.shape) for leaf in jax.tree.leaves(backward) if getattr(leaf, "ndim", 0)
    )


def test_recomputed_functions_save_only_their_arguments():
    x = jnp.linspace(-2, 2, 12).reshape(3, 4)
    assert saved(layers.gelu, x) == [(3, 4)]
    assert len(saved(lambda x: jax.nn.gelu(x, approximate=True), x)) > 1
    assert saved(layers.gated_silu, x, x + 1) == [(3, 4), (3, 4)]


@pytest.mark.parametrize(
    ("kind", "of_flax"), [(layers.LayerNorm, nnx.LayerNorm), (layers.RMSNorm, nnx.RMSNorm)]
)
def test_norms_are_those_of_flax(kind, of_flax):
    norm, plain = kind(8, rngs=nnx.Rngs(0)), of_flax(8, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 8))
    graph, params = nnx.split(norm)
    plain_graph, _ = nnx.split(plain)

    def loss(graph, params, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, params)(x)))

    run = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)
    ours, theirs = (run(which, params, x) for which in (graph, plain_graph))
    for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.allclose(got, expected, atol=1e-6)
    assert (4, 8) in saved(norm, x)
    assert len([shape for shape in saved(norm, x) if shape == (4, 8)]) == 1


def test_a_norm_with_a_mask_works_in_a_scan():
    norm, mask = layers.LayerNorm(8, rngs=nnx.Rngs(0)), jnp.arange(8) < 5

    def body(x, _):
        return norm(x, mask=mask[None]), None

    run = jax.jit(jax.grad(lambda x: jnp.sum(jax.lax.scan(body, x, length=2)[0][:, :2])))
    found = run(jnp.ones((4, 8)) * jnp.arange(8.0)[None])
    assert jnp.isfinite(found).all()


def test_recomputation_can_be_differentiated_again_and_mapped():
    x = jnp.linspace(-1, 1, 6)
    both = layers.gelu, jax.nn.gelu
    ours, theirs = jax.jit(lambda x: [jax.vmap(jax.grad(jax.grad(fn)))(x) for fn in both])(x)
    assert np.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "platform", "said"),
    [
        ("flash", "cpu", "no kernel for cpu"),
        ("cudnn", "tpu", "no kernel for tpu"),
        ("flsh", "gpu", "unknown attention"),
    ],
)
def test_a_kernel_of_another_platform_is_refused(kind, platform, said):
    with pytest.raises(ValueError, match=said):
        make_attention(kind, platform)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_sequence_that_no_block_divides_is_refused(platform):
    short = jax.ShapeDtypeStruct((1, 200, 2, 128), jnp.float32)
    attend = make_attention("flash", platform)
    with pytest.raises(ValueError, match="a multiple of 128 tokens, got 200; use 128 or 256"):
        jax.eval_shape(lambda q: attend(q, q, q, is_causal=True), short)


def test_blockwise_attention_knows_segments_bias_and_scale():
    T, S = 1536, 96
    query = jax.random.normal(jax.random.key(0), (2, T, 2, 8))
    key, value = (jax.random.normal(jax.random.key(n), (2, S, 1, 8)) for n in (1, 2))
    bias = jax.random.normal(jax.random.key(3), (1, 2, T, S))
    segments = tuple(jax.random.randint(jax.random.key(n), (2, n), 0, 3) for n in (T, S))

    def run(attend, query, key, value, bias):
        more = {"segments": segments, "bias": bias, "scale": 0.5}
        return jnp.sum(jnp.sin(attend(query, key, value, is_causal=False, **more)))

    compiled = jax.jit(jax.value_and_grad(run, argnums=(1, 2, 3, 4)), static_argnums=0)
    ours, theirs = (
        compiled(attend, query, key, value, bias)
        for attend in (layers.blockwise_attention, layers.dense_attention)
    )
    for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.allclose(got, expected, atol=1e-4, rtol=1e-4)

    @jax.jit
    def both(query, key, value, bias):
        same = segments[0][:, :, None] == segments[1][:, None]
        scores = jnp.einsum("bthk,bsk->bhts", query, key[:, :, 0]) * 0.5 + bias
        weights = jax.nn.softmax(jnp.where(same[:, None], scores, -jnp.inf), axis=-1)
        more = {"segments": segments, "bias": bias, "scale": 0.5}
        dense = layers.dense_attention(query, key, value, is_causal=False, **more)
        return dense, jnp.einsum("bhts,bsk->bthk", weights, value[:, :, 0])

    dense, plain = both(query, key, value, bias)
    assert np.allclose(dense, plain, atol=1e-4)


@pytest.mark.parametrize(
    ("heads", "more"),
    [
        (2, {"segments": True, "scale": 0.3}),
        pytest.param(2, {}, marks=pytest.mark.long),
        pytest.param(4, {}, marks=pytest.mark.long),
    ],
)
def test_triton_attention_is_attention(heads, more, monkeypatch):
    """Interpreted: the kernel's arithmetic, masks and scale, with keys and values that several
    heads share.
    """
    real = pl.pallas_call
    monkeypatch.setattr(
        pl,
        "pallas_call",
        lambda *a, **k: real(*a, **{**k, "interpret": True, "compiler_params": None}),
    )
    random = np.random.default_rng(0)
    query = random.normal(size=(1, 128, 4, 32)).astype(np.float32)
    key, value = random.normal(size=(2, 1, 128, heads, 32)).astype(np.float32)
    of = (np.arange(128)[None] >= 50).astype(np.int32)
    settings = {"is_causal": True} | more | ({"segments": (of, of)} if more else {})
    ours = make_attention("flash", "gpu")(query, key, value, **settings)
    assert np.allclose(ours, layers.dense_attention(query, key, value, **settings), atol=1e-3)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_unsupported_arguments_of_a_flash_kernel_are_refused(platform):
    query, of = (
        jax.ShapeDtypeStruct((1, 128, 2, 128), jnp.float32),
        jax.ShapeDtypeStruct((1, 128), jnp.int32),
    )
    attend, bias = (
        make_attention("flash", platform),
        jax.ShapeDtypeStruct((1, 2, 128, 128), jnp.float32),
    )
    with pytest.raises(ValueError, match="adds no bias"):
        jax.eval_shape(lambda q, b: attend(q, q, q, is_causal=False, bias=b), query, bias)
    if platform == "gpu":
        with pytest.raises(ValueError, match="segments of one sequence"):
            jax.eval_shape(
                lambda q, a, b: attend(q, q, q, is_causal=False, segments=(a, b)), query, of, of
            )


@pytest.mark.parametrize(
    ("chunk", "dtype"),
    [
        (4, "float32"),
        (17, "bfloat16"),
        *(
            pytest.param(chunk, dtype, marks=pytest.mark.long)
            for chunk, dtype in ((1, "float32"), (1, "bfloat16"), (17, "float32"), (50, "float32"))
        ),
    ],
)
def test_a_chunked_loss_is_the_cross_entropy(chunk, dtype):
    head = layers.Head(8, 20, dtype=dtype, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 12, 8)).astype(dtype)
    targets = jax.random.randint(jax.random.key(1), (3, 12), 0, 17)
    graph, params = nnx.split(head)
    params = jax.tree.map(lambda leaf: (10 * leaf).astype(dtype), params)
    weight = jnp.linspace(0, 1, 12)[None]

    def whole(params, x):
        return jnp.sum(weight * cross_entropy(nnx.merge(graph, params)(x)[..., :17], targets))

    def chunked(params, x):
        return jnp.sum(
            weight * nnx.merge(graph, params).losses(x, targets, vocab_size=17, chunk=chunk)
        )

    ours, theirs = (
        jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(params, x) for fn in (chunked, whole)
    )
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert got.dtype == expected.dtype
        got, expected = (np.asarray(leaf, np.float32) for leaf in (got, expected))
        assert np.allclose(got, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def test_a_chunked_loss_never_holds_all_logits():
    T, V = 64, 4096

    def compiled(chunk):
        def loss(table, x, targets):
            head = layers.Embedding(V, 16, rngs=nnx.Rngs(0))
            head.embedding.set_value(table)
            whole = (
                cross_entropy(head.attend(x), targets)
                if chunk is None
                else head.losses(x, targets, vocab_size=V, chunk=chunk)
            )
            return jnp.sum(whole)

        shapes = [
            jax.ShapeDtypeStruct(s, d)
            for s, d in (((V, 16), "float32"), ((2, T, 16), "float32"), ((2, T), "int32"))
        ]
        return (
            jax.jit(jax.grad(loss, argnums=(0, 1)))
            .lower(*shapes)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    logits = 2 * T * V * 4
    assert compiled(None) > 0.9 * logits
    assert compiled(256) < 0.6 * logits


def test_an_empty_chunk_is_refused():
    head = layers.Head(8, 20, dtype=None, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="at least 1 token of the vocabulary, got 0"):
        head.losses(jnp.ones((1, 12, 8)), jnp.zeros((1, 12), jnp.int32), vocab_size=20, chunk=0)


def test_a_chunked_loss_of_no_token_is_not_a_number():
    head = layers.Head(8, 20, dtype=None, rngs=nnx.Rngs(0))
    found = head.losses(jnp.ones((1, 3, 8)), jnp.array([[-1, 0, 17]]), vocab_size=17, chunk=5)
    assert jnp.isnan(found).tolist() == [[True, False, True]]
