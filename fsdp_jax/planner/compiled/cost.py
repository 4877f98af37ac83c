"""The cost of one instruction of a compiled program: its matmuls and the memory it moves.

XLA's own cost analysis counts a loop once and is absent for CUDA, so both are counted here, from
the program's text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np

from fsdp_jax.hlo.collectives import OPS, UNREAD
from fsdp_jax.hlo.parser import Computation, Instruction, Module, Shape
from fsdp_jax.planner.compiled.attention_kernels import attention_matmuls
from fsdp_jax.planner.machines.roofline import Matmul

_NO_TRAFFIC = """parameter constant get-tuple-element tuple bitcast after-all partition-id
    replica-id optimization-barrier domain while conditional call recv"""
FREE = {*_NO_TRAFFIC.split(), *OPS, *UNREAD}
"""Opcodes that move no device memory themselves, or move data between devices."""

_MARKERS = re.compile(r"AllocateBuffer|ConcatBitcast|AssumeGatherIndicesInBound")
"""Custom calls of XLA's TPU compiler that do nothing."""

_KERNELS = re.compile(r"tpu_custom_call|triton|mosaic|cudnn|cublas")
"""Custom calls of a user's kernel, as Pallas makes them, or of a library."""

HOST_SPACE = 5
"""XLA's number of host memory, on GPUs and TPUs: `S(5)` in a layout."""

_HOST = f"S({HOST_SPACE})"
_ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_SCRATCH = re.compile(r", [su]8\[\d+\](\{[^}]*\})?\)$")
_SLICES = {"dynamic-slice", "slice", "gather"}
_SAME_VALUES = {"bitcast", "reshape", "copy", "convert", "transpose"}
_SAME_MEMORY = {"bitcast", "reshape"}
_Sizes = Callable[[str], list[int]]


@dataclass(frozen=True)
class InstructionCost:
    """The cost of one instruction, run once, on one device.

    Attributes:
        matmuls: including those of an attention kernel.
        bytes: of device memory read and written; a fusion that slices an array reads the slice.
        unknown: a kernel whose matmuls the text does not tell; "" if there is none.
        from_host: bytes read from host memory.
        to_host: bytes written to host memory.

    """

    matmuls: tuple[Matmul, ...] = ()
    bytes: int = 0
    unknown: str = ""
    from_host: int = 0
    to_host: int = 0


