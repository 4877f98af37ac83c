"""Builds the objects of a run from its configuration."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import jax
import optax
from flax import nnx

from fsdp_jax.api import Sharded, fully_shard
from fsdp_jax.data.checks import ignored_key_error
from fsdp_jax.errors import ArgumentError, ConfigError
from fsdp_jax.launch import use_virtual_devices
from fsdp_jax.lora import with_lora
from fsdp_jax.models import FAMILIES, Family
from fsdp_jax.models.attention import TILE, AttentionKind, make_attention
from fsdp_jax.planner import Work, choose_platforms, parse_topology
from fsdp_jax.sharding.mesh import make_mesh, mesh_axes
from fsdp_jax.sharding.offload import Offload
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.step.loss_spikes import LossSpikes
from fsdp_jax.train.config import (
    Config,
    LoraConfig,
    ModelConfig,
    OffloadConfig,
    UnitsConfig,
)
from fsdp_jax.train.model_config import make_model_config
from fsdp_jax.train.optimizers import make_optimizer, make_schedule
from fsdp_jax.train.shapes import BatchShapes, batch_shapes, work_of
from fsdp_jax.units.auto_wrap import Units
from fsdp_jax.units.remat import Remat, RematPolicy, check_named_activations


@dataclass(frozen=True)
class Run:
    """The objects that a configuration describes, before any array exists."""

    config: Config
    sharded: Sharded
    step: CompiledStep  # `step.lower(batch)` is the program that trains
    eval_step: CompiledStep
    schedule: optax.Schedule  # optimizer updates so far -> learning rate
    batch: BatchShapes  # shapes and dtypes of the global batch
    work: Work  # tokens and FLOPs of a step
    family: Family
    model_config: Any  # of the model itself, such as a GPTConfig


# Where the library's errors are, in the words of a configuration.
_KEY_OF = {
    "accumulation": "train.accumulation",
    "clip": "optimizer.clip",
    "frozen": "model.frozen",
    "offload.activations": "offload.activation_names",
    "remat.save": "remat_save",
    "remat.every": "remat_every",
    "targets": "lora.targets",
    "trainable": "lora.trained",
    "LossSpikes.window": "train.spike_window",
    "LossSpikes.threshold": "train.spike_threshold",
}


@contextlib.contextmanager
def as_config_errors() -> Iterator[None]:
    """Turns ValueErrors about the library's arguments into ConfigErrors about the run's keys."""
    try:
        yield
    except ArgumentError as error:
        raise ConfigError(
            error.what,
            where=_KEY_OF.get(error.where, error.where),
            expected=error.expected,
            got=error.got,
            fix=error.fix,
        ) from error
    except ValueError as error:
        raise ConfigError(error) from error


@as_config_errors()
def check_activation_names(run: Run) -> None:
    """Traces the step; raises ConfigError for keys that name activations that it does not have."""
    if run.config.remat_save or run.config.offload.activation_names:
        check_named_activations(run.step.plan.activations, run.step.trace(run.batch).jaxpr)


def start_devices(virtual: int | None) -> None:
    """Chooses the platform, with `virtual` CPU devices if given, before JAX starts a backend."""
    choose_platforms()
    if virtual is not None:
        use_virtual_devices(virtual)


def topology_devices(name: str) -> list[jax.Device]:
    """Returns the devices to compile for on a machine, such as `h100:8`, that need not be present.

    Raises ConfigError where there is no compiler for it.
    """
    topology = parse_topology(name)
    with as_config_errors():  # JAX runs already, with fewer devices
        start_devices(topology.size if topology.hardware.platform == "cpu" else None)
    return topology.devices()


@as_config_errors()
def build(config: Config, devices: Sequence[jax.Device] | None = None) -> Run:
    """Builds the mesh, model, optimizer, layout and steps; allocates and compiles nothing.

    The devices of the mesh need not be present; by default they are this machine's, or
    `train.devices` virtual ones. Raises ConfigError for keys that do not fit, by name.
    """
    if devices is None:
        start_devices(config.train.devices)

    # The mesh and the model.
    train, data = config.train, config.data
    mesh = make_mesh(config.mesh.data, config.mesh.replica, devices=devices)
    _check_batch(train.global_batch_size, mesh_axes(mesh).batch_shards, train.accumulation)
    family = FAMILIES[config.model.family]
    _check_attention(config.model, family, data.sequence_length)
    model_config = make_model_config(config.model, data)
    platform = mesh.devices.flat[0].platform
    make, frozen = make_model(config.model, config.lora, family, model_config, platform)
    if config.precision.frozen is not None and not frozen:
        fix = "leave it out, or set what is frozen: model.frozen, lora.rank"
        raise ignored_key_error("precision.frozen", config.precision.frozen, fix)
    _check_local_batch(config)

    # The sharded training state and the steps.
    schedule = make_schedule(config.optimizer, train.steps)
    sharded = _make_sharded(config, make, frozen, make_optimizer(config.optimizer, schedule), mesh)
    loss = make_loss(family, train.loss_chunk)
    step = sharded.make_train_step(
        partial(loss, train=True),
        accumulation=train.accumulation,
        deferred_reduction=train.deferred_reduction,
        local_batch=train.local_batch,
        clip=config.optimizer.clip,
        abort_after=train.abort_after,
    )
    return Run(
        config=config,
        sharded=sharded,
        step=step,
        eval_step=sharded.make_eval_step(loss),
        schedule=schedule,
        batch=batch_shapes(family, model_config, data, train.global_batch_size),
        work=work_of(family, model_config, data, train.global_batch_size),
        family=family,
        model_config=model_config,
    )


def _make_sharded(
    config: Config,
    make: Callable[[nnx.Rngs], nnx.Module],
    frozen: tuple[str, ...],
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
) -> Sharded:
    """Returns what `fully_shard` makes of a run's keys. Raises ConfigError if nothing is trained.

    `make` is the constructor of the model, and `frozen` are patterns of its frozen parameters.
    """
    train, spikes = config.train, None
    if train.spike != "ignore":
        spikes = LossSpikes(train.spike_window, train.spike_threshold, train.spike == "skip")
    sharded = fully_shard(
        make,
        tx,
        mesh,
        config.strategy,
        make_units(config.units),
        precision=Precision(**vars(config.precision)),
        remat=make_remat(config),
        prefetch=config.prefetch,
        offload=make_offload(config.offload),
        loss_spikes=spikes,
        frozen=frozen,
    )
    if not any(leaf.trainable for leaf in sharded.layout.by_path.values()):
        raise ConfigError(
            "nothing is trained",
            where="model.frozen",
            got=", ".join(frozen),
            fix="leave some parameters out of model.frozen",
        )
    return sharded


def make_model(
    model: ModelConfig, lora: LoraConfig, family: Family, model_config: Any, platform: str
) -> tuple[Callable[[nnx.Rngs], nnx.Module], tuple[str, ...]]:
    """Returns (the constructor of the model, with adapters if any; patterns of frozen parameters).

    Raises ConfigError for keys of `model` and `lora` that do not go together.
    """
    attention = make_attention(model.attention, platform)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return family.model(model_config, rngs=rngs, attention=attention)

    if lora.rank is None:
        # Configurations that runs wrote before targets depended on the family state this default.
        written_before = (r"(attn|cross)/(qkv|q|k|v|o|out)$",)
        if lora not in (LoraConfig(), LoraConfig(targets=written_before)):
            raise ConfigError(
                "adapters without a rank",
                where="lora",
                got=lora,
                fix="set lora.rank, or leave the others out",
            )
        return make, model.frozen
    if model.frozen:
        raise ConfigError(
            "LoRA freezes all the rest",
            where="model.frozen",
            got="model.frozen and lora.rank",
            fix="leave model.frozen out; lora.trained names parameters to train as well",
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
    """Returns what scales the adapters' output, alpha / rank; None without adapters."""
    if lora.rank is None:
        return None
    return 1.0 if lora.alpha is None else lora.alpha / lora.rank


