"""Parses the text of a compiled program (`compiled.as_text()`) into computations of instructions.

Only the grammar is here: names, shapes, operands, attributes, which computation calls which, how
often a loop runs. `collectives.py` interprets the collectives. XLA promises no stable format: text
of an unknown form is a ValueError.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from fsdp_jax.errors import ArgumentError

DTYPES = {
    "pred": "bool",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
    **{f"s{bits}": f"int{bits}" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (1, 2, 4, 8, 16, 32, 64)},
}
LONGEST_LOOP = 1 << 16  # evaluated trips of a counter, where XLA does not state the trip count

# A computation: `ENTRY %main.5 (p0: f32[8]) -> f32[8] {`, or its name alone.
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) (?:\(.*\) -> .* )?\{$")
# `  ROOT %add.3 = f32[8]{0} add(%a, %b), metadata={...}`: root, name, type, opcode, inside, rest.
_INSTRUCTION = re.compile(
    r"^\s+(ROOT )?%?(\S+) = (.*?) ([a-z][a-z0-9-]*)\(((?:[^()]|\([^()]*\))*)\)(.*)$"
)
# `bf16[8,<=16]{1,0:S(5)}`: dtype, dims (`<=`: at most), layout with the memory space.
_SHAPE = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_OPERAND = re.compile(r"%([^\s,()]+)")
# `body=%b` or `branch_computations={%a, %b}`; `control-predecessors` are instructions.
_NAMED = re.compile(r'(?<!predecessors)=\{?((?:%[^\s,(){}"]+(?:, )?)+)')
# Opcodes that leave the value of an integer scalar as it is.
_TRANSPARENT = {"copy", "bitcast", "convert", "reshape"}
_OPERATIONS: dict[str, Callable[[int, int], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
"""Operations on two scalars; comparisons by their direction."""


def malformed_error(what: str, got: str) -> ValueError:
    """Makes the error for a text that is not a compiled program as XLA prints it."""
    fix = "pass compiled.as_text(), whole; where it is, this release of XLA prints a form that the"
    fix += " reader does not know"
    return ArgumentError(f"unreadable program: {what}", got=got.strip()[:200], fix=fix)


@dataclass(frozen=True)
class Shape:
    """One array: its dtype as numpy names it, its dims on one device, and XLA's memory space."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def bits(self) -> int:
        """Bits of an element."""
        if self.dtype == "bool":
            return 8
        return int(re.findall(r"\d+", self.dtype)[0])

    @property
    def bytes(self) -> int:
        """Bytes of the array without padding; dtypes below one byte are packed."""
        return (prod(self.dims) * self.bits + 7) // 8


