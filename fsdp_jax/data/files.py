"""Finds the files of a corpus: one file, a folder's text files, or Python's standard library."""

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp_jax.errors import ConfigError
from fsdp_jax.io.regular_files import read_regular

EMBEDDED_LIMIT = 8 * 2**20  # bytes of the embedded corpus: whole files, in order
EMBEDDED_NAME = f"python-{sys.version_info.major}.{sys.version_info.minor}-stdlib"
JSON_SUFFIXES = (".json", ".jsonl")  # files of records, one field of which is a document
TEXT_SUFFIXES = (*JSON_SUFFIXES, ".md", ".py", ".rst", ".txt")  # read from a folder
HIDDEN = "hidden or linked"
# Folders of the standard library that hold installed packages, tests or tools.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


class Skipped(Counter[str]):
    """Counts what was skipped or repaired, by reason; as text, `3 empty, 2 hidden or linked`."""

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.items()) if count)

    def note(self, text: str) -> str:
        """Returns `text` with the counts in place of its `{}`; "" if nothing was skipped."""
        return text.format(self) if self.total() else ""


def embedded_files() -> list[Path]:
    """Returns the standard library's `.py` files by path, at most `EMBEDDED_LIMIT` bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    total = 0
    for file in find_files(library, (".py",), Skipped(), without=_NOT_LIBRARY):
        total += file.stat().st_size
        if total > EMBEDDED_LIMIT:
            break
        files.append(file)
    return files


def text_files(path: Path, skipped: Skipped) -> list[Path]:
    """Returns the file at `path`, or a folder's text files. Raises ConfigError without any."""
    if path.is_file():
        return [path]
    fix = "set data.path to a text file or a folder, or leave it out for the embedded corpus"
    if not path.is_dir():
        fault = "is neither a file nor a folder" if path.exists() else "does not exist"
        what = f"the corpus {fault}"
        expected = "a file or a folder"
        raise ConfigError(what, where="data.path", expected=expected, got=path, fix=fix)
    files = find_files(path, TEXT_SUFFIXES, skipped)
    if not files:
        expected = f"files named *{', *'.join(TEXT_SUFFIXES)}"
        raise empty_corpus_error(f"none in {path}", skipped, expected=expected, fix=fix)
    return files


def empty_corpus_error(got: str, skipped: Skipped, *, expected: str, fix: str) -> ConfigError:
    """Returns the error for a corpus without text; it counts what was skipped."""
    what = "the corpus is empty"
    got += skipped.note(" ({} skipped)")
    return ConfigError(what, where="data.path", expected=expected, got=got, fix=fix)


def find_files(
    root: Path, suffixes: tuple[str, ...], skipped: Skipped, *, without: Collection[str] = ()
) -> list[Path]:
    """Returns the files below `root` with one of `suffixes`, sorted by relative POSIX path.

    Hidden files and folders, links that leave the root, and folders that are links (they may loop)
    are counted in `skipped`. Folders named in `without` are left out, uncounted.
    """
    resolved_root = root.resolve()
    files = []
    for folder, subfolders, names in os.walk(root):
        links = {name for name in subfolders if Path(folder, name).is_symlink()}
        closed = [name for name in subfolders if name.startswith(".") or name in links]
        skipped[HIDDEN] += len(closed)
        # os.walk descends into the folders that are left in its list.
        subfolders[:] = [name for name in subfolders if name not in closed and name not in without]
        for file in (Path(folder, name) for name in names if name.endswith(suffixes)):
            inside = file.is_file() and file.resolve().is_relative_to(resolved_root)
            if inside and not file.name.startswith("."):
                files.append(file)
            else:
                skipped[HIDDEN] += 1
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def read_bytes(file: Path) -> bytes:
    """Returns the contents of a file; raises ConfigError if it cannot be read."""
    with os_errors_as_config_error(file):
        return read_regular(file)


@contextmanager
def os_errors_as_config_error(file: Path) -> Iterator[None]:
    """Turns an OSError of reading `file`, a file of a corpus, into a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        what, fix = "a corpus file cannot be read", "make it readable, or set data.path otherwise"
        raise ConfigError(what, where=str(file), got=error, fix=fix) from error
