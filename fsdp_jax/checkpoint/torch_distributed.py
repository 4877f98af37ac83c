"""Opens the tensors of PyTorch's distributed checkpoints, without PyTorch.

The pickle `.metadata` has the shape of each tensor, the parts that it was saved in, and where each
part is in the files: in a zip archive of its own, as `torch.save` writes it. A part is read by its
position; nothing in a pickle is imported or called.
"""

import io
import os
import struct
import zipfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fsdp_jax.checkpoint.saved_array import SavedArray, damage
from fsdp_jax.io.array_specs import array_bytes
from fsdp_jax.io.boxes import Box, full_box, intersect
from fsdp_jax.io.folder_kinds import TORCH, not_one_checkpoint, steps_in
from fsdp_jax.io.inert_pickle import Called, Name, read_pickle
from fsdp_jax.io.regular_files import open_regular, read_into, read_regular
from fsdp_jax.io.safetensors import ForeignTensor, StoredTensor
from fsdp_jax.io.tensor_mapping import TensorMapping

METADATA = ".metadata"
_CLASSES = "torch.distributed.checkpoint.metadata."
DTYPES = {
    f"torch.{name}": name
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
LARGEST_PICKLE = 1 << 16  # bytes of the pickle of one part
LOCAL_HEADER = 30  # bytes of the header of a file in a zip archive, before its name


# What zipfile raises for what is no archive, and we for what is no tensor.
_OF_ARCHIVES = (
    *(EOFError, IndexError, KeyError, NotImplementedError, OverflowError, RuntimeError),
    *(TypeError, ValueError, struct.error, zipfile.BadZipFile, zipfile.LargeZipFile),
)


class _Window(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: int, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise ValueError("before the archive")
        self._at = origin + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self._length - self._at), 0)
        count = read_into(self._file, memoryview(buffer)[:count], self._start + self._at)
        self._at += count
        return count


@dataclass(frozen=True)
class TorchPart(ForeignTensor):
    """A part of a tensor: `offset` and `length` are those of its archive in the file."""

    length: int

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """Reads the values of a box. Raises DamageError, and OSError."""
        return self._values.read(box, scratch)

    @cached_property
    def _values(self) -> StoredTensor:
        """The values in the archive, which is read when they are first needed."""
        try:
            start = self.offset + self._start_of_values()
        except _OF_ARCHIVES as error:
            raise damage(f"{self.path}, tensor {self.name}", error) from error
        return StoredTensor(self.name, self.path, self.file, start, self.shape, self.dtype)

    def _start_of_values(self) -> int:
        """Finds the first value in the archive. Raises ValueError for another tensor."""
        window = _Window(self.file, self.offset, self.length)
        with zipfile.ZipFile(io.BufferedReader(window)) as archive:
            named = {each.filename.partition("/")[2]: each for each in archive.infolist()}
            for name in ("data.pkl", "data/0"):
                if name not in named or named[name].compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"no {name} in its archive")
            if "byteorder" in named and archive.read(named["byteorder"]) != b"little":
                raise ValueError("values in another byte order")
            if named["data.pkl"].file_size > LARGEST_PICKLE:
                raise ValueError("a pickle of more than a tensor")
            made = read_pickle(archive.read(named["data.pkl"]))
            values = named["data/0"]
        first = self._first_element(made)
        header = self._bytes(values.header_offset, LOCAL_HEADER)
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        size = array_bytes(self.shape, self.dtype)
        if first + size > values.file_size:
            raise ValueError(f"{values.file_size:,} bytes of values, {first + size:,} are needed")
        return values.header_offset + LOCAL_HEADER + name_bytes + extra_bytes + first

    def _first_element(self, made: Any) -> int:
        """Finds the first byte of the tensor in its storage; its values follow, row by row."""
        # torch._utils._rebuild_tensor_v2(storage, offset, shape, strides, ...)
        if not isinstance(made, Called) or not made.name.startswith("torch._utils._rebuild"):
            raise ValueError("something else than a tensor")
        if made.name == "torch._utils._rebuild_parameter":
            made = made.args[0]
        offset, shape, strides = made.args[1:4]
        rows = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        sizes = zip(self.shape, strides, rows, strict=True)
        if tuple(shape) != self.shape or any(size > 1 and got != row for size, got, row in sizes):
            raise ValueError(f"a tensor of {list(shape)} whose rows do not follow one another")
        if type(offset) is not int or offset < 0:
            raise ValueError("no offset")
        return offset * self.dtype.itemsize

    def _bytes(self, start: int, count: int) -> bytes:
        """Reads bytes of the archive. Raises ValueError where the file ends before."""
        found = bytearray(count)
        if read_into(self.file, memoryview(found), self.offset + start) < count:
            raise ValueError("the file ends before")
        return bytes(found)


