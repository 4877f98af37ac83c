"""Finds the matmuls, convolutions and attention kernels that a collective overlaps with."""

import re
from functools import cache, cached_property
from typing import NamedTuple

from fsdp_jax.hlo.parser import Computation, Instruction, Module, malformed

# Names of GEMMs, convolutions and attention where the compiler or Pallas calls a library or a
# kernel for them.
KERNELS = re.compile(
    r"__cublas|__cudnn\$(?!norm)|__triton|triton_kernel|mosaic_gpu|tpu_custom_call"
    r"|xla\.gpu\.triton|cutlass"
)
_CHAIN = re.compile(r'chain_id="\w*"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_START, _DONE = '"AsyncCollectiveStart"', '"AsyncCollectiveDone"'


class Span(NamedTuple):
    """From where a collective starts to where it is waited for."""

    asynchronous: bool  # whether other instructions may run in between
    kernels: int  # how many GEMMs, convolutions and attention kernels do
    ends: str  # the scheduled instruction that waits for it; the collective if it is synchronous


def receive_of(within: Computation, send: Instruction) -> Instruction | None:
    """Returns the receive that belongs to a send between slices of a TPU."""
    meeting = _RENDEZVOUS.findall(send.attributes)
    for one in within.instructions:
        if one.opcode == "recv" and meeting and _RENDEZVOUS.findall(one.attributes) == meeting:
            return one
    return None


class Overlap:
    """Reads the schedule of a program."""

    def __init__(self, module: Module):
        self._module = module
        self.kernels_in = cache(self._count_kernels_in)

    def continues(self, called: Computation) -> bool:
        """Returns whether a TPU's fusion only continues a collective that another one started.

        That one may be outside the loop that contains this one: XLA hides a gather behind a loop of
        the model's own.
        """
        return _chain(called) in self._started and not _chain(called, _START)

    @cached_property
    def _started(self) -> set[str]:
        """The chains that some fusion starts."""
        return {_chain(each, _START) for each in self._module.computations.values()} - {""}

    def between(self, within: Computation, position: int) -> Span:
        """Returns the span of the collective at a position; ValueError if nothing waits for it."""
        module, start = self._module, within.instructions[position]
        if start.opcode.endswith("-start"):
            done = within.done(start)
        elif start.opcode == "send":
            receive = receive_of(within, start)
            done = within.done(receive) if receive else None
        elif start.opcode == "fusion" and (chain := _chain(module[start.calls[0]], _START)):
            later = (one for one in within.instructions[position + 1 :] if one.opcode == "fusion")
            ends = (one for one in later if _chain(module[one.calls[0]], _DONE) == chain)
            done = next(ends, None)
        else:
            return Span(False, 0, start.name)
        if done is None:
            raise malformed(f"'{start.name}' starts and is never done", within.name)
        if '"is_sync":true' in start.attributes:
            return Span(False, 0, done.name)
        inside = within.instructions[position + 1 : within.instructions.index(done)]
        return Span(True, sum(self._kernels(one) for one in inside), done.name)

    def _kernels(self, one: Instruction) -> int:
        """Returns how many GEMMs, convolutions and attention kernels an instruction runs."""
        if one.opcode in ("dot", "convolution"):
            return 1
        if one.opcode == "custom-call":
            return int(bool(KERNELS.search(one.target)))
        if one.opcode == "while":
            _, body = self._module.parts(one)
            return self.kernels_in(body.name)
        inside = [self.kernels_in(name) for name in one.calls]
        if one.opcode == "fusion":
            return int(any(inside))
        return max(inside, default=0) if one.opcode == "conditional" else sum(inside)

    def _count_kernels_in(self, name: str) -> int:
        """Returns how many GEMMs, convolutions and attention kernels a computation runs."""
        return sum(self._kernels(one) for one in self._module[name].instructions)


def _chain(called: Computation, target: str = "") -> str:
    """Returns the chain of collectives that a TPU's fusion is a part of, "" if of none.

    With a `target`, of a fusion that calls it.
    """
    if target and all(one.target != target for one in called.instructions):
        return ""
    chains = (_CHAIN.search(one.attributes) for one in called.instructions)
    return next((chain[0] for chain in chains if chain), "")