class CostModel:
    """Costs of the instructions of one program.

    Args:
        module: the program.
        on_chip: memory spaces that are not device memory, such as a TPU's VMEM.

    """

    def __init__(self, module: Module, on_chip: frozenset[int] = frozenset()) -> None:
        self.module = module
        self.on_chip = on_chip
        self._matmuls_in = cache(self._matmuls_in_computation)
        instructions = (each for one in module.computations.values() for each in one.instructions)
        self._has_host_memory = any(_HOST in each.type for each in instructions)

    def cost(self, within: Computation, instruction: Instruction) -> InstructionCost:
        """Returns the cost of an instruction of a scheduled computation; none if asynchronous."""
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith(("-start", "-done", "-update")):
            return InstructionCost()
        from_host, to_host = self._host_transfer(within, instruction)
        if opcode == "fusion":
            matmuls = self._matmuls_in(instruction.calls[0])
            moved = sum(self._moved(within, instruction, self._device_bytes))
            return InstructionCost(matmuls, moved, "", from_host, to_host)
        target = instruction.attribute("custom_call_target") if opcode == "custom-call" else ""
        if _MARKERS.search(target):
            return InstructionCost()
        matmuls_or_none = _matmuls(within, instruction)
        unknown = ""
        if matmuls_or_none is None and _KERNELS.search(target):
            unknown = instruction.op_name or instruction.name
        moved = sum(self._moved(within, instruction, self._device_bytes))
        return InstructionCost(matmuls_or_none or (), moved, unknown, from_host, to_host)

    def async_host_transfer(
        self, within: Computation, instruction: Instruction
    ) -> tuple[int, int] | None:
        """Returns the bytes that an asynchronous instruction sends (from, to) the host.

        None where it sends none, or is not asynchronous.
        """
        if not self._has_host_memory or not instruction.opcode.endswith("-start"):
            return None
        transfer = self._host_transfer(within, _synchronous(instruction))
        return transfer if any(transfer) else None

    def _host_transfer(self, within: Computation, instruction: Instruction) -> tuple[int, int]:
        """Returns the bytes that an instruction moves (from, to) host memory."""
        if not self._has_host_memory or not instruction.operands:
            return 0, 0
        touched = [instruction.type, *(within[name].type for name in instruction.operands)]
        if not any(_HOST in each for each in touched):
            return 0, 0
        if instruction.opcode in _SAME_VALUES and all(_HOST in each for each in touched):
            return 0, 0  # within host memory: nothing crosses the link
        return self._moved(within, instruction, _host_bytes)

    def async_bytes(self, instruction: Instruction) -> int:
        """Returns the bytes of device memory that an asynchronous copy or slice moves."""
        if instruction.opcode not in ("copy-start", "slice-start"):
            return 0
        sides = self._device_bytes(instruction.type)[:2]
        sizes = [_array_bytes(dtype, dims) for dtype, dims, _ in _ARRAY.findall(instruction.type)]
        return sum(min(side, *sizes[:2]) for side in sides)  # of a sliced array, the slice

    def _matmuls_in_computation(self, name: str) -> tuple[Matmul, ...]:
        within = self.module[name]
        matmuls: list[Matmul] = []
        for instruction in within.instructions:
            matmuls += _matmuls(within, instruction) or ()
            for called in instruction.calls:
                matmuls += self._matmuls_in(called)
        return tuple(matmuls)

    def _device_bytes(self, type_text: str) -> list[int]:
        """Returns the bytes of each array of a type, 0 for those that are not in device memory."""
        elsewhere = {HOST_SPACE, *self.on_chip}
        return [0 if space in elsewhere else size for size, space in _arrays(type_text)]

    def _moved(
        self, within: Computation, instruction: Instruction, sizes: _Sizes
    ) -> tuple[int, int]:
        """Returns the bytes that an instruction (reads, writes) in one memory.

        `sizes` returns the bytes of each array of a type, 0 for those in another memory.
        """
        if instruction.opcode == "fusion":
            return self._moved_by_fusion(within, instruction, sizes)
        type_text = instruction.type
        if instruction.opcode == "custom-call":
            type_text = _SCRATCH.sub(")", type_text)
        written = sum(sizes(type_text))
        if instruction.opcode in _SLICES:
            source = sum(sizes(within[instruction.operands[0]].type))
            return min(_size(instruction), source), written
        if update := _update(within, instruction):
            return sum(sizes(update.type)), min(written, _size(update))
        if instruction.opcode in ("broadcast", "iota", "rng-bit-generator"):
            return 0, written
        operands = dict.fromkeys(instruction.operands)
        return sum(sum(sizes(within[name].type)) for name in operands), written

    def _moved_by_fusion(
        self, within: Computation, fusion: Instruction, sizes: _Sizes
    ) -> tuple[int, int]:
        """Returns the bytes that a fusion (reads, writes) in one memory."""
        called = self.module[fusion.calls[0]]
        parameters = _parameters(called)
        read: dict[str, int] = {}
        for i, name in enumerate(fusion.operands):
            size = sum(sizes(within[name].type))
            used = self._read_bytes(called, parameters[i]) if i in parameters else size
            read[name] = min(size, read.get(name, 0) + used)  # an operand may be given twice
        outputs = [called.root]
        if called.root.opcode == "tuple":
            outputs = [called[name] for name in called.root.operands]
        written = sum(
            min(size, self._written_bytes(called, output))
            for size, output in zip(sizes(fusion.type), outputs, strict=False)
        )
        return sum(read.values()), written

    def _read_bytes(
        self,
        called: Computation,
        value: Instruction,
        *,
        same_memory: bool = True,
        updated: bool = False,
    ) -> int:
        """Returns the bytes that a fusion reads of a parameter: of one that it slices, the slices.

        Args:
            called: the fusion.
            value: the parameter, or what was made of it.
            same_memory: the value still has the parameter's memory.
            updated: it was updated in part; returning it then reads nothing.

        """
        total = 0
        size = _size(value)
        for user in called.users.get(value.name, []):
            is_first = value.name not in user.operands[1:]
            is_root = user is called.root
            if user.opcode in _SLICES and is_first:
                total += _size(user)
            elif is_first and same_memory and _update(called, user):
                total += self._read_bytes(called, user, updated=True)
            elif is_root and updated and user.opcode in ("tuple", *_SAME_MEMORY):
                continue
            elif user.opcode in _SAME_VALUES and not is_root:
                same = same_memory and user.opcode in _SAME_MEMORY
                used = self._read_bytes(called, user, same_memory=same, updated=updated)
                total += used * size // max(_size(user), 1)
            elif user.opcode == "fusion":
                inner = self.module[user.calls[0]]
                parameters = _parameters(inner)
                for i, name in enumerate(user.operands):
                    if name == value.name:
                        total += self._read_bytes(inner, parameters[i])
            else:
                return size
        return min(total, size)

    def _written_bytes(self, called: Computation, output: Instruction) -> int:
        """Returns the bytes that a fusion writes of a result: of an update in place, the update."""
        updates = 0
        base = output
        while base.opcode in _SAME_MEMORY or _update(called, base):
            update = _update(called, base)
            updates += _size(update) if update else 0
            base = called[base.operands[0]]
        if base.opcode == "fusion" and not updates:
            inner = self.module[base.calls[0]]
            return self._written_bytes(inner, inner.root)
        if updates and base.opcode == "parameter":
            return min(updates, _size(output))
        return _size(output)


