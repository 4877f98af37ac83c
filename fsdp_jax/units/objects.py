"""Arrays inside objects that are not pytrees, such as a plain dataclass that a block returns.

A checkpoint returns arrays alone. So what a unit returns is taken apart into arrays and the rest,
as pickling takes an object apart, and made again outside. An object without arrays is not touched.
"""

import functools
import inspect
import io
import pickle
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

from fsdp_jax.errors import ArgumentError
from fsdp_jax.tree import PyTree

_FLAX = (nnx.Pytree, nnx.Variable, nn.Module, nn.Variable)
_WHOLE = (*_FLAX, jax.Array, np.ndarray, type, types.FunctionType, types.ModuleType)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def is_node(x: Any) -> bool:
    """Tells whether x is an object of Flax that a call may write to, such as a module."""
    return isinstance(x, _FLAX)


@jax.tree_util.register_pytree_node_class
@dataclass
class _Apart:
    """Stands for an object in a tree; its children are the object's arrays and Flax objects."""

    pickled: bytes
    parts: list[Any]  # of `_WHOLE`, in the order of their numbers

    @functools.cached_property
    def places(self) -> list[int]:
        """Numbers of the children among the parts."""
        children = (*_FLAX, jax.Array)
        return [n for n, part in enumerate(self.parts) if isinstance(part, children)]

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """Lists its children; the rest outlives their trace, and holds none of them."""
        rest = {n: part for n, part in enumerate(self.parts) if n not in self.places}
        return [self.parts[n] for n in self.places], (self.pickled, self.places, rest)

    @classmethod
    def tree_unflatten(cls, rest: Any, children: Sequence[Any]) -> Any:
        """Makes the object again, with these children."""
        pickled, places, others = rest
        return _Unpickler(pickled, others | dict(zip(places, children, strict=True))).load()


class _Pickler(pickle.Pickler):
    """Pickles an object without its arrays, functions and Flax objects, which `parts` lists."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.parts: list[Any] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, x: Any) -> int | None:
        """Numbers what is not pickled."""
        if not isinstance(x, _WHOLE):
            return None
        if id(x) not in self._numbers:
            self._numbers[id(x)] = len(self.parts)
            self.parts.append(x)
        return self._numbers[id(x)]


class _Unpickler(pickle.Unpickler):
    """Makes an object from its pickled form and its parts."""

    def __init__(self, pickled: bytes, parts: Mapping[int, Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._parts = parts

    def persistent_load(self, number: int) -> Any:
        """Finds a part by its number."""
        return self._parts[number]


def _is_leaf(x: Any) -> bool:
    """Tells whether x stays whole here, also where jax has children of it or warns of it."""
    return is_node(x) or isinstance(x, _Apart | Iterator)


def take_apart(tree: PyTree) -> PyTree:
    """Replaces each object of a tree that holds arrays by a node of the tree.

    Unflattening such a node makes the object again. What cannot be pickled stays as it is.
    """

    def apart(leaf: Any) -> Any:
        if isinstance(leaf, (*_WHOLE, *_PLAIN, Iterator)):
            return leaf
        pickler = _Pickler(file := io.BytesIO())
        try:
            pickler.dump(leaf)
        except Exception:  # of any kind: a class may refuse to be pickled as it likes
            return leaf
        found = _Apart(file.getvalue(), pickler.parts)
        return found if found.places or any(map(_hides_arrays, found.parts)) else leaf

    return jax.tree.map(apart, tree, is_leaf=_is_leaf)


def refuse_hidden_arrays(results: PyTree, unit: str) -> None:
    """Raises ValueError for a result of a unit's method whose arrays `take_apart` cannot reach.

    These are functions that close over arrays, and iterators, which a read would use up.
    """
    for leaf in jax.tree.leaves(results, is_leaf=_is_leaf):
        for part in filter(_hides_arrays, leaf.parts if isinstance(leaf, _Apart) else [leaf]):
            raise ArgumentError(
                f"a unit returns a {type(part).__name__}, which hides the arrays that it holds",
                where=unit or "model",
                expected="arrays, in a pytree or another object",
                got=part,
                fix="return the arrays; or choose the units without this one, units='model'",
            )


def _hides_arrays(part: Any) -> bool:
    """Tells whether a part is an iterator, or a function whose closure holds arrays of a trace."""
    captured = jax.tree.leaves(captured_values(part))
    return isinstance(part, Iterator) or any(isinstance(x, jax.core.Tracer) for x in captured)


def captured_values(function: Any) -> list[Any]:
    """Lists the values that a function's closure, or a partial, holds; none for other objects."""
    if isinstance(function, functools.partial):
        return [*function.args, *function.keywords.values(), *captured_values(function.func)]
    if inspect.isfunction(function):
        return list(inspect.getclosurevars(function).nonlocals.values())
    return []
