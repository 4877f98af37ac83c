"""What one operation does to values that are per example, or sums over examples: the tables behind `examples.py`.

A rule sees an operation twice, as the whole batch and as one part of it makes it. Wherever the two differ in size is
the dim of the examples, so a rule never tracks that dim: it only checks that the operation keeps to it. The meaning of
lax's parameters is that of https://docs.jax.dev/en/latest/jax.lax.html and https://openxla.org/stablehlo/spec.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import prod
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np


class Kind(Enum):
    """How a value of the whole batch relates to the values of its parts."""

    WHOLE = auto()  # the same for every part
    ZERO = auto()  # WHOLE, and also a SUM
    ROWS = auto()  # the parts' values, one after the other along one dim
    SUM = auto()  # the sum of the parts' values
    COUNT = auto()  # a SUM that the shapes alone decide
    POSITION = auto()  # the number of an example in its batch
    INDEX = auto()  # ROWS of index vectors, of which one column is a POSITION
    NEVER = auto()  # ROWS that are all False
    MIXED = auto()  # none of these, or not known to be


@dataclass(frozen=True)
class Value:
    """A kind and its particulars.

    Attributes:
        kind: how the value relates to those of the parts.
        reason: where MIXED, what mixed it.
        extent: where POSITION or INDEX, the number of positions in the whole batch.
        column: where INDEX, the entry of the index vectors that is a POSITION.

    """

    kind: Kind
    reason: str = ""
    extent: int = 0
    column: int = 0


@dataclass(frozen=True)
class Pair:
    """Shape and dtype of one value in the whole batch and in one of the `parts`."""

    whole: Any
    part: Any

    @property
    def changed(self) -> tuple[int, ...]:
        """The dims that depend on the number of examples."""
        return tuple(dim for dim, size in enumerate(self.whole.shape) if size != self.part.shape[dim])

    @property
    def row(self) -> int:
        """The dim of the examples, of a value that has one."""
        (dim,) = self.changed
        return dim


@dataclass(frozen=True)
class Op:
    """One operation, traced twice; `ins` and `outs` are its operands' and results' shapes."""

    name: str
    params: Mapping[str, Any]
    part_params: Mapping[str, Any]
    values: list[Value]
    ins: list[Pair]
    outs: list[Pair]
    parts: int

    @property
    def kinds(self) -> list[Kind]:
        """Of the operands."""
        return [value.kind for value in self.values]

    def rows(self) -> dict[int, int]:
        """{operand: its dim of examples}."""
        return {i: self.ins[i].row for i, kind in enumerate(self.kinds) if kind in PER_EXAMPLE}


CONSTANT = {Kind.WHOLE, Kind.ZERO}
SUMS = {Kind.SUM, Kind.COUNT, Kind.ZERO}
PER_EXAMPLE = {Kind.ROWS, Kind.NEVER, Kind.POSITION, Kind.INDEX}
AT_POSITION = {Kind.POSITION, Kind.INDEX}
WIDE_INTEGERS = (np.dtype("int32"), np.dtype("int64"), np.dtype("uint32"))  # in which a position does not overflow


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


KEEPS = _words("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type
    broadcast_in_dim cbrt ceil clamp clz complex conj convert_element_type cos cosh digamma div empty eq erf erf_inv
    erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow iota is_finite le lgamma log log1p
    logistic lt max min mul mulhi ne neg nextafter not one_minus_square or polygamma population_count pow random_bits
    random_fold_in random_gamma random_gamma_grad random_split random_unwrap random_wrap real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square squeeze sub tan tanh transpose xor zeta""")
"""Keep the dim of the examples whatever their parameters."""

UNPROVEN = {"sharding_constraint": "a sharding constraint is said of the whole batch"}
PASSED = _words("copy copy_p device_put name optimization_barrier stop_gradient")
"""Results are the operands, one by one."""

CREATES = _words("broadcast_in_dim empty iota random_bits random_split rng_bit_generator rng_uniform")
"""Make one value per example out of constants; random numbers are as good drawn part by part."""

ALONG = {
    **dict.fromkeys(_words("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum"), "axes"),
    **dict.fromkeys(_words("cumlogsumexp cummax cummin cumprod cumsum split unstack"), "axis"),
    **dict.fromkeys(_words("concatenate sort"), "dimension"),
    "rev": "dimensions",
}
"""The parameter that names the dims along which examples would meet or move."""

