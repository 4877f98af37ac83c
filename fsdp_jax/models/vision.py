"""What the image models share: patches, the MLP between the attentions, the loss of a classifier.

Shapes: B batch, N patches, P the side of a patch in pixels, D width, F hidden width of the MLP.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fsdp_jax.models import layers

CHANNELS = 3
HALF = (0.5, 0.5, 0.5)
"""Mean and standard deviation that take pixels to -1 to 1."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, red, green and blue, from 0 to 1."""


def gelu(x: jax.Array) -> jax.Array:
    """The exact gelu, by the error function, `recomputed`."""
    return layers.recomputed(partial(jax.nn.gelu, approximate=False))(x)


class PatchEmbed(nnx.Module):
    """A convolution whose stride is its size, as one product: every patch of P x P pixels becomes a
    vector.

    `kernel` [P, P, 3, D] (HWIO), drawn from normal(0, 0.02), and `bias` [D]. The images are cast to
    `dtype`, or where that is None to the kernel's: pixels do not choose the dtype that a model
    computes in.
    """

    def __init__(self, patch: int, width: int, *, dtype: str | None, rngs: nnx.Rngs):
        self.dtype = dtype
        draw = nnx.initializers.normal(layers.INIT_STD)
        self.kernel = nnx.Param(draw(rngs.params(), (patch, patch, CHANNELS, width), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Floats [B, H, W, 3] to [B, N, D], the patches row by row."""
        kernel, bias = self.kernel[...], self.bias[...]
        dtype = kernel.dtype if self.dtype is None else self.dtype
        B, H, W, C = images_BHWC.shape
        P, _, _, D = kernel.shape
        grid = images_BHWC.astype(dtype).reshape(B, H // P, P, W // P, P, C)
        patches = jnp.transpose(grid, (0, 1, 3, 2, 4, 5)).reshape(B, (H // P) * (W // P), P * P * C)
        return patches @ kernel.reshape(-1, D).astype(dtype) + bias.astype(dtype)[None, None]


class Attention(nnx.Module):
    """Multi-head attention with biases, in all directions; queries come from one stream, keys and
    values from any.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        attention: layers.Attention,
        dtype: str | None,
        rngs: nnx.Rngs,
    ):
        self.heads = heads
        self.attention = attention
        self.q = layers.linear(width, width, dtype=dtype, rngs=rngs)
        self.k = layers.linear(width, width, dtype=dtype, rngs=rngs)
        self.v = layers.linear(width, width, dtype=dtype, rngs=rngs)
        self.o = layers.linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, seen_BSD: jax.Array) -> jax.Array:
        """[B, T, D] and [B, S, D] to [B, T, D]."""
        q_BTHK, k_BSHK, v_BSHK = (
            project(x).reshape(*x.shape[:2], self.heads, x.shape[2] // self.heads)
            for project, x in ((self.q, x_BTD), (self.k, seen_BSD), (self.v, seen_BSD))
        )
        return self.o(self.attention(q_BTHK, k_BSHK, v_BSHK, is_causal=False).reshape(x_BTD.shape))


class MLP(nnx.Module):
    """Two Linears, D to F and back, with the exact gelu between them."""

    def __init__(self, width: int, hidden: int, *, dtype: str | None, rngs: nnx.Rngs):
        self.up = layers.linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = layers.linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        return self.down(gelu(self.up(x_BTD)))


def drawn(*shape: int, rngs: nnx.Rngs) -> nnx.Param:
    """A parameter drawn from normal(0, 0.02): a class token, a table of positions."""
    return nnx.Param(nnx.initializers.normal(layers.INIT_STD)(rngs.params(), shape, jnp.float32))


def check_sizes(config: Any) -> None:
    """ValueError where the sizes that every image model has do not fit together."""
    kind = type(config).__name__
    for name in ("image_size", "patch", "classes", "layers", "width", "heads", "hidden"):
        if getattr(config, name) < 1:
            raise ValueError(f"{kind}.{name} must be at least 1, got {getattr(config, name)}")
    if config.image_size % config.patch:
        where = f"image_size {config.image_size}, patch {config.patch}"
        raise ValueError(f"{kind}.image_size must be a multiple of patch, got {where}")
    if config.width % config.heads:
        raise ValueError(
            f"{kind}.width must be a multiple of heads, got width {config.width}, heads {config.heads}"
        )
    if not config.norm_epsilon > 0:
        raise ValueError(f"{kind}.norm_epsilon must be above 0, got {config.norm_epsilon}")
    for name in ("mean", "std"):
        if len(getattr(config, name)) != CHANNELS:
            raise ValueError(
                f"{kind}.{name} must be {CHANNELS} numbers, got {getattr(config, name)}"
            )
    if not min(config.std) > 0:
        raise ValueError(f"{kind}.std must be above 0, got {config.std}")


def check_images(images: jax.Array, image_size: int) -> None:
    """ValueError unless these are uint8 or floats, [B, image_size, image_size, 3]."""
    expected = (image_size, image_size, CHANNELS)
    known = images.dtype == jnp.uint8 or jnp.issubdtype(images.dtype, jnp.floating)
    if images.ndim != 4 or images.shape[1:] != expected or not known:
        got = f"{images.dtype} {list(images.shape)}"
        raise ValueError(
            f"expected images as uint8 or floats [B, {', '.join(map(str, expected))}], got {got}"
        )


def to_floats(
    images_BHWC: jax.Array, mean: tuple[float, ...] = HALF, std: tuple[float, ...] = HALF
) -> jax.Array:
    """uint8 pixels [B, H, W, 3] to float32, (x / 255 - mean) / std for each colour; floats as they
    are.
    """
    if images_BHWC.dtype != jnp.uint8:
        return images_BHWC
    shift, scale = (255 * np.array(each, np.float32)[None, None, None] for each in (mean, std))
    return (images_BHWC.astype(jnp.float32) - shift) / scale


def classification_loss(
    model: Callable[..., jax.Array], batch: Mapping[str, jax.Array], *, train: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The sum of the cross-entropy in nats and the number of images it is over, both float32
    scalars.

    `batch` has `images` [B, H, W, 3], which the model takes as they are, and `labels`, int32 [B],
    and may have `mask`, [B], the weight of each image (absent: all 1); where it is 0 the label may
    be any number. They are returned apart so that sums over microbatches and devices can be divided
    once. `train=True` applies dropout.
    """
    logits_BC = model(batch["images"], deterministic=not train)
    loss_B = layers.cross_entropy(logits_BC[:, None], batch["labels"][:, None])[:, 0]
    return layers.masked_sum(loss_B, batch.get("mask"))
