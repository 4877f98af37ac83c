"""The text of a compiled program (`compiled.as_text()`) as computations of instructions.

Only the grammar lives here: names, shapes, operands, attributes, what calls what, how often a loop
runs. What a collective means is for `collectives.py`. XLA promises no stable format: what is not
understood is a ValueError.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from fsdp_jax.errors import message

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
LONGEST_LOOP = 1 << 16
"""A loop is run here, where XLA does not say how often it runs, for at most so many steps."""

_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(
    r"^\s+(ROOT )?%?(\S+) = (.*?) ([a-z][a-z0-9-]*)\(((?:[^()]|\([^()]*\))*)\)(.*)$"
)
_SHAPE = re.compile(r"\b(pred|token|opaque|[a-z]+\d\w*)\[([\d,<=]*)\]")
_OPERAND = re.compile(r"%([^\s,()]+)")
_NAMED = re.compile(r'(?<!predecessors)=\{?((?:%[^\s,(){}"]+(?:, )?)+)')
_TRANSPARENT = {"copy", "bitcast", "convert", "reshape"}


def malformed(what: str, got: str) -> ValueError:
    """The error for a text that is not a compiled program as XLA prints it."""
    fix = "pass compiled.as_text(), whole; where it is, this release of XLA prints what the reader does not know"
    return ValueError(message(f"unreadable program: {what}", got=got.strip()[:200], fix=fix))


@dataclass(frozen=True)
class Shape:
    """One array: its dtype by its numpy name, its dims as the device holds them."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the array without padding; dtypes below one byte are packed."""
        bits = 8 if self.dtype == "bool" else int(re.findall(r"\d+", self.dtype)[0])
        return (prod(self.dims) * bits + 7) // 8


