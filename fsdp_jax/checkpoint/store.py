"""The one adapter around orbax: nothing else imports it.

A step is saved flat, as `path -> array`, whatever the state is made of; the structure comes from the target on restore.
So NamedTuples, empty subtrees and renamed classes need no care, and two states are compared by comparing their paths.
"""

import json
import operator
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as orbax

from fsdp_jax.errors import ConfigError, message
from fsdp_jax.tree import PyTree, flatten, path_of

Json = dict[str, Any]

COMMITTED = "_CHECKPOINT_METADATA"  # orbax writes it last, before it renames the step into place
UNFINISHED = ".orbax-checkpoint-tmp"  # the ending of a step being written
DELETING = ".deleting"  # the ending of a step being deleted: a half-deleted step must not look like a good one
SHOWN = 40  # differences listed before the rest is only counted


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read: a full disk, a damaged file. Not a mistake of the user."""


class CheckpointStore:
    """The checkpoints of a run: `directory/STEP/` each, whole or not there at all.

    `directory` is on a file system that every process sees; each writes and reads its own shards, and every process
    makes the same calls in the same order. The newest `keep` steps are preserved, older ones deleted once a newer one
    is committed. With `asynchronous` a save returns as soon as the state is copied to the host and is written behind
    the caller's back; the state may then be donated. Readers need no lease: a store that never saves changes nothing.

    Raises ConfigError if `keep` is not positive.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3, asynchronous: bool = True):
        if keep < 1:
            raise ConfigError(message("nothing to keep", where="checkpoint.keep", expected="1 or more", got=keep))
        self.directory = Path(directory).absolute()
        self.keep = keep
        self.asynchronous = asynchronous
        self._context = orbax.Context()
        # In the background, a folder that cannot be made leaves orbax's threads waiting for it: 300 s, exit included.
        self._context.asynchronous.create_directories_asynchronously = False
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
        """Saves state, data position and metadata together as `directory/STEP/`; returns the seconds it blocked.

        `state` is any pytree of sharded jax.Arrays, typed PRNG keys among them. `data` and `metadata` come back as JSON
        gives them (tuples as lists). `data` is the position of the global batch, so it is equal in every process and
        process 0's is the one saved. Waits for the save before this one.

        Raises that earlier save's error instead of saving; CheckpointError if this one fails (later, from `wait`, when
        asynchronous); ValueError if the step is there already or an argument cannot be saved.
        """
        started = time.perf_counter()
        self.wait()
        step, path = operator.index(step), self._path(step)
        arrays, contents = _to_arrays(state)
        record = {"data": _as_json("data", data), "metadata": _as_json("metadata", metadata), **contents}
        if path.exists():
            raise ValueError(
                message("this step is there already", where=str(path), fix="remove it, or save another step")
            )
        self._sweep()
        try:
            with self._context:
                response = orbax.save_async(path, arrays, custom_metadata=record)
        except Exception as error:
            raise _failure("a checkpoint could not be written", path, error) from error
        self._pending = self._worker.submit(self._commit, step, response)
        if not self.asynchronous:
            self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Returns when nothing is being written. Raises the error of the save under way, once; then it is forgotten."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def steps(self) -> list[int]:
        """The committed steps, ascending. An empty or foreign directory named like a step is none."""
        if not self.directory.is_dir():
            return []
        names = [path.parent.name for path in self.directory.glob(f"*/{COMMITTED}")]
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def latest(self) -> int | None:
        """The newest committed step, by number: clocks may disagree."""
        return max(self.steps(), default=None)

    def restore(self, step: int, target: PyTree) -> tuple[PyTree, Json, Json]:
        """Reads (state, data, metadata) of a step, each shard straight to where `target` wants it.

        `target` is the state's structure with a `jax.ShapeDtypeStruct` that has a sharding at every leaf. Another mesh
        than the one that saved is fine.

        Raises ValueError if there is no such step, or, before any array is read, if a path, shape or dtype differs from
        the target (nothing is cast); CheckpointError if the files are damaged.
        """
        self.wait()
        path, found = self._path(step), self.steps()
        if step not in found:
            raise ValueError(message("no such step", where=str(path), expected=f"one of {found}", got=step))
        record = _read_record(path)
        leaves = _flatten(target)
        _check_target(path, record["leaves"], leaves)
        try:
            arrays = orbax.load(path, {name: _stored(leaf) for name, leaf in leaves.items() if leaf.size})
        except Exception as error:
            raise _failure("a checkpoint could not be read", path, error) from error
        restored = [_from_stored(arrays.get(name), leaf, record["keys"].get(name)) for name, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(target), restored), record["data"], record["metadata"]

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _commit(self, step: int, response: Any) -> None:
        """In the background thread: sees the save through, then deletes what is too old."""
        try:
            response.result()
        except Exception as error:
            self._swept = False  # what it left takes room, perhaps on a full disk: the next save clears it away
            raise _failure("a checkpoint could not be written", self._path(step), error) from error
        if jax.process_index() == 0:
            # Steps beyond this one are of a run that went further and was taken up again before its end: leave them.
            for old in [found for found in self.steps() if found <= step][: -self.keep]:
                self._delete(old)

    def _delete(self, step: int) -> None:
        path = self._path(step)
        doomed = path.with_name(path.name + DELETING)
        path.rename(doomed)
        shutil.rmtree(doomed)

    def _sweep(self) -> None:
        """Removes what a killed writer or a failed save left. Before a save only: who saves is the one writer."""
        if not self._swept and jax.process_index() == 0:
            for ending in (UNFINISHED, DELETING):
                for path in self.directory.glob(f"*{ending}"):
                    shutil.rmtree(path)
        self._swept = True


