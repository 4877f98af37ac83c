"""Which programs jax's persistent compilation cache holds."""

import functools
import re
from typing import Any

from jax._src import compilation_cache

# The instruction of a collective, and the line that begins the computation of the whole program.
_COLLECTIVE = re.compile(
    r" (?:ragged-)?(?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-\w+)(?:-start)?\("
)
_ENTRY = re.compile(r"^ENTRY [^\n]*\n(?: [^\n]*\n)*", re.MULTILINE)


def has_collectives_in_loops(text: str) -> bool:
    """Whether an optimized program has collectives in a loop, a conditional or a call."""
    return _COLLECTIVE.search(_ENTRY.sub("", text)) is not None


@functools.cache  # once in a process
def compile_loops_anew() -> None:
    """Keeps programs with collectives in loops, for CPUs, out of jax's persistent cache.

    Devices have to start collectives in one order. XLA:CPU orders those of a loop against those
    around it in a program that it has just compiled; in one that it reads from the cache it does
    not (docs/design/xla-cpu-waits.md). Devices then wait for one another for ever, take the data of
    another collective, or the process crashes.

    It holds for all programs of the process: these are not written, and those that another process
    has written are compiled again.
    """
    read = compilation_cache.get_executable_and_time
    write = compilation_cache.put_executable_and_time

    @functools.wraps(read)
    def read_in_order(
        cache_key: str, compile_options: Any, backend: Any, *rest: Any, **named: Any
    ) -> tuple[Any, int | None]:
        executable, seconds = read(cache_key, compile_options, backend, *rest, **named)
        return (None, None) if _loses_order(executable, backend) else (executable, seconds)

    @functools.wraps(write)
    def write_in_order(
        cache_key: str, module_name: str, executable: Any, backend: Any, *rest: Any, **named: Any
    ) -> None:
        if not _loses_order(executable, backend):
            write(cache_key, module_name, executable, backend, *rest, **named)

    compilation_cache.get_executable_and_time = read_in_order
    compilation_cache.put_executable_and_time = write_in_order


def _loses_order(executable: Any, backend: Any) -> bool:
    if executable is None or backend.platform != "cpu":
        return False
    return any(has_collectives_in_loops(each.to_string()) for each in executable.hlo_modules())
