"""Full state dicts: the parameters of a sharded checkpoint as safetensors files, and back onto any mesh.

The layout is Hugging Face's for sharded models: `model-00001-of-00003.safetensors` and so on, with an index that says
which tensor lies in which file; a model that fits one file is `model.safetensors` alone. Tensors have their paths here
for names. No tensor is in memory but those of the file being written.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fsdp_jax.checkpoint.arrays import bytes_of, describe, leaves_of, parse
from fsdp_jax.checkpoint.manifest import flush_folder
from fsdp_jax.checkpoint.store import CheckpointStore
from fsdp_jax.errors import CheckpointError, ConfigError, message
from fsdp_jax.tree import PyTree

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PARAMS = "params/"
DTYPES = ("float32", "bfloat16", "float16")
FILE_BYTES = 256 << 20
SHOWN = 20  # differences listed before the rest is only counted


@dataclass(frozen=True)
class Exported:
    """What an export wrote: the files, and the tensors' bytes."""

    directory: Path
    files: tuple[str, ...]
    tensors: int
    size: int


def export_params(
    store: CheckpointStore, step: int, directory: str | os.PathLike[str], *, dtype: str | None = "float32",
    file_bytes: int = FILE_BYTES,
) -> Exported:  # fmt: skip
    """Writes a checkpoint's parameters to a new directory, file by file, whatever mesh saved them.

    Args:
        store: the run's checkpoints.
        step: which of them.
        directory: to be made; it appears under its name when all of it is written.
        dtype: of the floating-point tensors; None leaves each as it was trained. Others always stay as they are.
        file_bytes: tensors of one file, and so the host memory it takes; a larger tensor gets a file of its own.

    Raises:
        ConfigError: the directory is there already, or the dtype is none of `DTYPES`.
        ValueError: no such step. DamageError, CheckpointError: it cannot be read.

    """
    target = Path(directory).absolute()
    if target.exists():
        raise ConfigError(message("the directory is there already", where=str(target), fix="choose another"))
    wanted = _wanted(store.record(step)["leaves"], dtype)
    files = list(_in_files(wanted, file_bytes))
    names = [_file_name(at, len(files)) for at in range(len(files))]
    unfinished = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.unfinished")  # of this export alone
        unfinished.mkdir()
        for name, tensors in zip(names, files, strict=True):
            _write(store, step, tensors, unfinished / name)
        total = sum(_bytes(leaf) for leaf in wanted.values())
        if len(files) > 1:
            where = {
                path.removeprefix(PARAMS): name for name, tensors in zip(names, files, strict=True) for path in tensors
            }
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (unfinished / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        flush_folder(unfinished)
        unfinished.rename(target)
        flush_folder(target.parent)
    except (OSError, SafetensorError) as error:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(message("the export could not be written", where=str(target), got=error)) from error
    return Exported(target, tuple(names), len(wanted), total)


def import_params(directory: str | os.PathLike[str], target: PyTree) -> PyTree:
    """Reads safetensors straight into shards: each process the slices that its devices need, one at a time.

    `target`: a pytree whose leaves have shape, dtype and sharding, such as `sharded.checkpoint_target().params`.
    Tensors are named by their paths in it (`blocks/attn/qkv/kernel`), and floating-point ones are cast to its dtypes.
    Returns the same structure.

    Raises:
        ConfigError: no such files, or tensors that are missing, unknown or of another shape, each by name.
        ValueError: a target without shardings.

    """
    wanted = leaves_of(target)
    homeless = [path for path, leaf in wanted.items() if getattr(leaf, "sharding", None) is None]
    if homeless:
        fix, got = "sharded.checkpoint_target().params, or a sharding in each leaf", ", ".join(homeless[:SHOWN])
        raise ValueError(message("a target without shardings", where="import_params", got=got, fix=fix))
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in _weight_files(Path(directory)):
            try:
                opened = stack.enter_context(safe_open(file, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(message("weights cannot be read", where=str(file), got=error)) from error
            found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        _check_weights(Path(directory), found, wanted)
        return jax.tree.unflatten(
            jax.tree.structure(target), [_placed(found[path], leaf) for path, leaf in wanted.items()]
        )


def _wanted(leaves: dict[str, str], dtype: str | None) -> dict[str, jax.ShapeDtypeStruct]:
    """{path in the checkpoint: what to write} of the parameters. Raises ConfigError."""
    if dtype is not None and dtype not in DTYPES:
        expected = ", ".join([*DTYPES, "or same"])
        raise ConfigError(message("not a dtype to export", where="--dtype", expected=expected, got=dtype))
    found = {}
    for path, text in leaves.items():
        if path.startswith(PARAMS):
            name, shape = parse(text)
            kept = dtype is None or not jnp.issubdtype(jnp.dtype(name), jnp.floating)
            found[path] = jax.ShapeDtypeStruct(shape, name if kept else dtype)
    return found


def _in_files(wanted: dict[str, jax.ShapeDtypeStruct], file_bytes: int) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """In order, as many to a file as fit."""
    tensors: dict[str, jax.ShapeDtypeStruct] = {}
    for path, leaf in wanted.items():
        if tensors and sum(map(_bytes, tensors.values())) + _bytes(leaf) > file_bytes:
            yield tensors
            tensors = {}
        tensors[path] = leaf
    yield tensors


def _file_name(at: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{at + 1:05}-of-{count:05}.safetensors"


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return bytes_of(leaf.shape, leaf.dtype)


def _write(store: CheckpointStore, step: int, tensors: dict[str, jax.ShapeDtypeStruct], file: Path) -> None:
    """One file; a CPU's memory is the host's, so what is read there is not copied again."""
    here = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    host = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in tensors.items() if not prod(leaf.shape)}
    whole = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
        for path, leaf in tensors.items() if path not in host
    }  # fmt: skip
    host |= {path: np.asarray(array) for path, array in store.read(step, whole).items()} if whole else {}
    assert all(host[path].dtype == leaf.dtype for path, leaf in tensors.items()), "the header says what is written"
    file.touch()
    mode = file.stat().st_mode  # as the umask has it; the library would make it the writer's alone
    save_file({path.removeprefix(PARAMS): host[path] for path in tensors}, file, metadata={"format": "fsdp_jax"})
    file.chmod(mode)
    with file.open("rb") as written:
        os.fsync(written.fileno())


def _weight_files(directory: Path) -> list[Path]:
    """Those of the index, or the single one. Raises ConfigError."""
    index = directory / INDEX
    if not index.exists():
        return [directory / SINGLE]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(message("not an index of weights", where=str(index), got=error)) from error
    outside = sorted(name for name in names if Path(name).name != name)
    if outside:
        raise ConfigError(message("a file outside the directory", where=str(index), got=", ".join(outside)))
    return [directory / name for name in sorted(names)]


def _check_weights(directory: Path, found: dict[str, Any], target: dict[str, jax.ShapeDtypeStruct]) -> None:
    shapes = {name: tuple(part.get_shape()) for name, part in found.items()}
    lines = [f"{name}: missing" for name in target if name not in found]
    lines += [f"{name}: unknown" for name in found if name not in target]
    for name, leaf in target.items():
        kind = found[name].get_dtype() if name in found else ""
        fits = "F" in kind if jnp.issubdtype(leaf.dtype, jnp.floating) else kind == _kind(leaf)
        if name in found and (tuple(leaf.shape) != shapes[name] or not fits):
            lines.append(f"{name}: expected {describe(leaf)}, got {kind}{list(shapes[name])}")
    if lines:
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        got = "\n            ".join([*sorted(lines)[:SHOWN], *more])
        raise ConfigError(message("the weights do not fit the model", where=str(directory), got=got))


def _kind(leaf: jax.ShapeDtypeStruct) -> str:
    """What safetensors calls a dtype that is not floating: I32, U8, BOOL."""
    name = leaf.dtype.name
    return name.upper().replace("UINT", "U").replace("INT", "I")


def _placed(part: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    shape = tuple(leaf.shape)

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        if not prod(shape):
            return np.empty(shape, leaf.dtype)[index]
        return np.asarray(part[index] if index else part[...]).astype(leaf.dtype, copy=False)

    return jax.make_array_from_callback(shape, leaf.sharding, read)
