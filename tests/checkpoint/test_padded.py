"""Arrays that the devices do not divide: checkpoints, exports and imports have their own shapes.

Each number of devices compiles what completes a restored state, and one an `init` from weights;
states are random numbers, so that no step is compiled.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flips import flip_byte
from orbax.checkpoint import v1 as orbax
from random_states import bits, random_state, restore
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointError, CheckpointStore, export_params, import_params
from fsdp_jax.checkpoint import store as module
from fsdp_jax.checkpoint.arrays import not_finite
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.sharding.padding import Padded, stored_array, stored_shape
from fsdp_jax.tree import flatten

WIDTH, HIDDEN, LAYERS = 40, 56, 3
OPTIMIZERS = {
    "adam": optax.adamw(0.01),
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=8),
}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.wide = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.narrow = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.narrow(jnp.tanh(self.wide(x)))


class Model(nnx.Module):
    """Stacked layers, and a table of which seven and eight devices have shards of zeros alone."""

    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (9, 9)))
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))
        self.blocks = make(rngs)


@functools.cache
def sharded(devices, optimizer="adam"):
    mesh = fsdp.make_mesh(data=devices, devices=jax.devices()[:devices])
    tx = OPTIMIZERS[optimizer]
    return fsdp.fully_shard(lambda rngs: Model(rngs), tx, mesh, "full_shard", [Block], min_size=8)


def padded_of(tree):
    return {path: leaf for path, leaf in flatten(tree).items() if isinstance(leaf, Padded)}


def assert_zeros_behind(padded):
    for path, leaf in padded.items():
        whole = np.array(leaf.array)
        assert whole.shape != leaf.shape
        whole[tuple(map(slice, leaf.shape))] = 0
        assert not whole.view(np.uint8).any(), path


@pytest.mark.parametrize(
    "counts", [(7, 8), pytest.param((6, 7, 5, 8, 7), marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bits_survive_any_number_of_devices(tmp_path, optimizer, counts):
    """The first checkpoint is one of an older release, which padded nothing."""
    saved = random_state(sharded(8, optimizer))
    expected = bits(saved)
    with CheckpointStore(tmp_path, keep=99) as store:
        store.save(0, saved, data={}, metadata={}, finite=True)
        for step, devices in enumerate(counts):
            model = sharded(devices, optimizer)
            saved = model.to_checkpoint(restore(store, step, model))
            assert bits(saved) == expected, devices
            assert len(padded_of(saved)) > (0 if devices == 8 else 5)
            assert_zeros_behind(padded_of(saved))
            store.save(step + 1, saved, data={}, metadata={}, finite=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{devices: the store of a run with as many}, with the same numbers in step 0."""
    folder = tmp_path_factory.mktemp("saved")
    state, stores = random_state(sharded(8)), {}
    with CheckpointStore(folder / "whole") as whole:
        whole.save(0, state, data={}, metadata={}, finite=True)
        for devices in (7, 8):
            model = sharded(devices)
            state = model.to_checkpoint(restore(whole, 0, model))
            stores[devices] = CheckpointStore(folder / str(devices), asynchronous=False)
            stores[devices].save(0, state, data={}, metadata={}, finite=True)
    yield stores
    for store in stores.values():
        store.close()


def test_files_have_the_arrays_own_shapes(saved):
    """As any reader of orbax's files finds them."""
    manifests = []
    for devices, store in saved.items():
        manifests.append(store.record(0))
        assert store.check(0).good
        found = orbax.metadata(store.path(0)).metadata
        own = flatten(sharded(devices).checkpoint_target())
        leaves = {p: leaf for p, leaf in own.items() if not is_prng_key(leaf)}
        assert {p: found[p].shape for p in leaves} == {p: x.shape for p, x in leaves.items()}
    assert manifests[0]["leaves"] == manifests[1]["leaves"]
    assert manifests[0]["shards"] != manifests[1]["shards"]


def small(shape=(9, 3), fill=None, dtype="float32"):
    """A padded array over 8 devices, of which 3 have nothing but zeros, and its target."""
    rows = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P("data"))
    own = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    if fill is not None:
        own[-1, -1] = fill
    stored = np.pad(own, [(0, -shape[0] % 8), (0, 0)])
    target = jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
    return Padded(jax.device_put(stored, rows), shape), target


def test_nonfinite_values_of_padded_arrays_are_found(tmp_path):
    arrays = [small(fill=fill) for fill in (None, np.nan, np.inf)]
    named = {str(number): array for number, (array, _) in enumerate(arrays)}
    assert not_finite(named) == ["1", "2"]
    with CheckpointStore(tmp_path) as store:
        for step, (array, target) in enumerate(arrays):
            store.save(step, {"w": array}, data={}, metadata={})
            store.wait()
            assert store.record(step)["finite"] is (step == 0)
            found, *_ = store.restore(step, {"w": target})
            assert np.array_equal(np.asarray(found["w"])[:9], np.asarray(array), equal_nan=True)


