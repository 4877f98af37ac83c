"""Saving and restoring on any mesh, and the errors of what cannot be saved or read.

Only small programs are compiled: of tests that overwrite what is saved, and orbax's own copies.
"""

import contextlib
import gc
import os
import re
import resource
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collected import collected
from jax.sharding import NamedSharding, PartitionSpec
from refusals import refused

from fsdp_jax.checkpoint import Checked, CheckpointError, CheckpointStore, DamageError, arrays
from fsdp_jax.checkpoint import store as module
from fsdp_jax.errors import ConfigError

pytestmark = pytest.mark.releases

DATA = {"position": 640, "epochs": [1, {"shard": None}]}
METADATA = {"mesh": {"data": 8}, "note": "ü"}


class Scale(NamedTuple):
    value: jax.Array
    hits: jax.Array


def sharding(devices, *spec):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    return NamedSharding(mesh, PartitionSpec(*spec))


def make_state(devices=8):
    """Returns all kinds of leaves of a training state; those with rows are sharded by them."""
    rows, replicated = sharding(devices, "data"), sharding(devices)
    numbers = np.random.default_rng(0)
    params = {
        "embed": jnp.asarray(numbers.normal(size=(16, 24)), jnp.float32),
        "blocks": [{"kernel": jnp.asarray(numbers.normal(size=(8, 4)), jnp.bfloat16)}, {}],
    }
    # EmptyState of a chain, MaskedNode of a mask, injected hyperparameters.
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.adam(1e-3), {"embed": True, "blocks": False}),
        optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9),
    )
    state = {
        "params": params,
        "optimizer": optimizer.init(params),
        "scale": Scale(jnp.float32(2.0**15), jnp.int32(3)),
        "key": jax.random.key(7),
        "dropout": jax.random.split(jax.random.key(8, impl="rbg"), 8),
        "nothing": {
            "empty": jnp.zeros((0, 4), jnp.bfloat16),
            "keys": jax.random.split(jax.random.key(0), 0),
        },
    }
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, rows if leaf.ndim and leaf.shape[0] else replicated),
        state,
    )


def target_of(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def small(value=1.0):
    return {"w": jax.device_put(np.full((16, 4), value, np.float32), sharding(8, "data"))}


def host(leaf):
    return np.asarray(
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    )


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        assert host(one).tobytes() == host(other).tobytes()


def save(store, step, state, data=DATA, metadata=METADATA, finite=None):
    return store.save(step, state, data=data, metadata=metadata, finite=finite)


def test_a_state_is_restored_with_all_kinds_of_leaves(tmp_path):
    state = make_state()
    with CheckpointStore(tmp_path / "new" / "checkpoints") as store:
        assert (store.steps(), store.latest()) == ([], None)
        assert save(store, 5, state) > 0
        restored, data, metadata = store.restore(5, target_of(state))
    assert (data, metadata) == (DATA, METADATA)
    assert_same(restored, state)
    # Typed keys continue where they were.
    assert (jax.random.bits(restored["key"]) == jax.random.bits(state["key"])).all()
    assert str(jax.random.key_impl(restored["dropout"])) == "rbg"


def test_a_synchronous_save_is_in_place_when_it_returns(tmp_path):
    with CheckpointStore(tmp_path, asynchronous=False) as store:
        save(store, 5, small())
        assert store.steps() == [5]


def test_resharding_is_bitwise(tmp_path):
    """From 8 to 4, 1 and 8 devices, saved again each time."""
    before = make_state(8)
    with CheckpointStore(tmp_path, keep=9) as store:
        save(store, 0, before)
        for step, devices in enumerate([4, 1, 8]):
            wanted = make_state(devices)
            restored, *_ = store.restore(step, target_of(wanted))
            assert_same(restored, wanted)
            assert len(restored["params"]["embed"].sharding.device_set) == devices
            save(store, step + 1, restored)


def test_state_may_be_donated_right_after_save(tmp_path):
    """The next step overwrites the buffers while they are being written."""
    state = {
        str(i): jax.device_put(np.full((512, 512), i, np.float32), sharding(8, *axes))
        for i, axes in enumerate([["data"], []] * 4)  # sharded, replicated
    }
    target = target_of(state)
    overwrite = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0
    )
    data = {"position": [1]}
    with CheckpointStore(tmp_path) as store:
        save(store, 1, state, data=data)
        data["position"].append(2)
        for _ in range(3):
            state = overwrite(state)
        restored, found, _ = store.restore(1, target)
    assert found == {"position": [1]}
    for name, leaf in restored.items():
        assert (np.asarray(leaf) == float(name)).all()


