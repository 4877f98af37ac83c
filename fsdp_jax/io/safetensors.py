"""Reads safetensors files, slice by slice.

The `safetensors` library checks the headers; the values are read by `preadv`, not through its
memory map: mapped pages count as memory of the process, and a file that is cut short while it is
mapped kills the process.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NoReturn

import jax.numpy as jnp
import numpy as np

from fsdp_jax.errors import ConfigError, DamageError, extra, first_lines, is_failure
from fsdp_jax.io.array_specs import array_bytes
from fsdp_jax.io.boxes import Box, box_sizes, split_box
from fsdp_jax.io.folder_kinds import FIXES, kind_of_folder
from fsdp_jax.io.json_text import read_json_object
from fsdp_jax.io.regular_files import open_regular, read_into

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHOWN = 10  # missing tensors listed before the rest is only counted
AGAIN = "copy or download the file again: it is cut short or damaged"
# safetensors dtype -> numpy dtype
DTYPE_OF_CODE = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open file; shape and dtype are as stored."""

    name: str
    path: Path
    file: int  # descriptor
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{CODE_OF_DTYPE[self.dtype.name]}{list(self.shape)}"

    def contiguous_bytes(self, box: Box) -> int:
        """Counts the bytes of a box that are contiguous in the file: those of a single read."""
        return prod(box_sizes(box[self._last_partial_dim(box) :])) * self.dtype.itemsize

    def blocks(self, box: Box, elements: int) -> Iterator[Box]:
        """Yields the blocks of a box to read, each of at most so many elements."""
        yield from split_box(box, elements)

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """Reads the values of a box, into `scratch` (uint8, large enough) if given.

        Raises DamageError if the file ends before the tensor does, and OSError.
        """
        sizes = box_sizes(box)
        size = array_bytes(sizes, self.dtype)
        raw = scratch
        if raw is None:
            raw = np.empty(size, np.uint8)
        raw = raw[:size]
        if size:
            # One read per index of the dims before the last partial one: the bytes of all dims
            # from that one on are contiguous.
            outer = box[: self._last_partial_dim(box)]
            chunk = self.contiguous_bytes(box)
            strides = [array_bytes(self.shape[dim + 1 :], self.dtype) for dim in range(len(box))]
            first = self.offset + sum(lo * each for (lo, _), each in zip(box, strides, strict=True))
            for number, index in enumerate(np.ndindex(box_sizes(outer))):
                offset = first + sum(i * each for i, each in zip(index, strides, strict=False))
                self._read_into(raw[number * chunk : (number + 1) * chunk].data, offset)
        return raw.view(self.dtype).reshape(sizes)

    def _last_partial_dim(self, box: Box) -> int:
        """Finds the last dim that the box takes in part; 0 if it takes all of the tensor."""
        partial = (dim for dim, size in enumerate(box_sizes(box)) if size < self.shape[dim])
        return max(partial, default=0)

    def _read_into(self, view: memoryview, offset: int) -> None:
        """Fills `view` from `offset`, in bytes of the file. Raises as `read`."""
        if read_into(self.file, view, offset) < len(view):
            end = self.offset + array_bytes(self.shape, self.dtype)
            raise DamageError(
                "weights cannot be read",
                where=f"{self.path}, tensor {self.name}",
                expected=f"{end:,} bytes, up to the end of the tensor",
                got=f"{os.fstat(self.file).st_size:,} bytes: it was cut short while it was read",
                fix=AGAIN,
            )


