"""Any name of a directory serves to save, verify, restore and export, or is refused at once."""

import os
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collected import collected
from refusals import refused

from fsdp_jax.checkpoint import CheckpointError, CheckpointStore, import_params
from fsdp_jax.checkpoint.verify import export_run, verify_run
from fsdp_jax.compat.orbax_files import LiteralPath
from fsdp_jax.errors import ConfigError

PUNCTUATION = [f"a{each}b" for each in string.punctuation if each not in "/\\"]
# Read as patterns, the last two would match the directories beside them.
NAMES = [*PUNCTUATION, "~", "-x", " a b ", "a\nb\tc", "é日本", "**", "[ab]*?", "a", "[ab]", "?"]
STATE = {"params": {"w": jnp.arange(8.0)}}


def target():
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), STATE
    )


@pytest.mark.parametrize("run", ["/".join(NAMES), NAMES[-2]], ids=["all", "pattern"])
def test_a_state_comes_back_bit_for_bit(tmp_path, run):
    (tmp_path / "a/checkpoints").mkdir(parents=True)  # what a pattern could match
    with CheckpointStore(tmp_path / run / "checkpoints", asynchronous=False) as store:
        store.save(1, STATE, data={}, metadata={}, finite=True)
        restored, *_ = store.restore(1, target())
    assert (np.asarray(restored["params"]["w"]) == np.arange(8.0)).all()
    assert verify_run(tmp_path / run).good
    export_run(tmp_path / run, tmp_path / run / "[weights]*", step=None, dtype=None)
    imported = import_params(tmp_path / run / "[weights]*", target()["params"])
    assert (np.asarray(imported["w"]) == np.arange(8.0)).all()


def test_what_orbax_takes_for_another_directory_is_refused(tmp_path):
    """Before anything is written."""
    with collected() as case:
        for number, name in enumerate(["/s3/run", "logs:gs:", os.fsdecode(b"a\xff"), "a\\b"]):
            folder = tmp_path / str(number)
            folder.mkdir()
            fix = "a link with a plain name"
            with case(ascii(name)):
                with refused("written under this name", error=ConfigError, fix=fix):
                    CheckpointStore(folder / name / "checkpoints")
                assert not list(folder.iterdir())
    # The fix works.
    (folder / name).mkdir()
    (folder / "plain").symlink_to(folder / name)
    with CheckpointStore(folder / "plain" / "checkpoints") as store:
        store.save(1, STATE, data={}, metadata={}, finite=True)
        store.restore(1, target())


def test_a_step_that_cannot_be_read_back_is_never_sealed(tmp_path, monkeypatch):
    """Orbax finds no files to merge, and says so in a warning alone."""
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(1, STATE, data={}, metadata={})
        store.wait()
        with monkeypatch.context() as patched:
            patched.setattr(LiteralPath, "glob", lambda *_: iter(()))
            store.save(2, STATE, data={}, metadata={})
            with refused("could not be written", error=CheckpointError, got="params/w"):
                store.wait()
        assert sorted(os.listdir(tmp_path)) == ["1"]
        assert store.check(1).good
        store.save(2, STATE, data={}, metadata={})
    assert sorted(os.listdir(tmp_path)) == ["2"]
