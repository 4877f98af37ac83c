"""Makes the adapter of a user's model, or explains what was passed in place of a model."""

import inspect
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from flax import nnx

from fsdp_jax.errors import ArgumentError
from fsdp_jax.units.constructors import EXPECTED, IN_MEMORY, call_of, fix_in_memory
from fsdp_jax.units.linen import LinenModel
from fsdp_jax.units.model import Model
from fsdp_jax.units.nnx import NnxModel

# Packages whose models are callable: they could be mistaken for a function that makes a model.
_OTHER_LIBRARIES = {
    "equinox": "Equinox",
    "haiku": "Haiku",
    "keras": "Keras",
    "tf_keras": "Keras",
    "torch": "PyTorch",
}


def make_adapter(model: Any, inputs: tuple[Any, ...] | Mapping[str, Any] | None) -> Model:
    """Makes the adapter of an NNX model, or of a Linen model with its example inputs.

    Raises ValueError for anything else, with a fix for the common mistakes.
    """
    # Common mistakes first: each has a specific fix.
    mistake = _model_mistake(model)
    if mistake is not None:
        what, fix = mistake
        got = model if isinstance(model, type) else type(model)
        raise ArgumentError(
            what,
            where="model",
            expected=EXPECTED,
            got=got.__name__,
            fix=fix,
        )
    # Linen: a module, whose shapes are known only with its inputs.
    if isinstance(model, nn.Module):
        if inputs is None:
            raise ArgumentError(
                "a Linen model needs example inputs",
                where="inputs",
                fix="inputs=(jax.ShapeDtypeStruct((1, 128), jnp.int32),)",
            )
        return LinenModel(model, inputs)
    # NNX: a function that makes the model, with all of its shapes.
    if inputs:
        raise ArgumentError(
            "an NNX model takes no example inputs",
            where="inputs",
            got=f"{len(inputs)} inputs",
            fix="leave inputs out",
        )
    # It must take only the random streams: checked here, so that it does not fail in a trace.
    try:
        inspect.signature(model).bind(None)  # the random streams
    except TypeError as error:
        raise ArgumentError(
            "the function that makes the model does not take random streams alone",
            where="model",
            got=error,
            fix="lambda rngs: Model(..., rngs=rngs)",
        ) from error
    except ValueError:  # of a function that is not written in Python
        pass
    return NnxModel(model)


def _model_mistake(model: Any) -> tuple[str, str] | None:
    """Finds a common mistake in the `model` argument: (the mistake, its fix); None for a model."""
    # Models of other libraries, by the package of a base class.
    kind = model if isinstance(model, type) else type(model)
    libraries = {base.__module__.partition(".")[0] for base in kind.__mro__}
    for library, name in _OTHER_LIBRARIES.items():
        if library in libraries:
            fix = "write it in Flax, NNX or Linen; or in a trainer of your own shard its arrays by "
            fix += "fsdp_jax.partition_specs(params, mesh, rules)"
            return f"a model of {name}, not of Flax", fix
    # Models of Flax in a form that the adapters do not take.
    make_model = "lambda rngs: Model(..., rngs=rngs)"
    if isinstance(model, type) and issubclass(model, nn.Module):
        return "a class, not a model", f"{call_of(model)}, and inputs=(...)"
    if isinstance(model, type):
        return "a class, not a model", f"lambda rngs: {call_of(model)}"
    if isinstance(model, nnx.bridge.ToNNX):
        return "a Linen module wrapped for NNX", "pass the Linen module itself, and inputs=(...)"
    if isinstance(model, nnx.bridge.ToLinen):
        return "an NNX model wrapped for Linen", f"{make_model}, the NNX model itself"
    if isinstance(model, nnx.Module):
        return IN_MEMORY, fix_in_memory(model)
    if isinstance(model, nn.Module):
        if model.scope is None:
            return None
        fix = "pass the module that it was made from, or model.unbind()[0]"
        return "a module bound to its variables", fix
    # Objects that hold a model, then objects that cannot be one.
    if callable(getattr(model, "apply_fn", None)):
        fix = "pass the module whose `apply` is its apply_fn, and inputs=(...)"
        return "a train state, not a model", fix
    if isinstance(getattr(model, "module", None), nn.Module | nnx.Module):
        fix = "pass the module that it holds, its attribute `module`, and inputs=(...)"
        return "an object around a module", fix
    if not callable(model):
        return "not a model", f"{make_model}, or a Linen module and inputs=(...)"
    return None
