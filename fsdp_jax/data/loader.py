"""Batches of examples that resume exactly, read ahead of the step.

The stream of rows is one sequence that the seed fixes: epoch after epoch, each shuffled in its own
way. Step s takes the rows s·G to (s+1)·G of it (G the global batch), and of those process p of n
takes every n-th, from p on. So what a step sees does not depend on how many processes read it, and
a number of steps is all there is to remember.

Shapes: G global batch, n processes, T sequence.
"""

import weakref
from collections.abc import Iterator
from typing import Any, Self

import grain
import numpy as np

from fsdp_jax.data.examples import Examples, Row, check_seed
from fsdp_jax.data.read_ahead import ReadAhead
from fsdp_jax.data.windows import check_positive
from fsdp_jax.errors import ConfigError, message

Batch = dict[str, np.ndarray]

AHEAD = 2  # batches


class Loader:
    """An iterator over this process's rows of each batch, whose position can be saved and restored.

    A thread of its own reads up to `ahead` batches before they are asked for, from the first `next`
    on; none, and no thread, for 0. `settings` is what fixes the stream: a state made under other
    settings is refused. Close it, or use it in a `with` block; one that is dropped closes itself.
    """

    def __init__(self, batches: grain.MapDataset, settings: dict[str, Any], *, ahead: int = AHEAD):
        self._batches, self._settings, self._ahead = batches, settings, ahead
        self._position = 0  # batches delivered, whatever has been read
        self._reader: ReadAhead[Batch] | None = None
        self._stop: weakref.finalize | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """{name: array [G/n, ...]}. Raises what reading raised; the position stays, so the next
        call tries again.
        """
        if self._position >= len(self._batches):
            raise StopIteration
        if not self._ahead:
            batch = self._batches[self._position]
        else:
            if self._reader is None:
                self._start()
            assert self._reader is not None
            try:
                batch = self._reader.take()
            except BaseException:
                self.close()
                raise
        self._position += 1
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and waits for it; `next` would start another at the same position."""
        if self._stop is not None:
            self._stop()
        self._reader = self._stop = None

    def get_state(self) -> dict[str, Any]:
        """What resumes after the batch delivered last: JSON-serialisable, and the same on every
        process.
        """
        return {"position": {"next_index": self._position}, "settings": dict(self._settings)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken; ConfigError where it belongs to another stream."""
        saved = state.get("settings", {}) if "position" in state else {}
        names = dict.fromkeys([*self._settings, *saved])
        differing = [
            name for name in names if saved.get(name, _NONE) != self._settings.get(name, _NONE)
        ]
        if differing:
            raise ConfigError(
                message(
                    "The saved position belongs to another stream of data.",
                    where=", ".join(differing),
                    expected=", ".join(f"{name} {saved.get(name, _NONE)}" for name in differing)
                    + " (saved)",
                    got=", ".join(
                        f"{name} {self._settings.get(name, _NONE)}" for name in differing
                    ),
                    fix="restore the saved settings, or begin anew: with another `output`, without a saved position",
                )
            )
        self.close()
        self._position = int(state["position"]["next_index"])

    def _start(self) -> None:
        self._reader = reader = ReadAhead(
            self._batches.__getitem__, self._position, len(self._batches), self._ahead
        )
        self._stop = weakref.finalize(self, reader.close)


_NONE = "missing"


def make_loader(
    examples: Examples,
    *,
    global_batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    shuffle: bool = True,
    repeat: bool = True,
    ahead: int = AHEAD,
) -> Loader:
    """The batches of process `process_index`.

    `repeat=True` never ends; otherwise one epoch, without the rows that do not fill a last global
    batch. `ahead`: batches read before they are asked for. Raises ConfigError where the numbers do
    not fit together.
    """
    rows = _rows_per_process(global_batch_size, process_index, process_count)
    check_seed(seed)
    dataset = grain.MapDataset.source(examples)
    if shuffle:
        dataset = dataset.shuffle(seed)
    # Repeated before it is sliced: an epoch need not be a multiple of the processes or of the
    # batch.
    dataset = dataset.repeat() if repeat else dataset[: _whole_batches(examples, global_batch_size)]
    dataset = dataset[process_index::process_count].batch(rows, drop_remainder=True)
    settings = {
        **examples.settings,
        "global_batch_size": global_batch_size,
        "seed": seed,
        "shuffle": shuffle,
        "repeat": repeat,
    }
    return Loader(dataset, settings, ahead=ahead)


def eval_batches(
    examples: Examples,
    *,
    batch_size: int,
    limit: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """Every row once, in order, at most `limit` batches; `batch_size` is global, the rows are this
    process's.

    Yields {name: array [batch_size/n, ...]}, always with `mask`: float32 [batch_size/n, T], or
    [batch_size/n] where rows have labels. Rows that fill up the last batch repeat one, with mask 0.
    Every process gets as many batches. Raises ConfigError as `make_loader` does, at the call.
    """
    rows = _rows_per_process(batch_size, process_index, process_count)
    found = examples
    starts = range(0, len(found), batch_size)[:limit]

    def batch(start: int) -> Batch:
        mine = range(start + process_index, start + batch_size, process_count)
        assert len(mine) == rows, "every process has as many rows"
        real = [_masked(found[index]) for index in mine if index < len(found)]
        if len(real) < rows:
            spare = _masked(found[start])
            real += [spare | {"mask": np.zeros_like(spare["mask"])}] * (rows - len(real))
        return {name: np.stack([row[name] for row in real]) for name in real[0]}

    return (batch(start) for start in starts)


def _masked(row: Row) -> Row:
    """The row with a mask; one that has none counts in full."""
    if "mask" in row:
        return row
    assert "tokens" in row or "labels" in row, "text to text has a mask"
    shape = (len(row["tokens"]) - 1,) if "tokens" in row else ()
    return row | {"mask": np.ones(shape, np.float32)}


def _rows_per_process(global_batch_size: int, process_index: int, process_count: int) -> int:
    check_positive("the batch size", global_batch_size)
    check_positive("the number of processes", process_count)
    if not 0 <= process_index < process_count:
        expected = f"0 to {process_count - 1}"
        raise ConfigError(
            message(
                "There is no such process.",
                where="process_index",
                expected=expected,
                got=process_index,
            )
        )
    if global_batch_size % process_count:
        raise ConfigError(
            message(
                "The batch cannot be shared evenly by the processes.",
                where="train.global_batch_size",
                expected=f"a multiple of {process_count} processes",
                got=global_batch_size,
                fix=f"use {max(1, global_batch_size // process_count) * process_count}",
            )
        )
    return global_batch_size // process_count


def _whole_batches(examples: Examples, global_batch_size: int) -> int:
    """How many rows fill whole batches; ConfigError where not even one."""
    if len(examples) < global_batch_size:
        raise ConfigError(
            message(
                "One epoch does not fill one batch.",
                where="train.global_batch_size",
                expected=f"at most {len(examples)}, the rows of one epoch",
                got=global_batch_size,
                fix="use a smaller batch or more data, or let the data repeat",
            )
        )
    return len(examples) // global_batch_size * global_batch_size
