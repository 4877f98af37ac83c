"""Process 0's side of the watch: compares facts, passes errors on, and notices lost processes.

Process 0 listens at the address of the run, and each process, 0 included, keeps a connection to it.
The kernel closes the connection of a process that dies, however it dies, and answers the keep-alive
probes of one that compiles, computes or holds the interpreter's lock: a silent process is not lost.

A connection is unknown until it has proved to know the secret of the run (see `admission`). Unknown
ones are few, small and short-lived. docs/design/processes.md explains the bounds.
"""

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations

from fsdp_jax.errors import FAILED, LOST, UNUSABLE, first_lines, message
from fsdp_jax.launch.admission import (
    HELLO_SECONDS,
    HUB,
    PROCESS,
    PROTOCOL,
    is_proof,
    make_nonce,
    make_proof,
    other_release_line,
    other_secret_line,
)
from fsdp_jax.launch.listening import Listening, enable_keep_alive
from fsdp_jax.launch.messages import (
    LONGEST_LINE,
    Line,
    encode_line,
    failure_line,
    lost_line,
    plain_text,
)

JOIN = "the configuration"  # the subject of the first comparison, when the processes join
SAY_SECONDS = 5  # between lines that name the processes that are waited for

LONGEST_HELLO = 1 << 14  # bytes of an unknown connection's line: an older release's hello fits
# Unknown connections at a time, while processes join and afterwards. One more takes the place of
# the oldest once this is SETTLED seconds old: a process needs milliseconds to be admitted, and
# strangers cannot come faster than they are dropped.
MOST_UNKNOWN, MOST_UNKNOWN_LATER, SETTLED = 256, 8, 0.25
LONGEST_HOST = 253  # characters of a host's name, as in the DNS
MOST_UNSENT = LONGEST_LINE  # bytes that wait for a process which does not read


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


def _different_places(places: dict[int, str]) -> str:
    """Formats an error block for processes that wait for one another at different `places`."""
    lines = [f"process {process} at {what}" for process, what in places.items()]
    return message(
        "error: the processes wait for one another at different places",
        where=f"{len(set(places.values()))} places",
        got=first_lines(lines, 10),
        fix="give every process the same command, files, packages and environment",
    )


Calls = Mapping[str, int]  # of each program, by one process


def _is_ahead(one: Calls, other: Calls) -> bool:
    """Tells whether a process has called some program more often than another process."""
    return any(count > other.get(program, 0) for program, count in one.items())


def _unequal_batches(calls: Mapping[int, Calls], places: Mapping[int, str]) -> str:
    """Formats an error block if some processes have run out of batches before others; "" if none.

    `places`: where a process waits for the others. All make the same calls in the same order, so
    that a process which has made fewer is late. It has run out if it waits for the others, or is
    ahead of them in another program, such as the eval step.
    """
    # Most processes have made the same calls.
    same = {(*sorted(of.items()), places.get(process)): process for process, of in calls.items()}
    for one, other in permutations(same.values(), 2):
        if not _is_ahead(calls[one], calls[other]):
            continue
        if other in places or _is_ahead(calls[other], calls[one]):
            return message(
                "error: the processes have unequal numbers of batches",
                where="the steps",
                expected="as many in every process, for the same steps in the same order",
                got=first_lines(_calls_texts(calls, places), 10),
                fix="end the loop in all processes at once, `if in_any_process(batch is None): "
                "break` (fsdp_jax.launch), or give those that have fewer batches of rows that the "
                "loss leaves out",
            )
    return ""


def _calls_texts(calls: Mapping[int, Calls], places: Mapping[int, str]) -> list[str]:
    """Lists the calls that the processes have made, where these differ, and where they wait."""
    alike: dict[str, list[int]] = {}
    programs = dict.fromkeys(program for of in calls.values() for program in of)
    counts = {program: [of.get(program, 0) for of in calls.values()] for program in programs}
    for process, of in sorted(calls.items()):
        made = [f"{of.get(each, 0)} for {each}" for each in programs if len({*counts[each]}) > 1]
        text = " and ".join(made)
        if process in places:
            text += f", waits at {places[process]}"
        alike.setdefault(text, []).append(process)
    return [f"{_numbers_text(processes)}: {text}" for text, processes in alike.items()]


