"""What the two pipelines of gathered layers, `layerscan` and `chain`, are made of.

Nothing in them knows jaxprs or Flax: a layer is a function of its gathered parameters and its
inputs. `prefetch.py` finds them. See its note for what is moved where, and why.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fsdp_jax.units.collectives import ParamComm, fetch, reduce

Arrays = dict[str, jax.Array]
Layer = Callable[[Arrays, list[Any]], list[Any]]
"""(gathered parameters by path, inputs) -> outputs."""


def is_float(x: Any) -> bool:
    """Whether it has a cotangent."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floats(values: Iterable[Any]) -> list[Any]:
    """Those that have a cotangent."""
    return [x for x in values if is_float(x)]


def typed(like: Sequence[Any], found: Iterable[Any]) -> list[Any]:
    """`found` for the floats of `like`, in order; for the rest the zeros without a type that JAX
    wants there.
    """
    rest = iter(found)
    return [next(rest) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in like]


class Saved:
    """What `jax.vjp` of a layer keeps, less what the backward has anyway: gathered parameters and
    constants.
    """

    def __init__(
        self, pullback: Any, gathered: Arrays, consts: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        leaves, self.treedef = jax.tree.flatten(pullback)
        self.outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
        self.sources: dict[int, tuple[str, str | int]] = {
            id(x): ("gathered", name) for name, x in gathered.items()
        }
        self.sources |= {id(x): ("const", number) for number, x in enumerate(consts)}
        self.kept: list[Any] = []
        for leaf in leaves:
            if id(leaf) not in self.sources:
                self.sources[id(leaf)] = ("kept", len(self.kept))
                self.kept.append(leaf)
        self.places = [self.sources[id(leaf)] for leaf in leaves]

    def pull(
        self, kept: Sequence[Any], gathered: Arrays, consts: Sequence[Any], outputs: Sequence[Any]
    ) -> Any:
        """(cotangents of the gathered parameters, of the inputs), given those of the outputs that
        are floats.
        """
        where: dict[str, Any] = {"kept": kept, "gathered": gathered, "const": consts}
        pullback = jax.tree.unflatten(self.treedef, [where[kind][key] for kind, key in self.places])
        return pullback(typed(self.outputs, outputs))


def run_layer(
    layer: Layer, gathered: Arrays, consts: list[Any], inputs: list[Any]
) -> tuple[list[Any], Saved]:
    """(outputs, what the backward needs)."""
    out, pullback = jax.vjp(layer, gathered, [*consts, *inputs])
    return out, Saved(pullback, gathered, consts, out)


def fetch_all(comms: Mapping[str, ParamComm], values: Arrays) -> Arrays:
    """Parameters gathered."""
    return {path: fetch(comms[path], value) for path, value in values.items()}


def after(values: Arrays, event: list[Any]) -> tuple[Arrays, list[Any]]:
    """Both, where what is made of `values` waits for `event`."""
    return lax.optimization_barrier((values, event)) if event else (values, event)


def gather_behind(
    comms: Mapping[str, ParamComm], values: Arrays, pending: Arrays, made: list[jax.Array]
) -> tuple[list[jax.Array], Arrays]:
    """(`made`, gathered parameters): what layers made, and what is used only behind them.

    On the way back the layers begin when the gradients of these parameters are reduced. Left alone,
    XLA computes them at the very end, and keeps the logits' gradient until then.
    """

    @jax.custom_vjp
    def run(
        values: Arrays, pending: Arrays, made: list[jax.Array]
    ) -> tuple[list[jax.Array], Arrays]:
        return made, fetch_all(comms, values)

    def back(pending: Arrays, cotangents: tuple[list[jax.Array], Arrays]) -> Any:
        made, grads = cotangents
        landed, made = after(land(comms, pending, grads), made)
        return *to_shards(shapes, pending, landed), made

    shapes = {
        path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in values.items()
    }
    run.defvjp(lambda values, pending, made: (run(values, pending, made), pending), back)
    return run(values, pending, made)


def land(comms: Mapping[str, ParamComm], pending: Arrays, grads: Arrays) -> Arrays:
    """Gradients of what is trained, reduced and scattered; as they are where reduction is deferred."""
    return {
        path: g.astype(pending[path].dtype) if path in pending else reduce(comms[path], g)
        for path, g in grads.items()
        if comms[path].trained
    }


def to_shards(
    values: Mapping[str, Any], pending: Arrays, landed: Arrays
) -> tuple[dict[str, Any], Arrays]:
    """The cotangents of shards and of `pending`, from landed gradients; None for what is not
    trained.
    """
    found = {path: landed.get(path) for path in values}
    to_values = {
        p: jnp.zeros(values[p].shape, values[p].dtype) if p in pending else g
        for p, g in found.items()
    }
    return to_values, {path: landed[path] for path in pending}


def after_floats(values: Arrays, inputs: list[Any]) -> tuple[Arrays, list[Any]]:
    """As `after`, of inputs that need not be floats."""
    values, found = after(values, floats(inputs))
    rest = iter(found)
    return values, [next(rest) if is_float(x) else x for x in inputs]


def zeros(tree: Any) -> Any:
    """Of the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)


def typeful(cotangents: Iterable[Any]) -> list[Any]:
    """Without those of what is no float."""
    return [x for x in cotangents if x.dtype != jax.dtypes.float0]


def optional(like: Sequence[Any], found: Iterable[Any]) -> list[Any]:
    """`found` for the floats of `like`, in order, and None for the rest."""
    rest = iter(found)
    return [next(rest) if is_float(x) else None for x in like]
