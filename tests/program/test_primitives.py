"""Every row of `fsdp_jax/program/primitives.py`, traced by the jax that is installed."""

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fsdp_jax.program import equations, primitives
from fsdp_jax.program.primitives import PRIMITIVES, Primitive

pytestmark = pytest.mark.releases
X = np.linspace(0.1, 0.9, 32, dtype=np.float32).reshape(8, 4)
SQUARE = X[:4] @ X[:4].T + np.eye(4, dtype=np.float32)
BITS = np.arange(32, dtype=np.int32).reshape(8, 4)
MESH = Mesh(np.array(jax.devices()), ("d",))


def on_devices(fn: Callable[..., Any], check_vma: bool = False) -> Callable[..., Any]:
    """`fn` of each device's rows."""
    return jax.shard_map(fn, mesh=MESH, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma)


def gathered_invariant(x: Any) -> Any:
    return x + lax.all_gather(x, "d", to="invarying").sum()


def ragged_all_to_all(x: Any) -> Any:
    numbers = jnp.arange(8)
    return lax.ragged_all_to_all(x, jnp.zeros_like(x), *[numbers] * 4, axis_name="d")


def with_custom_vjp(x: Any) -> Any:
    fn = jax.custom_vjp(lambda x: 2 * x)
    fn.defvjp(lambda x: (2 * x, None), lambda _, cotangent: (2 * cotangent,))
    return fn(x)


def with_custom_jvp(x: Any) -> Any:
    fn = jax.custom_jvp(lambda x: 2 * x)
    fn.defjvp(lambda x, t: (2 * x[0], 2 * t[0]))
    return fn(x)


def with_ref(x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[0] = x[1]
    jax.ref.addupdate(ref, 0, x[2])
    return ref[...], jax.freeze(ref)


def cudnn_attention(fp8: bool, x: Any) -> Any:
    """cuDNN's attention. No public way traces it where there is no GPU."""
    module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "check_cudnn_version", lambda: 91000)
        patch.setattr(module, "check_compute_capability", lambda *_: True)
        if not fp8:
            q = jnp.ones((1, 64, 2, 64), jnp.bfloat16) * x[0, 0].astype(jnp.bfloat16)
            return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")
        q = jnp.ones((1, 128, 2, 64), jnp.float8_e4m3fn)
        scales = {name: jnp.ones((1, 1, 1, 1)) for name in module.fp8_params_keys}
        return module.dot_product_attention(q, q, q, fp8_params=scales, use_fp8=True)


def scaled_matmul(x: Any) -> Any:
    matrix, scales = jnp.ones((1, 4, 128), jnp.float8_e4m3fn), jnp.ones((1, 4, 4), "float8_e8m0fnu")
    return x[0, 0], jax.nn.scaled_matmul(matrix, matrix, scales, scales)


def copy_kernel(x: Any) -> Any:
    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...]

    block = pallas.BlockSpec((4, 4), lambda i: (i, 0))
    call = pallas.pallas_call(
        kernel, out_shape=x, grid=(2,), in_specs=[block], out_specs=block, name="mine"
    )
    return call(x)


