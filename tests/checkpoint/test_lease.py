"""One writer per directory, also after the writer before was killed."""

import json
import os
import subprocess
import sys

import pytest

from fsdp_jax.checkpoint import Lease
from fsdp_jax.errors import ConfigError

HOLD = """
import sys
from fsdp_jax.checkpoint.lease import Lease
for line in sys.stdin:  # "lease" and "release" in turn
    with Lease(sys.argv[1]):
        print("held", flush=True)
        sys.stdin.readline()
    print("released", flush=True)
"""


def test_the_file_names_the_owner_and_is_removed_on_exit(tmp_path):
    with Lease(tmp_path / "new" / "run", process=3) as lease:
        owner = json.loads(lease.path.read_text())
        assert set(owner) == {"host", "pid", "process", "started"}
        assert (owner["pid"], owner["process"]) == (os.getpid(), 3)
    assert not lease.path.exists()
    with lease:  # and once more
        assert lease.path.exists()


def test_a_second_writer_is_refused_until_the_owner_leaves_or_is_killed(tmp_path):
    file = tmp_path / "lease.json"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as owner:
        try:
            owner.stdin.write("lease\n")
            assert owner.stdout.readline() == "held\n"
            started = json.loads(file.read_text())["started"]
            with pytest.raises(ConfigError) as refused, Lease(tmp_path):
                pass
            assert f"pid {owner.pid}, process 0, since {started}" in str(refused.value)
            assert "another `output`" in str(refused.value)
            assert owner.poll() is None
            assert file.exists(), "only the owner removes it"

            owner.stdin.write("release\n")
            assert owner.stdout.readline() == "released\n"
            with Lease(tmp_path):
                pass

            owner.stdin.write("lease\n")
            assert owner.stdout.readline() == "held\n"
        finally:
            owner.kill()
    assert file.exists(), "the owner could not remove it"
    with Lease(tmp_path):
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_a_second_writer_in_the_same_process_is_refused(tmp_path):
    with Lease(tmp_path), pytest.raises(ConfigError, match="another run"), Lease(tmp_path):
        pass
    with Lease(tmp_path):
        pass


def test_an_owner_that_has_not_written_its_name_yet_is_said_to_be_starting(tmp_path):
    with Lease(tmp_path) as lease:
        lease.path.write_text("")
        with pytest.raises(ConfigError, match="just starting"), Lease(tmp_path):
            pass


def test_a_lock_on_a_removed_file_does_not_count(tmp_path, monkeypatch):
    """The owner leaves between the second writer's open and its lock."""
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


def test_release_does_not_remove_a_file_of_another_owner(tmp_path):
    with Lease(tmp_path) as lease:
        lease.path.unlink()
        lease.path.write_text("{}")
    assert lease.path.read_text() == "{}"


@pytest.mark.parametrize("kind", ["link", "second name", "pipe", "folder"])
def test_what_merely_has_the_name_of_the_lease_is_refused_and_left_alone(tmp_path, kind):
    """A link's target would be overwritten; a pipe would be awaited."""
    precious, lease = tmp_path / "precious", tmp_path / "lease.json"
    precious.write_text("precious")
    make = {
        "link": lambda: lease.symlink_to(precious),
        "second name": lambda: lease.hardlink_to(precious),
        "pipe": lambda: os.mkfifo(lease),
        "folder": lease.mkdir,
    }
    make[kind]()
    with pytest.raises(ConfigError, match=r"the name of the lease[^$]*fix: +remove it"):
        Lease(tmp_path).__enter__()
    assert lease.exists()
    assert precious.read_text() == "precious"
