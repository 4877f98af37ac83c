"""Reads what a compiled program sends: `read_program(compiled.as_text(), mesh.shape)`.

An operation is named by what is communicated, not by the instruction: an `all-reduce-scatter`
fusion of a TPU is a reduce-scatter; an all-reduce of which each device then keeps a part is an
all-reduce, `sliced`. Bytes follow a ring: with n devices in a group, all-gather, reduce-scatter and
all-to-all send (n-1)/n of the unsharded array, all-reduce twice that (reduce-scatter, then
all-gather), a permute its operand once, on a device that has someone to send to. The shapes are the
program's: padding by the compiler is sent too.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Literal, NamedTuple

from fsdp_jax.errors import message
from fsdp_jax.hlo.dataflow import concatenated_operands, only_sliced, paths_of
from fsdp_jax.hlo.overlap import KERNELS, Overlap, Span, is_pair
from fsdp_jax.hlo.parser import Computation, Instruction, Module, Shape, parse
from fsdp_jax.hlo.replica_groups import Axes, Groups, groups_of

Op = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"]

OPS: dict[str, Op] = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "collective-permute": "permute",
}
UNREAD = ("ragged-all-to-all", "collective-broadcast", "send")
"""Communication between devices whose bytes or partners the text does not tell."""

MEGASCALE: dict[str, Op] = {
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_REDUCE": "all-reduce",
}
"""Transfer types in a `send` between slices of a TPU, each of which runs a program of its own."""
_MEGASCALE = "_xla_megascale_transfer_type"


@dataclass(frozen=True)
class Collective:
    """One instruction's traffic in one dtype, over a whole step.

    Attributes:
        op: the operation, by what is communicated.
        dtype: numpy name of the dtype that is sent.
        axis: the mesh axes it runs along, joined by "+"; "?" where the groups fit no axes.
        count: executions per step.
        bytes: that a device sends per step, all executions.
        hidden: of these, the bytes sent while a GEMM, a convolution or an attention kernel runs.
        asynchronous: it has a start and a done.
        sliced: each device keeps only a part of an all-reduce's result; a reduce-scatter would have
            sent half.
        kernels: how many GEMMs, convolutions and attention kernels run between start and done,
            per execution.
        shapes: of the unsharded (gathered, not yet scattered) arrays, one per operand.
        paths: what each operand serves: the parameter of its `fsdp.gather[...]` or
            `fsdp.reduce[...]` scope, else the traced operation; "" where the program does not tell.
        loop: number of while loops around it.
        name: of the instruction in the program.
        within: the scheduled computation that runs it.
        begins: the instruction of `within` that starts it: itself, or the fusion or wrapper around
            it.
        ends: the one that waits for it.

    """

    op: Op
    dtype: str
    axis: str
    count: int
    bytes: int
    hidden: int
    asynchronous: bool
    sliced: bool
    kernels: int
    shapes: tuple[tuple[int, ...], ...]
    paths: tuple[str, ...]
    loop: int
    name: str
    within: str = ""
    begins: str = ""
    ends: str = ""


@dataclass(frozen=True)
class ProgramTraffic:
    """The collectives of a program in its order, and what could not be read.

    Attributes:
        collectives: what is sent.
        unread: one line for each loop whose trip count is not known, which is counted as run once,
            and for each transfer of a kind that is not understood. Where it is not empty, the bytes
            are a lower bound.

    """

    collectives: tuple[Collective, ...]
    unread: tuple[str, ...]


def read_program(text: str, axes: Mapping[str, int]) -> ProgramTraffic:
    """Reads what a compiled program sends.

    Args:
        text: `compiled.as_text()`, of any backend.
        axes: the mesh's axes and sizes in its order, `mesh.shape`; slices of a TPU along the first
            of them.

    Raises:
        ValueError: a text that is not a compiled program, or is one for another number of devices.

    """
    module = parse(text)
    devices = prod(axes.values())
    inner, across = _slices(axes, devices // module.partitions)
    fits = (
        devices == prod(size for _, size in inner) * across.size == module.partitions * across.size
    )
    if not fits or (across.size > 1) != (_MEGASCALE in text):
        what = "the program is not for this mesh"
        expected = f"{module.partitions} devices"
        expected += " in each of several slices" if _MEGASCALE in text else ""
        got = f"a mesh of {dict(axes)}"
        fix = "pass the shape of the mesh that the program was compiled for"
        raise ValueError(message(what, got=got, expected=expected, fix=fix))
    reader = _CollectiveReader(module, inner, across)
    collectives = reader.read(module[module.entry], _LoopContext(1, 0, {}))
    unread = dict.fromkeys([*reader.unread, *reader.not_entered()])
    return ProgramTraffic(tuple(collectives), tuple(unread))


def _slices(axes: Mapping[str, int], slices: int) -> tuple[Axes, Groups]:
    """Returns (axes inside a slice, group across slices); slices are along the first axes."""
    inner: list[tuple[str, int]] = []
    across: list[str] = []
    covered = 1
    for name, size in axes.items():
        part = gcd(size, slices // covered)
        covered *= part
        inner.append((name, size // part))
        if part > 1:
            across.append(name)
    return tuple(inner), Groups(covered, "+".join(across))


class _LoopContext(NamedTuple):
    """The loops around a computation.

    Attributes:
        executions: how often it runs per step.
        loop: number of while loops around it.
        known: known scalars of its argument, by position in the tuple.

    """

    executions: int
    loop: int
    known: Mapping[int, int]


class _Caller(NamedTuple):
    """An instruction of a scheduled computation, by position."""

    within: Computation
    position: int


class _Scheduled(NamedTuple):
    """Where the schedule starts a collective and waits for it."""

    within: str
    begins: str
    span: Span


class _CollectiveReader:
    """Reads the collectives of a module.

    Attributes:
        unread: what could not be read so far.

    """

    def __init__(self, module: Module, axes: Axes, across: Groups):
        self.unread: list[str] = []
        self._module, self._axes, self._across = module, axes, across
        self._entered: set[str] = set()
        self._overlap = Overlap(module)

    def read(
        self, within: Computation, context: _LoopContext, caller: _Caller | None = None
    ) -> list[Collective]:
        """Returns the collectives of a computation and of all that it calls.

        Args:
            within: the computation.
            context: the loops around it.
            caller: the instruction that the schedule shows in its place, where it is a fusion or is
                called asynchronously.

        """
        collectives: list[Collective] = []
        self._entered.add(within.name)
        for position, one in enumerate(within.instructions):
            scheduled = caller or _Caller(within, position)
            if one.opcode == "while":
                collectives += self._loop(within, one, context)
            elif one.opcode == "conditional":
                unknown = context._replace(known={})
                branches = [self.read(self._module[name], unknown) for name in one.calls]
                collectives += max(branches, key=_total_bytes, default=[])
            elif one.opcode.removesuffix("-start") in OPS:
                collectives += self._collective(within, one, context, scheduled)
            elif one.opcode == "send" and _MEGASCALE in one.attributes:
                collectives += self._between_slices(within, one, context, position)
            elif _communicates(one):
                self.unread.append(f"{one.opcode} '{one.name}' in '{within.name}'")
            else:
                collectives += self._collectives_of_callees(within, one, context, scheduled)
        return collectives

    def not_entered(self) -> list[str]:
        """Returns the communication in computations that no understood instruction calls."""
        return [
            f"{one.opcode} '{one.name}' in '{name}', "
            "which is not run by an instruction that is understood"
            for name, computation in self._module.computations.items()
            if name not in self._entered
            for one in computation.instructions
            if _communicates(one) or _is_opaque(one)
        ]

    def _loop(
        self, within: Computation, one: Instruction, context: _LoopContext
    ) -> list[Collective]:
        trips = self._module.trips(within, one, context.known)
        if trips is None:
            self.unread.append(f"the length of the loop '{one.name}' in '{within.name}'")
            trips = 1
        condition, body = self._module.parts(one)
        known = self._module.constants(within, one, context.known)
        executions = context.executions * trips
        loop = context.loop + 1
        return [
            *self.read(condition, _LoopContext(executions + context.executions, loop, known)),
            *self.read(body, _LoopContext(executions, loop, known)),
        ]

    def _collectives_of_callees(
        self, within: Computation, one: Instruction, context: _LoopContext, scheduled: _Caller
    ) -> list[Collective]:
        """Returns the collectives of what fusions, calls and asynchronous wrappers call.

        Appends to `self.unread` what is named otherwise and may communicate.
        """
        collectives: list[Collective] = []
        single = one.opcode in ("fusion", "async-start", "call-start")
        for called in (self._module[name] for name in one.calls):
            inside = self.read(called, context._replace(known={}), scheduled if single else None)
            if not (inside and one.opcode == "fusion" and self._overlap.continues(called)):
                collectives += inside
        self.unread += [
            f"what {one.opcode} '{one.name}' in '{within.name}' sends by '{called.name}'"
            for called in self._module.named(one)
            if called.name not in one.calls and self._may_communicate(called)
        ]
        return collectives

    def _may_communicate(self, within: Computation) -> bool:
        """Returns whether a computation, or one that it names, may send; enters all of them."""
        self._entered.add(within.name)
        named = [each for one in within.instructions for each in self._module.named(one)]
        inside = [self._may_communicate(each) for each in named]
        return any(inside) or any(
            _communicates(one) or _is_opaque(one) for one in within.instructions
        )

    def _collective(
        self, inner: Computation, one: Instruction, context: _LoopContext, scheduled: _Caller
    ) -> list[Collective]:
        """Returns one collective per dtype.

        Args:
            inner: the computation that contains `one`.
            one: the collective.
            context: the loops around it.
            scheduled: the collective itself, or the fusion or wrapper around it.

        """
        outer, position = scheduled
        op = OPS[one.opcode.removesuffix("-start")]
        groups = groups_of(one, self._axes)
        if groups.size == 1:
            return []
        sliced = op == "all-reduce" and only_sliced(self._module, inner, one.name)
        if sliced and inner is not outer:
            op = "reduce-scatter"
            sliced = False
        # XLA concatenates small arrays before it reduces them.
        parts = list(one.operands)
        if op == "all-reduce":
            parts = [
                part for name in parts for part in concatenated_operands(self._module, inner, name)
            ]
        unmerged = one
        if len(parts) != len(one.operands):
            unmerged = replace(one, inside=", ".join(f"%{name}" for name in parts))
        paths = paths_of(self._module, inner, unmerged)
        shapes = [_unsharded(op, one, inner[name].shapes[0], groups.size) for name in parts]
        begins = outer.instructions[position].name
        where = _Scheduled(outer.name, begins, self._overlap.between(outer, position))
        return _per_dtype(op, groups, shapes, paths, where, context, one.name, sliced)

    def _between_slices(
        self, within: Computation, one: Instruction, context: _LoopContext, position: int
    ) -> list[Collective]:
        """Returns the exchange between a TPU's slices through their hosts: a send and a receive."""
        attributes = dict(re.findall(r'_xla_(megascale_\w+)="([^"]*)"', one.attributes))
        op = MEGASCALE.get(attributes["megascale_transfer_type"])
        targets = attributes.get("megascale_target", "").partition("}")[0].count(",") + 1
        receives = (each for each in within.instructions if each.opcode == "recv")
        receive = next((each for each in receives if is_pair(one, each)), None)
        if op is None or receive is None or targets != self._across.size:
            self.unread.append(f"{one.opcode} '{one.name}' in '{within.name}'")
            return []
        shape = receive.shapes[0] if op == "all-gather" else one.shapes[0]
        paths = paths_of(self._module, within, replace(one, inside=f"%{one.operands[0]}"))
        where = _Scheduled(within.name, one.name, self._overlap.between(within, position))
        return _per_dtype(op, self._across, [shape], paths, where, context, one.name)


