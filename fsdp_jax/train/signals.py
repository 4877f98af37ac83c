"""Stopping a run by a signal, and agreement of its processes on what to do next."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax.sharding.mesh import replicated

NUMBERS = ("data_wait_s", "host_s", "host_memory_bytes")
"""What each process tells of its last step: see `StepRecord`."""


class StopSignal:
    """Records SIGINT and SIGTERM in `asked`, read by the loop; a second SIGINT exits at once."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python allows handlers only in the main thread.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._record_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            os._exit(128 + number)  # an ordinary exit waits for threads that still write
        self.asked = True


class Agreement:
    """Tells every process whether any has set a flag, and numbers of each, without waiting.

    Of several processes, each call therefore answers for the call before.

    Attributes:
        numbers: what this process tells the others with the next calls, `NUMBERS`, float32 [n].
        of_processes: the numbers of every process, float32 [processes, n].

    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._combine = jax.jit(
            lambda flags, numbers: (jnp.max(flags, axis=0), numbers), out_shardings=replicated(mesh)
        )
        owners = [device.process_index for device in mesh.devices.flat]
        self._row_of_process = [owners.index(process) for process in sorted(set(owners))]
        self._previous: tuple[jax.Array, jax.Array] | None = None
        self.numbers = np.zeros(len(NUMBERS), np.float32)
        self.of_processes = np.zeros((len(self._row_of_process), len(NUMBERS)), np.float32)

    def __call__(self, *flags: bool) -> tuple[bool, ...]:
        """Tells for each flag whether any process set it; all processes make the same calls."""
        if jax.process_count() == 1:
            self.of_processes = self.numbers[None]
            return flags
        previous = self._previous
        self._previous = self._combine(
            self._on_each_device(np.asarray(flags, np.int32)), self._on_each_device(self.numbers)
        )
        if previous is None:
            return (False,) * len(flags)
        self.of_processes = np.asarray(previous[1])[self._row_of_process]
        return tuple(bool(flag) for flag in np.asarray(previous[0]))

    def _on_each_device(self, values: np.ndarray) -> jax.Array:
        """Makes an array [devices, n] whose rows are the values of each device's process."""
        local = np.tile(values, (self._mesh.local_mesh.size, 1))
        return jax.make_array_from_process_local_data(self._sharding, local)
