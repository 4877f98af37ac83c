"""Updates state that is in host memory: brought to the device in groups, updated and sent back.

[Note: groups] The optimizer's update is traced once, for the whole tree. In the traced program it
shows which arrays of the state each result depends on: those that depend on one another, such as a
parameter and its moments, form a component, and a component is updated without the others.
Components are joined to groups of about `GROUP_BYTES`. A component of stacked layers is
updated some layers at a time, in a loop, if each layer's results depend on that layer alone; the
traced equations then run on arrays of so many layers. XLA streams from host memory along the first
dim.

[Note: order] `IN_FLIGHT` groups are on the device at once: while one is sent back, a later one is
fetched, array by array in turns, so that both directions of the link are busy. The turns, and the
updates between them, follow each other by optimization barriers. Within a loop the groups of one
layer follow each other in a ring, so that no buffer is read and written at once: XLA would copy it,
in host memory. So the transfers of a loop with a single group do not overlap.

A global norm of the gradients, learning rates and counts depend on nothing in host memory: they are
computed before, once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from fsdp_jax.errors import ArgumentError, human_bytes
from fsdp_jax.host_memory import to_device, to_host
from fsdp_jax.sharding.layout import Leaf
from fsdp_jax.sharding.padding import pad, padded_shape, unpad
from fsdp_jax.step.traced_update import Arrays, TracedUpdate, Update
from fsdp_jax.tree import PyTree

# Bytes of a group on each device: a transfer of milliseconds, beside which its start costs nothing.
GROUP_BYTES = 64 * 2**20
# Groups that are on the device at once: one is updated or sent back while the next is fetched.
IN_FLIGHT = 2


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class StreamReport:
    """How state in host memory is updated.

    A pytree without arrays, so that a traced step can return it.

    Attributes:
        groups: fetches in a step.
        staging_bytes: most bytes on each device, of the groups in flight and of one update that is
            sent back.
        moved_whole: path -> bytes on each device, of parameters that cannot be updated layer by
            layer and that with their state are larger than `GROUP_BYTES`.

    """

    groups: int = 0
    staging_bytes: int = 0
    moved_whole: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.groups:
            return "no state is streamed from host memory"
        text = f"state streamed from host memory in {self.groups} groups, "
        text += f"which take at most {human_bytes(self.staging_bytes)} of each device's memory"
        if self.moved_whole:
            largest = max(self.moved_whole, key=lambda path: self.moved_whole[path])
            text += f"; the largest that is moved whole is '{largest}', "
            text += human_bytes(self.moved_whole[largest])
        return text


class StreamedUpdate(NamedTuple):
    """The results of `update_in_groups`."""

    state: PyTree
    is_finite: jax.Array  # bool []: no number is kept to stay so
    report: StreamReport


def update_in_groups(
    update: Update,
    state: PyTree,
    gradients: PyTree,
    scalars: PyTree,
    leaves: list[Leaf],
) -> StreamedUpdate:
    """Computes `update(state, gradients, scalars)`, for arrays in host memory in groups.

    Args:
        update: a pure function, which sees all arrays in device memory.
        state: parameters, their copies to compute with, and the optimizer's state, in this order.
        gradients: of these parameters, in device memory.
        scalars: other inputs of the update, such as the loss, in device memory.
        leaves: how each array of the state is stored.

    Raises:
        ValueError: an optimizer whose update of one parameter reads the state of another.

    """
    # Trace the update, and compute first what depends on no array of the state.
    traced = TracedUpdate(update, state, gradients, scalars, leaves)
    components = _find_components(traced)
    old = dict(enumerate(jax.tree.leaves(state)))
    grads = dict(enumerate(jax.tree.leaves(gradients)))
    env = traced.compute_before(old, grads, scalars)
    # What is in device memory alone is updated as without offload.
    in_groups = {number for component in components for number in component.numbers}
    beside = [number for number in old if number not in in_groups]
    new, finite = traced.new_arrays(beside, env, old, grads)
    # The others in loops over layers, or whole.
    by_layers: dict[int, list[_Component]] = {}
    for component in components:
        by_layers.setdefault(component.layers, []).append(component)
    stacks = [_Stack(traced, each, n, env) for n, each in sorted(by_layers.items())]
    for stack in stacks[::-1]:
        run = stack.update_by_layers if stack.length > 1 else stack.update_whole
        updated, stack_finite = run(_select(old, _numbers_of(stack.components)), grads)
        new |= updated
        finite &= stack_finite
    new_state = jax.tree.unflatten(jax.tree.structure(state), [new[number] for number in old])
    return StreamedUpdate(new_state, finite, _report_of(stacks, leaves))


def _report_of(stacks: Sequence["_Stack"], leaves: Sequence[Leaf]) -> StreamReport:
    """Reports how these stacks are updated."""
    sizes = [
        sum(component.bytes_per_layer for component in group) * stack.rows
        for stack in stacks
        for group in stack.groups
    ]
    in_flight = sum(sorted(sizes, reverse=True)[:IN_FLIGHT])
    moved_whole = {
        leaves[component.numbers[0]].path: component.bytes_per_layer * stack.rows
        for stack in stacks
        for component in stack.components
        if stack.length == 1 and component.bytes_per_layer * stack.rows > GROUP_BYTES
    }
    return StreamReport(
        groups=sum(len(stack.groups) * stack.length for stack in stacks),
        staging_bytes=in_flight + max(sizes, default=0),
        moved_whole=moved_whole,
    )


@dataclass(frozen=True)
class _Component:
    """Arrays of the state whose updates depend on one another alone.

    Attributes:
        numbers: of the arrays.
        layers: if they are updated layer by layer, the number of these; otherwise 1.
        bytes_per_layer: of a layer, or of all, on each device.

    """

    numbers: tuple[int, ...]
    layers: int
    bytes_per_layer: int


def _find_components(traced: TracedUpdate) -> list[_Component]:
    """Finds the components of the state that have an array in host memory; see the note."""
    # Join each result with what it depends on.
    joined = {number: {number} for number in range(len(traced.leaves))}
    for number, variable in enumerate(traced.outputs):
        depends = () if isinstance(variable, jex.Literal) else traced.depends_on.get(variable, ())
        for other in depends:
            if other not in joined[number]:
                both = joined[number] | joined[other]
                joined |= dict.fromkeys(both, both)
    components = []
    for numbers in dict.fromkeys(tuple(sorted(each)) for each in joined.values()):
        leaves = [traced.leaves[number] for number in numbers]
        if any(leaf.on_host for leaf in leaves):
            _check_streamable(leaves)
            layers = _layer_count(traced, numbers)
            total = sum(leaf.bytes_per_device for leaf in leaves)
            components.append(_Component(numbers, layers, total // layers))
    return components


def _check_streamable(leaves: Sequence[Leaf]) -> None:
    """Raises ValueError if several parameters are updated together: they cannot be streamed.

    `leaves`: those of a component.
    """
    params = [leaf.path for leaf in leaves if leaf.part == "params"]
    if len(params) <= 1:
        return
    size = sum(leaf.bytes_per_device for leaf in leaves)
    raise ArgumentError(
        "the optimizer cannot be streamed from host memory",
        where="offload",
        expected="an update of each parameter from its own state",
        got=(
            f"'{params[0]}' and {len(params) - 1} others depend on one another, "
            f"{human_bytes(size)} on each device"
        ),
        fix=(
            "clip the gradient by make_train_step(clip=) or before the moments, accumulate by "
            "accumulation=, and leave out transformations of the whole tree such as "
            "optax.apply_if_finite; or leave the optimizer state on the devices"
        ),
    )


def _layer_count(traced: TracedUpdate, numbers: Sequence[int]) -> int:
    """Counts the layers that a component can be updated in one by one; 1 if it cannot.

    `numbers`: of the component's arrays.
    """
    leaves = [traced.leaves[number] for number in numbers]
    stacks = {leaf.shape[0] for leaf in leaves if leaf.part == "params" and leaf.stacked}
    firsts = {leaf.shape[:1] for leaf in leaves}
    if len(stacks) != 1 or firsts != {tuple(stacks)} or any(any(leaf.spec[:1]) for leaf in leaves):
        return 1
    (layers,) = stacks
    return layers if traced.is_row_wise(numbers, layers) else 1


@dataclass(frozen=True)
class _Stack:
    """Components of the same number of layers, updated together in a loop, or whole.

    Attributes:
        traced: the update.
        components: that are updated.
        layers: of each component; 1 if they are updated whole.
        env: scalars, as `TracedUpdate.compute_before` returned them.

    """

    traced: TracedUpdate
    components: list[_Component]
    layers: int
    env: Mapping[Any, Any] = field(repr=False)

    @cached_property
    def dim_orders(self) -> dict[int, tuple[int, ...]]:
        """Number -> order of the dims in memory, of arrays in host memory; empty except on TPUs.

        In a loop XLA may prefer the order of the gradients, and would transpose the state before
        and after it, in host memory.
        """
        leaves = {number: self.traced.leaves[number] for number in _numbers_of(self.components)}
        stored = {number: leaf.stored for number, leaf in leaves.items() if leaf.on_host}
        device = next(iter(leaves.values())).axes.mesh.devices.flat[0]
        # What only stands for a device has no compiler to ask; its step is traced, not compiled.
        if device.platform != "tpu" or not isinstance(device, jax.Device):
            return {}
        compiled = jax.jit(lambda *arrays: arrays).lower(*stored.values()).compile()
        formats = compiled.input_formats[0]
        return {n: each.layout.major_to_minor for n, each in zip(stored, formats, strict=True)}

    @cached_property
    def groups(self) -> list[list[_Component]]:
        """The components of each group: one, or several that together are small enough."""
        groups: list[list[_Component]] = []
        size = 0
        for component in self.components:
            component_bytes = component.bytes_per_layer * self.rows
            if not groups or size + component_bytes > GROUP_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(component)
            size += component_bytes
        return groups

    @cached_property
    def rows(self) -> int:
        """Layers that are updated at a time: as many as fit a group, of the largest component."""
        largest = max(component.bytes_per_layer for component in self.components)
        fit = max(1, GROUP_BYTES // max(largest, 1))
        return max(k for k in range(1, self.layers + 1) if self.layers % k == 0 and k <= fit)

    @property
    def length(self) -> int:
        """Iterations of the loop."""
        return self.layers // self.rows

    def update_whole(self, buffers: Arrays, gradients: Arrays) -> tuple[Arrays, jax.Array]:
        """Updates each array whole: (new arrays, whether no number is kept to stay finite)."""
        new: Arrays = {}
        finite = jnp.bool_(True)
        updated: list[Arrays] = []
        for group, numbers in enumerate(map(_numbers_of, self.groups)):
            inputs = _select(buffers, numbers)
            if group >= IN_FLIGHT:
                waits_for = updated[group - IN_FLIGHT]
                inputs, _ = lax.optimization_barrier((inputs, waits_for))
            on_device = {number: self._to_device(number, x) for number, x in inputs.items()}
            values, is_finite = self.traced.new_arrays(numbers, self.env, on_device, gradients)
            finite &= is_finite
            updated.append(values)
            new |= {number: self._to_host(number, x) for number, x in values.items()}
        return new, finite

    def update_by_layers(self, buffers: Arrays, gradients: Arrays) -> tuple[Arrays, jax.Array]:
        """Updates `rows` layers at a time: as `update_whole` returns it."""
        groups = [_numbers_of(components) for components in self.groups]
        ahead = min(IN_FLIGHT, len(groups)) - 1

        def fetch(buffers: Arrays, numbers: Sequence[int], index: Any) -> Arrays:
            return {
                number: self._to_device(number, self._slice_rows(buffers[number], index))
                for number in numbers
            }

        def send(buffers: Arrays, values: Arrays, index: Any) -> Arrays:
            """Writes new rows into the stacked arrays, in place; returns those."""
            return {
                number: lax.dynamic_update_slice_in_dim(
                    buffers[number], self._to_host(number, x), index * self.rows, 0
                )
                for number, x in values.items()
            }

        def iteration(carry: tuple[Arrays, list[Arrays], jax.Array], index: Any) -> Any:
            """Updates the `index`-th `rows` layers; a group is fetched `ahead` groups before."""
            buffers, fetched, finite = carry
            for group, numbers in enumerate(groups):
                # A later group to fetch; after the last one, a group of the next layers.
                later, later_layer = groups[(group + ahead) % len(groups)], index
                if group + ahead >= len(groups):
                    later_layer = jnp.minimum(index + 1, self.length - 1)
                if not ahead:  # one group at a time
                    later, fetched = [], [fetch(buffers, numbers, index)]
                # Update this group from the rows that were fetched for it.
                slices = {
                    n: self._slice_rows(g, index) for n, g in _select(gradients, numbers).items()
                }
                rows = self.layers, self.rows
                values, is_finite = self.traced.new_arrays(
                    numbers, self.env, fetched[0], slices, rows
                )
                finite &= is_finite
                # Send it back while the later one is fetched; both wait for this update.
                index, later_layer, values = lax.optimization_barrier((index, later_layer, values))
                arriving: Arrays = {}
                for sends, fetches in _in_turns(list(values), later):
                    sent = send(buffers, _select(values, sends), index)
                    arriving |= fetch(buffers, fetches, later_layer)
                    # The next turn waits for both directions of this one.
                    turn = index, later_layer, sent, arriving
                    index, later_layer, sent, arriving = lax.optimization_barrier(turn)
                    buffers = buffers | sent
                fetched = [*fetched[1:], arriving]
            return (buffers, fetched[:ahead], finite), None

        # The first groups are fetched before the loop.
        ahead_of_all = [fetch(buffers, groups[group], 0) for group in range(ahead)]
        start = buffers, ahead_of_all, jnp.bool_(True)
        (buffers, _, finite), _ = lax.scan(iteration, start, jnp.arange(self.length))
        return buffers, finite

    def _slice_rows(self, array: jax.Array, index: Any) -> jax.Array:
        """Slices the `index`-th `rows` layers of a stacked array."""
        return lax.dynamic_slice_in_dim(array, index * self.rows, self.rows, 0)

    def _to_device(self, number: int, array: jax.Array) -> jax.Array:
        """Moves the array with this number, or layers of it, to device memory, unpadded."""
        leaf = self.traced.leaves[number]
        if not leaf.on_host:
            return array
        array = to_device(array)
        order = self.dim_orders.get(number)
        if order is not None:
            array = with_layout_constraint(array, Layout(order))
        if not leaf.is_padded:
            return array
        own = unpad(array, tuple(map(min, array.shape, leaf.shape)))
        return lax.with_sharding_constraint(own, leaf.on_device)

    def _to_host(self, number: int, array: jax.Array) -> jax.Array:
        """Moves an updated array, or layers of it, to the memory where the state keeps it."""
        leaf = self.traced.leaves[number]
        if not leaf.on_host:
            return array
        return to_host(pad(array, padded_shape(array.shape, leaf.spec, leaf.mesh)))


def _in_turns(
    sends: Sequence[int], fetches: Sequence[int]
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Splits what is sent and what is fetched into turns: (sent, fetched) of each.

    As many turns as the shorter list has arrays, so that both directions of the link are busy in
    each. XLA orders transfers by compute, of which there is next to none here: left alone, it
    fetches a whole group before it sends one.
    """
    count = max(min(len(sends), len(fetches)), 1)

    def part(numbers: Sequence[int], turn: int) -> Sequence[int]:
        return numbers[turn * len(numbers) // count : (turn + 1) * len(numbers) // count]

    return [(part(sends, turn), part(fetches, turn)) for turn in range(count)]


def _numbers_of(components: Iterable[_Component]) -> list[int]:
    """Lists the numbers of all arrays of some components."""
    return [number for component in components for number in component.numbers]


def _select(arrays: Arrays, numbers: Sequence[int]) -> Arrays:
    """Selects the arrays with these numbers, as far as there are some."""
    return {number: arrays[number] for number in numbers if number in arrays}
