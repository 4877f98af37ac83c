"""CaiT in plain Flax NNX: talking heads over an image's patches, then class attention.

Shapes: B batch, T patches, D width, H heads, K head dim, F hidden width of the MLP, L layers.

Every branch is scaled (LayerScale). The arithmetic is that of timm's `cait_*` models and weights;
the paper's stochastic depth, which drops whole branches, is not implemented. Sources: CaiT,
arXiv:2103.17239; talking heads, arXiv:2003.02436.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fsdp_jax.models import layers, vision
from fsdp_jax.models.config import from_preset
from fsdp_jax.models.flops import training_flops
from fsdp_jax.models.layers import Attention, blockwise_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaiTConfig(vision.ImageConfig):
    """The shape of a CaiT. Raises ValueError for sizes that do not fit together."""

    patch: int = 16  # side of a patch, in pixels
    class_layers: int = 2  # blocks of class attention after the blocks of self-attention
    layer_scale: float | None = None
    """Initial LayerScale of every branch; None uses the paper's by depth, see `initial_scale`."""
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("layer_scale", self.initial_scale > 0, "above 0")

    @property
    def initial_scale(self) -> float:
        """`layer_scale`, or the paper's (section 2): 0.1 up to 18 blocks, 1e-5 to 24, then 1e-6."""
        if self.layer_scale is not None:
            return self.layer_scale
        if self.layers <= 18:
            return 0.1
        if self.layers <= 24:
            return 1e-5
        return 1e-6


def _cait_config(depth: int, width: int, heads: int, image_size: int) -> CaiTConfig:
    """Makes a configuration with an MLP four times as wide, as the paper's have."""
    hidden = 4 * width
    return CaiTConfig(image_size=image_size, layers=depth, width=width, heads=heads, hidden=hidden)


PRESETS: dict[str, CaiTConfig] = {
    "cait-tiny": CaiTConfig(  # 1.2M
        image_size=32, patch=4, classes=8, layers=4, width=128, heads=4, hidden=512
    ),
    "cait-xxs24-224": _cait_config(24, 192, 4, 224),  # 12.0M
    "cait-s24-224": _cait_config(24, 384, 8, 224),  # 46.9M
    "cait-s36-384": _cait_config(36, 384, 8, 384),  # 68.4M
    "cait-m36-384": _cait_config(36, 768, 16, 384),  # 271M
    "cait-m48-448": _cait_config(48, 768, 16, 448),  # 356M
}
preset = partial(from_preset, PRESETS)


class HeadMix(nnx.Module):
    """A Linear that mixes heads: `kernel` [H, H] from normal(0, 0.02), `bias` [H]."""

    def __init__(self, heads: int, *, dtype: str | None, rngs: nnx.Rngs):
        self.dtype = dtype
        self.kernel = vision.normal_param(heads, heads, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((heads,), jnp.float32))

    def __call__(self, x_BHTS: jax.Array) -> jax.Array:
        """Maps [B, H, T, S] to [B, H, T, S] in the dtype of the input."""
        dtype = self.dtype or x_BHTS.dtype
        kernel, bias = self.kernel[...].astype(dtype), self.bias[...].astype(dtype)
        mixed = jnp.einsum("bhts,hg->bgts", x_BHTS, kernel) + bias[None, :, None, None]
        return mixed.astype(x_BHTS.dtype)


class TalkingHeadsAttention(nnx.Module):
    """Self-attention whose heads are mixed before the softmax (`proj_l`) and after it (`proj_w`).

    It takes no `Attention`: a fused kernel computes the scores of one head at a time, and here each
    head's depend on all of them.
    """

    def __init__(self, config: CaiTConfig, *, rngs: nnx.Rngs):
        D, dtype = config.width, config.dtype
        self.head_dim = D // config.heads
        self.qkv = layers.linear(D, 3 * D, dtype=dtype, rngs=rngs)
        self.proj_l = HeadMix(config.heads, dtype=dtype, rngs=rngs)
        self.proj_w = HeadMix(config.heads, dtype=dtype, rngs=rngs)
        self.o = layers.linear(D, D, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]."""
        # the queries are scaled, not the scores, as in timm
        q_BTHK, k_BTHK, v_BTHK = layers.split_qkv(self.qkv(x_BTD), self.head_dim)
        q_BTHK = q_BTHK * self.head_dim**-0.5
        scores_BHTS = self.proj_l(jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK))
        # the softmax in float32, as in the attention of the other families
        weights_BHTS = jax.nn.softmax(scores_BHTS.astype(jnp.float32), axis=-1).astype(v_BTHK.dtype)
        attended = jnp.einsum("bhts,bshk->bthk", self.proj_w(weights_BHTS), v_BTHK)
        attended = checkpoint_name(attended, "attention")
        return checkpoint_name(self.o(attended.reshape(x_BTD.shape)), "attention_out")


class _ScaledBlock(nnx.Module):
    """Base of CaiT's blocks: `attn`, then an MLP, each after a norm and times a LayerScale."""

    def __init__(self, config: CaiTConfig, attn: nnx.Module, *, rngs: nnx.Rngs):
        def layer_scale() -> nnx.Param:
            return nnx.Param(jnp.full((config.width,), config.initial_scale, jnp.float32))

        self.attn_norm = layers.layer_norm(config, rngs=rngs)
        self.attn = attn
        self.gamma_1 = layer_scale()
        self.mlp_norm = layers.layer_norm(config, rngs=rngs)
        self.mlp = vision.make_mlp(config, rngs=rngs)
        self.gamma_2 = layer_scale()


