"""Reads programs that are compiled here, and programs written here that no compiler here prints."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir.dialects import stablehlo

from fsdp_jax.hlo.collectives import OPS, ProgramTraffic, read_collectives
from fsdp_jax.sharding.mesh import make_mesh

pytestmark = pytest.mark.releases

AXES = {"replica": ("replica",), "data": ("data",), "replica+data": ("replica", "data")}
SIZES = {"replica": 2, "data": 4, "replica+data": 8}


def gather(x, axes, n):
    return lax.all_gather(x, axes, tiled=True).reshape(n, *x.shape).sum(0)


def scatter(x, axes, n):
    return jnp.tile(lax.psum_scatter(x, axes, tiled=True), (n, 1))


def exchange(x, axes, n):
    return lax.all_to_all(x, axes, 0, 0, tiled=True)


def permute(x, axes, n):
    return lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])


# op -> (traced operation, bytes sent for an operand of x bytes over n devices)
ROUND_TRIPS = {
    "all-gather": (gather, lambda n, x: (n - 1) * x),
    "reduce-scatter": (scatter, lambda n, x: (n - 1) * x // n),
    "all-reduce": (lambda x, axes, n: lax.psum(x, axes), lambda n, x: 2 * (n - 1) * x // n),
    "all-to-all": (exchange, lambda n, x: (n - 1) * x // n),
    "permute": (permute, lambda n, x: x),
}


def compile_loop(
    op, axes: tuple[str, ...], n: int, shape: tuple[int, int], outer: int, inner: int
) -> str:
    """Compiles a program that runs an operation outer * inner times.

    Each device has float32 [rows, columns].
    """
    mesh = make_mesh(data=4, replica=2)

    def local(x):
        def body(x, _):
            return jnp.sin(op(x, axes, n)), None

        return lax.scan(
            lambda x, _: (lax.scan(body, x, None, length=inner)[0], None), x, None, length=outer
        )[0]

    spec = PartitionSpec(("replica", "data"))
    ours = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.ShapeDtypeStruct(
        (8 * shape[0], shape[1]), jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    return ours.lower(x).compile().as_text()


@settings(max_examples=30, deadline=None)
@given(
    op=st.sampled_from(sorted(ROUND_TRIPS)),
    axis=st.sampled_from(sorted(AXES)),
    rows=st.integers(1, 4),
    columns=st.integers(1, 40),
    outer=st.integers(1, 4),
    inner=st.integers(1, 6),
)
def test_collectives_in_loops_are_read_back(op, axis, rows, columns, outer, inner):
    run, share = ROUND_TRIPS[op]
    shape = (8 * rows, columns)
    program = read_collectives(
        compile_loop(run, AXES[axis], SIZES[axis], shape, outer, inner), {"replica": 2, "data": 4}
    )
    assert program.unread == ()
    assert {(one.op, one.dtype, one.axis) for one in program.collectives} == {(op, "float32", axis)}
    assert sum(one.count for one in program.collectives) == outer * inner
    assert sum(one.bytes for one in program.collectives) == outer * inner * share(
        SIZES[axis], 4 * shape[0] * columns
    )


def test_a_loop_of_unknown_length_is_counted_once_and_reported():
    mesh = make_mesh(data=8)

    def local(x):
        return lax.while_loop(lambda x: x[0] < 100, lambda x: lax.psum(x, "data"), x)

    spec = PartitionSpec("data")
    ours = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    text = ours.lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile().as_text()
    program = read_collectives(text, dict(mesh.shape))
    assert [one.count for one in program.collectives] == [1]
    assert len(program.unread) == 1
    assert "length of the loop" in program.unread[0]


# Programs written here

PLAIN = "\n  %x = f32[64]{0} parameter(0)"
GROUPS = "replica_groups={{0,1,2,3}}"


def written(body: str, *, more: str = "") -> partial[ProgramTraffic]:
    head = "HloModule m, is_scheduled=true, num_partitions=4"
    return partial(
        read_collectives,
        f"{head}\n\n{more}\n\nENTRY %main (x: f32[64]) -> f32[64] {{{PLAIN}{body}\n}}\n",
        {"d": 4},
    )


def pair(between: str) -> str:
    return f"""
  %s = (f32[64]{{0}}, f32[256]{{0}}) all-gather-start(%x), {GROUPS}, dimensions={{0}}
  {between}
  ROOT %d = f32[256]{{0}} all-gather-done(%s)"""


@pytest.mark.parametrize(
    ("kernel", "count"),
    [
        ('%k = f32[64] custom-call(%x), custom_call_target="__cublas$gemm"', 1),
        ('%k = f32[64] custom-call(%x), custom_call_target="__cublas$lt$matmul$f8"', 1),
        ('%k = f32[64] custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"', 1),
        ('%k = f32[64] custom-call(%x), custom_call_target="__cudnn$convForward"', 1),
        ('%k = f32[64] custom-call(%x), custom_call_target="__cudnn$norm"', 0),
        ('%k = f32[64] custom-call(%x), custom_call_target="tpu_custom_call"', 1),
        ('%k = f32[64] custom-call(%x), custom_call_target="AllocateBuffer"', 0),
        ("%k = f32[] dot(%x, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}", 1),
        ("%k = f32[64] fusion(%x), kind=kLoop, calls=%cheap", 0),
        ("%k = f32[64] fusion(%x), kind=kOutput, calls=%costly", 1),
        ("%k = f32[64] call(%x), to_apply=%costly", 1),
        ("%k = f32[64] while(%x), condition=%cheap, body=%costly", 1),
        ("%k = f32[64] conditional(%x, %x, %x), branch_computations={%cheap, %costly}", 1),
        ("%k = f32[64] add(%x, %x)", 0),
    ],
)
def test_what_counts_as_a_kernel(kernel, count):
    functions = """%cheap (p: f32[64]) -> f32[64] {
  ROOT %p = f32[64] parameter(0)
}

