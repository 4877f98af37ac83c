"""Starts the processes of a run on this machine, ends them together, and starts them again.

It loads no jax and takes no device: it supervises, and the processes exchange the data. They find
one another by variables of the environment, and resume from what they have saved.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Self

from fsdp_jax.errors import (
    BROKEN,
    INTERRUPTED,
    LOST,
    OUT_OF_MEMORY,
    UNUSABLE,
    ConfigError,
    did_you_mean,
    message,
    printable,
)
from fsdp_jax.launch.admission import SECRET_VARIABLE
from fsdp_jax.launch.local_devices import divide_devices
from fsdp_jax.launch.local_process import LocalProcess
from fsdp_jax.launch.messages import process_of

POLL_SECONDS = 0.05
# After one process has failed: for the others to end by themselves, as those of a joined run do,
# then to heed SIGTERM; a process that waits in a collective heeds nothing but SIGKILL.
OWN_END_SECONDS, TERM_SECONDS = 10.0, 5.0
SECOND_SIGNAL_SECONDS = 10.0  # from a second signal to SIGKILL
# A process whose device or memory is gone fails at once when it is started again.
GONE_SECONDS = 300.0
LONGEST_WAIT = 60.0  # seconds between two attempts
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
# Exit codes of errors that a second start would have again.
FOR_THE_USER = (UNUSABLE, BROKEN, OUT_OF_MEMORY)
PROGRAMS = ("train", "python")  # what is suggested in place of an unknown command
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class LaunchOptions:
    """What to start, and when to start it again.

    Attributes:
        command: `train CONFIG ...`, `compile CONFIG ...`, or a program and its arguments, such as
            `python script.py`.
        processes: how many to start.
        devices_per_process: GPUs, or virtual CPU devices where there are none; None: see
            `divide_devices`.
        max_restarts: how often the processes are started again after a failure.
        min_processes: the fewest to go on with where one fails whenever it is started; None: all.
        log_dir: folder of the output of each process, and of `failures.jsonl`.
        stop_seconds: how long the processes may take to save and end after a signal.

    """

    command: tuple[str, ...]
    processes: int
    devices_per_process: int | None = None
    max_restarts: int = 0
    min_processes: int | None = None
    log_dir: Path | None = None
    stop_seconds: float = 300.0


@dataclass
class Signals:
    """Records the signals that this process is sent, in place of ending by them."""

    received: list[int] = field(default_factory=list)
    _previous: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


@dataclass(frozen=True)
class Attempt:
    """One start of all processes, once they have ended."""

    processes: list[LocalProcess]
    seconds: float
    stopped: bool  # by a signal to the launcher

    @property
    def failure(self) -> LocalProcess | None:
        """The process that is the likely cause of the end; None if none failed."""
        if not any(process.has_failed() for process in self.processes):
            return None
        first = min(self.processes, key=LocalProcess.cause_rank)
        killed = [each for each in self.processes if each.return_code == -signal.SIGKILL]
        # All others ended because one was lost, and that one had to be killed: it had hung.
        if first.return_code == LOST and killed:
            return killed[0]
        return first

    @property
    def was_ended_by_signal(self) -> bool:
        """Whether a signal that was forwarded ended a process, which is no failure."""
        failure = self.failure
        if failure is None or not self.stopped:
            return False
        return -failure.return_code in FORWARDED or failure.return_code == INTERRUPTED

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher if this attempt is the last."""
        failure = self.failure
        if failure is None:
            return max(process.return_code for process in self.processes)
        if failure.return_code >= 0:
            return failure.return_code
        if self.stopped:
            return 128 - failure.return_code  # as a shell reports it
        return LOST