def test_chunks_of_padded_arrays_may_be_smaller_than_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 64)
    padded, _ = small((45, 4), dtype="float32")
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"w": padded}, data={}, metadata={}, finite=True)
        store.wait()
        metadata = orbax.metadata(tmp_path / "1").metadata["w"]
        assert metadata.shape == (45, 4)
        assert metadata.storage_metadata.write_shape == (6, 4)
        assert np.prod(metadata.storage_metadata.chunk_shape) * 4 <= 64
        for devices in (1, 5, 7):
            mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
            rows = jax.NamedSharding(mesh, jax.P("data"))
            target = {"w": jax.ShapeDtypeStruct((45, 4), jnp.float32, sharding=rows)}
            found = store.restore(1, target)[0]["w"]
            assert found.shape == (45, 4)
            assert np.array_equal(np.asarray(found), np.asarray(padded))
            stored = stored_array(found)
            assert stored.shape == stored_shape(target["w"])
            assert not np.asarray(stored)[45:].any()


def test_a_state_saved_as_it_is_stored_is_told_what_to_do(saved, tmp_path):
    model = sharded(7)
    state = dataclasses.replace(restore(saved[7], 0, model), copies={})
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, data={}, metadata={}, finite=True)
        with refused(got="saved without to_checkpoint", fix="abstract_state"):
            store.restore(1, model.checkpoint_target())
        target = dataclasses.replace(model.abstract_state(), copies={})
        found = store.restore(1, target)[0]
    for path, leaf in flatten(state.params).items():
        assert np.array_equal(np.asarray(flatten(found.params)[path]), np.asarray(leaf))


def test_what_a_restore_reads_is_counted(tmp_path):
    """Of 5 saved shards of 2 rows each is read once; half of the last is behind the array."""
    padded, target = small()
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"w": padded}, data={}, metadata={}, finite=True)
        same = store.preflight(1, {"w": target})
        assert (same.read_bytes, same.device_bytes) == (5 * 2 * 12, 2 * 12)
        mesh = jax.make_mesh((6,), ("data",), devices=jax.devices()[:6])
        rows = jax.NamedSharding(mesh, jax.P("data"))
        other = store.preflight(1, {"w": jax.ShapeDtypeStruct((9, 3), "float32", sharding=rows)})
        assert (other.read_bytes, other.device_bytes) == (5 * 2 * 12, 2 * 12)


def test_another_shape_is_refused_though_padding_is_possible(tmp_path):
    padded, target = small()
    taller = jax.ShapeDtypeStruct((10, 3), "float32", sharding=target.sharding)
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"w": padded}, data={}, metadata={}, finite=True)
        with refused(got="w: expected float32[10,3], got float32[9,3]"):
            store.restore(1, {"w": taller})
        with refused(expected="float32[9,3]"):
            store.read(1, {"w": taller})


def test_a_step_that_kept_its_padding_is_no_checkpoint(tmp_path, monkeypatch):
    """As after a kill between the write and the change of shapes, or if that does nothing."""
    padded, _ = small()

    def killed(*_):
        raise KeyboardInterrupt

    with CheckpointStore(tmp_path, asynchronous=False) as store:
        for step, change in enumerate((killed, lambda *_: None), 1):
            with monkeypatch.context() as patched:
                patched.setattr(module, "set_shapes", change)
                with pytest.raises((KeyboardInterrupt, CheckpointError)):
                    store.save(step, {"w": padded}, data={}, metadata={}, finite=True)
            assert store.steps() == []
        store.save(3, {"w": padded}, data={}, metadata={}, finite=True)
        assert store.steps() == [3]


def test_digests_cover_the_changed_shapes(tmp_path):
    padded, _ = small()
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"w": padded}, data={}, metadata={}, finite=True)
        store.wait()
        flip_byte(tmp_path / "1" / "state" / "manifest.ocdbt", -1)
        assert store.check(1).problems == ("state/manifest.ocdbt: its contents have changed",)


def test_exports_and_imports_do_not_depend_on_the_devices(saved, tmp_path):
    files = {}
    for devices, store in saved.items():
        export_params(store, 0, tmp_path / str(devices), dtype=None)
        files[devices] = (tmp_path / str(devices) / "model.safetensors").read_bytes()
    assert files[7] == files[8]
    model = sharded(7)
    params = import_params(tmp_path / "8", model.checkpoint_target().params)
    for path, leaf in flatten(params).items():
        want = model.layout.by_path[path].own
        assert (leaf.shape, leaf.sharding) == (want.shape, want.sharding), path
    state = model.to_checkpoint(model.init(1, params))
    expected = model.to_checkpoint(restore(saved[8], 0, model)).params
    assert bits(state.params) == bits(expected)
    assert_zeros_behind(padded_of(state.params))
