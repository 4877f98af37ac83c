"""Products and bytes of written instructions, against arithmetic, and those of a Llama on a GPU that is not there."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fsdp_jax as fsdp
from fsdp_jax.inspect.collectives import read_program
from fsdp_jax.inspect.hlo import parse
from fsdp_jax.models import llama, next_token_loss
from fsdp_jax.overlap import compiler_options
from fsdp_jax.planner.cost import Cost, Costs
from fsdp_jax.planner.efficiency import efficiency_of
from fsdp_jax.planner.hardware import HARDWARE
from fsdp_jax.planner.network import Network
from fsdp_jax.planner.timeline import Player
from fsdp_jax.testing import mesh_of

pytestmark = pytest.mark.core

ON_CHIP = frozenset({1})
WHOLE, LAYER = 8 * 64 * 128 * 4, 64 * 128 * 4  # of the arrays below


def costs_of(lines: str, more: str = "", on_chip: frozenset[int] = ON_CHIP) -> tuple[Costs, Cost]:
    """The cost of the last of the entry's lines."""
    text = f"HloModule m, is_scheduled=true\n\n{more}\n\nENTRY %main (x: f32[]) -> f32[] {{\n{lines}\n}}\n"
    costs = Costs(parse(text), on_chip)
    main = costs.module["main"]
    return costs, costs.of(main, main.instructions[-1])


def cost(lines: str, more: str = "", on_chip: frozenset[int] = ON_CHIP) -> Cost:
    return costs_of(lines, more, on_chip)[1]


def shape(dims, dtype: str = "bf16") -> str:
    return f"{dtype}[{','.join(map(str, dims))}]"


def flops(found: Cost) -> int:
    return sum(product.times * product.flops for product in found.products)


# Products


@given(
    sizes=st.tuples(*[st.integers(1, 300)] * 4),
    left=st.permutations("bmk"),
    right=st.permutations("bkn"),
    dtypes=st.sampled_from(
        [("bf16", "bf16", "bfloat16"), ("bf16", "f32", "float32"), ("f8e4m3fn", "bf16", "bfloat16")]
    ),
    library=st.booleans(),
)
def test_a_dot_is_what_its_dims_say(sizes, left, right, dtypes, library):
    size = dict(zip("bmnk", sizes, strict=True))
    lines = [
        f"  %l = {shape([size[d] for d in left], dtypes[0])}{{2,1,0}} parameter(0)",
        f"  %r = {shape([size[d] for d in right], dtypes[1])}{{2,1,0}} parameter(1)",
    ]
    out = shape([size[d] for d in "bmn"])
    at = {f"{side}_{kind}": labels.index(d) for side, labels in (("lhs", left), ("rhs", right))
          for kind, d in (("batch", "b"), ("contracting", "k"))}  # fmt: skip
    if library:
        said = ",".join(f'"{name}_dimensions":["{i}"]' for name, i in at.items())
        lines.append(
            f'  %d = ({out}{{2,1,0}}, s8[4194304]{{0}}) custom-call(%l, %r), custom_call_target="__cublas$lt$matmul",'
            f' backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{{said}}}}}}}'
        )
    else:
        dims = ", ".join(f"{name}_dims={{{i}}}" for name, i in at.items())
        lines.append(f"  %d = {out}{{2,1,0}} dot(%l, %r), {dims}")
    found = cost("\n".join(lines))
    [product] = found.products
    assert (product.batch, product.m, product.n, product.k) == tuple(size[d] for d in "bmnk")
    assert product.dtype == dtypes[2]
    assert found.unknown == ""
    bits = {"bf16": 2, "f32": 4, "f8e4m3fn": 1}
    sides = size["b"] * size["k"] * (size["m"] * bits[dtypes[0]] + size["n"] * bits[dtypes[1]])
    assert found.bytes == sides + 2 * size["b"] * size["m"] * size["n"]  # the library's workspace is no traffic


