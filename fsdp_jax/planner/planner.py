"""Makes plans: from the compiled program of a step, or from its traced one alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from fsdp_jax.contract.contract import judge
from fsdp_jax.contract.expected import expected_of
from fsdp_jax.errors import ConfigError, human_bytes, message
from fsdp_jax.hlo.collectives import ProgramTraffic
from fsdp_jax.hlo.collectives import read_program
from fsdp_jax.hlo.parser import Module, parse
from fsdp_jax.planner.analytic.communication import Traffic, expected_traffic
from fsdp_jax.planner.analytic.memory import Estimate, estimate
from fsdp_jax.planner.compiled.peak_memory import KINDS, Buffer, held
from fsdp_jax.planner.compiled.program import Program, check_dtypes, compile_step
from fsdp_jax.planner.compiled.timeline import Played, Player
from fsdp_jax.planner.figures import MOST, Basis, Time
from fsdp_jax.planner.machines.efficiency import Efficiency, efficiency_of
from fsdp_jax.planner.machines.matmul import Product
from fsdp_jax.planner.machines.network import Network
from fsdp_jax.planner.machines.topology import Topology
from fsdp_jax.planner.plan import Plan
from fsdp_jax.sharding.mesh import REPLICA, shape_of
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.train_step import StepPlan
from fsdp_jax.tree import PyTree

ON_CHIP: Mapping[str, frozenset[int]] = {"tpu": frozenset(range(1, 5)) | {6}}
"""Memory spaces of XLA that are no device memory; 5 is the host's everywhere."""

WAITS = 0.05
"""Of a step, what may wait for collectives without a note."""

MEMORY = ("peak_bytes", "host_bytes", "breakdown")
SENT = ("collectives", "wire_bytes", "exposed_bytes")
TIME = ("time", "tokens_per_s_per_device", "mfu", "hfu")


@dataclass(frozen=True)
class Work:
    """What one step does, for whoever counts in tokens.

    Attributes:
        tokens: of the global batch.
        flops: of the model for them, forward and backward, without what is recomputed.
        convention: how they are counted.
        vocab: size of the vocabulary, by which logits are known among the arrays.

    """

    tokens: int | None = None
    flops: float | None = None
    convention: str = ""
    vocab: int | None = None


def compiled_plan(
    step: CompiledStep, batch: PyTree, topology: Topology, work: Work, cache: Path | None
) -> Plan:
    """The plan of a step whose mesh is of `topology.devices()`.

    Where XLA refuses to compile for want of memory, the peak is what it says it would take, and the
    rest is analytic.

    Raises:
        ConfigError: virtual CPU devices, which have neither memory nor speed to plan for.

    """
    _check(topology)
    program = compile_step(step, batch, topology, cache)
    plan = step.plan
    if program.dump is None:
        return _refused(step, batch, topology, work, program)
    module = parse(program.text)
    memory = held(plan, module, program.dump)
    sent = read_program(program.text, plan.layout.mesh.shape)
    player = player_of(module, sent, plan, efficiency_of(topology.hardware))
    played = player.whole()
    contract = judge(plan, program.text)
    return Plan(
        **_common(plan, topology, work),
        **_speeds(_time(played), played.products, topology, work),
        peak_bytes=memory.peak_bytes,
        host_bytes=memory.host_bytes,
        breakdown=dict[str, int](memory.breakdown.items()),
        buffers=memory.buffers,
        collectives=contract.rows(),
        wire_bytes=contract.wire_bytes,
        wire_bytes_limit=contract.wire_bytes_limit,
        exposed_bytes=int(played.exposed_bytes),
        time=_time(played),
        compile_s=program.seconds,
        basis=_basis(MEMORY + SENT + TIME),
        notes=_compiled_notes(contract.holds, plan, topology, memory.peak_bytes, sent, played),
        events=player.layer().events,
    )


def player_of(
    module: Module, sent: ProgramTraffic, plan: StepPlan, efficiency: Efficiency
) -> Player:
    """A player of a compiled step, on a chip that achieves so much."""
    chip = efficiency.chip
    network = Network(plan.layout.mesh, chip, efficiency)
    return Player(
        module, sent.collectives, network, efficiency, ON_CHIP.get(chip.platform, frozenset())
    )


