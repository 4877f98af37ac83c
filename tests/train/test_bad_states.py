"""A bad state never replaces good ones: steps that are skipped, and spikes of the loss.

Four steps are compiled and run, as is what these tests are about: one whose learning rate is
infinite for two updates, with and without a limit; one that replicates its state; and one that
takes most losses for spikes.
"""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flips import flip_after, flip_byte
from runs import records
from test_loop import cluster, finish

from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.train import build, loop
from fsdp_jax.train.loop import Training

SPOILED, LAST = 3, 2  # updates that are applied before the learning rate is infinite, and while
EACH_STEP = ("--checkpoint.every", "1", "--checkpoint.keep", "2", "--train.eval_every", "None")


def rate(update):
    return 3e-3 / (1 + update)


def make_spoiled_schedule(*_):
    spoiled = lambda update: (update >= SPOILED) & (update < SPOILED + LAST)  # noqa: E731
    return lambda update: jnp.where(spoiled(update), jnp.inf, rate(update))


@pytest.fixture
def infinite_rate(monkeypatch):
    """Makes the learning rate infinite after some updates."""
    monkeypatch.setattr(build, "make_schedule", make_spoiled_schedule)


def steps_of(run, name):
    return CheckpointStore(run.directory / name / "checkpoints").steps()


def test_updates_that_would_spoil_the_state_are_skipped(run, infinite_rate, capsys):
    assert run("spoiled", *EACH_STEP, "--train.abort_after", "2") == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: 2 steps in a row were skipped")
    assert said.out.count("warning: step 4 was skipped: its loss is ") == 1
    assert "was skipped:" not in said.err
    assert "step 4 is not saved: steps skipped in a row: 1; the next one that is" in said.out
    # The last good steps are there, and the newest is restored.
    assert steps_of(run, "spoiled") == [2, 3]
    store = CheckpointStore(run.directory / "spoiled" / "checkpoints")
    assert store.record(3)["finite"] is True
    assert not (run.directory / "spoiled" / "lease.json").exists()


def test_a_run_that_ends_while_it_skips_steps_keeps_older_ones(run, infinite_rate, capsys):
    words = ("--train.abort_after", "None", "--train.steps", "5")
    assert run("spoiled", *EACH_STEP, *words) == 0
    assert [each["skipped_steps"] for each in records(run.directory / "spoiled")] == [0, 0, 0, 1, 2]
    # The state is that of step 3, and the data goes on.
    assert steps_of(run, "spoiled") == [2, 3, 5]


def test_a_schedule_counts_updates_of_which_numbers_are_kept(run, infinite_rate):
    assert run("spoiled", "--train.abort_after", "None", "--train.eval_every", "None") == 0
    logged = records(run.directory / "spoiled")
    assert [each["skipped_steps"] for each in logged] == [0, 0, 0, 1, 2, 2]
    rates = [rate(update) for update in range(6)]
    rates[SPOILED : SPOILED + LAST] = [None] * LAST  # infinities in JSON
    for each, expected in zip(logged, rates, strict=True):
        assert each["learning_rate"] == (expected and pytest.approx(expected, rel=1e-6))


FLAT = ("--optimizer.learning_rate", "0", "--train.spike_window", "8", "--train.steps", "30")


def spiking(run, name, policy, threshold, *more):
    words = (*FLAT, "--train.eval_every", "None", "--train.spike", policy)
    return run(name, *words, "--train.spike_threshold", str(threshold), *more)


