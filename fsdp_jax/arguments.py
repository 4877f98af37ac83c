"""The stages of `fully_shard`: its arguments checked, the model placed, the state laid out."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from fsdp_jax.errors import ArgumentError, SlowerWarning, human_bytes
from fsdp_jax.optim import in_float32
from fsdp_jax.optim.fitting import fit_optimizer
from fsdp_jax.prefetch.rewrite import Prefetch, check_prefetch
from fsdp_jax.sharding.explicit_style import model_view, trace_as_asked
from fsdp_jax.sharding.layout import Layout, make_layout
from fsdp_jax.sharding.logical_axes import LogicalAxes
from fsdp_jax.sharding.mesh import MeshAxes, mesh_axes, shards_of
from fsdp_jax.sharding.offload import Offload, check_host_memory, is_count
from fsdp_jax.sharding.path_rules import Rule
from fsdp_jax.sharding.patterns import matched
from fsdp_jax.sharding.precision import Precision, check_trained
from fsdp_jax.sharding.quantized import QuantizedBase
from fsdp_jax.sharding.rules import LARGE_BYTES, Rules
from fsdp_jax.sharding.strategy import Strategy, get_strategy
from fsdp_jax.step.float8_matmuls import check_float8_matmuls
from fsdp_jax.step.loss_spikes import LossSpikes
from fsdp_jax.step.state import abstract_rest
from fsdp_jax.tree import flatten, nest_like
from fsdp_jax.units.adapters import make_adapter
from fsdp_jax.units.auto_wrap import UNFOUND, Units, check_units
from fsdp_jax.units.find_units import FoundUnits
from fsdp_jax.units.keep_gathered import KeepGathered, check_keep_gathered
from fsdp_jax.units.model import Model
from fsdp_jax.units.param_comms import (
    abstract_copies,
    check_kept_float32,
    param_comms,
    quantized_parameters,
)
from fsdp_jax.units.placement import (
    PlacedModel,
    place_model,
    place_quantized,
    split_data_in_axes,
    warn_of_idle_axes,
)
from fsdp_jax.units.remat import Remat, RematPolicy, as_policy


@dataclass(frozen=True)
class Arguments:
    """The arguments of `fully_shard`, which documents them, with the defaults filled in."""

    model: Callable[[nnx.Rngs], nnx.Module] | nn.Module
    tx: optax.GradientTransformation
    mesh: Mesh | MeshAxes
    strategy: str | Strategy
    units: Units
    data: str | Sequence[str] | None
    replica: str | Sequence[str] | None
    inputs: tuple[Any, ...] | Mapping[str, Any] | None
    precision: Precision
    remat: Remat
    prefetch: Prefetch
    keep_gathered: KeepGathered
    offload: Offload
    loss_spikes: LossSpikes | None
    rules: Sequence[Rule]
    logical_axes: LogicalAxes | None
    min_size: int
    strict: bool
    stacked: Sequence[str] | None
    frozen: Sequence[str]
    base: QuantizedBase | None

    @property
    def policy(self) -> RematPolicy:
        """The rematerialization policy."""
        return as_policy(self.remat)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer as a step runs it: where updates are rounded at random, in float32."""
        return in_float32(self.tx) if self.precision.stochastic_rounding else self.tx


