"""What a compiled program sends, by meaning: `read_program(compiled.as_text(), mesh.shape)`.

An operation is named by what travels, not by the instruction: an `all-reduce-scatter` fusion of a
TPU is a reduce-scatter; an all-reduce of which each device then keeps a part is an all-reduce,
`sliced`. Bytes follow a ring: with n devices in a group, all-gather, reduce-scatter and all-to-all
send (n-1)/n of the whole array, all-reduce twice that (reduce-scatter, then all-gather), a permute
its operand once, on a device that has someone to send to. The shapes are the program's: what the
compiler pads travels too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Literal, NamedTuple

from fsdp_jax.errors import message
from fsdp_jax.hlo.dataflow import only_sliced, paths_of, pieces
from fsdp_jax.hlo.overlap import KERNELS, Overlap, Span, meet
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
"""What also travels between devices, but whose bytes or partners the text does not tell."""

MEGASCALE: dict[str, Op] = {
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_REDUCE": "all-reduce",
}
"""What slices of a TPU, each of which runs a program of its own, say in the `send` to the others."""
_MEGASCALE = "_xla_megascale_transfer_type"


@dataclass(frozen=True)
class Collective:
    """One instruction's traffic in one dtype, over a whole step.

    Attributes:
        op: what travels.
        dtype: numpy name of the dtype on the wire.
        axis: the mesh axes it runs along, joined by "+"; "?" where the groups fit no axes.
        count: executions per step.
        bytes: that a device sends per step, all executions.
        hidden: of these, what is sent while a GEMM, a convolution or an attention kernel runs.
        asynchronous: it has a start and a done.
        sliced: each device keeps only a part of an all-reduce's result; a reduce-scatter would have
            sent half.
        kernels: how many GEMMs, convolutions and attention kernels stand between start and done,
            per execution.
        shapes: of the whole (gathered, unscattered) arrays, one per operand.
        paths: what each operand serves: the parameter of its `fsdp.gather[...]` or
            `fsdp.reduce[...]` scope, else the traced operation; "" where the program does not tell.
        loop: how many while loops stand around it.
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
class Program:
    """The collectives of a program in its order, and what could not be read.

    Attributes:
        collectives: what is sent.
        unread: one line for each loop whose length is not known, which is counted as run once, and
            for each transfer of a kind that is not understood. Where it is not empty, the bytes are
            a lower bound.

    """

    collectives: tuple[Collective, ...]
    unread: tuple[str, ...]


