"""What Linen's modules ask of their scopes, in `flax.core`.

[Note: flags] `nn.jit` reuses the trace of an equal module, and in a reused trace nothing is
intercepted. A flag that never equals itself, of the scope that a model runs in, makes every trace
a new one. It also tells these scopes from those of a user's own `model.apply`.

[Note: boxes] A box of `nn.with_partitioning` constrains its value to the axes that it names as it
is opened under an ambient mesh, which may lack them. Names are for the layout to read: boxes are
opened without a constraint here.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import core
from flax.core import meta


class _NeverEqual:
    """A flag that hashes anew each time; see the note."""

    _numbers = itertools.count()

    def __hash__(self) -> int:
        return hash(("fsdp_jax", next(self._numbers)))


FLAGS = {"fsdp_jax": _NeverEqual()}
"""Of the scopes that models are initialized and run in; see the note."""
_RUN = "fsdp_jax_run"  # the flag that holds the number of a model's run


def flags_of_run(number: int) -> dict[str, Any]:
    """Makes the flags of the scopes of one run of a model, and of those lifted from them."""
    return {**FLAGS, _RUN: number}


def run_of(scope: core.Scope) -> int | None:
    """Reads the number of the run that a scope is of; None in a user's own `model.apply`."""
    return scope.flags.get(_RUN)


def params_of_root(scope: core.Scope) -> list[Any]:
    """Lists the arrays among the parameters of a scope's root."""
    return jax.tree.leaves(scope.root.variables().get("params", {}))


def hook_scope(scope: core.Scope, hooks: Any) -> None:
    """Calls hooks as a module asks its scope, by replacing methods of this one object.

    `hooks`: an object like `units.linen_scope.ScopeWatch`. A scope without `FLAGS` is left alone.
    Parameters are read as the note on boxes says.
    """
    if not FLAGS.keys() <= scope.flags.keys() or "has_rng" in vars(scope):
        return
    is_mutable, variables = scope.is_mutable_collection, scope.variables
    rewound, param = scope.rewound, scope.param

    # Questions about what the scope may do: each hook is told before the scope answers.
    def has_rng(name: str) -> bool:
        hooks.asks_stream(name)
        return name in scope.rngs

    def is_mutable_collection(name: str) -> bool:
        if not is_mutable(name):
            hooks.asks_mutable(name, scope.path)
        return is_mutable(name)

    # Reads: with what the hooks have put in place of variables that are missing.
    def read() -> Mapping[str, Any]:
        return {**variables(), **hooks.missing} if hooks.missing else variables()

    def hooked(read_one: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a method that calls the hook, then reads a variable."""

        def read_after_hook(collection: str, *args: Any) -> Any:
            hooks.reads(collection)
            return read_one(collection, *args)

        return read_after_hook

    # Parameters come without constraints; a scope that is made from this one is hooked too.
    def unboxed_param(*args: Any, unbox: bool = True, **kwargs: Any) -> Any:
        value = param(*args, unbox=False, **kwargs)
        return unbox_tree(value) if unbox else value

    def rewound_and_hooked(*args: Any, **kwargs: Any) -> core.Scope:
        # What a module has after its call: Linen leaves out the flags, also of a second call.
        after = rewound(*args, **kwargs)
        after.flags = scope.flags
        hook_scope(after, hooks)
        return after

    replaced = {
        "has_rng": has_rng,
        "param": unboxed_param,
        "is_mutable_collection": is_mutable_collection,
        "variables": read,
        "get_variable": hooked(scope.get_variable),
        "has_variable": hooked(scope.has_variable),
        "rewound": rewound_and_hooked,
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


def unbox_tree(tree: Any) -> Any:
    """Replaces the boxes in a tree by their values, without constraints; see the note."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, meta.Partitioned):
            return leaf.unbox(apply_constraint=False)
        return meta.unbox(leaf)

    return jax.tree.map(value, tree, is_leaf=lambda leaf: isinstance(leaf, meta.AxisMetadata))


def in_scope(module: nn.Module, scope: core.Scope) -> nn.Module:
    """Makes a module run in a scope: `nn.apply` and `nn.init` make scopes without flags."""
    return module.clone(parent=scope, _deep_clone=True)


def original_method(context: Any) -> Callable[..., Any]:
    """Finds the method of a call that is intercepted, without its user's wrappers."""
    return context.orig_method.func
