"""Lets the processes of one run agree. What it calls waits for all: for the main thread only."""

import os
import platform
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from fsdp_jax.errors import ReadableError

# How the processes compare facts, given their subject and the seconds to wait for the others, or
# None; ends all where the facts differ, or a process does not come in time.
Comparison = Callable[[str, Mapping[str, object], float | None], None]
_comparison: Comparison | None = None  # of a process that has joined others
_hosts: list[str] = []  # of each process, if they have joined by `launch`
_calls: Counter[str] = Counter()  # of programs that run on the devices of all processes
_asked_to_join = False
STARTED_WITH = "JAX_NUM_PROCESSES"  # set by `fsdp-jax launch`, a JobSet, Kubeflow's Trainer


def compare_facts_by(comparison: Comparison | None) -> None:
    """Sets what compares the facts of the processes: `launch` does, as they join and leave."""
    global _comparison
    _comparison = comparison
    _calls.clear()


def count_call(program: str) -> None:
    """Counts a call of a program that every process runs, just before it runs; see `calls`."""
    _calls[program] += 1


def calls() -> dict[str, int]:
    """Returns the calls of each program since this process joined others: {program: calls}.

    All processes make the same calls in the same order, so that of two processes one is behind.
    """
    return dict(_calls)


def note_joining() -> None:
    """Notes that this process was asked to join others, also where there are none."""
    global _asked_to_join
    _asked_to_join = True


def warn_if_alone() -> None:
    """Warns of a process that was started as one of several, and has not asked to join them.

    Each of them would train the whole model by itself, and all write the same files.
    """
    count = os.environ.get(STARTED_WITH, "")
    started = int(count) if count.isdecimal() else 1
    if started > 1 and jax.process_count() == 1 and not _asked_to_join:
        warnings.warn(
            f"this process was started as one of {started} ({STARTED_WITH}) and has not joined the "
            "others, so that each trains a model of its own: call fsdp_jax.launch.join_cluster() "
            "before anything that touches a device",
            stacklevel=3,
        )


def comparison_over(mesh: Mesh) -> Comparison | None:
    """Finds what compares facts of all processes; None unless all of them have devices of the mesh.

    Processes that jax alone has started are not compared.
    """
    processes = {device.process_index for device in mesh.devices.flat}
    if _comparison is None or len(processes) != jax.process_count():
        return None
    return _comparison


def require_same_call(what: str, seconds: float | None) -> None:
    """Waits until every process is at this call; does nothing unless `launch` has joined them.

    For what one process alone may call by mistake: the others are named while it waits, and all end
    where one of them is at another call of this kind, or does not come within so many seconds
    (None: no limit).
    """
    if _comparison is not None and jax.process_count() > 1:
        _comparison(what, {}, seconds)


def set_hosts(names: Sequence[str]) -> None:
    """Sets the name of each process's host: `launch` does, as they join and leave."""
    _hosts[:] = names


def host_of(device: jax.Device) -> int:
    """Finds the host of a device of this run, by the first of its processes.

    A process that jax alone has started, or that is planned for, counts as a host.
    """
    if not device.process_index < len(_hosts) == jax.process_count():
        return device.process_index
    return _hosts.index(_hosts[device.process_index])


def in_any_process(flag: bool) -> bool:
    """Tells whether the flag is set in any process; waits for all of them."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.int32(flag)).max())


@contextmanager
def raise_together(elsewhere: ReadableError) -> Iterator[None]:
    """Raises in every process if the work inside fails in any; waits for all of them.

    A process raises its own error; one whose work succeeded raises `elsewhere`.
    """
    # The error is held back until all processes have said how their work went.
    own = None
    try:
        yield
    except Exception as error:
        own = error
    if in_any_process(own is not None):
        elsewhere.caused_elsewhere = True
        raise own or elsewhere


def host_name() -> str:
    """Names this host, as no other is named: by its boot, or by its name if that is not known.

    Containers of one host may have names of their own, and have its boot in common.
    """
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


def hosts_of_processes() -> dict[int, int]:
    """Numbers the hosts that the processes run on: {process: host}.

    Waits for all processes where jax alone has started them.
    """
    if jax.process_count() == 1:
        return {0: 0}
    names: list[Any] = _hosts
    if len(_hosts) != jax.process_count():
        own = np.array(zlib.crc32(host_name().encode()), np.uint32)
        names = gather_from_processes(own).tolist()
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return {process: numbers[name] for process, name in enumerate(names)}


def gather_from_processes(values: np.ndarray, *, seconds: float | None = None) -> np.ndarray:
    """Gathers the arrays of every process, stacked [processes, ...]; waits for all of them.

    Raises TimeoutError where another process does not come within `seconds`, if these are given:
    the devices then still wait, and the run has to end.
    """
    if seconds is None:
        return np.asarray(multihost_utils.process_allgather(values))
    # In a thread, since a collective cannot be given up: the thread is left waiting.
    results: list[Any] = []

    def gather() -> None:
        try:
            results.append(np.asarray(multihost_utils.process_allgather(values)))
        except Exception as error:  # raised by the caller
            results.append(error)

    thread = threading.Thread(target=gather, name="gather-from-processes", daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise TimeoutError(f"another process did not come within {seconds:g} s")
    if isinstance(results[0], Exception):
        raise results[0]
    return np.asarray(results[0])
