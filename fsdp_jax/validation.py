"""Argument validation, with fixes for the common mistakes. Every check raises ValueError."""

import warnings
from collections.abc import Mapping
from math import prod
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fsdp_jax.errors import ArgumentError, SlowerWarning, did_you_mean, human_bytes
from fsdp_jax.prefetch.rewrite import Prefetch
from fsdp_jax.sharding.layout import Layout
from fsdp_jax.sharding.mesh import MeshAxes, shards_of, spec_axes
from fsdp_jax.sharding.offload import HOST, Offload, is_count
from fsdp_jax.sharding.patterns import matched
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.sharding.rules import LARGE_BYTES, Placement
from fsdp_jax.tree import flatten
from fsdp_jax.units.collectives import ParamComm
from fsdp_jax.units.model import Model
from fsdp_jax.units.remat import as_policy


def check_arguments(
    tx: Any,
    mesh: Any,
    units: Any,
    precision: Any,
    remat: Any,
    prefetch: Any,
    offload: Any,
    min_size: Any,
) -> None:
    """Raises ValueError for arguments of `fully_shard` of the wrong kind."""
    if hasattr(getattr(tx, "tx", None), "update"):
        raise ArgumentError(
            "an optimizer around an optax transformation, with a state of its own",
            where="tx",
            expected="optax's own",
            got=type(tx).__name__,
            fix="pass the transformation that it holds, optimizer.tx; sharded.init makes its state",
        )
    is_mesh = isinstance(mesh, Mesh | MeshAxes)
    is_optax = hasattr(tx, "init") and hasattr(tx, "update")
    is_precision = isinstance(precision, Precision | None)
    is_offload = isinstance(offload, Offload | None)
    checks = [
        (
            is_mesh,
            "a mesh",
            "mesh",
            type(mesh),
            "fsdp_jax.make_mesh(data=8)",
        ),
        (is_optax, "an optax transformation", "tx", tx, "optax.adamw(3e-4)"),
        (is_precision, "a Precision", "precision", precision, 'Precision(compute="bfloat16")'),
        (is_offload, "an Offload", "offload", offload, "Offload(optimizer=True)"),
        (is_count(min_size, least=0), "a number of elements", "min_size", min_size, "2**14"),
    ]
    for holds, kind, where, got, fix in checks:
        if not holds:
            raise ArgumentError(f"not {kind}", where=where, got=got, fix=fix)
    _check_units(units)
    as_policy(remat)
    if prefetch not in get_args(Prefetch):
        raise ArgumentError(
            f"unknown prefetch '{prefetch}'",
            where="prefetch",
            fix=did_you_mean(str(prefetch), get_args(Prefetch)),
        )


def check_host_memory(offload: Offload | None, mesh: Mesh) -> None:
    """Raises ValueError where state shall be offloaded, and devices cannot reach host memory."""
    if offload is None or not (offload.state or offload.saves_activations):
        return
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    # GPUs that are only compiled for report no memories.
    if kinds and HOST not in kinds:
        raise ArgumentError(
            f"these devices cannot reach host memory of the kind '{HOST}'",
            where="offload",
            got=f"{device.device_kind}, with {', '.join(kinds)}",
            fix="leave offload out; remat, accumulation= and more devices save memory too",
        )


def _check_units(units: Any) -> None:
    """Raises ValueError unless `units` is a choice, a number of parameters, classes or names."""
    names = isinstance(units, list | tuple | set) and all(isinstance(u, str | type) for u in units)
    if is_count(units) or (units and (names or isinstance(units, str))):
        return
    raise ArgumentError(
        "no units",
        where="units",
        expected="classes or their names, a least number of parameters, 'auto', 'scan' or 'model'",
        got=units,
        fix="units=[Block], units='model' for one unit, or leave it out for the repeated blocks",
    )


def check_train_step(
    layout: Layout,
    precision: Precision,
    prefetch: Prefetch,
    *,
    accumulation: Any,
    deferred: bool,
    local_batch: Any,
    clip: Any,
) -> None:
    """Raises ValueError for arguments of `Sharded.make_train_step` that do not fit."""
    if not is_count(accumulation):
        raise ArgumentError(
            "accumulation is a whole number, at least 1", where="accumulation", got=accumulation
        )
    is_number = isinstance(clip, int | float | np.number) and not isinstance(clip, bool)
    if clip is not None and not (is_number and clip > 0):
        raise ArgumentError("clip is above 0, or None", where="clip", got=clip)
    if not isinstance(local_batch, bool):
        raise ArgumentError(
            "not a bool",
            where="local_batch",
            got=local_batch,
            fix="True if loss_fn is a sum over examples, or else False",
        )
    if local_batch:
        _check_local_batch(layout)
    else:
        _check_global_batch(precision, prefetch, deferred)


def _check_local_batch(layout: Layout) -> None:
    """Raises ValueError for what `local_batch=True` cannot do: sharded layers, model axes."""
    for path, leaf in layout.by_path.items():
        if any(leaf.spec[: leaf.stacked]):
            raise ArgumentError(
                "a stack of layers is sharded along its layers",
                where=path,
                expected="a spec that leaves that dim unsharded",
                got=leaf.spec,
                fix="shard another dim, or leave local_batch out",
            )
    axes = layout.axes
    if axes.model_shards > 1:
        raise ArgumentError(
            "local_batch=True needs a mesh without axes of the model's own",
            where="local_batch",
            got=f"{list(axes.model)} beside data={list(axes.user_data)}",
            fix=(
                "leave local_batch out: XLA then inserts the collectives along all axes; or, if "
                "these axes shard state or batch, name them in data or replica"
            ),
        )


