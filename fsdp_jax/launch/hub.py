"""Process 0's side of the watch: compares facts, passes errors on, and notices lost processes.

Process 0 listens at the address of the run, and each process, 0 included, keeps a connection to it.
The kernel closes the connection of a process that dies, however it dies, and answers the keep-alive
probes of one that compiles, computes or holds the interpreter's lock: a silent process is not lost.

Both directions carry lines of JSON: `same` (facts, and that they agree), `failed`, `left`, `say`.
"""

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from fsdp_jax.errors import LOST, UNUSABLE, first_lines, message

JOIN = "the configuration"  # the subject of the first comparison, when the processes join
LONGEST_LINE = 1 << 20  # bytes
EVERY = -1  # in place of the number of a process that failed
SAY_SECONDS = 5  # between lines that name the processes that are waited for
# A machine that is gone is noticed after 10 + 6 x 5 seconds; a broken network may last as long.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 40_000}

Line = dict[str, Any]


def encode_line(line: Line) -> bytes:
    """Encodes a line as it is sent: JSON that ends with a newline."""
    return json.dumps(line).encode() + b"\n"


def failure_line(text: str, code: int, *, process: int = EVERY, stacks: bool = False) -> Line:
    """Makes the line that ends every process, with an error block and an exit code.

    `process` is the one that failed; with `stacks` each process prints the stacks of its threads.
    """
    return {"failed": process, "text": text, "code": code, "stacks": stacks}


def lost_line(process: int, where: str) -> Line:
    """Makes the failure line for a process whose connection closed without a word."""
    text = message(
        f"error: process {process} is gone",
        where=where,
        got="its connection closed: it was killed (out of memory?), or its machine was lost",
        fix="look at its own log, and at its machine's; then run the same command again to resume "
        "from the last checkpoint",
    )
    return failure_line(text, LOST, process=process)


def enable_keep_alive(connection: socket.socket) -> None:
    """Makes the kernel close a connection when the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen(port: int) -> socket.socket:
    """Opens a socket that listens on every address. Raises OSError if the port is in use."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _free_port(preferred: int) -> int:
    """Finds a free port: the preferred one, or any if it is taken. Raises OSError."""
    for port in (preferred, 0):
        with contextlib.suppress(OSError, OverflowError), _listen(port) as probe:
            return int(probe.getsockname()[1])
    raise OSError("no port is free")


def _disagreement(process: int, what: str, facts: Line, expected: Line) -> str:
    """Formats an error block of the facts that differ from process 0's; "" if none does."""
    # a line for each fact that differs, also where one process lacks it
    lines = [
        f"{key}: {expected.get(key, 'missing')} in process 0, "
        f"{facts.get(key, 'missing')} in process {process}"
        for key in {**expected, **facts}
        if facts.get(key) != expected.get(key)
    ]
    if not lines:
        return ""
    where = f"{len(lines)} keys"
    if len(lines) == 1:
        where = lines[0].partition(":")[0]
    return message(
        f"error: the processes disagree about {what}",
        where=where,
        got=first_lines(lines, 10),
        fix="give every process the same command, files, packages and environment",
    )


@dataclass
class Peer:
    """A connected process, as process 0 knows it."""

    writer: asyncio.StreamWriter
    where: str  # host and pid
    token: str  # the same for all connections of a process


