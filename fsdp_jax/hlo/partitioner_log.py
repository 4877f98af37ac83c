"""Collects the arrays that XLA's partitioner replicates, which it reports only on stderr."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fsdp_jax.compat.compilation_cache import without_compilation_cache
from fsdp_jax.hlo.op_names import scoped_paths, strip_tracing

# "[spmd] Involuntary full rematerialization. The compiler cannot go from sharding ... for HLO
# operation %x = f32[8,16]{1,0} ..., metadata={op_name="..."}"
_MESSAGE = re.compile(r"\[spmd\] Involuntary full rematerialization\..*", re.IGNORECASE)
_OPERATION = re.compile(r"HLO operation:? %?\S+ = (\w+\[[\d,]*\])")
_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Rematerialization:
    """XLA's involuntary full rematerialization: to reshard an array, it replicates all of it."""

    op_name: str  # of the traced operation, "" where the compiler kept none
    shape: str  # of the array on one device before, as XLA writes it: `f32[8,16]`

    @property
    def path(self) -> str:
        """The parameter of an `fsdp` scope around it, else the name that tracing gave it."""
        return "+".join(scoped_paths(self.op_name)) or strip_tracing(self.op_name)


@contextmanager
def collect_rematerializations() -> Iterator[list[Rematerialization]]:
    """Collects XLA's warnings of involuntary full rematerialization while the block compiles.

    The list is filled when the block ends, also by an exception. File descriptor 2 of the whole
    process is redirected for that long and its output then written out unchanged, so blocks may be
    nested; the last output of a process that is killed meanwhile is lost. Jax's compilation cache
    is off in the block, because a cached program gives no warning. XLA gives none either where
    TF_CPP_MIN_LOG_LEVEL silences it.
    """
    # XLA writes to the file descriptor, past Python's `sys.stderr`.
    collected: list[Rematerialization] = []
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as redirected:
        os.dup2(redirected.fileno(), 2)
        try:
            with without_compilation_cache():
                yield collected
        finally:
            # Restore it first, so that the output below reaches the user.
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
            redirected.seek(0)
            text = redirected.read()
            with os.fdopen(2, "wb", closefd=False) as stderr:
                stderr.write(text)
            collected += find_rematerializations(text.decode(errors="replace"))


def find_rematerializations(text: str) -> list[Rematerialization]:
    """Finds the rematerializations in XLA's log, each once."""
    replicated = []
    for warning in _MESSAGE.findall(text):
        name = next(iter(_NAME.findall(warning)), "")
        shape = next(iter(_OPERATION.findall(warning)), "")
        replicated.append(Rematerialization(name, shape))
    return list(dict.fromkeys(replicated))
