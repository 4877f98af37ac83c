"""Exports as any reader of safetensors sees them, and imports of the same files."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from fsdp_jax.checkpoint import CheckpointError, CheckpointStore, export_params, import_params
from fsdp_jax.errors import ConfigError, DamageError
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
        path: jax.device_put(jnp.asarray(numbers.normal(size=shape) * 100, dtype), sharding(shape))
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
        store.save(3, nested, data={}, metadata={})
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


@pytest.mark.parametrize("file_bytes", [1 << 20, 4000, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
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


@pytest.mark.parametrize("devices", [8, 4, 1])
@pytest.mark.parametrize("file_bytes", [1 << 20, 4000])
def test_export_and_import_are_bitwise(tmp_path, store, params, devices, file_bytes):
    export_params(store, 3, tmp_path / "out", dtype=None, file_bytes=file_bytes)
    wanted = targets(params, devices)
    found = import_params(tmp_path / "out", wanted)
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
    with pytest.raises(ValueError, match=r"without shardings[^$]*blocks/count"):
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
    with pytest.raises(ConfigError, match="there already"):
        export_params(store, 3, tmp_path / "there")
    for dtype in ("int8", "float33", "float64", "pi"):
        with pytest.raises(
            ConfigError, match=rf"--dtype[^$]*float32, bfloat16, float16[^$]*{dtype}"
        ):
            export_params(store, 3, tmp_path / "out", dtype=dtype)
    with pytest.raises(ValueError, match="no such step"):
        export_params(store, 4, tmp_path / "out")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_writer.os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"could not be written[^$]*No space left"):
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
    with pytest.raises(ConfigError) as refused:
        import_params(tmp_path / "out", wanted)
    assert "blocks/count: expected float32[4], got I32[4]" in str(refused.value)
    for line in (
        "embed/embedding: expected float32[64,25], got F32[64, 24]",
        "other: missing",
        "scale: unknown",
    ):
        assert line in str(refused.value)


KILLED = """
import os, sys
import jax
import numpy as np
from fsdp_jax.io.safetensors_writer import write_weights

def values():
    yield np.zeros(4, np.float32)
    print("writing", flush=True)
    sys.stdin.readline()

specs = {name: jax.ShapeDtypeStruct((4,), np.float32) for name in "ab"}
write_weights(sys.argv[1], specs, values(), file_bytes=1 << 20, metadata={})
"""


def test_leftovers_of_a_killed_export_are_removed_and_nothing_else(tmp_path, store):
    target = tmp_path / "weights[1]"

    def leftovers():
        return {path.name for path in tmp_path.iterdir() if path.name.startswith(target.name + ".")}

    command = [sys.executable, "-c", KILLED, str(target)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as alive, subprocess.Popen(command, **pipes) as killed:
        assert killed.stdout.readline() == alive.stdout.readline() == b"writing\n"
        both = leftovers()
        assert len(both) == 2
        killed.kill()
        killed.wait()
        # What a user made is not an export's, whatever it is called.
        users = [f"{target.name}.0123abcd.unfinished", f"{target.name}.1.unfinished"]
        for name in users:
            (tmp_path / name).mkdir()
            (tmp_path / name / "notes.txt").write_text("mine")
        (tmp_path / f"{target.name}.01234567.unfinished").write_text("a file")
        # Another export was killed as it wrote its configuration.
        third = tmp_path / f"{target.name}.89abcdef.unfinished"
        third.mkdir()
        for name in ("model.safetensors", "config.json.unfinished"):
            (third / name).write_text("{")
        export_params(store, 3, target)
        mine = {*users, f"{target.name}.01234567.unfinished"}
        assert leftovers() - mine < both
        assert len(leftovers() - mine) == 1  # of the export that is alive
        assert mine < leftovers()
        alive.kill()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, r"no weights there[^$]*model\.safetensors"),
        ({"model.safetensors": "not one"}, "cannot be read"),
        ({INDEX: "{"}, "not an index"),
        ({INDEX: '{"weight_map": []}'}, "not an index"),
        ({INDEX: '{"weight_map": {"w": "../secret"}}'}, r"outside the directory[^$]*\.\./secret"),
        ({INDEX: '{"weight_map": {"w": "/etc/passwd"}}'}, "outside the directory"),
        ({INDEX: '{"weight_map": {"w": "a.safetensors"}}'}, r"cannot be read[^$]*a\.safetensors"),
    ],
)
def test_folders_without_weights_are_refused(tmp_path, params, files, said):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DamageError if files else ConfigError, match=said):
        import_params(tmp_path, targets(params, 8))
