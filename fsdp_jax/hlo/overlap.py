"""What runs beside a collective: the matmuls, convolutions and attention kernels between its start
and its done.
"""

import re
from functools import cache, cached_property
from typing import NamedTuple

from fsdp_jax.hlo.parser import Computation, Instruction, Module, malformed

# What GEMMs, convolutions and attention are called where the compiler or Pallas hands them to a
# library or a kernel.
KERNELS = re.compile(
    r"__cublas|__cudnn\$(?!norm)|__triton|triton_kernel|mosaic_gpu|tpu_custom_call|xla\.gpu\.triton|cutlass"
)
_CHAIN = re.compile(r'chain_id="\w*"')


class Span(NamedTuple):
    """From where a collective starts to where it is waited for.

    Attributes:
        asynchronous: other work may run beside it.
        kernels: how many GEMMs, convolutions and attention kernels stand between.
        ends: the scheduled instruction that waits for it; its own where it is synchronous.

    """

    asynchronous: bool
    kernels: int
    ends: str


def meet(send: Instruction, receive: Instruction) -> bool:
    """Whether a send and a receive between the slices of a TPU belong together."""
    one, other = (
        re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', each.attributes)
        for each in (send, receive)
    )
    return one is not None and other is not None and one.group(1) == other.group(1)


class Overlap:
    """Reads a program's schedule."""

    def __init__(self, module: Module):
        self.module = module
        self.kernels_in = cache(self._kernels_in)

    def continues(self, called: Computation) -> bool:
        """Whether a TPU's fusion only carries on with a collective that another one started.

        That one may stand outside the loop that this one is in: XLA hides a gather behind a loop of
        the model's own.
        """
        chain = next(
            (found[0] for one in called.instructions if (found := _CHAIN.search(one.attributes))),
            "",
        )
        return chain in self.started and not _targets(called, "AsyncCollectiveStart")

    @cached_property
    def started(self) -> set[str]:
        """The collectives that some fusion starts."""
        starts = [
            each
            for each in self.module.computations.values()
            if _targets(each, "AsyncCollectiveStart")
        ]
        chains = [_CHAIN.search(one.attributes) for each in starts for one in each.instructions]
        return {chain[0] for chain in chains if chain}

    def between(self, within: Computation, position: int) -> Span:
        """What stands between the start of a collective at a position and its done."""
        start = within.instructions[position]
        if start.opcode.endswith("-start") or start.opcode == "send":
            done = self._done(within, start)
        elif start.opcode == "fusion" and (chain := self._chain(start, "AsyncCollectiveStart")):
            later = within.instructions[position + 1 :]
            done = next(
                (one for one in later if self._chain(one, "AsyncCollectiveDone") == chain), None
            )
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
            receives = (
                one for one in within.instructions if one.opcode == "recv" and meet(start, one)
            )
            return next((done for one in receives if (done := self._done(within, one))), None)
        for user in within.users.get(start.name, []):
            if user.opcode.endswith("-done"):
                return user
            if user.opcode.endswith("-update"):
                return self._done(within, user)
        return None

    def _chain(self, one: Instruction, target: str) -> str:
        """The collective that a TPU's fusion starts or ends, "" where it does neither."""
        if one.opcode != "fusion":
            return ""
        called = self.module[one.calls[0]]
        if not _targets(called, target):
            return ""
        return next(
            (found for each in called.instructions if (found := _CHAIN.search(each.attributes))),
            [""],
        )[0]

    def _kernels(self, one: Instruction) -> int:
        """How many GEMMs, convolutions and attention kernels an instruction runs."""
        if one.opcode in ("dot", "convolution"):
            return 1
        if one.opcode == "custom-call":
            return int(bool(KERNELS.search(one.attribute("custom_call_target"))))
        if one.opcode == "while":
            _, body = self.module.parts(one)
            return self.kernels_in(body.name)
        inside = [self.kernels_in(name) for name in one.calls]
        if one.opcode == "fusion":
            return int(any(inside))
        return max(inside, default=0) if one.opcode == "conditional" else sum(inside)

    def _kernels_in(self, name: str) -> int:
        return sum(self._kernels(one) for one in self.module[name].instructions)


def _targets(called: Computation, target: str) -> bool:
    return any(
        each.attribute("custom_call_target") == f'"{target}"' for each in called.instructions
    )
