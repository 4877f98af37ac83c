"""Copies of the newest state in host memory, from which a restarted run goes on without its disk.

Each process writes its shards to a file in a folder of memory (`/dev/shm`), and may send the file
to the next process, for the case that its host is lost. The manifest's rules hold as on disk: a
copy has the digests of its arrays, and is of one run, one layout and one step; a state that is not
finite is not copied. Of two generations the newer one stays while the older one is replaced.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from io import FileIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax.checkpoint.arrays import leaf_from_saved, leaves_of, saved_spec
from fsdp_jax.errors import ArgumentError, ConfigError, DamageError
from fsdp_jax.io.array_specs import describe_array, is_prng_key
from fsdp_jax.io.atomic import UNFINISHED, write_durably
from fsdp_jax.io.digests import Json, digest_bytes, digest_json, parse_sealed, sealed_text
from fsdp_jax.io.regular_files import open_regular, read_into, read_regular
from fsdp_jax.processes import gather_from_processes, hosts_of_processes, in_any_process
from fsdp_jax.tree import PyTree

log = logging.getLogger("fsdp_jax.checkpoint")

FOLDER = Path("/dev/shm")  # memory that outlives the process, on Linux
RUN_FILE = "memory_copies.id"  # in the directory of the run: which copies are its own
GENERATIONS = 2
CHUNK = 32 << 20  # bytes that a device sends at a time
DIGITS = 16  # of the length of a file's footer, at its end
NO_STEP = -1


@dataclass(frozen=True)
class MemoryCopy:
    """A complete copy of a state, in the memory of the hosts.

    Attributes:
        step: of the state.
        attempt: number of the start of the run that made it.
        missing: processes without their own file, which the next process has.

    """

    step: int
    attempt: int
    missing: tuple[int, ...]


class MemoryCopies:
    """The copies of a run's newest state; every process makes the same calls in the same order.

    `directory`: that of the run, where process 0 writes which copies are its own with the first
    one; `folder`: of memory, or None for `/dev/shm`; `target`: the state, with a
    `jax.ShapeDtypeStruct` that has a sharding at every leaf; `facts`: what else a copy must have in
    common with the run; `neighbours`: each process also holds the copy of the one before it.

    Raises ConfigError for a folder that cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        folder: str | None,
        target: PyTree,
        facts: Json,
        *,
        neighbours: bool = False,
    ) -> None:
        self._run_file = directory / RUN_FILE
        self.process, self.processes = jax.process_index(), jax.process_count()
        self.neighbours = neighbours and self.processes > 1
        # Process 0 tells all which run this is, and which of its starts.
        numbers = np.frombuffer(os.urandom(12), np.uint32)
        with suppress(OSError, ValueError):  # no such file, or no such text
            text = read_regular(self._run_file).decode()
            known = int(text[:8], 16), int(text[8:16], 16)
            numbers = np.array([*known, numbers[2]], np.uint32)
        if self.processes > 1:
            numbers = gather_from_processes(numbers)[0]
        self._run, self.attempt = "{:08x}{:08x}".format(*numbers[:2]), int(numbers[2])
        # A copy of another layout has other facts: also one of other devices in each process.
        leaves = leaves_of(target)
        arrays = {name: f"{describe_array(leaf)} {leaf.sharding}" for name, leaf in leaves.items()}
        meshes = dict.fromkeys(leaf.sharding.mesh for leaf in leaves.values())
        owners = [[device.process_index for device in mesh.devices.flat] for mesh in meshes]
        own = {"run": self._run, "state": digest_json({"arrays": arrays, "owners": owners})}
        self._target, self.facts = target, json.loads(json.dumps(facts | own))
        self._held = _own_folder(folder) / self._run / str(self.process)  # by this process
        # Other processes of this host hold their own.
        hosts = hosts_of_processes()
        same_host = {number for number, host in hosts.items() if host == hosts[self.process]}
        self._held_by_others = {str(number) for number in same_host - {self.process}}

    # Writing

    def save(self, step: int, state: PyTree, data: Json, metadata: Json) -> None:
        """Copies a state, the data's position and metadata; waits for the devices.

        Where the memory of a process is short no copy is made, with a warning in its log.
        """
        path = self._path(self.process, step)
        parts = self._parts(step, leaves_of(state), data, metadata)
        written = self._write_run_file() and _write(path, parts)
        # All keep the same steps: a copy that one process lacks would take the place of another.
        if in_any_process(not written):
            with suppress(OSError):  # such as: it is not there
                path.unlink()
        elif self.neighbours:
            before = (self.process - 1) % self.processes
            _shift(path, self._path(before, step), by=1)

    def _write_run_file(self) -> bool:
        """Writes in process 0 which copies are the run's; tells whether this could be done."""
        if self.process > 0 or self._run_file.exists():
            return True
        try:
            write_durably(self._run_file, self._run.encode())
        except OSError as error:
            log.warning("no copy is made in memory: %s", error)
            return False
        return True

    def _parts(self, step: int, leaves: dict[str, Any], data: Json, more: Json) -> Iterator[Any]:
        """Yields the bytes of a copy: this process's shards, one by one, and a footer."""
        shards = []
        for name, index, array in _local_shards(leaves):
            shards.append([name, index, digest_bytes(array.data)])
            yield array.data
        footer = {
            "attempt": self.attempt,
            "data": data,
            "facts": self.facts,
            "keys": {n: str(jax.random.key_impl(x)) for n, x in leaves.items() if is_prng_key(x)},
            "metadata": more,
            "owner": self.process,
            "shards": shards,
            "step": step,
        }
        text = sealed_text(footer).encode()
        yield text + f"{len(text):{DIGITS}d}".encode()

    def remove(self) -> None:
        """Removes the copies that this process holds, and what other starts left on this host."""
        for folder in self._held.parent.glob("*"):
            if folder.name not in self._held_by_others:
                shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not empty: others have not removed theirs yet
            self._held.parent.rmdir()

    # Reading

    def newest(self) -> tuple[MemoryCopy | None, str]:
        """Finds the newest copy that all processes have, whole and undamaged, and what is wrong.

        The text names damaged copies, and those of another run or layout; empty if there are none.
        """
        before = (self.process - 1) % self.processes
        problems: list[str] = []
        own, other = self._good_copies(self.process, problems), []
        if self.neighbours:
            other = self._good_copies(before, problems)
        table = np.full((2, GENERATIONS, 2), NO_STEP, np.int64)
        for row, good in zip(table, (own, other), strict=True):
            for entry, copy in zip(row, good, strict=False):
                entry[:] = copy
        # 32 bits: jax has no others by default.
        every = table.astype(np.uint32)[None]
        if self.processes > 1:
            every = gather_from_processes(every[0])
        copies = [[{tuple(map(int, c)) for c in row} for row in rows] for rows in every]
        none = (int(np.uint32(NO_STEP & 0xFFFFFFFF)),) * 2
        found = {copy for rows in copies for row in rows for copy in row} - {none}
        for step, attempt in sorted(found, reverse=True):
            lacking = [n for n, (mine, _) in enumerate(copies) if (step, attempt) not in mine]
            if all((step, attempt) in copies[(n + 1) % self.processes][1] for n in lacking):
                return MemoryCopy(step, attempt, tuple(lacking)), "; ".join(problems)
            problems.append(f"step {step} is not complete")
        return None, "; ".join(problems)

    def fetch(self, copy: MemoryCopy) -> bool:
        """Gets the missing files from the next processes; tells whether none is missing now."""
        if not copy.missing:
            return True
        lacks = self.process in copy.missing
        target = None
        if lacks:
            target = self._path(self.process, copy.step)
        before = (self.process - 1) % self.processes
        _shift(self._path(before, copy.step), target, by=-1)
        good = not lacks or (copy.step, copy.attempt) in self._good_copies(self.process, [])
        return not in_any_process(not good)

    def restore(self, copy: MemoryCopy) -> tuple[PyTree, Json, Json]:
        """Reads (state, data, metadata) of a copy, each shard straight to its device.

        Raises DamageError if a file has changed since `newest` found the copy, or `fetch` got it.
        """
        path = self._path(self.process, copy.step)
        footer, read = _read_copy(path)
        if (footer["step"], footer["attempt"]) != (copy.step, copy.attempt):
            raise DamageError("a copy in memory has changed", where=str(path))
        arrays = []
        for name, leaf in leaves_of(self._target).items():
            spec = saved_spec(leaf)

            def shard(index: Any, name: str = name, spec: Any = spec) -> np.ndarray:
                return read(name, _index_text(index, spec.shape), spec)

            array = jax.make_array_from_callback(spec.shape, spec.sharding, shard)
            arrays.append(leaf_from_saved(array, leaf, footer["keys"].get(name)))
        state = jax.tree.unflatten(jax.tree.structure(self._target), arrays)
        return state, footer["data"], footer["metadata"]

    def _good_copies(self, owner: int, problems: list[str]) -> list[tuple[int, int]]:
        """Lists (step, attempt) of a process's undamaged copies that this process holds."""
        good = []
        for path in sorted(self._held.glob(f"{owner}-*.copy")):
            try:
                footer, _ = _read_copy(path)
            except DamageError as error:
                problems.append(f"{path} is damaged: {error.got}")
                continue
            if footer["facts"] != self.facts or footer["owner"] != owner:
                problems.append(f"step {footer['step']} is of another configuration or layout")
                continue
            good.append((footer["step"], footer["attempt"]))
        return good

    def _path(self, owner: int, step: int) -> Path:
        """Finds the file of a process's copy; steps share `GENERATIONS` files in turns."""
        # A step that is there is replaced, otherwise the oldest: the newest stays.
        files = {path: _step_of(path) for path in self._held.glob(f"{owner}-*.copy")}
        same = [path for path, found in files.items() if found == step]
        if same:
            return same[0]
        free = [self._held / f"{owner}-{number}.copy" for number in range(GENERATIONS)]
        return min(free, key=lambda path: files.get(path, NO_STEP))


