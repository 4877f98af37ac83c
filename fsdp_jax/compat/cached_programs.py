"""Programs that jax's persistent compilation cache must not give back."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

_ONE_AT_A_TIME = threading.RLock()  # jax's switch is for the whole process


@contextmanager
def compiled_anew(mesh: Mesh, lowered: Any = None) -> Iterator[None]:
    """Compiles what its block compiles for several CPU devices, and leaves jax's cache aside.

    Devices have to start collectives in one order. XLA:CPU orders those of a loop against those
    around it in a program that it has just compiled; in one that it reads from the cache it does
    not (docs/design/xla-cpu-waits.md). Devices then wait for one another for ever, or take the data
    of another collective, and the process crashes.

    `lowered`: the only program that is compiled. If it has neither loops nor branches, whose bodies
    XLA schedules apart, it may come from the cache.
    """
    on_cpus = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    if not on_cpus or (lowered is not None and not _has_bodies(lowered.as_text())):
        yield
        return
    with _ONE_AT_A_TIME:
        enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        _use_cache(False)
        try:
            yield
        finally:
            _use_cache(enabled)


def _has_bodies(text: str) -> bool:
    return any(name in text for name in ("stablehlo.while", "stablehlo.case", "stablehlo.if"))


def _use_cache(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()  # jax reads its setting once, at the first compile after this
