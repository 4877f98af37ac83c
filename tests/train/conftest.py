"""A tiny run, started as the command line does, and what it measured."""

import pytest
from runs import losses

from fsdp_jax.cli.main import main

CONFIG = """
model: {layers: 2, width: 64, heads: 2}
units: {classes: [Block]}
optimizer: {learning_rate: 3.0e-3, warmup_steps: 2}
data: {sequence_length: 16}
train: {steps: 6, global_batch_size: 8, devices: 8, eval_every: 4, eval_batches: 2, log_every: 2, sample: 0}
checkpoint: {every: 4}
"""


@pytest.fixture
def run(tmp_path):
    """Runs the command on a tiny configuration, writing to a directory of that name; without a
    sample.
    """
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG)

    def start(name, *words):
        return main(["train", str(config), "--output", str(tmp_path / name), *words])

    start.config, start.directory = config, tmp_path
    return start


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What each step of a whole run measured."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    (directory / "tiny.yaml").write_text(CONFIG)
    assert main(["train", str(directory / "tiny.yaml"), "--output", str(directory)]) == 0
    return losses(directory)
