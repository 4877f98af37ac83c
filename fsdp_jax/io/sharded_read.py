"""Tensors of files into the shards of arrays: each process reads what its devices hold, once.

An array is made of pieces: boxes of it, each of which is a tensor of the files with its dims in
another order. Pieces are read a block at a time and every block goes at once to all shards that
hold some of it, so that a tensor which is transposed on its way is still read in the order in which
it lies.

Where arrays lie in the host's memory (CPU devices, offloading), shards are made there. Elsewhere an
array's shards are put together on the host if they fit half of the budget, and otherwise on the
device, block by block.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol, Self

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from fsdp_jax.io.safetensors import Box, Tensor

STAGING = (
    256 << 20
)  # bytes of host memory that an import takes beside the arrays, unless told otherwise
WORKERS = min(os.cpu_count() or 1, 8)  # blocks that are read and moved at the same time
HOST_MEMORY = ("pinned_host", "unpinned_host")  # what jax calls the host's, on any device
BLOCK = 4 << 20  # bytes: larger ones fall out of the caches before they are turned (measured)
ALIGNED = 64  # bytes; a CPU device takes such memory over, and copies any other
RUN = (
    16 << 10
)  # bytes that are worth a read of their own; disks and kernels fetch about as much anyway
SMALL = 1 << 14  # elements that are not worth a detour


@dataclass(frozen=True)
class Piece:
    """A box of one of our arrays that is one tensor of theirs.

    Attributes:
        name: of the tensor.
        start: of the box, per dim of ours.
        size: of the box, per dim of ours.
        dims: per dim of ours, the dim of theirs that it is; None where theirs has none, and the box
            is 1 thick. Dims of theirs that none of ours is are of size 1.
        shape: of theirs.

    """

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    dims: tuple[int | None, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Self:
        """Ours is theirs."""
        return cls(name, (0,) * len(shape), tuple(shape), tuple(range(len(shape))), tuple(shape))

    def stacked(self, name: str, at: int) -> "Piece":
        """The same in an array that has one more dim first, where it is at `at`."""
        return Piece(name, (at, *self.start), (1, *self.size), (None, *self.dims), self.shape)

    @property
    def box(self) -> Box:
        """In ours."""
        return tuple(
            (start, start + size) for start, size in zip(self.start, self.size, strict=True)
        )

    def theirs(self, box: Box) -> Box:
        """A box of ours, within the piece, as a box of theirs."""
        found = [(0, 1)] * len(self.shape)
        for (lo, hi), start, dim in zip(box, self.start, self.dims, strict=True):
            if dim is not None:
                found[dim] = (lo - start, hi - start)
        return tuple(found)

    def ours(self, box: Box) -> Box:
        """A box of theirs as a box of ours."""
        return tuple(
            (start, start + 1) if dim is None else (start + box[dim][0], start + box[dim][1])
            for start, dim in zip(self.start, self.dims, strict=True)
        )

    def to_ours(self, block: np.ndarray) -> np.ndarray:
        """A block of theirs, as a view in the order of our dims."""
        kept = [dim for dim in self.dims if dim is not None]
        gone = [dim for dim in range(block.ndim) if dim not in kept]
        view = block.transpose(*kept, *gone)
        sizes = iter(view.shape)
        return view.reshape([1 if dim is None else next(sizes) for dim in self.dims])

    def to_theirs(self, block: Any) -> Any:
        """The piece, cut out of ours, as the tensor of theirs."""
        kept = [dim for dim in self.dims if dim is not None]
        view = block.reshape(
            [size for size, dim in zip(block.shape, self.dims, strict=True) if dim is not None]
        )
        return view.transpose([kept.index(dim) for dim in sorted(kept)]).reshape(self.shape)


class Sink(Protocol):
    """The memory of one shard while it is filled."""

    def write(self, box: Box, values: np.ndarray) -> None:
        """Casts and stores what belongs in a box of the shard; from several threads."""
        ...

    def arrays(self) -> list[jax.Array]:
        """The shard on each of its devices; nothing is written any more."""
        ...


class HostSink:
    """A shard that is put together on the host."""

    def __init__(self, values: np.ndarray, homes: Sequence[SingleDeviceSharding]) -> None:
        self.values, self._homes = values, homes

    def write(self, box: Box, values: np.ndarray) -> None:
        """As `Sink.write`."""
        cut(self.values, box)[...] = ordered(values)

    def arrays(self) -> list[jax.Array]:
        """As `Sink.arrays`. A CPU device keeps this very memory; jax never writes to it."""
        return [jax.device_put(self.values, home) for home in self._homes]


def aligned_zeros(shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> list[np.ndarray]:
    """Arrays in one piece of memory, which takes fewer and larger pages than many; unwritten ones
    take none.
    """
    sizes = [prod(shape) * dtype.itemsize for shape in shapes]
    starts = np.cumsum([0, *(-(-size // ALIGNED) * ALIGNED for size in sizes)])
    raw = np.zeros(starts[-1] + ALIGNED, np.uint8)
    raw = raw[-raw.ctypes.data % ALIGNED :]
    return [
        raw[start : start + size].view(dtype).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=False)
    ]


class DeviceSink:
    """A shard that is put together on its devices, too large for the host."""

    def __init__(
        self, shape: Sequence[int], dtype: np.dtype, homes: Sequence[SingleDeviceSharding]
    ) -> None:
        self._made = [
            jax.jit(lambda: jax.numpy.zeros(shape, dtype), out_shardings=home)() for home in homes
        ]
        self._homes, self._dtype, self._lock = homes, dtype, threading.Lock()

    def write(self, box: Box, values: np.ndarray) -> None:
        """As `Sink.write`."""
        block = np.ascontiguousarray(ordered(values).astype(self._dtype, copy=False))
        with self._lock:
            start = [lo for lo, _ in box]
            self._made = [_updated(made, block, start) for made in self._made]
            jax.block_until_ready(self._made)  # the block is in use until then

    def arrays(self) -> list[jax.Array]:
        """As `Sink.arrays`."""
        return self._made


@partial(jax.jit, donate_argnums=0)
def _updated(made: jax.Array, block: jax.Array, start: Sequence[int]) -> jax.Array:
    return jax.lax.dynamic_update_slice(made, block, start)


class Staging:
    """Threads that fill arrays, within `budget` bytes of host memory beside the arrays: a context.

    Each worker has a block that it reads into, one that it casts into where shards are on other
    devices than the host's, and the transfer of that one; blocks are an eighth of a worker's part
    at most, so that half of the budget is left for shards that are put together on the host.

    `read` counts the bytes that were read from files.
    """

    def __init__(self, budget: int = STAGING) -> None:
        if budget < 1:
            raise ValueError(f"the budget for staging is at least 1 byte, got {budget}")
        self.budget, self.block = budget, max(min(budget // (8 * WORKERS), BLOCK), 1)
        self.read = 0
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="import")
        self._local, self._lock = threading.local(), threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def place(
        self, leaf: jax.ShapeDtypeStruct, pieces: Sequence[Piece], tensors: Mapping[str, Tensor]
    ) -> jax.Array:
        """The array with the leaf's shape, dtype and sharding; zero where no piece is."""
        shape, sharding = tuple(leaf.shape), leaf.sharding
        assert sharding is not None, "callers check that a target has shardings"
        homes: dict[Box, list[SingleDeviceSharding]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            home = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            homes.setdefault(box_of(index, shape), []).append(home)
        held = sum(prod(hi - lo for lo, hi in box) for box in homes) * leaf.dtype.itemsize
        here = sharding.memory_kind in HOST_MEMORY or all(
            map(shares_memory, sharding.addressable_devices)
        )
        sinks: dict[Box, Sink]
        shapes = [tuple(hi - lo for lo, hi in box) for box in homes]
        if here or held <= self.budget // 2:
            made_here = zip(aligned_zeros(shapes, leaf.dtype), homes.items(), strict=True)
            sinks = {box: HostSink(values, each) for values, (box, each) in made_here}
        else:
            sinks = {
                box: DeviceSink(shape, leaf.dtype, homes[box])
                for box, shape in zip(homes, shapes, strict=True)
            }
        self.fill(sinks, pieces, tensors)
        made = [array for sink in sinks.values() for array in sink.arrays()]
        jax.block_until_ready(made)  # what is on its way still takes memory of the host
        return jax.make_array_from_single_device_arrays(shape, sharding, made)

    def fill(
        self, sinks: Mapping[Box, Sink], pieces: Sequence[Piece], tensors: Mapping[str, Tensor]
    ) -> None:
        """Reads what `sinks`, by their boxes of the array, hold of the pieces. Raises OSError."""
        jobs = [job for piece in pieces for job in self._jobs(sinks, piece, tensors[piece.name])]
        for _ in self._pool.map(lambda job: job(), jobs):
            pass

    def _jobs(
        self, sinks: Mapping[Box, Sink], piece: Piece, tensor: Tensor
    ) -> Iterator[Callable[[], None]]:
        """One for each block that is needed."""
        needed = [part for box in sinks if (part := overlap(box, piece.box)) is not None]
        if not needed:
            return
        around = tuple(
            (min(lo for lo, _ in dim), max(hi for _, hi in dim))
            for dim in zip(*needed, strict=True)
        )
        wanted = piece.theirs(around)
        if (
            tensor.run(wanted) < RUN
        ):  # so little at a time that reading what lies between costs nothing
            wanted = (*wanted[:1], *((0, size) for size in tensor.shape[1:]))
        for block in blocks(wanted, max(self.block // tensor.dtype.itemsize, 1)):
            ours = piece.ours(block)
            if any(overlap(ours, part) is not None for part in needed):
                yield partial(self._move, block, piece, tensor, sinks)

    def _move(self, block: Box, piece: Piece, tensor: Tensor, sinks: Mapping[Box, Sink]) -> None:
        values = piece.to_ours(tensor.read(block, self._scratch(tensor.dtype.itemsize)))
        with self._lock:
            self.read += values.nbytes
        ours = piece.ours(block)
        for box, sink in sinks.items():
            part = overlap(ours, box)
            if part is not None:
                sink.write(within(part, box), cut(values, within(part, ours)))

    def _scratch(self, item: int) -> np.ndarray:
        """One for each thread."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = np.empty(max(self.block, 16), np.uint8)
        assert self._local.scratch.size >= item
        return self._local.scratch


def shares_memory(device: jax.Device) -> bool:
    """Whether a device's memory is the host's."""
    return device.platform == "cpu"


def equal(first: Tensor, second: Tensor, limit: int = 8 << 20) -> bool:
    """Whether two tensors are the same to the bit, of `limit` bytes each at a time."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return all(
        first.read(box).tobytes() == second.read(box).tobytes()
        for box in blocks(tuple((0, size) for size in first.shape), limit // first.dtype.itemsize)
    )


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """What a shard's index means."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def overlap(first: Box, second: Box) -> Box | None:
    """What two boxes share; None where that is nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return both if all(lo < hi for lo, hi in both) else None


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    """The view of a box, an array even where it has no dims."""
    index: Any = (*(slice(*each) for each in box), ...)
    return array[index]


def within(part: Box, box: Box) -> Box:
    """A box as seen from the start of the one around it."""
    return tuple((lo - start, hi - start) for (lo, hi), (start, _) in zip(part, box, strict=True))


def blocks(box: Box, limit: int) -> Iterator[Box]:
    """A box in parts of at most `limit` elements, in order, along the first dims."""
    sizes = [hi - lo for lo, hi in box]
    if prod(sizes) == 0:
        return
    if not box:
        yield ()
        return
    dim = next(
        dim for dim in range(len(box)) if prod(sizes[dim + 1 :]) <= limit or dim == len(box) - 1
    )
    step = max(limit // prod(sizes[dim + 1 :]), 1)
    for index in np.ndindex(*sizes[:dim]):
        before = tuple((lo + i, lo + i + 1) for (lo, _), i in zip(box, index, strict=False))
        for first in range(*box[dim], step):
            yield (*before, (first, min(first + step, box[dim][1])), *box[dim + 1 :])


def ordered(values: np.ndarray) -> np.ndarray:
    """The same values with the last dim's neighbours next to each other, where that is worth it.

    jax's transfer to a CPU device turns a matrix in its caches, three times as fast as numpy does
    it (measured). It would narrow what has 8 bytes.
    """
    if _fastest(values) == values.ndim - 1 or values.size < SMALL or values.dtype.itemsize > 4:
        return values
    return np.asarray(jax.device_put(values, jax.local_devices(backend="cpu")[0]))


def _fastest(array: np.ndarray) -> int:
    """The dim whose neighbours lie next to each other."""
    sizes = enumerate(zip(array.strides, array.shape, strict=True))
    return min(((stride, dim) for dim, (stride, size) in sizes if size > 1), default=(0, 0))[1]
