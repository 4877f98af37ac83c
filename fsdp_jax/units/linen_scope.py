"""What a Linen model asks of its scope: random streams to draw from, collections to sow into.

Linen gives a model the streams and the mutable collections that its caller names, and here the
caller is a step that knows neither. So they are learned: a trace in which the model asks for
another one is abandoned, and made again with it.

[Note: sown values] `Module.sow` stores a value if its collection is mutable, and else does nothing.
A collection that is not part of the model's state becomes mutable once the loss reads this one in
`model.variables`: a value that nobody reads is not computed, differentiated, nor kept for the
backward pass, and a model that asks whether a collection is mutable is told of this loss alone.
What is still not stored then, such as in an `nn.scan` whose `variable_axes` do not name the
collection, is an error when it is read, never an empty collection.

[Note: boxes] A box of `nn.with_partitioning` constrains its value to the axes that it names as it
is opened under an ambient mesh, which may lack them. Names are for the layout to read: boxes are
opened without a constraint here.
"""

import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax import core
from flax.core import meta

from fsdp_jax.errors import ArgumentError
from fsdp_jax.tree import SEPARATOR, PyTree

T = TypeVar("T")
FLAG = "fsdp_jax"  # of the scopes that the library makes


class AskedError(Exception):
    """The model asks for what its scope lacks; `trace_until_met` adds it and traces again."""


@dataclass(frozen=True)
class Demands:
    """What has been asked for."""

    # Random streams beside "params" and "dropout", of the model in all traces so far.
    streams: set[str] = field(default_factory=set)
    # Collections that are sown into, and read by the loss that is being traced.
    sown: set[str] = field(default_factory=set)

    def trace_until_met(self, trace: Callable[[], T]) -> T:
        """Returns `trace()`, made again as long as the model asks for more in it."""
        while True:
            try:
                return trace()
            except AskedError:
                continue

    def rngs(self, params: jax.Array, dropout: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        """Returns the key of each stream; those of other streams are made of `key`."""
        others = {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in self.streams}
        return {"params": params, "dropout": dropout, **others}

    def ask(self, kind: set[str], name: str) -> None:
        """Abandons the trace, to be made again with this stream or collection."""
        kind.add(name)
        raise AskedError


@dataclass(frozen=True)
class ScopeWatch:
    """Watches the scopes of one trace, for what the model asks of them; see `watch`."""

    demands: Demands
    gives_streams: bool  # the trace has random streams
    known: Collection[str]  # collections that nothing is sown into: parameters and state
    _not_stored: dict[str, "_NotStored"] = field(default_factory=dict, init=False)

    def watch(self, scope: core.Scope) -> None:
        """Watches what is asked of a scope, by replacing methods of this one object.

        Scopes of a user's own `model.apply` are left alone: they have no flag of ours.
        """
        if FLAG not in scope.flags or "has_rng" in vars(scope):
            return
        is_mutable, variables = scope.is_mutable_collection, scope.variables
        rewound, param = scope.rewound, scope.param

        def has_rng(name: str) -> bool:
            if self.gives_streams and name not in {"params", "dropout", *self.demands.streams}:
                self.demands.ask(self.demands.streams, name)
            return name in scope.rngs

        def is_mutable_collection(name: str) -> bool:
            if not is_mutable(name) and name not in self.known:
                where = SEPARATOR.join(scope.path)
                self._not_stored.setdefault(name, _NotStored(self.demands, name, where))
            return is_mutable(name)

        def read() -> Mapping[str, Any]:
            return {**variables(), **self._not_stored} if self._not_stored else variables()

        def asking_if_missing(read_one: Callable[..., Any]) -> Callable[..., Any]:
            """Returns a method that reads a collection, and first asks for one not stored."""

            def read_stored(collection: str, *args: Any) -> Any:
                if collection in self._not_stored:
                    self._not_stored[collection].keys()
                return read_one(collection, *args)

            return read_stored

        def unboxed_param(*args: Any, unbox: bool = True, **kwargs: Any) -> Any:
            value = param(*args, unbox=False, **kwargs)
            return unbox_tree(value) if unbox else value

        def rewound_and_watched(*args: Any, **kwargs: Any) -> core.Scope:
            # What a module has after its call: Linen leaves out the flags, also of a second call.
            after = rewound(*args, **kwargs)
            after.flags = core.freeze({FLAG: scope.flags[FLAG]})
            self.watch(after)
            return after

        replaced = {
            "has_rng": has_rng,
            "param": unboxed_param,
            "is_mutable_collection": is_mutable_collection,
            "variables": read,
            "get_variable": asking_if_missing(scope.get_variable),
            "has_variable": asking_if_missing(scope.has_variable),
            "rewound": rewound_and_watched,
        }
        vars(scope).update(replaced)


def sow_nothing(module: nn.Module) -> None:
    """Keeps a module from sowing arrays while it is initialized: they are no state of the model."""
    sow = module.sow

    def sow_metadata(collection: str, name: str, value: Any, *args: Any, **kwargs: Any) -> bool:
        # Names of logical axes are sown too.
        return not jax.tree.leaves(value) and sow(collection, name, value, *args, **kwargs)

    if "sow" not in vars(module):
        object.__setattr__(module, "sow", sow_metadata)


def unbox_tree(tree: PyTree) -> PyTree:
    """Returns a tree with boxes replaced by their values, without constraints; see the note."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, meta.Partitioned):
            return leaf.unbox(apply_constraint=False)
        return meta.unbox(leaf)

    return jax.tree.map(value, tree, is_leaf=lambda leaf: isinstance(leaf, meta.AxisMetadata))


@jax.tree_util.register_pytree_node_class
class _NotStored(dict[str, Any]):
    """Stands for a collection that misses what was sown into it, and asks for it once it is read.

    `where`: the module whose value was not stored.
    """

    def __init__(self, demands: Demands, collection: str, where: str) -> None:
        self._demands, self._collection, self._where = demands, collection, where

    def _read(self, *_: Any, **__: Any) -> Any:
        """Asks for the collection. Raises ValueError if it was asked for before, in vain."""
        name = self._collection
        if name not in self._demands.sown:
            self._demands.ask(self._demands.sown, name)
        raise ArgumentError(
            f"what the model sows into '{name}' does not reach the loss",
            where=self._where,
            expected="a collection that every nn.scan and nn.vmap around the module passes on",
            fix=f"variable_axes={{'params': 0, '{name}': 0}} in the nn.scan or nn.vmap",
        )

    __getitem__ = __iter__ = __len__ = __contains__ = _read  # type: ignore[assignment]
    get = keys = values = items = copy = pop = _read  # type: ignore[assignment]
    __eq__ = __or__ = __ror__ = _read  # type: ignore[assignment]
    tree_flatten = tree_unflatten = _read
