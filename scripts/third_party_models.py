"""The models of scripts/third_party.py: published packages, their own classes, small and wide.

A package is imported by the function that makes its model, so that a missing one loses one row.
Losses are written as a user of that package would: a Linen one calls the bound module.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

Batch = dict[str, np.ndarray]
TOKENS, VOCABULARY, CLASSES = 16, 256, 8


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        package: as pip names it.
        kind: `NNX` or `Linen`.
        units: the block classes, by name.
        make: (wide or not, `dtype` for the model) -> what `fully_shard` takes: `make_model(rngs)`,
            or a Linen module.
        loss: `(model, batch) -> (sum, count)`.
        batch: rows, random numbers, wide or not -> arrays [rows, ...].
        inputs: batch -> example inputs of a Linen module.
        evaluation: the loss in inference mode, where the model has an argument for it.
        dtype: whether the model has a dtype of its own, float32 unless it is given another;
            otherwise it computes in that of its inputs and parameters, and ignores `dtype`.
        rules: of `fully_shard`, as a message of the contract gives them.
        explicit: it is run on a mesh with Explicit axes.
        needs_mesh: its layers read an ambient mesh, on one device too.

    """

    package: str
    kind: str
    units: tuple[str, ...]
    make: Callable[[bool, Any], Any]
    loss: Callable[[Any, Any], tuple[Any, Any]]
    batch: Callable[[int, np.random.Generator, bool], Batch]
    inputs: Callable[[Batch], Mapping[str, Any]] | None = None
    evaluation: Callable[[Any, Any], tuple[Any, Any]] | None = None
    dtype: bool = False
    rules: tuple[tuple[str, Any], ...] = ()
    explicit: bool = False
    needs_mesh: bool = False


def cross_entropy(logits: Any, labels: Any) -> tuple[Any, Any]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return losses.sum(), losses.size


def tokens(rows: int, random: np.random.Generator, wide: bool) -> Batch:
    length = 4 * TOKENS if wide else TOKENS
    return {"tokens": random.integers(0, VOCABULARY, (rows, length + 1)).astype(np.int32)}


def images(rows: int, random: np.random.Generator, wide: bool) -> Batch:
    labels = random.integers(0, CLASSES, rows).astype(np.int32)
    pixels = random.normal(size=(rows, 32, 32, 3)) + labels[:, None, None, None] / CLASSES
    return {"pixels": pixels.astype(np.float32), "labels": labels}


# google-tunix, NNX


def tunix_llama(wide: bool, _: Any) -> Any:
    from tunix.models.llama3.model import Llama3, ModelConfig

    width = 1024 if wide else 64
    config = ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        embed_dim=width,
        hidden_dim=2 * width,
        num_heads=4,
        head_dim=width // 4,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    return lambda rngs: Llama3(config, rngs=rngs)


def tunix_qwen_moe(wide: bool, dtype: Any) -> Any:
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    width = 1024 if wide else 64
    config = ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        embed_dim=width,
        hidden_dim=width,
        num_heads=4,
        head_dim=width // 4,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        num_experts=8,
        num_experts_per_tok=2,
        dtype=dtype,
    )
    return lambda rngs: Qwen3(config, rngs=rngs)


def tunix_gemma3(wide: bool, _: Any) -> Any:
    from tunix.models.gemma3.model import Gemma3, ModelConfig

    width = 1024 if wide else 64
    config = ModelConfig(
        num_layers=2,
        num_embed=VOCABULARY,
        embed_dim=width,
        hidden_dim=2 * width,
        num_heads=4,
        head_dim=width // 4,
        num_kv_heads=2,
        sliding_window_size=8,
        param_dtype=jnp.float32,
    )
    return lambda rngs: Gemma3(config, rngs=rngs)


def tunix_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    inputs, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    rows, length = inputs.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    logits, _ = model(inputs, positions, None, mask)
    return cross_entropy(logits, labels)


# jimm, NNX: its layers name shardings of their own


def jimm_vit(wide: bool, dtype: Any) -> Any:
    from jimm import VisionTransformer

    width = 1024 if wide else 64
    return lambda rngs: VisionTransformer(
        num_classes=CLASSES,
        img_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=4,
        mlp_dim=4 * width,
        hidden_size=width,
        dropout_rate=0.0,
        dtype=dtype,
        rngs=rngs,
    )


def jimm_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    return cross_entropy(model(batch["pixels"]), batch["labels"])


