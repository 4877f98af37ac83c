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
    """Tells every process whether any process has set a flag, without waiting for the others.

    Of several processes, each call therefore answers for the flags of the call before.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._any = jax.jit(lambda flags: jnp.max(flags, axis=0), out_shardings=replicated(mesh))
        self._previous: jax.Array | None = None

    def __call__(self, *flags: bool) -> tuple[bool, ...]:
        """Tells for each flag whether any process set it; all processes make the same calls."""
        if jax.process_count() == 1:
            return flags
        local = np.tile(np.asarray(flags, np.int32), (self._mesh.local_mesh.size, 1))
        previous = self._previous
        self._previous = self._any(jax.make_array_from_process_local_data(self._sharding, local))
        if previous is None:
            return (False,) * len(flags)
        return tuple(bool(flag) for flag in np.asarray(previous))
