"""GPT-2 as `GPT2LMHeadModel` saves it (openai-community/gpt2)."""

from fsdp_jax.models.gpt import GPTConfig
from fsdp_jax.models.huggingface.config_json import Json, Keys, WeightFormat, refuse_unsupported
from fsdp_jax.models.huggingface.table import LINEAR, Entry, Table, conv1d, for_every_block, norm

BLOCK = [
    *norm("ln_1", "ln_1"),
    *conv1d("attn/qkv", "attn.c_attn"),
    *conv1d("attn/out", "attn.c_proj"),
    *norm("ln_2", "ln_2"),
    *conv1d("mlp/up", "mlp.c_fc"),
    *conv1d("mlp/down", "mlp.c_proj"),
]

KEYS = Keys(
    fields={
        "vocab_size": "vocab_size", "n_positions": "sequence_length", "n_layer": "layers",
        "n_embd": "width", "n_head": "heads", "tie_word_embeddings": "tie_head",
    },
    optional={"tie_word_embeddings": True},
    fixed={
        # the tanh approximation, by three names
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "layer_norm_epsilon": (GPTConfig.norm_epsilon,), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,), "is_encoder_decoder": (False,),
    },
    harmless=(
        "resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_type", "summary_use_proj",
        "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    ),
    derived=("n_inner", "n_ctx"),
)  # fmt: skip


def _weight_table(config: GPTConfig) -> Table:
    """Maps our parameters to the tensors of a `GPT2LMHeadModel`."""
    rows = config.vocab_size  # ours may have rows of padding after them
    head: list[Entry] = []
    aliases: tuple[str, ...] = ()
    if config.tie_head:  # a file may have the tied table under the name of the head too
        aliases = ("lm_head.weight",)
    else:
        head.append(Entry("head/kernel", "lm_head.weight", LINEAR, (1, rows), vocabulary=1))
    entries = (
        Entry(
            "embed/embedding",
            "transformer.wte.weight",
            rows=(0, rows),
            aliases=aliases,
            vocabulary=0,
        ),
        Entry("positions/embedding", "transformer.wpe.weight"),
        *for_every_block(config.layers, "blocks/*", "transformer.h.*", BLOCK),
        *norm("ln_f", "transformer.ln_f"),
        *head,
    )
    causal_mask = ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias")
    return Table(entries, prefix="transformer.", ignored=causal_mask)


def _read_config(content: Json, where: object) -> GPTConfig:
    """Converts the `config.json` of a `GPT2LMHeadModel` to a GPTConfig."""
    fields = KEYS.read(content, where)
    width, length = fields["width"], fields["sequence_length"]
    # derived keys, which other values than these would make another model
    inner, context = content.get("n_inner"), content.get("n_ctx", length)
    lines = []
    if inner not in (None, 4 * width):
        lines.append(f"n_inner: {inner} is not implemented, only 4 x n_embd, {4 * width}")
    if context != length:
        lines.append(f"n_ctx: {context} differs from n_positions, {length}")
    refuse_unsupported(lines, where)
    return GPTConfig(**fields)


def _write_config(config: GPTConfig) -> Json:
    """Converts our configuration to the `config.json` of a `GPT2LMHeadModel`."""
    # our attention has no dropout of its weights
    rates: Json = dict.fromkeys(("resid_pdrop", "embd_pdrop"), config.dropout) | {"attn_pdrop": 0.0}
    return KEYS.write(config) | {"n_inner": None, "architectures": ["GPT2LMHeadModel"]} | rates


FORMAT = WeightFormat("gpt2", _weight_table, _read_config, _write_config)
