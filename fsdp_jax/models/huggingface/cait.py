"""CaiT as timm saves it; `config.json` names the architecture, and what differs from it.

https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/cait.py
"""

from typing import Any

from fsdp_jax.errors import ConfigError, did_you_mean, message
from fsdp_jax.models.cait import CaiTConfig
from fsdp_jax.models.huggingface.config_json import Json, colours, refuse
from fsdp_jax.models.huggingface.table import Entry, Table, linear, norm, patches, stacked
from fsdp_jax.models.vision import CHANNELS, IMAGENET_MEAN, IMAGENET_STD

ENDS = [
    *norm("attn_norm", "norm1"),
    *linear("attn/o", "attn.proj"),
    Entry("gamma_1", "gamma_1"),
    *norm("mlp_norm", "norm2"),
    *linear("mlp/up", "mlp.fc1"),
    *linear("mlp/down", "mlp.fc2"),
    Entry("gamma_2", "gamma_2"),
]
BLOCK = [
    *ENDS,
    *linear("attn/qkv", "attn.qkv"),
    *linear("attn/proj_l", "attn.proj_l"),
    *linear("attn/proj_w", "attn.proj_w"),
]
CLASS_BLOCK = [
    *ENDS,
    *(entry for name in "qkv" for entry in linear(f"attn/{name}", f"attn.{name}")),
]

# architecture: (image size, width, layers, heads, first value of LayerScale)
ARCHITECTURES = {
    "cait_xxs24_224": (224, 192, 24, 4, 1e-5), "cait_xxs24_384": (384, 192, 24, 4, 1e-5),
    "cait_xxs36_224": (224, 192, 36, 4, 1e-5), "cait_xxs36_384": (384, 192, 36, 4, 1e-5),
    "cait_xs24_384": (384, 288, 24, 6, 1e-5), "cait_s24_224": (224, 384, 24, 8, 1e-5),
    "cait_s24_384": (384, 384, 24, 8, 1e-5), "cait_s36_384": (384, 384, 36, 8, 1e-6),
    "cait_m36_384": (384, 768, 36, 16, 1e-6), "cait_m48_448": (448, 768, 48, 16, 1e-6),
}  # fmt: skip
ARGUMENTS = (
    "img_size",
    "embed_dim",
    "depth",
    "num_heads",
    "init_values",
)  # of timm's Cait, in that order
DEFAULTS = {
    "patch_size": 16,
    "mlp_ratio": 4.0,
    "mlp_ratio_token_only": 4.0,
    "depth_token_only": 2,
    "num_classes": 1000,
}
FIXED = {"global_pool": ("token",), "in_chans": (3,), "qkv_bias": (True,)}
HARMLESS = (
    "drop_rate",
    "pos_drop_rate",
    "proj_drop_rate",
    "attn_drop_rate",
    "drop_path_rate",
)  # of training
EPSILON = 1e-6  # of all norms; timm has no argument for it
KNOWN = (
    "architecture",
    "num_classes",
    "num_features",
    "global_pool",
    "model_args",
    "pretrained_cfg",
)


def table(config: CaiTConfig) -> Table:
    """Of a config."""
    return Table(
        (
            *patches("patches", "patch_embed.proj"),
            Entry("class_token", "cls_token"),
            Entry("positions", "pos_embed"),
            *stacked(config.layers, "blocks/*", "blocks.*", BLOCK),
            *stacked(config.class_layers, "class_blocks/*", "blocks_token_only.*", CLASS_BLOCK),
            *norm("norm", "norm"),
            *linear("head", "head"),
        )
    )


def read(found: Json, where: object) -> CaiTConfig:
    """From `config.json`. Raises ConfigError, ValueError."""
    name = found["architecture"]
    if name not in ARCHITECTURES:
        fix = did_you_mean(str(name), ARCHITECTURES)
        raise ConfigError(
            message("an architecture that is not known", where=str(where), got=name, fix=fix)
        )
    given = {
        key: value for key, value in (found.get("model_args") or {}).items() if value is not None
    }
    known = {*ARGUMENTS, *DEFAULTS, *FIXED, *HARMLESS}
    lines = [
        f"model_args.{key}: {value} is not known"
        for key, value in given.items()
        if key not in known
    ]
    lines += [
        f"{key}: is not known"
        for key, value in found.items()
        if key not in KNOWN and value is not None
    ]
    for key, allowed in FIXED.items():
        for value in (given.get(key, allowed[0]), found.get(key, allowed[0])):
            if value not in allowed:
                lines.append(f"{key}: {value} is not implemented, only {allowed[0]}")
    sizes: dict[str, Any] = {**DEFAULTS, **dict(zip(ARGUMENTS, ARCHITECTURES[name], strict=True))}
    sizes |= {"num_classes": found.get("num_classes", DEFAULTS["num_classes"])} | given
    if not isinstance(sizes["img_size"], int):
        lines.append(f"img_size: {sizes['img_size']} is not implemented, only squares")
    if sizes["mlp_ratio"] != sizes["mlp_ratio_token_only"]:
        lines.append("mlp_ratio: is not implemented where mlp_ratio_token_only differs from it")
    refuse(lines, where)
    given_colours = colours(
        found.get("pretrained_cfg") or {}, {"mean": "mean", "std": "std"}, where
    )
    return CaiTConfig(
        image_size=sizes["img_size"], patch=sizes["patch_size"], classes=sizes["num_classes"], layers=sizes["depth"],
        class_layers=sizes["depth_token_only"], width=sizes["embed_dim"], heads=sizes["num_heads"],
        hidden=int(sizes["embed_dim"] * sizes["mlp_ratio"]), layer_scale=sizes["init_values"],
        norm_epsilon=EPSILON, mean=given_colours.get("mean", IMAGENET_MEAN), std=given_colours.get("std", IMAGENET_STD),
    )  # fmt: skip


def write(config: CaiTConfig) -> Json:
    """For `config.json`: the architecture that it is, or the smallest with all that differs from
    it.

    Raises ConfigError where timm cannot compute it.
    """
    if config.norm_epsilon != EPSILON:
        what, got = "an epsilon that timm has no argument for", config.norm_epsilon
        raise ConfigError(message(what, where="CaiTConfig.norm_epsilon", expected=EPSILON, got=got))
    sizes = (config.image_size, config.width, config.layers, config.heads, config.initial_scale)
    named = next((name for name, each in ARCHITECTURES.items() if each == sizes), None)
    more: dict[str, Any] = {"patch_size": config.patch, "depth_token_only": config.class_layers}
    more |= dict.fromkeys(("mlp_ratio", "mlp_ratio_token_only"), config.hidden / config.width)
    given = {key: value for key, value in more.items() if value != DEFAULTS[key]}
    if named is None:
        given |= dict(zip(ARGUMENTS, sizes, strict=True))
    return {
        "architecture": named or next(iter(ARCHITECTURES)), "num_classes": config.classes,
        "num_features": config.width, "global_pool": "token", "model_args": given,
        "pretrained_cfg": {
            "input_size": [CHANNELS, config.image_size, config.image_size], "fixed_input_size": True,
            "mean": list(config.mean), "std": list(config.std), "num_classes": config.classes,
            "first_conv": "patch_embed.proj", "classifier": "head",
        },
    }  # fmt: skip
