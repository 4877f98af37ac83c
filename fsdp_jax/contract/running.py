"""Reads the program that a step executes, in the background, and compares it with the contract.

A compiler, a flag or a chip of a run may be other than those of tests and plans.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from fsdp_jax.contract.contract import Contract, check_program
from fsdp_jax.errors import ArgumentError, human_bytes, message
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.step_plan import StepPlan

# XLA:CPU sends bfloat16 as float32, and its devices share their memory.
NOT_JUDGED = ("cpu",)
LISTED = 5  # violations that are printed


class RunningContract:
    """The verdict on the program of a step, which a thread reads while steps run.

    Attributes:
        contract: the verdict; None until it is there, and where the program cannot be judged.

    """

    def __init__(self, step: CompiledStep, say: Callable[[str], Any] | None = None):
        self.contract: Contract | None = None
        self.platform = step.plan.layout.mesh.devices.flat[0].platform
        self._failure = ""
        # A daemon: a program that ends, or fails, does not wait for it.
        judge = (step.plan, step.compiled, say)
        self._thread = threading.Thread(target=self._judge, args=judge, daemon=True)
        if self.platform not in NOT_JUDGED:
            self._thread.start()
        elif say is not None:
            say("\n".join(self.lines()))

    def _judge(self, plan: StepPlan, compiled: Any, say: Callable[[str], Any] | None) -> None:
        """Sets the contract, or the failure, and says it."""
        try:
            self.contract = check_program(plan, compiled.as_text())
        except Exception as error:  # whatever it is, the steps go on
            self._failure = f"{type(error).__name__}: {error}"
        if say is not None:
            say("\n".join(self.lines()))

    @property
    def is_read(self) -> bool:
        """Whether the program has been read, or is not judged."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> Contract | None:
        """Waits until the program has been read, at most so long; returns the verdict, if any."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return self.contract

    def lines(self, more: str = "print the contract") -> list[str]:
        """Lists what the program sends, in a line, and a warning for each of the violations.

        `more`: where those are that are not listed.
        """
        if self.platform in NOT_JUDGED:
            return [f"communication: not judged on {self.platform.upper()}"]
        if self.contract is None:
            return [f"communication: not judged: {self._failure or 'the program is being read'}"]
        first = f"communication: {summary(self.contract)}"
        return [first, *violation_warnings(self.contract, more)]


def read_communication(
    step: CompiledStep, say: Callable[[str], Any] | None = print
) -> RunningContract:
    """Reads what a step really sends from its compiled program, in a thread; fails no step.

    Call it after the first step. As `fsdp-jax train` does, it prints one line, and a warning with
    path, bytes, cause and fix for each violation: through `say`, once the program has been read.
    On CPUs nothing is judged.

    Raises:
        ArgumentError: the step has not run yet.

    """
    if step.compiled is None:
        what, fix = "the step is not compiled yet", "call the step once before"
        raise ArgumentError(what, where="read_communication", fix=fix)
    return RunningContract(step, say)


def summary(contract: Contract) -> str:
    """Formats the bytes that a device sends, over the declared, and the share beside compute."""
    sent, declared = contract.wire_bytes, contract.wire_bytes_limit
    if not sent and declared:
        return f"sends nothing, declared {human_bytes(declared)} a step"
    if not sent:
        return "sends nothing, as declared"
    text = f"sends {human_bytes(sent)} a step"
    if declared:
        text += f", {sent / declared:.3f} of declared"
    else:
        text += ", none declared"
    total = sum(each.bytes for each in contract.collectives)
    hidden = sum(each.hidden for each in contract.collectives)
    return f"{text}; {hidden / total:.0%} beside compute"


def violation_warnings(contract: Contract, more: str) -> Iterator[str]:
    """Yields a warning for each of the largest violations, and for what could not be read.

    `more`: where the others are.
    """
    for violation in contract.violations[:LISTED]:
        got = "less than declared"
        if violation.bytes > 0:
            got = f"{human_bytes(violation.bytes)} a step above the declared"
        where = violation.path or "no parameter"
        what = f"warning: communication: {violation.what}"
        yield message(what, where=where, got=got, fix=violation.cause)
    if (others := len(contract.violations) - LISTED) > 0:
        yield f"warning: communication: {others} more violations: {more}"
    for line in contract.unread:
        yield f"warning: communication: not judged: {line}"
