"""Matrices that a step's optimizer orthogonalizes, spread over devices; see `optim.spread_muon`."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from optax.contrib import MuonState

from fsdp_jax.optim.spread_muon import MatrixStack, spread_matrices
from fsdp_jax.sharding.layout import Leaf
from fsdp_jax.step.step_plan import StepPlan

Stacks = Mapping[tuple[str, ...], MatrixStack]
"""{paths of parameters: the stack of their matrices}"""


def spread_over_devices(plan: StepPlan) -> AbstractContextManager[Stacks]:
    """Makes the context in which the step's optimizer is traced; it yields the stacks it makes.

    Matrices are spread over the axes that they are sharded along. State in host memory is updated
    in groups, and its matrices are not spread.
    """
    axes = plan.layout.axes
    specs = {path: leaf.update_spec for path, leaf in plan.layout.by_path.items()}
    if axes.batch_shards == 1 or plan.offload.state:
        return nullcontext({})
    return spread_matrices(axes.mesh, axes.batch, specs)


def matrix_stacks(plan: StepPlan) -> list[MatrixStack]:
    """Lists the stacks of matrices that a step sends, by a trace of its optimizer's update."""
    layout = plan.layout
    states = jax.tree.leaves(layout.optimizer, is_leaf=lambda leaf: isinstance(leaf, MuonState))
    if not any(isinstance(state, MuonState) for state in states):
        return []

    def abstract(tree: Any) -> Any:
        def shape(leaf: Leaf) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

        return jax.tree.map(shape, tree)

    def update(params: Any, state: Any, loss: jax.Array) -> Any:
        return plan.tx.update(params, state, params, value=loss, grad=params)

    loss = jax.ShapeDtypeStruct((), jnp.float32)
    with spread_over_devices(plan) as stacks:
        params, state = layout.trainable(layout.params), layout.optimizer
        jax.eval_shape(update, abstract(params), abstract(state), loss)
    return [*stacks.values()]
