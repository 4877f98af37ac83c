"""Batches of byte windows, read by grain in this process, that resume exactly.

The stream of examples is one sequence that the seed fixes: epoch after epoch, each shuffled in its own way. Step s
takes the examples s·G to (s+1)·G of it (G the global batch), and of those process p of n takes every n-th, from p on.
So what a step sees does not depend on how many processes read it, and a number of steps is all there is to remember.

Shapes: G global batch, n processes, T sequence.
"""

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from fsdp_jax.errors import ConfigError, message

Batch = dict[str, np.ndarray]


class Windows:
    """Random access to windows of T+1 tokens, each starting at the last token of the one before.

    Every token is predicted once per epoch; what is left at the end, less than T tokens, is not used. Raises
    ConfigError where the corpus is shorter than one window.
    """

    def __init__(self, tokens: np.ndarray, *, sequence_length: int):
        _check_positive("data.sequence_length", sequence_length)
        if tokens.ndim != 1 or len(tokens) < sequence_length + 1:
            raise ConfigError(
                message(
                    "The corpus is shorter than one sequence.",
                    where="data.sequence_length",
                    expected=f"at least {sequence_length + 1} tokens (sequence length {sequence_length}, and one more)",
                    got=f"a corpus of {len(tokens)} tokens",
                    fix="shorten data.sequence_length or use more text",
                )
            )
        self.tokens = tokens
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> Batch:
        """`tokens`, int32 [T+1]."""
        start = index * self.sequence_length
        return {"tokens": self.tokens[start : start + self.sequence_length + 1].astype(np.int32)}


class Loader:
    """An iterator over this process's rows of each batch, whose position can be saved and restored.

    `settings` is what fixes the stream: a state made under other settings is refused.
    """

    def __init__(self, dataset: grain.MapDataset, settings: dict[str, Any]):
        # The windows are in memory: threads would only wait for each other.
        self._batches = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
        self._settings = settings

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        """`tokens`, int32 [G/n, T+1]."""
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """What resumes here: JSON-serialisable, and the same on every process."""
        return {"position": self._batches.get_state(), "settings": dict(self._settings)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken; ConfigError where it belongs to another stream."""
        saved = state.get("settings", {}) if "position" in state else {}
        differing = [name for name, value in self._settings.items() if saved.get(name) != value]
        if differing:
            raise ConfigError(
                message(
                    "The saved position belongs to another stream of data.",
                    where=", ".join(differing),
                    expected=", ".join(f"{name} {saved.get(name, 'missing')}" for name in differing) + " (saved)",
                    got=", ".join(f"{name} {self._settings[name]}" for name in differing),
                    fix="restore the saved settings, or start the data again without a saved position",
                )
            )
        self._batches.set_state(state["position"])


def make_loader(
    tokens: np.ndarray,
    *,
    sequence_length: int,
    global_batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    shuffle: bool = True,
    repeat: bool = True,
) -> Loader:
    """The batches of process `process_index`; `tokens` is uint8 (or any integer) of one dimension.

    `repeat=True` never ends; otherwise one epoch, without the windows that do not fill a last global batch. Raises
    ConfigError where the numbers do not fit together.
    """
    rows = _rows_per_process(global_batch_size, process_index, process_count)
    windows = Windows(tokens, sequence_length=sequence_length)
    if not 0 <= seed < 2**32:
        raise ConfigError(message("The seed is out of range.", where="train.seed", expected="0 to 2**32 - 1", got=seed))
    dataset = grain.MapDataset.source(windows)
    if shuffle:
        dataset = dataset.shuffle(seed)
    # Repeated before it is sliced: an epoch need not be a multiple of the processes or of the batch.
    dataset = dataset.repeat() if repeat else dataset[: _whole_batches(windows, global_batch_size)]
    dataset = dataset[process_index::process_count].batch(rows, drop_remainder=True)
    settings = {
        "sequence_length": sequence_length,
        "global_batch_size": global_batch_size,
        "seed": seed,
        "shuffle": shuffle,
        "repeat": repeat,
        "corpus_tokens": len(tokens),
    }
    return Loader(dataset, settings)


def eval_batches(
    tokens: np.ndarray,
    *,
    sequence_length: int,
    batch_size: int,
    limit: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """Every window once, in order, at most `limit` batches; `batch_size` is global, the rows are this process's.

    Yields `tokens`, int32 [batch_size/n, T+1], and `mask`, float32 [batch_size/n, T]: 1, or 0 in the rows that fill up
    the last batch. Every process gets as many batches. Raises ConfigError as `make_loader` does, at the call.
    """
    rows = _rows_per_process(batch_size, process_index, process_count)
    windows = Windows(tokens, sequence_length=sequence_length)
    starts = range(0, len(windows), batch_size)[:limit]

    def batch(start: int) -> Batch:
        filled = {"tokens": np.zeros((rows, sequence_length + 1), np.int32)}
        filled["mask"] = np.zeros((rows, sequence_length), np.float32)
        for row, index in enumerate(range(start + process_index, start + batch_size, process_count)):
            if index < len(windows):
                filled["tokens"][row] = windows[index]["tokens"]
                filled["mask"][row] = 1
        return filled

    return (batch(start) for start in starts)


def _rows_per_process(global_batch_size: int, process_index: int, process_count: int) -> int:
    _check_positive("the batch size", global_batch_size)
    _check_positive("the number of processes", process_count)
    if not 0 <= process_index < process_count:
        expected = f"0 to {process_count - 1}"
        raise ConfigError(
            message("There is no such process.", where="process_index", expected=expected, got=process_index)
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


def _whole_batches(windows: Windows, global_batch_size: int) -> int:
    """How many windows fill whole batches; ConfigError where not even one."""
    if len(windows) < global_batch_size:
        raise ConfigError(
            message(
                "One epoch does not fill one batch.",
                where="train.global_batch_size",
                expected=f"at most {len(windows)}, the windows of {windows.sequence_length} tokens in the corpus",
                got=global_batch_size,
                fix="use a smaller batch or more text, or let the data repeat",
            )
        )
    return len(windows) // global_batch_size * global_batch_size


def _check_positive(where: str, value: int) -> None:
    if value < 1:
        raise ConfigError(message("A size is not positive.", where=where, expected="at least 1", got=value))
