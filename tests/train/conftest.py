"""A tiny run, started as the command line does, and one finished run that tests copy.

Runs whose steps are the same share the objects of one build, so that their programs are traced and
compiled once in a session.
"""

import contextlib
import io
import shutil
import warnings
from dataclasses import replace

import jax
import pytest
from runs import losses

from fsdp_jax.api import Sharded
from fsdp_jax.cli.main import main
from fsdp_jax.step.compiled_step import NonFiniteError
from fsdp_jax.train import build as building
from fsdp_jax.train import main as running
from fsdp_jax.train.config import Config
from fsdp_jax.train.optimizers import make_schedule

CONFIG = """
model: {layers: 2, width: 64, heads: 2}
units: {classes: [Block]}
optimizer: {learning_rate: 3.0e-3, warmup_steps: 2, schedule: constant}
data: {sequence_length: 16}
train: {steps: 6, global_batch_size: 8, devices: 8, log_every: 2, sample: 0,
        eval_every: 4, eval_batches: 2}
checkpoint: {every: 4}
"""

# Keys that decide on nothing that `build` makes, by section.
OF_THE_LOOP = {
    "train": ("log_every", "eval_every", "eval_batches", "sample", "seed", "check_replicas"),
    "data": ("path", "tokenizer", "held_out", "invalid"),
}
OTHER_SECTIONS = ("output", "checkpoint", "cluster", "track", "profile")
BUILT, INITIAL = {}, {}
INIT = Sharded.init


def step_of(config):
    """The configuration without what the programs of a run do not depend on."""
    defaults = Config()
    left_out = {name: getattr(defaults, name) for name in OTHER_SECTIONS}
    for section, keys in OF_THE_LOOP.items():
        same = {key: getattr(getattr(defaults, section), key) for key in keys}
        left_out[section] = replace(getattr(config, section), **same)
    if config.data.kind in ("text", "tokens"):
        left_out["data"] = replace(left_out["data"], kind=defaults.data.kind)
    # A test replaces the schedule by one that does not depend on them either.
    if config.optimizer.schedule == "constant" or building.make_schedule is not make_schedule:
        left_out["train"] = replace(left_out["train"], steps=defaults.train.steps)
    return replace(config, **left_out)


def build_once(config):
    """Builds a run, or returns that of an earlier test with the same step."""
    key = (step_of(config), building.make_schedule, building.make_loss)
    if key not in BUILT:
        BUILT[key] = building.build(config)
    run = BUILT[key]
    # A run that was ended has left steps in flight, which the next would judge as its own.
    with contextlib.suppress(NonFiniteError), warnings.catch_warnings(action="ignore"):
        run.step.finish()
    return run


def init_once(sharded, seed=0, params=None):
    """Makes a fresh state: a copy of that of an earlier test with the same object."""
    if params or all(sharded is not run.sharded for run in BUILT.values()):
        return INIT(sharded, seed, params)
    key = (id(sharded), seed)
    if key not in INITIAL:
        INITIAL[key] = INIT(sharded, seed)
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), INITIAL[key])


@contextlib.contextmanager
def sharing():
    """Has runs share what is built."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(running, "build", build_once)
        patched.setattr(Sharded, "init", init_once)
        yield


@pytest.fixture(autouse=True)
def shared_programs():
    """Of each test, so that those of other folders have the library's own methods."""
    with sharing():
        yield


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
    with sharing(), contextlib.redirect_stdout(io.StringIO()) as log:
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
