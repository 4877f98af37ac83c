"""Where the state of any optax transformation lies.

`jit(tx.init)` on an Auto mesh forgets the parameters' sharding and leaves the state whole on every device. So we ask
JAX itself: `tx.init` is traced on parameters whose types carry their sharding (an Explicit abstract mesh), and each
leaf of the result says how it is sharded. What comes back whole (histories, accumulators built from shapes alone)
takes the spec of the parameter it belongs to, by path and shape, and failing that the size heuristic.
"""

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from fsdp_jax.mesh import axes_of
from fsdp_jax.rules import Placement, Rules
from fsdp_jax.tree import SEPARATOR, PyTree, flatten, map_with_path


def optimizer_placements(
    tx: optax.GradientTransformation, params: PyTree, specs: dict[str, PartitionSpec], rules: Rules, mesh: Mesh
) -> tuple[PyTree, PyTree]:
    """(abstract optimizer state, the same tree of Placements).

    Args:
        tx: any optax transformation.
        params: abstract parameters that are trained, nested dicts.
        specs: path -> how the optimizer works on that parameter: sharded also where the parameter itself is not.
        rules: the heuristic's settings, for leaves that belong to no parameter.
        mesh: the run's mesh.

    """
    abstract = jax.eval_shape(tx.init, params)
    if not any(specs.values()):
        return abstract, jax.tree.map(
            lambda _: Placement(PartitionSpec(), "strategy", "optimizer replicated"), abstract
        )
    traced = _trace(tx, params, specs, mesh)
    shapes = {path: tuple(leaf.shape) for path, leaf in flatten(params).items()}

    def place(path: str, leaf: jax.ShapeDtypeStruct, spec: PartitionSpec | None) -> Placement:
        if spec is not None and any(axes_of(entry) for entry in spec):
            return Placement(spec, "optimizer", "follows its parameter through tx.init")
        owner, extra = _owner(path, tuple(leaf.shape), shapes)
        if owner is not None:
            inherited = PartitionSpec(*[None] * extra, *specs[owner]) if specs[owner] else PartitionSpec()
            return Placement(inherited, "optimizer", f"as parameter {owner}, by path and shape")
        return _heuristic(rules, leaf, mesh)

    return abstract, map_with_path(place, abstract, traced)


def _heuristic(rules: Rules, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Placement:
    """The size heuristic alone: a user's rules speak of parameters."""
    alone = Rules(min_size=rules.min_size, axes=rules.axes)
    return alone.place({"leaf": leaf}, mesh, stacked={})["leaf"]


def _trace(tx: optax.GradientTransformation, params: PyTree, specs: dict[str, PartitionSpec], mesh: Mesh) -> PyTree:
    """Tree of specs as `tx.init` gives them on sharded parameters; None where it gives none."""
    explicit = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))
    typed = map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(explicit, _full_rank(specs[path], len(leaf.shape)))
        ),
        params,
    )
    with use_abstract_mesh(explicit):
        state = jax.eval_shape(tx.init, typed)
    return jax.tree.map(lambda leaf: _trimmed(getattr(leaf.sharding, "spec", None)), state)


def _full_rank(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    return PartitionSpec(*spec, *[None] * (ndim - len(spec)))


def _trimmed(spec: PartitionSpec | None) -> PartitionSpec:
    entries = list(spec or ())
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _owner(path: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]) -> tuple[str | None, int]:
    """The parameter that a leaf of the state belongs to, and how many dims stand before the parameter's own.

    A leaf belongs to the parameter whose path ends its own; the longest such path wins.
    """
    parts = path.split(SEPARATOR)
    for start in range(len(parts)):
        name = SEPARATOR.join(parts[start:])
        if name in shapes:
            extra = len(shape) - len(shapes[name])
            return (name, extra) if extra >= 0 and shape[extra:] == shapes[name] else (None, 0)
    return None, 0
