"""Processes that join, disagree, fail or die: every one gets to know why, and ends.

Most processes are threads. Two are real, and one of them is killed: no thread can be. Where they
compare their programs, the initialization of a small model is compiled, since it runs before the
programs that follow are lowered.
"""

import contextlib
import shutil
import socket
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import optax
import pytest
from flax import nnx
from processes import JOIN, PATIENCE, free_port, start
from refusals import refused
from test_hub import Joined, leave_together, make  # noqa: F401

import fsdp_jax
from fsdp_jax.errors import OWN_FOLDER, ConfigError, ProcessLostError
from fsdp_jax.launch import cluster, fail_together, hub, source_digests, watch
from fsdp_jax.launch.source_digests import SUFFIXES
from fsdp_jax.launch.watch import Watch


@pytest.fixture
def impatient(monkeypatch):
    """Processes that say every 0.2 seconds who is waited for."""
    for module in (hub, watch):
        monkeypatch.setattr(module, "SAY_SECONDS", 0.2)


def join(*numbers, facts=(), patience=30.0, processes=None):
    """Joins processes of these numbers, as threads; returns what each gets: a result or an error.

    `facts` are those of each process.
    """
    port = free_port()
    results = [None] * len(numbers)

    def run(place, number):
        process = Watch("127.0.0.1", port, number, processes or len(numbers), patience)
        try:
            results[place] = process.join(facts[place] if facts else {})
            process.leave()
        except (ConfigError, ProcessLostError) as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(numbers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_every_process_is_told_how_they_differ():
    facts = [{"seed": 1, "optimizer.learning_rate": rate} for rate in (0.1, 0.1, 0.2)]
    for error in join(0, 1, 2, facts=facts):
        assert isinstance(error, ConfigError)
        lines = str(error).splitlines()
        assert lines[0] == "the processes disagree about the configuration"
        assert lines[1].split() == ["where:", "optimizer.learning_rate"]
        assert lines[2].endswith("optimizer.learning_rate: 0.1 in process 0, 0.2 in process 2")
        assert lines[3].startswith("  fix:")


@pytest.mark.parametrize("twice", [0, 1])
def test_two_processes_of_one_number_are_named(twice):
    for error in join(*sorted((0, 1, twice)), processes=3):
        assert isinstance(error, ConfigError)
        assert f"two processes have the number {twice}\n  where:    cluster.process" in str(error)
        assert str(error).count("host ") == 2


@pytest.fixture
def other_source(tmp_path):
    """The folder of a copy of the package in which one line of one file differs."""
    copied = tmp_path / "fsdp_jax"
    shutil.copytree(OWN_FOLDER, copied, ignore=shutil.ignore_patterns("__pycache__"))
    file = copied / "optim" / "stored_adam.py"
    file.write_text(file.read_text() + "\n# another line\n")
    (copied / "notes.txt").write_text("files of no use may differ")
    return copied


def test_processes_of_another_source_are_refused(other_source, monkeypatch):
    facts = [cluster._environment_facts()]
    monkeypatch.setattr(source_digests, "OWN_FOLDER", other_source)
    facts.append(cluster._environment_facts())
    for error in join(0, 1, facts=facts):
        assert isinstance(error, ConfigError)
        said = "disagree about the configuration\n  where:    fsdp_jax/optim/stored_adam.py\n"
        assert said in str(error)


def test_every_kind_of_file_that_is_installed_is_digested():
    project = tomllib.loads((OWN_FOLDER.parent / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]["fsdp_jax"]
    assert {Path(name).suffix for name in data} - {".typed"} <= SUFFIXES
    digests = source_digests.source_digests()
    assert {"fsdp_jax/__init__.py", "fsdp_jax/step/known_defects.toml"} < digests.keys()
    assert len(set(digests.values())) > len(digests) / 2


def test_a_process_that_never_comes_is_named(impatient, capsys):
    for error in join(0, 2, processes=4, patience=1.5):
        assert isinstance(error, ProcessLostError)
        assert "processes 1, 3 did not join" in str(error)
        assert "4 processes within 2 s" in str(error)
        assert "process 2 (host" in str(error)
    said = capsys.readouterr().err
    for process in (0, 2):
        assert (
            f"process {process}: waiting for processes 1, 3 (of 0 to 3) to join: 0 of at most"
            in said
        )


def test_process_0_that_does_not_answer_is_named(impatient, capsys):
    (error,) = join(1, processes=2, patience=1.5)
    assert isinstance(error, ProcessLostError)
    assert "process 0 does not answer" in str(error)
    assert "cluster.coordinator" in str(error)
    assert "process 1: waiting for process 0 at 127.0.0.1:" in capsys.readouterr().err


def test_a_port_that_something_else_listens_on(impatient):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with refused("cannot listen", error=ConfigError) as caught:
            Watch("127.0.0.1", taken, 0, 2, 30.0).join({})
        assert f"127.0.0.1:{taken}" in str(caught.value)
        assert "in use" in str(caught.value)


@pytest.mark.parametrize("answer", [b"5\n", b"[" * 100_000 + b"\n", b"{}\n", b"\xff\n", b"\n"])
def test_a_stranger_in_place_of_process_0_is_told(impatient, capsys, answer):

    def serve(listener):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        with refused("process 0 does not answer", error=ProcessLostError):
            Watch("127.0.0.1", listener.getsockname()[1], 1, 2, 1.0).join({})
        listener.shutdown(socket.SHUT_RDWR)
    assert "waiting for process 0 at 127.0.0.1:" in capsys.readouterr().err


def test_facts_of_any_length_are_compared():
    texts = ["x" * (2 << 20) + end for end in "aab"]
    assert len(set(join(0, 1, facts=[{"long": text} for text in texts[:2]]))) == 1
    for error in join(0, 1, facts=[{"long": text} for text in texts[1:]]):
        assert "the processes disagree about the configuration\n  where:    long" in str(error)


def test_a_run_under_way_takes_no_further_process(make):  # noqa: F811
    port = free_port()
    first, second = (make(Joined, port, number, secret=b"") for number in range(2))
    assert first.wait() == second.wait()
    with refused("a run is under way at this address", error=ConfigError):
        Watch("127.0.0.1", port, 1, 2, 30.0).join({})
    leave_together(first, second)


def test_an_error_in_one_process_ends_the_other(make, monkeypatch, capsys):  # noqa: F811
    port = free_port()
    first, second = (make(Joined, port, number) for number in range(2))
    assert first.wait() == second.wait()
    monkeypatch.setattr(cluster, "_watch", first.watch)
    with fail_together():
        raise ConfigError("token 99 is outside the vocabulary")
    assert second.watch.ended.wait(60)
    assert (first.watch.code, second.watch.code) == (2, 2)
    error = capsys.readouterr().err
    assert "error in process 0 (of 0 to 1): token 99 is outside the vocabulary\n" in error


FAULT = (
    JOIN
    + """
import contextlib, ctypes, os, signal, time
import jax
from jax.experimental import multihost_utils
from fsdp_jax.errors import CheckpointError, ConfigError
from fsdp_jax.launch import cluster, fail_together, require_same
from fsdp_jax.processes import raise_together
broken, fault = int(sys.argv[4]), sys.argv[5]
barrier("all there")
ctypes.PyDLL(None).usleep(500_000)  # with the interpreter's lock: nobody takes it for dead
require_same("the data", {"digest": str(process) if fault == "differ" else "equal"})
if process == broken:
    print("fault at", time.time(), flush=True)
    if fault == "fork and kill" and os.fork() == 0:
        os.closerange(1, 3)
        with contextlib.suppress(ConfigError), fail_together():
            raise ConfigError("in a copy, which is no process of the run")
        time.sleep(60)  # nor does it keep the connections open
        os._exit(0)
    if "kill" in fault:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "end":
        cluster.AT_EXIT = 1.0
        sys.exit(0)
    if fault == "uncaught":
        raise RuntimeError("in the user's step")
    with fail_together():
        if fault == "exit":
            sys.exit(256 + 7)  # the system takes 8 bits
        if fault == "refusal":
            raise ConfigError("token 99 is outside the vocabulary")
with fail_together():
    if fault == "together":
        with raise_together(CheckpointError("not written, see the other process")):
            if process == broken:
                raise OSError(28, "no space")
    try:
        multihost_utils.sync_global_devices("never")
    except Exception as error:
        raise CheckpointError("a checkpoint could not be written") from error
"""
)


IN_1 = "in process 1 (of 0 to 1): "
FAULTS = [
    # (fault, broken process, exit codes of it and of the other, what each says)
    ("kill", 0, (-9, 69), "", "error: process 0 is gone\n  where:    127.0.0.1:"),
    ("refusal", 0, (2, 2), "error in process 0 (of 0 to 1): token 99 is", "error: token 99 is"),
    ("together", 1, (1, 1), "process 1 (of 0 to 1): the disk is full", "error: the disk is full"),
    ("uncaught", 1, (1, 1), f"error {IN_1}RuntimeError", "in the user's step"),
    ("exit", 1, (7, 7), f"error {IN_1}exited with 263", "error: exited with 263"),
    ("fork and kill", 1, (-9, 69), "", "error: process 1 is gone\n  where:    host"),
    ("end", 1, (69, 69), f"{IN_1}this process has ended", "others have not"),
]


@pytest.mark.parametrize(
    ("fault", "broken", "codes", "own", "told"),
    [
        pytest.param(*each, marks=[pytest.mark.long] * (number > 1), id=f"{each[0]}-{each[1]}")
        for number, each in enumerate(FAULTS)
    ],
)
def test_a_fault_of_one_process_ends_the_other_at_once(fault, broken, codes, own, told):
    port = free_port()
    processes = [
        start(FAULT, port, number, 2, broken, fault, JAX_PLATFORMS="cpu") for number in range(2)
    ]
    outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    ended = time.time()
    out, error = outputs[broken]
    other = outputs[1 - broken][1]
    assert (processes[broken].returncode, processes[1 - broken].returncode) == codes, other
    assert own in error
    assert f"process {broken} (of 0 to 1) failed, so {1 - broken} ends:\n" in other
    assert told in other
    # what the failure causes there, if only with a delay, is not reported as a failure
    assert "error in process" not in other
    began = float(next(line for line in out.splitlines() if "fault at" in line).split()[-1])
    assert ended - began < 30


PARTS = {
    "init": "the model's initialization",
    "optimizer": "the train step",
    "eval": "the eval step",
}


def compared_programs(monkeypatch, where):
    """{subject: facts} that a process compares of its programs; the steps themselves do not run."""
    found = {}

    def compare(what, facts, patience):
        found[what] = facts
        if what.endswith("step"):
            raise ProcessLostError(what)

    def loss(model, batch):
        return ((where == "eval" and evaluates) + model(batch["x"])).sum(), 8

    monkeypatch.setattr("fsdp_jax.processes._comparison", compare)
    bias = nnx.initializers.constant(1.0 + (where == "init"))
    sharded = fsdp_jax.fully_shard(
        lambda rngs: nnx.Linear(4, 8, rngs=rngs, bias_init=bias),
        optax.adam(0.1, b2=0.9 + 0.05 * (where == "optimizer")),
        fsdp_jax.make_mesh(),
        min_size=1,
    )
    state, batch = sharded.init(0), {"x": np.zeros((8, 4), np.float32)}
    for evaluates in (False, True):
        make_step = sharded.make_eval_step if evaluates else sharded.make_train_step
        with pytest.raises(ProcessLostError):
            make_step(loss)(state, batch)
    return {what.removeprefix("the program of "): facts for what, facts in found.items()}


def test_programs_are_compared_before_they_run(monkeypatch):
    expected = compared_programs(monkeypatch, "")
    assert expected == compared_programs(monkeypatch, "")
    for where, program in PARTS.items():
        found = compared_programs(monkeypatch, where)
        differ = [what for what in expected if found[what] != expected[what]]
        assert differ == [program], where


@pytest.mark.long
def test_processes_that_disagree_after_they_joined_all_end():
    port = free_port()
    processes = [start(FAULT, port, k, 2, 9, "differ", JAX_PLATFORMS="cpu") for k in range(2)]
    for process in processes:
        _, error = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2, error
        assert "error: the processes disagree about the data\n  where:    digest" in error
        assert "digest: 0 in process 0, 1 in process 1" in error
