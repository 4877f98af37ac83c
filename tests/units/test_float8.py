"""Float8: scales, casts and matmuls; what is gathered in it; which matmuls of a model run in it."""

import warnings
from functools import partial
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
from reference import CASES, control, covering_params, gpt, traffic, train

import fsdp_jax as fsdp
from fsdp_jax.errors import SlowerWarning
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import Block
from fsdp_jax.planner import fake_devices, parse_topology
from fsdp_jax.sharding.strategy import STRATEGIES
from fsdp_jax.step.float8_matmuls import check_float8_matmuls, with_float8_matmuls
from fsdp_jax.step.train_step import train_step
from fsdp_jax.units import float8
from fsdp_jax.units.collectives import FLOAT8, gather_without_vjp

GATHER = {"gather": "float8_e4m3fn"}
MATMUL = {"matmul": "float8"}
FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


# Scales and casts


@pytest.mark.releases
@pytest.mark.parametrize(("dtype", "top"), [(float8.WEIGHT, 448.0), (float8.GRADIENT, 57344.0)])
@pytest.mark.parametrize("largest", [1.0, 1.75, 1.7500001, 3e38, 1e-30, 0.0])
def test_the_scale_is_the_least_power_of_two_that_fits(dtype, top, largest):
    values, scale = float8.quantize(jnp.array([largest, -largest / 3], jnp.float32), dtype)
    magnitude = float(jnp.abs(values.astype(jnp.float32)).max())
    assert np.frexp(float(scale))[0] == 0.5
    assert magnitude <= top
    assert magnitude >= top / 2 or not largest
    back = float8.dequantize(values, scale, FLOAT32)
    np.testing.assert_allclose(back, [largest, -largest / 3], rtol=0.0 if not largest else 0.13)


@pytest.mark.releases
@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", [float8.WEIGHT, float8.GRADIENT])
def test_what_is_not_finite_stays_so(dtype, bad):
    values, scale = float8.quantize(jnp.array([1.0, bad]), dtype)
    assert not jnp.isfinite(float8.dequantize(values, scale, FLOAT32)[1])


@pytest.mark.releases
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_what_was_cast_once_is_cast_again_to_the_same(dtype):
    x = jax.random.normal(jax.random.key(0), (64, 64), dtype) * 0.03
    once = float8.dequantize(*float8.quantize(x, float8.WEIGHT), dtype)
    twice = float8.dequantize(*float8.quantize(once, float8.WEIGHT), dtype)
    np.testing.assert_array_equal(once, twice)
    assert (once != x).any()


DIMS = [
    ((4, 8, 16), (16, 32), (((2,), (0,)), ((), ()))),
    ((4, 8, 2, 16), (16, 2, 32), (((3, 2), (0, 1)), ((), ()))),
    ((4, 8, 16), (5, 4, 16), (((2,), (2,)), ((0,), (1,)))),
    ((16, 3, 4), (8, 4, 16), (((0, 2), (2, 1)), ((), ()))),
]


@pytest.mark.releases
@pytest.mark.parametrize(("left", "right", "dims"), DIMS)
def test_a_matmul_and_its_gradients_differ_by_the_rounding_alone(left, right, dims):
    keys = jax.random.split(jax.random.key(1), 3)
    x, y = (jax.random.normal(k, s) for k, s in zip(keys[:2], (left, right), strict=True))
    exact, exact_vjp = jax.vjp(lambda x, y: lax.dot_general(x, y, dims), x, y)
    out, vjp = jax.vjp(lambda x, y: float8.dot(x, y, dims, FLOAT32), x, y)
    cotangent = jax.random.normal(keys[2], exact.shape)
    pairs = zip((exact, *exact_vjp(cotangent)), (out, *vjp(cotangent)), strict=True)
    for expected, found in pairs:
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        error = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
        assert 0.01 < error < 0.07


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
    spec, whole = annotated.param_spec, PartitionSpec()
    value = jax.random.normal(jax.random.key(0), sharded.layout.by_path[path].shape)
    shard = jax.device_put(value, NamedSharding(mesh, spec))
    by_hand = jax.shard_map(
        lambda x: gather_without_vjp(manual, x),
        mesh=mesh,
        in_specs=spec,
        out_specs=whole,
        check_vma=False,
    )
    expected = float8.dequantize(*float8.quantize(value, float8.WEIGHT), BFLOAT16)
    for found in (
        jax.jit(lambda x: gather_without_vjp(annotated, x))(shard),
        jax.jit(by_hand)(shard),
    ):
        assert found.dtype == BFLOAT16
        np.testing.assert_array_equal(found, expected)


