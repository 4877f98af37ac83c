"""A training state as named arrays, and back: what is written is flat, `path -> array`, whatever it
was made of.
"""

from typing import Any

import jax
import numpy as np

from fsdp_jax.errors import message
from fsdp_jax.io.array_specs import describe, is_prng_key
from fsdp_jax.step.state import TrainState
from fsdp_jax.tree import PyTree, flatten, path_of


def leaves_of(state: PyTree) -> dict[str, Any]:
    """{path: leaf}. Raises ValueError if two leaves share a path."""
    flat = flatten(state)
    if len(flat) < len(jax.tree.leaves(state)):
        paths = [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(
            message("two leaves share a path", got=", ".join(twice), fix="no `/` in names")
        )
    return flat


def to_arrays(state: PyTree) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """The arrays to write, and what the record says of them: leaves as text, kinds of PRNG keys,
    shapes of the shards.

    Raises ValueError for what is no array, and for a state without a single element.
    """
    if isinstance(state, TrainState) and jax.tree.leaves(state.copies):
        what, fix = (
            "copies that only this layout computes with",
            "save sharded.to_checkpoint(state)",
        )
        raise ValueError(message(what, where="copies", fix=fix))
    leaves = leaves_of(state)
    foreign = [
        f"{path}: {type(leaf).__name__}"
        for path, leaf in leaves.items()
        if not isinstance(leaf, jax.Array)
    ]
    if foreign:
        raise ValueError(
            message("only jax.Arrays can be saved", got="; ".join(foreign), fix="use jnp.asarray")
        )
    keys = {
        path: str(jax.random.key_impl(leaf)) for path, leaf in leaves.items() if is_prng_key(leaf)
    }
    # orbax refuses arrays without elements; the record alone brings them back
    arrays = {
        path: jax.random.key_data(leaf) if path in keys else leaf
        for path, leaf in leaves.items()
        if leaf.size
    }
    if not arrays:
        raise ValueError(
            message("nothing to save", expected="a state with at least one element", got="none")
        )
    shards = {path: list(leaf.sharding.shard_shape(leaf.shape)) for path, leaf in arrays.items()}
    described = {path: describe(leaf) for path, leaf in leaves.items()}
    return arrays, {"leaves": described, "keys": keys, "shards": shards}


def stored(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What lies on disk for a leaf of the target. A PRNG key has one more dim there, and that one
    is whole.
    """
    found = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if is_prng_key(leaf):
        found = jax.eval_shape(jax.random.key_data, found)
    return jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=leaf.sharding)


def from_stored(array: jax.Array | None, leaf: jax.ShapeDtypeStruct, impl: str | None) -> jax.Array:
    """The leaf from what was read for it; None for one without elements, which was never written."""
    if array is None:
        wanted = stored(leaf)
        empty = np.zeros(wanted.shape, wanted.dtype)
        array = jax.make_array_from_callback(
            wanted.shape, wanted.sharding, lambda index: empty[index]
        )
    return array if impl is None else jax.random.wrap_key_data(array, impl=impl)
