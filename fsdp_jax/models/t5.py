"""T5 in plain Flax NNX: an encoder and a decoder of pre-norm blocks with RMSNorm and relative
positions.

Shapes: B batch, S input sequence, T target sequence, D width, H heads, K head dim, F hidden width
of the MLP, V vocab, L layers.

The arithmetic is that of the weights on Hugging Face, of version 1.0 (a ReLU, the head tied to the
embedding) and of
1.1 (`gated`, its own head): no biases, no scaling of attention scores, one table of relative
  positions for each stack.
T5 also drops attention weights and hidden units; here dropout acts on the embeddings, on what each
block adds to the residual stream and on each stack's output, so that any fused attention can be
used. Sources: arXiv:1910.10683; 1.1, arXiv:2002.05202.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fsdp_jax.local_rows import on_local_rows
from fsdp_jax.models import layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
    """The shape of a T5. Raises ValueError where the numbers do not fit together."""

    vocab_size: int = 32_128
    inputs_length: int = 512
    """The longest input, in tokens."""
    targets_length: int = 512
    """The longest target, in tokens."""
    layers: int
    """Of the encoder."""
    decoder_layers: int
    width: int
    heads: int
    head_dim: int
    """Not tied to the width: heads x head_dim may be less or more than it."""
    hidden: int
    """Hidden width of the MLP."""
    buckets: int = 32
    """Rows of each table of relative positions."""
    max_distance: int = 128
    """From here on all distances share a bucket."""
    norm_epsilon: float = 1e-6
    gated: bool = False
    """The MLP of version 1.1, gelu(wi_0 x) * wi_1 x, instead of 1.0's relu(up x)."""
    tie_head: bool = True
    """Use the embedding table as the output head, and scale what goes into it by width^-0.5, as version 1.0 does."""
    dropout: float = 0.0
    """The probability that a value is dropped; above 0 the model needs a `dropout` random stream."""
    scan_layers: bool = True
    """Stack the blocks' parameters and compile one block of each stack; False keeps lists of blocks."""
    dtype: str | None = None
    """Compute dtype by name; None follows the parameters and inputs."""

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "inputs_length",
            "targets_length",
            "layers",
            "decoder_layers",
            "width",
            "heads",
        )
        for name in (*sizes, "head_dim", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"T5Config.{name} must be at least 1, got {getattr(self, name)}")
        if self.buckets < 4 or self.buckets % 2:
            raise ValueError(f"T5Config.buckets must be even and at least 4, got {self.buckets}")
        if (
            self.max_distance <= self.buckets // 2
        ):  # the decoder gives half of its buckets to one distance each
            where = f"max_distance {self.max_distance}, buckets {self.buckets}"
            raise ValueError(f"T5Config.max_distance must be above buckets / 2, got {where}")
        if not self.norm_epsilon > 0:
            raise ValueError(f"T5Config.norm_epsilon must be above 0, got {self.norm_epsilon}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"T5Config.dropout must be at least 0 and below 1, got {self.dropout}")


def _t5(
    depth: int, width: int, heads: int, hidden: int, head_dim: int = 64, **more: Any
) -> T5Config:
    return T5Config(
        layers=depth,
        decoder_layers=depth,
        width=width,
        heads=heads,
        hidden=hidden,
        head_dim=head_dim,
        **more,
    )


_V1_1: dict[str, Any] = {"gated": True, "tie_head": False}

PRESETS: dict[str, T5Config] = {
    "t5-tiny": _t5(
        2, 128, 4, 256, 32, vocab_size=512, inputs_length=128, targets_length=128
    ),  # 0.7M, bytes
    "t5-small": _t5(6, 512, 8, 2048),  # 60.5M
    "t5-base": _t5(12, 768, 12, 3072),  # 223M
    "t5-large": _t5(24, 1024, 16, 4096),  # 738M
    "t5-3b": _t5(24, 1024, 32, 16_384, 128),  # 2.85B
    "t5-11b": _t5(24, 1024, 128, 65_536, 128),  # 11.3B
    "t5-v1_1-small": _t5(8, 512, 6, 1024, **_V1_1),  # 77.0M
    "t5-v1_1-base": _t5(12, 768, 12, 2048, **_V1_1),  # 248M
    "t5-v1_1-large": _t5(24, 1024, 16, 2816, **_V1_1),  # 783M
    "t5-v1_1-xl": _t5(24, 2048, 32, 5120, **_V1_1),  # 2.85B
    "t5-v1_1-xxl": _t5(24, 4096, 64, 10_240, **_V1_1),  # 11.1B
    # The sizes that PyTorch's FSDP was measured with (arXiv:2304.11277). The counts are theirs,
    # 611M and 2.28B; the shapes are ours, and give those counts: near 1.1's large and xl, with the
    # MLP and the head of 1.0.
    "t5-611m": _t5(24, 1024, 16, 2808),  # 611M
    "t5-2.28b": _t5(24, 2048, 32, 5120),  # 2.281B
    "t5-11.3b": _t5(24, 1024, 128, 65_536, 128),  # t5-11b by its size
}


def preset(name: str, **overrides: Any) -> T5Config:
    """The preset `name` with fields replaced; ValueError for an unknown name or field says what was
    probably meant.
    """
    return layers.from_preset(PRESETS, name, overrides)


def _norm(config: T5Config, *, rngs: nnx.Rngs) -> layers.RMSNorm:
    """RMSNorm over D, x / sqrt(mean(x^2) + epsilon) times a scale, in float32 whatever the dtype."""
    return layers.RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=config.dtype, rngs=rngs)


