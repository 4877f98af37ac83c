"""How a run is asked to stop, and how its processes agree on it."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax.mesh import batch_axes, replicated


class StopSignal:
    """SIGINT and SIGTERM ask the run to stop after the current step; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            os._exit(128 + number)  # threads that still write would keep an ordinary exit waiting
        self.asked = True


class Agreement:
    """Whether any process was asked to stop: the same answer for all of them, or they would wait for each other.

    Among several processes the answer is that of the call before, so that no step waits for it.
    """

    def __init__(self, stop: StopSignal, mesh: Mesh):
        self._stop, self._mesh = stop, mesh
        self._sharding = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
        self._any = jax.jit(jnp.max, out_shardings=replicated(mesh))
        self._last: jax.Array | None = None

    def __call__(self) -> bool:
        """To be called by every process, equally often."""
        if jax.process_count() == 1:
            return self._stop.asked
        mine = np.full(self._mesh.local_mesh.size, self._stop.asked, np.int32)
        last, self._last = self._last, self._any(jax.make_array_from_process_local_data(self._sharding, mine))
        return last is not None and bool(last)


def anywhere(flag: bool) -> bool:
    """Whether it is so in any process; waits for all of them."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.int32(flag)).max())
