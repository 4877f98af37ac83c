"""Prefetch changes when a parameter is gathered, never what is computed.

The first two tests compile steps and compare them with an unsharded run, in which nothing moves; of
their combinations each pair of values from any two axes is run at least once before a release, and
two of three in `make test-long`. How often what is gathered is read in the trace; once in a
compiled program, whose collectives XLA may have changed.
"""

import re
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from reference import (
    CNN,
    Case,
    LinenTransformer,
    check,
    covering_params,
    gpt,
    image_loss,
    linen_loss,
    make_model,
    optimizer,
    traffic,
    train,
    train_unsharded,
)

import fsdp_jax as fsdp
from fsdp_jax.compat import xla_flags
from fsdp_jax.hlo.collectives import read_collectives
from fsdp_jax.models import GPT, next_token_loss, preset
from fsdp_jax.models.gpt import Block
from fsdp_jax.sharding.mesh import mesh_axes, split_data
from fsdp_jax.step.xla_options import on_sparse_cores

pytestmark = [
    pytest.mark.releases,
    pytest.mark.filterwarnings("ignore::fsdp_jax.ReplicationWarning"),
]

STEPS = 3


class Images(CNN):
    """Without batch statistics."""

    norm_class = nnx.LayerNorm


MODELS = {
    "nnx-scanned": Case(gpt(True, layers=3), next_token_loss, (Block,)),
    "nnx-unrolled": Case(gpt(False, layers=3), next_token_loss, (Block,)),
    "linen-scanned": Case(LinenTransformer(layers=3), linen_loss, ("LinenBlock",)),
    "linen-unrolled": Case(LinenTransformer(scan=False, layers=3), linen_loss, ("LinenBlock",)),
    "cnn": Case(Images, image_loss, (nnx.Conv,), image=True),
}
MODES = ["none", "post", "pre"]
DTYPES = [
    ("float32", None),
    ("bfloat16", "float32"),
    ("float32", "bfloat16"),
]  # (compute, reduce)
REMATS = ["none", "full"]
ACCUMULATIONS = [(1, False), (2, False), (2, True)]
AXES = [list(MODELS), MODES, DTYPES, REMATS, ACCUMULATIONS]
# With `pre`, deferred reduction and each model and remat: the most demanding cases.
DEMANDING = [
    (model, "pre", DTYPES[0], REMATS[i % 2], ACCUMULATIONS[2]) for i, model in enumerate(MODELS)
]


@pytest.mark.parametrize(
    ("model", "prefetch", "dtypes", "remat", "accumulation"),
    covering_params(AXES, first=DEMANDING, quick=0),
)
def test_every_prefetch_mode_matches_an_unsharded_run(model, prefetch, dtypes, remat, accumulation):
    """float32 within rounding; bfloat16 (8 bits) within 2% of the loss, 2 learning rates a step."""
    case, (count, deferred) = MODELS[model], accumulation
    precision = fsdp.Precision(compute=dtypes[0], reduce=dtypes[1], output="float32")
    found, _ = train(
        case,
        fsdp.make_mesh(data=4, replica=2),
        "hybrid_shard",
        steps=STEPS,
        accumulation=count,
        deferred=deferred,
        local_batch=True,
        precision=precision,
        remat=remat,
        prefetch=prefetch,
    )
    exact = dtypes == ("float32", None)
    near = {} if exact else {"loss": 2e-2, "params": 2e-3 * STEPS}
    check(found, train_unsharded(case, count, steps=STEPS), **near)


# On the global batch, where XLA inserts the collectives. The first in each run of the tests.
# Of the strategies that gather no units, and so prefetch nothing, there is one.
GATHERING = [name for name, strategy in fsdp.STRATEGIES.items() if strategy.gathers_per_unit]
GLOBAL_AXES = [
    list(MODELS),
    ["pre", "post"],
    GATHERING,
    REMATS,
    [1, 2],
    [("float32", None), ("bfloat16", None)],
]
ON_GLOBAL_BATCH = [
    ("nnx-scanned", "pre", "hybrid_shard", "full", 2, DTYPES[0]),
    ("linen-scanned", "pre", "full_shard", "none", 1, DTYPES[0]),
]