def launch(options: LaunchOptions) -> int:
    """Runs a command in several processes until it is done; returns its exit code.

    Where one fails all are ended, and started again as often as the options say. Raises ConfigError
    for options that do not make sense.
    """
    least = options.min_processes or options.processes
    if least > options.processes:
        raise ConfigError(
            "more processes are needed than are started",
            where="--min-nproc",
            expected=f"{options.processes} or less",
            got=least,
        )
    if least < options.processes and options.max_restarts < 2:
        raise ConfigError(
            "a process is left out after two failures in a row, which need two restarts",
            where="--min-nproc",
            expected="--max-restarts of 2 or more",
            got=f"--max-restarts {options.max_restarts}",
        )
    command = _program(options)
    slots = divide_devices(options.processes, options.devices_per_process)
    if options.log_dir is not None:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    restarts, last_cause = 0, None
    with Signals() as signals:
        while True:
            attempt = _run_attempt(options, command, slots, restarts, signals)
            failure = attempt.failure
            if failure is None or attempt.was_ended_by_signal:
                return attempt.exit_code
            # Say what ended the run, and whether it starts again.
            is_last = (
                restarts >= options.max_restarts
                or bool(signals.received)
                or failure.return_code in FOR_THE_USER
            )
            _report_failure(options, attempt, failure, restarts, is_last=is_last)
            if is_last:
                return attempt.exit_code
            # Which process failed is known by its devices, since numbers change with their count.
            cause = slots[failure.number]
            if cause is last_cause and attempt.seconds < GONE_SECONDS:
                slots = _without(slots, failure.number, least)
            last_cause = cause
            restarts += 1
            wait = min(2.0 ** (restarts - 1), LONGEST_WAIT)
            _say(
                f"restart {restarts} of {options.max_restarts} in {wait:.0f} s, on {len(slots)} "
                "processes"
            )
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline and not signals.received:
                time.sleep(POLL_SECONDS)
            if signals.received:
                return attempt.exit_code


def _program(options: LaunchOptions) -> list[str]:
    """Makes the command line of each process; raises ConfigError for a command that is none."""
    if not options.command:
        raise ConfigError(
            "no command to start",
            where="command line",
            expected="-- train CONFIG ..., or -- python SCRIPT ...",
            fix="fsdp-jax launch --nproc 2 -- train configs/quickstart.yaml",
        )
    name, *arguments = options.command
    if name in ("train", "compile"):
        # The devices of the launcher are those of the run, whatever the configuration says.
        if options.devices_per_process is not None:
            arguments += ["--train.devices", str(options.devices_per_process)]
        return [sys.executable, "-m", "fsdp_jax", name, *arguments]
    if name in ("python", "python3"):
        return [sys.executable, *arguments]
    path = shutil.which(name)
    if path is None:
        raise ConfigError(
            f"no such command to start: '{name}'",
            where="command line",
            expected="-- train CONFIG ..., -- python SCRIPT ..., or another program",
            fix=f"-- python {name}" if name.endswith(".py") else did_you_mean(name, PROGRAMS),
        )
    return [path, *arguments]


def _without(slots: list[dict[str, str]], lost: int, least: int) -> list[dict[str, str]]:
    """Chooses the processes to go on with where one fails whenever it is started.

    All of them where fewer would be less than `least`.
    """
    fewer = fewer_processes(len(slots))
    if fewer < max(least, 1):
        return slots
    others = [slot for number, slot in enumerate(slots) if number != lost]
    return others[:fewer]


def fewer_processes(count: int) -> int:
    """Computes with how many processes a launch goes on after it has lost one; 0 for none.

    The number divides the one before, so that whatever was divided among those (batch, mesh) can
    be divided among these.
    """
    return max((number for number in range(1, count) if count % number == 0), default=0)


def _run_attempt(
    options: LaunchOptions,
    command: Sequence[str],
    slots: Sequence[dict[str, str]],
    restarts: int,
    signals: Signals,
) -> Attempt:
    """Starts all processes, and waits until they have ended; one that fails ends the others."""
    shared = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{_free_port()}",
        "JAX_NUM_PROCESSES": str(len(slots)),
        SECRET_VARIABLE: secrets.token_hex(32),
        "FSDP_JAX_RESTARTS": str(restarts),
        "PYTHONUNBUFFERED": "1",  # or output would come late, and be lost where one is killed
    }
    # The devices are divided here.
    inherited = {name: value for name, value in os.environ.items() if name != LOCAL_DEVICES}
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        processes = []
        for number, slot in enumerate(slots):
            environment = {**inherited, **shared, **slot, "JAX_PROCESS_ID": str(number)}
            log = None
            if options.log_dir is not None:
                log = options.log_dir / f"process-{number}.log"
                # Tell the output of one start from that of the one before.
                now = datetime.now(UTC).isoformat(timespec="seconds")
                with log.open("a", encoding="utf-8") as file:
                    file.write(f"=== {now}: started, after {restarts} restarts\n")
            process = LocalProcess(number, command, environment, log)
            stack.callback(process.close)
            processes.append(process)
        _wait_for_all(processes, signals, options.stop_seconds)
    return Attempt(processes, time.monotonic() - began, bool(signals.received))


