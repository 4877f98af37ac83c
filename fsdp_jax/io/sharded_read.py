"""Reads tensors of files into the shards of arrays: each process reads its own shards, once.

An array is assembled from mapped tensors, block by block. A block is read once and copied to every
shard that overlaps it, so that a tensor that is transposed in memory is still read in file order.

Shards in host memory (of CPU devices, or of a host memory kind) are assembled in place. Otherwise
an array's shards are assembled on the host if they fit half of the staging budget, or on the
device, block by block.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from fsdp_jax.host_memory import in_host_memory
from fsdp_jax.io.array_specs import array_bytes
from fsdp_jax.io.boxes import (
    Box,
    bounding_box,
    box_of_index,
    box_sizes,
    box_view,
    full_box,
    intersect,
    relative_box,
    split_box,
)
from fsdp_jax.io.safetensors import StoredTensor
from fsdp_jax.io.tensor_mapping import TensorMapping

STAGING_BYTES = 256 << 20  # default host memory of an import, beside the arrays themselves
WORKERS = min(os.cpu_count() or 1, 8)  # blocks read and copied at the same time
MAX_BLOCK = 4 << 20  # bytes; larger blocks fall out of the caches before they are transposed
ALIGNMENT = 64  # bytes; a CPU device adopts memory aligned to it, and copies any other
MIN_READ = 16 << 10  # bytes; below this, reading the gaps too costs nothing
MIN_TRANSPOSE = 1 << 14  # elements; below this, numpy transposes fast enough


class HostBuffer:
    """A shard that is assembled in host memory."""

    def __init__(self, values: np.ndarray, targets: Sequence[SingleDeviceSharding]) -> None:
        self.values = values
        self._targets = targets

    def write(self, box: Box, values: np.ndarray) -> None:
        """Casts `values` and stores them in a box of the shard. Thread-safe."""
        box_view(self.values, box)[...] = row_major(values)

    def arrays(self) -> list[jax.Array]:
        """Transfers the shard to each of its devices; no write may follow.

        A CPU device adopts the memory itself.
        """
        return [jax.device_put(self.values, target) for target in self._targets]


class DeviceBuffer:
    """A shard that is assembled on its devices, too large for the staging budget."""

    def __init__(
        self, shape: Sequence[int], dtype: np.dtype, targets: Sequence[SingleDeviceSharding]
    ) -> None:
        self._arrays = [
            jax.jit(lambda: jax.numpy.zeros(shape, dtype), out_shardings=target)()
            for target in targets
        ]
        self._dtype = dtype
        self._lock = threading.Lock()

    def write(self, box: Box, values: np.ndarray) -> None:
        """Casts `values` and stores them in a box of the shard. Thread-safe."""
        block = np.ascontiguousarray(row_major(values).astype(self._dtype, copy=False))
        start = [lo for lo, _ in box]
        with self._lock:
            self._arrays = [_update(array, block, start) for array in self._arrays]
            jax.block_until_ready(self._arrays)  # the block is in use until then

    def arrays(self) -> list[jax.Array]:
        """Returns the shard on each of its devices."""
        return self._arrays


ShardBuffer = HostBuffer | DeviceBuffer


@partial(jax.jit, donate_argnums=0)
def _update(array: jax.Array, block: jax.Array, start: Sequence[int]) -> jax.Array:
    """Writes `block` at the index `start` of the array, which is donated."""
    return jax.lax.dynamic_update_slice(array, block, start)


class ShardReader(AbstractContextManager["ShardReader"]):
    """A pool of threads that read `tensors` into arrays, with `budget` bytes for staging.

    Each worker has a block to read into, one to cast into for devices with memory of their own, and
    the transfer of that one. Blocks are at most an eighth of a worker's share of the budget, so
    that half of the budget is left for shards that are assembled on the host.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], budget: int = STAGING_BYTES) -> None:
        if budget < 1:
            raise ValueError(f"the budget for staging is at least 1 byte, got {budget}")
        self.tensors = tensors
        self.budget = budget
        self.block_bytes = max(min(budget // (8 * WORKERS), MAX_BLOCK), 1)
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="import")
        self._local = threading.local()

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read_array(
        self, leaf: jax.ShapeDtypeStruct, mappings: Sequence[TensorMapping]
    ) -> jax.Array:
        """Reads the mapped tensors into an array of the leaf's shape, dtype and sharding.

        Elements that no tensor is mapped to are 0.
        """
        shape = tuple(leaf.shape)
        sharding = leaf.sharding
        assert sharding is not None, "callers check that a target has shardings"

        # Assemble on the host where the shards stay there or fit the budget, or on the devices.
        targets = targets_of(sharding, shape)
        shapes = [box_sizes(box) for box in targets]
        size = sum(array_bytes(sizes, leaf.dtype) for sizes in shapes)
        buffers: dict[Box, ShardBuffer]
        if in_host_memory(sharding) or size <= self.budget // 2:
            values = aligned_zeros(shapes, leaf.dtype)
            buffers = {
                box: HostBuffer(part, targets[box])
                for box, part in zip(targets, values, strict=True)
            }
        else:
            buffers = {
                box: DeviceBuffer(sizes, leaf.dtype, targets[box])
                for box, sizes in zip(targets, shapes, strict=True)
            }
        self.fill_buffers(buffers, mappings)

        # Make one array of the shards.
        arrays = [array for buffer in buffers.values() for array in buffer.arrays()]
        jax.block_until_ready(arrays)  # a transfer holds host memory until it is done
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def fill_buffers(
        self,
        buffers: Mapping[Box, ShardBuffer],
        mappings: Sequence[TensorMapping],
        tensors: Mapping[str, StoredTensor] | None = None,
    ) -> None:
        """Reads the mapped tensors into `buffers`, {box of the array: buffer}. Raises OSError.

        `tensors`: others than the reader's, by the names in the mappings.
        """
        found = self.tensors if tensors is None else tensors
        blocks = [
            (mapping, found[mapping.name], block)
            for mapping in mappings
            for block in self._needed_blocks(buffers, mapping, found[mapping.name])
        ]
        # Where a block cannot be as small as it should be, fewer are held at a time.
        sizes = [array_bytes(box_sizes(block), tensor.dtype) for _, tensor, block in blocks]
        held = max(self.budget // (4 * max(sizes, default=1)), 1)
        room = threading.Semaphore(held)

        def copy(block: tuple[TensorMapping, StoredTensor, Box]) -> None:
            with room:
                self._copy_block(buffers, *block)

        for _ in self._pool.map(copy, blocks):
            pass  # raises the error of a copy that failed

    def _needed_blocks(
        self, buffers: Mapping[Box, ShardBuffer], mapping: TensorMapping, tensor: StoredTensor
    ) -> Iterator[Box]:
        """Yields the box of the tensor for each block that some buffer needs."""
        needed = [part for box in buffers if (part := intersect(box, mapping.box)) is not None]
        if not needed:
            return
        # Whole rows where only short stretches of each are needed: one long read is faster.
        read_box = mapping.tensor_box(bounding_box(needed))
        if tensor.contiguous_bytes(read_box) < MIN_READ:
            read_box = (*read_box[:1], *full_box(tensor.shape[1:]))
        for block in tensor.blocks(read_box, self._elements(tensor)):
            array_block = mapping.array_box(block)
            if any(intersect(array_block, part) is not None for part in needed):
                yield block

    def _copy_block(
        self,
        buffers: Mapping[Box, ShardBuffer],
        mapping: TensorMapping,
        tensor: StoredTensor,
        block: Box,
    ) -> None:
        """Reads a block of the tensor, and writes to each buffer the part that is in its box."""
        # Read in the order of the file; each copy puts the elements in the order of the shard.
        # A block, or one element of any dtype, is read into memory that the thread keeps: the
        # system would clear new memory for each.
        if not hasattr(self._local, "scratch"):
            self._local.scratch = np.empty(max(self.block_bytes, 16), np.uint8)
        read = tensor.read(block, self._local.scratch)
        for piece in split_box(block, self._elements(tensor)):
            values = mapping.to_array(box_view(read, relative_box(piece, block)))
            array_block = mapping.array_box(piece)
            for box, buffer in buffers.items():
                part = intersect(array_block, box)
                if part is not None:
                    part_values = box_view(values, relative_box(part, array_block))
                    buffer.write(relative_box(part, box), part_values)

    def _elements(self, tensor: StoredTensor) -> int:
        """Counts the elements of a tensor in a block."""
        return max(self.block_bytes // tensor.dtype.itemsize, 1)


def targets_of(sharding: Any, shape: tuple[int, ...]) -> dict[Box, list[SingleDeviceSharding]]:
    """Finds which devices of this process hold which part of an array; replicas share a part."""
    targets: dict[Box, list[SingleDeviceSharding]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        targets.setdefault(box_of_index(index, shape), []).append(target)
    return targets


def aligned_zeros(shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> list[np.ndarray]:
    """Makes zeros in one aligned allocation, which takes fewer and larger pages than many.

    Pages that are never written take no memory.
    """
    # Each array begins at a multiple of the alignment, and so does the first.
    sizes = [array_bytes(shape, dtype) for shape in shapes]
    starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)])
    raw = np.zeros(starts[-1] + ALIGNMENT, np.uint8)
    raw = raw[-raw.ctypes.data % ALIGNMENT :]
    return [
        raw[start : start + size].view(dtype).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=False)
    ]


def tensors_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Tells whether two tensors are bitwise equal, reading 8 MiB of each at a time."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return all(
        first.read(box).tobytes() == second.read(box).tobytes()
        for box in split_box(full_box(first.shape), 2**23 // first.dtype.itemsize)
    )


def row_major(values: np.ndarray) -> np.ndarray:
    """Copies values to have a contiguous last dim, where that is worth it.

    jax's transfer to a CPU device transposes in cache-sized tiles, three times as fast as numpy
    (measured). It would narrow dtypes of 8 bytes.
    """
    sizes = enumerate(zip(values.strides, values.shape, strict=True))
    strides = [(stride, dim) for dim, (stride, size) in sizes if size > 1]
    if (
        min(strides, default=(0, 0))[1] == values.ndim - 1
        or values.size < MIN_TRANSPOSE
        or values.dtype.itemsize > 4
    ):
        return values
    return np.asarray(jax.device_put(values, jax.local_devices(backend="cpu")[0]))
