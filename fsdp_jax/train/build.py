"""Builds the objects of a run from its configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from fsdp_jax.api import Sharded, fully_shard
from fsdp_jax.data.checks import ignored_key_error
from fsdp_jax.errors import ConfigError
from fsdp_jax.launch import use_virtual_devices
from fsdp_jax.lora import Adapters, with_lora
from fsdp_jax.models import FAMILIES, Family
from fsdp_jax.models.attention import TILE, AttentionKind, make_attention
from fsdp_jax.planner import Work, choose_platforms, parse_topology
from fsdp_jax.processes import hosts_of_processes
from fsdp_jax.sharding.mesh import count_hosts, make_mesh, mesh_axes
from fsdp_jax.sharding.patterns import search_any
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.sharding.strategy import get_strategy
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.train.config import Config, ModelConfig
from fsdp_jax.train.model_config import make_model_config
from fsdp_jax.train.optimizers import make_optimizer, make_schedule
from fsdp_jax.train.renamed_keys import as_config_errors
from fsdp_jax.train.shapes import BatchShapes, batch_shapes, work_of
from fsdp_jax.units.remat import INPUT, check_named_activations
from fsdp_jax.weights.adapters import linear_paths, read_adapters


@dataclass(frozen=True)
class Run:
    """The objects that a configuration describes, before any array exists."""

    sharded: Sharded
    step: CompiledStep  # `step.lower(batch)` is the program that trains
    eval_steps: dict[str, CompiledStep]  # of the parameters, "", and of their average, "_ema"
    schedule: optax.Schedule  # optimizer updates so far -> learning rate
    batch: BatchShapes  # shapes and dtypes of the global batch
    work: Work  # tokens and FLOPs of a step
    family: Family
    model_config: Any  # of the model itself, such as a GPTConfig
    adapters: Adapters  # with the rank, alpha and targets of `lora.weights`

    @property
    def rows(self) -> int:
        """Examples in the global batch."""
        return int(jax.tree.leaves(self.batch)[0].shape[0])


@as_config_errors()
def check_activation_names(run: Run) -> None:
    """Traces the step; raises ConfigError for keys that name activations that it does not have."""
    activations = run.step.plan.activations
    if {*activations.save, *activations.offload} - {INPUT}:
        check_named_activations(activations, run.step.trace(run.batch).jaxpr)


def start_devices(virtual: int | None) -> None:
    """Chooses the platform, with `virtual` CPU devices if given, before JAX starts a backend."""
    choose_platforms()
    if virtual is not None:
        use_virtual_devices(virtual)


def topology_devices(name: str) -> list[jax.Device]:
    """Finds the devices to compile for on a machine, such as `h100:8`, that need not be present.

    Raises ConfigError where there is no compiler for it.
    """
    topology = parse_topology(name)
    with as_config_errors():  # JAX runs already, with fewer devices
        start_devices(topology.size if topology.hardware.platform == "cpu" else None)
    return topology.devices()


def _make_mesh(config: Config, devices: Sequence[jax.Device] | None) -> Mesh:
    """Makes the mesh; by default hybrid strategies have a replica on each host, and `data` inside.

    Waits for all processes of a run, if `devices` is None.
    """
    # Devices of a machine that is planned for have a process on each host.
    hosts = None
    if devices is None:
        devices, hosts = jax.devices(), hosts_of_processes()
    # Beside a stated size of `data`, its replicas are what is left.
    replica = config.mesh.replica
    if replica is None:
        replica = 1
        if get_strategy(config.strategy).hybrid:
            replica = count_hosts(devices, hosts) if config.mesh.data == -1 else -1
    return make_mesh(config.mesh.data, replica, devices=devices, hosts=hosts)


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
    mesh = _make_mesh(config, devices)
    _check_batch(train.global_batch_size, mesh_axes(mesh).batch_shards, train.accumulation)
    family = FAMILIES[config.model.family]
    _check_attention(config.model, family, data.sequence_length)
    model_config = make_model_config(config.model, data)
    # The model's constructor: attention depends on the platform, adapters on `lora`.
    platform = mesh.devices.flat[0].platform
    adapters = resolve_adapters(config.lora, config.model, model_config)
    make, frozen = make_model(config.model, adapters, family, model_config, platform)
    if config.precision.frozen is not None and not frozen:
        fix = "leave it out, or set what is frozen: model.frozen, lora.rank"
        raise ignored_key_error("precision.frozen", config.precision.frozen, fix)

    # The sharded training state and the steps.
    schedule = make_schedule(config.optimizer, train.steps)
    spikes = None
    if train.spike != "ignore":
        spikes = replace(config.loss_spikes, skip=train.spike == "skip")
    sharded = fully_shard(
        make,
        make_optimizer(config.optimizer, schedule),
        mesh,
        config.strategy,
        config.units.choice,
        precision=config.precision,
        remat=config.remat,
        prefetch=config.prefetch,
        keep_gathered=config.keep_gathered.choice,
        offload=config.offload,
        loss_spikes=spikes,
        frozen=frozen,
        base=config.lora.quantized,
    )
    # The same loss trains and evaluates.
    loss = make_loss(family, train.loss_chunk)
    step = sharded.make_train_step(
        partial(loss, train=True),
        accumulation=train.accumulation,
        deferred_reduction=train.deferred_reduction,
        local_batch=train.local_batch,
        clip=config.optimizer.clip,
        abort_after=train.abort_after,
    )
    eval_steps = {"": sharded.make_eval_step(loss)}
    if config.optimizer.ema is not None:
        eval_steps["_ema"] = sharded.make_eval_step(loss, weights="ema")
    # With the shapes of a batch, and the tokens and FLOPs of a step.
    return Run(
        sharded=sharded,
        step=step,
        eval_steps=eval_steps,
        schedule=schedule,
        batch=batch_shapes(family, model_config, data, train.global_batch_size),
        work=work_of(family, model_config, data, train.global_batch_size),
        family=family,
        model_config=model_config,
        adapters=adapters,
    )


@as_config_errors()
def build_state(
    model: ModelConfig,
    lora: Adapters,
    model_config: Any,
    tx: optax.GradientTransformation,
    precision: Precision,
) -> tuple[Sharded, float | None]:
    """Builds (the state of a run over this machine's devices, LoRA's scale), without data or steps.

    Any layout restores a checkpoint of it. Allocates nothing. Raises ConfigError as `build`.
    """
    adapters = resolve_adapters(lora, model, model_config)
    family, mesh = FAMILIES[model.family], make_mesh()
    platform = mesh.devices.flat[0].platform
    make, frozen = make_model(model, adapters, family, model_config, platform)
    sharded = fully_shard(make, tx, mesh, precision=precision, frozen=frozen, base=lora.quantized)
    return sharded, adapters.scale


def resolve_adapters(lora: Adapters, model: ModelConfig, model_config: Any) -> Adapters:
    """Fills in the rank, alpha and targets of `lora.weights`, if it is set.

    Raises ConfigError for others beside it, and for a folder that cannot be used.
    """
    if lora.weights is None:
        return lora
    if model.weights is None:
        raise ConfigError(
            "adapters without the weights that they belong to",
            where="lora.weights",
            got=lora.weights,
            fix="set model.weights",
        )
    found = read_adapters(Path(lora.weights).expanduser(), model_config)
    targets = found.targets
    if all(
        search_any(lora.targets, path) == search_any(targets, path)
        for path in linear_paths(model_config)
    ):
        targets = lora.targets
    own_values = {"rank": found.rank, "alpha": found.alpha, "targets": targets}
    for name, own in own_values.items():
        value = getattr(lora, name)
        if value not in (None, (), own):
            raise ConfigError(
                f"lora.weights has its own {name}",
                where=f"lora.{name}",
                expected=own,
                got=value,
                fix="leave it out",
            )
    return replace(lora, rank=found.rank, alpha=found.alpha, targets=found.targets)


def make_model(
    model: ModelConfig, lora: Adapters, family: Family, model_config: Any, platform: str
) -> tuple[Callable[[nnx.Rngs], nnx.Module], tuple[str, ...]]:
    """Makes (the constructor of the model, with adapters if any; patterns of frozen parameters).

    Raises ConfigError for keys of `model` and `lora` that do not go together.
    """
    attention = make_attention(model.attention, platform)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return family.model(model_config, rngs=rngs, attention=attention)

    if lora.rank is None:
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
        trainable=lora.trainable,
    )
    return adapted, adapted.frozen


def make_loss(family: Family, chunk: int | None) -> Callable[..., Any]:
    """Makes the loss, (model, batch, *, train) -> (sum, count).

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
