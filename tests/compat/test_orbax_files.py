"""Files and directories as orbax and tensorstore read and write them."""

import gc
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from collected import collected
from levanter_files import write_levanter
from mend import relied_on
from orbax.checkpoint import v1 as orbax

from fsdp_jax.compat.orbax_files import (
    ARRAYS,
    UNUSABLE_NAME,
    LiteralPath,
    chunk_shape,
    keys_of_tree,
    list_arrays,
    open_arrays,
    set_shapes,
    writing_process,
    written_arrays,
)

pytestmark = pytest.mark.releases


def context():
    options = orbax.Context()
    options.file.path_class = LiteralPath
    return options


def save(path, arrays):
    with context():
        orbax.save(path, arrays)


def load(path, **shapes):
    """Arrays of float32 by name, as the library reads them: into shardings of its own."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    specs = {
        name.replace("_", "/"): jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)
        for name, shape in shapes.items()
    }
    return orbax.load(path, specs)


def test_arrays(tmp_path):
    save(tmp_path / "1", {"params/w": jnp.ones(8)})
    with relied_on("orbax-checkpoint", "orbax_files.ARRAYS", "the directory of a pytree's arrays"):
        assert (tmp_path / "1" / ARRAYS).is_dir()


def test_writing_process(tmp_path):
    save(tmp_path / "1", {"params/w": jnp.ones(8)})
    files = [str(file.relative_to(tmp_path / "1")) for file in (tmp_path / "1").rglob("*")]
    name = "orbax_files.writing_process"
    with relied_on("orbax-checkpoint", name, "`process_N` in the names of files that N writes"):
        assert any("process_0" in file for file in files), files
        assert {writing_process(file) for file in files} == {0}
    assert writing_process("state/ocdbt.process_3/d/1") == 3
    assert writing_process("state/array_metadatas/process_12") == 12


def test_literal_path(tmp_path):
    what = "directories are searched by `glob` of the class `path_class`"
    path = tmp_path / "a[b]" / "*?" / "1"
    with relied_on("orbax-checkpoint", "orbax_files.LiteralPath", what):
        save(path, {"w": jnp.arange(8.0)})
        with context():
            assert (load(path, w=(8,))["w"] == jnp.arange(8.0)).all()


def test_literal_path_is_needed(tmp_path):
    """Orbax's own class of paths takes them for patterns."""

    def save_and_load(name):
        orbax.save(tmp_path / name / "1", {"w": jnp.arange(8.0)})
        return load(tmp_path / name / "1", w=(8,))

    save_and_load("plain")
    what = "directories whose names are patterns are not found: if they are, drop the class"
    with (
        relied_on("orbax-checkpoint", "orbax_files.LiteralPath", what),
        pytest.raises(Exception),  # noqa: B017, PT011
    ):
        save_and_load("a[b]")


def test_unusable_name():
    """`test_orbax_paths.py` in tests/checkpoint has what becomes of them."""
    cases = [
        ("a\\b", "\\"),
        ("logs:gs:/x", "gs:/"),
        ("/s3/run", "/s3/"),
        (os.fsdecode(b"a\xff"), "\udcff"),
    ]
    with collected() as case:
        for name, found in cases:
            with case(ascii(name)):
                assert UNUSABLE_NAME.search(name)[0] == found
                assert UNUSABLE_NAME.search("/home/me/[runs] é/1") is None


def test_set_shapes(tmp_path):
    path = tmp_path / "1"
    save(path, {"a/b": jnp.arange(12.0).reshape(6, 2), "c": jnp.ones(3)})
    with relied_on(
        "orbax-checkpoint", "orbax_files.set_shapes", "zarr3 arrays in an OCDBT database"
    ):
        set_shapes(path, {"a/b": (5, 2)})
        loaded = load(path, a_b=(5, 2), c=(3,))
        assert (loaded["a/b"] == jnp.arange(10.0).reshape(5, 2)).all()


def test_written_arrays(tmp_path):
    path = tmp_path / "1"
    arrays = {"a/b": jnp.ones((6, 2), "bfloat16"), "c": jnp.ones((), "int32"), "d": jnp.ones(3)}
    save(path, arrays)
    with relied_on(
        "orbax-checkpoint", "orbax_files.written_arrays", "zarr3 arrays in an OCDBT database"
    ):
        found = written_arrays(path, [*arrays, "e"])
        assert {name: (x.shape, x.dtype) for name, x in arrays.items()} == {
            name: (found[name].shape, found[name].dtype) for name in arrays
        }
    assert isinstance(found["e"], Exception), "it was not saved"


def test_open_arrays(tmp_path):
    """Of both versions; with a database, and with a folder an array."""
    tree = {"a.b": [jnp.arange(6.0).reshape(2, 3), jnp.ones((), "int32")], "none": None}
    handlers = [ocp.PyTreeCheckpointHandler(use_ocdbt=database) for database in (True, False)]
    for number, handler in enumerate(handlers):
        ocp.Checkpointer(handler).save(tmp_path / str(number), tree)
    orbax.save(tmp_path / "2", tree)
    for folder in (tmp_path / "0", tmp_path / "1", tmp_path / "2" / ARRAYS):
        what = "`_METADATA`, and arrays by their keys with dots between"
        with relied_on("orbax-checkpoint", "orbax_files.open_arrays", what):
            metadata = json.loads((folder / "_METADATA").read_text())
            leaves = keys_of_tree(metadata)
            assert leaves == [("a.b", "0"), ("a.b", "1")]
            assert metadata["store_array_data_equal_to_fill_value"] is True
            driver = "zarr3" if metadata["use_zarr3"] else "zarr"
            names = {"x": "a.b.0", "y": "a.b.1"}
            first, second = open_arrays(folder, names, driver).values()
            assert first.read().result().tolist() == [[0, 1, 2], [3, 4, 5]]
            assert (chunk_shape(first), chunk_shape(second)) == ((2, 3), ())
            absent = open_arrays(folder, {"x": "c"}, driver)
            assert isinstance(absent["x"], Exception)


def test_list_arrays(tmp_path):
    """Of folders and of a database, as jax's serialization and orbax write them."""
    tree = {"a": {"b": np.ones(3, np.float32)}}
    for database, driver in ((False, "zarr"), (True, "zarr3")):
        write_levanter(tmp_path / driver, tree, database=database)
        with relied_on("tensorstore", "orbax_files.list_arrays", "`.zarray` and `zarr.json`"):
            assert list_arrays(tmp_path / driver) == (driver, ["a/b"])


def test_opening_arrays_leaves_no_objects_behind(tmp_path):
    """A run that saves a thousand times would keep them all: `orbax.metadata` does."""
    save(tmp_path / "1", {"a": jnp.ones(8)})

    def objects_of_eight_calls(call):
        call()
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(8):
            call()
        gc.collect()
        return len(gc.get_objects()) - before

    assert objects_of_eight_calls(lambda: written_arrays(tmp_path / "1", ["a"])) < 8
