"""Formats the call of a model's class, for the fixes in errors about the `model` argument."""

import inspect
from typing import Any

import jax
from flax import nnx

from fsdp_jax.errors import ArgumentError

IN_MEMORY = "the model is already in memory, unsharded"
EXPECTED = "a function of nnx.Rngs that makes an NNX model, or an unbound Linen module"
RNGS = "rngs"  # the argument of an NNX module for its random streams


def call_of(kind: type) -> str:
    """Writes the call of a model's class, with its required arguments: `GPT(width=..., rngs=rngs)`.

    If the signature cannot be read, writes `...` for the arguments.
    """
    try:
        # of the constructor: NNX's metaclass hides the signature of the class
        _, *parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    except (TypeError, ValueError):
        return f"{kind.__name__}(...)"
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        f"{each.name}=..."
        for each in parameters
        if each.default is each.empty and each.kind not in variadic and each.name != RNGS
    ]
    if RNGS in [each.name for each in parameters]:
        required.append("rngs=rngs")
    return f"{kind.__name__}({', '.join(required)})"


def fix_in_memory(model: nnx.Module) -> str:
    """Says what to pass instead of an NNX model that was already made."""
    return (
        f"pass the function that makes it, lambda rngs: {call_of(type(model))}, so that it is "
        "initialized in shards; weights that it has go into sharded.init(params=...)"
    )


def refuse_in_memory(model: nnx.Module) -> None:
    """Raises ValueError for a function that returns a model that was made before.

    Such a model would be on one device, and the seed would have no effect. It is recognized by its
    parameters: those made inside a trace are tracers.
    """
    params: list[Any] = jax.tree.leaves(nnx.state(model, nnx.Param))
    made_here = [leaf for leaf in params if isinstance(leaf, jax.core.Tracer)]
    if not made_here and any(isinstance(leaf, jax.Array) for leaf in params):
        raise ArgumentError(
            IN_MEMORY,
            where="model",
            expected="a function that makes a new model in each call",
            got=f"a {type(model).__name__} whose parameters were all made outside of this call",
            fix=fix_in_memory(model),
        )
