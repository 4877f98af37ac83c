"""The optimizer's part of a training step: clip the gradients, update, or keep the old state."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fsdp_jax.sharding.layout import COPIES, Leaf
from fsdp_jax.sharding.rounding import Seed, apply_updates, step_seed
from fsdp_jax.step.finite import keep_finite
from fsdp_jax.step.matrix_stacks import spread_over_devices
from fsdp_jax.step.state import TrainState
from fsdp_jax.step.step_plan import StepPlan
from fsdp_jax.step.streaming import StreamReport, update_in_groups
from fsdp_jax.tree import PyTree, flatten, map_with_path, replace_leaves
from fsdp_jax.units.collectives import gather_stored


class Updated(NamedTuple):
    """The updated part of the state, after the step."""

    params: PyTree
    copies: PyTree
    opt_state: PyTree
    is_finite: jax.Array  # bool []: no number is kept to stay so
    report: StreamReport


def mean_and_clipped(
    gradients: PyTree, divisor: jax.Array, limit: float | None
) -> tuple[PyTree, jax.Array]:
    """Computes (gradients of the mean loss, clipped to the norm `limit`; their norm before).

    `gradients` are those of the scaled sum of the loss, `divisor` times as large.
    """
    wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), gradients)
    norm = optax.tree.norm(wide) / divisor
    clip = 1.0 if limit is None else jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
    scale = clip / divisor
    # Scale in float32 at least.
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradients), norm


def choose(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Selects the tree `new` where the condition holds, otherwise `old`."""
    # `jnp.where` would be traced as a call for each leaf.
    return jax.tree.map(lambda x, y: lax.select(condition, jnp.asarray(x), y), new, old)


def update_or_keep(
    plan: StepPlan, state: TrainState, gradients: PyTree, loss: jax.Array, applies: jax.Array
) -> Updated:
    """Updates parameters and optimizer state if `applies`; keeps finite numbers finite.

    Each device updates its own shards; under zero1, slices of replicated parameters. State in host
    memory is updated in groups, see `streaming`.
    """
    seed = None
    if plan.precision.stochastic_rounding:
        seed = step_seed(state.rng, state.step)
    if plan.offload.state:
        updated = _update_streamed(plan, state, gradients, (loss, applies, seed))
    else:
        updated = _update_whole(plan, state, gradients, (loss, applies, seed))
    # Add the frozen parameters.
    return updated._replace(params=replace_leaves(state.params, updated.params))


_Scalars = tuple[jax.Array, jax.Array, Seed | None]
"""The loss, whether the update applies, and the seed to round by."""


def _update_whole(
    plan: StepPlan, state: TrainState, gradients: PyTree, scalars: _Scalars
) -> Updated:
    """Updates state in device memory."""
    layout = plan.layout
    loss, applies, seed = scalars
    old = layout.trainable(state.params), state.opt_state
    leaves = jax.tree.leaves((layout.trainable(layout.params), layout.optimizer))
    with spread_over_devices(plan):
        updated = _apply_optimizer(plan, old, gradients, (loss, seed))
    new, is_finite = keep_finite(old, updated, leaves)
    params, opt_state = choose(applies, new, old)
    copies = _new_copies(plan, params)
    return Updated(params, copies, opt_state, is_finite, StreamReport())


def _update_streamed(
    plan: StepPlan, state: TrainState, gradients: PyTree, scalars: _Scalars
) -> Updated:
    """Updates state that is partly in host memory, group by group."""
    layout = plan.layout

    def update(trees: PyTree, gradients: PyTree, scalars: _Scalars) -> PyTree:
        """Computes new (parameters, copies, optimizer state); the old ones if not applied."""
        params, _, opt_state = trees
        loss, applies, seed = scalars
        old = params, opt_state
        updated = _apply_optimizer(plan, old, gradients, (loss, seed))
        params, opt_state = choose(applies, updated, old)
        return params, _new_copies(plan, params), opt_state

    stored = layout.trainable(layout.params), layout.other[COPIES], layout.optimizer
    old = layout.trainable(state.params), state.copies, state.opt_state
    streamed = update_in_groups(update, old, gradients, scalars, jax.tree.leaves(stored))
    params, copies, opt_state = streamed.state
    return Updated(params, copies, opt_state, streamed.is_finite, streamed.report)


def _apply_optimizer(
    plan: StepPlan,
    old: tuple[PyTree, PyTree],
    gradients: PyTree,
    scalars: tuple[jax.Array, Seed | None],
) -> tuple[PyTree, PyTree]:
    """Updates (trained parameters, optimizer state); with a seed, rounds them stochastically.

    `old`: those before the update; `scalars`: the loss and the seed.

    Arrays are in device memory: the whole tree, or some layers of the stacked ones. Raises
    ValueError for an optimizer that evaluates the loss again, for a line search.
    """
    by_path = plan.layout.by_path
    loss, seed = scalars

    # Under zero1 each device updates its own slice of replicated parameters; where the optimizer
    # state is sharded over replicas too, a part of its shard.
    def pinned(path: str, x: jax.Array) -> jax.Array:
        leaf = by_path[path]
        if leaf.spec == leaf.update_spec:  # as the state is sharded anyway
            return x
        return lax.with_sharding_constraint(x, leaf.update_sharding)

    # Pass the loss and the gradients too: some optimizers take them.
    params, opt_state = old
    params, gradients = map_with_path(pinned, params), map_with_path(pinned, gradients)
    updates, new_state = plan.tx.update(gradients, opt_state, params, value=loss, grad=gradients)
    return map_with_path(pinned, apply_updates(params, updates, seed)), new_state


def _new_copies(plan: StepPlan, params: PyTree) -> PyTree:
    """Casts updated parameters to copies in the compute dtype, replicated or sharded, by path."""
    leaves, flat = plan.layout.by_path, flatten(params)

    def copy(path: str, copied: Leaf) -> jax.Array:
        """Returns the copy of an updated parameter."""
        comm, spec = plan.comms[path], leaves[path].spec
        if copied.spec == spec:
            return flat[path].astype(copied.dtype)
        # The optimizer's update is outside `shard_map`, and so is this.
        comm = replace(comm, shard_spec=spec, mode="annotated", on_host=False)
        return gather_stored(comm, flat[path])

    return map_with_path(copy, plan.layout.other[COPIES])