def test_newest_steps_are_kept(tmp_path):
    with CheckpointStore(tmp_path, keep=2) as store:
        # The run is resumed at 5: 10 is of an earlier attempt and stays, 9 is not the oldest.
        for step in (1, 5, 10, 9):
            save(store, step, small(float(step)))
            store.wait()
        assert store.steps() == [5, 9, 10]
        assert store.latest() == 10
        assert (np.asarray(store.restore(9, target_of(small()))[0]["w"]) == 9).all()
    assert sorted(os.listdir(tmp_path)) == ["10", "5", "9"], "nothing else is left"


def test_entries_of_the_same_number_are_no_second_step(tmp_path):
    with CheckpointStore(tmp_path, keep=1) as store:
        for name in ("03", "٣"):
            (tmp_path / name).mkdir()
        for step in (2, 3):
            save(store, step, small(float(step)))
            store.wait()
        assert store.steps() == [3]
    assert (tmp_path / "3").is_dir()


def test_the_newest_finite_step_is_never_deleted(tmp_path):
    with CheckpointStore(tmp_path, keep=2) as store:
        values = {1: 1.0, 2: 2.0, 3: np.nan, 4: np.inf, 5: np.nan}
        for step, value in values.items():
            save(store, step, small(value))
            store.wait()
            assert store.record(step)["finite"] is bool(np.isfinite(value))
        assert store.steps() == [2, 4, 5]
        save(store, 6, small(6.0))
        store.wait()
        assert store.steps() == [5, 6]


def test_a_state_is_checked_as_saved_in_the_background(tmp_path, monkeypatch):
    """The next step overwrites it, with values of the other kind, before the result is read."""
    begin, threads = module.begin_finite_check, []

    def recording(arrays):
        result = begin(arrays)

        def in_thread():
            threads.append(threading.current_thread().name)
            return result()

        return in_thread

    monkeypatch.setattr(module, "begin_finite_check", recording)
    overwrite = jax.jit(
        lambda tree: jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), jnp.nan, 1.0), tree),
        donate_argnums=0,
    )
    with CheckpointStore(tmp_path) as store:
        for step, finite in enumerate((True, False)):
            state = {str(i): small(1.0 if finite else np.inf)["w"] for i in range(4)}
            save(store, step, state)
            overwrite(state)
            store.wait()
            assert store.record(step)["finite"] is finite
    assert [name.startswith("checkpoint") for name in threads] == [True, True]


def test_only_complete_steps_count(tmp_path):
    with CheckpointStore(tmp_path) as store:
        save(store, 3, small())
        store.wait()
        (tmp_path / "7").mkdir()
        (tmp_path / "8.orbax-checkpoint-tmp").mkdir()
        (tmp_path / "9").write_text("")
        for name in ("best", "04", "\u0665"):
            shutil.copytree(tmp_path / "3", tmp_path / name)
        assert store.steps() == [3]
        with refused("no such step", expected="one of [3]", got="7"):
            store.restore(7, target_of(small()))
        for step in (3, 7):
            with refused("there already", where=str(tmp_path / str(step))):
                save(store, step, small())


def test_a_reader_changes_nothing(tmp_path):
    with CheckpointStore(tmp_path) as store:
        save(store, 1, small())
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()  # someone else is writing
    with CheckpointStore(tmp_path) as store:
        store.restore(1, target_of(small()))
    assert sorted(os.listdir(tmp_path)) == ["1", "2.orbax-checkpoint-tmp"]


