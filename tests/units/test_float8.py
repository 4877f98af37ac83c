"""Float8: scales, casts and matmuls; what is gathered in it; which matmuls of a model run in it.

Compiles a training run of a small model, for the distance of its losses from float32, and a few
functions: a trace has no rounding. All else is traced.
"""

import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from reference import (
    CASES,
    Chain,
    by_path,
    control,
    covering_params,
    gpt,
    on_eight,
    squares,
    traffic,
    train,
)
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.errors import SlowerWarning
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import Block
from fsdp_jax.planner import fake_devices, parse_topology
from fsdp_jax.sharding.mesh import mesh_axes
from fsdp_jax.sharding.strategy import STRATEGIES
from fsdp_jax.step.float8_matmuls import check_float8_matmuls, with_float8_matmuls
from fsdp_jax.step.train_step import train_step
from fsdp_jax.units import float8
from fsdp_jax.units.collectives import FLOAT8, _program_of, gather, gather_stored
from fsdp_jax.units.comm import ParamComm
from fsdp_jax.units.gather_transform import Float8Gather, GatherTransform

GATHER = {"gather": "float8_e4m3fn"}
MATMUL = {"matmul": "float8"}
FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


# Scales and casts


@jax.jit
def cast_and_back(x):
    """{dtype: (values, scale, what they stand for)}"""
    cast = {dtype: float8.quantize(x, dtype) for dtype in (float8.WEIGHT, float8.GRADIENT)}
    return {
        str(dtype): (values.astype(jnp.float32), scale, float8.dequantize(values, scale, FLOAT32))
        for dtype, (values, scale) in cast.items()
    }


@pytest.mark.releases
def test_the_scale_is_the_least_power_of_two_that_fits():
    tops = {str(float8.WEIGHT): 448.0, str(float8.GRADIENT): 57344.0}
    for largest in (1.0, 1.75, 1.7500001, 3e38, 1e-30, 0.0):
        x = np.array([largest, -largest / 3], np.float32)
        for dtype, (values, scale, back) in cast_and_back(x).items():
            magnitude, told = float(np.abs(values).max()), (dtype, largest)
            assert np.frexp(float(scale))[0] == 0.5, told
            assert magnitude <= tops[dtype], told
            assert magnitude >= tops[dtype] / 2 or not largest, told
            np.testing.assert_allclose(back, x, rtol=0.0 if not largest else 0.13, err_msg=told)


@pytest.mark.releases
def test_what_is_not_finite_stays_so():
    for bad in (np.inf, -np.inf, np.nan):
        for dtype, (*_, back) in cast_and_back(np.array([1.0, bad], np.float32)).items():
            assert not np.isfinite(back[1]), (dtype, bad)


@pytest.mark.releases
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_what_was_cast_once_is_cast_again_to_the_same(dtype):
    x = (np.random.default_rng(0).normal(size=(64, 64)) * 0.03).astype(dtype)
    cast = jax.jit(lambda x: float8.dequantize(*float8.quantize(x, float8.WEIGHT), dtype))
    once = np.asarray(cast(x))
    twice = np.asarray(cast(once))
    np.testing.assert_array_equal(once, twice)
    assert (once != x).any()


DIMS = [
    ((4, 8, 16), (16, 32), (((2,), (0,)), ((), ()))),
    ((4, 8, 2, 16), (16, 2, 32), (((3, 2), (0, 1)), ((), ()))),
    ((4, 8, 16), (5, 4, 16), (((2,), (2,)), ((0,), (1,)))),
    ((16, 3, 4), (8, 4, 16), (((0, 2), (2, 1)), ((), ()))),
]


