"""Sets up a process before jax starts its backends: virtual devices, and joining a cluster."""

import os

import jax
from jax.experimental import multihost_utils

from fsdp_jax.errors import ConfigError, message
from fsdp_jax.planner.machines.pjrt_plugins import choose_platforms


def use_virtual_devices(count: int) -> None:
    """Gives this process `count` virtual CPU devices; an accelerator stays the default backend.

    Plugins whose hardware is absent are not started; see `fsdp_jax.planner.choose_platforms`.

    Raises ConfigError if `count` is not positive, and ValueError if jax has already started with
    another count.
    """
    if count < 1:
        what = "no such number of devices"
        raise ConfigError(message(what, where="train.devices", expected="1 or more", got=count))
    choose_platforms()
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # the backends have started, which is fine if they need no change
        if jax.default_backend() != "cpu" or jax.local_device_count() == count:
            return
        raise ValueError(
            message(
                "jax has started already: the number of virtual devices is fixed",
                where="train.devices",
                expected=count,
                got=jax.local_device_count(),
                fix="call use_virtual_devices before anything that touches a device",
            )
        ) from None
    _set_xla_flags(
        {
            # Agrees with jax's setting above, for processes that inherit the environment.
            "--xla_force_host_platform_device_count": count,
            # A busy machine may delay one device's thread; the default aborts after 40 s.
            "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
            "--xla_cpu_collective_call_terminate_timeout_seconds": 600,
        }
    )


def _set_xla_flags(flags: dict[str, int]) -> None:
    present = os.environ.get("XLA_FLAGS", "").split()
    others = [flag for flag in present if flag.partition("=")[0] not in flags]
    added = [f"{name}={value}" for name, value in flags.items()]
    os.environ["XLA_FLAGS"] = " ".join([*others, *added])


def join_cluster(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Joins this process into a run of several, and waits until all have joined.

    All arguments are None for a run of one process.

    Args:
        coordinator: HOST:PORT where process 0 listens.
        processes: number of processes.
        process: number of this process, from 0.

    Raises ConfigError if the arguments do not make sense.
    """
    if coordinator is None and processes is None and process is None:
        return
    if coordinator is None or processes is None or process is None:
        raise ConfigError(
            message(
                "an incomplete cluster",
                where="cluster",
                expected="coordinator, processes and process, or none of them",
                got=f"coordinator={coordinator}, processes={processes}, process={process}",
            )
        )
    _check_address(coordinator)
    if processes < 1:
        where = "cluster.processes"
        raise ConfigError(
            message("an empty cluster", where=where, expected="1 or more", got=processes)
        )
    if not 0 <= process < processes:
        where = "cluster.process"
        expected = f"0 to {processes - 1} for {processes} processes"
        raise ConfigError(message("no such process", where=where, expected=expected, got=process))
    jax.distributed.initialize(coordinator, processes, process)


def _check_address(coordinator: str) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            message(
                "not an address",
                where="cluster.coordinator",
                expected="HOST:PORT, the same for every process",
                got=coordinator,
                fix="for example 10.0.0.1:1234: the host of process 0, and a free port there",
            )
        )


def leave_cluster() -> None:
    """Leaves the cluster once all processes do; does nothing if this one never joined."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def is_lead() -> bool:
    """Returns whether this is process 0, which logs and writes what is written once.

    Starts jax's backends.
    """
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until every process calls this with the same `name`. From the main thread only."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
