"""Attention kernels by name, for configurations; a model takes any callable like `Attention`.

Shapes: B batch, T sequence, H query heads, G key and value heads, K head dim.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from fsdp_jax.errors import ArgumentError
from fsdp_jax.local_rows import on_local_rows
from fsdp_jax.models.layers import Attention, Segments, blockwise_attention, dense_attention

AttentionKind = Literal["blockwise", "flash", "cudnn"]

GPU = ("gpu", "cuda")
TILE = 128  # the smallest block of tokens of a flash kernel


def make_attention(kind: AttentionKind, platform: str) -> Attention:
    """Finds the attention of that name for devices of a jax platform: cpu, gpu, cuda or tpu.

    `blockwise` runs everywhere; `flash` is jax's Pallas kernel for the platform, which also
    compiles without the device; `cudnn` is NVIDIA's, which needs cuDNN where it is compiled. Raises
    ValueError where there is no such kernel for that platform.
    """
    if kind not in get_args(AttentionKind):
        choices = ", ".join(get_args(AttentionKind))
        raise _attention_error(f"unknown attention '{kind}'; one of: {choices}")
    if kind == "blockwise":
        return blockwise_attention
    if kind == "cudnn" and platform in GPU:
        return partial(dense_attention, implementation="cudnn")
    if kind == "flash" and platform == "tpu":
        return partial(_attend_on_local_rows, _flash_on_tpu)
    if kind == "flash" and platform in GPU:
        return partial(_attend_on_local_rows, _flash_on_gpu)
    raise _attention_error(f"attention '{kind}' has no kernel for {platform}; use blockwise")


def _attend_on_local_rows(
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
    """An `Attention` by a kernel that XLA cannot partition: each device calls it on its own rows.

    `kernel` takes query, key and value, and then no segments, one array where queries and keys
    have the same, or two.
    """
    if bias is not None:
        what = "flash attention adds no bias to the scores, as T5 needs"
        raise _attention_error(f"{what}; use blockwise attention, or cudnn")
    if scale is None:
        scale = query.shape[3] ** -0.5
    # of a self-attention both sides have the same segments, which are passed once
    sides: tuple[jax.Array, ...] = segments or ()
    if segments is not None and segments[0] is segments[1]:
        sides = segments[:1]

    def attend(*arrays: jax.Array) -> jax.Array:
        return kernel(*arrays, is_causal=is_causal, scale=scale)

    return on_local_rows(attend)(query, key, value, *sides)


def _flash_on_gpu(*arrays: jax.Array, is_causal: bool, scale: float) -> jax.Array:
    """Flash self-attention on GPUs (Dao, arXiv:2307.08691), for `_attend_on_local_rows`."""
    query, key, value, *segments = arrays
    if len(segments) > 1:
        what = "flash attention on GPUs knows segments of one sequence only"
        raise _attention_error(f"{what}; use blockwise attention")
    # newer releases of jax deprecate the module in favor of a package of its own
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "jax.experimental.pallas.ops.gpu.attention is deprecated", DeprecationWarning
        )
        from jax.experimental.pallas.ops.gpu.attention import mha

    # raises for a length that the kernel's blocks do not divide; the kernel chooses its own blocks
    _flash_block_size(query.shape[1])
    # it has no grouped queries either: each query head gets keys and values of its own
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1:
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    segment_ids = next(iter(segments), None)
    return mha(query, key, value, segment_ids, sm_scale=scale, causal=is_causal)


def _flash_on_tpu(*arrays: jax.Array, is_causal: bool, scale: float) -> jax.Array:
    """Splash attention on TPUs, for `_attend_on_local_rows`."""
    query, key, value, *segments = arrays
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    # one mask for each head; the kernel skips the blocks that it hides
    T, S, H = query.shape[1], key.shape[1], query.shape[2]
    mask_class = splash_attention_mask.CausalMask if is_causal else splash_attention_mask.FullMask
    mask = splash_attention_mask.MultiHeadMask([mask_class((T, S))] * H)
    # the sizes of blocks in the forward pass and in the two backward kernels (dkv, dq)
    of_queries = ("block_q", "block_q_dkv", "block_q_dq")
    sizes: dict[str, Any] = dict.fromkeys(of_queries, _flash_block_size(T))
    of_keys = ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute")
    sizes |= dict.fromkeys((*of_keys, "block_kv_dq"), _flash_block_size(S))
    blocks = splash_attention_kernel.BlockSizes(**sizes)
    kernel = splash_attention_kernel.make_splash_mha(
        mask, block_sizes=blocks, head_shards=1, q_seq_shards=1
    )
    # it takes heads before the sequence, one example at a time, and does not scale the scores
    scaled = query * jnp.asarray(scale, query.dtype)
    heads_first = (jnp.moveaxis(x, 2, 1) for x in (scaled, key, value))
    segment_ids = None
    if segments:  # of the queries and of the keys, or of both
        segment_ids = splash_attention_kernel.SegmentIds(segments[0], segments[-1])
    return jnp.moveaxis(jax.vmap(kernel)(*heads_first, segment_ids), 1, 2)


def _flash_block_size(length: int) -> int:
    """Finds the largest block of tokens that divides `length`. Raises ValueError without any."""
    for size in (512, 384, 256, TILE):
        if length % size == 0:
            return size
    near = max(TILE, length // TILE * TILE)
    what = f"flash attention needs a sequence of a multiple of {TILE} tokens, got {length}"
    raise _attention_error(f"{what}; use {near} or {near + TILE}, or blockwise attention")


def _attention_error(what: str) -> ValueError:
    """Returns the error for an attention that cannot be used; `what` says why."""
    return ArgumentError(what, where="model.attention")
