"""Memory that a process gives back to the system."""

import ctypes

from fsdp_jax.host_memory import return_freed


def resident():
    """MiB of this process."""
    with open("/proc/self/status") as status:
        return int(status.read().split("VmRSS:")[1].split()[0]) / 1024


def test_freed_memory_is_returned_to_the_system():
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    # 200 MiB, each too small to be mapped alone
    blocks = [libc.malloc(65536) for _ in range(3200)]
    for block in blocks:
        ctypes.memset(ctypes.c_void_p(block), 1, 65536)
    for block in blocks[:-1]:  # the last keeps the end of the heap
        libc.free(ctypes.c_void_p(block))
    before = resident()
    return_freed()
    returned = before - resident()
    libc.free(ctypes.c_void_p(blocks[-1]))
    assert returned > 150 or not hasattr(libc, "malloc_trim")