def _add_scaled(x_BTD: jax.Array, gamma: nnx.Param, branch: jax.Array) -> jax.Array:
    """Adds gamma * branch to x, in the dtype of x."""
    return x_BTD + gamma[...].astype(x_BTD.dtype)[None, None] * branch.astype(x_BTD.dtype)


class CaiTBlock(_ScaledBlock):
    """One block of talking-heads attention between the patches."""

    def __init__(self, config: CaiTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, TalkingHeadsAttention(config, rngs=rngs), rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D] in the dtype of the input."""
        x_BTD = _add_scaled(x_BTD, self.gamma_1, self.attn(self.attn_norm(x_BTD)))
        return _add_scaled(x_BTD, self.gamma_2, self.mlp(self.mlp_norm(x_BTD)))


class ClassAttentionBlock(_ScaledBlock):
    """One block in which the class token attends to itself and the patches, which do not change."""

    def __init__(self, config: CaiTConfig, *, attention: Attention, rngs: nnx.Rngs):
        attn = vision.VisionAttention(config, attention=attention, rngs=rngs)
        super().__init__(config, attn, rngs=rngs)

    def __call__(self, x_B1D: jax.Array, *, patches: jax.Array) -> jax.Array:
        """Maps the class token [B, 1, D] and patches [B, T, D] to the class token, in its dtype."""
        # the class token is the only query; keys and values are of all positions
        source = self.attn_norm(jnp.concatenate([x_B1D, patches], axis=1))
        x_B1D = _add_scaled(x_B1D, self.gamma_1, self.attn(source[:, :1], source))
        return _add_scaled(x_B1D, self.gamma_2, self.mlp(self.mlp_norm(x_B1D)))


class CaiT(nnx.Module):
    """A classifier of images; arguments and attributes are as `fsdp_jax.models` says.

    `class_blocks` are ClassAttentionBlocks, whose attention alone `attention` replaces. Weights
    start from normal(0, 0.02), biases from zero, as in timm.
    """

    def __init__(
        self, config: CaiTConfig, *, rngs: nnx.Rngs, attention: Attention = blockwise_attention
    ):
        D, scan_layers = config.width, config.scan_layers
        self.config = config
        self.patches = vision.PatchEmbed(config, rngs=rngs)
        self.class_token = vision.normal_param(1, 1, D, rngs=rngs)
        self.positions = vision.normal_param(1, config.patches, D, rngs=rngs)
        make = partial(CaiTBlock, config)
        self.blocks = layers.make_blocks(make, config.layers, scan_layers, rngs)
        make_class = partial(ClassAttentionBlock, config, attention=attention)
        self.class_blocks = layers.make_blocks(make_class, config.class_layers, scan_layers, rngs)
        self.norm = layers.layer_norm(config, rngs=rngs)
        self.head = layers.linear(D, config.classes, dtype=config.dtype, rngs=rngs)

    def __call__(self, images_BHWC: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Maps images to logits as `vit.ViT` does; `deterministic` has no effect: no dropout."""
        x_BTD = self.patches(vision.normalize_images(images_BHWC, self.config))
        x_BTD = x_BTD + self.positions[...].astype(x_BTD.dtype)
        x_BTD = layers.run_blocks(self.blocks, x_BTD)
        # the class token joins after the blocks of self-attention, unlike a ViT's
        token_B1D = vision.repeat_token(self.class_token, x_BTD)
        token_B1D = layers.run_blocks(self.class_blocks, token_B1D, patches=x_BTD)
        return self.head(self.norm(token_B1D[:, 0]))


def flops_per_example(config: CaiTConfig) -> float:
    """Counts the `training_flops` of one image.

    A class block has its keys and values, and the norm before them, for all patches and the class
    token, the rest for the token alone. The class token and the positions are added, not
    multiplied.
    """
    T = config.patches
    multiplied = {
        "class_token|positions": 0,
        "class_blocks/(attn_norm|attn/[kv])/": T + 1,
        "class_blocks|norm|head": 1,
        "blocks/attn/proj_": T * T,
        "patches|blocks": T,
    }
    pairs = config.layers * T * T + config.class_layers * (T + 1)
    return training_flops(CaiT, config, multiplied, pairs=pairs)
