"""A checkpoint belongs to no layout: whoever reads it, on whatever mesh, gets the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import CASES, gpt, optimizer

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.tree import flatten

pytestmark = pytest.mark.core

CASE = CASES["nnx-gpt-scanned"]
MIXED = fsdp.Precision(compute="bfloat16")

# Each restores what the one before has saved. zero1 in mixed precision computes with a copy that no
# other layout has.
CHAIN = [
    ("full_shard", {"data": 8}, "float32", CASE.units),
    ("full_shard", {"data": 4}, "float32", "model"),
    ("full_shard", {"data": 2}, "float32", "scan"),
    ("full_shard", {"data": 1}, "float32", CASE.units),
    ("full_shard", {"data": 8}, "bfloat16", CASE.units),
    ("hybrid_shard", {"data": 4, "replica": 2}, "float32", CASE.units),
    ("no_shard", {"data": 8}, "bfloat16", CASE.units),
    ("zero1", {"data": 8}, "bfloat16", "scan"),
    ("zero1", {"data": 2}, "float32", "model"),
    ("shard_grad_op", {"data": 8}, "bfloat16", CASE.units),
    ("full_shard", {"data": 8}, "float32", CASE.units),
]


def sharded(strategy, axes, compute, units):
    count = axes["data"] * axes.get("replica", 1)
    mesh = fsdp.make_mesh(**axes, devices=jax.devices()[:count])
    return fsdp.fully_shard(
        gpt(True),
        optimizer(),
        mesh,
        strategy,
        units,
        min_size=8,
        precision=fsdp.Precision(compute=compute),
    )


def bits(state):
    leaves = flatten(state)
    data = {
        p: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for p, x in leaves.items()
    }
    return {path: np.asarray(leaf).tobytes() for path, leaf in data.items()}


@pytest.mark.long
def test_bits_survive_every_layout(tmp_path):
    first, *rest = CHAIN
    model = sharded(*first)
    state = model.init(seed=3)
    step = model.train_step(CASE.loss)
    for i in range(2):  # the optimizer's state is not zero
        state, _ = step(state, CASE.batch(i))
    expected = bits(model.to_checkpoint(state))
    with CheckpointStore(tmp_path, keep=99) as store:
        store.save(0, model.to_checkpoint(state), data={}, metadata={})
        for at, layout in enumerate(rest):
            model = sharded(*layout)
            plan = store.preflight(at, model.checkpoint_target())
            assert (plan.differences, plan.casts) == ((), ())
            saved, *_ = store.restore(at, model.checkpoint_target())
            state = model.from_checkpoint(saved)
            assert bits(model.to_checkpoint(state)) == expected, layout
            for leaf, wanted in zip(
                jax.tree.leaves(state), jax.tree.leaves(model.abstract_state()), strict=True
            ):
                assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
            store.save(at + 1, model.to_checkpoint(state), data={}, metadata={})


@pytest.mark.parametrize("layout", [CHAIN[5], CHAIN[7]], ids=["hybrid_shard", "zero1"])
def test_another_layout_trains_on(tmp_path, layout):
    """Within the tolerance of another order of sums; bfloat16 is rounded elsewhere too."""
    compute = layout[2]
    one, other = sharded("full_shard", {"data": 8}, compute, CASE.units), sharded(*layout)
    batches = [CASE.batch(i) for i in range(4)]
    step, state = one.train_step(CASE.loss), one.init()
    for batch in batches[:2]:
        state, _ = step(state, batch)
    with CheckpointStore(tmp_path) as store:
        store.save(2, one.to_checkpoint(state), data={}, metadata={})
        store.wait()
        there = other.from_checkpoint(store.restore(2, other.checkpoint_target())[0])
    again = other.train_step(CASE.loss)
    for batch in batches[2:]:
        state, metrics = step(state, batch)
        there, found = again(there, batch)
        rounding = 1e-5 if compute == "float32" else 2e-3
        assert float(found["loss"]) == pytest.approx(float(metrics["loss"]), rel=rounding)


def test_copies_are_not_saved(tmp_path):
    model = sharded("zero1", {"data": 8}, "bfloat16", CASE.units)
    with (
        CheckpointStore(tmp_path) as store,
        pytest.raises(ValueError, match=r"copies[^$]*to_checkpoint\(state\)"),
    ):
        store.save(1, model.init(), data={}, metadata={})


def target(shape, dtype, devices, *spec):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*spec)))


@pytest.fixture
def store(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
    state = {
        "w": jax.device_put(jax.random.normal(jax.random.key(0), (64, 32)), rows),
        "n": jax.device_put(jnp.arange(8), whole),
        "key": jax.device_put(jax.random.key(1), whole),
    }
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, data={}, metadata={})
        store.wait()
        yield store


def wanted(devices=8, **other):
    whole = target((), jax.random.key(0).dtype, devices)
    return {
        "w": target((64, 32), "float32", devices, "data"),
        "n": target((8,), "int32", devices),
        "key": whole,
    } | other


def test_preflight_counts_what_is_read_and_held(store):
    counter, key = 8 * 4, 2 * 4
    for devices in (8, 2):
        plan = store.preflight(1, wanted(devices))
        assert plan.read_bytes == 64 * 32 * 4 + counter + key, "a replicated array is read once"
        assert plan.device_bytes == 64 * 32 * 4 // devices + counter + key
        assert plan.host_bytes == 2 * plan.read_bytes, (
            "what is read, and the part of it that is kept"
        )
        assert "into" in str(plan)
    plan.require_fit()


def test_a_cast_is_said_and_is_that_of_jax(store):
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
    whole, *_ = store.restore(1, wanted())
    assert found["w"].dtype == jnp.bfloat16
    assert (np.asarray(found["w"]) == np.asarray(whole["w"].astype(jnp.bfloat16))).all()


def test_preflight_counts_what_is_cut_through(store):
    """A part of another shape than those that were saved is read with all of each that it touches."""
    plan = store.preflight(1, wanted(w=target((64, 32), "float32", 8, None, "data")))
    assert plan.read_bytes == 8 * 64 * 32 * 4 + 8 * 4 + 2 * 4
    narrow = store.preflight(1, wanted(w=target((64, 32), "bfloat16", 8, "data")), allow_cast=True)
    assert narrow.read_bytes == 64 * 32 * 4 + 8 * 4 + 2 * 4, "what is read is what was written"
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
def test_what_no_cast_makes_fit(store, other, line):
    with pytest.raises(ValueError, match=line) as refused:
        store.restore(1, wanted(**other), allow_cast=True)
    assert "allow_cast" not in str(refused.value)
