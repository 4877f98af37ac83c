"""From a configuration to the objects of a run. Nothing below here sees the configuration."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from fsdp_jax.api import Sharded, fully_shard
from fsdp_jax.compiled import Step
from fsdp_jax.data import Corpus, Loader, eval_batches, load_corpus, make_loader
from fsdp_jax.data.loader import Batch
from fsdp_jax.errors import ConfigError, message
from fsdp_jax.launch import use_virtual_devices
from fsdp_jax.mesh import make_mesh
from fsdp_jax.models import FAMILIES, next_token_loss
from fsdp_jax.models.attention import TILE, make_attention
from fsdp_jax.planner import Work, choose_platforms, parse_topology
from fsdp_jax.precision import Precision
from fsdp_jax.train.keys import Config, DataConfig, ModelConfig, OptimizerConfig, UnitsConfig
from fsdp_jax.units import Units


@dataclasses.dataclass(frozen=True)
class Run:
    """What a configuration describes, before any array exists.

    Attributes:
        schedule: optimizer updates so far -> learning rate.
        batch: shapes of the global batch; `step.lower(batch)` is the program that trains.
        flops_per_token: of forward and backward.
        work: what a step of it does, for a plan.

    """

    sharded: Sharded
    step: Step
    eval_step: Step
    schedule: optax.Schedule
    batch: dict[str, jax.ShapeDtypeStruct]
    flops_per_token: float
    work: Work


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run reads.

    Attributes:
        tokenizer: what turns its text into tokens, by name; part of what a checkpoint must have in common with a run.
        evaluation: makes an iterator over held-out batches; None where there is too little held-out text.

    """

    corpus: Corpus
    loader: Loader
    tokenizer: str
    evaluation: Callable[[], Iterator[Batch]] | None


def build(config: Config, devices: Sequence[jax.Device] | None = None) -> Run:
    """Mesh, model, optimizer, layout and steps; nothing is allocated or compiled.

    Args:
        config: all of it.
        devices: to lay it out on, which need not be there; this machine's, or `train.devices` virtual ones, if None.

    Raises:
        ConfigError: what does not fit, with its key.

    """
    if devices is None:
        start_devices(config.train.devices)
    try:
        return _build(config, devices)
    except ConfigError:
        raise
    except ValueError as error:  # the library's own refusals: all of them speak of arguments, which are keys here
        raise ConfigError(str(error)) from error


def start_devices(virtual: int | None) -> None:
    """Comes before anything that starts jax's backends."""
    choose_platforms()
    if virtual is not None:
        use_virtual_devices(virtual)


def topology_devices(name: str) -> list[jax.Device]:
    """The devices of a machine that need not be there, for `build`.

    Raises:
        ConfigError: no such machine, or no compiler for it.

    """
    topology = parse_topology(name)
    try:
        start_devices(topology.size if topology.hardware.platform == "cpu" else None)
    except ValueError as error:  # jax runs already, with fewer
        raise ConfigError(str(error)) from error
    return topology.devices()


def _build(config: Config, devices: Sequence[jax.Device] | None) -> Run:
    train, precision = config.train, config.precision
    mesh = make_mesh(config.mesh.data, config.mesh.replica, devices=devices)
    _check_batch(train.global_batch_size, mesh.size, train.accumulation)
    length = config.data.sequence_length
    family = FAMILIES[config.model.family]
    shape = make_shape(config.model, length)
    schedule = make_schedule(config.optimizer, train.steps)
    attention = make_attention(config.model.attention, mesh.devices.flat[0].platform)
    if config.model.attention == "flash" and length % TILE:
        fix = f"use {max(TILE, length // TILE * TILE)}, or model.attention blockwise"
        expected = f"a multiple of {TILE}, for flash attention"
        raise ConfigError(
            message(
                "the sequence does not divide into blocks",
                where="data.sequence_length",
                expected=expected,
                got=length,
                fix=fix,
            )
        )
    sharded = fully_shard(
        lambda rngs: family.make(shape, rngs=rngs, attention=attention),
        make_optimizer(config.optimizer, schedule),
        mesh,
        config.strategy,
        make_units(config.units),
        precision=Precision(precision.param, precision.compute, precision.reduce, precision.output),
        remat=config.remat,
        prefetch=config.prefetch,
    )
    step = sharded.train_step(
        partial(next_token_loss, train=True),
        accumulation=train.accumulation,
        deferred_reduction=train.deferred_reduction,
        # What a kernel of its own does cannot be proven; that attention does not mix examples is known.
        local_batch=None if config.model.attention == "blockwise" else True,
        clip=config.optimizer.clip,
        abort_after=train.abort_after,
    )
    batch = {"tokens": jax.ShapeDtypeStruct((train.global_batch_size, length + 1), np.dtype("int32"))}
    tokens, flops = train.global_batch_size * length, family.flops_per_token(shape)
    work = Work(tokens, tokens * flops, "6 N + 12 L D T a token, attention in full", shape.vocab_size)
    return Run(sharded, step, sharded.eval_step(next_token_loss), schedule, batch, flops, work)


