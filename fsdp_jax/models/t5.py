"""T5 in plain Flax NNX: an encoder and a decoder with RMSNorm and relative positions.

Shapes: B batch, S input sequence, T target sequence, D width, H heads, K head dim, F hidden width
of the MLP, V vocab, L layers.

The arithmetic is that of the weights on Hugging Face, of version 1.0 (a ReLU, the head tied to the
embedding) and of 1.1 (`gated`, its own head): no biases, no scaling of attention scores, one table
of relative positions for each stack. T5 also drops attention weights and hidden units; here dropout
acts on the embeddings, on what each block adds to the residual stream and on each stack's output,
so that any fused attention can be used. Sources: arXiv:1910.10683; 1.1, arXiv:2002.05202.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fsdp_jax.local_rows import on_local_rows
from fsdp_jax.models import layers
from fsdp_jax.models.config import BaseConfig, from_preset
from fsdp_jax.models.flops import training_flops
from fsdp_jax.models.layers import Attention, blockwise_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(BaseConfig):
    """The shape of a T5. Raises ValueError for sizes that do not fit together."""

    vocab_size: int = 32_128
    inputs_length: int = 512  # the longest input, in tokens
    targets_length: int = 512  # the longest target, in tokens
    layers: int  # blocks of the encoder
    decoder_layers: int
    head_dim: int  # not tied to the width: heads x head_dim may be less or more than it
    hidden: int  # hidden width of the MLP
    buckets: int = 32  # rows of each table of relative positions
    max_distance: int = 128  # from here on all distances share a bucket
    norm_epsilon: float = 1e-6
    gated: bool = False
    """The MLP of version 1.1, gelu(wi_0 x) * wi_1 x, instead of 1.0's relu(up x)."""
    tie_head: bool = True
    """Use the embedding as the output head, with its input scaled by width^-0.5, as 1.0 does."""
    dropout: float = 0.0  # dropout probability; above 0 the model needs a `dropout` random stream

    def __post_init__(self) -> None:
        super().__post_init__()
        even = self.buckets >= 4 and self.buckets % 2 == 0
        self.require("buckets", even, "even and at least 4")
        # the decoder gives half of its buckets to one distance each
        exact = self.buckets // 2
        self.require("max_distance", self.max_distance > exact, f"above {exact}, buckets / 2")


def _t5_config(
    depth: int, width: int, heads: int, hidden: int, head_dim: int = 64, **more: Any
) -> T5Config:
    """Makes a configuration with `depth` blocks in the encoder and as many in the decoder."""
    more |= {"layers": depth, "decoder_layers": depth, "head_dim": head_dim}
    return T5Config(width=width, heads=heads, hidden=hidden, **more)


_TINY: dict[str, Any] = {"vocab_size": 512, "inputs_length": 128, "targets_length": 128}
_V1_1: dict[str, Any] = {"gated": True, "tie_head": False}

PRESETS: dict[str, T5Config] = {
    "t5-tiny": _t5_config(2, 128, 4, 256, 32, **_TINY),  # 0.7M, bytes
    "t5-small": _t5_config(6, 512, 8, 2048),  # 60.5M
    "t5-base": _t5_config(12, 768, 12, 3072),  # 223M
    "t5-large": _t5_config(24, 1024, 16, 4096),  # 738M
    "t5-3b": _t5_config(24, 1024, 32, 16_384, 128),  # 2.85B
    "t5-11b": _t5_config(24, 1024, 128, 65_536, 128),  # 11.3B
    "t5-v1_1-small": _t5_config(8, 512, 6, 1024, **_V1_1),  # 77.0M
    "t5-v1_1-base": _t5_config(12, 768, 12, 2048, **_V1_1),  # 248M
    "t5-v1_1-large": _t5_config(24, 1024, 16, 2816, **_V1_1),  # 783M
    "t5-v1_1-xl": _t5_config(24, 2048, 32, 5120, **_V1_1),  # 2.85B
    "t5-v1_1-xxl": _t5_config(24, 4096, 64, 10_240, **_V1_1),  # 11.1B
    # The sizes that PyTorch's FSDP was measured with (arXiv:2304.11277). The counts are theirs,
    # 611M and 2.28B; the shapes are ours, and give those counts: near 1.1's large and xl, with the
    # MLP and the head of 1.0.
    "t5-611m": _t5_config(24, 1024, 16, 2808),  # 611M
    "t5-2.28b": _t5_config(24, 2048, 32, 5120),  # 2.281B
    "t5-11.3b": _t5_config(24, 1024, 128, 65_536, 128),  # t5-11b by its size
}
preset = partial(from_preset, PRESETS)


