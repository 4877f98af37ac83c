"""Host memory: its names in JAX and in XLA, moving arrays there and back, and giving it back.

To use another kind in its place is a change of this file alone.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

HOST = "pinned_host"  # JAX's name of the memory of a host that its devices can read and write
HOST_KINDS = (HOST, "unpinned_host")  # all kinds of memory that are a host's
HOST_SPACE = 5  # XLA's number of host memory, on GPUs and TPUs: `S(5)` in a layout
MMAP_THRESHOLD = -3  # mallopt's M_MMAP_THRESHOLD


def to_host(tree: Any) -> Any:
    """Moves arrays to host memory; within a jit, where their shardings stay."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: Any) -> Any:
    """Moves arrays to device memory; within a jit, where their shardings stay."""
    return jax.device_put(tree, jax.memory.Space.Device)


def is_on_host(aval: Any) -> bool:
    """Tells whether a value of a traced program is in host memory; False for other things."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def in_host_memory(sharding: jax.sharding.Sharding) -> bool:
    """Tells whether shards are in the memory of a host, which is that of CPU devices."""
    devices: set[jax.Device] = sharding.device_set
    on_cpu = all(device.platform == "cpu" for device in devices)
    return on_cpu or sharding.memory_kind in HOST_KINDS


def return_freed() -> None:
    """Returns memory to the system that was freed, such as what a compiler took; glibc alone can.

    XLA's compiler leaves it in the arenas of many threads, of which a step's large arrays use none.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Makes GNU malloc return freed blocks to the system while a checkpoint is read.

    It would keep blocks below 32 MiB for itself: reading 2 GiB took 0.7 GiB beside the state, and
    takes 0.1 (measured). Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        mallopt(MMAP_THRESHOLD, 32 << 20)  # the upper end of malloc's own adjustment