def make_shape(model: ModelConfig, sequence_length: int) -> Any:
    """The configuration of the model, of the class that its family has."""
    other = next((name for name, family in FAMILIES.items() if model.preset in family.presets), model.family)
    if other != model.family:
        what, where = "family and preset do not go together", "model.preset"
        got, fix = f"{model.preset}, which is a {other}", f"set model.family to {other}"
        raise ConfigError(message(what, where=where, expected=f"a {model.family}", got=got, fix=fix))
    if model.dropout and model.family != "gpt":
        got, fix = f"{model.dropout} with {model.family}, which has none", "set it to 0"
        raise ConfigError(message("dropout would be ignored", where="model.dropout", got=got, fix=fix))
    fields: dict[str, Any] = {"scan_layers": model.scan_layers, "sequence_length": sequence_length}
    fields |= {name: size for name in ("layers", "width", "heads") if (size := getattr(model, name)) is not None}
    fields |= {"dropout": model.dropout} if model.dropout else {}
    return FAMILIES[model.family].preset(model.preset, **fields)


def _check_batch(rows: int, devices: int, accumulation: int) -> None:
    parts = devices * accumulation
    if rows % parts:
        below = max(parts, rows // parts * parts)
        raise ConfigError(
            message(
                "the batch does not divide",
                where="train.global_batch_size",
                expected=f"a multiple of {parts}: {devices} devices x accumulation {accumulation}",
                got=rows,
                fix=f"use {below} or {below + parts}",
            )
        )


def make_units(units: UnitsConfig) -> Units:
    """As `fully_shard` takes them."""
    return "scan" if units.scan else units.min_params or units.classes or "model"


def make_schedule(settings: OptimizerConfig, steps: int) -> optax.Schedule:
    """Optimizer updates so far -> learning rate: up from zero, then as the schedule says until the last step."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    rest = max(1, steps - warmup)
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=0.1),
        "linear": optax.linear_schedule(peak, peak / 10, rest),
    }[settings.schedule]
    if not warmup:
        return after
    # the first update is not wasted on a rate of zero
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup - 1 or 1), after], [warmup])


def make_optimizer(settings: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optax transformation of that name."""
    decay = settings.weight_decay
    if decay and settings.name in ("adam", "sgd"):
        fix = "set it to 0, or use adamw" if settings.name == "adam" else "set it to 0, or use lion"
        got = f"{decay} with {settings.name}, which has none"
        raise ConfigError(message("weight decay would be ignored", where="optimizer.weight_decay", got=got, fix=fix))
    if settings.name == "adafactor":
        return optax.adafactor(schedule, weight_decay_rate=decay or None)
    if settings.name == "sgd":
        return optax.sgd(schedule, momentum=0.9)
    if settings.name == "lion":
        return optax.lion(schedule, weight_decay=decay)
    # Language models train more steadily with a shorter memory of squared gradients than optax's 0.999.
    return (
        optax.adam(schedule, b2=0.95) if settings.name == "adam" else optax.adamw(schedule, b2=0.95, weight_decay=decay)
    )


def open_data(settings: DataConfig, *, global_batch_size: int, seed: int, eval_limit: int | None) -> Data:
    """The corpus, and this process's part of its batches."""
    if (settings.kind == "text") != (settings.path is not None):
        fix = "set data.kind to text and data.path to a file or folder, or embedded and leave the path out"
        got = f"kind {settings.kind}, path {settings.path}"
        raise ConfigError(message("kind and path do not go together", where="data.path", got=got, fix=fix))
    corpus, length = load_corpus(settings.path), settings.sequence_length
    share = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    loader = make_loader(
        corpus.train, sequence_length=length, global_batch_size=global_batch_size, seed=seed, **share
    )  # fmt: skip
    evaluation = partial(
        eval_batches, corpus.held_out, sequence_length=length, batch_size=global_batch_size, limit=eval_limit, **share
    )  # fmt: skip
    return Data(corpus, loader, "bytes", evaluation if len(corpus.held_out) > length else None)
