"""Reads the collectives of a compiled program: `read_collectives(text, mesh.shape)`.

An operation is named after the communication, not the instruction: an `all-reduce-scatter` fusion
of a TPU is a reduce-scatter; an all-reduce of which each device then keeps a part is an all-reduce,
`sliced`. Bytes follow a ring: with n devices in a group, all-gather, reduce-scatter and all-to-all
send (n-1)/n of the unsharded array, all-reduce twice that (reduce-scatter, then all-gather), a
permute its operand once, on a device that has a target. The shapes are the program's: padding by
the compiler is sent too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Literal, NamedTuple

from fsdp_jax.errors import ArgumentError
from fsdp_jax.hlo.dataflow import concatenated_operands, is_only_sliced, paths_of_operands
from fsdp_jax.hlo.overlap import KERNELS, Overlap, receive_of
from fsdp_jax.hlo.parser import Computation, Instruction, Module, Shape, parse_program
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
"""Communication between devices whose bytes or partners the text does not state.

So is any other instruction that names groups or pairs of devices; see `_communicates`.
"""
_PARTNERS = ("replica_groups", "source_target_pairs")

MEGASCALE: dict[str, Op] = {
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_REDUCE": "all-reduce",
}
"""Transfer types in a `send` between slices of a TPU, each of which runs a program of its own."""
_MEGASCALE = "_xla_megascale_transfer_type"


@dataclass(frozen=True)
class Collective:
    """One instruction's traffic in one dtype, over a whole step."""

    op: Op  # the operation, named after the communication
    dtype: str  # numpy name of the dtype that is sent
    axis: str  # the mesh axes it runs along, joined by "+"; "?" where the groups fit no axes
    count: int  # executions per step
    bytes: int  # that a device sends per step, all executions
    asynchronous: bool  # it has a start and a done
    sliced: bool  # each device keeps a part of an all-reduce; a reduce-scatter would send half
    kernels: int  # GEMMs, convolutions, attention kernels between start and done, per execution
    shapes: tuple[tuple[int, ...], ...]  # unsharded (gathered, not yet scattered), by operand
    # the parameter of each operand, by its `fsdp.gather[...]` or `fsdp.reduce[...]` scope, else the
    # traced operation; "" where the program names neither
    paths: tuple[str, ...]
    loop: int  # number of while loops around it
    name: str  # of the instruction in the program
    within: str = ""  # the scheduled computation that runs it
    begins: str = ""  # the instruction of `within` that starts it: itself, or its wrapper
    ends: str = ""  # the one that waits for it

    @property
    def hidden(self) -> int:
        """Bytes that are sent while a GEMM, a convolution or an attention kernel runs."""
        if not self.kernels:
            return 0
        return self.bytes


@dataclass(frozen=True)
class ProgramTraffic:
    """The collectives of a program in its order, and the parts of it that could not be read."""

    collectives: tuple[Collective, ...]
    # one line for each loop whose trip count is not known, which is counted as run once, and for
    # each transfer of an unknown kind. Where it is not empty, the bytes are a lower bound
    unread: tuple[str, ...]


