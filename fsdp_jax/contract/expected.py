"""What a step declares that it sends, parameter by parameter, from the strategy's arithmetic alone.

[Note: the limit] With n devices along an axis a ring sends (n-1)/n of an array to gather it or to
reduce and scatter it, twice that to reduce it everywhere (Patarasuk and Yuan, 2009). A parameter
that is gathered per unit is gathered in forward and again in backward, by each microbatch; one that
belongs to no unit once, as the model is entered. `shard_grad_op` and `zero1` gather once per
optimizer step. Gradients are reduced by each microbatch, or once where that is deferred: scattered
along the axes that they are sharded along, and what is left of them reduced along the others.

By sharding annotations this sum is a limit and no more: XLA may send activations in place of a
parameter. A gradient is then reduced in the dtype that its matmul yields, which is the compute
dtype; no other is declared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fsdp_jax.sharding.layout import COPIES
from fsdp_jax.sharding.mesh import DATA, axes_of, batch_axes, data_axes
from fsdp_jax.step.train_step import StepPlan
from fsdp_jax.tree import flatten

Role = Literal["gather", "reduce"]


@dataclass(frozen=True)
class Expected:
    """What one parameter sends, one way.

    Attributes:
        path: of the parameter.
        role: to the model, or its gradient back.
        op: all-gather, reduce-scatter or all-reduce.
        dtype: numpy name of the dtype on the wire.
        axis: mesh axes joined by "+", in the user's words.
        bytes: that a device sends per step.
        shapes: that the array may travel in: one layer of a stack, or all of them; what is left of
            it where it is reduced after it was scattered.

    """

    path: str
    role: Role
    op: str
    dtype: str
    axis: str
    bytes: int
    shapes: tuple[tuple[int, ...], ...]


def expected_of(plan: StepPlan) -> list[Expected]:
    """All that the parameters of a step send."""
    found: list[Expected] = []
    copies = flatten(plan.layout.other.get(COPIES, {}))
    strategy, mesh = plan.layout.strategy, plan.layout.mesh
    for path, leaf in plan.layout.by_path.items():
        comm = plan.comms[path]
        spec = leaf.spec if path in copies or strategy.gathers_params else leaf.grad_spec
        times, dtype = _gathers(plan, path), comm.transform.wire
        if path not in copies and not strategy.gathers_params:  # the updated parameter itself
            dtype = leaf.dtype
        shapes = leaf.shape[leaf.stacked :], leaf.shape
        size = prod(leaf.shape)
        if times and any(spec) and (leaf.trainable or strategy.gathers_params):
            axes = _axes(spec)
            found.append(
                _one(path, "gather", "all-gather", dtype, plan, axes, times * size, shapes)
            )
        if not leaf.trainable or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        times = 1 if plan.deferred else plan.accumulation
        reduce = comm.transform.reduce if plan.local_batch else comm.transform.compute
        scattered = _axes(leaf.grad_spec)
        rest = tuple(axis for axis in batch_axes(mesh) if axis not in scattered)
        if scattered:
            found.append(
                _one(
                    path, "reduce", "reduce-scatter", reduce, plan, scattered, times * size, shapes
                )
            )
        parts = prod(mesh.shape[axis] for axis in scattered)
        if prod(mesh.shape[axis] for axis in rest) > 1:
            part = leaf.grad_sharding.shard_shape(leaf.shape)
            kept = part[leaf.stacked :], part
            found.append(
                _one(path, "reduce", "all-reduce", reduce, plan, rest, times * size // parts, kept)
            )
    return [each for each in found if each.bytes]


def _gathers(plan: StepPlan, path: str) -> int:
    """How often a parameter is gathered in a step."""
    if not plan.per_unit:
        return 1
    return plan.accumulation * (1 if plan.comms[path].unit is None else 2)


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(axis for entry in spec for axis in axes_of(entry))


def _one(
    path: str,
    role: Role,
    op: str,
    dtype: np.dtype,
    plan: StepPlan,
    axes: Sequence[str],
    elements: int,
    shapes: tuple[tuple[int, ...], ...],
) -> Expected:
    mesh = plan.layout.mesh
    n = prod(mesh.shape[axis] for axis in axes)
    wire = on_wire(dtype, mesh.devices.flat[0].platform)
    sent = elements * wire.itemsize * (n - 1) // n * (2 if op == "all-reduce" else 1)
    named = [axis for axis in axes if mesh.shape[axis] > 1]
    return Expected(path, role, op, str(wire), axis_name(named, data_axes(mesh)), sent, shapes)


def on_wire(dtype: np.dtype, platform: str) -> np.dtype:
    """XLA:CPU widens bfloat16 before it sends it; no accelerator does."""
    return jnp.dtype("float32") if platform == "cpu" and dtype == jnp.bfloat16 else jnp.dtype(dtype)


def axis_name(axes: Sequence[str], parts: Sequence[str]) -> str:
    """`replica+data` for any axes of the mesh; one of the axes behind `data` counts as `data`."""
    return "+".join(dict.fromkeys(DATA if axis in parts else axis for axis in axes))


def by_axis(rows: Sequence[Expected]) -> Mapping[str, int]:
    """{axis: bytes}."""
    sums: dict[str, int] = {}
    for row in rows:
        sums[row.axis] = sums.get(row.axis, 0) + row.bytes
    return sums
