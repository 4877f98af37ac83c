"""CaiT as timm saves it; `config.json` names an architecture, and what differs from it.

https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/cait.py
"""

from typing import Any

from fsdp_jax.errors import ConfigError, did_you_mean
from fsdp_jax.models.cait import CaiTConfig
from fsdp_jax.models.huggingface.config_json import (
    Json,
    WeightFormat,
    read_normalization,
    refuse_unsupported,
)
from fsdp_jax.models.huggingface.table import Entry, Table, conv2d, for_every_block, linear, norm
from fsdp_jax.models.vision import CHANNELS, IMAGENET_MEAN, IMAGENET_STD

SCALED_BLOCK = [
    *norm("attn_norm", "norm1"),
    *linear("attn/o", "attn.proj"),
    Entry("gamma_1", "gamma_1"),
    *norm("mlp_norm", "norm2"),
    *linear("mlp/up", "mlp.fc1"),
    *linear("mlp/down", "mlp.fc2"),
    Entry("gamma_2", "gamma_2"),
]
BLOCK = [
    *SCALED_BLOCK,
    *linear("attn/qkv", "attn.qkv"),
    *linear("attn/proj_l", "attn.proj_l"),
    *linear("attn/proj_w", "attn.proj_w"),
]
CLASS_BLOCK = [
    *SCALED_BLOCK,
    *linear("attn/q", "attn.q"),
    *linear("attn/k", "attn.k"),
    *linear("attn/v", "attn.v"),
]

# architecture: (image size, width, layers, heads, initial LayerScale)
ARCHITECTURES = {
    "cait_xxs24_224": (224, 192, 24, 4, 1e-5), "cait_xxs24_384": (384, 192, 24, 4, 1e-5),
    "cait_xxs36_224": (224, 192, 36, 4, 1e-5), "cait_xxs36_384": (384, 192, 36, 4, 1e-5),
    "cait_xs24_384": (384, 288, 24, 6, 1e-5), "cait_s24_224": (224, 384, 24, 8, 1e-5),
    "cait_s24_384": (384, 384, 24, 8, 1e-5), "cait_s36_384": (384, 384, 36, 8, 1e-6),
    "cait_m36_384": (384, 768, 36, 16, 1e-6), "cait_m48_448": (448, 768, 48, 16, 1e-6),
}  # fmt: skip
# arguments of timm's Cait and our fields for them: those in that order, and others
ARGUMENTS = {
    "img_size": "image_size", "embed_dim": "width", "depth": "layers", "num_heads": "heads",
    "init_values": "layer_scale",
}  # fmt: skip
MORE = {"patch_size": "patch", "num_classes": "classes", "depth_token_only": "class_layers"}
DEFAULTS = {
    "patch_size": 16,
    "mlp_ratio": 4.0,
    "mlp_ratio_token_only": 4.0,
    "depth_token_only": 2,
    "num_classes": 1000,
}
FIXED = {"global_pool": "token", "in_chans": 3, "qkv_bias": True}
# of training
HARMLESS = ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")
ARGUMENT_NAMES = {*ARGUMENTS, *DEFAULTS, *FIXED, *HARMLESS}
KEY_NAMES = {"architecture", "num_classes", "num_features", "global_pool", "model_args"}
KEY_NAMES |= {"pretrained_cfg"}
EPSILON = 1e-6
"""Of all norms; timm has no argument for it."""


def _weight_table(config: CaiTConfig) -> Table:
    """Maps our parameters to the tensors of a `Cait` of timm."""
    entries = (
        *conv2d("patches", "patch_embed.proj"),
        Entry("class_token", "cls_token"),
        Entry("positions", "pos_embed"),
        *for_every_block(config.layers, "blocks/*", "blocks.*", BLOCK),
        *for_every_block(config.class_layers, "class_blocks/*", "blocks_token_only.*", CLASS_BLOCK),
        *norm("norm", "norm"),
        *linear("head", "head"),
    )
    return Table(entries)


def _read_config(content: Json, where: object) -> CaiTConfig:
    """Converts timm's `config.json`, an architecture changed by `model_args`, to a CaiTConfig."""
    name = content["architecture"]
    if name not in ARCHITECTURES:
        raise ConfigError(
            "an unknown architecture",
            where=str(where),
            got=name,
            fix=did_you_mean(str(name), ARCHITECTURES),
        )
    given = {
        key: value for key, value in (content.get("model_args") or {}).items() if value is not None
    }
    # every argument that is not implemented, so that one error lists them all
    unknown = {f"model_args.{key}: {given[key]}" for key in given.keys() - ARGUMENT_NAMES}
    unknown |= {key for key in content.keys() - KEY_NAMES if content[key] is not None}
    lines = [f"{key} is not known" for key in sorted(unknown)]
    for key, only in FIXED.items():
        for value in (given.get(key, only), content.get(key, only)):
            if value != only:
                lines.append(f"{key}: {value} is not implemented, only {only}")
    # the sizes of the architecture, which `model_args` change
    sizes: dict[str, Any] = {**DEFAULTS, **dict(zip(ARGUMENTS, ARCHITECTURES[name], strict=True))}
    sizes |= {"num_classes": content.get("num_classes", DEFAULTS["num_classes"])} | given
    if not isinstance(sizes["img_size"], int):
        lines.append(f"img_size: {sizes['img_size']} is not implemented, only squares")
    if sizes["mlp_ratio"] != sizes["mlp_ratio_token_only"]:
        lines.append("mlp_ratio: is not implemented where mlp_ratio_token_only differs from it")
    refuse_unsupported(lines, where)
    # the normalization that the weights were trained with; timm's default is ImageNet's
    pixels: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    pretrained = content.get("pretrained_cfg") or {}
    pixels |= read_normalization(pretrained, {"mean": "mean", "std": "std"}, where)
    fields = {ours: sizes[theirs] for theirs, ours in (ARGUMENTS | MORE).items()}
    hidden = int(sizes["embed_dim"] * sizes["mlp_ratio"])
    return CaiTConfig(**fields, hidden=hidden, norm_epsilon=EPSILON, **pixels)


def _write_config(config: CaiTConfig) -> Json:
    """Makes the content of `config.json`: the architecture, or the smallest and the differences.

    Raises ConfigError where timm cannot compute it.
    """
    if config.norm_epsilon != EPSILON:
        raise ConfigError(
            "an epsilon that timm has no argument for",
            where="CaiTConfig.norm_epsilon",
            expected=EPSILON,
            got=config.norm_epsilon,
        )
    # an architecture with these sizes, or else any, with the sizes as its arguments
    sizes = (config.image_size, config.width, config.layers, config.heads, config.initial_scale)
    names = [name for name, arguments in ARCHITECTURES.items() if arguments == sizes]
    ratio = config.hidden / config.width
    more: dict[str, Any] = {"patch_size": config.patch, "depth_token_only": config.class_layers}
    more |= {"mlp_ratio": ratio, "mlp_ratio_token_only": ratio}
    arguments = {key: value for key, value in more.items() if value != DEFAULTS[key]}
    if not names:
        arguments |= dict(zip(ARGUMENTS, sizes, strict=True))
    return {
        "architecture": next(iter(names or ARCHITECTURES)),
        "num_classes": config.classes,
        "num_features": config.width,
        "global_pool": "token",
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [CHANNELS, config.image_size, config.image_size],
            "fixed_input_size": True,
            "mean": list(config.mean),
            "std": list(config.std),
            "num_classes": config.classes,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


FORMAT = WeightFormat(None, _weight_table, _read_config, _write_config, tokens=())
