"""Llama 2 and 3 as `LlamaForCausalLM` saves them."""

from typing import Any

from fsdp_jax.models.huggingface.config_json import Json, Keys, WeightFormat, refuse_unsupported
from fsdp_jax.models.huggingface.table import LINEAR, Entry, Table, for_every_block, linear, norm
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
        "vocab_size": "vocab_size", "max_position_embeddings": "sequence_length",
        "num_hidden_layers": "layers", "hidden_size": "width", "num_attention_heads": "heads",
        "intermediate_size": "hidden", "rms_norm_eps": "norm_epsilon",
        "tie_word_embeddings": "tie_head",
    },
    optional={"tie_word_embeddings": False},
    fixed={
        "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
        "is_encoder_decoder": (False,), "partial_rotary_factor": (1.0, None),
    },
    # pretraining_tp splits matmuls into parts with the same sums
    harmless=("attention_dropout", "pretraining_tp"),
    derived=(
        "num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters",
    ),
)  # fmt: skip

SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
}
ROPE_TYPES = ("default", "llama3")


def _weight_table(config: LlamaConfig) -> Table:
    """Maps our parameters to the tensors of a `LlamaForCausalLM`."""
    head: list[Entry] = []
    aliases: tuple[str, ...] = ()
    if config.tie_head:  # a file may have the tied table under the name of the head too
        aliases = ("lm_head.weight",)
    else:
        head.append(Entry("head/kernel", "lm_head.weight", LINEAR, vocabulary=1))
    entries = (
        Entry("embed/embedding", "model.embed_tokens.weight", aliases=aliases, vocabulary=0),
        *for_every_block(config.layers, "blocks/*", "model.layers.*", BLOCK),
        *norm("norm", "model.norm", bias=False),
        *head,
    )
    # a buffer that older versions saved
    ignored = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
    return Table(entries, prefix="model.", ignored=ignored)


def _read_config(content: Json, where: object) -> LlamaConfig:
    """Converts the `config.json` of a `LlamaForCausalLM` to a LlamaConfig."""
    fields = KEYS.read(content, where)
    lines: list[str] = []
    heads, head_dim = fields["heads"], fields["width"] / fields["heads"]
    if content.get("head_dim") not in (None, head_dim):
        only = f"only hidden_size / num_attention_heads, {head_dim:g}"
        lines.append(f"head_dim: {content['head_dim']} is not implemented, {only}")
    # the rotary embedding, in the form of any version
    rope = _rope_settings(content, lines)
    refuse_unsupported(lines, where)
    kv_heads, theta = content.get("num_key_value_heads") or heads, rope.pop("rope_theta")
    scaling = None
    if rope:
        scaling = RopeScaling(**{ours: rope[theirs] for theirs, ours in SCALING.items()})
    return LlamaConfig(**fields, kv_heads=kv_heads, rope_theta=theta, rope_scaling=scaling)


def _write_config(config: LlamaConfig) -> Json:
    """Converts our configuration to the `config.json` of a `LlamaForCausalLM`."""
    scaling: dict[str, Any] = {}
    if config.rope_scaling is not None:
        scaling = {theirs: getattr(config.rope_scaling, ours) for theirs, ours in SCALING.items()}
    rope = {"rope_type": "llama3" if scaling else "default"} | scaling
    content = KEYS.write(config)
    # versions that know the key take it from `rope_parameters`
    del content["partial_rotary_factor"]
    return content | {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if scaling else None,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
    }


def _rope_settings(content: Json, lines: list[str]) -> Json:
    """Reads `rope_theta` and its keys of `SCALING` from either form of them.

    Appends a line to `lines` for each problem. transformers 5 has `rope_parameters`, older versions
    `rope_theta` and `rope_scaling`.
    """
    # both forms as one, the new one above the old one
    new, old = content.get("rope_parameters") or {}, _cleaned_rope(content.get("rope_scaling"))
    if content.get("rope_theta") is not None:
        old = {"rope_theta": content["rope_theta"]} | old
    rope = {"rope_theta": 10_000.0} | old | _cleaned_rope(new)
    lines += [
        f"rope_parameters.{key} contradicts rope_theta, rope_scaling"
        for key in sorted(old.keys() & new.keys())
        if rope[key] != old[key]
    ]
    # a kind of scaling that is not implemented
    rope_type = rope.pop("rope_type", "default")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        lines.append("rope_parameters.partial_rotary_factor: only 1.0 is implemented")
    if rope_type not in ROPE_TYPES:
        choices = " or ".join(ROPE_TYPES)
        lines.append(f"rope_type: '{rope_type}' is not implemented, only {choices}")
        return {"rope_theta": rope["rope_theta"]}
    # every key of the type, and no other, which may change the computation
    known = {"rope_theta"}
    if rope_type == "llama3":
        known |= SCALING.keys()
    lines += [f"rope_parameters.{key}: missing" for key in sorted(known - rope.keys())]
    unknown = sorted(rope.keys() - known)
    lines += [f"rope_parameters.{key}: not known with rope_type '{rope_type}'" for key in unknown]
    return rope


def _cleaned_rope(rope: Json | None) -> Json:
    """Drops the nulls of `rope`, and renames its `type`, as older versions say, to `rope_type`."""
    renamed = {"rope_type" if key == "type" else key: value for key, value in (rope or {}).items()}
    return {key: value for key, value in renamed.items() if value is not None}


FORMAT = WeightFormat("llama", _weight_table, _read_config, _write_config)