def _synchronous(start: Instruction) -> Instruction:
    """Returns the instruction that an asynchronous one starts.

    `copy-start` returns (result, operand, context), others ((operands), result, context).
    """
    elements = _tuple_elements(start.type)
    opcode = start.opcode.removesuffix("-start")
    position = 0 if opcode == "copy" else 1
    result = elements[position] if len(elements) > 1 else start.type
    # `async-start` calls the computation that it runs, as a fusion does
    opcode = opcode.replace("async", "fusion")
    return replace(start, opcode=opcode, type=result)


def _tuple_elements(type_text: str) -> list[str]:
    """Splits the text of a tuple's type at its commas; another type is its only element."""
    if not type_text.startswith("("):
        return [type_text]
    elements = [""]
    depth = 0
    for letter in type_text[1:-1]:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += letter
    return [element.strip() for element in elements]


def _arrays(type_text: str) -> list[tuple[int, int]]:
    """Returns (bytes, memory space) of each array of a type; space 0 is the device's memory."""
    arrays = []
    for dtype, dims, layout in _ARRAY.findall(type_text):
        space = _MEMORY_SPACE.search(layout)
        arrays.append((_array_bytes(dtype, dims), int(space.group(1)) if space else 0))
    return arrays


def device_bytes(type_text: str) -> int:
    """Returns the bytes of the arrays of a type that are in device memory."""
    return sum(size for size, space in _arrays(type_text) if space == 0)


def _host_bytes(type_text: str) -> list[int]:
    """Returns the bytes of each array of a type, 0 for those that are not in host memory."""
    return [size if space == HOST_SPACE else 0 for size, space in _arrays(type_text)]


def _update(within: Computation, instruction: Instruction) -> Instruction | None:
    """Returns what is written into the first operand, if the instruction does nothing else."""
    if instruction.opcode == "dynamic-update-slice":
        return within[instruction.operands[1]]
    if instruction.opcode == "scatter" and len(instruction.operands) == 3:
        return within[instruction.operands[2]]
    return None


def _parameters(called: Computation) -> dict[int, Instruction]:
    return {int(one.inside): one for one in called.instructions if one.opcode == "parameter"}


def _size(instruction: Instruction) -> int:
    return sum(shape.bytes for shape in instruction.shapes)


def _array_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    elements = prod(int(size) for size in re.sub("[<=]", "", dims).split(",") if size)
    return (elements * bits + 7) // 8


