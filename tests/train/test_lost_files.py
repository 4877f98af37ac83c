"""Runs whose directory is lost, or whose token shards shrink, while they train.

The runs share the compiled step of `conftest.py`.
"""

import contextlib
import json
import re
import shutil

import pytest
from runs import losses
from test_loop import command, finish

from fsdp_jax.checkpoint import Lease
from fsdp_jax.cli.main import main
from fsdp_jax.train import loop


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def at_step(monkeypatch, number, act):
    """Acts before a step is recorded."""
    record = loop.Training._record_step

    def acting(self, pending):
        if pending.step == number:
            act()
        return record(self, pending)

    monkeypatch.setattr(loop.Training, "_record_step", acting)


def remove(run, _):
    shutil.rmtree(run)


def move(run, aside):
    run.rename(aside)


def replace(run, aside):
    """Moves the run away; another has begun in its place, with steps of the same numbers."""
    run.rename(aside)
    shutil.copytree(aside, run)
    return Lease(run, process=7)


@pytest.mark.parametrize("lose", [remove, move, replace])
def test_a_run_that_loses_its_directory_ends_and_changes_nothing(
    run, tmp_path, uninterrupted, monkeypatch, capsys, lose
):
    directory, aside = tmp_path / "run", tmp_path / "aside"
    lost = {}

    def act():
        if (other := lose(directory, aside)) is not None:
            others.enter_context(other)
        lost.update(contents(directory))

    with contextlib.ExitStack() as others:
        patched = others.enter_context(monkeypatch.context())
        at_step(patched, 4, act)
        saved = "--checkpoint.every 2 --checkpoint.keep 1 --checkpoint.asynchronous False"
        assert run("run", *saved.split()) == 1
        assert contents(directory) == lost
    error = capsys.readouterr().err
    assert error.startswith(f"error: this run has lost its directory\n  where:    {directory}\n")
    assert (", process 7, since " in error) == (lose is replace)
    assert directory.exists() == (lose is replace)
    # Where it was moved to, the same command goes on.
    if lose is not remove:
        assert f"the run's own is at {aside}" in error
        assert [path.name for path in (aside / "checkpoints").iterdir()] == ["2"]
    if lose is move:
        assert run("aside") == 0
        assert losses(aside) == uninterrupted


SHRINK = """
import os
from fsdp_jax.train.loop import Training
record = Training._record_step
def act(self, pending):
    if pending.step == 2:
        os.truncate(self.data.loaded.shards.folder / "train-00000.tokens", 100)
    return record(self, pending)
Training._record_step = act
"""


@pytest.mark.long
def test_token_shards_that_shrink_end_the_run(run, tmp_path, capsys):
    """In a process of its own, which would be killed if the file was mapped."""
    (tmp_path / "text.txt").write_text("to be, or not to be " * 1000)
    shards = tmp_path / "shards"
    words = ["tokenize", str(tmp_path / "text.txt"), "--to", str(shards), "--tokenizer", "bytes"]
    assert main(words) == 0
    size = (shards / "train-00000.tokens").stat().st_size
    words = f"--data.kind tokens --data.path {shards} --train.steps 1000 --train.eval_every None"
    ((code, shown),) = finish(command(run, "run", *words.split(), fault=SHRINK))
    assert code == 3, shown
    block = r"error: a file of token shards is not as it was written\n  where: +(.*)\n"
    block += (
        rf"  expected: {size:,} bytes\n  got: +100 bytes: it was cut short while it was in use\n"
    )
    assert re.search(block, shown), shown
    assert "Traceback" not in shown
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] > 1