# Of one array [8, 4] of floats between 0 and 1: a function that is traced to the primitive.
TRACED: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit(jnp.sin),
    "remat2": jax.checkpoint(jnp.sin),
    "custom_vjp_call": with_custom_vjp,
    "custom_jvp_call": with_custom_jvp,
    "shard_map": on_devices(jnp.sin),
    "scan": lambda x: lax.scan(lambda total, row: (total + row * x[0], total), x[0], x),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < x.sum(), lambda c: c + x, x),
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "dot_general": lambda x: x @ x.T,
    "conv_general_dilated": lambda x: lax.conv(
        x[None, None], x[None, None, :2, :2], (1, 1), "SAME"
    ),
    "ragged_dot_general": lambda x: lax.ragged_dot(x, jnp.ones((2, 4, 3)), jnp.array([4, 4])),
    "scaled_matmul_wrapper": scaled_matmul,
    "pallas_call": copy_kernel,
    "dot_product_attention_fwd_wrapper": partial(cudnn_attention, False),
    "dot_product_attention_fp8_fwd_wrapper": partial(cudnn_attention, True),
    "cholesky": lambda x: lax.linalg.cholesky(SQUARE * x[0, 0]),
    "eigh": lambda x: lax.linalg.eigh(SQUARE * x[0, 0]),
    "lu": lambda x: lax.linalg.lu(SQUARE * x[0, 0]),
    "qr": lambda x: lax.linalg.qr(x, full_matrices=False),
    "svd": lambda x: lax.linalg.svd(x, full_matrices=False),
    "triangular_solve": lambda x: lax.linalg.triangular_solve(SQUARE, x[:4]),
    "fft": jnp.fft.fft,
    "ffi_call": lambda x: jax.ffi.ffi_call("f", jax.ShapeDtypeStruct(x.shape, x.dtype))(x),
    "top_k": lambda x: lax.top_k(x, 2),
    "select_and_scatter_add": jax.grad(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum()
    ),
    "gather": lambda x: x[jnp.array([2, 1])],
    "argmax": lambda x: lax.argmax(x, 0, jnp.int32),
    "argmin": lambda x: lax.argmin(x, 0, jnp.int32),
    "reduce_and": lambda x: jnp.all(x > 0, axis=1),
    "reduce_or": lambda x: jnp.any(x > 0, axis=1),
    "reduce_sum": lambda x: x.sum(1),
    "reduce_max": lambda x: x.max(1),
    "reduce_min": lambda x: x.min(1),
    "reduce_prod": lambda x: x.prod(1),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:1], (BITS[0, 1], 0)),
    "scatter": lambda x: x.at[jnp.array([2, 1])].set(0.0),
    "scatter-add": lambda x: x.at[jnp.array([2, 1])].add(1.0),
    "all_gather": on_devices(lambda x: lax.all_gather(x, "d", tiled=True)[:1]),
    "psum": on_devices(lambda x: lax.psum(x, "d")),
    "psum_invariant": on_devices(lambda x: x + lax.psum(x, "d"), check_vma=True),
    "pmax": on_devices(lambda x: lax.pmax(x, "d")),
    "pmin": on_devices(lambda x: lax.pmin(x, "d")),
    "all_gather_invariant": on_devices(gathered_invariant, check_vma=True),
    "reduce_scatter": on_devices(
        lambda x: lax.psum_scatter(jnp.tile(x, (1, 2)), "d", scatter_dimension=1, tiled=True)
    ),
    "ppermute": on_devices(lambda x: lax.ppermute(x, "d", [(0, 1)])),
    "all_to_all": on_devices(lambda x: lax.all_to_all(jnp.tile(x, (8, 1)), "d", 0, 0)),
    "ragged_all_to_all": on_devices(ragged_all_to_all),
    "axis_index": on_devices(lambda x: x + lax.axis_index("d")),
    "reshape": lambda x: x.reshape(4, 8),
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "transpose": jnp.transpose,
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (3, 8, 4)),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "slice": lambda x: x[1:3],
    "split": lambda x: lax.split(x, (3, 5)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (BITS[0, 1], 0), (2, 4)),
    "name": lambda x: checkpoint_name(x, "mine"),
    "layout_constraint": lambda x: with_layout_constraint(x, Layout((0, 1))),
    "rev": lambda x: lax.rev(x, (0,)),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 23),
    "copy": jnp.copy,
    "stop_gradient": lax.stop_gradient,
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "sharding_constraint": lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P("d"))),
    "optimization_barrier": lax.optimization_barrier,
    "device_put": jax.device_put,
    "add_any": jax.grad(lambda x: (jnp.sin(x) * jnp.cos(x)).sum()),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "is_finite": lax.is_finite,
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "clamp": lambda x: lax.clamp(0.2, x, 0.8),
    "select_n": lambda x: lax.select_n(x > 0.5, x, -x),
    "not": lambda x: ~(x > 0.5),
    "round": lax.round,
    "iota": lambda x: lax.iota(jnp.float32, 4),
    "sort": lambda x: lax.sort(x),
} | dict.fromkeys(["new_ref", "get", "swap", "addupdate", "freeze"], with_ref)
# The parameters that are read of operations of a primitive, by the functions of `equations`.
PARAMETERS = {
    "jit": "in_shardings out_shardings name jaxpr",
    "remat2": "policy prevent_cse differentiated jaxpr",
    "shard_map": "mesh in_specs jaxpr",
    "scan": "length reverse unroll jaxpr",
    "while": "cond_jaxpr body_jaxpr cond_nconsts body_nconsts",
    "cond": "branches",
    "dot_general": "dimension_numbers out_sharding",
    "pallas_call": "grid_mapping jaxpr",
    "reshape": "dimensions new_sizes",
    "broadcast_in_dim": "broadcast_dimensions shape",
    "iota": "dimension shape",
    "name": "name",
    "sharding_constraint": "sharding",
    "reduce_scatter": "scatter_dimension",
} | {row.name: "axes" for row in PRIMITIVES.values() if row.reduces}


