"""Estimates a step's peak memory, matmuls and memory traffic on one device, from its trace alone.

Neither a compiler nor devices are needed: a step traced on `fake_devices(topology)` is enough.

[Note: stored values] XLA fuses elementwise operations into their readers: their results never reach
memory; their operands live until then. So a value is *stored* if XLA runs the operation that makes
it as a kernel of its own (matmuls, collectives, reductions, loops), or if such a kernel reads it;
then all others read it from memory too, for XLA fuses into all readers or none. Any other value is
*fused*: reading it reads the stored values that it is made from. A stored value takes memory from
the operation that makes it to the last that reads it; a constant, from the first that reads it.

What is updated in place takes no second buffer: slices written into an array, scatters, loop
carries. What a loop stacks is allocated at its start. The new state reuses the memory of the
donated old one; the optimizer is fused.

[Note: the order of operations]
It is that of the trace, except where XLA is observed to reorder on GPUs:

- It schedules from the end. An operation on which no loop and no gather depends runs after the last
  of them: gradients of weights run after the loop over the chunks of attention, and that of a tied
  embedding after the loop over layers. Their operands stay alive until then.
- A loop of one trip is inlined, so the above holds inside it too; one of none is left out.
- A collective needs its dim to be the outermost. An array that is scattered along another dim is
  copied first, unless a matmul made it, which can write it in that layout. As collectives are
  combined, all copies are made before the first is sent.

[Note: host memory]
A value in host memory takes no device memory. What a `device_put` brings to the device is stored
from there on; what it sends to the host is read by the transfer.

Not modeled: padding, gaps between buffers in the heap, copies that XLA makes for other reasons,
and the code.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Any

import jax.extend.core as jex

from fsdp_jax.host_memory import is_on_host
from fsdp_jax.planner.analytic.traced_matmuls import matmuls_of, uncounted_kernel
from fsdp_jax.planner.compiled.peak_memory import KINDS, Kind, gradient_shapes
from fsdp_jax.planner.machines.roofline import Matmul
from fsdp_jax.program import primitives
from fsdp_jax.program.equations import (
    bodies,
    body_of,
    inputs_of,
    is_own,
    parameter_text,
    scattered_dim,
    scopes_of,
    split_scan,
    trips_of,
)
from fsdp_jax.program.primitives import Primitive, primitive_of
from fsdp_jax.sharding.layout import COPIES, Leaf
from fsdp_jax.sharding.mesh import shards_of
from fsdp_jax.step.others import leaves_of_others
from fsdp_jax.step.step_plan import StepPlan
from fsdp_jax.tree import SEPARATOR
from fsdp_jax.units.collectives import GATHER, is_gathering

_COPY = Primitive("copy for a collective", "kernel")


@dataclass(frozen=True)
class StepEstimate:
    """What one device needs for one step."""

    peak_bytes: int  # the most memory that is in use at once, the state included
    breakdown: dict[Kind, int]  # bytes by kind at that time; their sum is `peak_bytes`
    # loop trips counted (one trip where their number is unknown)
    matmuls: tuple[Matmul, ...]
    uncounted: frozenset[str]  # names of kernels whose matmuls are not counted
    traffic_bytes: int  # read from and written to device memory
    from_host_bytes: int  # that transfers bring from host memory
    to_host_bytes: int  # that transfers send to host memory
    update_bytes: int  # of both, those around the optimizer's update: no matmul runs beside them
    host_bytes: int  # of values that loops stack in host memory, the state not included


def estimate_step(plan: StepPlan, jaxpr: jex.ClosedJaxpr) -> StepEstimate:
    """Estimates a traced step with local batches: its peak memory, matmuls and memory traffic."""
    layout = plan.layout
    assert plan.local_batch or layout.axes.batch_shards == 1, "its trace has no device's shapes"
    # Read the step into operations on the memory of one device.
    of_others = list(chain.from_iterable(leaves_of_others(plan).values()))
    shapes, outer = _StateShapes([*layout, *of_others]), jaxpr.jaxpr
    reader = _JaxprReader(shapes.sharded_bytes, shapes.kind)
    state = sum(1 for _ in layout)  # comes before the batch
    inputs = [
        _outer_value(shapes.sharded_bytes(var.aval), donated=number < state)
        for number, var in enumerate(outer.invars)
    ]
    results = reader.read(outer, inputs)  # the new state, which reuses the memory of the old one
    operations = _OperationList(reader.operations, results)
    operations.resolve()
    # Count the work of all operations that are needed, as often as loops run them.
    times: Counter[Matmul] = Counter()
    uncounted: set[str] = set()
    from_host = to_host = in_update = on_host = 0
    for operation, count in operations.executed():
        for matmul in operation.matmuls:
            times[replace(matmul, times=1)] += count * matmul.times
        uncounted.add(operation.uncounted)
        from_host += count * operation.from_host
        to_host += count * operation.to_host
        in_update += count * operation.in_update * (operation.from_host + operation.to_host)
        on_host += operation.stacked_on_host
    # What the operations need, then the state, then the batch.
    lifetimes = _Lifetimes(operations)
    peak: Counter[str] = lifetimes.peak()
    for leaf in (leaf for leaf in (*layout, *of_others) if not leaf.on_host):
        is_copy = leaf.path.startswith(COPIES + SEPARATOR)
        peak["params" if is_copy else leaf.part] += leaf.bytes_per_device
    batch = outer.invars[state : len(outer.invars) - len(of_others)]
    peak["other"] += sum(_device_bytes(var.aval) for var in batch) // layout.axes.batch_shards
    return StepEstimate(
        peak_bytes=peak.total(),
        breakdown={kind: peak[kind] for kind in KINDS},
        matmuls=tuple(replace(matmul, times=count) for matmul, count in times.items()),
        uncounted=frozenset(uncounted - {""}),
        traffic_bytes=lifetimes.traffic,
        from_host_bytes=from_host,
        to_host_bytes=to_host,
        update_bytes=in_update,
        host_bytes=on_host,
    )


class _StateShapes:
    """Shapes of the state, by which values of the trace are recognized."""

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        self.shards: dict[tuple[int, ...], int] = {}
        self.layer_shards: dict[tuple[int, ...], int] = {}
        self.gradients: set[tuple[int, ...]] = set()
        for leaf in leaves:
            shards = prod(shards_of(leaf.axes.mesh, entry) for entry in leaf.grad_spec)
            self.shards[leaf.shape] = max(self.shards.get(leaf.shape, 1), shards)
            for stacked in range(leaf.stacked):
                self.layer_shards[leaf.shape[stacked + 1 :]] = shards
            if leaf.part == "params":
                self.gradients |= gradient_shapes(leaf)

    def sharded_bytes(self, aval: Any) -> int:
        """Computes one device's bytes of a value of global shape, sharded as state of that shape.

        A value of some layers of the state, or of one, is sharded as that state.
        """
        shape = getattr(aval, "shape", ())
        layer = self.layer_shards.get(shape[1:]) or self.layer_shards.get(shape, 1)
        return _device_bytes(aval) // self.shards.get(shape, layer)

    def kind(self, eqn: jex.JaxprEqn, aval: Any) -> Kind:
        """Tells the kind of a value, not part of the state, that an equation returns."""
        in_gather = is_gathering(eqn) and "transpose(" not in scopes_of(eqn)
        if primitive_of(eqn) is primitives.ALL_GATHER or in_gather:
            return "gathered"
        return "gradients" if getattr(aval, "shape", ()) in self.gradients else "activations"


def _device_bytes(aval: Any) -> int:
    """Computes the bytes of all of a value's shape; 0 if it is in host memory."""
    return 0 if is_on_host(aval) else _array_bytes(aval)