def _numbers_text(processes: Iterable[int]) -> str:
    """Formats `process 1` or `processes 1, 3`."""
    numbers = [str(process) for process in processes]
    shown = numbers[:20]
    if len(numbers) > 20:
        shown.append("...")
    return f"process{'es' * (len(numbers) > 1)} {', '.join(shown)}"


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Reads a line; empty where the connection has closed or breaks."""
    with contextlib.suppress(OSError):
        return await reader.readline()
    return b""


@dataclass
class Peer:
    """A connected process, as process 0 knows it."""

    writer: asyncio.StreamWriter
    where: str  # host and pid
    token: str  # the same for all connections of a process

    def send(self, line: Line) -> None:
        """Sends a line; closes the connection of a process that does not read."""
        self.writer.write(encode_line(line))
        if self.writer.transport.get_write_buffer_size() > MOST_UNSENT:
            self.writer.transport.abort()


class Hub:
    """The server in process 0 that all processes connect to, in a thread of its own."""

    def __init__(self, listening: Listening, processes: int, patience: float, secret: bytes):
        self._listening = listening
        self._processes = processes
        self._patience = patience
        self._secret = secret
        # jax's own service takes the next port, unless it is taken
        self._coordinator_port = listening.sockets[0].getsockname()[1] + 1
        self._accepting: list[asyncio.Task[None]] = []
        self._unknown: dict[asyncio.Task[None], float] = {}  # connection -> when it came
        self._turned_away = ""  # why the last connection was not admitted
        self._peers: dict[int, Peer] = {}
        self._left: set[int] = set()
        self._failed: set[int] = set()
        # Of the comparisons under way: process -> (subject, facts).
        self._claims: dict[int, tuple[str, Line]] = {}
        self._calls: dict[int, dict[str, int]] = {}  # of programs, as far as it is known
        self._told_calls: dict[int, dict[str, int]] = {}  # of the last time that some waited
        # Names of the processes' hosts, and checksums of the names of their GPUs.
        self._places: dict[int, tuple[str, int]] = {}
        self._following: tuple[str, float] | None = None  # of process 0's claim
        self._next: tuple[str, float] | None = None  # what all must agree on next, and until when
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
        self._loop.call_soon_threadsafe(self._close)

    def descriptors(self) -> list[int]:
        """Lists the file descriptors of all sockets but those of unknown connections."""
        sockets = [peer.writer.get_extra_info("socket") for peer in [*self._peers.values()]]
        return [each.fileno() for each in (*self._listening.sockets, *sockets)]

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

    def _close(self) -> None:
        """Stops to listen, and drops the connections that are not admitted."""
        for task in (*self._accepting, *self._unknown):
            task.cancel()
        for each in self._listening.sockets:
            each.close()

    async def _run_server(self) -> None:
        """Serves connections to the end, and names missing processes every few seconds."""
        self._accepting = [
            asyncio.create_task(self._accept_connections(each)) for each in self._listening.sockets
        ]
        started = time.monotonic()
        seconds = 0.0
        for tick in range(1, sys.maxsize):
            await asyncio.sleep(min(SAY_SECONDS, max(self._patience - seconds, 1.0)))
            seconds = time.monotonic() - started
            if not self._started and not self._ending:
                self._report_missing(seconds)
            elif self._next and not self._ending and time.monotonic() > self._next[1]:
                self._report_late(self._next[0])
            elif not self._ending:
                self._refuse_unequal_batches()
                self._send_to_all({"calls": True})
                if tick % 12 == 0:
                    self._report_waiting()

    def _report_missing(self, seconds: float) -> None:
        """Names processes that have not joined after `seconds`; ends the run at the time limit."""
        missing = self._missing_processes(self._claims)
        # those that have joined print it too: their logs may be the only ones that are looked at
        if seconds < self._patience:
            limit = f"{seconds:.0f} of at most {self._patience:.0f} s (cluster.timeout)"
            text = f"waiting for {missing} (of 0 to {self._processes - 1}) to join: {limit}"
            if self._turned_away:
                text += f"; turned away: {self._turned_away}"
            self._send_to_all({"say": text})
            return
        got = [f"process {k} ({peer.where})" for k, peer in self._peers.items()]
        if self._turned_away:
            got.append(f"turned away: {self._turned_away}")
        text = message(
            f"error: {missing} did not join",
            where="cluster",
            expected=f"{self._processes} processes within {self._patience:.0f} s",
            got=", ".join(got),
            fix="look at the log of those that are missing: did they start, with this address?",
        )
        self._fail_all(failure_line(text, LOST))

    def _report_waiting(self) -> None:
        """Names the processes that others wait for, after all have joined."""
        for what in {what for what, _ in self._claims.values()}:
            known = [k for k, (subject, _) in self._claims.items() if subject == what]
            missing = self._missing_processes(known)
            self._send_to_all({"say": f"waiting for {missing} to agree on {what}"})
        # Batches that are late: read slowly, or there are none, and the process does other work.
        texts = _calls_texts(self._calls, {})
        if len(texts) > 1 and self._calls == self._told_calls:
            text = f"no step for {12 * SAY_SECONDS} s; batches of {'; '.join(texts[:10])}"
            self._send_to_all({"say": text})
        self._told_calls = dict(self._calls)

    def _refuse_unequal_batches(self) -> bool:
        """Ends the run if some processes have run out of batches; returns whether it does."""
        places = {process: what for process, (what, _) in self._claims.items()}
        text = _unequal_batches(self._calls, places)
        if text:
            self._refuse_all(text)
        return bool(text)

    def _report_late(self, what: str) -> None:
        """Ends the run, and names the processes that have not come to `what` in time."""
        late = [k for k in range(self._processes) if k not in self._claims]
        missing = self._missing_processes(self._claims)
        got = [f"process {k} ({peer.where})" for k, peer in self._peers.items() if k in late]
        fix = "look at the log and the devices of those that did not answer"
        if len(late) == self._processes:
            got = ["all of them wait"]
            fix = "do the hosts reach each other at all ports? Is a host's own name a loopback "
            fix += "address in /etc/hosts? For NCCL, set NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME"
        text = message(
            f"error: {missing} did not answer in time",
            where=what,
            expected=f"{self._processes} processes within the time limit (cluster.timeout)",
            got=first_lines(got, 10),
            fix=fix,
        )
        self._next = None
        self._fail_all(failure_line(text, LOST))

    def _missing_processes(self, known: Container[int]) -> str:
        """Formats `process 1` or `processes 1, 3`: those that are not in `known`."""
        return _numbers_text(k for k in range(self._processes) if k not in known)

    # Connections

    async def _accept_connections(self, listener: socket.socket) -> None:
        """Accepts connections, as many as there is room for."""
        listener.setblocking(False)
        while True:
            try:
                connection, address = await self._loop.sock_accept(listener)
            except OSError:  # it broke already, or this process has no descriptors left
                await asyncio.sleep(SETTLED)
                continue
            with contextlib.ExitStack() as stack:
                stack.enter_context(connection)
                await self._make_room()
                stack.pop_all()
            task = asyncio.create_task(self._serve_connection(connection, str(address[0])))
            self._unknown[task] = self._loop.time()
            await asyncio.sleep(0)  # others have their turn, however many connections come

    async def _make_room(self) -> None:
        """Waits for room for one more unknown connection; drops the oldest if it is `SETTLED`."""
        while len(self._unknown) >= (MOST_UNKNOWN_LATER if self._started else MOST_UNKNOWN):
            oldest, since = next(iter(self._unknown.items()))
            seconds = since + SETTLED - self._loop.time()
            if seconds > 0:
                await asyncio.wait([oldest], timeout=seconds)
            else:
                del self._unknown[oldest]
                oldest.cancel()

    async def _serve_connection(self, connection: socket.socket, address: str) -> None:
        """Serves one connection until it closes."""
        own = asyncio.current_task()
        assert own is not None
        writer: asyncio.StreamWriter | None = None
        process = -1
        try:
            # An unknown connection has so many seconds, however slowly it sends.
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await self._authenticate(connection, address)
                reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
                process = self._admit(hello, writer)
                if process < 0:
                    writer.close()
                    await writer.wait_closed()
            self._unknown.pop(own, None)
            if process >= 0:
                await self._read_lines(process, reader)
        except Exception:
            pass  # a stranger, or a connection that broke
        finally:
            self._unknown.pop(own, None)
            # unless the process has connected again meanwhile
            peer = self._peers.get(process)
            if peer is not None and peer.writer is writer:
                self._handle_disconnect(process)
            if writer is None:
                connection.close()
            elif process < 0:
                writer.transport.abort()
            else:
                writer.close()

    async def _read_lines(self, process: int, reader: asyncio.StreamReader) -> None:
        """Acts on the lines of a process that is admitted, until its connection closes or breaks.

        Anything else that goes wrong ends the run with its own message: the process is not lost.
        """
        peer = self._peers[process]
        try:
            # what a process sent before it connected again no longer counts
            while (line := await _read_line(reader)) and self._peers.get(process) is peer:
                self._handle_line(process, json.loads(line))
        except Exception as error:
            text = message(
                f"error: process 0 cannot act on what process {process} sends",
                where=peer.where,
                got=f"{type(error).__name__}: {plain_text(error)[:300]}",
                fix="run the same command again to resume from the last checkpoint",
            )
            self._fail_all(failure_line(text, LOST))

    async def _authenticate(self, connection: socket.socket, address: str) -> Line:
        """Makes a connection prove that it knows the secret; returns its hello.

        Raises any error otherwise, once it has been told why.
        """
        # As raw bytes: a stream would store a line of any length that a stranger sends.
        connection.setblocking(False)
        enable_keep_alive(connection)
        hello = await self._receive_small(connection)
        process, where = int(hello["process"]), plain_text(hello["where"])[:300]
        if hello.get("protocol") != PROTOCOL:
            await self._turn_away(connection, address, hello, other_release_line(process, where))
        nonce = make_nonce()
        await self._send_small(connection, {"protocol": PROTOCOL, "nonce": nonce})
        answer = await self._receive_small(connection)
        if not is_proof(answer["proof"], make_proof(self._secret, PROCESS, hello, nonce)):
            await self._turn_away(connection, address, hello, other_secret_line(process, where))
        proof = make_proof(self._secret, HUB, hello, nonce)
        await self._send_small(connection, {"proof": proof})
        return {**hello, "process": process, "where": where, "token": str(hello["token"])}

    async def _turn_away(
        self, connection: socket.socket, address: str, hello: Line, line: Line
    ) -> None:
        """Tells a connection why it is not admitted, notes it for the log, and raises."""
        what = str(line["text"]).partition("\n")[0].removeprefix("error: ")
        self._turned_away = f"{address}, since {what}"
        await self._send_small(connection, line)
        # Without a secret its number is believed, and the run cannot begin without it.
        if not self._secret and not self._started and not self._ending:
            self._refuse_all(line["text"])
            self._refused.add(str(hello["token"]))
        raise ConnectionError(what)

    async def _send_small(self, connection: socket.socket, line: Line) -> None:
        await self._loop.sock_sendall(connection, encode_line(line))

    async def _receive_small(self, connection: socket.socket) -> Line:
        """Receives one line from an unknown connection. Raises any error for anything else."""
        data = b""
        while not data.endswith(b"\n"):
            more = await self._loop.sock_recv(connection, LONGEST_HELLO - len(data))
            if not more:
                raise ConnectionError("closed, or a line that is too long")
            data += more
        line = json.loads(data)
        if not isinstance(line, dict):
            raise ValueError("not a line")
        return line

    def _admit(self, hello: Line, writer: asyncio.StreamWriter) -> int:
        """Admits a process by its `hello`; returns its number, or -1 if it may not join.

        It is told why it may not, unless it came by chance as the run ends.
        """
        process, where, token = hello["process"], hello["where"], hello["token"]
        # While processes join: a new one, or one that connects again.
        if not self._started and not self._ending:
            other = self._peers.get(process)
            if not 0 <= process < self._processes:
                what = "error: the processes disagree about the configuration"
                got = f"{self._processes} in process 0, and a process {process} ({where})"
                fix = "give every process the same number of processes"
                self._refuse_all(message(what, where="cluster.processes", got=got, fix=fix))
            elif other is None or other.token == token:
                if other is not None:
                    other.writer.transport.abort()
                    self._claims.pop(process, None)  # it sends its facts again
                self._peers[process] = Peer(writer, where, token)
                return int(process)
            else:
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

    # What processes say

    def _handle_line(self, process: int, line: Line) -> None:
        """Acts on a line of a process: facts to compare, its calls, its failure, or its leave."""
        if "calls" in line:
            calls = {plain_text(name): int(count) for name, count in line["calls"].items()}
            self._calls[process] = calls
        if "same" in line:
            if "host" in line:
                host = plain_text(line["host"])[:LONGEST_HOST]
                self._places[process] = host, int(line.get("gpus", 0))
            following = None
            if "next" in line:
                following = plain_text(line["next"]), float(line["within"])
            self._compare_facts(process, plain_text(line["same"]), dict(line["facts"]), following)
        elif "failed" in line and process not in self._failed:
            self._failed.add(process)
            # Made anew: what all processes act on is of the right types, and ends none with 0.
            text, code = plain_text(line["text"]), int(line["code"]) % 256 or FAILED
            stacks = line["stacks"] is True
            self._fail_all(failure_line(text, code, process=process, stacks=stacks))
        elif "left" in line:
            self._left.add(process)
            self._check_alone()
        elif "failed" not in line and "calls" not in line:
            raise ValueError("not a line of a process")

    def _compare_facts(
        self, process: int, what: str, facts: Line, following: tuple[str, float] | None
    ) -> None:
        """Compares a process's facts about `what` with process 0's; tells all when all agree.

        `following`, of process 0, is what all must agree on next, and the seconds until then.
        """
        claims = self._claims
        if process == 0:
            self._following = following
        claims[process] = what, facts
        # facts that came before process 0's are compared when those come
        subject, expected = claims.get(0, ("", {}))
        for other in [process] if process else list(claims):
            if claims[other][0] != subject:
                continue
            if text := _disagreement(other, what, claims[other][1], expected):
                self._refuse_all(text)
                return
            claims[other] = claims[0]  # equal, and stored once
        if len(claims) < self._processes:
            return
        # All wait: for the same, or each for another.
        if self._refuse_unequal_batches():
            return
        if len({subject for subject, _ in claims.values()}) > 1:
            self._refuse_all(_different_places({k: claims[k][0] for k in sorted(claims)}))
            return
        claims.clear()
        self._next = None
        if self._following is not None:
            self._next = self._following[0], time.monotonic() + self._following[1]
        agreed: Line = {"same": what}
        if not self._started:
            self._started = True
            # chosen only now, so that no other program takes it while processes join
            agreed["port"] = self._listening.free_port(self._coordinator_port)
            places = [self._places.get(k, ("", 0)) for k in range(self._processes)]
            agreed["hosts"] = [host for host, _ in places]
            agreed["gpus"] = [gpus for _, gpus in places]
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
            self._claims.pop(process, None)
        elif process not in self._left and not self._ending:
            self._fail_all(lost_line(process, peer.where))
        self._check_alone()

    def _fail_all(self, line: Line) -> None:
        """Ends all processes with a failure line."""
        self._ending = True
        self._send_to_all(line)

    def _send_to_all(self, line: Line) -> None:
        for peer in self._peers.values():
            peer.send(line)
