"""What a test of `fsdp_jax/compat/` says where a library no longer does what is relied on."""

import importlib
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest


@contextmanager
def relied_on(library: str, name: str, what: str) -> Iterator[None]:
    """Fails, if the block does, with what a library no longer does and where to mend it.

    `name`: of the function or constant, in `fsdp_jax.compat`; `what`: a sentence about the library.
    """
    try:
        yield
    except Exception as error:
        changed = f"{library} {version(library)} changed. Relied on: {what}"
        met = f"{type(error).__name__}: {error}"
        pytest.fail(f"{changed}\nmend: fsdp_jax.compat.{name}\nmet: {met}", pytrace=False)


def in_gpu_compiler(text: str) -> bool:
    """Whether XLA's compiler for GPUs has a text, in the file of jax's plugin."""
    folder = Path(importlib.import_module("jax_plugins.xla_cuda13").__file__).parent
    with (
        open(folder / "xla_cuda_plugin.so", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return content.find(text.encode()) >= 0