class Hub:
    """The server in process 0 that all processes connect to, in a thread of its own.

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
        # a thread of its own: the main one compiles and computes, often for minutes
        self._loop = asyncio.new_event_loop()
        run = self._loop.run_until_complete
        threading.Thread(
            target=run, args=[self._run_server()], name="processes-hub", daemon=True
        ).start()

    def wait_until_alone(self, seconds: float) -> None:
        """Waits until the others are gone, and those that are refused have come and know it.

        Then, or after some seconds, closes the server.
        """
        self._loop.call_soon_threadsafe(self._mark_ending)
        self._alone.wait(seconds)
        self._loop.call_soon_threadsafe(self._server.close)

    def descriptors(self) -> list[int]:
        """Lists the file descriptors of all connections."""
        sockets = [peer.writer.get_extra_info("socket") for peer in self._peers.values()]
        return [each.fileno() for each in (self._listener, *sockets)]

    def _mark_ending(self) -> None:
        """Notes that the run ends, so that a closed connection is no failure."""
        self._ending = True
        self._check_alone()

    def _check_alone(self) -> None:
        """Releases `wait_until_alone` if the run ends and no other process is waited for."""
        others = self._peers.keys() - {0} - self._left
        # processes that have yet to come, to be told that the run is refused
        late = self._refusal is not None and len(self._refused) < self._processes
        if self._ending and not others and not late:
            self._send_to_all({"left": 0})
            self._alone.set()

    async def _run_server(self) -> None:
        """Serves connections to the end, and names missing processes every few seconds."""
        # `limit` bounds the bytes that a stranger may make this process store
        self._server = await asyncio.start_server(
            self._serve_connection, sock=self._listener, limit=LONGEST_LINE
        )
        started = time.monotonic()
        seconds = 0.0
        for tick in range(1, sys.maxsize):
            await asyncio.sleep(min(SAY_SECONDS, max(self._patience - seconds, 1.0)))
            seconds = time.monotonic() - started
            if not self._started and not self._ending:
                self._report_missing(seconds)
            elif tick % 12 == 0:
                for what, facts in self._facts.items():
                    missing = self._missing_processes(facts)
                    self._send_to_all({"say": f"waiting for {missing} to agree on {what}"})

    def _report_missing(self, seconds: float) -> None:
        """Names processes that have not joined after `seconds`; ends the run at the time limit."""
        missing = self._missing_processes(self._peers)
        # those that have joined print it too: their logs may be the only ones that are looked at
        if seconds < self._patience:
            limit = f"{seconds:.0f} of at most {self._patience:.0f} s (cluster.timeout)"
            self._send_to_all(
                {"say": f"waiting for {missing} of {self._processes} to join: {limit}"}
            )
            return
        text = message(
            f"error: {missing} did not join",
            where="cluster",
            expected=f"{self._processes} processes within {self._patience:.0f} s",
            got=", ".join(f"process {k} ({peer.where})" for k, peer in self._peers.items()),
            fix="look at the log of those that are missing: did they start, with this address?",
        )
        self._fail_all(failure_line(text, LOST))

    def _missing_processes(self, known: dict[int, Any]) -> str:
        """Formats `process 1` or `processes 1, 3`: those that are no key of `known`."""
        missing = [str(k) for k in range(self._processes) if k not in known]
        shown = missing[:20]
        if len(missing) > 20:
            shown.append("...")
        return f"process{'es' * (len(missing) > 1)} {', '.join(shown)}"

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves one connection until it closes."""
        process = -1
        try:
            enable_keep_alive(writer.get_extra_info("socket"))
            async with asyncio.timeout(10):  # a stranger may connect and stay silent
                hello = json.loads(await reader.readline())
            process = self._admit(hello, writer)
            if process >= 0:
                self._compare_facts(process, JOIN, hello["facts"])
                while line := await reader.readline():
                    self._handle_line(process, json.loads(line))
        except Exception:
            pass  # a stranger, or a connection that broke
        # unless the process has connected again meanwhile
        peer = self._peers.get(process)
        if peer is not None and peer.writer is writer:
            self._handle_disconnect(process)
        writer.close()

    def _admit(self, hello: Line, writer: asyncio.StreamWriter) -> int:
        """Admits a process by its `hello`; returns its number, or -1 if it may not join.

        It is told why it may not, unless it came by chance as the run ends.
        """
        process, where, token = int(hello["process"]), str(hello["where"]), str(hello["token"])
        # While processes join: a new one, or one that connects again.
        if not self._started and not self._ending:
            other = self._peers.get(process)
            if other is None or other.token == token:
                self._peers[process] = Peer(writer, where, token)
                writer.write(encode_line({"say": ""}))
                return process
            # Which of the two is right is unknown.
            what = f"error: two processes have the number {process}"
            fix = "give each process its own cluster.process, from 0"
            got = f"{other.where} and {where}"
            self._refuse_all(message(what, where="cluster.process", got=got, fix=fix))
        # Too late, or refused: it is told why.
        if self._refusal is not None:
            self._refused.add(token)
            writer.write(encode_line(self._refusal))
            self._check_alone()
        elif not self._ending:
            what = "error: a run is under way at this address"
            fix = "wait for its end, or choose another address"
            text = message(what, where="cluster.coordinator", got=where, fix=fix)
            writer.write(encode_line(failure_line(text, UNUSABLE)))
        return -1  # as the run ends, it tries again, until another run listens here

    def _handle_line(self, process: int, line: Line) -> None:
        """Acts on a line of a process: facts to compare, its failure, or that it leaves."""
        if "same" in line:
            self._compare_facts(process, line["same"], line["facts"])
        elif "failed" in line:
            self._fail_all(line)
        elif "left" in line:
            self._left.add(process)
            self._check_alone()

    def _compare_facts(self, process: int, what: str, facts: Line) -> None:
        """Compares a process's facts about `what` with process 0's; tells all when all agree."""
        known = self._facts.setdefault(what, {})
        known[process] = facts
        # facts that came before process 0's are compared when those come
        comparable = [process]
        if process == 0:
            comparable = list(known)
        elif 0 not in known:
            comparable = []
        for other in comparable:
            if text := _disagreement(other, what, known[other], known[0]):
                self._refuse_all(text)
                return
        if len(known) == self._processes:
            del self._facts[what]
            agreed: Line = {"same": what}
            if not self._started:
                self._started = True
                # chosen only now, so that no other program takes it while processes join
                agreed["port"] = _free_port(self._coordinator_port)
            self._send_to_all(agreed)

    def _refuse_all(self, text: str) -> None:
        """Ends all processes with the error block `text`, exit code 2; those that join late too."""
        refusal = failure_line(text, UNUSABLE)
        self._fail_all(refusal)
        if not self._started:
            self._refusal = refusal
            self._refused = {peer.token for peer in self._peers.values()}

    def _handle_disconnect(self, process: int) -> None:
        """Drops a process whose connection closed.

        Ends the run if all had joined and it had not left; while they join it may start again.
        """
        peer = self._peers.pop(process)
        if not self._started:
            self._facts.get(JOIN, {}).pop(process, None)
        elif process not in self._left and not self._ending:
            self._fail_all(lost_line(process, peer.where))
        self._check_alone()

    def _fail_all(self, line: Line) -> None:
        """Ends all processes with a failure line."""
        self._ending = True
        self._send_to_all(line)

    def _send_to_all(self, line: Line) -> None:
        for peer in self._peers.values():
            peer.writer.write(encode_line(line))
