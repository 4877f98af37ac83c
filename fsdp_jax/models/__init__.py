"""Plain Flax models that know nothing of sharding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_jax.models import cait, gpt, llama, t5, vit
from fsdp_jax.models.cait import CaiT, CaiTBlock, CaiTConfig, ClassAttentionBlock
from fsdp_jax.models.gpt import (
    GPT,
    PRESETS,
    Block,
    GPTConfig,
    flops_per_token,
    parameter_count,
    preset,
)
from fsdp_jax.models.layers import next_token_loss
from fsdp_jax.models.llama import Llama, LlamaBlock, LlamaConfig, RopeScaling
from fsdp_jax.models.sampling import answer, sample
from fsdp_jax.models.t5 import T5, T5Config, T5DecoderBlock, T5EncoderBlock, text_to_text_loss
from fsdp_jax.models.vision import classification_loss, to_floats
from fsdp_jax.models.vit import ViT, ViTBlock, ViTConfig

__all__ = [
    "FAMILIES",
    "GPT",
    "PRESETS",
    "T5",
    "Block",
    "CaiT",
    "CaiTBlock",
    "CaiTConfig",
    "ClassAttentionBlock",
    "Family",
    "GPTConfig",
    "Llama",
    "LlamaBlock",
    "LlamaConfig",
    "RopeScaling",
    "T5Config",
    "T5DecoderBlock",
    "T5EncoderBlock",
    "ViT",
    "ViTBlock",
    "ViTConfig",
    "answer",
    "classification_loss",
    "flops_per_token",
    "next_token_loss",
    "parameter_count",
    "preset",
    "sample",
    "text_to_text_loss",
    "to_floats",
]

Task = Literal["text", "text to text", "images"]


@dataclass(frozen=True)
class Family:
    """Models of one kind, as a program that is given names needs them.

    Attributes:
        task: what an example is. text: tokens, of which each next one is predicted; text to text:
            an input and a target; images: and their classes.
        make: (config, *, rngs, attention) -> module.
        config: the class of its configurations.
        preset: (name, **fields to replace) -> config; ValueError for an unknown name or field.
        presets: name -> config; the first is the smallest.
        loss: (model, batch, *, train) -> (sum, count).
        local_batch: the loss is a sum over examples, so that each device may run it on its own
            rows.
        parameter_count: config -> parameters that are stored.
        positions: config -> tokens or patches that an example has.
        flops: config -> model FLOPs of a training step for one example; see each family for the
            convention.

    """

    task: Task
    make: Callable[..., Any]
    config: type
    preset: Callable[..., Any]
    presets: Mapping[str, Any]
    loss: Callable[..., Any]
    parameter_count: Callable[[Any], int]
    positions: Callable[[Any], int]
    flops: Callable[[Any], float]
    local_batch: bool = True


FAMILIES = {
    "gpt": Family(
        "text",
        GPT,
        GPTConfig,
        gpt.preset,
        gpt.PRESETS,
        next_token_loss,
        gpt.parameter_count,
        lambda config: config.sequence_length,
        lambda config: config.sequence_length * gpt.flops_per_token(config),
    ),
    "llama": Family(
        "text",
        Llama,
        LlamaConfig,
        llama.preset,
        llama.PRESETS,
        next_token_loss,
        llama.parameter_count,
        lambda config: config.sequence_length,
        lambda config: config.sequence_length * llama.flops_per_token(config),
    ),
    "t5": Family(
        "text to text",
        T5,
        T5Config,
        t5.preset,
        t5.PRESETS,
        text_to_text_loss,
        t5.parameter_count,
        lambda config: config.inputs_length + config.targets_length,
        t5.flops_per_example,
    ),
    "vit": Family(
        "images",
        ViT,
        ViTConfig,
        vit.preset,
        vit.PRESETS,
        classification_loss,
        vit.parameter_count,
        lambda config: config.positions,
        vit.flops_per_example,
    ),
    "cait": Family(
        "images",
        CaiT,
        CaiTConfig,
        cait.preset,
        cait.PRESETS,
        classification_loss,
        cait.parameter_count,
        lambda config: config.patches,
        cait.flops_per_example,
    ),
}
