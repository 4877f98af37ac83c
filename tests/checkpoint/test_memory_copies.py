"""Copies of the newest state in host memory: bit for bit, never another run's or a damaged one.

One program is compiled, which sends a file between processes: that it is one is what is tested.
"""

import gc
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flips import flip_byte
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes import run_cluster
from refusals import refused
from test_store import capture_compiles

from fsdp_jax import make_mesh
from fsdp_jax.checkpoint import memory_copies
from fsdp_jax.checkpoint.memory_copies import MemoryCopies
from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.io.atomic import UNFINISHED

MESH = make_mesh(data=4, replica=2)
VALUES = {
    "weights": (np.linspace(-1, 1, 64).reshape(8, 8), "bfloat16", P("data")),
    "both": (np.arange(64).reshape(8, 8), "int32", P("replica", "data")),
    "whole": (np.array([np.nan, np.inf, -0.0]), "float32", P()),
    "step": (np.array(7), "int32", P()),
    "mask": (np.array([True, False] * 4), "bool", P("data")),
}


def make_state(scale=1):
    state = {
        name: jax.device_put(jnp.asarray(value * scale).astype(dtype), NamedSharding(MESH, spec))
        for name, (value, dtype, spec) in VALUES.items()
    }
    keys = jax.random.split(jax.random.key(scale), 4)
    return state | {"rng": jax.device_put(keys, NamedSharding(MESH, P("data")))}


TARGET = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make_state()
)


def bits(state):
    arrays = dict(state) | {"rng": jax.random.key_data(state["rng"])}
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


@pytest.fixture
def opened(tmp_path):
    """Opens the copies of a run, as each start of it does."""
    (tmp_path / "memory").mkdir()

    def open_copies(run="run", target=TARGET, **facts):
        (tmp_path / run).mkdir(exist_ok=True)
        return MemoryCopies(tmp_path / run, str(tmp_path / "memory"), target, facts)

    return open_copies


def files(tmp_path):
    return sorted((tmp_path / "memory").rglob("*.copy"))


def test_a_restarted_run_reads_the_newest_of_two_copies(opened, tmp_path):
    copies = opened()
    assert copies.newest() == (None, "")
    for step in (2, 4, 6):
        copies.save(step, make_state(step), {"position": step}, {"returns": {3: 1}})
    assert len(files(tmp_path)) == 2
    again = opened()
    copy, problems = again.newest()
    assert (copy.step, copy.attempt, problems) == (6, copies.attempt, "")
    state, data, metadata = again.restore(copy)
    assert bits(state) == bits(make_state(6))
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, TARGET)
    assert (data, metadata) == ({"position": 6}, {"returns": {"3": 1}})
    # The same step is written again in its own place; then nothing is left.
    again.save(6, make_state(1), {}, {})
    assert bits(opened().restore(opened().newest()[0])[0]) == bits(make_state(1))
    # What a start with more processes left goes too.
    left = files(tmp_path)[0].parent.with_name("3")
    left.mkdir()
    again.remove()
    assert not left.parent.exists()


def test_files_hold_the_state_twice_at_most(opened, tmp_path, monkeypatch):
    copies = opened()
    held, rename, shards = [], Path.rename, memory_copies._local_shards

    def held_bytes():
        return sum(path.stat().st_size for path in (tmp_path / "memory").rglob("*.copy*"))

    def renamed(path, target):
        held.append(held_bytes())
        return rename(path, target)

    def large(leaves):
        before = -1
        for name, index, array in shards(leaves):
            assert held_bytes() > before  # the shard before is written
            before = held_bytes()
            yield name, index, np.resize(array, 1 << 16)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(memory_copies, "_local_shards", large)
    for step in (2, 4, 6):
        copies.save(step, make_state(step), {}, {})
    first, *others = [size for size in held if size > 1000]
    assert max(others) < 2.1 * first