def check_arguments(given: Arguments) -> MeshAxes:
    """Checks the arguments: the mesh with the roles of its axes.

    Raises ValueError for arguments of the wrong kind, and for what the devices cannot do.
    """
    tx, mesh, precision = given.tx, given.mesh, given.precision
    # Flax's own optimizers wrap the transformation, and keep its state in themselves.
    if hasattr(getattr(tx, "tx", None), "update"):
        raise ArgumentError(
            "an optimizer around an optax transformation, with a state of its own",
            where="tx",
            expected="optax's own",
            got=type(tx).__name__,
            fix="pass the transformation that it holds, optimizer.tx; sharded.init makes its state",
        )
    # Arguments of another kind, as they are most often mixed up.
    is_mesh = isinstance(mesh, Mesh | MeshAxes)
    is_optax = hasattr(tx, "init") and hasattr(tx, "update")
    is_precision = isinstance(precision, Precision)
    is_offload = isinstance(given.offload, Offload)
    is_size = is_count(given.min_size, least=0)
    is_spikes = given.loss_spikes is None or isinstance(given.loss_spikes, LossSpikes)
    is_bool = given.strict in (True, False)
    is_base = given.base is None or isinstance(given.base, QuantizedBase)
    for holds, kind, where, got, fix in (
        (is_mesh, "a mesh", "mesh", type(mesh), "fsdp_jax.make_mesh(data=8)"),
        (is_optax, "an optax transformation", "tx", tx, "optax.adamw(3e-4)"),
        (is_precision, "a Precision", "precision", precision, 'Precision(compute="bfloat16")'),
        (is_offload, "an Offload", "offload", given.offload, "Offload(optimizer=True)"),
        (is_size, "a number of elements", "min_size", given.min_size, "2**14"),
        (is_spikes, "a LossSpikes", "loss_spikes", given.loss_spikes, "LossSpikes()"),
        (is_base, "a QuantizedBase", "base", given.base, 'QuantizedBase("nf4")'),
        (is_bool, "a bool", "strict", given.strict, "True or False"),
    ):
        if not holds:
            raise ArgumentError(f"not {kind}", where=where, got=got, fix=fix)
    # Values out of range, and unknown names.
    check_units(given.units)
    as_policy(given.remat)
    check_prefetch(given.prefetch)
    check_keep_gathered(given.keep_gathered)

    # What the devices can do.
    axes = mesh_axes(mesh, given.data, given.replica)
    check_host_memory(given.offload, axes.mesh)
    get_strategy(given.strategy).warn_of_one_replica(axes)
    if precision.matmul is not None:
        check_float8_matmuls(axes.mesh.devices.flat[0])
    return axes


def trace_and_place(given: Arguments, axes: MeshAxes) -> PlacedModel:
    """Traces the model for its shapes, and places its arrays by the rules."""

    def trace_model(axes: MeshAxes) -> tuple[Model, MeshAxes]:
        """Traces the model: (its adapter, the axes as it sees them)."""
        with model_view(axes):
            return make_adapter(given.model, given.inputs), axes

    model, axes = trace_as_asked(axes, trace_model)

    # Which parameters are stacked, which are frozen, and what the rules make of all.
    shapes = {path: tuple(leaf.shape) for path, leaf in flatten(model.params).items()}
    stacked = model.stacked
    if given.stacked is not None:
        named = matched(given.stacked, shapes, "stacked", aliases=model.aliases)
        stacked = {path: model.stacked.get(path, 1) for path in named}
    frozen = matched(given.frozen, shapes, "frozen", aliases=model.aliases)
    strategy = get_strategy(given.strategy)
    rules = Rules(
        given.rules,
        logical_axes=split_data_in_axes(given.logical_axes, axes),
        min_size=given.min_size,
        strict=given.strict,
        axes=strategy.shard_axes(axes),
        pads=True,
    )
    # Place every array, and warn of mesh axes that shard none.
    params, state = place_model(rules, model, axes.mesh, stacked)
    strategy.check_placements(params | state, axes)
    warn_of_idle_axes(params | state, axes)
    return PlacedModel(
        model=model,
        axes=axes,
        strategy=strategy,
        rules=rules,
        params=params,
        state=state,
        stacked=stacked,
        frozen=frozenset(frozen),
    )


