"""Parameters as the sharding rules read them: shapes, stacked layers, annotations of Flax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from fsdp_jax.compat.flax_boxes import array_in_box, is_box, names_in_box, rules_in_box
from fsdp_jax.errors import ArgumentError
from fsdp_jax.sharding.logical_axes import Table, is_entry, read_logical_axes
from fsdp_jax.sharding.mesh import Entry
from fsdp_jax.sharding.path_rules import Pattern, matches
from fsdp_jax.tree import PyTree, flatten, prefixes


def stacked_dims(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Finds parameters that look like layers stacked along dim 0 for a layer scan: {path: 1}.

    For trees of which nothing but shapes is known; `added_dims` knows more. A subtree is a stack
    where every leaf has the same leading dim, some leaf has three dims or more, and some dim is as
    large as the leading one: layers are fewer than features. What it takes for a stack by mistake
    is sharded along another dim, or stays replicated where it is small without the leading one.
    """
    subtrees: dict[str, list[str]] = {}
    for path in shapes:
        for root in prefixes(path)[1:]:
            subtrees.setdefault(root, []).append(path)
    stacked: dict[str, int] = {}
    for paths in subtrees.values():
        leading = {shapes[path][0] if shapes[path] else 0 for path in paths}
        rank = max(len(shapes[path]) for path in paths)
        features = max((size for path in paths for size in shapes[path][1:]), default=0)
        if len(paths) > 1 and rank >= 3 and len(leading) == 1 and features >= max(leading):
            stacked |= dict.fromkeys(paths, 1)
    return stacked


def added_dims(
    made: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Counts the leading dims that parameters have got since they were made: {path: dims}, if any.

    Transforms of Flax that stack layers (scan, vmap) add them to what is made inside. A parameter
    that has none, beside others of its module that have, is stacked as they are where its leading
    dims are the same: it may replace one of them (`nnx.Param(2 * layer.kernel[...])`), which equal
    sizes alone cannot tell from one that is not stacked.

    Args:
        made: the shapes in which the model made its parameters, by path. Of parameters that are
            not here no transform was seen: `stacked_dims` decides by their shapes.
        shapes: those that the parameters have.

    """
    stacked: dict[str, int] = {}
    modules: dict[str, tuple[int, ...]] = {}  # module -> its leading dims
    for path, shape in shapes.items():
        count = len(shape) - len(made.get(path, shape))
        if count > 0 and shape[count:] == made[path]:
            stacked[path] = count
            modules[prefixes(path)[1]] = shape[:count]
    for path, shape in shapes.items():
        leading = modules.get(prefixes(path)[1], ())
        if path not in stacked and leading and shape[: len(leading)] == leading:
            stacked[path] = len(leading)
    unseen = {path: shape for path, shape in shapes.items() if path not in made}
    return stacked_dims(unseen) | stacked


@dataclass(frozen=True)
class ParamLeaf:
    """A parameter, as far as the rules read it."""

    shape: tuple[int, ...]
    names: tuple[Any, ...] | None
    stacked: int
    table: Table = ()  # its own logical axes, which Flax keeps beside the names
    aliases: tuple[str, ...] = ()  # its paths in other modules, where it is shared
    # Of a quantized parameter: for each dim, the elements that a shard must not cut.
    granules: tuple[int, ...] = ()

    def matches(self, pattern: Pattern, path: str) -> bool:
        """Matches a rule's pattern to its path, or to another path of it."""
        return any(matches(pattern, each) for each in (path, *self.aliases))


def read_leaves(params: PyTree, stacked: Mapping[str, int] | None = None) -> dict[str, ParamLeaf]:
    """Reads a tree of arrays, shapes or boxes of Flax: {path: ParamLeaf}.

    `stacked`: {path: number of dims that stack layers}; by default as `stacked_dims` detects them.
    """
    # Shapes, whatever Flax has wrapped around the arrays.
    boxes = flatten(params, is_leaf=is_box)
    shapes = {}
    for path, box in boxes.items():
        array = array_in_box(box)
        if not hasattr(array, "shape"):
            raise ArgumentError(
                "a leaf of the parameters is no array",
                where=path,
                got=type(array).__name__,
                fix="pass the arrays alone: nnx.state(model, nnx.Param), or variables['params']",
            )
        shapes[path] = tuple(array.shape)
    if stacked is None:
        stacked = stacked_dims(shapes)
    # Annotations: names for each dim, and the table that came with them.
    leaves = {}
    for path, shape in shapes.items():
        names = logical_names(boxes[path], path)
        layer_dims = stacked.get(path, 0)
        if names is not None and len(names) == len(shape) - layer_dims:
            names = (None,) * layer_dims + names  # annotated before the layers were stacked
        table = read_logical_axes(rules_in_box(boxes[path]))
        leaves[path] = ParamLeaf(shape, names, layer_dims, table)
    return leaves


def logical_names(leaf: Any, path: str = "") -> tuple[Entry, ...] | None:
    """Reads the names that `nnx.with_partitioning` or `nn.with_partitioning` gave a parameter.

    Raises ValueError where these are not a name, several or None for each dim.
    """
    names = names_in_box(leaf)
    names = getattr(names, "spec", names)  # of a NamedSharding
    if names is None:
        return None
    if isinstance(names, tuple | list | PartitionSpec):
        entries = [None if name is PartitionSpec.UNCONSTRAINED else name for name in names]
        if all(map(is_entry, entries)):
            return tuple(entries)
    fix = f"({names!r},)" if isinstance(names, str) else '("embed", None)'
    fix = f"with_partitioning(init, {fix})"
    raise ArgumentError(
        "an annotation has one entry per dim: a name, several, or None",
        where=path,
        got=repr(names),
        fix=fix,
    )