def relative_buckets(
    distance: np.ndarray, *, bidirectional: bool, buckets: int, max_distance: int
) -> np.ndarray:
    """The row of the table for each distance, the key's position less the query's: int32 of the
    same shape.

    Half of the buckets hold one distance each, the others ever more of them, logarithmically, up to
    `max_distance`. `bidirectional` gives keys after the query the upper half; otherwise they all
    count as distance 0, to be masked.
    """
    first = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    # in float32, as the weights were trained: where the logarithm meets a whole number, rounding
    # decides
    grown = np.log(np.maximum(distance, 1) / np.float32(exact), dtype=np.float32)
    grown = grown / np.float32(math.log(max_distance / exact))
    coarse = np.minimum(exact + (grown * np.float32(buckets - exact)).astype(np.int32), buckets - 1)
    return (first + np.where(distance < exact, distance, coarse)).astype(np.int32)


def relative_bias(
    table: jax.Array, length: int, config: T5Config, *, bidirectional: bool
) -> jax.Array:
    """What self-attention adds to its scores: [1, H, T, T] from a table [buckets, H], T being
    `length`.
    """
    T, sizes = length, {"buckets": config.buckets, "max_distance": config.max_distance}
    # R = 2T - 1 distances; query t's row is the T values from T - 1 - t on
    rows = relative_buckets(np.arange(1 - T, T), bidirectional=bidirectional, **sizes)
    by_distance_HR = table[rows].T
    # One value of padding, repeated T times and read as rows without it: each row starts one
    # further to the left. Slices have cheaper gradients than a lookup of T x T distances.
    H, R = by_distance_HR.shape
    repeated = jnp.broadcast_to(jnp.pad(by_distance_HR, ((0, 0), (0, 1)))[:, None], (H, T, R + 1))
    return repeated.reshape(H, T * (R + 1))[:, : T * R].reshape(1, H, T, R)[..., T - 1 :]


class T5Attention(nnx.Module):
    """Multi-head attention without biases and without scaling; queries come from one stream, keys
    from any.
    """

    def __init__(self, config: T5Config, *, attention: layers.Attention, rngs: nnx.Rngs):
        D, inner = config.width, config.heads * config.head_dim
        self.head_dim = config.head_dim
        self.attention = attention
        linear = partial(layers.linear, bias=False, dtype=config.dtype, rngs=rngs)
        self.q = linear(
            D, inner, std=(D * config.head_dim) ** -0.5
        )  # makes up for the scores' scale
        self.k = linear(D, inner, std=D**-0.5)
        self.v = linear(D, inner, std=D**-0.5)
        self.o = linear(inner, D, std=inner**-0.5)

    def __call__(
        self,
        x_BTD: jax.Array,
        seen_BSD: jax.Array,
        *,
        is_causal: bool = False,
        bias: jax.Array | None = None,
        segments: layers.Segments | None = None,
    ) -> jax.Array:
        """[B, T, D] that reads [B, S, D], to [B, T, D].

        `bias`: [n, H, T, S] for n equal parts of the batch. `segments`: see `layers.Attention`.
        """
        B, T, _ = x_BTD.shape
        q_BTHK, k_BSHK, v_BSHK = (
            project(x).reshape(B, x.shape[1], -1, self.head_dim)
            for project, x in ((self.q, x_BTD), (self.k, seen_BSD), (self.v, seen_BSD))
        )

        def attend(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            segments: layers.Segments | None,
            bias_HTS: jax.Array | None,
        ) -> jax.Array:
            more: dict[str, Any] = _given(segments) | (
                {} if bias_HTS is None else {"bias": bias_HTS[None]}
            )
            return self.attention(q, k, v, is_causal=is_causal, scale=1.0, **more)

        if bias is None:
            attended = attend(q_BTHK, k_BSHK, v_BSHK, segments, None)
        else:  # each part has a bias of its own, so that a gradient is added up over the part's rows first
            rows: tuple[Any, ...] = (q_BTHK, k_BSHK, v_BSHK, segments)
            q, k, v, numbers = (
                jax.tree.map(lambda x: x.reshape(bias.shape[0], -1, *x.shape[1:]), x) for x in rows
            )
            attended = jax.vmap(attend)(q, k, v, numbers, bias)
        return self.o(attended.reshape(B, T, -1))


