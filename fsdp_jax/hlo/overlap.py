"""Finds the matmuls, convolutions and attention kernels that a collective overlaps with."""

import re
from functools import cache, cached_property
from typing import NamedTuple

from fsdp_jax.hlo.parser import Computation, Instruction, Module, malformed_error

# Names of GEMMs, convolutions and attention where the compiler or Pallas calls a library or a
# kernel for them.
KERNELS = re.compile(
    r"__cublas|__cudnn\$(?!norm)|__triton|triton_kernel|mosaic_gpu|tpu_custom_call"
    r"|xla\.gpu\.triton|cutlass"
)
# Attributes of a TPU's program. The fusions that start, continue and end a collective have one
# chain; a send and its receive have one rendezvous.
_CHAIN = re.compile(r'chain_id="\w*"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_START, _DONE = '"AsyncCollectiveStart"', '"AsyncCollectiveDone"'


class Span(NamedTuple):
    """The part of the schedule from a collective's start to the instruction that waits for it."""

    asynchronous: bool  # whether other instructions may run in between
    kernels: int  # number of GEMMs, convolutions and attention kernels that run in between
    ends: str  # the scheduled instruction that waits for it; the collective if it is synchronous


def receive_of(within: Computation, send: Instruction) -> Instruction | None:
    """Finds the receive that belongs to a send between slices of a TPU; None if there is none."""
    meeting = _RENDEZVOUS.findall(send.attributes)
    for one in within.instructions:
        if one.opcode == "recv" and meeting and _RENDEZVOUS.findall(one.attributes) == meeting:
            return one
    return None


class Overlap:
    """Finds the kernels in a program's schedule that run while a collective is in flight."""

    def __init__(self, module: Module):
        self._module = module
        self.kernels_in = cache(self._count_kernels_in)

    def only_continues(self, called: Computation) -> bool:
        """Tells whether a TPU's fusion only continues a collective that another fusion started.

        `called`: the computation of the fusion. The one that starts it may be outside of the loop
        around this one: XLA hides a gather behind a loop of the model's own.
        """
        return _chain_id(called) in self._started_chains and not _chain_id(called, _START)

    @cached_property
    def _started_chains(self) -> set[str]:
        """The chains of collectives that some fusion starts."""
        return {_chain_id(each, _START) for each in self._module.computations.values()} - {""}

    def span_of(self, within: Computation, position: int) -> Span:
        """Finds the span of the collective at a position in a scheduled computation.

        Raises ValueError if nothing waits for it.
        """
        # The instruction that waits: its done, that of the receive of its send, or a TPU's fusion
        # that ends the same chain.
        module, start = self._module, within.instructions[position]
        done: Instruction | None = None
        if start.opcode.endswith("-start"):
            done = within.done_of(start)
        elif start.opcode == "send":
            if receive := receive_of(within, start):
                done = within.done_of(receive)
        elif start.opcode == "fusion" and (chain := _chain_id(module[start.calls[0]], _START)):
            later = (one for one in within.instructions[position + 1 :] if one.opcode == "fusion")
            ends = (one for one in later if _chain_id(module[one.calls[0]], _DONE) == chain)
            done = next(ends, None)
        else:
            return Span(False, 0, start.name)
        if done is None:
            raise malformed_error(f"'{start.name}' starts and is never done", within.name)
        # XLA may mark a pair as run at once, whatever stands between.
        if '"is_sync":true' in start.attributes:
            return Span(False, 0, done.name)
        inside = within.instructions[position + 1 : within.instructions.index(done)]
        return Span(True, sum(self._count_kernels(one) for one in inside), done.name)

    def _count_kernels(self, instruction: Instruction) -> int:
        """Counts the GEMMs, convolutions and attention kernels that an instruction runs.

        A fusion counts as one, a loop by one trip, a conditional by its largest branch.
        """
        if instruction.opcode in ("dot", "convolution"):
            return 1
        if instruction.opcode == "custom-call":
            return int(bool(KERNELS.search(instruction.target)))
        if instruction.opcode == "while":
            _, body = self._module.loop_parts(instruction)
            return self.kernels_in(body.name)
        inside = [self.kernels_in(name) for name in instruction.calls]
        if instruction.opcode == "fusion":
            return int(any(inside))
        if instruction.opcode == "conditional":
            return max(inside, default=0)
        return sum(inside)

    def _count_kernels_in(self, name: str) -> int:
        """Counts the GEMMs, convolutions and attention kernels that the named computation runs."""
        return sum(self._count_kernels(one) for one in self._module[name].instructions)


def _chain_id(called: Computation, target: str = "") -> str:
    """Reads the `chain_id` of the collective that a TPU's fusion is a part of; "" if of none.

    `called`: the computation of the fusion; `target`: a custom call that must be in it, if given.
    """
    if target and all(one.target != target for one in called.instructions):
        return ""
    chains = (_CHAIN.search(one.attributes) for one in called.instructions)
    return next((chain[0] for chain in chains if chain), "")
