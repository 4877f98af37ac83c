"""Writes weights under Hugging Face's or timm's names, from a checkpoint or a running model."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fsdp_jax.checkpoint.arrays import leaves_of
from fsdp_jax.checkpoint.export import raise_if_misfits, read_params, saved_params
from fsdp_jax.checkpoint.store import CheckpointStore
from fsdp_jax.errors import ConfigError
from fsdp_jax.host_memory import in_host_memory
from fsdp_jax.io.array_specs import describe_array
from fsdp_jax.io.boxes import Box, box_of_index, box_sizes, box_view, intersect, relative_box
from fsdp_jax.io.model_files import TOKENIZER, TOKENIZER_FILES
from fsdp_jax.io.regular_files import read_regular
from fsdp_jax.io.safetensors_writer import Exported, exported_dtype, write_weights
from fsdp_jax.io.tensor_mapping import TensorMapping
from fsdp_jax.lora import A, B, merge, merged_paths
from fsdp_jax.models.families import family_of
from fsdp_jax.models.flops import parameter_shapes
from fsdp_jax.models.huggingface.config_json import TokenIds
from fsdp_jax.models.huggingface.table import Table
from fsdp_jax.sharding.padding import stored_array
from fsdp_jax.sharding.quantized import Blocks
from fsdp_jax.step.average import Weights
from fsdp_jax.tree import SEPARATOR, PyTree
from fsdp_jax.weights.model_config import config_files, read_files, table_of

FILE_BYTES = 5_000_000_000
"""Default size of the tensors in one file."""


@dataclass(frozen=True)
class Source:
    """Where exported parameters come from.

    Attributes:
        leaves: {path: an object with its shape and dtype}. What must not be exported, such as
            adapters, is left out.
        read: paths -> (path, full numpy or jax array, which may be padded) one after another, in
            that order.
        change: (path, box of the array, its values) -> the values to write instead, of the same
            shape and any floating-point dtype. A box is what becomes one tensor, one layer of a
            stack.

    """

    leaves: Mapping[str, Any]
    read: Callable[[Sequence[str]], Iterator[tuple[str, Any]]]
    change: Callable[[str, Box, np.ndarray], np.ndarray] | None = None


def from_arrays(params: PyTree, *, scale: float | None = None) -> Source:
    """Makes a `Source` of a running model's parameters, `sharded.to_checkpoint(state).params`.

    Quantized ones are dequantized, one at a time on the host.

    Args:
        params: a pytree of arrays, or of `Padded` ones.
        scale: merges adapters into their kernels as they are written; `with_lora(...).scale`. By
            default they stay beside them.

    Raises ConfigError if another process holds some, or for a scale without adapters.
    """
    given = leaves_of(params)
    blocks = {
        path: Blocks.parse(leaf.stored_as, np.dtype(np.float32))
        for path, leaf in given.items()
        if getattr(leaf, "stored_as", "")
    }
    leaves = given | {
        path: jax.ShapeDtypeStruct(each.shape, each.dtype) for path, each in blocks.items()
    }
    arrays = {path: stored_array(leaf) for path, leaf in given.items()}
    for path, array in arrays.items():
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            raise ConfigError(
                "parameters that other processes hold",
                where="from_arrays",
                got=path,
                fix="save a checkpoint, and export that",
            )

    def read(paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
        for path in paths:
            array = arrays[path]
            yield path, blocks[path].to_host(np.asarray(array)) if path in blocks else array

    return _merged(Source(leaves, read), scale)


def from_store(
    store: CheckpointStore,
    step: int,
    weights: Weights = "params",
    *,
    scale: float | None = None,
) -> Source:
    """Makes a `Source` of a checkpoint's parameters, which reads one at a time on the host.

    `weights`: "ema" for the average that `optim.params_ema` keeps. `scale`: see `from_arrays`.
    Raises ValueError if there is no such step, no average, or a scale without adapters.
    """
    leaves = saved_params(store, step)

    def read(paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
        return read_params(store, step, {path: leaves[path] for path in paths}, weights)

    return _merged(Source(leaves, read), scale)


def _merged(source: Source, scale: float | None) -> Source:
    """Merges adapters into their kernels, one tensor at a time, in float32; None merges none."""
    if scale is None:
        return source
    # Each kernel with the paths of its two adapters, if it has them.
    parts = merged_paths(source.leaves)
    if len(parts) == len(source.leaves):
        raise ConfigError(
            "no adapters among the parameters", where="scale", got=scale, fix="leave scale out"
        )

    @lru_cache(maxsize=1)  # the layers of a kernel follow one another
    def adapters(path: str) -> list[np.ndarray]:
        return [np.asarray(array) for _, array in source.read(parts[path][1:])]

    # A box of a kernel needs these rows of one adapter, and these columns of the other.
    def merge_adapters(path: str, box: Box, kernel: np.ndarray) -> np.ndarray:
        if len(parts[path]) == 1:
            return kernel
        a, b = adapters(path)
        *stack, inputs, outputs = box
        rank = (0, source.leaves[parts[path][1]].shape[-1])  # either may be padded
        a = box_view(a, (*stack, inputs, rank))
        b = box_view(b, (*stack, rank, outputs))
        return np.asarray(merge(kernel.astype(np.float32), a, b, scale=scale))

    return Source({path: source.leaves[path] for path in parts}, source.read, merge_adapters)


def export_weights(
    source: Source,
    config: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = "float32",
    file_bytes: int = FILE_BYTES,
    tokenizer: str | os.PathLike[str] | None = None,
    tokens: TokenIds | None = None,
    like: str | os.PathLike[str] | None = None,
) -> Exported:
    """Writes a new folder that `from_pretrained` loads: safetensors and `config.json`.

    Args:
        source: `from_store(store, step)` or `from_arrays(sharded.to_checkpoint(state).params)`,
            with `scale=` where adapters are to be merged.
        config: the model's, of any family, such as a GPTConfig.
        folder: to be created; it appears under its name when all of it is written.
        dtype: of the floating-point tensors; None keeps each one's. Each is rounded to it once.
        file_bytes: tensors of one file; a larger tensor gets a file of its own. Host memory does
            not depend on it: one array of the source and one tensor are held at a time.
        tokenizer: a `tokenizer.json`, or a folder with one, to copy, with the other files of a
            tokenizer in its folder, such as `tokenizer_config.json` and `chat_template.jinja`.
        tokens: ids for `config.json`, by name: `{"bos_token_id": 1, "eos_token_id": 2}`. Those
            that are not given are null, or as in `like`.
        like: the folder of the weights that were trained, whose `config.json`, generation
            configuration and tokenizer are written again; see `config_json`.

    Raises:
        ConfigError: the folder exists already, the dtype is none of float32, bfloat16, float16,
            there is no such tokenizer, tokens are not the model's, or parameters and tensors do not
            fit each other: all at once, by both names.
        CheckpointError, DamageError: it cannot be written, or the source cannot be read; nothing of
            it is left.

    """
    # which tensor is which part of which parameter, and that none is missing or misshaped
    table = table_of(config)
    mappings = table.mappings(source.leaves)
    _check_complete(table, mappings, source.leaves)
    _check_shapes(table, mappings, source.leaves, config)
    # the files are laid out from shapes and dtypes, before any value is read
    dtypes = {
        path: exported_dtype(np.dtype(leaf.dtype), dtype, "dtype")
        for path, leaf in source.leaves.items()
    }
    outlines = {
        mapping.name: jax.ShapeDtypeStruct(mapping.shape, dtypes[path])
        for path, each in mappings.items()
        for mapping in each
    }
    # `config.json` states one dtype, in which a reader may hold all weights: the widest
    widest = max(dtypes.values(), key=lambda each: each.itemsize)
    others = config_files(config, dtype=widest.name, tokens=tokens, like=like)
    if tokenizer is not None:
        others = replace_tokenizer(others, tokenizer_files(Path(tokenizer)))
    # a generator: the writer takes one tensor at a time
    values = tensor_values(source, mappings)
    return write_weights(
        folder, outlines, values, file_bytes=file_bytes, metadata={"format": "pt"}, others=others
    )


def _check_complete(
    table: Table, mappings: Mapping[str, Sequence[TensorMapping]], leaves: Mapping[str, Any]
) -> None:
    """Raises ConfigError unless the parameters are exactly the tensors of the table."""
    names = table.names()
    paths = {mapping.name: path for path, each in mappings.items() for mapping in each}
    # parameters without a tensor, tensors without a parameter, and blocks beyond the config's
    lines = [
        f"ours {path}, {describe_array(leaves[path])}: no tensor is known for it"
        for path, each in mappings.items()
        if not each
    ]
    lines += [
        f"ours {entry.ours}, theirs {name}: missing"
        for name, entry in names.items()
        if name not in paths
    ]
    lines += [
        f"ours {path}, theirs {name}: a block that the config does not have"
        for name, path in paths.items()
        if name not in names
    ]
    fix = ""
    if any(path.rpartition(SEPARATOR)[2] in (A, B) for path in leaves):
        fix = "from_arrays(params, scale=adapted.scale), which merges adapters; or export_adapters"
    raise_if_misfits("export_weights", lines, fix=fix)


def _check_shapes(
    table: Table,
    mappings: Mapping[str, Sequence[TensorMapping]],
    leaves: Mapping[str, Any],
    config: Any,
) -> None:
    """Raises ConfigError unless the tensors have the shapes of a model of this configuration."""
    # a model's shapes by its configuration; the first tensor of a stack stands for all of them
    stacked = {
        path: jax.ShapeDtypeStruct(shape, np.float32)
        for path, shape in parameter_shapes(family_of(config).model, config).items()
    }
    model = table.mappings(stacked)
    expected = {each.name: each.shape for many in model.values() for each in many}
    lines = [
        f"ours {path}, {describe_array(leaves[path])}: expected {list(expected[mapping.name])} "
        f"for theirs {mapping.name}, got {list(mapping.shape)}"
        for path, each in mappings.items()
        for mapping in each[:1]
        if mapping.shape != expected[mapping.name]
    ]
    fix = "sharded.to_checkpoint(state).params: those of a state may be padded"
    raise_if_misfits("export_weights", lines, fix=fix)


def tensor_values(
    source: Source, mappings: Mapping[str, Sequence[TensorMapping]]
) -> Iterator[np.ndarray]:
    """Yields the values of every tensor, changed by the source, in the order of `mappings`.

    An array of the source is held until its last tensor has been taken.
    """
    # one parameter at a time, and of it one tensor
    for path, array in source.read(list(mappings)):
        for mapping in mappings[path]:
            values = _copy_box_to_host(array, mapping.box)
            changed = values
            if source.change is not None:
                changed = source.change(path, mapping.box, values)
            if changed.shape != values.shape:
                raise ConfigError(
                    "`change` must keep the shape of the values",
                    where=path,
                    got=f"{describe_array(values)} to {describe_array(changed)}",
                )
            yield mapping.to_tensor(changed)


def _copy_box_to_host(array: Any, box: Box) -> np.ndarray:
    """Copies a box of an array to host memory, and no other parts of its shards."""
    if not isinstance(array, jax.Array):
        return box_view(np.asarray(array), box)
    # from each shard its part of the box; a replicated part from one device
    out = np.empty(box_sizes(box), array.dtype)
    for shard in array.addressable_shards:
        shard_box = box_of_index(shard.index, array.shape)
        part = intersect(box, shard_box)
        if shard.replica_id == 0 and part is not None:
            # In host memory a view; elsewhere the part is cut out on its device.
            data: Any = shard.data
            if in_host_memory(data.sharding):
                data = np.asarray(data)
            values = np.asarray(box_view(data, relative_box(part, shard_box)))
            box_view(out, relative_box(part, box))[...] = values
    return out


def replace_tokenizer(files: Mapping[str, bytes], by: Mapping[str, bytes]) -> dict[str, bytes]:
    """Replaces the files of a tokenizer, and puts the new ones before the others."""
    return {**by, **{name: each for name, each in files.items() if name not in TOKENIZER_FILES}}


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """Reads the tokenizer at `path`, or in it, and what belongs to it: {name: content}.

    Raises ConfigError if it cannot be read, DamageError for the other files.
    """
    file = path / TOKENIZER if path.is_dir() else path
    try:
        content = read_regular(file)
    except OSError as error:
        raise ConfigError("no such tokenizer", where=str(file), got=error) from error
    return read_files(file.parent, TOKENIZER_FILES) | {TOKENIZER: content}
