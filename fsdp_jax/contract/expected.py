"""Computes the traffic that a step declares, parameter by parameter, from the strategy alone.

[Note: the limit] With n devices along an axis, a ring sends (n-1)/n of an array in an all-gather or
a reduce-scatter, and twice that in an all-reduce (Patarasuk and Yuan, 2009). A parameter that is
gathered per unit is gathered in forward and, unless it stays gathered, again in backward, by each
microbatch; a parameter of no unit is gathered once, as the model is entered. `shard_grad_op` and
`zero1` gather once per optimizer step. Gradients are reduced by each microbatch, or once where that
is deferred: scattered along the axes that they are sharded along, and each device's part reduced
along the others. Where the optimizer updates parts of a parameter's shard, these are gathered once
per optimizer step.
The matrices of `optim.muon` are made whole and sharded again by two all-to-alls.

A kernel that is gathered in float8 has a scale, which its shards agree on by an all-reduce of a
scalar; like those of the loss and the norms, these bytes are not declared.

A gradient that is scattered in int8 is sent by an all-to-all of each device's part, or one after
another where mesh axes take turns, with a float32 scale for each 256 elements; its sum is then
reduced along the other axes in the reduce dtype.

A gradient whose dims are not divisible is padded to be scattered. With sharding annotations XLA
makes an all-reduce of it, twice the bytes, and that is declared.

Another model of the step is gathered in the forward pass, and in the backward pass too where the
loss is differentiated through it, which the trace of the step tells. The average of the model
itself is gathered once more where it is sharded along more axes than the parameters.

With prefetch `pre`, hybrid strategies sum the gradients of stacked layers over the replicas once
more than there are layers: zeros, at the start of each backward loop.

The contract allows 2% more than this sum. With sharding annotations XLA may choose other
collectives, such as one of activations in place of a parameter's. A gradient is then reduced in the
dtype that its matmul yields, which is the compute dtype; no other is declared.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fsdp_jax.optim.params_ema import find_average
from fsdp_jax.optim.spread_muon import MatrixStack
from fsdp_jax.sharding.layout import COPIES, Leaf
from fsdp_jax.sharding.precision import GATHER_FORMATS
from fsdp_jax.step.average import by_parameter
from fsdp_jax.step.matrix_stacks import matrix_stacks
from fsdp_jax.step.step_plan import OtherModel, StepPlan
from fsdp_jax.tree import flatten
from fsdp_jax.units.int8_blocks import BLOCK, packed_bytes

Role = Literal["gather", "reduce", "update"]
# Elements that a device sends of an array, as multiples of (n-1)/n: an all-reduce in a ring is a
# reduce-scatter and an all-gather.
RING_PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
_ON_CPU = {"bfloat16": "float32"} | {name: each.on_cpu for name, each in GATHER_FORMATS.items()}


@dataclass(frozen=True)
class ExpectedTraffic:
    """The declared traffic of one parameter, by one operation."""

    path: str  # of the parameter, or which matrices the optimizer spreads over devices
    # gather of the parameter, reduction of its gradient, communication of its update
    role: Role
    op: str  # all-gather, reduce-scatter, all-reduce or all-to-all
    dtype: str  # numpy name of the dtype that is sent
    axis: str  # mesh axes joined by "+", by the user's names
    bytes: int  # that a device sends per step, padding included
    # how often a step sends one of `shapes`: per layer of a stack that is gathered layer by layer,
    # microbatch, forward and backward
    times: int
    # shapes that the array may have when it is sent: one layer of a stack, or all layers; a
    # device's part of it where it is reduced after it was scattered
    shapes: tuple[tuple[int, ...], ...]


def expected_traffic(plan: StepPlan) -> list[ExpectedTraffic]:
    """Computes the traffic that the parameters of a step declare, by parameter and operation."""
    rows: list[ExpectedTraffic] = []
    copies = flatten(plan.layout.other.get(COPIES, {}))
    axes = plan.layout.axes
    gathers = plan.layout.strategy.gathers_params
    for path, leaf in plan.layout.by_path.items():
        transform = plan.comms[path].transform
        # The shape after the all-gather: still sharded along the model's own axes.
        gathered = NamedSharding(leaf.axes.mesh, axes.model_spec(leaf.grad_spec))
        shape = gathered.shard_shape(leaf.grad_shape)
        # The parameter; where the strategy never gathers, its copy or the updated parameter itself.
        spec, dtype = leaf.grad_spec, leaf.dtype
        if gathers or path in copies:
            spec, dtype = leaf.spec, transform.wire
        along = axes.batch_spec_axes(spec)
        if along and (leaf.trainable or gathers):
            row = _ring_traffic(plan, leaf, "all-gather", dtype, along, shape, 1)
            rows.append(_with_all_gathers(plan, leaf, row))
        # Its updated parts, each made by one replica.
        parts = [axis for axis in axes.batch_spec_axes(leaf.update_spec) if axis not in along]
        if leaf.trainable and parts:
            own = leaf.sharding.shard_shape(leaf.stored_shape)
            update = _ring_traffic(plan, leaf, "all-gather", leaf.dtype, parts, own, 1)
            # In the parameter's own dtype, and all layers of a stack at once.
            rows.append(replace(update, role="update", times=1, shapes=(own,)))
        if not leaf.trainable or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        # Its gradient: scattered along the axes that it is sharded along, ...
        times = plan.accumulation
        if plan.deferred:
            times = 1
        dtype = transform.compute
        if plan.local_batch:
            dtype = transform.reduce
        scattered = axes.batch_spec_axes(leaf.grad_spec)
        op = "reduce-scatter"
        if reduces_everywhere(plan, leaf):
            op, shape = "all-reduce", gathered.shard_shape(leaf.shape)
        if plan.comms[path].int8_scatter:
            rows += _int8_traffic(plan, leaf, times)
        else:
            rows.append(_ring_traffic(plan, leaf, op, dtype, scattered, shape, times))
        # ... and a device's part of it reduced along the others.
        part = leaf.grad_sharding.shard_shape(leaf.grad_shape)
        others = [axis for axis in axes.batch if axis not in scattered]
        row = _ring_traffic(plan, leaf, "all-reduce", dtype, others, part, times)
        rows.append(_with_first_iteration(plan, leaf, row, times))
    rows += [_stack_traffic(plan, stack) for stack in matrix_stacks(plan)]
    for other in plan.others.values():
        rows += _other_traffic(plan, other)
    # An operation along no axis, or along axes of size 1, sends nothing.
    return [each for each in rows if each.bytes]


def _other_traffic(step: StepPlan, other: OtherModel) -> list[ExpectedTraffic]:
    """Computes the traffic of another model of a step: that of its gathers alone."""
    plan, rows = other.plan, []
    axes, gathers = plan.layout.axes, plan.layout.strategy.gathers_params
    copies, averages = flatten(plan.layout.other[COPIES]), {}
    if other.averages:
        averages = by_parameter(plan.layout, find_average(plan.layout.optimizer))
    for path, leaf in plan.layout.by_path.items():
        comm = plan.comms[path]
        gathered = NamedSharding(leaf.axes.mesh, axes.model_spec(leaf.grad_spec))
        shape = gathered.shard_shape(leaf.grad_shape)
        along = axes.batch_spec_axes(leaf.spec) if gathers else ()
        times = 1
        if not comm.already_gathered:
            again = other.in_backward and comm.unit is not None  # in the backward pass
            times = step.accumulation * (1 + again)
        dtype = comm.transform.wire
        found = [_ring_traffic(plan, leaf, "all-gather", dtype, along, shape, times)]
        # Its average is put in its place, sharded as it is, and then in that of its copy.
        placed = [averages[path], leaf, copies.get(path, leaf)] if path in averages else []
        for before, after in itertools.pairwise(placed):
            kept = axes.batch_spec_axes(after.spec)
            more = [axis for axis in axes.batch_spec_axes(before.spec) if axis not in kept]
            shard = after.sharding.shard_shape(after.stored_shape)
            sent = after.dtype
            if plan.per_unit and comm.transform.format is None:
                sent = comm.transform.compute  # XLA moves the cast of the gather before this one
            row = _ring_traffic(plan, leaf, "all-gather", sent, more, shard, 1)
            found.append(replace(row, role="update", times=1, shapes=(shard,)))
        rows += [replace(row, path=comm.path) for row in found]
    return rows


def _with_all_gathers(plan: StepPlan, leaf: Leaf, once: ExpectedTraffic) -> ExpectedTraffic:
    """Multiplies the traffic of gathering a parameter once by how often a step gathers it."""
    comm = plan.comms[leaf.path]
    if comm.already_gathered:
        return once
    # Each layer of a unit is gathered in forward, and again in backward unless it stays gathered.
    layers = comm.layers
    if comm.unit is not None:
        layers += comm.layers - comm.keeps
    times = plan.accumulation * layers
    return replace(
        once, bytes=once.bytes * times // comm.layers, times=once.times * times // comm.layers
    )


def _with_first_iteration(
    plan: StepPlan, leaf: Leaf, row: ExpectedTraffic, times: int
) -> ExpectedTraffic:
    """Adds the all-reduce of a layer's zeros, which prefetch begins its backward loop with.

    Under hybrid strategies an iteration sums over replicas what the one before has scattered.
    """
    comm = plan.comms[leaf.path]
    if plan.prefetch != "pre" or not plan.per_unit or not leaf.stacked or not comm.reduced_in_two:
        return row
    # Where some layers stay gathered there are two loops, but none of a single layer.
    loops = 1
    if comm.keeps_some:
        loops = sum(layers > 1 for layers in (comm.keeps, comm.layers - comm.keeps))
    more = row.bytes // comm.layers * loops
    return replace(row, bytes=row.bytes + more, times=row.times + times * loops)


def _int8_traffic(plan: StepPlan, leaf: Leaf, times: int) -> list[ExpectedTraffic]:
    """Computes the traffic of a gradient that is scattered in int8, a row for each all-to-all."""
    comm = plan.comms[leaf.path]
    mesh = leaf.axes.mesh
    # A stack is sent layer by layer where its unit is a layer; not where it is reduced at the end.
    stacked = 0
    if plan.per_unit and not plan.deferred:
        stacked = leaf.stacked
    layers = prod(leaf.shape[:stacked])
    elements = prod(leaf.grad_shape[stacked:])
    rows = []
    for entry in leaf.grad_spec:
        for along in comm.axes_per_collective(entry):
            n = prod(mesh.shape[axis] for axis in along)
            elements //= n
            size = packed_bytes(elements)  # of each device's part
            axis = leaf.axes.user_name(axis for axis in along if mesh.shape[axis] > 1)
            sent = (n - 1) * size * layers * times
            # XLA may take the array apart, into a part for each device; and sums over the other
            # axes in the shape of the blocks.
            shapes = (n, size), (1, size), (-(-elements // BLOCK), BLOCK)
            row = ExpectedTraffic(
                leaf.path, "reduce", "all-to-all", "int8", axis, sent, layers * times, shapes
            )
            rows.append(row)
    return rows


def _stack_traffic(plan: StepPlan, stack: MatrixStack) -> ExpectedTraffic:
    """Computes the traffic of matrices that are made whole, and of their shards again."""
    axes = plan.layout.axes
    dtype = _wire_dtype(stack.dtype, axes.mesh.devices.flat[0].platform)
    # An all-to-all keeps 1/n of a device's part, and sends the rest.
    part = stack.stored_shape
    sent = 2 * prod(part) * dtype.itemsize * (stack.shards - 1) // stack.shards
    axis = axes.user_name(stack.axes)
    return ExpectedTraffic(stack.name, "update", "all-to-all", str(dtype), axis, sent, 2, (part,))


def reduces_everywhere(plan: StepPlan, leaf: Leaf) -> bool:
    """Tells whether a parameter's gradient is all-reduced in place of a reduce-scatter.

    With sharding annotations XLA scatters along divisible dims alone.
    """
    return not plan.local_batch and leaf.grad_shape != leaf.shape


def _ring_traffic(
    plan: StepPlan,
    leaf: Leaf,
    op: str,
    dtype: np.dtype,
    along: Sequence[str],
    shape: tuple[int, ...],
    times: int,
) -> ExpectedTraffic:
    """Computes the traffic of an operation on an array of this `shape`, in a ring.

    `along`: the mesh axes that it runs along; `times`: how often a step sends the array.
    """
    mesh = leaf.axes.mesh
    n = prod(mesh.shape[axis] for axis in along)
    dtype = _wire_dtype(dtype, mesh.devices.flat[0].platform)
    elements = prod(shape) * times
    sent = elements * dtype.itemsize * (n - 1) // n * RING_PASSES[op]
    axis = leaf.axes.user_name(axis for axis in along if mesh.shape[axis] > 1)
    role: Role = "gather" if op == "all-gather" else "reduce"
    # A stack is sent layer by layer where its unit is a layer.
    if not plan.comms[leaf.path].already_gathered:
        times *= prod(leaf.shape[: leaf.stacked])
    shapes = shape[leaf.stacked :], shape
    return ExpectedTraffic(leaf.path, role, op, str(dtype), axis, sent, times, shapes)


def _wire_dtype(dtype: np.dtype, platform: str) -> np.dtype:
    """Finds the dtype that is sent: XLA:CPU widens narrow floats first, no accelerator does."""
    return jnp.dtype(_ON_CPU.get(dtype.name, dtype)) if platform == "cpu" else dtype
