"""Places the parameters, and other large state, of a model on a mesh by the rules."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from jax.sharding import Mesh, PartitionSpec

from fsdp_jax.compat.flax_boxes import is_box
from fsdp_jax.errors import SlowerWarning
from fsdp_jax.sharding.logical_axes import LogicalAxes, check_logical_axes, read_logical_axes
from fsdp_jax.sharding.mesh import Entry, MeshAxes, entry_of, spec_axes
from fsdp_jax.sharding.param_leaves import read_leaves
from fsdp_jax.sharding.quantized import Blocks
from fsdp_jax.sharding.rules import HEURISTIC, Placement, Rules
from fsdp_jax.sharding.strategy import Strategy
from fsdp_jax.tree import flatten
from fsdp_jax.units.model import Model


@dataclass(frozen=True)
class PlacedModel:
    """A model, and where its arrays go on a mesh."""

    model: Model
    axes: MeshAxes  # as the model sees them
    strategy: Strategy
    rules: Rules  # what placed the arrays
    params: Mapping[str, Placement]  # by path
    state: Mapping[str, Placement]  # of other state that a rule or an annotation names
    stacked: Mapping[str, int]  # path -> leading dims that stack layers
    frozen: frozenset[str]  # paths of the parameters that are not trained


def place_model(
    rules: Rules, model: Model, mesh: Mesh, stacked: Mapping[str, int]
) -> tuple[dict[str, Placement], dict[str, Placement]]:
    """Places a model's arrays: ({path: Placement} of the parameters, the same for other state).

    Other state is placed if it is large, and a rule or its annotation names it. The heuristic is
    for parameters only: if it sharded a buffer that every layer reads, a table or a mask, every
    layer would gather it.

    `stacked`: path -> number of leading dims that stack layers.
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


def place_quantized(placed: PlacedModel, blocks: Mapping[str, Blocks]) -> dict[str, Placement]:
    """Places the quantized parameters again, so that shards hold whole blocks; {path: Placement}.

    Of all parameters; the others stay as they are. `blocks`: {path of a quantized parameter: how it
    is stored}.
    """
    aliases, boxes = placed.model.aliases, flatten(placed.model.params, is_leaf=is_box)
    leaves = read_leaves({path: boxes[path] for path in blocks}, placed.stacked)
    again = {}
    for path, leaf in leaves.items():
        known = replace(leaf, aliases=aliases.get(path, ()), granules=blocks[path].granules)
        again[path] = placed.rules.place_leaf(path, known, placed.axes.mesh)
    return {**placed.params, **again}


def warn_of_idle_axes(placements: Mapping[str, Placement], axes: MeshAxes) -> None:
    """Warns of the model's own mesh axes that shard no parameter; says how to name them."""
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
                stacklevel=4,  # the caller of fully_shard
            )


def split_data_in_axes(logical_axes: LogicalAxes | None, axes: MeshAxes) -> LogicalAxes:
    """Replaces `data` in logical axes by the mesh axes that it is split into."""
    table = read_logical_axes(logical_axes)
    check_logical_axes(table, tuple(axes.shape))
    split: list[tuple[str, Entry]] = [(axes.unsplit, axes.data)] if axes.unsplit else []
    for name, entry in table:
        parts = [axes.data if axis == axes.unsplit else (axis,) for axis in entry]
        split.append((name, entry_of([part for group in parts for part in group])))
    return split
