"""Safetensors files, read slice by slice.

The `safetensors` library checks the headers; the values are read by `preadv`, not through its
memory map: mapped pages count as memory of the process, and a file that is cut short while it is
mapped kills the process.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from fsdp_jax.errors import ConfigError, message
from fsdp_jax.io.array_specs import array_bytes
from fsdp_jax.io.boxes import Box, box_sizes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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
    """A tensor in an open file.

    Attributes:
        name: its name in the file.
        file: descriptor of the open file.
        offset: bytes from the start of the file.
        shape, dtype: as stored.

    """

    name: str
    file: int
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{CODE_OF_DTYPE[self.dtype.name]}{list(self.shape)}"

    def contiguous_bytes(self, box: Box) -> int:
        """Returns the bytes of a box that are contiguous in the file: those of a single read."""
        return prod(box_sizes(box[self._last_partial_dim(box) :])) * self.dtype.itemsize

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """Returns the values of a box, read into `scratch` (uint8, large enough) if given.

        Raises OSError, also if the file ends before the tensor does.
        """
        sizes = box_sizes(box)
        size = array_bytes(sizes, self.dtype)
        raw = np.empty(size, np.uint8) if scratch is None else scratch[:size]
        if size:
            # One read per index of the dims before the last one that is taken in part.
            outer_sizes = sizes[: self._last_partial_dim(box)]
            chunk = self.contiguous_bytes(box)
            strides = [array_bytes(self.shape[dim + 1 :], self.dtype) for dim in range(len(box))]
            first = self.offset + sum(
                start * stride for (start, _), stride in zip(box, strides, strict=True)
            )
            for number, index in enumerate(np.ndindex(outer_sizes)):
                offset = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
                self._read_into(raw[number * chunk : (number + 1) * chunk].data, offset)
        return raw.view(self.dtype).reshape(sizes)

    def _last_partial_dim(self, box: Box) -> int:
        """Returns the last dim that the box takes in part; 0 if it takes all of the tensor."""
        partial = [dim for dim, size in enumerate(box_sizes(box)) if size < self.shape[dim]]
        return partial[-1] if partial else 0

    def _read_into(self, view: memoryview, offset: int) -> None:
        while view:
            count = os.preadv(self.file, [view], offset)
            if not count:
                raise OSError(f"the file ends within tensor '{self.name}'")
            offset += count
            view = view[count:]


class SafetensorsFolder(Mapping[str, StoredTensor]):
    """The tensors of a folder by name; as a context manager it keeps their files open.

    The files are those that `model.safetensors.index.json` names, or `model.safetensors`. No code
    in them is run.

    Raises ConfigError if there are none, if one cannot be read, if two have a tensor of the same
    name, and if the index names a file outside the folder.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._open_files = ExitStack()
        self._tensors: dict[str, StoredTensor] = {}
        with self._open_files as on_error:  # closes the files opened so far if one cannot be read
            for file in weight_files(self.directory):
                for tensor in _open_tensors(file, self._open_files):
                    if tensor.name in self._tensors:
                        what = "a tensor in two files"
                        raise ConfigError(message(what, where=str(file), got=tensor.name))
                    self._tensors[tensor.name] = tensor
            self._open_files = on_error.pop_all()

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()


def weight_files(directory: Path) -> list[Path]:
    """Returns the files that the index names, or the single one. Raises ConfigError."""
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            _refuse_pickles(directory)
        return [directory / SINGLE]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        what = "not an index of weights"
        raise ConfigError(message(what, where=str(index), got=error)) from error
    outside = sorted(
        str(name) for name in names if not isinstance(name, str) or Path(name).name != name
    )
    if outside:
        what = "a file outside the directory"
        raise ConfigError(message(what, where=str(index), got=", ".join(outside)))
    return [directory / name for name in sorted(names)]


def _refuse_pickles(directory: Path) -> None:
    """Raises ConfigError if there are pickled weights: reading a pickle runs its code."""
    pickles = sorted(
        path.name
        for suffix in ("bin", "pt", "pth", "ckpt")
        for path in directory.glob(f"*.{suffix}")
    )
    if pickles:
        raise ConfigError(
            message(
                "only pickled weights there, which are never opened",
                where=str(directory),
                expected="*.safetensors",
                got=", ".join(pickles),
                fix="convert it: with transformers, "
                "AutoModel.from_pretrained(folder).save_pretrained(other folder)",
            )
        )


def _open_tensors(path: Path, open_files: ExitStack) -> list[StoredTensor]:
    """Returns the tensors of one file, which stays open until `open_files` is closed.

    Raises ConfigError if the header is invalid, or its tensors do not fill the file exactly.
    """
    tensors = []
    try:
        file = open_files.enter_context(path.open("rb", buffering=0)).fileno()
        with safe_open(path, framework="numpy") as header:
            # The library has checked that the tensors follow the header without gaps.
            offset = 8 + int.from_bytes(os.pread(file, 8, 0), "little")
            for name in header.offset_keys():
                spec = header.get_slice(name)
                if spec.get_dtype() not in DTYPE_OF_CODE:
                    known = ", ".join(DTYPE_OF_CODE)
                    raise ValueError(f"tensor '{name}' of dtype {spec.get_dtype()}; known: {known}")
                dtype = jnp.dtype(DTYPE_OF_CODE[spec.get_dtype()])
                tensors.append(StoredTensor(name, file, offset, tuple(spec.get_shape()), dtype))
                offset += array_bytes(spec.get_shape(), dtype)
    except (OSError, ValueError, SafetensorError) as error:
        what = "weights cannot be read"
        fix = "copy or download the file again if it is cut short or damaged"
        raise ConfigError(message(what, where=str(path), got=error, fix=fix)) from error
    return tensors
