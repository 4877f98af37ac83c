"""Gathering and reduction of each parameter of a model, and casts between its modules."""

import re
from collections.abc import Collection, Mapping, Set
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax.errors import ArgumentError
from fsdp_jax.sharding.layout import COPIES, Layout
from fsdp_jax.sharding.mesh import MeshAxes, shards_of
from fsdp_jax.sharding.offload import Offload, worth_sending
from fsdp_jax.sharding.patterns import matched
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.sharding.quantized import Blocks, QuantizedBase, block_dim
from fsdp_jax.tree import flatten
from fsdp_jax.units.auto_wrap import Owners
from fsdp_jax.units.comm import AxesAtOnce, Mode, ParamComm
from fsdp_jax.units.gather_transform import TRANSFORMS, GatherTransform, QuantizedGather
from fsdp_jax.units.model import Boundary, Model
from fsdp_jax.units.placement import PlacedModel
from fsdp_jax.units.remat import SAVED, Activations
from fsdp_jax.units.unit import ROOT

_BIAS = re.compile(r"bias[^/]*$")


def float32_paths(model: Model, precision: Precision) -> set[str]:
    """Finds the paths of parameters that are gathered in float32: `Precision.keep_float32`."""
    by_class = {
        path
        for module in model.modules
        for path in module.direct
        if precision.keeps(module.class_names)
    }
    return by_class | {
        path
        for path in flatten(model.params)
        if precision.keeps((path, *model.aliases.get(path, ())))
    }


def check_kept_float32(precision: Precision, model: Model) -> None:
    """Raises ValueError for a pattern of the user's in `keep_float32` that matches nothing."""
    classes = set().union(*(module.class_names for module in model.modules))
    names = classes.union(flatten(model.params), *model.aliases.values())
    own = [one for one in precision.keep_float32 if one not in Precision().keep_float32]
    matched(own, names, "precision.keep_float32", "parameter and no class of a module")


def eight_bit_kernels(
    model: Model, precision: Precision, units: Owners, stacked: Mapping[str, int]
) -> set[str]:
    """Finds the paths of the units' kernels that are gathered, scattered or multiplied in 8 bits.

    `stacked`: path -> leading dims that stack layers. Raises ValueError if 8 bits are requested and
    no kernel is found.
    """
    if not precision.eight_bit:
        return set()
    kernels = _unit_kernels(model, precision, units, stacked)
    if not kernels:
        raise ArgumentError(
            "float8 and int8 are for the kernels of units, and no unit has one",
            where="precision",
            got=sorted({str(unit) for unit in units.values() if unit}) or "the whole model as one",
            fix=(
                "units=[Block], the class of the model's layers; or leave gather, matmul and "
                "scatter out"
            ),
        )
    return kernels


def _unit_kernels(
    model: Model, precision: Precision, units: Owners, stacked: Mapping[str, int]
) -> set[str]:
    """Finds the paths of the units' kernels.

    A kernel has two dims or more, and is not a bias, not an embedding table and not kept in
    float32. Parameters outside of the units, such as the head, are none.
    """
    # Leave out embedding tables, and parameters that are gathered in float32.
    tables = {path for each in model.modules if "Embed" in each.class_names for path in each.direct}
    others = tables | float32_paths(model, precision)
    dims = {path: len(x.shape) - stacked.get(path, 0) for path, x in flatten(model.params).items()}
    return {
        path
        for path, unit in units.items()
        if unit and dims[path] >= 2 and path not in others and not _BIAS.search(path)
    }


def quantized_parameters(
    placed: PlacedModel, base: QuantizedBase | None, precision: Precision, units: Owners
) -> dict[str, Blocks]:
    """Finds the frozen parameters that are stored in 4 or 8 bits: {path: how}.

    Raises ValueError where a pattern names a trained parameter, where no kernel is frozen, and for
    a kernel whose blocks a mesh axis of the model cuts.
    """
    if base is None:
        return {}
    chosen = _chosen_kernels(placed, base, precision, units)
    params = flatten(placed.model.params)
    found, left = {}, {}
    for path in sorted(chosen):
        shape, layers = tuple(params[path].shape), placed.stacked.get(path, 0)
        dtype = precision.storage_dtype(params[path].dtype, trained=False)
        if not jnp.issubdtype(dtype, jnp.floating) or len(shape) < layers + 2 or not prod(shape):
            left[path] = f"{dtype}{list(shape)} is no matrix of floats"
            continue
        blocks = Blocks(base, shape, dtype, block_dim(shape, layers, base.granule))
        if prod(blocks.stored_shape) >= prod(shape) * dtype.itemsize:
            left[path] = f"{dtype}{list(shape)} is too small for {base.granule} elements in a row"
            continue
        _check_whole_blocks(path, blocks, placed)
        found[path] = blocks
    # Each pattern, and a base without patterns, must find some.
    for pattern in base.kernels:
        named = matched((pattern,), params, "base.kernels", aliases=placed.model.aliases)
        if not found.keys() & named:
            path = min(named)
            raise ArgumentError(
                "base.kernels names no parameter that can be stored in 4 or 8 bits",
                where=path,
                got=left[path],
                fix=f"leave '{pattern}' out of base.kernels",
            )
    if not found:
        raise _nothing_to_quantize(left, placed.frozen, units)
    return found


