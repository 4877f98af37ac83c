"""Where the state of any optax transformation lies.

`jit(tx.init)` on an Auto mesh forgets the parameters' sharding and leaves the state whole on every
device. So we ask JAX itself: `tx.init` is traced on parameters whose types carry their sharding (an
Explicit abstract mesh), and each leaf of the result says how it is sharded. What comes back whole
(histories, accumulators built from shapes alone) takes the spec of the parameter it belongs to, by
path and shape, and failing that the size heuristic.
"""

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

from fsdp_jax.sharding.rules import Placement, Rules
from fsdp_jax.tree import SEPARATOR, PyTree, flatten, map_with_path


def optimizer_placements(
    tx: optax.GradientTransformation,
    params: PyTree,
    placements: dict[str, Placement],
    rules: Rules,
    mesh: Mesh,
) -> tuple[PyTree, PyTree]:
    """(abstract optimizer state, the same tree of Placements).

    Args:
        tx: any optax transformation.
        params: abstract parameters that are trained, nested dicts.
        placements: path -> how the optimizer works on that parameter: sharded also where the
            parameter itself is not.
        rules: the heuristic's settings, for leaves that belong to no parameter.
        mesh: the run's mesh.

    """
    abstract = jax.eval_shape(tx.init, params)
    if not any(at.spec or at.undivided > 1 for at in placements.values()):
        whole = Placement(
            PartitionSpec(), "optimizer", "whole, as every parameter is to the optimizer"
        )
        return abstract, jax.tree.map(lambda _: whole, abstract)
    traced = _trace(tx, params, placements, mesh)
    shapes = {path: tuple(leaf.shape) for path, leaf in flatten(params).items()}

    def place(path: str, leaf: jax.ShapeDtypeStruct) -> Placement:
        if traced.get(path):
            return Placement(traced[path], "optimizer", "follows its parameter through tx.init")
        owner, extra = _owner(path, tuple(leaf.shape), shapes)
        if owner is None:
            return _heuristic(rules, leaf, mesh)
        at = placements[owner]
        spec = PartitionSpec(*[None] * extra, *at.spec) if at.spec else PartitionSpec()
        return Placement(
            spec, "optimizer", f"as parameter {owner}, by path and shape", at.undivided
        )

    return abstract, map_with_path(place, abstract)


def _heuristic(rules: Rules, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Placement:
    """The size heuristic alone: a user's rules speak of parameters."""
    alone = Rules(min_size=rules.min_size, axes=rules.axes)
    return alone.place({"leaf": leaf}, mesh, stacked={})["leaf"]


def _trace(
    tx: optax.GradientTransformation, params: PyTree, placements: dict[str, Placement], mesh: Mesh
) -> dict[str, PartitionSpec]:
    """{path: spec} as `tx.init` gives them on sharded parameters; empty where it gives none."""
    explicit = AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names)
    )

    def typed(path: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = _full_rank(placements[path].spec, len(leaf.shape))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(explicit, spec))

    try:
        with use_abstract_mesh(explicit):
            state = jax.eval_shape(tx.init, map_with_path(typed, params))
    except Exception:
        # It ran a moment ago without shardings: it does what no sharding survives, as the reshapes
        # of `optax.flatten`.
        return {}
    return {
        path: _trimmed(getattr(leaf.sharding, "spec", None))
        for path, leaf in flatten(state).items()
    }


def _full_rank(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    return PartitionSpec(*spec, *[None] * (ndim - len(spec)))


def _trimmed(spec: PartitionSpec | None) -> PartitionSpec:
    entries = list(spec or ())
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _owner(
    path: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]
) -> tuple[str | None, int]:
    """The parameter that a leaf of the state belongs to, and how many dims stand before the
    parameter's own.

    A leaf belongs to the parameter whose path ends its own; the longest such path wins.
    """
    parts = path.split(SEPARATOR)
    for start in range(len(parts)):
        name = SEPARATOR.join(parts[start:])
        if name in shapes:
            extra = len(shape) - len(shapes[name])
            return (name, extra) if extra >= 0 and shape[extra:] == shapes[name] else (None, 0)
    return None, 0
