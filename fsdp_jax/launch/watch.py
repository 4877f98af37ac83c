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
import traceback
import zlib
from collections.abc import Mapping, Sequence

import jax

from fsdp_jax.errors import (
    FAILED,
    INTERRUPTED,
    UNUSABLE,
    ConfigError,
    ProcessLostError,
    ReadableError,
    error_block,
    exit_code,
)
from fsdp_jax.launch.admission import (
    HELLO_SECONDS,
    HUB,
    PROCESS,
    PROTOCOL,
    is_proof,
    make_nonce,
    make_proof,
)
from fsdp_jax.launch.hub import JOIN, SAY_SECONDS, Hub
from fsdp_jax.launch.listening import enable_keep_alive, listen
from fsdp_jax.launch.messages import (
    EVERY,
    LONGEST_LINE,
    LONGEST_TEXT,
    Line,
    encode_line,
    failure_line,
    lost_line,
    plain_text,
    process_of,
)
from fsdp_jax.processes import calls, host_name

log = logging.getLogger("fsdp_jax.launch")

LONGEST_FACT = 1000  # characters; of a longer one the rest is compared by its digest
# Seconds that a process waits: for the errors of others, before it ends; for its own error to reach
# process 0; for news of a lost process that may have caused its error; for processes that join
# late, when the run is refused.
GRACE, DELIVERY, CAUSE, LATE = 1.0, 3.0, 3.0, 10.0
_last_step: int | None = None  # of training, in this process


Following = tuple[str, float]  # the subject of the next comparison, and the seconds until then


