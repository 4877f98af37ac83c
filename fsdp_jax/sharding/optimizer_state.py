"""How the state of any optax transformation is sharded.

`jit(tx.init)` on an Auto mesh drops the parameters' sharding and replicates the state. So we ask
JAX itself: `tx.init` is traced on parameters whose types carry their sharding (an Explicit abstract
mesh), and each leaf of the result says how it is sharded. What comes back replicated (histories,
accumulators built from shapes alone) takes the spec of the parameter it belongs to, by path and
shape, and failing that the size heuristic. `optimizer_placements` has these rules in their order.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import jax
import optax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from fsdp_jax.compat.error_texts import first_line
from fsdp_jax.compat.flax_boxes import array_in_box, is_box
from fsdp_jax.errors import ArgumentError, did_you_mean
from fsdp_jax.sharding.mesh import axes_of, shards_of, spec_axes, spec_of
from fsdp_jax.sharding.param_leaves import ParamLeaf
from fsdp_jax.sharding.rules import (
    MIN_SIZE,
    Placement,
    Rules,
    make_rules,
)
from fsdp_jax.tree import PyTree, flatten, map_with_path, prefixes, suffixes


def optimizer_specs(
    tx: optax.GradientTransformation,
    params: PyTree,
    specs: PyTree,
    mesh: Mesh | AbstractMesh,
    *,
    min_size: int = MIN_SIZE,
    axes: str | tuple[str, ...] | None = None,
) -> PyTree:
    """Finds a PartitionSpec for every leaf of `tx.init(params)`, in the same tree.

    Each is that of the parameter which the leaf belongs to. Leaves that belong to none are sharded
    by size, as `partition_specs` does.

    Args:
        tx: any optax transformation.
        params: what `tx.init` is called with, arrays or shapes: an NNX state, Linen variables,
            dicts.
        specs: PartitionSpecs (or NamedShardings) of `params`, from `partition_specs` or Flax's
            `get_partition_spec`; one for a subtree stands for all of it.
        mesh: that of the specs; its axis names and sizes are all that is used.
        min_size: leaves of no parameter with fewer elements stay replicated.
        axes: the mesh axes to shard leaves of no parameter along, as in `partition_specs`.

    Raises:
        ValueError: a parameter without a spec, or a spec with an axis that the mesh lacks.

    Example:
        >>> params = {"kernel": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
        >>> specs = fsdp.partition_specs(params, mesh)
        >>> specs = fsdp.optimizer_specs(optax.sgd(0.1, momentum=0.9), params, specs, mesh)
        >>> tuple(specs[0].trace["kernel"])
        (None, 'data')
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise ArgumentError(
            "not an optax transformation",
            where="tx",
            got=type(tx).__name__,
            fix="such as optax.adamw(3e-4)",
        )
    rules, mesh = make_rules(mesh, min_size=min_size, axes=axes)
    by_path = flatten(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec | NamedSharding))
    given = {path: getattr(spec, "spec", spec) for path, spec in by_path.items()}
    placements = {
        path: _given_placement(path, given, mesh) for path in flatten(params, is_leaf=is_box)
    }
    _, places = optimizer_placements(tx, params, placements, rules, mesh)
    return jax.tree.map(lambda placement: placement.spec, places)


def _given_placement(path: str, given: Mapping[str, Any], mesh: Mesh) -> Placement:
    """Finds the placement of the parameter at `path` by the user's spec.

    `given`: {path: spec}, where the path of a subtree stands for all parameters in it. Raises
    ValueError where there is no spec, or it names an axis that the mesh lacks.
    """
    spec = next((given[prefix] for prefix in prefixes(path) if prefix in given), None)
    if not isinstance(spec, PartitionSpec):
        raise ArgumentError(
            "a parameter has no PartitionSpec",
            where=path,
            got=repr(spec),
            fix="specs = fsdp_jax.partition_specs(params, mesh, rules), for the same params",
        )
    for axis in set(spec_axes(spec)) - set(mesh.axis_names):
        raise ArgumentError(
            f"the mesh has no axis '{axis}'",
            where=path,
            expected=mesh.axis_names,
            got=spec,
            fix=did_you_mean(axis, mesh.axis_names),
        )
    return Placement(spec, "given", "its own spec")