%costly (q: f32[64]) -> f32[] {
  %q = f32[64] parameter(0)
  ROOT %dot = f32[] dot(%q, %q)
}"""
    [gather] = written(pair(kernel), more=functions)().collectives
    assert (gather.asynchronous, gather.kernels) == (True, count)
    assert gather.hidden == (3 * 64 * 4 if count else 0)


def test_an_asynchronous_wrapper_and_an_update_on_the_way():
    functions = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %b = f32[] parameter(1)
}

%wrapped (p: f32[64]) -> f32[16] {
  %p = f32[64] parameter(0)
  ROOT %rs = f32[16] reduce-scatter(%p), replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
}"""
    body = """
  %s = ((f32[64]), f32[16], u32[]) async-start(%x), calls=%wrapped
  %k = f32[64] custom-call(%x), custom_call_target="__cublas$gemm"
  %u = ((f32[64]), f32[16], u32[]) async-update(%s)
  ROOT %d = f32[16] async-done(%u)"""
    [scatter] = written(body, more=functions)().collectives
    assert (scatter.op, scatter.shapes, scatter.bytes, scatter.hidden) == (
        "reduce-scatter",
        ((64,),),
        192,
        192,
    )


def test_a_computation_called_twice_counts_twice():
    gather = f"ROOT %g = f32[256] all-gather(%p), {GROUPS}, dimensions={{0}}"
    inner = f"%f (p: f32[64]) -> f32[64] {{\n  %p = f32[64] parameter(0)\n  {gather}\n}}"
    body = "\n  %a = f32[256] call(%x), to_apply=%f\n  ROOT %b = f32[256] call(%x), to_apply=%f"
    assert [one.bytes for one in written(body, more=inner)().collectives] == [768, 768]


def test_groups_of_one_send_nothing():
    alone = "\n  ROOT %g = f32[64] all-gather(%x), replica_groups={{0},{1},{2},{3}}, dimensions={0}"
    still = "\n  ROOT %g = f32[64] collective-permute(%x), source_target_pairs={{0,0},{1,1}}"
    assert written(alone)() == written(still)() == ProgramTraffic((), ())


@pytest.mark.parametrize("opcode", ["ragged-all-to-all", "collective-broadcast", "send"])
def test_an_unknown_transfer_is_reported(opcode):
    program = written(f"\n  ROOT %g = f32[64] {opcode}(%x), {GROUPS}")()
    assert program == ProgramTraffic((), (f"{opcode} 'g' in 'main'",))


