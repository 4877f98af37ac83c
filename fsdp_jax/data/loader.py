"""Batches of examples that resume exactly, read ahead of the step.

The stream of rows is one sequence that the seed determines: epoch after epoch, each with its own
shuffle. Step s takes rows s·G to (s+1)·G of the stream (G the global batch), and process p of n
takes every n-th of those, starting at p. So a step's batch does not depend on how many processes
read it, and a position in the stream is one number of steps.

Shapes: G global batch, n processes, T sequence.
"""

import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from fsdp_jax.data.checks import check_equal, check_positive, check_seed
from fsdp_jax.data.examples import Examples, Row, read_rows
from fsdp_jax.errors import ConfigError, DamageError, extra

with extra("train"):
    import grain

Batch = dict[str, np.ndarray]

AHEAD = 2  # batches


class Loader:
    """An iterator over this process's rows of each batch, whose position can be saved and restored.

    `batches` are this process's. From the first `next` on, a thread reads at most `ahead` of them
    in advance; with 0 there is no thread. `settings` determines the stream, and `identity` are
    digests of the data: a state saved under others is refused. Close the loader or use it in a
    `with` block; garbage collection also ends its thread.
    """

    def __init__(
        self,
        batches: "RowStream",
        settings: dict[str, Any],
        *,
        identity: Mapping[str, str] | None = None,
        ahead: int = AHEAD,
    ):
        self._options = grain.ReadOptions(num_threads=min(ahead, 1), prefetch_buffer_size=ahead)
        self._batches = batches
        self._settings = settings
        self._identity = dict(identity or {})
        self._position = 0  # batches delivered, however many were read
        self._source = _ClosableBatches(batches)
        self._iterator: grain.DatasetIterator | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Returns the next batch, {name: array [G/n, ...]}.

        Raises what reading the batch raised; the position stays, so the next call tries again.
        """
        if self._iterator is None:
            self._source = _ClosableBatches(self._batches)
            dataset = grain.MapDataset.source(self._source).to_iter_dataset(self._options)
            self._iterator = iter(dataset)
            self._iterator.set_state({"next_index": self._position})
        try:
            batch = next(self._iterator)
        except BaseException as error:
            # grain's iterator would skip the batch that failed: start another one next time.
            self.close()
            if not isinstance(error, StopIteration):
                error.add_note(f"(while reading batch {self._position})")
            raise
        self._position += 1
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread after the batch that it is reading; `next` would start another one."""
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None
        self._source.close()  # grain's iterator does not wait

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last delivered batch, as JSON; equal on every process."""
        state = {"position": {"next_index": self._position}, "settings": dict(self._settings)}
        if self._identity:
            state["data"] = dict(self._identity)
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a saved position.

        Raises ConfigError if it belongs to another stream, or to other data: digests that both have
        are compared, since older releases saved none. Raises DamageError for a position that this
        stream does not have.
        """
        # The settings determine the stream; a state without a position has none of them.
        saved = {}
        if "position" in state and isinstance(state.get("settings"), dict):
            saved = state["settings"]
        what = "the saved position belongs to another stream of data"
        fix = "restore the saved settings, or start anew with another `output`"
        check_equal(what, saved, self._settings, fix=fix)
        # The digests of the data.
        identity = state.get("data", {})
        if not isinstance(identity, dict):
            raise DamageError("the saved digests are none", where="data", got=identity)
        both = sorted(self._identity.keys() & identity.keys())
        old, new = (
            {f"{name} digest": digests[name] for name in both}
            for digests in (identity, self._identity)
        )
        what = "the saved position belongs to other data"
        fix = "restore the data, or start anew with another `output`"
        check_equal(what, old, new, fix=fix)
        # The position itself, which anything may have written.
        position = None
        if isinstance(state["position"], dict):
            position = state["position"].get("next_index")
        if type(position) is not int or not 0 <= position <= len(self._batches):
            what, expected = "the saved position is none", f"0 to {len(self._batches)} batches"
            raise DamageError(what, where="position", expected=expected, got=position)
        self.close()
        self._position = position


@dataclass(frozen=True, eq=False)
class RowStream:
    """One process's batches by index, of the stream of rows that this module describes.

    `rows`: of this process in a batch. `seed`: of the shuffles; None keeps the rows in order.
    """

    examples: Examples
    rows: int
    process_index: int
    process_count: int
    seed: int | None
    repeat: bool

    def __len__(self) -> int:
        if self.repeat:
            # as many as there can be: an epoch need not be a multiple of the batch
            return sys.maxsize // self.process_count // self.rows
        return len(self.examples) // (self.rows * self.process_count)

    def __getitem__(self, index: int) -> Batch:
        """Reads a batch, {name: array [rows, ...]}, in one call where the examples allow it."""
        first = index * self.rows * self.process_count + self.process_index
        places = range(first, first + self.rows * self.process_count, self.process_count)
        count = len(self.examples)
        pairs = (divmod(place, count) for place in places)
        if self.seed is None:
            return read_rows(self.examples, [row for _, row in pairs])
        # a permutation by index, so that no list of all rows is in memory
        shuffle, seed = grain.experimental.index_shuffle, self.seed
        shuffled = [shuffle(row, count - 1, (seed + epoch) % 2**32, 4) for epoch, row in pairs]
        return read_rows(self.examples, shuffled)