def _flatten(state: PyTree) -> dict[str, Any]:
    flat = flatten(state)
    if len(flat) < len(jax.tree.leaves(state)):
        paths = [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(message("two leaves share a path", got=", ".join(twice), fix="no `/` in names"))
    return flat


def _to_arrays(state: PyTree) -> tuple[dict[str, jax.Array], Json]:
    """The arrays to write, and what the record says of them: every leaf as text, and the kind of each PRNG key."""
    leaves = _flatten(state)
    foreign = [f"{path}: {type(leaf).__name__}" for path, leaf in leaves.items() if not isinstance(leaf, jax.Array)]
    if foreign:
        raise ValueError(message("only jax.Arrays can be saved", got="; ".join(foreign), fix="use jnp.asarray"))
    keys = {path: str(jax.random.key_impl(leaf)) for path, leaf in leaves.items() if _is_key(leaf)}
    # orbax refuses arrays without elements; the record alone brings them back
    arrays = {path: jax.random.key_data(leaf) if path in keys else leaf for path, leaf in leaves.items() if leaf.size}
    if not arrays:
        raise ValueError(message("nothing to save", expected="a state with at least one element", got="none"))
    return arrays, {"leaves": {path: _describe(leaf) for path, leaf in leaves.items()}, "keys": keys}


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe(leaf: Any) -> str:
    """As in `bfloat16[8,4]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _stored(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What lies on disk for a leaf of the target. A PRNG key has one more dim there, and that one is whole."""
    stored = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if _is_key(leaf):
        stored = jax.eval_shape(jax.random.key_data, stored)
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=leaf.sharding)


def _from_stored(array: jax.Array | None, leaf: jax.ShapeDtypeStruct, impl: str | None) -> jax.Array:
    if array is None:  # no elements, never written
        stored = _stored(leaf)
        empty = np.zeros(stored.shape, stored.dtype)
        array = jax.make_array_from_callback(stored.shape, stored.sharding, lambda index: empty[index])
    return array if impl is None else jax.random.wrap_key_data(array, impl=impl)


def _check_target(path: Path, saved: dict[str, str], target: dict[str, Any]) -> None:
    homeless = [name for name, leaf in target.items() if getattr(leaf, "sharding", None) is None]
    if homeless:
        raise ValueError(message("a target without shardings", where=str(path), got=", ".join(homeless[:SHOWN])))
    wanted = {name: _describe(leaf) for name, leaf in target.items()}
    differing = sorted(name for name in wanted.keys() | saved.keys() if wanted.get(name) != saved.get(name))
    if not differing:
        return
    lines = [f"{n}: expected {wanted.get(n, 'nothing')}, got {saved.get(n, 'nothing')}" for n in differing[:SHOWN]]
    if len(differing) > SHOWN:
        lines.append(f"and {len(differing) - SHOWN} more")
    raise ValueError(
        message(
            "the checkpoint does not fit this run",
            where=str(path),
            expected="the state that the configuration describes",
            got="\n            ".join([f"{len(differing)} differing paths", *lines]),
            fix="use the configuration that wrote it, or another output directory",
        )
    )


def _read_record(path: Path) -> Json:
    """What was saved beside the arrays: `data`, `metadata`, `leaves` and `keys`."""
    try:
        record = orbax.metadata(path, "state").custom_metadata
        if not isinstance(record, dict) or not {"data", "metadata", "leaves", "keys"} <= record.keys():
            raise ValueError(f"{COMMITTED} lacks what belongs to a step")
    except Exception as error:
        raise _failure("a checkpoint could not be read", path, error) from error
    return record


def _as_json(name: str, value: Json) -> Json:
    """A copy: the caller may go on changing its own while the save is under way."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(message(f"`{name}` cannot be saved as JSON", got=error)) from error


def _failure(what: str, path: Path, error: BaseException) -> CheckpointError:
    """The real cause, in one line: orbax wraps it, as in `NoEntryError: incompatible handler`."""
    cause = error
    while (inner := cause.__cause__ or cause.__context__) and str(inner):
        cause = inner
    line = str(cause).partition("\n")[0].partition(" [tensorstore_spec")[0]
    return CheckpointError(message(what, where=str(path), got=f"{type(cause).__name__}: {line}"))
