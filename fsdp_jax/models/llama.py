"""Llama 2 and 3 in plain Flax NNX: RMSNorm, rotary positions, grouped queries and SwiGLU.

Shapes: B batch, T sequence, D width, H query heads, G key and value heads, K head dim, F hidden
width, V vocab, L layers.

Parameters are named after what they do; their order, and the halves that the rotary embedding
rotates, are those of the weights on Hugging Face. Sources: Llama 2, arXiv:2307.09288; Llama 3,
arXiv:2407.21783.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fsdp_jax.errors import ArgumentError
from fsdp_jax.models import layers
from fsdp_jax.models.config import BaseConfig, from_preset
from fsdp_jax.models.flops import training_flops
from fsdp_jax.models.layers import Attention, blockwise_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 and later extend the rotary embedding beyond the first training length.

    Frequencies that rotate less than `low_frequency_factor` times in `original_length` tokens are
    divided by `factor`, those that rotate more than `high_frequency_factor` times stay, and between
    them it is interpolated.
    """

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192  # tokens

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_length < 1:
            expected = "RopeScaling.factor and original_length must be at least 1"
            raise ValueError(f"{expected}, got {self}")
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            expected = "RopeScaling.low_frequency_factor must be above 0 and below the high one"
            raise ValueError(f"{expected}, got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(BaseConfig):
    """The shape of a Llama. Raises ValueError for sizes that do not fit together."""

    vocab_size: int
    sequence_length: int  # the longest sequence, in tokens
    heads: int  # query heads
    kv_heads: int  # key and value heads, each shared by heads / kv_heads query heads
    hidden: int  # hidden width of the MLP
    rope_theta: float = 10_000.0  # the base of the rotary frequencies
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    tie_head: bool = False  # use the embedding table as the output head

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (2 * self.heads):
            expected = "LlamaConfig.width must be a multiple of 2 x heads (rotary pairs)"
            got = f"got width {self.width}, heads {self.heads}"
            raise ArgumentError(f"{expected}, {got}", where="model.heads")
        self.require_multiple("heads", "kv_heads")

    @property
    def head_dim(self) -> int:
        """K, the width of a head."""
        return self.width // self.heads


_LLAMA2 = LlamaConfig(
    vocab_size=32_000,
    sequence_length=4096,
    layers=32,
    width=4096,
    heads=32,
    kv_heads=32,
    hidden=11_008,
)
_llama2 = partial(dataclasses.replace, _LLAMA2)
_LLAMA3 = _llama2(
    vocab_size=128_256, sequence_length=8192, kv_heads=8, hidden=14_336, rope_theta=500_000.0
)
_llama3 = partial(dataclasses.replace, _LLAMA3)
_70B: dict[str, Any] = {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28_672}
_LONG: dict[str, Any] = {"sequence_length": 131_072, "rope_scaling": RopeScaling(factor=8.0)}
_1B: dict[str, Any] = {"layers": 16, "width": 2048, "hidden": 8192, "tie_head": True}

PRESETS: dict[str, LlamaConfig] = {
    "llama-tiny": LlamaConfig(  # 0.7M, bytes
        vocab_size=256, sequence_length=128, layers=4, width=128, heads=4, kv_heads=2, hidden=320
    ),
    "llama2-7b": _LLAMA2,  # 6.74B
    "llama2-13b": _llama2(layers=40, width=5120, heads=40, kv_heads=40, hidden=13_824),  # 13.0B
    "llama2-70b": _llama2(**_70B),  # 69.0B
    "llama3-8b": _LLAMA3,  # 8.03B
    "llama3-70b": _llama3(**_70B),  # 70.6B
    "llama3.1-8b": _llama3(**_LONG),
    "llama3.1-70b": _llama3(**_70B, **_LONG),
    "llama3.2-1b": _llama3(**_LONG | _1B | {"rope_scaling": RopeScaling(factor=32.0)}),  # 1.24B
}
preset = partial(from_preset, PRESETS)


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> jax.Array:
    """Computes the radians that each pair of the head rotates per position, float32 [K/2].

    theta^(-2i/K), scaled by `scaling` as in Llama 3.1's published code (`apply_scaling`).
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequency
    # from low to high frequencies the scaled one is blended into the unscaled one, linearly in
    # how often a pair rotates within the original length
    rotations = scaling.original_length * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    unscaled = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
    return (1 - unscaled) * frequency / scaling.factor + unscaled * frequency


def apply_rotary(
    x_BTHK: jax.Array, frequency: jax.Array, positions_BT: jax.Array | None = None
) -> jax.Array:
    """Rotates pair i of each head at position t by t * frequency[i] in float32; keeps the dtype.

    Pair i is (x[i], x[i + K/2]): the layout of the weights on Hugging Face. RoFormer,
    arXiv:2104.09864, equation 34, and Meta's own weights pair neighbors (x[2i], x[2i+1]) instead.
    Positions are 0 to T-1 where none are given.
    """
    if positions_BT is None:
        positions_BT = jnp.arange(x_BTHK.shape[1])[None]
    # in float32, [B or 1, T, 1, K/2]: bfloat16 has too few bits for positions above 256
    angle = positions_BT.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHK.dtype)


class GroupedQueryAttention(layers.MultiHeadAttention):
    """Causal self-attention with rotary positions; query head h reads k, v head h // (H / G)."""

    def __init__(self, config: LlamaConfig, *, attention: Attention, rngs: nnx.Rngs):
        # Meta has not published its initialization; this is GPT-2's.
        std = (layers.INIT_STD, layers.INIT_STD, layers.residual_std(config))
        super().__init__(
            config, kv_heads=config.kv_heads, bias=False, std=std, attention=attention, rngs=rngs
        )
        self.rope = (config.head_dim, config.rope_theta, config.rope_scaling)

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]; position t attends to 0..t, within its segment if any."""
        q_BTHK, k_BTGK, v_BTGK = self.project(x_BTD)
        frequency = rotary_frequencies(*self.rope)
        q_BTHK = apply_rotary(q_BTHK, frequency, positions)
        k_BTGK = apply_rotary(k_BTGK, frequency, positions)
        more = layers.segments_keyword(segments)
        attended = self.attention(q_BTHK, k_BTGK, v_BTGK, is_causal=True, **more)
        return self.project_out(attended, x_BTD)


class LlamaBlock(layers.ResidualBlock):
    """One pre-norm transformer block: attention, then SwiGLU, each added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, attention: Attention, rngs: nnx.Rngs):
        std = (layers.INIT_STD, layers.residual_std(config))
        swiglu: dict[str, Any] = {"std": std, "activation": layers.gated_silu}
        mlp = partial(layers.GatedMLP, hidden=config.hidden, **swiglu)
        attn = partial(GroupedQueryAttention, attention=attention)
        super().__init__(config, layers.rms_norm, attn, mlp, rngs=rngs)


