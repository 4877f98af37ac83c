"""Weights with the names that others give them, read straight into shards."""

import fnmatch
import os
from collections.abc import Sequence
from typing import Any

from fsdp_jax.checkpoint.arrays import leaves_of
from fsdp_jax.checkpoint.export import fits_dtype, read_mapped, refuse_misfits
from fsdp_jax.io.array_specs import describe
from fsdp_jax.io.safetensors import SafetensorsFolder, StoredTensor
from fsdp_jax.io.sharded_read import STAGING_BYTES, tensors_equal
from fsdp_jax.io.tensor_mapping import TensorMapping
from fsdp_jax.models.huggingface.table import Table
from fsdp_jax.tree import PyTree
from fsdp_jax.weights.families import table_of


def import_weights(
    folder: str | os.PathLike[str],
    target: PyTree,
    config: Any,
    *,
    budget: int = STAGING_BYTES,
    ignore: Sequence[str] = (),
) -> PyTree:
    """Reads a folder of safetensors into the shards of `target`: each process what its devices
    need, once.

    Args:
        folder: with `model.safetensors`, or several files and their index, as Hugging Face lays
            them out.
        target: a pytree whose leaves have shape, dtype and sharding, such as
            `sharded.checkpoint_target().params`, and whose paths are those of the model that
            `config` makes. It may lack some: what the files have for them is then of no parameter,
            and has to be ignored.
        config: GPTConfig, LlamaConfig, T5Config, ViTConfig or CaiTConfig, as from
            `read_config(folder)`.
        budget: bytes of host memory that are taken beside the arrays.
        ignore: names of tensors that are not wanted, with `*` for anything: `("classifier.*",)`.

    Returns the same structure. Floating-point tensors are cast to the target's dtypes; rows that
    pad are 0.

    Raises:
        ConfigError: no such files, or pickled ones alone; tensors that are missing, of no parameter
            of ours, misshaped, or there twice and different. All at once, by their names and ours.
        ValueError: a target without shardings.
        CheckpointError: files that cannot be read to their end.

    """
    wanted, table = leaves_of(target), table_of(config)
    with SafetensorsFolder(folder) as found:
        pieces = table.pieces(wanted)
        located = located_tensors(found, table, pieces, wanted, ignore)
        return read_mapped(target, pieces, located, budget, found.directory)


def located_tensors(
    found: SafetensorsFolder,
    table: Table,
    pieces: dict[str, list[TensorMapping]],
    wanted: dict[str, Any],
    ignore: Sequence[str],
) -> dict[str, StoredTensor]:
    """{name in the table: the tensor}. Raises ConfigError with all that does not fit."""
    owners = {piece.name: (path, piece) for path, each in pieces.items() for piece in each}
    located, lines = _by_name(found, table, owners, ignore)
    lines += [
        f"ours {path}, {describe(wanted[path])}: no tensor is known for it"
        for path in pieces
        if not pieces[path]
    ]
    for name, (path, piece) in owners.items():
        ours = f"ours {path}, {describe(wanted[path])}"
        if name not in located:
            lines.append(f"theirs {name}, {ours}: missing in the files")
        elif located[name].shape != piece.shape:
            lines.append(
                f"theirs {name}, {ours}: expected {list(piece.shape)}, got {located[name]}"
            )
        elif not fits_dtype(located[name], wanted[path]):
            lines.append(f"theirs {name}, {ours}: cannot be cast from {located[name]}")
    refuse_misfits(found.directory, lines)
    return located


def _by_name(
    found: SafetensorsFolder, table: Table, owners: dict[str, Any], ignore: Sequence[str]
) -> tuple[dict[str, StoredTensor], list[str]]:
    """({name in the table: tensor}, what is wrong): prefixes are added, aliases resolved, what is
    ignored left out.
    """
    aliases, lines = table.aliases(), []
    located: dict[str, StoredTensor] = {}
    for name, tensor in found.items():
        spelt = [name, table.prefix + name]
        if any(fnmatch.fnmatchcase(each, pattern) for each in spelt for pattern in ignore):
            continue
        ours = next((each for each in [*spelt, *map(aliases.get, spelt)] if each in owners), None)
        if ours is None:
            if not any(table.is_ignored(each) for each in spelt):
                known = next(
                    (entry.ours for each in spelt if (entry := table.names().get(each))), None
                )
                why = (
                    f"ours {known} is not in the target"
                    if known
                    else "no parameter of ours is known for it"
                )
                lines.append(f"theirs {name}, {tensor}: {why}")
        elif ours not in located:
            located[ours] = tensor
        elif not tensors_equal(located[ours], tensor):
            lines.append(
                f"theirs {name}: one of ours, {owners[ours][0]}, with {located[ours].name}, but they differ"
            )
    return located, lines