class T5MLP(nnx.Module):
    """down(relu(up(x))), or gated: down(gelu(wi_0(x)) * wi_1(x)) with the tanh approximation of
    gelu.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        D, F = config.width, config.hidden
        linear = partial(layers.linear, bias=False, dtype=config.dtype, rngs=rngs)
        self.gated = config.gated
        if self.gated:
            self.wi_0 = linear(D, F, std=D**-0.5)
            self.wi_1 = linear(D, F, std=D**-0.5)
        else:
            self.up = linear(D, F, std=D**-0.5)
        self.down = linear(F, D, std=F**-0.5)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        if self.gated:
            return self.down(_gated_gelu(self.wi_0(x_BTD), self.wi_1(x_BTD)))
        return self.down(jax.nn.relu(self.up(x_BTD)))


def _gated_gelu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return layers.recomputed(lambda gate, up: jax.nn.gelu(gate, approximate=True) * up)(gate, up)


class T5EncoderBlock(nnx.Module):
    """One pre-norm block: self-attention in both directions, then an MLP, each added to the
    residual stream.
    """

    def __init__(self, config: T5Config, *, attention: layers.Attention, rngs: nnx.Rngs):
        self.attn_norm = _norm(config, rngs=rngs)
        self.attn = T5Attention(config, attention=attention, rngs=rngs)
        self.mlp_norm = _norm(config, rngs=rngs)
        self.mlp = T5MLP(config, rngs=rngs)
        self.dropout = layers.dropout(config.dropout, rngs=rngs)

    def __call__(
        self,
        x_BSD: jax.Array,
        *,
        bias: jax.Array,
        segments: layers.Segments | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """[B, S, D] to [B, S, D] in the dtype of the input; `bias` [n, H, S, S] for n parts of the
        batch.
        """

        def branch(y_BSD: jax.Array) -> jax.Array:
            return self.dropout(y_BSD, deterministic=deterministic).astype(x_BSD.dtype)

        y_BSD = self.attn_norm(x_BSD)
        x_BSD = x_BSD + branch(self.attn(y_BSD, y_BSD, bias=bias, segments=segments))
        return x_BSD + branch(self.mlp(self.mlp_norm(x_BSD)))


class T5DecoderBlock(nnx.Module):
    """One pre-norm block: causal self-attention, attention to the encoder's output, then an MLP."""

    def __init__(self, config: T5Config, *, attention: layers.Attention, rngs: nnx.Rngs):
        self.attn_norm = _norm(config, rngs=rngs)
        self.attn = T5Attention(config, attention=attention, rngs=rngs)
        self.cross_norm = _norm(config, rngs=rngs)
        self.cross = T5Attention(config, attention=attention, rngs=rngs)
        self.mlp_norm = _norm(config, rngs=rngs)
        self.mlp = T5MLP(config, rngs=rngs)
        self.dropout = layers.dropout(config.dropout, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        seen: jax.Array,
        bias: jax.Array,
        segments: layers.Segments | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """[B, T, D] to [B, T, D] in the dtype of the input; `seen` [B, S, D], `bias` [n, H, T, T]."""

        def branch(y_BTD: jax.Array) -> jax.Array:
            return self.dropout(y_BTD, deterministic=deterministic).astype(x_BTD.dtype)

        y_BTD = self.attn_norm(x_BTD)
        x_BTD = x_BTD + branch(self.attn(y_BTD, y_BTD, is_causal=True, bias=bias))
        y_BTD = self.cross_norm(x_BTD).astype(seen.dtype)
        x_BTD = x_BTD + branch(self.cross(y_BTD, seen, segments=segments))
        return x_BTD + branch(self.mlp(self.mlp_norm(x_BTD)))


def _given(segments: layers.Segments | None) -> dict[str, Any]:
    return {} if segments is None else {"segments": segments}


class T5Stack(nnx.Module):
    """The encoder or the decoder: its blocks, the relative positions that they share, and its final
    norm.
    """

    def __init__(
        self,
        config: T5Config,
        block: type[T5EncoderBlock | T5DecoderBlock],
        *,
        attention: layers.Attention,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.is_encoder = issubclass(block, T5EncoderBlock)
        depth = config.layers if self.is_encoder else config.decoder_layers
        std, dtype = config.width**-0.5, config.dtype
        self.relative_bias = layers.embedding(
            config.buckets, config.heads, std=std, dtype=dtype, rngs=rngs
        )

        def make(rngs: nnx.Rngs) -> T5EncoderBlock | T5DecoderBlock:
            return block(config, attention=attention, rngs=rngs)

        self.blocks = layers.make_blocks(make, depth, scan_layers=config.scan_layers, rngs=rngs)
        self.norm = _norm(config, rngs=rngs)
        self.dropout = layers.dropout(config.dropout, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, *, deterministic: bool, **settings: Any) -> jax.Array:
        """[B, T, D] to [B, T, D] in the dtype of the input; `settings` are the blocks'."""

        def bias_of(x_BTD: jax.Array, table: jax.Array) -> jax.Array:
            return relative_bias(table, x_BTD.shape[1], self.config, bidirectional=self.is_encoder)

        # on each device: the gradient of the bias is added up to one of its small table before it
        # is reduced
        bias = on_local_rows(bias_of, replicated=(1,))(x_BTD, self.relative_bias.table())
        x_BTD = self.dropout(x_BTD, deterministic=deterministic)
        y_BTD = layers.run_blocks(
            self.blocks, x_BTD, bias=bias, deterministic=deterministic, **settings
        )
        return self.dropout(self.norm(y_BTD), deterministic=deterministic).astype(x_BTD.dtype)


class T5(nnx.Module):
    """An encoder-decoder language model.

    `encoder/blocks` is one T5EncoderBlock whose leaves have a leading dim L (`scan_layers`), or an
    nnx.List of L of them; so are `decoder/blocks` T5DecoderBlocks. `rngs` needs a `params` stream,
    and a `dropout` stream where dropout is above 0. `attention` replaces the attention of every
    block; it is given `scale`, `bias` and, with an `inputs_mask`, `segments`.

    Parameters start as in Mesh TensorFlow, which T5 was trained with: normal with std 1 for the
    embedding, and for all else, a head of its own too, by the fan-in.
    """

    def __init__(
        self,
        config: T5Config,
        *,
        rngs: nnx.Rngs,
        attention: layers.Attention = layers.blockwise_attention,
    ):
        V, D, dtype = config.vocab_size, config.width, config.dtype
        self.config = config
        self.embed = layers.embedding(V, D, std=1.0, tied=config.tie_head, dtype=dtype, rngs=rngs)
        self.encoder = T5Stack(config, T5EncoderBlock, attention=attention, rngs=rngs)
        self.decoder = T5Stack(config, T5DecoderBlock, attention=attention, rngs=rngs)
        if not config.tie_head:
            init = nnx.initializers.normal(D**-0.5)
            self.head = layers.Head(D, V, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        inputs_BS: jax.Array,
        targets_BT: jax.Array,
        *,
        inputs_mask: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """int32 [B, S] and [B, T] to logits [B, T, V] in the compute dtype; ValueError where one is
        too long.

        `targets_BT` are what the decoder reads: the targets shifted right. `inputs_mask`, int32 [B,
        S], is 1 for a token and 0 for padding, which no token sees. `deterministic=False` applies
        dropout and advances its random state.
        """
        x_BTD = self._trunk(inputs_BS, targets_BT, inputs_mask, deterministic)
        return self.embed.attend(x_BTD) if self.config.tie_head else self.head(x_BTD)

    def losses(
        self,
        inputs_BS: jax.Array,
        targets_BT: jax.Array,
        labels_BT: jax.Array,
        *,
        chunk: int,
        inputs_mask: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Cross-entropy of each label, float32 [B, T], without ever holding all logits; see
        `chunked_losses`.
        """
        x_BTD = self._trunk(inputs_BS, targets_BT, inputs_mask, deterministic)
        head = self.embed if self.config.tie_head else self.head
        return head.losses(x_BTD, labels_BT, self.config.vocab_size, chunk)

    def _trunk(
        self,
        inputs_BS: jax.Array,
        targets_BT: jax.Array,
        inputs_mask: jax.Array | None,
        deterministic: bool,
    ) -> jax.Array:
        """All but the head, to [B, T, D]."""
        for name, tokens in (("inputs", inputs_BS), ("targets", targets_BT)):
            longest = getattr(self.config, f"{name}_length")
            if longest < tokens.shape[1]:
                raise ValueError(
                    f"expected at most {longest} {name} ({name}_length), got {tokens.shape[1]}"
                )

        def seen_by(tokens: jax.Array) -> layers.Segments | None:
            return (
                None
                if inputs_mask is None
                else (jnp.ones_like(tokens), inputs_mask.astype(tokens.dtype))
            )

        seen_BSD = self.encoder(
            self.embed(inputs_BS), segments=seen_by(inputs_BS), deterministic=deterministic
        )
        x_BTD = self.decoder(
            self.embed(targets_BT),
            seen=seen_BSD,
            segments=seen_by(targets_BT),
            deterministic=deterministic,
        )
        return x_BTD * self.config.width**-0.5 if self.config.tie_head else x_BTD


def text_to_text_loss(
    model: Any, batch: Mapping[str, jax.Array], *, train: bool = False, chunk: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The sum of the cross-entropy in nats and the number of targets it is over, both float32
    scalars.

    `batch` has `inputs`, int32 [B, S], and `targets`, int32 [B, T], and may have `inputs_mask`, [B,
    S], 1 for a token and 0 for padding, and `mask`, [B, T], the weight of each target (absent: all
    1); where it is 0 the target may be any number. The decoder reads the targets shifted right,
    after a 0; a negative one is read as 0, padding. `train` and `chunk` are as for
    `layers.next_token_loss`.
    """
    targets_BT = batch["targets"]
    shifted_BT = jnp.pad(jnp.maximum(targets_BT, 0)[:, :-1], ((0, 0), (1, 0)))
    settings: dict[str, Any] = {"inputs_mask": batch.get("inputs_mask"), "deterministic": not train}
    if chunk is None:
        loss_BT = layers.cross_entropy(model(batch["inputs"], shifted_BT, **settings), targets_BT)
    else:
        loss_BT = model.losses(batch["inputs"], shifted_BT, targets_BT, chunk=chunk, **settings)
    return layers.masked_sum(loss_BT, batch.get("mask"))


def _sizes(config: T5Config) -> tuple[int, int, int]:
    """Parameters of one attention, of one MLP and of the head."""
    D = config.width
    return (
        4 * D * config.heads * config.head_dim,
        (3 if config.gated else 2) * D * config.hidden,
        D * config.vocab_size,
    )


def parameter_count(config: T5Config) -> int:
    """The number of parameters; the embedding, used three times where the head is tied, counts
    once.
    """
    attention, mlp, head = _sizes(config)
    D = config.width
    encoder = config.layers * (attention + mlp + 2 * D)
    decoder = config.decoder_layers * (2 * attention + mlp + 3 * D)
    stacks = 2 * (config.buckets * config.heads + D)  # a table and a final norm each
    return encoder + decoder + stacks + (1 if config.tie_head else 2) * head


def flops_per_example(config: T5Config) -> float:
    """Model FLOPs of one example of a training step, forward and backward, at the full lengths S
    and T.

    The convention is 6 N + 12 L H K T per token (PaLM, appendix B), with what each parameter is
    multiplied with counted apart: the encoder's and the cross-attention's keys and values S times,
    the rest of the decoder and the head T times. Attention over pairs: S x S in the encoder, T x T
    and T x S in the decoder, in full, not halved for causality. Tables that are looked up are left
    out, and nothing is added for recomputation.
    """
    attention, mlp, head = _sizes(config)
    S, T, D = config.inputs_length, config.targets_length, config.width
    encoder = config.layers * (attention + mlp + 2 * D) + D
    decoder = config.decoder_layers * (attention + attention // 2 + mlp + 3 * D) + D + head
    cross = config.decoder_layers * attention // 2
    pairs = config.layers * S * S + config.decoder_layers * (T * T + T * S)
    return (
        6.0 * (S * (encoder + cross) + T * decoder) + 12.0 * config.heads * config.head_dim * pairs
    )
