"""Attention by name, for whoever chooses one in a configuration; a model takes any callable like
these.

Shapes: B batch, T sequence, H query heads, G key and value heads, K head dim.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from fsdp_jax.local_rows import on_local_rows
from fsdp_jax.models.layers import Attention, Segments, blockwise_attention, dense_attention

Kind = Literal["blockwise", "flash", "cudnn"]

GPU = ("gpu", "cuda")
TILE = 128
"""Tokens that a flash kernel takes at once, at least."""


def make_attention(kind: Kind, platform: str) -> Attention:
    """The attention of that name for a platform of jax.

    Args:
        kind: `blockwise` runs everywhere; `flash` is jax's Pallas kernel for the platform, which
            compiles for a machine that is not there; `cudnn` is NVIDIA's, which needs cuDNN where
            it is compiled.
        platform: of the devices that it will run on: cpu, gpu, cuda or tpu.

    Raises:
        ValueError: there is no such kernel for that platform.

    """
    if kind not in get_args(Kind):
        raise ValueError(f"unknown attention '{kind}'; one of: {', '.join(get_args(Kind))}")
    if kind == "blockwise":
        return blockwise_attention
    if kind == "cudnn" and platform in GPU:
        return partial(dense_attention, implementation="cudnn")
    if kind == "flash" and platform in (*GPU, "tpu"):
        return partial(_on_local_rows, _splash if platform == "tpu" else _triton)
    raise ValueError(f"attention '{kind}' has no kernel for {platform}; use blockwise")


def _on_local_rows(
    kernel: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool,
    segments: Segments | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """A kernel that XLA cannot partition, as an `Attention`."""
    if bias is not None:
        raise ValueError(
            "flash attention adds no bias to the scores, as T5 needs; use blockwise attention, or cudnn"
        )
    given: tuple[jax.Array, ...] = () if segments is None else segments
    given = (
        given[:1] if segments is not None and segments[0] is segments[1] else given
    )  # of one sequence

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, *given: jax.Array) -> jax.Array:
        segments = (given[0], given[-1]) if given else None
        return kernel(query, key, value, is_causal=is_causal, segments=segments, scale=scale)

    out: jax.Array = on_local_rows(attend)(query, key, value, *given)
    return out


def _triton(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool,
    segments: Segments | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Flash attention on GPUs (Dao, arXiv:2307.08691), of a sequence on itself; see `Attention`."""
    if segments is not None and segments[0] is not segments[1]:
        raise ValueError(
            "flash attention on GPUs knows segments of one sequence only; use blockwise attention"
        )
    with (
        warnings.catch_warnings()
    ):  # newer releases of jax name a package of its own as the successor
        warnings.filterwarnings(
            "ignore", "jax.experimental.pallas.ops.gpu.attention is deprecated", DeprecationWarning
        )
        from jax.experimental.pallas.ops.gpu.attention import mha

    _block(query.shape[1])
    repeats = query.shape[2] // key.shape[2]  # the kernel knows no grouped queries
    key, value = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (key, value))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    of_tokens = None if segments is None else segments[0]
    out: jax.Array = mha(query, key, value, of_tokens, sm_scale=scale, causal=is_causal)
    return out


def _splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool,
    segments: Segments | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Splash attention on TPUs; see `Attention`. The kernel wants heads first, and queries that are
    scaled.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    T, S, H = query.shape[1], key.shape[1], query.shape[2]
    mask = (
        splash_attention_mask.CausalMask((T, S))
        if is_causal
        else splash_attention_mask.FullMask((T, S))
    )
    rows, columns = _block(T), _block(S)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_kv_compute=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_kv_dkv_compute=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * H),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
    )
    scaled = query * jnp.asarray(query.shape[3] ** -0.5 if scale is None else scale, query.dtype)
    heads_first = (jnp.moveaxis(x, 2, 1) for x in (scaled, key, value))
    of_tokens = None if segments is None else splash_attention_kernel.SegmentIds(*segments)
    out: jax.Array = jnp.moveaxis(jax.vmap(kernel)(*heads_first, of_tokens), 1, 2)
    return out


def _block(length: int) -> int:
    """The largest block that divides a sequence; ValueError where none does."""
    found = next((size for size in (512, 384, 256, TILE) if length % size == 0), None)
    if found is None:
        near = max(TILE, length // TILE * TILE)
        said = f"flash attention needs a sequence of a multiple of {TILE} tokens, got {length}"
        raise ValueError(f"{said}; use {near} or {near + TILE}, or blockwise attention")
    return found
