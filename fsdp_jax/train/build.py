"""From a configuration to the objects of a run. Nothing below here sees the configuration."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import jax
import optax
from flax import nnx

from fsdp_jax.api import Sharded, fully_shard
from fsdp_jax.errors import ConfigError, message
from fsdp_jax.launch import use_virtual_devices
from fsdp_jax.lora import with_lora
from fsdp_jax.models import FAMILIES, Family
from fsdp_jax.models.attention import TILE, AttentionKind, make_attention
from fsdp_jax.planner import Work, choose_platforms, parse_topology
from fsdp_jax.sharding.mesh import batch_shards, make_mesh
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.train.config import Config, LoraConfig, ModelConfig, UnitsConfig
from fsdp_jax.train.initial_weights import weights_shape
from fsdp_jax.train.optimizers import make_optimizer, make_schedule
from fsdp_jax.train.shapes import Batch, batch_shapes, make_shape, work_of
from fsdp_jax.units.auto_wrap import Units


@dataclasses.dataclass(frozen=True)
class Run:
    """What a configuration describes, before any array exists.

    Attributes:
        schedule: optimizer updates so far -> learning rate.
        batch: shapes of the global batch; `step.lower(batch)` is the program that trains.
        work: what a step of it does.
        family: of the model.
        shape: the model's own configuration.

    """

    sharded: Sharded
    step: CompiledStep
    eval_step: CompiledStep
    schedule: optax.Schedule
    batch: Batch
    work: Work
    family: Family
    shape: Any


def build(config: Config, devices: Sequence[jax.Device] | None = None) -> Run:
    """Mesh, model, optimizer, layout and steps; nothing is allocated or compiled.

    Args:
        config: all of it.
        devices: to lay it out on, which need not be there; this machine's, or `train.devices`
            virtual ones, if None.

    Raises:
        ConfigError: what does not fit, with its key.

    """
    if devices is None:
        start_devices(config.train.devices)
    try:
        return _build(config, devices)
    except ConfigError:
        raise
    except (
        ValueError
    ) as error:  # the library's own refusals: all of them speak of arguments, which are keys here
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
    _check_batch(train.global_batch_size, batch_shards(mesh), train.accumulation)
    family = FAMILIES[config.model.family]
    _check_attention(config.model, family, config.data.sequence_length)
    shape = make_shape(config.model, config.data, weights_shape(config.model.weights))
    make, frozen = make_model(
        config.model, config.lora, family, shape, mesh.devices.flat[0].platform
    )
    if precision.frozen is not None and not frozen:
        fix = "leave it out, or say what is frozen: model.frozen, lora.rank"
        raise ConfigError(
            message("it would be ignored", where="precision.frozen", got=precision.frozen, fix=fix)
        )
    _check_local_batch(config, family)
    schedule = make_schedule(config.optimizer, train.steps)
    sharded = fully_shard(
        make,
        make_optimizer(config.optimizer, schedule),
        mesh,
        config.strategy,
        make_units(config.units),
        precision=Precision(
            precision.param,
            precision.compute,
            precision.reduce,
            precision.output,
            frozen=precision.frozen,
        ),
        remat=config.remat,
        prefetch=config.prefetch,
        frozen=frozen,
    )
    if not any(leaf.trainable for leaf in sharded.layout.by_path.values()):
        fix = "leave some parameters out of model.frozen"
        raise ConfigError(
            message("nothing is trained", where="model.frozen", got=", ".join(frozen), fix=fix)
        )
    loss = make_loss(family, train.loss_chunk)
    step = sharded.train_step(
        partial(loss, train=True),
        accumulation=train.accumulation,
        deferred_reduction=train.deferred_reduction,
        local_batch=train.local_batch and family.local_batch,
        clip=config.optimizer.clip,
        abort_after=train.abort_after,
    )
    batch = batch_shapes(family, shape, config.data, train.global_batch_size)
    work = work_of(family, shape, config.data, train.global_batch_size)
    return Run(sharded, step, sharded.eval_step(loss), schedule, batch, work, family, shape)


def make_model(
    model: ModelConfig, lora: LoraConfig, family: Family, shape: Any, platform: str
) -> tuple[Callable[[nnx.Rngs], nnx.Module], tuple[str, ...]]:
    """(what makes the model, patterns of what of it is frozen).

    Raises:
        ConfigError: keys that do not go together, or attention that the platform has not.

    """
    attention = make_attention(model.attention, platform)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return family.model(shape, rngs=rngs, attention=attention)

    if lora.rank is None:
        if lora != LoraConfig():
            fix = "set lora.rank, or leave the others out"
            raise ConfigError(message("adapters without a rank", where="lora", got=lora, fix=fix))
        return make, model.frozen
    if model.frozen:
        got, fix = (
            "model.frozen and lora.rank",
            "leave model.frozen out: lora.trained says what is trained beside it",
        )
        raise ConfigError(
            message("LoRA freezes all the rest", where="model.frozen", got=got, fix=fix)
        )
    adapted = with_lora(
        make,
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets or family.lora_targets,
        trainable=lora.trained,
    )
    return adapted, adapted.frozen


def lora_scale(lora: LoraConfig) -> float | None:
    """What adapters are scaled by; None without any."""
    return (
        None if lora.rank is None else (lora.rank if lora.alpha is None else lora.alpha) / lora.rank
    )


def _check_attention(model: ModelConfig, family: Family, length: int) -> None:
    """ConfigError for a kernel that cannot do what the family asks of it."""
    kind, where = model.attention, "model.attention"
    if kind in family.unsupported_attention:
        what, got = "no such attention for this family", f"{kind}, which "
        got += family.unsupported_attention[kind]
        usable = [
            each for each in get_args(AttentionKind) if each not in family.unsupported_attention
        ]
        raise ConfigError(message(what, where=where, got=got, fix=f"use {' or '.join(usable)}"))
    if kind == "flash" and length % TILE:
        fix = f"use {max(TILE, length // TILE * TILE)}, or model.attention blockwise"
        what, expected = (
            "the sequence does not divide into blocks",
            f"a multiple of {TILE}, for flash attention",
        )
        raise ConfigError(
            message(what, where="data.sequence_length", expected=expected, got=length, fix=fix)
        )


def make_loss(family: Family, chunk: int | None) -> Callable[..., Any]:
    """(model, batch, *, train) -> (sum, count). Raises ConfigError for chunks of what has no
    vocabulary.
    """
    if chunk is None:
        return family.loss
    if not family.task.is_text:
        fix = "leave it out: the logits of images are few"
        raise ConfigError(
            message("chunks would be ignored", where="train.loss_chunk", got=chunk, fix=fix)
        )
    return partial(family.loss, chunk=chunk)


def _check_local_batch(config: Config, family: Family) -> None:
    """ConfigError for keys that only explicit collectives serve."""
    if config.train.local_batch and family.local_batch:
        return
    precision = config.precision
    asked = {
        "prefetch": (config.prefetch, "none"),
        "train.deferred_reduction": (config.train.deferred_reduction, False),
        "precision.reduce": (
            precision.reduce,
            None if precision.reduce != precision.compute else precision.reduce,
        ),
    }
    for key, (got, plain) in asked.items():
        if got != plain:
            what, fix = (
                f"{key} needs train.local_batch",
                f"--train.local_batch True, or --{key} {plain}",
            )
            raise ConfigError(message(what, where=key, expected=plain, got=got, fix=fix))


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
