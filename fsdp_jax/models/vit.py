"""ViT in plain Flax NNX: pre-norm blocks over the patches of an image and a class token, whose
output is classified.

Shapes: B batch, N patches, T = N + 1 positions (the class token first), D width, H heads, K head
dim, F hidden width of the MLP, L layers.

The arithmetic is that of the weights on Hugging Face (google/vit-base-patch16-224): learned
positions, biases, the exact gelu. Sources: ViT, arXiv:2010.11929; g/14, arXiv:2106.04560.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fsdp_jax.models import layers, vision
from fsdp_jax.models.vision import classification_loss

__all__ = [
    "PRESETS",
    "ViT",
    "ViTBlock",
    "ViTConfig",
    "classification_loss",
    "flops_per_example",
    "parameter_count",
    "preset",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The shape of a ViT. Raises ValueError where the numbers do not fit together."""

    image_size: int = 224
    """Side of the images, in pixels."""
    patch: int
    """Side of a patch, in pixels."""
    classes: int = 1000
    layers: int
    width: int
    heads: int
    hidden: int
    """Hidden width of the MLP."""
    norm_epsilon: float = 1e-12
    mean: tuple[float, ...] = vision.HALF
    """What is taken from uint8 pixels, red, green and blue, once they are divided by 255; see `vision.to_floats`."""
    std: tuple[float, ...] = vision.HALF
    """What they are then divided by."""
    dropout: float = 0.0
    """The probability that a value is dropped; above 0 the model needs a `dropout` random stream."""
    scan_layers: bool = True
    """Stack the blocks' parameters and compile one block; False keeps a list of blocks."""
    dtype: str | None = None
    """Compute dtype by name; None follows the parameters."""

    def __post_init__(self) -> None:
        vision.check_sizes(self)
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"ViTConfig.dropout must be at least 0 and below 1, got {self.dropout}"
            )

    @property
    def positions(self) -> int:
        """T: the patches of an image, and the class token."""
        return (self.image_size // self.patch) ** 2 + 1


def _vit(depth: int, width: int, heads: int, hidden: int, patch: int) -> ViTConfig:
    return ViTConfig(patch=patch, layers=depth, width=width, heads=heads, hidden=hidden)


PRESETS: dict[str, ViTConfig] = {
    "vit-tiny": ViTConfig(
        image_size=32, patch=4, classes=8, layers=4, width=128, heads=4, hidden=512
    ),  # 0.8M
    "vit-s16": _vit(12, 384, 6, 1536, 16),  # 22.1M
    "vit-b16": _vit(12, 768, 12, 3072, 16),  # 86.6M
    "vit-l16": _vit(24, 1024, 16, 4096, 16),  # 304M
    "vit-h14": _vit(32, 1280, 16, 5120, 14),  # 632M
    "vit-g14": _vit(40, 1408, 16, 6144, 14),  # 1.01B
}


def preset(name: str, **overrides: Any) -> ViTConfig:
    """The preset `name` with fields replaced; ValueError for an unknown name or field says what was
    probably meant.
    """
    return layers.from_preset(PRESETS, name, overrides)


def _norm(config: ViTConfig, *, rngs: nnx.Rngs) -> layers.LayerNorm:
    return layers.LayerNorm(
        config.width, epsilon=config.norm_epsilon, dtype=config.dtype, rngs=rngs
    )


class ViTBlock(nnx.Module):
    """One pre-norm transformer block: attention, then an MLP, each added to the residual stream."""

    def __init__(self, config: ViTConfig, *, attention: layers.Attention, rngs: nnx.Rngs):
        self.attn_norm = _norm(config, rngs=rngs)
        self.attn = vision.Attention(
            config.width, config.heads, attention=attention, dtype=config.dtype, rngs=rngs
        )
        self.mlp_norm = _norm(config, rngs=rngs)
        self.mlp = vision.MLP(config.width, config.hidden, dtype=config.dtype, rngs=rngs)
        self.dropout = layers.dropout(config.dropout, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """[B, T, D] to [B, T, D] in the dtype of the input, also where a norm kept in float32
        widens a branch.
        """

        def branch(y_BTD: jax.Array) -> jax.Array:
            return self.dropout(y_BTD, deterministic=deterministic).astype(x_BTD.dtype)

        y_BTD = self.attn_norm(x_BTD)
        x_BTD = x_BTD + branch(self.attn(y_BTD, y_BTD))
        return x_BTD + branch(self.mlp(self.mlp_norm(x_BTD)))


class ViT(nnx.Module):
    """A classifier of images.

    `blocks` is one ViTBlock whose leaves have a leading dim L (`scan_layers`), or an nnx.List of L
    ViTBlocks. `rngs` needs a `params` stream, and a `dropout` stream where dropout is above 0.
    `attention` replaces the attention of every block. Weights start as on Hugging Face, from
    normal(0, 0.02), biases from zero.
    """

    def __init__(
        self,
        config: ViTConfig,
        *,
        rngs: nnx.Rngs,
        attention: layers.Attention = layers.blockwise_attention,
    ):
        D, dtype = config.width, config.dtype
        self.config = config
        self.patches = vision.PatchEmbed(config.patch, D, dtype=dtype, rngs=rngs)
        self.class_token = vision.drawn(1, 1, D, rngs=rngs)
        self.positions = vision.drawn(1, config.positions, D, rngs=rngs)
        self.dropout = layers.dropout(config.dropout, rngs=rngs)

        def make(rngs: nnx.Rngs) -> ViTBlock:
            return ViTBlock(config, attention=attention, rngs=rngs)

        self.blocks = layers.make_blocks(
            make, config.layers, scan_layers=config.scan_layers, rngs=rngs
        )
        self.norm = _norm(config, rngs=rngs)
        self.head = layers.linear(D, config.classes, dtype=dtype, rngs=rngs)

    def __call__(self, images_BHWC: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Images [B, image_size, image_size, 3] to logits [B, classes] in the compute dtype.

        uint8 pixels are normalised by the config's mean and std; floats are taken as they are.
        ValueError for images of another shape or dtype. `deterministic=False` applies dropout and
        advances its random state.
        """
        vision.check_images(images_BHWC, self.config.image_size)
        x_BND = self.patches(vision.to_floats(images_BHWC, self.config.mean, self.config.std))
        first_B1D = jnp.broadcast_to(
            self.class_token[...].astype(x_BND.dtype), (x_BND.shape[0], 1, x_BND.shape[2])
        )
        x_BTD = jnp.concatenate([first_B1D, x_BND], axis=1) + self.positions[...].astype(
            x_BND.dtype
        )
        x_BTD = self.dropout(x_BTD, deterministic=deterministic)
        x_BTD = layers.run_blocks(self.blocks, x_BTD, deterministic=deterministic)
        return self.head(self.norm(x_BTD[:, 0]))


def _block_size(config: ViTConfig) -> int:
    D, F = config.width, config.hidden
    return (
        4 * D * D + 2 * D * F + 9 * D + F
    )  # q, k, v, o; up, down; their biases, 5 D + F; two norms, 4 D


def parameter_count(config: ViTConfig) -> int:
    """The number of parameters."""
    D = config.width
    patches = vision.CHANNELS * config.patch**2 * D + D
    ends = (
        D + config.positions * D + 2 * D + config.classes * (D + 1)
    )  # class token, positions, final norm, head
    return patches + config.layers * _block_size(config) + ends


def flops_per_example(config: ViTConfig) -> float:
    """Model FLOPs of one image of a training step, forward and backward.

    The convention is 6 N + 12 L D T per position (PaLM, appendix B), with what each parameter is
    multiplied with counted apart: the patches' kernel N times, the blocks T times, the final norm
    and the head once. The class token and the positions are added, not multiplied. Nothing is added
    for recomputation.
    """
    D, T = config.width, config.positions
    patches = (vision.CHANNELS * config.patch**2 + 1) * D * (T - 1)
    head = 2 * D + config.classes * (D + 1)
    return (
        6.0 * (patches + config.layers * _block_size(config) * T + head)
        + 12.0 * config.layers * D * T * T
    )
