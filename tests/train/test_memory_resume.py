"""Runs that go on from the copies of their state in host memory.

The runs share the compiled step of `conftest.py`.
"""

import shutil

import pytest
from flips import flip_byte
from runs import losses
from test_loop import cluster, finish

from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.train.loop import Training

CRASH = 5  # the step whose metrics are not recorded any more


@pytest.fixture
def memory(tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


@pytest.fixture
def crashed(run, memory, monkeypatch):
    """Starts a run that keeps copies, crashes in step `CRASH`; returns how to start it again."""

    def start(*words):
        words = ("--checkpoint.memory_folder", str(memory), *words)
        record = Training._record_step

        def fail(self, pending):
            if pending.step == CRASH:
                raise OSError("the machine fails")
            return record(self, pending)

        with monkeypatch.context() as patched:
            patched.setattr(Training, "_record_step", fail)
            assert run("run", *words) == 1
        return lambda *more: run("run", *words, *more)

    return start


def copies_in(memory):
    return sorted(memory.rglob("*.copy"))


def steps_of(run):
    return CheckpointStore(run.directory / "run" / "checkpoints").steps()


def test_a_run_goes_on_at_the_step_of_its_copy_bit_for_bit(
    run, crashed, memory, uninterrupted, capsys
):
    again = crashed("--checkpoint.every", "None", "--checkpoint.memory_every", "2")
    assert steps_of(run) == []
    assert len(copies_in(memory)) == 2
    capsys.readouterr()
    assert again() == 0
    shown = capsys.readouterr().out
    assert "step 4 is restored from the copies in memory\n" in shown
    assert losses(run.directory / "run") == uninterrupted
    # The last step is on disk, and memory is free again.
    assert steps_of(run) == [6]
    assert copies_in(memory) == []


def test_where_the_copy_is_damaged_the_checkpoint_is_read(
    run, crashed, memory, uninterrupted, capsys
):
    words = ("--checkpoint.every", "3", "--checkpoint.memory_every", "4")
    again = crashed(*words, "--train.eval_every", "None")
    (copy,) = copies_in(memory)
    flip_byte(copy)
    capsys.readouterr()
    assert again() == 0
    shown = capsys.readouterr().out
    assert f"note: of the copies in memory, {copy} is damaged: its contents have changed" in shown
    assert "there is no usable copy of the state in memory; reading the disk" in shown
    assert "resumes at step 3" in shown
    assert losses(run.directory / "run") == uninterrupted


def test_where_the_disk_is_newer_it_is_read(run, crashed, memory, uninterrupted, capsys):
    again = crashed("--checkpoint.every", "4", "--checkpoint.memory_every", "3")
    capsys.readouterr()
    assert again() == 0
    shown = capsys.readouterr().out
    assert "the copies in memory are of step 3, and step 4 is saved; reading the disk" in shown
    assert losses(run.directory / "run") == uninterrupted


@pytest.mark.long
def test_copies_outlive_a_failed_start(run, crashed, memory, capsys):
    again = crashed("--checkpoint.every", "2", "--checkpoint.memory_every", "2")
    # A start that fails before it has read the disk leaves the copies.
    kept = copies_in(memory)
    assert len(kept) == 2
    capsys.readouterr()
    assert again("--checkpoint.step", "3") == 2
    assert (
        "the copies in memory, of step 4, are not used: checkpoint.step is set"
        in capsys.readouterr().out
    )
    assert copies_in(memory) == kept
    # As on disk, other settings may differ.
    capsys.readouterr()
    assert again("--train.steps", "4", "--train.log_every", "3") == 0
    shown = capsys.readouterr().out
    assert "step 4 is restored from the copies in memory\n" in shown


@pytest.mark.long
def test_another_layout_reads_the_disk(run, crashed, memory, capsys):
    words = ("--train.steps", "4", "--train.log_every", "4", "--train.eval_every", "None")
    again = crashed("--checkpoint.every", "2", "--checkpoint.memory_every", "2")
    capsys.readouterr()
    assert again("--strategy", "no_shard", *words) == 0
    shown = capsys.readouterr().out
    assert "note: of the copies in memory, step 2 is of another configuration or layout" in shown
    assert "resumes at step 4" in shown
    assert copies_in(memory) == []


KILL = f"""
import os, signal
from fsdp_jax.train.loop import Training
record = Training._record_step
def die(self, pending):
    if pending.step == {CRASH}:
        os.kill(os.getpid(), signal.SIGKILL)
    return record(self, pending)
Training._record_step = die
"""


@pytest.mark.filterwarnings("always:checkpoint.memory_neighbours")
def test_copies_that_are_not_made_are_told(run, capsys):
    assert run("run", "--checkpoint.memory_neighbours True", "--train.steps 1") == 0
    assert "no copies are made in memory; set checkpoint.memory_every" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_killed_process_goes_on_from_its_neighbours_copy(run, memory, uninterrupted):
    words = ["--checkpoint.every", "None", "--checkpoint.memory_every", "2"]
    words += ["--checkpoint.memory_folder", str(memory), "--checkpoint.memory_neighbours", "True"]
    (code, _), (killed, _) = finish(*cluster(run, "run", *words, faults=("", KILL)))
    assert (code, killed) == (69, -9)
    (lost,) = memory.glob("fsdp_jax-*/*/1")
    shutil.rmtree(lost)
    (first, shown), (second, silent) = finish(*cluster(run, "run", *words))
    assert (first, second) == (0, 0), shown + silent
    assert "step 4 is restored from the copies in memory, process 1 from its neighbour's" in shown
    for expected, row in zip(uninterrupted, losses(run.directory / "run"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    assert copies_in(memory) == []