def read_program(text: str, axes: Mapping[str, int]) -> Program:
    """Reads what a compiled program sends.

    Args:
        text: `compiled.as_text()`, of any backend.
        axes: the mesh's axes and sizes in its order, `mesh.shape`; slices of a TPU along the first
            of them.

    Raises:
        ValueError: a text that is not a compiled program, or is one for another number of devices.

    """
    module = parse(text)
    inner, across = _slices(axes, prod(axes.values()) // module.partitions)
    fits = (
        prod(axes.values())
        == prod(size for _, size in inner) * across.size
        == module.partitions * across.size
    )
    if not fits or (across.size > 1) != (_MEGASCALE in text):
        fix = "pass the shape of the mesh that the program was compiled for"
        got, expected = f"a mesh of {dict(axes)}", f"{module.partitions} devices"
        expected += " in each of several slices" if _MEGASCALE in text else ""
        raise ValueError(
            message("the program is not for this mesh", got=got, expected=expected, fix=fix)
        )
    reader = _Reader(module, inner, across)
    collectives = reader.read(module[module.entry], _Place(1, 0, {}))
    return Program(tuple(collectives), tuple(dict.fromkeys([*reader.unread, *reader.unreached()])))


def _slices(axes: Mapping[str, int], slices: int) -> tuple[Axes, Groups]:
    """A mesh whose first axes lead from slice to slice: what is left of it inside a slice, and
    those axes.
    """
    inner, across, over = [], [], 1
    for name, size in axes.items():
        part = gcd(size, slices // over)
        over *= part
        inner.append((name, size // part))
        across += [name] if part > 1 else []
    return tuple(inner), Groups(over, "+".join(across))


class _Place(NamedTuple):
    """Where a computation runs: how often per step, inside how many loops, and what is known of its
    arguments.
    """

    times: int
    loop: int
    known: Mapping[int, int]


class _Caller(NamedTuple):
    """An instruction of a scheduled computation."""

    within: Computation
    position: int


class _Scheduled(NamedTuple):
    """Where a collective stands in the schedule."""

    within: str
    begins: str
    span: Span


class _Reader:
    def __init__(self, module: Module, axes: Axes, across: Groups):
        self.module, self.axes, self.across = module, axes, across
        self.unread: list[str] = []
        self.entered: set[str] = set()
        self.overlap = Overlap(module)

    def read(
        self, within: Computation, place: _Place, caller: _Caller | None = None
    ) -> list[Collective]:
        """The collectives of a computation and of all that it runs.

        Args:
            within: the computation.
            place: where it runs.
            caller: what is scheduled in its place, where it is one operation: a fusion, or what
                runs asynchronously.

        """
        found: list[Collective] = []
        self.entered.add(within.name)
        for position, one in enumerate(within.instructions):
            at = caller or _Caller(within, position)
            if one.opcode == "while":
                found += self._loop(within, one, place)
            elif one.opcode == "conditional":
                branches = [
                    self.read(self.module[name], place._replace(known={})) for name in one.calls
                ]
                found += max(
                    branches, key=lambda branch: sum(each.bytes for each in branch), default=[]
                )
            elif one.opcode.removesuffix("-start") in OPS:
                found += self._collective(within, one, place, at)
            elif one.opcode == "send" and _MEGASCALE in one.attributes:
                found += self._between_slices(within, one, place, position)
            elif _transfers(one):
                self.unread.append(f"{one.opcode} '{one.name}' in '{within.name}'")
            else:
                found += self._called(within, one, place, at)
        return found

    def unreached(self) -> list[str]:
        """What travels in computations that no instruction which is understood runs."""
        return [
            f"{one.opcode} '{one.name}' in '{name}', which is not run by an instruction that is understood"
            for name, computation in self.module.computations.items()
            if name not in self.entered
            for one in computation.instructions
            if _transfers(one) or _opaque(one)
        ]

    def _loop(self, within: Computation, one: Instruction, place: _Place) -> list[Collective]:
        trips = self.module.trips(within, one, place.known)
        if trips is None:
            self.unread.append(f"the length of the loop '{one.name}' in '{within.name}'")
        condition, body = self.module.parts(one)
        known = self.module.constants(within, one, place.known)
        times = place.times * (1 if trips is None else trips)
        return [
            *self.read(condition, _Place(times + place.times, place.loop + 1, known)),
            *self.read(body, _Place(times, place.loop + 1, known)),
        ]

    def _called(
        self, within: Computation, one: Instruction, place: _Place, at: _Caller
    ) -> list[Collective]:
        """What fusions, calls and asynchronous wrappers send."""
        found: list[Collective] = []
        single = one.opcode in ("fusion", "async-start", "call-start")
        for called in (self.module[name] for name in one.calls):
            sent = self.read(called, place._replace(known={}), at if single else None)
            continued = one.opcode == "fusion" and sent and self.overlap.continues(called)
            found += [] if continued else sent
        self.unread += [
            f"what {one.opcode} '{one.name}' in '{within.name}' sends by '{called.name}'"
            for called in self.module.named(one)
            if called.name not in one.calls and self._sends(called)
        ]
        return found

    def _sends(self, within: Computation) -> bool:
        """Whether something may travel in a computation or in what its instructions name; it counts
        as entered.
        """
        self.entered.add(within.name)
        inside = [
            self._sends(called) for one in within.instructions for called in self.module.named(one)
        ]
        return any(inside) or any(_transfers(one) or _opaque(one) for one in within.instructions)

    def _collective(
        self, inner: Computation, one: Instruction, place: _Place, at: _Caller
    ) -> list[Collective]:
        """One collective per dtype.

        Args:
            inner: the computation that holds `one`.
            one: the collective.
            place: where it runs.
            at: the collective itself, or the fusion or wrapper around it.

        """
        outer, position = at
        op = OPS[one.opcode.removesuffix("-start")]
        groups = groups_of(one, self.axes)
        if groups.size == 1:
            return []
        sliced = op == "all-reduce" and only_sliced(self.module, inner, one.name)
        if sliced and inner is not outer:
            op, sliced = "reduce-scatter", False
        if op == "all-reduce":  # XLA lays small arrays end to end before it reduces them
            parts = [part for name in one.operands for part in pieces(self.module, inner, name)]
        else:
            parts = list(one.operands)
        shapes = [_whole(op, one, inner[name].shapes[0], groups.size) for name in parts]
        given = (
            one
            if len(parts) == len(one.operands)
            else replace(one, inside=", ".join(f"%{name}" for name in parts))
        )
        paths = paths_of(self.module, inner, given)
        where = _Scheduled(
            outer.name, outer.instructions[position].name, self.overlap.between(outer, position)
        )
        return [
            _record(op, groups, part, where, place, one.name, sliced)
            for part in _by_dtype(shapes, paths)
        ]

    def _between_slices(
        self, within: Computation, one: Instruction, place: _Place, position: int
    ) -> list[Collective]:
        """An exchange of a TPU's slices through their hosts: a send and a receive that say what
        they do together.
        """
        said = dict(re.findall(r'_xla_(megascale_\w+)="([^"]*)"', one.attributes))
        op = MEGASCALE.get(said["megascale_transfer_type"])
        everyone = (
            said.get("megascale_target", "").partition("}")[0].count(",") + 1 == self.across.size
        )
        receive = next(
            (each for each in within.instructions if each.opcode == "recv" and meet(one, each)),
            None,
        )
        if op is None or receive is None or not everyone:
            self.unread.append(f"{one.opcode} '{one.name}' in '{within.name}'")
            return []
        whole = receive.shapes[0] if op == "all-gather" else one.shapes[0]
        path = paths_of(self.module, within, replace(one, inside=f"%{one.operands[0]}"))
        where = _Scheduled(within.name, one.name, self.overlap.between(within, position))
        return [
            _record(op, self.across, part, where, place, one.name)
            for part in _by_dtype([whole], path)
        ]


def _transfers(one: Instruction) -> bool:
    """Whether an instruction is itself an exchange between devices; a Pallas kernel says so."""
    if one.opcode == "custom-call":
        return '"has_communication":true' in one.attributes
    if one.opcode in UNREAD:
        return "is_host_transfer=true" not in one.attributes or _MEGASCALE in one.attributes
    return one.opcode.removesuffix("-start") in OPS


def _opaque(one: Instruction) -> bool:
    """Whether it is a library's or the runtime's, and may exchange anything."""
    return one.opcode == "custom-call" and not KERNELS.search(one.attribute("custom_call_target"))


_Part = list[tuple[Shape, str]]


def _by_dtype(shapes: list[Shape], paths: list[str]) -> list[_Part]:
    parts: dict[str, _Part] = {}
    for shape, path in zip(shapes, paths, strict=True):
        parts.setdefault(shape.dtype, []).append((shape, path))
    return list(parts.values())


def _record(
    op: Op,
    groups: Groups,
    part: _Part,
    where: _Scheduled,
    place: _Place,
    name: str,
    sliced: bool = False,
) -> Collective:
    asynchronous, kernels, ends = where.span
    sent = place.times * _sent(op, groups.size, sum(shape.bytes for shape, _ in part))
    return Collective(
        op=op,
        dtype=part[0][0].dtype,
        axis=groups.axis,
        count=place.times,
        bytes=sent,
        hidden=sent if asynchronous and kernels else 0,
        asynchronous=asynchronous,
        sliced=sliced,
        kernels=kernels,
        shapes=tuple(shape.dims for shape, _ in part),
        paths=tuple(path for _, path in part),
        loop=place.loop,
        name=name,
        within=where.within,
        begins=where.begins,
        ends=ends,
    )


def _whole(op: Op, one: Instruction, shape: Shape, size: int) -> Shape:
    """The gathered array of an operand; of the other collectives the operand is whole."""
    if op != "all-gather":
        return shape
    dim = int(one.attribute("dimensions").strip("{}"))
    return Shape(
        shape.dtype,
        tuple(length * size if i == dim else length for i, length in enumerate(shape.dims)),
    )


def _sent(op: Op, size: int, whole: int) -> int:
    """Bytes that a device sends once, in a ring of `size` devices."""
    if op == "permute":
        return whole
    return (2 if op == "all-reduce" else 1) * whole * (size - 1) // size
