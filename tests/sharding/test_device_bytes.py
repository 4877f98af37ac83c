"""What each device holds: the shards' own bytes, in every kind of sharding.

Compiles one initialization: a layout is compared with what real arrays hold.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pages import Outline
from reference import gpt
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.sharding.device_bytes import REST


@pytest.fixture(scope="module")
def sharded():
    model = gpt(True, vocab_size=384, sequence_length=64, layers=2, width=64)
    mesh = fsdp.make_mesh(data=4, replica=2)
    return fsdp.fully_shard(model, optax.adamw(1e-3), mesh, "hybrid_shard", min_size=64)


def test_a_state_and_its_layout_hold_the_same(sharded):
    state = sharded.init(0)
    held = dict.fromkeys(range(8), 0)
    for array in jax.tree.leaves(state):
        for shard in array.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    (bar,) = fsdp.device_bytes(state).bars
    assert bar.name == "device 0-7"
    assert {bar.total} == set(held.values()) == {sharded.layout.per_device()}
    (planned,) = fsdp.device_bytes(sharded.layout).bars
    assert planned.total == bar.total
    assert planned.parts["params"] == bar.parts["params"] == sharded.layout.per_device("params")
    assert fsdp.device_bytes(sharded.abstract_state()).bars[0].total == bar.total
    Outline(fsdp.device_bytes(state).page())


def test_devices_that_hold_more_have_a_bar_of_their_own():
    devices = jax.devices()
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=devices[:4])
    arrays = {
        "w": jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("x"))),
        "b": jax.device_put(jnp.ones(3), devices[3]),
    }
    shown = fsdp.device_bytes(arrays)
    assert {bar.name: bar.total for bar in shown.bars} == {"device 0-2": 32, "device 3": 44}
    assert shown.title == "4 devices hold 140 B, at most 44 B each"


def test_entries_have_the_colours_of_other_views():
    shown = fsdp.device_bytes({"opt_state": jnp.ones(9), "params": jnp.ones(3), "x": jnp.ones(4)})
    assert shown.title == "1 device holds 64 B"
    colors = {kind.name: kind.color for kind in shown.used_kinds}
    assert colors == {"params": 0, "opt_state": 1, "x": 2}


def test_many_entries_and_512_devices_stay_readable():
    mesh = AbstractMesh((2, 256), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    spec = NamedSharding(mesh, P(None, "data"))
    arrays = {
        f"part_{n}": jax.ShapeDtypeStruct((n + 1, 512, 2, 2), jnp.float32, sharding=spec)
        for n in range(2000)
    }
    shown = fsdp.device_bytes(arrays)
    (bar,) = shown.bars
    assert bar.name == "device 0-511"
    assert bar.total == sum((n + 1) * 2 * 2 * 2 * 4 for n in range(2000))
    assert [kind.name for kind in shown.used_kinds][::5] == ["part_1999", REST]
    assert len(shown.page()) < 20_000


def test_what_has_no_devices_is_refused():
    for state, what, where in (
        ({}, "no arrays", None),
        ({"a": np.ones(3)}, "not an array with a sharding", "device_bytes, a"),
        (np.ones(3), "not an array with a sharding", "device_bytes"),
    ):
        with refused(what, where=where):
            fsdp.device_bytes(state)
    array = jnp.ones(3)
    array.delete()
    with refused("the array was donated"):
        fsdp.device_bytes([array])
