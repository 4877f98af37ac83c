"""Compares the program that a run executes with the contract, and its plan with what is measured.

A compiler, a flag or a chip of the run may be other than those of the tests and of plans.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from fsdp_jax.checkpoint import Lease
from fsdp_jax.contract.running import NOT_JUDGED, RunningContract, summary
from fsdp_jax.errors import human_bytes, message
from fsdp_jax.hlo.parser import parse_program
from fsdp_jax.io.atomic import write_durably
from fsdp_jax.planner import hardware_of
from fsdp_jax.planner.compiled.timeline import ScheduleSimulator
from fsdp_jax.planner.html import seconds_text
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.train.metrics import StepRecord, utc_timestamp

COMMUNICATION = "communication.json"  # in the directory of the run
MEASURED = "measured.json"  # beside it: planned against measured
# The first steps of a start fill caches, and wait for the data.
WARM_UP, MEASURED_STEPS = 2, 5


@dataclass(frozen=True)
class StepFigures:
    """The most memory of a device, and the time of a step; None where it is not known."""

    peak_bytes: float | None
    step_s: float | None


class CommunicationCheck:
    """Reads the program of a step in a thread, beside the steps, and fails no run.

    `contract` is the verdict, and `planned` what a plan reads from that program; None until they
    are there, and where the program cannot be judged.
    """

    def __init__(self, step: CompiledStep):
        device = step.plan.layout.mesh.devices.flat[0]
        self._device = device.device_kind
        self.contract = RunningContract(step)
        self.planned: StepFigures | None = None
        self._failure = ""
        self._told, self._has_compared = False, device.platform in NOT_JUDGED
        self._records: list[StepRecord] = []
        # A daemon: a run that ends, or fails, does not wait for it.
        self._thread = threading.Thread(target=self._plan, args=(step,), daemon=True)
        if not self._has_compared:
            self._thread.start()

    def _plan(self, step: CompiledStep) -> None:
        """Sets the planned figures, or the failure."""
        contract = self.contract.wait()
        try:
            memory = step.compiled.memory_analysis()
            used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            peak = int(used + memory.output_size_in_bytes - memory.alias_size_in_bytes)
            seconds = None
            chip = hardware_of(self._device)
            if chip is not None and contract is not None:
                module, mesh = parse_program(step.compiled.as_text()), step.plan.layout.mesh
                simulator = ScheduleSimulator(module, contract.collectives, mesh, chip)
                seconds = simulator.simulate_step().seconds
            self.planned = StepFigures(peak, seconds)
        except Exception as error:  # whatever it is, the run goes on
            self._failure = f"{type(error).__name__}: {error}"

    def wait(self, seconds: float) -> None:
        """Waits until the program has been read, and planned, at most so long for each."""
        self.contract.wait(seconds)
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def note_step(self, record: StepRecord) -> None:
        """Keeps the record of one of the first steps, whose time and memory were measured."""
        if not self._has_compared and len(self._records) < WARM_UP + MEASURED_STEPS:
            self._records.append(record)

    def news(self, lease: Lease) -> Iterator[str]:
        """Writes the verdict and the comparison, once, and yields the lines to print.

        Each comes when it is there. `lease`: of the directory that gets the files.
        """
        if not self._told and self.contract.is_read:
            self._told = True
            yield from self.contract.lines(f"see {COMMUNICATION}")
            if self.contract.contract is not None:
                found = self.contract.contract
                yield from self._write(
                    lease, COMMUNICATION, {"summary": summary(found)} | found.to_json()
                )
        is_measured = len(self._records) == WARM_UP + MEASURED_STEPS
        if not self._has_compared and is_measured and not self._thread.is_alive():
            self._has_compared = True
            yield from self._compare(lease)

    def _compare(self, lease: Lease) -> Iterator[str]:
        """Writes `measured.json`, and yields the line of planned against measured."""
        if self.planned is None:
            yield f"planned against measured: no plan of this program: {self._failure}"
            return
        records = self._records[WARM_UP:]
        measured = StepFigures(
            records[-1].memory_peak_bytes, median(each.step_time_s for each in records)
        )
        yield f"planned against measured: {comparison(self.planned, measured)}"
        steps = {"first_step": records[0].step, "last_step": records[-1].step}
        figures = {"planned": asdict(self.planned), "measured": asdict(measured)}
        yield from self._write(lease, MEASURED, steps | figures)

    def _write(self, lease: Lease, name: str, fields: dict[str, Any]) -> Iterator[str]:
        """Writes a file; yields a warning where the disk does not take it."""
        text = json.dumps({"time": utc_timestamp(), "device": self._device} | fields, indent=1)
        try:
            with lease.writing():
                write_durably(lease.anchor / name, f"{text}\n".encode())
        except OSError as error:
            yield message(f"warning: {name} is not written", got=error)


def comparison(planned: StepFigures, measured: StepFigures) -> str:
    """Formats the peak and the time of a step, planned and measured, with their ratios."""
    parts = []
    for name, plan, found, text in (
        ("peak memory", planned.peak_bytes, measured.peak_bytes, human_bytes),
        ("a step", planned.step_s, measured.step_s, seconds_text),
    ):
        shown = [f"{name} {text(plan)} planned" if plan else f"{name} not planned"]
        shown.append(f"{text(found)} measured" if found else "not measured")
        if plan and found:
            shown.append(f"ratio {found / plan:.2f}")
        parts.append(", ".join(shown))
    return "; ".join(parts)
