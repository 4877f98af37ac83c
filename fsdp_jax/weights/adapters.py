"""LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Of a Linear of theirs, in whatever order its weight is, `lora_A` is [R, I] and `lora_B` [O, R]: the
transposes of our `lora_a` and `lora_b`. Names follow from the weight table of the family, with
`base_model.model.` before them. Where a family fuses projections (GPT-2's and CaiT's qkv), so do
transformers and timm, and one adapter is for all three on both sides.
"""

import json
import math
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from fsdp_jax.checkpoint.arrays import leaves_of
from fsdp_jax.checkpoint.export import raise_if_misfits, read_mapped
from fsdp_jax.errors import ConfigError, first_lines
from fsdp_jax.io.array_specs import describe_array
from fsdp_jax.io.json_text import read_json_object
from fsdp_jax.io.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fsdp_jax.io.safetensors import SafetensorsFolder, StoredTensor
from fsdp_jax.io.safetensors_writer import Exported, exported_dtype, write_weights
from fsdp_jax.io.sharded_read import STAGING_BYTES
from fsdp_jax.io.tensor_mapping import TensorMapping
from fsdp_jax.lora import KERNEL, A, Adapters, B, merged_paths
from fsdp_jax.models.families import family_of
from fsdp_jax.models.flops import parameter_shapes
from fsdp_jax.models.huggingface.config_json import Json
from fsdp_jax.models.huggingface.table import LINEAR, Entry, Table
from fsdp_jax.tree import SEPARATOR, PyTree
from fsdp_jax.weights.export import Source, tensor_values, tokenizer_files
from fsdp_jax.weights.importer import locate_tensors
from fsdp_jax.weights.model_config import table_of

