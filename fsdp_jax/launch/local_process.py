"""A process that the launcher has started: its output, and how it ended."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_jax.compat.native_lines import is_of_gloo
from fsdp_jax.errors import LOST

LONGEST_LINE = 1 << 16  # bytes of output that are printed as one line
KEPT_LINES = 200  # of the newest output, for the cause of a failure
BLOCK_LINES = 30  # at most, of an error that is reported
DRAIN_SECONDS = 5.0  # for output that is still in the pipe when the process has ended
# The first line of an error: in order of how well it tells the cause. The first two are printed by
# `launch/watch.py` and the command; the second also follows "process 1 (of 0 to 1) failed, so 0
# ends:".
TRACEBACK = re.compile(r"Traceback \(most recent call last\):")
ERROR_LINES = (
    re.compile(r"error in process \d+ \(of 0 to \d+\):"),
    re.compile(r"error: "),
    TRACEBACK,
)

_printing = threading.Lock()  # lines of several processes, each whole


class LocalProcess:
    """A process of the run. Its output is printed, each line with its number, and written to a log.

    What Gloo prints of its connections is in the log alone.

    Attributes:
        number: of the process, from 0.
        unread: whether nobody reads what this process prints.
        stopped_by_launcher: whether it ended after a signal that the launcher sent.

    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None = None,
    ):
        self.number = number
        self.unread = False
        self.stopped_by_launcher = False
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._ended_at: float | None = None
        # A session of its own: Ctrl-C reaches the launcher alone, which forwards it once, and a
        # signal to the group reaches the processes that this one has started.
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_output, args=[log], daemon=True)
        self._reader.start()

    def is_running(self) -> bool:
        """Tells whether the process runs; kills what it has left running when it no longer does."""
        self._notice_end(os.WNOHANG)
        return self._ended_at is None

    def _notice_end(self, option: int = 0) -> None:
        """Waits for the end of the process, or with `os.WNOHANG` only looks whether it has come."""
        if self._ended_at is not None:
            return
        # With WNOWAIT its number stays its own. Later that may be the number of another group.
        if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | option):
            self._kill_group()
            self._process.wait()
            self._ended_at = time.monotonic()

    def _kill_group(self) -> None:
        """Kills the process, whose end has not been noticed yet, and those that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def return_code(self) -> int:
        """The exit code of a process that has ended; minus the number of the signal it died of."""
        assert self._process.returncode is not None, "it runs"
        return self._process.returncode

    def has_failed(self) -> bool:
        """Tells whether the process has ended with an error."""
        return not self.is_running() and self.return_code not in (0, os.EX_TEMPFAIL)

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process if it runs; SIGKILL to those that it has started too."""
        if not self.is_running():
            return
        self.stopped_by_launcher = True
        if number == signal.SIGKILL:
            self._kill_group()
        else:
            os.kill(self._process.pid, number)

    def close(self) -> None:
        """Kills what the process has left running, and waits until its output is written."""
        self.send_signal(signal.SIGKILL)
        self._notice_end()
        self._reader.join(DRAIN_SECONDS)

    def cause_rank(self) -> tuple[int, float]:
        """Ranks a process that has ended: of several, the least is the likely cause of the end.

        First those that died of a signal or say that the error is theirs, then other exit codes,
        then those that ended because another process was lost, then those that the launcher ended,
        then those that did not fail; within each, by time.
        """
        assert self._ended_at is not None, "it runs"
        own = any(ERROR_LINES[0].match(line) for line in self._tail)
        rank = 1
        if not self.has_failed():
            rank = 4
        elif self.stopped_by_launcher:
            rank = 3
        elif self.return_code == LOST:
            rank = 2
        elif own or self.return_code < 0:
            rank = 0
        return rank, self._ended_at

    def ending(self) -> str:
        """Describes how the process ended: `was killed by SIGKILL`, `exited with 1`."""
        if self.return_code >= 0:
            return f"exited with {self.return_code}"
        number = -self.return_code
        try:
            name = signal.Signals(number).name
        except ValueError:  # a real-time signal
            name = f"signal {number}"
        if self.stopped_by_launcher:
            return f"did not end, and was killed by {name}"
        return f"was killed by {name}"

    def printed_error(self) -> bool:
        """Tells whether an error is among the newest lines of output."""
        return any(pattern.match(line) for pattern in ERROR_LINES for line in self._tail)

    def error_text(self) -> str:
        """Finds the last error among the newest lines of output; without one, the last lines."""
        lines = list(self._tail)
        for pattern in ERROR_LINES:
            starts = [index for index, line in enumerate(lines) if pattern.match(line)]
            if starts:
                block = lines[starts[-1] :]
                # The error itself is at the end of a traceback.
                if pattern is TRACEBACK and len(block) > BLOCK_LINES:
                    return "\n".join([block[0], "  ...", *block[-BLOCK_LINES + 2 :]])
                return "\n".join(block[:BLOCK_LINES])
        return "\n".join(lines[-BLOCK_LINES:])

    def _read_output(self, log: Path | None) -> None:
        """Runs in a thread: prints the lines of the process until its output closes."""
        assert self._process.stdout is not None
        with contextlib.ExitStack() as stack:
            file = None
            if log is not None:
                file = stack.enter_context(log.open("ab", buffering=0))
            stream = stack.enter_context(self._process.stdout)
            of_gloo = False
            while line := stream.readline(LONGEST_LINE):
                if file is not None:
                    with contextlib.suppress(OSError):  # a full disk: it is still printed
                        file.write(line)
                text = line.decode(errors="replace").rstrip("\r\n")
                of_gloo = is_of_gloo(text, of_gloo)
                if not of_gloo:
                    self._tail.append(text)
                    self._print(text)

    def _print(self, text: str) -> None:
        """Prints a line with the number of the process; goes on reading where nobody reads it."""
        try:
            with _printing:
                print(f"[{self.number}] {text}", flush=True)
        except (OSError, ValueError):
            self.unread = True
