"""A mesh with an axis of the model's own: tensor parallelism by the annotations of a Llama.

Compiles and runs steps: how XLA partitions along an axis of the model's own shows in numbers alone.
"""

import contextlib
import dataclasses
import warnings
from functools import cache

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec
from processes import run_cluster
from reference import linen_loss, losses_of

import fsdp_jax as fsdp
from fsdp_jax.contract.contract import check_contract
from fsdp_jax.models.llama import Llama, LlamaConfig
from fsdp_jax.planner import parse_topology

pytestmark = pytest.mark.releases

SMALL = LlamaConfig(
    vocab_size=64, sequence_length=16, layers=2, width=32, heads=4, kv_heads=2, hidden=64
)
UNROLLED = dataclasses.replace(SMALL, scan_layers=False)
WIDE = dataclasses.replace(
    SMALL,
    vocab_size=4096,
    sequence_length=512,
    layers=3,
    width=1024,
    heads=8,
    kv_heads=8,
    hidden=2816,
)
COLUMNS, ROWS = (None, "tensor"), ("tensor", None)
TENSOR = {
    **dict.fromkeys(("attn/q", "attn/k", "attn/v", "mlp/gate", "mlp/up", "head"), COLUMNS),
    **dict.fromkeys(("attn/o", "mlp/down"), ROWS),
}  # the embedding has no annotation
STEPS = 3
RNG = np.random.default_rng(0)
BATCHES = [{"tokens": RNG.integers(0, 64, (16, 17))} for _ in range(STEPS)]


def annotated(config, constraint=None):
    """Returns a function that makes a Llama whose kernels carry the axes of Megatron."""

    class Constrained(Llama):
        def hidden_states(self, tokens_BT, **settings):
            x = super().hidden_states(tokens_BT, **settings)
            return x if constraint is None else jax.lax.with_sharding_constraint(x, constraint)

    def make(rngs):
        model = Constrained(config, rngs=rngs)
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            module = "/".join(map(str, path[-3:-1]))
            names = next((TENSOR[name] for name in TENSOR if module.endswith(name)), None)
            if names:
                variable.set_metadata(out_sharding=names)
        return model

    return make


def shard(mesh, strategy="full_shard", *, make=None, data="fsdp", **settings):
    make = make or annotated(SMALL)
    return fsdp.fully_shard(
        make, optax.adamw(1e-3), mesh, strategy, ["LlamaBlock"], data=data, min_size=0, **settings
    )


def train(sharded, config=None, **settings):
    """Losses from the initial values of one device, or if no config is given from its own."""
    step = sharded.make_train_step(linen_loss, **settings)
    return losses_of(step, sharded.init(0, params=config and initial(config)), BATCHES)[0]


@cache
def initial(config):
    """Parameters as the library draws them on one device."""
    one = fsdp.make_mesh(1, allow_fewer=True)
    sharded = shard(one, "no_shard", make=annotated(config), data="data")
    return jax.device_get(sharded.init(0).params)


@cache
def unsharded(config=SMALL):
    """Returns losses of the model on one device, without the library but for the initial values."""
    make = annotated(config)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param)
    nnx.replace_by_pure_dict(params, initial(config))
    tx = optax.adamw(1e-3)

    @jax.jit
    def step(params, opt_state, batch):
        def mean(params):
            total, count = linen_loss(nnx.merge(graphdef, params), batch)
            return total / count

        value, gradients = jax.value_and_grad(mean)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = jax.jit(tx.init)(params), []
    for batch in BATCHES:
        params, opt_state, value = step(params, opt_state, batch)
        losses.append(float(value))
    return losses


def mesh_of(shape=(4, 2), names=("fsdp", "tensor"), kind=AxisType.Explicit):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


REPLICAS = ("dp", "fsdp", "tensor")


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=() if name == "hybrid_shard" else pytest.mark.long)
        for name in fsdp.STRATEGIES
    ],
)
def test_tensor_annotations_compose_with_every_strategy(strategy):
    """Scanned layers, and unrolled ones with `full_shard`."""
    config = UNROLLED if strategy == "full_shard" else SMALL
    names = REPLICAS if fsdp.STRATEGIES[strategy].hybrid else ("fsdp", "tensor")
    mesh = mesh_of((2, 2, 2) if len(names) == 3 else (4, 2), names)
    replica = "dp" if "dp" in names else None
    prefetch = "pre" if fsdp.STRATEGIES[strategy].gathers_per_unit else "none"
    sharded = shard(mesh, strategy, make=annotated(config), replica=replica, prefetch=prefetch)
    losses = train(sharded, config, accumulation=2)
    np.testing.assert_allclose(losses, unsharded(config), rtol=1e-5)


