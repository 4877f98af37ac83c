"""The one adapter around orbax: nothing else imports it.

A step is written beside its place, digested, and renamed into place once its manifest lies on the
disk.
"""

import contextlib
import ctypes
import json
import logging
import operator
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
from orbax.checkpoint import v1 as orbax

from fsdp_jax.checkpoint.arrays import from_stored, leaves_of, stored, to_arrays
from fsdp_jax.checkpoint.manifest import (
    Checked,
    check_files,
    digest_files,
    list_files,
    numbered,
    read_manifest,
    seal,
)
from fsdp_jax.checkpoint.preflight import Preflight, compare, read_ahead
from fsdp_jax.errors import CheckpointError, ConfigError, DamageError, message
from fsdp_jax.io.atomic import fsync_directory
from fsdp_jax.processes import anywhere
from fsdp_jax.tree import PyTree

Json = dict[str, Any]
log = logging.getLogger("fsdp_jax.checkpoint")

UNSEALED = ".unsealed"  # the ending of a step being written
DELETING = ".deleting"  # the ending of a step being deleted: a half-deleted step must not look like a good one
CHUNK = 256 << 20  # bytes of an array that are read and written together
DIGESTS = (
    ".digests"  # the ending of the folder where several processes tell each other what they wrote
)
MMAP_THRESHOLD = -3  # mallopt's number for it
PATIENCE = 1200.0  # seconds one process waits for the others' part of a save


