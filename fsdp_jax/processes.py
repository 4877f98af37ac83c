"""What the processes of one run agree on. From the main thread only: these are collectives."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def anywhere(flag: bool) -> bool:
    """Whether it is so in any process; waits for all of them."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.int32(flag)).max())


def from_processes(values: np.ndarray) -> np.ndarray:
    """What every process passes, [processes, ...]; waits for all of them."""
    return np.asarray(multihost_utils.process_allgather(values))
