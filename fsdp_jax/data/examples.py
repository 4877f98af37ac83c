"""What examples are: rows of named arrays by number, the same row for the same number every time."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from fsdp_jax.errors import ConfigError, message

Row = dict[str, np.ndarray]
"""One example: {name: array}, without the dimension of the batch."""

Settings = Mapping[str, int | float | str | bool]


class Examples(Protocol):
    """Random access to rows, all with the same names, shapes and dtypes."""

    @property
    def settings(self) -> Settings:
        """What fixes the rows and their order; a saved position is refused where they differ."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Row `index`, from 0 to the length; may be called from several threads."""
        ...


class Tokens(Protocol):
    """A stream of token ids: an array of one dimension, or what reads like one."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice) -> np.ndarray: ...


def check_seed(seed: int) -> None:
    """Raises ConfigError where it is not one that every generator here takes."""
    if not 0 <= seed < 2**32:
        raise ConfigError(
            message(
                "The seed is out of range.", where="train.seed", expected="0 to 2**32 - 1", got=seed
            )
        )


def uniforms(seed: int, index: int, count: int) -> np.ndarray:
    """float64 [count] in [0, 1) that `seed` and `index` fix, whatever numpy's release (Philox,
    Salmon et al., 2011).
    """
    raw = np.random.Philox(key=np.array([seed, index], np.uint64)).random_raw(count)
    return (raw >> np.uint64(11)) * 2.0**-53


def random_bytes(seed: int, index: int, count: int) -> np.ndarray:
    """uint8 [count], apart from those of `uniforms`: the other half of the generator's keys."""
    key = np.array([seed, index | 1 << 63], np.uint64)
    return np.random.Philox(key=key).random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]


def padded(tokens: np.ndarray | Sequence[int], length: int) -> np.ndarray:
    """int32 [length]: `tokens`, then zeros."""
    row = np.zeros(length, np.int32)
    row[: len(tokens)] = tokens
    return row


def real(count: int, length: int, dtype: type = np.float32) -> np.ndarray:
    """[length]: 1 in the first `count` places, 0 after."""
    return (np.arange(length) < count).astype(dtype)
