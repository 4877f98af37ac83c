"""Compiles without jax's persistent compilation cache, for those who read what XLA reports."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache

SWITCH = "jax_enable_compilation_cache"


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compiles every program of the block anew, and writes none of them to the cache.

    XLA gives no warning and writes no memory report for a cached program, and jax cannot read back
    a program for a machine that is not present.
    """
    before = getattr(jax.config, SWITCH)
    jax.config.update(SWITCH, False)
    compilation_cache.reset_cache()  # jax remembers whether the cache is enabled
    try:
        yield
    finally:
        jax.config.update(SWITCH, before)
        compilation_cache.reset_cache()
