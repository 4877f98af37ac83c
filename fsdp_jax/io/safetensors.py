"""Safetensors files, read slice by slice.

The format is a length, a JSON header and the bytes of every tensor
(https://github.com/huggingface/safetensors). Files are read, not mapped: pages of a mapped file
count as memory of the process, and stay until the system wants them back.
"""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from fsdp_jax.errors import ConfigError, message

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADER_BYTES = 100_000_000  # the largest header that the format allows
# What the format calls a dtype, and what numpy does.
NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
KINDS = {name: kind for kind, name in NAMES.items()}
Box = tuple[tuple[int, int], ...]  # per dim, first and beyond the last


@dataclass(frozen=True)
class Tensor:
    """A tensor that lies in an open file, `offset` bytes from its start."""

    name: str
    file: int
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{KINDS[self.dtype.name]}{list(self.shape)}"

    def run(self, box: Box) -> int:
        """Bytes of a box that lie together in the file; it is as many runs as it takes."""
        return prod(hi - lo for lo, hi in box[self._partial(box) :]) * self.dtype.itemsize

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """The values of a box, into `scratch` (uint8, large enough) where given. Raises OSError."""
        sizes = tuple(hi - lo for lo, hi in box)
        count, item = prod(sizes), self.dtype.itemsize
        raw = np.empty(count * item, np.uint8) if scratch is None else scratch[: count * item]
        if count:
            partial, run = self._partial(box), self.run(box)
            strides = [prod(self.shape[dim + 1 :]) * item for dim in range(len(box))]
            first = self.offset + sum(
                lo * stride for (lo, _), stride in zip(box, strides, strict=True)
            )
            for at, index in enumerate(np.ndindex(sizes[:partial])):
                start = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
                _read_into(self.file, start, raw[at * run : (at + 1) * run].data, self.name)
        return raw.view(self.dtype).reshape(sizes)

    def _partial(self, box: Box) -> int:
        """The last dim that is not taken whole; all after it lies together."""
        partial = [dim for dim, (lo, hi) in enumerate(box) if hi - lo < self.shape[dim]]
        return partial[-1] if partial else 0


class Tensors(Mapping[str, Tensor]):
    """The tensors of a folder by name: a context that keeps their files open.

    The files are those that `model.safetensors.index.json` names, or `model.safetensors`. Nothing
    in them is run.

    Raises ConfigError where there are none, where one cannot be read, and where the index names a
    file elsewhere.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._open = ExitStack()
        self._found: dict[str, Tensor] = {}
        with self._open as undo:  # closes what is open where one cannot be read
            for file in weight_files(self.directory):
                for tensor in _opened(file, self._open):
                    if tensor.name in self._found:
                        raise ConfigError(
                            message("a tensor in two files", where=str(file), got=tensor.name)
                        )
                    self._found[tensor.name] = tensor
            self._open = undo.pop_all()

    def __getitem__(self, name: str) -> Tensor:
        return self._found[name]

    def __iter__(self) -> Any:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def weight_files(directory: Path) -> list[Path]:
    """Those of the index, or the single one. Raises ConfigError."""
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            _refuse_pickles(directory)
        return [directory / SINGLE]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            message("not an index of weights", where=str(index), got=error)
        ) from error
    outside = sorted(
        str(name) for name in names if not isinstance(name, str) or Path(name).name != name
    )
    if outside:
        raise ConfigError(
            message("a file outside the directory", where=str(index), got=", ".join(outside))
        )
    return [directory / name for name in sorted(names)]


def _refuse_pickles(directory: Path) -> None:
    """Pickles run code as they are read."""
    found = sorted(
        each.name
        for ending in ("bin", "pt", "pth", "ckpt")
        for each in directory.glob(f"*.{ending}")
    )
    if found:
        fix = "convert it: with transformers, AutoModel.from_pretrained(folder).save_pretrained(other folder)"
        what = "only pickled weights there, which are never opened"
        raise ConfigError(
            message(
                what, where=str(directory), expected="*.safetensors", got=", ".join(found), fix=fix
            )
        )


def _opened(path: Path, stack: ExitStack) -> list[Tensor]:
    """The tensors of one file, which stays open. Raises ConfigError unless header and file fit each
    other.
    """
    try:
        file = stack.enter_context(path.open("rb", buffering=0)).fileno()
        size, start = os.fstat(file).st_size, 8
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        if not 0 < length <= min(size - 8, HEADER_BYTES):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(os.pread(file, length, start))
        start += length
        found = [
            _tensor(name, entry, file, start)
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        end = start
        for tensor in sorted(found, key=lambda each: (each.offset, prod(each.shape))):
            if tensor.offset != end:
                raise ValueError(
                    f"tensor '{tensor.name}' does not begin where the one before it ends"
                )
            end += prod(tensor.shape) * tensor.dtype.itemsize
        if end != size:
            raise ValueError(f"{end} bytes by its header, {size} in the file")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(message("weights cannot be read", where=str(path), got=error)) from error
    return found


def _tensor(name: str, entry: dict[str, Any], file: int, start: int) -> Tensor:
    if entry["dtype"] not in NAMES:
        raise ValueError(f"tensor '{name}' of dtype {entry['dtype']}; known: {', '.join(NAMES)}")
    tensor = Tensor(
        name,
        file,
        start + int(entry["data_offsets"][0]),
        tuple(map(int, entry["shape"])),
        jnp.dtype(NAMES[entry["dtype"]]),
    )
    size = prod(tensor.shape) * tensor.dtype.itemsize
    if (
        min(tensor.shape, default=0) < 0
        or start + int(entry["data_offsets"][1]) - tensor.offset != size
    ):
        raise ValueError(f"tensor '{name}' of {tensor} in bytes {entry['data_offsets']}")
    return tensor


def _read_into(file: int, start: int, view: memoryview, name: str) -> None:
    while view:
        done = os.preadv(file, [view], start)
        if not done:
            raise OSError(f"the file ends within tensor '{name}'")
        start, view = start + done, view[done:]
