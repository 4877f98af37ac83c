"""What XLA's partitioner only says on the process's standard error: arrays that it makes whole on
every device.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fsdp_jax.hlo.op_names import scopes, stripped

_MESSAGE = re.compile(r"\[spmd\] Involuntary full rematerialization\..*", re.IGNORECASE)
_OPERATION = re.compile(r"HLO operation:? %?\S+ = (\w+\[[\d,]*\])")
_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Rematerialization:
    """A resharding for which XLA found no way but to replicate the array.

    Attributes:
        op_name: of the traced operation, "" where the compiler kept none.
        shape: of the array on one device before, as XLA writes it: `f32[8,16]`.
        path: the parameter of an `fsdp` scope around it, else the operation without what tracing
            adds.

    """

    op_name: str
    shape: str
    path: str


@contextmanager
def rematerializations() -> Iterator[list[Rematerialization]]:
    """Collects what XLA says of involuntary full rematerialization while the block compiles.

    The list is filled when the block ends, by an exception too. File descriptor 2 of the whole
    process is held back for that long and then written out unchanged, so blocks may be nested; the
    last words of a process that is killed meanwhile are lost. A program that comes from jax's
    compilation cache is not partitioned again and says nothing, neither does XLA where
    TF_CPP_MIN_LOG_LEVEL silences its warnings.
    """
    found: list[Rematerialization] = []
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield found
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            held.seek(0)
            text = held.read()
            with os.fdopen(2, "wb", closefd=False) as stderr:
                stderr.write(text)
            found += find(text.decode(errors="replace"))


def find(text: str) -> list[Rematerialization]:
    """The rematerializations in XLA's log, each once."""
    found = []
    for said in _MESSAGE.findall(text):
        shape, name = _OPERATION.search(said), _NAME.search(said)
        op_name = name.group(1) if name else ""
        path = "+".join(scopes(op_name)) or stripped(op_name)
        found.append(Rematerialization(op_name, shape.group(1) if shape else "", path))
    return list(dict.fromkeys(found))