SHAPES = _words("shape new_sizes slice_sizes limit_indices")
"""Parameters that may depend on the number of examples: the shapes of the results tell what they say."""

BILINEAR = _words("mul dot_general conv_general_dilated")
FIRST = _words("""
    broadcast_in_dim convert_element_type cumsum div dynamic_slice gather imag neg real reduce_precision reduce_sum
    reduce_window_sum reshape rev slice split squeeze transpose unstack""")
LINEAR = {
    **dict.fromkeys(FIRST, slice(0, 1)),
    **dict.fromkeys(_words("add add_any concatenate pad sub"), slice(None)),
    **dict.fromkeys(_words("scatter scatter-add scatter-sub"), slice(0, None, 2)),
    "dynamic_update_slice": slice(0, 2),
    "select_n": slice(1, None),
}
"""The operands in which, together, an operation is linear; the others must be constant."""


def apply(op: Op) -> list[Value]:
    """What kind of values the results are."""
    if op.name in PASSED:
        return op.values
    value = _positions(op) or _apply(op)
    return [_shaped(op, value, out) for out in op.outs]


def _mixed(reason: str) -> Value:
    return Value(Kind.MIXED, reason)


def _shaped(op: Op, value: Value, out: Pair) -> Value:
    """`value`, if the result's shape bears it out."""
    kind, ratio = value.kind, {out.whole.shape[dim] == op.parts * out.part.shape[dim] for dim in out.changed}
    if kind in CONSTANT and op.name in CREATES and len(out.changed) == 1 and ratio == {True}:
        if op.name != "iota" or op.params["dimension"] != out.row:
            return Value(Kind.ROWS)
        if out.whole.dtype in WIDE_INTEGERS:
            return Value(Kind.POSITION, extent=out.whole.shape[out.row])
        return _mixed("uses the position in the batch")
    if kind in PER_EXAMPLE and (len(out.changed) != 1 or ratio != {True}):
        return _mixed("compares every example with every other" if len(out.changed) > 1 else "singles examples out")
    if kind in CONSTANT | SUMS and out.changed:
        back = "gives a sum over the batch back to each example"
        return _mixed(back if kind in (Kind.SUM, Kind.COUNT) else "reads constants by the position in the batch")
    return value


def _apply(op: Op) -> Value:
    mixed = next((value for value in op.values if value.kind is Kind.MIXED), None)
    if mixed:
        return mixed
    kinds = set(op.kinds)
    known = op.name in KEEPS or op.name in CHECKS
    if not known and kinds - CONSTANT:
        return _mixed(UNPROVEN.get(op.name, f"{op.name} is unknown to the proof"))
    if any(not same(value, op.part_params.get(key)) for key, value in op.params.items() if key not in SHAPES):
        return _mixed("depends on the number of examples")
    if not kinds - CONSTANT - SUMS:
        return _linear(op) or (Value(Kind.WHOLE) if kinds <= CONSTANT else _mixed(_not_linear(op)))
    if kinds & {Kind.SUM, Kind.COUNT}:
        return _mixed(_not_linear(op))
    if kinds & AT_POSITION and op.name.split("-")[0] not in ("gather", "scatter"):
        return _mixed("uses the position in the batch; to pick one entry per example use jnp.take_along_axis")
    found: Kind | str = Kind.ROWS if op.name in KEEPS else CHECKS[op.name](op)
    return _mixed(found) if isinstance(found, str) else Value(found)


def same(a: Any, b: Any) -> bool:
    """Whether two parameters say the same; functions only if they are one."""
    if a is b:
        return True
    if isinstance(a, jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr):
        return str(a) == str(b)
    if isinstance(a, np.ndarray | jax.Array) or isinstance(b, np.ndarray | jax.Array):
        return np.array_equal(a, b, equal_nan=jnp.issubdtype(jnp.result_type(a), jnp.inexact))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _positions(op: Op) -> Value | None:
    """The one use of positions that is understood: `x[jnp.arange(rows), column]`, with its care for negative ones."""
    kinds, first = op.kinds, op.values[0] if op.values else None
    if op.name == "select_n" and kinds[0] is Kind.NEVER:
        return op.values[1]
    if op.name == "lt" and kinds == [Kind.POSITION, Kind.ZERO]:
        return Value(Kind.NEVER)
    if Kind.POSITION not in kinds or set(kinds) - {Kind.POSITION, Kind.ROWS, Kind.NEVER}:
        return None
    if op.name in ("broadcast_in_dim", "squeeze", "transpose") or (op.name == "reshape" and not _reshape_fault(op)):
        return first
    if op.name == "convert_element_type" and op.params["new_dtype"] in WIDE_INTEGERS:
        return first
    last = len(op.outs[0].whole.shape) - 1
    widths = {pair.whole.shape[-1] for pair in op.ins}
    if op.name == "concatenate" and op.params["dimension"] == last and widths == {1}:
        column = kinds.index(Kind.POSITION)
        return replace(op.values[column], kind=Kind.INDEX, column=column) if kinds.count(Kind.POSITION) == 1 else None
    return None