class Llama(layers.LanguageModel):
    """A decoder-only language model; arguments and attributes are as `fsdp_jax.models` says."""

    def __init__(
        self, config: LlamaConfig, *, rngs: nnx.Rngs, attention: Attention = blockwise_attention
    ):
        V, D, dtype = config.vocab_size, config.width, config.dtype
        self.config = config
        self.embed = layers.Embedding(V, D, tied=config.tie_head, dtype=dtype, rngs=rngs)
        make = partial(LlamaBlock, config, attention=attention)
        self.blocks = layers.make_blocks(make, config.layers, config.scan_layers, rngs)
        self.norm = layers.rms_norm(config, rngs=rngs)
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
        """Maps int32 [B, T] to the input of the head, [B, T, D]; arguments are those of `gpt.GPT`.

        `deterministic` has no effect: a Llama has no dropout.
        """
        layers.check_length(tokens_BT, self.config.sequence_length, "sequence_length")
        settings = {"segments": segments, "positions": positions}
        return self.norm(layers.run_blocks(self.blocks, self.embed(tokens_BT), **settings))


def flops_per_example(config: LlamaConfig) -> float:
    """Counts the `training_flops` of one example at the full sequence length.

    The embedding is looked up where the head is its own matrix. Sharing keys and values does not
    change attention's.
    """
    T = config.sequence_length
    multiplied = {"embed": T if config.tie_head else 0, "": T}
    return training_flops(Llama, config, multiplied, pairs=config.layers * T * T)