@dataclass(frozen=True)
class Instruction:
    """One line: `%name = type opcode(inside), attributes`.

    `inside`: the text of operands, of a constant's value, or of a parameter's number; `root`: it is
    the result of its computation.
    """

    name: str
    opcode: str
    type: str
    inside: str
    attributes: str
    root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions that it reads."""
        return tuple(_OPERAND.findall(self.inside))

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Arrays of its result, tuples flattened."""
        return shapes_of(self.type)

    def attribute(self, key: str) -> str:
        """Finds the value of `key=value`, "" where there is none; lists keep their braces."""
        return _first_group(rf"\b{key}=(\{{[^{{}}]*\}}|[^\s,]+)", self.attributes)

    @property
    def operation(self) -> str:
        """Its opcode, without the `-start` of an asynchronous form."""
        return self.opcode.removesuffix("-start")

    @property
    def target(self) -> str:
        """Target of a custom call, in quotes; "" for any other instruction."""
        return self.attribute("custom_call_target")

    @cached_property
    def op_name(self) -> str:
        """Path of the traced operation, "" where the compiler kept none."""
        return _first_group(r'metadata=\{.*?op_name="((?:[^"\\]|\\.)*)"', self.attributes)

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that it calls, except a reduction's `to_apply` and a loop's."""
        keys = "calls called_computations branch_computations true_computation false_computation"
        if self.opcode in ("call", "call-start"):
            keys += " to_apply"
        lists = [self.attribute(key) for key in keys.split()]
        return tuple(name.strip(" %{}") for each in lists for name in each.split(",") if name)


@dataclass(frozen=True)
class Computation:
    """A computation: its instructions in the order in which they are scheduled."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        return {int(one.inside): one for one in self.instructions if one.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction's result."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return users

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result it returns."""
        return next((one for one in self.instructions if one.root), self.instructions[-1])

    def parameters_for(self, caller: Instruction, name: str) -> list[Instruction]:
        """Finds the parameters to which a calling instruction passes the array `name`."""
        return [self.parameters[i] for i, operand in enumerate(caller.operands) if operand == name]

    def done_of(self, start: Instruction) -> Instruction | None:
        """Finds the instruction that waits for an asynchronous one; None where none does."""
        for user in self.users.get(start.name, []):
            if user.opcode.endswith("-done"):
                return user
            if user.opcode.endswith("-update"):
                return self.done_of(user)
        return None

    def __getitem__(self, name: str) -> Instruction:
        if name not in self.by_name:
            raise malformed_error(f"'{name}' is read but not defined", self.name)
        return self.by_name[name]


class Loop(NamedTuple):
    """A `while`: its parts, trip count (None if unknown), and constants.

    `constants` are known scalars of its tuple that the body passes on unchanged, by position.
    """

    condition: Computation
    body: Computation
    trips: int | None
    constants: dict[int, int]


@dataclass(frozen=True)
class Module:
    """A program: computations by name, the entry, and the devices it is partitioned over."""

    computations: dict[str, Computation]
    entry: str
    partitions: int

    def __getitem__(self, name: str) -> Computation:
        if name not in self.computations:
            raise malformed_error(f"the computation '{name}' is called but not defined", self.entry)
        return self.computations[name]

    def computations_named_by(self, instruction: Instruction) -> list[Computation]:
        """Finds all computations that an instruction's attributes name, for whatever purpose."""
        lists = _NAMED.findall(instruction.attributes)
        names = dict.fromkeys(name for each in lists for name in _OPERAND.findall(each))
        return [self.computations[name] for name in names if name in self.computations]

    def loop_parts(self, loop: Instruction) -> tuple[Computation, Computation]:
        """Looks up a loop's condition and body."""
        condition, body = loop.attribute("condition"), loop.attribute("body")
        return self[condition.lstrip("%")], self[body.lstrip("%")]

    def read_loop(
        self, within: Computation, instruction: Instruction, known: Mapping[int, int]
    ) -> Loop:
        """Reads a `while` of `within`.

        `known`: known scalars of the tuple that `within` receives, by position.
        """
        condition, body = self.loop_parts(instruction)
        trips = None
        stated = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.attributes)
        if stated:
            trips = int(stated[1])
        start = within[instruction.operands[0]]
        if body.root.opcode != "tuple" or start.opcode != "tuple":
            return Loop(condition, body, trips, {})
        state = self._scalar_operands(within, start, known)
        # A loop inside this one may need them to count its own trips.
        constants = {}
        for i, value in state.items():
            passed = body[body.root.operands[i]]
            if passed.opcode == "get-tuple-element" and passed.attribute("index") == str(i):
                constants[i] = value
        if trips is None:
            trips = self._count_trips(condition, body, state)
        return Loop(condition, body, trips, constants)

    def _count_trips(
        self, condition: Computation, body: Computation, state: Mapping[int, int]
    ) -> int | None:
        """Counts a loop's trips by evaluating its counter; None if it cannot be computed.

        `state`: known scalars of the tuple at its first trip, by position.
        """
        for trip in range(LONGEST_LOOP):
            again = self.scalar_value(condition, condition.root.name, state)
            if again is None:
                return None
            if not again:
                return trip
            # One trip of the body, of which the scalars that stay known are kept.
            after = {i: self.scalar_value(body, body.root.operands[i], state) for i in state}
            state = {i: value for i, value in after.items() if value is not None}
        return None

    def _scalar_operands(
        self, within: Computation, instruction: Instruction, inputs: Mapping[int, int]
    ) -> dict[int, int]:
        """Computes the operands that are scalars and can be computed: position -> value."""
        values = {
            i: self.scalar_value(within, name, inputs)
            for i, name in enumerate(instruction.operands)
        }
        return {i: value for i, value in values.items() if value is not None}

    def scalar_value(self, within: Computation, name: str, inputs: Mapping[int, int]) -> int | None:
        """Computes an integer or boolean scalar; None if it cannot be computed.

        `inputs`: known scalars, by parameter number or by position in the only parameter's tuple.
        """
        one = within[name]
        if len(one.shapes) != 1 or one.shapes[0].dims:  # operands of arrays need not be visited
            return None
        if not one.shapes[0].dtype.startswith(("int", "uint", "bool")):
            return None
        # Values that are written in the text or known.
        if one.opcode == "constant":
            return _parse_scalar(one.inside)
        if one.opcode == "parameter":
            return inputs.get(int(one.inside))
        if one.opcode == "get-tuple-element":
            source = within[one.operands[0]]
            index = int(one.attribute("index"))
            if source.opcode == "tuple":
                return self.scalar_value(within, source.operands[index], inputs)
            if source.opcode == "parameter":
                return inputs.get(index)
            return None
        # Values that are moved or computed elsewhere.
        if one.opcode in _TRANSPARENT:
            return self.scalar_value(within, one.operands[0], inputs)
        if one.opcode in ("fusion", "call"):
            called = self[one.calls[0]]
            return self.scalar_value(
                called, called.root.name, self._scalar_operands(within, one, inputs)
            )
        # Arithmetic on two of them.
        operation = _OPERATIONS.get(one.attribute("direction") or one.opcode)
        if operation is None:
            return None
        left, right = (self.scalar_value(within, operand, inputs) for operand in one.operands)
        if left is None or right is None:
            return None
        return int(operation(left, right))


