"""What a Linen model asks of its scope: random streams to draw from, collections to sow into.

Linen gives a model the streams and the mutable collections that its caller names, and here the
caller is a step that knows neither. So they are learned: a trace in which the model asks for
another one is abandoned, and made again with it.

[Note: sown values] `Module.sow` stores a value if its collection is mutable, and else does nothing.
A collection that is not part of the model's state becomes mutable once a loss reads
`model.variables`: a value that nobody reads is not computed for, nor kept for the backward pass.
What is still not stored then, such as in an `nn.scan` whose `variable_axes` do not name the
collection, is an error when that collection is read, never an empty one.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax import core

from fsdp_jax.errors import message
from fsdp_jax.tree import SEPARATOR

T = TypeVar("T")
FLAG = "fsdp_jax"  # of the scopes that the library makes


class AskedError(Exception):
    """The model asks for what its scope lacks; `Demands.met` adds it and traces again."""


class Demands:
    """What a model has asked for, in all traces so far.

    Attributes:
        streams: random streams beside "params" and "dropout".
        sown: collections that are sown into and read.

    """

    def __init__(self) -> None:
        self.streams: set[str] = set()
        self.sown: set[str] = set()

    def met(self, trace: Callable[[], T]) -> T:
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

    def ask(self, kind: set[str], names: Iterable[str]) -> None:
        """Abandons the trace, to be made again with these streams or collections."""
        kind.update(names)
        raise AskedError


class ScopeWatch:
    """Watches the scopes of one trace.

    Args:
        demands: of the model.
        gives_streams: whether the trace has random streams.
        known: collections that nothing is sown into: parameters and state.

    """

    def __init__(self, demands: Demands, *, gives_streams: bool, known: Collection[str]) -> None:
        self._demands = demands
        self._gives_streams = gives_streams
        self._known = known
        self._not_stored: dict[str, str] = {}  # collection -> where a value was not stored
        self.depth = 0  # of methods that are running; 0 in the loss itself

    def watch(self, scope: core.Scope) -> None:
        """Watches what is asked of a scope, by replacing methods of this one object.

        Scopes of a user's own `model.apply` are left alone: they have no flag of ours.
        """
        if FLAG not in scope.flags or "has_rng" in vars(scope):
            return
        is_mutable, variables = scope.is_mutable_collection, scope.variables
        rewound = scope.rewound

        def has_rng(name: str) -> bool:
            if self._gives_streams and name not in {"params", "dropout", *self._demands.streams}:
                self._demands.ask(self._demands.streams, [name])
            return name in scope.rngs

        def is_mutable_collection(name: str) -> bool:
            if not is_mutable(name) and name not in self._known:
                self._not_stored.setdefault(name, SEPARATOR.join(scope.path))
            return is_mutable(name)

        def read() -> Mapping[str, Any]:
            if self.depth or not self._not_stored:
                return variables()
            if new := self._not_stored.keys() - self._demands.sown:
                self._demands.ask(self._demands.sown, new)
            lost = {name: _Lost(name, path) for name, path in self._not_stored.items()}
            return {**variables(), **lost}

        def rewound_and_watched(*args: Any, **kwargs: Any) -> core.Scope:
            # What a module has after its call: Linen leaves out the flags, also of a second call.
            after = rewound(*args, **kwargs)
            after.flags = core.freeze({FLAG: scope.flags[FLAG]})
            self.watch(after)
            return after

        replaced = {
            "has_rng": has_rng,
            "is_mutable_collection": is_mutable_collection,
            "variables": read,
            "rewound": rewound_and_watched,
        }
        vars(scope).update(replaced)


def sow_nothing(module: nn.Module) -> None:
    """Lets a module sow no arrays while it is initialized: they are no state of the model."""
    sow = module.sow

    def sow_metadata(collection: str, name: str, value: Any, *args: Any, **kwargs: Any) -> bool:
        # Names of logical axes are sown too.
        return not jax.tree.leaves(value) and sow(collection, name, value, *args, **kwargs)

    if "sow" not in vars(module):
        object.__setattr__(module, "sow", sow_metadata)


class _Lost:
    """Stands for a collection that misses a value which was sown into it; reading it is an error.

    Attributes:
        where: the module whose value was not stored.

    """

    def __init__(self, collection: str, where: str) -> None:
        self._collection, self._where = collection, where

    def _refuse(self, *_: Any) -> Any:
        name = self._collection
        what = f"what the model sows into '{name}' does not reach the loss"
        expected = "a collection that every nn.scan and nn.vmap around the module passes on"
        fix = f"variable_axes={{'params': 0, '{name}': 0}} in the nn.scan or nn.vmap"
        raise ValueError(message(what, where=self._where, expected=expected, fix=fix))

    __getitem__ = __iter__ = __len__ = __contains__ = __jax_array__ = __bool__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = _refuse

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("_") else self._refuse()
