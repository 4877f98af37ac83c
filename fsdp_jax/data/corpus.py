"""A corpus is text as bytes, split into a training and a held-out part.

The embedded corpus is the source text of the running Python's standard library: there on every machine, nothing to
download, and alike enough between releases that curves compare, though not byte for byte (the digest tells).
"""

import dataclasses
import hashlib
import os
import sys
import sysconfig
from collections.abc import Collection
from pathlib import Path

import numpy as np

from fsdp_jax.errors import ConfigError, human_bytes, message

EMBEDDED_LIMIT = 8 * 2**20
"""Bytes of the embedded corpus: whole files, in order, up to this many."""

TEXT_SUFFIXES = (".jsonl", ".md", ".py", ".rst", ".txt")
"""What is read from a folder."""

# Folders of the standard library that hold installed packages, tests or tools.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Text as bytes. Both arrays are uint8 of one dimension and cannot be written."""

    train: np.ndarray
    held_out: np.ndarray
    name: str
    files: int
    """How many files were read."""
    skipped: int
    """Text files and folders that were passed over: hidden ones, and symbolic links that leave the folder."""
    digest: str
    """SHA-256, in hexadecimal, of the training bytes followed by the held-out bytes."""


def load_corpus(path: str | None = None, *, held_out: float = 0.05) -> Corpus:
    """Reads `path`: a file's bytes, or every text file (`TEXT_SUFFIXES`) below a folder, in the order of their paths.

    None is the embedded corpus: the standard library's `.py` files without tests, at most `EMBEDDED_LIMIT` bytes.
    `held_out`, from 0 to 0.5, is about the share kept from training: every k-th file where that makes at least two
    files, else the end of the bytes. Raises ConfigError where there is nothing to read.
    """
    if not 0 <= held_out <= 0.5:
        raise ConfigError(message("The held-out share is out of range.", expected="0 to 0.5", got=held_out))
    if path is None:
        root, skipped = Path(sysconfig.get_paths()["stdlib"]), 0
        name = f"python-{sys.version_info.major}.{sys.version_info.minor}-stdlib"
        contents = _read(_walk(root, (".py",), without=_NOT_LIBRARY)[0], limit=EMBEDDED_LIMIT)
    else:
        root = Path(path).expanduser()
        files, skipped = _text_files(root)
        name, contents = root.resolve().name, _read(files)
    if not any(contents):
        raise ConfigError(_nothing_in(root, skipped))
    train, rest = _split(contents, held_out)
    digest = hashlib.sha256(train + rest).hexdigest()
    return Corpus(
        train=np.frombuffer(train, np.uint8),
        held_out=np.frombuffer(rest, np.uint8),
        name=name,
        files=len(contents),
        skipped=skipped,
        digest=digest,
    )


def decode(tokens: np.ndarray) -> str:
    """Byte tokens of any integer dtype and shape [T] as text; what is not UTF-8 becomes U+FFFD."""
    return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")


def _text_files(path: Path) -> tuple[list[Path], int]:
    """The files that `path` stands for, and how many were passed over."""
    if path.is_dir():
        return _walk(path, TEXT_SUFFIXES)
    if path.is_file():
        return [path], 0
    fix = "set data.path to a text file or a folder, or leave it out for the embedded corpus"
    raise ConfigError(message("The corpus does not exist.", where="data.path", expected="a file", got=path, fix=fix))


def _walk(root: Path, suffixes: tuple[str, ...], without: Collection[str] = ()) -> tuple[list[Path], int]:
    """Files below `root` with one of `suffixes`, sorted by relative POSIX path, and how many were passed over.

    Folders named in `without` are left out, uncounted. Folders that are symbolic links are never entered: they may
    leave the root, and they may loop.
    """
    inside, found, skipped = root.resolve(), [], 0
    for folder, subfolders, names in os.walk(root):
        closed = [name for name in subfolders if name.startswith(".") or os.path.islink(os.path.join(folder, name))]
        subfolders[:] = [name for name in subfolders if name not in closed and name not in without]
        skipped += len(closed)
        for file in (Path(folder, name) for name in names if name.endswith(suffixes)):
            if file.name.startswith(".") or not (file.is_file() and file.resolve().is_relative_to(inside)):
                skipped += 1
            else:
                found.append(file)
    return sorted(found, key=lambda file: file.relative_to(root).as_posix()), skipped


def _read(files: list[Path], limit: int | None = None) -> list[bytes]:
    """The bytes of each file, stopping before the file that would exceed `limit`."""
    contents: list[bytes] = []
    total = 0
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            fix = "make the file readable, or point data.path elsewhere"
            raise ConfigError(message("A corpus file cannot be read.", where=str(file), got=error, fix=fix)) from error
        total += len(content)
        if limit is not None and total > limit:
            break
        contents.append(content)
    return contents


def _split(contents: list[bytes], held_out: float) -> tuple[bytes, bytes]:
    """Training and held-out bytes. Whole files are held out where there are enough, so that no text is cut in two."""
    if held_out == 0:
        return b"".join(contents), b""
    every = round(1 / held_out)
    if len(contents) >= 2 * every:
        kept = [content for i, content in enumerate(contents, 1) if i % every]
        return b"".join(kept), b"".join(contents[every - 1 :: every])
    joined = b"".join(contents)
    cut = round(len(joined) * (1 - held_out))
    return joined[:cut], joined[cut:]


def _nothing_in(root: Path, skipped: int) -> str:
    expected = (
        f"at least one byte in files named *{', *'.join(TEXT_SUFFIXES)}" if root.is_dir() else "at least one byte"
    )
    got = f"{human_bytes(0)} in {root}" + (f" ({skipped} hidden or linked entries passed over)" if skipped else "")
    return message("The corpus is empty.", where="data.path", expected=expected, got=got, fix="point data.path at text")