class LineReader:
    """Reads lines from a connection, each within a time that slow bytes do not prolong."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._data = bytearray()

    def read(self, deadline: float | None = None) -> Line | None:
        """Reads a line; None if the connection is closed. `deadline`: of `time.monotonic`.

        Raises TimeoutError when it has passed, other OSErrors, and ValueError or RecursionError for
        anything but a JSON object in a line.
        """
        while (end := self._data.find(b"\n")) < 0:
            if len(self._data) > LONGEST_LINE:
                raise ValueError("a line that is too long")
            if deadline is not None:
                self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
            more = self._connection.recv(1 << 16)
            if not more:
                return None
            self._data += more
        line = json.loads(self._data[:end])
        del self._data[: end + 1]
        if not isinstance(line, dict):
            raise ValueError("not a line of process 0")
        return line


class Watch:
    """Joins this process to the others, compares facts with them, and makes all end if one fails.

    It has one connection to the `Hub` of process 0, which a thread of its own reads.

    Attributes:
        only_at_address: in process 0, whether it listens at the address of the run alone, as jax's
            service then has to.
        hosts: the name of each process's host, once it has joined.
        gpus: a checksum of the names of the GPUs that each process sees, likewise.

    """

    def __init__(
        self,
        host: str,
        port: int,
        process: int,
        processes: int,
        patience: float,
        secret: bytes = b"",
    ):
        self._address = (host, port)
        self._host = host
        if ":" in host:  # IPv6
            self._host = f"[{host}]"
        self._where = f"{self._host}:{port}"
        self._process = process
        self._processes = processes
        self._patience = patience
        self.only_at_address = False
        self.hosts: list[str] = []
        self.gpus: list[int] = []
        self._secret = secret
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

    def join(
        self,
        facts: Mapping[str, object],
        following: Following | None = None,
        gpus: Sequence[str] = (),
    ) -> str:
        """Waits until all processes have joined and agree; returns the address of jax's service.

        `following`: as for `require_same`. `gpus`: names of those that this process sees.

        Raises ConfigError if they disagree, two have one number, or the address cannot be listened
        at, and ProcessLostError if some did not come in time.
        """
        taken: OSError | None = None
        patience = self._patience
        if self._process == 0:
            try:
                listening = listen(*self._address, has_secret=bool(self._secret))
                self._print_line(listening.warning)
                self.only_at_address = bool(listening.host)
                if not listening.host:  # behind a name or port that leads back here by detours
                    self._host = "127.0.0.1"
                    self._address = (self._host, self._address[1])
                self._hub = Hub(listening, self._processes, self._patience, self._secret)
            except OSError as error:  # perhaps another process 0 listens there, and says so
                taken = error
                patience = SAY_SECONDS
        try:
            claim = _claim(JOIN, facts, following)
            claim |= {"host": host_name(), "gpus": zlib.crc32(" ".join(gpus).encode())}
            return f"{self._host}:{self._connect(claim, patience)}"
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

    def _connect(self, claim: Line, patience: float) -> int:
        """Connects, sends the claim and waits for the others; returns the port of jax's service.

        Tries again until `patience` seconds have passed.
        """
        began = said = time.monotonic()
        # the token is this process's own: by it process 0 tells a second try from a second process
        here = f"host {socket.gethostname()}, pid {os.getpid()}"
        name = {"process": self._process, "where": here, "token": secrets.token_hex(8)}
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
                    enable_keep_alive(connection)
                    lines = LineReader(connection)
                    problem = self._prove(connection, lines, name)
                    if not problem:
                        connection.settimeout(self._patience)
                        connection.sendall(encode_line(claim))
                        if port := self._await_others(lines):
                            stack.pop_all()
                            self._start_reading(connection, lines)
                            return port
                        problem = "it closes the connection"
            # What went wrong is said while this process waits, and again when it gives up. An
            # answer of process 0 that ends the run is not tried again.
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

    def _prove(self, connection: socket.socket, lines: LineReader, name: Line) -> str:
        """Proves to process 0 that this process knows the secret, and has it prove the same.

        Returns what went wrong, to be tried again; empty if nothing did. Raises ConfigError or
        ProcessLostError as process 0 says, and for one of another release.
        """
        deadline = time.monotonic() + HELLO_SECONDS
        # An older release takes this for facts, which differ from its own, and ends.
        facts = {"protocol of the hub": str(PROTOCOL)}
        hello = {"protocol": PROTOCOL, **name, "nonce": make_nonce(), "facts": facts}
        connection.sendall(encode_line(hello))
        line = lines.read(deadline)
        if line is not None:
            _raise_failure(line)
            if "nonce" not in line and "say" in line:
                raise ConfigError(
                    "the processes run different releases of fsdp_jax",
                    where=f"process 0, at {self._where}",
                    expected=f"protocol {PROTOCOL} of the hub, as in this process",
                    got="an older one",
                    fix="install the same release for every process",
                )
            proof = make_proof(self._secret, PROCESS, hello, str(line["nonce"]))
            connection.sendall(encode_line({"proof": proof}))
            answer = lines.read(deadline)
            if answer is not None:
                _raise_failure(answer)
                right = make_proof(self._secret, HUB, hello, str(line["nonce"]))
                if is_proof(answer.get("proof"), right):
                    return ""
                return "what answers there does not know the secret of the run"
        return "it closes the connection"

    def _await_others(self, lines: LineReader) -> int:
        """Reads until all processes agree; returns the port of jax's service.

        Returns 0 if the connection closes before. Raises ConfigError or ProcessLostError as process
        0 says, and TimeoutError where it ends the waiting too late, whatever else it says.
        """
        deadline = time.monotonic() + self._patience + LATE
        while line := lines.read(deadline):
            _raise_failure(line)
            if "say" in line:
                self._print_line(plain_text(line["say"]))
            elif "same" in line:
                self.hosts = [plain_text(host) for host in line["hosts"]]
                self.gpus = [int(number) for number in line["gpus"]]
                return int(line["port"])
            if time.monotonic() > deadline:
                raise TimeoutError("it neither begins nor ends the run")
        return 0

    def _start_reading(self, connection: socket.socket, lines: LineReader) -> None:
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

    def _read_lines(self, lines: LineReader) -> None:
        """Acts on the lines of process 0; ends this process if the connection closes too early."""
        # A line that cannot be read ends it too: what follows could not be trusted.
        with contextlib.suppress(Exception), self._connection:
            while line := lines.read():
                self._handle_line(line)
        # After the last agreement each ends when it likes.
        if not (self._left or self._failing or self._news.is_set()):
            line = lost_line(0, self._where)
            self._end_process(self._failure_text(line), line["code"])

    def _handle_line(self, line: Line) -> None:
        """Acts on a line of process 0; ends this process `GRACE` seconds after another fails."""
        if "say" in line:
            self._print_line(plain_text(line["say"]))
        elif "same" in line:
            self._agreed.set()
        elif "calls" in line:
            self._send({"calls": calls()})
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
                timer = threading.Timer(GRACE, self._end_unless_failing, [int(line["code"])])
                timer.daemon = True
                timer.start()

    def _end_unless_failing(self, code: int) -> None:
        """Ends this process with the code of another, unless it has failed itself meanwhile."""
        if not self._failing:
            self._end_process("", code)

    def _failure_text(self, line: Line) -> str:
        """Formats a failure line for people, with the process that failed before its text."""
        process, text = line["failed"], plain_text(line["text"])
        if process == EVERY:
            return text
        failed = process_of(process, self._processes)
        return f"{failed} failed, so {self._process} ends:\n{text}"

    # Acting

    def require_same(
        self,
        what: str,
        facts: Mapping[str, object],
        patience: float | None = None,
        following: Following | None = None,
    ) -> bool:
        """Waits until every process has called this; ends all of them if the facts differ.

        Returns False if some have not within `patience` seconds. If `following` of process 0 names
        what all call this for next, and the seconds until then, all end where some come too late:
        also those that hang, since process 0 counts the time in a thread of its own.
        """
        self._agreed.clear()
        self._send(_claim(what, facts, following))
        return self._agreed.wait(patience)

    def find_gpu_sharers(self) -> list[int]:
        """Lists the processes of this host that see the same GPUs as this one, itself included."""
        places = list(zip(self.hosts, self.gpus, strict=True))
        return [k for k, place in enumerate(places) if place == places[self._process]]

    def agree_to_end(self, patience: float | None) -> bool:
        """Waits as `require_same` until every process is done; then none is lost any more."""
        self._left = self.require_same("the end of the run", {}, patience)
        return self._left

    def fail(self, error: BaseException, *, stacks: bool = False) -> None:
        """Prints an error, makes it known to every process, and ends this one.

        With `stacks` every process prints the stacks of its threads before.
        """
        if _may_be_a_consequence(error) and self._news.wait(CAUSE):
            time.sleep(60)  # caused by the process that failed: the timer ends this one
        self._failing = True
        if stacks:
            print_stacks()
        # A program of the user's, or --debug: the command silences this log.
        shows_traceback = log.isEnabledFor(logging.ERROR)
        # the code and the text that the command line has for the error
        if isinstance(error, SystemExit):
            # The system takes the last 8 bits, of which none may be set.
            code = (isinstance(error.code, int) and error.code % 256) or FAILED
            text = f"error: exited with {error.code}"
        elif isinstance(error, KeyboardInterrupt):
            code, text = INTERRUPTED, "error: interrupted"
        else:
            code, text = exit_code(error), error_block(error, of_command=not shows_traceback)
        # printed here first: the connection may be broken
        text = text[:LONGEST_TEXT]
        shown = f"error in {process_of(self._process, self._processes)}:"
        shown += text.removeprefix("error:")
        if shows_traceback:  # but for its last line, which says the same
            shown += "\n" + "".join(traceback.format_exception(error)[:-1])
        self._print_last(shown)
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

    def _print_last(self, text: str) -> None:
        """Prints text on stderr after all output, but waits for no reader that has stopped."""

        # in a thread: a full pipe blocks its writer forever
        def write() -> None:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            with contextlib.suppress(OSError, ValueError):
                print(text, end="\n" if text else "", file=sys.stderr, flush=True)

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(GRACE)


def _may_be_a_consequence(error: BaseException) -> bool:
    """Tells whether the failure of another process may have caused an error.

    So may an error of jax's, which a library such as orbax may raise as its own.
    """
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, jax.errors.JaxRuntimeError):
            return True
        if isinstance(each, ReadableError) and each.caused_elsewhere:
            return True
        each = each.__cause__ or each.__context__
    return False


def _raise_failure(line: Line) -> None:
    """Raises ConfigError or ProcessLostError if a line of process 0 refuses or ends the run."""
    if "failed" in line:
        text = plain_text(line["text"]).removeprefix("error: ")
        if line["code"] == UNUSABLE:
            raise ConfigError(text)
        raise ProcessLostError(text)


def note_step(step: int) -> None:
    """Notes the number of the last step of training that is done, for `print_stacks`."""
    global _last_step
    _last_step = step


def print_stacks() -> None:
    """Prints the last step that this process has done, and where every thread of it is."""
    with contextlib.suppress(Exception):  # as where stderr is no file
        if _last_step is not None:
            print(f"the last step done is {_last_step}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()


def _claim(what: str, facts: Mapping[str, object], following: Following | None) -> Line:
    """Makes the line that states a process's facts about `what`."""
    line: Line = {"same": what, "facts": _facts_as_text(facts), "calls": calls()}
    if following is not None:
        line |= {"next": following[0], "within": following[1]}
    return line


def _facts_as_text(facts: Mapping[str, object]) -> dict[str, str]:
    """Converts facts to texts of bounded length that differ where the facts do."""
    texts = {}
    for key, value in facts.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
        if len(text) > LONGEST_FACT:
            text = f"{text[:LONGEST_FACT]}... {hashlib.sha256(text.encode()).hexdigest()}"
        texts[key] = text
    return texts
