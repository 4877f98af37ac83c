"""Which files a path stands for: one file, the text files of a folder, or the source of Python's
standard library.
"""

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from fsdp_jax.errors import ConfigError, human_bytes, message

EMBEDDED_LIMIT = 8 * 2**20
"""Bytes of the embedded corpus: whole files, in order, up to this many."""

EMBEDDED_NAME = f"python-{sys.version_info.major}.{sys.version_info.minor}-stdlib"

JSON_SUFFIXES = (".json", ".jsonl")
"""What holds records, one field of which is a document."""

TEXT_SUFFIXES = (*JSON_SUFFIXES, ".md", ".py", ".rst", ".txt")
"""What is read from a folder."""

HIDDEN = "hidden or linked"

# Folders of the standard library that hold installed packages, tests or tools.
_NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
}


class Skipped(Counter[str]):
    """What was passed over or mended: reason -> how often. As text, `3 empty, 2 hidden or linked`;
    "" for nothing.
    """

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.items()) if count)


def embedded_files() -> list[Path]:
    """The standard library's `.py` files without tests, in the order of their paths, at most
    `EMBEDDED_LIMIT` bytes.
    """
    found, total = [], 0
    for file in walk(
        Path(sysconfig.get_paths()["stdlib"]), (".py",), Skipped(), without=_NOT_LIBRARY
    ):
        total += file.stat().st_size
        if total > EMBEDDED_LIMIT:
            break
        found.append(file)
    return found


def text_files(path: Path, skipped: Skipped) -> list[Path]:
    """The file at `path`, whatever its name, or the files below a folder that end in one of
    `TEXT_SUFFIXES`.

    Raises ConfigError where there is none.
    """
    if path.is_file():
        return [path]
    fix = "set data.path to a text file or a folder, or leave it out for the embedded corpus"
    if not path.is_dir():
        what = "The corpus does not exist."
        raise ConfigError(
            message(what, where="data.path", expected="a file or a folder", got=path, fix=fix)
        )
    found = walk(path, TEXT_SUFFIXES, skipped)
    if not found:
        expected = f"files named *{', *'.join(TEXT_SUFFIXES)}"
        got = f"{human_bytes(0)} in {path}" + (
            f" ({skipped} passed over)" if skipped.total() else ""
        )
        raise ConfigError(
            message("The corpus is empty.", where="data.path", expected=expected, got=got, fix=fix)
        )
    return found


def walk(
    root: Path, suffixes: tuple[str, ...], skipped: Skipped, *, without: Collection[str] = ()
) -> list[Path]:
    """Files below `root` with one of `suffixes`, sorted by relative POSIX path.

    Hidden files and folders, links that leave the root, and folders that are links (they may loop)
    are counted in `skipped`. Folders named in `without` are left out, uncounted.
    """
    inside, found = root.resolve(), []
    for folder, subfolders, names in os.walk(root):
        closed = [
            name
            for name in subfolders
            if name.startswith(".") or os.path.islink(os.path.join(folder, name))
        ]
        subfolders[:] = [name for name in subfolders if name not in closed and name not in without]
        skipped[HIDDEN] += len(closed)
        for file in (Path(folder, name) for name in names if name.endswith(suffixes)):
            if file.name.startswith(".") or not (
                file.is_file() and file.resolve().is_relative_to(inside)
            ):
                skipped[HIDDEN] += 1
            else:
                found.append(file)
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def read_bytes(file: Path) -> bytes:
    """The contents of a file. Raises ConfigError where it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: OSError) -> ConfigError:
    """The refusal of a file that the system does not let us read."""
    fix = "make the file readable, or point data.path elsewhere"
    return ConfigError(
        message("A corpus file cannot be read.", where=str(file), got=error, fix=fix)
    )
