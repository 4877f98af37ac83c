"""Starts a run: joins the cluster, locks the output directory, and resumes or initializes."""

import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax.checkpoint import CheckpointStore, Lease
from fsdp_jax.checkpoint.memory_copies import MemoryCopies
from fsdp_jax.errors import CheckpointError, ConfigError
from fsdp_jax.io.atomic import write_durably
from fsdp_jax.launch import (
    NativeOutput,
    StepTimeout,
    fail_together,
    is_lead,
    join_cluster,
    leave_cluster,
    require_same,
)
from fsdp_jax.planner import peak_flops
from fsdp_jax.sharding.report import layout_json
from fsdp_jax.step.kept_programs import keeping
from fsdp_jax.step.state import state_like
from fsdp_jax.trackers import Trackers
from fsdp_jax.train.build import Run, build, check_activation_names, start_devices
from fsdp_jax.train.compiled_programs import keep_compiled_programs
from fsdp_jax.train.config import ClusterConfig, Config
from fsdp_jax.train.config_file import KEYS, config_digest, dump_config, key_values, load_config
from fsdp_jax.train.console import RunLog, Screen, banner
from fsdp_jax.train.dataset import Data, open_data
from fsdp_jax.train.huggingface import write_config_and_tokenizer
from fsdp_jax.train.loop import Training
from fsdp_jax.train.memory import OutOfMemory, check_fits
from fsdp_jax.train.metrics import Meter, utc_timestamp
from fsdp_jax.train.optimizers import learning_rates
from fsdp_jax.train.planning import propose_fixes_on, remaking_of
from fsdp_jax.train.profiling import StepProfile
from fsdp_jax.train.resume import MUST_MATCH, Resumer, Saving
from fsdp_jax.train.signals import Agreement, StopSignal


def train(config: Config) -> int:
    """Trains; returns 0 when all steps are done, 75 when a signal stopped the run after saving."""
    started = utc_timestamp()
    start_devices(config.train.devices)
    with NativeOutput() as native:
        join_cluster(**joining(config.cluster, key_values(config)), native_output=native)
        # Errors are made known before the stack unwinds, which may wait for other processes.
        with ExitStack() as stack, fail_together():
            code = _build_and_train(config, stack, started, native)
        leave_cluster()
    return code