def make_remat(config: Config) -> Remat:
    """Returns the `remat` of `fully_shard`; ConfigError for keys that change nothing."""
    unused = {"remat_save": config.remat_save, "remat_every": config.remat_every > 1}
    for key, is_set in unused.items():
        if is_set and config.remat == "none":
            raise ConfigError(
                "with remat none nothing is recomputed",
                where=key,
                got=getattr(config, key),
                fix="remat: full, or leave it out",
            )
    policy = RematPolicy(config.remat, config.remat_save, config.remat_every)
    return config.remat if policy == RematPolicy(config.remat) else policy


def make_offload(offload: OffloadConfig) -> Offload:
    """Returns the `offload` of `fully_shard`; ConfigError for both inputs and names."""
    if offload.activations and offload.activation_names:
        raise ConfigError(
            "either the inputs of the units are offloaded, or activations by name",
            where="offload.activation_names",
            got=", ".join(offload.activation_names),
            fix="leave one of them out",
        )
    activations = offload.activation_names or offload.activations
    return Offload(
        offload.params, offload.optimizer, activations, offload.in_flight, offload.group_bytes
    )


def make_units(units: UnitsConfig) -> Units:
    """Returns the `units` of `fully_shard`."""
    if units.whole_model:
        return "model"
    return "scan" if units.scan else units.min_params or units.classes or "auto"


