"""Arrays inside objects that are not pytrees, such as a plain dataclass that a block returns.

A checkpoint returns arrays alone. So an object that a unit returns is taken apart into what its
`__dict__` holds and the rest, and made again outside. One that holds arrays elsewhere is refused.
"""

import functools
import inspect
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

from fsdp_jax.errors import ArgumentError
from fsdp_jax.tree import PyTree

_FLAX = (nnx.Pytree, nnx.Variable, nn.Module, nn.Variable)
_WHOLE = (*_FLAX, jax.Array, np.ndarray, type, types.FunctionType, types.ModuleType)


def is_node(x: Any) -> bool:
    """Tells whether x is an object of Flax that a call may write to, such as a module."""
    return isinstance(x, _FLAX)


def _is_leaf(x: Any) -> bool:
    """Tells whether x stays whole here, also where jax has children of it or warns of it."""
    return is_node(x) or isinstance(x, _Apart | Iterator)


@jax.tree_util.register_pytree_node_class
class _Apart:
    """Stands for an object in a tree; its children are what the object's `__dict__` holds."""

    def __init__(self, instance: Any, fields: dict[str, Any]) -> None:
        self.kind, self.fields = type(instance), fields

    def tree_flatten(self) -> tuple[tuple[dict[str, Any]], Any]:
        """Lists its children."""
        return (self.fields,), self.kind

    @classmethod
    def tree_unflatten(cls, kind: Any, children: tuple[dict[str, Any]]) -> Any:
        """Makes the object again, with these children, without its constructor."""
        instance = kind.__new__(kind)
        fields = vars(instance)  # of a frozen dataclass too
        fields |= children[0]
        return instance


def _has_fields_alone(x: Any) -> bool:
    """Tells whether an object holds all that it holds in its `__dict__`."""
    if isinstance(x, _WHOLE) or not isinstance(getattr(x, "__dict__", None), dict):
        return False
    makes: Any = type(x).__new__
    is_plain = isinstance(x, types.SimpleNamespace) or makes is object.__new__
    return is_plain and not getattr(type(x), "__slots__", ())


def arrays_in_objects(leaves: Sequence[Any]) -> list[jax.Array]:
    """Lists the arrays that objects among the leaves of a tree hold in their attributes."""
    found: list[jax.Array] = []
    seen: set[int] = set()
    remaining = [x for x in leaves if _has_fields_alone(x)]
    while remaining:
        each = remaining.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        held = jax.tree.leaves(dict(vars(each)), is_leaf=_is_leaf)
        found += [x for x in held if isinstance(x, jax.Array)]
        remaining += [x for x in held if _has_fields_alone(x)]
    return found


def take_apart(tree: PyTree, above: tuple[Any, ...] = ()) -> PyTree:
    """Replaces each object of a tree whose `__dict__` holds arrays by a node of the tree.

    Unflattening such a node makes the object again. `above`: the objects around, which are left as
    they are where one refers to them.
    """

    def apart(leaf: Any) -> Any:
        if not _has_fields_alone(leaf) or any(leaf is each for each in above):
            return leaf
        fields = take_apart(dict(vars(leaf)), (*above, leaf))
        held = jax.tree.leaves(fields, is_leaf=_is_leaf)
        found = any(isinstance(x, (*_FLAX, jax.Array, _Apart)) or _hides_arrays(x) for x in held)
        return _Apart(leaf, fields) if found else leaf

    return jax.tree.map(apart, tree, is_leaf=_is_leaf)


def refuse_hidden_arrays(results: PyTree, unit: str) -> None:
    """Raises ValueError for a result of a unit's method whose arrays `take_apart` cannot reach.

    These are closures, partials, iterators, which a read would use up, and subclasses of
    containers.
    """
    for leaf in jax.tree.leaves(results, is_leaf=_is_leaf):
        if isinstance(leaf, _Apart):
            refuse_hidden_arrays(leaf.fields, unit)
            continue
        for part in filter(_hides_arrays, [leaf]):
            raise ArgumentError(
                f"a unit returns a {type(part).__name__}, which hides the arrays that it holds",
                where=unit or "model",
                expected="arrays, in a pytree or in attributes of an object",
                got=part,
                fix="return the arrays; or choose the units without this one, units='model'",
            )


def _hides_arrays(part: Any) -> bool:
    """Tells whether a part holds arrays of a trace where `take_apart` does not look."""
    held: list[Any] = captured_values(part)
    if isinstance(part, Iterator):
        return True
    if isinstance(part, Mapping):
        held += part.values()
    elif isinstance(part, set | frozenset | list | tuple | deque):
        held += part
    slots = getattr(type(part), "__slots__", ())
    held += [getattr(part, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(held, is_leaf=_is_leaf))


def captured_values(function: Any) -> list[Any]:
    """Lists the values that a function's closure, or a partial, holds; none for other objects."""
    if isinstance(function, functools.partial):
        return [*function.args, *function.keywords.values(), *captured_values(function.func)]
    if inspect.isfunction(function):
        return list(inspect.getclosurevars(function).nonlocals.values())
    return []