def lay_out_state(
    given: Arguments, placed: PlacedModel, found: FoundUnits
) -> tuple[Layout, optax.GradientTransformationExtraArgs]:
    """Lays out the state: parameters as they are stored, optimizer state, copies and the rest.

    Returns the layout, and the optimizer as the step calls it.
    """
    # The dtypes that parameters are stored in, and what of them has a copy to compute with.
    model, precision = placed.model, given.precision
    stored = {
        path: jax.ShapeDtypeStruct(
            leaf.shape, precision.storage_dtype(leaf.dtype, path not in placed.frozen)
        )
        for path, leaf in flatten(model.params).items()
    }
    blocks = quantized_parameters(placed, given.base, precision, found.owners)
    for path, each in blocks.items():
        stored[path] = jax.ShapeDtypeStruct(each.stored_shape, np.uint8)
    trained = {path: leaf for path, leaf in stored.items() if path not in placed.frozen}
    check_trained(trained)
    check_kept_float32(precision, model)
    copies = abstract_copies(placed, trained, precision, found.owners, given.offload)
    tx = fit_optimizer(given.optimizer, nest_like(model.params, trained))
    # All arrays of the state as they are stored.
    abstract = nest_like(model.params, copies)
    layout = make_layout(
        params=nest_like(model.params, stored),
        placements=place_quantized(placed, blocks),
        other=abstract_rest(model, abstract, precision.scaling, given.loss_spikes),
        tx=tx,
        axes=placed.axes,
        strategy=placed.strategy,
        rules=placed.rules,
        stacked=placed.stacked,
        frozen=placed.frozen,
        copied=copies,
        units=found.description,
        state=placed.state,
        offload=given.offload,
        blocks=blocks,
    )
    return layout, tx


def warn_of_settings_without_effect(
    given: Arguments, placed: PlacedModel, found: FoundUnits
) -> None:
    """Warns of settings that change nothing beside the others."""

    def warn(setting: str, why: str, fix: str) -> None:
        text = f"{setting} has no effect: {why}; {fix}"
        warnings.warn(text, SlowerWarning, stacklevel=4)  # the caller of fully_shard

    axes, strategy = placed.axes, placed.strategy
    prefetch = given.prefetch
    if prefetch in ("pre", "post") and not strategy.gathers_per_unit:
        why = f"'{strategy.name}' does not gather parameters unit by unit"
        warn(f"prefetch='{prefetch}'", why, "leave it out, or strategy='full_shard'")
    if given.keep_gathered and not strategy.gathers_per_unit:
        why = f"'{strategy.name}' does not gather parameters unit by unit"
        fix = "leave it out, or strategy='full_shard'"
        warn(f"keep_gathered={given.keep_gathered!r}", why, fix)
    if given.keep_gathered and found.description and not found.kept.layers:
        why = "nothing of these units is sharded, and so nothing is gathered"
        fix = f"leave it out, or a min_size below {given.min_size}"
        warn(f"keep_gathered={given.keep_gathered!r}", why, fix)
    data, replicas = (shards_of(axes.mesh, each) for each in (axes.data, axes.replica))
    if strategy.hybrid and not strategy.updates_over_replicas and data == 1 < replicas:
        why = f"data has size 1, and each of the {replicas} replicas holds all of the state"
        fix = "'full_shard' shards it over the replicas, 'no_shard' says that this is meant"
        warn(f"strategy='{strategy.name}'", why, fix)


def warn_of_one_unit(given: Arguments, model: Model, layout: Layout, found: FoundUnits) -> None:
    """Warns of the time and memory that it costs where no units are found in a large model."""
    if given.units != "auto" or any(found.owners.values()):
        return
    # Recomputing all of the model keeps all of its activations, just later than the loss.
    if given.policy.policy != "none":
        what = "remat recomputes the whole model at once, which frees activations during the loss "
        what += f"alone: no units were found ({UNFOUND}); units=[YourBlock] names them"
        warnings.warn(what, SlowerWarning, stacklevel=3)
    # The whole model, gathered, has to fit each device.
    comms = param_comms(model, layout, given.precision, found.owners, "annotated")
    mesh = layout.axes.mesh
    gathered = sum(
        prod(layout.by_path[path].shape) * comm.transform.wire.itemsize
        for path, comm in comms.items()
        if shards_of(mesh, layout.axes.batch_spec_axes(comm.shard_spec)) > 1
    )
    if layout.strategy.gathers_per_unit and gathered >= LARGE_BYTES:
        what = f"the whole model is gathered at once, {human_bytes(gathered)} on every device: "
        what += f"{UNFOUND}; units=[YourBlock] gathers block by block, units='model' says that it "
        what += "is meant (in a configuration units.classes, units.whole_model)"
        warnings.warn(what, SlowerWarning, stacklevel=3)
