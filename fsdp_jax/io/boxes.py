"""Boxes: rectangular regions of an array, as (start, stop) per dim."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

Box = tuple[tuple[int, int], ...]


def full_box(shape: Sequence[int]) -> Box:
    """Makes the box of a whole array."""
    return tuple((0, size) for size in shape)


def box_of_index(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Converts a shard's index, whose slices may leave out their ends, to a box."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def box_sizes(box: Box) -> tuple[int, ...]:
    """Computes the shape of a box."""
    return tuple(stop - start for start, stop in box)


def box_view(array: Any, box: Box) -> Any:
    """Takes the view of a box, a copy of a jax.Array's; an array even where it has no dims."""
    # Without the ellipsis NumPy gives a scalar, which cannot be written to.
    index: Any = (*(slice(*bounds) for bounds in box), ...)
    return array[index]


def intersect(first: Box, second: Box) -> Box | None:
    """Intersects two boxes; None if nothing is in both."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    if any(start >= stop for start, stop in both):
        return None
    return both


def relative_box(box: Box, outer: Box) -> Box:
    """Shifts a box to coordinates that begin where `outer`, which contains it, begins."""
    return tuple(
        (start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(box, outer, strict=True)
    )


def bounding_box(boxes: Sequence[Box]) -> Box:
    """Finds the smallest box that contains all of `boxes`."""
    return tuple(
        (min(start for start, _ in bounds), max(stop for _, stop in bounds))
        for bounds in zip(*boxes, strict=True)
    )


def split_box(box: Box, max_elements: int) -> Iterator[Box]:
    """Yields the blocks of a box in row-major order, each of at most `max_elements` elements.

    A block is as many whole trailing dims as fit, and a range of the dim before them.
    """
    sizes = box_sizes(box)
    if prod(sizes) == 0:
        return
    if not box:
        yield ()
        return
    # Split the first dim whose trailing dims fit, however small the range of it.
    split_dim = next(
        (dim for dim in range(len(box)) if prod(sizes[dim + 1 :]) <= max_elements), len(box) - 1
    )
    step = max(max_elements // prod(sizes[split_dim + 1 :]), 1)
    start, stop = box[split_dim]
    # The dims before it one index at a time, the dims behind it whole.
    for index in np.ndindex(*sizes[:split_dim]):
        leading = tuple((lo + i, lo + i + 1) for (lo, _), i in zip(box, index, strict=False))
        for first in range(start, stop, step):
            yield (*leading, (first, min(first + step, stop)), *box[split_dim + 1 :])
