"""Keeps the processes of a run together: they join, agree, and end when one of them fails."""

import contextlib
import faulthandler
import hashlib
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import BinaryIO

import jax

from fsdp_jax.errors import (
    FAILED,
    INTERRUPTED,
    UNUSABLE,
    ConfigError,
    ProcessLostError,
    error_block,
    exit_code,
)
from fsdp_jax.launch.hub import (
    EVERY,
    LONGEST_LINE,
    SAY_SECONDS,
    Hub,
    Line,
    enable_keep_alive,
    encode_line,
    failure_line,
    lost_line,
)

log = logging.getLogger("fsdp_jax.launch")

LONGEST_FACT = 1000  # characters; of a longer one the rest is compared by its digest
# Seconds that a process waits: for the errors of others, before it ends; for its own error to reach
# process 0; for news of a lost process that may have caused its error; for processes that join
# late, when the run is refused.
GRACE, DELIVERY, CAUSE, LATE = 1.0, 3.0, 3.0, 10.0


class Watch:
    """Joins this process to the others, compares facts with them, and makes all end if one fails.

    It has one connection to the `Hub` of process 0, which a thread of its own reads.
    """

    def __init__(self, host: str, port: int, process: int, processes: int, patience: float):
        self._address = (host, port)
        self._host = host
        if ":" in host:  # IPv6
            self._host = f"[{host}]"
        self._where = f"{self._host}:{port}"
        self._process = process
        self._processes = processes
        self._patience = patience
        self._hub: Hub | None = None  # in process 0
        self._connection: socket.socket
        # several threads send: the main one, and the one that times the steps
        self._sending = threading.Lock()
        self._agreed = threading.Event()
        self._news = threading.Event()  # another process failed
        self._delivered = threading.Event()  # this process's error is known to process 0
        self._failing = False
        self._left = False

    # Joining

    def join(self, facts: Mapping[str, object]) -> str:
        """Waits until all processes have joined and agree; returns the address of jax's service.

        Raises ConfigError if they disagree, two have one number, or the port is in use, and
        ProcessLostError if some did not come in time.
        """
        taken: OSError | None = None
        patience = self._patience
        if self._process == 0:
            try:
                self._hub = Hub(self._address[1], self._processes, self._patience)
            except OSError as error:  # perhaps another process 0 listens there, and says so
                taken = error
                patience = SAY_SECONDS
        try:
            return self._connect(facts, patience)
        except (ConfigError, ProcessLostError) as error:
            # the hub ends with this process: first the others must hear why
            if self._hub is not None:
                self._hub.wait_until_alone(LATE)
            if taken is None or isinstance(error, ConfigError):
                raise
            raise ConfigError(
                "process 0 cannot listen",
                where="cluster.coordinator",
                got=f"{self._where}: {taken}",
                fix="choose a port that is free on its host",
            ) from taken

    def _connect(self, facts: Mapping[str, object], patience: float) -> str:
        """Connects and waits for the others; tries again until `patience` seconds have passed."""
        began = said = time.monotonic()
        # the token is this process's own: by it process 0 tells a second try from a second process
        here = f"host {socket.gethostname()}, pid {os.getpid()}"
        name = {"process": self._process, "where": here, "token": secrets.token_hex(8)}
        hello = encode_line({**name, "facts": _facts_as_text(facts)})
        problem = ""
        while (now := time.monotonic()) < began + patience:
            if now - said >= SAY_SECONDS:
                said = now
                limit = f"{now - began:.0f} of at most {patience:.0f} s (cluster.timeout)"
                self._print_line(f"waiting for process 0 at {self._where}: {problem}: {limit}")
            # one try, whose connection is closed unless all processes join and agree
            try:
                with contextlib.ExitStack() as stack:
                    connection = socket.create_connection(self._address, timeout=SAY_SECONDS)
                    stack.enter_context(connection)
                    lines = stack.enter_context(connection.makefile("rb"))
                    enable_keep_alive(connection)
                    connection.sendall(hello)
                    connection.settimeout(3 * SAY_SECONDS)  # a stranger may never answer
                    if port := self._await_others(connection, lines):
                        stack.pop_all()
                        self._start_reading(connection, lines)
                        return f"{self._host}:{port}"
                # What went wrong is said while this process waits, and again when it gives up. An
                # answer of process 0 that ends the run is not tried again.
                problem = "it closes the connection"
            except (ConfigError, ProcessLostError):
                raise
            except (OSError, UnicodeError) as error:
                problem = str(error)
            except Exception:
                problem = "something else answers there"
            time.sleep(0.2)
        raise ProcessLostError(
            "process 0 does not answer",
            where="cluster.coordinator",
            expected=f"process 0 at {self._where} within {patience:.0f} s",
            got=problem,
            fix="look at its log: did it start, on that host, with this port?",
        )

    def _await_others(self, connection: socket.socket, lines: BinaryIO) -> int:
        """Reads until all processes agree; returns the port of jax's service.

        Returns 0 if the connection closes before. Raises ConfigError or ProcessLostError as process
        0 says.
        """
        while data := lines.readline(LONGEST_LINE):
            line = json.loads(data)
            connection.settimeout(2 * self._patience)  # process 0 ends it before that
            if "say" in line:
                self._print_line(line["say"])
            elif "failed" in line:
                text = line["text"].removeprefix("error: ")
                if line["code"] == UNUSABLE:
                    raise ConfigError(text)
                raise ProcessLostError(text)
            elif "same" in line:
                return int(line["port"])
        return 0

    def _start_reading(self, connection: socket.socket, lines: BinaryIO) -> None:
        """Keeps the connection, and starts the thread that reads from it."""
        connection.settimeout(None)
        self._connection = connection
        name = "processes-watch"
        threading.Thread(target=self._read_lines, args=[lines], name=name, daemon=True).start()

    def close_after_fork(self) -> None:
        """Closes the connections in a forked copy of this process, which would keep them open."""
        handles = [self._connection.fileno()]
        if self._hub is not None:
            handles += self._hub.descriptors()
        for handle in handles:
            if handle >= 0:  # not closed already
                os.close(handle)

    # Reading

    def _read_lines(self, lines: BinaryIO) -> None:
        """Acts on the lines of process 0; ends this process if the connection closes too early."""
        with contextlib.suppress(OSError), self._connection, lines:
            for data in lines:
                self._handle_line(json.loads(data))
        if not (self._left or self._failing or self._news.is_set()):
            line = lost_line(0, self._where)
            self._end_process(self._failure_text(line), line["code"])

    def _handle_line(self, line: Line) -> None:
        """Acts on a line of process 0; ends this process `GRACE` seconds after another fails."""
        if "say" in line:
            self._print_line(line["say"])
        elif "same" in line:
            self._agreed.set()
        elif "left" in line:
            self._left = True
        elif line["failed"] == self._process and self._failing:
            self._delivered.set()
        elif "failed" in line:
            if line["stacks"]:
                print_stacks()
            self._print_last(self._failure_text(line))
            if not self._news.is_set():
                self._news.set()
                # Others may fail as well, this one too: their errors are printed until then.
                timer = threading.Timer(GRACE, self._end_unless_failing, [line["code"]])
                timer.daemon = True
                timer.start()

    def _end_unless_failing(self, code: int) -> None:
        """Ends this process with the code of another, unless it has failed itself meanwhile."""
        if not self._failing:
            self._end_process("", code)

    def _failure_text(self, line: Line) -> str:
        """Formats a failure line for people, with the process that failed before its text."""
        process, text = line["failed"], line["text"]
        if process == EVERY:
            return text
        return f"process {process} of {self._processes} failed, so {self._process} ends:\n{text}"

    # Acting

    def require_same(
        self, what: str, facts: Mapping[str, object], patience: float | None = None
    ) -> bool:
        """Waits until every process has called this; ends all of them if the facts differ.

        Returns False if some have not within `patience` seconds.
        """
        self._agreed.clear()
        self._send({"same": what, "facts": _facts_as_text(facts)})
        return self._agreed.wait(patience)

    def fail(self, error: BaseException, *, stacks: bool = False) -> None:
        """Prints an error, makes it known to every process, and ends this one.

        With `stacks` every process prints the stacks of its threads before.
        """
        if isinstance(error, jax.errors.JaxRuntimeError) and self._news.wait(CAUSE):
            time.sleep(60)  # caused by the process that failed: the timer ends this one
        self._failing = True
        if stacks:
            print_stacks()
        # the code and the text that the command line has for the error
        if isinstance(error, SystemExit):
            # The system takes the last 8 bits, of which none may be set.
            code = (isinstance(error.code, int) and error.code % 256) or FAILED
            text = f"error: exited with {error.code}"
        elif isinstance(error, KeyboardInterrupt):
            code, text = INTERRUPTED, "error: interrupted"
        else:
            code, text = exit_code(error), error_block(error)
        # printed here first: the connection may be broken
        text = text[: LONGEST_LINE // 16]  # JSON may take 6 bytes for a character
        place = f"error in process {self._process} of {self._processes}:"
        self._print_last(place + text.removeprefix("error:"), error)
        self._send(failure_line(text, code, process=self._process, stacks=stacks))
        self._delivered.wait(DELIVERY)
        self._end_process("", code)

    def leave(self) -> None:
        """Tells the others that this process is done; process 0 waits until all are."""
        self._left = True
        self._send({"left": self._process})
        if self._hub is not None:
            self._hub.wait_until_alone(DELIVERY)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def _send(self, line: Line) -> None:
        # If the connection is broken, the thread that reads has noticed.
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(encode_line(line))

    # Ending

    def _end_process(self, text: str, code: int) -> None:
        """Prints text and ends the process; a collective could not be interrupted otherwise.

        A checkpoint that is being saved is lost, as if the process was killed; older ones stay.
        """
        self._print_last(text)
        if self._hub is not None:
            self._hub.wait_until_alone(DELIVERY)
        os._exit(code)

    def _print_line(self, text: str) -> None:
        if text:
            print(f"process {self._process}: {text}", file=sys.stderr, flush=True)

    def _print_last(self, text: str, error: BaseException | None = None) -> None:
        """Prints text on stderr after all output, but waits for no reader that has stopped."""

        # in a thread: a full pipe blocks its writer forever
        def write() -> None:
            if error is not None:
                log.error("in process %d:", self._process, exc_info=error)
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            with contextlib.suppress(OSError, ValueError):
                print(text, end="\n" if text else "", file=sys.stderr, flush=True)

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(GRACE)


def print_stacks() -> None:
    """Prints where every thread of this process is."""
    with contextlib.suppress(Exception):  # as where stderr is no file
        faulthandler.dump_traceback()


def _facts_as_text(facts: Mapping[str, object]) -> dict[str, str]:
    """Converts facts to texts of bounded length that differ where the facts do."""
    texts = {}
    for key, value in facts.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
        if len(text) > LONGEST_FACT:
            text = f"{text[:LONGEST_FACT]}... {hashlib.sha256(text.encode()).hexdigest()}"
        texts[key] = text
    return texts