def _chosen_kernels(
    placed: PlacedModel, base: QuantizedBase, precision: Precision, units: Owners
) -> Set[str]:
    """Lists the paths that a base names, or else the frozen kernels of units.

    Raises ValueError where it names a trained parameter.
    """
    model = placed.model
    if not base.kernels:
        return _unit_kernels(model, precision, units, placed.stacked) & placed.frozen
    params = flatten(model.params)
    chosen = set(matched(base.kernels, params, "base.kernels", aliases=model.aliases))
    if trained := sorted(chosen - placed.frozen):
        raise ArgumentError(
            "a trained parameter cannot be stored in 4 or 8 bits",
            where=trained[0],
            expected="frozen parameters",
            got=f"base.kernels={tuple(base.kernels)}",
            fix="name it in frozen, or leave it out of base.kernels",
        )
    return chosen


def _nothing_to_quantize(
    left: Mapping[str, str], frozen: Collection[str], units: Owners
) -> ArgumentError:
    """Says why a base finds no kernel. `left`: {path of a frozen kernel: why it cannot be}."""
    for path, why in left.items():
        return ArgumentError(
            "no frozen kernel can be quantized",
            where=path,
            got=why,
            fix="a smaller QuantizedBase.block, or no base",
        )
    fix = "units=[Block], the class of the model's layers"
    if frozen and not any(units[path] for path in frozen):
        return ArgumentError(
            "no frozen parameter belongs to a unit of a part of the model",
            where="base",
            got="units='model'",
            fix=f"{fix}, or base.kernels=('kernel',)",
        )
    return ArgumentError(
        "the base is to be quantized, and no kernel of a unit is frozen",
        where="base",
        got=sorted(frozen)[:4] or "frozen=()",
        fix=f"frozen=('kernel',), of LoRA frozen=adapted.frozen, and {fix}",
    )


def _check_whole_blocks(path: str, blocks: Blocks, placed: PlacedModel) -> None:
    """Raises ValueError for blocks that shards along a mesh axis of the model would cut."""
    spec, axes = placed.params[path].spec, placed.axes
    entry = [*axes.model_spec(spec), *[None] * len(blocks.shape)][blocks.dim]
    shards, granule = shards_of(axes.mesh, entry), blocks.base.granule
    if blocks.shape[blocks.dim] % (shards * granule) and shards > 1:
        raise ArgumentError(
            "a mesh axis of the model cuts the blocks of a quantized kernel",
            where=path,
            expected=f"dim {blocks.dim} a multiple of {shards} shards x {granule} elements",
            got=blocks.shape,
            fix=(
                "a smaller QuantizedBase.block, scales of floats, or a rule that shards another "
                "dim along that axis"
            ),
        )


