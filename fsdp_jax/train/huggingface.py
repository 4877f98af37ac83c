"""Runs from other people's weights, and weights for other people from runs."""

import os
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import optax

from fsdp_jax.api import fully_shard
from fsdp_jax.checkpoint import CheckpointStore, Lease
from fsdp_jax.checkpoint.export import read_params, saved_params
from fsdp_jax.checkpoint.verify import steps_of
from fsdp_jax.data import Tokenizer, load_tokenizer
from fsdp_jax.data.tokenizer import FILE, SETTINGS
from fsdp_jax.errors import ConfigError, human_bytes, message
from fsdp_jax.io.boxes import Box, box_view
from fsdp_jax.io.safetensors_writer import exported_dtype, new_directory
from fsdp_jax.lora import merge, merged_paths
from fsdp_jax.models import FAMILIES, Family
from fsdp_jax.models.huggingface.config_json import CONFIG
from fsdp_jax.models.huggingface.vit import IMAGES
from fsdp_jax.sharding.mesh import make_mesh
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.train.initial_weights import CHECKPOINTS
from fsdp_jax.tree import flatten
from fsdp_jax.weights import (
    Source,
    config_files,
    export_weights,
    from_store,
    import_weights,
    read_config,
    token_ids,
)
from fsdp_jax.weights.export import Change

AnyPath = str | os.PathLike[str]
IMPORTED = ("float32", "bfloat16")
IS_IMPORT = "imported"  # in the metadata of a step: the name of the folder that it comes from
WRITING = ".writing"  # the ending of a small file that is being written
LEASE = "lease.json"


def import_run(folder: AnyPath, to: AnyPath, *, dtype: str) -> str:
    """Weights as on Hugging Face become step 0 of a new run, sharded over all devices; returns what
    to print.

    `config.json` is written last: an import that was killed before is begun anew.

    Args:
        folder: with `config.json` and safetensors; its tokenizer comes along.
        to: directory of the run, for `model.weights`.
        dtype: of the parameters, float32 or bfloat16.

    Raises:
        ConfigError: another dtype, weights or a model that are none of ours, by name, or a
            directory that holds something.

    """
    if dtype not in IMPORTED:
        expected = " or ".join(IMPORTED)
        raise ConfigError(
            message("not a dtype to train in", where="--dtype", expected=expected, got=dtype)
        )
    source, target = Path(folder).expanduser(), Path(to).expanduser()
    shape = read_config(source)
    family = _family_of(shape)
    tokenizer = load_tokenizer(source) if _has_tokenizer(source, family) else None
    tokens = _known_ids(source, family)
    _require_free(target)
    sharded = fully_shard(
        lambda rngs: family.make(shape, rngs=rngs),
        optax.identity(),
        make_mesh(),
        precision=Precision(dtype),
    )
    params = import_weights(source, sharded.checkpoint_target().params, shape)
    metadata = {"config": "", "strategy": "full_shard", IS_IMPORT: source.resolve().name}
    with Lease(target):
        _require_free(target)  # another may have been here meanwhile
        if (target / CHECKPOINTS).exists():
            shutil.rmtree(target / CHECKPOINTS)
        with CheckpointStore(target / CHECKPOINTS) as store:
            store.save(0, {"params": params}, data={}, metadata=metadata)
        _write(target, shape, tokenizer, tokens)
    leaves = flatten(params).values()
    size = human_bytes(sum(leaf.nbytes for leaf in leaves))
    count = sum(leaf.size for leaf in leaves)
    return f"{count:,} parameters, {size} in {len(leaves)} arrays, in {target}: for --model.weights {target}"


def _require_free(target: Path) -> None:
    """Raises ConfigError unless there is nothing, or what an import left that did not come to its
    end.
    """
    fix = "choose another for --to"
    if target.exists() and not target.is_dir():
        raise ConfigError(message("not a directory", where="--to", got=str(target), fix=fix))
    found = {each.name for each in target.iterdir()} if target.exists() else set()
    begun = {
        LEASE,
        CHECKPOINTS,
        FILE,
        SETTINGS,
        IMAGES,
        *(name + WRITING for name in (FILE, SETTINGS, IMAGES, CONFIG)),
    }
    others = sorted(found - begun)
    if not others and CHECKPOINTS in found and not _is_import(target / CHECKPOINTS):
        others = [CHECKPOINTS]
    if others:
        what = "the directory holds something already"
        raise ConfigError(message(what, where=str(target), got=others[0], fix=fix))


def _is_import(directory: Path) -> bool:
    """Whether all checkpoints in it are imported ones; one that is not finished is none."""
    with CheckpointStore(directory) as store:
        imported = [IS_IMPORT in store.record(step)["metadata"] for step in store.steps()]
        return all(imported) and not store.foreign()


