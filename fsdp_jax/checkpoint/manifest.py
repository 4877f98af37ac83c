"""What makes a checkpoint good: a list of its files with a digest of each, written last, and a
digest of that list.

Orbax keeps no digest of the data: a flipped bit loads as another number (measured). A step is
renamed into place only once its list is written and all of it is on the disk, so a step that is
there is whole, or was damaged since.
"""

import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from fsdp_jax.errors import DamageError, message
from fsdp_jax.io.atomic import fsync_directory

Json = dict[str, Any]

MANIFEST = "manifest.json"
ORBAX = "_CHECKPOINT_METADATA"  # orbax's own mark; a step with it and without a manifest has lost the manifest
FORMAT = 1
BLOCK = 4 << 20  # bytes read at a time
READERS = 4  # files digested at a time
SHOWN = 10  # damaged files listed before the rest is only counted
PACKAGES = (
    "fsdp_jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorstore",
    "numpy",
)


@dataclass(frozen=True)
class Checked:
    """What became of checking files against their digests.

    Attributes:
        files, size: how many are as they were written, and their bytes.
        seconds: what it took.
        problems: one line for each file that is not as it was written; a good checkpoint has none.

    """

    files: int
    size: int
    seconds: float
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether every file is as it was written."""
        return not self.problems

    def summary(self) -> str:
        """The problems in a few lines."""
        more = len(self.problems) - SHOWN
        return "\n            ".join(
            [*self.problems[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
        )


def numbered(directory: Path) -> list[tuple[int, bool]]:
    """(number, whether it is a directory with a checkpoint, good or damaged) of all that is named
    like a step.
    """
    if not directory.is_dir():
        return []
    named = [
        path
        for path in directory.iterdir()
        if path.name.isdecimal() and path.name == str(int(path.name))
    ]
    return sorted(
        (
            int(path.name),
            not path.is_symlink() and any((path / mark).exists() for mark in (MANIFEST, ORBAX)),
        )
        for path in named
    )


def list_files(root: Path) -> list[str]:
    """Every file under `root` but its manifest, relative, with `/`; links count as files and are
    never followed.
    """
    found = []
    for folder, folders, files in os.walk(root):
        linked = [name for name in folders if (Path(folder) / name).is_symlink()]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in (*files, *linked)]
    return sorted(name for name in found if name != MANIFEST)


def digest_files(root: Path, names: Iterable[str], *, flush: bool = False) -> dict[str, Json]:
    """{name: {bytes, xxh3_128}}. `flush`: also waits until they are on the disk, not in the
    kernel's memory alone.
    """
    names = list(names)
    with ThreadPoolExecutor(READERS) as pool:  # the digest lets go of the interpreter
        return dict(
            zip(names, pool.map(lambda name: _digest(root / name, flush), names), strict=True)
        )


def _digest(path: Path, flush: bool) -> Json:
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        if flush:
            os.fsync(file.fileno())
        block = memoryview(bytearray(BLOCK))
        while count := file.readinto(block):
            state.update(block[:count])
            size += count
    return {"bytes": size, "xxh3_128": state.hexdigest()}


def seal(root: Path, contents: Json, files: dict[str, Json]) -> None:
    """Writes the manifest of a checkpoint that is complete, with what is recorded beside its
    arrays.
    """
    body: Json = {"format": FORMAT, "packages": packages(), **contents, "files": files}
    body["digest"] = _digest_of(body)
    with (root / MANIFEST).open("w") as file:
        file.write(_text(body))
        file.flush()
        os.fsync(file.fileno())
    for folder, _, _ in os.walk(root, topdown=False):
        fsync_directory(Path(folder))


def packages() -> dict[str, str]:
    """Versions of what wrote the checkpoint."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a source tree that is not installed
            found[name] = "unknown"
    return found


def read_manifest(root: Path) -> Json:
    """What was recorded; the files themselves are not read.

    Raises DamageError if the manifest is missing, or not to the letter what was written.
    """
    path = root / MANIFEST
    try:
        if path.is_symlink():
            raise ValueError("a link, which could lead anywhere")
        text = path.read_text()
        body = json.loads(text)
        # letter by letter: a flipped bit in white space is a flipped bit too
        if (
            not isinstance(body, dict)
            or _text(body) != text
            or body.get("digest") != _digest_of(body)
        ):
            raise ValueError("its own digest does not fit it")
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']}, which this version does not read")
    except (OSError, ValueError) as error:
        what = "missing" if isinstance(error, FileNotFoundError) else error
        raise DamageError(message("a checkpoint is damaged", where=str(path), got=what)) from error
    return body


def check_files(root: Path, *, part: int = 0, parts: int = 1) -> Checked:
    """Reads the files and compares them to the manifest; of several readers, each takes every
    `parts`-th file.

    With 0 parts no file is read: the manifest alone is.

    Files that the manifest does not name are not of the checkpoint, and are left alone.
    """
    started = time.perf_counter()
    try:
        expected = read_manifest(root)["files"]
    except DamageError as error:
        got = str(error).rpartition("got:")[2].strip()
        return Checked(0, 0, time.perf_counter() - started, (f"{MANIFEST}: {got}",))
    mine = sorted(expected)[part::parts] if parts else []
    there = set(list_files(root))  # what is found on the disk: a name such as ../x leads nowhere
    with ThreadPoolExecutor(READERS) as pool:
        found = list(
            pool.map(
                lambda name: _problem(root, name, expected[name]) if name in there else "missing",
                mine,
            )
        )
    problems = tuple(
        f"{name}: {problem}" for name, problem in zip(mine, found, strict=True) if problem
    )
    read = [
        expected[name]["bytes"] for name, problem in zip(mine, found, strict=True) if not problem
    ]
    return Checked(len(read), sum(read), time.perf_counter() - started, problems)


def _problem(root: Path, name: str, expected: Json) -> str:
    """What is wrong with one file; "" if nothing."""
    path = root / name
    try:
        if path.is_symlink():
            return "a link, which could lead anywhere"
        if (size := path.stat().st_size) != expected["bytes"]:
            return f"{size:,} bytes, {expected['bytes']:,} were written"
        return "" if _digest(path, flush=False) == expected else "its contents have changed"
    except OSError as error:
        return error.strerror or str(error)


def _text(body: Json) -> str:
    return json.dumps(body, indent=1, sort_keys=True) + "\n"


def _digest_of(body: Json) -> str:
    return xxhash.xxh3_128_hexdigest(
        _text({key: value for key, value in body.items() if key != "digest"}).encode()
    )