def traced_by(name: str) -> Callable[[Any], Any]:
    """The function that is traced to a primitive: by default that of `lax` with its name."""
    if name in TRACED:
        return TRACED[name]
    fn = getattr(lax, f"bitwise_{name}" if name in ("and", "or", "xor") else name)
    array = BITS if name in ("and", "or", "xor", "shift_right_logical") else X
    binary = "and or xor add sub mul div rem max min eq ne ge gt le lt pow atan2 nextafter"
    if name in [*binary.split(), "shift_right_logical"]:
        return lambda x: fn(array + x.astype(array.dtype), array + array)
    return lambda x: fn(x)


def equations_of(name: str) -> list[Any]:
    """The equations of a primitive in the trace of its function."""
    program = jax.make_jaxpr(traced_by(name))(X).jaxpr
    return [x for x in equations.all_eqns(program) if equations.primitive_of(x).name == name]


MEND = f"""jax {jax.__version__} has changed: mend these rows of
fsdp_jax/program/primitives.py, and what reads them in fsdp_jax/program/equations.py"""


def test_every_row_is_as_jax_traces_it():
    wrong = [text for name in PRIMITIVES for text in wrong_in_trace(name)]
    assert wrong == [], MEND


@pytest.mark.long
def test_values_are_as_the_rows_say():
    """Runs one small program for each primitive: of elements and sums a trace says nothing."""
    assert {name: found for name in PRIMITIVES if (found := wrong_in_values(name))} == {}, MEND


def wrong_in_trace(name: str) -> list[str]:
    """What the row of a primitive and `PARAMETERS` say of its operations, and is not so."""
    eqns = equations_of(name)
    if not eqns:
        return [f"{name}: the trace of its function has none"]
    missing = set(PARAMETERS.get(name, "").split()) - eqns[0].params.keys()
    wrong = [f"it has no {parameter}" for parameter in sorted(missing)]
    return [f"{name}: {each}" for each in wrong + wrong_about(PRIMITIVES[name], eqns[0])]


def wrong_in_values(name: str) -> list[str]:
    row = PRIMITIVES[name]
    seen = (row.elementwise or row.rearranges or row.linear) and row not in UNSEEN
    return wrong_values(row, equations_of(name)[0]) if seen else []


def wrong_about(row: Primitive, eqn: Any) -> list[str]:
    """What the row of a primitive says of its operations, and is not so of an equation."""
    inputs, outputs = ([v.aval for v in each] for each in (eqn.invars, eqn.outvars))
    refs = [aval for aval in (*inputs, *outputs) if hasattr(aval, "inner_aval")]
    wrong = []
    if bool(refs) != row.mutates:
        wrong.append("mutable arrays")
    if row.memory == "inlined" and len(equations.body_of(eqn)[0].invars) != len(inputs):
        wrong.append("what the program inside is given")
    if row.memory == "loop" and not equations.bodies(eqn):
        wrong.append("it runs no program")
    if row.memory == "alias" and inputs[0].size != outputs[0].size:
        wrong.append("its result has another size")
    if row.memory == "update" and inputs[0].shape != outputs[0].shape:
        wrong.append("its result is not like the first operand")
    if row.elementwise and has_derivative(eqn) == row.zero_derivative:
        wrong.append("its derivative")
    if row.slices and inputs[0].size <= outputs[0].size:
        wrong.append("it reads no more than it returns")
    if row.reduces and not equations.keeps_rows(eqn, eqn.invars):
        wrong.append("the dims that it reduces")
    if row.collective and "d" not in equations.collective_axes(eqn):
        wrong.append(f"its axes are {equations.collective_axes(eqn)}")
    return wrong


def has_derivative(eqn: Any) -> bool:
    """Whether the tangent of a result depends on those of the operands, as jax traces it.

    True where there is none to ask for: other dtypes, and primitives that cannot be differentiated.
    """
    if not all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (*eqn.invars, *eqn.outvars)):
        return True
    invars = list(dict.fromkeys(equations.reads(eqn)))
    args = [numbers(v.aval) for v in invars]

    def results(*values: Any) -> Any:
        operands = equations.values_of(dict(zip(invars, values, strict=True)), eqn.invars)
        return eqn.primitive.bind(*operands, **eqn.params)

    try:
        traced = jax.make_jaxpr(lambda tangents: jax.jvp(results, args, tangents)[1])(args).jaxpr
    except (NotImplementedError, TypeError):
        return True
    needed = equations.equations_for(traced, traced.outvars, lambda _: False)
    reads = {*traced.outvars, *(v for each in needed for v in equations.reads(each))}
    return not reads.isdisjoint(traced.invars)


