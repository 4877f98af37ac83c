"""What the model families share, in plain Flax NNX: layers, the stack of them, the loss, presets by
name.

Shapes: B batch, T sequence, D width, H heads, K head dim, F hidden width of the MLP, V vocab, L
layers.

Dtypes: with `dtype=None` a layer computes in the dtype that its inputs and parameters promote to,
so whoever casts the parameters chooses the compute dtype. Parameters are created in float32.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from fsdp_jax.local_rows import on_local_rows
from fsdp_jax.models.chunked_loss import chunked_losses

INIT_STD = 0.02
LAYER_NORM_EPSILON = 1e-5


Segments = tuple[jax.Array, jax.Array]


class Attention(Protocol):
    """`dense_attention`, or anything called like it. A model passes only those keywords that it
    needs.
    """

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        is_causal: bool,
        segments: Segments | None = None,
        bias: jax.Array | None = None,
        scale: float | None = None,
    ) -> jax.Array:
        """Queries [B, T, H, K], keys and values [B, S, G, K], H a multiple of G, to [B, T, H, K].

        `segments`: a pair of int32 [B, T] and [B, S]; a query sees keys of its own number alone.
        `bias`: [1 or B, H, T, S], added to the scores. `scale`: of the scores, K^-0.5 where absent.
        """


def recomputed(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`fn` of arrays (or trees of them), whose backward keeps the arguments alone and runs it
    again.

    For what is cheap beside the products around it: left alone, jax keeps every array between two
    products, which of a GPT's block are two thirds of all that is kept. Not `jax.checkpoint`:
    inside another one, whose policy keeps activations as a unit's does, it keeps what that one
    keeps. Derivatives are of reverse mode: `jax.jvp` of it is refused by jax.
    """

    @jax.custom_vjp
    def run(*args: Any) -> jax.Array:
        return fn(*args)

    def forward(*args: Any) -> tuple[jax.Array, Any]:
        return fn(*args), args

    def backward(args: Any, cotangent: jax.Array) -> Any:
        args = jax.lax.optimization_barrier(
            args
        )  # or XLA, seeing it computed before, keeps that after all
        return jax.vjp(fn, *args)[1](cotangent)

    run.defvjp(forward, backward)
    return run


BLOCK = 512  # queries that are attended together where a sequence is long


def dense_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool,
    segments: Segments | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> jax.Array:
    """`jax.nn.dot_product_attention` with segments; see `Attention`."""
    mask = None if segments is None else (segments[0][:, :, None] == segments[1][:, None])[:, None]
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        scale=scale,
        implementation=implementation,
    )


