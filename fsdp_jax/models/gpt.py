"""GPT-2 in plain Flax NNX: pre-norm blocks, learned positions, biases, and a head tied to the
embedding.

Shapes: B batch, T sequence, D width, H heads, K head dim, V vocab, L layers.

GPT-2 also drops attention weights; here dropout acts on the embedding and on what each block adds
to the residual stream, so that any fused attention can be used.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fsdp_jax.models import layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT. Raises ValueError where the numbers do not fit together."""

    vocab_size: int
    sequence_length: int
    """The longest sequence, in tokens: the number of learned positions."""
    layers: int
    width: int
    heads: int
    pad_vocab_to: int = 128
    """The embedding table and the head have as many rows as the next multiple of this, so that they can be sharded."""
    dropout: float = 0.0
    """The probability that a value is dropped; above 0 the model needs a `dropout` random stream."""
    scan_layers: bool = True
    """Stack the blocks' parameters and compile one block; False keeps a list of blocks."""
    tie_head: bool = True
    """Use the embedding table as the output head, as GPT-2 does."""
    dtype: str | None = None
    """Compute dtype by name; None follows the parameters and inputs."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "sequence_length", "layers", "width", "heads", "pad_vocab_to"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(
                f"GPTConfig.width must be a multiple of heads, got width {self.width}, heads {self.heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"GPTConfig.dropout must be at least 0 and below 1, got {self.dropout}"
            )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table. Those from vocab_size on belong to no token: no logit, no
        gradient.
        """
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to


def _gpt2(depth: int, width: int, heads: int) -> GPTConfig:
    return GPTConfig(vocab_size=50257, sequence_length=1024, layers=depth, width=width, heads=heads)


PRESETS: dict[str, GPTConfig] = {
    "tiny": GPTConfig(
        vocab_size=256, sequence_length=128, layers=4, width=128, heads=4
    ),  # 0.8M, bytes
    "small": GPTConfig(
        vocab_size=256, sequence_length=256, layers=6, width=384, heads=6
    ),  # 10.8M, bytes
    "gpt2": _gpt2(12, 768, 12),  # 124M
    "gpt2-medium": _gpt2(24, 1024, 16),  # 355M
    "gpt2-large": _gpt2(36, 1280, 20),  # 774M
    "gpt2-xl": _gpt2(48, 1600, 25),  # 1.56B
    # The shapes of GPT-3 (arXiv:2005.14165, table 2.1), and of the 1T model that PyTorch's FSDP was
    # announced with; minGPT, which that was, has an untied head.
    "gpt3-175b": dataclasses.replace(
        _gpt2(96, 12_288, 96), sequence_length=2048, tie_head=False
    ),  # 175B
    "gpt-1t": dataclasses.replace(
        _gpt2(128, 25_600, 160), sequence_length=2048, tie_head=False
    ),  # 1.01T
}


def preset(name: str, **overrides: Any) -> GPTConfig:
    """The preset `name` with fields replaced; ValueError for an unknown name or field says what was
    probably meant.
    """
    return layers.from_preset(PRESETS, name, overrides)


