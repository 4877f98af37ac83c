"""Full state dicts: the parameters of a sharded checkpoint as safetensors files, and back onto any
mesh.

SafetensorsFolder have their paths here for names; `fsdp_jax.weights` does the same with the names that others
give them.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from fsdp_jax.checkpoint.arrays import leaves_of
from fsdp_jax.checkpoint.store import CheckpointStore
from fsdp_jax.errors import CheckpointError, ConfigError, message
from fsdp_jax.io.array_specs import array_bytes, describe, parse_description
from fsdp_jax.io.safetensors import SafetensorsFolder, StoredTensor
from fsdp_jax.io.safetensors_writer import (
    Exported,
    TensorSpec,
    batches,
    exported_dtype,
    write_weights,
)
from fsdp_jax.io.sharded_read import STAGING_BYTES, ShardReader
from fsdp_jax.io.tensor_mapping import TensorMapping
from fsdp_jax.tree import PyTree

PARAMS = "params/"
FILE_BYTES = 256 << 20
SHOWN = 20  # differences listed before the rest is only counted


def export_params(
    store: CheckpointStore,
    step: int,
    directory: str | os.PathLike[str],
    *,
    dtype: str | None = "float32",
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Writes a checkpoint's parameters to a new directory, file by file, whatever mesh saved them.

    Args:
        store: the run's checkpoints.
        step: which of them.
        directory: to be made; it appears under its name when all of it is written.
        dtype: of the floating-point tensors; None leaves each as it was trained. Others always stay
            as they are.
        file_bytes: tensors of one file, and so the host memory it takes; a larger tensor gets a
            file of its own.

    Raises:
        ConfigError: the directory is there already, or the dtype is none of `DTYPES`.
        ValueError: no such step. DamageError, CheckpointError: it cannot be read.

    """
    saved = saved_params(store, step)
    wanted = {
        path: jax.ShapeDtypeStruct(leaf.shape, exported_dtype(leaf.dtype, dtype, "--dtype"))
        for path, leaf in saved.items()
    }
    outlines = [TensorSpec(path, tuple(leaf.shape), leaf.dtype) for path, leaf in wanted.items()]
    values = (value for _, value in read_params(store, step, wanted, batch=file_bytes))
    return write_weights(
        directory, outlines, values, file_bytes=file_bytes, metadata={"format": "fsdp_jax"}
    )


def saved_params(store: CheckpointStore, step: int) -> dict[str, jax.ShapeDtypeStruct]:
    """{path: shape and dtype} of a checkpoint's parameters. Raises ValueError if there is no such
    step.
    """
    leaves = {
        path: parse_description(text)
        for path, text in store.record(step)["leaves"].items()
        if path.startswith(PARAMS)
    }
    return {
        path.removeprefix(PARAMS): jax.ShapeDtypeStruct(shape, jnp.dtype(name))
        for path, (name, shape) in leaves.items()
    }


def read_params(
    store: CheckpointStore,
    step: int,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    *,
    batch: int = FILE_BYTES,
) -> Iterator[tuple[str, np.ndarray]]:
    """Some of a checkpoint's parameters in order, whole, on the host; as many are read at once as
    fit `batch` bytes.

    Cast to the dtypes of `wanted`. Raises DamageError, CheckpointError.
    """
    # a CPU's memory is the host's, so what is read there is not copied again
    here = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    for part in batches(
        list(wanted.items()), batch, lambda item: array_bytes(item[1].shape, item[1].dtype)
    ):
        full = {
            PARAMS + path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
            for path, leaf in part
            if prod(leaf.shape)
        }
        read = store.read(step, full) if full else {}
        for path, leaf in part:
            yield path, np.asarray(read.pop(PARAMS + path, np.empty(leaf.shape, leaf.dtype)))


def import_params(
    directory: str | os.PathLike[str], target: PyTree, *, budget: int = STAGING_BYTES
) -> PyTree:
    """Reads safetensors straight into shards: each process the slices that its devices need, once.

    `target`: a pytree whose leaves have shape, dtype and sharding, such as
    `sharded.checkpoint_target().params`. SafetensorsFolder are named by their paths in it
    (`blocks/attn/qkv/kernel`), and floating-point ones are cast to its dtypes. `budget`: bytes of
    host memory beside the arrays. Returns the same structure.

    Raises:
        ConfigError: no such files, or tensors that are missing, unknown or of another shape, each
            by name.
        ValueError: a target without shardings.
        CheckpointError: they cannot be read to their end.

    """
    wanted = leaves_of(target)
    with SafetensorsFolder(directory) as found:
        _check_weights(found, wanted)
        pieces = {path: [TensorMapping.identity(path, leaf.shape)] for path, leaf in wanted.items()}
        return place_all(target, pieces, found, budget, found.directory)


def place_all(
    target: PyTree,
    pieces: Mapping[str, Sequence[TensorMapping]],
    tensors: Mapping[str, StoredTensor],
    budget: int,
    where: Path,
) -> PyTree:
    """The target's structure with an array for every leaf, made of the pieces of its path.

    Raises ValueError for leaves without shardings; CheckpointError where a file cannot be read.
    """
    wanted = leaves_of(target)
    homeless = [path for path, leaf in wanted.items() if getattr(leaf, "sharding", None) is None]
    if homeless:
        fix, got = (
            "sharded.checkpoint_target().params, or a sharding in each leaf",
            ", ".join(homeless[:SHOWN]),
        )
        raise ValueError(message("a target without shardings", where="target", got=got, fix=fix))
    try:
        with ShardReader(budget) as staging:
            made = [
                staging.read_array(leaf, pieces[path], tensors) for path, leaf in wanted.items()
            ]
    except OSError as error:
        raise CheckpointError(
            message("weights cannot be read", where=str(where), got=error)
        ) from error
    return jax.tree.unflatten(jax.tree.structure(target), made)


def refuse_misfits(where: object, lines: Sequence[str], *, fix: str = "") -> None:
    """Raises ConfigError with all that does not fit, the first of many and the count of the rest."""
    if lines:
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        got = "\n            ".join([*lines[:SHOWN], *more])
        raise ConfigError(
            message("the weights do not fit the model", where=str(where), got=got, fix=fix)
        )


def fits_dtype(tensor: StoredTensor, leaf: jax.ShapeDtypeStruct) -> bool:
    """Whether a tensor may be cast to the leaf's dtype: floating point to floating point, or none
    at all.
    """
    both = [jnp.issubdtype(dtype, jnp.floating) for dtype in (tensor.dtype, leaf.dtype)]
    return all(both) or tensor.dtype == leaf.dtype


def _check_weights(found: SafetensorsFolder, target: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    lines = [f"{name}: missing" for name in target if name not in found]
    lines += [f"{name}: unknown" for name in found if name not in target]
    for name, leaf in target.items():
        if name in found and (
            tuple(leaf.shape) != found[name].shape or not fits_dtype(found[name], leaf)
        ):
            lines.append(f"{name}: expected {describe(leaf)}, got {found[name]}")
    refuse_misfits(found.directory, sorted(lines))