def blockwise_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool,
    segments: Segments | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """`dense_attention`, in blocks of queries where there are more than two blocks of them.

    At T 2048 and H 32 the whole [H, T, T] of scores and weights takes 1.5 GiB per example; a block
    at a time, recomputed in the backward, a quarter of it (Rabe and Staats, 2021). Kernels take
    less still: see `attention.py`.
    """
    B, T, H, K = query.shape
    if T <= 2 * BLOCK or T % BLOCK:
        return dense_attention(
            query, key, value, is_causal=is_causal, segments=segments, bias=bias, scale=scale
        )
    of_queries, of_keys = segments or (None, None)

    def attend(
        block: Any, key: jax.Array, value: jax.Array, of_keys: jax.Array | None
    ) -> jax.Array:
        first, query, of_queries, bias = block
        S = key.shape[1]
        seen = (
            (first + jnp.arange(BLOCK))[:, None] >= jnp.arange(S)[None]
            if is_causal
            else jnp.ones((BLOCK, S), bool)
        )
        seen = seen[None, None]
        if of_keys is not None:
            seen &= (of_queries[:, :, None] == of_keys[:, None])[:, None]
        return jax.nn.dot_product_attention(query, key, value, bias, seen, scale=scale)

    def cut(x: jax.Array | None, dim: int) -> jax.Array | None:
        if x is None:
            return None
        return jnp.moveaxis(
            x.reshape(*x.shape[:dim], T // BLOCK, BLOCK, *x.shape[dim + 1 :]), dim, 0
        )

    blocks = (jnp.arange(0, T, BLOCK), cut(query, 1), cut(of_queries, 1), cut(bias, 2))
    out = jax.lax.map(lambda block: recomputed(attend)(block, key, value, of_keys), blocks)
    return jnp.moveaxis(out, 0, 1).reshape(B, T, H, K)


def linear(
    inputs: int,
    outputs: int,
    *,
    std: float = INIT_STD,
    bias: bool = True,
    dtype: str | None,
    rngs: nnx.Rngs,
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
        return recomputed(
            lambda params, x: super(LayerNorm, nnx.merge(structure, params)).__call__(x)
        )(params, x)


class RMSNorm(nnx.RMSNorm):
    """An RMSNorm that is `recomputed`."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """[..., D] to [..., D]."""
        if mask is not None:
            return super().__call__(x, mask=mask)
        structure, params = nnx.split(self)
        return recomputed(
            lambda params, x: super(RMSNorm, nnx.merge(structure, params)).__call__(x)
        )(params, x)


def layer_norm(width: int, *, dtype: str | None, rngs: nnx.Rngs) -> LayerNorm:
    """A LayerNorm over D with scale and bias; its statistics are float32 whatever the dtype."""
    return LayerNorm(width, epsilon=LAYER_NORM_EPSILON, dtype=dtype, rngs=rngs)


def gelu(x: jax.Array) -> jax.Array:
    """The tanh approximation of gelu, `recomputed`."""
    return recomputed(partial(jax.nn.gelu, approximate=True))(x)


def gated_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, `recomputed`."""
    return recomputed(lambda gate, up: jax.nn.silu(gate) * up)(gate, up)


class Embedding(nnx.Embed):
    """A table of vectors; a `tied` one is the output head too."""

    tied: bool = False

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Int [B, T] to [B, T, D] in `dtype`, or else the table's."""
        if not self.tied:
            return super().__call__(inputs, out_sharding)
        # A tied table has two gradients. Left alone, XLA reduces each by itself, or gathers the
        # activations of one. Where the lookup's is added up on each device, it joins them and
        # reduces their sum.
        return on_local_rows(_look_up, replicated=(1,))(inputs, self.table())

    def table(self) -> jax.Array:
        """The table [V, D] in the dtype that it is looked up in."""
        table_VD: jax.Array = self.embedding[...]
        return table_VD if self.dtype is None else table_VD.astype(self.dtype)

    def losses(
        self, x_BTD: jax.Array, targets_BT: jax.Array, vocab_size: int, chunk: int
    ) -> jax.Array:
        """`chunked_losses` of the logits that `attend` makes."""
        dtype = self.dtype or jnp.result_type(x_BTD, self.embedding[...])
        x_BTD, table_VD = x_BTD.astype(dtype), self.embedding[...].astype(dtype)
        return chunked_losses(
            x_BTD, table_VD, targets_BT, dim=0, vocab_size=vocab_size, chunk=chunk
        )


def _look_up(tokens: jax.Array, table_VD: jax.Array) -> jax.Array:
    return jnp.take(table_VD, tokens, axis=0)


class Head(nnx.Linear):
    """The Linear from the residual stream to logits."""

    def losses(
        self, x_BTD: jax.Array, targets_BT: jax.Array, vocab_size: int, chunk: int
    ) -> jax.Array:
        """`chunked_losses` of its logits."""
        dtype = self.dtype or jnp.result_type(x_BTD, self.kernel[...])
        x_BTD, kernel_DV = x_BTD.astype(dtype), self.kernel[...].astype(dtype)
        return chunked_losses(
            x_BTD, kernel_DV, targets_BT, dim=1, vocab_size=vocab_size, chunk=chunk
        )


def embedding(
    count: int,
    width: int,
    *,
    std: float = INIT_STD,
    tied: bool = False,
    dtype: str | None,
    rngs: nnx.Rngs,
) -> Embedding:
    """A table [count, width] drawn from normal(0, std); with dtype None its output has the table's
    dtype.
    """
    table = Embedding(count, width, embedding_init=nnx.initializers.normal(std), rngs=rngs)
    # nnx.Embed pins the dtype its table is created with; a table cast to bfloat16 later would be
    # promoted back.
    table.dtype = dtype
    table.tied = tied
    return table


def head(width: int, vocab_size: int, *, dtype: str | None, rngs: nnx.Rngs) -> Head:
    """A Head without bias: kernel [width, vocab_size] drawn from normal(0, 0.02)."""
    init = nnx.initializers.normal(INIT_STD)
    return Head(width, vocab_size, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs)


class SelfAttention(nnx.Module):
    """Causal multi-head self-attention with one fused projection to queries, keys and values, in
    that order.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        out_std: float,
        attention: Attention,
        dtype: str | None,
        rngs: nnx.Rngs,
    ):
        self.heads = heads
        self.attention = attention
        self.qkv = linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.out = linear(width, width, std=out_std, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        """[B, T, D] to [B, T, D]; position t sees positions 0 to t, of its own segment where there
        are segments.
        """
        B, T, D = x_BTD.shape
        parts = jnp.split(self.qkv(x_BTD), 3, axis=-1)
        q_BTHK, k_BTHK, v_BTHK = (part.reshape(B, T, self.heads, D // self.heads) for part in parts)
        attended = self.attention(q_BTHK, k_BTHK, v_BTHK, is_causal=True, **within(segments_BT))
        return self.out(attended.reshape(B, T, D))


def within(segments_BT: jax.Array | None) -> dict[str, Any]:
    """Attention's keyword for self-attention inside segments; nothing where there are none."""
    return {} if segments_BT is None else {"segments": (segments_BT, segments_BT)}


class MLP(nnx.Module):
    """Two Linears, D to F and back, with the tanh approximation of gelu between them."""

    def __init__(
        self, width: int, hidden: int, *, out_std: float, dtype: str | None, rngs: nnx.Rngs
    ):
        self.up = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = linear(hidden, width, std=out_std, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        return self.down(gelu(self.up(x_BTD)))


def dropout(rate: float, *, rngs: nnx.Rngs) -> nnx.Dropout:
    """A Dropout with a `dropout` stream of its own; at rate 0 it has no stream, so the model has no
    random state.
    """
    return nnx.Dropout(rate, rngs=rngs if rate > 0 else None)


M = TypeVar("M", bound=nnx.Module)


def make_blocks(
    make: Callable[[nnx.Rngs], M], count: int, *, scan_layers: bool, rngs: nnx.Rngs
) -> "M | nnx.List[M]":
    """`count` blocks for `run_blocks`: with `scan_layers` one module whose leaves have a leading
    dim L, else a list.

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
    """Passes `x` through `make_blocks`' blocks in order, each called with `settings` too; all keep
    its shape, dtype.
    """
    if isinstance(blocks, nnx.List):
        for block in blocks:
            x = block(x, **settings)
        return x

    # Layers change their state (dropout counters), never their structure. Saying so also lets a
    # model that is closed over be called inside other transformations, such as the loop of a
    # sampler.
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, graph_updates=False)
    def run(block: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return block(x, **settings)

    return run(blocks, x)


class LanguageModel(nnx.Module):
    """A decoder-only language model: `_trunk`, and a head that is the embedding's table or a matrix
    of its own.

    Subclasses set `config` (with `tie_head` and `vocab_size`), `embed` and, where it is not tied,
    `head`.
    """

    config: Any
    embed: Embedding
    head: Head

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """int32 [B, T] to logits [B, T, V] in the compute dtype; ValueError where T exceeds the
        config's.

        `segments` and `positions`, int32 [B, T], are of packed documents: a token sees those before
        it in its own segment alone. `deterministic=False` applies dropout, where there is any, and
        advances its random state.
        """
        x_BTD = self._trunk(tokens_BT, segments, positions, deterministic)
        logits = self.embed.attend(x_BTD) if self.config.tie_head else self.head(x_BTD)
        return logits[..., : self.config.vocab_size]

    def losses(
        self,
        tokens_BT: jax.Array,
        targets_BT: jax.Array,
        *,
        chunk: int,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Cross-entropy of each target, float32 [B, T], without ever holding all logits; see
        `chunked.py`.
        """
        x_BTD = self._trunk(tokens_BT, segments, positions, deterministic)
        head = self.embed if self.config.tie_head else self.head
        return head.losses(x_BTD, targets_BT, self.config.vocab_size, chunk)

    def _trunk(
        self,
        tokens_BT: jax.Array,
        segments: jax.Array | None,
        positions: jax.Array | None,
        deterministic: bool,
    ) -> jax.Array:
        """All but the head, to [B, T, D]."""
        raise NotImplementedError


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Negative log likelihood in nats, float32 [B, T], computed in float32 whatever the dtype of
    the logits.

    Where a target is not one of 0 to V-1 the loss is NaN.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    V = logits_BTV.shape[-1]
    # Not take_along_axis: its gradient scatters into a float32 [B, T, V] of zeros. This one fuses
    # with the softmax's, and no float32 logits are stored.
    is_target_BTV = (
        jax.lax.broadcasted_iota(targets_BT.dtype, logits_BTV.shape, 2) == targets_BT[..., None]
    )
    picked_BT = jnp.where(is_target_BTV, logits_BTV, 0.0).sum(-1)
    loss_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - picked_BT
    return jnp.where((targets_BT >= 0) & (targets_BT < V), loss_BT, jnp.nan)


def next_token_loss(
    model: Any, batch: Mapping[str, jax.Array], *, train: bool = False, chunk: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The sum of the cross-entropy in nats and the number of targets it is over, both float32
    scalars.

    `batch` has `tokens`, int32 [B, T+1], and may have `mask`, [B, T], the weight of each target
    (absent: all 1); where it is 0 the target may be any number. Packed documents have `segments`
    and `positions`, int32 [B, T]. They are returned apart so that sums over microbatches and
    devices can be divided once. `train=True` applies dropout. `chunk`: tokens of the vocabulary
    whose logits are made at once, for models that have `losses` (`chunked_losses`).
    """
    tokens = batch["tokens"]
    settings: dict[str, Any] = {
        name: batch[name] for name in ("segments", "positions") if name in batch
    }
    settings["deterministic"] = not train
    if chunk is None:
        loss_BT = cross_entropy(model(tokens[:, :-1], **settings), tokens[:, 1:])
    else:
        loss_BT = model.losses(tokens[:, :-1], tokens[:, 1:], chunk=chunk, **settings)
    return masked_sum(loss_BT, batch.get("mask"))


def masked_sum(losses: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(the sum of losses times mask, the sum of the mask), float32 scalars. Losses where the mask
    is 0 may be NaN.
    """
    weight = jnp.ones_like(losses) if mask is None else mask.astype(jnp.float32)
    return jnp.where(weight == 0, 0.0, losses * weight).sum(), weight.sum()


C = TypeVar("C")


def from_preset(presets: Mapping[str, C], name: str, overrides: Mapping[str, Any]) -> C:
    """The preset `name` with fields replaced; ValueError for an unknown name or field says what was
    probably meant.
    """
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
