"""GPT-2 in plain Flax NNX: pre-norm blocks, learned positions, biases, an optionally tied head.

Shapes: B batch, T sequence, D width, H heads, K head dim, V vocab, L layers.

GPT-2 also drops attention weights; here dropout acts on the embedding and on what each block adds
to the residual stream, so that any fused attention can be used.
"""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fsdp_jax.models import layers
from fsdp_jax.models.config import BaseConfig, from_preset
from fsdp_jax.models.flops import training_flops
from fsdp_jax.models.layers import Attention, blockwise_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(BaseConfig):
    """The shape of a GPT. Raises ValueError for sizes that do not fit together."""

    vocab_size: int
    sequence_length: int  # the longest sequence, in tokens: the number of learned positions
    pad_vocab_to: int = 128
    """The rows of the embedding and of the head are padded to a multiple of this, to be sharded."""
    dropout: float = 0.0  # dropout probability; above 0 the model needs a `dropout` random stream
    tie_head: bool = True  # use the embedding table as the output head, as GPT-2 does
    norm_epsilon: ClassVar[float] = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_multiple("width", "heads")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table; those from vocab_size on have no logit and no gradient."""
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to


def _gpt2_config(depth: int, width: int, heads: int) -> GPTConfig:
    """Makes a configuration with GPT-2's vocabulary and sequence length."""
    return GPTConfig(vocab_size=50257, sequence_length=1024, layers=depth, width=width, heads=heads)


# The shapes of GPT-3 (arXiv:2005.14165, table 2.1) and of the 1T model that PyTorch's FSDP was
# announced with; minGPT, which that was, has an untied head.
_large = partial(dataclasses.replace, sequence_length=2048, tie_head=False)

PRESETS: dict[str, GPTConfig] = {
    # 0.8M and 10.8M parameters, bytes
    "tiny": GPTConfig(vocab_size=256, sequence_length=128, layers=4, width=128, heads=4),
    "small": GPTConfig(vocab_size=256, sequence_length=256, layers=6, width=384, heads=6),
    "gpt2": _gpt2_config(12, 768, 12),  # 124M
    "gpt2-medium": _gpt2_config(24, 1024, 16),  # 355M
    "gpt2-large": _gpt2_config(36, 1280, 20),  # 774M
    "gpt2-xl": _gpt2_config(48, 1600, 25),  # 1.56B
    "gpt3-175b": _large(_gpt2_config(96, 12_288, 96)),  # 175B
    "gpt-1t": _large(_gpt2_config(128, 25_600, 160)),  # 1.01T
}
preset = partial(from_preset, PRESETS)


class SelfAttention(nnx.Module):
    """Causal multi-head self-attention with one fused projection to queries, keys and values."""

    def __init__(self, config: GPTConfig, *, attention: Attention, rngs: nnx.Rngs):
        D = config.width
        linear = partial(layers.linear, dtype=config.dtype, rngs=rngs)
        self.head_dim = D // config.heads
        self.attention = attention
        self.qkv = linear(D, 3 * D)
        self.out = linear(D, D, std=layers.residual_std(config))

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]; position t attends to 0..t, within its segment if any."""
        heads = layers.split_qkv(self.qkv(x_BTD), self.head_dim)
        attended = self.attention(*heads, is_causal=True, **layers.segments_keyword(segments_BT))
        return checkpoint_name(self.out(attended.reshape(x_BTD.shape)), "attention_out")


class Block(nnx.Module):
    """One pre-norm transformer block: attention, then an MLP four times as wide."""

    def __init__(self, config: GPTConfig, *, attention: Attention, rngs: nnx.Rngs):
        std = (layers.INIT_STD, layers.residual_std(config))
        self.ln_1 = layers.layer_norm(config, rngs=rngs)
        self.attn = SelfAttention(config, attention=attention, rngs=rngs)
        self.ln_2 = layers.layer_norm(config, rngs=rngs)
        self.mlp = layers.MLP(config, 4 * config.width, std=std, rngs=rngs)
        self.dropout = layers.ResidualDropout(config.dropout, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, *, segments: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """Maps [B, T, D] to [B, T, D] in the dtype of the input."""
        x_BTD = self.dropout.add(x_BTD, self.attn(self.ln_1(x_BTD), segments), deterministic)
        return self.dropout.add(x_BTD, self.mlp(self.ln_2(x_BTD)), deterministic)


class GPT(layers.LanguageModel):
    """A decoder-only language model; arguments and attributes are as `fsdp_jax.models` says."""

    def __init__(
        self, config: GPTConfig, *, rngs: nnx.Rngs, attention: Attention = blockwise_attention
    ):
        V, D, dtype = config.padded_vocab_size, config.width, config.dtype
        self.config = config
        self.embed = layers.Embedding(V, D, tied=config.tie_head, dtype=dtype, rngs=rngs)
        self.positions = layers.Embedding(config.sequence_length, D, dtype=dtype, rngs=rngs)
        self.dropout = layers.ResidualDropout(config.dropout, rngs=rngs)
        make = partial(Block, config, attention=attention)
        self.blocks = layers.make_blocks(make, config.layers, config.scan_layers, rngs)
        self.ln_f = layers.layer_norm(config, rngs=rngs)
        if not config.tie_head:
            self.head = layers.Head(D, V, dtype=dtype, rngs=rngs)

    def hidden_states(
        self,
        tokens_BT: jax.Array,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Maps int32 [B, T] to the input of the head, [B, T, D].

        Args:
            tokens_BT: at most `sequence_length` tokens a row; more are a ValueError.
            segments: int32 [B, T], of packed documents: a token attends to those before it in its
                own segment only.
            positions: int32 [B, T], of packed documents; 0 to T-1 if absent.
            deterministic: False applies dropout, and advances its random state.
        """
        layers.check_length(tokens_BT, self.config.sequence_length, "sequence_length")
        if positions is None:
            positions = jnp.arange(tokens_BT.shape[1])[None]
        x_BTD = self.embed(tokens_BT) + self.positions(positions)
        x_BTD = self.dropout(x_BTD, deterministic=deterministic)
        settings = {"segments": segments, "deterministic": deterministic}
        return self.ln_f(layers.run_blocks(self.blocks, x_BTD, **settings))


def flops_per_example(config: GPTConfig) -> float:
    """Counts the `training_flops` at the full length, without rows that pad the vocabulary.

    The positions are looked up, and the embedding too where the head is its own matrix.
    """
    # rows of padding are multiplied too, but no model needs them: they are not model FLOPs
    T, exact = config.sequence_length, dataclasses.replace(config, pad_vocab_to=1)
    multiplied = {"positions": 0, "embed": T if config.tie_head else 0, "": T}
    pairs = config.layers * T * T
    return training_flops(GPT, exact, multiplied, pairs=pairs)
