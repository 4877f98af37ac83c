"""Keeps the processes of a run together: they join, agree, and end when one of them fails.

Process 0 listens at the address of the run, and each process, 0 included, keeps a connection to it.
The kernel closes the connection of a process that dies, however it dies, and answers the keep-alive
probes of one that compiles, computes or holds the interpreter's lock: who is silent is not dead.

Both directions carry lines of JSON: `same` (facts, and that they agree), `failed`, `left`, `say`.
"""

import asyncio
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
from dataclasses import dataclass
from typing import Any, BinaryIO

import jax

from fsdp_jax.errors import (
    FAILED,
    INTERRUPTED,
    LOST,
    UNUSABLE,
    ConfigError,
    ProcessLostError,
    error_block,
    exit_code,
    first_lines,
    message,
)

log = logging.getLogger("fsdp_jax.launch")

JOIN = "the configuration"  # what is compared first, when the processes join
LONGEST_LINE = 1 << 20  # bytes
LONGEST_FACT = 1000  # characters; of a longer one the rest is compared by its digest
EVERY = -1  # in place of the number of a process that failed
SAY_SECONDS = 5  # between lines that say who is waited for
# Seconds that a process waits: for the errors of others, before it ends; for its own error to reach
# process 0; for the cause of an error that a lost process may have caused; for processes that join
# late, when the run is refused.
GRACE, DELIVERY, CAUSE, LATE = 1.0, 3.0, 3.0, 10.0
# A machine that is gone is noticed after 10 + 6 x 5 seconds; a broken network may last as long.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 40_000}
RESUME = "run the same command again to resume from the last checkpoint"

Line = dict[str, Any]


