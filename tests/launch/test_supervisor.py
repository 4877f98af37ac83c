"""`fsdp-jax launch`: processes that end, fail, hang and are started again.

The processes are small scripts without jax. The launcher runs in this process, but where it is sent
signals or loses its own output.
"""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from processes import INHERITED, PATIENCE, start
from refusals import refused
from runs import records

from fsdp_jax.cli.main import main
from fsdp_jax.errors import ConfigError
from fsdp_jax.launch import local_devices, local_process, supervisor
from fsdp_jax.launch.local_process import LocalProcess

# The waits of the launcher, shortened.
WAITS = {"OWN_END_SECONDS": 1.0, "TERM_SECONDS": 1.0, "LONGEST_WAIT": 0.1}
LAUNCH = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
from fsdp_jax.cli.main import main
from fsdp_jax.launch import supervisor
vars(supervisor).update({WAITS})
code = main()
assert "jax" not in sys.modules
sys.exit(code)
"""
# What every script begins with.
SELF = """
import os, signal, sys, time
process, processes = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
restarts = int(os.environ["FSDP_JAX_RESTARTS"])
"""


# Without site-packages Python starts in a fifth of the time.
PYTHON = ("--", "python", "-S", "-c")


def start_launcher(*options, script):
    """Starts the launcher with a script, in a process of its own."""
    return start(LAUNCH, "launch", *options, *PYTHON, SELF + script)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the launcher with a command line; returns (exit code, stdout, stderr)."""
    for name, seconds in WAITS.items():
        monkeypatch.setattr(supervisor, name, seconds)
    for name in INHERITED:
        monkeypatch.delenv(name, raising=False)

    def run(*words):
        code = main(["launch", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def launch(command, monkeypatch):
    """Runs the launcher with a script; returns (exit code, stdout, stderr)."""

    def run(*options, script, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return command(*options, *PYTHON, SELF + script)

    return run


def end(launcher):
    """Returns (exit code, stdout, stderr) of a launcher."""
    try:
        out, err = launcher.communicate(timeout=PATIENCE)
    finally:
        launcher.kill()
    return launcher.returncode, out, err


failures = partial(records, file="failures.jsonl")


def test_processes_get_numbers_devices_and_one_secret(launch, tmp_path):
    script = """
names = ("COORDINATOR_ADDRESS", "NUM_PROCESSES")
print(*(os.environ[f"JAX_{name}"] for name in names), os.environ["FSDP_JAX_CLUSTER_SECRET"])
print(os.environ["XLA_FLAGS"].split()[:2], os.environ["NPROC"], file=sys.stderr)
"""
    options = ("--nproc", 2, "--devices-per-process", 3, "--log-dir", tmp_path / "logs")
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_one=1", "NPROC": "7"}
    code, out, err = launch(*options, script=script, **flags)
    assert (code, err) == (0, "")
    lines = [[line[4:] for line in out.splitlines() if line.startswith(f"[{k}]")] for k in (0, 1)]
    assert lines[0] == lines[1]
    assert len(out.splitlines()) == 4
    first, second = lines[0]
    address, count, secret = first.split()
    assert address.startswith("127.0.0.1:")
    assert count == "2"
    assert len(secret) == 64
    assert second == "['--xla_one=1', '--xla_force_host_platform_device_count=3'] 7"
    for number in (0, 1):
        header, *shown = (tmp_path / "logs" / f"process-{number}.log").read_text().splitlines()
        assert header.startswith("=== ")
        assert shown == lines[0]


def test_one_that_is_killed_ends_all_that_ignore_it_too(launch, tmp_path):
    script = """
if process == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if process == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""
    code, _, err = launch("--nproc", 3, "--log-dir", tmp_path, script=script)
    assert code == 69
    assert err.startswith("error: process 1 (of 0 to 2) was killed by SIGKILL\n")
    (failure,) = failures(tmp_path)
    assert failure["process"] == 1
    assert failure["return_codes"] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGKILL]


# What processes of a joined run print and exit with: see fsdp_jax/launch/watch.py.
CONSEQUENCES = """
if process == 2:
    time.sleep(0.2)
    print("error in process 2 (of 0 to 2): the disk is full\\n  where: here")
    print("a line that another library prints at the end")
    sys.exit(1)
print(f"process 2 (of 0 to 2) failed, so {process} ends:\\nerror: the disk is full\\n  where: here")
sys.exit(1 if process else 69)
"""


def test_the_cause_is_told_from_its_consequences(launch, tmp_path):
    code, _, err = launch("--nproc", 3, "--log-dir", tmp_path, script=CONSEQUENCES)
    assert code == 1
    assert err.startswith("error: process 2 (of 0 to 2) exited with 1\n")
    assert "got:      error in process 2 (of 0 to 2): the disk is full\n" in err
    assert "fix:" not in err
    (failure,) = failures(tmp_path)
    assert failure["error"].startswith("error in process 2 (of 0 to 2): the disk is full\n")


TRACEBACK = """
def even(depth):
    odd(depth - 1)
def odd(depth):
    if depth < 0:
        raise ValueError("two lines\\n  where: here")
    even(depth - 1)
print("[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1")
even(40)
"""


def test_the_error_below_a_traceback_is_told_and_gloo_logged(launch, tmp_path):
    code, out, err = launch("--nproc", 1, "--log-dir", tmp_path, script=TRACEBACK)
    assert code == 1
    assert "got:      ValueError: two lines\n" in err
    (failure,) = failures(tmp_path)
    assert failure["error"].endswith("ValueError: two lines\n  where: here")
    assert len(failure["error"].splitlines()) == local_process.BLOCK_LINES
    assert "Gloo" not in out
    assert "[Gloo] Rank 0" in (tmp_path / "process-0.log").read_text()


def test_one_that_hangs_is_the_cause_where_others_have_lost_it(launch):
    script = "sys.exit(69) if process else time.sleep(600)"
    code, _, err = launch("--nproc", 3, script=f"signal.signal(15, signal.SIG_IGN)\n{script}")
    assert code == 69
    assert err.startswith("error: process 0 (of 0 to 2) did not end, and was killed by SIGKILL\n")


def test_what_does_not_fit_is_not_started_again(launch):
    """As `train` exits where a step takes more memory than a device has."""
    code, out, err = launch("--nproc", 1, "--max-restarts", 3, script="print('go'); sys.exit(71)")
    assert (code, out.count("go")) == (71, 1)
    assert "restart" not in err
    assert "resume" not in err
    assert "it is not started again" in err


def test_all_are_started_again_until_they_are_done(launch, tmp_path):
    script = """
print("start", restarts)
if restarts < 2:
    raise KeyError(f"at {restarts}") if process == restarts else time.sleep(600)
"""
    options = ("--nproc", 2, "--max-restarts", 2, "--log-dir", tmp_path)
    code, out, err = launch(*options, script=script)
    assert code == 0, err
    assert out.count("start") == 6
    assert [failure["process"] for failure in failures(tmp_path)] == [0, 1]
    assert failures(tmp_path)[1]["error"].endswith("KeyError: 'at 1'")
    assert "launch: process 1 (of 0 to 1) exited with 1 after " in err
    assert "launch: restart 2 of 2 in 0 s, on 2 processes\n" in err
    assert (tmp_path / "process-0.log").read_text().count("=== ") == 3


def test_restarts_end_and_are_not_for_errors_of_the_user(launch):
    code, out, err = launch("--nproc", 1, "--max-restarts", 2, script="print(1); sys.exit(5)")
    assert (code, out.count("[0] 1")) == (5, 3)
    assert err.count("error: process 0 (of 0 to 0) exited with 5\n") == 1
    for wrong in (2, 3):
        script = f"print(1); sys.exit({wrong})"
        code, out, err = launch("--nproc", 1, "--max-restarts", 2, script=script)
        assert (code, out.count("[0] 1")) == (wrong, 1)


@pytest.mark.parametrize(("least", "counts"), [(2, "442"), (3, "444")])
def test_one_that_fails_twice_in_a_row_is_left_out(launch, tmp_path, least, counts):
    """The devices of process 1 are gone: three are left, of which two divide what four did."""
    script = """
print("count", processes, os.environ["CUDA_VISIBLE_DEVICES"])
if "1" in os.environ["CUDA_VISIBLE_DEVICES"]:
    time.sleep(0.3)
    sys.exit(1)
time.sleep(0 if processes == 2 else 600)
"""
    options = ["--nproc", 4, "--max-restarts", 2, "--log-dir", tmp_path, "--min-nproc", least]
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "JAX_PLATFORMS": ""}
    code, _, err = launch(*options, script=script, **gpus)
    starts = (tmp_path / "process-0.log").read_text()
    assert "".join(line[6] for line in starts.splitlines() if line.startswith("count")) == counts
    if counts == "442":
        assert code == 0, err
        last = [(tmp_path / f"process-{k}.log").read_text().splitlines()[-1] for k in range(2)]
        assert last == ["count 2 0", "count 2 2"]
    else:
        assert code == 1


def test_signals_are_forwarded_and_who_ignores_them_is_killed():
    script = """
def stop(number, frame):
    print("asked by", number, flush=True)
    if process == 0:
        sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
while True:
    time.sleep(600)
"""
    launcher = start_launcher("--nproc", 2, "--max-restarts", 3, "--stop-seconds", 2, script=script)
    ready = [launcher.stdout.readline() for _ in range(2)]
    assert sorted(ready) == ["[0] ready\n", "[1] ready\n"]
    launcher.send_signal(signal.SIGINT)
    code, out, err = end(launcher)
    assert sorted(out.splitlines()) == ["[0] asked by 2", "[1] asked by 2"]
    assert code == 128 + signal.SIGKILL
    assert "process 1 (of 0 to 1) did not end, and was killed by SIGKILL" in err
    assert "restart" not in err


def test_a_signal_after_a_failure_does_not_postpone_the_end():
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if process == 1:
    time.sleep(1)
    print("fails", flush=True)
    sys.exit(5)
time.sleep(600)
"""
    launcher = start_launcher("--nproc", 2, "--stop-seconds", 10000, script=script)
    assert launcher.stdout.readline() == "[1] fails\n"
    time.sleep(0.5)  # the launcher notices it
    launcher.send_signal(signal.SIGTERM)
    code, _, err = end(launcher)
    assert code == 5
    assert err.startswith("error: process 1 (of 0 to 1) exited with 5\n")


@pytest.mark.parametrize("code", [75, 143])
def test_a_run_that_a_signal_has_stopped_has_not_failed(code):
    prepare = "signal.signal(15, lambda *_: sys.exit(75)) if CODE == 75 else None\nprint(1)\n"
    script = prepare.replace("CODE", str(code)) + "time.sleep(600)"
    launcher = start_launcher("--nproc", 2, script=script)
    for _ in range(2):
        launcher.stdout.readline()
    launcher.send_signal(signal.SIGTERM)
    assert end(launcher) == (code, "", "")


def test_what_nobody_reads_ends_the_processes():
    launcher = start_launcher("--nproc", 2, script="while True: print(1); time.sleep(0.01)")
    launcher.stdout.readline()
    launcher.stdout.close()
    launcher.stdout = None
    assert end(launcher)[0] == 141


def test_what_a_process_has_started_ends_with_it(launch):
    script = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
print(child.pid)
os._exit(1)
"""
    code, out, _ = launch("--nproc", 1, script=script)
    assert code == 1
    # A process that was killed ends when it is next scheduled.
    ask = ["ps", "-o", "stat=", "-p", out.split()[1]]
    deadline = time.monotonic() + 60
    while subprocess.run(ask, capture_output=True, text=True, check=False).stdout[:1] not in "Z":
        assert time.monotonic() < deadline, "it runs"
        time.sleep(0.01)


def test_the_group_of_a_process_is_killed_once(monkeypatch):
    killed = []
    killpg = os.killpg

    def kill(number, signal_number):
        # Raises ChildProcessError for a process that has been waited for: another may have its pid.
        os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        killed.append(number)
        killpg(number, signal_number)

    monkeypatch.setattr(local_process.os, "killpg", kill)
    for command in (["true"], ["sleep", "600"]):
        process = LocalProcess(0, command, dict(os.environ))
        while command == ["true"] and process.is_running():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.close()
        process.close()
        assert set(killed) == {process._process.pid}
        assert process.return_code == (0 if command == ["true"] else -signal.SIGKILL)
        killed.clear()


UNUSABLE = {
    "--nproc 2": "no command to start",
    "--nproc 2 train quickstart": "no command to start",
    "--nproc 2 script.py": "fix:      fsdp-jax launch --nproc 2 -- python script.py",
    "--nproc 2 train quickstart -- train quickstart": "words before `--` that are no options",
    "-- train quickstart": "--nproc is missing",
    "--nproc 0 -- train quickstart": "a value is too small",
    "--nproc 2 -- trian quickstart": "did you mean 'train'?",
    "--nproc 2 -- ./script.py": "fix:      -- python ./script.py",
    "--nproc 2 --min-nproc 3 -- train quickstart": "more processes are needed",
    "--nproc 2 --min-nproc 1 -- train quickstart": "--max-restarts of 2 or more",
}


def test_unusable_command_lines_are_refused(command):
    accepted = []
    for words, said in UNUSABLE.items():
        code, out, err = command(*words.split())
        if (code, out) != (2, "") or not err.startswith("error: ") or said not in err:
            accepted.append((words, code, out, err))
    assert accepted == []


def test_help_and_debug_of_the_command_are_its_own(command):
    train = supervisor._program(supervisor.LaunchOptions(("train", "c.yaml", "--debug"), 1, 4))
    assert train[0] == sys.executable
    assert " ".join(train[1:]) == "-m fsdp_jax train c.yaml --debug --train.devices 4"
    for words in ((), ("--help", "--debug")):
        shown = command("--nproc", 1, *PYTHON, "import sys; print(sys.argv)", *words)
        assert shown == (0, f"[0] {['-c', *words]}\n", "")


SMI = """#!/bin/sh
echo "GPU 0: one (UUID: GPU-0)"
echo "GPU 1: another (UUID: GPU-1)"
"""


def test_gpus_are_divided(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    one_each = [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert local_devices.divide_devices(2, None) == one_each
    assert local_devices.divide_devices(1, None) == [{"CUDA_VISIBLE_DEVICES": "0,1"}]
    assert local_devices.divide_devices(1, 1) == one_each[:1]
    for processes, each in ((3, None), (2, 2), (4, None)):
        with refused(error=ConfigError, got="2 GPUs for"):
            local_devices.divide_devices(processes, each)
    # Those that the launcher itself may use, and none for a run on the CPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,GPU-a")
    assert local_devices.divide_devices(2, None)[0] == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert local_devices.divide_devices(2, None) == [{}, {}]


def test_gpus_that_cannot_be_listed_are_refused(tmp_path, monkeypatch):
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local_devices, "NVIDIA_FOLDER", tmp_path)
    assert local_devices.divide_devices(2, None) == [{}, {}]
    (tmp_path / "nvidia0").touch()
    with refused(error=ConfigError, fix="name them: CUDA_VISIBLE_DEVICES="):
        local_devices.divide_devices(2, None)