def open_torch(
    path: str | os.PathLike[str], files: ExitStack
) -> tuple[Path, dict[str, SavedArray]]:
    """Opens the tensors of a distributed checkpoint: (its folder, {name: tensor}).

    Accelerate writes the model and its optimizer as two, in folders of one: they are opened
    together. Files stay open until `files` is closed. Raises ConfigError for a folder of something
    else, and DamageError for a `.metadata` that is not as PyTorch writes it.
    """
    folder = Path(path).expanduser().absolute()
    if (folder / METADATA).exists():
        return folder, _opened(folder, files)
    arrays: dict[str, SavedArray] = {}
    inside = [] if steps_in(folder) else sorted(folder.glob(f"*/{METADATA}"))
    of_parts = [_opened(metadata.parent, files) for metadata in inside]
    for each in of_parts:
        arrays |= each
    # Checkpoints of the same names are not parts of one.
    if len(of_parts) < 2 or len(arrays) < sum(map(len, of_parts)):
        raise not_one_checkpoint(
            "not one distributed checkpoint of PyTorch",
            folder,
            TORCH,
            f"a folder with {METADATA}, as torch.distributed.checkpoint writes it",
        )
    return folder, arrays


def _opened(folder: Path, files: ExitStack) -> dict[str, SavedArray]:
    """Opens the tensors of the checkpoint that is in a folder. Raises DamageError."""
    try:
        metadata = read_pickle(read_regular(folder / METADATA))
        return _arrays(folder, metadata, files)
    except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
        expected = "the metadata of torch.distributed.checkpoint"
        raise damage(folder / METADATA, error, expected) from error


def _arrays(folder: Path, metadata: Any, files: ExitStack) -> dict[str, SavedArray]:
    """Makes the tensors that the metadata lists, which is all that is read."""
    opened: dict[str, int] = {}
    places = {}
    for index, info in metadata.field("storage_data").items:
        if info.name != "torch.distributed.checkpoint.filesystem._StorageInfo":
            raise ValueError(f"places of {info.name}")
        offset = index.get("offset")  # what is no tensor has none
        where = _sizes(offset) if offset is not None else ()
        places[_text(index.field("fqn")), where] = info
    arrays = {}
    for name, stored in metadata.field("state_dict_metadata").items:
        if stored.name != f"{_CLASSES}TensorStorageMetadata":
            continue  # a number of the optimizer's settings, in a pickle
        properties = stored.field("properties").state
        dtype = np.dtype(jnp.dtype(DTYPES[_name(properties[0])]))
        shape = _sizes(stored.field("size"))
        parts, boxes = [], []
        for chunk in stored.field("chunks"):
            start, size = _sizes(chunk.field("offsets")), _sizes(chunk.field("sizes"))
            box = tuple((lo, lo + count) for lo, count in zip(start, size, strict=True))
            inside = intersect(box, full_box(shape))
            if inside != box and all(size):
                raise ValueError(f"a part of {name} that is not in it")
            part = _part(folder, _text(name), places[name, start], size, dtype, opened, files)
            dims = tuple(range(len(shape)))
            boxes.append(box)
            parts.append((part, TensorMapping(name, start, size, dims, size)))
        if sum(prod(part.shape) for part, _ in parts) != prod(shape) or _overlap(boxes):
            raise ValueError(f"parts of {name} that are not all of it")
        arrays[name] = SavedArray(name, shape, dtype, tuple(parts))
    return arrays


def _overlap(boxes: Iterable[Box]) -> bool:
    """Tells whether any two boxes share an element."""
    filled = sorted(box for box in boxes if all(lo < hi for lo, hi in box))
    for number, box in enumerate(filled):
        for other in filled[number + 1 :]:
            if other[:1] and other[0][0] >= box[0][1]:  # nor do those behind it
                break
            if intersect(box, other) is not None:
                return True
    return False


def _part(
    folder: Path,
    name: str,
    info: Called,
    shape: tuple[int, ...],
    dtype: np.dtype,
    opened: dict[str, int],
    files: ExitStack,
) -> TorchPart:
    """Makes one part of a tensor; its file is opened once."""
    file = _text(info.field("relative_path"))
    if Path(file).name != file:
        raise ValueError("a file outside the folder")
    transforms = info.get("transform_descriptors")  # releases before them have no such field
    if transforms:
        raise ValueError(f"{name} is transformed, such as compressed")
    if file not in opened:
        opened[file] = files.enter_context(open_regular(folder / file)).fileno()
    offset, length = info.field("offset"), info.field("length")
    if not all(type(each) is int and 0 <= each < 1 << 62 for each in (offset, length)):
        raise ValueError("a place that is none")
    return TorchPart(name, folder / file, opened[file], offset, shape, dtype, length)


def _sizes(size: Any) -> tuple[int, ...]:
    """Reads a torch.Size."""
    (values,) = size.args
    found = tuple(values)
    if size.name != "torch.Size" or not all(type(n) is int and 0 <= n < 1 << 48 for n in found):
        raise ValueError("a size that is none")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("a name that is no text")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, Name):
        raise ValueError("a dtype that is no name")
    return value.name