def _array_bytes(aval: Any) -> int:
    itemsize = int(getattr(getattr(aval, "dtype", None), "itemsize", 0))
    return prod(getattr(aval, "shape", ())) * itemsize


@dataclass(eq=False)
class _Value:
    """A value on one device."""

    bytes: int
    kind: Kind = "activations"
    is_outer: bool = False  # its memory is counted elsewhere: in the state, or around the loop
    donated: bool = False  # it is state, whose memory what updates it in place reuses
    live: bool = False  # something needs it
    stored: bool = False  # see [Note: stored values]
    constant: Any = None  # of equal ones XLA keeps one; None for what depends on an input
    maker: Primitive | None = None  # what it comes from, however it has been reshaped since
    # the stored values that are read in its place, and the bytes read of each
    reads: "dict[_Value, int]" = field(default_factory=dict)


def _outer_value(
    size: int, kind: Kind = "activations", constant: Any = None, *, donated: bool = False
) -> _Value:
    """Makes a value of `size` bytes whose memory is counted elsewhere."""
    value = _Value(size, kind, is_outer=True, donated=donated, stored=True, constant=constant)
    value.reads = {value: size}
    return value


@dataclass(eq=False)
class _Operation:
    """An operation of the trace; a loop's own matmuls and transfers are outside of its bodies."""

    does: Primitive
    effect: str  # on memory: that of the primitive, but of transfers
    inputs: list[_Value]
    outputs: list[_Value]
    # pairs of a loop's initial carry, or an update's target, and the output that replaces it
    in_place: "Sequence[tuple[_Value, _Value]]" = ()
    bodies: "list[_OperationList]" = field(default_factory=list)
    trips: int = 1
    matmuls: Sequence[Matmul] = ()
    uncounted: str = ""  # a kernel whose matmuls are not counted
    from_host: int = 0  # bytes that it brings from host memory
    to_host: int = 0  # bytes that it sends to host memory
    in_update: bool = False  # it is part of neither the forward nor the backward pass
    stacked_on_host: int = 0  # bytes that a loop stacks in host memory
    live: bool = False  # something needs an output


