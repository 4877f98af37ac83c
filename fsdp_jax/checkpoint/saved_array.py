"""Arrays of a checkpoint that are read box by box, and views of them: nothing is read for a view.

A view is a list of parts: tensors, and where each is in the array. Transposing, slicing, stacking
and concatenating change the places alone; another shape is a tensor that reads another one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np

from fsdp_jax.errors import ArgumentError, DamageError
from fsdp_jax.io.boxes import (
    Box,
    box_sizes,
    box_view,
    full_box,
    intersect,
    relative_box,
    split_box,
)
from fsdp_jax.io.safetensors import ForeignTensor, StoredTensor
from fsdp_jax.io.tensor_mapping import TensorMapping

NO_FILE = -1  # the descriptor of a tensor that is not read from one file
NOT_READ = "a checkpoint of another program cannot be read"
AGAIN = "copy or download the checkpoint again"
Bounds = tuple[int, int]


@dataclass(frozen=True)
class SavedArray:
    """An array of a checkpoint, or a view of several; `np.asarray` of it reads all.

    It is indexed by numbers and by slices, has `transpose`, `swapaxes` and `reshape`, and is
    multiplied by a number, in float32 at least; `np.stack`, `np.concatenate`, `np.moveaxis`,
    `np.swapaxes`, `np.transpose` and `np.reshape` take it. None of them reads anything.

    Attributes:
        name: of the array in the checkpoint; of a view, of all that it is made of.
        shape, dtype: as NumPy has them.
        parts: each tensor, with its place in the array.

    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[tuple[StoredTensor, TensorMapping], ...]

    @classmethod
    def of_tensor(cls, tensor: StoredTensor) -> "SavedArray":
        """Makes the array that is one tensor."""
        place = TensorMapping.identity(tensor.name, tensor.shape)
        return cls(tensor.name, tensor.shape, tensor.dtype, ((tensor, place),))

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The values, on the host."""
        return np.array(self.read(full_box(self.shape)), dtype, copy=copy)

    def __array_function__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "SavedArray":
        """Applies a function of NumPy that makes a view."""
        if function not in _FUNCTIONS:
            known = ", ".join(f"np.{each.__name__}" for each in _FUNCTIONS)
            raise ArgumentError(
                "no view of an array that is not read",
                where=self.name,
                expected=known,
                got=f"np.{function.__name__}",
                fix="np.asarray(array) first, which reads all of it",
            )
        return _FUNCTIONS[function](*args, **kwargs)

    def read(self, box: Box) -> np.ndarray:
        """Reads the values of a box. Raises DamageError, and OSError."""
        values = None
        for tensor, place in self.parts:
            part = intersect(box, place.box)
            if part is None:
                continue
            read = place.to_array(tensor.read(place.tensor_box(part)))
            if part == box:  # all of it: without another copy
                return read
            if values is None:
                values = np.zeros(box_sizes(box), self.dtype)
            box_view(values, relative_box(part, box))[...] = read
        return np.zeros(box_sizes(box), self.dtype) if values is None else values

    def blocks(self, box: Box, elements: int) -> Iterator[Box]:
        """Yields the blocks of a box to read, as its tensors have them."""
        for tensor, place in self.parts:
            part = intersect(box, place.box)
            if part is not None:
                for block in tensor.blocks(place.tensor_box(part), elements):
                    yield place.array_box(block)

    def __mul__(self, factor: float) -> "SavedArray":
        """Multiplies the values by a number."""
        dtype = np.promote_types(self.dtype, np.float32)
        parts = []
        for tensor, at in self.parts:
            place = (tensor.name, tensor.path, NO_FILE, 0, tensor.shape, dtype)
            parts.append((ScaledTensor(*place, tensor, factor), at))
        return replace(self, dtype=dtype, parts=tuple(parts))

    def transpose(self, *dims: Any) -> "SavedArray":
        """Permutes the dims, as NumPy does."""
        if len(dims) == 1 and not isinstance(dims[0], int):
            dims = tuple(dims[0] or ())
        order = [dim % max(self.ndim, 1) for dim in dims or range(self.ndim)[::-1]]
        if sorted(order) != list(range(self.ndim)):
            raise self._misfit("transpose", f"a permutation of {self.ndim} dims", dims)

        def permuted(values: Sequence[Any], _: Any) -> tuple[Any, ...]:
            return tuple(values[dim] for dim in order)

        return self._with_dims(permuted)

    def swapaxes(self, first: int, second: int) -> "SavedArray":
        """Exchanges two dims."""
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        return self.transpose(order)

    def reshape(self, *shape: Any) -> "SavedArray":
        """Gives the elements another shape, in the same order; -1 is the size that is left."""
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        known = prod(size for size in shape if size != -1)
        if -1 in shape and known:
            left = prod(self.shape) // known
            shape = tuple(left if size == -1 else size for size in shape)
        if prod(shape) != prod(self.shape) or any(size < 0 for size in shape):
            raise self._misfit("reshape", f"a shape of {prod(self.shape)} elements", shape)
        if tuple(shape) == self.shape:
            return self
        return SavedArray.of_tensor(ReshapedTensor.of(self, tuple(shape)))

    def __getitem__(self, index: Any) -> "SavedArray":
        """Takes indices and slices without a step of the dims; a dim that has an index goes."""
        entries = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in entries:
            at = entries.index(Ellipsis)
            entries[at : at + 1] = [slice(None)] * (self.ndim - len(entries) + 1)
        if len(entries) > self.ndim:
            raise self._misfit("index", f"at most {self.ndim} entries", index)
        entries += [slice(None)] * (self.ndim - len(entries))
        bounds, dropped = [], []
        for dim, (entry, size) in enumerate(zip(entries, self.shape, strict=True)):
            if isinstance(entry, slice):
                start, stop, step = entry.indices(size)
            else:
                dropped.append(dim)
                start, stop, step = entry % max(size, 1), entry % max(size, 1) + 1, 1
                if not -size <= entry < size:
                    raise self._misfit("index", f"an index below {size} of dim {dim}", entry)
            if step != 1:
                raise self._misfit("index", "slices without a step", entry)
            bounds.append((start, max(start, stop)))
        return self._cut(tuple(bounds))._without(dropped)

    def _cut(self, box: Box) -> "SavedArray":
        """Takes a box of the array."""
        parts = []
        for tensor, at in self.parts:
            both = intersect(at.box, box)
            if both is not None:
                cut = PartOfTensor.of(tensor, at.tensor_box(both))
                start = tuple(lo - first for (lo, _), (first, _) in zip(both, box, strict=True))
                place = replace(at, start=start, size=box_sizes(both), shape=cut.shape)
                parts.append((cut, place))
        return replace(self, shape=box_sizes(box), parts=tuple(parts))

    def _without(self, dims: Sequence[int]) -> "SavedArray":
        """Drops dims of size 1."""

        def kept(values: Sequence[Any], _: Any) -> tuple[Any, ...]:
            return tuple(value for dim, value in enumerate(values) if dim not in dims)

        return self._with_dims(kept)

    def _with_dim(self, axis: int) -> "SavedArray":
        """Adds a dim of size 1."""

        def added(values: Sequence[Any], value: Any) -> tuple[Any, ...]:
            return (*values[:axis], value, *values[axis:])

        return self._with_dims(added)

    def _with_dims(self, changed: Callable[[Sequence[Any], Any], tuple[Any, ...]]) -> "SavedArray":
        """Changes the dims: `changed(values of the dims, that of a new dim of size 1)`."""
        parts = []
        for tensor, at in self.parts:
            start, size = changed(at.start, 0), changed(at.size, 1)
            place = replace(at, start=start, size=size, dims=changed(at.dims, None))
            parts.append((tensor, place))
        return replace(self, shape=changed(self.shape, 1), parts=tuple(parts))

    def _misfit(self, what: str, expected: str, got: object) -> ArgumentError:
        """Makes the error for a view that there is not."""
        return ArgumentError(
            f"no such {what} of a saved array",
            where=f"{self.name}, {self}",
            expected=expected,
            got=got,
        )


def damage(where: object, got: object, expected: str = "") -> DamageError:
    """Makes the error for files of another program's checkpoint that are not as it writes them."""
    return DamageError(NOT_READ, where=str(where), expected=expected, got=got, fix=AGAIN)


