"""Files and directories as orbax and tensorstore read and write them."""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import tensorstore
from orbax.checkpoint import v1 as orbax

ARRAYS = "state"  # directory of a checkpoint with its arrays
_DATABASE = "manifest.ocdbt"  # of a folder with all arrays in one database
_MOST_BRACKETS = 1000  # in the metadata of an array
ZARR_METADATA, ZARR3_METADATA = ".zarray", "zarr.json"  # of an array
# What orbax or tensorstore takes for something else: a separator, an address in a cloud; and what
# Python has in place of bytes that are not UTF-8.
UNUSABLE_NAME = re.compile(r"\\|gs:/|^/(gs|s3|az|hf)(/|$)|(?P<bytes>[\ud800-\udfff])")
_PathOfOrbax: Any = type(orbax.Context().file.path_class("/"))


class LiteralPath(_PathOfOrbax):
    """A path for orbax: its own `[`, `*` and `?` mean themselves."""

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yields the paths below this one that match."""
        for name in glob.iglob(pattern, root_dir=os.fspath(self)):
            yield self / name


def writing_process(name: str) -> int:
    """Reads the number of the process that wrote a file: N of `process_N` in its name, or 0."""
    match = re.search(r"(?:^|/)(?:ocdbt\.)?process_(\d+)(?:/|$)", name)
    return int(match[1]) if match else 0


def set_shapes(checkpoint: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Changes the shapes of written arrays, by their paths; only one process may call this.

    `shapes` are no larger than those that were written. The metadata alone changes: the last chunks
    of a zarr array may reach beyond its shape, and what is there is never read. A change that is
    interrupted leaves none.
    """
    if not shapes:
        return
    # With one context and one transaction the database writes its files once, for all arrays.
    context = tensorstore.Context()
    with tensorstore.Transaction() as transaction:
        opened = {
            path: tensorstore.open(
                _spec(checkpoint, path), context=context, transaction=transaction
            )
            for path in shapes
        }
        resized = [
            array.result().resize(exclusive_max=shapes[path], resize_metadata_only=True)
            for path, array in opened.items()
        ]
        for each in resized:
            each.result()


def written_arrays(
    checkpoint: Path, paths: Iterable[str]
) -> dict[str, jax.ShapeDtypeStruct | Exception]:
    """Opens written arrays, by their paths: {path: shape and dtype, or why it cannot be opened}.

    Not by `orbax.metadata`: it asks tensorstore for JSON, which keeps 20 Python objects an array
    (tensorstore 0.1.86), of every checkpoint that a run saves.
    """
    context = tensorstore.Context()
    opened = {
        path: tensorstore.open(_spec(checkpoint, path), context=context, read=True)
        for path in paths
    }
    found: dict[str, jax.ShapeDtypeStruct | Exception] = {}
    for path, array in opened.items():
        try:
            store = array.result()
            found[path] = jax.ShapeDtypeStruct(store.shape, store.dtype.numpy_dtype)
        except Exception as error:  # of any kind, from a file that is not as it was written
            found[path] = error
    return found


def _spec(checkpoint: Path, path: str) -> dict[str, Any]:
    """Describes the array at a path for tensorstore: zarr in a database, as orbax writes it."""
    base = {"driver": "file", "path": f"{checkpoint / ARRAYS}/"}
    database = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
    return {"driver": "zarr3", "kvstore": database}


Keys = tuple[str, ...]  # of a leaf, from the root of its tree


def keys_of_tree(metadata: Mapping[str, Any]) -> list[Keys]:
    """Lists the leaves of a tree that are arrays or numbers, from its `_METADATA`.

    Raises KeyError, TypeError or ValueError for what orbax does not write.
    """
    found = []
    for entry in metadata["tree_metadata"].values():
        keys = tuple(each["key"] for each in entry["key_metadata"])
        if not all(isinstance(key, str) for key in keys):
            raise TypeError("a key that is no text")
        if entry["value_metadata"]["value_type"] not in ("None", "Dict", "List", "string"):
            found.append(keys)
    return found


def open_arrays(
    folder: Path,
    names: Mapping[str, str],
    driver: str,
    cache_bytes: int = 0,
    *,
    zeros_are_written: bool = False,
) -> dict[str, Any]:
    """Opens arrays of a folder: {path: tensorstore's, or its error}; metadata alone is read.

    Args:
        folder: with a database, or a folder for each array.
        names: {path: the name of the array in the files}.
        driver: `zarr` or `zarr3`.
        cache_bytes: of decoded chunks that are kept for the next read.
        zeros_are_written: a chunk that is not there is lost, as chunks of zeros are written too.

    """
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
    found: dict[str, Any] = _too_deep(folder, names, driver, context)
    opening = {}
    for path, name in names.items():
        if path in found:
            continue
        spec: dict[str, Any] = {"driver": driver, "kvstore": _store(folder, f"{name}/")}
        if zeros_are_written:
            spec["fill_missing_data_reads"] = False
        opening[path] = tensorstore.open(spec, context=context, read=True, open=True)
    for path, array in opening.items():
        try:
            found[path] = array.result()
        except Exception as error:  # of any kind, from a file that is not as it was written
            found[path] = error
    return {path: found[path] for path in names}


def _store(folder: Path, path: str) -> dict[str, Any]:
    """Describes a place in a folder for tensorstore: in its database, if it has one."""
    base = {"driver": "file", "path": f"{folder}/"}
    if (folder / _DATABASE).exists():
        return {"driver": "ocdbt", "base": base, "path": path}
    return {**base, "path": f"{folder / path}" + "/" * path.endswith("/")}


def _too_deep(
    folder: Path, names: Mapping[str, str], driver: str, context: Any
) -> dict[str, ValueError]:
    """Finds arrays whose metadata is nested deeper than any: tensorstore's parser overflows."""
    reading = {}
    for path, name in names.items():
        spec = _store(folder, f"{name}/")
        reading[path] = tensorstore.KvStore.open(spec, context=context)
    file = ZARR3_METADATA if driver == "zarr3" else ZARR_METADATA
    found = {}
    for path, store in reading.items():
        try:
            content = store.result()[file]
        except Exception:  # it is told when the array is opened
            continue
        if content.count(b"[") + content.count(b"{") > _MOST_BRACKETS:
            found[path] = ValueError("metadata of an array that is nested too deep")
    return found


def list_arrays(folder: Path) -> tuple[str, list[str]]:
    """Lists the arrays in a folder without a tree's metadata: (their driver, their names).

    Raises ValueError for a database that cannot be read.
    """
    if not (folder / _DATABASE).exists():
        found = [each.parent for each in sorted(folder.rglob(ZARR_METADATA)) if each.is_file()]
        return "zarr", [str(each.relative_to(folder)) for each in found]
    try:
        keys = tensorstore.KvStore.open(_store(folder, "")).result().list().result()
    except Exception as error:  # of any kind, from a file that is not as it was written
        raise ValueError(str(error)) from error
    end = f"/{ZARR3_METADATA}"
    names = [key.decode() for key in keys]
    return "zarr3", [name.removesuffix(end) for name in names if name.endswith(end)]


def chunk_shape(array: Any) -> tuple[int, ...]:
    """Returns the shape of what tensorstore reads and decodes as a whole."""
    return tuple(array.chunk_layout.read_chunk.shape or ())
