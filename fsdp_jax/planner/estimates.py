"""Makes plans: from the compiled program of a step, or analytically from its trace."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import jax

from fsdp_jax.contract.contract import Contract, check_program
from fsdp_jax.contract.expected import expected_traffic
from fsdp_jax.errors import ArgumentError, human_bytes
from fsdp_jax.hlo.parser import parse_program
from fsdp_jax.hlo.source_frames import SourceFrames
from fsdp_jax.planner.analytic.communication import TrafficEstimate, estimate_traffic
from fsdp_jax.planner.analytic.memory import StepEstimate, estimate_step
from fsdp_jax.planner.compiled.peak_memory import KINDS, peak_memory, steady_state
from fsdp_jax.planner.compiled.program import CompiledProgram, check_bfloat16, compile_step
from fsdp_jax.planner.compiled.timeline import ScheduleSimulator, SimulatedTime
from fsdp_jax.planner.machines.network import Network
from fsdp_jax.planner.machines.roofline import Matmul, Roofline
from fsdp_jax.planner.machines.topology import Topology, check_not_virtual
from fsdp_jax.planner.memory_cliff import MemoryCliff, memory_cliff, scheduler_memory_limit
from fsdp_jax.planner.plan import Basis, Plan, Time
from fsdp_jax.sharding.mesh import MeshAxes
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.others import bytes_of_others, with_others_as_traced
from fsdp_jax.step.step_plan import StepPlan
from fsdp_jax.tree import PyTree

EXPOSED_NOTE = 0.05  # fraction of a step that may wait for collectives without a note
EXPOSED_UPDATES = 0.6
"""Fraction of the transfers around the optimizer's update that is exposed.