@pytest.mark.releases
@pytest.mark.parametrize("local_batch", [True, False])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_kernels_are_gathered_again_in_the_backward_pass(remat, local_batch):
    sharded = sharded_gpt(fsdp.Precision(**GATHER, **MATMUL), remat=remat)
    step = sharded.make_train_step(next_token_loss, local_batch=local_batch)
    tokens = {"tokens": jax.ShapeDtypeStruct((16, 9), jnp.int32)}
    one = "all_gather" if local_batch else "optimization_barrier"
    found = traffic(sharded, step, tokens)
    kernels = [path for path in step.plan.comms if path.startswith("blocks") and "kernel" in path]
    assert {found[one, path] for path in kernels} == {4}


@pytest.mark.releases
@pytest.mark.parametrize("scan", [True, False])
def test_policies_save_the_matmuls_in_float8_that_they_save_otherwise(scan):
    counts = {}
    for remat in ("none", "selective", "dots", "full"):
        sharded = sharded_gpt(fsdp.Precision(**MATMUL), scan, remat=remat)
        plan = sharded.make_train_step(next_token_loss).plan
        tokens = {"tokens": jax.ShapeDtypeStruct((1, 8, 9), jnp.int32)}
        step = jax.make_jaxpr(partial(train_step, plan))(sharded.abstract_state(), tokens)
        counts[remat] = dots_in(step.jaxpr)[0]
    assert counts["none"] == counts["selective"] == counts["dots"] < counts["full"]


# Training

CASES_OF_PAIRS = covering_params(
    [("nnx-gpt-scanned", "linen-transformer"), tuple(STRATEGIES), ("gather", "both"), (False, True)]
)


@pytest.mark.parametrize(("case", "strategy", "what", "local_batch"), CASES_OF_PAIRS)
def test_losses_are_within_one_percent_of_float32(case, strategy, what, local_batch):
    mesh = fsdp.make_mesh(data=4, replica=2) if "hybrid" in strategy else fsdp.make_mesh(data=8)
    precision = fsdp.Precision(**GATHER, **(MATMUL if what == "both" else {}))
    settings = {"local_batch": local_batch, "precision": precision, "steps": 4}
    (losses, _), _ = train(CASES[case], mesh, strategy, **settings)
    expected = control(case, 1)[0][:4]
    np.testing.assert_allclose(losses, expected, rtol=1e-2)
    assert losses != expected


@pytest.mark.releases
def test_eight_devices_gather_and_multiply_what_one_does():
    precision = fsdp.Precision(**GATHER, **MATMUL)
    one = fsdp.make_mesh(data=1, devices=jax.devices()[:1])
    runs = [
        train(CASES["nnx-gpt-scanned"], mesh, steps=4, precision=precision)[0]
        for mesh in (one, fsdp.make_mesh(data=8))
    ]
    np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-5)
    for path, value in runs[0][1].items():
        np.testing.assert_allclose(value, runs[1][1][path], atol=1e-5, err_msg=path)


@pytest.mark.releases
def test_a_weight_that_came_in_float8_is_rounded_once():
    runs = [
        train(CASES["nnx-gpt-scanned"], fsdp.make_mesh(data=8), steps=4, precision=precision)[0]
        for precision in (fsdp.Precision(**MATMUL), fsdp.Precision(**MATMUL, **GATHER))
    ]
    assert runs[0][0] == runs[1][0]


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