def analytic_plan(step: CompiledStep, batch: PyTree, topology: Topology, work: Work) -> Plan:
    """The plan of a step whose mesh may be of `stand_ins(topology)`: from the traced program,
    without any compiler.
    """
    _check(topology)
    jaxpr = step.trace(batch)
    plan = step.plan
    check_dtypes(plan, topology)
    found = estimate(plan, jaxpr)
    efficiency = efficiency_of(topology.hardware)
    traffic = expected_traffic(plan, Network(plan.layout.mesh, topology.hardware, efficiency))
    time = _analytic_time(found, traffic, efficiency)
    counts = {product: product.times for product in found.products}
    return Plan(
        **_common(plan, topology, work),
        **_speeds(time, counts, topology, work),
        peak_bytes=found.peak_bytes,
        host_bytes=0,
        breakdown=dict(found.breakdown),
        buffers=(),
        collectives=traffic.rows,
        wire_bytes=traffic.bytes,
        wire_bytes_limit=traffic.bytes,
        exposed_bytes=int(traffic.bytes * time.exposed_s / traffic.seconds)
        if traffic.seconds
        else 0,
        time=time,
        compile_s=None,
        basis=_basis((), MEMORY + SENT + TIME),
        notes=_analytic_notes(plan, topology, found.peak_bytes),
    )


def _check(topology: Topology) -> None:
    if topology.hardware.platform == "cpu":
        what, fix = (
            "virtual CPU devices have no memory or speed of their own",
            "--topology h100:8, or v5e:16x16, ...",
        )
        raise ConfigError(message(what, where="topology", got=topology.name, fix=fix))


def _refused(
    step: CompiledStep, batch: PyTree, topology: Topology, work: Work, program: Program
) -> Plan:
    """XLA's word for the peak, and for the rest what can be known without a program."""
    assert program.refused_bytes is not None
    said = f"XLA refuses to compile it: it would take {human_bytes(program.refused_bytes)}"
    if (
        not step.plan.local_batch and topology.size > 1
    ):  # an estimate needs to know what each device sees
        return _from_layout(step.plan, topology, work, program, said)
    guess = analytic_plan(step, batch, topology, work)
    rest = program.refused_bytes - guess.peak_bytes + guess.breakdown["other"]
    if rest < 0:
        return _from_layout(step.plan, topology, work, program, said)
    return replace(
        guess,
        peak_bytes=program.refused_bytes,
        breakdown=dict(guess.breakdown) | {"other": rest},
        compile_s=program.seconds,
        notes=(f"{said}; all else is analytic", *guess.notes),
        basis=dict(guess.basis) | {"peak_bytes": "compiled"},
    )


def _from_layout(
    plan: StepPlan, topology: Topology, work: Work, program: Program, said: str
) -> Plan:
    """What the layout alone tells of a step that XLA refuses: no time, and of the peak the state in
    it.
    """
    assert program.refused_bytes is not None
    layout = plan.layout
    held: dict[str, int] = dict.fromkeys(KINDS, 0)
    held |= {"params": layout.per_device("params"), "optimizer": layout.per_device("optimizer")}
    held["other"] = program.refused_bytes - sum(held.values())
    limit = sum(each.bytes for each in expected_of(plan))
    return Plan(
        **_common(plan, topology, work),
        peak_bytes=program.refused_bytes,
        host_bytes=0,
        breakdown=held,
        buffers=(),
        collectives=(),
        wire_bytes=limit,
        wire_bytes_limit=limit,
        exposed_bytes=0,
        time=None,
        tokens_per_s_per_device=None,
        mfu=None,
        hfu=None,
        compile_s=program.seconds,
        basis=_basis(("peak_bytes",), ("breakdown", "wire_bytes")),
        notes=(said,),
    )


def _common(plan: StepPlan, topology: Topology, work: Work) -> dict[str, Any]:
    """What the layout says."""
    layout, chip = plan.layout, topology.hardware
    assert chip.memory_bytes is not None
    return {
        "topology": topology.name,
        "strategy": layout.strategy.name,
        "mesh": shape_of(layout.mesh),
        "devices": layout.mesh.size,
        "parameters": sum(prod(leaf.shape) for leaf in layout.by_path.values()),
        "valley_bytes": layout.per_device(),
        "capacity_bytes": chip.memory_bytes,
        "usable_bytes": chip.memory_bytes - chip.reserved_bytes,
        "convention": work.convention,
    }


def _time(played: Played) -> Time:
    return Time(played.compute, played.memory, played.collective, played.exposed, played.seconds)


