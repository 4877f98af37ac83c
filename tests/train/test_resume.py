"""Which checkpoint a run resumes from, and what it refuses to resume from.

The runs share the compiled step of `conftest.py`; one has another strategy.
"""

import json
import re
import shutil
import signal
import time

import pytest
from flips import flip_byte
from runs import losses, records

from fsdp_jax.checkpoint import CheckpointStore, store
from fsdp_jax.cli.main import main
from fsdp_jax.io.digests import sealed_text
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.train import resume
from fsdp_jax.train.loop import Training
from fsdp_jax.train.resume import Saving
from fsdp_jax.train.signals import Agreement

EVERY_TWO = ("--checkpoint.every", "2")


def names(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_a_damaged_checkpoint_stops_the_run_or_is_set_aside(run, copied, capsys):
    directory = copied("damaged")
    (directory / "checkpoints" / "6" / "_CHECKPOINT_METADATA").write_text("{}")
    assert run("damaged") == 3
    error = capsys.readouterr().err
    assert "_CHECKPOINT_METADATA: 2 bytes" in error
    assert "--checkpoint.damaged previous" in error
    assert names(directory) == ["2", "4", "6"]
    assert run("damaged", "--checkpoint.damaged", "previous") == 0
    shown = capsys.readouterr().out
    assert "step 6 is damaged, trying the one before" in shown
    assert "step 6 is set aside as 6.damaged" in shown
    assert "resumes at step 4" in shown
    assert names(directory) == ["2", "4", "6", "6.damaged"]


FOREIGN = [
    ({"data": {"position": {"next_index": 10**30}}}, "the saved position is none"),
    ({"data": {"position": {"next_index": -1}}}, "the saved position is none"),
    ({"data": {"data": 7}}, "the saved digests are none"),
    ({"metadata": {"returns": {"4": "often"}}}, "metadata, returns"),
    ({"metadata": {"returns": [4]}}, "metadata, returns"),
    ({"keys": {"rng": "no generator"}}, "keys, rng"),
    ({"keys": {"rng": 7}}, "keys, rng"),
    ({"leaves": {"recent_losses/losses": "float99[64]"}}, "numbers that no save writes"),
]


def change_manifest(directory, **sections):
    """Changes fields of the manifest of step 6; its digest fits it."""
    manifest = directory / "checkpoints" / "6" / "manifest.json"
    body = json.loads(manifest.read_text())
    for section, values in sections.items():
        assert section not in ("keys", "metadata") or body[section].keys() & values.keys()
        body[section] |= values
    manifest.write_text(sealed_text(body))


def test_a_manifest_of_another_program_is_damage(run, copied, capsys):
    directory = copied("foreign")
    manifest = directory / "checkpoints" / "6" / "manifest.json"
    whole, wrong = manifest.read_text(), []
    for change, says in FOREIGN:
        manifest.write_text(whole)
        change_manifest(directory, **change)
        code, error = run("foreign", "--train.steps", "7"), capsys.readouterr().err
        if code != 3 or error.count("error: ") != 1 or says not in error:
            wrong.append((change, code, error))
    assert wrong == []


def test_a_state_of_another_step_is_damage(run, copied, capsys):
    """As its folder and manifest were numbered anew."""
    steps = copied("renumbered") / "checkpoints"
    step = (steps / "6").rename(steps / "8")
    body = json.loads((step / "manifest.json").read_text())
    (step / "manifest.json").write_text(sealed_text(body | {"step": 8}))
    assert run("renumbered", "--train.steps", "9") == 3
    assert re.search("checkpoints/8, step\n +expected: 8\n +got: +6", capsys.readouterr().err)


def test_a_folder_in_the_place_of_a_file_of_the_run_is_refused(run, copied, capsys):
    for name in ("config.yaml", "layout.json"):
        file = copied(f"blocked-{name}") / name
        file.unlink()
        file.mkdir()
        assert run(file.parent.name, "--train.steps", "7") == 2
        error = capsys.readouterr().err
        assert error.startswith("error: a folder is in the place of a file of the run\n")
        assert f"where:    {file}\n" in error
        # What reads the checkpoints alone does without it.
        assert main(["verify", str(file.parent)]) == 0


def test_a_changed_configuration_is_told_or_refused(run, copied, capsys):
    copied("changed")
    faster = ("--optimizer.learning_rate", "6e-3")
    assert run("changed", "--train.steps", "7", "--strategy", "no_shard", *faster) == 0
    shown = capsys.readouterr().out
    assert "note: config, strategy changed since the checkpoint at step 6" in shown
    assert "changed since the run last started:" in shown
    assert "strategy full_shard -> no_shard" in shown
    assert "note: the learning rate goes on at 0.006; it would have been 0.003 with" in shown
    # What a restore reads is said before it begins.
    assert "step 6 is undamaged:" in shown
    assert "of host memory at a time, into" in shown
    assert run("changed", "--train.steps", "8", "--model.width", "128") == 2
    assert "the checkpoint does not fit this run" in capsys.readouterr().err


@pytest.mark.long
def test_a_stated_step(run, copied, uninterrupted, capsys):
    directory = copied("stated")
    assert run("stated", *EVERY_TWO, "--checkpoint.step", "3") == 2
    assert "one of [2, 4, 6]" in capsys.readouterr().err
    assert run("stated", *EVERY_TWO, "--checkpoint.step", "2") == 0
    shown = capsys.readouterr().out
    assert "resumes at step 2" in shown
    assert "step 6 is set aside as 6.superseded" in shown
    assert names(directory) == ["2", "4", "4.superseded", "6", "6.superseded"]
    assert losses(directory) == uninterrupted
    # The same command again resumes from the newest step.
    assert run("stated", *EVERY_TWO, "--checkpoint.step", "2", "--train.steps", "7") == 0
    assert "resumes at step 6" in capsys.readouterr().out
    assert names(directory) == ["4", "4.superseded", "6", "6.superseded", "7"]
    assert run("nothing", "--checkpoint.step", "2") == 2
    assert "there is no checkpoint yet" in capsys.readouterr().err


def test_a_stated_step_that_is_damaged_is_never_replaced(run, copied, capsys):
    directory = copied("stated")
    (directory / "checkpoints" / "4" / "manifest.json").unlink()
    overrides = ("--checkpoint.step", "4", "--checkpoint.damaged", "previous")
    assert run("stated", *overrides) == 3
    error = capsys.readouterr().err
    assert "manifest.json: missing" in error
    assert "choose another step" in error
    assert names(directory) == ["2", "4", "6"]


def test_a_run_that_is_refused_renames_nothing(run, copied, capsys):
    directory = copied("refused")
    assert run("refused", "--checkpoint.step", "2", "--train.global_batch_size", "16") == 2
    (directory / "checkpoints" / "6" / "manifest.json").unlink()
    previous = ("--checkpoint.damaged", "previous")
    assert run("refused", *previous, "--model.width", "32") == 2
    assert names(directory) == ["2", "4", "6"]
    capsys.readouterr()
    assert run("refused", *previous, "--checkpoint.verify", "False") == 0
    assert "step 4 is not verified (checkpoint.verify)" in capsys.readouterr().out
    assert names(directory) == ["2", "4", "6", "6.damaged"]


def test_where_none_is_good_none_is_touched(run, copied, capsys):
    directory = copied("damaged")
    for step in ("2", "4", "6"):
        shutil.rmtree(directory / "checkpoints" / step / "state")
    assert run("damaged", "--checkpoint.damaged", "previous") == 3
    assert "every checkpoint is damaged" in capsys.readouterr().err
    assert names(directory) == ["2", "4", "6"]


def test_another_optimizer_is_refused_path_by_path(run, copied, capsys):
    copied("other")
    assert run("other", "--train.steps", "7", "--optimizer.name", "lion") == 2
    error = capsys.readouterr().err
    assert "opt_state/0/nu/" in error
    assert "expected nothing, got float32" in error


@pytest.mark.long
def test_another_dtype_is_refused_unless_allowed(run, copied, capsys):
    directory = copied("cast")
    narrow = ("--train.steps", "7", "--precision.param", "bfloat16")
    assert run("cast", *narrow) == 2
    error = capsys.readouterr().err
    assert "expected bfloat16" in error
    assert "--checkpoint.allow_cast True" in error
    assert run("cast", *narrow, "--checkpoint.allow_cast", "True") == 0
    assert "cast: params/" in capsys.readouterr().out
    assert len(records(directory)) == 7


def test_what_has_to_match_the_checkpoint_is_refused(run, copied, capsys):
    directory = copied("other")
    for name, (what, _) in resume.MUST_MATCH.items():
        change_manifest(directory, metadata={name: "another"})
        assert run("other", "--train.steps", "7") == 2
        assert f"error: {what} has changed since the checkpoint\n" in capsys.readouterr().err
        shutil.rmtree(directory)
        copied("other")


def test_token_shards_of_another_text_or_damaged_are_refused(run, tmp_path, capsys, monkeypatch):
    def tokenize(text):
        (tmp_path / "text.txt").write_text(text * 100)
        words = ["tokenize", str(tmp_path / "text.txt"), "--to", str(shards)]
        assert main([*words, "--tokenizer", "bytes"]) == 0

    shards = tmp_path / "shards"
    overrides = ["--data.kind", "tokens", "--data.path", str(shards)]
    overrides += ["--checkpoint.every", "1", "--checkpoint.asynchronous", "False"]
    tokenize("to be, or not to be ")
    assert run("run", *overrides, "--train.steps", "1") == 0

    # One bit flips, to another letter: found at once, or in the background before the next save.
    flip_byte(shards / "train-00000.tokens")
    assert run("run", *overrides, "--train.steps", "2") == 3
    assert re.search(r"not as it was written\n.*train-00000\.tokens", capsys.readouterr().err)
    monkeypatch.setattr("fsdp_jax.data.shards.AT_ONCE", 0)
    assert run("run", *overrides, "--train.steps", "2") == 3
    assert re.search(r"not as it was written\n.*train-00000\.tokens", capsys.readouterr().err)
    assert names(tmp_path / "run") == ["1"]
    # The same shards again, compared in the background; and then others of the same size.
    tokenize("to be, or not to be ")
    assert run("run", *overrides, "--train.steps", "2") == 0
    shutil.rmtree(shards)
    tokenize("to be, or not to see")
    assert run("run", *overrides, "--train.steps", "3") == 2
    assert "the corpus has changed since the checkpoint" in capsys.readouterr().err


@pytest.mark.long
def test_saving_by_the_clock_and_keeping_some_for_good(run, tmp_path, monkeypatch):
    check, checked = resume.not_finite, 0.05

    def slow(arrays):
        time.sleep(checked)
        return check(arrays)

    monkeypatch.setattr(resume, "not_finite", slow)
    by_clock = "--checkpoint.every None --checkpoint.every_minutes 0"
    some = "--checkpoint.keep 1 --checkpoint.keep_every 3"
    assert run("clock", *by_clock.split(), *some.split()) == 0
    assert names(tmp_path / "clock") == ["3", "6"]
    # Every step was checked and saved, which blocked the next.
    blocked = [record["checkpoint_blocked_s"] for record in records(tmp_path / "clock")]
    assert blocked[0] is None
    assert all(seconds > checked for seconds in blocked[1:])
    assert run("hour", *by_clock.replace("0", "60").split()) == 0
    assert names(tmp_path / "hour") == ["6"]
    assert {record["checkpoint_blocked_s"] for record in records(tmp_path / "hour")} == {None}


def test_a_save_that_is_asked_for_before_an_evaluation_is_made(run, tmp_path, monkeypatch):
    """Of several processes an answer comes a call later, which may be in an evaluation."""
    previous = []

    def answer_later(self, *flags):
        previous.append(flags)
        if len(previous) == 1:
            return (False,) * len(flags)
        return previous[-2]

    due = iter([False, True])  # after step 2, which is evaluated
    monkeypatch.setattr(Agreement, "__call__", answer_later)
    monkeypatch.setattr(Saving, "timed_save_is_due", lambda self: next(due, False))
    keys = "--checkpoint.every None --train.eval_every 2 --train.steps 5"
    assert run("late", *keys.split()) == 0
    assert names(tmp_path / "late") == ["3", "5"]


@pytest.mark.long
def test_a_save_that_failed_is_made_up_for_at_once(run, tmp_path, capsys, monkeypatch):
    """And a disk that stays full ends the run by the next step."""
    write_manifest, failing = store.write_manifest, [True]

    def full_once(*arguments):
        if failing and failing.pop():
            raise OSError(28, "No space left on device")
        write_manifest(*arguments)

    monkeypatch.setattr(store, "write_manifest", full_once)
    slow_down(monkeypatch)
    assert run("once", *EVERY_TWO) == 0
    shown = capsys.readouterr().out
    assert "warning: step 2 was not saved; saving step 3 instead" in shown
    assert "No space left on device" in shown
    assert names(tmp_path / "once") == ["3", "4", "6"]
    failing[:] = [True] * 9 + [False]  # the save of step 2 is good
    assert run("always", *EVERY_TWO, "--train.steps", "9") == 1
    error = capsys.readouterr().err
    assert re.search("a checkpoint could not be written[^$]*No space left[^$]*free disk", error)
    assert names(tmp_path / "always") == ["2"], "nothing that was unfinished is left"
    assert records(tmp_path / "always")[-1]["step"] < 9
    failing.clear()
    assert run("always", *EVERY_TWO) == 0
    assert "resumes at step 2" in capsys.readouterr().out


def slow_down(monkeypatch):
    """Steps long enough for a background save to come to its end."""
    put = CompiledStep.put
    monkeypatch.setattr(
        CompiledStep, "put", lambda *arguments: (time.sleep(0.5), put(*arguments))[1]
    )


def test_what_merely_is_named_like_a_step(run, tmp_path, capsys):
    checkpoints = tmp_path / "foreign" / "checkpoints"
    (checkpoints / "0").mkdir(parents=True)
    (checkpoints / "3").symlink_to(tmp_path)
    (checkpoints / "4").write_text("")
    assert run("foreign", "--train.steps", "1") == 2
    error = capsys.readouterr().err
    assert "something else has the name of a later step" in error
    assert f"{checkpoints}/3, {checkpoints}/4" in error
    (checkpoints / "3").unlink()
    (checkpoints / "4").unlink()
    assert run("foreign", "--train.steps", "1") == 0
    shown = capsys.readouterr().out
    assert f"{checkpoints}/0 holds no checkpoint; it is left alone" in shown
    assert "starts at step 0" in shown
    assert names(tmp_path / "foreign") == ["0", "1"]


def test_a_signal_while_it_compiles_or_saves(run, uninterrupted, tmp_path, monkeypatch):
    """The run is stopped before the first step, and again while step 4 is written."""
    with monkeypatch.context() as patched:
        train = Training.train

        def interrupted_start(self):
            signal.raise_signal(signal.SIGINT)
            return train(self)

        patched.setattr(Training, "train", interrupted_start)
        assert run("signal") == 75
    assert len(names(tmp_path / "signal")) == 1
    with monkeypatch.context() as patched:
        finish = CheckpointStore._finish_save

        def interrupted_save(self, step, *rest):
            if step == 4:
                signal.raise_signal(signal.SIGTERM)
            finish(self, step, *rest)

        patched.setattr(CheckpointStore, "_finish_save", interrupted_save)
        assert run("signal") == 75
    assert run("signal") == 0
    assert losses(tmp_path / "signal") == uninterrupted
