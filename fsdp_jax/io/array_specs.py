"""An array's dtype and shape as text, and its size."""

from collections.abc import Iterable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp


def is_key(leaf: Any) -> bool:
    """Whether it is an array of typed PRNG keys."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def describe(leaf: Any) -> str:
    """As in `bfloat16[8,4]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def parse(text: str) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of what `describe` says."""
    dtype, _, shape = text.removesuffix("]").partition("[")
    return dtype, tuple(int(size) for size in shape.split(",") if size)


def bytes_of(shape: Iterable[int], dtype: Any) -> int:
    """Bytes of an array that is whole."""
    return prod(shape) * jnp.dtype(dtype).itemsize
