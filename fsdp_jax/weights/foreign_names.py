"""The names and layouts of other programs' checkpoints, for our model families.

Each returns a function for `rename=` of `import_orbax`, `import_dcp` and `import_levanter`, which
arranges the arrays of a checkpoint as ours are; nothing is read for that.

Sources, as published: MaxText's `checkpoint_conversion` (its parameter mappings and hooks),
torchtitan's `Llama3StateDictAdapter`, Levanter's `models/llama.py`.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from fsdp_jax.checkpoint.import_tree import Rename, Saved
from fsdp_jax.checkpoint.saved_array import SavedArray, stacked
from fsdp_jax.errors import ConfigError
from fsdp_jax.models.families import family_of
from fsdp_jax.models.flops import parameter_shapes
from fsdp_jax.models.huggingface.table import Entry
from fsdp_jax.models.llama import LlamaConfig
from fsdp_jax.weights.model_config import table_of

Program = Literal["huggingface", "maxtext", "torchtitan", "levanter"]
# An array that only that program's checkpoints have.
MARKS: dict[str, Program] = {
    "token_embedder/embedding": "maxtext",
    "tok_embeddings.weight": "torchtitan",
    "embeddings/token_embeddings/weight": "levanter",
}
BLOCKS = "blocks/"
QUERY, KEY, OUT = "attn/q/kernel", "attn/k/kernel", "attn/o/kernel"
# Ours, of a block without its number -> MaxText's, of a layer.
MAXTEXT_LAYER = {
    "attn_norm/scale": "pre_self_attention_layer_norm/scale",
    QUERY: "self_attention/query/kernel",
    KEY: "self_attention/key/kernel",
    "attn/v/kernel": "self_attention/value/kernel",
    OUT: "self_attention/out/kernel",
    "mlp_norm/scale": "post_self_attention_layer_norm/scale",
    "mlp/gate/kernel": "mlp/wi_0/kernel",
    "mlp/up/kernel": "mlp/wi_1/kernel",
    "mlp/down/kernel": "mlp/wo/kernel",
}
MAXTEXT = {
    "embed/embedding": "token_embedder/embedding",
    "norm/scale": "decoder/decoder_norm/scale",
    "head/kernel": "decoder/logits_dense/kernel",
}
# Hugging Face's names -> torchtitan's, which are Meta's.
TORCHTITAN = (
    (r"^model\.embed_tokens\.", "tok_embeddings."),
    (r"^lm_head\.", "output."),
    (r"^model\.", ""),
    (r"\.self_attn\.(.)_proj\.", r".attention.w\1."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
)
# Hugging Face's names -> Levanter's, of layers that are stacked.
LEVANTER = (
    (r"^model\.embed_tokens\.", "embeddings.token_embeddings."),
    (r"^model\.layers\.\*\.", "transformer.layers.stacked."),
    (r"^model\.", "transformer."),
    (r"\.", "/"),
)
Names = Sequence[tuple[str, str]]


def foreign_names(program: Program, config: Any) -> Rename:
    """Makes the function of names for a model that another program trained.

    Args:
        program: `huggingface` for any program that trains the models of transformers, such as FSDP2
            or Accelerate, for every family with a table; the others for the Llama family. Of
            MaxText layers are scanned or not, rotary embeddings those of the config: interleaved
            with `rope_scaling` (its `rope_type: llama3.1`), else in halves.
        config: of our model, such as a LlamaConfig.

    Raises ConfigError for a family that has no names of that program.

    MaxText folds 1 / sqrt(head_dim) into the query kernels. They and their moments are multiplied,
    so that the model is the same; Adam's updates are then smaller in proportion to the kernels.

    Example:
        >>> names = foreign_names("maxtext", config)
        >>> params = import_orbax("maxtext/2", sharded.checkpoint_target().params, rename=names)

    """
    if program == "huggingface":
        return _ByTable(config, partial(_tensors, names=()))
    if not isinstance(config, LlamaConfig):
        raise ConfigError(
            f"names of {program} are known for Llama alone",
            where="model.family",
            got=type(config).__name__,
            fix="--rename FILE, or rename=, with a function of names",
        )
    if program == "maxtext":
        return _MaxText(config)
    return _ByTable(config, {"levanter": _levanter, "torchtitan": _torchtitan}[program])


def program_of(names: Collection[str], config: Any) -> Program | None:
    """Finds whose names the parameters of a checkpoint have, by one of them; None if nobody's."""
    for mark, program in MARKS.items():
        if mark in names:
            return program
    table = table_of(config)
    theirs = set(table.names())
    if theirs & ({*names} | {table.prefix + name for name in names}):
        return "huggingface"
    return None


def _in_block(path: str) -> str:
    """Drops the number of a block from a path, and what is before it."""
    return re.sub(rf"^{BLOCKS}((\d+|\*)/)?", "", path)


def _in_halves(array: SavedArray, dim: int, heads: int) -> SavedArray:
    """Splits a dim into [heads, 2, head_dim / 2]: neighbours that are rotated come into halves."""
    shape = array.shape
    pairs = array.reshape(*shape[:dim], heads, -1, 2, *shape[dim + 1 :])
    return pairs.swapaxes(dim + 1, dim + 2)