class Block(nnx.Module):
    """One pre-norm transformer block: attention, then an MLP four times as wide, each added to the
    residual stream.
    """

    def __init__(self, config: GPTConfig, *, attention: layers.Attention, rngs: nnx.Rngs):
        D, dtype = config.width, config.dtype
        # Each block adds twice to the residual stream; GPT-2 scales what it adds so that the sum
        # stays of order one.
        out_std = layers.INIT_STD / math.sqrt(2 * config.layers)
        self.ln_1 = layers.layer_norm(D, dtype=dtype, rngs=rngs)
        self.attn = layers.SelfAttention(
            D, config.heads, out_std=out_std, attention=attention, dtype=dtype, rngs=rngs
        )
        self.ln_2 = layers.layer_norm(D, dtype=dtype, rngs=rngs)
        self.mlp = layers.MLP(D, 4 * D, out_std=out_std, dtype=dtype, rngs=rngs)
        self.dropout = layers.dropout(config.dropout, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, *, segments: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """[B, T, D] to [B, T, D] in the dtype of the input, also where a norm kept in float32
        widens a branch.
        """

        def branch(y_BTD: jax.Array) -> jax.Array:
            return self.dropout(y_BTD, deterministic=deterministic).astype(x_BTD.dtype)

        x_BTD = x_BTD + branch(self.attn(self.ln_1(x_BTD), segments))
        return x_BTD + branch(self.mlp(self.ln_2(x_BTD)))


class GPT(layers.LanguageModel):
    """A decoder-only language model.

    `blocks` is one Block whose leaves have a leading dim L (`scan_layers`), or an nnx.List of L
    Blocks. `rngs` needs a `params` stream, and a `dropout` stream where dropout is above 0.
    `attention` replaces the attention of every block.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        rngs: nnx.Rngs,
        attention: layers.Attention = layers.blockwise_attention,
    ):
        V, T, D, dtype = (
            config.padded_vocab_size,
            config.sequence_length,
            config.width,
            config.dtype,
        )
        self.config = config
        self.embed = layers.embedding(V, D, tied=config.tie_head, dtype=dtype, rngs=rngs)
        self.positions = layers.embedding(T, D, dtype=dtype, rngs=rngs)
        self.dropout = layers.dropout(config.dropout, rngs=rngs)

        def make(rngs: nnx.Rngs) -> Block:
            return Block(config, attention=attention, rngs=rngs)

        self.blocks = layers.make_blocks(
            make, config.layers, scan_layers=config.scan_layers, rngs=rngs
        )
        self.ln_f = layers.layer_norm(D, dtype=dtype, rngs=rngs)
        if not config.tie_head:
            self.head = layers.head(D, V, dtype=dtype, rngs=rngs)

    def _trunk(
        self,
        tokens_BT: jax.Array,
        segments: jax.Array | None,
        positions: jax.Array | None,
        deterministic: bool,
    ) -> jax.Array:
        """All but the head, to [B, T, D]."""
        T = tokens_BT.shape[1]
        if self.config.sequence_length < T:
            raise ValueError(
                f"expected at most {self.config.sequence_length} tokens (sequence_length), got {T}"
            )
        x_BTD = self.embed(tokens_BT) + self.positions(
            jnp.arange(T)[None] if positions is None else positions
        )
        x_BTD = self.dropout(x_BTD, deterministic=deterministic)
        x_BTD = layers.run_blocks(
            self.blocks, x_BTD, segments=segments, deterministic=deterministic
        )
        return self.ln_f(x_BTD)


def parameter_count(config: GPTConfig) -> int:
    """The number of parameters that are stored; a tied head counts once.

    With `pad_vocab_to=1` it is the published count: 124,439,808 for gpt2, which stores 47 rows of
    768 more.
    """
    V, T, D = config.padded_vocab_size, config.sequence_length, config.width
    block = (
        12 * D * D + 13 * D
    )  # qkv, out, up, down: 3 + 1 + 4 + 4 squares and 9 bias rows; two norms: 4 rows
    return (V + T) * D + config.layers * block + 2 * D + (0 if config.tie_head else V * D)


def flops_per_token(config: GPTConfig) -> float:
    """Model FLOPs per token of a training step, forward and backward, at the full sequence length.

    The convention is 6 N + 12 L D T (PaLM, appendix B). N leaves out the tables that are looked up,
    not multiplied: the positions and, where the head is its own matrix, the embedding. It leaves
    out the rows that pad the vocabulary. Attention is counted in full, not halved for causality,
    and nothing is added for recomputation.
    """
    V, T, D = config.vocab_size, config.sequence_length, config.width
    published = parameter_count(dataclasses.replace(config, pad_vocab_to=1))
    multiplied = published - T * D - (0 if config.tie_head else V * D)
    return 6.0 * multiplied + 12.0 * config.layers * D * T
