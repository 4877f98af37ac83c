"""The memory of a run: whether it fits this machine, and what takes it where it does not."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import jax

from fsdp_jax.checkpoint import Lease
from fsdp_jax.compat.error_texts import in_one_line, is_out_of_memory
from fsdp_jax.errors import FitError, OutOfMemoryError, human_bytes
from fsdp_jax.hlo.collectives import read_collectives
from fsdp_jax.hlo.parser import parse_program
from fsdp_jax.io.atomic import write_durably
from fsdp_jax.planner import Fix, analytic_plan, fake_devices, hardware_of
from fsdp_jax.planner.fixes import describe_best_fix
from fsdp_jax.planner.machines.topology import Topology, topology_of_mesh
from fsdp_jax.planner.memory_cliff import MemoryCliff, memory_cliff, scheduler_memory_limit
from fsdp_jax.planner.out_of_memory import MemoryExplanation, explain_out_of_memory
from fsdp_jax.planner.remaking import Remaking
from fsdp_jax.processes import host_of
from fsdp_jax.train.build import Run
from fsdp_jax.train.metrics import Say, utc_timestamp

OOM = "oom.json"  # beside the run; of another process than 0, `oom-process-1.json`
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
    allocator = allocator_bytes(devices[0])
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


def allocator_bytes(device: jax.Device) -> int | None:
    """Reads the bytes that a device's allocator has; None where the device does not tell."""
    return (device.memory_stats() or {}).get("bytes_limit")


def _host_memory_bytes() -> int | None:
    """Reads the physical memory of this host, free or not; None if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


@dataclass(frozen=True)
class OutOfMemory:
    """Explains, where a run is out of memory, what takes it, and writes `oom.json`."""

    run: Run
    remaking: Remaking  # of the run's step with other settings
    lease: Lease
    say: Say

    def check_plan(self) -> None:
        """Raises OutOfMemoryError before anything is allocated, if the step cannot fit.

        Where an estimate exceeds what a device's allocator has, the step is compiled to know.
        """
        device = self.run.sharded.layout.mesh.local_devices[0]
        limit = allocator_bytes(device)
        topology = topology_of_mesh(self.run.sharded.layout.mesh)
        if limit is None or topology is None:
            return
        made = self.remaking.make_step(self.remaking.settings, fake_devices(topology))
        try:
            estimate = analytic_plan(*made, topology, self.remaking.work)
        except ValueError:  # such as a step of sharding annotations
            return
        if estimate.peak_bytes <= limit:
            return
        explanation = self._explain(None)
        if explanation.peak_bytes is not None and not explanation.fits:
            raise self._written(explanation)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises OutOfMemoryError in place of XLA's error where the block runs out of memory."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
                raise
            try:
                explanation = self._explain(error)
            # The first error is the one to tell of, whatever fails in explaining it.
            except Exception as failure:
                raise OutOfMemoryError(
                    "out of memory on a device",
                    got=in_one_line(error),
                    fix="`fsdp-jax plan` shows what a step takes",
                    details=f"not explained: {type(failure).__name__}: {in_one_line(failure)}",
                ) from error
            raise self._written(explanation) from error

    def _explain(self, error: Exception | None) -> MemoryExplanation:
        return explain_out_of_memory(
            self.run.step,
            self.run.batch,
            error,
            remaking=self.remaking,
            say=self.say,
        )

    def _written(self, explanation: MemoryExplanation) -> OutOfMemoryError:
        """Writes `oom.json`, and makes the error that names it."""
        error = explanation.error()
        process = jax.process_index()
        name = OOM if process == 0 else f"oom-process-{process}.json"
        fields = {"time": utc_timestamp(), **explanation.to_json()}
        try:
            with self.lease.writing():
                content = f"{json.dumps(fields, indent=1)}\n".encode()
                write_durably(self.lease.anchor / name, content)
            error.details += f"\n\nwritten to {self.lease.directory / name}"
        except OSError as failure:  # a full disk must not hide the explanation
            error.details += f"\n\n{name} is not written: {failure}"
        return error


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
    allocator = allocator_bytes(device)
    limit = scheduler_memory_limit(chip, module, allocator)
    sent = read_collectives(text, run.sharded.layout.mesh.shape).collectives
    stats = run.step.compiled.memory_analysis()
    used = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    peak = int(used + stats.output_size_in_bytes - stats.alias_size_in_bytes)
    cliff = memory_cliff(module, sent, peak, limit)
    topology = topology_of_mesh(run.sharded.layout.mesh)
    if cliff is None or topology is None:
        return cliff
    return replace(cliff, lever=describe_best_fix(propose_fixes(topology), cliff.free_bytes))
