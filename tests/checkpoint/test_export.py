"""Exports as any reader of safetensors sees them, and imports of the same files.

jax compiles casts of single arrays: their bytes are compared with those of files.
"""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from safetensors import safe_open

from fsdp_jax.checkpoint import CheckpointError, CheckpointStore, export_params, import_params
from fsdp_jax.errors import ConfigError
from fsdp_jax.io import safetensors_writer
from fsdp_jax.io.safetensors import INDEX
from fsdp_jax.tree import map_with_path

pytestmark = pytest.mark.releases

SHAPES = {
    "embed/embedding": ((64, 24), "float32"),
    "blocks/kernel": ((4, 24, 16), "bfloat16"),
    "blocks/count": ((4,), "int32"),
    "scale": ((), "float32"),
    "nothing": ((0, 3), "float32"),
}


def sharding(shape, devices=8):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    dim = next((i for i, size in enumerate(shape) if size and size % devices == 0), None)
    return jax.NamedSharding(mesh, jax.P(*([None] * dim + ["data"] if dim is not None else [])))


@pytest.fixture(scope="module")
def params():
    numbers = np.random.default_rng(0)
    return {
        path: jax.device_put((numbers.normal(size=shape) * 100).astype(dtype), sharding(shape))
        for path, (shape, dtype) in SHAPES.items()
    }


@pytest.fixture
def store(tmp_path, params):
    state = {"params": params, "opt_state": {"mu": params["embed/embedding"]}, "step": jnp.int32(3)}
    nested = {"params": {}, **{name: state[name] for name in ("opt_state", "step")}}
    for path, leaf in params.items():
        *parents, name = path.split("/")
        node = nested["params"]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(3, nested, data={}, metadata={}, finite=True)
        store.wait()
        yield store


