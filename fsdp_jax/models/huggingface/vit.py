"""ViT as `ViTForImageClassification` saves it (google/vit-base-patch16-224)."""

import math
from pathlib import Path
from typing import Any

from fsdp_jax.io.json_text import read_json_object
from fsdp_jax.io.model_files import IMAGES
from fsdp_jax.models.huggingface.config_json import (
    NO_MODEL,
    Json,
    Keys,
    WeightFormat,
    read_normalization,
    refuse_unsupported,
)
from fsdp_jax.models.huggingface.table import Entry, Table, conv2d, for_every_block, linear, norm
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
        "image_size": "image_size", "patch_size": "patch", "num_hidden_layers": "layers",
        "hidden_size": "width", "num_attention_heads": "heads", "intermediate_size": "hidden",
        "layer_norm_eps": "norm_epsilon",
    },
    fixed={
        "hidden_act": ("gelu",), "num_channels": (CHANNELS,), "qkv_bias": (True,),
        "is_encoder_decoder": (False,),
    },
    # the pooler is of models without a classifier, the stride of masked image modeling
    harmless=(
        "hidden_dropout_prob", "attention_probs_dropout_prob", "encoder_stride",
        "pooler_output_size", "pooler_act",
    ),
    derived=("num_labels",),
)  # fmt: skip
MODULES = (
    ("vit.encoder.layer.", "vit.layers."),
    ("attention.attention.query", "attention.q_proj"),
    ("attention.attention.key", "attention.k_proj"),
    ("attention.attention.value", "attention.v_proj"),
    ("attention.output.dense", "attention.o_proj"),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
)
"""Names of modules in transformers 5, whose files have those of transformers 4."""
LABELS = 2
"""Classes where `config.json` has neither labels nor their number, as in transformers."""
PIXEL_SCALE = 1 / 255
"""Pixels are multiplied by it before they are normalized."""


def _weight_table(config: ViTConfig) -> Table:
    """Maps our parameters to the tensors of a `ViTForImageClassification`."""
    entries = (
        *conv2d("patches", "vit.embeddings.patch_embeddings.projection"),
        Entry("class_token", "vit.embeddings.cls_token"),
        Entry("positions", "vit.embeddings.position_embeddings"),
        *for_every_block(config.layers, "blocks/*", "vit.encoder.layer.*", BLOCK),
        *norm("norm", "vit.layernorm"),
        *linear("head", "classifier"),
    )
    # a classifier does not use the pooler
    pooler = ("vit.pooler.dense.weight", "vit.pooler.dense.bias")
    return Table(entries, modules=MODULES, prefix="vit.", ignored=pooler)


def _read_config(content: Json, where: object) -> ViTConfig:
    """Converts the `config.json` of a `ViTForImageClassification` to a ViTConfig."""
    fields = KEYS.read(content, where)
    sizes = {"image_size": fields["image_size"], "patch_size": fields["patch"]}
    lines = [
        f"{key}: {value} is not implemented, only squares"
        for key, value in sizes.items()
        if not isinstance(value, int)
    ]
    refuse_unsupported(lines, where)
    labels = content.get("id2label") or ()
    classes = len(labels) or content.get("num_labels") or LABELS
    return ViTConfig(**fields, classes=classes)


def _write_config(config: ViTConfig) -> Json:
    """Converts our configuration to the `config.json` of a `ViTForImageClassification`."""
    labels = {str(index): f"LABEL_{index}" for index in range(config.classes)}
    return KEYS.write(config) | {
        "id2label": labels,
        "label2id": {label: int(index) for index, label in labels.items()},
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "architectures": ["ViTForImageClassification"],
    }


def _read_preprocessor(folder: Path) -> dict[str, Any]:
    """Reads the fields `mean` and `std` of `preprocessor_config.json`; {} without the file.

    Raises ConfigError for another preprocessing of pixels than ours.
    """
    where = folder / IMAGES
    if not where.exists():
        return {}
    content = read_json_object(where, NO_MODEL)
    # pixels are 0 to 1 before they are normalized: the mean and the std count on it
    factor = content.get("rescale_factor", PIXEL_SCALE)
    lines = []
    if not isinstance(factor, int | float) or not math.isclose(factor, PIXEL_SCALE, rel_tol=1e-6):
        lines.append(f"rescale_factor: {factor} is not implemented, only 1 / 255")
    if not content.get("do_rescale", True):
        lines.append("do_rescale: false is not implemented, only true")
    refuse_unsupported(lines, where)
    if not content.get("do_normalize", True):
        return {"mean": (0.0,) * CHANNELS, "std": (1.0,) * CHANNELS}
    return read_normalization(content, {"image_mean": "mean", "image_std": "std"}, where)


def _write_preprocessor(config: ViTConfig) -> dict[str, Json]:
    """Makes {`preprocessor_config.json`: the content that `_read_preprocessor` reads}."""
    content = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": config.image_size, "width": config.image_size},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": PIXEL_SCALE,
        "do_normalize": True,
        "image_mean": list(config.mean),
        "image_std": list(config.std),
    }
    return {IMAGES: content}


FORMAT = WeightFormat(
    "vit",
    _weight_table,
    _read_config,
    _write_config,
    tokens=(),
    read_preprocessor=_read_preprocessor,
    write_preprocessor=_write_preprocessor,
)