@pytest.mark.parametrize(
    ("model", "prefetch", "strategy", "remat", "accumulation", "dtypes"),
    covering_params(GLOBAL_AXES, first=ON_GLOBAL_BATCH, quick=1),
)
def test_prefetch_on_the_global_batch_matches_an_unsharded_run(
    model, prefetch, strategy, remat, accumulation, dtypes
):
    """float32 within rounding; bfloat16 as above."""
    case = MODELS[model]
    precision = fsdp.Precision(compute=dtypes[0], output="float32")
    hybrid = "hybrid" in strategy
    mesh = fsdp.make_mesh(data=4, replica=2) if hybrid else fsdp.make_mesh(data=8)
    settings = {"prefetch": prefetch, "remat": remat, "precision": precision}
    found, _ = train(case, mesh, strategy, steps=STEPS, accumulation=accumulation, **settings)
    near = {} if dtypes[0] == "float32" else {"loss": 2e-2, "params": 2e-3 * STEPS}
    check(found, train_unsharded(case, accumulation, steps=STEPS), **near)


def prefetch_report(case, prefetch="pre", **settings):
    """What the trace of a step tells of its gathers."""
    sharded = fsdp.fully_shard(
        make_model(case),
        optimizer(),
        fsdp.make_mesh(data=8),
        units=case.units,
        prefetch=prefetch,
        **case.inputs,
    )
    step = sharded.make_train_step(case.loss, **settings)
    step.trace(case.batch(0))
    return step.report.prefetch


def test_prefetch_on_the_global_batch_moves_all_gathers():
    report = prefetch_report(MODELS["linen-unrolled"])
    assert report.prefetched
    assert not report.not_prefetched


# How often parameters are gathered

TOKENS = {"tokens": jax.ShapeDtypeStruct((16, 9), "int32")}
KERNELS = ("attn/qkv/kernel", "attn/out/kernel", "mlp/up/kernel", "mlp/down/kernel")


def gpt_step(scan, layers, prefetch, mesh=None, strategy="full_shard", **settings):
    model, mesh = gpt(scan, layers=layers), mesh or fsdp.make_mesh(data=8)
    sharded = fsdp.fully_shard(
        model, optax.adam(1e-3), mesh, strategy, (Block,), min_size=8, prefetch=prefetch
    )
    return sharded, sharded.make_train_step(next_token_loss, local_batch=True, **settings)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("scan", "layers", "prefetch"),
    [
        (True, 3, "pre"),
        (False, 3, "post"),
        pytest.param(True, 3, "none", marks=LONG),
        pytest.param(True, 3, "post", marks=LONG),
        pytest.param(False, 3, "pre", marks=LONG),
        pytest.param(False, 3, "none", marks=LONG),
        pytest.param(False, 2, "pre", marks=LONG),
        pytest.param(True, 2, "pre", marks=LONG),
    ],
)
def test_how_often_each_kernel_is_gathered_and_reduced(scan, layers, prefetch):
    """2 gathers a layer; with `pre` the last layer's parameters are kept for the backward pass."""
    sharded, step = gpt_step(scan, layers, prefetch)
    found = traffic(sharded, step, TOKENS)
    for kernel in KERNELS:
        paths = [f"blocks/{kernel}"] if scan else [f"blocks/{i}/{kernel}" for i in range(layers)]
        assert sum(found["all_gather", path] for path in paths) == 2 * layers - (prefetch == "pre")
        assert sum(found["reduce_scatter", path] for path in paths) == layers
        assert prefetch != "pre" or scan or found["all_gather", paths[-1]] == 1
    sent = {
        path
        for (operation, path), times in found.items()
        if operation in ("all_gather", "reduce_scatter") and times
    }
    assert sent == set(sharded.layout.by_path), "parameters alone are sent"


@pytest.mark.parametrize(
    ("prefetch", "more"),
    [("pre", 1), pytest.param("none", 0, marks=LONG), pytest.param("post", 0, marks=LONG)],
)
def test_how_often_a_gradient_is_summed_over_replicas(prefetch, more):
    """With `pre`, a trip after it is scattered: the first trip has none, and sums zeros."""
    mesh = fsdp.make_mesh(data=4, replica=2)
    sharded, step = gpt_step(True, 4, prefetch, mesh=mesh, strategy="hybrid_shard")
    found = traffic(sharded, step, TOKENS)
    assert found["reduce_scatter", "blocks/mlp/up/kernel"] == 4
    assert found["psum", "blocks/mlp/up/kernel"] == 4 + more


