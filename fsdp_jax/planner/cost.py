"""What one instruction of a compiled program costs: the products it computes and the bytes of memory it moves.

XLA's own cost analysis counts a loop once and is absent for CUDA, so both are counted here, from the program's text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

from fsdp_jax.inspect.hlo import Computation, Instruction, Module, Shape
from fsdp_jax.planner.kernels import attention_products
from fsdp_jax.planner.products import Product

FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "domain", "while", "conditional", "call", "async-start", "async-update", "async-done",
}  # fmt: skip
"""Opcodes that move nothing themselves."""

_ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_FAST = re.compile(r"S\((\d+)\)")
_SLICES = {"dynamic-slice", "slice", "gather"}
_SAME = {"bitcast", "reshape", "copy", "convert", "transpose"}


@dataclass(frozen=True)
class Cost:
    """Of one instruction, run once, on one device.

    Attributes:
        products: matrix products, those of its attention kernel included.
        bytes: of device memory read and written; what a fusion slices out of an array counts, not the array.
        unknown: a kernel whose products the text does not tell, "" where there is none.

    """

    products: tuple[Product, ...] = ()
    bytes: int = 0
    unknown: str = ""


class Costs:
    """Costs of a program's instructions."""

    def __init__(self, module: Module, on_chip: frozenset[int] = frozenset()):
        """`on_chip`: numbers of the memory spaces that are no device memory, as a TPU's VMEM is."""
        self.module, self.on_chip = module, on_chip
        self.products_in = cache(self._products_in)

    def of(self, within: Computation, one: Instruction) -> Cost:
        """The cost of one instruction of a scheduled computation; of what it only starts or waits for, none."""
        if one.opcode in FREE or one.opcode.endswith(("-start", "-done", "-update")):
            return Cost()
        if one.opcode == "custom-call":
            products = attention_products(one, [within[name].shapes for name in one.operands])
            kernel = products is None and _is_kernel(one)
            return Cost(products or (), self._plain_bytes(within, one), one.op_name or one.name if kernel else "")
        if one.opcode == "fusion":
            return Cost(self.products_in(one.calls[0]), self._fusion_bytes(within, one))
        if one.opcode in ("dot", "convolution"):
            return Cost((_product(within, one),), self._plain_bytes(within, one))
        return Cost((), self._plain_bytes(within, one))

    def started(self, one: Instruction) -> int:
        """Bytes of device memory that a copy or slice moves, which others run beside."""
        return sum(self._held(one.type)[:2]) if one.opcode in ("copy-start", "slice-start") else 0

    def _products_in(self, name: str) -> tuple[Product, ...]:
        within = self.module[name]
        found: list[Product] = []
        for one in within.instructions:
            if one.opcode in ("dot", "convolution"):
                found.append(_product(within, one))
            for called in one.calls:
                found += self.products_in(called)
        return tuple(found)

    def _held(self, kind: str) -> list[int]:
        """Bytes of each array of a type, 0 for those that are on the chip."""
        sizes = []
        for dtype, dims, layout in _ARRAY.findall(kind):
            space = _FAST.search(layout)
            sizes.append(0 if space and int(space.group(1)) in self.on_chip else _bytes(dtype, dims))
        return sizes

    def _plain_bytes(self, within: Computation, one: Instruction) -> int:
        out = sum(self._held(one.type))
        if one.opcode in _SLICES:
            return 2 * out
        if one.opcode == "dynamic-update-slice":
            return 2 * sum(self._held(within[one.operands[1]].type))
        if one.opcode in ("broadcast", "iota", "rng-bit-generator"):
            return out
        return out + sum(sum(self._held(within[name].type)) for name in one.operands)

    def _fusion_bytes(self, within: Computation, one: Instruction) -> int:
        called = self.module[one.calls[0]]
        parameters = {int(p.inside): p for p in called.instructions if p.opcode == "parameter"}
        read = 0
        for i, name in enumerate(one.operands):
            whole = sum(self._held(within[name].type))
            read += min(whole, _used(called, parameters[i])) if i in parameters else whole
        outputs = [called[name] for name in called.root.operands] if called.root.opcode == "tuple" else [called.root]
        written = sum(
            min(size, _written(called, output)) for size, output in zip(self._held(one.type), outputs, strict=False)
        )
        return read + written


