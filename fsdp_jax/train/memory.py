"""Tells a run what XLA gave up for want of memory, and which setting frees some."""

from dataclasses import replace

from fsdp_jax.hlo.collectives import read_program
from fsdp_jax.hlo.parser import parse
from fsdp_jax.planner import analytic_plan, fake_devices, hardware_of, parse_topology
from fsdp_jax.planner.machines.topology import Topology
from fsdp_jax.planner.memory_cliff import MemoryCliff, compiler_limit, memory_cliff
from fsdp_jax.planner.settings import fixes, lever
from fsdp_jax.train.build import Run, build
from fsdp_jax.train.planning import make_step_of, settings_of


def cliff_of(run: Run) -> MemoryCliff | None:
    """Returns what XLA gave up for want of memory in a run's compiled step, with a lever.

    None if the program shows nothing, or is for devices that the planner does not know.
    """
    device = run.sharded.layout.mesh.devices.flat[0]
    chip = hardware_of(device.device_kind)
    if chip is None or chip.memory_bytes is None or run.step.compiled is None:
        return None
    # As in a plan, but for the memory that this process may take.
    text = run.step.compiled.as_text()
    module = parse(text)
    allocator = (device.memory_stats() or {}).get("bytes_limit")
    limit = compiler_limit(chip, module, allocator)
    sent = read_program(text, run.sharded.layout.mesh.shape).collectives
    cliff = memory_cliff(module, sent, _peak_bytes(run), limit)
    topology = _topology_of(run)
    if cliff is None or topology is None:
        return cliff
    planned = build(run.config, fake_devices(topology))
    plan = analytic_plan(planned.step, planned.batch, topology, run.work)
    make_step = make_step_of(run.config)
    changes = fixes(plan, settings_of(run.config), make_step, topology, run.work)
    return replace(cliff, lever=lever(changes, cliff.free_bytes))


def _peak_bytes(run: Run) -> int:
    """Returns the device memory of the compiled step, arguments included."""
    stats = run.step.compiled.memory_analysis()
    used = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    return int(used + stats.output_size_in_bytes - stats.alias_size_in_bytes)


def _topology_of(run: Run) -> Topology | None:
    """Returns the machine of a run's mesh; of TPUs, None: the mesh does not tell the torus."""
    devices = run.sharded.layout.mesh.devices.flatten()
    chip = hardware_of(devices[0].device_kind)
    hosts = len({device.process_index for device in devices})
    if chip is None or chip.platform != "cuda" or len(devices) % hosts:
        return None
    return parse_topology(f"{chip.name}:{hosts}x{len(devices) // hosts}")
