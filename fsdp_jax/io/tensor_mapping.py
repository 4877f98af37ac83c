"""Maps a tensor of a file to its place in an array: a box, with the dims in another order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from fsdp_jax.io.boxes import Box


@dataclass(frozen=True)
class TensorMapping:
    """Maps one tensor of the files onto a box of one of our arrays."""

    name: str  # of the tensor
    start: tuple[int, ...]  # first index of the box, per dim of the array
    size: tuple[int, ...]  # of the box, per dim of the array
    # Per dim of the array, the dim of the tensor; None if the tensor lacks it, and the box has size
    # 1 there. Dims of the tensor that are not listed have size 1.
    dims: tuple[int | None, ...]
    shape: tuple[int, ...]  # of the tensor

    @classmethod
    def identity(cls, name: str, shape: Sequence[int]) -> Self:
        """Maps a tensor onto a whole array of its shape."""
        return cls(name, (0,) * len(shape), tuple(shape), tuple(range(len(shape))), tuple(shape))

    def in_stack(self, name: str, index: int) -> "TensorMapping":
        """Maps tensor `name` onto entry `index` of a stack of such arrays."""
        return TensorMapping(
            name, (index, *self.start), (1, *self.size), (None, *self.dims), self.shape
        )

    @property
    def transpose(self) -> "TensorMapping":
        """The mapping of the transpose of the tensor, which has two dims."""
        dims = tuple(None if dim is None else 1 - dim for dim in self.dims)
        return replace(self, dims=dims, shape=self.shape[::-1])

    @property
    def box(self) -> Box:
        """The box of the array that the tensor is mapped onto."""
        return tuple(
            (start, start + size) for start, size in zip(self.start, self.size, strict=True)
        )

    def tensor_box(self, box: Box) -> Box:
        """Finds the box of the tensor for a box of the array within the mapped one."""
        bounds = [(0, 1)] * len(self.shape)  # for dims that the array lacks
        for (lo, hi), start, dim in zip(box, self.start, self.dims, strict=True):
            if dim is not None:
                bounds[dim] = (lo - start, hi - start)
        return tuple(bounds)

    def array_box(self, box: Box) -> Box:
        """Finds the box of the array that a box of the tensor is mapped onto."""
        bounds = []
        for start, dim in zip(self.start, self.dims, strict=True):
            lo, hi = (0, 1) if dim is None else box[dim]
            bounds.append((start + lo, start + hi))
        return tuple(bounds)

    def to_array(self, block: np.ndarray) -> np.ndarray:
        """Views a block of the tensor with the array's dims."""
        mapped = [dim for dim in self.dims if dim is not None]
        # The dims that the array lacks come last, and go: they have size 1.
        dropped = [dim for dim in range(block.ndim) if dim not in mapped]
        view = block.transpose(*mapped, *dropped)
        sizes = iter(view.shape)
        return view.reshape([1 if dim is None else next(sizes) for dim in self.dims])

    def to_tensor(self, block: Any) -> Any:
        """Makes the tensor from the values of the whole mapped box of the array."""
        # Drop the array's dims that the tensor lacks, and put the others in its order.
        mapped = [dim for dim in self.dims if dim is not None]
        sizes = [size for size, dim in zip(block.shape, self.dims, strict=True) if dim is not None]
        view = block.reshape(sizes)
        return view.transpose([mapped.index(dim) for dim in sorted(mapped)]).reshape(self.shape)