def _linear(op: Op) -> Value | None:
    """SUM or ZERO where the operation is linear in the sums it is given."""
    if op.name in BILINEAR:
        sums = [kind for kind in op.kinds if kind in (Kind.SUM, Kind.COUNT)]
        return Value(Kind.ZERO) if Kind.ZERO in op.kinds else Value(Kind.SUM) if len(sums) == 1 else None
    if op.name not in LINEAR:
        return None
    summed = op.kinds[LINEAR[op.name]]
    others = list(op.kinds)
    del others[LINEAR[op.name]]
    if not set(summed) <= SUMS or not set(others) <= CONSTANT:
        return None
    if set(summed) <= {Kind.ZERO}:
        return Value(Kind.ZERO) if summed else None
    out = op.outs[0].whole.dtype
    rounds = op.name in ("convert_element_type", "div") and not jnp.issubdtype(out, jnp.inexact)
    return None if rounds or _replaces(op) else Value(Kind.SUM)


def _replaces(op: Op) -> bool:
    """Whether a gather or scatter may put a constant where a sum was, or compute with a function of its own."""
    if op.name == "gather":
        fill, floats = op.params["fill_value"], jnp.issubdtype(op.outs[0].whole.dtype, jnp.inexact)
        harmless = fill == 0 or (floats and (fill is None or fill != fill))
        return op.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP and not harmless
    return op.name == "scatter" and op.params["update_jaxpr"] is not None and bool(op.params["update_jaxpr"].eqns)


def _not_linear(op: Op) -> str:
    if Kind.COUNT in op.kinds:
        return "divides by the number of examples" if op.name == "div" else "computes with the number of examples"
    if set(op.kinds) & PER_EXAMPLE:
        return "brings single examples together with a sum over the batch"
    if op.name in ("add", "add_any", "sub"):
        return "adds what does not depend on the batch to a sum over it: every device would add it"
    return f"takes {op.name} of a sum over the batch, which is not the sum of its parts"


# One check per family, on an operation some of whose operands are ROWS and the others constant. Each returns the kind
# of the result, or in words what happens to the examples.


def _along(op: Op) -> Kind | str:
    dims = np.atleast_1d(op.params[ALONG[op.name]]) % len(op.ins[0].whole.shape)
    if not set(op.rows().values()) & set(dims.tolist()):
        return Kind.ROWS
    return Kind.SUM if op.name == "reduce_sum" else f"takes {op.name} over the examples"


def _top_k(op: Op) -> Kind | str:
    axis = op.params.get("axis", -1) % len(op.ins[0].whole.shape)
    return Kind.ROWS if axis != op.ins[0].row else "takes top_k over the examples"


def _batch_first(op: Op) -> Kind | str:
    """The attention of cuDNN, whose operands and results all have the batch first."""
    return Kind.ROWS if set(op.rows().values()) == {0} else f"hands the examples to {op.name} other than along dim 0"


def _reshape_fault(op: Op) -> bool:
    """Parts stay contiguous if as many elements lie outside the dim of the examples before as after."""
    before, after = op.ins[0], op.outs[0]
    return len(after.changed) != 1 or prod(before.whole.shape[: before.row]) != prod(after.whole.shape[: after.row])


def _reshape(op: Op) -> Kind | str:
    return "reshapes the examples apart, or into the minor part of a dim" if _reshape_fault(op) else Kind.ROWS


def _slice(op: Op) -> Kind | str:
    row, strides = op.ins[0].row, op.params.get("strides")
    full = op.outs[0].whole.shape[row] == op.ins[0].whole.shape[row]
    return Kind.ROWS if full and (strides is None or strides[row] == 1) else "takes some of the examples"


def _dynamic_update_slice(op: Op) -> Kind | str:
    rows = op.rows()
    if set(rows) != {0, 1} or rows[0] != rows[1]:
        return "writes to some of the examples"
    whole = op.ins[0].whole.shape[rows[0]] == op.ins[1].whole.shape[rows[0]]
    return Kind.ROWS if whole else "writes to some of the examples"


