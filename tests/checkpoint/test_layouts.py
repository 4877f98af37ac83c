"""A checkpoint does not depend on the layout: any mesh and strategy restores the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import CASES, gpt, optimizer

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.tree import flatten

pytestmark = pytest.mark.releases

CASE = CASES["nnx-gpt-scanned"]

# (strategy, data, replica, compute dtype, units). Each restores what the one before has saved.
# zero1 in mixed precision computes with a copy that no other layout has.
CHAIN = [
    ("full_shard", 8, 1, "float32", CASE.units),
    ("full_shard", 4, 1, "float32", "model"),
    ("full_shard", 2, 1, "float32", "scan"),
    ("full_shard", 1, 1, "float32", CASE.units),
    ("full_shard", 8, 1, "bfloat16", CASE.units),
    ("hybrid_shard", 4, 2, "float32", CASE.units),
    ("no_shard", 8, 1, "bfloat16", CASE.units),
    ("zero1", 8, 1, "bfloat16", "scan"),
    ("zero1", 2, 1, "float32", "model"),
    ("shard_grad_op", 8, 1, "bfloat16", CASE.units),
    ("full_shard", 8, 1, "float32", CASE.units),
]


@functools.cache
def sharded(layout):
    strategy, data, replica, compute, units = CHAIN[layout]
    mesh = fsdp.make_mesh(data=data, replica=replica, devices=jax.devices()[: data * replica])
    precision = fsdp.Precision(compute=compute)
    return fsdp.fully_shard(
        gpt(True), optimizer(), mesh, strategy, units, min_size=8, precision=precision
    )


@functools.cache
def train_step(layout):
    return sharded(layout).make_train_step(CASE.loss)


def bits(state):
    leaves = flatten(state)
    data = {
        path: jax.random.key_data(leaf) if is_prng_key(leaf) else leaf
        for path, leaf in leaves.items()
    }
    return {path: np.asarray(leaf).tobytes() for path, leaf in data.items()}


@pytest.mark.long
def test_bits_survive_every_layout(tmp_path):
    model = sharded(0)
    state = model.init(seed=3)
    for i in range(2):  # the optimizer's state is not zero
        state, _ = train_step(0)(state, CASE.batch(i))
    expected = bits(model.to_checkpoint(state))
    with CheckpointStore(tmp_path, keep=99) as store:
        store.save(0, model.to_checkpoint(state), data={}, metadata={})
        for layout in range(1, len(CHAIN)):
            model = sharded(layout)
            plan = store.preflight(layout - 1, model.checkpoint_target())
            assert (plan.differences, plan.casts) == ((), ())
            saved, *_ = store.restore(layout - 1, model.checkpoint_target())
            state = model.from_checkpoint(saved)
            assert bits(model.to_checkpoint(state)) == expected, CHAIN[layout]
            for leaf, wanted in zip(
                jax.tree.leaves(state), jax.tree.leaves(model.abstract_state()), strict=True
            ):
                assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
            store.save(layout, model.to_checkpoint(state), data={}, metadata={})


@pytest.mark.parametrize(
    ("source", "restored", "rounding"),
    # another order of sums; bfloat16 is also rounded elsewhere
    [pytest.param(0, 5, 1e-5, marks=pytest.mark.long), (4, 7, 2e-3)],
    ids=["hybrid_shard", "zero1"],
)
def test_training_continues_in_another_layout(tmp_path, source, restored, rounding):
    batches = [CASE.batch(i) for i in range(4)]
    state = sharded(source).init()
    for batch in batches[:2]:
        state, _ = train_step(source)(state, batch)
    with CheckpointStore(tmp_path) as store:
        store.save(2, sharded(source).to_checkpoint(state), data={}, metadata={})
        saved, *_ = store.restore(2, sharded(restored).checkpoint_target())
    other_state = sharded(restored).from_checkpoint(saved)
    for batch in batches[2:]:
        state, metrics = train_step(source)(state, batch)
        other_state, other_metrics = train_step(restored)(other_state, batch)
        expected = pytest.approx(float(metrics["loss"]), rel=rounding)
        assert float(other_metrics["loss"]) == expected


def test_copies_are_not_saved(tmp_path):
    with (
        CheckpointStore(tmp_path) as store,
        pytest.raises(ValueError, match=r"copies[^$]*to_checkpoint\(state\)"),
    ):
        store.save(1, sharded(7).init(), data={}, metadata={})


def target(shape, dtype, devices, *spec):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*spec)))


@pytest.fixture
def store(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    rows, replicated = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
    state = {
        "w": jax.device_put(jax.random.normal(jax.random.key(0), (64, 32)), rows),
        "n": jax.device_put(jnp.arange(8), replicated),
        "key": jax.device_put(jax.random.key(1), replicated),
    }
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, data={}, metadata={})
        store.wait()
        yield store


def wanted(devices=8, **other):
    return {
        "w": target((64, 32), "float32", devices, "data"),
        "n": target((8,), "int32", devices),
        "key": target((), jax.random.key(0).dtype, devices),
    } | other


def test_preflight_counts_the_bytes_read_and_held(store):
    counter, key = 8 * 4, 2 * 4
    for devices in (8, 2):
        plan = store.preflight(1, wanted(devices))
        assert plan.read_bytes == 64 * 32 * 4 + counter + key, "a replicated array is read once"
        assert plan.device_bytes == 64 * 32 * 4 // devices + counter + key
        assert plan.host_bytes == 2 * plan.read_bytes, "bytes read and bytes kept"
        assert "into" in str(plan)
    plan.require_fit()


def test_a_cast_must_be_allowed_and_rounds_as_jax(store):
    narrow = wanted(w=target((64, 32), "bfloat16", 8, "data"))
    with pytest.raises(
        ValueError,
        match=r"w: expected bfloat16\[64,32\], got float32\[64,32\][^$]*fix: +allow_cast=True",
    ):
        store.restore(1, narrow)
    assert store.preflight(1, narrow, allow_cast=True).casts == (
        "w: float32[64,32] to bfloat16[64,32]",
    )
    found, *_ = store.restore(1, narrow, allow_cast=True)
    uncast, *_ = store.restore(1, wanted())
    assert found["w"].dtype == jnp.bfloat16
    assert (np.asarray(found["w"]) == np.asarray(uncast["w"].astype(jnp.bfloat16))).all()


def test_preflight_counts_all_of_every_saved_shard_that_is_read_in_part(store):
    plan = store.preflight(1, wanted(w=target((64, 32), "float32", 8, None, "data")))
    assert plan.read_bytes == 8 * 64 * 32 * 4 + 8 * 4 + 2 * 4
    narrow = store.preflight(1, wanted(w=target((64, 32), "bfloat16", 8, "data")), allow_cast=True)
    assert narrow.read_bytes == 64 * 32 * 4 + 8 * 4 + 2 * 4, "bytes of the saved dtype are read"
    assert narrow.device_bytes == 64 * 32 * 2 // 8 + 8 * 4 + 2 * 4


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"n": target((8,), "float32", 8)}, r"n: expected float32\[8\], got int32\[8\]\n"),
        (
            {"w": target((64, 33), "bfloat16", 8)},
            r"w: expected bfloat16\[64,33\], got float32\[64,32\]\n",
        ),
        ({"key": target((), "float32", 8)}, r"key: expected float32\[\], got key<fry>\[\]\n"),
        ({"new": target((2,), "float32", 8)}, r"new: expected float32\[2\], got nothing\n"),
    ],
)
def test_other_differences_are_refused_though_casts_are_allowed(store, other, line):
    with pytest.raises(ValueError, match=line) as refused:
        store.restore(1, wanted(**other), allow_cast=True)
    assert "allow_cast" not in str(refused.value)
