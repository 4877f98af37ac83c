"""Finds and opens the files of a corpus: one, a folder's, or Python's standard library.

A file is text or records by its suffix, in upper or lower case and before that of a compression,
and compressed by its content.
"""

import bz2
import gzip
import lzma
import os
import re
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from fsdp_jax.data.options import SpecialTokens
from fsdp_jax.errors import ConfigError, DamageError, extra
from fsdp_jax.io.regular_files import open_regular

EMBEDDED_LIMIT = 8 * 2**20  # bytes of the embedded corpus: whole files, in order
EMBEDDED_NAME = f"python-{sys.version_info.major}.{sys.version_info.minor}-stdlib"
# files of records, one field of which is a document
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
TEXT_SUFFIXES = (*JSON_SUFFIXES, ".md", ".py", ".rst", ".txt")  # read from a folder
HIDDEN = "hidden or linked"
NOT_READ = "not read"  # the suffix follows in brackets
# Folders of the standard library that hold installed packages, tests or tools.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_BYTECODE = {"__pycache__"}
HEAD = 512  # bytes that tell the format of a file
DAMAGED = (EOFError, zlib.error, lzma.LZMAError)  # of a compressed file, besides OSErrors


class Skipped(Counter[str]):
    """Counts skipped and repaired texts, by reason; as text, `3 empty, 2 hidden or linked`."""

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.items()) if count)

    def count_spellings(
        self, texts: Iterable[str], spellings: Collection[str], how: SpecialTokens
    ) -> None:
        """Counts special tokens that texts spell. `how` they are read: as text, or as tokens."""
        if spellings:
            found = spelling_pattern(tuple(spellings)).findall
            reason = f"spellings of special tokens read as {how} (special_tokens)"
            self[reason] += sum(len(found(text)) for text in texts)

    def of(self, start: str) -> dict[str, int]:
        """Selects {reason: count} of the reasons that start so."""
        return {reason: count for reason, count in self.items() if reason.startswith(start)}

    def note(self, text: str) -> str:
        """Formats the counts into the `{}` of `text`; "" if nothing was skipped."""
        if not self.total():
            return ""
        return text.format(self)


@cache
def spelling_pattern(spellings: tuple[str, ...]) -> re.Pattern[str]:
    """Makes a pattern of any of the texts, the longest first; of none it matches nothing."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def embedded_files() -> list[Path]:
    """Lists the standard library's `.py` files by path, at most `EMBEDDED_LIMIT` bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    total = 0
    for file in find_files(library, (".py",), Skipped(), without=_NOT_LIBRARY | _BYTECODE):
        total += file.stat().st_size
        if total > EMBEDDED_LIMIT:
            break
        files.append(file)
    return files


def text_files(path: Path, skipped: Skipped) -> list[Path]:
    """Lists the file at `path`, or a folder's text files. Raises ConfigError without any."""
    # a file is read whatever its name, of a folder only files with the suffix of a text
    if path.is_file():
        return [path]
    fix = "set data.path to a text file or a folder, or leave it out for the embedded corpus"
    if not path.is_dir():
        what = "the corpus does not exist"
        if path.exists():
            what = "the corpus is neither a file nor a folder"
        expected = "a file or a folder"
        raise ConfigError(what, where="data.path", expected=expected, got=path, fix=fix)
    files = find_files(path, TEXT_SUFFIXES, skipped, without=_BYTECODE)
    expected = f"files named *{', *'.join(TEXT_SUFFIXES)}, plain or compressed"
    if not files:
        raise empty_corpus_error(f"none in {path}", skipped, expected=expected, fix=fix)
    others = Skipped(skipped.of(NOT_READ))
    if others.total() > len(files):
        what = "most files of the folder are not read"
        fix = "move them away; or set data.kind to datasets for .parquet and .csv"
        got = f"{len(files):,} read, {others}"
        raise ConfigError(what, where="data.path", expected=expected, got=got, fix=fix)
    return files


def empty_corpus_error(got: str, skipped: Skipped, *, expected: str, fix: str) -> ConfigError:
    """Makes the error for a corpus without text, with the counts of skipped texts."""
    what = "the corpus is empty"
    got += skipped.note(" ({} skipped)")
    return ConfigError(what, where="data.path", expected=expected, got=got, fix=fix)


