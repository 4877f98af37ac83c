"""Weights under the names that others give them: from a checkpoint, or from the arrays of a model
that is running.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fsdp_jax.checkpoint.arrays import leaves_of
from fsdp_jax.checkpoint.export import read_params, refuse_misfits, saved_params
from fsdp_jax.checkpoint.store import CheckpointStore
from fsdp_jax.errors import ConfigError, message
from fsdp_jax.io.array_specs import describe
from fsdp_jax.io.boxes import Box, box_of_index, box_view, intersect, relative_box
from fsdp_jax.io.safetensors_writer import Exported, TensorSpec, exported_dtype, write_weights
from fsdp_jax.io.sharded_read import uses_host_memory
from fsdp_jax.io.tensor_mapping import TensorMapping
from fsdp_jax.models.huggingface.config_json import Tokens
from fsdp_jax.tree import PyTree
from fsdp_jax.weights.families import config_files, table_of

FILE_BYTES = 5_000_000_000  # of tensors in one file
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
Change = Callable[[str, Box, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Source:
    """Where parameters come from.

    Attributes:
        leaves: {path: what has its shape and dtype}. What must not be exported, such as adapters,
            is left out.
        read: some of them, whole and in the order asked for, one after another: (path, numpy or jax
            array).

    """

    leaves: Mapping[str, Any]
    read: Callable[[Sequence[str]], Iterator[tuple[str, Any]]]


def from_arrays(params: PyTree) -> Source:
    """The parameters of a running model. Raises ConfigError where another process holds some of
    them.
    """
    leaves = leaves_of(params)
    afar = [
        path
        for path, leaf in leaves.items()
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    ]
    if afar:
        fix = "save a checkpoint, and export that"
        raise ConfigError(
            message(
                "parameters that other processes hold", where="from_arrays", got=afar[0], fix=fix
            )
        )
    return Source(leaves, lambda paths: ((path, leaves[path]) for path in paths))


def from_store(store: CheckpointStore, step: int) -> Source:
    """The parameters of a checkpoint, one at a time on the host. Raises ValueError if there is no
    such step.
    """
    leaves = saved_params(store, step)
    return Source(
        leaves, lambda paths: read_params(store, step, {path: leaves[path] for path in paths})
    )


def export_weights(
    source: Source,
    config: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = "float32",
    file_bytes: int = FILE_BYTES,
    tokenizer: str | os.PathLike[str] | None = None,
    tokens: Tokens | None = None,
    change: Change | None = None,
) -> Exported:
    """Writes a new folder that `from_pretrained` loads: safetensors in Hugging Face's layout, and
    `config.json`.

    Args:
        source: `from_store(store, step)` or `from_arrays(state.params)`.
        config: GPTConfig, LlamaConfig, T5Config, ViTConfig or CaiTConfig: the model's.
        folder: to be made; it appears under its name when all of it is written.
        dtype: of the floating-point tensors; None leaves each as it is. Each is rounded to it once.
        file_bytes: tensors of one file; a larger tensor gets a file of its own. Host memory does
            not depend on it: it takes one array of the source and one tensor.
        tokenizer: a `tokenizer.json`, or a folder with one, that is copied, and the
            `tokenizer_config.json` beside it.
        tokens: ids for `config.json`, by name: `{"bos_token_id": 1, "eos_token_id": 2}`. What is
            not given is null.
        change: (path, box of the array, the values in it) -> the values to write in their place, of
            the same shape and any floating-point dtype: merges an adapter. A box is what becomes
            one tensor: of stacked layers, one.

    Raises:
        ConfigError: the folder is there already, the dtype is none of float32, bfloat16, float16,
            there is no such tokenizer, tokens are not the model's, or parameters and tensors do not
            fit each other: all at once, by our names and theirs.
        CheckpointError, DamageError: it cannot be written, or the source cannot be read; nothing of
            it is left.

    """
    table = table_of(config)
    pieces = table.pieces(source.leaves)
    lines = [
        f"ours {path}, {describe(source.leaves[path])}: no tensor is known for it"
        for path, each in pieces.items()
        if not each
    ]
    made = {piece.name for each in pieces.values() for piece in each}
    lines += [
        f"ours {entry.ours}, theirs {name}: missing"
        for name, entry in table.names().items()
        if name not in made
    ]
    lines += [
        f"ours {path}, theirs {piece.name}: a block that the config does not have"
        for path, each in pieces.items()
        for piece in each
        if piece.name not in table.names()
    ]
    refuse_misfits("export_weights", lines)
    dtypes = {
        path: exported_dtype(np.dtype(leaf.dtype), dtype, "dtype")
        for path, leaf in source.leaves.items()
    }
    outlines = [
        TensorSpec(piece.name, piece.shape, dtypes[path])
        for path, each in pieces.items()
        for piece in each
    ]
    others = config_files(
        config, dtype=max(dtypes.values(), key=lambda each: each.itemsize).name, tokens=tokens
    )
    if tokenizer is not None:
        others |= _tokenizer(Path(tokenizer))
    return write_weights(
        folder,
        outlines,
        _values(source, pieces, change),
        file_bytes=file_bytes,
        metadata={"format": "pt"},
        others=others,
    )


def _values(
    source: Source, pieces: Mapping[str, Sequence[TensorMapping]], change: Change | None
) -> Iterator[np.ndarray]:
    """Every tensor in order; an array is held until its last one is written."""
    for path, array in source.read(list(pieces)):
        for piece in pieces[path]:
            values = _on_host(array, piece.box)
            changed = values if change is None else change(path, piece.box, values)
            if changed.shape != values.shape:
                got = f"{describe(values)} to {describe(changed)}"
                raise ConfigError(
                    message("values that others replace keep their shape", where=path, got=got)
                )
            yield piece.to_tensor(changed)


def _on_host(array: Any, box: Box) -> np.ndarray:
    """A box of an array, of whose shards only what is needed leaves the devices."""
    if not isinstance(array, jax.Array):
        return box_view(np.asarray(array), box)
    out = np.empty([hi - lo for lo, hi in box], array.dtype)
    for shard in array.addressable_shards:
        held = box_of_index(shard.index, array.shape)
        part = intersect(box, held)
        if shard.replica_id == 0 and part is not None:
            box_view(out, relative_box(part, box))[...] = _cut_on_device(
                shard.data, relative_box(part, held)
            )
    return out


def _cut_on_device(data: jax.Array, box: Box) -> np.ndarray:
    if all(map(uses_host_memory, data.devices())):
        return box_view(np.asarray(data), box)  # a view of its own memory
    sizes = tuple(hi - lo for lo, hi in box)
    return np.asarray(_sliced(data, [lo for lo, _ in box], sizes))


@partial(jax.jit, static_argnums=2)
def _sliced(data: jax.Array, start: Sequence[int], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(data, start, sizes)


def _tokenizer(path: Path) -> dict[str, bytes]:
    file = path / TOKENIZER if path.is_dir() else path
    beside = file.with_name(SETTINGS)
    try:
        return {TOKENIZER: file.read_bytes()} | (
            {SETTINGS: beside.read_bytes()} if beside.is_file() else {}
        )
    except OSError as error:
        raise ConfigError(message("no tokenizer there", where=str(file), got=error)) from error