def read(directory):
    """Returns every tensor, read by the library that defines the format."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def targets(params, devices, dtype=None):
    return {
        path: jax.ShapeDtypeStruct(
            leaf.shape,
            dtype if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype,
            sharding=sharding(leaf.shape, devices),
        )
        for path, leaf in params.items()
    }


def assert_bits(found, expected):
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        assert (found[path].dtype, found[path].shape) == (leaf.dtype, leaf.shape), path
        assert np.asarray(found[path]).tobytes() == np.asarray(leaf).tobytes(), path


@pytest.mark.parametrize(
    ("dtype", "file_bytes"), [("float32", 1 << 20), ("bfloat16", 4000), (None, 1)]
)
def test_any_reader_of_safetensors_finds_every_parameter(
    tmp_path, store, params, dtype, file_bytes
):
    done = export_params(store, 3, tmp_path / "out", dtype=dtype, file_bytes=file_bytes)
    wanted = {
        path: leaf.astype(dtype) if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for path, leaf in params.items()
    }
    assert_bits(read(tmp_path / "out"), wanted)
    assert (done.tensors, done.size) == (len(params), sum(leaf.nbytes for leaf in wanted.values()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]
    index = tmp_path / "out" / INDEX
    assert (len(done.files) > 1) == index.exists() == (file_bytes < 1 << 20)
    if index.exists():
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == done.size
        assert content["weight_map"].keys() == params.keys()
        assert set(content["weight_map"].values()) == {
            path.name for path in (tmp_path / "out").glob("model-*")
        }
    else:
        assert done.files == ("model.safetensors",)


def test_export_and_import_are_bitwise(tmp_path, store, params):
    for devices, file_bytes in ((8, 4000), (4, 1 << 20), (1, 4000)):
        out = tmp_path / str(devices)
        export_params(store, 3, out, dtype=None, file_bytes=file_bytes)
        wanted = targets(params, devices)
        found = import_params(out, wanted)
        assert_bits(found, params)
        for path, leaf in found.items():
            assert leaf.sharding.is_equivalent_to(wanted[path].sharding, leaf.ndim)


def test_an_import_has_the_structure_of_its_target(tmp_path, store, params):
    export_params(store, 3, tmp_path / "out", dtype=None)
    tree = {
        "embed": {"embedding": 0},
        "blocks": {"kernel": 0, "count": 0},
        "scale": 0,
        "nothing": 0,
    }
    wanted = map_with_path(lambda path, _: targets(params, 8)[path], tree)
    found = import_params(tmp_path / "out", wanted)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert (found["blocks"]["kernel"] == params["blocks/kernel"]).all()
    with refused("without shardings", got="blocks/count"):
        import_params(
            tmp_path / "out",
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), wanted),
        )


def test_an_export_has_the_permissions_of_the_umask(tmp_path, store):
    before = os.umask(0o027)
    try:
        done = export_params(store, 3, tmp_path / "out", file_bytes=1)
    finally:
        os.umask(before)
    assert done.directory.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in done.directory.iterdir()} == {0o640}


def test_weights_are_cast_to_the_dtypes_of_the_target(tmp_path, store, params):
    export_params(store, 3, tmp_path / "out")
    found = import_params(tmp_path / "out", targets(params, 8, "bfloat16"))
    assert_bits(
        found, {p: x.astype("bfloat16") if x.dtype == jnp.float32 else x for p, x in params.items()}
    )


def test_exports_that_fail_leave_nothing(tmp_path, store, monkeypatch):
    (tmp_path / "there").mkdir()
    with refused("there already", error=ConfigError, where=str(tmp_path / "there")):
        export_params(store, 3, tmp_path / "there")
    expected = "float32, bfloat16, float16"
    for dtype in ("int8", "float33", "float64", "pi"):
        with refused(error=ConfigError, where="--dtype", expected=expected, got=dtype):
            export_params(store, 3, tmp_path / "out", dtype=dtype)
    with refused("no such step", got="4"):
        export_params(store, 4, tmp_path / "out")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_writer.os, "fsync", full)
    where = str(tmp_path / "out")
    with refused(error=CheckpointError, where=where, got="No space left"):
        export_params(store, 3, tmp_path / "out")
    assert not (tmp_path / "out").exists(), (
        "an export in part must not have the name of a complete one"
    )
    monkeypatch.undo()
    export_params(store, 3, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out", "there"]


def test_weights_that_do_not_fit_are_named(tmp_path, store, params):
    export_params(store, 3, tmp_path / "out")
    wanted = targets(params, 8)
    wanted["other"] = wanted.pop("scale")
    wanted["embed/embedding"] = jax.ShapeDtypeStruct(
        (64, 25), jnp.float32, sharding=sharding((64, 25))
    )
    wanted["blocks/count"] = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding((4,)))
    with refused("do not fit", error=ConfigError) as caught:
        import_params(tmp_path / "out", wanted)
    assert [line.strip() for line in caught.value.got.splitlines()] == [
        "blocks/count: expected float32[4], got I32[4]",
        "embed/embedding: expected float32[64,25], got F32[64, 24]",
        "other: missing",
        "scale: unknown",
    ]


def test_leftovers_of_killed_exports_alone_are_removed(tmp_path, store):
    """The kernel takes the lock of a killed process: its folder is one that nobody has locked."""
    target = tmp_path / "weights[1]"

    def leftovers():
        return {path.name for path in tmp_path.iterdir() if path.name.startswith(target.name + ".")}

    def make(name, *files):
        folder = tmp_path / f"{target.name}.{name}.unfinished"
        folder.mkdir()
        for file in files:
            (folder / file).write_text("{")
        return folder.name

    def values():
        """Another export, which is under way."""
        yield np.zeros(4, np.float32)
        alive = leftovers()
        assert len(alive) == 1
        # What a user made is not an export's, whatever it is called.
        users = {make("0123abcd", "notes.txt"), make("1", "notes.txt")}
        (tmp_path / f"{target.name}.01234567.unfinished").write_text("a file")
        # Killed as it wrote its weights, and as it wrote its configuration.
        make("fedcba98", "model.safetensors")
        make("89abcdef", "model.safetensors", "config.json.unfinished")
        export_params(store, 3, target)
        assert leftovers() == alive | users | {f"{target.name}.01234567.unfinished"}
        raise KeyboardInterrupt

    specs = {name: jax.ShapeDtypeStruct((4,), np.float32) for name in "ab"}
    with pytest.raises(KeyboardInterrupt):
        safetensors_writer.write_weights(target, specs, values(), file_bytes=1 << 20, metadata={})
