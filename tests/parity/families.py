"""Small random models of transformers, the batches they see, and the same in ours."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from family_cases import logits_of
from torch.nn import functional

from fsdp_jax.models import FAMILIES as OURS
from fsdp_jax.models import Family

B, T, S, V, CLASSES, SIDE = 8, 24, 20, 93, 11, 32


@dataclass(frozen=True)
class Pair:
    """One kind of model, in torch and in ours.

    Attributes:
        make: () -> the torch model, its weights random.
        family: ours.
        batch: seed -> numpy arrays.
        torch_logits: (torch model, batch of tensors) -> logits.
        torch_loss: (torch model, batch of tensors) -> mean loss.
        logits: (our model, batch) -> logits.

    """

    make: Callable[[], torch.nn.Module]
    family: Family
    batch: Callable[[int], dict[str, np.ndarray]]
    torch_logits: Callable[..., torch.Tensor]
    torch_loss: Callable[..., torch.Tensor]
    logits: Callable[..., Any] = logits_of


def randomised(model, seed=0):
    """Every parameter drawn so that activations are of order one, no bias is 0 and no scale 1."""
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=drawn)
            if value.ndim == 1:
                is_bias = name.endswith("bias")
                value.copy_(0.2 * noise if is_bias else 0.7 + 0.3 * noise.abs())
            elif (
                "wte" in name
                or "embed" in name
                or "shared" in name
                or "wpe" in name
                or "token" in name
            ):
                value.copy_(0.5 * noise)
            elif "relative" in name:
                value.copy_(noise)
            else:
                value.copy_(noise / math.sqrt(value[0].numel()))
    return model.eval()


def tokens(seed):
    return {"tokens": np.random.default_rng(seed).integers(0, V, (B, T + 1), dtype=np.int32)}


def next_token(model, batch):
    logits = model(input_ids=batch["tokens"][:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def decoder(make, family):
    return Pair(
        make,
        OURS[family],
        tokens,
        torch_logits=lambda model, batch: model(input_ids=batch["tokens"][:, :-1]).logits,
        torch_loss=next_token,
    )


def gpt2(**more):
    return lambda: randomised(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=V,
                n_positions=32,
                n_embd=64,
                n_layer=2,
                n_head=4,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                attn_implementation="eager",
                bos_token_id=0,
                eos_token_id=0,
                **more,
            )
        )
    )


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def llama_like(**more):
    return lambda: randomised(
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=V,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=96,
                max_position_embeddings=64,
                attn_implementation="eager",
                bos_token_id=0,
                eos_token_id=0,
                **more,
            )
        )
    )


def pairs(seed):
    draw = np.random.default_rng(seed)
    inputs = draw.integers(1, V, (B, S), dtype=np.int32)
    targets = draw.integers(1, V, (B, T), dtype=np.int32)
    seen = (np.arange(S)[None] < draw.integers(S // 2, S + 1, (B, 1))).astype(np.int32)
    kept = (np.arange(T)[None] < draw.integers(T // 2, T + 1, (B, 1))).astype(np.float32)
    return {"inputs": inputs * seen, "inputs_mask": seen, "targets": targets, "mask": kept}


def t5_like(*, gated, tied):
    def make():
        config = transformers.T5Config(
            vocab_size=V,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu" if gated else "relu",
            decoder_start_token_id=0,
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
        model = transformers.T5ForConditionalGeneration(config)
        if not tied:  # transformers 5 ties it all the same, unless a file says otherwise
            model.lm_head.weight = torch.nn.Parameter(torch.empty(V, 64))
        return randomised(model)

    return make


def t5_output(model, batch):
    labels = torch.where(batch["mask"] > 0, batch["targets"], -100)
    # what the decoder reads is given, so that padded targets are the same for both; they weigh
    # nothing
    shifted = functional.pad(batch["targets"][:, :-1], (1, 0))
    return model(
        input_ids=batch["inputs"],
        attention_mask=batch["inputs_mask"],
        decoder_input_ids=shifted,
        labels=labels,
    )


def text_to_text(make):
    return Pair(
        make,
        OURS["t5"],
        pairs,
        torch_logits=lambda model, batch: t5_output(model, batch).logits,
        torch_loss=lambda model, batch: t5_output(model, batch).loss,
        logits=lambda model, batch: model(
            batch["inputs"],
            jnp.pad(batch["targets"][:, :-1], ((0, 0), (1, 0))),
            inputs_mask=batch["inputs_mask"],
        ),
    )


def images(seed):
    draw = np.random.default_rng(seed)
    return {
        "images": draw.normal(size=(B, SIDE, SIDE, 3)).astype(np.float32),
        "labels": draw.integers(0, CLASSES, B, dtype=np.int32),
    }


def vit_like():
    return randomised(
        transformers.ViTForImageClassification(
            transformers.ViTConfig(
                image_size=SIDE,
                patch_size=8,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=96,
                num_labels=CLASSES,
                attn_implementation="eager",
            )
        )
    )


def channels_first(batch):
    return batch["images"].permute(0, 3, 1, 2)


def classifier(make, family, call):
    return Pair(
        make,
        OURS[family],
        images,
        torch_logits=lambda model, batch: call(model, channels_first(batch)),
        torch_loss=lambda model, batch: functional.cross_entropy(
            call(model, channels_first(batch)), batch["labels"].long()
        ),
    )


FAMILIES = {
    "gpt2": decoder(gpt2(), "gpt"),
    "gpt2-untied": decoder(gpt2(tie_word_embeddings=False), "gpt"),
    "llama": decoder(llama_like(num_key_value_heads=4), "llama"),
    "llama-grouped": decoder(llama_like(num_key_value_heads=2, tie_word_embeddings=True), "llama"),
    "llama-3.1": decoder(llama_like(num_key_value_heads=2, rope_parameters=LLAMA3), "llama"),
    "t5": text_to_text(t5_like(gated=False, tied=True)),
    "t5-v1_1": text_to_text(t5_like(gated=True, tied=False)),
    "vit": classifier(vit_like, "vit", lambda model, x: model(pixel_values=x).logits),
}

CAIT = {
    "img_size": SIDE,
    "patch_size": 8,
    "embed_dim": 64,
    "depth": 3,
    "num_heads": 4,
    "init_values": 0.1,
}


def cait_like(timm):
    """timm's, which has no `from_pretrained`: the file is written and loaded by hand."""

    def make():
        return randomised(timm.create_model("cait_xxs24_224", num_classes=CLASSES, **CAIT))

    return classifier(make, "cait", lambda model, x: model(x))