def text_suffix(path: str | Path) -> str:
    """Finds the suffix in lower case, before that of a compression: `.jsonl` of `A.JSONL.gz`."""
    name = Path(str(path).lower())
    return Path(name.stem).suffix if name.suffix in COMPRESSIONS else name.suffix


def find_files(
    root: Path, suffixes: tuple[str, ...], skipped: Skipped, *, without: Collection[str] = ()
) -> list[Path]:
    """Finds the files below `root` with one of `suffixes`, sorted by relative POSIX path.

    Counted in `skipped` are files with other suffixes, and hidden files and folders, links that
    leave the root, and folders that are links (they may loop). Folders named in `without` are left
    out, uncounted.
    """
    resolved_root = root.resolve()
    files = []
    for folder, subfolders, names in os.walk(root):
        # folders that are not entered are counted, unless they are left out by name
        links = {name for name in subfolders if Path(folder, name).is_symlink()}
        closed = [name for name in subfolders if name.startswith(".") or name in links]
        skipped[HIDDEN] += len(closed)
        # os.walk descends into the folders that are left in its list.
        subfolders[:] = [name for name in subfolders if name not in closed and name not in without]
        # files: a link is read where it stays inside
        for file in (Path(folder, name) for name in names):
            if text_suffix(file) not in suffixes:
                if not file.name.startswith("."):
                    skipped[f"{NOT_READ} (*{file.suffix.lower() or ', no suffix'})"] += 1
                continue
            inside = file.is_file() and file.resolve().is_relative_to(resolved_root)
            if inside and not file.name.startswith("."):
                files.append(file)
            else:
                skipped[HIDDEN] += 1
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _open_zstandard(file: IO[bytes]) -> BufferedReader:
    """Opens a file that Zstandard compressed, by the package that reads datasets."""
    with extra("hf"):
        import pyarrow  # type: ignore[import-untyped]
    raw: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    return BufferedReader(raw)


COMPRESSIONS: dict[str, tuple[bytes, Callable[[Any], Any]]] = {
    ".gz": (rb"\x1f\x8b", gzip.open),
    ".bz2": (rb"BZh\d1AY&SY", bz2.open),
    ".xz": (rb"\xfd7zXZ\0", lzma.open),
    ".zst": (rb"\x28\xb5\x2f\xfd", _open_zstandard),
}
"""{suffix: (a pattern of the first bytes, how it is opened)}."""
NO_TEXT = {b"PAR1": "a parquet table", b"PK\3\4": "a zip archive", b"%PDF-": "a PDF"}


@contextmanager
def open_text(file: Path) -> Iterator[IO[bytes]]:
    """Opens the bytes of a text, decompressed.

    Raises ConfigError if the file cannot be read or is a table or an archive, and DamageError if it
    cannot be decompressed, also for what the block reads.
    """
    with _errors_of(file), BufferedReader(open_regular(file)) as raw:
        head = raw.peek(HEAD)
        reader: IO[bytes] = raw
        opener = next(
            (each for start, each in COMPRESSIONS.values() if re.match(start, head)), None
        )
        if opener is not None:
            reader = opener(raw)
            head = reader.peek(HEAD)  # type: ignore[attr-defined]
        _check_text(file, head)
        yield reader


def _check_text(file: Path, head: bytes) -> None:
    """Raises ConfigError for the first bytes of a format that is no text."""
    kinds = [kind for start, kind in NO_TEXT.items() if head.startswith(start)]
    if head[257:262] == b"ustar":
        kinds = ["a tar archive"]
    if text_suffix(file) == ".csv":
        kinds = ["a table, as its suffix says"]
    if kinds:
        fix = "extract its text, or set data.path otherwise"
        if "table" in kinds[0]:
            fix = "set data.kind to datasets"
        raise ConfigError("a file is not text", where=str(file), got=kinds[0], fix=fix)


def read_bytes(file: Path) -> bytes:
    """Reads a text; errors are those of `open_text`."""
    with open_text(file) as reader:
        return reader.read()


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    """Turns errors of reading `file`, a file of a corpus, into ones that name it."""
    try:
        yield
    except (OSError, *DAMAGED) as error:
        if isinstance(error, OSError) and error.errno is not None:
            what, fix = "a corpus file cannot be read", "make it readable, or set data.path"
            raise ConfigError(what, where=str(file), got=error, fix=fix) from error
        # of the data, not of the file: the packages give no number
        what, fix = "a compressed file is damaged", "restore the file"
        raise DamageError(what, where=str(file), got=error, fix=fix) from error