@dataclass
class _OperationList:
    """Operations in order: a step, or a loop's body."""

    operations: list[_Operation]
    results: Sequence[_Value]  # values written to memory that is counted elsewhere
    carry_in: Sequence[_Value] = ()  # a loop's carries as its body begins
    carry_out: Sequence[_Value] = ()  # a loop's carries as its body ends; they are live until then

    def resolve(self) -> None:
        """Decides which values are stored, and the order of operations; see the notes."""
        for value in self.results:
            value.live = True
        for value in self.carry_out:
            value.live = value.stored = True
        for operation in reversed(self.operations):
            self._resolve_operation(operation)
        self.operations = self._schedule()
        # A copy comes directly after the operation that makes its operand.
        for copy in [each for each in reversed(self.operations) if each.does is _COPY]:
            self.operations.remove(copy)
            after = (
                index + 1
                for index, operation in enumerate(self.operations)
                if copy.inputs[0] in operation.outputs
            )
            self.operations.insert(next(after, 0), copy)

    def _resolve_operation(self, operation: _Operation) -> None:
        """Decides whether an operation is live, and which of its values are stored.

        Those that read its outputs have been decided.
        """
        effect = operation.effect
        operation.live = any(output.live for output in operation.outputs)
        for body in operation.bodies:
            body.resolve()
        if operation.live:
            for index, value in enumerate(operation.inputs):
                value.live = True
                value.stored |= (
                    effect in ("kernel", "loop")
                    or (effect == "update" and index == 0)
                    or (effect == "alias" and operation.outputs[index].stored)
                )
        if effect not in ("fused", "alias"):
            for value in operation.outputs:
                value.stored = True

    def _schedule(self) -> list[_Operation]:
        """Orders the operations, with those that no loop or gather needs after the last loop."""
        live_loops = [each.live and each.effect == "loop" for each in self.operations]
        end = max((index + 1 for index, is_loop in enumerate(live_loops) if is_loop), default=0)
        needed = set(self.results)
        early = set()
        for index, operation in reversed(list(enumerate(self.operations))):
            is_gather = operation.live and operation.does is primitives.ALL_GATHER
            is_needed = index < end and not needed.isdisjoint(operation.outputs)
            if live_loops[index] or is_gather or is_needed:
                needed.update(operation.inputs)
                early.add(operation)
        before = sorted(self.operations[:end], key=lambda operation: operation not in early)
        return before + self.operations[end:]

    def executed(self, times: int = 1) -> Iterator[tuple[_Operation, int]]:
        """Yields the live operations, those of loops included, and how often each runs."""
        for operation in self.operations:
            if operation.live:
                yield operation, times
                for body in operation.bodies:
                    yield from body.executed(times * operation.trips)


