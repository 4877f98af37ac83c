"""The cost of one instruction of a compiled program: its matmuls and the memory it moves.

XLA's own cost analysis counts a loop once and is absent for CUDA, so both are counted here, from
the program's text.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np

from fsdp_jax.hlo.collectives import OPS, UNREAD
from fsdp_jax.hlo.parser import Computation, Instruction, Module, Shape
from fsdp_jax.host_memory import HOST_SPACE
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

_UNREAD_MATMULS = {"ragged-dot", "scaled-dot"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_SAME_VALUES = {"bitcast", "reshape", "copy", "convert", "transpose"}
_SAME_MEMORY = {"bitcast", "reshape"}
_InMemory = Callable[[Shape], bool]
"""Tells whether an array is in the memory whose traffic is counted."""


@dataclass(frozen=True)
class InstructionCost:
    """The cost of one instruction, run once, on one device."""

    matmuls: tuple[Matmul, ...] = ()  # including those of an attention kernel
    bytes: int = 0  # read and written in device memory; a fusion that slices reads the slice
    unknown: str = ""  # a kernel whose matmuls the text does not tell; "" if there is none
    from_host: int = 0  # bytes read from host memory
    to_host: int = 0  # bytes written to host memory


class CostModel:
    """Costs of the instructions of one program.

    `on_chip`: memory spaces that are not device memory, such as a TPU's VMEM.
    """

    def __init__(self, module: Module, on_chip: frozenset[int] = frozenset()) -> None:
        self.module = module
        self.on_chip = on_chip
        self._work_in = cache(self._work_in_computation)

    def cost(self, within: Computation, instruction: Instruction) -> InstructionCost:
        """Computes the cost of an instruction of a scheduled computation.

        A transfer or copy that is started counts where it starts, and a collective not at all.
        """
        # instructions that move nothing in device memory, or in the background
        opcode = instruction.opcode
        if instruction.operation in FREE or opcode.endswith(("-done", "-update")):
            return InstructionCost()
        if opcode.endswith("-start"):
            return self._cost_of_started(within, instruction)
        target = ""
        if opcode == "custom-call":
            target = instruction.target
        if _MARKERS.search(target):
            return InstructionCost()
        # its matmuls, or the name of a kernel whose matmuls are unknown
        if opcode == "fusion":
            matmuls, unknown = self._work_in(instruction.calls[0])
        else:
            matmuls, unknown = _own_work(within, instruction)
        # and its traffic
        moved = sum(self._moved_bytes(within, instruction, self._is_on_device))
        from_host, to_host = self._host_bytes(within, instruction)
        return InstructionCost(matmuls, moved, unknown, from_host, to_host)

    def _cost_of_started(self, within: Computation, start: Instruction) -> InstructionCost:
        """Computes the cost of what `start` starts: a transfer with the host, a copy or a slice."""
        done = within.done_of(start) or start
        # `async-start` calls the computation that it runs, as a fusion does
        opcode = start.operation.replace("async", "fusion")
        synchronous = replace(start, opcode=opcode, type=done.type)
        transfer = self._host_bytes(within, synchronous)
        # of a transfer with the host, the bytes in device memory are not what takes the time
        moved = 0
        if opcode in ("copy", "slice") and not any(transfer):
            sides = start.shapes[:2]
            size = min(side.bytes for side in sides)  # of a sliced array, the slice
            moved = sum(size for side in sides if self._is_on_device(side))
        # nor are matmuls that run beside others: their kernel is named
        unknown = ""
        if start.operation == "async" and any(self._work_in(start.calls[0])):
            unknown = start.op_name or start.name
        return InstructionCost((), moved, unknown, *transfer)

    def _host_bytes(self, within: Computation, instruction: Instruction) -> tuple[int, int]:
        """Counts the bytes that an instruction reads and writes in host memory: (read, written)."""
        touched = [instruction, *(within[name] for name in instruction.operands)]
        on_host = [any(_is_on_host(array) for array in each.shapes) for each in touched]
        if len(touched) == 1 or not any(on_host):
            return 0, 0
        if instruction.opcode in _SAME_VALUES and all(on_host):
            return 0, 0  # within host memory: nothing crosses the link
        return self._moved_bytes(within, instruction, _is_on_host)

    def _work_in_computation(self, name: str) -> tuple[tuple[Matmul, ...], str]:
        """Finds the work of a computation and of all that it calls, as `_own_work` does."""
        within = self.module[name]
        works = [_own_work(within, instruction) for instruction in within.instructions]
        works += [self._work_in(called) for each in within.instructions for called in each.calls]
        matmuls = tuple(matmul for own, _ in works for matmul in own)
        return matmuls, next((unknown for _, unknown in works if unknown), "")

    def _is_on_device(self, array: Shape) -> bool:
        return array.space != HOST_SPACE and array.space not in self.on_chip

    def _moved_bytes(
        self, within: Computation, instruction: Instruction, counted: _InMemory
    ) -> tuple[int, int]:
        """Counts the bytes that an instruction reads and writes in one memory: (read, written).

        `counted` tells whether an array is in that memory.
        """
        if instruction.opcode == "fusion":
            return self._bytes_moved_by_fusion(within, instruction, counted)
        written = _sum_bytes(_result_arrays(instruction), counted)
        operands = {name: _sum_bytes(within[name].shapes, counted) for name in instruction.operands}
        # a slice reads no more than its result has, and an update in place moves the update alone
        if instruction.opcode in _SLICES:
            return min(_sum_bytes(instruction.shapes), operands[instruction.operands[0]]), written
        if update := _in_place_update(within, instruction):
            return operands[update.name], min(written, _sum_bytes(update.shapes))
        if instruction.opcode in ("broadcast", "iota", "rng-bit-generator"):
            return 0, written
        return sum(operands.values()), written

    def _bytes_moved_by_fusion(
        self, within: Computation, fusion: Instruction, counted: _InMemory
    ) -> tuple[int, int]:
        """Counts the bytes that a fusion reads and writes in one memory, as `_moved_bytes` does."""
        # of each operand the bytes that the fusion's instructions read, or at most all
        called = self.module[fusion.calls[0]]
        read = 0
        for name in dict.fromkeys(fusion.operands):
            used = (self._read_bytes(called, one) for one in called.parameters_for(fusion, name))
            read += min(_sum_bytes(within[name].shapes, counted), sum(used))
        # of each result those that its last instructions write
        outputs = [called.root]
        if called.root.opcode == "tuple":
            outputs = [called[name] for name in called.root.operands]
        written = sum(
            min(shape.bytes, self._written_bytes(called, output))
            for shape, output in zip(fusion.shapes, outputs, strict=False)
            if counted(shape)
        )
        return read, written

    def _read_bytes(
        self,
        called: Computation,
        value: Instruction,
        *,
        same_memory: bool = True,
        updated: bool = False,
    ) -> int:
        """Counts the bytes that a fusion reads of a parameter: of one that it slices, the slices.

        `value`: the parameter, or what was made of it; `same_memory`: it is still in that of the
        parameter; `updated`: a part of it was written, so that to return it reads nothing.
        """
        total = 0
        size = _sum_bytes(value.shapes)
        for user in called.users.get(value.name, []):
            is_first = value.name not in user.operands[1:]
            is_root = user is called.root
            # A slice reads its own size, and an update in place nothing of what it replaces.
            # What keeps the values is followed to its own users, in proportion, since `convert`
            # changes their size. Everything else reads all of the parameter.
            if user.opcode in _SLICES and is_first:
                total += _sum_bytes(user.shapes)
            elif is_first and same_memory and _in_place_update(called, user):
                total += self._read_bytes(called, user, updated=True)
            elif is_root and updated and user.opcode in ("tuple", *_SAME_MEMORY):
                continue
            elif user.opcode in _SAME_VALUES and not is_root:
                same = same_memory and user.opcode in _SAME_MEMORY
                used = self._read_bytes(called, user, same_memory=same, updated=updated)
                total += used * size // max(_sum_bytes(user.shapes), 1)
            elif user.opcode == "fusion":
                inner = self.module[user.calls[0]]
                parameters = inner.parameters_for(user, value.name)
                total += sum(self._read_bytes(inner, parameter) for parameter in parameters)
            else:
                return size
        return min(total, size)

    def _written_bytes(self, called: Computation, output: Instruction) -> int:
        """Counts the bytes that a fusion writes of a result: of an update in place, the update."""
        # back through updates in place, to the array that they are written into
        updates = 0
        base = output
        while base.opcode in _SAME_MEMORY or _in_place_update(called, base):
            if update := _in_place_update(called, base):
                updates += _sum_bytes(update.shapes)
            base = called[base.operands[0]]
        if base.opcode == "fusion" and not updates:
            inner = self.module[base.calls[0]]
            return self._written_bytes(inner, inner.root)
        written = _sum_bytes(output.shapes)
        if updates and base.opcode == "parameter":
            return min(updates, written)
        return written  # the array is new: all of it is written


def _is_on_host(array: Shape) -> bool:
    return array.space == HOST_SPACE


def _sum_bytes(arrays: Iterable[Shape], counted: _InMemory = lambda array: True) -> int:
    return sum(array.bytes for array in arrays if counted(array))


def _result_arrays(instruction: Instruction) -> Sequence[Shape]:
    """Lists the arrays that an instruction returns, without a library's workspace."""
    shapes = instruction.shapes
    if instruction.opcode != "custom-call" or len(shapes) < 2:
        return shapes
    is_workspace = shapes[-1].dtype in ("int8", "uint8") and len(shapes[-1].dims) == 1
    if is_workspace:
        return shapes[:-1]
    return shapes


