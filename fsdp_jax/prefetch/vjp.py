"""Building blocks of the two prefetching pipelines, `layer_scan` and `unit_chain`.

This module uses neither jaxprs nor Flax: a layer is a function of its gathered parameters and its
inputs. `rewrite` finds the layers in a traced program; its note explains which operations move
where, and why.

A list of cotangents is parallel to its values, with None for those that are not differentiable.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fsdp_jax.tree import PyTree
from fsdp_jax.units.collectives import (
    Prepared,
    Unreduced,
    converted,
    gather_prepared,
    gather_results,
    gradient_of,
)
from fsdp_jax.units.comm import ParamComm

Arrays = dict[str, Any]
"""Path -> an array. Of gathered parameters: the results of `GATHER`, or `Prepared`, as sent."""
Gradients = Mapping[str, Unreduced]
"""Path -> the cotangent of the gathered parameter, not yet reduced."""
Operands = dict[str, list[jax.Array]]
"""Path -> what its gather reads: [shard], or [shard, slot]; see `units.shard_reads.Held`.

The last gets the gradient as its cotangent.
"""
Layer = Callable[[Arrays, list[Any]], list[Any]]
"""(gathered parameters by path, inputs) -> outputs."""


def is_float(x: Any) -> bool:
    """Tells whether an array is differentiable: floats or complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def without_float0(cotangents: Sequence[Any]) -> list[Any]:
    """Replaces float0 by None in cotangents that JAX made."""
    return [None if x.dtype == jax.dtypes.float0 else x for x in cotangents]


def is_traced(x: Any) -> bool:
    """Tells whether the step computes a value; False for a constant of its program."""
    return isinstance(x, jax.core.Tracer)


def zero_cotangent(x: Any) -> Any:
    """Makes the cotangent of an array that nothing depends on: zeros; None for integers."""
    return jnp.zeros_like(x) if is_float(x) else None


@dataclass(frozen=True)
class LayerVjp:
    """The VJP of one layer by its gathered parameters; `reduce_gradients` reduces what it returns.

    The pullback that `jax.vjp` returns closes over gathered parameters, constants and residuals.
    They are not saved: the backward pass gathers the parameters again and passes the others in.
    Constants of the program itself stay where they are.

    Attributes:
        outputs: shapes and dtypes of the layer's outputs.
        treedef: of the pullback.
        leaves: of the pullback: the place among gathered parameters, constants and residuals, or a
            constant of the program. It outlives the trace of the layer, and so has no array of it.

    """

    outputs: list[jax.ShapeDtypeStruct]
    treedef: Any
    leaves: list[tuple[int, None] | tuple[None, Any]]

    def pull_back(
        self, residuals: list[Any], gathered: Arrays, consts: list[Any], cotangents: Sequence[Any]
    ) -> tuple[Arrays, list[Any]]:
        """Computes (cotangents of the gathered parameters, cotangents of constants and inputs)."""
        values = jax.tree.leaves((gathered, consts, residuals))
        leaves = [leaf if place is None else values[place] for place, leaf in self.leaves]
        to_outputs = [
            np.zeros(output.shape, jax.dtypes.float0) if x is None else x
            for output, x in zip(self.outputs, cotangents, strict=True)
        ]
        gradients, to_inputs = jax.tree.unflatten(self.treedef, leaves)(to_outputs)
        return {path: g for path, (g, *_) in gradients.items()}, without_float0(to_inputs)


def run_layer(
    layer: Layer, gathered: Arrays, consts: list[Any], inputs: list[Any]
) -> tuple[list[Any], list[Any], LayerVjp]:
    """Runs a layer on [*consts, *inputs]; returns (outputs, residuals, its VJP).

    Residuals are what must be saved from forward to backward; they leave out what the backward pass
    has anyway.
    """
    outputs, pullback = jax.vjp(layer, gathered, [*consts, *inputs])
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    leaves, treedef = jax.tree.flatten(pullback)
    given = jax.tree.leaves((gathered, consts))
    known = set(map(id, given))
    saved = {id(x): x for x in leaves if is_traced(x) and id(x) not in known}
    residuals = list(saved.values())
    places = {id(x): place for place, x in enumerate([*given, *residuals])}
    placed = [(places[id(leaf)], None) if id(leaf) in places else (None, leaf) for leaf in leaves]
    return outputs, residuals, LayerVjp(shapes, treedef, placed)