# Files


def _own_folder(folder: str | None) -> Path:
    """Makes the folder of this user's copies, which others cannot read or replace."""
    parent = FOLDER
    if folder is not None:
        parent = Path(folder)
    where = "checkpoint.memory_folder"
    if not parent.is_dir():
        fix = "name a folder of memory (tmpfs) or of a local disk"
        raise ConfigError("no such folder", where=where, got=str(parent), fix=fix)
    own = parent / f"fsdp_jax-{os.getuid()}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
    except OSError as error:
        what = "copies cannot be written there"
        raise ConfigError(what, where=where, got=error, fix="name another folder") from error
    if own.is_symlink() or found.st_uid != os.getuid():
        fix = "name another folder"
        raise ConfigError("the folder is another user's", where=where, got=str(own), fix=fix)
    return own


def _unfinished(path: Path) -> Path:
    """Names a file while it is written."""
    return path.with_name(path.name + UNFINISHED)


def _step_of(path: Path) -> int:
    """Reads the step of a copy; `NO_STEP` if it is damaged."""
    try:
        return int(_read_footer(path)["step"])
    except DamageError:
        return NO_STEP


def _write(path: Path, parts: Iterable[Any]) -> bool:
    """Writes a file that replaces the one at `path`; tells whether this could be done.

    The old file goes first, since memory may not hold both. Where the new one cannot be written
    there is none, with a warning in the log.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with _unfinished(path).open("wb") as file:
            for part in parts:
                file.write(part)
        _unfinished(path).rename(path)
    except OSError as error:
        log.warning("a copy is not written to memory: %s", error)
        with suppress(OSError):
            _unfinished(path).unlink()
        return False
    return True


def _read_footer(path: Path) -> Json:
    """Reads what describes the shards of a copy. Raises DamageError."""
    try:
        with open_regular(path, follow_link=False) as file:
            end = file.seek(0, os.SEEK_END) - DIGITS
            file.seek(max(0, end))
            length = int(file.read())
            if not 0 < length <= end:
                raise ValueError("it is cut short")
            file.seek(end - length)
            return parse_sealed(file.read(length).decode())
    except (OSError, ValueError) as error:
        raise DamageError("a copy in memory is damaged", where=str(path), got=error) from error


def _read_copy(path: Path) -> tuple[Json, Any]:
    """Reads (the footer of a copy, a function that reads a shard), all compared with its digests.

    Raises DamageError.
    """
    footer = _read_footer(path)
    places: dict[tuple[str, str], tuple[int, Json]] = {}
    offset = 0
    for name, index, digest in footer["shards"]:
        places[name, index] = offset, digest
        offset += digest["bytes"]

    def read(name: str, index: str, spec: Any) -> np.ndarray:
        """Reads the shard of an array at an index, of the shape and dtype of `spec`."""
        if (name, index) not in places:
            raise DamageError("a copy in memory lacks a shard", where=str(path), got=name)
        place, digest = places[name, index]
        found = _read_bytes(path, place, digest)
        bounds = [part.split(":") for part in index.split(",") if part]
        sizes = [int(stop) - int(start) for start, stop in bounds]
        return found.view(spec.dtype).reshape(sizes)

    for name, index in places:
        _read_bytes(path, *places[name, index])
    return footer, read


def _read_bytes(path: Path, offset: int, digest: Json) -> np.ndarray:
    """Reads the bytes of a shard, uint8 [bytes]; raises DamageError if they are not as written."""
    found = np.empty(digest["bytes"], np.uint8)
    try:
        with open_regular(path, follow_link=False) as file:
            count = read_into(file.fileno(), found.data, offset)
    except OSError as error:
        raise DamageError("a copy in memory is damaged", where=str(path), got=error) from error
    if count < found.size or digest_bytes(found.data) != digest:
        got = "its contents have changed"
        raise DamageError("a copy in memory is damaged", where=str(path), got=got)
    return found


# Shards


def _local_shards(leaves: dict[str, Any]) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (path, index, bytes) of the different shards of this process, as uint8 [bytes]."""
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise ArgumentError("only jax.Arrays can be copied", where=name, got=type(leaf))
        array = leaf
        if is_prng_key(leaf):
            array = jax.random.key_data(leaf)
        seen = set()
        for shard in array.addressable_shards:
            index = _index_text(shard.index, array.shape)
            if index not in seen:
                seen.add(index)
                # jax keeps what it copies to the host as long as the array: as this alias of it.
                data = shard.data
                alias = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
                own = np.ascontiguousarray(np.asarray(alias))
                yield name, index, own.reshape(-1).view(np.uint8)