def _in_place_update(within: Computation, instruction: Instruction) -> Instruction | None:
    """Finds the operand that an instruction only writes into its first; None for any other."""
    if instruction.opcode == "dynamic-update-slice":
        return within[instruction.operands[1]]
    if instruction.opcode == "scatter" and len(instruction.operands) == 3:
        return within[instruction.operands[2]]
    return None


def _own_work(within: Computation, instruction: Instruction) -> tuple[tuple[Matmul, ...], str]:
    """Finds the matmuls of an instruction that is no fusion, or names a kernel that hides them."""
    matmuls = _own_matmuls(within, instruction)
    hides = _KERNELS.search(instruction.target) or instruction.opcode in _UNREAD_MATMULS
    if matmuls is None and hides:
        return (), instruction.op_name or instruction.name
    return matmuls or (), ""


def _own_matmuls(within: Computation, instruction: Instruction) -> tuple[Matmul, ...] | None:
    """Finds the matmuls of an instruction that is no fusion; None if none are known."""
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return None
    shapes = [within[name].shapes for name in instruction.operands]
    target = instruction.target
    if instruction.opcode == "dot" or "__cublas" in target:
        batch, contracting = (_dot_dims(instruction, kind) for kind in ("batch", "contracting"))
        return (dot_matmul(shapes[0][0], shapes[1][0], batch, contracting),)
    if instruction.opcode == "convolution" or "__cudnn$conv" in target:
        # the window and labels are those of the forward pass
        left, right, out = shapes[0][0], shapes[1][0], instruction.shapes[0]
        if "BackwardInput" in target:
            left, out = out, left
        if "BackwardFilter" in target:
            right, out = out, right
        return (_convolution_matmul(instruction, left, right, out),)
    name = f"{target} {instruction.op_name} {instruction.name}"
    return attention_matmuls(name, [each[0] for each in shapes if each], instruction.attributes)