@pytest.mark.long
def test_a_spike_is_told_skipped_or_gone_back_from(run, capsys):
    # The largest of the flat run's scores is the only spike.
    assert spiking(run, "flat", "warn", 1e6) == 0
    capsys.readouterr()
    scores = {each["step"]: each["loss_z_score"] for each in records(run.directory / "flat")}
    assert set(itertools.islice(scores.values(), 8)) == {0.0}
    highest, second = sorted(scores.values(), reverse=True)[:2]
    (step,) = (step for step, score in scores.items() if score == highest)
    threshold = (highest + second) / 2
    loss = next(each["loss"] for each in records(run.directory / "flat") if each["step"] == step)
    told = f"the loss of step {step}, {loss:.4f}, is {highest:.1f} standard deviations (robust) "
    told += "above the median of the 8 before it"

    assert spiking(run, "warned", "warn", threshold) == 0
    assert capsys.readouterr().out.count(f"warning: {told}") == 1
    assert records(run.directory / "warned")[-1]["skipped_steps"] == 0

    assert spiking(run, "skipped", "skip", threshold, "--checkpoint.every", str(step)) == 0
    assert f"warning: {told}, and its update was skipped" in capsys.readouterr().out
    assert records(run.directory / "skipped")[-1]["skipped_steps"] == 1
    # The save that was due is made at the very next step.
    assert steps_of(run, "skipped")[0] == step + 1

    every = ("--checkpoint.every", "4", "--train.steps", str(step))
    assert spiking(run, "back", "back", threshold, *every) == 0
    before = (step - 1) // 4 * 4
    assert f"warning: {told}; back to step {before}, and on" in capsys.readouterr().out
    # Each step has one line, and the data that caused the spike is not read again.
    lines = records(run.directory / "back")
    assert [each["step"] for each in lines] == list(range(1, step + 1))
    losses = [each["loss"] for each in records(run.directory / "flat")]
    assert lines[before]["loss"] in losses[step:]


def test_a_run_does_not_go_back_for_ever(run, capsys):
    every = ("--checkpoint.every", "8", "--train.steps", "40")
    assert spiking(run, "again", "back", 1e-6, *every) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the loss has spikes")
    assert "the run went back to step 8 3 times" in error
    assert steps_of(run, "again") == [8]


