"""Updates state that is in host memory: brought to the device in groups, updated and sent back.

[Note: groups] The optimizer's update is traced once, for the whole tree. In the traced program it
shows which arrays of the state each result depends on: those that depend on one another, such as a
parameter and its moments, form a part, and a part is updated without the others. Parts are joined
to groups of about `Offload.group_bytes`. A part of stacked layers is updated some layers at a time,
in a loop, if each layer's results depend on that layer alone; the update is then traced again for
arrays of so many layers. XLA streams from host memory along the first dim.

[Note: order] `in_flight` groups are on the device at once: while one is updated, the next is
fetched. A fetch waits for the update of the group `in_flight` before it, by a barrier. Within a
loop the groups of one layer follow each other in a ring, so that no buffer is read and written at
once: XLA would copy it, in host memory. So a loop with a single group fetches and sends in turn.

A global norm of the gradients, learning rates and counts depend on nothing in host memory: they are
computed before, once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from fsdp_jax.errors import human_bytes, message
from fsdp_jax.sharding.layout import Leaf
from fsdp_jax.sharding.offload import Offload
from fsdp_jax.step.traced_update import Arrays, TracedUpdate, Update, is_by_rows
from fsdp_jax.tree import PyTree


@dataclass
class StreamReport:
    """How state in host memory is updated, once the step is traced.

    Attributes:
        groups: fetches in a step.
        staging_bytes: most bytes on each device, of the groups in flight and of one update that is
            sent back.
        moved_whole: path -> bytes on each device, of parameters that cannot be updated layer by
            layer and that with their state are larger than `Offload.group_bytes`.

    """

    groups: int = 0
    staging_bytes: int = 0
    moved_whole: dict[str, int] = field(default_factory=dict)

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


def stays_finite(old: PyTree, new: PyTree) -> jax.Array:
    """Returns whether every number that was finite still is, bool [].

    What was not finite before may stay so: a mask of -inf, a best loss that starts at infinity.
    """
    spoiled = [
        jnp.any(jnp.isfinite(before) & ~jnp.isfinite(after))
        for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if jnp.issubdtype(jnp.result_type(after), jnp.inexact)  # an optimizer may return `0.0`
    ]
    return ~jnp.any(jnp.stack(spoiled)) if spoiled else jnp.bool_(True)


def streamed(
    update: Update,
    state: Arrays,
    gradients: Arrays,
    scalars: Any,
    leaves: Mapping[str, Leaf],
    offload: Offload,
    report: StreamReport,
) -> tuple[Arrays, jax.Array]:
    """Returns `update(state, gradients, scalars)`, and whether what was finite still is.

    Arrays in host memory are updated in groups.

    Args:
        update: a pure function, which sees all arrays in device memory.
        state: of the optimizer and the parameters that it updates, and copies of these, by name.
        gradients: in device memory, by names of `state`.
        scalars: a pytree of what else it reads, in device memory.
        leaves: name -> how that array of the state is stored.
        offload: how many groups of which size.
        report: filled in.

    Raises:
        ValueError: an optimizer whose update of one parameter reads the state of another.

    """
    traced = TracedUpdate(update, state, gradients, scalars, leaves)
    parts = _parts(traced)
    env = traced.run_before(state, gradients, scalars)
    # What is in device memory alone is updated as without offload.
    in_groups = {name for part in parts for name in part.names}
    beside = [name for name in traced.outputs if name not in in_groups]
    new = traced.run(beside, env, state, gradients)
    finite = stays_finite(_of(state, beside), new)
    # The others in loops over layers, or whole.
    by_layers: dict[int, list[_Part]] = {}
    for part in parts:
        by_layers.setdefault(part.layers, []).append(part)
    stacks = [_Stack(traced, each, n, env, offload) for n, each in sorted(by_layers.items())]
    for stack in stacks[::-1]:
        buffers = {name: state[name] for part in stack.parts for name in part.names}
        run = stack.run if stack.length > 1 else stack.run_whole
        updated, stack_finite = run(buffers, gradients)
        new |= updated
        finite &= stack_finite
    _fill(report, stacks, offload)
    return new, finite


def _fill(report: StreamReport, stacks: Sequence["_Stack"], offload: Offload) -> None:
    sizes = [size for stack in stacks for size in stack.group_sizes]
    report.groups = sum(len(stack.groups) * stack.length for stack in stacks)
    in_flight = sum(sorted(sizes, reverse=True)[: offload.in_flight])
    report.staging_bytes = in_flight + max(sizes, default=0)
    report.moved_whole = {
        stack.traced.leaves[part.names[0]].path: part.bytes_per_layer * stack.rows
        for stack in stacks
        for part in stack.parts
        if stack.length == 1 and part.bytes_per_layer * stack.rows > offload.group_bytes
    }


@dataclass(frozen=True)
class _Part:
    """Arrays of the state whose updates depend on one another alone.

    Attributes:
        names: of the arrays.
        layers: if they are updated layer by layer, the number of these; otherwise 1.
        bytes_per_layer: of a layer, or of all, on each device.

    """

    names: tuple[str, ...]
    layers: int
    bytes_per_layer: int


def _parts(traced: TracedUpdate) -> list[_Part]:
    """Returns the parts that have an array in host memory.

    Raises:
        ValueError: a part with several parameters.

    """
    # Join each result with what it depends on.
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        while parents.setdefault(name, name) != name:
            name = parents[name]
        return name

    for name, variable in traced.outputs.items():
        depends = () if isinstance(variable, jex.Literal) else traced.depends_on.get(variable, ())
        for other in depends:
            parents[root(other)] = root(name)
    joined: dict[str, list[str]] = {}
    for name in traced.outputs:
        joined.setdefault(root(name), []).append(name)

    parts = []
    for names in joined.values():
        if not any(traced.leaves[name].on_host for name in names):
            continue
        _check_streams(names, traced.leaves)
        layers = _layers(traced, names)
        total = sum(traced.leaves[name].bytes_per_device for name in names)
        parts.append(_Part(tuple(names), layers, total // layers))
    return parts


def _check_streams(names: Sequence[str], leaves: Mapping[str, Leaf]) -> None:
    params = [name for name in names if leaves[name].part == "params"]
    if len(params) <= 1:
        return
    size = sum(leaves[name].bytes_per_device for name in names)
    what = "the optimizer cannot be streamed from host memory"
    expected = "an update of each parameter from its own state"
    got = f"'{leaves[params[0]].path}' and {len(params) - 1} others depend on one another, "
    got += f"{human_bytes(size)} on each device"
    fix = "clip the gradient by make_train_step(clip=) or before the moments, accumulate by "
    fix += "accumulation=, and leave out transformations of the whole tree such as "
    fix += "optax.apply_if_finite; or leave the optimizer state on the devices"
    raise ValueError(message(what, where="offload", expected=expected, got=got, fix=fix))


def _layers(traced: TracedUpdate, names: Sequence[str]) -> int:
    """Returns the number of layers that a part can be updated one by one; 1 if it cannot."""
    leaves = [traced.leaves[name] for name in names]
    stacked = {leaf.shape[0] for leaf in leaves if leaf.part == "params" and leaf.stacked}
    sizes = {leaf.shape[:1] for leaf in leaves}
    (size,) = sizes if len(sizes) == 1 else [()]
    if len(size) != 1 or stacked != set(size) or any(any(leaf.spec[:1]) for leaf in leaves):
        return 1
    layers = int(size[0])
    inputs = {v for v, name in traced.inputs.items() if name in names}
    known = inputs | set(traced.before) | set(traced.jaxpr.constvars)
    known |= set(traced.jaxpr.invars[len(traced.inputs) :])
    variables = [traced.outputs[name] for name in names]
    eqns = traced.needed(variables, known)
    return layers if is_by_rows(eqns, inputs, variables, layers) else 1


@dataclass(frozen=True)
class _Stack:
    """Parts of the same number of layers, updated together in a loop, or whole.

    Attributes:
        traced: the update.
        parts: what is updated.
        layers: of each part; 1 if they are updated whole.
        env: scalars, as `TracedUpdate.run_before` returned them.
        offload: the size of groups, and how many are on the device.

    """

    traced: TracedUpdate
    parts: list[_Part]
    layers: int
    env: Mapping[Any, Any] = field(repr=False)
    offload: Offload

    @cached_property
    def orders(self) -> dict[str, tuple[int, ...]]:
        """Name -> order of the dims in memory, of arrays in host memory, on TPUs.

        In a loop XLA may prefer the order of the gradients, and would transpose the state before
        and after it, in host memory.
        """
        names = [name for part in self.parts for name in part.names]
        on_host = [name for name in names if self.traced.leaves[name].on_host]
        leaves = [self.traced.leaves[name] for name in on_host]
        device = leaves[0].axes.mesh.devices.flat[0]
        # What only stands for a device has no compiler to ask; its step is traced, not compiled.
        if device.platform != "tpu" or not isinstance(device, jax.Device):
            return {}
        stored = tuple(leaf.abstract for leaf in leaves)
        compiled = jax.jit(lambda *arrays: arrays).lower(*stored).compile()
        formats = compiled.input_formats[0]
        return {
            name: each.layout.major_to_minor for name, each in zip(on_host, formats, strict=True)
        }

    @cached_property
    def groups(self) -> list[list[_Part]]:
        """The parts of each group: one, or several that together are small enough."""
        groups: list[list[_Part]] = []
        size = 0
        for part in self.parts:
            part_bytes = part.bytes_per_layer * self.rows
            if not groups or size + part_bytes > self.offload.group_bytes:
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += part_bytes
        return groups

    @property
    def group_sizes(self) -> list[int]:
        """Bytes of each group on a device."""
        return [sum(part.bytes_per_layer for part in parts) * self.rows for parts in self.groups]

    @cached_property
    def names(self) -> list[list[str]]:
        """Names of each group's arrays."""
        return [[name for part in parts for name in part.names] for parts in self.groups]

    @property
    def rows(self) -> int:
        """Layers that are updated at a time: as many as leave the largest part within a group.

        All of them if the update looks at their number.
        """
        return self._fitting_rows if self.sliced else self.layers

    @cached_property
    def sliced(self) -> TracedUpdate | None:
        """The update traced for the rows of an iteration; None if that would be another update."""
        rows = self._fitting_rows
        if rows == self.layers:
            return self.traced
        return self.traced.resized({name: rows for part in self.parts for name in part.names})

    @cached_property
    def _fitting_rows(self) -> int:
        largest = max(part.bytes_per_layer for part in self.parts)
        fit = max(1, self.offload.group_bytes // max(largest, 1))
        return max(k for k in range(1, self.layers + 1) if self.layers % k == 0 and k <= fit)

    @property
    def length(self) -> int:
        """Iterations of the loop."""
        return self.layers // self.rows

    def run_whole(self, buffers: Arrays, gradients: Arrays) -> tuple[Arrays, jax.Array]:
        """Returns the new arrays, each updated whole, and whether they stay finite."""
        new: Arrays = {}
        finite = jnp.bool_(True)
        updated: list[Arrays] = []
        for number, names in enumerate(self.names):
            inputs = {name: buffers[name] for name in names}
            if number >= self.offload.in_flight:
                waits_for = updated[number - self.offload.in_flight]
                inputs, _ = lax.optimization_barrier((inputs, waits_for))
            on_device = {name: self._to_device(name, x) for name, x in inputs.items()}
            values = self.traced.run(names, self.env, on_device, gradients)
            finite &= self._stay_finite(on_device, values)
            updated.append(values)
            new |= {name: self._to_host(name, x) for name, x in values.items()}
        return new, finite

    def run(self, buffers: Arrays, gradients: Arrays) -> tuple[Arrays, jax.Array]:
        """Returns the new arrays, updated `rows` layers at a time; whether they stay finite."""
        sliced = self.sliced
        assert sliced is not None, "the loop has more than one iteration"
        env = self.traced.translated(self.env, sliced)
        groups = self.names
        ahead = min(self.offload.in_flight, len(groups)) - 1

        def fetch(buffers: Arrays, group: int, index: Any) -> Arrays:
            return {
                name: self._to_device(name, self._rows_of(buffers[name], index))
                for name in groups[group]
            }

        def iteration(carry: tuple[Arrays, list[Arrays], jax.Array], index: Any) -> Any:
            buffers, fetched, finite = carry
            for number, names in enumerate(groups):
                next_group, next_layer = (number + ahead) % len(groups), index
                if number + ahead >= len(groups):
                    next_layer = jnp.minimum(index + 1, self.length - 1)
                fetched = [*fetched, fetch(buffers, next_group, next_layer)]
                slices = {
                    name: self._rows_of(g, index) for name, g in _of(gradients, names).items()
                }
                values = sliced.run(names, env, fetched[0], slices)
                finite &= self._stay_finite(fetched[0], values)
                # The next fetch waits for this update.
                index, values = lax.optimization_barrier((index, values))
                buffers = buffers | {
                    name: self._set_rows(buffers[name], self._to_host(name, x), index)
                    for name, x in values.items()
                }
                fetched = fetched[1:]
            return (buffers, fetched, finite), None

        ahead_of_all = [fetch(buffers, group, 0) for group in range(ahead)]
        start = buffers, ahead_of_all, jnp.bool_(True)
        (buffers, _, finite), _ = lax.scan(iteration, start, jnp.arange(self.length))
        return buffers, finite

    def _stay_finite(self, old: Arrays, new: Arrays) -> jax.Array:
        """Returns whether what was finite still is; copies follow their parameters."""
        names = [name for name in new if self.traced.leaves[name].part != "other"]
        return stays_finite(_of(old, names), _of(new, names))

    def _rows_of(self, array: jax.Array, index: Any) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, index * self.rows, self.rows, 0)

    def _set_rows(self, array: jax.Array, values: jax.Array, index: Any) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(array, values, index * self.rows, 0)

    def _to_device(self, name: str, array: jax.Array) -> jax.Array:
        if not self.traced.leaves[name].on_host:
            return array
        array = jax.device_put(array, jax.memory.Space.Device)
        order = self.orders.get(name)
        return array if order is None else with_layout_constraint(array, Layout(order))

    def _to_host(self, name: str, array: jax.Array) -> jax.Array:
        on_host = self.traced.leaves[name].on_host
        return jax.device_put(array, jax.memory.Space.Host) if on_host else array


def _of(arrays: Arrays, names: Sequence[str]) -> Arrays:
    return {name: arrays[name] for name in names if name in arrays}
