"""Shapes that follow from the keys of the data: the arrays of a batch, and the work of a step."""

import dataclasses
from typing import Any

import jax

from fsdp_jax.data.options import KINDS, DataOptions
from fsdp_jax.models import Family
from fsdp_jax.models.tasks import Lengths
from fsdp_jax.planner import Work

BatchShapes = dict[str, jax.ShapeDtypeStruct]
CONVENTION = "6 N + 12 L D T a token, attention in full"


def target_length(data: DataOptions) -> int:
    """Finds the longest target of an encoder-decoder, in tokens."""
    return data.target_length or max(1, data.sequence_length // 4)


def length_fields(family: Family, data: DataOptions) -> dict[str, int]:
    """Computes the fields of a model's configuration that the data's lengths set; {} for images."""
    return family.task.config_lengths(_lengths(data))


def batch_shapes(family: Family, model_config: Any, data: DataOptions, rows: int) -> BatchShapes:
    """Describes {name: shape and dtype} of a global batch of that many rows."""
    arrays = family.task.arrays(model_config, _lengths(data))
    return {
        name: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype) for name, leaf in arrays.items()
    }


def work_of(family: Family, model_config: Any, data: DataOptions, rows: int) -> Work:
    """Counts the tokens and FLOPs of a step on that many rows of the data's lengths."""
    config = dataclasses.replace(model_config, **length_fields(family, data))
    vocab = getattr(model_config, "vocab_size", None)
    return Work(rows * family.positions(config), rows * family.flops(config), CONVENTION, vocab)


def _lengths(data: DataOptions) -> Lengths:
    packed = data.packing or KINDS[data.kind].packs
    return Lengths(data.sequence_length, target_length(data), packed)
