"""Where the parameters and the large other state of a model go on a mesh, by the rules."""

from collections.abc import Mapping
from math import prod

from jax.sharding import Mesh, PartitionSpec

from fsdp_jax.compat.flax_boxes import is_box
from fsdp_jax.sharding.logical_axes import LogicalAxes, check_logical_axes, read_logical_axes
from fsdp_jax.sharding.mesh import Entry, MeshAxes, entry_of
from fsdp_jax.sharding.rules import HEURISTIC, Placement, Rules
from fsdp_jax.tree import flatten
from fsdp_jax.units.model import Model


def place_model(
    rules: Rules, model: Model, mesh: Mesh, stacked: Mapping[str, int]
) -> tuple[dict[str, Placement], dict[str, Placement]]:
    """Returns ({path: Placement} of the parameters, the same of other state that is placed).

    That is large state which a rule or its annotation names. The heuristic is for parameters: of a
    buffer that every layer reads, a table or a mask, it would make a gather in every layer.

    `stacked`: path -> leading dims that stack layers.
    """
    params = flatten(model.params, is_leaf=is_box)
    rest = flatten(model.boxed_rest, is_leaf=is_box)
    sizes = {path: prod(leaf.shape) for path, leaf in flatten(model.rest).items()}
    large = {path: leaf for path, leaf in rest.items() if sizes[path] >= rules.min_size}
    leaves = params | large
    placed = rules.place(leaves, mesh, stacked=stacked, others=large, aliases=model.aliases)
    state = {path: placed[path] for path in large if placed[path].rule != HEURISTIC}
    for path in large.keys() - state.keys():
        if names := placed[path].dropped:
            reason = f"its annotation names {list(names)}, which the mesh lacks: replicated"
            state[path] = Placement(PartitionSpec(), "state", reason)
    return {path: placed[path] for path in params}, state


def split_data_in_axes(logical_axes: LogicalAxes | None, axes: MeshAxes) -> LogicalAxes:
    """Returns logical axes with `data` replaced by the mesh axes that it is split into."""
    table = read_logical_axes(logical_axes)
    check_logical_axes(table, tuple(axes.shape))
    split: list[tuple[str, Entry]] = [(axes.unsplit, axes.data)] if axes.unsplit else []
    for name, entry in table:
        parts = [axes.data if axis == axes.unsplit else (axis,) for axis in entry]
        split.append((name, entry_of([part for group in parts for part in group])))
    return split