# As XLA's TPU compiler writes products: heads and batch dims are windows. (left, right, labels, window, groups)
CONVOLUTIONS = {
    "plain": ((24, 40), (40, 56), "bf_io->bf", "", {}),
    "into heads": ((24, 40, 1), (4, 16, 40), "bf0_0oi->b0f", "size=4 pad=3_3 rhs_reversal=1", {}),
    "into heads, in chunks": ((3, 8, 40, 1), (4, 16, 40, 1), "0bf1_1oi0->0b1f", "size=1x4 pad=0_0x3_3", {}),
    "scores": ((8, 4, 16), (24, 4, 16), "b0f_o0i->0bf", "size=4 stride=3 lhs_dilate=4", {}),
    "their use": ((4, 8, 24), (4, 24, 16), "0bf_0io->0bf", "size=4 stride=3 lhs_dilate=4", {}),
    "halves of a gradient": ((2, 24, 40), (40, 56, 1), "0bf_io0->0bf", "size=1", {}),
    "patches": ((2, 32, 32, 3), (8, 8, 3, 20), "b01f_01io->b01f", "size=8x8 stride=8x8", {}),
    "groups of features": ((2, 32, 12), (4, 3, 20), "b0f_0io->b0f", "size=4 stride=4", {"feature_group_count": 4}),
    "groups of the batch": ((8, 32, 3), (4, 3, 20), "b0f_0io->b0f", "size=4 stride=4", {"batch_group_count": 4}),
}


def convolve(left, right, labels: str, window: str, groups):
    """The convolution of ones: each number of it is how many pairs were multiplied for it."""
    said = dict(part.split("=") for part in window.split())
    inputs, kernel, outputs = re.split("_|->", labels)
    spatial = len(inputs) - 2
    each = {
        key: [int(i) for i in said.get(key, "x".join("1" * spatial)).split("x") if i]
        for key in ("stride", "lhs_dilate")
    }
    pads = [tuple(map(int, pad.split("_"))) for pad in said["pad"].split("x")] if "pad" in said else [(0, 0)] * spatial
    numbers = jax.lax.ConvDimensionNumbers(
        *(tuple(labels.index(one) for one in (*first, *"01"[:spatial]))
          for labels, first in ((inputs, "bf"), (kernel, "oi"), (outputs, "bf")))
    )  # fmt: skip
    return jax.lax.conv_general_dilated(
        np.ones(left, "float32"), np.ones(right, "float32"), each["stride"], pads, lhs_dilation=each["lhs_dilate"],
        dimension_numbers=numbers, **groups,
    )  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_multiplies_what_its_windows_meet(name):
    left, right, labels, window, groups = CONVOLUTIONS[name]
    out = convolve(*CONVOLUTIONS[name])
    said = f", window={{{window}}}" if window else ""
    said += f", dim_labels={labels}" + "".join(f", {key}={value}" for key, value in groups.items())
    found = cost(
        f"  %l = {shape(left)} parameter(0)\n  %r = {shape(right)} parameter(1)\n"
        f"  %c = {shape(out.shape)} convolution(%l, %r){said}"
    )
    assert flops(found) == 2 * int(np.asarray(out, "float64").sum())
    [product] = found.products
    wide = {"patches": (2 * 16, 20, 192), "into heads": (24, 16, 40), "into heads, in chunks": (24, 16, 40)}
    assert (product.m, product.n, product.k) == wide.get(name, (product.m, product.n, product.k))


@pytest.mark.parametrize(
    ("target", "order"),
    [("convForward", "lro"), ("convBackwardInput", "orl"), ("convBackwardFilter", "lor")],
)
def test_a_convolution_of_cudnn_is_the_forward_ones_count(target, order):
    left, right, labels, window, groups = CONVOLUTIONS["patches"]
    out = convolve(left, right, labels, window, groups)
    dims = {"l": left, "r": right, "o": out.shape}
    first, second, result = (shape(dims[one]) for one in order)
    found = cost(
        f"  %a = {first} parameter(0)\n  %b = {second} parameter(1)\n  %c = ({result}{{3,2,1,0}}, u8[512]{{0}})"
        f' custom-call(%a, %b), window={{{window}}}, dim_labels={labels}, custom_call_target="__cudnn${target}"'
    )
    assert flops(found) == 2 * int(out.sum())
    assert found.bytes == 2 * sum(math.prod(each) for each in dims.values())


