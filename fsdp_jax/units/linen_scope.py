"""What a Linen model asks of its scope: random streams to draw from, collections to sow into.

Linen gives a model the streams and the mutable collections that its caller names, and here the
caller is a step that knows neither. So the step learns them: when the model asks for another one,
the trace is abandoned, and repeated with it.

[Note: sown values] `Module.sow` stores a value if its collection is mutable, and otherwise does
nothing. A collection that is not part of the model's state becomes mutable once the loss reads it
in `model.variables`. So a value that nobody reads is not computed, differentiated, nor kept for the
backward pass, and a model that asks whether a collection is mutable gets the answer for this loss.
If a value is still not stored, such as in an `nn.scan` whose `variable_axes` do not name the
collection, reading the collection is an error; it never looks empty.
"""

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
from flax import core

from fsdp_jax.compat.flax_linen import hook_scope
from fsdp_jax.errors import ArgumentError
from fsdp_jax.tree import SEPARATOR

T = TypeVar("T")


class AskedError(Exception):
    """The model asks for a stream or collection that its scope lacks; `trace_until_met` adds it.

    Its argument is the `Demands` that it was added to: runs of several models may be nested.
    """


@dataclass(frozen=True)
class Demands:
    """The streams and collections that the model has asked for."""

    # The model's random streams other than "params" and "dropout", in all traces so far.
    streams: set[str] = field(default_factory=set)
    # Collections that are sown into, and that the traced loss reads.
    sown: set[str] = field(default_factory=set)

    def trace_until_met(self, trace: Callable[[], T]) -> T:
        """Calls `trace()`, and again as long as the model asks for more in it."""
        while True:
            try:
                return trace()
            except AskedError as asked:
                if asked.args[0] is not self:
                    raise

    def rngs(self, params: jax.Array, dropout: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        """Makes the key of each stream; streams without a given key get theirs from `key`."""
        others = {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in self.streams}
        return {"params": params, "dropout": dropout, **others}

    def ask(self, kind: set[str], name: str) -> None:
        """Abandons the trace, to be repeated with this stream or collection."""
        kind.add(name)
        raise AskedError(self)


@dataclass(frozen=True)
class ScopeWatch:
    """Watches the scopes of one trace, to learn what the model asks of them."""

    demands: Demands
    gives_streams: bool  # the trace has random streams
    known: Collection[str]  # collections that nothing is sown into: parameters and state
    # Immutable collections that a module sees when it reads all of them; see the note.
    missing: dict[str, "_NotStored"] = field(default_factory=dict, init=False)

    def watch(self, scope: core.Scope) -> None:
        """Watches the questions to a scope, except scopes of a user's own `model.apply`."""
        hook_scope(scope, self)

    def asks_stream(self, name: str) -> None:
        """Called as a module asks for a random stream."""
        if self.gives_streams and name not in {"params", "dropout", *self.demands.streams}:
            self.demands.ask(self.demands.streams, name)

    def asks_mutable(self, name: str, path: tuple[str, ...]) -> None:
        """Called as the module at a path asks whether it may sow into a collection, and may not."""
        if name not in self.known:
            not_stored = _NotStored(self.demands, name, SEPARATOR.join(path))
            self.missing.setdefault(name, not_stored)

    def reads(self, collection: str) -> None:
        """Called as a module reads a variable of a collection."""
        if collection in self.missing:
            self.missing[collection].keys()


@jax.tree_util.register_pytree_node_class
class _NotStored(dict[str, Any]):
    """Stands for a collection that misses a sown value, and asks for it when it is read.

    `where`: the module whose value was not stored.
    """

    def __init__(self, demands: Demands, collection: str, where: str) -> None:
        self._demands, self._collection, self._where = demands, collection, where

    def _read(self, *_: Any, **__: Any) -> Any:
        """Asks for the collection. Raises ValueError if that was tried before without success."""
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
