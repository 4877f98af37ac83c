"""Files and directories as orbax and tensorstore read and write them."""

import glob
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import tensorstore
from orbax.checkpoint import v1 as orbax

ARRAYS = "state"  # directory of a checkpoint with its arrays
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
    base = {"driver": "file", "path": f"{checkpoint / ARRAYS}/"}
    with tensorstore.Transaction() as transaction:
        opened = {}
        for path in shapes:
            database = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
            spec = {"driver": "zarr3", "kvstore": database}
            opened[path] = tensorstore.open(spec, context=context, transaction=transaction)
        resized = [
            array.result().resize(exclusive_max=shapes[path], resize_metadata_only=True)
            for path, array in opened.items()
        ]
        for each in resized:
            each.result()