def tensors_of(array: SavedArray) -> list[StoredTensor]:
    """Lists the tensors of the files that an array is made of."""
    found: list[StoredTensor] = []
    for tensor, _ in array.parts:
        if isinstance(tensor, PartOfTensor | ScaledTensor):
            found += tensors_of(SavedArray.of_tensor(tensor.whole))
        elif isinstance(tensor, ReshapedTensor):
            found += tensors_of(tensor.array)
        else:
            found.append(tensor)
    return found


def is_read_in_blocks(array: SavedArray) -> bool:
    """Tells whether each block of the files is a block of the array, which is then read once."""
    for tensor, _ in array.parts:
        inner = tensor
        while isinstance(inner, PartOfTensor | ScaledTensor):
            inner = inner.whole
        if isinstance(inner, ReshapedTensor) and not inner.keeps_blocks:
            return False
    return True


def with_tensors(array: SavedArray, opened: Mapping[str, StoredTensor]) -> SavedArray:
    """Replaces the tensors of the files that an array is made of, by their names."""
    parts: list[tuple[StoredTensor, TensorMapping]] = []
    for tensor, at in array.parts:
        if isinstance(tensor, PartOfTensor | ScaledTensor):
            whole = SavedArray.of_tensor(tensor.whole)
            ((inner, _),) = with_tensors(whole, opened).parts
            parts.append((replace(tensor, whole=inner), at))
        elif isinstance(tensor, ReshapedTensor):
            parts.append((replace(tensor, array=with_tensors(tensor.array, opened)), at))
        else:
            parts.append((opened[tensor.name], at))
    return replace(array, parts=tuple(parts))


