"""Writes a folder of safetensors files, one tensor in memory at a time.

The layout is Hugging Face's for sharded models: `model-00001-of-00003.safetensors` and so on, with
an index that maps tensors to files; a model that fits one file is `model.safetensors` alone.
"""

import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax.errors import CheckpointError, ConfigError
from fsdp_jax.io.array_specs import array_bytes
from fsdp_jax.io.atomic import (
    UNFINISHED,
    fsync_directory,
    fsync_file,
    rename_durably,
    write_durably,
)
from fsdp_jax.io.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MODEL_FILES
from fsdp_jax.io.safetensors import CODE_OF_DTYPE, INDEX, SINGLE
from fsdp_jax.io.sharded_read import row_major

Specs = Mapping[str, jax.ShapeDtypeStruct]
# Names of the files of an export, in any format: a folder with others is never removed.
OWN_FILES = re.compile(
    "|".join(
        [
            r"model(-\d{5}-of-\d{5})?\.safetensors",
            *map(re.escape, (INDEX, ADAPTER_CONFIG, ADAPTER_WEIGHTS, *MODEL_FILES)),
        ]
    )
)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Exported:
    """The files that an export wrote.

    Attributes:
        directory: the new directory.
        files: names of the safetensors files.
        tensors: number of tensors.
        size: bytes of all tensors.

    """

    directory: Path
    files: tuple[str, ...]
    tensors: int
    size: int


def exported_dtype(dtype: np.dtype, requested: str | None, where: str) -> np.dtype:
    """Chooses `requested` for a floating-point dtype, otherwise `dtype` itself.

    Raises ConfigError, naming `where`, if `requested` is not in `DTYPES`.
    """
    if requested is not None and requested not in DTYPES:
        raise ConfigError(
            "not a dtype to export",
            where=where,
            expected=", ".join([*DTYPES, "or same"]),
            got=requested,
        )
    if requested is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return jnp.dtype(requested)


def require_new_directory(directory: str | os.PathLike[str]) -> Path:
    """Makes the path of `directory` absolute; it is not created. ConfigError if it exists."""
    target = Path(directory).absolute()
    if target.exists():
        raise ConfigError("the directory is there already", where=str(target), fix="choose another")
    return target


def write_weights(
    directory: str | os.PathLike[str],
    tensors: Specs,
    values: Iterator[np.ndarray],
    *,
    file_bytes: int,
    metadata: Mapping[str, str],
    others: Mapping[str, bytes] = MappingProxyType({}),
    single: str = SINGLE,
) -> Exported:
    """Writes tensors to a new directory, which appears once it is complete and on disk.

    The values are in the order of `tensors` and any memory order; they are taken one at a time, and
    cast. A file has `file_bytes` of them, or a single larger one, and the metadata; `others` are
    the contents of more files, by name. `single`: the name of the file where there is one.

    Raises ConfigError if the directory exists; CheckpointError, and leaves nothing of it, if it
    cannot be written.
    """
    target = require_new_directory(directory)
    total = sum(array_bytes(spec.shape, spec.dtype) for spec in tensors.values())

    # Assign the tensors to files.
    parts = list(group_by_bytes(tensors, file_bytes))
    files = {single: parts[0]}
    extra_files = dict(others)
    if len(parts) > 1:
        names = (f"model-{k + 1:05}-of-{len(parts):05}.safetensors" for k in range(len(parts)))
        files = dict(zip(names, parts, strict=True))
        file_of = {tensor: name for name, part in files.items() for tensor in part}
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        extra_files[INDEX] = (json.dumps(index, indent=1) + "\n").encode()

    # Write under a name of this export's own, then rename. The lock tells other exports that the
    # folder has an owner.
    unfinished = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}")
    lock = None
    try:
        unfinished.mkdir(parents=True)
        lock = _try_lock(unfinished)
        _remove_leftovers(target)
        for name, part in files.items():
            _write_safetensors_file(unfinished / name, part, values, metadata)
        for name, content in extra_files.items():
            write_durably(unfinished / name, content)
        fsync_directory(unfinished)
        rename_durably(unfinished, target)
    except OSError as error:
        raise CheckpointError(
            "the export could not be written", where=str(target), got=error
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # renamed away unless something failed
        if lock is not None:
            os.close(lock)
    return Exported(target, tuple(files), len(tensors), total)


def _try_lock(folder: Path) -> int | None:
    """Locks a folder, and returns the file descriptor that holds the lock.

    Returns None if another process has it, or the file system has no locks.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _remove_leftovers(target: Path) -> None:
    """Removes the leftovers of killed exports to `target`: folders with their names and no owner.

    All else is not ours, and stays.
    """
    leftover = re.compile(re.escape(target.name) + r"\.[0-9a-f]{8}" + re.escape(UNFINISHED))
    for folder in target.parent.iterdir():
        if leftover.fullmatch(folder.name) is None or folder.is_symlink():
            continue
        with suppress(OSError):  # another user's
            if not all(map(_is_of_export, folder.iterdir())):
                continue
            lock = _try_lock(folder)
            if lock is not None:
                shutil.rmtree(folder)
                os.close(lock)


def _is_of_export(path: Path) -> bool:
    """Tells whether an export writes a file of this name."""
    return path.is_file() and bool(OWN_FILES.fullmatch(path.name.removesuffix(UNFINISHED)))


def group_by_bytes(tensors: Specs, limit: int) -> Iterator[Specs]:
    """Yields consecutive tensors of at most `limit` bytes together; a larger one comes alone."""
    # There is one group at least, which may be empty: a model without tensors has a file too.
    batch: dict[str, jax.ShapeDtypeStruct] = {}
    total = 0
    for name, spec in tensors.items():
        size = array_bytes(spec.shape, spec.dtype)
        if batch and total + size > limit:
            yield batch
            batch = {}
            total = 0
        batch[name] = spec
        total += size
    yield batch


def _write_safetensors_file(
    path: Path, part: Specs, values: Iterator[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes one file of the tensors in `part`, and flushes it to disk.

    Takes their values from the iterator, in the order of `part`: one tensor is in memory at a time.
    """
    # The header. Wide dtypes come first in the file: readers that map it want aligned tensors.
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offsets = {}
    end = 0
    for name, spec in sorted(part.items(), key=lambda item: -item[1].dtype.itemsize):
        offsets[name] = end
        end += array_bytes(spec.shape, spec.dtype)
        entries[name] = {
            "dtype": CODE_OF_DTYPE[spec.dtype.name],
            "shape": list(spec.shape),
            "data_offsets": [offsets[name], end],
        }
    # Padded with spaces, so that the values begin at a multiple of 8 bytes.
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    # The values, in the order in which they come, each at its place.
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, spec in part.items():
            value = next(values)
            assert value.shape == spec.shape, f"{name}: the header must match the values"
            value = np.ascontiguousarray(row_major(value).astype(spec.dtype, copy=False))
            file.seek(8 + len(header) + offsets[name])
            file.write(value.reshape(-1).view(np.uint8).data)
        fsync_file(file)
