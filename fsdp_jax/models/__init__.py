"""Plain Flax models that know nothing of sharding, and the registry of their families.

A model is made by `Model(config, rngs=..., attention=blockwise_attention)`. `rngs` needs a `params`
stream, and a `dropout` stream where `config.dropout` is above 0; `attention` replaces the attention
of every block. `blocks` is one block whose leaves have a leading dim L (`scan_layers`), or an
nnx.List of L blocks.
"""

from fsdp_jax.models.cait import CaiT, CaiTBlock, CaiTConfig, ClassAttentionBlock
from fsdp_jax.models.families import FAMILIES, Family, flops_per_token, parameter_count
from fsdp_jax.models.gpt import GPT, PRESETS, Block, GPTConfig, preset
from fsdp_jax.models.llama import Llama, LlamaBlock, LlamaConfig, RopeScaling
from fsdp_jax.models.losses import classification_loss, next_token_loss, text_to_text_loss
from fsdp_jax.models.sampling import answer, sample
from fsdp_jax.models.t5 import T5, T5Config, T5DecoderBlock, T5EncoderBlock
from fsdp_jax.models.vision import to_floats
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