def _encode(line: Line) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen(port: int) -> socket.socket:
    """Returns a socket that listens on every address. Raises OSError if the port is in use."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _free_port(preferred: int) -> int:
    for port in (preferred, 0):
        with contextlib.suppress(OSError, OverflowError), _listen(port) as probe:
            return int(probe.getsockname()[1])
    raise OSError("no port is free")


def _numbers(processes: list[int]) -> str:
    """Returns `process 1` or `processes 1, 3`."""
    shown = ", ".join(map(str, processes[:20])) + (", ..." if len(processes) > 20 else "")
    return f"process{'es' * (len(processes) > 1)} {shown}"


def _disagreement(process: int, what: str, facts: Line, expected: Line) -> str:
    """Returns the keys whose values differ between process 0 and another; empty if none does."""
    lines = [
        f"{key}: {expected.get(key, 'missing')} in process 0, "
        f"{facts.get(key, 'missing')} in process {process}"
        for key in {**expected, **facts}
        if facts.get(key) != expected.get(key)
    ]
    if not lines:
        return ""
    where = lines[0].partition(":")[0] if len(lines) == 1 else f"{len(lines)} keys"
    return message(
        f"error: the processes disagree about {what}",
        where=where,
        got=first_lines(lines, 10),
        fix="give every process the same command, files, packages and environment",
    )


@dataclass
class Peer:
    """A process as process 0 knows it."""

    writer: asyncio.StreamWriter
    where: str  # host and pid
    token: str  # the same for all connections of a process


class Hub:
    """Process 0's side: compares facts and passes errors on, in a thread of its own.

    Raises OSError if the port is in use.
    """

    def __init__(self, port: int, processes: int, patience: float):
        self._processes = processes
        self._patience = patience
        self._listener = _listen(port)
        self._server: asyncio.Server
        self._coordinator_port = port + 1  # of jax's own service, unless it is taken
        self._peers: dict[int, Peer] = {}
        self._left: set[int] = set()
        self._facts: dict[str, dict[int, Line]] = {}  # of the comparisons under way
        self._started = False  # all have joined
        self._ending = False
        self._refusal: Line | None = None  # why the processes cannot join
        self._refused: set[str] = set()  # tokens of those that know
        self._alone = threading.Event()  # the others are gone
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="processes-hub", daemon=True).start()

    def wait_until_alone(self, seconds: float) -> None:
        """Waits until the other processes are gone; refused ones that come late too."""
        self._loop.call_soon_threadsafe(self._end)
        self._alone.wait(seconds)
        self._loop.call_soon_threadsafe(self._server.close)

    def handles(self) -> list[int]:
        """Returns the numbers of the open files of all connections."""
        sockets = [peer.writer.get_extra_info("socket") for peer in self._peers.values()]
        return [each.fileno() for each in (self._listener, *sockets)]

    def _end(self) -> None:
        self._ending = True
        self._check_alone()

    def _check_alone(self) -> None:
        others = self._peers.keys() - {0} - self._left
        late = self._refusal is not None and len(self._refused) < self._processes
        if self._ending and not others and not late:
            self._tell({"left": 0})
            self._alone.set()

    def _run(self) -> None:
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        # asyncio's own `limit` bounds what a stranger may make this process store
        self._server = await asyncio.start_server(
            self._serve, sock=self._listener, limit=LONGEST_LINE
        )
        started = time.monotonic()
        seconds = 0.0
        for tick in range(1, sys.maxsize):
            await asyncio.sleep(min(SAY_SECONDS, max(self._patience - seconds, 1.0)))
            seconds = time.monotonic() - started
            if not self._started and not self._ending:
                self._await_joins(seconds)
            elif tick % 12 == 0:
                for what, facts in self._facts.items():
                    missing = [k for k in range(self._processes) if k not in facts]
                    self._tell({"say": f"waiting for {_numbers(missing)} to agree on {what}"})

    def _await_joins(self, seconds: float) -> None:
        missing = [k for k in range(self._processes) if k not in self._peers]
        where = f"{_numbers(missing)} of {self._processes}"
        if seconds < self._patience:
            limit = f"{seconds:.0f} of at most {self._patience:.0f} s"
            self._tell({"say": f"waiting for {where} to join: {limit} (cluster.timeout)"})
            return
        text = message(
            f"error: {_numbers(missing)} did not join",
            where="cluster",
            expected=f"{self._processes} processes within {self._patience:.0f} s",
            got=", ".join(f"process {k} ({peer.where})" for k, peer in self._peers.items()),
            fix="look at the log of those that are missing: did they start, with this address?",
        )
        self._fail(EVERY, text, LOST)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until it closes."""
        _keep_alive(writer.get_extra_info("socket"))
        process = -1
        try:
            async with asyncio.timeout(10):
                hello = json.loads(await reader.readline())
            process = self._admit(hello, writer)
            self._compare(process, JOIN, hello["facts"])
            while process >= 0 and (line := await reader.readline()):
                self._receive(process, json.loads(line))
        except Exception:
            pass  # a stranger, or a connection that broke
        peer = self._peers.get(process)
        if peer is not None and peer.writer is writer:
            self._lose(process)
        writer.close()

    def _admit(self, hello: Line, writer: asyncio.StreamWriter) -> int:
        """Returns the number of a process that joins, or -1 if it may not."""
        process, where, token = int(hello["process"]), str(hello["where"]), str(hello["token"])
        other = self._peers.get(process)
        if self._started and not self._ending:
            what = "error: a run is under way at this address"
            fix = "wait for its end, or choose another address"
            text = message(what, where="cluster.coordinator", got=where, fix=fix)
            writer.write(_encode({"failed": EVERY, "text": text, "code": UNUSABLE}))
        elif self._refusal is not None:
            self._refused.add(token)
            writer.write(_encode(self._refusal))
            self._check_alone()
        elif not self._ending and (other is None or other.token == token):
            self._peers[process] = Peer(writer, where, token)
            writer.write(_encode({"say": ""}))
            return process
        elif not self._ending and other is not None:
            # Which of the two is right is unknown.
            what = f"error: two processes have the number {process}"
            fix = "give each process its own cluster.process, from 0"
            got = f"{other.where} and {where}"
            self._refuse(message(what, where="cluster.process", got=got, fix=fix))
            return self._admit(hello, writer)  # to be told as well
        return -1  # as the run ends, it tries again, until another run listens here

    def _refuse(self, text: str) -> None:
        """Ends all processes because of what they were given."""
        self._fail(EVERY, text, UNUSABLE)
        if not self._started:
            self._refusal = {"failed": EVERY, "text": text, "code": UNUSABLE}
            self._refused = {peer.token for peer in self._peers.values()}

    def _receive(self, process: int, line: Line) -> None:
        if "same" in line:
            self._compare(process, line["same"], line["facts"])
        elif "failed" in line:
            self._fail(process, line["text"], line["code"], stacks=line["stacks"])
        elif "left" in line:
            self._left.add(process)
            self._check_alone()

    def _compare(self, process: int, what: str, facts: Line) -> None:
        """Compares facts as they come with those of process 0; tells all once all agree."""
        if process < 0:
            return
        known = self._facts.setdefault(what, {})
        known[process] = facts
        comparable = list(known) if process == 0 else [process]
        for other in comparable if 0 in known else []:
            if text := _disagreement(other, what, known[other], known[0]):
                self._refuse(text)
                return
        if len(known) == self._processes:
            del self._facts[what]
            agreed: Line = {"same": what}
            if not self._started:
                self._started = True
                agreed["port"] = _free_port(self._coordinator_port)
            self._tell(agreed)

    def _lose(self, process: int) -> None:
        """Takes note that a connection has closed."""
        peer = self._peers.pop(process)
        if not self._started:
            self._facts.get(JOIN, {}).pop(process, None)  # it may start again
        elif process not in self._left and not self._ending:
            self._fail(process, lost(process, peer.where), LOST)
        self._check_alone()

    def _fail(self, process: int, text: str, code: int, *, stacks: bool = False) -> None:
        self._ending = True
        self._tell({"failed": process, "text": text, "code": code, "stacks": stacks})

    def _tell(self, line: Line) -> None:
        for peer in self._peers.values():
            peer.writer.write(_encode(line))


