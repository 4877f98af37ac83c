"""Any damage to a file of a checkpoint is found, and the file is named."""

import json
import os
import random

import jax
import jax.numpy as jnp
import pytest

from fsdp_jax.checkpoint import CheckpointStore, DamageError, manifest
from fsdp_jax.io.digests import sealed_text

STATE = {"w": (16, 4), "b": (8,), "counter": ()}


@pytest.fixture
def step(tmp_path):
    """Returns the directory of an intact checkpoint."""
    mesh = jax.make_mesh((8,), ("data",))
    rows, replicated = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
    state = {
        name: jax.device_put(
            jax.random.normal(jax.random.key(0), shape), rows if shape else replicated
        )
        for name, shape in STATE.items()
    }
    with CheckpointStore(tmp_path) as store:
        store.save(7, state, data={"position": 3}, metadata={"mesh": {"data": 8}})
    return tmp_path / "7"


def every_file(step):
    return [*manifest.list_files(step), manifest.MANIFEST]


def problems(step):
    return manifest.check_files(step).problems


def test_an_intact_checkpoint_is_good(step):
    checked = manifest.check_files(step)
    assert checked.good
    assert checked.files == len(manifest.list_files(step)) > 5
    assert checked.size == sum((step / name).stat().st_size for name in manifest.list_files(step))
    recorded = manifest.read_manifest(step)
    assert recorded["leaves"] == {"w": "float32[16,4]", "b": "float32[8]", "counter": "float32[]"}
    assert recorded["metadata"] == {"mesh": {"data": 8}}
    assert recorded["packages"]["jax"] == jax.__version__


