"""The manifest of a checkpoint: its files with a digest of each, and a digest of the list itself.

Orbax keeps no digest of the data: a flipped bit loads as another number (measured). A step is
renamed into place only once its manifest is written and all of it is on disk: a step in place is
complete, unless it was damaged later.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from math import prod
from pathlib import Path

from fsdp_jax.compat.orbax_files import ARRAYS, keys_of_tree
from fsdp_jax.errors import DamageError, first_lines
from fsdp_jax.io.array_specs import is_dtype, parse_description
from fsdp_jax.io.atomic import fsync_directory, fsync_file
from fsdp_jax.io.digests import Json, digest_file, parse_sealed, sealed_text
from fsdp_jax.io.folder_kinds import FIXES, TREE_METADATA, kind_of_folder, trees_in
from fsdp_jax.io.json_text import parse_json
from fsdp_jax.io.regular_files import open_regular, read_regular

MANIFEST = "manifest.json"
ORBAX_MARK = "_CHECKPOINT_METADATA"  # a directory with this file, but no manifest, has lost it
FORMAT = 1
READERS = 4  # files digested at a time
SHOWN = 10  # damaged files listed before the rest is only counted
# Packages whose version a manifest records.
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
    """The result of checking files against their digests.

    Attributes:
        files, size: number of the intact files, and their bytes.
        seconds: time that the check took.
        problems: one line per damaged file; empty for an intact checkpoint.

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
        """Formats the problems in a few lines."""
        return first_lines(self.problems, SHOWN)


def list_steps(directory: Path) -> tuple[list[int], list[int]]:
    """Lists (steps, good or damaged; the numbers of other entries named like a step)."""
    if not directory.is_dir():
        return [], []
    names = os.listdir(directory)
    steps: list[int] = []
    others: list[int] = []
    for number in sorted({int(name) for name in names if name.isdecimal()}):  # 3 and 03 are one
        path = directory / str(number)
        if path.name in names:
            marked = any((path / mark).exists() for mark in (MANIFEST, ORBAX_MARK))
            if marked and not path.is_symlink():
                steps.append(number)
            else:
                others.append(number)
    return steps, others


def list_files(root: Path) -> list[str]:
    """Lists the sorted relative paths of all files and links under `root` except the manifest."""
    names = []
    for folder, folders, files in os.walk(root):
        # Links to folders, which `os.walk` lists but does not follow.
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in (*files, *links)]
    return sorted(name for name in names if name != MANIFEST)


def digest_files(root: Path, names: Sequence[str], *, flush: bool = False) -> dict[str, Json]:
    """Computes {name: {bytes, xxh3_128}}. `flush` also waits until the files are on disk."""
    digest = partial(digest_file, flush=flush, follow_link=False)
    with ThreadPoolExecutor(READERS) as pool:  # digests are computed without the GIL
        return dict(zip(names, pool.map(digest, map(root.joinpath, names)), strict=True))


def write_manifest(root: Path, contents: Json, files: dict[str, Json]) -> None:
    """Writes the manifest of a complete checkpoint, and flushes it and all directories to disk.

    `contents`: the record beside the arrays; `files`: the digests.
    """
    # All on disk before the step gets its name: the files are flushed as they are digested.
    body: Json = {"format": FORMAT, "packages": package_versions(), **contents, "files": files}
    with (root / MANIFEST).open("w") as file:
        file.write(sealed_text(body))
        fsync_file(file)
    folders = [Path(folder) for folder, _, _ in os.walk(root)]
    with ThreadPoolExecutor(READERS) as pool:  # the disk takes them together
        list(pool.map(fsync_directory, folders))


