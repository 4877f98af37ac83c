"""Nested dicts of arrays, and their slash-joined paths."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

PyTree = Any
SEPARATOR = "/"


def path_of(keys: tuple[Any, ...]) -> str:
    """A key path as `blocks/0/attn/kernel`; what merely boxes a value (`.value`) is left out."""
    if (
        keys
        and isinstance(keys[-1], jax.tree_util.GetAttrKey)
        and keys[-1].name in ("value", "raw_value")
    ):
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator=SEPARATOR)


def flatten(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """{path: leaf} in the tree's own order."""
    return {
        path_of(keys): leaf
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    }


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{path: leaf} back to nested dicts."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split(SEPARATOR)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def prefixes(path: str) -> list[str]:
    """The path and every path that it lies under, the longest first; the last is empty, the root."""
    parts = path.split(SEPARATOR)
    return [SEPARATOR.join(parts[:count]) for count in range(len(parts), 0, -1)] + [""]


def map_with_path(
    fn: Callable[..., Any],
    tree: PyTree,
    *rest: PyTree,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """`jax.tree.map` that hands `fn` the slash-joined path first."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, *leaves: fn(path_of(keys), *leaves), tree, *rest, is_leaf=is_leaf
    )