def relative_buckets(
    distance: np.ndarray, *, bidirectional: bool, buckets: int, max_distance: int
) -> np.ndarray:
    """Finds the row of the table for each distance, key position minus query position, as int32.

    Half of the buckets hold one distance each, the others ever more of them, logarithmically, up to
    `max_distance`. `bidirectional` gives keys after the query the upper half; otherwise they all
    count as distance 0, to be masked.
    """
    # keys after the query have the upper half of the buckets, or count as distance 0
    first = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    # One bucket for each distance below `exact`, logarithmic ones from there on: in float32, as the
    # weights were trained, since rounding decides where the logarithm meets an integer.
    exact = buckets // 2
    log_ratio = np.log(np.maximum(distance, 1) / np.float32(exact), dtype=np.float32)
    log_ratio = log_ratio / np.float32(math.log(max_distance / exact))
    coarse = exact + (log_ratio * np.float32(buckets - exact)).astype(np.int32)
    coarse = np.minimum(coarse, buckets - 1)
    return (first + np.where(distance < exact, distance, coarse)).astype(np.int32)


def relative_bias(
    table: jax.Array, length: int, config: T5Config, *, bidirectional: bool
) -> jax.Array:
    """Computes the bias of self-attention's scores, [1, H, T, T], from a table [buckets, H].

    T is `length`.
    """
    T = length
    sizes = {"buckets": config.buckets, "max_distance": config.max_distance}
    # R = 2T - 1 distances; query t's row is the T values from T - 1 - t on
    rows = relative_buckets(np.arange(1 - T, T), bidirectional=bidirectional, **sizes)
    by_distance_HR = table[rows].T
    # One value of padding, repeated T times and read as rows without it: each row starts one
    # further to the left. Slices have cheaper gradients than a lookup of T x T distances.
    H, R = by_distance_HR.shape
    repeated = jnp.broadcast_to(jnp.pad(by_distance_HR, ((0, 0), (0, 1)))[:, None], (H, T, R + 1))
    return repeated.reshape(H, T * (R + 1))[:, : T * R].reshape(1, H, T, R)[..., T - 1 :]


class T5Attention(layers.MultiHeadAttention):
    """Multi-head attention without biases and without scaling of scores."""

    def __init__(self, config: T5Config, *, attention: Attention, rngs: nnx.Rngs):
        D, K = config.width, config.head_dim
        # q starts smaller, in place of the scores' scale
        std = ((D * K) ** -0.5, D**-0.5, (config.heads * K) ** -0.5)
        super().__init__(config, head_dim=K, bias=False, std=std, attention=attention, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        source_BSD: jax.Array | None = None,
        *,
        is_causal: bool = False,
        bias: jax.Array | None = None,
        segments: layers.Segments | None = None,
    ) -> jax.Array:
        """Lets `x_BTD` attend to `source_BSD`, by default to itself; returns [B, T, D].

        `bias`: [n, H, T, S] for n equal parts of the batch. `segments`: see `layers.Attention`.
        """
        q_BTHK, k_BSHK, v_BSHK = self.project(x_BTD, source_BSD)

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, bias_HTS: jax.Array | None
        ) -> jax.Array:
            more: dict[str, Any] = {}
            if segments is not None:
                more["segments"] = segments
            if bias_HTS is not None:
                more["bias"] = bias_HTS[None]
            return self.attention(q, k, v, is_causal=is_causal, scale=1.0, **more)

        if bias is None:
            return self.project_out(attend(q_BTHK, k_BSHK, v_BSHK, segments, None), x_BTD)
        # Each part of the batch has its own bias, so that the bias's gradient is summed over the
        # rows of a part first.
        q, k, v, parts = jax.tree.map(
            lambda x: x.reshape(bias.shape[0], -1, *x.shape[1:]),
            (q_BTHK, k_BSHK, v_BSHK, segments),
        )
        return self.project_out(jax.vmap(attend)(q, k, v, parts, bias), x_BTD)


