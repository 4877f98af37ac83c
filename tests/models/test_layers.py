"""What layers keep for the backward, and the attention kernels against plain attention."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import pallas as pl

from fsdp_jax.models import layers
from fsdp_jax.models.attention import make_attention


def saved(fn, *args):
    """Shapes of what the backward of a function keeps."""
    _, backward = jax.vjp(fn, *args)
    return sorted(tuple(leaf.shape) for leaf in jax.tree.leaves(backward) if getattr(leaf, "ndim", 0))


def test_what_is_recomputed_keeps_its_arguments_alone():
    x = jnp.linspace(-2, 2, 12).reshape(3, 4)
    assert saved(layers.gelu, x) == [(3, 4)]
    assert len(saved(lambda x: jax.nn.gelu(x, approximate=True), x)) > 1
    assert saved(layers.gated_silu, x, x + 1) == [(3, 4), (3, 4)]


@pytest.mark.parametrize("kind", [layers.LayerNorm, layers.RMSNorm])
def test_norms_are_those_of_flax(kind):
    norm, plain = kind(8, rngs=nnx.Rngs(0)), kind.__mro__[1](8, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 8))
    graph, params = nnx.split(norm)
    plain_graph, _ = nnx.split(plain)

    def loss(graph, params, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, params)(x)))

    ours, theirs = (jax.grad(loss, argnums=(1, 2))(which, params, x) for which in (graph, plain_graph))
    for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert jnp.allclose(got, expected, atol=1e-6)
    assert (4, 8) in saved(norm, x)
    assert len([shape for shape in saved(norm, x) if shape == (4, 8)]) == 1


def test_a_norm_with_a_mask_works_in_a_scan():
    norm, mask = layers.LayerNorm(8, rngs=nnx.Rngs(0)), jnp.arange(8) < 5

    def body(x, _):
        return norm(x, mask=mask[None]), None

    found = jax.grad(lambda x: jnp.sum(jax.lax.scan(body, x, length=2)[0][:, :2]))(
        jnp.ones((4, 8)) * jnp.arange(8.0)[None]
    )
    assert jnp.isfinite(found).all()


def test_recomputation_can_be_differentiated_again_and_mapped():
    x = jnp.linspace(-1, 1, 6)
    ours, theirs = (jax.vmap(jax.grad(jax.grad(fn)))(x) for fn in (layers.gelu, jax.nn.gelu))
    assert jnp.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("sequence", [1536, 2048])
def test_blockwise_attention_takes_fewer_keys_than_queries(sequence):
    query, key = (jax.random.normal(jax.random.key(n), (1, n, 2, 8)) for n in (sequence, 64))
    ours = layers.blockwise_attention(query, key, key, is_causal=False)
    assert jnp.allclose(ours, jax.nn.dot_product_attention(query, key, key), atol=1e-5)


@pytest.mark.parametrize("heads", [2, 4])
def test_triton_attention_is_attention(heads, monkeypatch):
    """Interpreted: the kernel's arithmetic, masks and scale, with keys and values that several heads share."""
    real = pl.pallas_call
    monkeypatch.setattr(
        pl, "pallas_call", lambda *a, **k: real(*a, **{**k, "interpret": True, "compiler_params": None})
    )
    query = jax.random.normal(jax.random.key(0), (1, 128, 4, 32))
    key, value = (jax.random.normal(jax.random.key(n), (1, 128, heads, 32)) for n in (1, 2))
    ours = make_attention("flash", "gpu")(query, key, value, is_causal=True)
    plain = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    assert jnp.allclose(ours, plain, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "platform", "said"),
    [
        ("flash", "cpu", "no kernel for cpu"),
        ("cudnn", "tpu", "no kernel for tpu"),
        ("flsh", "gpu", "unknown attention"),
    ],
)
def test_kernels_are_of_their_platform(kind, platform, said):
    with pytest.raises(ValueError, match=said):
        make_attention(kind, platform)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_sequence_that_no_block_divides_is_refused(platform):
    short = jax.ShapeDtypeStruct((1, 200, 2, 128), jnp.float32)
    attend = make_attention("flash", platform)
    with pytest.raises(ValueError, match="a multiple of 128 tokens, got 200; use 128 or 256"):
        jax.eval_shape(lambda q: attend(q, q, q, is_causal=True), short)
