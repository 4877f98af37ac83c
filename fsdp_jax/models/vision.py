"""The configuration and the layers that the image models share.

Shapes: B batch, N patches, P the side of a patch in pixels, D width, F hidden width of the MLP.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fsdp_jax.models import layers
from fsdp_jax.models.config import BaseConfig

CHANNELS = 3
HALF = (0.5, 0.5, 0.5)  # mean and standard deviation that map pixels to -1 to 1
IMAGENET_MEAN = (0.485, 0.456, 0.406)  # mean of ImageNet's pixels, red, green and blue, from 0 to 1
IMAGENET_STD = (0.229, 0.224, 0.225)  # standard deviation of ImageNet's pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(BaseConfig):
    """Base of the shapes of image models. Raises ValueError for sizes that do not fit together."""

    image_size: int = 224  # side of the images, in pixels
    patch: int  # side of a patch, in pixels
    classes: int = 1000
    layers: int  # blocks of self-attention
    hidden: int  # hidden width of the MLP
    norm_epsilon: float
    mean: tuple[float, ...] = HALF
    """Subtracted from uint8 pixels / 255, red, green and blue; see `to_floats`."""
    std: tuple[float, ...] = HALF  # divides them after that

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self.require_multiple("image_size", "patch")
        self.require_multiple("width", "heads")
        for name in ("mean", "std"):
            self.require(name, len(getattr(self, name)) == CHANNELS, f"{CHANNELS} numbers")
        self.require("std", min(self.std) > 0, "above 0")

    @property
    def patches(self) -> int:
        """N, the number of patches of an image."""
        return (self.image_size // self.patch) ** 2


class PatchEmbed(nnx.Module):
    """A convolution whose stride is its size, as one matmul: P x P pixels become a vector.

    `kernel` [P, P, 3, D] (HWIO) from normal(0, 0.02), and `bias` [D]. The images are cast to
    `dtype`, or where that is None to the kernel's: pixels do not choose the compute dtype.
    """

    def __init__(self, config: ImageConfig, *, rngs: nnx.Rngs):
        P, D = config.patch, config.width
        self.dtype = config.dtype
        self.kernel = normal_param(P, P, CHANNELS, D, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((D,), jnp.float32))

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Maps floats [B, H, W, 3] to [B, N, D], the patches row by row."""
        kernel, bias = self.kernel[...], self.bias[...]
        dtype = self.dtype or kernel.dtype
        B, H, W, C = images_BHWC.shape
        P, _, _, D = kernel.shape
        # a grid of patches of P x P pixels, each a row of the left operand
        grid = images_BHWC.astype(dtype).reshape(B, H // P, P, W // P, P, C)
        patches = jnp.transpose(grid, (0, 1, 3, 2, 4, 5)).reshape(B, (H // P) * (W // P), P * P * C)
        return patches @ kernel.reshape(-1, D).astype(dtype) + bias.astype(dtype)[None, None]


class VisionAttention(layers.MultiHeadAttention):
    """Multi-head attention with biases and without a causal mask."""

    def __call__(self, x_BTD: jax.Array, source_BSD: jax.Array | None = None) -> jax.Array:
        """Lets `x_BTD` attend to `source_BSD`, by default to itself; returns [B, T, D]."""
        heads = self.project(x_BTD, source_BSD)
        return self.project_out(self.attention(*heads, is_causal=False), x_BTD)


def make_mlp(config: ImageConfig, *, rngs: nnx.Rngs) -> layers.MLP:
    """Makes a block's MLP, D to F and back, with the exact gelu."""
    return layers.MLP(config, config.hidden, activation=layers.exact_gelu, rngs=rngs)


def normal_param(*shape: int, rngs: nnx.Rngs) -> nnx.Param:
    """Makes a parameter from normal(0, 0.02): a class token, a table of positions."""
    return nnx.Param(nnx.initializers.normal(layers.INIT_STD)(rngs.params(), shape, jnp.float32))


def repeat_token(token: nnx.Param, x_BND: jax.Array) -> jax.Array:
    """Repeats the class token [1, 1, D] for each row of `x_BND`: [B, 1, D] in its dtype."""
    return jnp.broadcast_to(token[...].astype(x_BND.dtype), (x_BND.shape[0], 1, x_BND.shape[2]))


def normalize_images(images: jax.Array, config: ImageConfig) -> jax.Array:
    """Checks images, and normalizes them by the configuration's mean and std: see `to_floats`.

    Raises ValueError unless they are uint8 or floats, [B, image_size, image_size, 3].
    """
    # other integers might be pixels of another range, and be read as floats
    shape = (config.image_size, config.image_size, CHANNELS)
    known = images.dtype == jnp.uint8 or jnp.issubdtype(images.dtype, jnp.floating)
    if images.ndim != 4 or images.shape[1:] != shape or not known:
        expected = f"[B, {', '.join(map(str, shape))}]"
        got = f"{images.dtype} {list(images.shape)}"
        raise ValueError(f"expected images as uint8 or floats {expected}, got {got}")
    return to_floats(images, config.mean, config.std)


def to_floats(
    images_BHWC: jax.Array, mean: tuple[float, ...] = HALF, std: tuple[float, ...] = HALF
) -> jax.Array:
    """Normalizes uint8 pixels to float32, (x / 255 - mean) / std per color; keeps floats."""
    if images_BHWC.dtype != jnp.uint8:
        return images_BHWC
    shift, scale = (255 * np.array(each, np.float32)[None, None, None] for each in (mean, std))
    return (images_BHWC.astype(jnp.float32) - shift) / scale
