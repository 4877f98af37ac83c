"""A scan over layers that gathers each layer while the one before it computes.

The note in `rewrite` says what is moved where.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fsdp_jax.prefetch.vjp import (
    Arrays,
    GatherInputs,
    Layer,
    LayerVjp,
    after,
    floats,
    gather_all,
    input_cotangents,
    reduce_gradients,
    run_layer,
    with_none,
    without_float0,
    zeros,
)
from fsdp_jax.units.collectives import ParamComm


class _Residuals(NamedTuple):
    """What the forward pass saves for the backward pass.

    Attributes:
        loop: residuals of the layers in the loop, stacked in the order in which they ran.
        last: with `pre`, residuals of the last layer, which runs after the loop.
        last_gathered: with `pre`, parameters of the last layer; the backward pass begins with it.

    """

    loop: list[Any]
    last: list[Any]
    last_gathered: Arrays


class _Cotangents(NamedTuple):
    """What the backward pass carries: cotangents of float arrays only.

    `others` and `gradients` have a slot for every layer, filled as the layers run.
    """

    carry: list[Any]
    consts: list[Any]
    others: list[Any]
    gradients: Arrays


@dataclass(frozen=True)
class LayerScan:
    """`lax.scan` over layers.

    Attributes:
        layer: takes [*consts, *carry, *others of this layer], returns [*carry, *ys].
        comms: path -> how that parameter of a layer is communicated.
        length: number of layers.
        carried: number of carried values.
        reverse: whether the last layer runs first.
        unroll: layers per iteration of the loop.
        pre: see the note in `rewrite`.

    """

    layer: Layer
    comms: Mapping[str, ParamComm]
    length: int
    carried: int
    reverse: bool
    unroll: int
    pre: bool

    def run(
        self, inputs: GatherInputs, consts: list[Any], carry: list[Any], others: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns (carry, ys).

        Args:
            inputs: what the gathers read, each array [length, ...].
            consts: arrays that all layers read.
            carry: arrays that each layer passes to the next.
            others: arrays [length, ...] of which each layer reads its slice, not gathered.

        """
        vjps: dict[str, LayerVjp] = {}

        @jax.custom_vjp
        def run(
            inputs: GatherInputs, consts: list[Any], carry: list[Any], others: list[Any]
        ) -> Any:
            return self._forward(inputs.shards, consts, carry, others, {})[:2]

        def forward(
            inputs: GatherInputs, consts: list[Any], carry: list[Any], others: list[Any]
        ) -> Any:
            carry, ys, residuals = self._forward(inputs.shards, consts, carry, others, vjps)
            return (carry, ys), (inputs, consts, others, residuals)

        def backward(saved: Any, cotangents: Any) -> Any:
            inputs, consts, others, residuals = saved
            carry, ys = (without_float0(part) for part in cotangents)
            return _Backward(self, vjps, inputs, consts, others, ys).run(carry, residuals)

        run.defvjp(forward, backward)
        return run(inputs, consts, carry, others)

    def slice_of(self, tree: Any, layer: Any) -> Any:
        """Returns the slice of the layer that runs as number `layer`."""
        return _slice(tree, self.length - 1 - layer if self.reverse else layer)

    def set_slice(self, stacks: Any, layer: Any, values: Any) -> Any:
        """Returns the stacks with that layer's slice set."""
        index = self.length - 1 - layer if self.reverse else layer
        return jax.tree.map(
            lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, index, 0), stacks, values
        )

    def gather_layer(self, shards: Arrays, layer: Any) -> Arrays:
        """Returns that layer's gathered parameters."""
        return gather_all(self.comms, self.slice_of(shards, layer))

    def _forward(
        self,
        shards: Arrays,
        consts: list[Any],
        carry: list[Any],
        others: list[Any],
        vjps: dict[str, LayerVjp],
    ) -> tuple[list[Any], list[Any], _Residuals]:
        """Returns (carry, ys, residuals); fills `vjps`."""

        def run(
            name: str, layer: Any, carry: list[Any], gathered: Arrays
        ) -> tuple[list[Any], list[Any], list[Any]]:
            inputs = [*carry, *self.slice_of(others, layer)]
            outputs, vjps[name] = run_layer(self.layer, gathered, consts, inputs)
            return outputs[: self.carried], outputs[self.carried :], vjps[name].residuals

        def post(carry: list[Any], layer: Any) -> Any:
            carry, ys, residuals = run("loop", layer, carry, self.gather_layer(shards, layer))
            return carry, (ys, residuals)

        def pre(carry_gathered: Any, layer: Any) -> Any:
            carry, gathered = carry_gathered
            following = self.gather_layer(shards, layer + 1)
            carry, ys, residuals = run("loop", layer, carry, gathered)
            return (carry, following), (ys, residuals)

        if not self.pre:
            layers = jnp.arange(self.length)
            carry, (ys, residuals) = lax.scan(post, carry, layers, unroll=self.unroll)
            return carry, self._in_order(ys), _Residuals(residuals, [], {})
        # The last layer has nothing to gather ahead of: it runs after the loop. Its parameters are
        # kept for the backward pass, which begins with it.
        start = carry, self.gather_layer(shards, 0)
        layers = jnp.arange(self.length - 1)
        (carry, gathered), (ys, residuals) = lax.scan(pre, start, layers, unroll=self.unroll)
        carry, last_ys, last_residuals = run("last", self.length - 1, carry, gathered)
        ys = jax.tree.map(lambda stack, last: jnp.concatenate([stack, last[None]]), ys, last_ys)
        return carry, self._in_order(ys), _Residuals(residuals, last_residuals, gathered)

    def _in_order(self, ys: list[Any]) -> list[Any]:
        return [jnp.flip(y, 0) for y in ys] if self.reverse else ys