@cache  # 3 ms
def package_versions() -> dict[str, str]:
    """Lists {package: version} of those that determine programs and the files of checkpoints."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # a source tree that is not installed
            versions[name] = "unknown"
    return versions


def read_manifest(root: Path) -> Json:
    """Reads the manifest's contents, not the files that it lists.

    Raises DamageError if the manifest is missing, or not byte for byte as it was written.
    """
    path = root / MANIFEST
    try:
        body = parse_sealed(read_regular(path, follow_link=False).decode())
        if body.get("format") != FORMAT:
            raise ValueError(f"format {body.get('format')}, which this version does not read")
        _require_sane_entries(body, root.name)
    except (OSError, ValueError) as error:
        got = _error_reason(error)
        if isinstance(error, FileNotFoundError):
            got = "missing"
            require_own(root, error)
        raise DamageError("a checkpoint is damaged", where=str(path), got=got) from error
    return body


def require_own(root: Path, error: Exception | None = None) -> None:
    """Raises DamageError for a folder that another program wrote, by name.

    A step of ours that has lost its manifest has all arrays in one tree, each by a single key.
    """
    kind = kind_of_folder(root)
    if (root / MANIFEST).exists() or kind not in FIXES or _has_flat_tree(root):
        return
    raise DamageError(
        "not a checkpoint of fsdp_jax", where=str(root), got=kind, fix=FIXES[kind]
    ) from error


def _has_flat_tree(root: Path) -> bool:
    """Tells whether a folder's tree of orbax, if it has one, is as we save it."""
    if trees_in(root) != [ARRAYS]:
        return False
    try:
        tree = parse_json(read_regular(root / ARRAYS / TREE_METADATA).decode())
        return all(len(keys) == 1 for keys in keys_of_tree(tree))
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        return True  # damaged, and it stands where ours does


def _require_sane_entries(body: Json, name: str) -> None:
    """Checks a manifest; raises ValueError for one of another step, or that no save writes."""

    def is_size(value: object) -> bool:
        return type(value) is int and 0 <= value < 1 << 63

    # A text whose digest fits may still come from another program, and a restore would allocate
    # arrays of its sizes.
    try:
        sizes = [body["step"], *(file["bytes"] for file in body["files"].values())]
        leaves = {path: parse_description(text) for path, text in body["leaves"].items()}
        shapes = {path: shape for path, (_, shape) in leaves.items()}
        parts = [list(part) for path, part in body["shards"].items() if shapes[path] is not None]
        sizes += chain(*shapes.values(), *parts)
        tables = (body["keys"], body["data"], body["metadata"])
        sane = all(map(is_size, sizes)) and all(isinstance(table, dict) for table in tables)
        sane = sane and not any(0 in part for part in parts)
        sane = sane and body["shards"].keys() == {path for path in shapes if prod(shapes[path])}
        sane = sane and all(is_dtype(dtype) for dtype, _ in leaves.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        sane = False
    if not sane:
        raise ValueError("entries or numbers that no save writes")
    if name.isdecimal() and body["step"] != int(name):
        raise ValueError(f"of step {body['step']}: the folder was renamed; rename it back")


def _error_reason(error: Exception) -> str:
    """Formats an error about a file, without its path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def check_files(root: Path, *, part: int = 0, parts: int = 1, contents: bool = True) -> Checked:
    """Compares a checkpoint's files to the digests of its manifest.

    `part` of `parts` readers takes every n-th file; with 0 parts only the manifest is read. Without
    `contents`, kinds and sizes are compared alone. Files that the manifest does not list are
    ignored.
    """
    started = time.perf_counter()
    try:
        expected = read_manifest(root)["files"]
    except DamageError as error:
        return Checked(0, 0, time.perf_counter() - started, (f"{MANIFEST}: {error.got}",))
    own_names = sorted(expected)[part::parts] if parts else []
    existing = set(list_files(root))  # a listed name such as ../x is never opened

    def problem_of(name: str) -> str:
        """Compares one file, and names the difference; "" if it is intact."""
        if name not in existing:
            return "missing"
        # The size first: contents take as long as reading the file.
        try:
            with open_regular(root / name, follow_link=False) as file:
                size = os.fstat(file.fileno()).st_size
            if size != expected[name]["bytes"]:
                return f"{size:,} bytes, {expected[name]['bytes']:,} were written"
            same = not contents or digest_file(root / name, follow_link=False) == expected[name]
        except OSError as error:
            return _error_reason(error)
        if not same:
            return "its contents have changed"
        return ""

    # Several at a time: digests are computed without the GIL.
    with ThreadPoolExecutor(READERS) as pool:
        results = dict(zip(own_names, pool.map(problem_of, own_names), strict=True))
    intact = [expected[name]["bytes"] for name, problem in results.items() if not problem]
    problems = tuple(f"{name}: {problem}" for name, problem in results.items() if problem)
    return Checked(len(intact), sum(intact), time.perf_counter() - started, problems)