class _JaxprReader:
    """Turns a jaxpr into operations; calls are inlined.

    `size` returns a value's bytes on one device, `kind` the kind of an operation's result;
    `in_model`: the jaxpr is a part of the forward or backward pass.
    """

    def __init__(
        self,
        size: Callable[[Any], int],
        kind: Callable[[jex.JaxprEqn, Any], Kind],
        in_model: bool = False,
    ) -> None:
        self.size = size
        self.kind = kind
        self.in_model = in_model
        self.operations: list[_Operation] = []

    def read(self, jaxpr: jex.Jaxpr, args: Sequence[_Value]) -> list[_Value]:
        """Appends the jaxpr's operations to `operations`; returns its results."""
        captured = [_outer_value(_device_bytes(var.aval)) for var in jaxpr.constvars]
        env: dict[Any, _Value] = dict(zip(inputs_of(jaxpr), (*captured, *args), strict=True))

        def value(atom: Any) -> _Value:
            if isinstance(atom, jex.Literal):
                return _outer_value(0, constant=(str(atom.val), str(atom.aval)))
            return env[atom]

        for eqn in jaxpr.eqns:
            outputs = self._read_eqn(eqn, [value(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _read_eqn(self, eqn: jex.JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        """Appends an equation's operation, or those of an inlined call; returns its results."""
        primitive = primitive_of(eqn)
        # Calls and loops of one trip are inlined: their equations are read in their place.
        if primitive.memory == "inlined" or is_own(eqn, GATHER):
            outer_size, outer_in_model = self.size, self.in_model
            self.in_model |= _is_in_model(eqn)
            if primitive is primitives.SHARD_MAP:  # shapes inside are those of one device
                self.size = _device_bytes
            outputs = self.read(bodies(eqn)[0], inputs)
            self.size, self.in_model = outer_size, outer_in_model
            return outputs
        if primitive is primitives.SCAN and trips_of(eqn) == 0:
            _, carry, _ = split_scan(eqn, inputs)
            return carry + [_outer_value(0) for _ in eqn.outvars[len(carry) :]]
        if primitive is primitives.SCAN and trips_of(eqn) == 1:
            consts, carry, xs = split_scan(eqn, inputs)
            slices = [
                self._add_operation(primitives.SQUEEZE, [x], [_Value(x.bytes, x.kind)]).outputs[0]
                for x in xs
            ]
            return self.read(body_of(eqn)[0], [*consts, *carry, *slices])
        # A copy to scatter from: see the note on the order of operations.
        if scattered_dim(eqn) and inputs[0].maker is not primitives.DOT:
            copied = _Value(inputs[0].bytes, inputs[0].kind)
            inputs = self._add_operation(_COPY, inputs, [copied]).outputs
        # The operation, with its effect on memory.
        outputs = [_Value(self.size(var.aval), self.kind(eqn, var.aval)) for var in eqn.outvars]
        effect: str = primitive.memory
        if primitive is primitives.DEVICE_PUT:
            crosses = len({is_on_host(var.aval) for var in (*eqn.invars, *eqn.outvars)}) > 1
            effect = "kernel" if crosses else "alias"
        # A value computed from constants alone is a constant too, identified by its computation.
        inputs_constant = all(value.constant is not None for value in inputs)
        if effect in ("fused", "alias") and inputs_constant:
            constants = [value.constant for value in inputs]
            for index, output in enumerate(outputs):
                aval = str(eqn.outvars[index].aval)
                output.constant = (primitive, index, aval, parameter_text(eqn), *constants)
        # Its work: matmuls, transfers to and from the host, and the bodies of a loop.
        operation = self._add_operation(primitive, inputs, outputs, effect)
        operation.matmuls = tuple(matmuls_of(eqn))
        operation.uncounted = uncounted_kernel(eqn)
        if primitive is primitives.DEVICE_PUT and effect == "kernel":
            operation.in_update = not (self.in_model or _is_in_model(eqn))
            # one side of each pair is in host memory, and takes no bytes here
            for value, output in zip(inputs, outputs, strict=True):
                operation.from_host += max(0, output.bytes - value.bytes)
                operation.to_host += max(0, value.bytes - output.bytes)
        if effect == "loop":
            self._read_bodies(eqn, operation)
        return outputs

    def _add_operation(
        self, does: Primitive, inputs: list[_Value], outputs: list[_Value], effect: str = ""
    ) -> _Operation:
        """Appends an operation, and tells its outputs what made them."""
        effect = effect or does.memory
        operation = _Operation(does, effect, inputs, outputs)
        if effect == "update":
            operation.in_place = list(zip(inputs, outputs, strict=False))
        self.operations.append(operation)
        for index, output in enumerate(outputs):
            output.maker = inputs[index].maker if effect == "alias" else does
            output.donated = effect == "alias" and inputs[index].donated
        return operation

    def _read_bodies(self, eqn: jex.JaxprEqn, loop: _Operation) -> None:
        """Sets a loop's bodies; each of a `cond` or `while` runs once, on values outside of it."""
        in_model = self.in_model or _is_in_model(eqn)
        # How often a `while` runs is not known, nor which branch a `cond` takes.
        if loop.does is not primitives.SCAN:
            for body in bodies(eqn):
                reader = _JaxprReader(self.size, self.kind, in_model)
                inputs = [_outer_value(_device_bytes(var.aval)) for var in body.invars]
                results = reader.read(body, inputs)
                loop.bodies.append(_OperationList(reader.operations, results))
            return
        # A scan: its constants stay outside; its carry is updated in place if donated, else copied.
        body, _ = body_of(eqn)
        arguments = list(zip(body.invars, loop.inputs, strict=True))
        consts, carry, xs = split_scan(eqn, arguments)
        inputs = [_outer_value(self.size(var.aval), value.kind) for var, value in consts]
        for (_, value), output in zip(carry, loop.outputs, strict=False):
            if value.kind == "gathered":  # for the next layer
                output.kind = "gathered"
        carry_in = [
            _outer_value(0, output.kind, donated=True)
            if value.donated
            else _Value(self.size(var.aval), output.kind)
            for (var, value), output in zip(carry, loop.outputs, strict=False)
        ]
        reader = _JaxprReader(self.size, self.kind, in_model)
        slices: list[_Value] = []
        for var, value in xs:  # a slice of a value outside, fused like any other
            size = self.size(var.aval)
            part = _Value(size, value.kind)
            slices += reader._add_operation(primitives.SLICE, [_outer_value(size)], [part]).outputs
        # Stacked values are results of the loop; the carry is also the input of the next trip.
        results = reader.read(body, [*inputs, *carry_in, *slices])
        carry_out, stacked = results[: len(carry)], results[len(carry) :]
        for output, result in zip(loop.outputs[len(carry) :], stacked, strict=True):
            if result.kind == "gathered":  # parameters that stay gathered
                output.kind = "gathered"
        loop.bodies = [_OperationList(reader.operations, stacked, carry_in, carry_out)]
        loop.in_place = list(zip((value for _, value in carry), loop.outputs, strict=False))
        loop.trips = trips_of(eqn)
        avals = [var.aval for var in eqn.outvars[len(carry) :]]
        loop.stacked_on_host = sum(_array_bytes(aval) for aval in avals if is_on_host(aval))


def _is_in_model(eqn: jex.JaxprEqn) -> bool:
    """Tells whether an equation is of the forward or backward pass: differentiation made it."""
    return "jvp(" in scopes_of(eqn)


class _Lifetimes:
    """When each stored value of resolved operations is live, and the memory `traffic` in bytes.

    Times are indices of operations; -1 is before the first.
    """

    def __init__(self, program: _OperationList) -> None:
        self.operations = program.operations
        self.end = len(program.operations)
        self.traffic = 0
        self.first: dict[_Value, int] = {}
        self.last: dict[_Value, int] = {}
        self.constants: dict[Any, _Value] = {}
        self.bodies: dict[int, list[_Lifetimes]] = {}
        for value in program.carry_in:
            if not value.donated:
                self._allocate(value, -1)
        for time, operation in enumerate(program.operations):
            if operation.live:
                self._visit_operation(time, operation)
        for value in program.carry_out:
            self._mark_read(value, self.end)
        for value in program.results:
            self.traffic += self._mark_read(value, self.end) + value.bytes

    def _allocate(self, value: _Value, time: int) -> None:
        """Gives a value memory of its own from this time on."""
        value.reads = {value: value.bytes}
        self.first[value] = self.last[value] = time

    def _mark_read(self, value: _Value, time: int) -> int:
        """Keeps what is read in place of a value live until this time; returns the bytes read."""
        for source in value.reads:
            if not source.is_outer:
                self.first.setdefault(source, time)
                self.last[source] = time
        return sum(value.reads.values())

    def _visit_operation(self, time: int, operation: _Operation) -> None:
        """Sets what reading each output reads; gives memory to what is stored, and adds traffic."""
        # Views and fused operations read what their operands read.
        outputs = operation.outputs
        is_fused = operation.effect == "fused"
        if operation.effect == "alias":
            for value, output in zip(operation.inputs, outputs, strict=False):
                output.reads = value.reads
        elif is_fused and not any(output.stored for output in outputs):
            reads: dict[_Value, int] = {}
            for value in operation.inputs:
                reads |= value.reads
            for output in outputs:
                output.reads = dict(reads)
                if operation.does.slices:
                    output.reads = {each: min(size, output.bytes) for each, size in reads.items()}
        elif is_fused and outputs[0].constant is not None:
            for output in outputs:  # a constant is made where it is first read
                shared = self.constants.setdefault(output.constant, output)
                output.reads = {shared: output.bytes}
        else:
            self._allocate_outputs(time, operation)

    def _allocate_outputs(self, time: int, operation: _Operation) -> None:
        """Gives each output memory, that of an input where it is updated in place; adds traffic."""
        # a carry that starts as a constant is made in the memory of the result
        new = {value for value, _ in operation.in_place if value.constant is not None}
        read = sum(self._mark_read(value, time) for value in operation.inputs if value not in new)
        targets = {output: value for value, output in operation.in_place if value not in new}
        for output in operation.outputs:
            memory = list(targets[output].reads) if output in targets else []
            if len(memory) == 1 and (memory[0].donated or memory[0] in self.first):
                output.reads = {memory[0]: output.bytes}
                self._mark_read(output, time)
            else:
                self._allocate(output, time)
        # Traffic: all trips of a loop, the slices of an update, otherwise all read and written.
        if operation.effect == "loop":
            self.bodies[time] = [_Lifetimes(body) for body in operation.bodies]
            self.traffic += operation.trips * sum(body.traffic for body in self.bodies[time])
        elif operation.effect == "update" and not operation.does.collective:
            self.traffic += 2 * sum(value.bytes for value in operation.inputs[1:])
        else:
            written = sum(output.bytes for output in operation.outputs)
            # A slice reads no more than it writes.
            self.traffic += (min(read, written) if operation.does.slices else read) + written

    def peak(self) -> Counter[str]:
        """Computes bytes by kind at the time of the peak."""
        changes: dict[int, Counter[str]] = defaultdict(Counter)
        for value, time in self.first.items():
            changes[time][value.kind] += value.bytes
            changes[self.last[value] + 1][value.kind] -= value.bytes
        live, peak = Counter[str](), Counter[str]()
        for time in range(-1, self.end + 1):
            live.update(changes[time])
            totals = [live]
            if time in self.bodies:
                # the bodies of a loop count its carries
                in_place = self.operations[time].in_place
                carries = {source for _, output in in_place for source in output.reads}
                carried = Counter[str]()
                for value in carries:
                    carried[value.kind] += value.bytes
                totals += [live - carried + body.peak() for body in self.bodies[time]]
            for total in totals:
                if total.total() > peak.total():
                    peak = Counter(total)
        return peak
