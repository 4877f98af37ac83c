"""Reads weights under Hugging Face's or timm's names straight into shards."""

import fnmatch
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_jax.checkpoint.arrays import leaves_of
from fsdp_jax.checkpoint.bitsandbytes_read import CodedTensor, join_codes
from fsdp_jax.checkpoint.export import SHOWN, fits_dtype, raise_if_misfits, read_mapped
from fsdp_jax.checkpoint.quantized_read import keeps_codes
from fsdp_jax.errors import first_lines, message
from fsdp_jax.io.array_specs import describe_array
from fsdp_jax.io.safetensors import SafetensorsFolder, StoredTensor
from fsdp_jax.io.sharded_read import STAGING_BYTES, tensors_equal
from fsdp_jax.io.tensor_mapping import TensorMapping
from fsdp_jax.lora import split_lora
from fsdp_jax.models.huggingface.table import Table
from fsdp_jax.sharding.quantized import QuantizedStruct, as_model_arrays
from fsdp_jax.tree import PyTree
from fsdp_jax.weights.model_config import table_of
from fsdp_jax.weights.new_rows import has_fewer_rows, of_new, warn_of_new_rows, with_mean_rows


def import_weights(
    folder: str | os.PathLike[str],
    target: PyTree,
    config: Any,
    *,
    budget: int = STAGING_BYTES,
    ignore: Sequence[str] = (),
) -> PyTree:
    """Reads a folder of safetensors into the shards of `target`.

    Each process reads what its devices need, once. Floating-point tensors are cast to the target's
    dtypes; padding rows are 0. Where the vocabulary of `config` is larger than that of the files,
    the rows that an embedding and a head lack are the mean of theirs, and a warning says so. A
    quantized parameter is quantized part by part as it is read, so
    that no host and no device holds more than `budget` of it in floating point.

    Weights that bitsandbytes has stored in nf4 are dequantized; into a parameter of
    `QuantizedBase("nf4")` whose blocks are theirs, codes and scales are copied bit for bit. Where
    they are quantized again, a warning names both formats.

    Args:
        folder: with `model.safetensors`, or several files and their index, in Hugging Face's
            layout.
        target: a pytree whose leaves have shape, dtype and sharding, such as
            `sharded.checkpoint_target().params`, and whose paths are those of the model of
            `config`. It may lack some parameters: their tensors then have to be ignored.
        config: of a model of any family, such as a GPTConfig, as from `read_config(folder)`.
        budget: bytes of host memory to use in addition to the arrays.
        ignore: names of tensors to skip, with `*` for anything: `("classifier.*",)`.

    Returns:
        A pytree like `target`, as `sharded.init(params=)` takes it: of arrays, or `Padded` where a
        sharding does not divide the shape.

    Raises:
        ConfigError: no such files, or only pickled ones; tensors that are missing, of no parameter,
            misshaped, or present twice with different values. All at once, by both names.
        ValueError: a target without shardings.
        DamageError: a file that ends before its tensors do.
        CheckpointError: a file that cannot be read.

    """
    wanted = leaves_of(target)
    leaves = as_model_arrays(wanted)
    table = table_of(config)
    with SafetensorsFolder(folder) as tensors:
        mappings = table.mappings(leaves)
        found = join_codes(tensors, tensors.directory)
        located, mappings = locate_tensors(
            found, tensors.directory, table, mappings, leaves, ignore
        )
        mappings, new = _with_new_rows(table, mappings, located, tensors.directory)
        located |= new
        _warn_of_new_codes(wanted, mappings, located, tensors.directory)
        return read_mapped(target, mappings, located, budget, tensors.directory)


def locate_tensors(
    tensors: Mapping[str, StoredTensor],
    folder: Path,
    table: Table,
    mappings: Mapping[str, Sequence[TensorMapping]],
    leaves: Mapping[str, Any],
    ignore: Sequence[str],
) -> tuple[dict[str, StoredTensor], dict[str, list[TensorMapping]]]:
    """Finds the tensor of the files for each tensor of `mappings`: {name in the table: tensor}.

    `tensors`: those of the `folder`. Returns the mappings too, as the tensors are stored. Raises
    ConfigError with everything that misfits the `leaves` of the target.
    """
    dims = table.vocabulary()
    # every problem, so that one error lists them all: first the tensors of the files
    owners = {mapping.name: (path, mapping) for path, each in mappings.items() for mapping in each}
    assert len(owners) == sum(map(len, mappings.values())), "a tensor has one place"
    located, lines = _match_tensors(tensors, table, owners, ignore)
    # then the parameters of the target
    unknown = [path for path, each in mappings.items() if not each]
    lines += [
        f"ours {path}, {describe_array(leaves[path])}: no tensor is known for it"
        for path in unknown
    ]
    stored: dict[str, list[TensorMapping]] = {path: [] for path in mappings}
    for name, (path, mapping) in owners.items():
        leaf, tensor = leaves[path], located.get(name)
        # A kernel in codes is [O, I] for any module, also for Conv1D's [I, O].
        order = [dim for dim in mapping.dims if dim is not None]
        if isinstance(tensor, CodedTensor) and path.endswith("kernel") and order == [0, 1]:
            mapping = mapping.transpose
        stored[path].append(mapping)
        both = f"theirs {name}, ours {path}, {describe_array(leaf)}"
        if tensor is None:
            lines.append(f"{both}: missing in the files")
        elif tensor.shape != mapping.shape and not has_fewer_rows(tensor, mapping, dims.get(path)):
            lines.append(f"{both}: expected {list(mapping.shape)}, got {tensor}")
        elif not fits_dtype(tensor, leaf):
            lines.append(f"{both}: cannot be cast from {tensor}")
    fix = ""
    if unknown and split_lora(leaves)[1]:
        fix = "split_lora(target): import_weights reads its first part, import_adapters the second"
    raise_if_misfits(folder, lines, fix=fix)
    return located, stored