def test_differences_are_listed_path_by_path(tmp_path, monkeypatch):
    from orbax.checkpoint import v1

    rows = sharding(8, "data")
    spec = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype, sharding=rows)  # noqa: E731
    unknown = "w: expected nothing, got float32[16,4]"
    cases = [  # target, what is told
        ({"w": spec(16, 4, dtype="bfloat16")}, ["w: expected bfloat16[16,4], got float32[16,4]"]),
        ({"w": spec(16, 8)}, ["w: expected float32[16,8], got float32[16,4]"]),
        ({"v": spec(16, 4)}, ["v: expected float32[16,4], got nothing", unknown]),
        ({"w": {"0": spec(16, 4)}}, ["w/0: expected float32[16,4], got nothing", unknown]),
    ]
    with CheckpointStore(tmp_path) as store, collected() as case:
        save(store, 1, small())
        store.wait()
        monkeypatch.setattr(v1, "load", lambda *_: pytest.fail("arrays were read"))
        for target, lines in cases:
            with case(lines), refused("does not fit") as caught:
                store.restore(1, target)
            for line in lines:
                with case(line):
                    assert line in caught.value.got


def test_a_key_of_another_implementation_is_refused(tmp_path):
    replicated = sharding(8)
    state = {"key": jax.device_put(jax.random.key(0), replicated)}
    target = target_of({"key": jax.device_put(jax.random.key(0, impl="rbg"), replicated)})
    with CheckpointStore(tmp_path) as store:
        save(store, 1, state)
        with refused(got="key: expected key<rbg>[], got key<fry>[]"):
            store.restore(1, target)


def test_a_target_without_shardings_is_refused(tmp_path):
    with CheckpointStore(tmp_path) as store:
        save(store, 1, small())
        with refused("without shardings", got="w"):
            store.restore(1, {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32)})


def test_states_that_cannot_be_saved_are_refused(tmp_path):
    with CheckpointStore(tmp_path) as store:
        with refused("only jax.Arrays", got="a: float; b: ndarray"):
            save(store, 1, {"a": 1.0, "b": np.zeros(3), "c": jnp.zeros(3)})
        with refused("share a path", got="a/b"):
            save(store, 1, {"a/b": jnp.zeros(3), "a": {"b": jnp.zeros(3)}})
        with refused("`data` cannot be saved as JSON", where="position"):
            save(store, 1, small(), data={"position": np.int64(3)})
        with refused("`data` is not a dict", where="data", got="NoneType", fix="data={}"):
            save(store, 1, small(), data=None)
        with refused("nothing to save"):
            save(store, 1, {"a": jnp.zeros((0,))})
        for step in (-1, 1.5, True, "3"):
            with refused("not a step", where="step", got=repr(step)):
                save(store, step, small())
        save(store, 1, small())
    assert store.steps() == [1]
    with refused(error=ConfigError, where="checkpoint.keep"):
        CheckpointStore(tmp_path, keep=0)


def test_a_directory_that_cannot_be_created(tmp_path):
    directory = tmp_path / "checkpoints"
    directory.write_text("a file")
    with CheckpointStore(directory) as store:
        where = str(directory / "2")
        with refused(error=CheckpointError, where=where, got="NotADirectoryError"):
            save(store, 2, small())
        directory.unlink()
        save(store, 2, small())  # the same step again
        store.wait()
        assert store.steps() == [2]


@contextlib.contextmanager
def full_disk():
    """A limit on the size of files stands for a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_the_error_of_the_next_call(tmp_path):
    """Whichever call that is, and once."""
    large = {"w": jax.device_put(np.random.default_rng(0).normal(size=(1 << 15, 4)), sharding(8))}

    def save_large(step):
        """Compiles nothing: a program could not be written to jax's cache either."""
        save(store, step, large, finite=True)

    def fails(call, step):
        where = str(tmp_path / str(step))
        with refused(error=CheckpointError, where=where, got="File too large", fix="free disk"):
            call()

    with CheckpointStore(tmp_path) as store:
        save(store, 1, small())
        store.wait()
        with full_disk():
            save_large(2)
            fails(lambda: save_large(3), 2)  # this one is not begun
            save_large(3)
            fails(store.wait, 3)
        assert (store.latest(), os.listdir(tmp_path)) == (1, ["1"])
        save_large(3)  # again, in spite of what the failed save left
        store.wait()
        assert (store.latest(), sorted(os.listdir(tmp_path))) == (3, ["1", "3"])
        with full_disk():
            save_large(4)
            fails(store.close, 4)