def joining(cluster: ClusterConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the arguments of `join_cluster`: who joins, and what all have in common.

    `values`: of the configuration, by key.
    """
    # Processes may have addresses of their own, and paths of files whose digests are compared.
    differ = {name for name, key in KEYS.items() if key.note.may_differ}
    facts = {
        key: value
        for key, value in values.items()
        if key not in differ and not key.startswith("cluster.")
    }
    return {
        "coordinator": cluster.coordinator,
        "processes": cluster.processes,
        "process": cluster.process,
        "detect": cluster.detect,
        "timeout": cluster.timeout,
        "facts": facts,
        "secret_file": cluster.secret,
    }


def _build_and_train(config: Config, stack: ExitStack, started: str, native: NativeOutput) -> int:
    """Builds the run, resumes it and trains; returns the exit code.

    `stack` ends what it starts, and `started` is when the run did, in UTC. What `native` holds is
    kept in the directory of the run, once this is locked.
    """
    output, weights = Path(config.output), config.model.weights

    # Build the objects of the run and lock its directory; nothing is allocated yet.
    stop = stack.enter_context(StopSignal())
    device_kind = jax.devices()[0].device_kind
    programs = keep_compiled_programs(config.train, config.output, key_values(config), device_kind)
    # Those that keep some agree on each of them: one that keeps none would not come.
    require_same("where compiled programs are from", {"use": programs.use})
    stack.enter_context(keeping(programs.kept))
    run = build(config)
    check_fits(run)
    check_activation_names(run)
    data = open_data(run, config.data, config.train, weights)
    stack.callback(data.loader.close)
    digests = {"data.path": data.loaded.digest, "data.tokenizer": data.tokenizer_digest}
    require_same("the data", digests | _loader_position(data))
    lease = _lock_output(output, stack)
    native.keep(lease.anchor / f"process-{jax.process_index()}.log")
    # Open its checkpoints and its output.
    kept = config.checkpoint
    store = CheckpointStore(
        output / "checkpoints",
        lease=lease,
        keep=kept.keep,
        keep_every=kept.keep_every,
        asynchronous=kept.asynchronous,
    )
    stack.enter_context(store)
    screen = Screen(config.train.steps, quiet=not is_lead())
    stack.callback(screen.end_bar)

    # Resume or initialize.
    training = _make_training(config, run, data, lease, store, stop, screen)
    memory = OutOfMemory(run, remaking_of(config, run), lease, screen.say)
    with memory.explained():
        memory.check_plan()
        training.resume(weights)
    resumed = training.progress.resumed
    require_same("the checkpoint", {"step": resumed} | _loader_position(data))

    # Describe the run in its directory, after resuming: a directory that is refused is unchanged.
    _say_changed_keys(output / "config.yaml", key_values(config), screen.say)
    described = banner(run, data.loaded.description, str(store.directory), weights, resumed)
    described["programs"] = programs.text
    if is_lead():
        _write_run_files(lease, dump_config(config), run, data, weights)
        # By path: a tracker may have processes of its own.
        training.log.trackers = Trackers(
            config.track,
            lease.directory,
            key_values(config),
            {
                "environment": "\n".join(f"{label}: {text}" for label, text in described.items()),
                "layout": str(run.sharded.layout),
            },
            step=training.progress.steps,
            say=screen.say,
        )
        stack.enter_context(training.log.trackers)
    if training.progress.steps < config.train.steps:
        training.log.note_start(started, resumed)
    screen.say_rows(described)
    with memory.explained():
        return training.train()


def _lock_output(output: Path, stack: ExitStack) -> Lease:
    """Locks the directory of the run, until the stack ends; raises ConfigError if it cannot be."""
    lease = Lease(output)
    try:
        stack.enter_context(lease)
    except OSError as error:
        raise ConfigError(
            "the output directory cannot be used", where="output", got=error
        ) from error
    # Process 0 removes the lease as it ends, and others may still check that it is held.
    stack.callback(require_same, "the end of writing", {})
    return lease


def _make_training(
    config: Config,
    run: Run,
    data: Data,
    lease: Lease,
    store: CheckpointStore,
    stop: StopSignal,
    screen: Screen,
) -> Training:
    """Makes the training of a run, with the metadata of its checkpoints and its measurements."""
    layout = run.sharded.layout
    metadata = {
        "config": config_digest(config),
        "strategy": layout.strategy.name,
        "mesh": layout.axes.shape,
        "corpus": data.loaded.digest,
        "tokenizer": data.tokenizer_digest,
        "lora_scale": run.adapters.scale,
    }
    kind = layout.mesh.devices.flat[0].device_kind
    peak = peak_flops(kind, config.precision.compute or jnp.float32)
    return Training(
        run=run,
        data=data,
        settings=config.train,
        saving=Saving(
            Resumer(store, config.checkpoint, screen.say),
            metadata,
            goes_back=config.train.spike == "back",
            copies=_memory_copies(config, run, lease, metadata),
        ),
        meter=Meter(run.work, learning_rates(run.schedule), layout.mesh.size, peak),
        log=RunLog(lease, screen),
        lease=lease,
        stop=stop,
        agree=Agreement(layout.mesh),
        step_timeout=StepTimeout(config.cluster.step_timeout),
        propose_fixes=partial(propose_fixes_on, remaking_of(config, run)),
        profile=StepProfile(config.profile, lease, screen.say),
    )


def _memory_copies(
    config: Config, run: Run, lease: Lease, metadata: dict[str, Any]
) -> MemoryCopies | None:
    """Opens the copies of the state in the hosts' memory; None where the run makes none."""
    kept = config.checkpoint
    if kept.memory_every is None:
        if kept.memory_neighbours or kept.memory_folder:
            text = "checkpoint.memory_neighbours and memory_folder have no effect: no copies are "
            warnings.warn(text + "made in memory; set checkpoint.memory_every", stacklevel=2)
        return None
    target = state_like(run.sharded.layout, lambda leaf: leaf.stored)
    facts = {name: metadata[name] for name in MUST_MATCH}  # as for a checkpoint; others may differ
    neighbours = kept.memory_neighbours
    return MemoryCopies(lease.anchor, kept.memory_folder, target, facts, neighbours=neighbours)


def _loader_position(data: Data) -> dict[str, Any]:
    """Reads the position of the loader, as a checkpoint has it, without the data's digests."""
    return {name: value for name, value in data.loader.get_state().items() if name != "data"}


def _write_run_files(lease: Lease, config: str, run: Run, data: Data, weights: str | None) -> None:
    """Writes config.yaml, config.json, the tokenizer and layout.json.

    What is beside the `weights` that the run starts from, such as a generation configuration, is
    kept.

    Raises ConfigError for a folder in the place of one, CheckpointError if the disk does not take
    them.
    """
    layout = json.dumps(layout_json(run.sharded.layout), indent=1)
    output = lease.anchor
    like = None if weights is None else Path(weights).expanduser()
    try:
        with lease.writing():
            write_durably(output / "config.yaml", config.encode())
            tokenizer = data.loaded.tokenizer
            write_config_and_tokenizer(output, run.model_config, tokenizer, like=like)
            write_durably(output / "layout.json", f"{layout}\n".encode())
    except IsADirectoryError as error:
        raise ConfigError(
            "a folder is in the place of a file of the run",
            where=lease.readable(str(error.filename2 or error.filename)),
            fix="move it away, or choose another `output`",
        ) from error
    except OSError as error:
        raise CheckpointError(
            "the files of the run cannot be written",
            where=str(error.filename or lease.directory),
            got=error,
            fix="free some space, or choose another `output`, and run the same command again",
        ) from error


def _say_changed_keys(file: Path, values: dict[str, Any], say: Callable[[str], None]) -> None:
    """Says which keys have other `values` than in `file`, with which the run last started."""
    if not file.is_file():
        return
    try:
        before = key_values(load_config(file))
    except ConfigError:
        say(f"note: {file} is of another release, so changed keys are not known")
        return
    changed = [
        f"{key} {before[key]} -> {value}" for key, value in values.items() if value != before[key]
    ]
    if changed:
        say(f"changed since the run last started: {', '.join(changed)}")
