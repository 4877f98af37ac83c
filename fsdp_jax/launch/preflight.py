"""The first computation of all processes together, which shows that every device takes part."""

from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax.errors import ProcessLostError

START = "the start of the devices"
SUM = "the first sum over all devices"
LEAST_SECONDS = 60.0  # that the devices have to start, and to compute: both compile


class Comparing(Protocol):
    """What compares the facts of the processes: `Watch`."""

    def require_same(
        self,
        what: str,
        facts: Mapping[str, object],
        patience: float | None = None,
        following: tuple[str, float] | None = None,
    ) -> bool:
        """Waits for all processes; see `Watch.require_same`."""


def first_sum(processes: Comparing, seconds: float) -> None:
    """Sums over the devices of all processes; ends the run if some do not answer in time.

    First each process computes on its own devices alone. So what does not answer is named: a
    process whose devices do not start or compute, or, where all are there and the sum does not
    end, the links between them. The time is counted by process 0, `LEAST_SECONDS` at least.

    Raises ProcessLostError for a sum that is wrong.
    """
    devices = jax.devices()
    for device in jax.local_devices():
        jax.block_until_ready(jax.device_put(1.0, device) + 1.0)
    processes.require_same(START, {}, following=(SUM, max(seconds, LEAST_SECONDS)))
    everywhere = Mesh(np.array(devices), ("device",))
    rows = NamedSharding(everywhere, PartitionSpec("device"))
    ones = jax.make_array_from_callback((len(devices),), rows, lambda index: np.ones(1, np.float32))
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(everywhere, PartitionSpec()))(ones)
    if float(total) != len(devices):
        raise ProcessLostError(
            "the devices of all processes do not add up",
            where=SUM,
            expected=len(devices),
            got=total,
        )
    processes.require_same(SUM, {})