def test_what_a_killed_writer_leaves_is_no_step_and_is_removed(tmp_path):
    with CheckpointStore(tmp_path) as store:
        save(store, 1, small())
    for name in ("0.deleting", "2.unsealed", "2.unsealed.orbax-checkpoint-tmp", "2.digests"):
        (tmp_path / name).mkdir()
    with CheckpointStore(tmp_path) as store:
        assert store.steps() == [1]
        save(store, 2, small())
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_the_first_save_compiles_nothing(tmp_path):
    """Orbax would compile a slice of a replicated array for each replica that writes a part."""
    state = {
        str(rows): jax.device_put(np.zeros((8 * rows, 3)), sharding(8)) for rows in range(1, 9)
    }
    with CheckpointStore(tmp_path) as store, capture_compiles() as compiled:
        store.save(1, state, data={}, metadata={}, finite=True)
        store.wait()
    assert not compiled


def test_replicas_share_the_writing_of_large_arrays(monkeypatch):
    """Those of several processes; each then writes what it has."""
    monkeypatch.setattr(arrays, "SHARED_BYTES", 4 * 8)
    mesh = jax.make_mesh((2, 4), ("replica", "data"))
    cases = {  # shape, spec -> spec
        "replicated": ((3, 24), (), (None, ("replica", "data"))),
        "hybrid": ((16, 8), (None, "data"), ("replica", "data")),
        "same dim": ((24, 3), ("data",), (("data", "replica"),)),
        "sharded": ((16, 8), ("replica", "data"), ("replica", "data")),
        "indivisible": ((9, 9), (), ()),
        "small": ((56,), (), ()),
    }
    state = {
        name: jax.device_put(
            jnp.arange(float(np.prod(shape))).reshape(shape), NamedSharding(mesh, jax.P(*spec))
        )
        for name, (shape, spec, _) in cases.items()
    }
    for compiles in (True, False):
        with capture_compiles() as compiled:
            divided = arrays.divide_replicas(state)
        assert any("backend_compile" in event for event in compiled) is compiles
    assert list(divided) == list(state)
    for name, (_, _, spec) in cases.items():
        expected = NamedSharding(mesh, jax.P(*spec))
        assert divided[name].sharding.is_equivalent_to(expected, divided[name].ndim), name
        assert (np.asarray(divided[name]) == np.asarray(state[name])).all()


@contextlib.contextmanager
def capture_compiles():
    """Gives a list that names what jax compiles inside the block."""
    names = []

    def listener(event, *_, **__):
        if "compile" in event:
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_an_old_step_that_stays_does_not_fail_the_save(tmp_path, monkeypatch, caplog):
    """A reader on another host may hold a file open: the next save tries again."""
    rmtree = shutil.rmtree

    def busy(path, *args, **options):
        if str(path).endswith(".deleting"):
            raise OSError(39, "Directory not empty")
        rmtree(path, *args, **options)

    with CheckpointStore(tmp_path, keep=1) as store:
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", busy)
            for step in (1, 2):
                save(store, step, small())
                store.wait()
        assert sorted(os.listdir(tmp_path)) == ["1.deleting", "2"]
        assert "could not be removed" in caplog.text
        save(store, 3, small())
    assert sorted(os.listdir(tmp_path)) == ["3"]


