"""What the package knows of jax's primitives: a row for each, which `tests/program` traces.

A primitive without a row has no property: it may do anything with its operands.
"""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Primitive:
    """What operations of a primitive do; as far as is known, False."""

    name: str
    # What XLA does for it: nothing of its own (fused into what reads it), runs the program inside
    # as part of the one outside, keeps the same memory, a kernel, a kernel that reduces, one that
    # writes into its first operand, a loop or a branch.
    memory: Literal["fused", "inlined", "alias", "kernel", "reduction", "update", "loop"] = "fused"
    elementwise: bool = False  # each element of the result is of the operands' there, or of scalars
    transcendental: bool = False  # approximated; how may depend on what it is fused with
    rearranges: bool = False  # the result is the first operand, rearranged, cast or named
    linear: bool = False  # in its operands, exactly: rearranges or adds them, and casts nothing
    zero_derivative: bool = False  # jax differentiates it as a constant
    slices: bool = False  # reads no more than it returns
    reduces: bool = False  # over the dims that `reduced_dims` tells
    matmul: bool = False
    fused_kernel: bool = False  # attention, or a kernel of the user's
    mutates: bool = False  # makes, reads or writes a mutable array
    # The result of a collective along its mesh axes, on all devices or on each.
    collective: Literal["", "same", "different"] = ""
    # A gather or a reduction of a parameter begins with it: its scope has the parameter's path.
    scoped: bool = False
    # Nearly free: computed again rather than saved.
    recomputed: bool = False


PRIMITIVES: dict[str, Primitive] = {}


def _rows(names: str, **properties: Any) -> list[Primitive]:
    """Adds a row for each of the primitives, all with these properties; returns the rows."""
    rows = [Primitive(name, **properties) for name in names.split()]
    PRIMITIVES.update((row.name, row) for row in rows)
    return rows


# Programs inside
JIT, CHECKPOINT, CUSTOM_VJP, SHARD_MAP, _ = _rows(
    "jit remat2 custom_vjp_call shard_map custom_jvp_call", memory="inlined"
)
SCAN, WHILE, COND = _rows("scan while cond", memory="loop")
# Matmuls and other kernels
(DOT,) = _rows("dot_general", memory="kernel", matmul=True)
_rows("conv_general_dilated ragged_dot_general scaled_matmul_wrapper", memory="kernel", matmul=True)
(PALLAS_CALL,) = _rows("pallas_call", memory="kernel", fused_kernel=True)
_ATTENTION = "dot_product_attention_fwd_wrapper dot_product_attention_fp8_fwd_wrapper"
_rows(_ATTENTION, memory="kernel", fused_kernel=True)
_KERNELS = """cholesky cumlogsumexp cummax cummin cumprod cumsum eigh fft lu qr
    select_and_scatter_add sort svd top_k triangular_solve"""
_rows(_KERNELS, memory="kernel")
(FFI_CALL,) = _rows("ffi_call", memory="kernel")  # a kernel of a library, or of the user's
_rows("gather", memory="kernel", slices=True)
(SUM,) = _rows("reduce_sum", memory="reduction", reduces=True, linear=True)
_REDUCTIONS = "reduce_max reduce_min reduce_prod reduce_and reduce_or"
_rows(_REDUCTIONS, memory="reduction", reduces=True)
_rows("argmax argmin", memory="reduction")
_rows("dynamic_update_slice scatter scatter-add", memory="update")
# Collectives
(ALL_GATHER,) = _rows("all_gather", memory="kernel", collective="same", scoped=True)
_rows("psum psum_invariant pmax pmin", memory="update", collective="same")
_rows("all_gather_invariant", memory="kernel", collective="same")
_DIFFERENT = "reduce_scatter ppermute all_to_all ragged_all_to_all"
_rows(_DIFFERENT, memory="kernel", collective="different")
(AXIS_INDEX,) = _rows("axis_index", collective="different")
# Rearranging and passing on
RESHAPE, SQUEEZE, _ = _rows(
    "reshape squeeze transpose", memory="alias", rearranges=True, linear=True, recomputed=True
)
(BROADCAST,) = _rows("broadcast_in_dim", rearranges=True, linear=True, recomputed=True)
(CONCATENATE,) = _rows("concatenate", recomputed=True)
SLICE, _ = _rows("slice split", rearranges=True, linear=True, slices=True, recomputed=True)
_rows("dynamic_slice", rearranges=True, slices=True)
(NAME,) = _rows("name", memory="alias", rearranges=True, linear=True)
_rows("layout_constraint", memory="alias", rearranges=True)
_rows("rev", rearranges=True, linear=True)
_rows("reduce_precision", rearranges=True)
_rows("copy", elementwise=True, rearranges=True, linear=True, recomputed=True)
_rows("stop_gradient", elementwise=True, zero_derivative=True, recomputed=True)
(CAST,) = _rows("convert_element_type", elementwise=True, rearranges=True, scoped=True)
(CONSTRAINT,) = _rows("sharding_constraint", rearranges=True, scoped=True, recomputed=True)
(BARRIER,) = _rows("optimization_barrier", memory="alias", scoped=True)
(DEVICE_PUT,) = _rows("device_put")
# Arithmetic
(MULTIPLY,) = _rows("mul", elementwise=True)
_rows("add add_any neg sub", elementwise=True, linear=True)
_rows("ceil floor round sign", elementwise=True, zero_derivative=True)
_ELEMENTWISE = """abs and bitcast_convert_type clamp div eq ge gt integer_pow is_finite le lt max
    min ne nextafter not or rem rsqrt select_n shift_right_logical sqrt square xor"""
_rows(_ELEMENTWISE, elementwise=True)
_TRANSCENDENTAL = "atan2 cbrt cos erf exp exp2 expm1 log log1p logistic pow sin tan tanh"
_rows(_TRANSCENDENTAL, elementwise=True, transcendental=True)
(IOTA,) = _rows("iota")
# Mutable arrays
_rows("new_ref get swap addupdate freeze", mutates=True)


def primitive_of(eqn: Any) -> Primitive:
    """Looks up the primitive of an equation, or of a policy's question; any name has one."""
    name = eqn.primitive.name
    return PRIMITIVES.get(name) or Primitive(name)