@pytest.mark.parametrize(
    ("scan", "prefetch"),
    [
        (True, "pre"),
        pytest.param(False, "post", marks=LONG),
        pytest.param(False, "pre", marks=LONG),
    ],
)
def test_deferred_reduction_reduces_each_gradient_once(scan, prefetch):
    found = traffic(*gpt_step(scan, 3, prefetch, accumulation=2, deferred_reduction=True), TOKENS)
    path, each = ("blocks/mlp/up/kernel", 3) if scan else ("blocks/1/mlp/up/kernel", 1)
    assert found["reduce_scatter", path] == 1
    assert found["all_gather", path] == 2 * (2 * each - (prefetch == "pre" and scan))


@pytest.mark.parametrize("prefetch", ["pre", pytest.param("post", marks=LONG)])
def test_the_compiled_program_gathers_what_the_traced_one_does(prefetch):
    """Parameters alone are gathered: no activation, no token."""
    sharded, step = gpt_step(True, 4, prefetch)
    program = read_collectives(step.compile(TOKENS).as_text(), sharded.layout.mesh.shape)
    assert not program.unread
    found = {}
    for one in program.collectives:
        if one.op == "all-reduce":
            assert set(one.shapes) == {()}, "the loss, its count and the gradient norm"
            continue
        assert set(one.paths) <= set(sharded.layout.by_path)
        for path in one.paths:
            found[one.op, path] = found.get((one.op, path), 0) + one.count
    for kernel in KERNELS:
        assert found["all-gather", f"blocks/{kernel}"] == 8 - (prefetch == "pre")
        assert found["reduce-scatter", f"blocks/{kernel}"] == 4


# Tori