def lost(process: int, where: str) -> str:
    """Returns the error block of a process that is gone without a word."""
    return message(
        f"error: process {process} is gone",
        where=where,
        got="its connection closed: it was killed (out of memory?), or its machine was lost",
        fix=f"look at its own log, and at its machine's; then {RESUME}",
    )


class Watch:
    """Joins this process to process 0: one connection to process 0, read by a thread of its own."""

    def __init__(self, host: str, port: int, process: int, processes: int, patience: float):
        self._address = (host, port)
        self._process = process
        self._processes = processes
        self._patience = patience
        self._hub: Hub | None = None
        self._connection: socket.socket
        self._sending = threading.Lock()
        self._agreed = threading.Event()
        self._news = threading.Event()  # another process failed
        self._delivered = threading.Event()  # this process's error is known to process 0
        self._failing = False
        self._left = False

    # Joining

    def join(self, facts: Mapping[str, object]) -> str:
        """Waits until all processes have joined and agree; returns the address of jax's service.

        Raises:
            ConfigError: they disagree, two have one number, or the port is in use.
            ProcessLostError: some did not come in time.

        """
        taken: OSError | None = None
        if self._process == 0:
            try:
                self._hub = Hub(self._address[1], self._processes, self._patience)
            except OSError as error:  # perhaps another process 0 listens there, and says so
                taken = error
        try:
            return self._connect(_as_text(facts), SAY_SECONDS if taken else self._patience)
        except (ConfigError, ProcessLostError) as error:
            if self._hub is not None:
                self._hub.wait_until_alone(LATE)
            if taken is None or isinstance(error, ConfigError):
                raise
            what, fix = "process 0 cannot listen", "choose a port that is free on its host"
            got = f"{self._where()}: {taken}"
            where = "cluster.coordinator"
            raise ConfigError(message(what, where=where, got=got, fix=fix)) from taken

    def _connect(self, facts: dict[str, str], patience: float) -> str:
        """Connects and waits for the others; tries again until `patience` seconds have passed."""
        began = said = time.monotonic()
        here = f"host {socket.gethostname()}, pid {os.getpid()}"
        name = {"process": self._process, "where": here, "token": secrets.token_hex(8)}
        hello = _encode({**name, "facts": facts})
        problem = ""
        while (now := time.monotonic()) < began + patience:
            if now - said >= SAY_SECONDS:
                said = now
                limit = f"{now - began:.0f} of at most {patience:.0f} s (cluster.timeout)"
                self._print(f"waiting for process 0 at {self._where()}: {problem}: {limit}")
            try:
                with contextlib.ExitStack() as stack:
                    connection = socket.create_connection(self._address, timeout=SAY_SECONDS)
                    stack.enter_context(connection)
                    lines = stack.enter_context(connection.makefile("rb"))
                    _keep_alive(connection)
                    connection.sendall(hello)
                    connection.settimeout(3 * SAY_SECONDS)  # a stranger may never answer
                    if port := self._await_others(connection, lines):
                        stack.pop_all()
                        self._start(connection, lines)
                        return f"{_bracketed(self._address[0])}:{port}"
                problem = "it closes the connection"
            except (ConfigError, ProcessLostError):
                raise
            except (OSError, UnicodeError) as error:
                problem = str(error)
            except Exception:
                problem = "something else answers there"
            time.sleep(0.2)
        raise ProcessLostError(
            message(
                "process 0 does not answer",
                where="cluster.coordinator",
                expected=f"process 0 at {self._where()} within {patience:.0f} s",
                got=problem,
                fix="look at its log: did it start, on that host, with this port?",
            )
        )

    def _await_others(self, connection: socket.socket, lines: BinaryIO) -> int:
        """Reads until all processes agree; returns the port of jax's service, 0 at the end."""
        while data := lines.readline(LONGEST_LINE):
            line = json.loads(data)
            connection.settimeout(2 * self._patience)  # process 0 ends it before that
            if "say" in line:
                self._print(line["say"])
            elif "failed" in line:
                text = line["text"].removeprefix("error: ")
                raise ConfigError(text) if line["code"] == UNUSABLE else ProcessLostError(text)
            elif "same" in line:
                return int(line["port"])
        return 0

    def _start(self, connection: socket.socket, lines: BinaryIO) -> None:
        connection.settimeout(None)
        self._connection = connection
        reader = threading.Thread(
            target=self._read, args=[lines], name="processes-watch", daemon=True
        )
        reader.start()

    def close_copies(self) -> None:
        """Closes the connections in a copy of this process, which would outlive it."""
        for handle in (self._connection.fileno(), *(self._hub.handles() if self._hub else ())):
            if handle >= 0:
                os.close(handle)

    def _where(self) -> str:
        return f"{_bracketed(self._address[0])}:{self._address[1]}"

    # Reading

    def _read(self, lines: BinaryIO) -> None:
        """Reads what process 0 sends until the connection closes."""
        with contextlib.suppress(OSError), self._connection, lines:
            for data in lines:
                self._receive(json.loads(data))
        if not (self._left or self._failing or self._news.is_set()):
            text = lost(0, self._where())
            self._end(self._as_told(0, text), LOST)

    def _receive(self, line: Line) -> None:
        if "say" in line:
            self._print(line["say"])
        elif "same" in line:
            self._agreed.set()
        elif "left" in line:
            self._left = True
        elif line["failed"] == self._process and self._failing:
            self._delivered.set()
        elif "failed" in line:
            if line["stacks"]:
                print_stacks()
            self._print_last(self._as_told(line["failed"], line["text"]))
            if not self._news.is_set():
                self._news.set()
                # Others may fail as well, this one too: their errors are printed until then.
                timer = threading.Timer(GRACE, self._leave, [line["code"]])
                timer.daemon = True
                timer.start()

    def _leave(self, code: int) -> None:
        if not self._failing:  # else the main thread does it
            self._end("", code)

    def _as_told(self, process: int, text: str) -> str:
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
        self._send({"same": what, "facts": _as_text(facts)})
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
        code = FAILED
        if isinstance(error, SystemExit):
            # The system takes the last 8 bits, of which none may be set.
            code = (isinstance(error.code, int) and error.code % 256) or FAILED
            text = f"error: exited with {error.code}"
        elif isinstance(error, KeyboardInterrupt):
            code, text = INTERRUPTED, "error: interrupted"
        else:
            code, text = exit_code(error), error_block(error)
        text = text[: LONGEST_LINE // 16]  # JSON may take 6 bytes for a character
        place = f"error in process {self._process} of {self._processes}:"
        self._print_last(place + text.removeprefix("error:"), error)
        self._send({"failed": self._process, "text": text, "code": code, "stacks": stacks})
        self._delivered.wait(DELIVERY)
        self._end("", code)

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
            self._connection.sendall(_encode(line))

    # Ending

    def _end(self, text: str, code: int) -> None:
        """Prints text and ends the process; a collective could not be interrupted otherwise.

        What is being saved is lost, as if the process was killed; what was saved stays.
        """
        self._print_last(text)
        if self._hub is not None:
            self._hub.wait_until_alone(DELIVERY)
        os._exit(code)

    def _print(self, text: str) -> None:
        if text:
            print(f"process {self._process}: {text}", file=sys.stderr, flush=True)

    def _print_last(self, text: str, error: BaseException | None = None) -> None:
        """Prints text on stderr after all output, but waits for no reader that has stopped."""

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


def _as_text(facts: Mapping[str, object]) -> dict[str, str]:
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
        for key, value in facts.items()
    }
    return {
        key: text
        if len(text) <= LONGEST_FACT
        else f"{text[:LONGEST_FACT]}... {hashlib.sha256(text.encode()).hexdigest()}"
        for key, text in texts.items()
    }


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
