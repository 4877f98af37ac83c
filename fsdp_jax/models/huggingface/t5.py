"""T5 1.0 and 1.1 as `T5ForConditionalGeneration` saves them.

Version 1.1 has a gated MLP, a head of its own, and no scaling of what goes into the head.
transformers 5 says the latter with `scale_decoder_outputs`, and older versions with
`tie_word_embeddings`.
"""

from fsdp_jax.models.huggingface.config_json import Json, Keys, refuse
from fsdp_jax.models.huggingface.table import LINEAR, Entry, Table, linear, norm, stacked
from fsdp_jax.models.t5 import T5Config

KEYS = Keys(
    fields={
        "vocab_size": "vocab_size", "num_layers": "layers", "d_model": "width", "num_heads": "heads",
        "d_kv": "head_dim", "d_ff": "hidden", "relative_attention_num_buckets": "buckets",
        "relative_attention_max_distance": "max_distance", "layer_norm_epsilon": "norm_epsilon",
    },
    optional={"relative_attention_max_distance": 128},
    fixed={
        "is_encoder_decoder": (True,),
        "pad_token_id": (0,),  # what the targets are shifted with, and padding, in our loss
        "decoder_start_token_id": (0, None),
    },
    harmless=("dropout_rate", "classifier_dropout", "dense_act_fn", "is_gated_act", "is_decoder", "output_past"),
    derived=(
        "num_decoder_layers", "feed_forward_proj", "tie_word_embeddings", "scale_decoder_outputs", "n_positions",
    ),
)  # fmt: skip
PLAIN, GATED = "relu", "gated-gelu"
LENGTH = 512  # tokens; what the published ones were trained with, where `n_positions` does not say


def _attention(ours: str, theirs: str) -> list[Entry]:
    return [
        entry
        for name in "qkvo"
        for entry in linear(f"{ours}/{name}", f"{theirs}.{name}", bias=False)
    ]


def _block(config: T5Config, *, decoder: bool) -> list[Entry]:
    mlp = 2 if decoder else 1
    names = {"wi_0": "wi_0", "wi_1": "wi_1"} if config.gated else {"up": "wi"}
    cross = [
        *norm("cross_norm", "layer.1.layer_norm", bias=False),
        *_attention("cross", "layer.1.EncDecAttention"),
    ]  # fmt: skip
    return [
        *norm("attn_norm", "layer.0.layer_norm", bias=False),
        *_attention("attn", "layer.0.SelfAttention"),
        *(cross if decoder else []),
        *norm("mlp_norm", f"layer.{mlp}.layer_norm", bias=False),
        *(e for ours, theirs in (names | {"down": "wo"}).items()
          for e in linear(f"mlp/{ours}", f"layer.{mlp}.DenseReluDense.{theirs}", bias=False)),
    ]  # fmt: skip


def _stack(config: T5Config, name: str, depth: int) -> list[Entry]:
    positions = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"  # of all of its blocks
    return [
        Entry(f"{name}/relative_bias/embedding", positions),
        *stacked(
            depth, f"{name}/blocks/*", f"{name}.block.*", _block(config, decoder=name == "decoder")
        ),
        *norm(f"{name}/norm", f"{name}.final_layer_norm", bias=False),
    ]


def table(config: T5Config) -> Table:
    """Of a config."""
    aliases = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    head = [] if config.tie_head else [Entry("head/kernel", "lm_head.weight", LINEAR)]
    return Table(
        (
            Entry(
                "embed/embedding",
                "shared.weight",
                aliases=(*aliases, "lm_head.weight")[: 3 if not head else 2],
            ),
            *_stack(config, "encoder", config.layers),
            *_stack(config, "decoder", config.decoder_layers),
            *head,
        ),
        # saved by old versions, and never used: keys at a distance from queries of another stack
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    )


def read(found: Json, where: object) -> T5Config:
    """From `config.json`. Raises ConfigError, ValueError."""
    fields = KEYS.read(found, where)
    kind = found.get("feed_forward_proj", PLAIN)
    tied = found.get("tie_word_embeddings", True)
    scaled = found.get("scale_decoder_outputs", tied)
    lines = []
    if kind not in (PLAIN, GATED):
        lines.append(f"feed_forward_proj: '{kind}' is not implemented, only '{PLAIN}' or '{GATED}'")
    if scaled and not tied:
        lines.append(
            "scale_decoder_outputs: true is not implemented where tie_word_embeddings is false"
        )
    refuse(lines, where)
    length = found.get("n_positions") or LENGTH
    decoder = found.get("num_decoder_layers") or fields["layers"]
    return T5Config(
        **fields, decoder_layers=decoder, gated=kind == GATED, tie_head=bool(scaled), inputs_length=length,
        targets_length=length,
    )  # fmt: skip


def write(config: T5Config) -> Json:
    """For `config.json`, for transformers of any age."""
    return KEYS.write(config) | {
        "num_decoder_layers": config.decoder_layers, "feed_forward_proj": GATED if config.gated else PLAIN,
        "tie_word_embeddings": config.tie_head, "n_positions": max(config.inputs_length, config.targets_length),
        "dropout_rate": config.dropout, "architectures": ["T5ForConditionalGeneration"],
    }  # fmt: skip
