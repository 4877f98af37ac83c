"""Saves and restores checkpoints by orbax, which only this package imports.

A step is written under another name, digested, and renamed into place once its manifest is on disk.
"""

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from math import prod
from numbers import Integral
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as orbax

from fsdp_jax.checkpoint.arrays import (
    begin_finite_check,
    divide_replicas,
    leaf_from_saved,
    leaves_of,
    saved_spec,
    to_arrays,
    with_saved_options,
)
from fsdp_jax.checkpoint.lease import Lease
from fsdp_jax.checkpoint.manifest import (
    Checked,
    check_files,
    digest_files,
    list_files,
    list_steps,
    read_manifest,
    require_own,
    write_manifest,
)
from fsdp_jax.checkpoint.preflight import Preflight, compare_to_target, read_ahead_bytes
from fsdp_jax.compat.error_texts import first_line, is_disk_full
from fsdp_jax.compat.orbax_files import (
    UNUSABLE_NAME,
    LiteralPath,
    set_shapes,
    writing_process,
    written_arrays,
)
from fsdp_jax.errors import ArgumentError, CheckpointError, ConfigError, DamageError, first_lines
from fsdp_jax.host_memory import freed_memory_returned
from fsdp_jax.io.array_specs import describe_array, parse_description
from fsdp_jax.io.atomic import fsync_directory, rename_durably
from fsdp_jax.io.digests import Json
from fsdp_jax.processes import in_any_process, raise_together, require_same_call
from fsdp_jax.sharding.padding import Padded, as_stored, mark_padded, stored_array
from fsdp_jax.tree import PyTree

log = logging.getLogger("fsdp_jax.checkpoint")

# Suffixes beside a step's own name. A half-deleted step must not look like a good one.
UNSEALED = ".unsealed"  # the step while it is written
DELETING = ".deleting"  # the step while it is deleted
DIGESTS = ".digests"  # directory where processes exchange the digests of what they wrote
CHUNK = 256 << 20  # bytes of an array that are read and written together, at most
LEAST_CHUNK = 1 << 20  # of a replicated array
SHOWN = 10  # arrays listed before the rest is only counted
PATIENCE = 1200.0  # seconds one process waits for the others to begin a save, and for their part
NOT_WRITTEN = "a checkpoint could not be written"
NOT_READ = "a checkpoint could not be read"