def test_every_flipped_bit_is_found(step):
    numbers = random.Random(0)
    for name in every_file(step):
        file = step / name
        before = file.read_bytes()
        if not before:  # orbax writes an empty file
            continue
        size = len(before)
        offsets = {0, size // 2, size - 1, *(numbers.randrange(size) for _ in range(5))}
        for offset in offsets:
            after = bytearray(before)
            after[offset] ^= 1 << numbers.randrange(8)
            file.write_bytes(after)
            (found,) = problems(step)
            assert found.startswith(f"{name}: "), found
        file.write_bytes(before)
    assert not problems(step)


@pytest.mark.parametrize("harm", ["shortened", "longer", "missing", "link", "folder", "pipe"])
def test_every_damaged_file_is_found(step, tmp_path, harm):
    for name in every_file(step):
        file, original = step / name, tmp_path / "original"
        file.rename(original)
        if harm == "shortened":
            file.write_bytes(original.read_bytes()[:-1])
        elif harm == "longer":
            file.write_bytes(original.read_bytes() + b"\n")
        elif harm == "link":
            file.symlink_to(original)
        elif harm == "folder":
            file.mkdir()
        elif harm == "pipe":  # nobody writes to it: who opened it would wait forever
            os.mkfifo(file)
        found = problems(step)
        if original.stat().st_size or harm != "shortened":  # an empty file has nothing to lose
            assert [line.partition(":")[0] for line in found] == [name], (harm, found)
        if harm == "folder":
            file.rmdir()
        original.replace(file)
    assert not problems(step)


def test_a_linked_folder_is_not_followed(step, tmp_path):
    folder = step / manifest.list_files(step)[-1].split("/")[0]
    assert folder.is_dir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert problems(step)
    assert all(line.endswith("missing") for line in problems(step))


def rewrite(step, change):
    """Changes the manifest and gives it a digest that fits."""
    body = json.loads((step / manifest.MANIFEST).read_text())
    change(body)
    (step / manifest.MANIFEST).write_text(sealed_text(body))


def test_a_listed_path_outside_the_checkpoint_is_never_read(step, tmp_path):
    (tmp_path / "secret").write_text("x")
    digest = manifest.digest_files(tmp_path, ["secret"])["secret"]
    for name in ("../secret", str(tmp_path / "secret")):
        rewrite(step, lambda body, name=name: body.update(files={name: digest}))
        assert problems(step) == (f"{name}: missing",)


def test_another_format_is_refused(step):
    rewrite(step, lambda body: body.update(format=2))
    with pytest.raises(DamageError, match="format 2, which this version does not read"):
        manifest.read_manifest(step)


@pytest.mark.parametrize(
    "change",
    [
        {"step": -7},
        {"step": 1 << 70},
        {"step": "7"},
        {"files": []},
        {"files": {"state/d": {"bytes": -1}}},
        {"files": {"state/d": "7"}},
        {"leaves": {"w": "float32[-16,4]", "b": "float32[8]", "counter": "float32[]"}},
        {"leaves": {"w": "float32[sixteen]", "b": "float32[8]", "counter": "float32[]"}},
        {"leaves": {"w": 7}},
        {"shards": {"w": [0, 4]}},
        {"shards": {"w": [2.5, 4]}},
        {"shards": {"w": None}},
        {"shards": {"w": [8, 4]}},
        {"leaves": {"w": "float99[16,4]", "b": "float32[8]", "counter": "float32[]"}},
        {"keys": None},
        {"format": None},
    ],
    ids=str,
)
def test_entries_that_no_save_writes_are_damage(step, change):
    """Though the digest fits them: nothing is computed with them."""
    rewrite(step, lambda body: body.update(change))
    assert [line.partition(":")[0] for line in problems(step)] == ["manifest.json"]
    rewrite(step, lambda body: body.pop(*change))
    assert problems(step)


def test_a_manifest_of_a_million_brackets_is_damaged(step):
    (step / manifest.MANIFEST).write_text("[" * 1_000_000)
    assert problems(step)[0].startswith("manifest.json: ")


def test_a_step_in_a_folder_of_another_number_is_damaged_until_it_is_renamed_back(step):
    """A run would train on from the wrong step, data position and learning rate."""
    renamed = step.rename(step.with_name("9"))
    told = "manifest.json: of step 7: the folder was renamed; rename it back"
    assert problems(renamed) == (told,)
    with CheckpointStore(step.parent) as store:
        with pytest.raises(DamageError, match="of step 7: the folder was renamed"):
            store.restore(9, {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=jax.P())})
        aside = renamed.rename(step.with_name("7.damaged"))
        assert store.steps() == []
        aside.rename(step)
        assert store.check(7).good


def test_a_step_without_a_manifest_is_damaged(step):
    (step / manifest.MANIFEST).unlink()
    with CheckpointStore(step.parent) as store:
        assert store.steps() == [7]
        assert store.check(7).problems == ("manifest.json: missing",)
        with pytest.raises(DamageError, match=r"manifest.json[^$]*missing"):
            store.restore(7, {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=jax.P())})


def test_files_that_the_manifest_does_not_list_are_ignored(step):
    (step / "note.txt").write_text("mine")
    assert not problems(step)


def test_several_readers_check_a_part_each(step):
    alone = manifest.check_files(step)
    parts = [manifest.check_files(step, part=part, parts=3) for part in range(3)]
    assert sum(part.files for part in parts) == alone.files
    assert sum(part.size for part in parts) == alone.size


def test_a_file_that_the_disk_cannot_read_is_named(step, monkeypatch):
    bad = manifest.list_files(step)[0]
    digest = manifest.digest_file

    def failing(path, **options):
        if path == step / bad:
            raise OSError(5, "Input/output error")
        return digest(path, **options)

    monkeypatch.setattr(manifest, "digest_file", failing)
    assert problems(step) == (f"{bad}: Input/output error",)


def test_many_problems_are_counted():
    checked = manifest.Checked(0, 0, 0.0, tuple(f"file{i}: missing" for i in range(25)))
    assert checked.summary().splitlines()[-1].strip() == "and 15 more"
