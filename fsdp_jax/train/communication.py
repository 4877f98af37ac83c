"""Compares the program that a run executes with the communication that its strategy declares.

A compiler, a flag or a chip of the run may be other than those of the tests and of plans.
"""

import json
import threading
from collections.abc import Iterator
from typing import Any

from fsdp_jax.checkpoint import Lease
from fsdp_jax.contract.contract import Contract, check_program
from fsdp_jax.errors import human_bytes, message
from fsdp_jax.io.atomic import write_durably
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.step_plan import StepPlan
from fsdp_jax.train.metrics import utc_timestamp

COMMUNICATION = "communication.json"  # in the directory of the run
# XLA:CPU sends bfloat16 as float32, and its devices share their memory.
NOT_JUDGED = ("cpu",)
LISTED = 5  # violations that are printed


class CommunicationCheck:
    """Reads the program of a step in a thread, beside the steps, and fails no run.

    Attributes:
        contract: the verdict; None until it is there, and where the program cannot be judged.

    """

    def __init__(self, step: CompiledStep):
        self.contract: Contract | None = None
        self._failure = ""
        device = step.plan.layout.mesh.devices.flat[0]
        self._platform, self._device = device.platform, device.device_kind
        # A daemon: a run that ends, or fails, does not wait for it.
        judge = (step.plan, step.compiled)
        self._thread = threading.Thread(target=self._judge, args=judge, daemon=True)
        self._told = False
        if self._platform not in NOT_JUDGED:
            self._thread.start()

    def _judge(self, plan: StepPlan, compiled: Any) -> None:
        """Sets the contract, or the failure."""
        try:
            self.contract = check_program(plan, compiled.as_text())
        except Exception as error:  # whatever it is, the run goes on
            self._failure = f"{type(error).__name__}: {error}"

    def wait(self, seconds: float) -> None:
        """Waits until the verdict is there, at most so long."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def news(self, lease: Lease) -> Iterator[str]:
        """Writes the verdict, once and when it is there, and yields the lines to print.

        `lease`: of the directory that gets the file.
        """
        if self._told or self._thread.is_alive():
            return
        self._told = True
        if self._platform in NOT_JUDGED:
            yield f"communication: not judged on {self._platform.upper()}"
        elif self.contract is None:
            yield f"communication: not judged: {self._failure}"
        else:
            yield f"communication: {summary(self.contract)}"
            yield from violation_warnings(self.contract)
            yield from self._write(lease, self.contract)

    def _write(self, lease: Lease, contract: Contract) -> Iterator[str]:
        """Writes `communication.json`; yields a warning where the disk does not take it."""
        fields = {"time": utc_timestamp(), "device": self._device, "summary": summary(contract)}
        text = json.dumps(fields | contract.to_json(), indent=1)
        try:
            with lease.writing():
                write_durably(lease.anchor / COMMUNICATION, f"{text}\n".encode())
        except OSError as error:
            yield message(f"warning: {COMMUNICATION} is not written", got=error)


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


def violation_warnings(contract: Contract) -> Iterator[str]:
    """Yields a warning for each of the largest violations, and for what could not be read."""
    for violation in contract.violations[:LISTED]:
        got = "less than declared"
        if violation.bytes > 0:
            got = f"{human_bytes(violation.bytes)} a step above the declared"
        where = violation.path or "no parameter"
        what = f"warning: communication: {violation.what}"
        yield message(what, where=where, got=got, fix=violation.cause)
    if (more := len(contract.violations) - LISTED) > 0:
        yield f"warning: communication: {more} more violations, in {COMMUNICATION}"
    for line in contract.unread:
        yield f"warning: communication: not judged: {line}"
