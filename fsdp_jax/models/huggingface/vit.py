"""ViT as `ViTForImageClassification` saves it (google/vit-base-patch16-224)."""

import math
from pathlib import Path
from typing import Any

from fsdp_jax.models.huggingface.config_json import Json, Keys, colours, read_json, refuse
from fsdp_jax.models.huggingface.table import Entry, Table, linear, norm, patches, stacked
from fsdp_jax.models.vision import CHANNELS
from fsdp_jax.models.vit import ViTConfig

BLOCK = [
    *norm("attn_norm", "layernorm_before"),
    *linear("attn/q", "attention.attention.query"),
    *linear("attn/k", "attention.attention.key"),
    *linear("attn/v", "attention.attention.value"),
    *linear("attn/o", "attention.output.dense"),
    *norm("mlp_norm", "layernorm_after"),
    *linear("mlp/up", "intermediate.dense"),
    *linear("mlp/down", "output.dense"),
]

KEYS = Keys(
    fields={
        "image_size": "image_size", "patch_size": "patch", "num_hidden_layers": "layers", "hidden_size": "width",
        "num_attention_heads": "heads", "intermediate_size": "hidden", "layer_norm_eps": "norm_epsilon",
    },
    fixed={
        "hidden_act": ("gelu",),
        "num_channels": (CHANNELS,),
        "qkv_bias": (True,),
        "is_encoder_decoder": (False,),
    },
    # the pooler is of models without a classifier, the stride of masked image modelling
    harmless=(
        "hidden_dropout_prob", "attention_probs_dropout_prob", "encoder_stride", "pooler_output_size", "pooler_act",
    ),
    derived=("num_labels",),
)  # fmt: skip
LABELS = 2  # where neither labels nor their number are given, as in transformers
IMAGES = "preprocessor_config.json"
PIXEL = 1 / 255  # what pixels are multiplied with before they are normalised


def table(config: ViTConfig) -> Table:
    """Of a config."""
    return Table(
        (
            *patches("patches", "vit.embeddings.patch_embeddings.projection"),
            Entry("class_token", "vit.embeddings.cls_token"),
            Entry("positions", "vit.embeddings.position_embeddings"),
            *stacked(config.layers, "blocks/*", "vit.encoder.layer.*", BLOCK),
            *norm("norm", "vit.layernorm"),
            *linear("head", "classifier"),
        ),
        prefix="vit.",
        ignored=(
            "vit.pooler.dense.weight",
            "vit.pooler.dense.bias",
        ),  # which no classifier goes through
    )


def read(found: Json, where: object) -> ViTConfig:
    """From `config.json`. Raises ConfigError, ValueError."""
    fields = KEYS.read(found, where)
    lines = [
        f"{key}: {value} is not implemented, only squares"
        for key, value in (("image_size", fields["image_size"]), ("patch_size", fields["patch"]))
        if not isinstance(value, int)
    ]
    refuse(lines, where)
    labels = found.get("id2label")
    return ViTConfig(**fields, classes=len(labels) if labels else found.get("num_labels") or LABELS)


def write(config: ViTConfig) -> Json:
    """For `config.json`."""
    names = {str(at): f"LABEL_{at}" for at in range(config.classes)}
    return KEYS.write(config) | {
        "id2label": names, "label2id": {name: int(at) for at, name in names.items()},
        "hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": 0.0,
        "architectures": ["ViTForImageClassification"],
    }  # fmt: skip


def read_images(folder: Path) -> dict[str, Any]:
    """How the images are normalised, by `preprocessor_config.json`; nothing where there is none.
    Raises ConfigError.
    """
    if not (folder / IMAGES).exists():
        return {}
    found, where = read_json(folder, IMAGES), folder / IMAGES
    factor, lines = found.get("rescale_factor", PIXEL), []
    if not isinstance(factor, int | float) or not math.isclose(factor, PIXEL, rel_tol=1e-6):
        lines.append(f"rescale_factor: {factor} is not implemented, only 1 / 255")
    if not found.get("do_rescale", True):
        lines.append("do_rescale: false is not implemented, only true")
    refuse(lines, where)
    if not found.get("do_normalize", True):
        return {"mean": (0.0,) * CHANNELS, "std": (1.0,) * CHANNELS}
    return colours(found, {"image_mean": "mean", "image_std": "std"}, where)


def write_images(config: ViTConfig) -> dict[str, Json]:
    """{name: content} of the file that `read_images` reads."""
    size = {"height": config.image_size, "width": config.image_size}
    found = {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": size, "resample": 2,  # bilinear
        "do_rescale": True, "rescale_factor": PIXEL, "do_normalize": True, "image_mean": list(config.mean),
        "image_std": list(config.std),
    }  # fmt: skip
    return {IMAGES: found}