@pytest.mark.releases
def test_a_matmul_and_its_gradients_differ_by_the_rounding_alone():
    rng = np.random.default_rng(1)

    @jax.jit
    def run(pairs):
        results = []
        for (x, y), (*_, dims) in zip(pairs, DIMS, strict=True):
            exact, exact_vjp = jax.vjp(lambda x, y, dims=dims: lax.dot_general(x, y, dims), x, y)
            out, vjp = jax.vjp(lambda x, y, dims=dims: float8.dot(x, y, dims, FLOAT32), x, y)
            cotangent = jnp.cos(7 * exact)
            results.append(((exact, *exact_vjp(cotangent)), (out, *vjp(cotangent))))
        return results

    shapes = [(left, right) for left, right, _ in DIMS]
    pairs = jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x[0], int),
    )
    for number, (exact, rounded) in enumerate(run(pairs)):
        for expected, found in zip(map(np.asarray, exact), map(np.asarray, rounded), strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
            assert 0.01 < error < 0.07, DIMS[number]


def test_a_matmul_of_given_float8_values_equals_one_that_casts():
    """The same bits in all results as from a cast of its own."""
    rng = np.random.default_rng(1)
    for left, right, dims in DIMS:
        x, y = (rng.normal(size=shape).astype(np.float32) for shape in (left, right))
        cast = [float8.quantize(each, float8.WEIGHT) for each in (x, y)]
        known = [(float8.as_bytes(values), scale) for values, scale in cast]
        results = []
        for sent in ((None, None), (known[0], None), (None, known[1])):
            # An operand whose values are known is not read.
            operands = [
                jnp.full_like(z, jnp.nan) if values else z
                for z, values in zip((x, y), sent, strict=True)
            ]
            out, vjp = jax.vjp(partial(float8.dot, dims=dims, dtype=FLOAT32, sent=sent), *operands)
            results.append((out, *vjp(jnp.cos(7 * out))))
        for found in results[1:]:
            jax.tree.map(np.testing.assert_array_equal, found, results[0])


# What is gathered


def sharded_gpt(precision, scan=True, strategy="full_shard", mesh=None, **settings):
    mesh = mesh or fsdp.make_mesh(data=8)
    settings = {"units": [Block], "min_size": 8, "precision": precision} | settings
    return fsdp.fully_shard(gpt(scan), optax.adam(1e-3), mesh, strategy, **settings)


def comms_of(sharded, **settings):
    return sharded.make_train_step(next_token_loss, **settings).plan.comms


@pytest.mark.releases
def test_kernels_of_units_are_sent_in_float8_and_nothing_else():
    comms = comms_of(sharded_gpt(fsdp.Precision(compute="bfloat16", **GATHER)))
    sent = {path: str(comm.transform.wire) for path, comm in comms.items()}
    kernels = {path for path, dtype in sent.items() if dtype == "float8_e4m3fn"}
    assert kernels == {path for path in sent if path.endswith("kernel") and path != "head/kernel"}
    assert sent["blocks/mlp/up/bias"] == sent["embed/embedding"] == "bfloat16"
    kept = fsdp.Precision(compute="bfloat16", keep_float32=("mlp/up",), **GATHER)
    comms = comms_of(sharded_gpt(kept))
    assert str(comms["blocks/mlp/up/kernel"].transform.wire) == "float32"


@pytest.mark.releases
def test_both_ways_to_communicate_gather_the_same_bits():
    sharded = sharded_gpt(fsdp.Precision(compute="bfloat16", **GATHER))
    path, mesh = "blocks/mlp/up/kernel", sharded.layout.mesh
    annotated, manual = (comms_of(sharded, local_batch=local)[path] for local in (False, True))
    spec, whole = annotated.shard_spec, PartitionSpec()
    shape = sharded.layout.by_path[path].shape
    value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    shard = jax.device_put(value, NamedSharding(mesh, spec))
    by_hand = jax.shard_map(
        lambda x: gather_stored(manual, x),
        mesh=mesh,
        in_specs=spec,
        out_specs=whole,
        check_vma=False,
    )
    expected = jax.jit(lambda x: float8.dequantize(*float8.quantize(x, float8.WEIGHT), BFLOAT16))(
        value
    )
    for found in (
        jax.jit(lambda x: gather_stored(annotated, x))(shard),
        jax.jit(by_hand)(shard),
    ):
        assert found.dtype == BFLOAT16
        np.testing.assert_array_equal(found, expected)


@pytest.mark.releases
@pytest.mark.parametrize(("remat", "local_batch"), [("none", True), ("full", False)])
def test_kernels_are_gathered_again_in_the_backward_pass(remat, local_batch):
    sharded = sharded_gpt(fsdp.Precision(**GATHER, **MATMUL), remat=remat)
    step = sharded.make_train_step(next_token_loss, local_batch=local_batch)
    tokens = {"tokens": jax.ShapeDtypeStruct((16, 9), jnp.int32)}
    one = "all_gather" if local_batch else "optimization_barrier"
    found = traffic(sharded, step, tokens)
    kernels = [path for path in step.plan.comms if path.startswith("blocks") and "kernel" in path]
    assert {found[one, path] for path in kernels} == {4}


@pytest.mark.releases
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.long)])
def test_policies_save_matmuls_in_float8_as_others(scan):
    counts = {}
    for remat in ("none", "selective", "dots", "full"):
        sharded = sharded_gpt(fsdp.Precision(**MATMUL), scan, remat=remat)
        plan = sharded.make_train_step(next_token_loss).plan
        tokens = {"tokens": jax.ShapeDtypeStruct((1, 8, 9), jnp.int32)}
        step = jax.make_jaxpr(partial(train_step, plan))(sharded.abstract_state(), tokens)
        counts[remat] = dots_in(step.jaxpr)[0]
    assert counts["none"] == counts["selective"] == counts["dots"] < counts["full"]