class CheckpointStore:
    """The checkpoints of a run: `directory/STEP/` each, whole or not there at all.

    `directory` is on a file system that every process sees; each writes and reads its own shards,
    and every process makes the same calls in the same order. The newest `keep` steps are preserved,
    and those that `keep_every` divides; others are deleted once a newer one is in place. With
    `asynchronous` a save returns as soon as the state is copied to the host and is written behind
    the caller's back; the state may then be donated. Readers need no lease: a store that never
    saves changes nothing.

    Raises ConfigError if `keep` or `keep_every` is not positive.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        asynchronous: bool = True,
    ):
        for name, value in (
            ("keep", keep),
            ("keep_every", 1 if keep_every is None else keep_every),
        ):
            if value < 1:
                where = f"checkpoint.{name}"
                raise ConfigError(
                    message("nothing to keep", where=where, expected="1 or more", got=value)
                )
        self.directory = Path(directory).absolute()
        self.keep, self.keep_every = keep, keep_every
        self.asynchronous = asynchronous
        self._context = orbax.Context()
        # In the background, a folder that cannot be made leaves orbax's threads waiting for it: 300
        # s, exit included.
        self._context.asynchronous.create_directories_asynchronously = False
        # Trained numbers shrink by 8% at thirteen times the time (measured); a part that is read
        # takes its whole chunk.
        self._context.array.saving.use_compression = False
        self._context.array.saving.storage_options.chunk_byte_size = CHUNK
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._swept = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the save under way, raising its error, and ends the background thread."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def save(self, step: int, state: PyTree, *, data: Json, metadata: Json) -> float:
        """Saves state, data position and metadata together as `directory/STEP/`; returns the
        seconds it blocked.

        `state` is any pytree of sharded jax.Arrays, typed PRNG keys among them. `data` and
        `metadata` come back as JSON gives them (tuples as lists). `data` is the position of the
        global batch, so it is equal in every process and process 0's is the one saved. Waits for
        the save before this one.

        Raises that earlier save's error instead of saving; CheckpointError if this one fails
        (later, from `wait`, when asynchronous) or if another process fails; ValueError if the step
        is there already or an argument cannot be saved.
        """
        started = time.perf_counter()
        step, path = operator.index(step), self.path(step)
        arrays: dict[str, jax.Array] = {}
        record: Json = {"step": step}
        error: Exception | None = None
        try:
            self.wait()
            arrays, contents = to_arrays(state)
            record |= {
                "data": _as_json("data", data),
                "metadata": _as_json("metadata", metadata),
                **contents,
            }
            if path.exists():
                fix = "remove or rename it, or save another step"
                raise ValueError(message("this step is there already", where=str(path), fix=fix))
            self._sweep()
        except Exception as raised:
            error = raised
        if anywhere(error is not None):  # all give up together: orbax would wait for those who have
            what = "a checkpoint could not be written"
            raise error or CheckpointError(
                message(what, where=str(path), got="an error in another process")
            )
        log.info("saving %d", step)
        try:
            with self._context:
                response = orbax.save_async(_beside(path, UNSEALED), arrays)
        except Exception as error:
            raise _failure("a checkpoint could not be written", path, error) from error
        self._pending = self._worker.submit(self._finish, step, record, response)
        if not self.asynchronous:
            self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Returns when nothing is being written. Raises the error of the save under way, once; then
        it is forgotten.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def failed(self) -> bool:
        """Whether a save has failed behind the caller's back: `wait` will say how."""
        return (
            self._pending is not None
            and self._pending.done()
            and self._pending.exception() is not None
        )

    def steps(self) -> list[int]:
        """The steps that are there, damaged ones too, ascending. An empty or foreign directory is
        none.
        """
        return [step for step, ours in numbered(self.directory) if ours]

    def foreign(self) -> list[int]:
        """What is named like a step, and is a link or has nothing of ours in it."""
        return [step for step, ours in numbered(self.directory) if not ours]

    def latest(self) -> int | None:
        """The newest step, by number: clocks may disagree. `check` says whether it is as it was
        written.
        """
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        """Where a step lies."""
        return self.directory / str(step)

    def check(self, step: int) -> Checked:
        """Reads a step's files against its manifest; of several processes, each reads its part and
        all get to know.

        Raises ValueError if there is no such step.
        """
        checked = check_files(
            self._existing(step), part=jax.process_index(), parts=jax.process_count()
        )
        if anywhere(not checked.good) and checked.good:
            return Checked(
                checked.files, checked.size, checked.seconds, ("found by another process",)
            )
        return checked

    def check_manifest(self, step: int) -> Checked:
        """The same of the manifest alone, which takes no time: whether it is there, and to the
        letter. No file is read.

        Raises ValueError if there is no such step.
        """
        return check_files(self._existing(step), parts=0)

    def preflight(self, step: int, target: PyTree, *, allow_cast: bool = False) -> Preflight:
        """What `restore` would do: what it reads, the memory it takes, and every path that differs.
        Reads no array.

        Raises ValueError if there is no such step or the target has no shardings; DamageError
        without a manifest.
        """
        path = self._existing(step)
        return compare(path, read_manifest(path), leaves_of(target), allow_cast=allow_cast)

    def restore(
        self, step: int, target: PyTree, *, allow_cast: bool = False, verify: bool = True
    ) -> tuple[PyTree, Json, Json]:
        """Reads (state, data, metadata) of a step, each shard straight to where `target` wants it.

        `target` is the state's structure with a `jax.ShapeDtypeStruct` that has a sharding at every
        leaf; any mesh will do. `allow_cast` reads one floating dtype as another. `verify` first
        reads every file against its digest, which takes as long as `check` says it did.

        Raises ValueError if there is no such step, or, before any array is read, if a path, shape
        or dtype differs from the target; DamageError if a file is not as it was written;
        CheckpointError if one cannot be read.
        """
        self.preflight(step, target, allow_cast=allow_cast).require_fit()
        if verify:
            self.require_good(step)
        path, leaves = self.path(step), leaves_of(target)
        record = read_manifest(path)
        arrays = self.read(step, {name: stored(leaf) for name, leaf in leaves.items() if leaf.size})
        restored = [
            from_stored(arrays.get(name), leaf, record["keys"].get(name))
            for name, leaf in leaves.items()
        ]
        return (
            jax.tree.unflatten(jax.tree.structure(target), restored),
            record["data"],
            record["metadata"],
        )

    def read(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Some of a step's arrays by path; what `wanted` lacks is not read. Raises CheckpointError,
        DamageError.
        """
        context = orbax.Context()
        context.pytree.loading.partial_load = True
        shards = self.record(step)["shards"]
        context.memory.read_concurrent_bytes = read_ahead(
            {leaf: shards[name] for name, leaf in wanted.items()}
        )
        try:
            with context, _given_back():
                return orbax.load(self.path(step), wanted)
        except Exception as error:
            checked = check_files(self.path(step))
            if not checked.good:  # read without having been verified
                raise self._damage(step, checked) from error
            raise _failure("a checkpoint could not be read", self.path(step), error) from error

    def require_good(self, step: int) -> Checked:
        """What `check` found, of a step without damage. Raises DamageError naming the files
        otherwise.
        """
        checked = self.check(step)
        if not checked.good:
            raise self._damage(step, checked)
        return checked

    def _damage(self, step: int, checked: Checked) -> DamageError:
        others = [other for other in self.steps() if other != step]
        fix = (
            f"restore the files, or take another step: {others}" if others else "restore the files"
        )
        where = str(self.path(step))
        return DamageError(
            message("a checkpoint is damaged", where=where, got=checked.summary(), fix=fix)
        )

    def record(self, step: int) -> Json:
        """All that was recorded beside the arrays: `data`, `metadata`, `leaves`, `files`,
        `packages`.
        """
        return read_manifest(self._existing(step))

    def set_aside(self, step: int, why: str) -> Path:
        """Renames a step to `STEP.WHY`, numbered if that is taken, so that it is none any more; to
        be called once.
        """
        path = self._existing(step)
        ends = [f".{why}", *(f".{why}-{again}" for again in range(2, 1000))]
        aside = next(there for end in ends if not (there := _beside(path, end)).exists())
        path.rename(aside)
        return aside

    def _existing(self, step: int) -> Path:
        self.wait()
        found = self.steps()
        if step not in found:
            where = str(self.path(step))
            raise ValueError(
                message("no such step", where=where, expected=f"one of {found}", got=step)
            )
        return self.path(step)

    def _finish(self, step: int, record: Json, response: Any) -> None:
        """In the background thread: sees the save through, puts it in place, then deletes what is
        too old.
        """
        path = self.path(step)
        try:
            response.result()
            self._seal(path, record)
        except Exception as error:
            self._swept = False  # what it left takes room, perhaps on a full disk: the next save clears it away
            with contextlib.suppress(
                OSError
            ):  # those who wait for this process's part need not wait long
                self._told(path).joinpath(f"failed-{jax.process_index()}").touch()
            raise _failure("a checkpoint could not be written", path, error) from error
        log.info("saved %d", step)
        if jax.process_index() == 0:
            for old in self._too_old(step):
                self._delete(old)

    def _seal(self, path: Path, record: Json) -> None:
        """Each process digests what it wrote; process 0 joins the digests and renames the step into
        place.
        """
        beside, me = _beside(path, UNSEALED), jax.process_index()
        self._until(beside.exists, path, f"{beside} to be seen from process {me}")
        files = digest_files(
            beside, [name for name in list_files(beside) if _writer(name) == me], flush=True
        )
        if me:
            part = self._told(path) / f"{me}.json"
            part.with_suffix(".writing").write_text(json.dumps(files))
            part.with_suffix(".writing").rename(part)
            self._until(path.exists, path, "process 0 to seal it")
            return
        for process in range(1, jax.process_count()):
            part = self._told(path) / f"{process}.json"
            self._until(part.exists, path, f"process {process} to digest its part")
            files |= json.loads(part.read_text())
        assert files.keys() == set(list_files(beside)), "every file has one writer"
        seal(beside, record, files)
        log.info("sealed %s", path.name)
        beside.rename(path)
        for folder in (path.parent, path.parent.parent):  # the first save makes both
            fsync_directory(folder)
        _remove(_beside(path, DIGESTS))

    def _told(self, path: Path) -> Path:
        """Where processes tell each other what they wrote, or that they failed."""
        folder = _beside(path, DIGESTS)
        if jax.process_count() > 1:
            folder.mkdir(exist_ok=True)
        return folder

    def _until(self, condition: Callable[[], bool], path: Path, what: str) -> None:
        """Files are all that a background thread can wait for: a collective would come between
        those of the steps.
        """
        deadline = time.monotonic() + PATIENCE
        while not condition():
            failures = sorted(each.name for each in _beside(path, DIGESTS).glob("failed-*"))
            if failures or time.monotonic() > deadline:
                raise TimeoutError(f"waited for {what}; {', '.join(failures) or 'in vain'}")
            time.sleep(0.05)

    def _too_old(self, step: int) -> list[int]:
        """Steps beyond this one are of a run that went further and was taken up again before its
        end: not old.
        """
        found = [there for there in self.steps() if there <= step]
        return [
            old for old in found[: -self.keep] if self.keep_every is None or old % self.keep_every
        ]

    def _delete(self, step: int) -> None:
        log.info("deleting %d", step)
        doomed = _beside(self.path(step), DELETING)
        try:
            self.path(step).rename(doomed)
        except OSError as error:  # it takes room, and the new step is in place all the same
            log.warning("%s could not be deleted: %s", self.path(step), error)
            return
        self._swept = _remove(doomed)
        log.info("deleted %d", step)

    def _sweep(self) -> None:
        """Removes what a killed writer or a failed save left. Before a save only: who saves is the
        one writer.
        """
        if not self._swept and jax.process_index() == 0:
            # orbax adds an ending of its own to what it writes
            for pattern in (f"*{UNSEALED}", f"*{UNSEALED}.*", f"*{DELETING}", f"*{DIGESTS}"):
                for path in self.directory.glob(pattern):
                    _remove(path)
        self._swept = True


@contextlib.contextmanager
def _given_back() -> Iterator[None]:
    """What is allocated for a while goes back to the system when it is freed, where the C library
    is GNU's.

    It would keep blocks below 32 MiB for itself: reading 2 GiB took 0.7 GiB beside the state, and
    takes 0.1 (measured).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        mallopt(MMAP_THRESHOLD, 32 << 20)  # where its own adjustment ends


def _remove(path: Path) -> bool:
    """Whether it is gone; what cannot be removed, because someone holds it open, is tried again
    before a later save.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)
        return False
    return True


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _writer(name: str) -> int:
    """Which process wrote a file: what is one process's own says `process_N`; the lead one writes
    the rest.
    """
    found = re.search(r"(?:^|/)(?:ocdbt\.)?process_(\d+)(?:/|$)", name)
    return int(found[1]) if found else 0


def _as_json(name: str, value: Json) -> Json:
    """A copy: the caller may go on changing its own while the save is under way."""
    for key, entry in value.items():
        try:
            json.dumps(entry)
        except (TypeError, ValueError) as error:
            what, fix = (
                f"`{name}` cannot be saved as JSON",
                "numbers, text, lists and dicts of them",
            )
            raise ValueError(message(what, where=str(key), got=error, fix=fix)) from error
    return json.loads(json.dumps(value))


def _failure(what: str, path: Path, error: BaseException) -> CheckpointError:
    """The real cause, in one line: orbax wraps it, as in `NoEntryError: incompatible handler`."""
    cause = error
    while (inner := cause.__cause__ or cause.__context__) and str(inner):
        cause = inner
    line = str(cause).partition("\n")[0].partition(" [tensorstore_spec")[0]
    full = any(sign in line for sign in ("No space left", "File too large", "quota"))
    fix = "make room there" if full else ""
    return CheckpointError(
        message(what, where=str(path), got=f"{type(cause).__name__}: {line}", fix=fix)
    )
