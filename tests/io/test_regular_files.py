"""What is not a regular file is refused at once."""

import os

import pytest

from fsdp_jax.io.atomic import UNFINISHED, write_durably
from fsdp_jax.io.regular_files import NotRegularError, open_regular, read_regular, regular_opener


def test_a_file_is_read_also_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        assert read_regular(tmp_path / name) == b"content"
    with pytest.raises(OSError, match="a link, which could lead anywhere"):
        read_regular(tmp_path / "link", follow_link=False)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


@pytest.mark.parametrize("follow_link", [True, False])
def test_pipes_devices_and_folders_are_refused_without_waiting(tmp_path, follow_link):
    os.mkfifo(tmp_path / "pipe")  # a reader that waits for a writer would wait forever
    for path, kind in {
        tmp_path / "pipe": "pipe",
        "/dev/zero": "device",
        tmp_path: "folder",
    }.items():
        with pytest.raises(OSError, match=f"a {kind}, not a file: '{path}'"):
            read_regular(path, follow_link=follow_link)
        opener = regular_opener(follow_link=follow_link)
        with pytest.raises(NotRegularError), open(path, "a+", opener=opener):
            pass


def test_a_file_is_written_beside_what_stands_in_the_way(tmp_path):
    others = tmp_path / "others"
    others.write_bytes(b"kept")
    (tmp_path / f"file{UNFINISHED}").symlink_to(others)
    write_durably(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    assert not (tmp_path / "file").is_symlink()
    assert others.read_bytes() == b"kept"
    os.mkfifo(tmp_path / f"file{UNFINISHED}")  # a writer would wait for a reader
    write_durably(tmp_path / "file", b"again")
    assert (tmp_path / "file").read_bytes() == b"again"
