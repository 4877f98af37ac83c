"""A tiny run, started as the command line does, and one finished run that tests copy."""

import contextlib
import io
import shutil

import pytest
from runs import losses

from fsdp_jax.cli.main import main

CONFIG = """
model: {layers: 2, width: 64, heads: 2}
units: {classes: [Block]}
optimizer: {learning_rate: 3.0e-3, warmup_steps: 2}
data: {sequence_length: 16}
train: {steps: 6, global_batch_size: 8, devices: 8, log_every: 2, sample: 0,
        eval_every: 4, eval_batches: 2}
checkpoint: {every: 4}
"""


@pytest.fixture
def run(tmp_path):
    """Trains the tiny configuration, with overrides as in a shell, in the directory of a name."""
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG)

    def start(name, *overrides):
        words = [word for override in overrides for word in override.split()]
        return main(["train", str(config), "--output", str(tmp_path / name), *words])

    start.config, start.directory = config, tmp_path
    return start


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The directory of a finished run with checkpoints 2, 4 and 6, and `log.txt` of its output."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    config = directory.with_name("tiny.yaml")
    config.write_text(CONFIG)
    overrides = ["--checkpoint.every", "2", "--train.sample", "20"]
    with contextlib.redirect_stdout(io.StringIO()) as log:
        assert main(["train", str(config), "--output", str(directory), *overrides]) == 0
    directory.with_name("log.txt").write_text(log.getvalue())
    return directory


@pytest.fixture
def copied(finished, run):
    """Copies the finished run to the directory of that name, where `run` resumes it."""

    def copy(name):
        return shutil.copytree(finished, run.directory / name)

    return copy


@pytest.fixture
def uninterrupted(finished):
    """(step, loss, gradient norm) of every step of the finished run."""
    return losses(finished)
