"""How a run is asked to stop, and how its processes agree on it."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax.sharding.mesh import batch_axes, replicated


class StopSignal:
    """SIGINT and SIGTERM ask the run to stop after the current step; a second SIGINT ends the
    process at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if (
            threading.current_thread() is threading.main_thread()
        ):  # elsewhere Python allows no handlers
            self._before = {
                number: signal.signal(number, self._ask)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            os._exit(128 + number)  # threads that still write would keep an ordinary exit waiting
        self.asked = True


class Agreement:
    """Whether any process wants something: the same answers for all of them, or they would wait for
    each other.

    Among several processes the answers are those to the call before, so that no step waits for
    them.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._sharding = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
        self._any = jax.jit(lambda flags: jnp.max(flags, axis=0), out_shardings=replicated(mesh))
        self._last: jax.Array | None = None

    def __call__(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag whether any process has it set. To be called by every process, equally
        often.
        """
        if jax.process_count() == 1:
            return flags
        mine = np.tile(np.asarray(flags, np.int32), (self._mesh.local_mesh.size, 1))
        last, self._last = (
            self._last,
            self._any(jax.make_array_from_process_local_data(self._sharding, mine)),
        )
        return (
            (False,) * len(flags)
            if last is None
            else tuple(bool(flag) for flag in np.asarray(last))
        )