def _concatenate(arrays: Sequence[Any], axis: int = 0) -> SavedArray:
    """Puts arrays of a checkpoint behind one another, as `np.concatenate`."""
    _require_saved(arrays)
    first = arrays[0]
    axis %= max(first.ndim, 1)
    others = [shape[:axis] + shape[axis + 1 :] for shape in (each.shape for each in arrays)]
    if len(set(others)) > 1 or len({each.dtype for each in arrays}) > 1 or not first.ndim:
        raise ArgumentError(
            "arrays that do not fit together",
            where=f"np.concatenate, axis {axis}",
            expected="one dtype, and one shape but for that dim",
            got=", ".join(f"{each.name} {each}" for each in arrays),
        )
    parts, offset = [], 0
    for each in arrays:
        for tensor, at in each.parts:
            start = list(at.start)
            start[axis] += offset
            parts.append((tensor, replace(at, start=tuple(start))))
        offset += each.shape[axis]
    shape = (*first.shape[:axis], offset, *first.shape[axis + 1 :])
    name = ", ".join(dict.fromkeys(each.name for each in arrays))
    return SavedArray(name, shape, first.dtype, tuple(parts))


def stacked(arrays: Sequence[Any], axis: int = 0) -> SavedArray:
    """Stacks arrays of a checkpoint along a new dim, as `np.stack`."""
    arrays = list(arrays)
    _require_saved(arrays)
    axis %= arrays[0].ndim + 1
    return _concatenate([each._with_dim(axis) for each in arrays], axis)


def _moveaxis(array: SavedArray, source: int, destination: int) -> SavedArray:
    """Moves one dim, as `np.moveaxis`."""
    order = [dim for dim in range(array.ndim) if dim != source % array.ndim]
    order.insert(destination % array.ndim, source % array.ndim)
    return array.transpose(order)