def only_shards(operands: Operands) -> Arrays:
    """Selects {path: shard}, without the slots that gathers also read."""
    return {path: read[0] for path, read in operands.items()}


def gather_all(comms: Mapping[str, ParamComm], shards: Arrays) -> Arrays:
    """Gathers parameters, given their shards: {path: results}; see `converted_all`."""
    return {
        path: gather_prepared(comms[path], shard)
        if isinstance(shard, Prepared)
        else gather_results(comms[path], shard)
        for path, shard in shards.items()
    }


def converted_all(comms: Mapping[str, ParamComm], gathered: Arrays) -> Arrays:
    """Converts what was gathered as it is sent, where it is used: {path: results of its gather}.

    Until then less memory holds it, and XLA fuses the conversion with what reads it.
    """
    return {
        path: converted(comms[path], x) if isinstance(x, Prepared) else x
        for path, x in gathered.items()
    }


def kept_of(comms: Mapping[str, ParamComm], gathered: Arrays) -> Arrays:
    """Selects the gathered parameters that stay until the backward pass, by path."""
    return {path: x for path, x in gathered.items() if comms[path].kept}


def gather_after(
    comms: Mapping[str, ParamComm], shards: Arrays, event: PyTree
) -> tuple[Arrays, PyTree]:
    """Gathers after `event`, behind a barrier: ({path: results}, `event`).

    `event`: arrays that pass the barrier together with the shards.
    """
    shards, event = order_after(shards, event)
    return gather_all(comms, shards), event


def order_after(values: PyTree, event: PyTree) -> tuple[PyTree, PyTree]:
    """Puts (`values`, `event`) behind a barrier: a read of `values` waits for `event`.

    Only the floats of `event` pass the barrier.
    """
    floats = jax.tree.map(lambda x: x if is_float(x) else None, event)
    if not jax.tree.leaves(floats) or not jax.tree.leaves(values):
        return values, event
    values, passed = lax.optimization_barrier((values, floats))
    return values, jax.tree.map(lambda x, float_: x if float_ is None else float_, event, passed)


def reduce_gradients(
    comms: Mapping[str, ParamComm], operands: Operands, gradients: Gradients
) -> Arrays:
    """Reduces trained parameters' gradients, unless deferred: {path: reduced gradient}."""
    reduced = {
        path: gradient_of(comms[path], g) for path, g in gradients.items() if comms[path].trained
    }
    return {path: g.astype(operands[path][-1].dtype) for path, g in reduced.items()}


def operand_cotangents(operands: Operands, gradients: Arrays) -> dict[str, list[Any]]:
    """Collects the cotangents of `operands` by path, from the result of `reduce_gradients`."""
    return {
        path: [*[None] * (len(read) - 1), gradients.get(path)] for path, read in operands.items()
    }


def gather_after_layers(
    comms: Mapping[str, ParamComm], operands: Operands, outputs: list[jax.Array]
) -> tuple[list[jax.Array], Arrays]:
    """Returns (`outputs` of the layers, the gathered parameters that are used only after them).

    In the backward pass the layers begin when the gradients of these parameters are reduced. By
    default XLA computes those gradients at the very end, and keeps the logits' gradient until then.
    """

    @jax.custom_vjp
    def run(operands: Operands, outputs: list[jax.Array]) -> tuple[list[jax.Array], Arrays]:
        return outputs, gather_all(comms, only_shards(operands))

    def forward(operands: Operands, outputs: list[jax.Array]) -> Any:
        return run(operands, outputs), None

    def backward(_: None, cotangents: tuple[list[jax.Array], Arrays]) -> Any:
        to_outputs, to_gathered = cotangents
        gradients = {path: g for path, (g, *_) in to_gathered.items()}
        reduced, to_outputs = order_after(reduce_gradients(comms, abstract, gradients), to_outputs)
        return operand_cotangents(abstract, reduced), to_outputs

    abstract: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    run.defvjp(forward, backward)
    return run(operands, outputs)