def test_no_shard_stays_on_the_host_after_the_copy(opened, monkeypatch):
    kept, shards = [], memory_copies._local_shards

    def noted(leaves):
        for name, index, array in shards(leaves):
            memory = array
            while isinstance(memory.base, np.ndarray):
                memory = memory.base
            kept.append(weakref.ref(memory))
            del memory
            yield name, index, array

    monkeypatch.setattr(memory_copies, "_local_shards", noted)
    # Of this dtype jax copies the bytes on a CPU too.
    state = {"x": jnp.zeros((8, 8), "int4", device=NamedSharding(MESH, P("data")))}
    opened(target=state).save(2, state, {}, {})
    assert len(kept) == 4
    gc.collect()  # when jax frees what is not used
    assert all(memory() is None for memory in kept)


@pytest.mark.parametrize("damage", ["bit of an array", "bit of the footer", "cut short", "link"])
def test_a_damaged_copy_is_named_and_the_one_before_it_is_taken(opened, tmp_path, damage):
    copies = opened()
    for step in (2, 4):
        copies.save(step, make_state(step), {}, {})
    path = next(path for path in files(tmp_path) if b'"step": 4' in path.read_bytes())
    content = bytearray(path.read_bytes())
    if damage == "cut short":
        path.write_bytes(content[:-1])
    elif damage == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        content[0 if damage == "bit of an array" else -100] ^= 4
        path.write_bytes(content)
    copy, problems = opened().newest()
    assert copy.step == 2
    assert f"{path} is damaged: " in problems


def test_damage_after_the_check_is_an_error(opened, tmp_path):
    copies = opened()
    copies.save(2, make_state(), {}, {})
    copy, _ = copies.newest()
    flip_byte(files(tmp_path)[0])
    with refused(error=DamageError, got="its contents have changed"):
        copies.restore(copy)


def test_copies_of_another_run_or_layout_are_never_read(opened, tmp_path):
    opened(config="a").save(2, make_state(), {}, {})
    assert opened(config="a").newest()[0].step == 2
    assert opened("other", config="a").newest() == (None, "")
    told = "step 2 is of another configuration or layout"
    assert opened(config="b").newest() == (None, told)
    sharding = NamedSharding(make_mesh(), P("data"))
    weights = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=sharding)
    assert opened(target=TARGET | {"weights": weights}, config="a").newest() == (None, told)
    # A directory that was removed and made again is another run.
    (tmp_path / "run" / "memory_copies.id").unlink()
    assert opened(config="a").newest() == (None, "")


def test_a_full_memory_leaves_the_copy_before(opened, tmp_path, caplog):
    copies = opened()
    copies.save(2, make_state(), {}, {})
    (held,) = {path.parent for path in files(tmp_path)}
    (held / f"0-1.copy{UNFINISHED}").symlink_to("/dev/full")
    copies.save(4, make_state(), {}, {})
    assert "a copy is not written to memory: [Errno 28] No space left on device" in caplog.text
    assert copies.newest()[0].step == 2


def test_a_run_directory_that_cannot_be_written_is_a_warning(opened, tmp_path, caplog):
    copies = opened()
    (tmp_path / "run").rmdir()
    copies.save(2, make_state(), {}, {})
    assert "no copy is made in memory: [Errno 2]" in caplog.text
    assert files(tmp_path) == []


def test_what_is_in_the_place_of_the_folder_is_a_warning(opened, tmp_path, caplog):
    copies = opened()
    (folder,) = (tmp_path / "memory").iterdir()
    folder.rmdir()
    folder.write_text("no folder")
    copies.save(2, make_state(), {}, {})
    assert "a copy is not written to memory: [Errno 20] Not a directory" in caplog.text


@pytest.fixture
def shift(tmp_path, monkeypatch):
    """Sends a file to this one process itself."""
    monkeypatch.setattr(memory_copies, "CHUNK", 1000)
    monkeypatch.setattr(memory_copies, "gather_from_processes", lambda values: values[None])
    source = tmp_path / "source"
    source.write_bytes(bytes(range(250)) * 100)

    def send(target):
        memory_copies._shift(source, target, by=1)
        return source.read_bytes()

    return send


