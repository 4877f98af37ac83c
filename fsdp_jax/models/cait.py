"""CaiT in plain Flax NNX: talking heads over an image's patches, then class attention; LayerScale
on every branch.

Shapes: B batch, T patches, D width, H heads, K head dim, F hidden width of the MLP, L layers.

The arithmetic is that of timm's `cait_*` models and weights. Sources: CaiT, arXiv:2103.17239;
talking heads, arXiv:2003.02436. What the paper drops at random, whole branches, is not dropped
here.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fsdp_jax.models import layers, vision


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaiTConfig:
    """The shape of a CaiT. Raises ValueError where the numbers do not fit together."""

    image_size: int = 224
    """Side of the images, in pixels."""
    patch: int = 16
    """Side of a patch, in pixels."""
    classes: int = 1000
    layers: int
    """Blocks of self-attention."""
    class_layers: int = 2
    """Blocks of class attention after them."""
    width: int
    heads: int
    hidden: int
    """Hidden width of the MLP."""
    layer_scale: float | None = None
    """What every branch is multiplied with at first; None takes the paper's for the depth, see `initial_scale`."""
    norm_epsilon: float = 1e-6
    mean: tuple[float, ...] = vision.HALF
    """What is taken from uint8 pixels, red, green and blue, once they are divided by 255; see `vision.to_floats`."""
    std: tuple[float, ...] = vision.HALF
    """What they are then divided by."""
    scan_layers: bool = True
    """Stack the blocks' parameters and compile one block of each kind; False keeps lists of blocks."""
    dtype: str | None = None
    """Compute dtype by name; None follows the parameters."""

    def __post_init__(self) -> None:
        vision.check_sizes(self)
        if self.class_layers < 1:
            raise ValueError(f"CaiTConfig.class_layers must be at least 1, got {self.class_layers}")
        if self.layer_scale is not None and not self.layer_scale > 0:
            raise ValueError(f"CaiTConfig.layer_scale must be above 0, got {self.layer_scale}")

    @property
    def patches(self) -> int:
        """T."""
        return (self.image_size // self.patch) ** 2

    @property
    def initial_scale(self) -> float:
        """`layer_scale`, or the paper's (section 2): 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6
        beyond.
        """
        by_depth = 0.1 if self.layers <= 18 else 1e-5 if self.layers <= 24 else 1e-6
        return by_depth if self.layer_scale is None else self.layer_scale


def _cait(depth: int, width: int, heads: int, image_size: int) -> CaiTConfig:
    return CaiTConfig(
        image_size=image_size, layers=depth, width=width, heads=heads, hidden=4 * width
    )


PRESETS: dict[str, CaiTConfig] = {
    "cait-tiny": CaiTConfig(  # 1.2M
        image_size=32, patch=4, classes=8, layers=4, width=128, heads=4, hidden=512
    ),
    "cait-xxs24-224": _cait(24, 192, 4, 224),  # 12.0M
    "cait-s24-224": _cait(24, 384, 8, 224),  # 46.9M
    "cait-s36-384": _cait(36, 384, 8, 384),  # 68.4M
    "cait-m36-384": _cait(36, 768, 16, 384),  # 271M
    "cait-m48-448": _cait(48, 768, 16, 448),  # 356M
}


def preset(name: str, **overrides: Any) -> CaiTConfig:
    """The preset `name` with fields replaced; ValueError for an unknown name or field says what was
    probably meant.
    """
    return layers.from_preset(PRESETS, name, overrides)


def _norm(config: CaiTConfig, *, rngs: nnx.Rngs) -> layers.LayerNorm:
    return layers.LayerNorm(
        config.width, epsilon=config.norm_epsilon, dtype=config.dtype, rngs=rngs
    )


class HeadMix(nnx.Module):
    """A Linear across the heads: `kernel` [H, H] from normal(0, 0.02), `bias` [H]."""

    def __init__(self, heads: int, *, dtype: str | None, rngs: nnx.Rngs):
        self.dtype = dtype
        self.kernel = vision.drawn(heads, heads, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((heads,), jnp.float32))

    def __call__(self, x_BHTS: jax.Array) -> jax.Array:
        """[B, H, T, S] to [B, H, T, S] in the dtype of the input."""
        kernel, bias = (
            value[...].astype(self.dtype or x_BHTS.dtype) for value in (self.kernel, self.bias)
        )
        mixed = jnp.einsum("bhts,hg->bgts", x_BHTS, kernel) + bias[None, :, None, None]
        return mixed.astype(x_BHTS.dtype)


class TalkingHeadsAttention(nnx.Module):
    """Self-attention whose heads are mixed before the softmax (`proj_l`) and after it (`proj_w`).

    Written out, not with an `Attention`: a fused kernel keeps the scores of one head at a time, and
    here each head's depend on all of them.
    """

    def __init__(self, config: CaiTConfig, *, rngs: nnx.Rngs):
        D, dtype = config.width, config.dtype
        self.heads = config.heads
        self.qkv = layers.linear(D, 3 * D, dtype=dtype, rngs=rngs)
        self.proj_l = HeadMix(config.heads, dtype=dtype, rngs=rngs)
        self.proj_w = HeadMix(config.heads, dtype=dtype, rngs=rngs)
        self.o = layers.linear(D, D, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        B, T, D = x_BTD.shape
        parts = jnp.split(self.qkv(x_BTD), 3, axis=-1)
        q_BTHK, k_BTHK, v_BTHK = (part.reshape(B, T, self.heads, D // self.heads) for part in parts)
        q_BTHK = q_BTHK * (D // self.heads) ** -0.5
        scores_BHTS = self.proj_l(jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK))
        weights_BHTS = jax.nn.softmax(scores_BHTS.astype(jnp.float32), axis=-1).astype(v_BTHK.dtype)
        attended = jnp.einsum("bhts,bshk->bthk", self.proj_w(weights_BHTS), v_BTHK)
        return self.o(attended.reshape(B, T, D))


class _Scaled(nnx.Module):
    """What both blocks are: attention, then an MLP, each after a norm and times a LayerScale,
    gamma_1 and gamma_2.
    """

    def __init__(self, config: CaiTConfig, attn: nnx.Module, *, rngs: nnx.Rngs):
        def scale() -> nnx.Param:
            return nnx.Param(jnp.full((config.width,), config.initial_scale, jnp.float32))

        self.attn_norm = _norm(config, rngs=rngs)
        self.attn = attn
        self.gamma_1 = scale()
        self.mlp_norm = _norm(config, rngs=rngs)
        self.mlp = vision.MLP(config.width, config.hidden, dtype=config.dtype, rngs=rngs)
        self.gamma_2 = scale()


def _times(gamma: nnx.Param, y_BTD: jax.Array, dtype: Any) -> jax.Array:
    return gamma[...].astype(dtype)[None, None] * y_BTD.astype(dtype)


class CaiTBlock(_Scaled):
    """One block of talking-heads attention between the patches."""

    def __init__(self, config: CaiTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, TalkingHeadsAttention(config, rngs=rngs), rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] to [B, T, D] in the dtype of the input."""
        x_BTD = x_BTD + _times(self.gamma_1, self.attn(self.attn_norm(x_BTD)), x_BTD.dtype)
        return x_BTD + _times(self.gamma_2, self.mlp(self.mlp_norm(x_BTD)), x_BTD.dtype)


class ClassAttentionBlock(_Scaled):
    """One block in which the class token reads itself and the patches, which stay as they are."""

    def __init__(self, config: CaiTConfig, *, attention: layers.Attention, rngs: nnx.Rngs):
        attn = vision.Attention(
            config.width, config.heads, attention=attention, dtype=config.dtype, rngs=rngs
        )
        super().__init__(config, attn, rngs=rngs)

    def __call__(self, x_B1D: jax.Array, *, patches: jax.Array) -> jax.Array:
        """The class token [B, 1, D] and the patches [B, T, D] to the class token, in its dtype."""
        seen = self.attn_norm(jnp.concatenate([x_B1D, patches], axis=1))
        x_B1D = x_B1D + _times(self.gamma_1, self.attn(seen[:, :1], seen), x_B1D.dtype)
        return x_B1D + _times(self.gamma_2, self.mlp(self.mlp_norm(x_B1D)), x_B1D.dtype)


class CaiT(nnx.Module):
    """A classifier of images.

    `blocks` is one CaiTBlock whose leaves have a leading dim L (`scan_layers`), or an nnx.List of L
    CaiTBlocks; so are `class_blocks` ClassAttentionBlocks. `rngs` needs a `params` stream.
    `attention` replaces the class attention alone. Weights start from normal(0, 0.02), biases from
    zero, as in timm.
    """

    def __init__(
        self,
        config: CaiTConfig,
        *,
        rngs: nnx.Rngs,
        attention: layers.Attention = layers.blockwise_attention,
    ):
        D, dtype = config.width, config.dtype
        self.config = config
        self.patches = vision.PatchEmbed(config.patch, D, dtype=dtype, rngs=rngs)
        self.class_token = vision.drawn(1, 1, D, rngs=rngs)
        self.positions = vision.drawn(1, config.patches, D, rngs=rngs)

        def make(rngs: nnx.Rngs) -> CaiTBlock:
            return CaiTBlock(config, rngs=rngs)

        def make_class(rngs: nnx.Rngs) -> ClassAttentionBlock:
            return ClassAttentionBlock(config, attention=attention, rngs=rngs)

        scan = config.scan_layers
        self.blocks = layers.make_blocks(make, config.layers, scan_layers=scan, rngs=rngs)
        self.class_blocks = layers.make_blocks(
            make_class, config.class_layers, scan_layers=scan, rngs=rngs
        )
        self.norm = _norm(config, rngs=rngs)
        self.head = layers.linear(D, config.classes, dtype=dtype, rngs=rngs)

    def __call__(self, images_BHWC: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Images [B, image_size, image_size, 3] to logits [B, classes] in the compute dtype.

        uint8 pixels are normalised by the config's mean and std; floats are taken as they are.
        ValueError for images of another shape or dtype. `deterministic` is what every family is
        called with; a CaiT draws no random numbers.
        """
        vision.check_images(images_BHWC, self.config.image_size)
        x_BTD = self.patches(vision.to_floats(images_BHWC, self.config.mean, self.config.std))
        x_BTD = x_BTD + self.positions[...].astype(x_BTD.dtype)
        x_BTD = layers.run_blocks(self.blocks, x_BTD)
        token = self.class_token[...].astype(x_BTD.dtype)
        token_B1D = jnp.broadcast_to(token, (x_BTD.shape[0], 1, x_BTD.shape[2]))
        token_B1D = layers.run_blocks(self.class_blocks, token_B1D, patches=x_BTD)
        return self.head(self.norm(token_B1D[:, 0]))


def _sizes(config: CaiTConfig) -> tuple[int, int, int]:
    """Parameters of a block less its head mixes, of its head mixes, and of the final norm with the
    head.
    """
    D, F, H = config.width, config.hidden, config.heads
    block = (
        4 * D * D + 2 * D * F + 11 * D + F
    )  # products; their biases, 5 D + F; two norms, 4 D; two scales, 2 D
    return block, 2 * (H * H + H), 2 * D + config.classes * (D + 1)


def parameter_count(config: CaiTConfig) -> int:
    """The number of parameters."""
    block, mixes, head = _sizes(config)
    D = config.width
    patches = vision.CHANNELS * config.patch**2 * D + D
    tables = D + config.patches * D  # class token and positions
    return patches + tables + config.layers * (block + mixes) + config.class_layers * block + head


def flops_per_example(config: CaiTConfig) -> float:
    """Model FLOPs of one image of a training step, forward and backward.

    The convention is 6 N + 12 L D T per position (PaLM, appendix B), with what each parameter is
    multiplied with counted apart: the patches' kernel and the blocks T times, the mixes of heads T
    x T times; of a class block the keys and values and the norm before them T + 1 times, all else
    once, as the final norm and the head. The class token and the positions are added, not
    multiplied. Nothing is added for recomputation.
    """
    block, mixes, head = _sizes(config)
    D, T = config.width, config.patches
    patches = (vision.CHANNELS * config.patch**2 + 1) * D * T
    read = 2 * D * D + 2 * D + 2 * D  # k and v with their biases, a norm
    class_block = read * (T + 1) + block - read
    multiplied = (
        patches
        + config.layers * (block * T + mixes * T * T)
        + config.class_layers * class_block
        + head
    )
    pairs = config.layers * T * T + config.class_layers * (T + 1)
    return 6.0 * multiplied + 12.0 * D * pairs
