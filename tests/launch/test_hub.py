"""Process 0's port: who is admitted, and what strangers, floods and old releases can do there."""

import contextlib
import json
import os
import socket
import threading
import time

import pytest
from processes import free_port
from refusals import refused
from strangers import STRANGE

from fsdp_jax.errors import ConfigError, ProcessLostError
from fsdp_jax.launch import admission, hub, listening, watch
from fsdp_jax.launch.admission import HUB, PROCESS, SECRET_VARIABLE, make_proof, read_secret
from fsdp_jax.launch.listening import listen
from fsdp_jax.launch.watch import Watch

SECRET = b"a secret of the suite"
AGREED = {"seed": 1}


class RawConnection:
    """A connection to process 0 that sends what a test wants."""

    def __init__(self, port, process=1, token="raw", secret=SECRET):
        for _ in range(200):
            with contextlib.suppress(OSError):
                self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
                break
            time.sleep(0.02)
        self.lines, self.secret = self.socket.makefile("rb"), secret
        name = {"process": process, "where": "host raw, pid 1", "token": token}
        self.hello = {"protocol": admission.PROTOCOL, **name, "nonce": "00", "facts": {}}

    def send(self, *lines):
        data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.socket.sendall(b"\n".join([*data, b""]))

    def close(self):
        self.lines.close()
        self.socket.close()

    def receive(self):
        """The next line; None if the connection is closed."""
        with contextlib.suppress(ConnectionError):
            return json.loads(self.lines.readline() or b"null")

    def prove(self, prover=PROCESS):
        self.send(self.hello)
        proof = make_proof(self.secret, prover, self.hello, self.receive()["nonce"])
        self.send({"proof": proof})
        return proof, self.receive()

    def join(self):
        """Proves to know the secret, and agrees on `AGREED`."""
        proof, answer = self.prove()
        assert "proof" in answer
        self.send({"same": hub.JOIN, "facts": {"seed": "1"}})
        return proof


class ThreadWatch(Watch):
    """The watch of a process that is a thread: it notes how it ends, and goes on."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.ended, self.code = threading.Event(), None

    def _end_process(self, text, code):
        self.code = self.code or code
        self.ended.set()


class Joined(threading.Thread):
    """A process, as a thread, that joins and keeps the result: an address, or an error."""

    def __init__(
        self,
        port,
        number,
        processes=2,
        patience=30.0,
        secret=SECRET,
        host="127.0.0.1",
        gpus=(),
    ):
        super().__init__(daemon=True)
        self.gpus = gpus
        self.watch = ThreadWatch(host, port, number, processes, patience, secret)
        self.result = None
        self.start()

    def run(self):
        try:
            self.result = self.watch.join(AGREED, gpus=self.gpus)
        except (ConfigError, ProcessLostError) as error:
            self.result = error

    def wait(self):
        self.join(60)
        return self.result

    def close(self):
        if self.watch._hub is not None:
            self.watch._hub.wait_until_alone(0.2)
        if isinstance(self.result, str):
            with contextlib.suppress(OSError):
                self.watch._connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def make():
    """Makes processes and raw connections, and closes them in the end."""
    made = []

    def make_one(kind, *arguments, **options):
        made.append(kind(*arguments, **options))
        return made[-1]

    yield make_one
    for each in made[::-1]:
        each.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Processes that end soon after another has failed."""
    monkeypatch.setattr(watch, "GRACE", 0.1)
    monkeypatch.setattr(watch, "LATE", 0.2)


def leave_together(*processes):
    for each in processes[::-1]:
        each.watch.leave()


# The secret


@pytest.mark.parametrize("other", [b"", b"another one of the suite"])
def test_who_does_not_know_the_secret_is_told(port, make, other):
    first = make(Joined, port, 0)
    error = make(Joined, port, 1, secret=other).wait()
    assert isinstance(error, ConfigError)
    assert "process 1 does not know the secret of the run\n  where:    cluster.secret" in str(error)
    second = make(Joined, port, 1)
    assert first.wait() == second.wait() == f"127.0.0.1:{first.result.split(':')[1]}"
    leave_together(first, second)