def write_model(output: Path, shape: Any, tokenizer: Tokenizer | None) -> None:
    """What an export needs beside the arrays: `config.json`, in Hugging Face's words, and the
    tokenizer's files.
    """
    _write(output, shape, tokenizer, _ids_of(tokenizer))


def _write(output: Path, shape: Any, tokenizer: Tokenizer | None, tokens: dict[str, Any]) -> None:
    files = ({} if tokenizer is None else dict(tokenizer.files)) | config_files(
        shape, tokens=tokens
    )
    for name, content in files.items():
        beside = output / (name + WRITING)
        beside.write_bytes(content)
        beside.replace(output / name)


def _ids_of(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """How a text begins and ends, as `config.json` names it; what is not known is left out."""
    if tokenizer is None:
        return {}
    known = {
        "bos_token_id": tokenizer.begin[-1] if tokenizer.begin else None,
        "eos_token_id": tokenizer.end,
    }
    return {name: token for name, token in known.items() if token is not None}


def _known_ids(folder: Path, family: Family) -> dict[str, Any]:
    """What `config.json` says, which `write_model` wrote by the tokenizer beside it; else what that
    tokenizer says.
    """
    found = {} if family.task == "images" else token_ids(folder)
    if "eos_token_id" in found or not _has_tokenizer(folder, family):
        return found
    return found | _ids_of(load_tokenizer(folder))


def _has_tokenizer(folder: Path, family: Family) -> bool:
    return family.task != "images" and (folder / FILE).is_file()


def _family_of(shape: Any) -> Family:
    return next(family for family in FAMILIES.values() if isinstance(shape, family.config))


def export_model(output: AnyPath, to: AnyPath, *, step: int | None, dtype: str | None) -> str:
    """Verifies a step of a run, the newest if None, and writes it for Hugging Face; returns what to
    print.

    Adapters of LoRA are merged into what they adapt, one tensor at a time, in float32, and rounded
    once to the dtype that is written: the kernel's own where `dtype` is None. In bfloat16, 8
    significant bits, what an adapter adds to an element is lost where it is below 1/512 of that
    element, and much of it often is; float32 keeps it, whatever the frozen kernels rest in.

    Raises:
        ConfigError: a dtype that is none, no such step, no `config.json`, or a directory that is
            there already.
        DamageError, CheckpointError: it cannot be read or written.

    """
    run, target = Path(output).expanduser(), Path(to).expanduser()
    exported_dtype(np.dtype("float32"), dtype, "--dtype")
    new_directory(target)
    directory, found = steps_of(run)
    chosen = max(found) if step is None else step
    if chosen not in found:
        raise ConfigError(
            message("no such step", where="--step", expected=f"one of {found}", got=chosen)
        )
    shape = read_config(run)
    family = _family_of(shape)
    tokens = _known_ids(run, family)
    tokenizer = run if _has_tokenizer(run, family) else None
    with CheckpointStore(directory) as store:
        store.require_good(chosen)
        source, change = _merging(store, chosen)
        done = export_weights(
            source, shape, target, dtype=dtype, tokenizer=tokenizer, tokens=tokens, change=change
        )
    return (
        f"{done.tensors} tensors of step {chosen}, {human_bytes(done.size)} in {len(done.files)} files, in "
        f"{done.directory}, for Hugging Face"
    )


def _merging(store: CheckpointStore, step: int) -> tuple[Source, Change | None]:
    """The parameters without adapters, and what adds the adapters to them."""
    leaves, scale = saved_params(store, step), store.record(step)["metadata"].get("lora_scale")
    if scale is None:
        return from_store(store, step), None
    made_from = merged_paths(leaves)
    kept = {path: leaves[path] for path in made_from}

    @lru_cache(maxsize=1)  # the layers of a kernel follow one another
    def adapters(path: str) -> list[np.ndarray]:
        parts = made_from[path][1:]
        found = dict(read_params(store, step, {each: leaves[each] for each in parts}))
        return [found[each] for each in parts]

    def change(path: str, box: Box, kernel: np.ndarray) -> np.ndarray:
        if len(made_from[path]) == 1:
            return kernel
        a, b = adapters(path)
        *stack, inputs, outputs = box
        rank = (0, a.shape[-1])
        a, b = box_view(a, (*stack, inputs, rank)), box_view(b, (*stack, rank, outputs))
        return np.asarray(merge(kernel.astype(np.float32), a, b, scale=scale))

    def read(paths: Sequence[str]) -> Any:
        return read_params(store, step, {path: kept[path] for path in paths})

    return Source(kept, read), change