def make_loss(family: Family, chunk: int | None) -> Callable[..., Any]:
    """Returns the loss, (model, batch, *, train) -> (sum, count).

    A `chunk` is the number of vocabulary entries whose logits are computed at a time.
    """
    if chunk is None:
        return family.loss
    if not family.task.is_text:
        fix = "leave it out: the logits of images are few"
        raise ignored_key_error("train.loss_chunk", chunk, fix)
    return partial(family.loss, chunk=chunk)


def _check_attention(model: ModelConfig, family: Family, length: int) -> None:
    """Raises ConfigError for a kernel that does not support the family or the sequence length."""
    kind, where = model.attention, "model.attention"
    if kind in family.unsupported_attention:
        what, got = "no such attention for this family", family.unsupported_attention[kind]
        usable = [
            other for other in get_args(AttentionKind) if other not in family.unsupported_attention
        ]
        raise ConfigError(
            what, where=where, got=f"{kind}, which {got}", fix=f"use {' or '.join(usable)}"
        )
    if kind == "flash" and length % TILE:
        raise ConfigError(
            "the sequence is not a multiple of a block",
            where="data.sequence_length",
            expected=f"a multiple of {TILE}",
            got=length,
            fix=f"use {max(TILE, length // TILE * TILE)}, or model.attention blockwise",
        )


def _check_local_batch(config: Config) -> None:
    """Raises ConfigError for keys that need explicit collectives where the loss runs without."""
    if config.train.local_batch:
        return
    reduce, compute = config.precision.reduce, config.precision.compute
    needed = {
        "prefetch": (config.prefetch, "none"),
        "train.deferred_reduction": (config.train.deferred_reduction, False),
        "precision.reduce": (reduce, reduce if reduce == compute else None),
    }
    for key, (got, allowed) in needed.items():
        if got != allowed:
            raise ConfigError(
                f"{key} needs train.local_batch",
                where=key,
                expected=allowed,
                got=got,
                fix=f"--train.local_batch True, or --{key} {allowed}",
            )


def _check_batch(rows: int, devices: int, accumulation: int) -> None:
    """Raises ConfigError unless every device has the same number of rows in every microbatch."""
    parts = devices * accumulation
    if rows % parts:
        below = max(parts, rows // parts * parts)
        raise ConfigError(
            "the batch cannot be split evenly",
            where="train.global_batch_size",
            expected=f"a multiple of {parts}: {devices} devices x accumulation {accumulation}",
            got=rows,
            fix=f"use {below} or {below + parts}",
        )