# transformers, Linen


def gpt2(wide: bool, dtype: Any) -> Any:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModel

    width = 1024 if wide else 64
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=width, n_layer=2, n_head=4, use_cache=False
    )
    return FlaxGPT2LMHeadModel(config, dtype=dtype, _do_init=False).module


def bert(wide: bool, dtype: Any) -> Any:
    from transformers import BertConfig
    from transformers.models.bert.modeling_flax_bert import FlaxBertForMaskedLM

    width = 1024 if wide else 64
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=64,
    )
    return FlaxBertForMaskedLM(config, dtype=dtype, _do_init=False).module


def vit(wide: bool, dtype: Any) -> Any:
    from transformers import ViTConfig
    from transformers.models.vit.modeling_flax_vit import FlaxViTForImageClassification

    width = 1024 if wide else 64
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * width,
        image_size=32,
        patch_size=8,
        num_labels=CLASSES,
    )
    return FlaxViTForImageClassification(
        config, dtype=dtype, _do_init=False, input_shape=(1, 32, 32, 3)
    ).module


def resnet(wide: bool, dtype: Any) -> Any:
    from transformers import ResNetConfig
    from transformers.models.resnet.modeling_flax_resnet import FlaxResNetForImageClassification

    width = 512 if wide else 16
    config = ResNetConfig(
        embedding_size=width,
        hidden_sizes=[width, 2 * width],
        depths=[1, 1],
        layer_type="basic",
        num_labels=CLASSES,
    )
    return FlaxResNetForImageClassification(
        config, dtype=dtype, _do_init=False, input_shape=(1, 32, 32, 3)
    ).module


def positions(batch: Any) -> Any:
    rows, length = batch["tokens"][:, :-1].shape
    return jnp.broadcast_to(jnp.arange(length), (rows, length))


def gpt2_inputs(batch: Any) -> dict[str, Any]:
    inputs = batch["tokens"][:, :-1]
    return {
        "input_ids": inputs,
        "attention_mask": jnp.ones_like(inputs),
        "position_ids": positions(batch),
    }


def gpt2_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    return cross_entropy(model(**gpt2_inputs(batch)).logits, batch["tokens"][:, 1:])


def bert_inputs(batch: Any) -> dict[str, Any]:
    token_types = jnp.zeros_like(batch["tokens"][:, :-1])
    return gpt2_inputs(batch) | {"token_type_ids": token_types, "head_mask": None}


def bert_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    return cross_entropy(model(**bert_inputs(batch)).logits, batch["tokens"][:, :-1])


def image_inputs(batch: Any) -> dict[str, Any]:
    return {"pixel_values": batch["pixels"]}


def vit_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    return cross_entropy(model(batch["pixels"]).logits, batch["labels"])


def resnet_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    return cross_entropy(model(batch["pixels"], deterministic=False).logits, batch["labels"])


def resnet_evaluation(model: Any, batch: Any) -> tuple[Any, Any]:
    return cross_entropy(model(batch["pixels"]).logits, batch["labels"])


# diffusers, Linen


def unet(wide: bool, dtype: Any) -> Any:
    from diffusers.models.unets.unet_2d_condition_flax import FlaxUNet2DConditionModel

    width = 512 if wide else 32
    return FlaxUNet2DConditionModel(
        sample_size=8,
        block_out_channels=(width, 2 * width),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=4,
        cross_attention_dim=width,
        dtype=dtype,
    )


def latents(rows: int, random: np.random.Generator, wide: bool) -> Batch:
    text = random.normal(size=(rows, 4, 512 if wide else 32))
    noise = random.normal(size=(2, rows, 4, 8, 8)).astype(np.float32)
    return {
        "sample": noise[0],
        "noise": noise[1],
        "text": text.astype(np.float32),
        "time": random.integers(0, 1000, rows).astype(np.int32),
    }


def unet_inputs(batch: Any) -> dict[str, Any]:
    return {
        "sample": batch["sample"],
        "timesteps": batch["time"],
        "encoder_hidden_states": batch["text"],
    }


def unet_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    error = model(**unet_inputs(batch)).sample - batch["noise"]
    return jnp.square(error).sum(), error.size


# jax-resnet, Linen: its BatchNorm trains where `batch_stats` is mutable