Of the compiled schedule of Llama 2 7B on h100:8 with the optimizer's state in host memory.
"""
JAX_MEMORY = 0.75  # fraction of a GPU's memory that jax takes by default

FIGURES = (
    *("peak_bytes", "host_bytes", "breakdown"),
    *("collectives", "wire_bytes", "exposed_bytes", "from_host_bytes", "to_host_bytes"),
    *("time", "tokens_per_s_per_device", "mfu", "hfu"),
)


@dataclass(frozen=True)
class Work:
    """What one step computes, for tokens per second and model FLOP/s.

    Attributes:
        tokens: in the global batch.
        flops: model FLOPs for them, forward and backward, without recomputation.
        convention: how FLOPs are counted.
        vocab: size of the vocabulary; None for a model without one.

    """

    tokens: int | None = None
    flops: float | None = None
    convention: str = ""
    vocab: int | None = None


def check_plan(topology: Any, batch: Any, axes: MeshAxes, work: Any, *, analytic: bool) -> None:
    """Raises ValueError for arguments of `Sharded.plan` that do not fit."""
    if analytic and axes.model_shards > 1:
        raise ArgumentError(
            "an analytic plan knows no mesh axes of the model's own",
            where="analytic",
            got=list(axes.model),
            fix="leave analytic out, and the plan is compiled",
        )
    if not isinstance(topology, str):
        raise ArgumentError(
            "not the name of a machine",
            where="topology",
            got=type(topology),
            fix='sharded.plan("h100:8", loss_fn, batch)',
        )
    if work is not None and not isinstance(work, Work):
        raise ArgumentError(
            "not what a step computes",
            where="work",
            got=repr(work),
            fix="fsdp_jax.planner.Work(tokens=..., flops=...)",
        )
    leaves = jax.tree.leaves(batch)
    if not leaves or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        raise ArgumentError(
            "not arrays, nor their shapes",
            where="batch",
            got=batch,
            fix='{"tokens": jax.ShapeDtypeStruct((rows, length), "int32")}',
        )


def compiled_plan(
    step: CompiledStep, batch: PyTree, topology: Topology, work: Work, cache: Path | None
) -> Plan:
    """Compiles a step, whose mesh is made of `topology.devices()`, and makes its plan.

    Where XLA refuses to compile for want of memory, the peak is that of XLA's message, and all
    other figures are analytic.

    Args:
        step: from `Sharded.make_train_step`.
        batch: arrays or shapes [global rows, ...].
        topology: of the mesh.
        work: what a step computes.
        cache: folder of compiled programs; None does not cache.

    Raises:
        ConfigError: virtual CPU devices, which have neither memory nor speed to plan for.

    """
    # XLA compiles the step, or refuses to for want of memory.
    check_not_virtual(topology.hardware, topology.name)
    program = compile_step(step, batch, topology, cache)
    plan = step.plan
    if program.refused_bytes is not None:
        return _refused_plan(step, batch, topology, work, program)
    assert program.report is not None
    # Memory from the report, traffic and time from the scheduled program.
    module = parse_program(program.text)
    memory = peak_memory(plan, module, program.report, SourceFrames(program.text))
    contract = check_program(plan, program.text)
    sent = contract.collectives
    simulator = ScheduleSimulator(module, sent, plan.layout.mesh, topology.hardware)
    simulated = simulator.simulate_step()
    time = _simulated_time(simulated)
    flops = sum(matmul.flops * count for matmul, count in simulated.matmuls.items())
    # What a reader must know beside the figures.
    limit = scheduler_memory_limit(topology.hardware, module)
    cliff = memory_cliff(module, sent, memory.peak_bytes, limit)
    notes = _plan_notes(topology, memory.peak_bytes, memory.host_bytes)
    notes += _program_notes(plan, contract, simulated, cliff)
    return Plan(
        **_layout_figures(step, topology, work),
        **_speeds(time, flops, topology, work),
        peak_bytes=memory.peak_bytes,
        host_bytes=memory.host_bytes,
        from_host_bytes=int(simulated.from_host),
        to_host_bytes=int(simulated.to_host),
        breakdown=dict[str, int](memory.breakdown.items()),
        buffers=memory.buffers,
        idle=memory.idle,
        collectives=contract.rows(),
        wire_bytes=contract.wire_bytes,
        wire_bytes_limit=contract.wire_bytes_limit,
        exposed_bytes=int(simulated.exposed_bytes),
        time=time,
        compile_s=program.seconds,
        basis=_basis_by_figure(compiled=FIGURES),
        cliff=cliff,
        notes=notes,
        events=simulator.simulate_layer().events,
    )


def analytic_plan(step: CompiledStep, batch: PyTree, topology: Topology, work: Work) -> Plan:
    """Makes the plan of a step from its trace, without any compiler.

    Memory, matmuls and memory traffic are those of the step with explicit collectives: a trace with
    sharding annotations has no shapes of one device. The step's mesh may be made of
    `fake_devices(topology)`.
    """
    # memory, matmuls and memory traffic from the trace, communication from the strategy
    check_not_virtual(topology.hardware, topology.name)
    plan = step.plan
    check_bfloat16(plan, topology)
    local = step.with_local_batch()
    jaxpr = local.trace(batch)
    estimated = estimate_step(local.plan, jaxpr)
    plan = with_others_as_traced(plan, local.plan)
    roofline = Roofline(topology.hardware)
    traffic = estimate_traffic(plan, Network(plan.layout.mesh, topology.hardware))
    time = _analytic_time(estimated, traffic, roofline)
    state_on_host = plan.layout.per_device(host=True) + bytes_of_others(plan, host=True)
    host_bytes = state_on_host + estimated.host_bytes
    flops = sum(matmul.flops * matmul.times for matmul in estimated.matmuls)
    exposed_share = 0.0
    if traffic.seconds:
        exposed_share = time.exposed_s / traffic.seconds
    # facts that the figures leave out
    notes = _plan_notes(topology, estimated.peak_bytes, host_bytes)
    notes += _kernel_notes(estimated.matmuls, estimated.uncounted)
    if not any(leaf.stacked for leaf in plan.layout.by_path.values()):
        notes.append("no layers are stacked: this peak may be up to 30% too low; compile to know")
    return Plan(
        **_layout_figures(local, topology, work),
        **_speeds(time, flops, topology, work),
        peak_bytes=estimated.peak_bytes,
        host_bytes=host_bytes,
        from_host_bytes=estimated.from_host_bytes,
        to_host_bytes=estimated.to_host_bytes,
        breakdown=dict[str, int](estimated.breakdown.items()),
        collectives=traffic.rows,
        wire_bytes=traffic.bytes,
        wire_bytes_limit=traffic.bytes,
        exposed_bytes=int(traffic.bytes * exposed_share),
        time=time,
        basis=_basis_by_figure(analytic=FIGURES),
        notes=notes,
    )


def _refused_plan(
    step: CompiledStep, batch: PyTree, topology: Topology, work: Work, program: CompiledProgram
) -> Plan:
    """Makes a plan with what XLA tells when it refuses: the peak, and maybe the arrays at it.

    All else is analytic, or unknown.
    """
    peak, compiled = program.refused_bytes, ["peak_bytes"]
    assert peak is not None
    reported: dict[str, Any] = {}
    if program.report is not None:
        module = parse_program(program.text)
        memory = peak_memory(step.plan, module, program.report, SourceFrames(program.text))
        names = ("host_bytes", "breakdown", "buffers", "idle")
        reported = {name: getattr(memory, name) for name in names}
        peak, compiled = memory.peak_bytes, [*compiled, "host_bytes", "breakdown"]
    plan = _estimate_of_peak(peak, step, batch, topology, work)
    note = f"XLA refuses to compile it: it would take {human_bytes(peak)}"
    if plan.time is not None:
        note += "; all else is analytic"
    basis = dict(plan.basis) | dict.fromkeys(compiled, "compiled")
    notes = (note, *plan.notes)
    return replace(plan, compile_s=program.seconds, basis=basis, notes=notes, **reported)


def _estimate_of_peak(
    peak: int, step: CompiledStep, batch: PyTree, topology: Topology, work: Work
) -> Plan:
    """Estimates a step of a known peak, analytically or where that fails from its layout alone.

    What the estimate does not explain of the peak is `other`.
    """
    with suppress(ValueError):  # of a loss that cannot run on local batches
        analytic = analytic_plan(step, batch, topology, work)
        other = peak - analytic.peak_bytes + analytic.breakdown["other"]
        if other >= 0:
            breakdown = dict(analytic.breakdown) | {"other": other}
            return replace(analytic, peak_bytes=peak, breakdown=breakdown)
    # no time, and of the peak only the state
    layout = step.plan.layout
    state = {part: layout.per_device(part) for part in ("params", "optimizer")}
    state["params"] += bytes_of_others(step.plan)
    limit = sum(expected.bytes for expected in expected_traffic(step.plan))
    return Plan(
        **_layout_figures(step, topology, work),
        peak_bytes=peak,
        host_bytes=layout.per_device(host=True) + bytes_of_others(step.plan, host=True),
        breakdown=dict.fromkeys(KINDS, 0) | state | {"other": peak - sum(state.values())},
        wire_bytes=limit,
        wire_bytes_limit=limit,
        basis=_basis_by_figure(analytic=("host_bytes", "breakdown", "wire_bytes")),
    )


def _layout_figures(step: CompiledStep, topology: Topology, work: Work) -> dict[str, Any]:
    """Returns field -> value of a plan for what the layout and the machine determine."""
    layout, chip = step.plan.layout, topology.hardware
    return {
        "topology": topology.name,
        "strategy": layout.strategy.name,
        "mesh": layout.axes.shape,
        "devices": layout.mesh.size,
        "parameters": sum(prod(leaf.model_shape) for leaf in layout.by_path.values()),
        "valley_bytes": layout.per_device() + bytes_of_others(step.plan),
        "valley": steady_state(step.plan),
        "staging_bytes": step.report.streaming.staging_bytes,
        "capacity_bytes": chip.memory_bytes,
        "usable_bytes": chip.usable_bytes,
        "host_devices": topology.host_devices,
        "host_capacity_bytes": chip.host_memory_bytes,
        "convention": work.convention,
    }


def _analytic_time(estimated: StepEstimate, traffic: TrafficEstimate, roofline: Roofline) -> Time:
    """Estimates the time of a step as the sum of the parts that cannot overlap.

    That is matmuls, other memory traffic, and communication and transfers that these cannot hide.
    """
    # what matmuls read and write is part of their own time
    compute = sum(roofline.seconds(matmul) for matmul in estimated.matmuls)
    matmul_bytes = sum(matmul.bytes for matmul in estimated.matmuls)
    memory = max(0, estimated.traffic_bytes - matmul_bytes) / roofline.memory_rate
    # while a collective runs beside them, matmuls have fewer cores
    share = roofline.efficiency.collective_cores / roofline.efficiency.cores
    compute += share * min(traffic.overlapped_s, compute)
    exposed = traffic.exposed_s + max(0.0, traffic.overlapped_s - compute - memory)
    # transfers of the forward and backward pass run beside it, those of the update hardly
    host = (estimated.from_host_bytes + estimated.to_host_bytes) / roofline.host_rate
    update = estimated.update_bytes / roofline.host_rate
    host_exposed = EXPOSED_UPDATES * update + max(0.0, host - update - compute - memory)
    step = compute + memory + exposed + host_exposed
    return Time(compute, memory, traffic.seconds, exposed, step, host, host_exposed)


def _simulated_time(simulated: SimulatedTime) -> Time:
    """Converts the simulated time of a step's program."""
    return Time(
        compute_s=simulated.compute,
        memory_s=simulated.memory,
        collective_s=simulated.collective,
        exposed_s=simulated.exposed,
        step_s=simulated.seconds,
        host_s=simulated.host,
        host_exposed_s=simulated.host_exposed,
    )