class CheckpointStore(contextlib.AbstractContextManager["CheckpointStore"]):
    """The checkpoints of a run: `directory/STEP/` each, complete or not there at all.

    `directory` is on a file system that every process sees; each writes and reads its own shards,
    and every process makes the same calls in the same order. The newest `keep` steps are kept, and
    those whose number is a multiple of `keep_every`; others are deleted once a newer one is in
    place. With `asynchronous` a save returns as soon as the state is copied to the host, and is
    written in the background; the state may then be donated. A store that never saves changes
    nothing: readers need no `Lease`. Methods that read a step raise ValueError if there is no such
    step, and DamageError if it has no manifest, or a damaged one.

    `lease` is that of a directory around `directory`, entered before the store is used. Where that
    directory is removed, moved or replaced, in a save too, the store raises DirectoryLostError, and
    neither writes nor deletes in whatever took its place.

    Raises ConfigError if `keep` or `keep_every` is not positive, or for a directory name that orbax
    would take for another path; ValueError if `directory` is not inside that of the lease.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        lease: Lease | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        asynchronous: bool = True,
    ):
        for name, value in {"keep": keep, "keep_every": keep_every}.items():
            if value is not None and value < 1:
                raise ConfigError(
                    "nothing to keep", where=f"checkpoint.{name}", expected="1 or more", got=value
                )
        self.directory = Path(directory).absolute()
        _require_usable(self.directory)
        if lease is not None and not self.directory.is_relative_to(lease.directory):
            raise ArgumentError(
                "the lease is of another directory",
                where="lease",
                expected=f"one around {self.directory}",
                got=str(lease.directory),
            )
        self._lease = lease
        self.keep = keep
        self.keep_every = keep_every
        self.asynchronous = asynchronous
        self._context = _saving_context()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._swept = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the save under way, raising its error, and ends the background thread."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    # Saving

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        data: Json,
        metadata: Json,
        finite: bool | None = None,
        delete_older: bool = True,
        keep_too: Collection[int] = (),
    ) -> float:
        """Saves state, data position and metadata as `directory/STEP/`; returns blocked seconds.

        Args:
            step: number of the step.
            state: any pytree of sharded jax.Arrays, typed PRNG keys among them. Of `Padded` leaves,
                as `sharded.to_checkpoint` returns them, the padding is not saved.
            data: position of the global batch; equal in every process, process 0's is saved.
            metadata: as `data`; a restore returns both as JSON has them (tuples as lists).
            finite: whether the state is finite, for the record; None checks every value, while the
                caller goes on. The newest step that was finite is never deleted.
            delete_older: whether steps that need not be kept are deleted; by a later save if not.
            keep_too: older steps that this save does not delete.

        Waits for the save before this one.

        Raises:
            CheckpointError: the save before this one failed, and this one is not begun; or this one
                fails (later, from `wait`, when asynchronous); or another process fails.
            DirectoryLostError: the directory is not the lease's any more, likewise.
            ValueError: the step exists, or an argument cannot be saved.

        """
        started = time.perf_counter()
        if not isinstance(step, Integral) or isinstance(step, bool) or step < 0:
            expected = "a whole number, 0 or more"
            raise ArgumentError("not a step", where="step", expected=expected, got=repr(step))
        step = int(step)

        require_same_call(f"store.save of step {step}, which every process calls", PATIENCE)
        # All processes raise together: orbax would wait for those that have raised.
        got = "an error in another process"
        with raise_together(CheckpointError(NOT_WRITTEN, where=str(self.path(step)), got=got)):
            self.wait()
            self._require_lease()
            leaves, contents = to_arrays(state)
            positions = {"data": _as_json("data", data), "metadata": _as_json("metadata", metadata)}
            record = {"step": step, "finite": finite, **positions, **contents}
            self._prepare_directory(step)

        # Copy to the host; write in the background.
        log.info("saving %d", step)
        try:
            # Dispatched before the state can be donated; `_finish_save` waits for it.
            not_finite = None
            if finite is None:
                not_finite = begin_finite_check(leaves)
            arrays = {name: stored_array(leaf) for name, leaf in leaves.items()}
            if jax.process_count() > 1:
                arrays = divide_replicas(arrays)
            with self._context:
                response = orbax.save_async(self._own_path(step, UNSEALED), arrays)
        except Exception as error:
            self._swept = False
            self._require_lease()
            raise self._error(NOT_WRITTEN, step, error) from error
        # The background thread gets texts and shapes, not the arrays, which may be donated.
        written = {name: describe_array(leaf) for name, leaf in leaves.items()}
        padded = {name: leaf.shape for name, leaf in leaves.items() if isinstance(leaf, Padded)}
        finish = (step, record, not_finite, written, padded, response, delete_older, keep_too)
        self._pending = self._worker.submit(self._finish_save, *finish)
        if not self.asynchronous:
            self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Waits for the save under way. Raises its error once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def failed(self) -> bool:
        """Tells whether the save in the background has failed; `wait` raises its error."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    # Listing

    def steps(self) -> list[int]:
        """Lists the steps in place, damaged ones too, ascending."""
        return list_steps(self.directory)[0]

    def foreign(self) -> list[int]:
        """Lists the numbers of entries named like a step that are links or not checkpoints."""
        return list_steps(self.directory)[1]

    def latest(self) -> int | None:
        """Finds the newest step, by number: clocks may disagree. `check` tells if it is good."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        """Returns the directory of a step."""
        return self.directory / str(step)

    def record(self, step: int) -> Json:
        """Reads the manifest: `data`, `metadata`, `leaves`, `files`, `packages` and more."""
        return read_manifest(self._existing_path(step))

    # Checking

    def check(self, step: int) -> Checked:
        """Compares a step's files with its manifest.

        Of several processes, each reads its part, and every result reports damage in any part.
        """
        path = self._existing_path(step)
        checked = check_files(path, part=jax.process_index(), parts=jax.process_count())
        if in_any_process(not checked.good) and checked.good:
            return replace(checked, problems=("found by another process",))
        return checked

    def check_manifest(self, step: int) -> Checked:
        """Checks the manifest alone, which takes no time: it exists and is byte for byte intact."""
        return check_files(self._existing_path(step), parts=0)

    def require_good(self, step: int) -> Checked:
        """Checks a step as `check` does. Raises DamageError naming the damaged files, if any."""
        checked = self.check(step)
        self._refuse_damaged(step, checked)
        return checked

    def set_aside(self, step: int, why: str) -> Path:
        """Renames a step to `STEP.WHY`, numbered if that exists, and returns the new path.

        It is no longer a step. Only one process may call this.
        """
        # The same step may have been set aside before, and trained again.
        self._existing_path(step)
        self._require_lease()
        suffixes = [f".{why}", *(f".{why}-{number}" for number in range(2, 1000))]
        candidates = [self._own_path(step, suffix) for suffix in suffixes]
        free = next(each for each in candidates if not each.exists())
        self._own_path(step).rename(free)
        return self.directory / free.name

    # Restoring

    def preflight(self, step: int, target: PyTree, *, allow_cast: bool = False) -> Preflight:
        """Plans what `restore` would do: bytes, memory, and every path that differs.

        Reads no array. Raises ValueError if the target has no shardings.
        """
        record = self.record(step)
        leaves = leaves_of(with_saved_options(target, record["leaves"]))
        return compare_to_target(self.path(step), record, leaves, allow_cast=allow_cast)

    def restore(
        self, step: int, target: PyTree, *, allow_cast: bool = False, verify: bool = True
    ) -> tuple[PyTree, Json, Json]:
        """Reads (state, data, metadata) of a step, each shard straight to its device.

        Args:
            step: which checkpoint.
            target: the state's structure with a `jax.ShapeDtypeStruct` that has a sharding at every
                leaf; any mesh will do. A `TrainState` gets the loss scale and the recent losses
                that are saved, if any: `sharded.from_checkpoint` takes them, or starts anew.
            allow_cast: reads one floating dtype as another.
            verify: first compares every file with its digest, which takes as long as `check`.

        Raises:
            ValueError: before any array is read, a path, shape or dtype differs.
            DamageError: a file is not as it was written.
            CheckpointError: a file cannot be read.

        """
        # Without a limit: one process may prepare data before it.
        require_same_call(f"store.restore of step {step}, which every process calls", None)
        # Cheapest first: the manifest, then all files, then the arrays.
        self.preflight(step, target, allow_cast=allow_cast).require_fit()
        if verify:
            self.require_good(step)
        record = self.record(step)
        target = with_saved_options(target, record["leaves"])
        leaves = leaves_of(target)
        specs = {name: saved_spec(leaf) for name, leaf in leaves.items() if leaf.size}
        arrays = self.read(step, specs)
        restored = []
        for name, leaf in leaves.items():
            impl = record["keys"].get(name)
            try:
                restored.append(leaf_from_saved(arrays.get(name), leaf, impl))
            except (TypeError, ValueError) as error:  # written by another program
                raise DamageError(
                    "a checkpoint is damaged",
                    where=f"{self.path(step)}, keys, {name}",
                    expected="an implementation of PRNG keys, as that of this state",
                    got=impl,
                ) from error
        state = jax.tree.unflatten(jax.tree.structure(target), restored)
        return state, record["data"], record["metadata"]

    def read(self, step: int, specs: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Reads a step's arrays in `specs`, by path; `Padded` where a sharding does not divide.

        Raises ValueError for another shape than the array has, CheckpointError, DamageError.
        """
        # Orbax would wait for a pipe, and take a shorter file for a missing array.
        path = self.path(step)
        self._refuse_damaged(step, check_files(path, contents=False))
        record = self.record(step)
        _require_shapes(path, record, specs)
        # Orbax reads padding as zeros behind the saved array, and limits the bytes in flight.
        shards = record["shards"]
        stored = {name: as_stored(spec) for name, spec in specs.items()}
        context = _orbax_context()
        context.array.loading.enable_padding_and_truncation = stored != specs
        context.pytree.loading.partial_load = True
        context.memory.read_concurrent_bytes = read_ahead_bytes(
            (spec, shards[name]) for name, spec in specs.items()
        )
        try:
            with context, freed_memory_returned():
                loaded = orbax.load(path, stored)
        except Exception as error:
            self._refuse_damaged(step, check_files(path))  # the caller did not verify
            raise self._error(NOT_READ, step, error) from error
        return {name: mark_padded(array, specs[name]) for name, array in loaded.items()}

    def _refuse_damaged(self, step: int, checked: Checked) -> None:
        """Raises DamageError naming the damaged files, if any."""
        if checked.good:
            return
        require_own(self.path(step))
        fix = "restore the files"
        others = [other for other in self.steps() if other != step]
        if others:
            fix += f", or take another step: {others}"
        raise DamageError(
            "a checkpoint is damaged", where=str(self.path(step)), got=checked.summary(), fix=fix
        )

    def _existing_path(self, step: int) -> Path:
        """Finds the path of a step. Raises ValueError if there is no such step."""
        self.wait()
        path = self.path(step)
        if step not in self.steps():
            raise ArgumentError(
                "no such step", where=str(path), expected=f"one of {self.steps()}", got=step
            )
        return path

    # The lease

    def _require_lease(self) -> None:
        """Raises DirectoryLostError if the store has a lease, whose directory is lost."""
        if self._lease is not None:
            self._lease.require_held()

    def _own_directory(self) -> Path:
        """Finds the path by which the store writes and deletes; `directory` is for people.

        With a lease it is in the leased directory, wherever that is, also where `directory` is
        another one by now.
        """
        if self._lease is None:
            return self.directory
        return self._lease.anchor / self.directory.relative_to(self._lease.directory)

    def _own_path(self, step: int, suffix: str = "") -> Path:
        """Finds the path by which a step is written and deleted, or one beside it."""
        return self._own_directory() / f"{step}{suffix}"

    def _error(self, what: str, step: int, error: BaseException) -> CheckpointError:
        """Makes the error to raise: `what`, and in one line the root cause, which orbax wraps."""
        # The first error of the chain names the disk or the file.
        cause = error
        while (inner := cause.__cause__ or cause.__context__) and str(inner):
            cause = inner
        fix = "free disk space there" if is_disk_full(cause) else ""
        got = f"{type(cause).__name__}: {first_line(cause)}"
        if self._lease is not None:
            got = self._lease.readable(got)
        return CheckpointError(what, where=str(self.path(step)), got=got, fix=fix)

    # The background thread

    def _finish_save(
        self,
        step: int,
        record: Json,
        not_finite: Callable[[], list[str]] | None,
        written: dict[str, str],
        padded: dict[str, tuple[int, ...]],
        response: Any,
        delete_older: bool,
        keep_too: Collection[int],
    ) -> None:
        """Waits for orbax to write, renames the step into place, and deletes old steps."""
        try:
            response.result()  # of all processes
            self._require_lease()
            # Orbax knows the padded shapes alone.
            if jax.process_index() == 0:
                # The step is not in place yet.
                set_shapes(self._own_path(step, UNSEALED), padded)
            if not_finite is not None:
                record["finite"] = not not_finite()
            self._seal(step, record, written)
        except Exception as error:
            self._swept = False
            # In a directory that is lost, nothing more is changed.
            self._require_lease()
            # The unfinished step may fill the disk. Other processes, and other threads of orbax,
            # may still write to it: the next save then removes it.
            if jax.process_count() == 1:
                self._remove_unsealed()
            # Tell the processes that wait for this one's part, if the disk allows it.
            with contextlib.suppress(OSError):
                self._digests_directory(step).joinpath(f"failed-{jax.process_index()}").touch()
            raise self._error(NOT_WRITTEN, step, error) from error
        log.info("saved %d", step)
        if jax.process_index() == 0 and delete_older:
            for old in self._expired_steps(step, finite=record["finite"]):
                if old not in keep_too:
                    self._require_lease()
                    self._delete_step(old)

    def _seal(self, step: int, record: Json, written: dict[str, str]) -> None:
        """Digests this process's files; process 0 then writes the manifest and renames the step.

        The others wait until it has. `written` is {path: dtype and shape} of the saved arrays.
        """
        # Each process digests the files that it wrote.
        path, unsealed = self._own_path(step), self._own_path(step, UNSEALED)
        process = jax.process_index()
        seen = f"{self.path(step)}{UNSEALED} to be seen from process {process}"
        self._poll_until(unsealed.exists, step, seen)
        own_files = [name for name in list_files(unsealed) if writing_process(name) == process]
        files = digest_files(unsealed, own_files, flush=True)

        # Other processes hand their digests to process 0 and wait for it.
        if process:
            part = self._digests_directory(step) / f"{process}.json"
            # Not durably: once it has this name, process 0 may seal the step and remove the folder.
            unfinished = part.with_suffix(".writing")
            unfinished.write_text(json.dumps(files))
            unfinished.rename(part)
            self._poll_until(path.exists, step, "process 0 to seal it")
            return
        for other in range(1, jax.process_count()):
            part = self._digests_directory(step) / f"{other}.json"
            self._poll_until(part.exists, step, f"process {other} to digest its part")
            files |= json.loads(part.read_text())
        assert files.keys() == set(list_files(unsealed)), "every file has one writer"

        # The step is complete: it gets its manifest, then its name.
        _require_readable(unsealed, written)
        write_manifest(unsealed, record, files)
        log.info("sealed %s", path.name)
        self._require_lease()
        rename_durably(unsealed, path)
        fsync_directory(path.parent.parent)  # the first save creates `directory` too
        _remove(self._own_path(step, DIGESTS))

    def _digests_directory(self, step: int) -> Path:
        """Creates the directory where several processes leave their digests, or a note of failure.

        One process needs none: it gets the path alone.
        """
        directory = self._own_path(step, DIGESTS)
        if jax.process_count() > 1:
            directory.mkdir(exist_ok=True)
        return directory

    def _poll_until(self, condition: Callable[[], bool], step: int, what: str) -> None:
        """Polls until `condition` holds. Raises TimeoutError, at once if another process failed.

        A background thread can only poll files: a collective would mix with those of the steps.
        """
        deadline = time.monotonic() + PATIENCE
        while not condition():
            self._require_lease()  # else what it waits for may never come
            failures = sorted(each.name for each in self._own_path(step, DIGESTS).glob("failed-*"))
            if failures or time.monotonic() > deadline:
                raise TimeoutError(f"waited for {what}; {', '.join(failures) or 'in vain'}")
            time.sleep(0.05)

    def _expired_steps(self, step: int, *, finite: bool) -> list[int]:
        """Lists the steps that `keep` and `keep_every` do not keep, after a save of `step`.

        Later steps do not count: a run that went further was resumed from before its end. Where the
        saved state was not `finite`, the newest step that was is kept too.
        """
        # By number, with `step` among those that are kept.
        steps = [other for other in list_steps(self._own_directory())[0] if other <= step]
        older = steps[: -self.keep]
        if not finite:
            good = [other for other in steps if self._was_finite(other)]
            older = [old for old in older if old not in good[-1:]]
        return [old for old in older if self.keep_every is None or old % self.keep_every]

    def _was_finite(self, step: int) -> bool:
        """Tells whether a step is finite; one without a record of it counts as finite."""
        try:
            return read_manifest(self._own_path(step)).get("finite") is not False
        except DamageError:
            return False

    def _delete_step(self, step: int) -> None:
        """Renames a step away, then removes it; only logs where it cannot be renamed."""
        log.info("deleting %d", step)
        deleting = self._own_path(step, DELETING)
        try:
            self._own_path(step).rename(deleting)
        except OSError as error:  # it takes space, but the new step is in place
            log.warning("%s could not be deleted: %s", self.path(step), error)
            return
        self._swept = _remove(deleting)
        log.info("deleted %d", step)

    def _prepare_directory(self, step: int) -> None:
        """Removes what a killed or failed save left, and tests whether a step can be created.

        Raises ValueError if the step exists; CheckpointError, in process 0, if that fails.
        """
        if self._own_path(step).exists():
            raise ArgumentError(
                "this step is there already",
                where=str(self.path(step)),
                fix="remove or rename it, or save another step",
            )
        if jax.process_index() == 0:  # the one writer
            if not self._swept:
                self._remove_unsealed()
            try:
                self._own_path(step, UNSEALED).mkdir(parents=True)
                self._own_path(step, UNSEALED).rmdir()
            except OSError as error:
                self._require_lease()
                raise self._error(NOT_WRITTEN, step, error) from error
        self._swept = True

    def _remove_unsealed(self) -> None:
        """Removes the leftovers of saves and deletions that were not finished."""
        for path in sorted(self._own_directory().glob("*")):
            # Orbax appends a suffix of its own while it writes.
            if path.name.endswith((UNSEALED, DELETING, DIGESTS)) or f"{UNSEALED}." in path.name:
                _remove(path)