def _check_global_batch(precision: Precision, prefetch: Prefetch, deferred: bool) -> None:
    """Raises ValueError for settings that need explicit collectives, and so local batches."""
    compute, reduce = precision.compute, precision.reduce
    reduces_otherwise = reduce is not None and reduce != compute
    precision_text = f"Precision(compute='{compute}', reduce='{reduce}')"
    unsupported = [
        (deferred, "deferred_reduction=True", "leave deferred_reduction out"),
        (prefetch != "none", f"prefetch='{prefetch}'", "fully_shard(..., prefetch='none')"),
        (reduces_otherwise, precision_text, "reduce=None"),
    ]
    for requested, name, otherwise in unsupported:
        if requested:
            raise ArgumentError(
                f"{name} needs local_batch=True: on the global batch XLA places the collectives",
                where="make_train_step",
                fix=(
                    "make_train_step(loss_fn, local_batch=True) if loss_fn is a sum over examples "
                    f"(fsdp_jax.testing.certify checks it); otherwise {otherwise}"
                ),
            )


def check_trained(params: Mapping[str, jax.ShapeDtypeStruct], precision: Precision) -> None:
    """Raises ValueError if no parameter is trained, or one has a dtype without gradients.

    `params`: the trained ones, by path. With a scaled loss none may be in float16, in which
    gradients that are scaled back vanish.
    """
    if not params:
        raise ArgumentError(
            "nothing is trained: every parameter is frozen",
            where="frozen",
            fix="patterns that match fewer: an empty one matches every path",
        )
    for path, leaf in params.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ArgumentError(
                "only parameters of real floating-point numbers can be trained",
                where=path,
                expected="a float dtype",
                got=leaf.dtype,
                fix=(
                    f"frozen=['{path}'] in fully_shard; or make it an nnx.Variable, not an "
                    "nnx.Param"
                ),
            )
        if precision.scaling is not None and leaf.dtype == jnp.float16:
            raise ArgumentError(
                "the optimizer would compute in float16, where gradients that are small vanish",
                where=path,
                got="param=None",
                fix='param="float32"; the model made it in float16',
            )


def check_patterns(precision: Precision, model: Model) -> None:
    """Raises ValueError for a pattern of the user's in `keep_float32` that matches nothing."""
    classes = set().union(*(module.class_names for module in model.modules))
    names = classes.union(flatten(model.params), *model.aliases.values())
    own = [one for one in precision.keep_float32 if one not in Precision().keep_float32]
    matched(own, names, "precision.keep_float32", "parameter and no class of a module")


def warn_of_idle_axes(placements: Mapping[str, Placement], axes: MeshAxes) -> None:
    """Warns of mesh axes of the model's own that shard no parameter; says how to name them."""
    used = {axis for place in placements.values() for axis in spec_axes(place.spec)}
    lacking = sorted({name for place in placements.values() for name in place.dropped})
    for axis in axes.model:
        size = axes.mesh.shape[axis]
        if axis not in used and size > 1:
            fix = f"name it, data={(*axes.data, axis)} or replica='{axis}', unless the model shares"
            fix += " out work along it by constraints of its own"
            if lacking:
                fix += f". Annotations name {lacking}, which the mesh lacks: "
                fix += f"logical_axes={{'{lacking[0]}': '{axis}'}} translates one"
            warnings.warn(
                f"no parameter is sharded along the mesh axis '{axis}': its {size} devices hold "
                f"the same state and the same rows of the batch; {fix}",
                SlowerWarning,
                stacklevel=3,
            )


def check_plan(topology: Any, batch: Any, axes: MeshAxes, *, analytic: bool) -> None:
    """Raises ValueError for arguments of `Sharded.plan` that do not fit."""
    if analytic and axes.model_shards > 1:
        raise ArgumentError(
            "an analytic plan knows no mesh axes of the model's own",
            where="analytic",
            got=list(axes.model),
            fix="leave analytic out, and the plan is compiled",
        )
    if not isinstance(topology, str):
        raise ArgumentError(
            "not the name of a machine",
            where="topology",
            got=type(topology),
            fix='sharded.plan("h100:8", loss_fn, batch)',
        )
    leaves = jax.tree.leaves(batch)
    if not leaves or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        raise ArgumentError(
            "not arrays, nor their shapes",
            where="batch",
            got=batch,
            fix='{"tokens": jax.ShapeDtypeStruct((rows, length), "int32")}',
        )


def warn_whole_model(
    layout: Layout, comms: Mapping[str, ParamComm], why: str, *, stacklevel: int
) -> None:
    """Warns of a large model that is gathered at once though the user did not ask for it.

    `why`: no units were found; `stacklevel`: as in `warnings.warn`.
    """
    gathered = sum(
        prod(layout.by_path[path].shape) * comm.transform.wire.itemsize
        for path, comm in comms.items()
        if shards_of(layout.axes.mesh, layout.axes.batch_spec_axes(comm.param_spec)) > 1
    )
    if layout.strategy.gathers_per_unit and gathered >= LARGE_BYTES:
        warnings.warn(
            f"the whole model is gathered at once, {human_bytes(gathered)} on every device: {why}; "
            "units=[YourBlock] gathers block by block, units='model' says that it is meant "
            "(in a configuration units.classes, units.whole_model)",
            SlowerWarning,
            stacklevel=stacklevel,
        )
