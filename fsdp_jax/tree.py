"""Flattens and nests dicts of arrays, by slash-joined paths."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

PyTree = Any
SEPARATOR = "/"


def path_of(keys: tuple[Any, ...]) -> str:
    """Formats a key path of jax: `blocks/attn/kernel`, without the `.value` that boxes a leaf."""
    if keys:
        last = keys[-1]
        if isinstance(last, jax.tree_util.GetAttrKey) and last.name in ("value", "raw_value"):
            keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator=SEPARATOR)


def flatten(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Flattens any pytree to {slash-joined path: leaf}, in its own order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {path_of(keys): leaf for keys, leaf in leaves}


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nests {path: leaf} as dicts; the inverse of `flatten` for nested dicts."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split(SEPARATOR)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def nest_like(like: Mapping[Any, Any], flat: Mapping[str, Any], above: str = "") -> dict[Any, Any]:
    """Nests {path: leaf} with the keys that nested mappings have at these paths.

    A path may stand for integers, and a key may have slashes: `like` tells. What `flat` lacks is
    left out. `above`: the path of `like`, with a slash behind it.
    """
    tree: dict[Any, Any] = {}
    for key, child in like.items():
        path = f"{above}{key}"
        if isinstance(child, Mapping):
            nested = nest_like(child, flat, path + SEPARATOR)
            if nested:
                tree[key] = nested
        elif path in flat:
            tree[key] = flat[path]
    return tree


def array_text(array: Any) -> str:
    """Formats dtype and shape, as messages show them: `float32[8, 16]`."""
    return f"{array.dtype}{list(array.shape)}"


def array_texts(tree: PyTree) -> dict[str, str]:
    """Formats dtype and shape of each leaf, by its path."""
    return {path: array_text(leaf) for path, leaf in flatten(tree).items()}


def prefixes(path: str) -> list[str]:
    """Lists a path and those around it, innermost first: `a/b`, `a` and the empty path."""
    parts = path.split(SEPARATOR)
    return [SEPARATOR.join(parts[:count]) for count in range(len(parts), 0, -1)] + [""]


def suffixes(path: str) -> list[str]:
    """Lists a path and its ends, longest first: `a/b/c`, `b/c` and `c` of `a/b/c`."""
    parts = path.split(SEPARATOR)
    return [SEPARATOR.join(parts[start:]) for start in range(len(parts))]


def map_with_path(
    fn: Callable[..., Any],
    tree: PyTree,
    *rest: PyTree,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """Maps `fn(path, leaf, ...)` over trees as `jax.tree.map` does, with slash-joined paths."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, *leaves: fn(path_of(keys), *leaves), tree, *rest, is_leaf=is_leaf
    )


def replace_leaves(tree: PyTree, others: PyTree) -> PyTree:
    """Replaces the leaves of a tree that `others` has too, by path."""
    flat = flatten(others)
    return map_with_path(lambda path, x: flat.get(path, x), tree)
