"""Llama 2 and 3 as `LlamaForCausalLM` saves them."""

from typing import Any

from fsdp_jax.models.huggingface.config_json import Json, Keys, refuse
from fsdp_jax.models.huggingface.table import LINEAR, Entry, Table, linear, norm, stacked
from fsdp_jax.models.llama import LlamaConfig, RopeScaling

BLOCK = [
    *norm("attn_norm", "input_layernorm", bias=False),
    *linear("attn/q", "self_attn.q_proj", bias=False),
    *linear("attn/k", "self_attn.k_proj", bias=False),
    *linear("attn/v", "self_attn.v_proj", bias=False),
    *linear("attn/o", "self_attn.o_proj", bias=False),
    *norm("mlp_norm", "post_attention_layernorm", bias=False),
    *linear("mlp/gate", "mlp.gate_proj", bias=False),
    *linear("mlp/up", "mlp.up_proj", bias=False),
    *linear("mlp/down", "mlp.down_proj", bias=False),
]

KEYS = Keys(
    fields={
        "vocab_size": "vocab_size", "max_position_embeddings": "sequence_length", "num_hidden_layers": "layers",
        "hidden_size": "width", "num_attention_heads": "heads", "intermediate_size": "hidden",
        "rms_norm_eps": "norm_epsilon", "tie_word_embeddings": "tie_head",
    },
    optional={"tie_word_embeddings": False},
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "is_encoder_decoder": (False,),
        "partial_rotary_factor": (1.0, None),
    },
    harmless=("attention_dropout", "pretraining_tp"),  # the latter cuts products in parts, for the same sums
    derived=("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters"),
)  # fmt: skip

SCALING = {
    "factor": "factor", "low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
}  # fmt: skip
KINDS = ("default", "llama3")


def table(config: LlamaConfig) -> Table:
    """Of a config."""
    aliases = ("lm_head.weight",) if config.tie_head else ()
    return Table(
        (
            Entry("embed/embedding", "model.embed_tokens.weight", aliases=aliases),
            *stacked(config.layers, "blocks/*", "model.layers.*", BLOCK),
            *norm("norm", "model.norm", bias=False),
            *([] if config.tie_head else [Entry("head/kernel", "lm_head.weight", LINEAR)]),
        ),
        prefix="model.",
        ignored=(
            "model.layers.*.self_attn.rotary_emb.inv_freq",
        ),  # a buffer that older versions saved
    )


def read(found: Json, where: object) -> LlamaConfig:
    """From `config.json`, of transformers 5 (`rope_parameters`) or older. Raises ConfigError,
    ValueError.
    """
    fields = KEYS.read(found, where)
    lines: list[str] = []
    width, heads = fields["width"], fields["heads"]
    if found.get("head_dim") not in (None, width / heads):
        got = found["head_dim"]
        lines.append(
            f"head_dim: {got} is not implemented, only hidden_size / num_attention_heads, {width / heads:g}"
        )
    rope = _rope(found, lines)
    refuse(lines, where)
    kv_heads = found.get("num_key_value_heads") or heads
    return LlamaConfig(
        **fields, kv_heads=kv_heads, rope_theta=rope.pop("rope_theta"), rope_scaling=_scaling(rope)
    )


def write(config: LlamaConfig) -> Json:
    """For `config.json`, for transformers of any age."""
    scaling: dict[str, Any] = {}
    if config.rope_scaling is not None:
        scaling = {theirs: getattr(config.rope_scaling, ours) for theirs, ours in SCALING.items()}
    kind = {"rope_type": "llama3" if scaling else "default"}
    fixed = KEYS.write(config)
    del fixed["partial_rotary_factor"]
    return fixed | {
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "architectures": ["LlamaForCausalLM"],
        "rope_theta": config.rope_theta, "rope_scaling": kind | scaling if scaling else None,
        "rope_parameters": kind | {"rope_theta": config.rope_theta} | scaling,
    }  # fmt: skip


def _rope(found: Json, lines: list[str]) -> Json:
    """`rope_theta`, and what scales it under their names; adds to `lines` what is not implemented."""
    new, old = found.get("rope_parameters") or {}, found.get("rope_scaling") or {}
    older = {"rope_theta": found["rope_theta"]} if found.get("rope_theta") is not None else {}
    rope = {"rope_theta": 10_000.0} | older | _plain(old) | _plain(new)
    differing = {
        key
        for key in (older | _plain(old)).keys() & new.keys()
        if rope[key] != (older | _plain(old))[key]
    }
    lines += [
        f"rope_parameters.{key} says otherwise than rope_theta, rope_scaling"
        for key in sorted(differing)
    ]
    kind = rope.pop("rope_type", "default")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        lines.append("rope_parameters.partial_rotary_factor: only 1.0 is implemented")
    if kind not in KINDS:
        lines.append(f"rope_type: '{kind}' is not implemented, only {' or '.join(KINDS)}")
        return {"rope_theta": rope["rope_theta"]}
    known = {"rope_theta", *(SCALING if kind == "llama3" else ())}
    lines += [f"rope_parameters.{key}: missing" for key in sorted(known - rope.keys())]
    lines += [
        f"rope_parameters.{key}: not known with rope_type '{kind}'"
        for key in sorted(rope.keys() - known)
    ]
    return rope


def _plain(rope: Json) -> Json:
    """Older versions say `type` for `rope_type`."""
    renamed = {"rope_type" if key == "type" else key: value for key, value in rope.items()}
    return {key: value for key, value in renamed.items() if value is not None}


def _scaling(rope: Json) -> RopeScaling | None:
    return RopeScaling(**{ours: rope[theirs] for theirs, ours in SCALING.items()}) if rope else None
