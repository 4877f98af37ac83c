"""Arrays that the devices do not divide: checkpoints, exports and imports have their own shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from orbax.checkpoint import v1 as orbax

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
    """Scanned layers, and a table of which seven and eight devices have shards of zeros alone."""

    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (9, 9)))
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))
        self.blocks = make(rngs)

    def __call__(self, x):
        layers = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return layers(x, self.blocks).sum() + jnp.sum(self.table[...] ** 2)


@functools.cache
def sharded(devices, optimizer="adam"):
    mesh = fsdp.make_mesh(data=devices, devices=jax.devices()[:devices])
    tx = OPTIMIZERS[optimizer]
    return fsdp.fully_shard(lambda rngs: Model(rngs), tx, mesh, "full_shard", [Block], min_size=8)


def trained(devices, optimizer):
    """A state after two steps: the optimizer's arrays are not zero."""
    model = sharded(devices, optimizer)
    step = model.make_train_step(lambda model, batch: (model(batch), batch.shape[0]))
    state = model.init(seed=3)
    for seed in range(2):
        batch = jax.random.normal(jax.random.key(seed), (devices, WIDTH))
        state, _ = step(state, batch)
    return state


def bits(tree):
    """{path: (dtype, shape, bytes)} of arrays in their own shapes."""
    arrays = {
        path: np.asarray(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)
        for path, leaf in flatten(tree).items()
    }
    return {path: (x.dtype.name, x.shape, x.tobytes()) for path, x in arrays.items()}


def padded_of(tree):
    return {path: leaf for path, leaf in flatten(tree).items() if isinstance(leaf, Padded)}


def assert_zeros_behind(padded):
    for path, leaf in padded.items():
        whole = np.array(leaf.array)
        assert whole.shape != leaf.shape
        whole[tuple(map(slice, leaf.shape))] = 0
        assert not whole.view(np.uint8).any(), path


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bits_survive_any_number_of_devices(tmp_path, optimizer):
    model = sharded(8, optimizer)
    state = trained(8, optimizer)
    expected = bits(model.to_checkpoint(state))
    counts = []
    with CheckpointStore(tmp_path, keep=99) as store:
        store.save(0, model.to_checkpoint(state), data={}, metadata={})
        for step, devices in enumerate((6, 7, 5, 8, 7), 1):
            model = sharded(devices, optimizer)
            plan = store.preflight(step - 1, model.checkpoint_target())
            assert (plan.differences, plan.casts) == ((), ())
            found, *_ = store.restore(step - 1, model.checkpoint_target())
            state = model.from_checkpoint(found)
            saved = model.to_checkpoint(state)
            assert bits(saved) == expected, devices
            padded = padded_of(saved)
            counts.append(len(padded))
            assert_zeros_behind(padded)
            wanted = jax.tree.leaves(model.abstract_state())
            for leaf, want in zip(jax.tree.leaves(state), wanted, strict=True):
                assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
                assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
            store.save(step, saved, data={}, metadata={})
    assert min(counts) > 0, counts


def on_eight(tree):
    """Arrays in their own shapes, replicated over 8 devices: as releases without padding saved."""
    everywhere = jax.NamedSharding(sharded(8).layout.mesh, jax.P())
    arrays = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, Padded) else x, tree)
    return jax.device_put(arrays, everywhere)


def test_older_checkpoints_are_restored(tmp_path):
    model = sharded(7)
    state = model.to_checkpoint(trained(7, "adam"))
    with CheckpointStore(tmp_path) as store:
        store.save(0, on_eight(state), data={}, metadata={})
        found, *_ = store.restore(0, model.checkpoint_target())
    found = model.to_checkpoint(model.from_checkpoint(found))
    assert bits(found) == bits(state)
    assert len(padded_of(found)) > 5
    assert_zeros_behind(padded_of(found))


def test_files_have_the_arrays_own_shapes(tmp_path):
    """As any reader of orbax's files finds them."""
    manifests = []
    for devices in (7, 8):
        model = sharded(devices)
        state = model.to_checkpoint(model.init(0))
        with CheckpointStore(tmp_path / str(devices)) as store:
            store.save(0, state, data={}, metadata={})
            manifests.append(store.record(0))
            assert store.check(0).good
        found = orbax.metadata(tmp_path / str(devices) / "0").metadata
        leaves = {p: leaf for p, leaf in flatten(state).items() if not is_prng_key(leaf)}
        assert {p: found[p].shape for p in leaves} == {p: x.shape for p, x in leaves.items()}
    assert manifests[0]["leaves"] == manifests[1]["leaves"]
    assert manifests[0]["shards"] != manifests[1]["shards"]
    assert [manifest["finite"] for manifest in manifests] == [True, True]


def small(shape=(9, 3), fill=None, dtype="float32"):
    """A padded array over 8 devices, of which 3 have nothing but zeros, and its target."""
    rows = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P("data"))
    own = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    if fill is not None:
        own[-1, -1] = fill
    stored = np.pad(own, [(0, -shape[0] % 8), (0, 0)])
    target = jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
    return Padded(jax.device_put(stored, rows), shape), target


