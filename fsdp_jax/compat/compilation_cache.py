"""Jax's persistent compilation cache: on, and off where a program has to be compiled anew."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

_SWITCH, _FOLDER = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
_lock = threading.Lock()
_blocks = 0  # number of open blocks, in all threads
_before = True  # the switch as it was before the first of them


def cache_folder() -> str | None:
    """Returns the folder of the cache; None if there is none."""
    return getattr(jax.config, _FOLDER)


def use_compilation_cache(folder: str | None) -> None:
    """Keeps programs that are compiled from now on in a folder, and finds them there; None: not."""
    jax.config.update(_FOLDER, folder)
    compilation_cache.reset_cache()  # jax remembers that there was none


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compiles every program of the block anew, and writes none of them to the cache.

    XLA gives no warning and writes no memory report for a cached program, and jax cannot read back
    a program for a machine that is not present. The switch is the process's: programs that other
    threads compile meanwhile are not cached either.
    """
    global _blocks, _before
    with _lock:
        if _blocks == 0:
            _before = getattr(jax.config, _SWITCH)
            _set_cache_enabled(False)
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                _set_cache_enabled(_before)


def without_cache_on_cpus(mesh: Mesh, lowered: Any = None) -> AbstractContextManager[None]:
    """Makes a block that compiles anew what has collectives in loops, for several CPU devices.

    Devices have to start collectives in one order. XLA:CPU orders those of a loop against those
    around it in a program that it has just compiled; in one that it reads from the cache it does
    not (docs/design/xla-cpu-waits.md). Devices then wait for one another for ever, or take the data
    of another collective, and the process crashes.

    `lowered`: the only program that the block compiles. If it has neither loops nor branches, whose
    bodies XLA schedules apart, it may come from the cache.
    """
    several_cpus = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    if not several_cpus or cache_folder() is None:
        return nullcontext()
    text = "" if lowered is None else lowered.as_text()
    if text and not any(f"stablehlo.{name}" in text for name in ("while", "case", "if")):
        return nullcontext()
    return without_compilation_cache()


def _set_cache_enabled(enabled: bool) -> None:
    jax.config.update(_SWITCH, enabled)
    compilation_cache.reset_cache()  # jax remembers whether the cache is enabled