def _require_usable(directory: Path) -> None:
    """Raises ConfigError for a directory that orbax would take for another, or cannot name."""
    found = UNUSABLE_NAME.search(f"{directory}/")
    if found:
        raise ConfigError(
            "checkpoints cannot be written under this name",
            where=ascii(str(directory)),
            got="bytes that are not UTF-8" if found["bytes"] else repr(found[0]),
            fix="use another directory, or a link with a plain name",
        )


def _orbax_context() -> orbax.Context:
    """Makes orbax's default options, with paths taken literally."""
    context = orbax.Context()
    context.file.path_class = LiteralPath
    return context


def _saving_context() -> orbax.Context:
    """Makes the options with which orbax saves; their effects are measured."""
    context = _orbax_context()
    # If directories cannot be created in the background, orbax's threads wait for 300 s.
    context.asynchronous.create_directories_asynchronously = False
    saving = context.array.saving
    # Compression shrinks trained weights by 8% at thirteen times the time.
    saving.use_compression = False
    # Orbax would compile a slice for each replica of an array, in the first save: 25 ms apiece.
    # `divide_replicas` is one program.
    saving.use_replica_parallel = False
    saving.scoped_storage_options_creator = _storage_options
    # `_require_readable` checks more; a restore brings its own shardings.
    saving.enable_post_merge_validation = False
    saving.enable_write_sharding_file = False
    return context