def _is_kernel(one: Instruction) -> bool:
    """Whether a custom call is a user's kernel, as Pallas makes them, and not a marker of the compiler's."""
    return bool(re.search(r"tpu_custom_call|triton|mosaic|cudnn|cublas", one.attribute("custom_call_target")))


def _used(called: Computation, parameter: Instruction) -> int:
    """Bytes of a fusion's parameter that it reads: where it is only sliced, the slices."""
    total = 0
    for user in called.users.get(parameter.name, []):
        if user.opcode in _SLICES and user.operands[0] == parameter.name:
            total += _size(user)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            continue  # updated in place
        elif user.opcode in ("bitcast", "reshape", "copy") and user is not called.root:
            total += _used(called, user)
        else:
            return _size(parameter)
    return total


def _written(called: Computation, output: Instruction) -> int:
    """Bytes that a fusion writes of one result: of an array that it updates in place, the update."""
    while output.opcode in _SAME and output.operands and output.opcode != "parameter":
        output = called[output.operands[0]]
    if output.opcode == "dynamic-update-slice":
        return _size(called[output.operands[1]])
    return _size(output)


def _size(one: Instruction) -> int:
    return sum(shape.bytes for shape in one.shapes)


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return (prod(int(size) for size in re.sub("[<=]", "", dims).split(",") if size) * bits + 7) // 8


def _product(within: Computation, one: Instruction) -> Product:
    left, right = (within[name].shapes[0] for name in one.operands[:2])
    return _dot(one, left, right) if one.opcode == "dot" else _convolution(one, left, right)


def _dot(one: Instruction, left: Shape, right: Shape) -> Product:
    batch = prod(left.dims[i] for i in _dims(one, "lhs_batch_dims"))
    k = prod(left.dims[i] for i in _dims(one, "lhs_contracting_dims"))
    m, n = prod(left.dims) // (batch * k), prod(right.dims) // (batch * k)
    return Product(batch, m, n, k, _wider(left, right))


def _dims(one: Instruction, name: str) -> list[int]:
    return [int(i) for i in one.attribute(name).strip("{}").split(",") if i]


def _convolution(one: Instruction, left: Shape, right: Shape) -> Product:
    """A TPU's products are convolutions; batch dims and several heads became windows over padded or dilated inputs."""
    labels = one.attribute("dim_labels")
    inputs, rest = labels.split("_", 1)
    kernel, _ = rest.split("->")
    out = one.shapes[0]
    k = right.dims[kernel.index("i")]
    n = right.dims[kernel.index("o")]
    m = left.dims[inputs.index("b")]
    window = _window(one)
    taps = 1
    for number, label in enumerate(letter for letter in kernel if letter.isdigit()):
        size = left.dims[inputs.index(label)]
        positions = out.dims[rest.split("->")[1].index(label)]
        taps *= _taps(size, positions, {key: values[number] for key, values in window.items()})
    return Product(taps, m, n, k, _wider(left, right))


def _window(one: Instruction) -> dict[str, list[str]]:
    return {
        key: value.split("x")
        for key, value in (
            part.split("=") for part in one.attribute("window").strip("{}").split() if not part.startswith("rhs_rev")
        )
    }


def _taps(size: int, positions: int, window: Mapping[str, str]) -> int:
    """How often one spatial dim's window meets a value of its input, over all positions of the output."""
    length, stride = int(window.get("size", 1)), int(window.get("stride", 1))
    before = int(window.get("pad", "0_0").split("_")[0])
    base, step = int(window.get("lhs_dilate", 1)), int(window.get("rhs_dilate", 1))
    last = (size - 1) * base
    count = 0
    for position in range(positions):
        for tap in range(length):
            at = position * stride + tap * step - before
            count += 0 <= at <= last and at % base == 0
    return count


def _wider(left: Shape, right: Shape) -> str:
    return max(left.dtype, right.dtype, key=lambda name: int(re.findall(r"\d+", name)[0]) if name != "bool" else 8)
