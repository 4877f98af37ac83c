"""Exports parameters of a checkpoint as safetensors files, and imports them onto any mesh.

Tensors are named by their paths here; `fsdp_jax.weights` reads and writes Hugging Face's names.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from fsdp_jax.checkpoint.arrays import OPT_STATE, leaves_of, require_shardings
from fsdp_jax.checkpoint.quantized_read import read_quantized
from fsdp_jax.checkpoint.store import CheckpointStore
from fsdp_jax.errors import CheckpointError, ConfigError, first_lines
from fsdp_jax.io.array_specs import describe_array, parse_description, stored_as
from fsdp_jax.io.safetensors import SafetensorsFolder, StoredTensor
from fsdp_jax.io.safetensors_writer import Exported, exported_dtype, group_by_bytes, write_weights
from fsdp_jax.io.sharded_read import STAGING_BYTES, ShardReader
from fsdp_jax.io.tensor_mapping import TensorMapping
from fsdp_jax.sharding.padding import as_stored, mark_padded
from fsdp_jax.sharding.quantized import Blocks, QuantizedStruct, as_model_arrays
from fsdp_jax.step.average import Weights
from fsdp_jax.tree import PyTree, suffixes

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
    weights: Weights = "params",
) -> Exported:
    """Writes a checkpoint's parameters, saved on any mesh, to a new directory.

    Args:
        store: the run's checkpoints.
        step: the checkpoint's step.
        directory: to create; it appears under its name once it is complete.
        dtype: of the floating-point tensors; None keeps each as it was trained. Others keep theirs.
        file_bytes: bytes of one file's tensors, and so of host memory; a larger tensor gets a file
            of its own.
        weights: "ema" for the average that `optim.params_ema` keeps.

    Raises:
        ConfigError: the directory exists, the dtype is none of `DTYPES`, or there is no average.
        ValueError: no such step.
        DamageError, CheckpointError: the checkpoint cannot be read.

    """
    targets = {
        path: jax.ShapeDtypeStruct(leaf.shape, exported_dtype(leaf.dtype, dtype, "--dtype"))
        for path, leaf in saved_params(store, step).items()
    }
    return write_weights(
        directory,
        targets,
        (value for _, value in read_params(store, step, targets, weights, batch=file_bytes)),
        file_bytes=file_bytes,
        metadata={"format": "fsdp_jax"},
    )


def saved_params(store: CheckpointStore, step: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Lists {path: shape and dtype} of a checkpoint's parameters, without reading them.

    Of quantized ones those of the model, in float32.
    """
    params = {}
    for path, description in store.record(step)["leaves"].items():
        if path.startswith(PARAMS):
            dtype, shape = parse_description(description)
            if name := stored_as(description):
                shape, dtype = Blocks.parse(name, np.dtype(np.float32)).shape, "float32"
            params[path.removeprefix(PARAMS)] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return params


