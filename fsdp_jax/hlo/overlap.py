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
_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


class Span(NamedTuple):
    """From where a collective starts to where it is waited for.

    Attributes:
        asynchronous: whether other instructions may run in between.
        kernels: how many GEMMs, convolutions and attention kernels do.
        ends: the scheduled instruction that waits for it; the collective if it is synchronous.

    """

    asynchronous: bool
    kernels: int
    ends: str


def is_pair(send: Instruction, receive: Instruction) -> bool:
    """Returns whether a send and a receive between slices of a TPU belong together."""
    one, other = (_RENDEZVOUS.search(each.attributes) for each in (send, receive))
    return one is not None and other is not None and one[1] == other[1]


class Overlap:
    """Reads the schedule of a program.

    Attributes:
        kernels_in: returns how many GEMMs, convolutions and attention kernels a computation runs.

    """

    def __init__(self, module: Module):
        self._module = module
        self.kernels_in = cache(self._count_kernels_in)

    def continues(self, called: Computation) -> bool:
        """Returns whether a TPU's fusion only continues a collective that another one started.

        That one may be outside the loop that contains this one: XLA hides a gather behind a loop of
        the model's own.
        """
        return _chain_in(called) in self._started and not _has_target(called, _START)

    @cached_property
    def _started(self) -> set[str]:
        """The chains that some fusion starts."""
        computations = self._module.computations.values()
        starts = [each for each in computations if _has_target(each, _START)]
        chains = [_CHAIN.search(one.attributes) for each in starts for one in each.instructions]
        return {chain[0] for chain in chains if chain}

    def between(self, within: Computation, position: int) -> Span:
        """Returns the span of the collective at a position of a computation.

        Raises:
            ValueError: it is started and never waited for.

        """
        start = within.instructions[position]
        if start.opcode.endswith("-start") or start.opcode == "send":
            done = self._done(within, start)
        elif start.opcode == "fusion" and (chain := self._chain(start, _START)):
            later = within.instructions[position + 1 :]
            done = next((one for one in later if self._chain(one, _DONE) == chain), None)
        else:
            return Span(False, 0, start.name)
        if done is None:
            raise malformed(f"'{start.name}' starts and is never done", within.name)
        if '"is_sync":true' in start.attributes:
            return Span(False, 0, done.name)
        inside = within.instructions[position + 1 : within.instructions.index(done)]
        return Span(True, sum(self._kernels(one) for one in inside), done.name)

    def _done(self, within: Computation, start: Instruction) -> Instruction | None:
        if start.opcode == "send":
            for one in within.instructions:
                paired = one.opcode == "recv" and is_pair(start, one)
                if paired and (done := self._done(within, one)):
                    return done
            return None
        for user in within.users.get(start.name, []):
            if user.opcode.endswith("-done"):
                return user
            if user.opcode.endswith("-update"):
                return self._done(within, user)
        return None

    def _chain(self, one: Instruction, target: str) -> str:
        """Returns the chain that a TPU's fusion starts or ends, "" where it does neither."""
        if one.opcode != "fusion":
            return ""
        called = self._module[one.calls[0]]
        return _chain_in(called) if _has_target(called, target) else ""

    def _kernels(self, one: Instruction) -> int:
        """Returns how many GEMMs, convolutions and attention kernels an instruction runs."""
        if one.opcode in ("dot", "convolution"):
            return 1
        if one.opcode == "custom-call":
            return int(bool(KERNELS.search(one.attribute("custom_call_target"))))
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


def _chain_in(called: Computation) -> str:
    chains = (_CHAIN.search(one.attributes) for one in called.instructions)
    return next((chain[0] for chain in chains if chain), "")


def _has_target(called: Computation, target: str) -> bool:
    quoted = f'"{target}"'
    return any(one.attribute("custom_call_target") == quoted for one in called.instructions)