def optimizer_placements(
    tx: optax.GradientTransformation,
    params: PyTree,
    placements: Mapping[str, Placement],
    rules: Rules,
    mesh: Mesh,
) -> tuple[PyTree, PyTree]:
    """Places the optimizer state: (abstract state, the same tree of Placements).

    `params`: shapes of those that are trained, in any tree; `placements`: how the optimizer updates
    them, by path; `rules`: their heuristic is for leaves that belong to no parameter.
    """
    # Where no parameter is sharded, the state is not either, and one trace gives its shapes.
    unsharded = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    abstract = jax.eval_shape(tx.init, unsharded)
    if not any(placement.spec for placement in placements.values()):
        reason = "replicated, as every parameter is for the optimizer"
        replicated = Placement(PartitionSpec(), "optimizer", reason)
        return abstract, map_with_path(lambda *_: replicated, abstract, is_leaf=_is_boxed_array)
    # JAX itself says which parameter a leaf follows; where it cannot, paths and shapes do.
    traced, why_not = _traced_specs(tx, params, placements, mesh)
    shapes = {path: tuple(leaf.shape) for path, leaf in flatten(params).items()}
    # A user's rules are for parameters.
    by_size = Rules(min_size=rules.min_size, axes=rules.axes, pads=rules.pads)

    def place(path: str, leaf: Any) -> Placement:
        """Places a leaf: as traced, or else by its path and size."""
        if traced.get(path):
            return Placement(traced[path], "optimizer", "follows its parameter through tx.init")
        placement = place_untraced(path, leaf)
        return replace(placement, reason=placement.reason + why_not)

    def place_untraced(path: str, leaf: Any) -> Placement:
        """Places a leaf: as its parameter, in blocks of it, or by size."""
        shape = tuple(array_in_box(leaf).shape)
        # It belongs to the parameter with the longest path that ends its own.
        owner = next((name for name in suffixes(path) if name in shapes), None)
        if owner is not None:
            placement = placements[owner]
            extra = len(shape) - len(shapes[owner])
            if extra >= 0 and shape[extra:] == shapes[owner]:
                spec = PartitionSpec(*[None] * (extra if placement.spec else 0), *placement.spec)
                reason = f"as parameter {owner}, by path and shape"
                return Placement(spec, "optimizer", reason, placement.missed_shards)
            if _is_scale_per_block(shapes[owner], shape):
                own = owner, shapes[owner], placement
                return _block_scale_placement(*own, shape, mesh, rules.min_size)
        return by_size.place_leaf(path, ParamLeaf(shape, names=None, stacked=0), mesh)

    return abstract, map_with_path(place, abstract, is_leaf=_is_boxed_array)


def _is_boxed_array(leaf: Any) -> bool:
    """Tells whether a leaf is Flax's box with an array in it; a masked parameter's is empty."""
    return is_box(leaf) and hasattr(array_in_box(leaf), "shape")


def _traced_specs(
    tx: optax.GradientTransformation,
    params: PyTree,
    placements: Mapping[str, Placement],
    mesh: Mesh,
) -> tuple[dict[str, PartitionSpec], str]:
    """Traces `tx.init` for the specs of the optimizer state, as JAX derives them: {path: spec}.

    The parameters of the trace are sharded by `placements`. If it fails there are none; the second
    result, for the reasons in the layout, says what JAX met, and is empty otherwise.
    """
    # Axes of size 1 divide any shape, so that arrays keep their own, and `tx.init` does with them
    # what it does unsharded.
    sizes, axis_types = zip(*((1, AxisType.Explicit) for _ in mesh.axis_names), strict=True)
    explicit = AbstractMesh(sizes, mesh.axis_names, axis_types=axis_types)

    def sharded(path: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = placements[path].spec
        full_rank = PartitionSpec(*spec, *[None] * (len(leaf.shape) - len(spec)))
        sharding = NamedSharding(explicit, full_rank)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    try:
        with use_abstract_mesh(explicit):
            state = jax.eval_shape(tx.init, map_with_path(sharded, params))
    except Exception as error:
        # The same trace without shardings succeeded: `tx.init` does what no sharding survives, such
        # as the reshapes of `optax.flatten`. The layout tells; arrays that stay replicated although
        # they could be sharded are warned of there.
        met = f"{type(error).__name__}: {first_line(error)}"
        return {}, f"; tx.init cannot be traced sharded: {met}"
    # What is padded is a dim of a parameter: a part of it, such as blocks, would be cut elsewhere.
    padded = {
        dim
        for path, leaf in flatten(params).items()
        for dim in _indivisible_dims(leaf.shape, placements[path].spec, mesh)
    }
    specs = {}
    for path, leaf in flatten(state).items():
        spec = spec_of(getattr(leaf.sharding, "spec", None) or ())
        if _indivisible_dims(leaf.shape, spec, mesh) <= padded:
            specs[path] = spec
    return specs, ""


def _indivisible_dims(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> set[tuple[int, tuple[str, ...]]]:
    """Lists the (size, mesh axes) of an array's dims that its shards do not divide."""
    dims = zip(shape, map(axes_of, spec), strict=False)
    return {(size, axes) for size, axes in dims if size % shards_of(mesh, axes)}


def _is_scale_per_block(shape: tuple[int, ...], counts: tuple[int, ...]) -> bool:
    """Tells whether an array has one number for each block of a parameter along one dim.

    `shape`: of the parameter; `counts`: of the array.
    """
    if len(shape) != len(counts):
        return False
    others = [(size, count) for size, count in zip(shape, counts, strict=True) if size != count]
    return len(others) == 1 and others[0][1] > 1 and others[0][0] % others[0][1] == 0


def _block_scale_placement(
    owner: str,
    owner_shape: tuple[int, ...],
    of_owner: Placement,
    shape: tuple[int, ...],
    mesh: Mesh,
    min_size: int,
) -> Placement:
    """Makes the placement of an array that has a scale for each block of a parameter.

    It is that of the parameter, without mesh axes that would cut a block.

    `owner`, ...: the parameter, its shape and placement; `shape`: of the scales; `min_size`:
    elements of an array whose replication is reported as waste.
    """
    entries = list(of_owner.spec)
    missed, reason = 1, f"a scale for each block of parameter {owner}"
    for dim, entry in enumerate(entries):
        shards = shards_of(mesh, entry)
        if shape[dim] != owner_shape[dim] and shape[dim] % shards:
            entries[dim] = None
            missed *= shards
            reason += f"; {shape[dim]} blocks of dim {dim} are not divisible by {shards}"
    missed = missed if prod(shape) >= min_size else 1
    return Placement(PartitionSpec(*entries), "optimizer", reason, missed)