def parse_program(text: str) -> Module:
    """Parses a compiled program's text; ValueError if it is another text or is cut short."""
    # Only scheduled, partitioned programs have the collectives that a device runs.
    lines = text.splitlines() or [""]
    head = lines[0]
    if not head.startswith("HloModule"):
        raise malformed_error("it does not begin with HloModule", head)
    if "is_scheduled=true" not in head:
        raise malformed_error("it is not scheduled, so not compiled", head)
    if "replica_count=" in head:
        raise malformed_error("it is replicated (pmap), not partitioned", head)
    # Each computation is a header, one instruction per line, and a closing brace.
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    types: dict[str, str] = {}  # of the instructions of the current computation, by name
    for line in _join_split_instructions(lines[1:]):
        if current is None:
            if header := _HEADER.match(line):
                is_entry, name = header.groups()
                current, types = Computation(name), {}
                computations[name] = current
                if is_entry:
                    entry = name
        elif line.startswith("}"):
            current = None
        elif match := _INSTRUCTION.match(line):
            root, name, kind, opcode, inside, attributes = match.groups()
            one = Instruction(name, opcode, kind, inside, attributes, root is not None)
            _append_elements(types, one, current)
            types[name] = kind
            current.instructions.append(one)
        else:
            raise malformed_error(f"a line of '{current.name}' is not an instruction", line)
    if current is not None:
        raise malformed_error(f"it ends inside '{current.name}'", lines[-1])
    if not entry:
        raise malformed_error("it has no ENTRY", head)
    # XLA leaves the number out for one device.
    partitions = int(_first_group(r"num_partitions=(\d+)", head) or 1)
    return Module(computations, entry, partitions)


def _append_elements(types: dict[str, str], reader: Instruction, within: Computation) -> None:
    """Adds a `get-tuple-element` for each operand `%tuple#1`, the short form of newer releases.

    `types`: of the instructions before `reader`, by name; those of the elements are added.
    """
    for name in reader.operands if "#" in reader.inside else ():
        source, _, index = name.rpartition("#")
        if name in types or source not in types or not index.isdecimal():
            continue
        elements = _elements_of(types[source])
        if int(index) >= len(elements):
            raise malformed_error(f"'{source}' has no element {index}", reader.inside)
        types[name] = elements[int(index)]
        element = Instruction(
            name, "get-tuple-element", types[name], f"%{source}", f", index={index}", False
        )
        within.instructions.append(element)


def _elements_of(kind: str) -> list[str]:
    """Splits the type of a tuple, `(f32[8]{0}, (s32[], f32[2]))`, into those of its elements."""
    if not kind.startswith("("):
        return []
    elements, depth = [""], 0
    for character in kind[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return [each.strip() for each in elements]


def _first_group(pattern: str | re.Pattern[str], text: str) -> str:
    """Searches a text for a pattern, and takes its first group; "" if it is not found."""
    match = re.search(pattern, text)
    if match is None:
        return ""
    return match.group(1)


def _join_split_instructions(lines: Sequence[str]) -> Iterator[str]:
    """Yields the lines, with an instruction whose metadata spans several joined into one.

    Its first line ends in `={`, its last begins with `}`.
    """
    partial = ""
    for line in lines:
        if partial:
            partial = f"{partial} {line.strip()}"
            if line.startswith("}"):
                yield partial
                partial = ""
        elif line.startswith(" ") and line.endswith("={"):
            partial = line
        else:
            yield line
    if partial:
        yield partial


def shapes_of(text: str) -> tuple[Shape, ...]:
    """Parses the arrays of a type as XLA writes it, `f32[8,16]{1,0}`; tuples are flattened."""
    shapes = []
    for dtype, dims, layout in _SHAPE.findall(text):
        sizes = tuple(int(size) for size in re.findall(r"\d+", dims))
        space = int(_first_group(_SPACE, layout) or 0)
        shapes.append(Shape(_numpy_dtype(dtype), sizes, space))
    return tuple(shapes)


def _numpy_dtype(name: str) -> str:
    """Converts XLA's name of a dtype to numpy's; ValueError for an unknown one."""
    if name in DTYPES:
        return DTYPES[name]
    # The float8 dtypes and narrower ones: f8e4m3fn is float8_e4m3fn.
    if re.fullmatch(r"f\d+e\d+m\d+\w*", name):
        return f"float{name[1:].replace('e', '_e', 1)}"
    raise malformed_error(f"unknown dtype '{name}'", name)


def _parse_scalar(text: str) -> int | None:
    """Parses the value of an integer or boolean constant; None for any other."""
    if text in ("true", "false"):
        return int(text == "true")
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return None
