"""A store whose leased directory is moved, removed or replaced, at any moment of a save."""

import json
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from fsdp_jax.checkpoint import CheckpointStore, Lease
from fsdp_jax.checkpoint import store as module
from fsdp_jax.errors import DirectoryLostError


def save(store, step):
    state = {"w": jnp.asarray(np.full((16, 4), step, np.float32))}
    store.save(step, state, data={}, metadata={}, finite=True)


def save_twice(store):
    """A loss after the last check of a save is told by the next."""
    for step in (3, 4):
        save(store, step)
        store.wait()


def contents(folder):
    """{path: contents} of all files below a folder, and of the folders, which have none."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def remove(run, _):
    shutil.rmtree(run)


def move(run, aside):
    run.rename(aside)


def replace(run, aside):
    """Moves the run away; another has begun in its place, with a save and steps of its names."""
    run.rename(aside)
    run.mkdir()
    (run / "lease.json").write_text(
        json.dumps({"host": "h", "pid": 1, "process": 0, "started": ""})
    )
    for name in ("1", "2", "3", "3.unsealed", "3.unsealed.orbax-checkpoint-tmp", "1.deleting"):
        (run / "checkpoints" / name).mkdir(parents=True)
        for file in ("manifest.json", "array"):
            (run / "checkpoints" / name / file).write_text("of the other run")


def before(patched, place, act):
    """Acts once, before the first call of a function (of a module or class, by its name)."""
    (owner, name), acts = place, [act]
    function = getattr(owner, name)

    def acting(*arguments, **options):
        if acts:
            acts.pop()()
        return function(*arguments, **options)

    patched.setattr(owner, name, acting)


MOMENTS = {
    "before the save": (CheckpointStore, "save"),
    "as orbax has written": (module, "set_shapes"),
    "as it is digested": (module, "digest_files"),
    "before it is sealed": (module, "write_manifest"),
}
# What only an open directory is safe from, where it has a path: a loss between a check and the
# deed that it allows.
if sys.platform.startswith("linux"):
    MOMENTS |= {
        "before orbax writes": (module.orbax, "save_async"),
        "after the last check": (module, "rename_durably"),
        "before an old step is deleted": (CheckpointStore, "_delete_step"),
        "as an old step is deleted": (module, "_remove"),
    }


# Another run in its place could be harmed, and takes every moment; the others change less.
ONCE = [(remove, "as orbax has written"), (move, "before it is sealed")]
CASES = [(replace, moment) for moment in MOMENTS] + ONCE
REST = [(lose, moment) for lose in (remove, move) for moment in MOMENTS]


@pytest.mark.parametrize(
    ("lose", "moment"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.long) for each in REST if each not in CASES)],
)
def test_nothing_changes_where_the_directory_was(tmp_path, monkeypatch, lose, moment):
    run, aside = tmp_path / "run", tmp_path / "aside"
    lost = {}

    def act():
        lose(run, aside)
        lost.update(contents(run))

    with (
        Lease(run) as lease,
        CheckpointStore(run / "checkpoints", keep=1, lease=lease) as store,
        monkeypatch.context() as patched,
    ):
        for step in (1, 2):
            save(store, step)
        store.wait()
        before(patched, MOMENTS[moment], act)
        with refused("has lost its directory", error=DirectoryLostError, where=str(run)):
            save_twice(store)
    assert contents(run) == lost
    assert run.exists() == bool(lost)
    # What was saved before stays, unless its successor was in place already.
    if lose is not remove:
        kept = {
            int(path.name) for path in (aside / "checkpoints").iterdir() if path.name.isdecimal()
        }
        assert kept <= {2, 3}
        with CheckpointStore(aside / "checkpoints") as moved:
            assert moved.check(max(kept)).good


def test_a_store_goes_on_where_only_its_steps_were_removed(tmp_path):
    with Lease(tmp_path) as lease, CheckpointStore(tmp_path / "steps", lease=lease) as store:
        save(store, 1)
        store.wait()
        shutil.rmtree(tmp_path / "steps")
        save(store, 2)
        store.wait()
        assert store.steps() == [2]


def test_a_lease_of_another_directory_is_refused(tmp_path):
    with Lease(tmp_path / "run") as lease, refused("another directory", where="lease"):
        CheckpointStore(tmp_path / "other" / "checkpoints", lease=lease)