def _index_text(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Formats the bounds of a shard in its array: `0:4,8:16`."""
    bounds = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop in bounds)


# Neighbours


def _shift(source: Path, target: Path | None, *, by: int) -> None:
    """Sends each process's file `source` to the process `by` numbers further, as its `target`.

    A process that has no such file sends none, and one whose `target` is None keeps none.
    """
    with ExitStack() as stack:
        file, size = None, 0
        with suppress(OSError):
            file = stack.enter_context(open_regular(source, follow_link=False))
            size = os.fstat(file.fileno()).st_size
        parts = np.array(divmod(size, 1 << 20), np.int32)
        sizes = [(int(high) << 20) + int(low) for high, low in gather_from_processes(parts)]
        expected = sizes[(jax.process_index() - by) % len(sizes)]
        chunks = _exchange(file, by, max(sizes))
        if target is not None and expected:
            _write(target, _first_bytes(chunks, expected))
        # Others wait for the chunks of this process, whether it writes what arrives or not.
        for _ in chunks:
            pass


def _exchange(file: FileIO | None, by: int, size: int) -> Iterator[np.ndarray]:
    """Sends `size` bytes of a file, or zeros, through the devices; yields the bytes that arrive.

    Each chunk is waited for: collectives of CPU devices that overlap take each other's data.
    """
    mesh, send = _mesh_and_send(by)
    processes, local = mesh.devices.shape
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    for offset in range(0, size, CHUNK * local):
        # All devices of a process send a part.
        own = np.zeros((1, local, CHUNK), np.uint8)
        if file is not None:
            read_into(file.fileno(), own.reshape(-1).data, offset)
        shape = (processes, local, CHUNK)
        with jax.set_mesh(mesh):
            sent = send(jax.make_array_from_process_local_data(sharding, own, shape))
        shards = sorted(sent.addressable_shards, key=lambda shard: shard.index[1].start or 0)
        yield np.concatenate([np.asarray(shard.data).reshape(-1) for shard in shards])


@cache  # or each copy would compile it anew
def _mesh_and_send(by: int) -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
    """Makes a mesh of all devices, and a function that shifts an array along its processes."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    processes = jax.process_count()
    mesh = Mesh(np.array(devices).reshape(processes, -1), ("process", "device"))
    spec = PartitionSpec("process", "device")
    pairs = [(number, (number + by) % processes) for number in range(processes)]
    shift = partial(lax.ppermute, axis_name="process", perm=pairs)
    return mesh, jax.jit(jax.shard_map(shift, mesh=mesh, in_specs=spec, out_specs=spec))


def _first_bytes(chunks: Iterator[np.ndarray], count: int) -> Iterator[memoryview]:
    """Yields the first `count` bytes of the chunks."""
    for chunk in chunks:
        yield chunk[:count].data
        count -= min(count, chunk.size)