@dataclass(frozen=True)
class _Backward:
    """The backward pass of a layer scan.

    Residuals are stacked in the order in which the layers ran, also where that is reversed.
    """

    scan: LayerScan
    vjps: dict[str, LayerVjp]
    inputs: GatherInputs
    consts: list[Any]
    others: list[Any]
    ys: list[Any]

    def run(self, carry: list[Any], residuals: _Residuals) -> Any:
        """Returns the cotangents of the four arguments of `LayerScan.run`; None for non-floats."""
        stacks = {
            path: self.inputs.slots.get(path, shard)
            for path, shard in self.inputs.shards.items()
            if self.scan.comms[path].trained
        }
        start = _Cotangents(
            carry, zeros(floats(self.consts)), zeros(floats(self.others)), zeros(stacks)
        )
        end = self._pre(start, residuals) if self.scan.pre else self._post(start, residuals)
        return (
            input_cotangents(self.inputs, end.gradients),
            with_none(self.consts, end.consts),
            with_none(self.vjps["loop"].outputs[: self.scan.carried], end.carry),
            with_none(self.others, end.others),
        )

    def _pre(self, cotangents: _Cotangents, residuals: _Residuals) -> _Cotangents:
        """Computes layer i while i-1 is gathered and the gradients of i+1 are reduced."""
        scan, shards = self.scan, self.inputs.shards
        last = scan.length - 1
        previous = scan.gather_layer(shards, last - 1)
        cotangents, gradients = self._layer(
            "last", last, cotangents, residuals.last_gathered, residuals.last
        )

        def step(carried: Any, layer: Any) -> Any:
            cotangents, gathered, gradients = carried
            # First the reduction and then the gather: the gradients are freed before the next
            # parameters are allocated.
            cotangents = self._reduce(cotangents, layer + 1, gradients)
            reduced = list(cotangents.gradients.values())
            values, reduced = after(scan.slice_of(shards, layer - 1), reduced)
            stacks = dict(zip(cotangents.gradients, reduced, strict=True))
            previous = gather_all(scan.comms, values)
            cotangents, gradients = self._layer(
                "loop",
                layer,
                cotangents._replace(gradients=stacks),
                gathered,
                _slice(residuals.loop, layer),
            )
            return (cotangents, previous, gradients), None

        start = cotangents, previous, gradients
        layers = jnp.arange(last - 1, 0, -1)
        (cotangents, gathered, gradients), _ = lax.scan(step, start, layers, unroll=scan.unroll)
        cotangents = self._reduce(cotangents, 1, gradients)
        return self._first_layer(cotangents, gathered, residuals)

    def _post(self, cotangents: _Cotangents, residuals: _Residuals) -> _Cotangents:
        """Gathers layer i-1 when i has computed, while the gradients of i are reduced."""
        scan, shards = self.scan, self.inputs.shards
        last = scan.length - 1

        def step(carried: Any, layer: Any) -> Any:
            cotangents, gathered = carried
            cotangents, gradients = self._layer(
                "loop", layer, cotangents, gathered, _slice(residuals.loop, layer)
            )
            values, carry = after(scan.slice_of(shards, layer - 1), cotangents.carry)
            previous = gather_all(scan.comms, values)
            return (
                self._reduce(cotangents._replace(carry=carry), layer, gradients),
                previous,
            ), None

        start = cotangents, scan.gather_layer(shards, last)
        layers = jnp.arange(last, 0, -1)
        (cotangents, gathered), _ = lax.scan(step, start, layers, unroll=scan.unroll)
        return self._first_layer(cotangents, gathered, residuals)

    def _first_layer(
        self, cotangents: _Cotangents, gathered: Arrays, residuals: _Residuals
    ) -> _Cotangents:
        cotangents, gradients = self._layer(
            "loop", 0, cotangents, gathered, _slice(residuals.loop, 0)
        )
        return self._reduce(cotangents, 0, gradients)

    def _layer(
        self, name: str, layer: Any, cotangents: _Cotangents, gathered: Arrays, residuals: list[Any]
    ) -> tuple[_Cotangents, Arrays]:
        """Returns (cotangents, gradients of the trained parameters, not reduced yet)."""
        scan = self.scan
        n_consts = len(self.consts)
        to_outputs = [*cotangents.carry, *scan.slice_of(self.ys, layer)]
        gradients, to_inputs = self.vjps[name].pull_back(
            residuals, gathered, self.consts, to_outputs
        )
        to_consts = without_float0(to_inputs[:n_consts])
        to_carry = without_float0(to_inputs[n_consts : n_consts + scan.carried])
        to_others = without_float0(to_inputs[n_consts + scan.carried :])
        updated = _Cotangents(
            to_carry,
            jax.tree.map(jnp.add, cotangents.consts, to_consts),
            scan.set_slice(cotangents.others, layer, to_others),
            cotangents.gradients,
        )
        return updated, {path: g for path, g in gradients.items() if scan.comms[path].trained}

    def _reduce(self, cotangents: _Cotangents, layer: Any, gradients: Arrays) -> _Cotangents:
        """Reduces a layer's gradients and puts them into their slots."""
        reduced = reduce_gradients(self.scan.comms, self.inputs.slots, gradients)
        stacks = {path: cotangents.gradients[path] for path in reduced}
        filled = self.scan.set_slice(stacks, layer, reduced)
        return cotangents._replace(gradients=cotangents.gradients | filled)


def _slice(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)