def _storage_options(_: Any, array: jax.Array) -> Any:
    """Chooses orbax's options for an array: the size of its chunks, which are read as a whole.

    Each replica of an array may be restored as a shard, and then reads its own chunk.
    """
    # Bytes of a shard, and how many devices hold the same one.
    shard = prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    replicas = max(1, shard * len(array.sharding.device_set) // array.nbytes)
    chunk = min(CHUNK, max(shard // replicas, LEAST_CHUNK))
    return orbax.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=chunk)


def _require_readable(path: Path, saved: dict[str, str]) -> None:
    """Opens every array of a finished step, and compares it with the state's.

    `saved` has dtype and shape of each, as text, by path. Reads metadata alone. Raises ValueError
    naming the arrays that are missing or different.
    """
    wrong = []
    for name, array in sorted(written_arrays(path, saved).items()):
        if isinstance(array, Exception):
            wrong.append(f"{name}: saved {saved[name]}, found {first_line(array)}")
        elif (found := describe_array(array)) != saved[name].partition(" ")[0]:
            wrong.append(f"{name}: saved {saved[name]}, found {found}")
    if wrong:
        raise ValueError(f"what was written cannot be read back: {first_lines(wrong, SHOWN)}")


def _require_shapes(path: Path, record: Json, specs: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Checks the shapes of specs; raises ValueError for others than saved: orbax would pad or cut.

    The data of PRNG keys, which has one more dim, has its shape from `saved_spec`.
    """
    for name, spec in specs.items():
        saved = record["leaves"].get(name)
        if saved and name not in record["keys"] and parse_description(saved)[1] != spec.shape:
            raise ArgumentError(
                "another shape is saved",
                where=f"{path}, {name}",
                expected=saved,
                got=describe_array(spec),
            )


def _remove(path: Path) -> bool:
    """Removes a file or directory; returns whether it is gone, which open readers can prevent."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s could not be removed: %s", path.name, error)
        return False
    return True


def _as_json(name: str, value: Json) -> Json:
    """Copies a dict through JSON. Raises ValueError naming the entry that JSON cannot hold."""
    if not isinstance(value, Mapping):
        raise ArgumentError(
            f"`{name}` is not a dict",
            where=name,
            expected="a dict of what JSON holds, which may be empty",
            got=type(value).__name__,
            fix=f"{name}={{}}",
        )
    for key, entry in value.items():
        try:
            json.dumps(entry)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"`{name}` cannot be saved as JSON",
                where=str(key),
                got=error,
                fix="numbers, text, lists and dicts of them",
            ) from error
    return json.loads(json.dumps(value))
