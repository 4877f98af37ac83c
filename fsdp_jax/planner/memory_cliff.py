"""Reads from a compiled program what XLA gave up for want of memory, and how much would avoid it.

Near the limit XLA does two things that cost time and that no figure of memory shows. It
rematerializes: it drops results and computes them again, which it marks by `.remat` in the
instructions' names. And its latency-hiding scheduler prefers schedules of less memory, in which
collectives wait instead of running beside compute.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_jax.errors import human_bytes
from fsdp_jax.hlo.collectives import Collective
from fsdp_jax.hlo.overlap import Overlap
from fsdp_jax.hlo.parser import Instruction, Module
from fsdp_jax.planner.machines.hardware import Hardware

GPU_BASE, GPU_SLOP = 0.80, 0.95
"""Fractions of a GPU's memory that XLA plans with: GetSchedulerMemoryLimit, gpu_hlo_schedule.cc."""

_REMATERIALIZED = re.compile(r".\.remat(?:\d|_|\.|$)")
_NO_WORK = {"bitcast", "get-tuple-element", "tuple", "parameter", "constant"}


@dataclass(frozen=True)
class MemoryCliff:
    """What XLA computes again or sends exposed for want of memory, and how much would avoid it."""

    rematerialized: int  # instructions that XLA added to compute a result again
    rematerialized_bytes: int  # of those results, each once; in a loop, of one trip
    # The fraction of the bytes sent in loops that no kernel overlaps; 0 below XLA's limit.
    exposed_share: float
    limit_bytes: int  # memory that XLA's scheduler plans with
    # An upper estimate of the memory to free: the excess over the limit, and the results that were
    # dropped, which may not all be needed at once.
    free_bytes: int
    lever: str = ""  # the setting that frees this at the least cost in step time; "" if unknown

    def __str__(self) -> str:
        parts = []
        if self.rematerialized:
            size = human_bytes(self.rematerialized_bytes)
            parts.append(
                f"XLA computes {self.rematerialized} results again ({size}) to save memory"
            )
        if self.exposed_share:
            parts.append(
                f"{self.exposed_share:.0%} of what is sent beside compute is exposed, above the"
                f" {human_bytes(self.limit_bytes)} that XLA's scheduler plans with"
            )
        text = f"memory cliff: {'; '.join(parts)}; free up to {human_bytes(self.free_bytes)}"
        if self.lever:
            text += f", at the least cost with {self.lever}"
        return text


def memory_cliff(
    module: Module, collectives: Iterable[Collective], peak_bytes: int, limit_bytes: int
) -> MemoryCliff | None:
    """Finds results that XLA computes again or sends exposed for want of memory; None for neither.

    `peak_bytes`: device memory that it needs; `limit_bytes`: from `scheduler_memory_limit`.
    """
    again = _rematerialized_instructions(module)
    excess = max(0, peak_bytes - limit_bytes)
    # below the limit the scheduler is free to overlap: exposed communication has other causes
    exposed = 0.0
    if excess:
        exposed = _exposed_fraction_in_loops(module, collectives)
    if not again and not exposed:
        return None
    # a result that is computed again several times is kept once where there is room
    results = {one.name.partition(".remat")[0]: one.shapes for one in again}
    dropped = sum(shape.bytes for shapes in results.values() for shape in shapes)
    return MemoryCliff(len(again), dropped, exposed, limit_bytes, excess + dropped)


def scheduler_memory_limit(chip: Hardware, module: Module, allocator: int | None = None) -> int:
    """Computes the device memory that XLA's scheduler plans with, for a program.

    `allocator`: bytes that the running process may take of a GPU; None without that GPU.
    """
    assert chip.memory_bytes is not None, "virtual devices have none"
    if chip.platform != "cuda":
        return chip.usable_bytes
    # the program's inputs are there already; XLA plans with most of the rest
    entry = module[module.entry].parameters.values()
    inputs = sum(array.bytes for one in entry for array in one.shapes if array.space == 0)
    base = GPU_BASE * chip.memory_bytes
    if allocator is not None:
        base = allocator
    return int(inputs + GPU_SLOP * max(0.0, base - inputs))


def _rematerialized_instructions(module: Module) -> list[Instruction]:
    """Finds the instructions that XLA's rematerialization added, in scheduled computations."""
    # instructions inside of a fusion are not scheduled: the fusion has the name
    computations = module.computations.values()
    instructions = [one for each in computations for one in each.instructions]
    fused = {name for one in instructions if one.opcode == "fusion" for name in one.calls}
    scheduled = [
        one for each in computations if each.name not in fused for one in each.instructions
    ]
    working = [one for one in scheduled if one.opcode not in _NO_WORK]
    return [one for one in working if _REMATERIALIZED.search(one.name)]


def _exposed_fraction_in_loops(module: Module, collectives: Iterable[Collective]) -> float:
    """Computes the share of the bytes sent in loops with kernels that no kernel overlaps."""
    overlap = Overlap(module)
    beside = [one for one in collectives if one.loop and overlap.kernels_in(one.within)]
    sent = sum(one.bytes for one in beside)
    if not sent:
        return 0.0
    return 1 - sum(one.hidden for one in beside) / sent
