"""Any damage to a file of a checkpoint is found, and the file is named."""

import itertools
import json
import os
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collected import collected
from refusals import refused

from fsdp_jax.checkpoint import CheckpointStore, DamageError, manifest
from fsdp_jax.io.digests import sealed_text

STATE = {"w": (16, 4), "b": (8,), "counter": ()}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A checkpoint, which no test changes."""
    root = tmp_path_factory.mktemp("intact")
    mesh = jax.make_mesh((8,), ("data",))
    rows, replicated = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
    state = {
        name: jax.device_put(
            np.random.default_rng(0).normal(size=shape), rows if shape else replicated
        )
        for name, shape in STATE.items()
    }
    with CheckpointStore(root) as store:
        store.save(7, state, data={"position": 3}, metadata={"mesh": {"data": 8}}, finite=True)
    return root / "7"


@pytest.fixture
def step(intact, tmp_path):
    """The directory of a copy to change."""
    return shutil.copytree(intact, tmp_path / "7")


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


def test_every_damaged_file_is_found(step, tmp_path):
    original = tmp_path / "original"
    harms = {
        "shortened": lambda file: file.write_bytes(original.read_bytes()[:-1]),
        "longer": lambda file: file.write_bytes(original.read_bytes() + b"\n"),
        "missing": lambda file: None,
        "link": lambda file: file.symlink_to(original),
        "folder": lambda file: file.mkdir(),
        "pipe": os.mkfifo,  # nobody writes to it: who opened it would wait forever
    }
    with collected() as case:
        for name, (harm, damage) in itertools.product(every_file(step), harms.items()):
            file = step / name
            file.rename(original)
            damage(file)
            with case(f"{name} {harm}"):
                found = [line.partition(":")[0] for line in problems(step)]
                nothing_lost = harm == "shortened" and not original.stat().st_size
                assert found == [name] * (not nothing_lost)
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
    with refused(error=DamageError, got="format 2, which this version does not read"):
        manifest.read_manifest(step)


def test_entries_that_no_save_writes_are_damage(step):
    """Though the digest fits them: nothing is computed with them."""
    changes = [
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
    ]
    before = (step / manifest.MANIFEST).read_text()
    with collected() as case:
        for change in changes:
            with case(change):
                rewrite(step, lambda body, change=change: body.update(change))
                assert [line.partition(":")[0] for line in problems(step)] == ["manifest.json"]
                rewrite(step, lambda body, change=change: body.pop(*change))
                assert problems(step)
            (step / manifest.MANIFEST).write_text(before)


def test_a_manifest_of_a_million_brackets_is_damaged(step):
    (step / manifest.MANIFEST).write_text("[" * 1_000_000)
    assert problems(step)[0].startswith("manifest.json: ")


def test_a_step_in_a_folder_of_another_number_is_damaged(step):
    """A run would train on from the wrong step, data position and learning rate."""
    renamed = step.rename(step.with_name("9"))
    told = "manifest.json: of step 7: the folder was renamed; rename it back"
    assert problems(renamed) == (told,)
    with CheckpointStore(step.parent) as store:
        with refused(error=DamageError, got="of step 7: the folder was renamed"):
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
        with refused(error=DamageError, where=str(step / "manifest.json"), got="missing"):
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