def read_collectives(text: str, axes: Mapping[str, int]) -> ProgramTraffic:
    """Reads the collectives of a compiled program, and names the parts that could not be read.

    `text`: `compiled.as_text()`, of any backend; `axes`: `mesh.shape`, where slices of a TPU are
    along the first axes. Raises ValueError for a text that is not a compiled program, or is one for
    another number of devices.
    """
    module = parse_program(text)
    devices = prod(axes.values())
    inner, across = _split_across_slices(axes, devices // module.partitions)
    # Each slice of a TPU runs a program of its own, partitioned over the devices of one slice.
    fits = devices == module.partitions * across.size
    if not fits or (across.size > 1) != (_MEGASCALE in text):
        expected = f"{module.partitions} devices"
        if _MEGASCALE in text:
            expected += " in each of several slices"
        raise ArgumentError(
            "the program is not for this mesh",
            got=f"a mesh of {dict(axes)}",
            expected=expected,
            fix="pass the shape of the mesh that the program was compiled for",
        )
    reader = _CollectiveReader(module, inner, across)
    # From the entry, which runs once per step, along the calls.
    collectives = reader.read(module[module.entry], _Context(1, 0, {}))
    unread = dict.fromkeys([*reader.unread, *reader.unreached_sends()])
    return ProgramTraffic(tuple(collectives), tuple(unread))


def _split_across_slices(axes: Mapping[str, int], slice_count: int) -> tuple[Axes, Groups]:
    """Splits a mesh: (axes and sizes inside a TPU slice, the group of devices across slices).

    Slices are along the first mesh axes, so that the last of these may be split in two.
    """
    inner: list[tuple[str, int]] = []
    across: list[str] = []
    covered = 1
    for name, size in axes.items():
        part = gcd(size, slice_count // covered)
        covered *= part
        inner.append((name, size // part))
        if part > 1:
            across.append(name)
    return tuple(inner), Groups(covered, "+".join(across))


class _Context(NamedTuple):
    """The place in the program where a computation runs, and how often."""

    executions: int  # how often it runs per step
    loop: int  # number of while loops around it
    known: Mapping[int, int]  # known scalars of its argument, by position in the tuple
    # the instruction that the schedule shows in its place, where it is a fusion or is called
    # asynchronously: a scheduled computation, and a position in it
    caller: tuple[Computation, int] | None = None


class _Transfer(NamedTuple):
    """One execution of a collective: the unsharded array and the path of each operand."""

    op: Op
    groups: Groups
    shapes: Sequence[Shape]
    paths: Sequence[str]
    sliced: bool = False


class _CollectiveReader:
    """Reads a program's collectives, computation by computation; `axes` are (name, size)."""

    def __init__(self, module: Module, axes: Axes, across: Groups):
        self.unread: list[str] = []  # lines on the parts that could not be read so far
        self._module, self._axes, self._across = module, axes, across
        self._entered: set[str] = set()
        self._overlap = Overlap(module)

    def read(self, within: Computation, context: _Context) -> list[Collective]:
        """Reads the collectives of a computation and of all that it calls."""
        collectives: list[Collective] = []
        self._entered.add(within.name)
        for position, one in enumerate(within.instructions):
            here = context._replace(caller=context.caller or (within, position))
            if one.opcode == "while":
                collectives += self._collectives_of_loop(within, one, context)
            elif one.opcode == "conditional":
                # The branch that sends most: which one runs is known only as the step runs.
                unknown = context._replace(known={}, caller=None)
                branches = [self.read(self._module[name], unknown) for name in one.calls]
                most = max(branches, key=lambda sent: sum(each.bytes for each in sent), default=[])
                collectives += most
            elif one.operation in OPS:
                transfer = self._read_transfer(within, one, fused=context.caller is not None)
                collectives += self._collectives_by_dtype(transfer, one, here)
            elif _communicates(one):
                # Between slices of a TPU, or in a way that the text does not state.
                if exchange := self._read_slice_exchange(within, one):
                    collectives += self._collectives_by_dtype(exchange, one, here)
                else:
                    self.unread.append(f"{one.opcode} '{one.name}' in '{within.name}'")
            else:
                collectives += self._collectives_of_callees(within, one, here)
        return collectives

    def unreached_sends(self) -> list[str]:
        """Lists the instructions that may send in computations not read so far, a line each."""
        return [
            f"{one.opcode} '{one.name}' in '{name}', "
            "which is not run by an instruction that is understood"
            for name, computation in self._module.computations.items()
            if name not in self._entered
            for one in computation.instructions
            if _may_send(one)
        ]

    def _collectives_of_loop(
        self, within: Computation, instruction: Instruction, context: _Context
    ) -> list[Collective]:
        """Reads the collectives of a `while`; where its trips are unknown, those of one trip."""
        condition, body, trips, constants = self._module.read_loop(
            within, instruction, context.known
        )
        if trips is None:
            self.unread.append(f"the length of the loop '{instruction.name}' in '{within.name}'")
            trips = 1
        inside = _Context(context.executions * trips, context.loop + 1, constants)
        # The condition also runs once more, before the loop ends.
        tested = inside._replace(executions=inside.executions + context.executions)
        return [*self.read(condition, tested), *self.read(body, inside)]

    def _collectives_of_callees(
        self, within: Computation, instruction: Instruction, context: _Context
    ) -> list[Collective]:
        """Reads the collectives of computations that fusions, calls and asynchronous wrappers call.

        Appends to `self.unread` those that are named otherwise and may communicate.
        """
        collectives: list[Collective] = []
        context = context._replace(known={})
        # The schedule shows a fusion or a wrapper in place of its computation.
        if instruction.opcode not in ("fusion", "async-start", "call-start"):
            context = context._replace(caller=None)
        for called in (self._module[name] for name in instruction.calls):
            inside = self.read(called, context)
            # Each collective counts once, by the fusion that starts it.
            if not (
                inside and instruction.opcode == "fusion" and self._overlap.only_continues(called)
            ):
                collectives += inside
        # Other attributes may name computations too, such as the `to_apply` of a sort.
        self.unread += [
            f"what {instruction.opcode} '{instruction.name}' in '{within.name}' sends"
            f" by '{called.name}'"
            for called in self._module.computations_named_by(instruction)
            if called.name not in instruction.calls and self._may_communicate(called)
        ]
        return collectives

    def _may_communicate(self, within: Computation) -> bool:
        """Tells whether a computation, or one that it names, may send; all count as read."""
        self._entered.add(within.name)
        named = [
            each for one in within.instructions for each in self._module.computations_named_by(one)
        ]
        inside = [self._may_communicate(each) for each in named]
        return any(inside) or any(_may_send(one) for one in within.instructions)

    def _read_transfer(
        self, within: Computation, instruction: Instruction, *, fused: bool
    ) -> _Transfer:
        """Reads the operands that a collective sends; none if its groups have one device.

        `fused`: it is inside a fusion or an asynchronous wrapper.
        """
        op = OPS[instruction.operation]
        groups = groups_of(instruction, self._axes)
        if groups.size == 1:
            return _Transfer(op, groups, (), ())
        # A TPU fuses an all-reduce and a slice into a reduce-scatter; others send all of it first.
        sliced = op == "all-reduce" and is_only_sliced(self._module, within, instruction.name)
        if sliced and fused:
            op = "reduce-scatter"
            sliced = False
        # XLA concatenates small arrays before it reduces them: each is an operand here.
        parts = list(instruction.operands)
        if op == "all-reduce":
            parts = [
                part for name in parts for part in concatenated_operands(self._module, within, name)
            ]
        unmerged = instruction
        if len(parts) != len(instruction.operands):
            unmerged = replace(instruction, inside=", ".join(f"%{name}" for name in parts))
        paths = paths_of_operands(self._module, within, unmerged)
        shapes = [
            _unsharded_shape(op, instruction, within[name].shapes[0], groups.size) for name in parts
        ]
        return _Transfer(op, groups, shapes, paths, sliced)

    def _read_slice_exchange(
        self, within: Computation, instruction: Instruction
    ) -> _Transfer | None:
        """Reads the operand of a `send` to other TPU slices through the hosts; None if unknown."""
        # The type of the transfer and the number of its targets are attributes of the `send`.
        attributes = dict(re.findall(r'_xla_(megascale_\w+)="([^"]*)"', instruction.attributes))
        op = MEGASCALE.get(attributes.get("megascale_transfer_type", ""))
        targets = attributes.get("megascale_target", "").partition("}")[0].count(",") + 1
        receive = receive_of(within, instruction)
        if op is None or receive is None or targets != self._across.size:
            return None
        # A gather's unsharded array is received, a reduction's is sent.
        shape = receive.shapes[0] if op == "all-gather" else instruction.shapes[0]
        paths = paths_of_operands(
            self._module, within, replace(instruction, inside=f"%{instruction.operands[0]}")
        )
        return _Transfer(op, self._across, [shape], paths)

    def _collectives_by_dtype(
        self, transfer: _Transfer, instruction: Instruction, context: _Context
    ) -> list[Collective]:
        """Makes one collective for each dtype that an instruction sends."""
        op, groups, shapes, paths, sliced = transfer
        if not shapes:
            return []
        # Overlap is a property of the scheduled instruction, which may be a fusion around this one.
        assert context.caller is not None
        scheduled, position = context.caller
        asynchronous, kernels, ends = self._overlap.span_of(scheduled, position)
        # The operands of each dtype, with the bytes of a ring.
        collectives = []
        for dtype in dict.fromkeys(shape.dtype for shape in shapes):
            operands = [each for each in zip(shapes, paths, strict=True) if each[0].dtype == dtype]
            sent = _sent_bytes(op, groups.size, sum(shape.bytes for shape, _ in operands))
            collective = Collective(
                op=op,
                dtype=dtype,
                axis=groups.axis,
                count=context.executions,
                bytes=context.executions * sent,
                asynchronous=asynchronous,
                sliced=sliced,
                kernels=kernels,
                shapes=tuple(shape.dims for shape, _ in operands),
                paths=tuple(path for _, path in operands),
                loop=context.loop,
                name=instruction.name,
                within=scheduled.name,
                begins=scheduled.instructions[position].name,
                ends=ends,
            )
            collectives.append(collective)
        return collectives


def _communicates(instruction: Instruction) -> bool:
    """Tells whether an instruction sends between devices; a Pallas kernel declares it."""
    if instruction.opcode == "custom-call":
        return '"has_communication":true' in instruction.attributes
    if instruction.operation in UNREAD:
        return (
            "is_host_transfer=true" not in instruction.attributes
            or _MEGASCALE in instruction.attributes
        )
    # An opcode that a later XLA may have states its partners, as all of today's do.
    return instruction.operation in OPS or any(map(instruction.attribute, _PARTNERS))


def _may_send(instruction: Instruction) -> bool:
    """Tells whether an instruction communicates, or calls a library or runtime that may."""
    is_opaque = instruction.opcode == "custom-call" and not KERNELS.search(instruction.target)
    return is_opaque or _communicates(instruction)


def _unsharded_shape(op: Op, instruction: Instruction, shape: Shape, size: int) -> Shape:
    """Computes the gathered shape of an all-gather's operand; of other operations, `shape` itself.

    `size`: how many devices are in the group.
    """
    if op != "all-gather":
        return shape
    dim = int(instruction.attribute("dimensions").strip("{}"))
    dims = list(shape.dims)
    dims[dim] *= size
    return Shape(shape.dtype, tuple(dims))


def _sent_bytes(op: Op, size: int, array_bytes: int) -> int:
    """Computes the bytes that a device sends in one execution, in a ring of `size` devices."""
    if op == "permute":
        return array_bytes
    # A reduce-scatter and an all-gather.
    if op == "all-reduce":
        array_bytes *= 2
    return array_bytes * (size - 1) // size
