"""Opens the arrays of a tree that tensorstore wrote: of orbax, in any of its formats, or Levanter.

Arrays are in chunks, each of which is decoded as a whole.
"""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_jax.checkpoint.saved_array import NOT_READ, damage
from fsdp_jax.compat.error_texts import first_line
from fsdp_jax.compat.orbax_files import chunk_shape, keys_of_tree, list_arrays, open_arrays
from fsdp_jax.errors import ConfigError, DamageError, first_lines
from fsdp_jax.io.array_specs import array_bytes
from fsdp_jax.io.boxes import Box, box_sizes, intersect
from fsdp_jax.io.folder_kinds import (
    LEVANTER,
    LEVANTER_METADATA,
    ORBAX,
    TREE_METADATA,
    kind_of_folder,
    not_one_checkpoint,
    steps_in,
    trees_in,
)
from fsdp_jax.io.json_text import read_json_object
from fsdp_jax.io.safetensors import ForeignTensor
from fsdp_jax.tree import SEPARATOR

SHOWN = 10
# Chunks may reach beyond a padded array, but not without end: each is decoded as a whole.
LARGEST_CHUNK = 64  # times the bytes of the array
SMALL = 1 << 20  # bytes; a chunk below this may be of any array


@dataclass(frozen=True)
class ChunkedTensor(ForeignTensor):
    """An array that tensorstore reads; `chunk` is the shape of what it decodes as a whole."""

    store: Any
    chunk: tuple[int, ...]

    def contiguous_bytes(self, box: Box) -> int:
        """Counts the bytes of a box: tensorstore reads it together."""
        return max(prod(box_sizes(box)), 1) << 20  # there is nothing to gain from a larger box

    def blocks(self, box: Box, elements: int) -> Iterator[Box]:
        """Yields the blocks of a box to read: its chunks, each of which is decoded as a whole."""
        first = [lo // size for (lo, _), size in zip(box, self.chunk, strict=True)]
        counts = [
            -(-hi // size) - at for (_, hi), size, at in zip(box, self.chunk, first, strict=True)
        ]
        for index in np.ndindex(*counts):
            chunk = tuple(
                ((at + i) * size, (at + i + 1) * size)
                for at, i, size in zip(first, index, self.chunk, strict=True)
            )
            part = intersect(chunk, box)
            if part is not None:
                yield part

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """Reads the values of a box. Raises DamageError."""
        del scratch  # tensorstore allocates what it returns
        try:
            values = self.store[tuple(slice(*bounds) for bounds in box)].read().result()
        except Exception as error:  # of any kind, from a file that is not as it was written
            raise self.damage(first_line(error)) from error
        return np.asarray(values)

    def damage(self, got: object) -> DamageError:
        """Makes the error for an array whose files are damaged."""
        return damage(f"{self.path}, array {self.name}", got)


@dataclass(frozen=True)
class ChunkedTree:
    """The arrays of a checkpoint, by slash-joined path: metadata alone is read.

    `problems`: why others cannot be opened, by path.
    """

    folder: Path
    names: Mapping[str, str]  # of the arrays in the files, by path
    driver: str
    zeros_are_written: bool
    tensors: Mapping[str, ChunkedTensor]
    problems: Mapping[str, str]

    @classmethod
    def open(
        cls, folder: Path, names: Mapping[str, str], driver: str, *, zeros_are_written: bool = False
    ) -> "ChunkedTree":
        """Opens the metadata of the arrays. Raises ValueError for names that there are not."""
        if not names:
            raise ValueError("no arrays")
        for name in names.values():
            if (
                ".." in name.split("/")
                or name.startswith("/")
                or "\0" in name
                or not name.isprintable()
            ):
                raise ValueError(f"an array of the name {name!r}")
        opened = open_arrays(folder, names, driver, zeros_are_written=zeros_are_written)
        made = {path: _tensor(path, folder, store) for path, store in opened.items()}
        return cls(
            folder,
            names,
            driver,
            zeros_are_written,
            {path: each for path, each in made.items() if isinstance(each, ChunkedTensor)},
            {path: each for path, each in made.items() if isinstance(each, str)},
        )

    def reopened(
        self, paths: Sequence[str], budget: int, *, keeps_chunks: bool
    ) -> dict[str, ChunkedTensor]:
        """Opens arrays again to read them, with `budget` bytes of chunks that are kept meanwhile.

        `keeps_chunks`: at least the largest chunk is kept, as more than one block needs it.
        """
        # What tensorstore counts of a chunk is more than its elements.
        tensors = [self.tensors[path] for path in paths]
        largest = max((array_bytes(each.chunk, each.dtype) for each in tensors), default=0)
        if keeps_chunks:
            budget = max(budget, largest + largest // 8 + SMALL)
        names = {path: self.names[path] for path in paths}
        options = {"zeros_are_written": self.zeros_are_written}
        found = {}
        for path, store in open_arrays(self.folder, names, self.driver, budget, **options).items():
            if isinstance(store, Exception):
                raise self.tensors[path].damage(first_line(store)) from store
            found[path] = replace(self.tensors[path], store=store)
        return found


def open_orbax(path: str | os.PathLike[str]) -> ChunkedTree:
    """Opens the tree of a checkpoint: the folder of a step, or the one in it that has the tree.

    Raises ConfigError for a folder that is something else, has several trees or several steps, and
    DamageError for metadata that is not as orbax writes it.
    """
    folder = _folder_of_tree(Path(path).expanduser().absolute())
    _require_files(folder)
    metadata = read_json_object(folder / TREE_METADATA, NOT_READ)
    try:
        leaves = keys_of_tree(metadata)
        names = {SEPARATOR.join(keys): ".".join(keys) for keys in leaves}
        if len(names) < len(leaves):
            raise ValueError("two arrays of one path")
        return ChunkedTree.open(
            folder,
            names,
            "zarr3" if metadata.get("use_zarr3") is True else "zarr",
            zeros_are_written=metadata.get("store_array_data_equal_to_fill_value") is True,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damage(
            folder / TREE_METADATA, error, "the tree of a checkpoint, as orbax writes it"
        ) from error


def open_levanter(path: str | os.PathLike[str]) -> ChunkedTree:
    """Opens the arrays of a checkpoint of Levanter: a folder each, or all in a database.

    Raises ConfigError for a folder that is something else, and DamageError for a database that
    cannot be read.
    """
    folder = Path(path).expanduser().absolute()
    kind = kind_of_folder(folder)
    steps = [] if (folder / LEVANTER_METADATA).exists() else steps_in(folder)
    if kind != LEVANTER or steps:
        raise not_one_checkpoint(
            "not one checkpoint of Levanter",
            folder,
            LEVANTER,
            f"a folder such as step-1000, with model and {LEVANTER_METADATA}",
        )
    _require_files(folder)
    try:
        driver, names = list_arrays(folder)
        return ChunkedTree.open(folder, {name: name for name in names}, driver)
    except (UnicodeDecodeError, ValueError) as error:
        raise damage(folder, error, "arrays, as Levanter writes them") from error


def _tensor(name: str, folder: Path, store: Any) -> ChunkedTensor | str:
    """Makes the tensor of an opened array; returns why there is none."""
    if isinstance(store, Exception):
        return first_line(store)
    shape, dtype, chunk = tuple(store.shape), store.dtype.numpy_dtype, chunk_shape(store)
    if any(store.origin):
        return "an array whose first index is not 0"
    if dtype.hasobject or dtype.names is not None:
        return f"elements of {dtype}"
    limit = max(LARGEST_CHUNK * array_bytes(shape, dtype), SMALL)
    if array_bytes(chunk, dtype) > limit:
        return f"chunks of {list(chunk)} in an array of {list(shape)}"
    return ChunkedTensor(name, folder, -1, 0, shape, dtype, store, chunk)


def _folder_of_tree(folder: Path) -> Path:
    """Finds the folder with the tree's metadata. Raises ConfigError where there is none."""
    if (folder / TREE_METADATA).exists():
        return folder
    trees = trees_in(folder)
    if len(trees) == 1:
        return folder / trees[0]
    expected = "the folder of one step of an orbax checkpoint"
    if trees:
        raise ConfigError(
            "several trees in one checkpoint",
            where=str(folder),
            expected=expected,
            got=first_lines(trees, SHOWN),
            fix=f"one of them: {folder / trees[0]}",
        )
    kind, steps = kind_of_folder(folder), steps_in(folder)
    if kind == ORBAX and (not steps or (folder / "manifest.ocdbt").exists()):
        raise damage(folder / TREE_METADATA, "no such file")
    raise not_one_checkpoint("not one orbax checkpoint", folder, ORBAX, expected)


def _require_files(folder: Path) -> None:
    """Raises DamageError for a pipe or a device among the files: who reads one may wait for it."""
    for above, _, names in os.walk(folder):
        for name in names:
            try:
                mode = os.stat(Path(above) / name).st_mode
            except OSError as error:
                got: object = error
            else:
                if stat.S_ISREG(mode):
                    continue
                got = "something else than a file"
            raise damage(Path(above) / name, got)