W, X = jnp.ones((8, 8)), jnp.ones((4, 8))
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
    "scan": lambda w, x: lax.scan(lambda c, w: (c @ named(w), None), x, w[None])[0],
    "scan over the rows": lambda w, x: scan_rows(named(w), x),
}
LEFT = {
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda w: x @ named(w), lambda w: x, w),
    "a lookup": lambda w, x: named(w)[x[:, 0].astype(int)],
    "arithmetic first": lambda w, x: x @ (named(w) * 2),
}


@pytest.mark.releases
@pytest.mark.parametrize("name", TAKEN)
def test_a_matmul_that_takes_a_kernel_runs_in_float8(name):
    fn = TAKEN[name]
    assert float8_dots(fn, W, X) == (0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float8_dots(with_float8_matmuls(fn), W, X) == (1, 0)
    np.testing.assert_allclose(with_float8_matmuls(fn)(W, X), fn(W, X), rtol=1e-6)
    gradients = [jax.grad(lambda w, f=f: f(w, X).sum())(W) for f in (fn, with_float8_matmuls(fn))]
    np.testing.assert_allclose(*gradients, rtol=1e-6)


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


@pytest.mark.releases
@pytest.mark.parametrize("topology", ["a100-80gb:8", "v5p:2x2x2", "v6e:2x2", "v5e:2x4"])
def test_a_chip_without_float8_is_refused_by_its_name(topology):
    machine = parse_topology(topology)
    mesh = fsdp.make_mesh(data=machine.size, devices=fake_devices(machine))
    kind = machine.hardware.device_kinds[0]
    with pytest.raises(ValueError, match=rf"{kind} has no matrix units for float8"):
        sharded_gpt(fsdp.Precision(**MATMUL), mesh=mesh)
    arguments = sharded_gpt(fsdp.Precision(**GATHER), mesh=mesh).arguments
    assert arguments.precision.gather == "float8_e4m3fn"


@pytest.mark.releases
@pytest.mark.parametrize(
    ("kind", "capability", "has"),
    [
        ("NVIDIA H100 80GB HBM3", "9.0", True),
        ("NVIDIA B200", "10.0", True),
        ("NVIDIA L40S", "8.9", True),
        ("NVIDIA A10G", "8.6", False),
        ("TPU7x", None, True),
        ("TPU v3", None, False),
        ("AMD Instinct MI250X", "gfx90a", False),
    ],
)
def test_chips_are_judged_by_what_they_report(kind, capability, has):
    device = SimpleNamespace(device_kind=kind, platform="tpu" if "TPU" in kind else "gpu")
    if capability:
        device.compute_capability = capability
    if has:
        check_float8_matmuls(device)
        return
    with pytest.raises(ValueError, match=rf"{kind} has no matrix units for float8"):
        check_float8_matmuls(device)


@pytest.mark.releases
def test_float8_without_units_is_refused():
    with pytest.raises(ValueError, match=r"no unit has one(?s:.*)units="):
        sharded_gpt(fsdp.Precision(**GATHER), units="model")


@pytest.mark.releases
@pytest.mark.parametrize(("field", "name"), [("gather", "float8_e5m2"), ("matmul", "int8")])
def test_other_formats_are_refused(field, name):
    with pytest.raises(ValueError, match=rf"unknown dtype '{name}'(?s:.*)precision\.{field}"):
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
    sharded = fsdp.fully_shard(
        Stack(),
        optax.sgd(0.1),
        fsdp.make_mesh(data=8),
        units=["Convolutions"],
        inputs=inputs,
        precision=fsdp.Precision(**MATMUL),
        min_size=8,
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

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Layer(rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    sharded = fsdp.fully_shard(
        lambda rngs: Model(rngs),
        optax.sgd(0.1),
        fsdp.make_mesh(data=8),
        units=[Layer],
        precision=fsdp.Precision(**MATMUL),
        min_size=8,
    )
    step = sharded.make_train_step(lambda model, x: (jnp.sum(model(x) ** 2), x.shape[0]))
    found = dots_in(step.trace(jnp.ones((16, 16))).jaxpr)
    assert found == (6, 0)
