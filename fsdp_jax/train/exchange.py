"""Runs from other people's weights, and weights for other people from runs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax

from fsdp_jax.api import fully_shard
from fsdp_jax.checkpoint import CheckpointStore, Lease
from fsdp_jax.checkpoint.export import read_params, saved_params
from fsdp_jax.checkpoint.verify import steps_of
from fsdp_jax.data import Tokenizer, load_tokenizer
from fsdp_jax.data.tokenizer import FILE
from fsdp_jax.errors import ConfigError, human_bytes, message
from fsdp_jax.lora import merge, merged_paths
from fsdp_jax.mesh import make_mesh
from fsdp_jax.models import FAMILIES
from fsdp_jax.precision import Precision
from fsdp_jax.train.initial import CHECKPOINTS
from fsdp_jax.tree import flatten
from fsdp_jax.weights import Source, config_json, export_weights, import_weights, read_config
from fsdp_jax.weights.keys import CONFIG

Path_ = str | os.PathLike[str]


def import_run(folder: Path_, to: Path_, *, dtype: str) -> str:
    """Weights as on Hugging Face become step 0 of a new run, sharded over all devices; returns what to print.

    Args:
        folder: with `config.json` and safetensors; its tokenizer comes along.
        to: directory of the run, for `model.weights`.
        dtype: of the parameters, float32 or bfloat16.

    Raises:
        ConfigError: weights or a model that are none of ours, by name, or a directory that holds something.

    """
    source, target = Path(folder).expanduser(), Path(to)
    shape = read_config(source)
    if target.exists() and any(target.iterdir()):
        what, fix = "the directory holds something already", "choose another for --to"
        raise ConfigError(
            message(what, where=str(target), got=sorted(each.name for each in target.iterdir())[0], fix=fix)
        )
    family = next(family for family in FAMILIES.values() if isinstance(shape, family.config))
    sharded = fully_shard(
        lambda rngs: family.make(shape, rngs=rngs), optax.identity(), make_mesh(), precision=Precision(dtype)
    )
    params = import_weights(source, sharded.checkpoint_target().params, shape)
    metadata = {"config": "", "strategy": "full_shard", "imported": source.resolve().name}
    with Lease(target), CheckpointStore(target / CHECKPOINTS) as store:
        write_model(target, shape, load_tokenizer(source) if (source / FILE).is_file() else None)
        store.save(0, {"params": params}, data={}, metadata=metadata)
    leaves = flatten(params).values()
    size = human_bytes(sum(leaf.nbytes for leaf in leaves))
    count = sum(leaf.size for leaf in leaves)
    return f"{count:,} parameters, {size} in {len(leaves)} arrays, in {target}: for --model.weights {target}"


def write_model(output: Path, shape: Any, tokenizer: Tokenizer | None) -> None:
    """What an export needs beside the arrays: `config.json`, in Hugging Face's words, and the tokenizer's files."""
    (output / CONFIG).write_text(json.dumps(config_json(shape), indent=2) + "\n")
    for name, content in ({} if tokenizer is None else tokenizer.files).items():
        (output / name).write_bytes(content)


def export_model(output: Path_, to: Path_, *, step: int | None, dtype: str | None) -> str:
    """Verifies a step of a run, the newest if None, and writes it for Hugging Face; returns what to print.

    Adapters of LoRA are merged into what they adapt, one array at a time.

    Raises:
        ConfigError: no such step, no `config.json`, or a directory that is there already.
        DamageError, CheckpointError: it cannot be read or written.

    """
    run = Path(output)
    directory, found = steps_of(output)
    chosen = max(found) if step is None else step
    if chosen not in found:
        raise ConfigError(message("no such step", where="--step", expected=f"one of {found}", got=chosen))
    shape = read_config(run)
    with CheckpointStore(directory) as store:
        store.require_good(chosen)
        source, change = _merging(store, chosen)
        tokenizer = run if (run / FILE).is_file() else None
        done = export_weights(source, shape, to, dtype=dtype, tokenizer=tokenizer, change=change)
    return (
        f"{done.tensors} tensors of step {chosen}, {human_bytes(done.size)} in {len(done.files)} files, in "
        f"{done.directory}, for Hugging Face"
    )  # fmt: skip


def _merging(store: CheckpointStore, step: int) -> tuple[Source, Callable[[str, Any], Any] | None]:
    """The parameters without adapters, and what adds the adapters to them."""
    leaves, scale = saved_params(store, step), store.record(step)["metadata"].get("lora_scale")
    made_from = merged_paths(leaves)
    if scale is None:
        return Source(leaves, lambda paths: read_params(store, step, {path: leaves[path] for path in paths})), None
    kept = {path: leaves[path] for path in made_from}

    def change(path: str, kernel: Any) -> Any:
        _, *adapters = made_from[path]
        if not adapters:
            return kernel
        parts = dict(read_params(store, step, {each: leaves[each] for each in adapters}))
        return np.asarray(merge(kernel, *(parts[each] for each in adapters), scale=scale))

    return Source(kept, lambda paths: read_params(store, step, {path: kept[path] for path in paths})), change