def test_a_secret_that_process_0_lacks_ends_all(port, make):
    for each in make(Joined, port, 0, secret=b""), make(Joined, port, 1):
        assert isinstance(each.wait(), ConfigError)
        assert "process 1 does not know the secret" in str(each.result)


def test_a_proof_is_of_use_once_and_in_one_direction(port, make):
    first = make(Joined, port, 0)
    used = make(RawConnection, port)
    proof, answer = used.prove()
    assert answer["proof"] != proof
    used.close()
    again = make(RawConnection, port)
    again.send(again.hello)
    assert again.receive()["nonce"]
    again.send({"proof": proof})
    assert "does not know the secret" in again.receive()["text"]
    assert "does not know the secret" in make(RawConnection, port).prove(HUB)[1]["text"]
    other = make(RawConnection, port)
    other.send(other.hello)
    nonce = other.receive()["nonce"]
    other.send({"proof": make_proof(SECRET, PROCESS, other.hello | {"process": 0}, nonce)})
    assert "does not know the secret" in other.receive()["text"]
    second = make(Joined, port, 1)
    assert first.wait() == second.wait()
    leave_together(first, second)


class FakeProcess0:
    """Listens, and answers each hello with the lines that `answers(hello)` yields."""

    def __init__(self, answers):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, args=(answers,), daemon=True).start()

    def serve(self, answers):
        with contextlib.suppress(OSError), self.listener:
            while True:
                connection, _ = self.listener.accept()
                with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError):
                    for line in answers(json.loads(lines.readline())):
                        connection.sendall(json.dumps(line).encode() + b"\n")
                    lines.readline()

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)


def test_process_0_has_to_know_the_secret_too(make):
    def answers(hello):
        yield {"protocol": admission.PROTOCOL, "nonce": "1"}
        yield {"proof": make_proof(b"guessed", HUB, hello, "1")}
        yield {"failed": 0, "text": "error: forged", "code": 2}

    error = make(Joined, make(FakeProcess0, answers).port, 1, patience=1.0).wait()
    assert isinstance(error, ProcessLostError)
    assert "what answers there does not know the secret of the run" in str(error)


def test_endless_lines_of_process_0_do_not_outlast_the_limit(make):
    stopped = time.monotonic() + 60

    def answers(hello):
        yield {"protocol": admission.PROTOCOL, "nonce": "1"}
        yield {"proof": make_proof(SECRET, HUB, hello, "1")}
        while time.monotonic() < stopped:
            yield {"say": ""}
            time.sleep(0.02)

    error = make(Joined, make(FakeProcess0, answers).port, 1, patience=1.0).wait()
    stopped = 0
    assert isinstance(error, ProcessLostError)
    assert "process 0 does not answer" in str(error)


