"""What the model families share, in plain Flax NNX: layers, the stack of them, the loss, presets by name.

Shapes: B batch, T sequence, D width, H heads, K head dim, F hidden width of the MLP, V vocab, L layers.

Dtypes: with `dtype=None` a layer computes in the dtype that its inputs and parameters promote to, so whoever casts the
parameters chooses the compute dtype. Parameters are created in float32.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

INIT_STD = 0.02
LAYER_NORM_EPSILON = 1e-5


class Attention(Protocol):
    """`jax.nn.dot_product_attention`, or anything called like it."""

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool) -> jax.Array:
        """Queries [B, T, H, K], keys and values [B, S, G, K], H a multiple of G, to [B, T, H, K]."""


def recomputed(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`fn` of arrays (or trees of them), whose backward keeps the arguments alone and runs it again.

    For what is cheap beside the products around it: left alone, jax keeps every array between two products, which of a
    GPT's block are two thirds of all that is kept. Not `jax.checkpoint`: inside another one, whose policy keeps
    activations as a unit's does, it keeps what that one keeps. Derivatives are of reverse mode: `jax.jvp` of it is
    refused by jax.
    """

    @jax.custom_vjp
    def run(*args: Any) -> jax.Array:
        return fn(*args)

    def forward(*args: Any) -> tuple[jax.Array, Any]:
        return fn(*args), args

    def backward(args: Any, cotangent: jax.Array) -> Any:
        args = jax.lax.optimization_barrier(args)  # or XLA, seeing it computed before, keeps that after all
        return jax.vjp(fn, *args)[1](cotangent)

    run.defvjp(forward, backward)
    return run


BLOCK = 512  # queries that are attended together where a sequence is long