B, T, H, K = 2, 512, 4, 64
CAUSAL = B * H * (T // 2) * T * K * 2  # of one product


@pytest.mark.parametrize(
    ("name", "operands", "count"),
    [
        ('"__gpu$xla.gpu.triton", metadata={op_name="jit(f)/jvp(jit(mha))/mha_forward/pallas_call"}', "qqq", 2),
        ('"__gpu$xla.gpu.triton", metadata={op_name="jit(f)/preprocess_backward/mha_preprocess_backward/x"}', "qq", 0),
        ('"__gpu$xla.gpu.triton", metadata={op_name="jit(f)/checkpoint/mha_backward/pallas_call"}', "qqqqqss", 5),
        ('"tpu_custom_call", metadata={op_name="jit(f)/splash_mha_fwd_residuals/x"}', "mhgg", 2),
        ('"tpu_custom_call", metadata={op_name="jit(f)/splash_mha_dkv_no_residuals/x"}', "mhgg", 3),
        ('"tpu_custom_call", metadata={op_name="jit(f)/splash_mha_dq_no_residuals/x"}', "mhgg", 2),
        ('"__cudnn$fmhaSoftmax", backend_config={"mask_type":"CAUSAL","lhs_batch_dimensions":["0","1"]}', "hhh", 2),
        ('"__cudnn$fmhaSoftmax", backend_config={"mask_type": "CAUSAL", "lhs_batch_dimensions": ["0", "2"]}', "qqq", 2),
        ('"__cudnn$fmhaSoftmax", backend_config={"mask_type":"NO_MASK","lhs_batch_dimensions":["0","2"]}', "qqq", 4),
        ('"__cudnn$fmhaSoftmaxBackward", backend_config={"mask_type":"CAUSAL","lhs_batch_dimensions":["0","1"],'
         '"rhs_batch_dimensions":["0","2"]}', "qqqsqq", 5),
    ],
)  # fmt: skip
def test_attention_is_counted_by_its_algorithm(name, operands, count):
    kinds = {"q": (B, T, H, K), "h": (B, H, T, K), "g": (B, H // 2, T, K), "s": (B, H, T), "m": (1, 2, 2)}
    dtypes = {"m": "s8", "s": "f32"}
    lines = [
        f"  %p{i} = {shape(kinds[kind], dtypes.get(kind, 'bf16'))} parameter({i})" for i, kind in enumerate(operands)
    ]
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    lines.append(f"  %k = {shape((B, T, H, K))} custom-call({names}), custom_call_target={name}")
    found = cost("\n".join(lines))
    assert flops(found) == count * CAUSAL
    assert found.unknown == ""
    assert all(product.fused for product in found.products)


def test_attention_of_a_batch_of_one_may_leave_the_batch_out():
    lines = "\n".join(f"  %p{i} = {shape((H, T, K))} parameter({i})" for i in range(3))
    call = 'custom-call(%p0, %p1, %p2), custom_call_target="tpu_custom_call"'
    found = cost(f"{lines}\n  %splash_mha_fwd_residuals.1 = {shape((H, T, K))} {call}")
    assert flops(found) == 2 * CAUSAL // B


def test_a_kernel_that_is_not_known_is_said_and_a_marker_is_free():
    lines = '  %x = f32[64] parameter(0)\n  %k = f32[64] custom-call(%x), custom_call_target="{}"{}'
    found = cost(lines.format("tpu_custom_call", ', metadata={op_name="jit(f)/mine/pallas_call"}'))
    assert (found.unknown, found.bytes, found.products) == ("jit(f)/mine/pallas_call", 512, ())
    assert cost(lines.format("AllocateBuffer", "")) == Cost()
    assert cost(lines.format("TopK", "")) == Cost((), 512, "")


# Bytes

STACK, ONE, INDEX = "f32[8,64,128]{2,1,0}", "f32[1,64,128]{2,1,0}", "s32[]"
FAST = "f32[1,64,128]{2,1,0:T(8,128)S(1)}"


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        (f"%r = {STACK} copy(%stack)", 2 * WHOLE),
        (f"%r = {STACK} add(%stack, %stack)", 2 * WHOLE),
        (f"%r = {STACK} bitcast(%stack)", 0),
        (f"%r = {STACK} broadcast(%i), dimensions={{}}", WHOLE),
        ("%r = f32[64,128] reduce(%stack, %i), dimensions={0}, to_apply=%sum", WHOLE + LAYER + 4),
        (f"%r = {ONE} dynamic-slice(%stack, %i, %i, %i), dynamic_slice_sizes={{1,64,128}}", 2 * LAYER),
        (f"%r = {FAST} dynamic-slice(%stack, %i, %i, %i), dynamic_slice_sizes={{1,64,128}}", LAYER),
        (f"%r = {ONE} slice(%near), slice={{[0:1]}}", LAYER),
        (f"%r = {STACK} dynamic-update-slice(%stack, %one, %i, %i, %i)", 2 * LAYER),
        (f"%r = {STACK} dynamic-update-slice(%stack, %near, %i, %i, %i)", LAYER),
        (f"%r = {STACK} scatter(%stack, %i, %one), to_apply=%sum", 2 * LAYER),
        (f"%r = {STACK} all-gather(%one), dimensions={{0}}", 0),
        (f"%r = ({ONE}, {STACK}) all-gather-start(%one), dimensions={{0}}", 0),
        (f"%r = ({STACK}, s32[]) while(%t), condition=%c, body=%b", 0),
    ],
)
def test_an_instruction_moves(line, moved):
    given_ = f"  %stack = {STACK} parameter(0)\n  %one = {ONE} parameter(1)\n  %i = s32[] parameter(2)\n"
    assert cost(f"{given_}  %near = {FAST} parameter(3)\n  {line}").bytes == moved


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        (f"(({STACK}), {FAST}, s32[]) slice-start(%stack), slice={{[0:1], [0:64], [0:128]}}", LAYER),
        (f"({FAST}, {ONE}, u32[]) copy-start(%one)", LAYER),
        (f"({ONE}, {ONE}, u32[]) copy-start(%one)", 2 * LAYER),
        (f"({STACK}, {STACK}) all-gather-start(%one)", 0),
    ],
)
def test_a_copy_beside_the_rest_moves_what_is_not_on_the_chip(kind, moved):
    costs, alone = costs_of(f"  %stack = {STACK} parameter(0)\n  %one = {ONE} parameter(1)\n  %s = {kind}")
    assert costs.started(costs.module["main"].instructions[-1]) == moved
    assert alone == Cost()


