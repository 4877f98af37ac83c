"""Tries a tokenizer in a process of its own, so that a hostile one ends that process and no other.

A `tokenizer.json` of a few bytes can ask for any time and memory: forty replacements of `a` by `aa`
make 2**40 letters of one. The package has no limit, and its code in Rust can neither be interrupted
nor outlive a failed allocation.
"""

import os
import signal
import string
import subprocess
import sys
from functools import lru_cache

from fsdp_jax.errors import human_bytes, printable

# A file of 55 MB, with 256,000 tokens and 150,000 added ones, takes 2 s and 0.3 GB.
SECONDS = 20  # of processor time: a busy machine is no reason to refuse
MEMORY = 2 << 30  # bytes of address space
SAMPLE = f"{string.printable}{'a' * 100} {'to be ' * 20}\u00e9\u4e2d\U0001f600"

# The child's program; its arguments are the limits. A text that a good tokenizer has no token for
# is an Exception; a panic is none.
PROGRAM = f"""
import contextlib, resource, sys
seconds, memory = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
with contextlib.suppress(ValueError, OSError):  # not on macOS
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
import tokenizers
try:
    tokenizer = tokenizers.Tokenizer.from_str(sys.stdin.buffer.read().decode())
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for added in (False, True):
        tokenizer.encode("a", add_special_tokens=added)
    with contextlib.suppress(Exception):
        ids = tokenizer.encode({SAMPLE!a}, add_special_tokens=False).ids
        tokenizer.decode(ids, skip_special_tokens=False)
except BaseException as error:
    print(ascii(str(error))[1:-1][:1000])
    sys.exit(1)
"""
# One thread with one heap: others would count as address space.
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


@lru_cache(maxsize=2)  # that of the weights is often that of the data
def find_fault(content: bytes) -> str:
    """Loads a `tokenizer.json` and encodes a short text; describes what failed, "" if nothing did.

    Takes as long as loading it, and a tenth of a second more.
    """
    paths = os.pathsep.join(filter(None, sys.path))
    child = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(SECONDS), str(MEMORY)],
        input=content,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # where Rust prints its stack
        env=os.environ | ONE_THREAD | {"PYTHONPATH": paths},
        start_new_session=True,  # Ctrl-C is for this process
        check=False,
    )
    if child.returncode == 0:
        return ""
    if child.returncode > 0:
        return printable(child.stdout.decode().strip()) or "it cannot be loaded"
    # Ended by a signal.
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {SECONDS} s"
    if child.returncode == -signal.SIGABRT:
        return f"it takes more than {human_bytes(MEMORY)} of memory"
    return f"the package ends with signal {-child.returncode}"
