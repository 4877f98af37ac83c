"""Imports Hugging Face weights as a run, and exports runs in Hugging Face's layout."""

import os
import shutil
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import optax

from fsdp_jax.api import fully_shard
from fsdp_jax.checkpoint import CheckpointStore, Lease
from fsdp_jax.checkpoint.verify import choose_step, describe_export
from fsdp_jax.data import Tokenizer, load_tokenizer
from fsdp_jax.errors import ConfigError, human_bytes, message
from fsdp_jax.io.array_specs import array_bytes
from fsdp_jax.io.atomic import UNFINISHED, write_durably
from fsdp_jax.io.model_files import CONFIG, MODEL_FILES, TOKENIZER
from fsdp_jax.io.safetensors_writer import exported_dtype, require_new_directory
from fsdp_jax.models.families import family_of
from fsdp_jax.sharding.mesh import make_mesh
from fsdp_jax.sharding.patterns import search_any
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.step.average import Weights
from fsdp_jax.train import run_files
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.initial_weights import CHECKPOINTS, IS_IMPORT, verified_tokenizer
from fsdp_jax.tree import flatten
from fsdp_jax.weights import (
    Source,
    config_files,
    export_adapters,
    export_weights,
    from_store,
    import_weights,
    read_config,
    token_ids,
)
from fsdp_jax.weights.export import replace_tokenizer

AnyPath = str | os.PathLike[str]
LEASE = "lease.json"


def import_huggingface(folder: AnyPath, to: AnyPath, *, dtype: str) -> str:
    """Writes Hugging Face weights as step 0 of a new run: the command `fsdp-jax import`.

    The weights are sharded over all devices, and the folder's `MODEL_FILES` are copied too.
    `config.json` is written last: an import that was killed before starts over.

    Args:
        folder: has `config.json` and safetensors.
        to: an empty directory, or one that does not exist.
        dtype: to store the parameters in, such as `float32`.

    Returns:
        The line to print.

    Raises:
        ConfigError: a model that is not supported, with the key or tensor; a directory that is not
            empty.

    """
    # Read the configuration and the tokenizer; the target must be empty.
    source, target = Path(folder).expanduser(), Path(to).expanduser()
    model_config = read_config(source)
    family = family_of(model_config)
    has_tokenizer = family.task.is_text and (source / TOKENIZER).exists()
    tokenizer = load_tokenizer(source) if has_tokenizer else None
    require_empty(target)

    # the parameters, in the shards that a run would have
    sharded = fully_shard(
        lambda rngs: family.model(model_config, rngs=rngs),
        optax.identity(),
        make_mesh(),
        precision=Precision(dtype),
    )
    params = import_weights(source, sharded.checkpoint_target().params, model_config)

    # the run's directory
    metadata = {IS_IMPORT: source.resolve().name}
    if tokenizer is not None:
        metadata["tokenizer"] = tokenizer.digest
    write_imported(target, {"params": params}, metadata, model_config, tokenizer, like=source)
    return f"{describe_import(params, target)}: for --model.weights {target}"


def write_imported(
    target: Path,
    state: Any,
    metadata: dict[str, Any],
    model_config: Any,
    tokenizer: Tokenizer | None = None,
    *,
    like: Path | None = None,
    step: int = 0,
) -> None:
    """Writes imported parameters, or a whole state, as a step of a new run, `config.json` last.

    `like`: see `write_config_and_tokenizer`. Raises ConfigError for a directory that is not empty.
    """
    metadata = {"config": "", "strategy": "full_shard", **metadata}
    with Lease(target) as lease, lease.writing():
        require_empty(target)  # another process may have written meanwhile
        if (lease.anchor / CHECKPOINTS).exists():
            shutil.rmtree(lease.anchor / CHECKPOINTS)
        with CheckpointStore(target / CHECKPOINTS, lease=lease) as store:
            store.save(step, state, data={}, metadata=metadata)
        lease.require_held()
        write_config_and_tokenizer(lease.anchor, model_config, tokenizer, like=like)


def describe_import(params: Any, target: Path) -> str:
    """Formats what `fsdp-jax import` has written."""
    arrays = flatten(params).values()
    size = human_bytes(sum(array_bytes(array.shape, array.dtype) for array in arrays))
    count = (
        f"{sum(prod(array.shape) for array in arrays):,} parameters, {size} in {len(arrays)} arrays"
    )
    return f"{count}, in {target}"


def require_empty(target: Path) -> None:
    """Raises ConfigError unless the directory is empty, absent or an unfinished import's."""
    fix = "choose another for --to"
    if target.exists() and not target.is_dir():
        raise ConfigError("not a directory", where="--to", got=str(target), fix=fix)
    names = {each.name for each in target.iterdir()} if target.exists() else set()
    unfinished = {LEASE, CHECKPOINTS, *MODEL_FILES} - {CONFIG}
    unfinished |= {name + UNFINISHED for name in MODEL_FILES}
    others = sorted(names - unfinished)
    if not others and CHECKPOINTS in names and not _holds_only_imports(target / CHECKPOINTS):
        others = [CHECKPOINTS]
    if others:
        raise ConfigError("the directory is not empty", where=str(target), got=others[0], fix=fix)


def _holds_only_imports(directory: Path) -> bool:
    """Tells whether imports wrote all that a folder of checkpoints holds, if anything."""
    with CheckpointStore(directory) as store:
        imported = [IS_IMPORT in store.record(step)["metadata"] for step in store.steps()]
        return all(imported) and not store.foreign()


