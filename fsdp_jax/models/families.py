"""The registry of model families: everything that a program needs to know of a family by name.

To add one: `models/NAME.py`, `models/huggingface/NAME.py`, an entry below, its name in
`train.config.ModelConfig.family`, and `tests/models/test_NAME.py`. A small configuration in
`tests/models/family_cases.py` has it pass `test_every_family.py` too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_jax.models import cait, gpt, llama, t5, vit
from fsdp_jax.models.attention import TILE
from fsdp_jax.models.config import from_preset
from fsdp_jax.models.huggingface import cait as hf_cait
from fsdp_jax.models.huggingface import gpt2 as hf_gpt2
from fsdp_jax.models.huggingface import llama as hf_llama
from fsdp_jax.models.huggingface import t5 as hf_t5
from fsdp_jax.models.huggingface import vit as hf_vit
from fsdp_jax.models.huggingface.weight_format import WeightFormat
from fsdp_jax.models.tasks import IMAGES, TEXT, TEXT_TO_TEXT, Task


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model, as programs that are given names use it.

    Attributes:
        task: what an example is, the loss, and what is sampled.
        model: the model's class, (config, *, rngs, attention) -> module.
        config: the class of its configurations.
        presets: name -> config; the first is the smallest.
        blocks: classes of its blocks, for `fully_shard(units=)`.
        weight_format: how Hugging Face or timm stores its weights and its configuration.
        parameter_count: config -> parameters that are stored.
        positions: config -> tokens or patches of an example.
        flops: config -> model FLOPs of a training step for one example; see each family for the
            convention.
        lora_targets: patterns of the Linears that LoRA adapts by default.
        unsupported_attention: `model.attention` -> why the family cannot use it.
        local_batch: whether the loss is a sum over examples, so that each device may run it on its
            own rows.

    """

    task: Task
    model: Callable[..., Any]
    config: type
    presets: Mapping[str, Any]
    blocks: tuple[type, ...]
    weight_format: WeightFormat
    parameter_count: Callable[[Any], int]
    positions: Callable[[Any], int]
    flops: Callable[[Any], float]
    lora_targets: tuple[str, ...]
    unsupported_attention: Mapping[str, str] = field(default_factory=dict)
    local_batch: bool = True

    @property
    def loss(self) -> Callable[..., Any]:
        """(model, batch, *, train) -> (sum, count)."""
        return self.task.loss

    def preset(self, name: str, **overrides: Any) -> Any:
        """Returns a preset with fields replaced; ValueError for an unknown name or field."""
        return from_preset(self.presets, name, **overrides)


_CLASS_TOKEN = f"takes multiples of {TILE} positions; images have a class token more"
_HEAD_MIXING = "would be ignored: CaiT mixes its heads inside attention"

FAMILIES = {
    "gpt": Family(
        task=TEXT,
        model=gpt.GPT,
        config=gpt.GPTConfig,
        presets=gpt.PRESETS,
        blocks=(gpt.Block,),
        weight_format=hf_gpt2.FORMAT,
        parameter_count=gpt.parameter_count,
        positions=lambda config: config.sequence_length,
        flops=lambda config: config.sequence_length * gpt.flops_per_token(config),
        lora_targets=(r"attn/(qkv|out)$",),
    ),
    "llama": Family(
        task=TEXT,
        model=llama.Llama,
        config=llama.LlamaConfig,
        presets=llama.PRESETS,
        blocks=(llama.LlamaBlock,),
        weight_format=hf_llama.FORMAT,
        parameter_count=llama.parameter_count,
        positions=lambda config: config.sequence_length,
        flops=lambda config: config.sequence_length * llama.flops_per_token(config),
        lora_targets=(r"attn/(q|k|v|o)$",),
    ),
    "t5": Family(
        task=TEXT_TO_TEXT,
        model=t5.T5,
        config=t5.T5Config,
        presets=t5.PRESETS,
        blocks=(t5.T5EncoderBlock, t5.T5DecoderBlock),
        weight_format=hf_t5.FORMAT,
        parameter_count=t5.parameter_count,
        positions=lambda config: config.inputs_length + config.targets_length,
        flops=t5.flops_per_example,
        lora_targets=(r"(attn|cross)/(q|k|v|o)$",),
        unsupported_attention={"flash": "adds no bias to the scores, as T5 does"},
    ),
    "vit": Family(
        task=IMAGES,
        model=vit.ViT,
        config=vit.ViTConfig,
        presets=vit.PRESETS,
        blocks=(vit.ViTBlock,),
        weight_format=hf_vit.FORMAT,
        parameter_count=vit.parameter_count,
        positions=lambda config: config.positions,
        flops=vit.flops_per_example,
        lora_targets=(r"attn/(q|k|v|o)$",),
        unsupported_attention={"flash": _CLASS_TOKEN},
    ),
    "cait": Family(
        task=IMAGES,
        model=cait.CaiT,
        config=cait.CaiTConfig,
        presets=cait.PRESETS,
        blocks=(cait.CaiTBlock, cait.ClassAttentionBlock),
        weight_format=hf_cait.FORMAT,
        parameter_count=cait.parameter_count,
        positions=lambda config: config.patches,
        flops=cait.flops_per_example,
        lora_targets=(r"attn/(qkv|q|k|v|o)$",),
        unsupported_attention=dict.fromkeys(("flash", "cudnn"), _HEAD_MIXING),
    ),
}


def family_name(config: Any) -> str | None:
    """Returns the name of the family of a model configuration, None if it is of no family."""
    names = (name for name, family in FAMILIES.items() if type(config) is family.config)
    return next(names, None)
