"""Jax's persistent compilation cache: on, off, and to take out and give back one program."""

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
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
    return getattr(jax.config, _FOLDER) or None


def cache_is_enabled() -> bool:
    """Tells whether jax's cache is switched on, whether or not it has a folder."""
    return bool(getattr(jax.config, _SWITCH))


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
    if cache_folder() is None or not loses_order(mesh, lowered):
        return nullcontext()
    return without_compilation_cache()


def loses_order(mesh: Mesh, lowered: Any = None) -> bool:
    """Tells whether XLA reads a program without the order of its collectives.

    It does on several CPU devices, in loops and branches; `lowered` None may be any program.
    """
    if mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
        return False
    text = "" if lowered is None else lowered.as_text()
    return not text or any(f"stablehlo.{name}" in text for name in ("while", "case", "if"))


class ProgramNotReadError(Exception):
    """Jax does not read a compiled program; the text says why."""


Compile = Callable[[], Any]  # of one lowered program: `lowered.compile`, with its options


def key_of_program(compile_it: Compile) -> str:
    """Returns jax's key of a program: all that its compiler depends on, hashed; compiles nothing.

    Processes that compile the same program may have different keys of it: those of CPUs have.
    Returns "" where jax does not tell: its cache is not for this platform, and it has compiled the
    program, in vain; or it has compiled it before in this process.
    """
    with tempfile.TemporaryDirectory() as folder, _only_cache(folder), _misses_raise():
        try:
            compile_it()
        except _MissError as miss:
            return miss.key
    return ""


def compile_and_take(compile_it: Compile, key: str) -> tuple[Any, bytes]:
    """Compiles a program; returns it, and what jax keeps of it, b"" if it keeps nothing.

    It keeps nothing in a process other than 0, and of a program that calls back to Python.
    """
    with tempfile.TemporaryDirectory() as folder, _only_cache(folder):
        compiled = compile_it()
        file = _file_of(folder, key)
        content = file.read_bytes() if file.exists() else b""
    return compiled, content


def read_compiled(compile_it: Compile, key: str, content: bytes) -> Any:
    """Has jax read a program that `compile_and_take` took, in place of compiling it.

    `key`: of the program in this process. What it reads is not unpickled, but it is code. Raises
    ProgramNotReadError.
    """
    with tempfile.TemporaryDirectory() as folder, _only_cache(folder), _misses_raise():
        try:
            _file_of(folder, key).write_bytes(content)
            return compile_it()
        except _MissError as miss:
            raise ProgramNotReadError("jax asks for another program") from miss
        except Exception as error:  # of the disk, zlib, zstandard, XLA
            raise ProgramNotReadError(f"{type(error).__name__}: {error}") from error


def _file_of(folder: str, key: str) -> Path:
    return Path(folder) / f"{key}-cache"


# Every program is kept, in a folder of its own, by no caches of XLA's own beside it.
_ONE_PROGRAM = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",
    "jax_compilation_cache_max_size": -1,
    "jax_compilation_cache_check_contents": False,
    "jax_raise_persistent_cache_errors": True,
}


def _only_cache(folder: str) -> AbstractContextManager[None]:
    """Has jax keep every program in a folder, and nowhere else, for the time of a block."""
    return _set({_SWITCH: True, _FOLDER: folder, **_ONE_PROGRAM})


@contextmanager
def _set(options: dict[str, Any]) -> Iterator[None]:
    """Sets options of jax for the time of a block."""
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


class _MissError(BaseException):  # jax turns an Exception into a warning
    """Jax has not found a program, whose `key` this is, and would compile it next."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class _RaiseMiss(logging.Handler):
    """Raises `_MissError` in the thread that made it, where jax logs a miss of its cache."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._thread = threading.get_ident()

    def handle(self, record: logging.LogRecord) -> bool:
        """Reads the key of the record, its last argument; ignores all other records."""
        if record.thread == self._thread and _MISS in str(record.msg) and record.args:
            raise _MissError(str(tuple(record.args)[-1]))
        return False


_MISS = "PERSISTENT COMPILATION CACHE MISS"


@contextmanager
def _misses_raise() -> Iterator[None]:
    """Has jax raise `_MissError` in place of compiling what its cache does not have."""
    logger, handler = logging.getLogger("jax"), _RaiseMiss()
    level = logger.level
    logger.handlers.insert(0, handler)  # before those that would print it
    logger.setLevel(logging.WARNING)
    try:
        with _set({"jax_explain_cache_misses": True}):
            yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _set_cache_enabled(enabled: bool) -> None:
    jax.config.update(_SWITCH, enabled)
    compilation_cache.reset_cache()  # jax remembers whether the cache is enabled