def abstract_copies(
    placed: PlacedModel,
    trained: Mapping[str, Any],
    precision: Precision,
    units: Owners,
    offload: Offload,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Describes the copies that a step computes with: {path: shape and compute dtype}.

    In mixed precision, a strategy that replicates parameters and shards their optimizer state can
    shard the master weights too: only the copy is replicated. If the master weights are in host
    memory, the units fetch the copy. Parameters that units gather in float8 have no copy: the units
    fetch their master weights.

    `trained`: {path: shape and dtype} of the parameters as they are stored.
    """
    model, stacked = placed.model, placed.stacked
    float32 = float32_paths(model, precision)
    kernels = eight_bit_kernels(model, precision, units, stacked)
    copies = {}
    for path, leaf in trained.items():
        compute, _ = precision.comm_dtypes(path in float32, leaf.dtype)
        replicated = placed.strategy.gathers_updates and placed.params[path].spec
        large = worth_sending(leaf.shape, stacked.get(path, 0), placed.rules.min_size)
        in_format = precision.gather is not None and path in kernels
        # float8 is made from the master weights: from a copy it would be rounded twice.
        fetched = offload.params and large and not in_format
        has_other_dtype = compute != leaf.dtype and (replicated or fetched)
        if has_other_dtype or (replicated and in_format):
            copies[path] = jax.ShapeDtypeStruct(leaf.shape, compute)
    return copies


def param_comms(
    model: Model,
    layout: Layout,
    precision: Precision,
    units: Owners,
    mode: Mode,
    *,
    kept: Mapping[str, int] = MappingProxyType({}),
    deferred: bool = False,
    microbatches: int = 1,
) -> dict[str, ParamComm]:
    """Plans each parameter's communication: {path: how it is gathered, and its gradient reduced}.

    `units`: {path: the unit that gathers it}; `kept`: {path: its layers that stay gathered};
    `deferred`: reduce gradients after the last microbatch, of so many.
    """
    # Facts about the whole model: dtypes, copies to compute with, the collectives of its mesh.
    float32 = float32_paths(model, precision)
    stacked = {path: leaf.stacked for path, leaf in layout.by_path.items()}
    kernels = eight_bit_kernels(model, precision, units, stacked)
    copies = flatten(layout.other[COPIES])
    axes_at_once = _axes_at_once(layout.axes)
    once = not layout.strategy.gathers_per_unit
    comms = {}
    for path, leaf in layout.by_path.items():
        # How this parameter is sent: from its copy, if it has one, and in float8 if it is a kernel.
        compute, reduce = precision.comm_dtypes(path in float32, leaf.dtype)
        computed_with = copies.get(path, leaf)
        is_kernel = path in kernels and bool(jnp.issubdtype(leaf.dtype, jnp.floating))
        transform: GatherTransform
        if leaf.blocks:
            compute, reduce = precision.comm_dtypes(path in float32, leaf.blocks.dtype)
            transform = QuantizedGather(leaf.blocks.dtype, compute, reduce, leaf.blocks)
        else:
            transform = TRANSFORMS[precision.gather if is_kernel else None](
                leaf.dtype, compute, reduce
            )
        comms[path] = ParamComm(
            path=path,
            unit=units[path],
            shape=leaf.model_shape,
            axes=leaf.axes,
            shard_spec=computed_with.spec,
            grad_spec=leaf.grad_spec,
            transform=transform,
            mode=mode,
            stacked=leaf.stacked,
            axes_at_once=axes_at_once,
            in_loop=leaf.stacked > 0 or microbatches > 1,
            on_host=computed_with.on_host,
            deferred=deferred,
            # Dequantized once for the step, a base would be whole in the compute dtype.
            already_gathered=once and not leaf.blocks,
            keeps=kept.get(path, 0),
            trained=leaf.trainable and bool(jnp.issubdtype(leaf.dtype, jnp.floating)),
            float8_matmuls=path in kernels and precision.matmul is not None,
            int8_scatter=(
                is_kernel
                and mode == "explicit"
                and precision.scatter is not None
                and shards_of(leaf.mesh, leaf.axes.batch_spec_axes(leaf.grad_spec)) > 1
            ),
        )
    if mode == "explicit":
        _check_int8_scatter(layout, precision, comms)
    return comms


def _check_int8_scatter(
    layout: Layout, precision: Precision, comms: Mapping[str, ParamComm]
) -> None:
    """Raises ValueError if gradients are to be scattered in int8, but no kernel's gradient is."""
    if precision.scatter is None or any(each.int8_scatter for each in comms.values()):
        return
    if layout.axes.batch_shards == 1:  # one device, which sends nothing
        return
    raise ArgumentError(
        f"{layout.strategy.name} scatters the gradient of no kernel here, so none is sent in int8",
        where="precision.scatter",
        expected="a strategy that shards gradients, and kernels of at least min_size elements",
        got={path: str(layout.by_path[path].grad_spec) for path in [*comms][:4]},
        fix="strategy='full_shard'; or leave scatter out",
    )


def make_boundaries(
    model: Model,
    precision: Precision,
    units: Owners,
    activations: Mapping[str, Activations],
    *,
    chosen: bool,
) -> dict[str, Boundary]:
    """Makes the boundaries of modules: {module path: what happens as calls enter and leave it}.

    Units gather. If dtypes mix, inputs are cast, and so are the outputs of float32 modules.
    `activations`: path of a unit -> how its activations are kept; includes units that gather
    nothing. `chosen`: the user named the units. Other units leave dtypes as if the whole model were
    one unit.
    """
    compute = precision.cast_dtype
    gathering = {unit for unit in units.values() if unit}
    float32 = float32_paths(model, precision) if compute is not None else set()
    found = {}
    for module in model.modules:
        # The model and the units that the user chose cast their inputs; modules with their own
        # dtype cast their outputs back.
        is_root = module.path == ROOT
        is_unit = module.path in gathering
        casts = precision.cast_inputs and (is_root or (is_unit and chosen))
        cast_out = None
        if is_root:
            cast_out = precision.output_dtype
        elif module.pinned or module.direct & float32:
            cast_out = compute
        boundary = Boundary(
            unit=module.path if is_unit or module.path in activations else None,
            activations=activations.get(module.path, SAVED),
            cast_in=compute if casts else None,
            cast_out=cast_out,
            pin=is_root or is_unit,
        )
        # Leave out a boundary that would do nothing: calls cross it for free.
        if boundary != Boundary():
            found[module.path] = boundary
    return found


def _axes_at_once(axes: MeshAxes) -> AxesAtOnce:
    """Chooses how many mesh axes a collective spans: on the torus of a TPU one at a time.

    `step.xla_options.with_sparse_cores` chooses again where SparseCores run the collectives.
    NCCL's collectives span all devices at once, on any network. Virtual CPU devices behave like a
    TPU if the data axis consists of several mesh axes.
    """
    platform = axes.mesh.devices.flat[0].platform
    if platform == "tpu" or (platform == "cpu" and len(axes.data) > 1):
        return "one"
    return "all"