def _pad(op: Op) -> Kind | str:
    return Kind.ROWS if tuple(op.params["padding_config"][op.ins[0].row]) == (0, 0, 0) else "pads the examples"


def _window(op: Op) -> Kind | str:
    row, *others = set(op.rows().values())
    keys = {"window_dimensions", "window_strides", "base_dilation", "window_dilation"} & set(op.params)
    alone = all(op.params[key][row] == 1 for key in keys) and tuple(op.params["padding"][row]) == (0, 0)
    return Kind.ROWS if alone and not others else "slides a window over the examples"


def _dot_general(op: Op) -> Kind | str:
    (contract, batch), rows = op.params["dimension_numbers"], op.rows()
    if len(rows) == 1:
        return Kind.ROWS  # a free dim: the other operand has none to pair it with
    pair = rows[0], rows[1]
    if pair in zip(*batch, strict=True):
        return Kind.ROWS
    return Kind.SUM if pair in zip(*contract, strict=True) else "compares every example with every other"


def _conv(op: Op) -> Kind | str:
    numbers, rows = op.params["dimension_numbers"], op.rows()
    if rows == {0: numbers.lhs_spec[0]} and op.params["batch_group_count"] == 1:
        return Kind.ROWS
    contracted = {0: numbers.lhs_spec[1], 1: numbers.rhs_spec[1]}
    return Kind.SUM if rows == contracted and op.params["feature_group_count"] == 1 else "convolves over the examples"


def _own(op: Op, mapped: tuple[int, ...]) -> bool:
    """Whether each example's index is its own position, among as many as there are."""
    rows, index = op.rows(), op.values[1]
    if 0 not in rows or op.kinds[0] in AT_POSITION:
        return False
    return mapped[index.column] == rows[0] and op.ins[0].whole.shape[rows[0]] == index.extent


def _gather(op: Op) -> Kind | str:
    numbers, rows, sizes = op.params["dimension_numbers"], op.rows(), op.params["slice_sizes"]
    if set(op.kinds) & AT_POSITION:
        own = _own(op, numbers.start_index_map) and rows[0] in numbers.collapsed_slice_dims
        return Kind.ROWS if own else "reads constants by the position in the batch"
    if set(rows) == {0, 1}:
        paired = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        return Kind.ROWS if (rows[0], rows[1]) in paired else "looks up some examples by others"
    if set(rows) == {0} and sizes[rows[0]] != op.ins[0].whole.shape[rows[0]]:
        return "takes some of the examples"
    return Kind.ROWS


def _scatter(op: Op) -> Kind | str:
    """Operands: what is written to, where, and what is written."""
    numbers, rows = op.params["dimension_numbers"], op.rows()
    written, windows = rows.get(2), numbers.update_window_dims
    if written is None or {op.kinds[0], op.kinds[2]} & AT_POSITION:
        return "writes to some of the examples"
    if set(rows) == {0, 2}:
        outside = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        inside = [dim for dim in range(len(op.ins[0].whole.shape)) if dim not in outside]
        sizes = op.ins[0].whole.shape[rows[0]], op.ins[2].whole.shape[written]
        full = (rows[0], written) in zip(inside, windows, strict=True) and sizes[0] == sizes[1]
        return Kind.ROWS if full else "writes to some of the examples"
    if set(rows) == {0, 1, 2} and op.kinds[1] in AT_POSITION:
        own = _own(op, numbers.scatter_dims_to_operand_dims) and rows[0] in numbers.inserted_window_dims
        return Kind.ROWS if own else "writes to some of the examples"
    if set(rows) == {0, 1, 2}:
        paired = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
        return Kind.ROWS if (rows[0], rows[1]) in paired else "writes some examples by others"
    if set(rows) == {1, 2} and op.kinds[0] is Kind.ZERO and op.name == "scatter-add" and op.kinds[1] is Kind.ROWS:
        return Kind.SUM
    return "writes the examples over one another"


WINDOWS = _words("reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter_add")
SCATTERS = _words("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max")
CHECKS: dict[str, Callable[[Op], Kind | str]] = {
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(WINDOWS, _window),
    **dict.fromkeys(SCATTERS, _scatter),
    **dict.fromkeys(_words("dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper"), _batch_first),
    "conv_general_dilated": _conv,
    "dot_general": _dot_general,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "top_k": _top_k,
}