class _ByTable:
    """The names of a program whose tensors are those of a weight table, by other names."""

    def __init__(self, config: Any, tensors: "Callable[[Request], SavedArray]") -> None:
        self.config = config
        self.table = table_of(config)
        self._tensors = tensors
        # Copies of tied tensors, and buffers.
        self.ignore = [f"*{name}" for name in (*self.table.aliases(), *self.table.ignored)]

    def __call__(self, path: str, saved: Saved) -> SavedArray | None:
        """Returns the array of one of our paths; None for what no table has, such as adapters."""
        for entry in self.table.entries:
            number = re.fullmatch(re.escape(entry.ours).replace(r"\*", r"(\d+)"), path)
            is_stacked = entry.depth is not None and path == entry.ours.replace("*/", "")
            if not number and not is_stacked:
                continue
            blocks = list(map(int, number.groups())) if number else list(range(entry.depth or 0))
            tensor = self._tensors(Request(entry, blocks, saved, self))
            if blocks and not is_stacked:
                tensor = tensor[0]
            if entry.dims:
                lead = tensor.ndim - len(entry.dims)
                tensor = tensor.transpose(*range(lead), *(dim + lead for dim in entry.dims))
            return self._padded(path, entry, tensor)
        return None

    def _padded(self, path: str, entry: Entry, tensor: SavedArray) -> SavedArray:
        """Adds the rows of zeros that ours has beyond theirs."""
        if entry.rows is None:
            return tensor
        dim, theirs = entry.rows
        shape = list(tensor.shape)
        if shape[dim] == theirs:
            shape[dim] = parameter_shapes(family_of(self.config).model, self.config)[path][dim]
        return replace(tensor, shape=tuple(shape))


@dataclass(frozen=True)
class Request:
    """A tensor of a table: of some blocks, [blocks, ...], or of none, in a checkpoint."""

    entry: Entry
    blocks: Sequence[int]
    saved: Saved
    names: _ByTable


def _tensors(request: Request, names: Names) -> SavedArray:
    """Takes a tensor for each block, by other names than the table's."""

    def tensor(name: str) -> SavedArray:
        other = _substituted(name, names)
        # Saved from the model without its head, names lack a prefix.
        bare = other.removeprefix(request.names.table.prefix)
        return request.saved[
            bare if other not in request.saved and bare in request.saved else other
        ]

    if not request.blocks:
        return tensor(request.entry.theirs)
    return stacked([tensor(request.entry.name(block)) for block in request.blocks])


def _torchtitan(request: Request) -> SavedArray:
    """Takes a tensor of torchtitan, with the pairs that are rotated as Hugging Face has them."""
    tensor, config = _tensors(request, TORCHTITAN), request.names.config
    heads = {QUERY: config.heads, KEY: config.kv_heads}.get(_in_block(request.entry.ours))
    if heads is None:
        return tensor
    return _in_halves(tensor, tensor.ndim - 2, heads).reshape(tensor.shape)


def _substituted(name: str, names: Names) -> str:
    for pattern, other in names:
        name = re.sub(pattern, other, name)
    return name


def _levanter(request: Request) -> SavedArray:
    """Takes a tensor of Levanter: layers are stacked, and heads have dims of their own."""
    name, saved = _substituted(request.entry.theirs, LEVANTER), request.saved
    if not request.blocks:
        return saved[name]
    if name in saved:
        tensor = saved[name][request.blocks[0] : request.blocks[-1] + 1]
    else:
        each = [name.replace("/stacked/", f"/blocks/{block}/") for block in request.blocks]
        tensor = stacked([saved[one] for one in each])
    if tensor.ndim <= 3:
        return tensor
    if _in_block(request.entry.ours) == OUT:  # [layers, width, heads, head_dim]
        return tensor.reshape(*tensor.shape[:2], -1)
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


class _MaxText:
    """The names of MaxText's Llama; layers are stacked along dim 1, or are `layers_N`."""

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config

    def __call__(self, path: str, saved: Saved) -> SavedArray | None:
        """Returns the array of one of our paths."""
        if path in MAXTEXT:
            return saved[MAXTEXT[path]]
        ours = _in_block(path)
        if ours not in MAXTEXT_LAYER:
            return None
        number = re.match(rf"{BLOCKS}(\d+)/", path)
        blocks = [int(number[1])] if number else list(range(self.config.layers))
        layers = self._arranged(ours, self._stacked(MAXTEXT_LAYER[ours], blocks, saved), saved)
        return layers[0] if number else layers

    def _stacked(self, name: str, blocks: Sequence[int], saved: Saved) -> SavedArray:
        """Takes an array of some layers, [layers, ...]."""
        scanned = f"decoder/layers/{name}"
        if scanned in saved:
            whole = saved[scanned].swapaxes(0, 1)
            return whole[blocks[0] : blocks[-1] + 1]
        return stacked([saved[f"decoder/layers_{block}/{name}"] for block in blocks])

    def _arranged(self, ours: str, layers: SavedArray, saved: Saved) -> SavedArray:
        """Joins heads, and brings what is rotated, and the scale, to ours."""
        if layers.ndim != 4:
            return layers
        if ours == OUT:  # [layers, heads, head_dim, width]
            return layers.reshape(layers.shape[0], -1, layers.shape[3])
        joined = layers.reshape(*layers.shape[:2], -1)  # from [layers, width, heads, head_dim]
        if ours in (QUERY, KEY) and self.config.rope_scaling is not None:
            joined = _in_halves(joined, 2, layers.shape[2]).reshape(joined.shape)
        if ours == QUERY:
            # A gradient is divided by what its parameter is multiplied by.
            root = math.sqrt(layers.shape[3])
            joined *= {0: root, 1: 1 / root, 2: 1 / root**2}[saved.moment]
        return joined