def _speeds(time: Time, flops: int, topology: Topology, work: Work) -> dict[str, Any]:
    """Computes the fields of a plan for speed; `flops`: of the program on a device."""
    chip, devices = topology.hardware, topology.size
    # of one dtype, whatever the model computes in, so that the figures of plans are comparable
    peak = chip.peak_flops.get("bfloat16") or chip.peak_flops["float16"]
    speeds: dict[str, float | None] = {"tokens_per_s_per_device": None, "mfu": None}
    if work.tokens:
        speeds["tokens_per_s_per_device"] = work.tokens / time.step_s / devices
    if work.flops:
        speeds["mfu"] = work.flops / (time.step_s * peak * devices)
    return speeds | {"hfu": flops / (time.step_s * peak)}


def _basis_by_figure(
    compiled: Sequence[str] = (), analytic: Sequence[str] = ()
) -> dict[str, Basis]:
    """Maps each figure of a plan to its basis, from the names of those of each basis."""
    # steady-state memory and the limit are always arithmetic on the layout
    always = ("valley_bytes", "wire_bytes_limit")
    basis: dict[str, Basis] = dict.fromkeys(compiled, "compiled")
    return basis | dict.fromkeys((*analytic, *always), "analytic")


def _plan_notes(topology: Topology, peak: int, host_bytes: int) -> list[str]:
    """Writes the notes of any plan, for a reader of the figures.

    `peak`, `host_bytes`: of one device.
    """
    notes = []
    chip = topology.hardware
    assert chip.memory_bytes is not None
    if chip.platform == "cuda" and JAX_MEMORY * chip.memory_bytes < peak <= chip.usable_bytes:
        notes.append(
            f"jax takes {JAX_MEMORY:.0%} of a GPU unless told otherwise: set"
            f" XLA_PYTHON_CLIENT_MEM_FRACTION={chip.usable_bytes / chip.memory_bytes:.2f}"
        )
    # the devices of a host share its memory
    on_host, capacity = host_bytes * topology.host_devices, chip.host_memory_bytes
    if capacity is not None and on_host > capacity:
        notes.append(
            f"a host needs {human_bytes(on_host)} of memory, and the vendor's reference system has"
            f" {human_bytes(capacity)}: this fits only hosts with more"
        )
    return notes


