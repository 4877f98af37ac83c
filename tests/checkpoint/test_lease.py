"""One writer per directory, also after the writer before was killed."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from collected import collected
from refusals import refused

from fsdp_jax.checkpoint import Lease
from fsdp_jax.checkpoint import lease as module
from fsdp_jax.errors import ConfigError, DirectoryLostError

# A process of its own that holds a lease, as the owner of one does.
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


@pytest.mark.long
def test_a_second_writer_is_refused_until_the_owner_has_gone(tmp_path):
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
            got = f"pid {owner.pid}, process 0, since {started}"
            with refused(error=ConfigError, got=got), Lease(tmp_path):
                pass
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
    with Lease(tmp_path) as lease:
        owner = json.loads(lease.path.read_text())
        got = "host {host}, pid {pid}, process {process}, since {started}".format(**owner)
        fix = "another directory (`output`)"
        with refused("another run", error=ConfigError, got=got, fix=fix), Lease(tmp_path):
            pass
        assert lease.path.exists(), "only the owner removes it"
    # What a killed owner leaves is no lease: the kernel's lock has gone with it.
    lease.path.write_text(json.dumps(owner))
    with Lease(tmp_path):
        assert json.loads(lease.path.read_text())["pid"] == os.getpid()


@pytest.fixture
def joined(monkeypatch):
    """This process as one of several; what these tell each other is up to the test."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)


def test_processes_give_the_directory_the_same_number(tmp_path, monkeypatch, joined):
    monkeypatch.setattr(
        module, "gather_from_processes", lambda own: np.array([own, max(int(own), 500)])
    )
    with Lease(tmp_path) as lease:
        assert lease._folder == 500
        lease.require_held()


def test_a_directory_that_not_every_process_sees_is_refused(tmp_path, monkeypatch, joined):
    monkeypatch.setattr(module, "in_any_process", lambda own: True)
    with refused("not every process sees", error=ConfigError, where=str(tmp_path)):
        Lease(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_without_a_name_yet_is_said_to_be_starting(tmp_path):
    with Lease(tmp_path) as lease:
        lease.path.write_text("")
        with refused(error=ConfigError, got="just starting"), Lease(tmp_path):
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


def test_what_merely_has_the_name_of_the_lease_is_left_alone(tmp_path):
    """A link's target would be overwritten; a pipe would be awaited."""
    precious, lease = tmp_path / "precious", tmp_path / "lease.json"
    precious.write_text("precious")
    ways = {
        "link": lambda: lease.symlink_to(precious),
        "second name": lambda: lease.hardlink_to(precious),
        "pipe": lambda: os.mkfifo(lease),
        "folder": lease.mkdir,
    }
    with collected() as case:
        for kind, make in ways.items():
            make()
            with case(kind):
                with refused(error=ConfigError, where=str(lease), fix="remove it"):
                    Lease(tmp_path).__enter__()
                assert lease.exists()
                assert precious.read_text() == "precious"
            lease.rmdir() if kind == "folder" else lease.unlink()


def replace_by(other):
    """Makes a change that moves a run's directory away, and `other` to its place."""

    def change(run, aside):
        run.rename(aside)
        other(run)

    return change


def lose_file(run, _):
    (run / "lease.json").unlink()


def lose_to_a_copy(run, aside):
    shutil.copytree(run, aside)
    shutil.rmtree(run)
    aside.rename(run)


# What happens to the directory `run`, which may be moved to `aside` -> what is told.
LOSSES = {
    "removed": (lambda run, _: shutil.rmtree(run), "No such file or directory; the run's own was"),
    "moved": (lambda run, aside: run.rename(aside), "the run's own is at {aside}"),
    "another folder": (replace_by(Path.mkdir), "another directory is there; .*is at {aside}"),
    "a file": (replace_by(Path.touch), "is at {aside}"),
    "its file removed": (lose_file, "its lease.json was removed or replaced"),
    "a copy": (lose_to_a_copy, "another lease is there, of host .*; the run's own was removed"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_lost_directory_is_told_with_what_became_of_it(tmp_path, kind):
    change, told = LOSSES[kind]
    run, aside = tmp_path / "run", tmp_path / "aside"
    lease = Lease(run)
    with refused("not held", where=str(lease.path)):
        lease.require_held()
    with lease:
        lease.require_held()
        change(run, aside)
        before = sorted(tmp_path.rglob("*"))
        with refused("has lost its directory", error=DirectoryLostError, where=str(run)) as lost:
            lease.require_held()
        told = told.format(aside=aside)
        if not sys.platform.startswith("linux"):  # where a directory does not tell its new name
            told = "removed or moved|was removed or replaced"
        assert re.search(told, lost.value.got), lost.value.got
        # Where it was moved to, a write by the anchor still arrives, and nowhere else.
        assert sorted(tmp_path.rglob("*")) == before
    assert [path for path in before if path not in tmp_path.rglob("*")] in (
        [],
        [aside / "lease.json"],
    )


def test_another_run_in_its_place_is_named_and_keeps_its_lease(tmp_path):
    run, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(tmp_path / "first")
    (tmp_path / "first").mkdir()
    with Lease(run) as lease, Lease(link) as linked:
        run.rename(tmp_path / "aside")
        link.unlink()
        link.symlink_to(tmp_path / "second")
        (tmp_path / "second").mkdir()
        with Lease(run) as other, Lease(link, process=5) as second:
            with refused(error=DirectoryLostError, got=f"pid {os.getpid()}, process"):
                lease.require_held()
            with refused(error=DirectoryLostError, got="process 5, since"):
                linked.require_held()
            lease.__exit__()
            linked.__exit__()
            other.require_held()
            second.require_held()


def test_a_stale_directory_is_lost_and_a_disk_that_fails_is_not(tmp_path, monkeypatch):
    lstat = Path.lstat
    number = errno.ESTALE

    def fail(path):
        if path.name == "lease.json":
            raise OSError(number, os.strerror(number), str(path))
        return lstat(path)

    with Lease(tmp_path) as lease:
        monkeypatch.setattr(Path, "lstat", fail)
        with refused(error=DirectoryLostError, got="Stale file handle"):
            lease.require_held()
        number = errno.EIO  # the write that follows tells
        lease.require_held()


def test_what_is_written_by_the_anchor_is_told_by_its_name(tmp_path):
    run = tmp_path / "run"
    with Lease(run) as lease:
        with pytest.raises(OSError, match=f"'{run}/no/file'"), lease.writing():
            (lease.anchor / "no" / "file").write_text("")
        run.rename(tmp_path / "aside")
        with refused(error=DirectoryLostError), lease.writing():
            raise AssertionError("the block does not begin")