def fused(result: str, body: str, operands: str = "%stack, %one, %i") -> Cost:
    """A fusion of a stack, one layer and an index; the inner fusion takes a layer out of what it is given."""
    inner = (
        f"%inner (q: f32[8,64,128]) -> f32[1,64,128] {{\n  %q = {STACK} parameter(0)\n  %j = s32[] parameter(1)\n"
        f"  ROOT %cut = {ONE} dynamic-slice(%q, %j, %j, %j)\n}}"
    )
    head = f"  %p = {STACK} parameter(0)\n  %u = {ONE} parameter(1)\n  %n = s32[] parameter(2)\n"
    lines = "".join(f"  {line.strip()}\n" for line in body.strip().splitlines())
    called = f"%f (p: f32[8,64,128]) -> f32[] {{\n{head}{lines}}}"
    given_ = f"  %stack = {STACK} parameter(0)\n  %one = {ONE} parameter(1)\n  %i = s32[] parameter(2)\n"
    return cost(f"{given_}  %r = {result} fusion({operands}), kind=kLoop, calls=%f", f"{inner}\n\n{called}")


UPDATE = f"{STACK} dynamic-update-slice(%p, %u, %n, %n, %n)"
CUT = "dynamic-slice(%p, %n, %n, %n)"
# What a fusion's body does, what comes out, and the bytes of the stack, of the layer, and of what it writes.
FUSIONS = {
    "slices": (ONE, f"%s = {ONE} {CUT}\nROOT %o = {ONE} add(%s, %u)", LAYER, LAYER, LAYER),
    "slices twice": (
        ONE, f"%s = {ONE} {CUT}\n%t = {ONE} slice(%p)\nROOT %o = {ONE} add(%s, %t)", 2 * LAYER, 0, LAYER,
    ),
    "slices behind a cast": (
        "bf16[1,64,128]", "%b = bf16[8,64,128] convert(%p)\nROOT %s = bf16[1,64,128] dynamic-slice(%b, %n, %n, %n)",
        LAYER, 0, LAYER // 2,
    ),
    "slices in a fusion inside": (ONE, f"ROOT %s = {ONE} fusion(%p, %n), kind=kLoop, calls=%inner", LAYER, 0, LAYER),
    "slices and adds": (STACK, f"%s = {ONE} {CUT}\nROOT %o = {STACK} add(%p, %s)", WHOLE, 0, WHOLE),
    "updates": (STACK, f"ROOT %o = {UPDATE}", 0, LAYER, LAYER),
    "updates behind a bitcast": (
        STACK, f"%b = {STACK} bitcast(%p)\n%o = {STACK} dynamic-update-slice(%b, %u, %n, %n, %n)\n"
        f"ROOT %c = {STACK} bitcast(%o)", 0, LAYER, LAYER,
    ),
    "updates twice": (
        STACK, f"%v = {UPDATE}\nROOT %o = {STACK} dynamic-update-slice(%v, %u, %n, %n, %n)", 0, LAYER, 2 * LAYER,
    ),
    "updates one of two results": (
        f"({STACK}, {ONE})", f"%v = {UPDATE}\n%w = {ONE} negate(%u)\nROOT %o = ({STACK}, {ONE}) tuple(%v, %w)",
        0, LAYER, 2 * LAYER,
    ),
    "updates what it casts": (
        "bf16[8,64,128]", "%b = bf16[8,64,128] convert(%p)\n%c = bf16[1,64,128] convert(%u)\n"
        "ROOT %o = bf16[8,64,128] dynamic-update-slice(%b, %c, %n, %n, %n)", WHOLE, LAYER, WHOLE // 2,
    ),
    "updates zeros": (
        STACK, f"%z = {STACK} broadcast(%n)\nROOT %o = {STACK} dynamic-update-slice(%z, %u, %n, %n, %n)",
        0, LAYER, WHOLE,
    ),
    "updates, then reads": (STACK, f"%v = {UPDATE}\nROOT %o = {STACK} multiply(%v, %v)", WHOLE, LAYER, WHOLE),
    "updates with its own": (
        STACK, f"%s = {ONE} {CUT}\n%a = {ONE} add(%s, %u)\nROOT %o = {STACK} dynamic-update-slice(%p, %a, %n, %n, %n)",
        LAYER, LAYER, LAYER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_moves(name):
    result, body, stack, layer, written = FUSIONS[name]
    found = fused(result, body)
    index = 4 * ("%n" in body)
    assert found.bytes == stack + layer + written + index


def test_an_operand_that_is_given_twice_is_read_once():
    body = f"ROOT %o = {STACK} add(%p, %u)"
    assert fused(STACK, body, "%stack, %stack, %i").bytes == 2 * WHOLE


@given(layers=st.integers(1, 50), rows=st.integers(1, 200), columns=st.integers(1, 200))
def test_a_stack_costs_what_a_layer_does(layers, rows, columns):
    stack, one = shape((layers, rows, columns)), shape((1, rows, columns))
    called = f"%f (p: {stack}) -> {one} {{\n  %p = {stack} parameter(0)\n  %n = s32[] parameter(1)\n"
    called += f"  ROOT %o = {one} dynamic-slice(%p, %n, %n, %n)\n}}"
    lines = f"  %a = {stack} parameter(0)\n  %i = s32[] parameter(1)\n  %r = {one} fusion(%a, %i), calls=%f"
    assert cost(lines, called).bytes == 2 * 2 * rows * columns + 4


# A whole program

LLAMA = llama.preset("llama2-7b", layers=2, sequence_length=512)


@pytest.mark.needs_plugin
def test_a_llama_of_two_layers_on_a_gpu():
    mesh, half = mesh_of("h100:8"), fsdp.Precision(compute="bfloat16")
    sharded = fsdp.fully_shard(
        lambda rngs: llama.Llama(LLAMA, rngs=rngs), optax.adamw(1e-3), mesh, units=[llama.LlamaBlock], precision=half,
        remat="none",
    )  # fmt: skip
    step = sharded.train_step(next_token_loss)
    lowered = step.lower({"tokens": jax.ShapeDtypeStruct((16, LLAMA.sequence_length + 1), jnp.int32)})
    text = lowered.compile(compiler_options=compiler_options(step.plan)).as_text()
    chip = HARDWARE["h100"]
    sent, efficiency = read_program(text, step.plan.layout.mesh.shape), efficiency_of(chip)
    network = Network(step.plan.layout.mesh, chip, efficiency)
    played = Player(parse(text), sent.collectives, network, efficiency).whole()
    # by hand: two sequences on a device; what is multiplied is all but the embedding and the norms
    D, F, V, heads, rows, width = 4096, 11008, 32000, 32, 512, 128
    layer, tokens = 4 * D * D + 3 * D * F, 2 * rows
    linear = 6 * tokens * (2 * layer + D * V)
    product = 2 * 2 * 2 * heads * rows * rows * width  # in both layers: queries by keys, the mask not skipped
    attention = (2 + 1 + 4) * product  # forward, scores again, four derivatives
    done = sum(each.flops * count for each, count in played.products.items())
    assert done == pytest.approx(linear + attention, rel=0.02)
    assert {each.dtype for each in played.products} <= {"bfloat16", "float32"}
    # at least: three times all weights in bf16; of a shard in float32, p, g, m, v are read and p, m, v written
    parameters = 2 * layer + 2 * D * V
    least = 3 * 2 * (2 * layer + D * V) + 28 * parameters // 8
    assert least < played.traffic < 4 * least
    assert played.compute + played.memory + played.exposed == pytest.approx(played.seconds)
    assert 0 < played.exposed <= played.collective < played.seconds
    assert not played.unknown