def _program_notes(
    plan: StepPlan, contract: Contract, simulated: SimulatedTime, cliff: MemoryCliff | None
) -> list[str]:
    """Writes the notes of a compiled plan that only the program tells."""
    notes = []
    share = simulated.exposed / simulated.seconds if simulated.seconds else 0
    if plan.per_unit and share > EXPOSED_NOTE:
        fix = "try --prefetch pre"
        if plan.prefetch != "none":
            fix = "try a larger microbatch"
        why = f": a device computes too little for what it sends; {fix}"
        if cliff is not None:
            why = ", for want of memory"
        notes.append(f"{share:.0%} of the step is spent waiting for collectives{why}")
    if not contract.holds:
        notes.append(
            "the contract does not hold: `fsdp-jax inspect CONFIG --topology T`, or"
            " `fsdp_jax.contract.check_contract(step, batch)`, lists what is sent, and why"
        )
    notes += [f"not counted: {line}" for line in contract.unread]
    if contract.model_bytes:
        along = "+".join(plan.layout.axes.model)
        notes.append(f"the model sends {human_bytes(contract.model_bytes)} more along '{along}'")
    names = {name.rsplit("/", 2)[-2] if "/" in name else name for name in simulated.unknown}
    return notes + _kernel_notes(simulated.matmuls, names)


def _kernel_notes(matmuls: Iterable[Matmul], uncounted: Iterable[str]) -> list[str]:
    """Writes the notes of kernels whose work is not read, but assumed or left out.

    `matmuls`: of the step; `uncounted`: names of kernels that have others.
    """
    assumed = [matmul for matmul in matmuls if matmul.assumed]
    kernels = {
        "kernels whose matmuls are unknown, counted by their memory alone": {*uncounted},
        "attention kernels, counted as causal whatever their mask": {
            matmul.assumed for matmul in assumed if matmul.keys
        },
        "kernels of your own, counted by the matmuls of every step of their grid": {
            matmul.assumed for matmul in assumed if not matmul.keys
        },
    }
    return [f"{what}: {', '.join(sorted(names))}" for what, names in kernels.items() if names]
