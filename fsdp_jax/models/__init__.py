"""Plain Flax models that know nothing of sharding."""

from fsdp_jax.models.gpt import (
    GPT,
    PRESETS,
    Block,
    GPTConfig,
    flops_per_token,
    next_token_loss,
    parameter_count,
    preset,
    sample,
)

__all__ = [
    "GPT",
    "PRESETS",
    "Block",
    "GPTConfig",
    "flops_per_token",
    "next_token_loss",
    "parameter_count",
    "preset",
    "sample",
]