def read_params(
    store: CheckpointStore,
    step: int,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    weights: Weights = "params",
    *,
    batch: int = FILE_BYTES,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, value) of some of a checkpoint's parameters, unsharded on the host, in order.

    Values are cast to the dtypes of `targets`, and dequantized; at most `batch` bytes are read
    together, or one parameter. Raises DamageError, CheckpointError; ConfigError where there is no
    average.
    """
    names = {path: PARAMS + path for path in targets}
    if weights == "ema":
        names |= _average_paths(store, step, targets)
    # A CPU device's memory is the host's, so that numpy views its arrays without a copy.
    on_host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    saved = store.record(step)["leaves"]
    blocks = {
        path: Blocks.parse(stored, np.dtype(leaf.dtype))
        for path, leaf in targets.items()
        if (stored := stored_as(saved.get(names[path], "")))
    }
    for part in group_by_bytes(targets, batch):
        specs = {
            names[path]: QuantizedStruct(blocks[path], on_host)
            if path in blocks
            else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host)
            for path, leaf in part.items()
            if leaf.size
        }
        # Arrays without elements are not saved: there may be nothing to read.
        arrays = {}
        if specs:
            arrays = store.read(step, specs)
        for path, leaf in part.items():
            value = np.asarray(arrays.pop(names[path], np.empty(leaf.shape, leaf.dtype)))
            yield path, blocks[path].to_host(value) if path in blocks else value


def _average_paths(
    store: CheckpointStore, step: int, targets: Mapping[str, object]
) -> dict[str, str]:
    """Finds {path of a parameter: path of its average in the checkpoint}; frozen ones have none."""
    leaves = store.record(step)["leaves"]
    averages: dict[str, dict[str, str]] = {}  # of each state of `params_ema`
    for saved in leaves:
        before, average, path = saved.partition("/average/")
        if average and before.startswith(OPT_STATE) and f"{before}/count" in leaves:
            averages.setdefault(before, {})[path] = saved
    if len(averages) != 1:
        raise ConfigError(
            "the checkpoint has no average of the parameters, or several",
            where="weights",
            got=str(store.path(step)),
            fix="train with optimizer.ema, or fsdp_jax.optim.params_ema; or export the parameters",
        )
    # An optimizer may see Linen's variables around the parameters.
    (found,) = averages.values()
    ends = {path: end for path in found for end in suffixes(path) if PARAMS + end in leaves}
    return {ends[path]: saved for path, saved in found.items() if ends.get(path) in targets}


def import_params(
    directory: str | os.PathLike[str], target: PyTree, *, budget: int = STAGING_BYTES
) -> PyTree:
    """Reads safetensors straight into shards: each process its own slices, once.

    Args:
        directory: of the safetensors files.
        target: a pytree whose leaves have shape, dtype and sharding, such as
            `sharded.checkpoint_target().params`. Tensors are named by their paths in it
            (`blocks/attn/qkv/kernel`), and floating-point ones are cast to its dtypes.
        budget: bytes of host memory beside the arrays.

    Returns the target's structure, as `sharded.init(params=)` takes it: a leaf whose sharding does
    not divide its shape is a `Padded`.

    Raises:
        ConfigError: no such files, or tensors that are missing, unknown or of another shape, each
            by name.
        ValueError: a target without shardings.
        DamageError: a file ends before its tensors do.
        CheckpointError: a file cannot be read.

    """
    leaves = leaves_of(target)
    with SafetensorsFolder(directory) as tensors:
        own = as_model_arrays(leaves)
        _check_tensors(tensors, own)
        mappings = {path: [TensorMapping.identity(path, leaf.shape)] for path, leaf in own.items()}
        return read_mapped(target, mappings, tensors, budget, tensors.directory)


def read_mapped(
    target: PyTree,
    mappings: Mapping[str, Sequence[TensorMapping]],
    tensors: Mapping[str, StoredTensor],
    budget: int,
    where: Path,
) -> PyTree:
    """Reads every leaf of the target's structure from the tensors mapped to its path.

    A leaf whose sharding does not divide its shape is a `Padded`.
    `budget` is in bytes of host memory beside the arrays; errors name `where`. Raises ValueError
    for leaves without shardings; CheckpointError if a file cannot be read.
    """
    leaves = leaves_of(target)
    fix = "sharded.checkpoint_target().params, or a sharding in each leaf"
    require_shardings(leaves, where="target", fix=fix)
    try:
        with ShardReader(tensors, budget) as reader:
            # Elements that no tensor is mapped to are zero, and so is the padding.
            arrays = []
            for path, leaf in leaves.items():
                if isinstance(leaf, QuantizedStruct):
                    array = read_quantized(reader, leaf, mappings[path])
                else:
                    array = reader.read_array(as_stored(leaf), mappings[path])
                arrays.append(mark_padded(array, leaf))
    except OSError as error:
        raise CheckpointError("weights cannot be read", where=str(where), got=error) from error
    return jax.tree.unflatten(jax.tree.structure(target), arrays)


def raise_if_misfits(where: object, lines: Sequence[str], *, fix: str = "") -> None:
    """Raises ConfigError if there are lines, each on a tensor that does not fit the model.

    The first 20 are shown. `where`: the file or folder with the tensors.
    """
    if lines:
        raise ConfigError(
            "the weights do not fit the model",
            where=str(where),
            got=first_lines(lines, SHOWN),
            fix=fix,
        )


def fits_dtype(tensor: StoredTensor, leaf: jax.ShapeDtypeStruct) -> bool:
    """Tells whether a tensor may be cast to the leaf: both floating-point, or of one dtype."""
    floating = [jnp.issubdtype(dtype, jnp.floating) for dtype in (tensor.dtype, leaf.dtype)]
    return all(floating) or tensor.dtype == leaf.dtype


def _check_tensors(tensors: SafetensorsFolder, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Checks tensors against the leaves of a target.

    Raises ConfigError with all that are missing, unknown, or of another shape or dtype.
    """
    lines = [f"{name}: missing" for name in leaves if name not in tensors]
    lines += [f"{name}: unknown" for name in tensors if name not in leaves]
    for name in leaves.keys() & tensors.keys():
        tensor, leaf = tensors[name], leaves[name]
        if tensor.shape != tuple(leaf.shape) or not fits_dtype(tensor, leaf):
            lines.append(f"{name}: expected {describe_array(leaf)}, got {tensor}")
    raise_if_misfits(tensors.directory, sorted(lines))
