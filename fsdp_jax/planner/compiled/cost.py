"""What one instruction of a compiled program costs: the products it computes and the bytes of
memory it moves.

XLA's own cost analysis counts a loop once and is absent for CUDA, so both are counted here, from
the program's text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from fsdp_jax.hlo.collectives import OPS, UNREAD
from fsdp_jax.hlo.parser import Computation, Instruction, Module, Shape
from fsdp_jax.planner.compiled.attention_kernels import attention_products
from fsdp_jax.planner.machines.matmul import Product

FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "optimization-barrier",
    "domain",
    "while",
    "conditional",
    "call",
    *OPS,
    *UNREAD,
    "recv",
}
"""Opcodes that move nothing themselves, or between devices."""
_MARKERS = re.compile(r"AllocateBuffer|ConcatBitcast|AssumeGatherIndicesInBound")
"""Custom calls of XLA's TPU compiler that do nothing."""

_ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_FAST = re.compile(r"S\((\d+)\)")
_SLICES = {"dynamic-slice", "slice", "gather"}
_SAME = {"bitcast", "reshape", "copy", "convert", "transpose"}
_IN_PLACE = {"bitcast", "reshape"}
_SCRATCH = re.compile(r", [su]8\[\d+\](\{[^}]*\})?\)$")


@dataclass(frozen=True)
class Cost:
    """Of one instruction, run once, on one device.

    Attributes:
        products: matrix products, those of its attention kernel included.
        bytes: of device memory read and written; what a fusion slices out of an array counts, not
            the array.
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
        """The cost of one instruction of a scheduled computation; of what it only starts or waits
        for, none.
        """
        if one.opcode in FREE or one.opcode.endswith(("-start", "-done", "-update")):
            return Cost()
        if one.opcode == "custom-call":
            if _MARKERS.search(one.attribute("custom_call_target")):
                return Cost()
            products = _products(within, one)
            kernel = products is None and _is_kernel(one)
            return Cost(
                products or (),
                self._plain_bytes(within, one),
                one.op_name or one.name if kernel else "",
            )
        if one.opcode == "fusion":
            return Cost(self.products_in(one.calls[0]), self._fusion_bytes(within, one))
        return Cost(_products(within, one) or (), self._plain_bytes(within, one))

    def started(self, one: Instruction) -> int:
        """Bytes of device memory that a copy or slice moves, which others run beside."""
        if one.opcode not in ("copy-start", "slice-start"):
            return 0
        sides, sizes = (
            self._held(one.type)[:2],
            [_bytes(dtype, dims) for dtype, dims, _ in _ARRAY.findall(one.type)],
        )
        return sum(min(side, *sizes[:2]) for side in sides)  # of what is sliced, the slice

    def _products_in(self, name: str) -> tuple[Product, ...]:
        within = self.module[name]
        found: list[Product] = []
        for one in within.instructions:
            found += _products(within, one) or ()
            for called in one.calls:
                found += self.products_in(called)
        return tuple(found)

    def _held(self, kind: str) -> list[int]:
        """Bytes of each array of a type, 0 for those that are on the chip."""
        sizes = []
        for dtype, dims, layout in _ARRAY.findall(kind):
            space = _FAST.search(layout)
            sizes.append(
                0 if space and int(space.group(1)) in self.on_chip else _bytes(dtype, dims)
            )
        return sizes

    def _plain_bytes(self, within: Computation, one: Instruction) -> int:
        out = sum(
            self._held(_SCRATCH.sub(")", one.type) if one.opcode == "custom-call" else one.type)
        )
        if one.opcode in _SLICES:
            return out + min(_size(one), sum(self._held(within[one.operands[0]].type)))
        if update := _update(within, one):
            return min(out, _size(update)) + sum(self._held(update.type))
        if one.opcode in ("broadcast", "iota", "rng-bit-generator"):
            return out
        return out + sum(sum(self._held(within[name].type)) for name in dict.fromkeys(one.operands))

    def _fusion_bytes(self, within: Computation, one: Instruction) -> int:
        called = self.module[one.calls[0]]
        parameters = _parameters(called)
        read: dict[str, int] = {}
        for i, name in enumerate(one.operands):
            whole = sum(self._held(within[name].type))
            used = self._used(called, parameters[i]) if i in parameters else whole
            read[name] = min(whole, read.get(name, 0) + used)  # an operand may be given twice
        outputs = (
            [called[name] for name in called.root.operands]
            if called.root.opcode == "tuple"
            else [called.root]
        )
        written = sum(
            min(size, self._written(called, output))
            for size, output in zip(self._held(one.type), outputs, strict=False)
        )
        return sum(read.values()) + written

    def _used(
        self, called: Computation, one: Instruction, *, same: bool = True, updated: bool = False
    ) -> int:
        """Bytes that a fusion reads of a parameter: where it is only sliced, the slices.

        Args:
            called: the fusion.
            one: the parameter, or what was made of it.
            same: it still lies where the parameter does.
            updated: in part; what is handed out has not been read.

        """
        total, whole = 0, _size(one)
        for user in called.users.get(one.name, []):
            first = one.name not in user.operands[1:]
            out = user is called.root
            if user.opcode in _SLICES and first:
                total += _size(user)
            elif first and same and _update(called, user):
                total += self._used(called, user, updated=True)
            elif out and updated and user.opcode in ("tuple", *_IN_PLACE):
                continue
            elif user.opcode in _SAME and not out:
                still = same and user.opcode in _IN_PLACE
                total += (
                    self._used(called, user, same=still, updated=updated)
                    * whole
                    // max(_size(user), 1)
                )
            elif user.opcode == "fusion":
                inner = self.module[user.calls[0]]
                given = (i for i, name in enumerate(user.operands) if name == one.name)
                total += sum(self._used(inner, _parameters(inner)[i]) for i in given)
            else:
                return whole
        return min(total, whole)

    def _written(self, called: Computation, output: Instruction) -> int:
        """Bytes that a fusion writes of one result: of a parameter that it updates in place, the
        updates.
        """
        total, base = 0, output
        while base.opcode in _IN_PLACE or _update(called, base):
            update = _update(called, base)
            total += _size(update) if update else 0
            base = called[base.operands[0]]
        if base.opcode == "fusion" and not total:
            inner = self.module[base.calls[0]]
            return self._written(inner, inner.root)
        return min(total, _size(output)) if total and base.opcode == "parameter" else _size(output)


def _update(within: Computation, one: Instruction) -> Instruction | None:
    """What is written into the first operand, where that is all it does."""
    if one.opcode == "dynamic-update-slice":
        return within[one.operands[1]]
    return within[one.operands[2]] if one.opcode == "scatter" and len(one.operands) == 3 else None


def _parameters(called: Computation) -> dict[int, Instruction]:
    return {int(one.inside): one for one in called.instructions if one.opcode == "parameter"}


def _is_kernel(one: Instruction) -> bool:
    """Whether a custom call is a user's kernel, as Pallas makes them, and not a marker of the
    compiler's.
    """
    return bool(
        re.search(
            r"tpu_custom_call|triton|mosaic|cudnn|cublas", one.attribute("custom_call_target")
        )
    )


def _size(one: Instruction) -> int:
    return sum(shape.bytes for shape in one.shapes)


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return (prod(int(size) for size in re.sub("[<=]", "", dims).split(",") if size) * bits + 7) // 8


def _products(within: Computation, one: Instruction) -> tuple[Product, ...] | None:
    """Of one instruction, what stands in its fusion left out; None where it has none, or none that
    is known.
    """
    if one.opcode not in ("dot", "convolution", "custom-call"):
        return None
    shapes = [within[name].shapes for name in one.operands]
    if one.opcode == "dot":
        return (
            _dot(
                shapes[0][0],
                shapes[1][0],
                _dims(one, "lhs_batch_dims"),
                _dims(one, "lhs_contracting_dims"),
            ),
        )
    if one.opcode == "convolution":
        return (_convolution(one, shapes[0][0], shapes[1][0], one.shapes[0]),)
    target = one.attribute("custom_call_target")
    if "__cublas" in target:
        batch, contracting = (
            _said(one, f"lhs_{kind}_dimensions") for kind in ("batch", "contracting")
        )
        return (_dot(shapes[0][0], shapes[1][0], batch, contracting),)
    if "__cudnn$conv" in target:  # its window and labels are those of the forward
        first, second, result = shapes[0][0], shapes[1][0], one.shapes[0]
        if "BackwardInput" in target:
            return (_convolution(one, result, second, first),)
        return (
            _convolution(
                one, first, *((result, second) if "BackwardFilter" in target else (second, result))
            ),
        )
    return attention_products(one, shapes)


def _dot(left: Shape, right: Shape, batched: Sequence[int], contracting: Sequence[int]) -> Product:
    batch, k = prod(left.dims[i] for i in batched), prod(left.dims[i] for i in contracting)
    m, n = prod(left.dims) // (batch * k), prod(right.dims) // (batch * k)
    return Product(batch, m, n, k, _wider(left, right))


def _dims(one: Instruction, name: str) -> list[int]:
    return [int(i) for i in one.attribute(name).strip("{}").split(",") if i]


def _said(one: Instruction, name: str) -> list[int]:
    """A list in the words of a library call, `"name":["0","1"]`."""
    found = re.search(rf'"{name}":\s*\[([^\]]*)\]', one.attributes)
    return [int(i) for i in re.findall(r"\d+", found.group(1))] if found else []


def _convolution(one: Instruction, left: Shape, right: Shape, out: Shape) -> Product:
    """A TPU's products are convolutions; batch dims and several heads became windows over padded or
    dilated inputs.
    """
    inputs, kernel, outputs = re.split("_|->", one.attribute("dim_labels"))
    k = right.dims[kernel.index("i")]
    n = right.dims[kernel.index("o")]
    m = left.dims[inputs.index("b")]
    window = _window(one)
    batch = 1
    for label in (letter for letter in kernel if letter.isdigit()):
        size, positions = left.dims[inputs.index(label)], out.dims[outputs.index(label)]
        along = {key: values[int(label)] for key, values in window.items()}
        taps = _taps(size, positions, along)
        if taps <= positions and int(along["size"]) > 1:
            batch *= taps  # each position meets one value: a batch dim
        else:  # a product of patches, their padding included, as it is computed
            m, k = m * positions, k * -(-taps // positions)
    features, batches = (
        int(one.attribute(f"{kind}_group_count") or 1) for kind in ("feature", "batch")
    )
    return Product(
        batch * features * batches, m // batches, n // (features * batches), k, _wider(left, right)
    )


def _window(one: Instruction) -> dict[str, list[str]]:
    return {
        key: value.split("x")
        for key, value in (
            part.split("=")
            for part in one.attribute("window").strip("{}").split()
            if not part.startswith("rhs_rev")
        )
    }


def _taps(size: int, positions: int, window: Mapping[str, str]) -> int:
    """How often one spatial dim's window meets a value of its input, over all positions of the
    output.
    """
    length, stride = int(window.get("size", 1)), int(window.get("stride", 1))
    before = int(window.get("pad", "0_0").split("_")[0])
    base, step = int(window.get("lhs_dilate", 1)), int(window.get("rhs_dilate", 1))
    at = np.arange(positions)[:, None] * stride + np.arange(length) * step - before
    return int(np.count_nonzero((at >= 0) & (at <= (size - 1) * base) & (at % base == 0)))


def _wider(left: Shape, right: Shape) -> str:
    return max(
        left.dtype,
        right.dtype,
        key=lambda name: int(re.findall(r"\d+", name)[0]) if name != "bool" else 8,
    )