def dot_matmul(
    left: Shape, right: Shape, batch_dims: Sequence[int], contracting: Sequence[int]
) -> Matmul:
    """Converts a dot to a matmul; the batch and contracting dims are its left operand's."""
    batch = prod(left.dims[i] for i in batch_dims)
    k = prod(left.dims[i] for i in contracting)
    m = prod(left.dims) // max(1, batch * k)
    n = prod(right.dims) // max(1, batch * k)
    return Matmul(batch, m, n, k, _wider_dtype(left, right))


def _dot_dims(instruction: Instruction, kind: str) -> list[int]:
    """Parses the dims of the left operand of a dot, or of a library's call, of one kind.

    `kind`: "batch" or "contracting".
    """
    # `lhs_contracting_dims={1}` of a dot, `"lhs_contracting_dimensions":["1"]` of a library's call
    pattern = rf'lhs_{kind}_dim(?:s=\{{|ensions":\s*\[)([^\]}}]*)'
    match = re.search(pattern, instruction.attributes)
    if match is None:
        return []
    return [int(i) for i in re.findall(r"\d+", match[1])]


def _convolution_matmul(instruction: Instruction, left: Shape, right: Shape, out: Shape) -> Matmul:
    """Converts a convolution to the matmul that it computes.

    XLA's TPU compiler writes matmuls as convolutions; batch dims and several heads become windows
    over padded or dilated inputs.
    """
    # of `dim_labels=b01f_01io->b01f`: batch, features in and out, and spatial dims by number
    inputs, kernel, outputs = re.split("_|->", instruction.attribute("dim_labels"))
    k = right.dims[kernel.index("i")]
    n = right.dims[kernel.index("o")]
    m = left.dims[inputs.index("b")]
    # each spatial dim is a batch dim in disguise, or multiplies the rows and the contraction
    parts = instruction.attribute("window").strip("{}").split()
    pairs = (part.split("=") for part in parts if not part.startswith("rhs_rev"))
    window = {key: value.split("x") for key, value in pairs}
    batch = 1
    for label in (letter for letter in kernel if letter.isdigit()):
        size = left.dims[inputs.index(label)]
        positions = out.dims[outputs.index(label)]
        settings = {key: values[int(label)] for key, values in window.items()}
        taps = _count_taps(size, positions, settings)
        if taps <= positions and int(settings["size"]) > 1:
            batch *= taps  # each position meets one value: a batch dim
        else:  # a matmul of patches, their padding included, as it is computed
            m *= positions
            k *= -(-taps // positions)
    # groups are matmuls of their own
    features = int(instruction.attribute("feature_group_count") or 1)
    batches = int(instruction.attribute("batch_group_count") or 1)
    groups = features * batches
    return Matmul(batch * groups, m // batches, n // groups, k, _wider_dtype(left, right))


def _count_taps(size: int, positions: int, window: Mapping[str, str]) -> int:
    """Counts the input values that the window of a spatial dim meets, over all positions.

    `size`: of the input; `positions`: of the output; `window`: its settings in this dim.
    """
    length, stride = int(window.get("size", 1)), int(window.get("stride", 1))
    padding = int(window.get("pad", "0_0").split("_")[0])
    base, step = int(window.get("lhs_dilate", 1)), int(window.get("rhs_dilate", 1))
    # the input index of every position and value of the window; between dilated inputs are zeros
    index = np.arange(positions)[:, None] * stride + np.arange(length) * step - padding
    inside = (index >= 0) & (index <= (size - 1) * base) & (index % base == 0)
    return int(np.count_nonzero(inside))


def _wider_dtype(left: Shape, right: Shape) -> str:
    return max(left, right, key=lambda side: side.bits).dtype