def test_a_secret_is_of_file_or_environment_and_never_quoted(tmp_path, monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    assert read_secret(None) == b""
    assert read_secret(str(file)) == SECRET
    monkeypatch.setenv(SECRET_VARIABLE, "another secret of the suite")
    assert read_secret(str(file)) == SECRET
    assert read_secret(None) == b"another secret of the suite"

    # Too short, none at all, or passed in place of its file: no message shows it.
    file.write_text("short")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for wrong in (
        str(file),
        str(tmp_path / "gone"),
        str(pipe),
        "a secret in place of a file",
        "\0",
    ):
        with refused(error=ConfigError, where="cluster.secret") as caught:
            read_secret(wrong)
        assert "short\n" not in str(caught.value)
        assert wrong.strip("\0") not in str(caught.value) or wrong == "\0"
    for wrong in ("", "15 bytes are few", "x" * 5000):
        monkeypatch.setenv(SECRET_VARIABLE, wrong[:15] if len(wrong) < 20 else wrong)
        with pytest.raises(ConfigError) as caught:
            read_secret(None)
        assert SECRET_VARIABLE in str(caught.value)
        assert not wrong or wrong[:15] not in str(caught.value)


# Strangers


def test_strangers_are_few_and_keep_no_process_out(port, make):
    """Also while they are connected, in greater number than process 0 keeps."""
    first = make(Joined, port, 0)
    make(RawConnection, port).close()
    before = len(os.listdir("/dev/fd"))
    strangers = []
    for number in range(3 * hub.MOST_UNKNOWN):
        stranger = socket.create_connection(("127.0.0.1", port), timeout=30)
        stranger.setblocking(False)
        with contextlib.suppress(OSError):
            stranger.send(STRANGE[number % len(STRANGE)])
        strangers.append(stranger)
    second = make(Joined, port, 1)
    assert first.wait() == second.wait()
    # Both ends are of this process.
    kept = len(os.listdir("/dev/fd")) - before - len(strangers)
    assert kept <= hub.MOST_UNKNOWN + 10
    for stranger in strangers:
        stranger.close()
    leave_together(first, second)


def test_a_stranger_has_little_time_however_slowly_it_sends(port, make, monkeypatch):
    monkeypatch.setattr(hub, "HELLO_SECONDS", 0.5)
    first = make(Joined, port, 0)
    stranger = make(RawConnection, port)
    sent = 0
    with contextlib.suppress(OSError):
        while sent < 300:
            sent += stranger.socket.send(b" ")
            time.sleep(0.05)
    assert sent < 300
    second = make(Joined, port, 1)
    assert first.wait() == second.wait()
    leave_together(first, second)


def test_a_process_that_connects_again_has_one_connection(port, make):
    first = make(Joined, port, 0, processes=3)
    connections = [make(RawConnection, port) for _ in range(5)]
    for each in connections[:-1]:
        each.join()
    connections[-1].prove()
    assert [each.receive() for each in connections[:-1]] == [None] * 4
    # It has not sent its facts again, though they were known: the run does not begin.
    assert 1 not in first.watch._hub._claims
    connections[-1].close()
    second, third = (make(Joined, port, number, processes=3) for number in (1, 2))
    assert first.wait() == second.wait() == third.wait()
    leave_together(first, second, third)


# Processes that are admitted


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"same": "x", "facts": ' + b"[" * 200_000 + b"}", 69),
        ({"same": ["x"], "facts": 1}, 69),
        ([1], 69),
        ({"unknown": 1}, 69),
        ({"failed": 1}, 69),
        ({"failed": 0, "text": "\x1b[31mred", "code": 256, "stacks": 0}, 1),
    ],
)
def test_what_an_admitted_process_sends_hangs_nobody(port, make, line, code):
    first, raw = make(Joined, port, 0), make(RawConnection, port)
    raw.join()
    assert first.wait() == f"127.0.0.1:{raw.receive()['port']}"
    with contextlib.suppress(OSError):
        raw.send(line)
    assert first.watch.ended.wait(60)
    assert first.watch.code == code


def test_processes_of_a_host_that_see_the_same_gpus_share_them(port, make):
    seen = ("0,1", "2,3", "0,1")
    joined = [
        make(Joined, port, k, processes=3, gpus=gpus.split(",")) for k, gpus in enumerate(seen)
    ]
    for each in joined:
        each.wait()
    assert [each.watch.find_gpu_sharers() for each in joined] == [[0, 2], [1], [0, 2]]
    leave_together(*joined)


def test_an_error_of_process_0_itself_blames_no_other_process(port, make, monkeypatch):
    def fail(self, preferred):
        raise OSError("no port is free")

    monkeypatch.setattr(listening.Listening, "free_port", fail)
    for each in [make(Joined, port, number) for number in (0, 1)]:
        assert isinstance(each.wait(), ProcessLostError)
        assert "got:      OSError: no port is free\n" in str(each.result)


def test_a_process_whose_line_is_too_long_is_not_called_gone(port, make, capsys):
    first, raw = make(Joined, port, 0), make(RawConnection, port)
    raw.join()
    first.wait()
    with contextlib.suppress(OSError):
        raw.send(b"x" * (3 << 20))
    assert first.watch.ended.wait(60)
    error = capsys.readouterr().err
    assert "error: process 0 cannot act on what process 1 sends\n" in error
    assert "is gone" not in error


def test_a_process_that_is_slow_to_leave_has_lost_nobody(port, make, monkeypatch):
    monkeypatch.setattr(watch, "DELIVERY", 0.1)
    first, second = make(Joined, port, 0), make(Joined, port, 1)
    second.wait()
    first.wait()
    ends = threading.Thread(target=second.watch.agree_to_end, args=[None])
    ends.start()
    assert first.watch.agree_to_end(None)
    ends.join()
    first.watch.leave()
    # as the kernel does when process 0 exits
    kept = first.watch._hub
    kept._loop.call_soon_threadsafe(kept._peers[1].writer.transport.abort)
    while second.watch._connection.fileno() >= 0:
        time.sleep(0.01)
    assert not second.watch.ended.wait(0.3)