def _wait_for_all(processes: list[LocalProcess], signals: Signals, stop_seconds: float) -> None:
    """Waits until all processes have ended; forwards signals, and ends all where one fails."""
    forwarded = 0
    plan: list[tuple[float, int]] = []  # times of `time.monotonic`, and the signals that are due
    failing = False
    while [process for process in processes if process.is_running()]:
        now = time.monotonic()
        # Signals to the launcher: the first asks for a save, the second for an end.
        if forwarded < len(signals.received):
            number = signals.received[forwarded]
            forwarded += 1
            patience = stop_seconds
            if forwarded > 1:
                patience = SECOND_SIGNAL_SECONDS
            if number == signal.SIGHUP:
                number = signal.SIGTERM  # the run saves as for any other
            # A SIGKILL that is due earlier, as after a failure, stays so.
            kill = min([now + patience, *(at for at, _ in plan[-1:])])
            plan = [(now, number), (kill, signal.SIGKILL)]
        # A process that failed: the others first have time to end by themselves.
        unread = any(process.unread for process in processes)
        if not failing and (unread or any(process.has_failed() for process in processes)):
            failing = True
            term = now + OWN_END_SECONDS
            plan = [(term, signal.SIGTERM), (term + TERM_SECONDS, signal.SIGKILL)]
        while plan and plan[0][0] <= now:
            _, number = plan.pop(0)
            for process in processes:
                process.send_signal(number)
        time.sleep(POLL_SECONDS)
    if any(process.unread for process in processes):
        raise BrokenPipeError("nobody reads the output of the processes")


def _report_failure(
    options: LaunchOptions, attempt: Attempt, failure: LocalProcess, restarts: int, *, is_last: bool
) -> None:
    """Prints which process ended the others, and appends it to `failures.jsonl`."""
    count = len(attempt.processes)
    what = f"{process_of(failure.number, count)} {failure.ending()}"
    where, error = "", failure.error_text()
    if options.log_dir is not None:
        where = str(options.log_dir / f"process-{failure.number}.log")
        record = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "restarts": restarts,
            "seconds": round(attempt.seconds, 1),
            "process": failure.number,
            "processes": count,
            "ending": failure.ending(),
            "return_codes": [process.return_code for process in attempt.processes],
            "error": error,
        }
        with (options.log_dir / "failures.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(record)}\n")
    if not is_last:
        _say(f"{what} after {attempt.seconds:.0f} s")
        return
    # One line of the error, which the process has printed itself.
    line, *others = error.split("\n")
    if line.startswith("Traceback"):  # the frames are indented, the error is not
        line = next((each for each in others if each and not each.startswith(" ")), line)
    elif others and not failure.printed_error():
        line = f"the last line of its output: {others[-1]}"
    # What another program does is its own affair, unless it was killed or has lost another process.
    code, fix = failure.return_code, ""
    if options.command[0] == "train" and code not in FOR_THE_USER:
        fix = "run the same command again to resume from the last checkpoint"
    elif code in FOR_THE_USER and options.max_restarts:
        fix = "correct what the error names: it is not started again, since it would fail again"
    elif code < 0 or code == LOST:
        fix = "run the same command again"
    text = message(f"error: {what}", where=where, got=printable(line), fix=fix)
    print(text, file=sys.stderr, flush=True)


def _say(text: str) -> None:
    """Prints a line of the launcher's own on stderr."""
    print(f"launch: {text}", file=sys.stderr, flush=True)


def _free_port() -> int:
    """Finds a port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