class _ClosableBatches:
    """Batches by index, read one at a time, and none any more once `close` has returned."""

    def __init__(self, batches: "RowStream"):
        self._batches = batches
        self._closed = False
        self._reading = threading.RLock()  # a signal's handler may close what it has interrupted

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        """Reads a batch. Raises ValueError once `close` has been called."""
        with self._reading:
            if self._closed:
                raise ValueError("the loader is closed")  # whoever asked for it has gone
            return self._batches[index]

    def close(self) -> None:
        """Waits for the batch that is being read; later ones are refused."""
        self._closed = True
        with self._reading:
            pass


def make_loader(
    examples: Examples,
    *,
    global_batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    shuffle: bool = True,
    repeat: bool = True,
    identity: Mapping[str, str] | None = None,
    ahead: int = AHEAD,
) -> Loader:
    """Makes a loader of the batches of process `process_index`.

    With `repeat` they never end; without, they are one epoch, less the rows that do not fill a last
    global batch. `identity`, such as `LoadedData.identity`, is saved with the position. `ahead` is
    how many batches are read in advance. Raises ConfigError if the sizes are inconsistent.
    """
    rows = _rows_per_process(global_batch_size, process_index, process_count)
    check_seed(seed)
    if not repeat and len(examples) < global_batch_size:
        what, where = "one epoch does not fill one batch", "train.global_batch_size"
        expected = f"at most {len(examples)}, the rows of one epoch"
        got, fix = global_batch_size, "use a smaller batch or more data, or let the data repeat"
        raise ConfigError(what, where=where, expected=expected, got=got, fix=fix)
    stream = RowStream(
        examples,
        rows=rows,
        process_index=process_index,
        process_count=process_count,
        seed=seed if shuffle else None,
        repeat=repeat,
    )
    settings = {
        **examples.settings,
        "global_batch_size": global_batch_size,
        "seed": seed,
        "shuffle": shuffle,
        "repeat": repeat,
    }
    return Loader(stream, settings, identity=identity, ahead=ahead)


def eval_batches(
    examples: Examples,
    *,
    batch_size: int,
    limit: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """Reads this process's rows of every example once, in order; at most `limit` batches.

    Yields {name: array [batch_size/n, ...]} for the global `batch_size`, always with `mask`:
    float32 [batch_size/n, T], or [batch_size/n] where rows have labels. The last batch is filled by
    repeating a row with mask 0, and every process gets as many batches. Raises ConfigError as
    `make_loader` does, at the call.
    """
    rows = _rows_per_process(batch_size, process_index, process_count)
    starts = range(0, len(examples), batch_size)[:limit]

    def make_batch(start: int) -> Batch:
        """Reads this process's rows of the global batch that starts at row `start`."""
        indices = range(start + process_index, start + batch_size, process_count)
        assert len(indices) == rows, "every process has as many rows"
        batch = [_with_mask(examples[index]) for index in indices if index < len(examples)]
        # the batch that starts at `start` has at least that row
        if len(batch) < rows:
            filler = _with_mask(examples[start])
            filler["mask"] = np.zeros_like(filler["mask"])
            batch += [filler] * (rows - len(batch))
        return {name: np.stack([row[name] for row in batch]) for name in batch[0]}

    return (make_batch(start) for start in starts)


def _with_mask(row: Row) -> Row:
    """Copies a row, with a `mask`: its own, or ones for its targets or its label."""
    if "mask" in row:
        return dict(row)
    assert "tokens" in row or "labels" in row, "text to text has a mask"
    shape: tuple[int, ...] = ()
    if "tokens" in row:
        shape = (len(row["tokens"]) - 1,)
    return row | {"mask": np.ones(shape, np.float32)}


def _rows_per_process(global_batch_size: int, process_index: int, process_count: int) -> int:
    """Counts the rows of a batch that a process reads. Raises ConfigError for bad arguments."""
    check_positive("the batch size", global_batch_size)
    check_positive("the number of processes", process_count)
    if not 0 <= process_index < process_count:
        what = "there is no such process"
        expected = f"0 to {process_count - 1}"
        raise ConfigError(what, where="process_index", expected=expected, got=process_index)
    if global_batch_size % process_count:
        what = "the batch cannot be split evenly among the processes"
        where, expected = "train.global_batch_size", f"a multiple of {process_count} processes"
        fix = f"use {max(1, global_batch_size // process_count) * process_count}"
        raise ConfigError(what, where=where, expected=expected, got=global_batch_size, fix=fix)
    return global_batch_size // process_count
