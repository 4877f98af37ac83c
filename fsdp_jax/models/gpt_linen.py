"""GPT-2 in Flax Linen, with the configuration, arithmetic and parameter names of `gpt.GPT`.

Shapes: B batch, T sequence, D width, H heads, V vocab, L layers.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fsdp_jax.models import layers
from fsdp_jax.models.gpt import GPTConfig
from fsdp_jax.models.layers import Attention, blockwise_attention


def _linear(
    config: GPTConfig, outputs: int, *, std: float = layers.INIT_STD, **more: Any
) -> nn.Dense:
    init = nn.initializers.normal(std)
    return nn.Dense(outputs, kernel_init=init, dtype=config.dtype, **more)


def _embedding(config: GPTConfig, count: int, *, name: str) -> nn.Embed:
    init = nn.initializers.normal(layers.INIT_STD)
    return nn.Embed(count, config.width, embedding_init=init, dtype=config.dtype, name=name)


def _layer_norm(config: GPTConfig, *, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=config.norm_epsilon, dtype=config.dtype, name=name)


class LinenSelfAttention(nn.Module):
    """Causal multi-head self-attention with one fused projection to queries, keys and values."""

    config: GPTConfig
    attention: Attention

    @nn.compact
    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]; position t attends to 0..t, within its segment if any."""
        D = self.config.width
        qkv = _linear(self.config, 3 * D, name="qkv")(x_BTD)
        heads = layers.split_qkv(qkv, D // self.config.heads)
        attended = self.attention(*heads, is_causal=True, **layers.segments_keyword(segments_BT))
        out = _linear(self.config, D, std=layers.residual_std(self.config), name="out")
        return checkpoint_name(out(attended.reshape(x_BTD.shape)), "attention_out")


class LinenMLP(nn.Module):
    """Two Linears, D to 4 D and back, with the tanh approximation of gelu between them."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]."""
        D = self.config.width
        hidden = checkpoint_name(_linear(self.config, 4 * D, name="up")(x_BTD), "mlp")
        down = _linear(self.config, D, std=layers.residual_std(self.config), name="down")
        return down(layers.gelu(hidden))


class LinenBlock(nn.Module):
    """One pre-norm transformer block: attention, then an MLP four times as wide."""

    config: GPTConfig
    attention: Attention
    deterministic: bool = True

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, segments_BT: jax.Array | None = None
    ) -> tuple[jax.Array, None]:
        """Maps [B, T, D] to ([B, T, D] in its dtype, None): carry and no output, for `nn.scan`."""
        config = self.config
        dropout = nn.Dropout(config.dropout, deterministic=self.deterministic)

        def with_dropout(y_BTD: jax.Array) -> jax.Array:
            return dropout(y_BTD).astype(x_BTD.dtype)

        attn = LinenSelfAttention(config, self.attention, name="attn")
        x_BTD = x_BTD + with_dropout(attn(_layer_norm(config, name="ln_1")(x_BTD), segments_BT))
        mlp = LinenMLP(config, name="mlp")
        return x_BTD + with_dropout(mlp(_layer_norm(config, name="ln_2")(x_BTD))), None


class LinenBlocks(nn.Module):
    """The blocks in order, named 0 to L-1, as those of an `nnx.List` are."""

    config: GPTConfig
    attention: Attention
    deterministic: bool = True

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, segments_BT: jax.Array | None = None
    ) -> tuple[jax.Array, None]:
        """Maps [B, T, D] to ([B, T, D], None), like a scan of the blocks."""
        settings = (self.config, self.attention, self.deterministic)
        for i in range(self.config.layers):
            x_BTD, _ = LinenBlock(*settings, name=str(i))(x_BTD, segments_BT)
        return x_BTD, None


class LinenGPT(nn.Module):
    """A decoder-only language model in Linen.

    The parameters of `blocks` have a leading dim L (`scan_layers`), or are those of blocks 0 to
    L-1. Dropout above 0 needs a `dropout` random stream. `attention` replaces the attention of
    every block.
    """

    config: GPTConfig
    attention: Attention = blockwise_attention

    @nn.compact
    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Maps int32 [B, T] to logits [B, T, V] in the compute dtype; arguments as of `gpt.GPT`."""
        config = self.config
        layers.check_length(tokens_BT, config.sequence_length, "sequence_length")
        if positions is None:
            positions = jnp.arange(tokens_BT.shape[1])[None]
        embed = _embedding(config, config.padded_vocab_size, name="embed")
        table = _embedding(config, config.sequence_length, name="positions")
        x_BTD = embed(tokens_BT) + table(positions)
        x_BTD = nn.Dropout(config.dropout, deterministic=deterministic)(x_BTD)
        blocks: type[nn.Module] = LinenBlocks
        if config.scan_layers:
            scanned: dict[str, Any] = {"in_axes": (nn.broadcast,), "length": config.layers}
            scanned["split_rngs"] = {"params": True, "dropout": True}
            blocks = nn.scan(LinenBlock, {"params": 0}, **scanned)
        x_BTD, _ = blocks(config, self.attention, deterministic, name="blocks")(x_BTD, segments)
        x_BTD = _layer_norm(config, name="ln_f")(x_BTD)
        if config.tie_head:
            logits = embed.attend(x_BTD)
        else:
            head = _linear(config, config.padded_vocab_size, use_bias=False, name="head")
            logits = head(x_BTD)
        return logits[..., : config.vocab_size]
