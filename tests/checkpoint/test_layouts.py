"""A checkpoint does not depend on the layout: any mesh and strategy restores the same bits.

Each layout compiles what makes its copies of restored parameters; steps are compiled in the long
test alone, which trains on from a restored state.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collected import collected
from random_states import bits, random_state, restore
from reference import CASES, gpt, optimizer
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore
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


@pytest.mark.parametrize(
    "chain", [[5, 7], pytest.param(range(len(CHAIN)), marks=pytest.mark.long)], ids=["two", "all"]
)
def test_bits_survive_every_layout(tmp_path, chain):
    saved = random_state(sharded(0))
    expected = bits(saved)
    with CheckpointStore(tmp_path, keep=99) as store:
        store.save(0, saved, data={}, metadata={}, finite=True)
        for step, layout in enumerate(chain):
            state = restore(store, step, sharded(layout))
            saved = sharded(layout).to_checkpoint(state)
            assert bits(saved) == expected, CHAIN[layout]
            store.save(step + 1, saved, data={}, metadata={}, finite=True)
            # What the step computes with is made of the parameters that were restored.
            params, copies = flatten(state.params), flatten(state.copies)
            assert bool(copies) == (CHAIN[layout][0] == "zero1" and CHAIN[layout][3] == "bfloat16")
            for path, copy in copies.items():
                rounded = np.asarray(params[path]).astype(jnp.bfloat16)
                assert np.array_equal(np.asarray(copy), rounded), path


def test_copies_are_not_saved(tmp_path):
    state = dataclasses.replace(random_state(sharded(7)), copies={"w": jnp.ones(2)})
    with CheckpointStore(tmp_path) as store, refused("copies", fix="to_checkpoint(state)"):
        store.save(1, state, data={}, metadata={})


def target(shape, dtype, devices, *spec):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*spec)))


@pytest.fixture
def store(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    rows, replicated = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
    state = {
        "w": jax.device_put(np.random.default_rng(0).normal(size=(64, 32)), rows),
        "n": jax.device_put(np.arange(8, dtype=np.int32), replicated),
        "key": jax.device_put(jax.random.key(1), replicated),
    }
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, data={}, metadata={}, finite=True)
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
    told = "w: expected bfloat16[64,32], got float32[64,32]"
    with refused(got=told, fix="allow_cast=True"):
        store.restore(1, narrow)
    assert store.preflight(1, narrow, allow_cast=True).casts == (
        "w: float32[64,32] to bfloat16[64,32]",
    )
    found, *_ = store.restore(1, narrow, allow_cast=True)
    uncast, *_ = store.restore(1, wanted())
    assert found["w"].dtype == jnp.bfloat16
    assert (np.asarray(found["w"]) == np.asarray(uncast["w"].astype(jnp.bfloat16))).all()


def test_preflight_counts_all_of_a_shard_that_is_read_in_part(store):
    plan = store.preflight(1, wanted(w=target((64, 32), "float32", 8, None, "data")))
    assert plan.read_bytes == 8 * 64 * 32 * 4 + 8 * 4 + 2 * 4
    narrow = store.preflight(1, wanted(w=target((64, 32), "bfloat16", 8, "data")), allow_cast=True)
    assert narrow.read_bytes == 64 * 32 * 4 + 8 * 4 + 2 * 4, "bytes of the saved dtype are read"
    assert narrow.device_bytes == 64 * 32 * 2 // 8 + 8 * 4 + 2 * 4


def test_other_differences_are_refused_though_casts_are_allowed(store):
    cases = [
        ({"n": target((8,), "float32", 8)}, "n: expected float32[8], got int32[8]"),
        (
            {"w": target((64, 33), "bfloat16", 8)},
            "w: expected bfloat16[64,33], got float32[64,32]",
        ),
        ({"key": target((), "float32", 8)}, "key: expected float32[], got key<fry>[]"),
        ({"new": target((2,), "float32", 8)}, "new: expected float32[2], got nothing"),
    ]
    with collected() as case:
        for other, line in cases:
            with case(line):
                with refused(got=line) as caught:
                    store.restore(1, wanted(**other), allow_cast=True)
                assert "allow_cast" not in str(caught.value)
