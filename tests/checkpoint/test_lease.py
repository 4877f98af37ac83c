"""One writer per directory, whatever became of the one before."""

import json
import os
import subprocess
import sys

import pytest

from fsdp_jax.checkpoint import Lease
from fsdp_jax.errors import ConfigError

pytestmark = pytest.mark.core

HOLD = """
import sys
from fsdp_jax.checkpoint.lease import Lease
with Lease(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    """Another process that holds the lease of tmp_path until its stdin closes."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_file_names_the_owner_and_goes_with_it(tmp_path):
    with Lease(tmp_path / "new" / "run", process=3) as lease:
        owner = json.loads(lease.path.read_text())
        assert set(owner) == {"host", "pid", "process", "started"}
        assert (owner["pid"], owner["process"]) == (os.getpid(), 3)
    assert not lease.path.exists()
    with lease:  # and once more
        assert lease.path.exists()


def test_second_writer_is_refused_at_once(tmp_path, owner):
    started = json.loads((tmp_path / "lease.json").read_text())["started"]
    with pytest.raises(ConfigError) as refused, Lease(tmp_path):
        pass
    assert f"pid {owner.pid}, process 0, since {started}" in str(refused.value)
    assert "another `output`" in str(refused.value)
    assert owner.poll() is None
    assert (tmp_path / "lease.json").exists(), "only the owner removes it"


def test_second_writer_in_the_same_process_is_refused(tmp_path):
    with Lease(tmp_path), pytest.raises(ConfigError, match="another run"), Lease(tmp_path):
        pass
    with Lease(tmp_path):
        pass


def test_killed_owner_keeps_nobody_out(tmp_path, owner):
    owner.kill()
    owner.wait()
    assert (tmp_path / "lease.json").exists()
    with Lease(tmp_path) as lease:
        assert json.loads(lease.path.read_text())["pid"] == os.getpid()


def test_free_once_the_owner_is_done(tmp_path, owner):
    owner.stdin.close()
    assert owner.wait(60) == 0
    with Lease(tmp_path):
        pass


def test_owner_that_has_not_written_its_name_yet(tmp_path):
    with Lease(tmp_path) as lease:
        lease.path.write_text("")
        with pytest.raises(ConfigError, match="just starting"), Lease(tmp_path):
            pass


def test_lock_on_a_removed_file_does_not_count(tmp_path, monkeypatch):
    """The owner leaves between the newcomer's open and its lock: the newcomer must lock the file
    that others see.
    """
    import fcntl

    path = tmp_path / "lease.json"
    flock, calls = fcntl.flock, []

    def slow_flock(file, how):
        if not calls:
            path.unlink()
        calls.append(how)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", slow_flock)
    with Lease(tmp_path):
        assert len(calls) == 2
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_release_leaves_a_file_that_is_not_its_own(tmp_path):
    with Lease(tmp_path) as lease:
        lease.path.unlink()
        lease.path.write_text("{}")
    assert lease.path.read_text() == "{}"
