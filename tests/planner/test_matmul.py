"""Matmuls of handwritten instructions, against convolutions of ones, and of a compiled Llama."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from fsdp_jax.hlo.parser import parse_program
from fsdp_jax.planner.analytic.traced_matmuls import matmuls_of
from fsdp_jax.planner.compiled.cost import CostModel, InstructionCost
from fsdp_jax.planner.machines.chips import HARDWARE
from fsdp_jax.planner.machines.roofline import Roofline

pytestmark = pytest.mark.releases


def cost(lines: str) -> InstructionCost:
    """Returns the cost of the last line of the entry."""
    module = parse_program(
        f"HloModule m, is_scheduled=true\n\nENTRY %main (x: f32[]) -> f32[] {{\n{lines}\n}}\n"
    )
    return CostModel(module).cost(module["main"], module["main"].instructions[-1])


def shape(dims, dtype: str = "bf16") -> str:
    return f"{dtype}[{','.join(map(str, dims))}]"


def flops(result: InstructionCost) -> int:
    return sum(matmul.times * matmul.flops for matmul in result.matmuls)


@settings(deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 300)] * 4),
    left=st.permutations("bmk"),
    right=st.permutations("bkn"),
    dtypes=st.sampled_from(
        [("bf16", "bf16", "bfloat16"), ("bf16", "f32", "float32"), ("f8e4m3fn", "bf16", "bfloat16")]
    ),
    library=st.booleans(),
)
def test_the_matmul_of_a_dot(sizes, left, right, dtypes, library):
    size = dict(zip("bmnk", sizes, strict=True))
    lines = [
        f"  %l = {shape([size[d] for d in left], dtypes[0])}{{2,1,0}} parameter(0)",
        f"  %r = {shape([size[d] for d in right], dtypes[1])}{{2,1,0}} parameter(1)",
    ]
    out = shape([size[d] for d in "bmn"])
    at = {
        f"{side}_{kind}": labels.index(d)
        for side, labels in (("lhs", left), ("rhs", right))
        for kind, d in (("batch", "b"), ("contracting", "k"))
    }
    if library:
        config = ",".join(f'"{name}_dimensions":["{i}"]' for name, i in at.items())
        lines.append(
            f"  %d = ({out}{{2,1,0}}, s8[4194304]{{0}}) custom-call(%l, %r),"
            ' custom_call_target="__cublas$lt$matmul",'
            f' backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{{config}}}}}}}'
        )
    else:
        dims = ", ".join(f"{name}_dims={{{i}}}" for name, i in at.items())
        lines.append(f"  %d = {out}{{2,1,0}} dot(%l, %r), {dims}")
    result = cost("\n".join(lines))
    [matmul] = result.matmuls
    assert (matmul.batch, matmul.m, matmul.n, matmul.k) == tuple(size[d] for d in "bmnk")
    assert matmul.dtype == dtypes[2]
    assert result.unknown == ""
    bits = {"bf16": 2, "f32": 4, "f8e4m3fn": 1}
    sides = size["b"] * size["k"] * (size["m"] * bits[dtypes[0]] + size["n"] * bits[dtypes[1]])
    # the library's workspace is not traffic
    assert result.bytes == sides + 2 * size["b"] * size["m"] * size["n"]


# As XLA's TPU compiler writes products: heads and batch dims are windows. (left, right, labels,
# window, groups)
CONVOLUTIONS = {
    "plain": ((24, 40), (40, 56), "bf_io->bf", "", {}),
    "into heads": ((24, 40, 1), (4, 16, 40), "bf0_0oi->b0f", "size=4 pad=3_3 rhs_reversal=1", {}),
    "into heads, in chunks": (
        (3, 8, 40, 1),
        (4, 16, 40, 1),
        "0bf1_1oi0->0b1f",
        "size=1x4 pad=0_0x3_3",
        {},
    ),
    "scores": ((8, 4, 16), (24, 4, 16), "b0f_o0i->0bf", "size=4 stride=3 lhs_dilate=4", {}),
    "their use": ((4, 8, 24), (4, 24, 16), "0bf_0io->0bf", "size=4 stride=3 lhs_dilate=4", {}),
    "halves of a gradient": ((2, 24, 40), (40, 56, 1), "0bf_io0->0bf", "size=1", {}),
    "patches": ((2, 32, 32, 3), (8, 8, 3, 20), "b01f_01io->b01f", "size=8x8 stride=8x8", {}),
    "groups of features": (
        (2, 32, 12),
        (4, 3, 20),
        "b0f_0io->b0f",
        "size=4 stride=4",
        {"feature_group_count": 4},
    ),
    "groups of the batch": (
        (8, 32, 3),
        (4, 3, 20),
        "b0f_0io->b0f",
        "size=4 stride=4",
        {"batch_group_count": 4},
    ),
}


def convolve(left, right, labels: str, window: str, groups):
    """Returns the convolution of ones: each element counts the pairs multiplied for it."""
    settings_of_window = dict(part.split("=") for part in window.split())
    inputs, kernel, outputs = re.split("_|->", labels)
    spatial = len(inputs) - 2
    each = {
        key: [int(i) for i in settings_of_window.get(key, "x".join("1" * spatial)).split("x") if i]
        for key in ("stride", "lhs_dilate")
    }
    pads = (
        [tuple(map(int, pad.split("_"))) for pad in settings_of_window["pad"].split("x")]
        if "pad" in settings_of_window
        else [(0, 0)] * spatial
    )
    numbers = jax.lax.ConvDimensionNumbers(
        *(
            tuple(labels.index(one) for one in (*first, *"01"[:spatial]))
            for labels, first in ((inputs, "bf"), (kernel, "oi"), (outputs, "bf"))
        )
    )
    return jax.lax.conv_general_dilated(
        np.ones(left, "float32"),
        np.ones(right, "float32"),
        each["stride"],
        pads,
        lhs_dilation=each["lhs_dilate"],
        dimension_numbers=numbers,
        **groups,
    )


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_flops_of_a_convolution_are_those_of_its_windows(name):
    left, right, labels, window, groups = CONVOLUTIONS[name]
    out = convolve(*CONVOLUTIONS[name])
    attributes = f", window={{{window}}}" if window else ""
    attributes += f", dim_labels={labels}" + "".join(
        f", {key}={value}" for key, value in groups.items()
    )
    result = cost(
        f"  %l = {shape(left)} parameter(0)\n  %r = {shape(right)} parameter(1)\n"
        f"  %c = {shape(out.shape)} convolution(%l, %r){attributes}"
    )
    assert flops(result) == 2 * int(np.asarray(out, "float64").sum())
    [matmul] = result.matmuls
    wide = {
        "patches": (2 * 16, 20, 192),
        "into heads": (24, 16, 40),
        "into heads, in chunks": (24, 16, 40),
    }
    assert (matmul.m, matmul.n, matmul.k) == wide.get(name, (matmul.m, matmul.n, matmul.k))


@pytest.mark.parametrize(
    ("target", "order"),
    [("convForward", "lro"), ("convBackwardInput", "orl"), ("convBackwardFilter", "lor")],
)
def test_convolutions_of_cudnn_have_the_flops_of_the_forward_one(target, order):
    left, right, labels, window, groups = CONVOLUTIONS["patches"]
    out = convolve(left, right, labels, window, groups)
    dims = {"l": left, "r": right, "o": out.shape}
    first, second, result = (shape(dims[one]) for one in order)
    result = cost(
        f"  %a = {first} parameter(0)\n  %b = {second} parameter(1)\n"
        f"  %c = ({result}{{3,2,1,0}}, u8[512]{{0}}) custom-call(%a, %b), window={{{window}}},"
        f' dim_labels={labels}, custom_call_target="__cudnn${target}"'
    )
    assert flops(result) == 2 * int(out.sum())
    assert [(matmul.m, matmul.n, matmul.k) for matmul in result.matmuls] == [(2 * 16, 20, 192)]
    assert result.bytes == 2 * sum(math.prod(each) for each in dims.values())


B, T, H, K = 2, 512, 4, 64
CAUSAL = B * H * (T // 2) * T * K * 2  # of one product


TRITON, PALLAS_TPU = "__gpu$xla.gpu.triton", "tpu_custom_call"
CUDNN = "__cudnn$fmhaSoftmax"


def cudnn(mask: str, *batch_dims: int) -> str:
    dims = ",".join(f'"{dim}"' for dim in batch_dims)
    return f'backend_config={{"mask_type":"{mask}","lhs_batch_dimensions":[{dims}]}}'


def named(name: str) -> str:
    return f'metadata={{op_name="jit(f)/{name}"}}'


@pytest.mark.parametrize(
    ("target", "attributes", "operands", "count"),
    [
        (TRITON, named("jvp(jit(mha))/mha_forward/pallas_call"), "qqq", 2),
        (TRITON, named("preprocess_backward/mha_preprocess_backward/x"), "qq", 0),
        (TRITON, named("checkpoint/mha_backward/pallas_call"), "qqqqqss", 5),
        (PALLAS_TPU, named("splash_mha_fwd_residuals/x"), "mhgg", 2),
        (PALLAS_TPU, named("splash_mha_dkv_no_residuals/x"), "mhgg", 3),
        (PALLAS_TPU, named("splash_mha_dq_no_residuals/x"), "mhgg", 2),
        (CUDNN, cudnn("CAUSAL", 0, 1), "hhh", 2),
        (CUDNN, cudnn("CAUSAL", 0, 2).replace(":", ": ").replace(",", ", "), "qqq", 2),
        (CUDNN, cudnn("NO_MASK", 0, 2), "qqq", 4),
        (
            f"{CUDNN}Backward",
            'backend_config={"mask_type":"CAUSAL","lhs_batch_dimensions":["0","1"],'
            '"rhs_batch_dimensions":["0","2"]}',
            "qqqsqq",
            5,
        ),
    ],
)
def test_attention_is_counted_by_its_algorithm(target, attributes, operands, count):
    kinds = {
        "q": (B, T, H, K),
        "h": (B, H, T, K),
        "g": (B, H // 2, T, K),
        "s": (B, H, T),
        "m": (1, 2, 2),
    }
    dtypes = {"m": "s8", "s": "f32"}
    lines = [
        f"  %p{i} = {shape(kinds[kind], dtypes.get(kind, 'bf16'))} parameter({i})"
        for i, kind in enumerate(operands)
    ]
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    lines.append(
        f"  %k = {shape((B, T, H, K))} custom-call({names}),"
        f' custom_call_target="{target}", {attributes}'
    )
    result = cost("\n".join(lines))
    assert flops(result) == count * CAUSAL
    assert result.unknown == ""
    # a query of a causal kernel sees half of the keys in the mean
    keys = T if "NO_MASK" in attributes else T // 2
    assert all((matmul.fused, matmul.keys) == (True, keys) for matmul in result.matmuls)
    assert all((matmul.assumed == "") == (CUDNN in target) for matmul in result.matmuls)


def test_attention_of_a_batch_of_one_may_leave_the_batch_out():
    lines = "\n".join(f"  %p{i} = {shape((H, T, K))} parameter({i})" for i in range(3))
    call = 'custom-call(%p0, %p1, %p2), custom_call_target="tpu_custom_call"'
    result = cost(f"{lines}\n  %splash_mha_fwd_residuals.1 = {shape((H, T, K))} {call}")
    assert flops(result) == 2 * CAUSAL // B


def test_an_unknown_kernel_is_named_and_a_marker_is_free():
    lines = '  %x = f32[64] parameter(0)\n  %k = f32[64] custom-call(%x), custom_call_target="{}"{}'
    result = cost(lines.format("tpu_custom_call", ', metadata={op_name="jit(f)/mine/pallas_call"}'))
    assert (result.unknown, result.bytes, result.matmuls) == ("jit(f)/mine/pallas_call", 512, ())
    ragged = "%r = f32[8,8] ragged-dot(%x, %x, %x), lhs_contracting_dims={1}"
    assert cost(f"  %x = f32[8,8] parameter(0)\n  {ragged}").unknown == "r"
    assert cost(lines.format("AllocateBuffer", "")) == InstructionCost()
    assert cost(lines.format("TopK", "")) == InstructionCost((), 512, "")


def test_a_traced_matmul_of_both_float8_formats_is_float8():
    left, right = jnp.ones((4, 8), "float8_e5m2"), jnp.ones((8, 2), "float8_e4m3fn")
    dims = (((1,), (0,)), ((), ()))
    fn = functools.partial(
        lax.dot_general, dimension_numbers=dims, preferred_element_type=jnp.bfloat16
    )
    (eqn,) = jax.make_jaxpr(fn)(left, right).jaxpr.eqns
    (matmul,) = matmuls_of(eqn)
    assert (matmul.m, matmul.n, matmul.k, matmul.flops) == (4, 2, 8, 128)
    assert Roofline(HARDWARE["h100"]).rate(matmul) > Roofline(HARDWARE["a100-80gb"]).rate(matmul)
    assert matmul.dtype.startswith("float8")