def write_config_and_tokenizer(
    output: Path, model_config: Any, tokenizer: Tokenizer | None, *, like: Path | None = None
) -> None:
    """Writes `config.json` and the tokenizer's files, if there is one, to a run's directory.

    `like`: the folder that the weights are from; see `config_json`. Warns where its ids do not end
    a text as the tokenizer does.
    """
    if tokenizer is not None and like is not None:
        _warn_of_other_end(tokenizer, like)
    files = config_files(model_config, tokens=_special_token_ids(tokenizer, like), like=like)
    if tokenizer is not None:
        files = replace_tokenizer(files, tokenizer.files)
    for name, content in files.items():
        write_durably(output / name, content)


def _warn_of_other_end(tokenizer: Tokenizer, like: Path) -> None:
    """Warns if the `config.json` of weights has other ids that end a text than their tokenizer."""
    stated: Any = token_ids(like).get("eos_token_id", tokenizer.end)
    if tokenizer.end is not None and tokenizer.end not in np.atleast_1d(stated):
        warnings.warn(
            message(
                "programs may not stop where this model does",
                where=f"{like / CONFIG}: eos_token_id",
                expected=f"{tokenizer.end}, with which the tokenizer ends a text",
                got=stated,
                fix="add it there and in generation_config.json, or to those of the export",
            ),
            stacklevel=2,
        )


def _special_token_ids(tokenizer: Tokenizer | None, like: Path | None) -> dict[str, int]:
    """Lists the tokenizer's {bos_token_id, eos_token_id}, without those that it does not have.

    {} where the `config.json` in `like` has an eos_token_id, or there is no tokenizer.
    """
    if tokenizer is None or (like is not None and "eos_token_id" in token_ids(like)):
        return {}
    begin = tokenizer.begin[-1] if tokenizer.begin else None
    ids = {"bos_token_id": begin, "eos_token_id": tokenizer.end}
    return {name: token for name, token in ids.items() if token is not None}


def export_huggingface(
    output: AnyPath,
    to: AnyPath,
    *,
    step: int | None,
    dtype: str | None,
    weights: Weights = "params",
) -> str:
    """Writes a verified step of a run, the newest if None, as a Hugging Face folder.

    LoRA adapters are merged into their kernels, one tensor at a time, in float32, and rounded once
    to the dtype that is written: the kernel's own where `dtype` is None. In bfloat16, with 8
    significant bits, what an adapter adds to an element is lost where it is below 1/512 of that
    element, as much of it often is; float32 keeps it, whatever dtype the frozen kernels have.

    Returns what to print. Raises ConfigError for an unknown dtype or step, no `config.json`, or a
    directory that exists, and CheckpointError for what cannot be read or written.
    """
    run, target = Path(output).expanduser(), Path(to).expanduser()
    exported_dtype(np.dtype("float32"), dtype, "--dtype")
    require_new_directory(target)
    directory, chosen = choose_step(run, step)
    model_config = read_config(run)
    is_text = family_of(model_config).task.is_text
    tokenizer = verified_tokenizer(run) if is_text else None
    tokens = _special_token_ids(tokenizer, run)
    with CheckpointStore(directory) as store:
        store.require_good(chosen)
        scale = store.record(chosen)["metadata"].get("lora_scale")
        source = from_store(store, chosen, weights, scale=scale)
        done = export_weights(source, model_config, target, dtype=dtype, tokens=tokens, like=run)
    return f"{describe_export(chosen, done)}, for Hugging Face"


def export_peft(
    output: AnyPath,
    to: AnyPath,
    *,
    step: int | None,
    dtype: str | None,
    weights: Weights = "params",
    base: str | None = None,
) -> str:
    """Writes the adapters of a verified step of a run, the newest if None, in PEFT's format.

    `base`: name or path of the weights below them; by default `model.weights` of the run, if it is
    a folder in Hugging Face's layout.

    Returns what to print. Raises ConfigError as `export_huggingface`, for a run without adapters,
    and for one that trained other parameters too, which PEFT's format has in other forms.
    """
    run, target = Path(output).expanduser(), Path(to).expanduser()
    exported_dtype(np.dtype("float32"), dtype, "--dtype")
    require_new_directory(target)
    directory, chosen = choose_step(run, step)
    model_config = read_config(run)
    with CheckpointStore(directory) as store:
        store.require_good(chosen)
        source = from_store(store, chosen, weights)
        scale = store.record(chosen)["metadata"].get("lora_scale")
        if scale is None:
            raise ConfigError(
                "a run without adapters",
                where="--format",
                got="peft",
                fix="--format huggingface",
            )
        config = load_config(run / run_files.CONFIG)
        _require_only_adapters(config.lora.trainable, source)
        if base is None:
            base = config.model.weights
            if base is not None and (Path(base).expanduser() / CHECKPOINTS).is_dir():
                base = None  # the directory of a run, which PEFT cannot load
        done = export_adapters(
            source,
            model_config,
            target,
            scale=scale,
            base=base,
            dtype=dtype,
            tokenizer=run if verified_tokenizer(run) is not None else None,
        )
    return f"{describe_export(chosen, done)}, adapters of {base or 'no stated base (--base)'}"


def _require_only_adapters(trainable: Sequence[str], source: Source) -> None:
    """Raises ConfigError if `lora.trained` names parameters that were trained beside adapters."""
    trained = [path for path in source.leaves if trainable and search_any(trainable, path)]
    if trained:
        raise ConfigError(
            "parameters were trained beside the adapters, and are not written in PEFT's format",
            where="lora.trained",
            got=", ".join(trained),
            fix="--format huggingface, which merges the adapters",
        )