def _warn_of_new_codes(
    leaves: Mapping[str, Any],
    mappings: Mapping[str, Sequence[TensorMapping]],
    tensors: Mapping[str, StoredTensor],
    where: Path,
) -> None:
    """Warns of codes of a folder that are dequantized and quantized again."""
    lines, fix = [], ""
    for path, leaf in leaves.items():
        found = [tensors[each.name] for each in mappings[path]]
        coded = [each for each in found if isinstance(each, CodedTensor)]
        if not isinstance(leaf, QuantizedStruct) or not coded:
            continue
        if keeps_codes(tensors, mappings[path], leaf.blocks):
            continue
        base, block = leaf.blocks.base, coded[0].block
        own = f"{base.format} in blocks of {base.block}, scales in {base.scales}"
        lines.append(f"{path}: nf4 in blocks of {block}, scales in float32 -> {own}")
        fix = f'QuantizedBase("nf4", block={block}) copies codes, where rows have whole blocks '
        fix += "and all layers of a stack are in codes"
    if lines:
        what, got = "codes in 4 bits are dequantized and quantized again", first_lines(lines, SHOWN)
        warnings.warn(message(what, where=str(where), got=got, fix=fix), stacklevel=3)


def _with_new_rows(
    table: Table,
    mappings: Mapping[str, list[TensorMapping]],
    located: Mapping[str, StoredTensor],
    where: object,
) -> tuple[dict[str, list[TensorMapping]], dict[str, Any]]:
    """Adds the rows of tokens that the files lack: (mappings by path, {name: new rows})."""
    found, new, sizes = dict(mappings), {}, {}
    for path, dim in table.vocabulary().items():
        for mapping in mappings.get(path, ()):
            tensor = located[mapping.name]
            if has_fewer_rows(tensor, mapping, dim):
                found[path], rows = with_mean_rows(tensor, mapping, dim)
                new[of_new(mapping.name)] = rows
                sizes[path] = found[path][0].size[dim], mapping.size[dim]
    warn_of_new_rows(where, sizes)
    return found, new


def _match_tensors(
    tensors: Mapping[str, StoredTensor],
    table: Table,
    owners: Mapping[str, Any],
    ignore: Sequence[str],
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Matches the files' tensors with those of the table; a line for each that is no one's.

    The files may lack the table's prefix, and have its aliases. `owners`: {name in the table: (path
    in the target, mapping)}. `ignore`: patterns of names to leave out.
    """
    aliases, names = table.aliases(), table.names()
    located: dict[str, StoredTensor] = {}
    lines = []
    for name, tensor in tensors.items():
        # the names in the table that this one may stand for: itself, with the prefix, and those
        # that it is an alias of
        spellings = [name, table.prefix + name]
        if any(fnmatch.fnmatchcase(each, skip) for each in spellings for skip in ignore):
            continue
        candidates = [*spellings, *(aliases.get(each, each) for each in spellings)]
        owned = next((each for each in candidates if each in owners), None)
        # of no parameter in the target, the first one of a parameter, or another copy of it
        if owned is None:
            if not any(map(table.is_ignored, spellings)):
                entry = next((names[each] for each in spellings if each in names), None)
                reason = "no parameter of ours is known for it"
                if entry is not None:
                    reason = f"ours {entry.ours} is not in the target"
                lines.append(f"theirs {name}, {tensor}: {reason}")
        elif owned not in located:
            located[owned] = tensor
        elif not tensors_equal(located[owned], tensor):
            both = f"{owners[owned][0]}, with {located[owned].name}"
            lines.append(f"theirs {name}: one of ours, {both}, but they differ")
    return located, lines