def _make_mlp(config: T5Config, *, rngs: nnx.Rngs) -> layers.MLP | layers.GatedMLP:
    """Makes an MLP: down(relu(up(x))), or gated: down(gelu(wi_0(x)) * wi_1(x)), the tanh gelu."""
    std = (config.width**-0.5, config.hidden**-0.5)
    settings: dict[str, Any] = {"std": std, "rngs": rngs}
    if config.gated:
        settings |= {"names": ("wi_0", "wi_1"), "activation": layers.gated_gelu}
        return layers.GatedMLP(config, config.hidden, **settings)
    return layers.MLP(config, config.hidden, bias=False, activation=jax.nn.relu, **settings)


class T5EncoderBlock(layers.ResidualBlock):
    """One pre-norm block: self-attention in both directions, then an MLP.

    It takes `bias`, [n, H, S, S] for n parts of the batch, and `segments`: see `T5Attention`.
    """

    def __init__(self, config: T5Config, *, attention: Attention, rngs: nnx.Rngs):
        parts = (layers.rms_norm, partial(T5Attention, attention=attention), _make_mlp)
        super().__init__(config, *parts, dropout=config.dropout, rngs=rngs)


class T5DecoderBlock(nnx.Module):
    """One pre-norm block: causal self-attention, attention to the encoder's output, then an MLP."""

    def __init__(self, config: T5Config, *, attention: Attention, rngs: nnx.Rngs):
        self.attn_norm = layers.rms_norm(config, rngs=rngs)
        self.attn = T5Attention(config, attention=attention, rngs=rngs)
        self.cross_norm = layers.rms_norm(config, rngs=rngs)
        self.cross = T5Attention(config, attention=attention, rngs=rngs)
        self.mlp_norm = layers.rms_norm(config, rngs=rngs)
        self.mlp = _make_mlp(config, rngs=rngs)
        self.dropout = layers.ResidualDropout(config.dropout, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        encoded: jax.Array,
        bias: jax.Array,
        segments: layers.Segments | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Maps [B, T, D] to [B, T, D] in its dtype; `encoded` [B, S, D], `bias` [n, H, T, T]."""
        attended = self.attn(self.attn_norm(x_BTD), is_causal=True, bias=bias)
        x_BTD = self.dropout.add(x_BTD, attended, deterministic)
        y_BTD = self.cross_norm(x_BTD).astype(encoded.dtype)
        attended = self.cross(y_BTD, encoded, segments=segments)
        x_BTD = self.dropout.add(x_BTD, attended, deterministic)
        return self.dropout.add(x_BTD, self.mlp(self.mlp_norm(x_BTD)), deterministic)


class T5Stack(nnx.Module):
    """The encoder or the decoder: its blocks, their shared relative positions, its final norm."""

    def __init__(
        self,
        config: T5Config,
        block: type[T5EncoderBlock | T5DecoderBlock],
        *,
        attention: Attention,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.is_encoder = issubclass(block, T5EncoderBlock)
        depth = config.decoder_layers
        if self.is_encoder:
            depth = config.layers
        std, dtype = config.width**-0.5, config.dtype
        # one table of relative positions, which all blocks of the stack use
        self.relative_bias = layers.Embedding(
            config.buckets, config.heads, std=std, dtype=dtype, rngs=rngs
        )
        make: Any = partial(block, config, attention=attention)
        self.blocks = layers.make_blocks(make, depth, config.scan_layers, rngs)
        self.norm = layers.rms_norm(config, rngs=rngs)
        self.dropout = layers.ResidualDropout(config.dropout, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, *, deterministic: bool, **settings: Any) -> jax.Array:
        """Maps [B, T, D] to [B, T, D] in the dtype of the input; `settings` are the blocks'."""

        def bias_of(x_BTD: jax.Array, table: jax.Array) -> jax.Array:
            return relative_bias(table, x_BTD.shape[1], self.config, bidirectional=self.is_encoder)

        # Computed on each device: the gradient of the bias is summed to that of its small table
        # before it is reduced.
        on_devices = on_local_rows(bias_of, replicated=(1,), row_per_device=True)
        bias = on_devices(x_BTD, self.relative_bias.table())
        x_BTD = self.dropout(x_BTD, deterministic=deterministic)
        settings |= {"bias": bias, "deterministic": deterministic}
        y_BTD = self.norm(layers.run_blocks(self.blocks, x_BTD, **settings))
        return self.dropout(y_BTD, deterministic=deterministic).astype(x_BTD.dtype)


class T5(layers.LanguageModel):
    """An encoder-decoder language model; arguments are as `fsdp_jax.models` says.

    The blocks are `encoder/blocks` and `decoder/blocks`. `attention` is given `scale`, `bias` and,
    with an `inputs_mask`, `segments`.

    Parameters start as in Mesh TensorFlow, which T5 was trained with: normal with std 1 for the
    embedding, and by the fan-in for everything else, its own head included.
    """

    def __init__(
        self, config: T5Config, *, rngs: nnx.Rngs, attention: Attention = blockwise_attention
    ):
        V, D, dtype = config.vocab_size, config.width, config.dtype
        self.config = config
        self.embed = layers.Embedding(V, D, std=1.0, tied=config.tie_head, dtype=dtype, rngs=rngs)
        self.encoder = T5Stack(config, T5EncoderBlock, attention=attention, rngs=rngs)
        self.decoder = T5Stack(config, T5DecoderBlock, attention=attention, rngs=rngs)
        if not config.tie_head:
            self.head = layers.Head(D, V, std=D**-0.5, dtype=dtype, rngs=rngs)

    def hidden_states(
        self,
        inputs_BS: jax.Array,
        targets_BT: jax.Array,
        *,
        inputs_mask: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Maps int32 [B, S] and [B, T] to the input of the head, [B, T, D].

        Args:
            inputs_BS: at most `inputs_length` tokens a row; more are a ValueError.
            targets_BT: the decoder's inputs: the targets shifted right; at most `targets_length`.
            inputs_mask: int32 [B, S], 1 for a token and 0 for padding, which is not attended to.
            deterministic: False applies dropout, and advances its random state.
        """
        config = self.config
        layers.check_length(inputs_BS, config.inputs_length, "inputs_length", "inputs")
        layers.check_length(targets_BT, config.targets_length, "targets_length", "targets")

        def segments_for(tokens: jax.Array) -> layers.Segments | None:
            """Makes segments by which `tokens`, the queries, attend to no padded input."""
            if inputs_mask is None:
                return None
            return jnp.ones_like(tokens), inputs_mask.astype(tokens.dtype)

        settings: dict[str, Any] = {"deterministic": deterministic}
        encoded = self.encoder(self.embed(inputs_BS), segments=segments_for(inputs_BS), **settings)
        settings |= {"encoded": encoded, "segments": segments_for(targets_BT)}
        x_BTD = self.decoder(self.embed(targets_BT), **settings)
        if not config.tie_head:
            return x_BTD
        # rows of the embedding have std 1: as a head they would make logits of std sqrt(D)
        return x_BTD * config.width**-0.5


def flops_per_example(config: T5Config) -> float:
    """Counts the `training_flops` of one example at the full lengths S and T.

    The encoder and the cross-attention's keys and values have S positions, the rest of the decoder
    and the head T; tables are looked up. Pairs are S x S in the encoder, T x T and T x S in the
    decoder.
    """
    S, T = config.inputs_length, config.targets_length
    multiplied = {
        "embed": T if config.tie_head else 0,
        "(encoder|decoder)/relative_bias": 0,
        "encoder|decoder/blocks/cross/[kv]/": S,
        "decoder|head": T,
    }
    pairs = config.layers * S * S + config.decoder_layers * (T * T + T * S)
    inner = config.heads * config.head_dim
    return training_flops(T5, config, multiplied, pairs=pairs, inner=inner)
