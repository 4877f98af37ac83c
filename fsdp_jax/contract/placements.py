"""Finds placements by which a step holds or sends more than needed, and the rules that fix them."""

from collections.abc import Iterator
from math import prod

from jax.sharding import PartitionSpec

from fsdp_jax.contract.violations import PlacementRules, Violation
from fsdp_jax.errors import human_bytes
from fsdp_jax.sharding.layout import Layout, Leaf
from fsdp_jax.sharding.mesh import axes_of, entry_of, shards_of, spec_of
from fsdp_jax.sharding.param_leaves import ParamLeaf
from fsdp_jax.sharding.path_rules import rule_text
from fsdp_jax.sharding.rules import HEURISTIC, MIN_SIZE, Rules
from fsdp_jax.step.step_plan import StepPlan

EMBEDDING = "Embed"  # in the class names of modules whose parameters are looked up in


def replicated_parameters(plan: StepPlan) -> Iterator[Violation]:
    """Yields the violations of large parameters that stay replicated under this strategy."""
    axes = plan.layout.axes
    # Replicated parameters are what such a strategy or mesh is for.
    if not plan.layout.strategy.shards_optimizer or axes.batch_shards == 1:
        return
    for leaf in plan.layout.by_path.values():
        # The size is of one layer of a stack, as the rules measure it.
        if axes.batch_spec_axes(leaf.grad_spec) or prod(leaf.shape[leaf.stacked :]) < MIN_SIZE:
            continue
        if leaf.rule == HEURISTIC:
            reason = leaf.reason
        elif leaf.rule == "annotation":
            reason = f"by {leaf.reason}"
        else:
            reason = f"by rule '{leaf.rule}'"
        cause = f"its gradient is all-reduced and its state costs {human_bytes(leaf.bytes)} a copy;"
        cause += f" {_way_to_shard(plan.layout, leaf)}"
        yield Violation(leaf.path, f"replicated on every device, {reason}", 0, cause)


def _way_to_shard(layout: Layout, leaf: Leaf) -> str:
    """Formats the rule that shards a replicated parameter."""
    along = layout.strategy.shard_axes(layout.axes)
    # The model's own axes stay; the rule adds the strategy's, whatever the parameter's size.
    own = layout.axes.model_spec(leaf.grad_spec)
    array = ParamLeaf(leaf.shape, None, leaf.stacked)
    by_size = Rules(min_size=1, axes=along, pads=True)
    spec, *_ = by_size.spec_by_size(array, leaf.mesh, own)
    return f"put this rule before the others: rules=[{_rule(layout, leaf.path, spec)}]"


def placement_rules(plan: StepPlan) -> PlacementRules:
    """Finds rules that shard another dim of parameters that are sharded along their first.

    They are for an embedding table [rows, features], and for a stack of arrays that no layer scan
    takes apart, such as [experts, inputs, outputs].
    """
    tables = {
        path
        for module in plan.model.modules
        if any(EMBEDDING in name for name in module.class_names)
        for path in module.direct
    }
    # By the features of a table, and by the shape of one array of a stack: a violation knows the
    # operand's shape only.
    lookups = dict[int, str]()
    slices = dict[tuple[int, ...], dict[str, None]]()
    for path, leaf in plan.layout.by_path.items():
        spec = _along_another_dim(plan.layout, leaf)
        if spec is None:
            continue
        rule = _rule(plan.layout, path, spec)
        if path in tables and len(leaf.shape) == 2:
            lookups[leaf.shape[1]] = f"rules=[{rule}]"
        elif len(leaf.shape) > 2:
            slice_shape = tuple(size for size in leaf.shape[1:] if size > 1)
            slices.setdefault(slice_shape, {})[rule] = None
    return PlacementRules(
        lookups, {shape: f"rules=[{', '.join(rules)}]" for shape, rules in slices.items()}
    )


def _along_another_dim(layout: Layout, leaf: Leaf) -> PartitionSpec | None:
    """Moves the batch axes of a parameter's first dim to its largest other dim in its spec.

    Returns None where the first dim has no batch axes, another has some, or no other is as large as
    their number of shards.
    """
    if not leaf.shape or leaf.stacked:
        return None
    entries = [*map(axes_of, leaf.spec), *[()] * (len(leaf.shape) - len(leaf.spec))]
    along = tuple(axis for axis in entries[0] if axis in layout.axes.batch)
    if not along or layout.axes.batch_spec_axes(PartitionSpec(*leaf.spec[1:])):
        return None
    entries[0] = tuple(axis for axis in entries[0] if axis not in along)
    # The largest dim first: its shards are the most even.
    for dim in sorted(range(1, len(entries)), key=lambda dim: -leaf.shape[dim]):
        entry = (*entries[dim], *along)
        if leaf.shape[dim] >= shards_of(leaf.mesh, entry):
            entries[dim] = entry
            return spec_of(map(entry_of, entries))
    return None


def _rule(layout: Layout, path: str, spec: PartitionSpec) -> str:
    """Formats a rule that gives a parameter this spec, with the user's names of mesh axes."""
    shapes = {path: leaf.shape for path, leaf in layout.by_path.items()}
    return rule_text(path, layout.axes.user_spec(spec), shapes)