def jax_resnet(wide: bool, _: Any) -> Any:
    from jax_resnet import ResNet18

    return (
        ResNet18(n_classes=CLASSES) if wide else ResNet18(n_classes=CLASSES, hidden_sizes=(8,) * 4)
    )


def jax_resnet_inputs(batch: Any) -> dict[str, Any]:
    return {"x": batch["pixels"]}


def jax_resnet_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    return cross_entropy(model(batch["pixels"]), batch["labels"])


# recurrentgemma, Linen


def griffin(wide: bool, _: Any) -> Any:
    from recurrentgemma.common import GriffinConfig, ScanType, TemporalBlockType
    from recurrentgemma.jax.griffin import Griffin

    width = 1024 if wide else 64
    config = GriffinConfig(
        vocab_size=VOCABULARY,
        width=width,
        mlp_expanded_width=2 * width,
        num_heads=4,
        block_types=(TemporalBlockType.RECURRENT, TemporalBlockType.ATTENTION),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=8,
        logits_soft_cap=30.0,
        scan_type=ScanType.LINEAR_NATIVE,
    )
    # Its own remat would gather each unit once more; see docs/third_party.md.
    return Griffin(config, gradient_checkpointing=False)


def griffin_inputs(batch: Any) -> dict[str, Any]:
    inputs = batch["tokens"][:, :-1]
    return {"tokens": inputs, "segment_pos": positions(batch), "return_cache": False}


def griffin_loss(model: Any, batch: Any) -> tuple[Any, Any]:
    logits, _ = model(**griffin_inputs(batch))
    return cross_entropy(logits, batch["tokens"][:, 1:])


UNET_BLOCKS = (
    "FlaxCrossAttnDownBlock2D",
    "FlaxDownBlock2D",
    "FlaxUNetMidBlock2DCrossAttn",
    "FlaxUpBlock2D",
    "FlaxCrossAttnUpBlock2D",
)
RESNET_BLOCKS = ("ResNetStem", "ResNetBlock")
CASES = {
    "Llama 3": Case("google-tunix", "NNX", ("DecoderLayer",), tunix_llama, tunix_loss, tokens),
    "Qwen3-MoE": Case(
        "google-tunix",
        "NNX",
        ("DecoderLayer",),
        tunix_qwen_moe,
        tunix_loss,
        tokens,
        dtype=True,
        rules=tuple(
            (rf"^layers/\d+/mlp/{name}_proj$", (None, "fsdp")) for name in ("down", "gate", "up")
        ),
    ),
    "Gemma 3": Case("google-tunix", "NNX", ("DecoderLayer",), tunix_gemma3, tunix_loss, tokens),
    "ViT, jimm": Case(
        "jax-image-models",
        "NNX",
        ("TransformerEncoder",),
        jimm_vit,
        jimm_loss,
        images,
        dtype=True,
        needs_mesh=True,
    ),
    "ViT, jimm, explicit": Case(
        "jax-image-models",
        "NNX",
        ("TransformerEncoder",),
        jimm_vit,
        jimm_loss,
        images,
        dtype=True,
        needs_mesh=True,
        explicit=True,
    ),
    "GPT-2": Case(
        "transformers",
        "Linen",
        ("FlaxGPT2Block",),
        gpt2,
        gpt2_loss,
        tokens,
        gpt2_inputs,
        dtype=True,
    ),
    "BERT": Case(
        "transformers",
        "Linen",
        ("FlaxBertLayer",),
        bert,
        bert_loss,
        tokens,
        bert_inputs,
        dtype=True,
    ),
    "ViT": Case(
        "transformers",
        "Linen",
        ("FlaxViTLayer",),
        vit,
        vit_loss,
        images,
        image_inputs,
        dtype=True,
    ),
    "ResNet": Case(
        "transformers",
        "Linen",
        ("FlaxResNetStage",),
        resnet,
        resnet_loss,
        images,
        image_inputs,
        resnet_evaluation,
        dtype=True,
    ),
    "ResNet-18": Case(
        "jax-resnet", "Linen", RESNET_BLOCKS, jax_resnet, jax_resnet_loss, images, jax_resnet_inputs
    ),
    "UNet": Case(
        "diffusers", "Linen", UNET_BLOCKS, unet, unet_loss, latents, unet_inputs, dtype=True
    ),
    "Griffin": Case(
        "recurrentgemma", "Linen", ("ResidualBlock",), griffin, griffin_loss, tokens, griffin_inputs
    ),
}
