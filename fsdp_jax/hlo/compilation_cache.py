"""Jax's persistent compilation cache: on, and off for callers that read XLA's reports."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache

SWITCH, FOLDER = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
_lock = threading.Lock()
_blocks = 0  # number of open blocks, in all threads
_before = True  # the switch as it was before the first of them


def cache_folder() -> str | None:
    """Returns the folder of the cache; None if there is none."""
    return getattr(jax.config, FOLDER)


def use_compilation_cache(folder: str | None) -> None:
    """Keeps programs that are compiled from now on in a folder, and finds them there; None: not."""
    jax.config.update(FOLDER, folder)
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
            _before = getattr(jax.config, SWITCH)
            _set_cache_enabled(False)
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                _set_cache_enabled(_before)


def _set_cache_enabled(enabled: bool) -> None:
    jax.config.update(SWITCH, enabled)
    compilation_cache.reset_cache()  # jax remembers whether the cache is enabled