def test_a_process_that_does_not_read_is_let_go(port, make):
    first, raw = make(Joined, port, 0), make(RawConnection, port)
    raw.join()
    first.wait()
    kept = first.watch._hub
    transport = kept._peers[1].writer.transport
    sent = 0
    while sent < 1000 and not transport.is_closing():
        kept._loop.call_soon_threadsafe(kept._peers[1].send, {"say": "x" * 60_000})
        sent += 1
        time.sleep(0.001)
    assert transport.get_write_buffer_size() < hub.MOST_UNSENT + 100_000
    assert first.watch.ended.wait(60)
    assert first.watch.code == 69


def test_processes_that_wait_at_different_places_all_end(port, make):
    first, raw = make(Joined, port, 0), make(RawConnection, port)
    raw.join()
    first.wait()
    raw.receive()
    raw.send({"same": "the end of the run", "facts": {}})
    assert not first.watch.require_same("the program of the train step", {}, 0.5)
    line = raw.receive()
    assert "wait for one another at different places" in line["text"]
    assert "process 0 at the program of the train step" in line["text"]
    assert "process 1 at the end of the run" in line["text"]
    assert first.watch.ended.wait(60)
    assert first.watch.code == 2


TRAIN, EVAL = "the train step", "the eval step"
# (calls of processes 0, 1, 2; who waits for the others), and what is said of 0; "": nothing.
CALLS = [
    (
        ({TRAIN: 6}, {TRAIN: 7}, {TRAIN: 7}),
        [0],
        "process 0: 6 for the train step, waits at the end",
    ),
    (({TRAIN: 6}, {TRAIN: 7}, {TRAIN: 7}), [0, 1], "process 0: 6 for the train step, waits"),
    (
        ({TRAIN: 6, EVAL: 1}, {TRAIN: 7}, {}),
        [],
        "process 0: 6 for the train step and 1 for the eval",
    ),
    (({TRAIN: 6, EVAL: 3}, {TRAIN: 6, EVAL: 4}, {}), [0], "process 0: 6 for the train step and 3"),
    (({TRAIN: 6}, {TRAIN: 7}, {TRAIN: 7}), [], ""),  # late
    (({TRAIN: 7}, {TRAIN: 6}, {TRAIN: 7}), [0, 2], ""),  # late
    (({TRAIN: 6, EVAL: 1}, {TRAIN: 6}, {}), [0], ""),  # the others have yet to come
    (({TRAIN: 6}, {TRAIN: 6}, {TRAIN: 6}), [0, 1], ""),
]


def test_who_has_run_out_of_batches_is_told_from_who_is_late():
    for calls, waiting, said in CALLS:
        places = dict.fromkeys(waiting, "the end of the run")
        text = hub._unequal_batches(dict(enumerate(calls)), places)
        assert said in text, (calls, waiting)
        assert ("unequal numbers of batches" in text) == bool(said), (calls, waiting)


@pytest.mark.parametrize("waits", [True, False])
def test_processes_with_unequal_numbers_of_batches_all_end(port, make, monkeypatch, capsys, waits):
    """Where one waits, as it leaves; else it is told every so often that no step is done."""
    monkeypatch.setattr(hub, "SAY_SECONDS", 0.05)
    monkeypatch.setattr(watch, "calls", lambda: {TRAIN: 7})
    first, raw = make(Joined, port, 0), make(RawConnection, port)
    raw.join()
    first.wait()
    raw.send({"calls": {TRAIN: 6}})
    if waits:
        raw.send({"same": "the end of the run", "facts": {}, "calls": {TRAIN: 6}})
        assert first.watch.ended.wait(60)
        assert first.watch.code == 2
        said = capsys.readouterr().err
        assert "got:      process 0: 7 for the train step\n" in said
        assert "          process 1: 6 for the train step, waits at the end of the run\n" in said
        return
    lines = iter(raw.receive, None)
    said = next(line["say"] for line in lines if "say" in line)
    assert said.endswith("process 0: 7 for the train step; process 1: 6 for the train step")
    assert not first.watch.ended.is_set()