def _analytic_time(found: Estimate, traffic: Traffic, efficiency: Efficiency) -> Time:
    """Products, then the memory traffic that is not theirs, then what is sent and cannot be hidden
    behind them.
    """
    compute = sum(efficiency.seconds(product) for product in found.products)
    theirs = sum(_operand_bytes(product) for product in found.products)
    memory = max(0, found.traffic_bytes - theirs) / efficiency.memory_rate
    exposed = traffic.exposed_s + max(0.0, traffic.hidden_s - compute - memory)
    return Time(compute, memory, traffic.seconds, exposed, compute + memory + exposed)


def _operand_bytes(product: Product) -> int:
    """Read and written by a product; a fused one keeps its m x n on the chip."""
    size = 2 if "16" in product.dtype else 1 if "8" in product.dtype else 4
    square = 0 if product.fused else product.m * product.n
    return (
        product.times
        * product.batch
        * size
        * (product.m * product.k + product.k * product.n + square)
    )


def _speeds(
    time: Time, products: Mapping[Product, int], topology: Topology, work: Work
) -> dict[str, Any]:
    chip, devices = topology.hardware, topology.size
    peak = chip.peak_flops.get("bfloat16") or chip.peak_flops["float16"]
    done = sum(product.flops * count for product, count in products.items())
    return {
        "tokens_per_s_per_device": work.tokens / time.step_s / devices if work.tokens else None,
        "mfu": work.flops / (time.step_s * peak * devices) if work.flops else None,
        "hfu": done / (time.step_s * peak),
    }


def _basis(compiled: Sequence[str], analytic: Sequence[str] = ()) -> dict[str, Basis]:
    # the limit and the valley are arithmetic on the layout, whoever compiles
    always: tuple[str, ...] = ("valley_bytes", "wire_bytes_limit")
    basis: dict[str, Basis] = dict.fromkeys(compiled, "compiled")
    return basis | dict.fromkeys((*analytic, *always), "analytic")


def _analytic_notes(plan: StepPlan, topology: Topology, peak: int) -> list[str]:
    notes = _notes(plan, topology, peak)
    if not any(leaf.stacked for leaf in plan.layout.by_path.values()):
        notes.append(
            "no layers are stacked: XLA may hold a third more than this estimate; compile to know"
        )
    return notes


def _compiled_notes(
    holds: bool, plan: StepPlan, topology: Topology, peak: int, sent: ProgramTraffic, played: Played
) -> list[str]:
    notes = _notes(plan, topology, peak)
    waits = played.exposed / played.seconds if played.seconds else 0
    if plan.per_unit and waits > WAITS:
        why = "near the limit of memory XLA hides nothing; else a device computes too little for what it sends"
        fix = "try a larger microbatch" if plan.prefetch != "none" else "try --prefetch pre"
        notes.append(f"{waits:.0%} of the step waits for collectives: {why}; {fix}")
    if not holds:
        notes.append(
            "the contract does not hold: `fsdp-jax inspect CONFIG --topology T` says what travels, and why"
        )
    notes += [f"not counted: {line}" for line in sent.unread]
    if played.unknown:
        kernels = ", ".join(
            sorted(name.rsplit("/", 2)[-2] if "/" in name else name for name in played.unknown)
        )
        notes.append(
            f"kernels whose products are not known, counted by their memory alone: {kernels}"
        )
    return notes


def _notes(plan: StepPlan, topology: Topology, peak: int) -> list[str]:
    """What holds for any plan."""
    chip, notes = topology.hardware, []
    assert chip.memory_bytes is not None
    if plan.layout.strategy.hybrid and shape_of(plan.layout.mesh).get(REPLICA, 1) == 1:
        notes.append(
            "hybrid with one replica shards over all devices; --mesh.replica HOSTS shards within a host"
        )
    if (
        chip.platform == "cuda"
        and MOST * chip.memory_bytes < peak <= chip.memory_bytes - chip.reserved_bytes
    ):
        share = (chip.memory_bytes - chip.reserved_bytes) / chip.memory_bytes
        notes.append(
            f"jax takes {MOST:.0%} of a GPU unless told otherwise: set XLA_PYTHON_CLIENT_MEM_FRACTION={share:.2f}"
        )
    return notes


def logits_bytes(buffers: Sequence[Buffer], vocab: int) -> int:
    """Of the arrays at the peak, those whose last dim is the vocabulary."""
    return sum(
        one.bytes
        for one in buffers
        if one.kind == "activations"
        and one.array.rpartition("]")[0].rpartition(",")[2] == str(vocab)
    )
