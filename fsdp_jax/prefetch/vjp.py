"""Building blocks of the two prefetching pipelines, `layer_scan` and `unit_chain`.

Nothing here knows jaxprs or Flax: a layer is a function of its gathered parameters and its inputs.
`rewrite` finds the layers in a traced program; its note says what is moved where, and why.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fsdp_jax.units.collectives import ParamComm, fetch, gradient_of

Arrays = dict[str, jax.Array]
Layer = Callable[[Arrays, list[Any]], list[Any]]
"""(gathered parameters by path, inputs) -> outputs."""


class GatherInputs(NamedTuple):
    """What the gathers of a unit read; a pytree.

    Attributes:
        shards: path -> shard of the parameter.
        slots: path -> zeros whose cotangent is the gradient, where that is not the cotangent of the
            shard; see `units.unit.Shard`.

    """

    shards: Arrays
    slots: Arrays


def is_float(x: Any) -> bool:
    """Returns whether an array is differentiable, so that its cotangent is not float0."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floats(values: Iterable[Any]) -> list[Any]:
    """Returns the differentiable arrays among `values`."""
    return [x for x in values if is_float(x)]


def replace_floats(
    like: Sequence[Any], replacements: Iterable[Any], other: Callable[[Any], Any]
) -> list[Any]:
    """Returns `like` with its floats replaced in order, and `other(x)` for each of the rest."""
    remaining = iter(replacements)
    return [next(remaining) if is_float(x) else other(x) for x in like]


def with_none(like: Sequence[Any], cotangents: Iterable[Any]) -> list[Any]:
    """Returns the cotangents of `like`, given those of its floats: None for the rest."""
    return replace_floats(like, cotangents, lambda x: None)


def with_float0(like: Sequence[Any], cotangents: Iterable[Any]) -> list[Any]:
    """Returns the cotangents of `like`, given those of its floats: float0 zeros for the rest."""
    return replace_floats(like, cotangents, lambda x: np.zeros(x.shape, jax.dtypes.float0))


def without_float0(cotangents: Iterable[Any]) -> list[Any]:
    """Returns the cotangents of floats alone."""
    return [x for x in cotangents if x.dtype != jax.dtypes.float0]


def zeros(tree: Any) -> Any:
    """Returns zeros of the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)


class LayerVjp:
    """The VJP of one layer, whose residuals leave out what the backward pass has anyway.

    The pullback that `jax.vjp` returns closes over gathered parameters and constants too. They are
    not saved: the backward pass gathers the parameters again and passes the constants in.

    Attributes:
        outputs: shapes and dtypes of the layer's outputs.
        residuals: the arrays that must be saved from forward to backward.

    """

    def __init__(
        self, pullback: Any, gathered: Arrays, consts: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        leaves, self._treedef = jax.tree.flatten(pullback)
        self.outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
        self.residuals: list[Any] = []
        sources: dict[int, tuple[str, str | int]] = {
            id(x): ("gathered", path) for path, x in gathered.items()
        }
        sources |= {id(x): ("const", number) for number, x in enumerate(consts)}
        for leaf in leaves:
            if id(leaf) not in sources:
                sources[id(leaf)] = ("residual", len(self.residuals))
                self.residuals.append(leaf)
        self._sources = [sources[id(leaf)] for leaf in leaves]

    def pull_back(
        self,
        residuals: Sequence[Any],
        gathered: Arrays,
        consts: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> Any:
        """Returns (cotangents of the gathered parameters, cotangents of the inputs).

        `cotangents`: of the outputs that are floats.
        """
        values: dict[str, Any] = {"residual": residuals, "gathered": gathered, "const": consts}
        leaves = [values[kind][key] for kind, key in self._sources]
        pullback = jax.tree.unflatten(self._treedef, leaves)
        return pullback(with_float0(self.outputs, cotangents))


def run_layer(
    layer: Layer, gathered: Arrays, consts: list[Any], inputs: list[Any]
) -> tuple[list[Any], LayerVjp]:
    """Runs a layer on [*consts, *inputs]; returns its outputs and its VJP."""
    outputs, pullback = jax.vjp(layer, gathered, [*consts, *inputs])
    return outputs, LayerVjp(pullback, gathered, consts, outputs)


def gather_all(comms: Mapping[str, ParamComm], shards: Arrays) -> Arrays:
    """Returns {path: gathered parameter}."""
    return {path: fetch(comms[path], shard) for path, shard in shards.items()}


def reduce_gradients(comms: Mapping[str, ParamComm], slots: Arrays, gradients: Arrays) -> Arrays:
    """Reduce-scatters the gradients of trained parameters, except where that is deferred."""
    reduced = {
        path: gradient_of(comms[path], g) for path, g in gradients.items() if comms[path].trained
    }
    return {
        path: g.astype(slots[path].dtype) if path in slots else g for path, g in reduced.items()
    }


def input_cotangents(inputs: GatherInputs, gradients: Arrays) -> GatherInputs:
    """Returns the cotangents of `inputs`, given what `reduce_gradients` returned.

    A parameter that is not trained gets None, and so does the shard of one that has a slot.
    """
    shards: dict[str, Any] = {
        path: None if path in inputs.slots else gradients.get(path) for path in inputs.shards
    }
    return GatherInputs(shards, {path: gradients[path] for path in inputs.slots})


def after(values: Arrays, event: list[Any]) -> tuple[Arrays, list[Any]]:
    """Returns both behind a barrier: what is computed from `values` waits for `event`."""
    return lax.optimization_barrier((values, event)) if event else (values, event)


def after_floats(values: Arrays, inputs: list[Any]) -> tuple[Arrays, list[Any]]:
    """As `after`; of the inputs only the floats pass the barrier."""
    values, passed = after(values, floats(inputs))
    return values, replace_floats(inputs, passed, lambda x: x)


def gather_after_layers(
    comms: Mapping[str, ParamComm], inputs: GatherInputs, outputs: list[jax.Array]
) -> tuple[list[jax.Array], Arrays]:
    """Returns (`outputs` of the layers, the gathered parameters that are used only after them).

    In the backward pass the layers begin when the gradients of these parameters are reduced. Left
    alone, XLA computes them at the very end, and keeps the logits' gradient until then.
    """

    @jax.custom_vjp
    def run(inputs: GatherInputs, outputs: list[jax.Array]) -> tuple[list[jax.Array], Arrays]:
        return outputs, gather_all(comms, inputs.shards)

    def forward(inputs: GatherInputs, outputs: list[jax.Array]) -> Any:
        return run(inputs, outputs), inputs.slots

    def backward(slots: Arrays, cotangents: tuple[list[jax.Array], Arrays]) -> Any:
        to_outputs, gradients = cotangents
        reduced, to_outputs = after(reduce_gradients(comms, slots, gradients), to_outputs)
        return input_cotangents(GatherInputs(abstract, slots), reduced), to_outputs

    abstract: Any = {
        path: jax.ShapeDtypeStruct(shard.shape, shard.dtype)
        for path, shard in inputs.shards.items()
    }
    run.defvjp(forward, backward)
    return run(inputs, outputs)