# Other releases


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_an_older_release_is_told_at_once(port, make, monkeypatch, secret):
    monkeypatch.setattr(hub, "SAY_SECONDS", 0.2)
    first, old = make(Joined, port, 0, secret=secret, patience=2.0), make(RawConnection, port)
    facts = {f"section.key_{number}": "x" * 40 for number in range(150)}
    old.send({"process": 1, "where": "host raw, pid 1", "token": "old", "facts": facts})
    line = old.receive()
    assert line["code"] == 2
    assert "the processes run different releases of fsdp_jax" in line["text"]
    # Whoever does not know the secret cannot end the others, which name it.
    assert isinstance(first.wait(), ProcessLostError if secret else ConfigError)
    assert "run different releases of fsdp_jax" in str(first.result)


def test_a_process_0_of_an_older_release_is_named_at_once(make):
    def answers(hello):
        assert {"process", "where", "token", "facts"} <= hello.keys()  # or the old one ignores it
        yield {"say": ""}

    error = make(Joined, make(FakeProcess0, answers).port, 1).wait()
    assert isinstance(error, ConfigError)
    assert "the processes run different releases of fsdp_jax" in str(error)
    assert "an older one" in str(error)


def test_a_process_of_a_larger_run_ends_all(port, make):
    first, raw = make(Joined, port, 0), make(RawConnection, port, process=7)
    raw.prove()
    assert "where:    cluster.processes" in raw.receive()["text"]
    assert "2 in process 0, and a process 7 (host raw" in str(first.wait())


# Where it listens

OTHERS = "203.0.113.1"  # of no machine: an address for documentation


@pytest.fixture
def names(monkeypatch):
    """Names of hosts: one with another machine's address, one with this machine's loopback."""
    known = {"node-1": "127.0.0.1", "gateway": OTHERS}
    look_up = socket.getaddrinfo

    def with_names(host, *rest, **more):
        if host == "nobody":
            raise socket.gaierror
        return look_up(known.get(host, host), *rest, **more)

    monkeypatch.setattr(listening.socket, "getaddrinfo", with_names)


@pytest.mark.parametrize(
    ("host", "has_secret", "everywhere", "warning"),
    [
        ("127.0.0.1", False, False, ""),
        ("127.0.0.1", True, False, ""),
        ("localhost", False, False, ""),
        ("0.0.0.0", False, True, "without cluster.secret"),
        ("0.0.0.0", True, True, ""),
        ("node-1", False, False, "node-1 is 127.0.0.1 on this machine, which no other reaches"),
        ("node-1", True, True, "listens on every interface, and asks for the secret"),
        ("gateway", True, True, "no address of gateway is this machine's"),
        ("nobody", True, True, "no address of nobody is this machine's"),
    ],
)
def test_it_listens_at_the_address_of_the_run_alone(
    port, names, host, has_secret, everywhere, warning
):
    found = listen(host, port, has_secret=has_secret)
    with contextlib.ExitStack() as stack:
        addresses = {stack.enter_context(each).getsockname()[0] for each in found.sockets}
        assert (addresses <= {"::", "0.0.0.0"}) == everywhere
        assert everywhere or addresses <= {"127.0.0.1", "::1"}
        assert warning in found.warning
        assert bool(found.warning) == bool(warning)
        # jax's own service listens at the same address, at a port that is free there.
        assert found.free_port(port) != port


@pytest.mark.parametrize(
    ("host", "got"), [("gateway", f"gateway: {OTHERS}, not of this machine"), ("nobody", "no addr")]
)
def test_an_address_of_another_machine_needs_a_secret(port, names, host, got):
    where = "cluster.coordinator"
    with refused(error=ConfigError, where=where, got=got, fix="cluster.secret"):
        listen(host, port, has_secret=False)


def test_behind_another_address_process_0_reaches_itself(port, make, names, capsys):
    first = make(Joined, port, 0, host="gateway")
    second = make(Joined, port, 1)
    assert first.wait() == second.wait()
    assert not first.watch.only_at_address
    assert "process 0: no address of gateway is this machine's" in capsys.readouterr().err
    leave_together(first, second)
