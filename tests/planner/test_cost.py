"""Bytes that handwritten instructions move, against arithmetic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jax.hlo.parser import parse_program
from fsdp_jax.planner.compiled.cost import CostModel, InstructionCost

ON_CHIP = frozenset({1})
WHOLE, LAYER = 8 * 64 * 128 * 4, 64 * 128 * 4  # of the arrays below


def cost(lines: str, more: str = "") -> InstructionCost:
    """Returns the cost of the last line of the entry."""
    entry = f"ENTRY %main (x: f32[]) -> f32[] {{\n{lines}\n}}\n"
    text = f"HloModule m, is_scheduled=true\n\n{more}\n\n{entry}"
    costs = CostModel(parse_program(text), ON_CHIP)
    main = costs.module["main"]
    return costs.cost(main, main.instructions[-1])


def shape(dims, dtype: str = "bf16") -> str:
    return f"{dtype}[{','.join(map(str, dims))}]"


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
        (
            f"%r = {ONE} dynamic-slice(%stack, %i, %i, %i), dynamic_slice_sizes={{1,64,128}}",
            2 * LAYER,
        ),
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
def test_bytes_of_an_instruction(line, moved):
    given_ = (
        f"  %stack = {STACK} parameter(0)\n  %one = {ONE} parameter(1)\n  %i = s32[] parameter(2)\n"
    )
    assert cost(f"{given_}  %near = {FAST} parameter(3)\n  {line}").bytes == moved


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        (
            f"(({STACK}), {FAST}, s32[]) slice-start(%stack), slice={{[0:1], [0:64], [0:128]}}",
            LAYER,
        ),
        (f"({FAST}, {ONE}, u32[]) copy-start(%one)", LAYER),
        (f"({ONE}, {ONE}, u32[]) copy-start(%one)", 2 * LAYER),
        (f"({STACK}, {STACK}) all-gather-start(%one)", 0),
    ],
)
def test_an_asynchronous_copy_moves_bytes_off_the_chip(kind, moved):
    given_ = f"  %stack = {STACK} parameter(0)\n  %one = {ONE} parameter(1)"
    assert cost(f"{given_}\n  %s = {kind}") == InstructionCost((), moved)


def fused(result: str, body: str, operands: str = "%stack, %one, %i") -> InstructionCost:
    """Returns the cost of a fusion of a stack, one layer and an index; `%inner` slices a layer."""
    inner = (
        "%inner (q: f32[8,64,128]) -> f32[1,64,128] {\n"
        f"  %q = {STACK} parameter(0)\n  %j = s32[] parameter(1)\n"
        f"  ROOT %cut = {ONE} dynamic-slice(%q, %j, %j, %j)\n}}"
    )
    head = f"  %p = {STACK} parameter(0)\n  %u = {ONE} parameter(1)\n  %n = s32[] parameter(2)\n"
    lines = "".join(f"  {line.strip()}\n" for line in body.strip().splitlines())
    called = f"%f (p: f32[8,64,128]) -> f32[] {{\n{head}{lines}}}"
    given_ = (
        f"  %stack = {STACK} parameter(0)\n  %one = {ONE} parameter(1)\n  %i = s32[] parameter(2)\n"
    )
    return cost(
        f"{given_}  %r = {result} fusion({operands}), kind=kLoop, calls=%f", f"{inner}\n\n{called}"
    )


UPDATE = f"{STACK} dynamic-update-slice(%p, %u, %n, %n, %n)"
CUT = "dynamic-slice(%p, %n, %n, %n)"
# What a fusion's body does, what comes out, and the bytes of the stack, of the layer, and of what
# it writes.
FUSIONS = {
    "slices": (ONE, f"%s = {ONE} {CUT}\nROOT %o = {ONE} add(%s, %u)", (LAYER, LAYER, LAYER)),
    "slices twice": (
        ONE,
        f"%s = {ONE} {CUT}\n%t = {ONE} slice(%p)\nROOT %o = {ONE} add(%s, %t)",
        (2 * LAYER, 0, LAYER),
    ),
    "slices behind a cast": (
        "bf16[1,64,128]",
        "%b = bf16[8,64,128] convert(%p)\nROOT %s = bf16[1,64,128] dynamic-slice(%b, %n, %n, %n)",
        (LAYER, 0, LAYER // 2),
    ),
    "slices in a fusion inside": (
        ONE,
        f"ROOT %s = {ONE} fusion(%p, %n), kind=kLoop, calls=%inner",
        (LAYER, 0, LAYER),
    ),
    "slices and adds": (
        STACK,
        f"%s = {ONE} {CUT}\nROOT %o = {STACK} add(%p, %s)",
        (WHOLE, 0, WHOLE),
    ),
    "updates": (STACK, f"ROOT %o = {UPDATE}", (0, LAYER, LAYER)),
    "updates behind a bitcast": (
        STACK,
        f"%b = {STACK} bitcast(%p)\n%o = {STACK} dynamic-update-slice(%b, %u, %n, %n, %n)\n"
        f"ROOT %c = {STACK} bitcast(%o)",
        (0, LAYER, LAYER),
    ),
    "updates twice": (
        STACK,
        f"%v = {UPDATE}\nROOT %o = {STACK} dynamic-update-slice(%v, %u, %n, %n, %n)",
        (0, LAYER, 2 * LAYER),
    ),
    "updates one of two results": (
        f"({STACK}, {ONE})",
        f"%v = {UPDATE}\n%w = {ONE} negate(%u)\nROOT %o = ({STACK}, {ONE}) tuple(%v, %w)",
        (0, LAYER, 2 * LAYER),
    ),
    "updates what it casts": (
        "bf16[8,64,128]",
        "%b = bf16[8,64,128] convert(%p)\n%c = bf16[1,64,128] convert(%u)\n"
        "ROOT %o = bf16[8,64,128] dynamic-update-slice(%b, %c, %n, %n, %n)",
        (WHOLE, LAYER, WHOLE // 2),
    ),
    "updates zeros": (
        STACK,
        f"%z = {STACK} broadcast(%n)\nROOT %o = {STACK} dynamic-update-slice(%z, %u, %n, %n, %n)",
        (0, LAYER, WHOLE),
    ),
    "updates, then reads": (
        STACK,
        f"%v = {UPDATE}\nROOT %o = {STACK} multiply(%v, %v)",
        (WHOLE, LAYER, WHOLE),
    ),
    "hands it on": (
        f"({STACK}, {ONE})",
        f"%w = {ONE} negate(%u)\nROOT %o = ({STACK}, {ONE}) tuple(%p, %w)",
        (WHOLE, LAYER, WHOLE + LAYER),
    ),
    "updates with its own": (
        STACK,
        f"%s = {ONE} {CUT}\n%a = {ONE} add(%s, %u)\n"
        f"ROOT %o = {STACK} dynamic-update-slice(%p, %a, %n, %n, %n)",
        (LAYER, LAYER, LAYER),
    ),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_bytes_of_a_fusion(name):
    result, body, moved = FUSIONS[name]
    result_cost = fused(result, body)
    index = 4 * ("%n" in body)
    assert result_cost.bytes == sum(moved) + index


def test_an_operand_that_is_given_twice_is_read_once():
    body = f"ROOT %o = {STACK} add(%p, %u)"
    assert fused(STACK, body, "%stack, %stack, %i").bytes == 2 * WHOLE


@settings(deadline=None)
@given(layers=st.integers(1, 50), rows=st.integers(1, 200), columns=st.integers(1, 200))
def test_slicing_a_stack_costs_one_layer(layers, rows, columns):
    stack, one = shape((layers, rows, columns)), shape((1, rows, columns))
    called = (
        f"%f (p: {stack}) -> {one} {{\n  %p = {stack} parameter(0)\n  %n = s32[] parameter(1)\n"
    )
    called += f"  ROOT %o = {one} dynamic-slice(%p, %n, %n, %n)\n}}"
    lines = f"  %a = {stack} parameter(0)\n  %i = s32[] parameter(1)\n"
    lines += f"  %r = {one} fusion(%a, %i), calls=%f"
    assert cost(lines, called).bytes == 2 * 2 * rows * columns + 4


def test_a_kernel_inside_another_computation_is_named():
    kernel = f'{ONE} custom-call(%u), custom_call_target="tpu_custom_call"'
    work = f'ROOT %k = {kernel}, metadata={{op_name="jit(f)/mine/pallas_call"}}'
    assert fused(ONE, work).unknown == "jit(f)/mine/pallas_call"
    called = f"%f (u: f32[1,64,128]) -> {ONE} {{\n  %u = {ONE} parameter(0)\n  {work}\n}}"
    start = f"%s = (({ONE}), {ONE}, s32[]) async-start(%one), calls=%f"
    assert cost(f"  %one = {ONE} parameter(0)\n  {start}", called).unknown == "s"