def blockwise_attention(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool) -> jax.Array:
    """`jax.nn.dot_product_attention`, in blocks of queries where there are more than two blocks of them.

    Query [B, T, H, K], key and value [B, S, G, K], result [B, T, H, K]. At T 2048 and H 32 the whole [H, T, T] of
    scores and weights takes 1.5 GiB per example; a block at a time, recomputed in the backward, a quarter of it (Rabe
    and Staats, 2021). With cuDNN, `jax.nn.dot_product_attention(..., implementation="cudnn")` takes less still.
    """
    B, T, H, K = query.shape
    if T <= 2 * BLOCK or T % BLOCK:
        return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal)

    def attend(first: jax.Array, block: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        S = key.shape[1]
        seen = (first + jnp.arange(BLOCK))[:, None] >= jnp.arange(S)[None] if is_causal else jnp.ones((BLOCK, S), bool)
        return jax.nn.dot_product_attention(block, key, value, mask=seen[None, None])

    blocks = jnp.moveaxis(query.reshape(B, T // BLOCK, BLOCK, H, K), 1, 0)
    out = jax.lax.map(lambda block: recomputed(attend)(*block, key, value), (jnp.arange(0, T, BLOCK), blocks))
    return jnp.moveaxis(out, 0, 1).reshape(B, T, H, K)


def linear(
    inputs: int, outputs: int, *, std: float = INIT_STD, bias: bool = True, dtype: str | None, rngs: nnx.Rngs
) -> nnx.Linear:
    """A Linear: kernel [inputs, outputs] drawn from normal(0, std), bias zero or none."""
    init = nnx.initializers.normal(std)
    return nnx.Linear(inputs, outputs, use_bias=bias, kernel_init=init, dtype=dtype, rngs=rngs)


class LayerNorm(nnx.LayerNorm):
    """A LayerNorm that is `recomputed`."""

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """[..., D] to [..., D]."""
        if mask is not None:
            return super().__call__(x, mask=mask)
        structure, params = nnx.split(self)
        return recomputed(lambda params, x: super(LayerNorm, nnx.merge(structure, params)).__call__(x))(params, x)


class RMSNorm(nnx.RMSNorm):
    """An RMSNorm that is `recomputed`."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """[..., D] to [..., D]."""
        if mask is not None:
            return super().__call__(x, mask=mask)
        structure, params = nnx.split(self)
        return recomputed(lambda params, x: super(RMSNorm, nnx.merge(structure, params)).__call__(x))(params, x)


def layer_norm(width: int, *, dtype: str | None, rngs: nnx.Rngs) -> LayerNorm:
    """A LayerNorm over D with scale and bias; its statistics are float32 whatever the dtype."""
    return LayerNorm(width, epsilon=LAYER_NORM_EPSILON, dtype=dtype, rngs=rngs)


def gelu(x: jax.Array) -> jax.Array:
    """The tanh approximation of gelu, `recomputed`."""
    return recomputed(partial(jax.nn.gelu, approximate=True))(x)


def gated_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, `recomputed`."""
    return recomputed(lambda gate, up: jax.nn.silu(gate) * up)(gate, up)


def embedding(count: int, width: int, *, dtype: str | None, rngs: nnx.Rngs) -> nnx.Embed:
    """A table [count, width] drawn from normal(0, 0.02); with dtype None its output has the table's dtype."""
    table = nnx.Embed(count, width, embedding_init=nnx.initializers.normal(INIT_STD), rngs=rngs)
    # nnx.Embed pins the dtype its table is created with; a table cast to bfloat16 later would be promoted back.
    table.dtype = dtype
    return table


class SelfAttention(nnx.Module):
    """Causal multi-head self-attention with one fused projection to queries, keys and values, in that order."""

    def __init__(
        self, width: int, heads: int, *, out_std: float, attention: Attention, dtype: str | None, rngs: nnx.Rngs
    ):
        self.heads = heads
        self.attention = attention
        self.qkv = linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.out = linear(width, width, std=out_std, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] to [B, T, D]; position t sees positions 0 to t."""
        B, T, D = x_BTD.shape
        parts = jnp.split(self.qkv(x_BTD), 3, axis=-1)
        q_BTHK, k_BTHK, v_BTHK = (part.reshape(B, T, self.heads, D // self.heads) for part in parts)
        return self.out(self.attention(q_BTHK, k_BTHK, v_BTHK, is_causal=True).reshape(B, T, D))


class MLP(nnx.Module):
    """Two Linears, D to F and back, with the tanh approximation of gelu between them."""

    def __init__(self, width: int, hidden: int, *, out_std: float, dtype: str | None, rngs: nnx.Rngs):
        self.up = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = linear(hidden, width, std=out_std, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        return self.down(gelu(self.up(x_BTD)))


def dropout(rate: float, *, rngs: nnx.Rngs) -> nnx.Dropout:
    """A Dropout with a `dropout` stream of its own; at rate 0 it has no stream, so the model has no random state."""
    return nnx.Dropout(rate, rngs=rngs if rate > 0 else None)


M = TypeVar("M", bound=nnx.Module)


def make_blocks(make: Callable[[nnx.Rngs], M], count: int, *, scan_layers: bool, rngs: nnx.Rngs) -> "M | nnx.List[M]":
    """`count` blocks for `run_blocks`: with `scan_layers` one module whose leaves have a leading dim L, else a list.

    Every block draws from random streams of its own.
    """
    if not scan_layers:
        return nnx.List([make(rngs) for _ in range(count)])

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make_all(rngs: nnx.Rngs) -> M:
        return make(rngs)

    return make_all(rngs)


def run_blocks(blocks: nnx.Module, x: jax.Array, **settings: Any) -> jax.Array:
    """Passes `x` through `make_blocks`' blocks in order, each called with `settings` too; all keep its shape, dtype."""
    if isinstance(blocks, nnx.List):
        for block in blocks:
            x = block(x, **settings)
        return x

    # Layers change their state (dropout counters), never their structure. Saying so also lets a model that is closed
    # over be called inside other transformations, such as the loop of a sampler.
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, graph_updates=False)
    def run(block: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return block(x, **settings)

    return run(blocks, x)


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Negative log likelihood in nats, float32 [B, T], computed in float32 whatever the dtype of the logits.

    Where a target is not one of 0 to V-1 the loss is NaN.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    V = logits_BTV.shape[-1]
    # Not take_along_axis: its gradient scatters into a float32 [B, T, V] of zeros. This one fuses with the softmax's,
    # and no float32 logits are stored.
    is_target_BTV = jax.lax.broadcasted_iota(targets_BT.dtype, logits_BTV.shape, 2) == targets_BT[..., None]
    picked_BT = jnp.where(is_target_BTV, logits_BTV, 0.0).sum(-1)
    loss_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - picked_BT
    return jnp.where((targets_BT >= 0) & (targets_BT < V), loss_BT, jnp.nan)


def next_token_loss(
    model: Callable[..., jax.Array], batch: Mapping[str, jax.Array], *, train: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The sum of the cross-entropy in nats and the number of targets it is over, both float32 scalars.

    `batch` has `tokens`, int32 [B, T+1], and may have `mask`, [B, T], the weight of each target (absent: all 1);
    where it is 0 the target may be any number. They are returned apart so that sums over microbatches and devices can
    be divided once. `train=True` applies dropout.
    """
    tokens = batch["tokens"]
    logits_BTV = model(tokens[:, :-1], deterministic=not train)
    loss_BT = cross_entropy(logits_BTV, tokens[:, 1:])
    mask_BT = batch["mask"].astype(jnp.float32) if "mask" in batch else jnp.ones_like(loss_BT)
    return jnp.where(mask_BT == 0, 0.0, loss_BT * mask_BT).sum(), mask_BT.sum()


C = TypeVar("C")


def from_preset(presets: Mapping[str, C], name: str, overrides: Mapping[str, Any]) -> C:
    """The preset `name` with fields replaced; ValueError for an unknown name or field says what was probably meant."""
    _check_known("preset", name, presets)
    config: Any = presets[name]
    for field in overrides:
        _check_known(f"{type(config).__name__} field", field, config.__dataclass_fields__)
    return dataclasses.replace(config, **overrides)


def _check_known(kind: str, word: str, known: Mapping[str, Any]) -> None:
    if word not in known:
        close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'?" if close else "one of: " + ", ".join(known)
        raise ValueError(f"unknown {kind} '{word}'; {hint}")
