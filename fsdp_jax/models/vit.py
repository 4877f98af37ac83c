"""ViT in plain Flax NNX: pre-norm blocks over the patches of an image and a class token.

Shapes: B batch, N patches, T = N + 1 positions (the class token first), D width, H heads, K head
dim, F hidden width of the MLP, L layers.

The arithmetic is that of the weights on Hugging Face (google/vit-base-patch16-224): learned
positions, biases, the exact gelu. Sources: ViT, arXiv:2010.11929; g/14, arXiv:2106.04560.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from fsdp_jax.models import layers, vision
from fsdp_jax.models.config import from_preset
from fsdp_jax.models.flops import training_flops
from fsdp_jax.models.layers import Attention, blockwise_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(vision.ImageConfig):
    """The shape of a ViT. Raises ValueError for sizes that do not fit together."""

    norm_epsilon: float = 1e-12
    dropout: float = 0.0  # dropout probability; above 0 the model needs a `dropout` random stream

    @property
    def positions(self) -> int:
        """T, the number of positions: the patches of an image, and the class token."""
        return self.patches + 1


def _vit_config(depth: int, width: int, heads: int, hidden: int, patch: int) -> ViTConfig:
    """Makes a configuration for ImageNet: images of 224 pixels, 1000 classes."""
    return ViTConfig(patch=patch, layers=depth, width=width, heads=heads, hidden=hidden)


PRESETS: dict[str, ViTConfig] = {
    "vit-tiny": ViTConfig(  # 0.8M
        image_size=32, patch=4, classes=8, layers=4, width=128, heads=4, hidden=512
    ),
    "vit-s16": _vit_config(12, 384, 6, 1536, 16),  # 22.1M
    "vit-b16": _vit_config(12, 768, 12, 3072, 16),  # 86.6M
    "vit-l16": _vit_config(24, 1024, 16, 4096, 16),  # 304M
    "vit-h14": _vit_config(32, 1280, 16, 5120, 14),  # 632M
    "vit-g14": _vit_config(40, 1408, 16, 6144, 14),  # 1.01B
}
preset = partial(from_preset, PRESETS)


class ViTBlock(layers.ResidualBlock):
    """One pre-norm transformer block: attention, then an MLP, each added to the residual stream."""

    def __init__(self, config: ViTConfig, *, attention: Attention, rngs: nnx.Rngs):
        attn = partial(vision.VisionAttention, attention=attention)
        parts = (layers.layer_norm, attn, vision.make_mlp)
        super().__init__(config, *parts, dropout=config.dropout, rngs=rngs)


class ViT(nnx.Module):
    """A classifier of images; arguments and attributes are as `fsdp_jax.models` says.

    Weights start as on Hugging Face, from normal(0, 0.02), biases from zero.
    """

    def __init__(
        self, config: ViTConfig, *, rngs: nnx.Rngs, attention: Attention = blockwise_attention
    ):
        D = config.width
        self.config = config
        self.patches = vision.PatchEmbed(config, rngs=rngs)
        self.class_token = vision.normal_param(1, 1, D, rngs=rngs)
        self.positions = vision.normal_param(1, config.positions, D, rngs=rngs)
        self.dropout = layers.ResidualDropout(config.dropout, rngs=rngs)
        make = partial(ViTBlock, config, attention=attention)
        self.blocks = layers.make_blocks(make, config.layers, config.scan_layers, rngs)
        self.norm = layers.layer_norm(config, rngs=rngs)
        self.head = layers.linear(D, config.classes, dtype=config.dtype, rngs=rngs)

    def __call__(self, images_BHWC: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Maps images [B, image_size, image_size, 3] to logits [B, classes] in the compute dtype.

        uint8 pixels are normalized by the config's mean and std; floats are passed on unchanged.
        ValueError for images of another shape or dtype. `deterministic=False` applies dropout and
        advances its random state.
        """
        # the class token first, and the positions added to it and to the patches
        x_BND = self.patches(vision.normalize_images(images_BHWC, self.config))
        x_BTD = jnp.concatenate([vision.repeat_token(self.class_token, x_BND), x_BND], axis=1)
        x_BTD = x_BTD + self.positions[...].astype(x_BND.dtype)
        x_BTD = self.dropout(x_BTD, deterministic=deterministic)
        x_BTD = layers.run_blocks(self.blocks, x_BTD, deterministic=deterministic)
        # the class token alone is classified; the norm of the others is not needed
        return self.head(self.norm(x_BTD[:, 0]))


def flops_per_example(config: ViTConfig) -> float:
    """Counts the `training_flops` of one image.

    The class token and the positions are added, not multiplied.
    """
    N, T = config.patches, config.positions
    multiplied = {"class_token|positions": 0, "patches": N, "blocks": T, "norm|head": 1}
    return training_flops(ViT, config, multiplied, pairs=config.layers * T * T)
