"""Plain Flax models that know nothing of sharding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_jax.models import gpt, llama
from fsdp_jax.models.gpt import GPT, PRESETS, Block, GPTConfig, flops_per_token, parameter_count, preset
from fsdp_jax.models.layers import next_token_loss
from fsdp_jax.models.llama import Llama, LlamaBlock, LlamaConfig
from fsdp_jax.models.sampling import sample

__all__ = [
    "FAMILIES",
    "GPT",
    "PRESETS",
    "Block",
    "Family",
    "GPTConfig",
    "Llama",
    "LlamaBlock",
    "LlamaConfig",
    "flops_per_token",
    "next_token_loss",
    "parameter_count",
    "preset",
    "sample",
]


@dataclass(frozen=True)
class Family:
    """Language models of one kind, as a program that is given names needs them.

    Attributes:
        make: (config, *, rngs) -> module that maps int32 tokens [B, T] to logits [B, T, V].
        preset: (name, **fields to replace) -> config; ValueError for an unknown name or field.
        presets: name -> config.
        parameter_count: config -> parameters that are stored.
        flops_per_token: config -> model FLOPs of a training step; see each family for the convention.

    """

    make: Callable[..., Any]
    preset: Callable[..., Any]
    presets: Mapping[str, Any]
    parameter_count: Callable[[Any], int]
    flops_per_token: Callable[[Any], float]


FAMILIES = {
    "gpt": Family(GPT, gpt.preset, gpt.PRESETS, gpt.parameter_count, gpt.flops_per_token),
    "llama": Family(Llama, llama.preset, llama.PRESETS, llama.parameter_count, llama.flops_per_token),
}
