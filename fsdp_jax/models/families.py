"""The registry of model families: everything that a program needs to know of a family by name.

To add one: `models/NAME.py`, `models/huggingface/NAME.py` and an entry below, which the command,
`certify`, the tests, the fuzzers and the benchmarks read.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from fsdp_jax.errors import ConfigError, did_you_mean
from fsdp_jax.models import cait, gpt, llama, t5, vit
from fsdp_jax.models.attention import TILE
from fsdp_jax.models.config import BaseConfig, from_preset
from fsdp_jax.models.flops import parameter_sizes
from fsdp_jax.models.huggingface import cait as hf_cait
from fsdp_jax.models.huggingface import gpt2 as hf_gpt2
from fsdp_jax.models.huggingface import llama as hf_llama
from fsdp_jax.models.huggingface import t5 as hf_t5
from fsdp_jax.models.huggingface import vit as hf_vit
from fsdp_jax.models.huggingface.config_json import WeightFormat
from fsdp_jax.models.tasks import IMAGES, TEXT, TEXT_TO_TEXT, Task


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model and all that belongs to it, for programs that know it by its name."""

    name: str  # as `model.family` has it
    task: Task  # the arrays of an example, the loss, and how text is sampled
    model: Callable[..., Any]  # its class, (config, *, rngs, attention) -> module
    config: type  # the class of its configurations
    presets: Mapping[str, Any]  # name -> config; the first is the smallest
    blocks: tuple[type, ...]  # their classes, for `fully_shard(units=)`
    weight_format: WeightFormat  # how Hugging Face or timm stores weights and configuration
    positions: Callable[[Any], int]  # config -> tokens or patches of an example
    flops: Callable[[Any], float]  # config -> `training_flops` of one example
    lora_targets: tuple[str, ...]  # patterns of the Linears that LoRA adapts by default
    # `model.attention` -> why the family cannot use it
    unsupported_attention: Mapping[str, str] = field(default_factory=dict)
    # sizes of a small model by field, where they are not those of `SMALL`
    small: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> Callable[..., Any]:
        """The loss of the family's task, `(model, batch, *, train) -> (sum, count)`."""
        return self.task.loss

    def preset(self, name: str, **overrides: Any) -> Any:
        """Looks up a preset and replaces fields; ValueError for an unknown name or field."""
        return from_preset(self.presets, name, **overrides)

    def shrink(self, config: Any, **lengths: int) -> Any:
        """Shrinks a configuration to a model that a CPU compares in seconds; see `small`.

        All else, such as gates, tied heads, scanned layers and other lengths of texts, stays.
        """
        sizes = {**SMALL, **self.small, **lengths}
        if getattr(config, "kv_heads", None) == config.heads:
            sizes["kv_heads"] = sizes["heads"]
        if hasattr(config, "image_size"):
            sizes["image_size"] = 2 * config.patch
        known = {each.name for each in dataclasses.fields(config)}
        return dataclasses.replace(config, **{k: v for k, v in sizes.items() if k in known})


# Sizes of a small model, for the fields that its configuration has; see `Family.shrink`.
SMALL: dict[str, Any] = {"layers": 2, "decoder_layers": 2, "class_layers": 1, "dropout": 0.0}
SMALL |= {"width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 96}
SMALL |= {"vocab_size": 128, "classes": 8}
# The reasons of `unsupported_attention`, each after the name of the attention.
_CLASS_TOKEN = f"takes multiples of {TILE} positions; images have a class token more"
_HEAD_MIXING = "would be ignored: CaiT mixes its heads inside attention"


def _family(module: ModuleType, **fields: Any) -> Family:
    """Makes the entry of a module `models/NAME.py`, which has `PRESETS` and `flops_per_example`."""
    name, presets = module.__name__.rpartition(".")[2], module.PRESETS
    config = type(next(iter(presets.values())))
    flops = module.flops_per_example
    return Family(name=name, config=config, presets=presets, flops=flops, **fields)


_FAMILIES = (
    _family(
        gpt,
        task=TEXT,
        model=gpt.GPT,
        blocks=(gpt.Block,),
        weight_format=hf_gpt2.FORMAT,
        positions=lambda config: config.sequence_length,
        lora_targets=(r"attn/(qkv|out)$",),
    ),
    _family(
        llama,
        task=TEXT,
        model=llama.Llama,
        blocks=(llama.LlamaBlock,),
        weight_format=hf_llama.FORMAT,
        positions=lambda config: config.sequence_length,
        lora_targets=(r"attn/(q|k|v|o)$",),
    ),
    _family(
        t5,
        task=TEXT_TO_TEXT,
        model=t5.T5,
        blocks=(t5.T5EncoderBlock, t5.T5DecoderBlock),
        weight_format=hf_t5.FORMAT,
        positions=lambda config: config.inputs_length + config.targets_length,
        lora_targets=(r"(attn|cross)/(q|k|v|o)$",),
        unsupported_attention={"flash": "adds no bias to the scores, as T5 does"},
    ),
    _family(
        vit,
        task=IMAGES,
        model=vit.ViT,
        blocks=(vit.ViTBlock,),
        weight_format=hf_vit.FORMAT,
        positions=lambda config: config.positions,
        lora_targets=(r"attn/(q|k|v|o)$",),
        unsupported_attention={"flash": _CLASS_TOKEN},
    ),
    _family(
        cait,
        task=IMAGES,
        model=cait.CaiT,
        blocks=(cait.CaiTBlock, cait.ClassAttentionBlock),
        weight_format=hf_cait.FORMAT,
        positions=lambda config: config.patches,
        lora_targets=(r"attn/(qkv|q|k|v|o)$",),
        unsupported_attention=dict.fromkeys(("flash", "cudnn"), _HEAD_MIXING),
    ),
)
FAMILIES = {family.name: family for family in _FAMILIES}


def family_of(config: Any) -> Family:
    """Finds the family of a model configuration. Raises ConfigError for any other object."""
    for family in FAMILIES.values():
        if isinstance(config, family.config):
            return family
    # no family has it: the class with the nearest name may be the one that was meant
    name = type(config).__name__
    raise ConfigError(
        "an unknown kind of model",
        where="config",
        got=name,
        fix=did_you_mean(name, [family.config.__name__ for family in FAMILIES.values()]),
    )


def parameter_count(config: BaseConfig) -> int:
    """Counts the parameters that are stored; a tied head counts once.

    With `pad_vocab_to=1` a GPT's is the published one: 124,439,808 for gpt2, which stores 47 rows
    of 768 more.
    """
    return sum(parameter_sizes(family_of(config).model, config).values())


def flops_per_token(config: BaseConfig) -> float:
    """Computes the model FLOPs per token of a training step at the full lengths."""
    family = family_of(config)
    return family.flops(config) / family.positions(config)
