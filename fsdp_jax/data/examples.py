"""The protocol of examples: rows of named arrays by index, the same row for the same index.

What several kinds of examples are made with: random numbers by index, and padded rows.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

Row = dict[str, np.ndarray]
"""One example: {name: array}, without the batch dimension."""

Settings = Mapping[str, int | float | str | bool]


class Examples(Protocol):
    """Random access to rows that share their names, shapes and dtypes."""

    @property
    def settings(self) -> Settings:
        """What determines the rows and their order; a saved position must have the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Returns row `index`, from 0 to the length; several threads may call it."""


@runtime_checkable
class BatchedExamples(Protocol):
    """Examples that read several rows in less time than one after the other."""

    def read_rows(self, indices: Sequence[int]) -> Row:
        """Returns {name: array [rows, ...]}, the rows of `indices` in their order."""


def read_rows(examples: Examples, indices: Sequence[int]) -> Row:
    """Reads rows and stacks them, {name: array [rows, ...]}; in one call where that is faster."""
    if isinstance(examples, BatchedExamples):
        return examples.read_rows(indices)
    rows = [examples[index] for index in indices]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


class Tokens(Protocol):
    """A stream of token ids: a one-dimensional array, or an object that is sliced like one."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice) -> np.ndarray: ...


@runtime_checkable
class BatchedTokens(Protocol):
    """Tokens that read several slices of one length in less time than one after the other."""

    def read_slices(self, starts: Sequence[int], length: int) -> np.ndarray:
        """Returns int32 [slices, length], the tokens from each of `starts` on."""


def read_slices(tokens: Tokens, starts: Sequence[int], length: int) -> np.ndarray:
    """Reads int32 [slices, length], the tokens from each of `starts` on."""
    if isinstance(tokens, BatchedTokens):
        return tokens.read_slices(starts, length)
    rows = np.empty((len(starts), length), np.int32)
    for row, start in zip(rows, starts, strict=True):
        row[:] = tokens[start : start + length]
    return rows


def random_uniforms(seed: int, index: int, count: int) -> np.ndarray:
    """Draws float64 [count] in [0, 1), a function of `seed` and `index` alone.

    The generator is Philox (Salmon et al., 2011): the numbers do not change with numpy's release.
    """
    raw = np.random.Philox(key=np.array([seed, index], np.uint64)).random_raw(count)
    # the upper 53 bits, as many as a float64 has
    return (raw >> np.uint64(11)) * 2.0**-53


def random_bytes(seed: int, index: int, count: int) -> np.ndarray:
    """Draws uint8 [count] by `seed` and `index`, independent of `random_uniforms`."""
    # from the half of the generator's keys that `random_uniforms` does not use
    key = np.array([seed, index | 1 << 63], np.uint64)
    return np.random.Philox(key=key).random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]


def text_to_text_row(inputs: np.ndarray, targets: np.ndarray, lengths: tuple[int, int]) -> Row:
    """Makes a row: `inputs`, `inputs_mask`, int32 [S]; `targets`, int32, `mask`, float32 [T].

    Tokens are padded with zeros to `lengths`, (S, T); masks are 1 where a token is not padding.
    """
    padding, targets_padding = (0, lengths[0] - len(inputs)), (0, lengths[1] - len(targets))
    return {
        "inputs": np.pad(inputs.astype(np.int32), padding),
        "inputs_mask": np.pad(np.ones(len(inputs), np.int32), padding),
        "targets": np.pad(targets.astype(np.int32), targets_padding),
        "mask": np.pad(np.ones(len(targets), np.float32), targets_padding),
    }
