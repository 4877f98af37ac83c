"""Which checkpoint a run goes on from, and what it refuses to go on from."""

import re
import shutil
import signal
import time

import pytest
from runs import losses, records

from fsdp_jax.checkpoint import CheckpointStore, store
from fsdp_jax.data import train_bpe
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.train.loop import Training

EVERY_TWO = ("--checkpoint.every", "2")


def names(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_a_damaged_checkpoint_stops_the_run_or_is_set_aside_as_it_is_told(run, tmp_path, capsys):
    assert run("damaged") == 0
    checkpoints = tmp_path / "damaged" / "checkpoints"
    (checkpoints / "6" / "_CHECKPOINT_METADATA").write_text("{}")
    assert run("damaged") == 3
    told = capsys.readouterr().err
    assert "_CHECKPOINT_METADATA: 2 bytes" in told
    assert "--checkpoint.damaged previous" in told
    assert sorted(path.name for path in checkpoints.iterdir()) == ["4", "6"]
    assert run("damaged", "--checkpoint.damaged", "previous") == 0
    shown = capsys.readouterr().out
    assert "step 6 is damaged, trying the one before" in shown
    assert "step 6 is set aside as 6.damaged" in shown
    assert "resumes at step 4" in shown
    assert sorted(path.name for path in checkpoints.iterdir()) == ["4", "6", "6.damaged"]


def test_another_corpus_is_refused(run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 500)
    words = ("--data.kind", "text", "--data.path", str(text), "--train.steps", "2")
    assert run("text", *words) == 0
    text.write_text("abcdefgi" * 500)
    assert run("text", *words) == 2
    assert "the corpus has changed since the checkpoint" in capsys.readouterr().err


def test_a_changed_configuration_is_told_or_refused(run, capsys):
    assert run("changed", "--train.steps", "2") == 0
    assert run("changed", "--train.steps", "3", "--strategy", "zero1") == 0
    assert (
        "note: config, strategy changed since the checkpoint at step 2" in capsys.readouterr().out
    )
    assert run("changed", "--train.steps", "3", "--model.width", "128") == 2
    assert "the checkpoint does not fit this run" in capsys.readouterr().err


@pytest.mark.long
def test_a_stated_step(run, uninterrupted, tmp_path, capsys):
    assert run("stated", *EVERY_TWO) == 0
    assert names(tmp_path / "stated") == ["2", "4", "6"]
    assert run("stated", *EVERY_TWO, "--checkpoint.step", "3") == 2
    assert "one of [2, 4, 6]" in capsys.readouterr().err
    assert run("stated", *EVERY_TWO, "--checkpoint.step", "2") == 0
    shown = capsys.readouterr().out
    assert "resumes at step 2" in shown
    assert "step 6 is set aside as 6.superseded" in shown
    assert names(tmp_path / "stated") == ["2", "4", "4.superseded", "6", "6.superseded"]
    assert losses(tmp_path / "stated") == uninterrupted
    assert (
        run("stated", *EVERY_TWO, "--checkpoint.step", "2", "--train.steps", "7") == 0
    )  # the same command again
    assert "resumes at step 6" in capsys.readouterr().out
    assert names(tmp_path / "stated") == ["4", "4.superseded", "6", "6.superseded", "7"]
    assert run("nothing", "--checkpoint.step", "2") == 2
    assert "there is no checkpoint yet" in capsys.readouterr().err


def test_a_stated_step_that_is_damaged_is_never_replaced(run, tmp_path, capsys):
    assert run("stated", *EVERY_TWO) == 0
    (tmp_path / "stated" / "checkpoints" / "4" / "manifest.json").unlink()
    words = ("--checkpoint.step", "4", "--checkpoint.damaged", "previous")
    assert run("stated", *EVERY_TWO, *words) == 3
    told = capsys.readouterr().err
    assert "manifest.json: missing" in told
    assert "choose another step" in told
    assert names(tmp_path / "stated") == ["2", "4", "6"]


def test_a_run_that_is_refused_renames_nothing(run, tmp_path, capsys):
    assert run("refused", *EVERY_TWO) == 0
    assert (
        run("refused", *EVERY_TWO, "--checkpoint.step", "2", "--train.global_batch_size", "16") == 2
    )
    (tmp_path / "refused" / "checkpoints" / "6" / "manifest.json").unlink()
    words = ("--checkpoint.damaged", "previous")
    assert run("refused", *EVERY_TWO, *words, "--model.width", "32") == 2
    assert names(tmp_path / "refused") == ["2", "4", "6"]
    assert run("refused", *EVERY_TWO, *words, "--checkpoint.verify", "False") == 0
    assert names(tmp_path / "refused") == ["2", "4", "6", "6.damaged"]


@pytest.mark.long
def test_a_save_that_failed_is_made_up_for_at_once(run, tmp_path, capsys, monkeypatch):
    """And a disk that stays full ends the run by the next step."""
    write_manifest, failing = store.write_manifest, [True]

    def full_once(*arguments):
        if failing:
            failing.pop()
            raise OSError(28, "No space left on device")
        write_manifest(*arguments)

    monkeypatch.setattr(store, "write_manifest", full_once)
    slow_down(monkeypatch)
    assert run("once", *EVERY_TWO) == 0
    shown = capsys.readouterr().out
    assert "warning: step 2 was not saved; saving step 3 instead" in shown
    assert "No space left on device" in shown
    assert names(tmp_path / "once") == ["3", "4", "6"]
    failing[:] = [True] * 9
    assert run("always", *EVERY_TWO) == 1
    assert re.search("a checkpoint could not be written[^$]*No space left", capsys.readouterr().err)
    assert [record["step"] for record in records(tmp_path / "always")][-1] < 6


def slow_down(monkeypatch):
    """Steps long enough for a background save to come to its end."""
    put = CompiledStep.put
    monkeypatch.setattr(
        CompiledStep, "put", lambda *arguments: (time.sleep(0.5), put(*arguments))[1]
    )


def test_where_none_is_good_none_is_touched(run, tmp_path, capsys):
    assert run("damaged", *EVERY_TWO) == 0
    for step in ("2", "4", "6"):
        shutil.rmtree(tmp_path / "damaged" / "checkpoints" / step / "state")
    assert run("damaged", *EVERY_TWO, "--checkpoint.damaged", "previous") == 3
    assert "no checkpoint is as it was written" in capsys.readouterr().err
    assert names(tmp_path / "damaged") == ["2", "4", "6"]


def test_what_merely_is_named_like_a_step(run, tmp_path, capsys):
    checkpoints = tmp_path / "foreign" / "checkpoints"
    (checkpoints / "0").mkdir(parents=True)
    (checkpoints / "3").symlink_to(tmp_path)
    (checkpoints / "4").write_text("")
    assert run("foreign", "--train.steps", "1") == 2
    told = capsys.readouterr().err
    assert "something else is where a later step will be" in told
    assert f"{checkpoints}/3, {checkpoints}/4" in told
    (checkpoints / "3").unlink()
    (checkpoints / "4").unlink()
    assert run("foreign", "--train.steps", "1") == 0
    shown = capsys.readouterr().out
    assert f"{checkpoints}/0 holds no checkpoint; it is left alone" in shown
    assert "starting afresh" in shown
    assert names(tmp_path / "foreign") == ["0", "1"]


def test_unverified(run, capsys):
    assert run("quick", "--train.steps", "2") == 0
    capsys.readouterr()
    assert run("quick", "--train.steps", "3", "--checkpoint.verify", "False") == 0
    assert "step 2 is not verified (checkpoint.verify)" in capsys.readouterr().out


def test_what_a_restore_takes_is_said_before(run, capsys):
    assert run("told", "--train.steps", "2") == 0
    assert run("told", "--train.steps", "3") == 0
    shown = capsys.readouterr().out
    assert "step 2 is as it was written:" in shown
    assert "of host memory at a time, into" in shown


def test_another_optimizer_is_refused_path_by_path(run, capsys):
    assert run("other", "--train.steps", "2") == 0
    assert run("other", "--train.steps", "3", "--optimizer.name", "lion") == 2
    told = capsys.readouterr().err
    assert "opt_state/0/nu/" in told
    assert "expected nothing, got float32" in told


@pytest.mark.long
def test_another_dtype_is_refused_unless_allowed(run, tmp_path, capsys):
    narrow = ("--train.steps", "3", "--precision.param", "bfloat16")
    assert run("cast", "--train.steps", "2") == 0
    assert run("cast", *narrow) == 2
    told = capsys.readouterr().err
    assert "expected bfloat16" in told
    assert "--checkpoint.allow_cast True" in told
    assert run("cast", *narrow, "--checkpoint.allow_cast", "True") == 0
    assert "cast: params/" in capsys.readouterr().out
    assert len(records(tmp_path / "cast")) == 3


def test_another_tokenizer_is_refused(run, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("to be, or not to be " * 100)
    trained = train_bpe(["to be, or not to be"], 270)
    (tmp_path / "tokenizer.json").write_bytes(trained.files["tokenizer.json"])
    words = (
        "--data.kind",
        "text",
        "--data.path",
        str(tmp_path / "text.txt"),
        "--model.vocab_size",
        "300",
    )
    assert run("words", "--train.steps", "1", *words) == 0
    assert (
        run(
            "words",
            "--train.steps",
            "2",
            *words,
            "--data.tokenizer",
            str(tmp_path / "tokenizer.json"),
        )
        == 2
    )
    assert "the tokenizer has changed since the checkpoint" in capsys.readouterr().err


@pytest.mark.long
def test_saving_by_the_clock(run, tmp_path):
    words = (
        "--checkpoint.every",
        "None",
        "--checkpoint.every_minutes",
        "0",
        "--checkpoint.keep",
        "9",
    )
    assert run("clock", *words) == 0
    assert names(tmp_path / "clock") == ["1", "2", "3", "4", "5", "6"]
    blocked = [record["checkpoint_blocked_s"] for record in records(tmp_path / "clock")]
    assert blocked[0] is None
    assert all(seconds > 0 for seconds in blocked[1:])
    assert run("hour", "--checkpoint.every", "None", "--checkpoint.every_minutes", "60") == 0
    assert names(tmp_path / "hour") == ["6"]
    assert {record["checkpoint_blocked_s"] for record in records(tmp_path / "hour")} == {None}


def test_some_are_kept_for_good(run, tmp_path):
    assert (
        run(
            "kept",
            "--checkpoint.every",
            "1",
            "--checkpoint.keep",
            "1",
            "--checkpoint.keep_every",
            "3",
        )
        == 0
    )
    assert names(tmp_path / "kept") == ["3", "6"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_compiles_or_saves(run, uninterrupted, tmp_path, monkeypatch, number):
    """Asked before the first step, and again while step 4 is written."""
    with monkeypatch.context() as patched:
        train = Training.train
        patched.setattr(
            Training, "train", lambda self: (signal.raise_signal(number), train(self))[1]
        )
        assert run("signal") == 75
    assert len(names(tmp_path / "signal")) == 1
    with monkeypatch.context() as patched:
        finish = CheckpointStore._finish

        def interrupted(self, step, *rest):
            if step == 4:
                signal.raise_signal(number)
            finish(self, step, *rest)

        patched.setattr(CheckpointStore, "_finish", interrupted)
        assert run("signal") == 75
    assert run("signal") == 0
    assert losses(tmp_path / "signal") == uninterrupted