def test_a_step_is_renamed_once_it_is_on_disk(tmp_path, monkeypatch):
    """Every file and directory is flushed before the rename, and its new name after it."""
    flushed, fsync, rename = [], os.fsync, Path.rename

    def recording_fsync(handle):
        flushed.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recording_fsync)

    def checking_rename(path, target):
        if path.name == "1.unsealed":
            missing = {str(each) for each in [path, *path.rglob("*")]} - set(flushed)
            assert not missing
            flushed.clear()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", checking_rename)
    with CheckpointStore(tmp_path / "checkpoints", asynchronous=False) as store:
        save(store, 1, small())
    assert flushed == [str(tmp_path / "checkpoints"), str(tmp_path)]


def test_a_pipe_is_damage_though_restore_did_not_verify(tmp_path):
    """Orbax would wait for somebody to write to it."""
    with CheckpointStore(tmp_path) as store:
        save(store, 1, small())
        store.wait()
        (tmp_path / "1" / "state" / "_METADATA").unlink()
        os.mkfifo(tmp_path / "1" / "state" / "_METADATA")
        with refused(error=DamageError, got="state/_METADATA: a pipe, not a file"):
            store.restore(1, target_of(small()), verify=False)


def test_directories_that_cannot_be_made_fail_the_save_at_once(tmp_path, monkeypatch):
    """Created in the background, orbax's threads would wait for them for 300 s."""
    mkdir, before = os.mkdir, threading.enumerate()

    def full(path, *args, **options):
        if "orbax-checkpoint-tmp" in str(path):
            raise OSError(28, "No space left on device")
        mkdir(path, *args, **options)

    with CheckpointStore(tmp_path) as store:
        save(store, 1, small())
        store.wait()
        with monkeypatch.context() as patched:
            patched.setattr(os, "mkdir", full)
            with refused(error=CheckpointError, got="No space left", fix="free disk space"):
                save(store, 2, small())
        for thread in set(threading.enumerate()) - {*before}:
            if not thread.name.startswith("checkpoint"):  # the store's own
                thread.join(60)
                assert not thread.is_alive(), thread
        assert store.steps() == [1]
        save(store, 2, small())
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


# Orbax gives up at the first missing file, and never awaits the coroutines of the other arrays.
@pytest.mark.filterwarnings(
    "ignore:coroutine '.*_get_array_metadatas' was never awaited:RuntimeWarning"
)
def test_a_file_that_is_cut_short_while_it_is_restored_is_named(tmp_path, monkeypatch):
    """After it was verified; orbax reads by position, so that the process lives."""
    load = module.orbax.load

    def cut_and_load(path, target):
        for file in path.rglob("d/*"):
            os.truncate(file, 100)
        return load(path, target)

    with CheckpointStore(tmp_path) as store:
        save(store, 1, small())
        store.wait()
        monkeypatch.setattr(module.orbax, "load", cut_and_load)
        with refused(error=DamageError, got=": 100 bytes, ") as damage:
            store.restore(1, target_of(small()))
        assert re.search(r"state/\S+: 100 bytes, \d+ were written", damage.value.got)
    gc.collect()  # the coroutines warn when they are collected: here, not in a later test


def test_damage_is_named_though_restore_did_not_verify(tmp_path, monkeypatch):
    """If the files are intact, the error is orbax's own, in one line."""
    with CheckpointStore(tmp_path) as store:
        save(store, 1, small())
        store.wait()
        for file in (tmp_path / "1" / "state").rglob("d/*"):
            file.unlink()
        with refused(error=DamageError, got=": missing") as damage:
            store.restore(1, target_of(small()), verify=False)
        assert re.search(r"state/d/\w+: missing", damage.value.got)
        monkeypatch.setattr(module, "check_files", lambda *_, **__: Checked(0, 0, 0.0, ()))
        with refused("could not be read", error=CheckpointError) as missing:
            store.restore(1, target_of(small()), verify=False)
        assert "incompatible handler" not in missing.value.got
        assert re.search(rf"NOT_FOUND: .*{tmp_path}/1/state/d/\w+\"$", missing.value.got)
        assert len(str(missing.value).splitlines()) == 3
    gc.collect()  # the coroutines warn when they are collected: here, not in a later test