# Training


@cache
def run(case="nnx-gpt-scanned", strategy="full_shard", what="both", local_batch=False, devices=8):
    """Four steps: (losses, parameters)."""
    replica = 2 if "hybrid" in strategy else 1
    mesh = fsdp.make_mesh(devices // replica, replica, devices=jax.devices()[:devices])
    precision = {"gather": GATHER, "matmul": MATMUL, "both": GATHER | MATMUL}[what]
    settings = {"local_batch": local_batch, "precision": fsdp.Precision(**precision), "steps": 4}
    return train(CASES[case], mesh, strategy, **settings)[0]


CASES_OF_PAIRS = covering_params(
    [
        ("nnx-gpt-scanned", "linen-transformer"),
        tuple(STRATEGIES),
        ("gather", "both"),
        (False, True),
    ],
    first=[
        ("nnx-gpt-scanned", "full_shard", "both", False),
        ("linen-transformer", "hybrid_shard", "gather", True),
    ],
    quick=1,
)


@pytest.mark.parametrize(("case", "strategy", "what", "local_batch"), CASES_OF_PAIRS)
def test_losses_are_within_one_percent_of_float32(case, strategy, what, local_batch):
    losses, _ = run(case, strategy, what, local_batch)
    expected = control(case, 1)[0][:4]
    np.testing.assert_allclose(losses, expected, rtol=1e-2)
    assert losses != expected


@pytest.mark.long
@pytest.mark.releases
def test_eight_devices_gather_and_multiply_what_one_does():
    one, eight = run(devices=1), run()
    np.testing.assert_allclose(one[0], eight[0], rtol=1e-5)
    for path, value in one[1].items():
        np.testing.assert_allclose(value, eight[1][path], atol=1e-5, err_msg=path)


@pytest.mark.long
@pytest.mark.releases
def test_a_weight_that_came_in_float8_is_rounded_once():
    assert run(what="matmul")[0] == run(what="both")[0]


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        # What stays gathered is saved by `jax.checkpoint`, which rounds floats that it saves.
        ("nnx-gpt-unrolled", {"keep_gathered": 2, "prefetch": "none", "local_batch": True}),
        pytest.param(
            "nnx-gpt-scanned", {"keep_gathered": 1, "prefetch": "pre"}, marks=pytest.mark.long
        ),
        pytest.param(
            "linen-transformer", {"accumulation": 2, "local_batch": True}, marks=pytest.mark.long
        ),
        pytest.param(
            "nnx-gpt-scanned",
            {"offload": fsdp.Offload(params=True), "remat": "full"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_kernels_as_they_were_sent_train_as_those_that_are_cast_again(case, settings, monkeypatch):
    precision = fsdp.Precision(compute="bfloat16", **GATHER, **MATMUL)
    runs = []
    for _ in range(2):
        _program_of.cache_clear()
        runs.append(
            train(CASES[case], fsdp.make_mesh(data=8), precision=precision, steps=2, **settings)[0]
        )
        monkeypatch.setattr(ParamComm, "multiplied_as_sent", False)
    jax.tree.map(np.testing.assert_array_equal, *runs)
    assert np.isfinite(runs[0][0]).all()


@pytest.mark.long
@pytest.mark.releases
@pytest.mark.parametrize(
    ("layers", "prefetch"),
    [("scanned", "pre"), ("unrolled", "post")],
)
def test_prefetch_gathers_in_float8_ahead(layers, prefetch):
    settings = {"steps": 3, "local_batch": True}
    settings["precision"] = fsdp.Precision(**GATHER, **MATMUL)
    mesh = fsdp.make_mesh(data=8)
    case = CASES[f"nnx-gpt-{layers}"]
    (losses, _), _ = train(case, mesh, **settings)
    (found, _), step = train(case, mesh, prefetch=prefetch, **settings)
    assert any("kernel" in path for path in step.report.prefetch.prefetched)
    np.testing.assert_allclose(found, losses, rtol=1e-5)


def kernels_searched(jaxpr, in_loop=False):
    """Yields (parameter, whether it is in a loop) of each search for a gather's largest value."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("reduce_max", "pmax"):
            found = re.search(r"fsdp.gather\[(.*?)\]", str(eqn.source_info.name_stack))
            if found:
                yield found.group(1), in_loop
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from kernels_searched(inner, in_loop or eqn.primitive.name == "scan")


@pytest.mark.parametrize(
    ("prefetch", "local_batch", "offload", "in_loop"),
    [
        ("pre", True, None, False),
        ("post", False, None, False),
        ("none", True, None, True),
        ("pre", True, fsdp.Offload(params=True), True),  # fetched one layer at a time
    ],
)
def test_scales_of_prefetched_layers_are_computed_before_the_loop(
    prefetch, local_batch, offload, in_loop
):
    precision = fsdp.Precision(compute="bfloat16", **GATHER)
    sharded = sharded_gpt(precision, prefetch=prefetch, offload=offload)
    step = sharded.make_train_step(next_token_loss, local_batch=local_batch)
    jaxpr = step.trace({"tokens": jax.ShapeDtypeStruct((16, 9), jnp.int32)}).jaxpr
    found = set(kernels_searched(jaxpr))
    assert {path for path, _ in found} == {
        path for path, comm in step.plan.comms.items() if comm.transform.format
    }
    assert any(looped for _, looped in found) == in_loop


class Scanned(nnx.Module):
    """One stack of layers, in reverse order."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        def layer(x, linear):
            return jnp.tanh(linear(x))

        axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
        return nnx.scan(layer, reverse=True, **axes)(x, self.layers)


def test_prefetch_changes_no_bit_of_what_came_in_float8():
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    mesh = fsdp.make_mesh(data=2, devices=jax.devices()[:2])
    results = []
    for prefetch in ("none", "pre"):
        sharded = fsdp.fully_shard(
            lambda rngs: Scanned(rngs),
            optax.sgd(0.1),
            mesh,
            units=[nnx.Linear],
            min_size=8,
            precision=fsdp.Precision(**GATHER),
            prefetch=prefetch,
        )
        step = sharded.make_train_step(squares, local_batch=True)
        state, metrics = step(sharded.init(seed=0), {"x": x})
        results.append((metrics["loss"], by_path(sharded.to_checkpoint(state).params)))
    jax.tree.map(np.testing.assert_array_equal, *results)


# Which matmuls


def float8_dots(fn, *args):
    """Number of matmuls in float8, and of others, anywhere in a traced function."""
    return dots_in(jax.make_jaxpr(fn)(*args).jaxpr)


def dots_in(jaxpr):
    found = {True: 0, False: 0}

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found["float8" in str(eqn.invars[0].aval.dtype)] += 1
            for inner in jex.jaxprs_in_params(eqn.params):
                visit(inner)

    visit(jaxpr)
    return found[True], found[False]


def named(x, path="w"):
    return jax.ad_checkpoint.checkpoint_name(x, f"{FLOAT8}{path}]")


def scan_rows(w, x):
    return lax.scan(lambda carry, row: (carry, row @ w), 0, x)[1]


W, X = np.ones((8, 8), np.float32), np.ones((4, 8), np.float32)
TAKEN = {
    "at": lambda w, x: x @ named(w),
    "einsum": lambda w, x: jnp.einsum("ij,bj->bi", named(w), x),
    "transposed": lambda w, x: x @ named(w).T.reshape(8, 4, 2)[:, :2].reshape(8, 4),
    "another dim": lambda w, x: jnp.tensordot(x, named(w)[None], ((1,), (1,)))[:, 0],
    "cast": lambda w, x: x.astype(BFLOAT16) @ named(w).astype(BFLOAT16),
    "jit": lambda w, x: jax.jit(jnp.dot)(x, named(w)),
    "rearranged inside jit": lambda w, x: x @ jax.jit(jnp.transpose)(named(w)),
    "named inside a checkpoint": lambda w, x: x @ jax.checkpoint(lambda w: named(w).T)(w),
    "split": lambda w, x: x @ jnp.split(named(w), 2, 1)[0],
    "checkpoint": lambda w, x: jax.checkpoint(lambda w, x: x @ named(w))(w, x),
    "a checkpoint with a barrier for x": lambda w, x: jax.checkpoint(
        lambda w, x: x @ named(w), prevent_cse=(False, True)
    )(w, x),
    "scan": lambda w, x: lax.scan(lambda c, w: (c @ named(w), None), x, w[None])[0],
    "scan over the rows": lambda w, x: scan_rows(named(w), x),
}
LEFT = {
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda w: x @ named(w), lambda w: x, w),
    "a lookup": lambda w, x: named(w)[x[:, 0].astype(int)],
    "arithmetic first": lambda w, x: x @ (named(w) * 2),
    "an empty part": lambda w, x: x @ named(w)[:, :0],
}


@pytest.mark.releases
def test_a_matmul_that_takes_a_kernel_runs_in_float8():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {
            name: (float8_dots(fn, W, X), float8_dots(with_float8_matmuls(fn), W, X))
            for name, fn in TAKEN.items()
        }
    assert found == dict.fromkeys(TAKEN, ((0, 1), (1, 0)))

    @jax.jit
    def results(w, x):
        both = {name: (fn, with_float8_matmuls(fn)) for name, fn in TAKEN.items()}
        gradient = {
            n: [jax.grad(lambda w, f=f: f(w, x).sum())(w) for f in b] for n, b in both.items()
        }
        return {name: [f(w, x) for f in each] for name, each in both.items()}, gradient

    for kind in results(W, X):
        for name, (expected, rounded) in kind.items():
            np.testing.assert_allclose(rounded, expected, rtol=1e-6, err_msg=name)


def searches(fn, *args):
    """Number of searches for the largest value of an array: one for each cast to float8."""
    return str(jax.make_jaxpr(fn)(*args)).count("reduce_max")


@pytest.mark.releases
def test_a_matmul_takes_a_kernel_as_it_was_sent():
    """The same bits as from another cast, but where a scan slices it or a checkpoint returns it."""
    mesh = fsdp.make_mesh(data=8)
    axes, spec = mesh_axes(mesh), PartitionSpec("data")
    transform = Float8Gather(FLOAT32, FLOAT32, FLOAT32)
    as_sent = ParamComm(
        "w", None, W.shape, axes, spec, spec, transform, "annotated", float8_matmuls=True
    )
    twice = replace(as_sent, float8_matmuls=False)
    w, x = (np.random.default_rng(0).normal(size=each.shape).astype(np.float32) for each in (W, X))
    casts, results = {}, {}

    def losses(w, x, comm):
        return {
            name: with_float8_matmuls(lambda w, x, fn=fn: fn(gather(comm, w), x))(w, x).sum()
            for name, fn in TAKEN.items()
        }

    for comm in (as_sent, twice):
        both = jax.jit(jax.jacrev(partial(losses, comm=comm), (0, 1)))
        results[comm] = jax.jit(partial(losses, comm=comm))(w, x), both(w, x)
        for name, fn in TAKEN.items():
            run = with_float8_matmuls(lambda w, x, fn=fn, comm=comm: fn(gather(comm, w), x))
            casts.setdefault(name, []).append(searches(run, w, x))
    jax.tree.map(np.testing.assert_array_equal, results[as_sent], results[twice])
    again = {name for name, (few, many) in casts.items() if few == many}
    assert again == {"scan", "named inside a checkpoint"}
    assert all(few == many - 1 for name, (few, many) in casts.items() if name not in again)


@pytest.mark.parametrize(("compute", "sent"), [("bfloat16", True), ("float16", False)])
def test_float16_compute_casts_kernels_again(compute, sent):
    """So that a matmul multiplies what the rest of the model sees."""
    sharded = sharded_gpt(fsdp.Precision(compute=compute, **GATHER, **MATMUL))
    comm = comms_of(sharded)["blocks/mlp/up/kernel"]
    assert comm.multiplied_as_sent == sent
    # Another format is no operand of a float8 matmul.
    other = type("Int8Gather", (GatherTransform,), {"format": "int8"})(FLOAT32, FLOAT32, FLOAT32)
    assert not replace(comm, transform=other).multiplied_as_sent


class Experts(nnx.Module):
    """Layers side by side, of which each has a scale of its own."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))
        self.experts = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        return nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None))(self.experts, x).sum(0)


def test_kernels_that_are_mapped_over_are_cast_again():
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    losses, casts = [], []
    for precision in (MATMUL, GATHER | MATMUL):
        sharded = on_eight(
            lambda rngs: Experts(rngs), units=[nnx.Linear], precision=fsdp.Precision(**precision)
        )
        step = sharded.make_train_step(squares)
        losses.append(step(sharded.init(seed=0), {"x": x})[1]["loss"])
        casts.append(str(step.trace({"x": x}).jaxpr).count("reduce_max"))
    np.testing.assert_allclose(*losses, rtol=0.02)
    assert casts[1] > casts[0]  # those of the matmuls, and those of the gathers


@pytest.mark.releases
@pytest.mark.parametrize("name", LEFT)
def test_kernels_that_are_left_are_named(name):
    fn = LEFT[name]
    with pytest.warns(SlowerWarning, match="1 kernels are not multiplied with in float8: w;"):
        found = float8_dots(with_float8_matmuls(fn), W, X)
    assert found == float8_dots(fn, W, X)


@pytest.mark.releases
def test_matmuls_without_a_kernel_stay():
    both = with_float8_matmuls(lambda w, x: (x @ x.T) @ (x @ named(w)) @ w)
    assert float8_dots(both, W, X) == (1, 3)


# Refusals


CHIPS = {  # what a device reports: whether it has float8
    ("NVIDIA H100 80GB HBM3", "9.0"): True,
    ("NVIDIA B200", "10.0"): True,
    ("NVIDIA L40S", "8.9"): True,
    ("NVIDIA A10G", "8.6"): False,
    ("TPU7x", None): True,
    ("TPU v3", None): False,
    ("AMD Instinct MI250X", "gfx90a"): False,
}


@pytest.mark.releases
def test_a_chip_without_float8_is_refused_by_its_name():
    for topology in ("a100-80gb:8", "v5p:2x2x2"):
        machine = parse_topology(topology)
        mesh = fsdp.make_mesh(data=machine.size, devices=fake_devices(machine))
        kind = machine.hardware.device_kinds[0]
        with refused(f"{kind} has no matrix units for float8", where="precision.matmul"):
            sharded_gpt(fsdp.Precision(**MATMUL), mesh=mesh)
    arguments = sharded_gpt(fsdp.Precision(**GATHER), mesh=mesh).arguments
    assert arguments.precision.gather == "float8_e4m3fn"
    for (kind, capability), has in CHIPS.items():
        device = SimpleNamespace(device_kind=kind, platform="tpu" if "TPU" in kind else "gpu")
        if capability:
            device.compute_capability = capability
        with nullcontext() if has else refused(kind, where="precision.matmul"):
            check_float8_matmuls(device)


@pytest.mark.releases
def test_float8_without_units_and_other_formats_are_refused():
    with refused("no unit has one", fix="units="):
        sharded_gpt(fsdp.Precision(**GATHER), units="model")
    for field, name in (("gather", "float8_e5m2"), ("matmul", "int8")):
        with refused(f"unknown dtype '{name}'", where=f"precision.{field}"):
            fsdp.Precision(**{field: name})


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(nn.Conv(16, (3,))(x))


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Convolutions(name=f"layer_{i}")(x)
        return x


@pytest.mark.releases
def test_a_convolution_stays_and_is_named():
    inputs = (jax.ShapeDtypeStruct((8, 4, 16), jnp.float32),)
    sharded = on_eight(
        Stack(), units=["Convolutions"], inputs=inputs, precision=fsdp.Precision(**MATMUL)
    )
    step = sharded.make_train_step(lambda model, x: (jnp.sum(model(x) ** 2), x.shape[0]))
    with pytest.warns(SlowerWarning, match="2 kernels(?s:.*)layer_0/Conv_0/kernel"):
        step.lower(inputs[0])


@pytest.mark.releases
def test_nnx_layers_with_einsum_run_in_float8():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.mix = nnx.Einsum("bi,ij->bj", (16, 16), rngs=rngs)

        def __call__(self, x):
            return x + self.mix(x)

    sharded = on_eight(
        lambda rngs: Chain([Layer(rngs), Layer(rngs)]),
        units=[Layer],
        precision=fsdp.Precision(**MATMUL),
    )
    step = sharded.make_train_step(lambda model, x: (jnp.sum(model(x) ** 2), x.shape[0]))
    found = dots_in(step.trace(np.ones((16, 16), np.float32)).jaxpr)
    assert found == (6, 0)
