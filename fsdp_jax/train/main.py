"""Starts a run: joins the cluster, locks the output directory, and resumes or initializes."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

from fsdp_jax.checkpoint import CheckpointStore, Lease
from fsdp_jax.errors import CheckpointError, ConfigError, message
from fsdp_jax.io.atomic import write_durably
from fsdp_jax.launch import is_lead, join_cluster, leave_cluster
from fsdp_jax.processes import anywhere
from fsdp_jax.sharding.report import layout_json
from fsdp_jax.train.build import Run, build, check_activation_names, start_devices
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import dump, load
from fsdp_jax.train.console import Screen
from fsdp_jax.train.dataset import Data, open_data
from fsdp_jax.train.huggingface import write_model
from fsdp_jax.train.initial_weights import initial_params
from fsdp_jax.train.loop import Training
from fsdp_jax.train.memory import check_fits
from fsdp_jax.train.resume import Resuming
from fsdp_jax.train.signals import StopSignal
from fsdp_jax.train.typed_keys import key_values

T = TypeVar("T")


def train(config: Config) -> int:
    """Trains; returns 0 when all steps are done, 75 when a signal stopped the run after saving."""
    start_devices(config.train.devices)
    join_cluster(config.cluster.coordinator, config.cluster.processes, config.cluster.process)
    try:
        with ExitStack() as stack:
            return _train(config, stack)
    finally:
        leave_cluster()


def _train(config: Config, stack: ExitStack) -> int:
    settings, checkpoint, output = config.train, config.checkpoint, Path(config.output)

    # Build the objects of the run and lock its directory; nothing is allocated yet.
    stop = stack.enter_context(StopSignal())
    run = build(config)
    check_fits(run)
    check_activation_names(run)
    open_all = partial(open_data, config.data, run, config.model.weights)
    data = _on_every_process(
        "the data", lambda: open_all(seed=settings.seed, eval_limit=settings.eval_batches)
    )
    stack.callback(data.loader.close)
    _lock(output, stack)
    store = stack.enter_context(
        CheckpointStore(
            output / "checkpoints",
            keep=checkpoint.keep,
            keep_every=checkpoint.keep_every,
            asynchronous=checkpoint.asynchronous,
        )
    )
    screen = stack.enter_context(Screen(settings.steps, quiet=not is_lead()))

    # Resume or initialize.
    training = Training(run, data, store, stop, screen)
    weights = partial(
        initial_params, config.model.weights, run.sharded, run.shape, verify=checkpoint.verify
    )
    training.resume(
        Resuming(store, checkpoint, screen.say), lambda: _on_every_process("the weights", weights)
    )

    # Describe the run in its directory, after resuming: a directory that is refused is unchanged.
    _say_changes(output / "config.yaml", config, screen.say)
    if is_lead():
        _describe(output, config, run, data)
    return training.train()


def _describe(output: Path, config: Config, run: Run, data: Data) -> None:
    """Writes the files that describe a run; of each, all of it or nothing.

    Raises:
        CheckpointError: the disk does not take them; nor would it take a checkpoint.

    """
    layout = json.dumps(layout_json(run.sharded.layout), indent=1)
    try:
        write_durably(output / "config.yaml", dump(config).encode())
        write_model(output, run.shape, data.loaded.tokenizer)
        write_durably(output / "layout.json", f"{layout}\n".encode())
    except OSError as error:
        what, where = "the files of the run cannot be written", str(error.filename or output)
        fix = "free some space, or choose another `output`, and run the same command again"
        raise CheckpointError(message(what, where=where, got=error, fix=fix)) from error


def _say_changes(file: Path, config: Config, say: Callable[[str], None]) -> None:
    """Prints the keys whose values differ from those that the run last started with."""
    if not file.is_file():
        return
    try:
        before = dict(key_values(load(file)))
    except ConfigError:
        say(f"note: {file} is of another release, so changed keys are not known")
        return
    changed = [
        f"{key} {before[key]} -> {value}"
        for key, value in key_values(config)
        if value != before[key]
    ]
    if changed:
        say(f"changed since the run last started: {', '.join(changed)}")


def _on_every_process(what: str, action: Callable[[], T]) -> T:
    """Returns the result of an action; if it raises in one process, it raises in all of them."""
    results: list[T] = []
    failure = None
    try:
        results.append(action())
    except Exception as error:  # of any kind: the other processes would wait
        failure = error
    if anywhere(failure is not None):
        other = message(f"{what} could not be read, in another process", where=what)
        raise failure or ConfigError(other)
    return results[0]


def _lock(output: Path, stack: ExitStack) -> None:
    """Takes the lease of the output directory in process 0; if that fails, all processes raise."""

    def take() -> None:
        if is_lead():
            try:
                stack.enter_context(Lease(output))
            except OSError as error:
                what = "the output directory cannot be used"
                raise ConfigError(message(what, where="output", got=error)) from error

    _on_every_process("the output directory", take)
