"""Runs of several processes that `fsdp-jax launch` starts, loses and starts again.

The processes are real, and train: they are lost in the middle of a step.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE, start
from runs import losses, records

# Imported by every Python that starts: it ends a process of the run in the middle of a step, and
# at its next start.
FAULT = """
import os, signal
process, restarts = os.environ.get("JAX_PROCESS_ID"), os.environ.get("FSDP_JAX_RESTARTS")
if process == "LOST" and restarts in "0 1".split()[:DEATHS]:
    if restarts == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    from fsdp_jax.train.loop import Training
    record = Training._record_step
    def die(self, pending):
        record(self, pending)
        if pending.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    Training._record_step = die
"""


@pytest.fixture
def launched(run, tmp_path):
    """Launches the tiny configuration; process `lost` dies `deaths` times. Returns its output."""

    def launch(*options, lost, deaths):
        fault = FAULT.replace("LOST", str(lost)).replace("DEATHS", str(deaths))
        (tmp_path / "sitecustomize.py").write_text(fault)
        paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
        code = "import sys; from fsdp_jax.cli.main import main; sys.exit(main())"
        words = ("--log-dir", tmp_path / "logs", "--max-restarts", deaths, "--")
        saves = ("--checkpoint.every", 2, "--checkpoint.asynchronous", "false")
        trained = ("train", run.config, "--output", tmp_path / "run", *saves)
        flags = "--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX"
        environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": paths}
        launcher = start(code, "launch", *options, *words, *trained, **environment)
        try:
            out, err = launcher.communicate(timeout=PATIENCE)
        finally:
            launcher.kill()
        assert launcher.returncode == 0, out + err
        return out, err

    return launch


@pytest.mark.long
def test_a_run_resumes_after_a_process_is_killed(launched, uninterrupted, tmp_path):
    options = ("--nproc", 2, "--devices-per-process", 4)
    out, err = launched(*options, lost=1, deaths=1)
    assert "launch: process 1 (of 0 to 1) was killed by SIGKILL after" in err
    assert "launch: restart 1 of 1 in 1 s, on 2 processes\n" in err
    (failure,) = records(tmp_path / "logs", "failures.jsonl")
    assert failure["return_codes"][0] == 69
    # From checkpoint 4, with the same data: nothing is lost and nothing is done twice.
    assert "resumes at step 4" in out
    for expected, row in zip(uninterrupted, losses(tmp_path / "run"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.exhaustive
def test_four_processes_go_on_as_two_where_one_is_gone(launched, uninterrupted, tmp_path):
    """The global batch and the order of the data are those of the run on 8 devices."""
    options = ("--nproc", 4, "--devices-per-process", 2, "--min-nproc", 2)
    out, err = launched(*options, lost=3, deaths=2)
    assert "launch: restart 1 of 2 in 1 s, on 4 processes\n" in err
    assert "launch: restart 2 of 2 in 2 s, on 2 processes\n" in err
    assert [each["process"] for each in records(tmp_path / "logs", "failures.jsonl")] == [3, 3]
    assert "8 cpu on 1 host, in 4 processes" in out
    assert "4 cpu on 1 host, in 2 processes" in out
    for expected, row in zip(uninterrupted, losses(tmp_path / "run"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    command = [sys.executable, "-m", "fsdp_jax", "verify", str(tmp_path / "run")]
    subprocess.run(command, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL)