def _require_saved(arrays: Sequence[Any]) -> None:
    """Raises ArgumentError for anything but arrays of a checkpoint."""
    others = [each for each in arrays if not isinstance(each, SavedArray)]
    if others or not arrays:
        raise ArgumentError(
            "something else among arrays of a checkpoint",
            expected="arrays of a checkpoint, and views of them",
            got=type(others[0]).__name__ if others else "none",
        )


_FUNCTIONS: dict[Any, Callable[..., SavedArray]] = {
    np.concatenate: _concatenate,
    np.stack: stacked,
    np.moveaxis: _moveaxis,
    np.swapaxes: SavedArray.swapaxes,
    np.transpose: lambda array, axes=None: array.transpose(axes or ()),
    np.reshape: lambda array, shape: array.reshape(shape),
}


@dataclass(frozen=True)
class PartOfTensor(ForeignTensor):
    """A box of a tensor."""

    whole: StoredTensor
    box: Box

    @classmethod
    def of(cls, tensor: StoredTensor, box: Box) -> StoredTensor:
        """Makes the tensor of a box; the tensor itself where that is all of it."""
        if box == full_box(tensor.shape):
            return tensor
        shape = box_sizes(box)
        return cls(tensor.name, tensor.path, NO_FILE, 0, shape, tensor.dtype, tensor, box)

    def contiguous_bytes(self, box: Box) -> int:
        """Counts the bytes of a box that are read together."""
        return self.whole.contiguous_bytes(self._in_whole(box))

    def blocks(self, box: Box, elements: int) -> Iterator[Box]:
        """Yields the blocks of a box to read, as the whole tensor has them."""
        for block in self.whole.blocks(self._in_whole(box), elements):
            yield relative_box(block, self.box)

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """Reads the values of a box. Raises DamageError, and OSError."""
        return self.whole.read(self._in_whole(box), scratch)

    def _in_whole(self, box: Box) -> Box:
        """Shifts a box to the coordinates of the whole tensor."""
        pairs = zip(box, self.box, strict=True)
        return tuple((lo + first, hi + first) for (lo, hi), (first, _) in pairs)


@dataclass(frozen=True)
class ScaledTensor(ForeignTensor):
    """A tensor times a number."""

    whole: StoredTensor
    factor: float

    def contiguous_bytes(self, box: Box) -> int:
        """Counts the bytes of a box that are read together."""
        return self.whole.contiguous_bytes(box)

    def blocks(self, box: Box, elements: int) -> Iterator[Box]:
        """Yields the blocks of a box to read, as the tensor has them."""
        yield from self.whole.blocks(box, elements)

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """Reads the values of a box. Raises DamageError, and OSError."""
        del scratch  # of another dtype
        values = self.whole.read(box).astype(self.dtype)
        values *= self.dtype.type(self.factor)
        return values