class ForeignTensor(StoredTensor):
    """A tensor of another program's checkpoint, whose dtype is shown by NumPy's name."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class SafetensorsFolder(dict[str, StoredTensor], AbstractContextManager["SafetensorsFolder"]):
    """The tensors of a folder by name; as a context manager it keeps their files open.

    The files are those that `model.safetensors.index.json` names, or `model.safetensors`; with a
    `file`, it is that one alone. No code in them is run.

    Raises ConfigError if there are none, and DamageError if one cannot be read, if two have a
    tensor of the same name, and if the index names a file outside the folder, or a tensor that is
    not in its file.
    """

    def __init__(self, directory: str | os.PathLike[str], file: str | None = None) -> None:
        super().__init__()
        self.directory = Path(directory)
        with ExitStack() as files:  # closes the files opened so far if one cannot be read
            for path, indexed in _weight_files(self.directory, file).items():
                tensors = _open_tensors(path, files)
                # The index and the files must agree on where each tensor is.
                missing = sorted(indexed - tensors.keys())
                if missing:
                    raise DamageError(
                        "a tensor that the index names is not in its file",
                        where=str(path),
                        expected=first_lines(missing, SHOWN),
                        fix=AGAIN,
                    )
                repeated = sorted(tensors.keys() & self.keys())
                if repeated:
                    raise DamageError(
                        "a tensor in two files", where=str(path), got=first_lines(repeated, SHOWN)
                    )
                self.update(tensors)
            # They stay open until the end of this context.
            self._open_files = files.pop_all()

    def __exit__(self, *_: object) -> None:
        self._open_files.close()


def _weight_files(directory: Path, only: str | None) -> dict[Path, set[str]]:
    """Reads {file: the tensors that the index has in it}; the single file without an index.

    `only`: the name of the single file, which has no index.
    """
    if only is not None:
        if not (directory / only).exists():
            _refuse_other_weights(directory, only)
        return {directory / only: set()}
    path = directory / INDEX
    what = "not an index of weights"
    try:
        places = read_json_object(path, what).get("weight_map")
    except ConfigError:
        if not (directory / SINGLE).exists():
            _refuse_other_weights(directory, f"{SINGLE}, or several files and {INDEX}")
        return {directory / SINGLE: set()}
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise DamageError(
            what, where=str(path), expected="weight_map, from tensors to files", fix=AGAIN
        )
    # A downloaded index must not lead to other files of the user.
    outside = sorted({name for name in places.values() if Path(name).name != name})
    if outside:
        raise DamageError(
            "a file outside the directory", where=str(path), got=first_lines(outside, SHOWN)
        )
    files: dict[Path, set[str]] = {directory / name: set() for name in sorted(places.values())}
    for tensor, name in places.items():
        files[directory / name].add(tensor)
    return files


def _refuse_other_weights(directory: Path, expected: str) -> NoReturn:
    """Raises ConfigError: the folder has no weights, or only pickles, whose code would run."""
    suffixes = (".bin", ".pt", ".pth", ".ckpt")
    pickles = sorted(path.name for path in directory.glob("*.*") if path.suffix in suffixes)
    if pickles:
        raise ConfigError(
            "only pickled weights there, which are never opened",
            where=str(directory),
            expected="*.safetensors",
            got=", ".join(pickles),
            fix=(
                "convert it: with transformers, "
                "AutoModel.from_pretrained(folder).save_pretrained(other folder)"
            ),
        )
    kind = kind_of_folder(directory)
    raise ConfigError(
        "no weights there",
        where=str(directory),
        expected=expected,
        got=kind,
        fix=FIXES.get(kind, ""),
    )


def _open_tensors(path: Path, open_files: ExitStack) -> dict[str, StoredTensor]:
    """Reads the header of one file, which stays open until `open_files` is closed.

    Raises DamageError if the header is invalid, or its tensors do not fill the file exactly.
    """
    with extra("train"):
        from safetensors import safe_open
    tensors = {}
    try:
        file = open_files.enter_context(open_regular(path)).fileno()
        with safe_open(path, framework="numpy") as header:
            # The library has checked that the tensors follow the header without gaps.
            offset = 8 + int.from_bytes(os.pread(file, 8, 0), "little")
            for name in header.offset_keys():
                spec = header.get_slice(name)
                if spec.get_dtype() not in DTYPE_OF_CODE:
                    known = ", ".join(DTYPE_OF_CODE)
                    raise ValueError(f"tensor '{name}' of dtype {spec.get_dtype()}; known: {known}")
                dtype, shape = jnp.dtype(DTYPE_OF_CODE[spec.get_dtype()]), tuple(spec.get_shape())
                # The library refuses other sizes that do not fit the file, not those of an empty
                # tensor: NumPy could not index it.
                if array_bytes([max(size, 1) for size in shape], dtype) > sys.maxsize:
                    raise ValueError(f"tensor '{name}' of shape {list(shape)}")
                tensors[name] = StoredTensor(name, path, file, offset, shape, dtype)
                offset += array_bytes(shape, dtype)
    except BaseException as error:  # the library is in Rust, and may panic
        if not is_failure(error):
            raise
        raise DamageError(
            "weights cannot be read", where=str(path), got=error, fix=AGAIN
        ) from error
    return tensors
