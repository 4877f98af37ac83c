"""Starts a run: joins the cluster, takes the lease on the output directory, and hands plain objects to the loop."""

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from fsdp_jax.checkpoint import CheckpointStore, Lease
from fsdp_jax.errors import ConfigError, message
from fsdp_jax.inspect import layout_json
from fsdp_jax.launch import is_lead, join_cluster, leave_cluster
from fsdp_jax.processes import anywhere
from fsdp_jax.train.config import digest, dump
from fsdp_jax.train.exchange import write_model
from fsdp_jax.train.initial import initial_params
from fsdp_jax.train.keys import Config
from fsdp_jax.train.loop import Training
from fsdp_jax.train.reading import open_data
from fsdp_jax.train.resume import Resuming
from fsdp_jax.train.run import build, lora_scale, start_devices
from fsdp_jax.train.screen import Screen
from fsdp_jax.train.stop import StopSignal


def train(config: Config) -> int:
    """Trains; returns the exit code: 0 when all steps are done, 75 when a signal stopped it after saving."""
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
        data = open_data(config.data, run, config.model.weights, seed=settings.seed, eval_limit=settings.eval_batches)
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
            run, data, store, stop, screen,
            output=output, lead=is_lead(), steps=settings.steps, seed=settings.seed, log_every=settings.log_every,
            eval_every=settings.eval_every, save_every=checkpoint.every,
            save_seconds=None if minutes is None else 60 * minutes, sample=settings.sample,
            config_hash=digest(config), lora_scale=lora_scale(config.lora),
        )  # fmt: skip
        resuming = Resuming(
            store,
            screen.say,
            is_lead(),
            step=checkpoint.step,
            damaged=checkpoint.damaged,
            verify=checkpoint.verify,
            allow_cast=checkpoint.allow_cast,
        )
        training.resume(resuming, partial(initial_params, config.model.weights, run.sharded, run.shape))
        if is_lead():  # after resuming: a directory that is refused stays as it was
            (output / "config.yaml").write_text(dump(config))
            write_model(output, run.shape, data.opened.tokenizer)
            (output / "layout.json").write_text(json.dumps(layout_json(run.sharded.layout), indent=1) + "\n")
        return training.train()


def _take(output: Path, stack: ExitStack) -> None:
    """Process 0 takes the lease; if it cannot, every process says so and ends, none waits."""
    refusal = None
    if is_lead():
        try:
            stack.enter_context(Lease(output))
        except ConfigError as error:
            refusal = error
        except OSError as error:
            refusal = ConfigError(message("the output directory cannot be used", where="output", got=error))
    if anywhere(refusal is not None):
        raise refusal or ConfigError(message("process 0 could not take the output directory", where="output"))
