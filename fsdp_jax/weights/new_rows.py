"""Rows of tokens that a model's vocabulary has and its weights have not: the mean of the others.

As transformers resizes an embedding: a token that was never trained then begins as an average one,
whose logit is the average too, and not as the most likely of all.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fsdp_jax.errors import message
from fsdp_jax.io.boxes import Box, box_sizes, box_view, full_box, split_box
from fsdp_jax.io.safetensors import StoredTensor
from fsdp_jax.io.tensor_mapping import TensorMapping

BLOCK = 1 << 21  # elements of a tensor that are summed at a time


@dataclass(frozen=True)
class MeanRows:
    """Rows that are all the mean of another tensor's; read in place of a `StoredTensor`.

    Attributes:
        mean: float32, of size 1 along the dim of the tokens.
        shape: of the rows.

    """

    mean: np.ndarray
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of what is read."""
        return self.mean.dtype

    def contiguous_bytes(self, box: Box) -> int:
        """Counts the bytes of a box: no file is read."""
        return int(np.prod(box_sizes(box))) * self.dtype.itemsize

    def blocks(self, box: Box, elements: int) -> Iterator[Box]:
        """Yields the blocks of a box to make, each of at most so many elements."""
        yield from split_box(box, elements)

    def read(self, box: Box, scratch: np.ndarray | None = None) -> np.ndarray:
        """Makes the values of a box."""
        of_mean = tuple(
            (0, 1) if size == 1 else bounds
            for bounds, size in zip(box, self.mean.shape, strict=True)
        )
        return np.broadcast_to(box_view(self.mean, of_mean), box_sizes(box)).copy()


def has_fewer_rows(tensor: StoredTensor, mapping: TensorMapping, vocabulary: int | None) -> bool:
    """Tells whether a tensor is the mapped one, but for tokens that it lacks.

    `vocabulary`: the dim of the array with a row for each token; None if it has none.
    """
    if vocabulary is None or len(tensor.shape) != len(mapping.shape):
        return False
    dim = mapping.dims[vocabulary]
    assert dim is not None, "an embedding is no stack"
    rows = tensor.shape[dim]
    others = (*tensor.shape[:dim], mapping.shape[dim], *tensor.shape[dim + 1 :])
    return others == mapping.shape and 0 < rows < mapping.shape[dim]


def with_mean_rows(
    tensor: StoredTensor, mapping: TensorMapping, vocabulary: int
) -> tuple[list[TensorMapping], MeanRows]:
    """Maps a tensor that `has_fewer_rows`, and after its rows new ones.

    Returns the mappings of both, the second by the name `of_new(mapping.name)`, and the new rows.
    """
    dim = mapping.dims[vocabulary]
    assert dim is not None
    old = tensor.shape[dim]
    new = mapping.shape[dim] - old

    def part(name: str, first: int, count: int) -> TensorMapping:
        start, size, shape = map(list, (mapping.start, mapping.size, mapping.shape))
        start[vocabulary] += first
        size[vocabulary] = shape[dim] = count
        return replace(mapping, name=name, start=tuple(start), size=tuple(size), shape=tuple(shape))

    parts = [part(mapping.name, 0, old), part(of_new(mapping.name), old, new)]
    return parts, MeanRows(_mean(tensor.read, tensor.shape, dim), parts[1].shape)


def of_new(name: str) -> str:
    """Names the new rows of a tensor."""
    return f"{name}, new rows"


def grown_array(
    whole: np.ndarray, shape: tuple[int, ...], dim: int, old: int, new: int
) -> np.ndarray:
    """Makes an array of `shape` of a whole one with `old` rows of tokens, and `new` with the mean.

    What either has after these rows is padding, and 0.
    """
    rows = np.moveaxis(whole, dim, 0)[:old]
    grown = np.zeros(shape, whole.dtype)
    view = np.moveaxis(grown, dim, 0)
    view[:old] = rows
    view[old:new] = _mean(lambda box: box_view(rows, box), rows.shape, 0)
    return grown


def warn_of_new_rows(where: object, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Says which parameters have rows that the weights lack: {path: rows in the weights, all}."""
    for old, new in sorted({*sizes.values()}):
        paths = [path for path, each in sizes.items() if each == (old, new)]
        warnings.warn(
            message(
                f"the last {new - old:,} rows of {' and '.join(paths)} are the mean of the others",
                where=str(where),
                expected=f"{new:,} tokens, the vocabulary of the model",
                got=f"{old:,} tokens",
                fix="train all of them: with LoRA by lora.trained, with_lora(trainable=)",
            ),
            stacklevel=4,  # the caller of import_weights
        )


def _mean(read: Callable[[Box], np.ndarray], shape: tuple[int, ...], dim: int) -> np.ndarray:
    """Computes the mean along a dim, which keeps size 1, float32, reading a part at a time."""
    total = np.zeros([1 if d == dim else size for d, size in enumerate(shape)])
    for box in split_box(full_box(shape), BLOCK):
        part = box_view(total, tuple((0, 1) if d == dim else each for d, each in enumerate(box)))
        part += read(box).astype(np.float64).sum(dim, keepdims=True)
    return (total / shape[dim]).astype(np.float32)
