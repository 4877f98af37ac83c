"""Shapes of arrays in orbax's files: padded ones get their own once they are written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorstore


def set_shapes(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Changes the shapes of written arrays, by their paths; only one process may call this.

    `directory` is the one that orbax wrote its database of zarr arrays to; `shapes` are no larger
    than those that were written. The metadata alone changes: the last chunks of a zarr array may
    reach beyond its shape, and what is there is never read. The step is not in place yet: a change
    that is interrupted leaves none.
    """
    if not shapes:
        return
    # With one context and one transaction the database writes its files once, for all arrays.
    context = tensorstore.Context()
    with tensorstore.Transaction() as transaction:
        opened = {
            path: tensorstore.open(_spec(directory, path), context=context, transaction=transaction)
            for path in shapes
        }
        resized = [
            array.result().resize(exclusive_max=shapes[path], resize_metadata_only=True)
            for path, array in opened.items()
        ]
        for each in resized:
            each.result()


def _spec(directory: Path, path: str) -> dict[str, Any]:
    """Returns how tensorstore opens the array that orbax wrote at a path, by orbax's defaults."""
    base = {"driver": "file", "path": f"{directory}/"}
    database = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
    return {"driver": "zarr3", "kvstore": database}