@pytest.mark.long
def test_a_run_goes_back_to_no_damaged_step(run, monkeypatch, capsys):
    go_back, damaged = Training._go_back_after_spike, []

    def damage(training, what):
        path = training.saving.resumer.store.path(8)
        if path.parent.parent.name not in damaged:
            damaged.append(path.parent.parent.name)
            training.saving.resumer.store.wait()
            file = max(
                (each for each in path.rglob("*") if each.is_file()), key=lambda x: x.stat().st_size
            )
            flip_byte(file, file.stat().st_size // 2)
        return go_back(training, what)

    monkeypatch.setattr(Training, "_go_back_after_spike", damage)
    every = ("--checkpoint.every", "4")
    assert spiking(run, "stops", "back", 1e-6, *every) == 3
    assert "a checkpoint is damaged" in capsys.readouterr().err
    assert steps_of(run, "stops") == [4, 8]
    # The step before it; the damaged one is renamed, so that its number is saved again.
    more = (*every, "--checkpoint.damaged", "previous")
    assert spiking(run, "goes on", "back", 1e-6, *more) == 1
    said = capsys.readouterr()
    assert "back to step 4, and on" in said.out
    assert said.err.startswith("error: the loss has spikes")
    assert (run.directory / "goes on" / "checkpoints" / "8.damaged").is_dir()


def test_a_signal_at_a_spike_does_not_save_that_step(run, monkeypatch, capsys):
    record = Training._record_step

    def stopping(training, pending):
        went_back = record(training, pending)
        training.stop.asked |= pending.step == 8
        return went_back

    monkeypatch.setattr(Training, "_record_step", stopping)
    assert spiking(run, "stopped", "back", 1e-6, "--checkpoint.every", "4") == 75
    said = capsys.readouterr().out
    assert "back to step 8, and on" in said
    assert "saved at step 8" in said
    assert steps_of(run, "stopped") == [4, 8]
    assert [each["step"] for each in records(run.directory / "stopped")] == list(range(1, 9))


@pytest.mark.long
def test_a_save_that_failed_before_a_spike_does_not_end_the_run(run, monkeypatch, capsys):
    seal, failed = CheckpointStore._seal, []

    def fails_once(store, step, *args):
        if step == 8 and not failed:
            failed.append(step)
            raise OSError("the disk is gone")
        return seal(store, step, *args)

    monkeypatch.setattr(CheckpointStore, "_seal", fails_once)
    monkeypatch.setattr(loop, "RETURNS", 100)  # every other loss is a spike
    every = ("--checkpoint.every", "4", "--train.steps", "10")
    assert spiking(run, "failed", "back", 1e-6, *every) == 0
    said = capsys.readouterr().out
    assert "warning: step 8 was not saved; " in said
    assert "the disk is gone" in said
    assert "back to step 4, and on" in said


def test_policies_out_of_range_are_refused(run, capsys):
    for key, value in (("spike_window", "7"), ("spike_threshold", "0"), ("spike", "stop")):
        assert run("refused", f"--train.{key}", value) == 2
        assert f"train.{key}" in capsys.readouterr().err


@pytest.mark.long
def test_the_window_of_losses_may_be_turned_on_off_and_resized(copied, run, capsys):
    directory = copied("windows")
    for words, note in [
        (("--train.spike", "ignore"), "which this run leaves out"),
        (("--train.spike", "warn"), "the checkpoint has no window of recent losses"),
        (("--train.spike_window", "16"), "the checkpoint has no window of recent losses"),
    ]:
        steps = str(int(CheckpointStore(directory / "checkpoints").latest()) + 1)
        assert run("windows", "--train.steps", steps, *words) == 0
        assert note in capsys.readouterr().out


@pytest.mark.long
def test_a_run_does_not_resume_from_a_state_that_is_not_finite(run, monkeypatch, capsys):
    save = CheckpointStore.save

    def recorded(store, step, *args, **keys):
        return save(store, step, *args, **keys | {"finite": step < 6})

    monkeypatch.setattr(CheckpointStore, "save", recorded)
    assert run("spoiled") == 0
    monkeypatch.undo()
    more = ("--train.steps", "7")
    assert run("spoiled", *more) == 3
    assert "its state is infinite or NaN" in capsys.readouterr().err
    assert run("spoiled", *more, "--checkpoint.damaged", "previous") == 0
    assert "step 6 is damaged, trying the one before" in capsys.readouterr().out
    assert steps_of(run, "spoiled") == [4, 7]


def spoil(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding)


def test_a_state_that_is_not_finite_is_never_saved(run, monkeypatch, capsys):
    # Something outside of the step has spoiled it.
    save = Training._save

    def spoiled(training, **how):
        if training.progress.steps > 2:
            training.progress.state = jax.tree.map(spoil, training.progress.state)
        return save(training, **how)

    monkeypatch.setattr(Training, "_save", spoiled)
    words = ("--checkpoint.every", "2", "--train.steps", "4", "--train.abort_after", "None")
    assert run("outside", *words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: step 4 is not saved: its state is infinite or NaN")
    assert "resume from an older step; none was deleted" in error
    assert steps_of(run, "outside") == [2]


REPLICATED = ("--strategy", "no_shard", "--train.check_replicas", "2", "--checkpoint.every", "2")


def test_a_flipped_bit_in_one_replica_ends_the_run(run, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        # Restores the method that is replaced.
        patched.setattr(Training, "_record_step", Training._record_step)
        flip_after(Training, step=3, number=5)
        assert run("flipped", *REPLICATED) == 1
    error = capsys.readouterr().err
    assert "error: copies of replicated arrays differ between devices\n" in error
    assert re.search(r"where: +params/.*: device 5 \(process 0\)\n", error), error
    assert [each["step"] for each in records(run.directory / "flipped")][-1] == 4
    assert steps_of(run, "flipped") == [2]
    # The same command goes on from the good checkpoint.
    assert run("flipped", *REPLICATED) == 0
    assert steps_of(run, "flipped") == [2, 4, 6]
    said = capsys.readouterr().out
    assert said.count("the copies of all replicated arrays are equal") == 1


FLIP = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from flips import flip_after
from runs import records
from fsdp_jax.train.loop import Training
flip_after(Training, step=3, number=1)
"""


@pytest.mark.exhaustive
def test_the_process_whose_replica_differs_is_named_by_all(run):
    for code, shown in finish(*cluster(run, "two", *REPLICATED, faults=("", FLIP))):
        assert code == 1, shown
        assert "copies of replicated arrays differ between devices\n" in shown
        assert re.search(r"where: +params/.*: device \d+ \(process 1\)\n", shown), shown
    assert steps_of(run, "two") == [2]