def ambient(kind):
    """A mesh that is set around the calls, with axes of this kind; none if None."""
    return jax.set_mesh(mesh_of(kind=kind)) if kind else contextlib.nullcontext()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(None, marks=pytest.mark.long),
        pytest.param(AxisType.Auto, marks=pytest.mark.long),
        AxisType.Explicit,
    ],
)
def test_constraints_of_the_model_hold_with_any_ambient_mesh(kind):
    spec, expected = PartitionSpec("fsdp", None, "tensor"), unsharded(SMALL)
    with ambient(kind):
        losses = train(shard(mesh_of(), make=annotated(SMALL, spec)), SMALL)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.long
def test_an_ambient_mesh_is_used_beside_local_batches():
    expected = unsharded(SMALL)
    with jax.set_mesh(fsdp.make_mesh()):
        sharded = shard(fsdp.make_mesh(), data=None, make=annotated(SMALL))
        losses = train(sharded, SMALL, local_batch=True)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_state_bytes_are_those_of_both_axes():
    sharded = shard(mesh_of())
    layout, shards = sharded.layout, {COLUMNS: 8, ROWS: 8, None: 4}
    expected = 0
    for path, leaf in layout.by_path.items():
        module = path.rpartition("/")[0]
        names = next((TENSOR[name] for name in TENSOR if module.endswith(name)), None)
        assert leaf.bytes_per_device == leaf.bytes // shards[names], path
        expected += leaf.bytes // shards[names]
    assert layout.per_device("params") == expected
    assert layout.axes.shape == {"fsdp": 4, "tensor": 2}
    state = sharded.init(0)
    on_first = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.params)]
    assert sum(on_first) == expected
    assert layout.per_device("optimizer") == 2 * expected + 4  # and Adam's counter
    assert "P('fsdp', 'tensor')" in str(layout).replace("P(None, 'fsdp'", "P('fsdp'")


@pytest.mark.long
def test_contract_and_plan_hold_with_tensor_inside_each_host():
    mesh = Mesh(np.array(parse_topology("h100:2x8").devices()).reshape(2, 8), ("fsdp", "tensor"))
    settings = {"precision": fsdp.Precision(compute="bfloat16"), "prefetch": "none"}
    sharded = shard(mesh, make=annotated(WIDE), **settings)
    step = sharded.make_train_step(linen_loss)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 513), "int32")}
    contract = check_contract(step, batch)
    assert contract.holds, str(contract)
    assert "along 'tensor' the model itself sends" in str(contract)

    # Along fsdp: half of what a device holds of each matrix, gathered twice and reduced once.
    axes = {}
    for row in contract.rows():
        axes[row["axis"]] = axes.get(row["axis"], 0) + row["bytes"]
    declared = 0
    for path, leaf in sharded.layout.by_path.items():
        shape = leaf.grad_sharding.shard_shape(leaf.shape)
        gathered = 2 * 2 * np.prod(shape)  # elements, bfloat16
        times = 2 if path.startswith(("embed", "norm", "head")) else 3
        declared += times * gathered // 2
    assert contract.wire_bytes_limit == pytest.approx(declared, rel=1e-3)
    assert axes["fsdp"] == pytest.approx(declared, rel=0.02)
    assert contract.model_bytes == axes["tensor"] > 0

    # From virtual devices the plan keeps the size of `tensor`, and the rest is `fsdp`.
    on_cpu = shard(mesh_of(), make=annotated(WIDE), precision=fsdp.Precision(compute="bfloat16"))
    plan = on_cpu.plan("h100:2x8", linen_loss, batch, cache=False)
    assert plan.mesh == {"fsdp": 8, "tensor": 2}
    assert plan.valley_bytes < sharded.layout.per_device() * 1.05
    assert plan.peak_bytes > plan.valley_bytes
    assert any("more along 'tensor'" in note for note in plan.notes)