@dataclass(frozen=True)
class ReshapedTensor(ForeignTensor):
    """The elements of an array in another shape.

    Dims are in groups: those of the array that are joined, with those that they become. Of each
    group the elements between the first and the last of a box are read.
    """

    array: SavedArray
    groups: tuple[tuple[Bounds, Bounds], ...]  # (dims of the array, dims of the shape), each

    @classmethod
    def of(cls, array: SavedArray, shape: tuple[int, ...]) -> "ReshapedTensor":
        """Makes the tensor of the array's elements in a shape of as many."""
        first = array.parts[0][0].path if array.parts else Path()
        groups = _groups(array.shape, shape)
        return cls(array.name, first, NO_FILE, 0, shape, array.dtype, array, groups)

    def contiguous_bytes(self, box: Box) -> int:
        """Counts the bytes of a box: how it is read is for the array to choose."""
        return max(prod(box_sizes(box)), 1) << 20

    @property
    def keeps_blocks(self) -> bool:
        """Whether each block of the array is a box in this shape too."""
        return self._kept_blocks(full_box(self.shape), prod(self.shape)) is not None

    def blocks(self, box: Box, elements: int) -> Iterator[Box]:
        """Yields the blocks of a box to read: the array's, where they are boxes in this shape."""
        kept = self._kept_blocks(box, elements)
        yield from split_box(box, elements) if kept is None else kept

    def _kept_blocks(self, box: Box, elements: int) -> list[Box] | None:
        """Finds the parts of a box that the array's blocks are; None where one is no box."""
        around: list[Bounds] = []
        for (lo, hi), (first, last) in self.groups:
            _, start, stop = _cover(box[first:last], self.shape[first:last])
            around += _box_of_range(start, stop, self.array.shape[lo:hi])[0]
        kept = []
        for block in self.array.blocks(tuple(around), elements):
            own: list[Bounds] = []
            for (lo, hi), (first, last) in self.groups:
                cover, start, stop = _cover(block[lo:hi], self.array.shape[lo:hi])
                inside, own_start, own_stop = _box_of_range(start, stop, self.shape[first:last])
                if (start, stop) != (own_start, own_stop) or cover != block[lo:hi]:
                    return None
                own += inside
            part = intersect(tuple(own), box)
            if part is not None:
                kept.append(part)
        return kept

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """Reads the values of a box. Raises DamageError, and OSError."""
        del scratch  # more than the box may be read
        # Of each group: the box around the box, whose elements are a range of the group's.
        own: list[Bounds] = []
        whole: list[Bounds] = []
        lines, cuts = [], []
        for (lo, hi), (first, last) in self.groups:
            cover, start, stop = _cover(box[first:last], self.shape[first:last])
            saved, saved_start, saved_stop = _box_of_range(start, stop, self.array.shape[lo:hi])
            own += cover
            whole += saved
            lines.append(saved_stop - saved_start)
            cuts.append(slice(start - saved_start, stop - saved_start))
        values = self.array.read(tuple(whole)).reshape(lines)[tuple(cuts)]
        cover_box = tuple(own)
        return cast(
            np.ndarray,
            box_view(values.reshape(box_sizes(cover_box)), relative_box(box, cover_box)),
        )


def _groups(
    before: Sequence[int], after: Sequence[int]
) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """Splits two shapes of as many elements into the least parts of as many elements each."""
    cuts = []
    first = {prod(before[:dim]): dim for dim in range(len(before) + 1)}
    second = {prod(after[:dim]): dim for dim in range(len(after) + 1)}
    if prod(before):
        cuts = [(first[size], second[size]) for size in sorted(first.keys() & second.keys())]
    cuts = [(0, 0), *cuts[1:-1], (len(before), len(after))]
    return tuple(((lo, hi), (left, right)) for (lo, left), (hi, right) in pairwise(cuts))


def _cover(box: Box, shape: Sequence[int]) -> tuple[Box, int, int]:
    """Finds the least range of elements, in row-major order, around a box: (its box, range)."""
    if not shape:
        return (), 0, 1
    first = np.ravel_multi_index([lo for lo, _ in box], shape)
    last = np.ravel_multi_index([hi - 1 for _, hi in box], shape)
    return _box_of_range(int(first), int(last) + 1, shape)


def _box_of_range(start: int, stop: int, shape: Sequence[int]) -> tuple[Box, int, int]:
    """Finds the least box around a range of elements that is a range itself: (it, its range)."""
    if not shape:
        return (), 0, 1
    pairs = [(int(lo), int(hi)) for lo, hi in np.unravel_index((start, stop - 1), shape)]
    split = next((dim for dim, (lo, hi) in enumerate(pairs) if lo != hi), len(shape) - 1)
    bounds = [(lo, hi + 1) for lo, hi in pairs[: split + 1]]
    bounds += full_box(shape[split + 1 :])
    inner = prod(shape[split + 1 :])
    begin = int(np.ravel_multi_index([lo for lo, _ in bounds], shape))
    return tuple(bounds), begin, begin + (bounds[split][1] - bounds[split][0]) * inner
