"""How the state of any optax transformation is sharded.

`jit(tx.init)` on an Auto mesh drops the parameters' sharding and replicates the state. So we ask
JAX itself: `tx.init` is traced on parameters whose types carry their sharding (an Explicit abstract
mesh), and each leaf of the result says how it is sharded. What comes back replicated (histories,
accumulators built from shapes alone) takes the spec of the parameter it belongs to, by path and
shape, and failing that the size heuristic.
"""

from collections.abc import Mapping

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

from fsdp_jax.sharding.mesh import spec_of
from fsdp_jax.sharding.rules import Placement, Rules
from fsdp_jax.tree import PyTree, flatten, map_with_path, suffixes


def optimizer_placements(
    tx: optax.GradientTransformation,
    params: PyTree,
    placements: Mapping[str, Placement],
    rules: Rules,
    mesh: Mesh,
) -> tuple[PyTree, PyTree]:
    """Returns (abstract optimizer state, the same tree of Placements).

    Args:
        tx: any optax transformation.
        params: abstract parameters that are trained, nested dicts.
        placements: path -> how the optimizer updates that parameter: sharded also where the
            parameter itself is not.
        rules: the heuristic's settings, for leaves that belong to no parameter.
        mesh: the run's mesh.

    """
    abstract = jax.eval_shape(tx.init, params)
    if not any(placement.spec or placement.missed_shards > 1 for placement in placements.values()):
        reason = "replicated, as every parameter is for the optimizer"
        replicated = Placement(PartitionSpec(), "optimizer", reason)
        return abstract, jax.tree.map(lambda _: replicated, abstract)
    traced = _traced_specs(tx, params, placements, mesh)
    shapes = {path: tuple(leaf.shape) for path, leaf in flatten(params).items()}

    def place(path: str, leaf: jax.ShapeDtypeStruct) -> Placement:
        if traced.get(path):
            return Placement(traced[path], "optimizer", "follows its parameter through tx.init")
        owner, extra = _owner(path, tuple(leaf.shape), shapes)
        if owner is None:
            return _heuristic(rules, leaf, mesh)
        of_owner = placements[owner]
        spec = PartitionSpec(*[None] * extra, *of_owner.spec) if of_owner.spec else PartitionSpec()
        reason = f"as parameter {owner}, by path and shape"
        return Placement(spec, "optimizer", reason, of_owner.missed_shards)

    return abstract, map_with_path(place, abstract)


def _heuristic(rules: Rules, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Placement:
    """Returns the size heuristic's placement: a user's rules are about parameters."""
    by_size = Rules(min_size=rules.min_size, axes=rules.axes)
    return by_size.place({"leaf": leaf}, mesh, stacked={})["leaf"]


def _traced_specs(
    tx: optax.GradientTransformation,
    params: PyTree,
    placements: Mapping[str, Placement],
    mesh: Mesh,
) -> dict[str, PartitionSpec]:
    """Returns {path: spec} as `tx.init` gives them on sharded parameters; empty if it fails."""
    axis_types = (AxisType.Explicit,) * len(mesh.axis_names)
    explicit = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=axis_types)

    def sharded(path: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = placements[path].spec
        full_rank = PartitionSpec(*spec, *[None] * (len(leaf.shape) - len(spec)))
        sharding = NamedSharding(explicit, full_rank)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    try:
        with use_abstract_mesh(explicit):
            state = jax.eval_shape(tx.init, map_with_path(sharded, params))
    except Exception:
        # The same trace without shardings succeeded: `tx.init` does what no sharding survives, such
        # as the reshapes of `optax.flatten`.
        return {}
    specs = {}
    for path, leaf in flatten(state).items():
        specs[path] = spec_of(getattr(leaf.sharding, "spec", None) or ())
    return specs


def _owner(
    path: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str | None, int]:
    """Returns the parameter that a leaf of the state belongs to, and how many dims precede its own.

    That is the parameter with the longest path that ends the leaf's; (None, 0) if there is none, or
    if the leaf's last dims are not its shape.
    """
    for name in suffixes(path):
        if name in shapes:
            extra = len(shape) - len(shapes[name])
            fits = extra >= 0 and shape[extra:] == shapes[name]
            return (name, extra) if fits else (None, 0)
    return None, 0
