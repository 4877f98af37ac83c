"""Crash-safe files: content is flushed to disk before it is renamed into place."""

import os
from pathlib import Path
from typing import IO, Any

UNFINISHED = ".unfinished"  # suffix of a file or directory that is still being written


def fsync_file(file: IO[Any]) -> None:
    """Flushes an open file to disk."""
    file.flush()
    os.fsync(file.fileno())


def fsync_directory(directory: Path) -> None:
    """Flushes a directory's entries to disk: the names of its files, not their contents."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename_durably(source: Path, target: Path) -> None:
    """Renames a file or directory that is already on disk, and flushes the new name too."""
    source.rename(target)
    fsync_directory(target.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file that appears under `path` complete and on disk, or not at all."""
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.unlink(missing_ok=True)
    # Made anew: never through a link, into a pipe or over another name.
    with unfinished.open("xb") as file:
        file.write(content)
        fsync_file(file)
    rename_durably(unfinished, path)