def test_results_are_computed_with_under_an_explicit_ambient_mesh():
    expected = unsharded(UNROLLED)
    with jax.set_mesh(mesh_of()):
        sharded = shard(mesh_of(), make=annotated(UNROLLED))
        state, tokens = sharded.init(0, initial(UNROLLED)), BATCHES[0]["tokens"][:, :8]
        total, count = sharded.make_eval_step(linen_loss)(state, BATCHES[0])
        assert float(total / count) == pytest.approx(expected[0], rel=1e-5)
        logits = sharded.apply(lambda model, tokens: model(tokens))(state, tokens)
        assert float((logits**2).sum()) > 0


def test_another_ambient_mesh_is_refused():
    with jax.set_mesh(mesh_of((2, 4))), pytest.raises(ValueError, match=r"another mesh is set"):
        shard(mesh_of())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda s: s.make_train_step(linen_loss, local_batch=True),
            "without axes of the model's own",
        ),
        (lambda s: s.plan("h100:8", linen_loss, BATCHES[0], analytic=True), "leave analytic out"),
        (lambda s: s.on(fsdp.make_mesh()), "no axis 'fsdp'"),
    ],
)
def test_what_needs_a_mesh_of_batch_axes_says_so(call, text):
    with pytest.raises(ValueError, match=text):
        call(shard(mesh_of()))


def test_an_axis_that_shards_nothing_is_reported():
    with pytest.warns(fsdp.SlowerWarning, match=r"axis 'dp': its 2 devices(.*)replica='dp'"):
        shard(mesh_of((2, 4), ("dp", "fsdp")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard(mesh_of((2, 4), ("dp", "fsdp")), replica="dp")


CLUSTER = """
import sys
import jax, numpy as np
from jax.sharding import Mesh
sys.path.insert(0, sys.argv[4])
import test_model_axes as t
rows = {"across": slice(None), "inside": slice(8 * process, 8 * process + 8)}
for where, shape in {"inside": (4, 2), "across": (2, 4)}.items():
    devices = np.array(jax.devices()).reshape(shape)
    names = ("fsdp", "tensor")
    if where == "across":  # devices of both processes hold the same rows
        devices = devices.T
    mesh = Mesh(devices, names)
    t.BATCHES = [{"tokens": b["tokens"][rows[where]]} for b in t.BATCHES_OF_ALL]
    with jax.set_mesh(mesh):
        losses = t.train(t.shard(mesh))
    print("losses", where, *losses, flush=True)
mesh = jax.make_mesh((8,), ("fsdp",))
t.BATCHES = [{"tokens": b["tokens"][rows["inside"]]} for b in t.BATCHES_OF_ALL]
make = t.annotated(t.SMALL, jax.sharding.PartitionSpec("fsdp"))
early, late = t.shard(mesh, make=make), t.shard(mesh)  # without an ambient mesh, split by hosts
jax.set_mesh(mesh)
try:
    t.train(early)
except ValueError as error:
    print("losses", "refused", "jax.set_mesh(mesh) before fully_shard" in str(error))
print("losses", "late", *t.train(late), flush=True)
print("losses", "plain", *t.train(t.shard(mesh, make=make)), flush=True)
print("losses", "local", *t.train(t.shard(mesh), local_batch=True), flush=True)
"""
BATCHES_OF_ALL = BATCHES


@pytest.mark.exhaustive
def test_an_ambient_mesh_works_on_several_hosts(tmp_path):
    here = __file__.rpartition("/")[0]
    for out in run_cluster(CLUSTER, here):
        lines = [line.split() for line in out.splitlines() if line.startswith("losses")]
        assert lines.pop(2) == ["losses", "refused", "True"]
        assert [line[1] for line in lines] == ["inside", "across", "late", "plain", "local"]
        for _, where, *losses in lines:
            np.testing.assert_allclose(np.float64(losses), unsharded(), rtol=1e-5, err_msg=where)


@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize("kind", [None, pytest.param(AxisType.Explicit, marks=pytest.mark.long)])
def test_a_pure_step_runs_in_a_jit_of_the_users_own(kind):
    expected = unsharded()
    sharded = shard(mesh_of(), make=annotated(SMALL, PartitionSpec("fsdp", None, "tensor")))
    with ambient(kind):
        shardings = sharded.state_shardings()
        step = jax.jit(
            sharded.pure_step(linen_loss),
            in_shardings=(shardings, None),
            out_shardings=(shardings, None),
        )
        losses, _ = losses_of(step, sharded.init(jax.random.key(0), initial(SMALL)), BATCHES)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
