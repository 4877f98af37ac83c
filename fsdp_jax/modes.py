"""Which of the two ways of saying it serves a step: collectives by name, or by annotation. See the note in `travel`.

A device may run the loss on its own part of the batch only if the loss is a sum over examples. That is proven on the
traced program, or promised; failing both, the whole batch is kept and what that costs is said.
"""

import warnings
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax.errors import human_bytes
from fsdp_jax.examples import sums_over_examples
from fsdp_jax.prefetch import Report
from fsdp_jax.step import StepPlan, sum_and_count
from fsdp_jax.tree import PyTree, unflatten
from fsdp_jax.units import Shard


class SlowerWarning(UserWarning):
    """Something asked for is not done, and this is what it costs."""


def settled(plan: StepPlan, batch: PyTree, local_batch: bool | None) -> StepPlan:
    """The plan as it will be run.

    Args:
        plan: with manual routes and all that was asked for.
        batch: shapes of one microbatch, [rows, ...].
        local_batch: whether a device may see its own part of the batch alone; None asks for the proof.

    Warns:
        SlowerWarning: it may not, and something that was asked for needs it.

    """
    why = "" if plan.layout.mesh.size == 1 else _obstacle(plan, batch, local_batch)
    plan = replace(plan, report=Report(), together=why)
    if not why and plan.layout.mesh.size > 1:
        return plan
    costs = _costs(plan) if why else []
    if costs:
        warnings.warn(f"{why}: {'; '.join(costs)}", SlowerWarning, stacklevel=2)
    routes = {path: replace(route, mode="annotate", hops=False) for path, route in plan.routes.items()}
    return replace(plan, routes=routes, deferred=False)


def _obstacle(plan: StepPlan, batch: PyTree, local_batch: bool | None) -> str:
    """Why a device must see the whole batch; empty where it need not."""
    if local_batch is False:
        return "local_batch=False keeps the whole batch together"
    layers = next((path for path, route in plan.routes.items() if any(route.rest[: route.stacked])), None)
    if layers is not None:
        return f"'{layers}' is sharded along its layers, of which a device would see some"
    state = next(iter(plan.model.batch_statistics), None)
    if state is not None:
        return f"the model keeps state ('{state}') that may need the whole batch"
    if local_batch:
        return ""
    leaves = plan.layout.by_path
    shapes = {p: jax.ShapeDtypeStruct(leaves[p].shape, route.compute) for p, route in plan.routes.items()}
    other = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), plan.layout.other)
    trained = {path: shape for path, shape in shapes.items() if leaves[path].trainable}
    frozen = {path: shape for path, shape in shapes.items() if path not in trained}

    def sums(batch: PyTree, trained: PyTree, frozen: PyTree, rest: PyTree, key: jax.Array) -> PyTree:
        mixed = sum(jnp.max(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(batch))

        def weight(path: str, value: jax.Array) -> Any:
            route = replace(plan.routes[path], arrived=True)
            if not route.unit:  # gathered before the loss is entered
                return value
            shard = Shard(value, route)
            if plan.per_unit and value.ndim:  # what reads it behind the unit's back would see one device's part
                shard.guard = jnp.full(value.shape, mixed, jnp.float32)
            return shard

        def loss(trained: PyTree) -> Any:
            weights = unflatten({path: weight(path, value) for path, value in (trained | frozen).items()})
            out, after = plan.model.run(
                plan.loss_fn, weights, rest, batch, key, plan.boundaries, training=True, device=None
            )
            total, count = sum_and_count(out)
            return total, (total, count, after)

        # The gradients too: a derivative rule of the user's own may mix the examples where its function does not.
        gradients, (total, count, after) = jax.grad(loss, has_aux=True)(trained)
        return (total, count, gradients), after

    parts = plan.layout.mesh.size
    verdict = sums_over_examples(sums, batch, trained, frozen, other["model_state"], other["rng"], parts=parts)
    if verdict.proven:
        return ""
    fix = "if it is one, say so by local_batch=True"
    ours = f" at {Path(__file__).name}:" in verdict.reason  # where the guards of shards are made
    why = "it reads parameters of units outside them" if ours else f"{verdict.reason}; {fix}"
    return f"loss_fn is not proven to be a sum over examples ({why})"


def _costs(plan: StepPlan) -> list[str]:
    """What is lost by annotations."""
    trained = [(path, leaf) for path, leaf in plan.layout.by_path.items() if leaf.trainable]
    whole = sum(prod(leaf.shape) * plan.routes[path].compute.itemsize for path, leaf in trained)
    costs = []
    if plan.deferred:
        each = f"up to {human_bytes(2 * whole)} each"
        costs.append(f"gradients are reduced after each of {plan.accumulation} microbatches, {each}")
    recast = [route for route in plan.routes.values() if route.reduce != route.compute]
    if recast:
        costs.append(f"gradients are reduced in {recast[0].compute}, not {recast[0].reduce}")
    if any(route.hops for route in plan.routes.values()):
        more = human_bytes(whole * plan.accumulation)
        costs.append(f"gradients travel as all-reduces, not reduce-scatters, up to {more} more per step")
    if plan.prefetch != "none":
        costs.append("gradients of a unit are reduced before the next one computes")
    return costs
