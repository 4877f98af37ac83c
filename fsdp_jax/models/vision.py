"""The configuration and the layers that the image models share.

Shapes: B batch, N patches, P the side of a patch in pixels, D width, F hidden width of the MLP.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fsdp_jax.models import layers
from fsdp_jax.models.config import check_multiple, check_positive, check_sizes

CHANNELS = 3
HALF = (0.5, 0.5, 0.5)
"""Mean and standard deviation that map pixels to -1 to 1."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's pixels, red, green and blue, from 0 to 1."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of ImageNet's pixels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Base of the shapes of image models. Raises ValueError for sizes that do not fit together."""

    image_size: int = 224
    """Side of the images, in pixels."""
    patch: int
    """Side of a patch, in pixels."""
    classes: int = 1000
    layers: int
    """Blocks of self-attention."""
    width: int
    heads: int
    hidden: int
    """Hidden width of the MLP."""
    norm_epsilon: float
    mean: tuple[float, ...] = HALF
    """Subtracted from uint8 pixels / 255, red, green and blue; see `to_floats`."""
    std: tuple[float, ...] = HALF
    """Divides them after that."""
    scan_layers: bool = True
    """Stack the blocks' parameters and compile one block per kind; False keeps lists of blocks."""
    dtype: str | None = None
    """Compute dtype by name; None follows the parameters."""

    def __post_init__(self) -> None:
        check_sizes(self, "image_size", "patch", "classes", "layers", "width", "heads", "hidden")
        check_multiple(self, "image_size", "patch")
        check_multiple(self, "width", "heads")
        check_positive(self, "norm_epsilon")
        kind = type(self).__name__
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != CHANNELS:
                raise ValueError(f"{kind}.{name} must be {CHANNELS} numbers, got {values}")
        if not min(self.std) > 0:
            raise ValueError(f"{kind}.std must be above 0, got {self.std}")

    @property
    def patches(self) -> int:
        """N, the patches of an image."""
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
        """Floats [B, H, W, 3] to [B, N, D], the patches row by row."""
        kernel, bias = self.kernel[...], self.bias[...]
        dtype = kernel.dtype if self.dtype is None else self.dtype
        B, H, W, C = images_BHWC.shape
        P, _, _, D = kernel.shape
        grid = images_BHWC.astype(dtype).reshape(B, H // P, P, W // P, P, C)
        patches = jnp.transpose(grid, (0, 1, 3, 2, 4, 5)).reshape(B, (H // P) * (W // P), P * P * C)
        return patches @ kernel.reshape(-1, D).astype(dtype) + bias.astype(dtype)[None, None]


class VisionAttention(nnx.Module):
    """Multi-head attention with biases, in all directions."""

    def __init__(self, config: ImageConfig, *, attention: layers.Attention, rngs: nnx.Rngs):
        D = config.width
        linear = partial(layers.linear, D, D, dtype=config.dtype, rngs=rngs)
        self.head_dim = D // config.heads
        self.attention = attention
        self.q = linear()
        self.k = linear()
        self.v = linear()
        self.o = linear()

    def __call__(self, x_BTD: jax.Array, source_BSD: jax.Array) -> jax.Array:
        """[B, T, D] that attends to [B, S, D], to [B, T, D]."""
        q_BTHK, k_BSHK, v_BSHK = (
            layers.split_heads(checkpoint_name(project(x), "qkv"), self.head_dim)
            for project, x in ((self.q, x_BTD), (self.k, source_BSD), (self.v, source_BSD))
        )
        attended = self.attention(q_BTHK, k_BSHK, v_BSHK, is_causal=False)
        return checkpoint_name(self.o(attended.reshape(x_BTD.shape)), "attention_out")


def mlp(config: ImageConfig, *, rngs: nnx.Rngs) -> layers.MLP:
    """Returns an MLP with the exact gelu."""
    sizes = (config.width, config.hidden)
    return layers.MLP(*sizes, activation=layers.exact_gelu, dtype=config.dtype, rngs=rngs)


def layer_norm(config: ImageConfig, *, rngs: nnx.Rngs) -> layers.LayerNorm:
    """Returns a LayerNorm over D with the configuration's epsilon."""
    epsilon = config.norm_epsilon
    return layers.LayerNorm(config.width, epsilon=epsilon, dtype=config.dtype, rngs=rngs)


def normal_param(*shape: int, rngs: nnx.Rngs) -> nnx.Param:
    """Returns a parameter from normal(0, 0.02): a class token, a table of positions."""
    return nnx.Param(nnx.initializers.normal(layers.INIT_STD)(rngs.params(), shape, jnp.float32))


def repeat_token(token: nnx.Param, x_BND: jax.Array) -> jax.Array:
    """Returns the class token [1, 1, D] for each row of `x_BND`, [B, 1, D] in its dtype."""
    return jnp.broadcast_to(token[...].astype(x_BND.dtype), (x_BND.shape[0], 1, x_BND.shape[2]))


def read_images(images: jax.Array, config: ImageConfig) -> jax.Array:
    """Returns `to_floats` of images by the configuration's mean and std.

    Raises ValueError unless they are uint8 or floats, [B, image_size, image_size, 3].
    """
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