def _matmuls(within: Computation, instruction: Instruction) -> tuple[Matmul, ...] | None:
    """Returns the matmuls of one instruction outside of its fusion; None if it has none known."""
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return None
    shapes = [within[name].shapes for name in instruction.operands]
    if instruction.opcode == "dot":
        batch, contracting = (
            [int(i) for i in instruction.attribute(name).strip("{}").split(",") if i]
            for name in ("lhs_batch_dims", "lhs_contracting_dims")
        )
        return (_dot(shapes[0][0], shapes[1][0], batch, contracting),)
    if instruction.opcode == "convolution":
        return (_convolution(instruction, shapes[0][0], shapes[1][0], instruction.shapes[0]),)
    target = instruction.attribute("custom_call_target")
    if "__cublas" in target:
        batch, contracting = (
            _json_list(instruction, f"lhs_{kind}_dimensions") for kind in ("batch", "contracting")
        )
        return (_dot(shapes[0][0], shapes[1][0], batch, contracting),)
    if "__cudnn$conv" in target:  # its window and labels are those of the forward pass
        first, second, result = shapes[0][0], shapes[1][0], instruction.shapes[0]
        if "BackwardInput" in target:
            return (_convolution(instruction, result, second, first),)
        if "BackwardFilter" in target:
            return (_convolution(instruction, first, result, second),)
        return (_convolution(instruction, first, second, result),)
    return attention_matmuls(instruction, shapes)


def _dot(
    left: Shape, right: Shape, batch_dims: Sequence[int], contracting: Sequence[int]
) -> Matmul:
    batch = prod(left.dims[i] for i in batch_dims)
    k = prod(left.dims[i] for i in contracting)
    m = prod(left.dims) // (batch * k)
    n = prod(right.dims) // (batch * k)
    return Matmul(batch, m, n, k, _wider(left, right))


def _json_list(instruction: Instruction, name: str) -> list[int]:
    """Returns a list of a library call's configuration, `"name":["0","1"]`."""
    match = re.search(rf'"{name}":\s*\[([^\]]*)\]', instruction.attributes)
    return [int(i) for i in re.findall(r"\d+", match.group(1))] if match else []


def _convolution(instruction: Instruction, left: Shape, right: Shape, out: Shape) -> Matmul:
    """Returns the matmul that a convolution computes.

    XLA's TPU compiler writes matmuls as convolutions; batch dims and several heads become windows
    over padded or dilated inputs.
    """
    inputs, kernel, outputs = re.split("_|->", instruction.attribute("dim_labels"))
    k = right.dims[kernel.index("i")]
    n = right.dims[kernel.index("o")]
    m = left.dims[inputs.index("b")]
    window = _window(instruction)
    batch = 1
    for label in (letter for letter in kernel if letter.isdigit()):
        size = left.dims[inputs.index(label)]
        positions = out.dims[outputs.index(label)]
        settings = {key: values[int(label)] for key, values in window.items()}
        taps = _taps(size, positions, settings)
        if taps <= positions and int(settings["size"]) > 1:
            batch *= taps  # each position meets one value: a batch dim
        else:  # a matmul of patches, their padding included, as it is computed
            m *= positions
            k *= -(-taps // positions)
    features = int(instruction.attribute("feature_group_count") or 1)
    batches = int(instruction.attribute("batch_group_count") or 1)
    groups = features * batches
    return Matmul(batch * groups, m // batches, n // groups, k, _wider(left, right))


def _window(instruction: Instruction) -> dict[str, list[str]]:
    """Returns the settings of a convolution's window, a value for each spatial dim."""
    parts = instruction.attribute("window").strip("{}").split()
    pairs = (part.split("=") for part in parts if not part.startswith("rhs_rev"))
    return {key: value.split("x") for key, value in pairs}


def _taps(size: int, positions: int, window: Mapping[str, str]) -> int:
    """Counts the input values that a spatial dim's window meets, over all output positions."""
    length, stride = int(window.get("size", 1)), int(window.get("stride", 1))
    padding = int(window.get("pad", "0_0").split("_")[0])
    base, step = int(window.get("lhs_dilate", 1)), int(window.get("rhs_dilate", 1))
    index = np.arange(positions)[:, None] * stride + np.arange(length) * step - padding
    inside = (index >= 0) & (index <= (size - 1) * base) & (index % base == 0)
    return int(np.count_nonzero(inside))


def _wider(left: Shape, right: Shape) -> str:
    return max(left.dtype, right.dtype, key=_bits)


def _bits(dtype: str) -> int:
    return 8 if dtype == "bool" else int(re.findall(r"\d+", dtype)[0])