@dataclass(frozen=True)
class Instruction:
    """One line: `%name = type opcode(operands), attributes`."""

    name: str
    opcode: str
    type: str
    inside: str
    attributes: str
    root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the instructions that it reads."""
        return tuple(_OPERAND.findall(self.inside))

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of its result, tuples flattened."""
        found = [
            (dtype, dims)
            for dtype, dims in _SHAPE.findall(self.type)
            if dtype not in ("token", "opaque")
        ]
        sizes = ((dtype, re.sub("[<=]", "", dims)) for dtype, dims in found)
        return tuple(
            Shape(_dtype(d), tuple(int(size) for size in s.split(",") if size)) for d, s in sizes
        )

    def attribute(self, key: str) -> str:
        """The value of `key=value`, "" where there is none; lists keep their braces."""
        found = re.search(rf"\b{key}=(\{{[^{{}}]*\}}|[^\s,]+)", self.attributes)
        return found.group(1) if found else ""

    @cached_property
    def op_name(self) -> str:
        """The path of the traced operation, "" where the compiler kept none."""
        found = re.search(r'metadata=\{.*?op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def calls(self) -> tuple[str, ...]:
        """The computations that it runs as they stand: not the reductions of a `to_apply`, not a
        loop's.
        """
        keys = [
            "calls",
            "called_computations",
            "branch_computations",
            "true_computation",
            "false_computation",
        ]
        keys += ["to_apply"] if self.opcode in ("call", "call-start") else []
        return tuple(
            name.strip(" %{}")
            for key in keys
            if (v := self.attribute(key))
            for name in v.split(",")
            if name
        )


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they are scheduled."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by their names, which are unique."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who reads an instruction's result."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return users

    @cached_property
    def root(self) -> Instruction:
        """What it returns."""
        return next((one for one in self.instructions if one.root), self.instructions[-1])

    def __getitem__(self, name: str) -> Instruction:
        if name not in self.by_name:
            raise malformed(f"'{name}' is read but not defined", self.name)
        return self.by_name[name]


@dataclass(frozen=True)
class Module:
    """A program: its computations by name, and how many devices it is partitioned over."""

    computations: dict[str, Computation]
    entry: str
    partitions: int

    def __getitem__(self, name: str) -> Computation:
        if name not in self.computations:
            raise malformed(f"the computation '{name}' is called but not defined", self.entry)
        return self.computations[name]

    def named(self, one: Instruction) -> list[Computation]:
        """All computations that an instruction's attributes name, for whatever it is that it does
        with them.
        """
        lists = _NAMED.findall(one.attributes)
        names = dict.fromkeys(name for each in lists for name in _OPERAND.findall(each))
        return [self.computations[name] for name in names if name in self.computations]

    def trips(self, within: Computation, loop: Instruction, known: Mapping[int, int]) -> int | None:
        """How often a `while` runs its body: as XLA says, or by running its counter; None where
        neither tells.

        Args:
            within: the computation that holds the loop.
            loop: the `while`.
            known: what is known of the tuple that `within` was given.

        """
        if said := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(said.group(1))
        condition, body = self.parts(loop)
        state = self.carried(within, loop, known)
        if body.root.opcode != "tuple":
            return None
        for trip in range(LONGEST_LOOP):
            again = self.scalar(condition, condition.root.name, state)
            if again is None:
                return None
            if not again:
                return trip
            after = {i: self.scalar(body, body.root.operands[i], state) for i in state}
            state = {i: value for i, value in after.items() if value is not None}
        return None

    def parts(self, loop: Instruction) -> tuple[Computation, Computation]:
        """A loop's condition and body."""
        return self[loop.attribute("condition").lstrip("%")], self[
            loop.attribute("body").lstrip("%")
        ]

    def carried(
        self, within: Computation, loop: Instruction, known: Mapping[int, int]
    ) -> dict[int, int]:
        """The scalars of a loop's tuple that are known when it starts, by their place in it."""
        start = within[loop.operands[0]]
        if start.opcode != "tuple":
            return {}
        values = {i: self.scalar(within, name, known) for i, name in enumerate(start.operands)}
        return {i: value for i, value in values.items() if value is not None}

    def constants(
        self, within: Computation, loop: Instruction, known: Mapping[int, int]
    ) -> dict[int, int]:
        """Those of `carried` that the body hands on as they are."""
        root, body = self.parts(loop)[1].root, self.parts(loop)[1]
        if root.opcode != "tuple":
            return {}
        handed = {i: body[name] for i, name in enumerate(root.operands)}
        same = {
            i
            for i, one in handed.items()
            if one.opcode == "get-tuple-element" and one.attribute("index") == str(i)
        }
        return {i: value for i, value in self.carried(within, loop, known).items() if i in same}

    def scalar(self, within: Computation, name: str, inputs: Mapping[int, int]) -> int | None:
        """The value of an integer or a truth that can be computed from `inputs`, the parameters or
        the tuple of one.
        """
        one = within[name]
        if not _countable(
            one
        ):  # a number found beside arrays: what those are computed from need not be looked at
            return None
        if one.opcode == "constant":
            return _literal(one.inside)
        if one.opcode == "parameter":
            return inputs.get(int(one.inside))
        if one.opcode == "get-tuple-element":
            source = within[one.operands[0]]
            index = int(one.attribute("index"))
            if source.opcode == "tuple":
                return self.scalar(within, source.operands[index], inputs)
            return inputs.get(index) if source.opcode == "parameter" else None
        if one.opcode in _TRANSPARENT:
            return self.scalar(within, one.operands[0], inputs)
        if one.opcode not in ("fusion", "call", "add", "subtract", "multiply", "compare", "and"):
            return None
        values = [self.scalar(within, operand, inputs) for operand in one.operands]
        if one.opcode in ("fusion", "call"):
            called = self[one.calls[0]]
            return self.scalar(
                called, called.root.name, {i: v for i, v in enumerate(values) if v is not None}
            )
        left, right = values
        return None if left is None or right is None else _apply(one, left, right)


def parse(text: str) -> Module:
    """Reads a compiled, scheduled program.

    Raises:
        ValueError: a text that is not one, or is cut short.

    """
    lines = text.splitlines()
    head = lines[0] if lines else ""
    if not head.startswith("HloModule"):
        raise malformed("it does not begin with HloModule", head)
    if "is_scheduled=true" not in head:
        raise malformed("it is not scheduled, so not compiled", head)
    if "replica_count=" in head:
        raise malformed("it is replicated (pmap), not partitioned", head)
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in _whole(lines[1:]):
        if current is None:
            if header := _HEADER.match(line):
                current = computations[header[2]] = Computation(header[2])
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif found := _INSTRUCTION.match(line):
            root, name, kind, opcode, inside, attributes = found.groups()
            current.instructions.append(
                Instruction(name, opcode, kind, inside, attributes, root is not None)
            )
        else:
            raise malformed(f"a line of '{current.name}' is no instruction", line)
    if current is not None:
        raise malformed(f"it ends inside '{current.name}'", lines[-1])
    if not entry:
        raise malformed("it has no ENTRY", head)
    said = re.search(r"num_partitions=(\d+)", head)
    return Module(computations, entry, int(said.group(1)) if said else 1)


def _whole(lines: Sequence[str]) -> Iterator[str]:
    """The lines, those put together that a kernel's metadata breaks: `={` ends one, `}` begins the
    last of them.
    """
    held = ""
    for line in lines:
        if held:
            held = f"{held} {line.strip()}"
            if line.startswith("}"):
                yield held
                held = ""
        elif line.startswith(" ") and line.endswith("={"):
            held = line
        else:
            yield line
    if held:
        yield held


def _dtype(name: str) -> str:
    if name in DTYPES:
        return DTYPES[name]
    if re.fullmatch(r"f\d+e\d+m\d+\w*", name):
        return f"float{name[1:].replace('e', '_e', 1)}"
    raise malformed(f"unknown dtype '{name}'", name)


def _countable(one: Instruction) -> bool:
    """Whether it is a single integer or truth."""
    return (
        len(one.shapes) == 1
        and not one.shapes[0].dims
        and one.shapes[0].dtype.startswith(("int", "uint", "bool"))
    )


def _literal(text: str) -> int | None:
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _apply(one: Instruction, left: int, right: int) -> int | None:
    if one.opcode == "compare":
        order = {"LT": left < right, "LE": left <= right, "GT": left > right, "GE": left >= right}
        return int({**order, "EQ": left == right, "NE": left != right}[one.attribute("direction")])
    return {
        "add": left + right,
        "subtract": left - right,
        "multiply": left * right,
        "and": left & right,
    }[one.opcode]
