"""Formats and parses dtypes and shapes of arrays, and counts their bytes."""

from collections.abc import Iterable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp


def is_prng_key(leaf: Any) -> bool:
    """Tells whether an array holds typed PRNG keys."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def describe_array(leaf: Any) -> str:
    """Formats dtype and shape: `bfloat16[8,4]`; of a quantized parameter also its format."""
    text = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    stored_as = getattr(leaf, "stored_as", "")
    return f"{text} {stored_as}" if stored_as else text


def parse_description(text: str) -> tuple[str, tuple[int, ...]]:
    """Parses (name of the dtype, shape) from a text of `describe_array`."""
    dtype, _, shape = text.partition("]")[0].partition("[")
    return dtype, tuple(int(size) for size in shape.split(",") if size)


def stored_as(text: str) -> str:
    """Finds what the bytes of a quantized parameter are, in a text of `describe_array`; or ""."""
    return text.partition(" ")[2]


def is_dtype(name: str) -> bool:
    """Tells whether arrays can have a dtype of this name; that of PRNG keys is `key<...>`."""
    try:
        jnp.dtype(name)
    except TypeError:
        return name.startswith("key<")
    return True


def array_bytes(shape: Iterable[int], dtype: Any) -> int:
    """Counts the bytes of an unsharded array."""
    return prod(shape) * jnp.dtype(dtype).itemsize