def _communicates(one: Instruction) -> bool:
    """Returns whether an instruction sends between devices; a Pallas kernel declares it."""
    if one.opcode == "custom-call":
        return '"has_communication":true' in one.attributes
    if one.opcode in UNREAD:
        return "is_host_transfer=true" not in one.attributes or _MEGASCALE in one.attributes
    return one.opcode.removesuffix("-start") in OPS


def _is_opaque(one: Instruction) -> bool:
    """Returns whether it calls a library or the runtime, which may send anything."""
    return one.opcode == "custom-call" and not KERNELS.search(one.attribute("custom_call_target"))


def _total_bytes(collectives: Iterable[Collective]) -> int:
    return sum(each.bytes for each in collectives)


def _per_dtype(
    op: Op,
    groups: Groups,
    shapes: list[Shape],
    paths: list[str],
    where: _Scheduled,
    context: _LoopContext,
    name: str,
    sliced: bool = False,
) -> list[Collective]:
    """Returns one collective for each dtype among its operands."""
    asynchronous, kernels, ends = where.span
    collectives = []
    for dtype in dict.fromkeys(shape.dtype for shape in shapes):
        operands = [each for each in zip(shapes, paths, strict=True) if each[0].dtype == dtype]
        once = _sent_bytes(op, groups.size, sum(shape.bytes for shape, _ in operands))
        sent = context.executions * once
        collective = Collective(
            op=op,
            dtype=dtype,
            axis=groups.axis,
            count=context.executions,
            bytes=sent,
            hidden=sent if asynchronous and kernels else 0,
            asynchronous=asynchronous,
            sliced=sliced,
            kernels=kernels,
            shapes=tuple(shape.dims for shape, _ in operands),
            paths=tuple(path for _, path in operands),
            loop=context.loop,
            name=name,
            within=where.within,
            begins=where.begins,
            ends=ends,
        )
        collectives.append(collective)
    return collectives


def _unsharded(op: Op, one: Instruction, shape: Shape, size: int) -> Shape:
    """Returns the gathered shape of an all-gather's operand; other operands are not sharded."""
    if op != "all-gather":
        return shape
    dim = int(one.attribute("dimensions").strip("{}"))
    dims = list(shape.dims)
    dims[dim] *= size
    return Shape(shape.dtype, tuple(dims))


def _sent_bytes(op: Op, size: int, array_bytes: int) -> int:
    """Returns the bytes that a device sends once, in a ring of `size` devices."""
    if op == "permute":
        return array_bytes
    return (2 if op == "all-reduce" else 1) * array_bytes * (size - 1) // size
