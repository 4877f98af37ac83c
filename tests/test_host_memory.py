"""Memory that a process gives back to the system."""

import ctypes
import subprocess
import sys

CHILD = """
import ctypes
from fsdp_jax.host_memory import return_freed

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def resident():
    with open("/proc/self/status") as status:
        return int(status.read().split("VmRSS:")[1].split()[0]) / 1024

blocks = [libc.malloc(65536) for _ in range(3200)]  # 200 MiB, each too small to be mapped alone
for block in blocks:
    ctypes.memset(ctypes.c_void_p(block), 1, 65536)
for block in blocks[:-1]:  # the last keeps the end of the heap
    libc.free(ctypes.c_void_p(block))
before = resident()
return_freed()
print(before - resident())
"""


def test_freed_memory_is_returned_to_the_system():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    returned = float(done.stdout)
    assert returned > 150 or not hasattr(ctypes.CDLL(None), "malloc_trim")