@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_values_of_padded_arrays_that_are_not_finite_are_found(tmp_path, fill):
    good, target = small()
    bad, _ = small(fill=fill)
    assert not_finite({"good": good, "bad": bad}) == ["bad"]
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"w": good}, data={}, metadata={})
        store.save(2, {"w": bad}, data={}, metadata={})
        store.wait()
        assert [store.record(step)["finite"] for step in (1, 2)] == [True, False]
        found, *_ = store.restore(2, {"w": target})
    assert np.array_equal(np.asarray(found["w"])[:9], np.asarray(bad), equal_nan=True)


def test_the_chunks_of_a_padded_array_may_be_smaller_than_its_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 64)
    padded, _ = small((45, 4), dtype="float32")
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"w": padded}, data={}, metadata={})
        store.wait()
        metadata = orbax.metadata(tmp_path / "1").metadata["w"]
        assert metadata.shape == (45, 4)
        assert metadata.storage_metadata.write_shape == (6, 4)
        assert np.prod(metadata.storage_metadata.chunk_shape) * 4 <= 64
        for devices in (1, 5, 6, 7):
            mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
            rows = jax.NamedSharding(mesh, jax.P("data"))
            target = {"w": jax.ShapeDtypeStruct((45, 4), jnp.float32, sharding=rows)}
            found = store.restore(1, target)[0]["w"]
            assert found.shape == (45, 4)
            assert np.array_equal(np.asarray(found), np.asarray(padded))
            stored = stored_array(found)
            assert stored.shape == stored_shape(target["w"])
            assert not np.asarray(stored)[45:].any()


def test_a_state_that_was_saved_as_it_is_stored_is_told_what_to_do(tmp_path):
    model = sharded(7)
    state = model.init(0)
    with CheckpointStore(tmp_path) as store:
        store.save(1, dataclasses.replace(state, copies={}), data={}, metadata={})
        with pytest.raises(ValueError, match=r"saved without to_checkpoint(?s:.*)abstract_state"):
            store.restore(1, model.checkpoint_target())
        target = dataclasses.replace(model.abstract_state(), copies={})
        found = store.restore(1, target)[0]
    for path, leaf in flatten(state.params).items():
        assert np.array_equal(np.asarray(flatten(found.params)[path]), np.asarray(leaf))


def test_what_a_restore_reads_is_counted(tmp_path):
    """Of 5 saved shards of 2 rows each is read once; half of the last is behind the array."""
    padded, target = small()
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"w": padded}, data={}, metadata={})
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
        store.save(1, {"w": padded}, data={}, metadata={})
        with pytest.raises(ValueError, match=r"w: expected float32\[10,3\], got float32\[9,3\]"):
            store.restore(1, {"w": taller})
        with pytest.raises(ValueError, match=r"expected: float32\[9,3\]"):
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
                    store.save(step, {"w": padded}, data={}, metadata={})
            assert store.steps() == []
        store.save(3, {"w": padded}, data={}, metadata={})
        assert store.steps() == [3]


def test_digests_cover_the_changed_shapes(tmp_path):
    padded, _ = small()
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"w": padded}, data={}, metadata={})
        store.wait()
        database = tmp_path / "1" / "state" / "manifest.ocdbt"
        content = bytearray(database.read_bytes())
        content[-1] ^= 1
        database.write_bytes(content)
        assert store.check(1).problems == ("state/manifest.ocdbt: its contents have changed",)


def test_exports_and_imports_are_those_of_other_numbers_of_devices(tmp_path):
    files = {}
    saved = sharded(8).to_checkpoint(trained(8, "adam"))
    with CheckpointStore(tmp_path / "checkpoints", keep=9, asynchronous=False) as store:
        store.save(8, saved, data={}, metadata={})
        for step, devices in enumerate((7, 6, 5), 9):
            model = sharded(devices)
            found, *_ = store.restore(8, model.checkpoint_target())
            state = model.to_checkpoint(model.from_checkpoint(found))
            store.save(step, state, data={}, metadata={})
        for step in store.steps():
            export_params(store, step, tmp_path / str(step), dtype=None)
            files[step] = (tmp_path / str(step) / "model.safetensors").read_bytes()
        assert list(files) == [8, 9, 10, 11]
        assert len(set(files.values())) == 1
    for devices in (8, 7, 6):
        model = sharded(devices)
        target = model.checkpoint_target().params
        params = import_params(tmp_path / str(step), target)
        state = model.to_checkpoint(model.init(1, params))
        assert bits(state.params) == bits(saved.params), devices
        assert_zeros_behind(padded_of(state.params))
        for path, leaf in flatten(params).items():
            want = model.layout.by_path[path].own
            assert (leaf.shape, leaf.sharding) == (want.shape, want.sharding), path