def split(*sizes, replica=1):
    return split_data(mesh_axes(fsdp.make_mesh(data=8 // replica, replica=replica)), sizes)


@pytest.mark.parametrize(
    ("model", "sizes", "replica", "prefetch"),
    [
        pytest.param("nnx-scanned", (2, 4), 1, "pre", marks=pytest.mark.exhaustive),
        pytest.param("nnx-unrolled", (2, 2, 2), 1, "post", marks=pytest.mark.long),
        pytest.param("linen-scanned", (2, 2), 2, "pre", marks=pytest.mark.long),
        pytest.param("cnn", (4, 2), 1, "none", marks=pytest.mark.exhaustive),
    ],
)
def test_one_axis_of_a_torus_at_a_time_matches_an_unsharded_run(model, sizes, replica, prefetch):
    case, mesh = MODELS[model], split(*sizes, replica=replica)
    strategy = "hybrid_shard" if replica > 1 else "full_shard"
    found, step = train(case, mesh, strategy, steps=STEPS, local_batch=True, prefetch=prefetch)
    check(found, train_unsharded(case, steps=STEPS))
    assert all(comm.axes_at_once == "one" for comm in step.plan.comms.values())


@pytest.fixture
def sparse_cores(monkeypatch):
    """Virtual CPU devices communicate as TPUs do that have SparseCores."""
    monkeypatch.setattr(xla_flags, "OF_TPU", {"cpu": {}})


@pytest.mark.usefixtures("sparse_cores")
@pytest.mark.parametrize(
    ("model", "sizes", "replica", "prefetch"),
    [
        pytest.param("nnx-scanned", (2, 4), 1, "pre", marks=pytest.mark.exhaustive),
        pytest.param("linen-unrolled", (2, 2, 2), 1, "pre", marks=pytest.mark.exhaustive),
        pytest.param("linen-scanned", (2, 2), 2, "pre", marks=pytest.mark.long),
        pytest.param("nnx-scanned", (4, 2), 1, "post", marks=pytest.mark.long),
    ],
)
def test_all_mesh_axes_of_a_torus_at_once_match_an_unsharded_run(model, sizes, replica, prefetch):
    case, mesh = MODELS[model], split(*sizes, replica=replica)
    strategy = "hybrid_shard" if replica > 1 else "full_shard"
    found, step = train(case, mesh, strategy, steps=STEPS, local_batch=True, prefetch=prefetch)
    check(found, train_unsharded(case, steps=STEPS))
    assert all(comm.axes_at_once == "sparse_cores" for comm in step.plan.comms.values())


@pytest.mark.usefixtures("sparse_cores")
def test_sparse_cores_gather_along_all_mesh_axes_at_once():
    sharded, step = gpt_step(True, 3, "pre", mesh=split(2, 4))
    found = traffic(sharded, step, TOKENS)
    assert found["all_gather", "blocks/mlp/up/kernel"] == 6 - 1
    assert found["reduce_scatter", "blocks/mlp/up/kernel"] == 3
    once = gpt_step(True, 3, "none", mesh=split(2, 4), strategy="shard_grad_op")[1].plan
    assert not on_sparse_cores(once), "only what is gathered unit by unit was compiled so"
    # Whoever compiles the step without the options gets one axis at a time.
    pure = sharded.pure_step(next_token_loss, local_batch=True)
    gathers = re.findall(
        r"all_gather\[.*?axis_name=(\(.*?\))",
        str(jax.make_jaxpr(pure)(sharded.abstract_state(), TOKENS)),
        re.DOTALL,
    )
    assert set(gathers) == {"('data_0',)", "('data_1',)"}


@pytest.mark.long
def test_a_torus_gathers_along_one_mesh_axis_at_a_time():
    sharded, step = gpt_step(True, 3, "pre", mesh=split(2, 4))
    found = traffic(sharded, step, TOKENS)
    assert found["all_gather", "blocks/mlp/up/kernel"] == 2 * (6 - 1)
    assert found["reduce_scatter", "blocks/mlp/up/kernel"] == 2 * 3


# Losses


class Packed(Case):
    """Rows of two documents each, of different lengths."""

    def batch(self, step, rows=32):
        start = np.arange(rows)[:, None] % 8  # of the second document
        column = np.arange(8)[None]
        segments = (column >= start).astype(np.int32)
        positions = (column - start * segments).astype(np.int32)
        plain = Case(self.model, next_token_loss, self.units).batch(step, rows)
        return plain | {"segments": segments, "positions": positions}


def packed(scan):
    return Packed(gpt(scan, layers=3), partial(next_token_loss, chunk=12), (Block,))


@pytest.mark.parametrize(
    ("scan", "local_batch"), [(True, True), pytest.param(False, False, marks=LONG)]
)
def test_gathers_move_with_packed_rows_and_a_chunked_loss(scan, local_batch):
    assert not prefetch_report(packed(scan), local_batch=local_batch).not_prefetched


@pytest.mark.long
def test_packed_rows_and_a_chunked_loss_match_an_unsharded_run():
    """Every layer reads the segments; the loss has a custom derivative outside the layers."""
    case = packed(True)
    found, _ = train(case, fsdp.make_mesh(data=8), steps=STEPS, local_batch=True, prefetch="pre")
    check(found, train_unsharded(case, steps=STEPS))


# Randomness


@pytest.mark.long
def test_dropout_draws_the_same_numbers_in_every_prefetch_mode():
    case = Case(
        gpt(True, layers=3, dropout=0.5), lambda m, b: next_token_loss(m, b, train=True), (Block,)
    )
    mesh = fsdp.make_mesh(data=8)
    runs = {p: train(case, mesh, steps=2, local_batch=True, prefetch=p)[0] for p in MODES}
    for prefetch in ("post", "pre"):
        check(runs[prefetch], runs["none"])
    without = train(replace(case, loss=next_token_loss), mesh, steps=1)[0]
    assert abs(runs["none"][0][0] - without[0][0]) > 1e-3


def test_a_step_is_traced_at_most_three_times(monkeypatch):
    """The model, and the backward pass of a layer, whose calls are then read in place."""
    traced = []
    make_jaxpr = jax.make_jaxpr
    sharded = fsdp.fully_shard(
        lambda rngs: GPT(preset("tiny", layers=3, width=32), rngs=rngs),
        optax.adamw(1e-3),
        fsdp.make_mesh(8),
        units=[Block],
        prefetch="pre",
    )
    step = sharded.make_train_step(next_token_loss)

    def counted(fn, **settings):
        traced.append(fn)
        return make_jaxpr(fn, **settings)

    monkeypatch.setattr(jax, "make_jaxpr", counted)
    step.trace({"tokens": jax.ShapeDtypeStruct((8, 16), "int32")})
    assert step.report.prefetch.moved
    assert len(traced) <= 3
