"""T5 1.0 and 1.1 as `T5ForConditionalGeneration` saves them.

Version 1.1 has a gated MLP, a head of its own, and no scaling of the head's input; transformers 5
states the latter with `scale_decoder_outputs`, older versions with `tie_word_embeddings`.
"""

from fsdp_jax.models.huggingface.config_json import Json, Keys, WeightFormat, refuse_unsupported
from fsdp_jax.models.huggingface.table import LINEAR, Entry, Table, for_every_block, linear, norm
from fsdp_jax.models.t5 import T5Config

KEYS = Keys(
    fields={
        "vocab_size": "vocab_size", "num_layers": "layers", "d_model": "width",
        "num_heads": "heads", "d_kv": "head_dim", "d_ff": "hidden",
        "relative_attention_num_buckets": "buckets",
        "relative_attention_max_distance": "max_distance", "layer_norm_epsilon": "norm_epsilon",
    },
    optional={"relative_attention_max_distance": 128},
    fixed={
        "is_encoder_decoder": (True,),
        "pad_token_id": (0,),  # our loss pads and shifts the targets with it
        "decoder_start_token_id": (0, None),
    },
    harmless=(
        "dropout_rate", "classifier_dropout", "dense_act_fn", "is_gated_act", "is_decoder",
        "output_past",
    ),
    derived=(
        "num_decoder_layers", "feed_forward_proj", "tie_word_embeddings", "scale_decoder_outputs",
        "n_positions",
    ),
)  # fmt: skip
RELU, GATED = "relu", "gated-gelu"
LENGTH = 512
"""Tokens of the published models' training sequences, where `n_positions` is absent."""


def _attention_entries(ours: str, theirs: str) -> list[Entry]:
    """Lists the entries of the four Linears of an attention."""
    names = [(f"{ours}/{name}", f"{theirs}.{name}") for name in "qkvo"]
    return [entry for pair in names for entry in linear(*pair, bias=False)]


def _block_entries(config: T5Config, *, is_decoder: bool) -> list[Entry]:
    """Lists the entries of one block, with names that are relative to it."""
    entries = [
        *norm("attn_norm", "layer.0.layer_norm", bias=False),
        *_attention_entries("attn", "layer.0.SelfAttention"),
    ]
    layer = "layer.1"
    if is_decoder:
        entries += norm("cross_norm", "layer.1.layer_norm", bias=False)
        entries += _attention_entries("cross", "layer.1.EncDecAttention")
        layer = "layer.2"
    entries += norm("mlp_norm", f"{layer}.layer_norm", bias=False)
    # the MLP, whose Linears are named by the activation
    names = {"wi_0": "wi_0", "wi_1": "wi_1"} if config.gated else {"up": "wi"}
    for ours, theirs in (names | {"down": "wo"}).items():
        entries += linear(f"mlp/{ours}", f"{layer}.DenseReluDense.{theirs}", bias=False)
    return entries


def _stack_entries(config: T5Config, name: str, depth: int) -> list[Entry]:
    """Lists the entries of the `encoder` or `decoder`, except for its embedding."""
    # stored with the first block, used by all of them
    positions = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    block = _block_entries(config, is_decoder=name == "decoder")
    return [
        Entry(f"{name}/relative_bias/embedding", positions),
        *for_every_block(depth, f"{name}/blocks/*", f"{name}.block.*", block),
        *norm(f"{name}/norm", f"{name}.final_layer_norm", bias=False),
    ]


def _weight_table(config: T5Config) -> Table:
    """Maps our parameters to the tensors of a `T5ForConditionalGeneration`."""
    head: list[Entry] = []
    aliases: tuple[str, ...] = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    if config.tie_head:  # a file may have the tied table under the name of the head too
        aliases = (*aliases, "lm_head.weight")
    else:
        head.append(Entry("head/kernel", "lm_head.weight", LINEAR, vocabulary=1))
    entries = (
        Entry("embed/embedding", "shared.weight", aliases=aliases, vocabulary=0),
        *_stack_entries(config, "encoder", config.layers),
        *_stack_entries(config, "decoder", config.decoder_layers),
        *head,
    )
    # saved by old versions and never used: cross-attention has no relative positions
    ignored = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
    return Table(entries, ignored=ignored)


def _read_config(content: Json, where: object) -> T5Config:
    """Converts the `config.json` of a `T5ForConditionalGeneration` to a T5Config."""
    fields = KEYS.read(content, where)
    mlp = content.get("feed_forward_proj", RELU)
    # older versions tie the head, and scale its input, or do neither
    tied = content.get("tie_word_embeddings", True)
    scaled = content.get("scale_decoder_outputs", tied)
    lines = []
    if mlp not in (RELU, GATED):
        lines.append(f"feed_forward_proj: '{mlp}' is not implemented, only '{RELU}' or '{GATED}'")
    if scaled and not tied:
        what = "scale_decoder_outputs: true is not implemented"
        lines.append(f"{what} where tie_word_embeddings is false")
    refuse_unsupported(lines, where)
    length = content.get("n_positions") or LENGTH
    return T5Config(
        **fields,
        decoder_layers=content.get("num_decoder_layers") or fields["layers"],
        gated=mlp == GATED,
        tie_head=bool(scaled),
        inputs_length=length,
        targets_length=length,
    )


def _write_config(config: T5Config) -> Json:
    """Converts our configuration to the `config.json` of a `T5ForConditionalGeneration`."""
    return KEYS.write(config) | {
        "num_decoder_layers": config.decoder_layers,
        "feed_forward_proj": GATED if config.gated else RELU,
        "tie_word_embeddings": config.tie_head,
        "n_positions": max(config.inputs_length, config.targets_length),
        "dropout_rate": config.dropout,
        "architectures": ["T5ForConditionalGeneration"],
    }


FORMAT = WeightFormat(
    "t5", _weight_table, _read_config, _write_config, descriptive=("n_positions",)
)