MALFORMED = {
    "": "does not begin with HloModule",
    "HloModule m\n": "not scheduled",
    "HloModule m, is_scheduled=true\n": "no ENTRY",
    "HloModule m, is_scheduled=true, replica_count=4\n": "replicated",
}


@pytest.mark.parametrize(("text", "what"), MALFORMED.items())
def test_a_text_that_is_not_a_compiled_program_is_refused(text, what):
    with pytest.raises(ValueError, match=what):
        read_collectives(text, {"d": 1})


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("\n  this is not an instruction", "is not an instruction"),
        (
            f"\n  ROOT %g = f32[256] all-gather(%y), {GROUPS}, dimensions={{0}}",
            "'y' is read but not defined",
        ),
        (
            "\n  ROOT %g = f32[256] fusion(%x), kind=kLoop, calls=%nowhere",
            "'nowhere' is called but not defined",
        ),
        (
            f"\n  ROOT %s = (f32[64], f32[256]) all-gather-start(%x), {GROUPS}, dimensions={{0}}",
            "never done",
        ),
        ("\n  ROOT %g = f32[256] all-gather(%x), dimensions={0}", "without groups"),
        (
            "\n  ROOT %g = f32[256] all-gather(%x), replica_groups={{0,1},{2}}, dimensions={0}",
            "do not share out",
        ),
        (
            "\n  %y = q99[64] parameter(1)"
            f"\n  ROOT %g = q99[256] all-gather(%y), {GROUPS}, dimensions={{0}}",
            "dtype",
        ),
    ],
)
def test_an_instruction_that_cannot_be_read_is_refused(body, what):
    with pytest.raises(ValueError, match=what):
        written(body)()


# Every opcode of XLA's that communicates (`HloOpcode` in xla/hlo/ir/hlo_opcode.h), with what its
# text says of its partners.
OPCODES = {
    "all-gather": f"{GROUPS}, dimensions={{0}}",
    "all-reduce": f"{GROUPS}, to_apply=%add",
    "all-to-all": GROUPS,
    "collective-broadcast": GROUPS,
    "collective-permute": "source_target_pairs={{0,1},{1,2}}",
    "ragged-all-to-all": GROUPS,
    "reduce-scatter": f"{GROUPS}, dimensions={{0}}, to_apply=%add",
    "send": "channel_id=1",
    "collective-reduce": GROUPS,  # of jax 0.12
    "collective-of-a-later-release": GROUPS,
}
ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %b = f32[] parameter(1)
}"""


def test_the_opcodes_are_those_that_stablehlo_has():
    names = [name.removesuffix("Op") for name in vars(stablehlo) if name.endswith("Op")]
    opcodes = {re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower() for name in names}
    sending = {one for one in opcodes if re.match(r"all-|collective-|reduce-scatter|send", one)}
    assert sending <= OPCODES.keys()


@pytest.mark.parametrize("form", ["synchronous", "asynchronous", "wrapped"])
@pytest.mark.parametrize("opcode", sorted(OPCODES))
def test_every_opcode_that_communicates_is_read_or_reported(opcode, form):
    attributes = OPCODES[opcode]
    body = {
        "synchronous": f"ROOT %r = f32[64] {opcode}(%x), {attributes}",
        "asynchronous": f"""%s = (f32[64], f32[64]) {opcode}-start(%x), {attributes}
  ROOT %r = f32[64] {opcode}-done(%s)""",
        "wrapped": """%s = ((f32[64]), f32[64]) async-start(%x), calls=%wrapped
  ROOT %r = f32[64] async-done(%s)""",
    }[form]
    wrapped = f"""%wrapped (p: f32[64]) -> f32[64] {{
  %p = f32[64] parameter(0)
  ROOT %w = f32[64] {opcode}(%p), {attributes}
}}"""
    more = ADD + ("\n\n" + wrapped if form == "wrapped" else "")
    program = written(f"\n  {body}", more=more)()
    [one] = [*(each.op for each in program.collectives), *program.unread]
    assert one == OPS.get(opcode) or one.startswith(opcode)
