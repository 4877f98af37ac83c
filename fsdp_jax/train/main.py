"""Starts a run: joins the cluster, takes the lease on the output directory, and hands plain objects
to the loop.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

from fsdp_jax.checkpoint import CheckpointStore, Lease
from fsdp_jax.errors import ConfigError, message
from fsdp_jax.launch import is_lead, join_cluster, leave_cluster
from fsdp_jax.processes import anywhere
from fsdp_jax.sharding.report import layout_json
from fsdp_jax.train.build import build, lora_scale, start_devices
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import digest, dump, flat, load
from fsdp_jax.train.console import Screen
from fsdp_jax.train.dataset import open_data
from fsdp_jax.train.huggingface import write_model
from fsdp_jax.train.initial_weights import initial_params
from fsdp_jax.train.loop import Training
from fsdp_jax.train.resume import Resuming
from fsdp_jax.train.signals import StopSignal

T = TypeVar("T")


def train(config: Config) -> int:
    """Trains; returns the exit code: 0 when all steps are done, 75 when a signal stopped it after
    saving.
    """
    start_devices(config.train.devices)
    join_cluster(config.cluster.coordinator, config.cluster.processes, config.cluster.process)
    try:
        return _train(config)
    finally:
        leave_cluster()


def _train(config: Config) -> int:
    settings, checkpoint, output = config.train, config.checkpoint, Path(config.output)
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        run = build(config)
        reading = partial(open_data, config.data, run, config.model.weights)
        data = _together(
            "the data", lambda: reading(seed=settings.seed, eval_limit=settings.eval_batches)
        )
        stack.callback(data.loader.close)
        _take(output, stack)
        store = stack.enter_context(
            CheckpointStore(
                output / "checkpoints",
                keep=checkpoint.keep,
                keep_every=checkpoint.keep_every,
                asynchronous=checkpoint.asynchronous,
            )
        )
        screen = stack.enter_context(Screen(settings.steps, quiet=not is_lead()))
        minutes = checkpoint.every_minutes
        training = Training(
            run,
            data,
            store,
            stop,
            screen,
            output=output,
            lead=is_lead(),
            steps=settings.steps,
            seed=settings.seed,
            log_every=settings.log_every,
            eval_every=settings.eval_every,
            save_every=checkpoint.every,
            save_seconds=None if minutes is None else 60 * minutes,
            sample=settings.sample,
            weights=config.model.weights,
            config_hash=digest(config),
            lora_scale=lora_scale(config.lora),
        )
        resuming = Resuming(
            store,
            screen.say,
            is_lead(),
            step=checkpoint.step,
            damaged=checkpoint.damaged,
            verify=checkpoint.verify,
            allow_cast=checkpoint.allow_cast,
        )
        weights = partial(
            initial_params, config.model.weights, run.sharded, run.shape, verify=checkpoint.verify
        )
        training.resume(resuming, lambda: _together("the weights", weights))
        _say_changes(output / "config.yaml", config, screen.say)
        if is_lead():  # after resuming: a directory that is refused stays as it was
            (output / "config.yaml").write_text(dump(config))
            write_model(output, run.shape, data.loaded.tokenizer)
            (output / "layout.json").write_text(
                json.dumps(layout_json(run.sharded.layout), indent=1) + "\n"
            )
        return training.train()


def _say_changes(file: Path, config: Config, say: Callable[[str], None]) -> None:
    """Which keys are not what they were when the run last started."""
    if not file.is_file():
        return
    try:
        before = dict(flat(load(file)))
    except ConfigError:  # of another release
        return say(f"note: {file} is not of this release, so what has changed is not known")
    changed = [
        f"{key} {before[key]} -> {value}" for key, value in flat(config) if value != before[key]
    ]
    if changed:
        say(f"changed since the run last started: {', '.join(changed)}")


def _together(what: str, action: Callable[[], T]) -> T:
    """Runs an action in every process; where it fails in one, all end, and none waits for it."""
    done: list[T] = []
    failure = None
    try:
        done.append(action())
    except Exception as error:  # whatever it is, the others must hear of it
        failure = error
    if anywhere(failure is not None):
        raise failure or ConfigError(
            message(f"{what} could not be read, in another process", where=what)
        )
    return done[0]


def _take(output: Path, stack: ExitStack) -> None:
    """Process 0 takes the lease; if it cannot, every process says so and ends, none waits."""

    def take() -> None:
        if is_lead():
            try:
                stack.enter_context(Lease(output))
            except OSError as error:
                raise ConfigError(
                    message("the output directory cannot be used", where="output", got=error)
                ) from error

    _together("the output directory", take)