PREFIX = "base_model.model."
"""What PEFT writes before the names of a model's modules."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
SHOWN = 10  # names listed before the rest is only counted

_TASKS = {"text": "CAUSAL_LM", "text to text": "SEQ_2_SEQ_LM"}  # of others PEFT has none
_OFF: tuple[Any, ...] = (None, False, "", [], {})
# Keys of a configuration by what becomes of them: read, without an effect on what saved adapters
# compute, and those with the values that are known.
_READ = ("r", "lora_alpha", "use_rslora")
_HARMLESS = (
    "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "peft_version", "target_modules", "exclude_modules", "fan_in_fan_out", "lora_dropout",
    "layers_to_transform", "layers_pattern", "eva_config", "megatron_core", "runtime_config",
    "qalora_group_size", "loftq_config", "corda_config", "lora_ga_config",
)  # fmt: skip
# Other initial values than these change the weights below the adapters too.
_KNOWN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
_MERGE = "merge it: PeftModel.merge_and_unload(), and start from the weights that it makes"


def export_adapters(
    source: Source,
    config: Any,
    folder: str | os.PathLike[str],
    *,
    scale: float,
    base: str | None = None,
    dtype: str | None = "float32",
    tokenizer: str | os.PathLike[str] | None = None,
) -> Exported:
    """Writes a new folder that `PeftModel.from_pretrained(model, folder)` loads.

    Args:
        source: `from_store(store, step)` or `from_arrays(sharded.to_checkpoint(state).params)`. Of
            its parameters only adapters are read: what else was trained (`with_lora(trainable=)`)
            is not written.
        config: of the model, of any family, such as a LlamaConfig.
        folder: to be created; it appears under its name when all of it is written.
        scale: alpha / rank, as it was trained with: `with_lora(...).scale`.
        base: name or path of the weights below the adapters, for `adapter_config.json`.
        dtype: of the tensors; None keeps each one's.
        tokenizer: a `tokenizer.json`, or a folder with one, to copy with the files beside it.

    Raises:
        ConfigError: no adapters, of several ranks, or of modules that the family's tensors do not
            have; the folder exists already, an unknown dtype, or no such tokenizer.
        CheckpointError, DamageError: it cannot be written, or the source cannot be read.

    """
    paths = [path for parts in merged_paths(source.leaves).values() for path in parts[1:]]
    if not paths:
        raise ConfigError(
            "no adapters among the parameters",
            where="export_adapters",
            expected=f"{A} and {B} beside kernels, as with_lora makes them",
            fix="export_weights; or a source that was made without a scale, which merges them",
        )
    leaves = {path: source.leaves[path] for path in paths}
    weights = table_of(config)
    table = adapter_table(weights)
    mappings = table.mappings(leaves)
    rank = _common_rank(leaves)
    _check_modules(table, mappings, leaves, config, rank)
    outlines = {
        PREFIX + mapping.name: jax.ShapeDtypeStruct(
            mapping.shape, exported_dtype(np.dtype(leaves[path].dtype), dtype, "dtype")
        )
        for path, each in mappings.items()
        for mapping in each
    }
    content = _config_json(weights, mappings, rank, scale)
    content |= {"task_type": _TASKS.get(family_of(config).task.name)}
    content |= {"base_model_name_or_path": base}
    others = {ADAPTER_CONFIG: (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()}
    if tokenizer is not None:
        others |= tokenizer_files(Path(tokenizer))
    return write_weights(
        folder,
        outlines,
        tensor_values(source, mappings),
        file_bytes=sys.maxsize,  # PEFT reads one file
        metadata={"format": "pt"},
        others=others,
        single=ADAPTER_WEIGHTS,
    )


def read_adapters(folder: str | os.PathLike[str], config: Any) -> Adapters:
    """Reads rank, alpha and targets of a folder in PEFT's format, arguments of `with_lora`.

    With rsLoRA, whose scale is lora_alpha / sqrt(r), alpha is lora_alpha * sqrt(r). The targets are
    those that the file has tensors of. Dropout is a setting of a training run, and is not read.

    Args:
        folder: with `adapter_config.json` and `adapter_model.safetensors`.
        config: of the model, of any family, such as a LlamaConfig.

    Raises:
        ConfigError: no such files, a configuration that computes what we do not implement, each key
            by name, or tensors of no Linear that the family has.
        DamageError: a file that is damaged.

    """
    rank, alpha = _read_settings(Path(folder))
    weights = table_of(config)
    table = adapter_table(weights)
    with _open_tensors(folder, weights) as tensors:
        known = table.names()
        unknown = [f"theirs {name}, {tensors[name]}" for name in tensors if name not in known]
        lines = [f"{line}: no Linear of ours is known for it" for line in unknown]
        raise_if_misfits(folder, lines, fix=_MERGE)
        targets = _targets(table, tensors, config, folder)
    return Adapters(rank=rank, alpha=alpha, targets=targets)


def stated_base(folder: str | os.PathLike[str]) -> str | None:
    """Reads the name or path of the weights that adapters were made for; None if it has none."""
    return cast(str | None, _read_config(Path(folder)).get("base_model_name_or_path"))


def import_adapters(
    folder: str | os.PathLike[str],
    target: PyTree,
    config: Any,
    *,
    scale: float,
    budget: int = STAGING_BYTES,
) -> PyTree:
    """Reads a folder in PEFT's format into the shards of adapters.

    Each process reads what its devices need, once; tensors are cast to the target's dtypes.

    Args:
        folder: with `adapter_config.json` and `adapter_model.safetensors`.
        target: the adapters' part of a target, whose leaves have shape, dtype and sharding:
            `split_lora(sharded.checkpoint_target().params)[1]`.
        config: of the model, of any family, such as a LlamaConfig.
        scale: of the adapters of the target, `with_lora(...).scale`.
        budget: bytes of host memory to use in addition to the arrays.

    Returns:
        A pytree like `target`, to be joined with the other parameters by `join_lora`.

    Raises:
        ConfigError: as `read_adapters`; another rank or scale than the target's; adapters that one
            of both lacks, all at once, by both names.
        ValueError: a target without shardings.
        DamageError: a file that is damaged, or ends before its tensors do.
        CheckpointError: a file that cannot be read.

    """
    rank, alpha = _read_settings(Path(folder))
    leaves = leaves_of(target)
    where = Path(folder) / ADAPTER_CONFIG
    for what, expected, got in (
        ("rank", _common_rank(leaves), rank),
        ("scale", scale, alpha / rank),
    ):
        if not math.isclose(expected, got):
            raise ConfigError(
                f"adapters of another {what}",
                where=str(where),
                expected=f"{what} {expected}",
                got=f"{what} {got}",
                fix="make the model with the rank and alpha that read_adapters(folder) returns",
            )
    weights = table_of(config)
    table = adapter_table(weights)
    with _open_tensors(folder, weights) as tensors:
        mappings = table.mappings(leaves)
        located, mappings = locate_tensors(tensors, Path(folder), table, mappings, leaves, ())
        return read_mapped(target, mappings, located, budget, Path(folder))


def adapter_table(table: Table) -> Table:
    """Makes the table of the adapters that a family's Linears can have, without the `PREFIX`.

    They are named after modules, in transformers 5's names.
    """
    entries: list[Entry] = []
    for entry in table.entries:
        ours, name = entry.ours.rsplit(SEPARATOR, 1) if SEPARATOR in entry.ours else ("", "")
        if name != KERNEL or len(entry.dims) > 2:  # norms, tables, convolutions
            continue
        theirs = table.module_of(entry.theirs)
        assert entry.rows is None or entry.rows[0] == 1, "only outputs are padded"
        for own, lora, rows in ((A, LORA_A, None), (B, LORA_B, entry.rows)):
            path = f"{ours}/{own}"
            entries.append(Entry(path, theirs + lora, LINEAR, rows, depth=entry.depth))
    return replace(table, entries=tuple(entries), ignored=(), modules=())


def linear_paths(config: Any) -> list[str]:
    """Lists the paths of the Linears that adapters may be of, in a model of this configuration."""
    paths = []
    for entry in adapter_table(table_of(config)).entries:
        path, _, own = entry.ours.rpartition(SEPARATOR)
        if own == A and config.scan_layers:
            paths.append(path.replace("*/", ""))
        elif own == A:
            paths += [path.replace("*", str(block)) for block in range(entry.depth or 1)]
    return paths


def _common_rank(leaves: Mapping[str, Any]) -> int:
    """Finds the rank of adapters. Raises ConfigError if they have several."""
    ranks = {path: leaf.shape[-1] for path, leaf in leaves.items() if path.endswith(A)}
    if not ranks:
        raise ConfigError(
            "no adapters in the target",
            where="import_adapters",
            got=first_lines(list(leaves), SHOWN),
            fix="split_lora(sharded.checkpoint_target().params)[1], of a model of with_lora",
        )
    if len(set(ranks.values())) != 1:
        raise ConfigError(
            "adapters of one rank are needed",
            where="adapters",
            got=first_lines([f"{path}: rank {rank}" for path, rank in ranks.items()], SHOWN),
            fix="one rank for all; or export_weights of from_arrays(params, scale=), merged",
        )
    return int(next(iter(ranks.values())))


def _check_modules(
    table: Table,
    mappings: Mapping[str, Sequence[TensorMapping]],
    leaves: Mapping[str, Any],
    config: Any,
    rank: int,
) -> None:
    """Raises ConfigError unless the adapters are of Linears of the family, with their shapes."""
    # The shapes that all adapters of a model of this configuration would have.
    shapes = parameter_shapes(family_of(config).model, config)
    whole = {}
    for path, shape in shapes.items():
        module, _, name = path.rpartition(SEPARATOR)
        if name == KERNEL:
            *stack, inputs, outputs = shape
            whole[f"{module}/{A}"] = jax.ShapeDtypeStruct((*stack, inputs, rank), np.float32)
            whole[f"{module}/{B}"] = jax.ShapeDtypeStruct((*stack, rank, outputs), np.float32)
    model = table.mappings(whole)
    expected = {mapping.name: mapping.shape for each in model.values() for mapping in each}
    lines = []
    for path, each in mappings.items():
        own = f"ours {path}, {describe_array(leaves[path])}"
        if not each:
            lines.append(f"{own}: PEFT's format has no tensor for it")
        for mapping in each:
            wanted, got = list(expected.get(mapping.name, ())), list(mapping.shape)
            if not wanted:
                lines.append(f"{own}, theirs {mapping.name}: a block that the config does not have")
            elif wanted != got:
                lines.append(f"{own}, theirs {mapping.name}: expected {wanted}, got {got}")
    raise_if_misfits("export_adapters", lines, fix="the configuration of the model")


def _config_json(
    weights: Table, mappings: Mapping[str, Sequence[TensorMapping]], rank: int, scale: float
) -> Json:
    """Makes the content of `adapter_config.json`, without the task and the base.

    `weights`: the family's table. `mappings`: of the adapters.
    """
    names = [mapping.name for each in mappings.values() for mapping in each]
    adapted = {name.removesuffix(LORA_A) for name in names if name.endswith(LORA_A)}
    entries = {weights.module_of(name): entry for name, entry in weights.names().items()}
    alpha = scale * rank
    if round(alpha) / rank == scale:
        alpha = round(alpha)
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": _target_modules(adapted, entries),
        # GPT-2's Conv1D, whose weight is [in, out].
        "fan_in_fan_out": any(entries[name].dims == () for name in adapted),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "revision": None,
    }


def _target_modules(adapted: Collection[str], modules: Collection[str]) -> list[str]:
    """Chooses the shortest ends of names by which PEFT finds the adapted modules and no others."""
    chosen: dict[str, None] = {}
    refused: set[str] = set()
    for module in sorted(adapted):
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            end = ".".join(parts[-count:])
            if end in refused:
                continue
            if end in chosen or all(
                other in adapted for other in modules if f".{other}".endswith(f".{end}")
            ):
                chosen[end] = None
                break
            refused.add(end)
    return sorted(chosen)


def _read_config(folder: Path) -> dict[str, Any]:
    """Reads `adapter_config.json`."""
    return read_json_object(
        folder / ADAPTER_CONFIG,
        "no adapters there",
        fix="a folder of PEFT; of a run, fsdp-jax export RUN --to DIR --format peft makes one",
    )


def _read_settings(folder: Path) -> tuple[int, float]:
    """Reads (rank, alpha) of `adapter_config.json`; the scale is alpha / rank.

    Raises ConfigError with every key that may change what is computed, and is not implemented.
    """
    where = folder / ADAPTER_CONFIG
    content = _read_config(folder)
    lines = []
    for key, known in _KNOWN.items():
        if content.get(key, known[0]) not in known:
            choice = " or ".join(json.dumps(each) for each in known)
            lines.append(f"{key}: {json.dumps(content[key])} is not implemented, only {choice}")
    read = {*_READ, *_HARMLESS, *_KNOWN}
    lines += [
        f"{key}: {json.dumps(value)} is not implemented"
        for key, value in content.items()
        if key not in read and value not in _OFF
    ]
    rank, alpha = content.get("r"), content.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        lines.append(f"r: {json.dumps(rank)} is not a rank")
    if type(alpha) not in (int, float) or not 0 < cast(float, alpha) < math.inf:
        lines.append(f"lora_alpha: {json.dumps(alpha)} is not a number above 0")
    if lines:
        raise ConfigError(
            "adapters that are not supported",
            where=str(where),
            got=first_lines(lines, SHOWN),
            fix=_MERGE,
        )
    rank, alpha = cast(int, rank), float(cast(float, alpha))
    if content.get("use_rslora"):
        return rank, alpha * math.sqrt(rank)
    return rank, alpha


@contextmanager
def _open_tensors(
    folder: str | os.PathLike[str], weights: Table
) -> Iterator[dict[str, StoredTensor]]:
    """Opens the tensors of a folder, by their names in the `adapter_table` where it has them.

    `weights`: the family's table. Names of modules in older transformers are those of its tensors.
    """
    names = adapter_table(weights).names()
    older = adapter_table(replace(weights, modules=())).names()
    new_name = dict(zip(older, names, strict=True))
    with SafetensorsFolder(folder, ADAPTER_WEIGHTS) as tensors:
        found: dict[str, StoredTensor] = {}
        for name, tensor in tensors.items():
            bare = name.removeprefix(PREFIX)
            # Saved from the model without its head, the name lacks the table's prefix.
            spellings = (bare, weights.prefix + bare)
            known = [new_name.get(each, each) for each in spellings]
            own = next((each for each in known if each in names), bare)
            if own in found:
                raise ConfigError(
                    "two tensors of one adapter",
                    where=str(folder),
                    got=f"{found[own].name} and {name}",
                    fix="save it with PEFT again, or remove one of them",
                )
            found[own] = tensor
        yield found


def _targets(
    table: Table, tensors: Collection[str], config: Any, folder: str | os.PathLike[str]
) -> tuple[str, ...]:
    """Makes patterns of our modules that a file has adapters of.

    Raises ConfigError where only some of stacked blocks have them, or one of two tensors is there.
    """
    targets, missing, uneven = [], [], []
    for entry in table.entries:
        present = [name in tensors for name in entry.names()]
        path, _, own = entry.ours.rpartition(SEPARATOR)
        if not any(present):
            continue
        partner = {A: (LORA_A, LORA_B), B: (LORA_B, LORA_A)}[own]
        names = [name for name, there in zip(entry.names(), present, strict=True) if there]
        missing += [
            f"theirs {other}: missing beside {name}"
            for name in names
            if (other := name.removesuffix(partner[0]) + partner[1]) not in tensors
        ]
        if own == B:
            continue
        if all(present):
            # Whether the blocks are stacked or not.
            pattern = re.escape(path).replace(r"\*/", r"(\d+/)?")
            targets.append(f"^{pattern}$")
        elif config.scan_layers:
            count = len(present) - len(names)
            uneven.append(
                f"ours {path.replace('*/', '')}: {count} of {len(present)} blocks have no "
                "adapter, and the blocks are stacked (scan_layers)"
            )
        else:
            blocks = [str(block) for block, there in enumerate(present) if there]
            targets += [f"^{re.escape(path.replace('*', block))}$" for block in blocks]
    raise_if_misfits(folder, missing, fix="copy or download the folder again")
    raise_if_misfits(folder, uneven, fix="model.scan_layers: false (scan_layers=False in Python)")
    return tuple(targets)
