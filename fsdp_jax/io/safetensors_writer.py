"""A folder of safetensors files, written tensor by tensor, which appears under its name when all of
it is there.

The layout is Hugging Face's for sharded models: `model-00001-of-00003.safetensors` and so on, with
an index that says which tensor lies in which file; a model that fits one file is
`model.safetensors` alone.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

from fsdp_jax.errors import CheckpointError, ConfigError, message
from fsdp_jax.io.array_specs import bytes_of
from fsdp_jax.io.atomic import flush_folder
from fsdp_jax.io.safetensors import INDEX, KINDS, SINGLE
from fsdp_jax.io.sharded_read import ordered

T = TypeVar("T")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Outline:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return bytes_of(self.shape, self.dtype)


@dataclass(frozen=True)
class Exported:
    """What an export wrote: the files, and the tensors' bytes."""

    directory: Path
    files: tuple[str, ...]
    tensors: int
    size: int


def exported_dtype(dtype: np.dtype, asked: str | None, where: str) -> np.dtype:
    """`asked` where the tensor is of floating point, else its own. Raises ConfigError if that is
    none of `DTYPES`.
    """
    if asked is not None and asked not in DTYPES:
        expected = ", ".join([*DTYPES, "or same"])
        raise ConfigError(
            message("not a dtype to export", where=where, expected=expected, got=asked)
        )
    return dtype if asked is None or not jnp.issubdtype(dtype, jnp.floating) else jnp.dtype(asked)


def new_directory(directory: str | os.PathLike[str]) -> Path:
    """Its absolute path. Raises ConfigError where it is there already."""
    target = Path(directory).absolute()
    if target.exists():
        raise ConfigError(
            message("the directory is there already", where=str(target), fix="choose another")
        )
    return target


def write_weights(
    directory: str | os.PathLike[str],
    tensors: Sequence[Outline],
    values: Iterator[np.ndarray],
    *,
    file_bytes: int,
    metadata: Mapping[str, str],
    others: Mapping[str, bytes] | None = None,
) -> Exported:
    """Writes a new directory.

    Args:
        directory: to be made.
        tensors: in order, all that is written.
        values: of each in the same order, taken one at a time, in any order of memory; cast to its
            dtype.
        file_bytes: of tensors in one file; a larger tensor gets a file of its own.
        metadata: of every file.
        others: more files, by name.

    Raises:
        ConfigError: the directory is there already.
        CheckpointError: it cannot be written; nothing of it is left.

    """
    target = new_directory(directory)
    files = list(batches(tensors, file_bytes, lambda each: each.size))
    names = [
        SINGLE if len(files) == 1 else f"model-{at + 1:05}-of-{len(files):05}.safetensors"
        for at in range(len(files))
    ]
    unfinished = target.with_name(
        f"{target.name}.{uuid.uuid4().hex[:8]}.unfinished"
    )  # of this export alone
    total = sum(each.size for each in tensors)
    try:
        unfinished.mkdir(parents=True)
        for name, part in zip(names, files, strict=True):
            _write_file(unfinished / name, part, values, metadata)
        if len(files) > 1:
            where = {
                each.name: name for name, part in zip(names, files, strict=True) for each in part
            }
            index = (
                json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
                + "\n"
            )
            _write_flushed(unfinished / INDEX, [(0, index.encode())])
        for name, content in (others or {}).items():
            _write_flushed(unfinished / name, [(0, content)])
        flush_folder(unfinished)
        unfinished.rename(target)
        flush_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            message("the export could not be written", where=str(target), got=error)
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # gone, unless something went wrong
    return Exported(target, tuple(names), len(tensors), total)


def batches(items: Sequence[T], limit: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """In order, as many together as have at most `limit` bytes; a larger one comes alone."""
    part: list[T] = []
    total = 0
    for item in items:
        if part and total + size(item) > limit:
            yield part
            part, total = [], 0
        part.append(item)
        total += size(item)
    yield part


def _write_file(
    path: Path, part: Sequence[Outline], values: Iterator[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """One file. No tensor is in memory but the one that is written."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    for each in sorted(
        part, key=lambda each: -each.dtype.itemsize
    ):  # readers that map the file want them aligned
        entries[each.name] = {
            "dtype": KINDS[each.dtype.name],
            "shape": list(each.shape),
            "data_offsets": [end, end + each.size],
        }
        starts[each.name] = end
        end += each.size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)

    def contents() -> Iterator[tuple[int, bytes | memoryview]]:
        yield 0, len(header).to_bytes(8, "little") + header
        for each in part:
            value = next(values)
            assert value.shape == each.shape, f"{each.name}: the header says what is written"
            value = np.ascontiguousarray(ordered(value).astype(each.dtype, copy=False))
            yield 8 + len(header) + starts[each.name], value.reshape(-1).view(np.uint8).data

    _write_flushed(path, contents())


def _write_flushed(path: Path, contents: Iterable[tuple[int, bytes | memoryview]]) -> None:
    """Each at its place in the file."""
    with path.open("wb") as file:
        for start, content in contents:
            file.seek(start)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
