"""The memory of a run: whether it fits this machine, and the cost where it is short."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import jax

from fsdp_jax.errors import FitError, human_bytes
from fsdp_jax.hlo.collectives import read_collectives
from fsdp_jax.hlo.parser import parse_program
from fsdp_jax.planner import Fix, hardware_of, parse_topology
from fsdp_jax.planner.fixes import describe_best_fix
from fsdp_jax.planner.machines.topology import Topology
from fsdp_jax.planner.memory_cliff import MemoryCliff, memory_cliff, scheduler_memory_limit
from fsdp_jax.processes import host_of
from fsdp_jax.train.build import Run

ProposeFixes = Callable[[Topology], Sequence[Fix]]
"""Proposes changes of a run's settings that lower the peak memory on a machine."""


def check_fits(run: Run) -> None:
    """Raises FitError if the state and a batch exceed the memory that this machine reports."""
    layout = run.sharded.layout
    devices = layout.mesh.local_devices
    # on this host there may be other processes, which have their own devices
    here = {host_of(device) for device in devices}
    neighbors = [device for device in layout.mesh.devices.flat if host_of(device) in here]
    processes = len({device.process_index for device in neighbors})
    rows = sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in run.batch.values())
    # Bytes of a device, and of a host with all of its devices.
    needs = {
        "state on a device": layout.per_device(),
        "state in host memory": layout.per_device(host=True) * len(neighbors),
        "a batch": rows * processes // jax.process_count(),
    }
    on_device = needs["state on a device"]
    on_host = needs["state in host memory"] + needs["a batch"]
    if devices[0].platform == "cpu":  # whose memory is the host's
        on_host += on_device * len(neighbors)
    # Compare with what the device and the host report; either may not tell.
    allocator = (devices[0].memory_stats() or {}).get("bytes_limit")
    for needed, limit in ((on_device, allocator), (on_host, _host_memory_bytes())):
        if limit is not None and needed > limit:
            what, expected = "the run does not fit this machine's memory", human_bytes(limit)
            raise FitError(
                what,
                expected=f"{expected} at most",
                got=", ".join(f"{name} {human_bytes(count)}" for name, count in needs.items()),
                fix=(
                    "a smaller model (model.*) or batch (train.global_batch_size), or more "
                    "devices; `fsdp-jax plan` shows what a step takes"
                ),
            )


def _host_memory_bytes() -> int | None:
    """Reads the physical memory of this host, free or not; None if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def find_memory_cliff(run: Run, propose_fixes: ProposeFixes) -> MemoryCliff | None:
    """Finds operations that XLA recomputes, or no longer overlaps, for want of memory.

    It names the setting that frees this memory, if the machine can be planned for. None if XLA lost
    nothing, and for a device of unknown memory.
    """
    device = run.sharded.layout.mesh.devices.flat[0]
    chip = hardware_of(device.device_kind)
    if chip is None or chip.memory_bytes is None or run.step.compiled is None:
        return None
    # As in a plan, but for the memory that this process may take.
    text = run.step.compiled.as_text()
    module = parse_program(text)
    allocator = (device.memory_stats() or {}).get("bytes_limit")
    limit = scheduler_memory_limit(chip, module, allocator)
    sent = read_collectives(text, run.sharded.layout.mesh.shape).collectives
    stats = run.step.compiled.memory_analysis()
    used = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    peak = int(used + stats.output_size_in_bytes - stats.alias_size_in_bytes)
    cliff = memory_cliff(module, sent, peak, limit)
    topology = _topology_of(run)
    if cliff is None or topology is None:
        return cliff
    return replace(cliff, lever=describe_best_fix(propose_fixes(topology), cliff.free_bytes))


def _topology_of(run: Run) -> Topology | None:
    """Finds the machine of a run's mesh if it has known GPUs, as many on each host; else None."""
    devices = run.sharded.layout.mesh.devices.flatten()
    chip = hardware_of(devices[0].device_kind)
    hosts = len({host_of(device) for device in devices})
    if chip is None or chip.platform != "cuda" or len(devices) % hosts:
        return None
    return parse_topology(f"{chip.name}:{hosts}x{len(devices) // hosts}")
