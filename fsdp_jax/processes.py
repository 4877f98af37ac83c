"""Agreement between the processes of one run. Collectives, for the main thread only."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils


def in_any_process(flag: bool) -> bool:
    """Returns whether the flag is set in any process; waits for all of them."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.int32(flag)).max())


@contextmanager
def raise_together(elsewhere: Exception) -> Iterator[None]:
    """Raises in every process if the work inside fails in any; waits for all of them.

    A process raises its own error; one whose work succeeded raises `elsewhere`.
    """
    own = None
    try:
        yield
    except Exception as error:
        own = error
    if in_any_process(own is not None):
        raise own or elsewhere


def gather_from_processes(values: np.ndarray) -> np.ndarray:
    """Returns the arrays of every process, stacked [processes, ...]; waits for all of them."""
    return np.asarray(multihost_utils.process_allgather(values))