# The values are the same, and how they are sharded or named is not seen.
UNSEEN = (primitives.CONSTRAINT, primitives.NAME)


def wrong_values(row: Primitive, eqn: Any) -> list[str]:
    """Runs an equation on arrays: what it says of elements, and of sums."""
    invars = list(dict.fromkeys(equations.reads(eqn)))
    values = [numbers(v.aval) for v in invars]

    def results(values: list[Any]) -> np.ndarray:
        args = equations.values_of(dict(zip(invars, values, strict=True)), eqn.invars)
        out = eqn.primitive.bind(*args, **eqn.params)
        return np.asarray(out[-1] if eqn.primitive.multiple_results else out)

    result = results(values)
    if row.linear:
        others = [-2 * x[::-1] for x in values]
        sums = [x + y for x, y in zip(values, others, strict=True)]
        if not np.array_equal(results(sums), result + results(others)):
            return ["it is not linear"]
    if not (row.elementwise or row.rearranges):
        return []
    if row.rearranges:
        kept = np.isin(result.astype(np.float32), np.asarray(values[0]).astype(result.dtype))
        return [] if kept.all() else ["it makes new values"]
    changed = results([x.at[-1].set(x[0]) if x.ndim else x for x in values])  # the last row alone
    return [] if np.array_equal(result[:-1], changed[:-1]) else ["it mixes elements"]


def numbers(aval: Any) -> jax.Array:
    """An array of small numbers, different ones."""
    count = int(np.prod(aval.shape))
    if aval.dtype == bool:
        return jnp.arange(count).reshape(aval.shape) % 2 == 0
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return jnp.arange(count, dtype=aval.dtype).reshape(aval.shape) % 5
    return ((jnp.arange(count) % 37 + 1) / 64).astype(aval.dtype).reshape(aval.shape)


def test_a_primitive_without_a_row_has_no_property():
    (eqn,) = jax.make_jaxpr(lax.erf_inv)(X).jaxpr.eqns
    assert equations.primitive_of(eqn) == Primitive("erf_inv")


def test_scans_while_loops_and_branches_are_taken_apart():
    (eqn,) = equations_of("scan")
    consts, carry, xs = equations.split_scan(eqn, eqn.invars)
    assert [[v.aval.shape for v in each] for each in (consts, carry, xs)] == [
        [(8, 4)],
        [(4,)],
        [(8, 4)],
    ]
    assert equations.scan_arguments(eqn) == {"length": 8, "reverse": False, "unroll": 1}
    assert equations.trips_of(eqn) == 8
    (eqn,) = equations_of("while")
    (cond, cond_consts), (body, body_consts), carry = equations.while_parts(eqn, eqn.invars)
    assert [len(x) for x in (cond_consts, body_consts, carry)] == [1, 1, 1]
    assert [v.aval.shape for v in (*cond.outvars, *body.outvars)] == [(), (8, 4)]
    (eqn,) = equations_of("cond")
    assert equations.is_branch(eqn)
    assert len(equations.branches_of(eqn)) == 2
    by_platform = partial(lax.platform_dependent, cpu=jnp.sin, default=jnp.cos)
    assert not any(map(equations.is_branch, jax.make_jaxpr(by_platform)(X).jaxpr.eqns))


def test_a_kernel_tells_its_name_and_grid():
    (eqn,) = jax.make_jaxpr(copy_kernel)(X).jaxpr.eqns
    assert (equations.trips_of(eqn), "mine" in str(equations.function_name(eqn))) == (2, True)


def table() -> str:
    """The table of the page: primitives that have the same properties in a row."""
    rows: dict[str, list[str]] = {}
    for row in PRIMITIVES.values():
        names = ("elementwise", "transcendental", "rearranges", "linear", "zero_derivative")
        names += ("slices", "reduces", "matmul", "fused_kernel", "mutates", "scoped", "recomputed")
        told = [row.memory, *(name for name in names if getattr(row, name))]
        told += [f"{row.collective} after"] if row.collective else []
        rows.setdefault(", ".join(told).replace("_", " "), []).append(f"`{row.name}`")
    return "\n".join(f"| {' '.join(names)} | {told} |" for told, names in rows.items())


def test_the_page_has_the_table():
    page = Path(__file__).parents[2] / "docs/design/traced-programs.md"
    assert table() in page.read_text(), f"its table is to be\n{table()}"