def test_a_file_that_arrives_is_written_by_one_program(shift, tmp_path):
    targets = [tmp_path / "first", tmp_path / "second"]
    assert shift(targets[0]) == targets[0].read_bytes()
    with capture_compiles() as compiled:
        assert shift(targets[1]) == targets[1].read_bytes()
    assert not [event for event in compiled if "backend_compile" in event]
    # A process that needs no file writes none.
    shift(None)
    assert sorted(tmp_path.iterdir()) == sorted([*targets, tmp_path / "source"])


@pytest.mark.parametrize("fault", ["full", "missing"])
def test_a_file_that_cannot_be_written_on_arrival_is_a_warning(shift, tmp_path, fault, caplog):
    target = tmp_path / "target"
    if fault == "full":
        (tmp_path / f"target{UNFINISHED}").symlink_to("/dev/full")
    else:
        target = tmp_path / "source" / "target"  # in what is no folder
    shift(target)
    assert "a copy is not written to memory: " in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_folder_that_is_missing_or_another_users_is_refused(tmp_path, monkeypatch):
    with refused("no such folder", error=ConfigError):
        MemoryCopies(tmp_path, str(tmp_path / "none"), TARGET, {})
    monkeypatch.setattr("os.getuid", lambda: 12345)
    (tmp_path / "fsdp_jax-12345").symlink_to(tmp_path)
    with refused("the folder is another user's", error=ConfigError):
        MemoryCopies(tmp_path, str(tmp_path), TARGET, {})


NEIGHBOURS = """
import shutil
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from fsdp_jax import make_mesh
from fsdp_jax.checkpoint import memory_copies
from fsdp_jax.checkpoint.memory_copies import MemoryCopies
from fsdp_jax.launch import barrier
memory_copies.CHUNK = 5000  # bytes: the file is sent in several
mesh = make_mesh()
sharding = NamedSharding(mesh, P("data"))
values = np.arange(24 * 1000, dtype=np.float32).reshape(24, 1000)
state = {"x": jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])}
target = {"x": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)}
memory, run = sys.argv[4], Path(sys.argv[5])

def opened():
    return MemoryCopies(run, memory, target, {}, neighbours=True)

def restored(copy):
    found = opened().restore(copy)[0]["x"]
    for shard in found.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), values[shard.index])

copies = opened()
copies.save(4, state, {}, {})
barrier("saved")
copy, _ = opened().newest()
assert (copy.step, copy.missing) == (4, ()), copy
restored(copy)
# The folder of one process is lost: the next one has its copy.
if process == 1:
    copies.remove()
barrier("lost")
copy, _ = opened().newest()
assert (copy.step, copy.missing) == (4, (1,)), copy
# The next one cannot be sent back while something is in the place of the folder.
held = copies._held
if process == 1:
    held.write_text("no folder")
assert not opened().fetch(copy)
if process == 1:
    held.unlink()
files = {path: path.stat().st_mtime_ns for path in held.glob("*")}
assert opened().fetch(copy)
assert process == 1 or files == {path: path.stat().st_mtime_ns for path in held.glob("*")}
restored(copy)
# Where one process has no room, no process has the copy.
(held / f"{process}-1.copy.unfinished").symlink_to(["/dev/full", memory + "/elsewhere"][process])
opened().save(6, state, {}, {})
assert opened().newest()[0].step == 4
assert not list(held.glob(f"{process}-1.copy*"))
# In another order of the devices other processes have the shards.
turned = NamedSharding(jax.sharding.Mesh(np.roll(mesh.devices, 4), mesh.axis_names), P("data"))
target["x"] = jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=turned)
assert opened().newest()[0] is None
target["x"] = state["x"]
# Both are lost.
barrier("restored")
copies.remove()
barrier("gone")
assert opened().newest()[0] is None
leave_cluster()
"""


@pytest.mark.long
def test_a_process_that_lost_its_folder_gets_a_neighbours_copy(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "run").mkdir()
    run_cluster(NEIGHBOURS, tmp_path / "memory", tmp_path / "run")
