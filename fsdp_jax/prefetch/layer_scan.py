"""A layer scan in which each layer is gathered while the one before it computes; see the note in
`prefetch`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fsdp_jax.prefetch.vjp import (
    Arrays,
    Layer,
    Saved,
    after,
    fetch_all,
    floats,
    land,
    optional,
    run_layer,
    to_shards,
    typeful,
    zeros,
)
from fsdp_jax.units.collectives import ParamComm


class _State(NamedTuple):
    """What the backward of a layer scan carries: cotangents, of floats only.

    `grads` and `others` have a slot for every layer, filled in place as the layers go by.
    """

    carry: list[Any]
    consts: list[Any]
    others: list[Any]
    grads: Arrays


@dataclass(frozen=True)
class LayerScan:
    """`lax.scan` over layers.

    Attributes:
        layer: takes [*consts, *carry, *others of this layer], returns [*carry, *ys].
        comms: path -> how a layer's parameter travels.
        length: layers.
        carried: how many values are carried.
        reverse: the last layer first.
        unroll: layers per turn of the loop.
        pre: see the note on prefetch.

    """

    layer: Layer
    comms: Mapping[str, ParamComm]
    length: int
    carried: int
    reverse: bool
    unroll: int
    pre: bool

    def run(
        self,
        values: Arrays,
        pending: Arrays,
        consts: list[Any],
        carry: list[Any],
        others: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """(carry, ys).

        Args:
            values: path -> shards at rest, [length, ...].
            pending: path -> zeros [length, ...] whose cotangent is the gradient before its
                reduction.
            consts: what all layers see.
            carry: what goes from layer to layer.
            others: what is of each layer and not gathered, [length, ...].

        """
        saved: dict[str, Saved] = {}

        @jax.custom_vjp
        def run(
            values: Arrays, pending: Arrays, consts: list[Any], carry: list[Any], others: list[Any]
        ) -> Any:
            return self._forward(values, consts, carry, others, {})[:2]

        def forward(
            values: Arrays, pending: Arrays, consts: list[Any], carry: list[Any], others: list[Any]
        ) -> Any:
            carry, ys, kept = self._forward(values, consts, carry, others, saved)
            return (carry, ys), (values, pending, consts, others, kept)

        def back(residual: Any, cotangent: Any) -> Any:
            values, pending, consts, others, kept = residual
            carry, ys = (typeful(part) for part in cotangent)
            return self._backward(values, pending, consts, others, kept, saved, carry, ys)

        run.defvjp(forward, back)
        return run(values, pending, consts, carry, others)

    def at(self, tree: Any, layer: Any) -> Any:
        """The slot of the layer that is run as number `layer`."""
        return _slot(tree, self.length - 1 - layer if self.reverse else layer)

    def set(self, slots: Any, layer: Any, values: Any) -> Any:
        """The slots with that layer's filled."""
        place = self.length - 1 - layer if self.reverse else layer
        return jax.tree.map(
            lambda x, v: lax.dynamic_update_index_in_dim(x, v, place, 0), slots, values
        )

    def ready(self, values: Arrays, layer: Any) -> Arrays:
        """That layer's parameters, gathered."""
        return fetch_all(self.comms, self.at(values, layer))

    def _forward(
        self,
        values: Arrays,
        consts: list[Any],
        carry: list[Any],
        others: list[Any],
        saved: dict[str, Saved],
    ) -> tuple[list[Any], list[Any], Any]:
        """(carry, ys, what the backward needs)."""

        def layer(
            name: str, number: Any, carry: list[Any], ready: Arrays
        ) -> tuple[list[Any], list[Any], list[Any]]:
            out, saved[name] = run_layer(
                self.layer, ready, consts, [*carry, *self.at(others, number)]
            )
            return out[: self.carried], out[self.carried :], saved[name].kept

        def post(carry: list[Any], number: Any) -> Any:
            carry, ys, kept = layer("loop", number, carry, self.ready(values, number))
            return carry, (ys, kept)

        def pre(carry_ready: Any, number: Any) -> Any:
            carry, ready = carry_ready
            coming = self.ready(values, number + 1)
            carry, ys, kept = layer("loop", number, carry, ready)
            return (carry, coming), (ys, kept)

        if not self.pre:
            carry, (ys, kept) = lax.scan(post, carry, jnp.arange(self.length), unroll=self.unroll)
            return carry, self._ordered(ys), (kept, [], {})
        start = carry, self.ready(values, 0)
        # The last layer has nothing to gather for: it stands behind the loop. Its parameters wait
        # for the backward, which begins with it.
        (carry, ready), (ys, kept) = lax.scan(
            pre, start, jnp.arange(self.length - 1), unroll=self.unroll
        )
        carry, last_ys, last_kept = layer("last", self.length - 1, carry, ready)
        ys = jax.tree.map(lambda stacked, last: jnp.concatenate([stacked, last[None]]), ys, last_ys)
        return carry, self._ordered(ys), (kept, last_kept, ready)

    def _ordered(self, ys: list[Any]) -> list[Any]:
        return [jnp.flip(y, 0) for y in ys] if self.reverse else ys

    def _backward(
        self,
        values: Arrays,
        pending: Arrays,
        consts: list[Any],
        others: list[Any],
        residual: Any,
        saved: dict[str, Saved],
        carry: list[Any],
        ys: list[Any],
    ) -> Any:
        """Cotangents of the five arguments of `run`; None for what is no float."""
        back = _Backward(self, values, pending, consts, others, saved, ys)
        slots = {
            path: pending.get(path, value)
            for path, value in values.items()
            if self.comms[path].trained
        }
        start = _State(carry, zeros(floats(consts)), zeros(floats(others)), zeros(slots))
        state = back.pre(start, *residual) if self.pre else back.post(start, residual[0])
        to_values, to_pending = to_shards(values, pending, state.grads)
        carried = saved["loop"].outputs[: self.carried]
        return (
            to_values,
            to_pending,
            optional(consts, state.consts),
            optional(carried, state.carry),
            optional(others, state.others),
        )


@dataclass(frozen=True)
class _Backward:
    """The way back through a layer scan. What was kept lies in the order of the run, also where
    that is reversed.
    """

    scan: LayerScan
    values: Arrays
    pending: Arrays
    consts: list[Any]
    others: list[Any]
    saved: dict[str, Saved]
    ys: list[Any]

    def pre(self, state: _State, kept: list[Any], last_kept: list[Any], ready: Arrays) -> _State:
        """Layer i computes while i-1 is gathered and the gradients of i+1 are reduced."""
        scan, last = self.scan, self.scan.length - 1
        coming = scan.ready(self.values, last - 1)
        state, grads = self._layer("last", last, state, ready, last_kept)

        def step(carried: Any, number: Any) -> Any:
            state, ready, grads = carried
            # First the one and then the other: the gradients are gone before the next parameters
            # take their place.
            state = self._land(state, number + 1, grads)
            shards, landed = after(scan.at(self.values, number - 1), list(state.grads.values()))
            state = state._replace(grads=dict(zip(state.grads, landed, strict=True)))
            coming = fetch_all(scan.comms, shards)
            state, grads = self._layer("loop", number, state, ready, _slot(kept, number))
            return (state, coming, grads), None

        (state, ready, grads), _ = lax.scan(
            step, (state, coming, grads), jnp.arange(last - 1, 0, -1), unroll=scan.unroll
        )
        state = self._land(state, 1, grads)
        state, grads = self._layer("loop", 0, state, ready, _slot(kept, 0))
        return self._land(state, 0, grads)

    def post(self, state: _State, kept: list[Any]) -> _State:
        """Layer i-1 is gathered when i has computed, while the gradients of i are reduced."""
        scan, last = self.scan, self.scan.length - 1

        def step(carried: Any, number: Any) -> Any:
            state, ready = carried
            state, grads = self._layer("loop", number, state, ready, _slot(kept, number))
            values, carry = after(scan.at(self.values, number - 1), state.carry)
            coming = fetch_all(scan.comms, values)
            return (self._land(state._replace(carry=carry), number, grads), coming), None

        start = state, scan.ready(self.values, last)
        (state, ready), _ = lax.scan(step, start, jnp.arange(last, 0, -1), unroll=scan.unroll)
        state, grads = self._layer("loop", 0, state, ready, _slot(kept, 0))
        return self._land(state, 0, grads)

    def _layer(
        self, name: str, number: Any, state: _State, ready: Arrays, kept: list[Any]
    ) -> tuple[_State, Arrays]:
        """(the state, gradients of the gathered parameters, not reduced yet)."""
        scan, n = self.scan, len(self.consts)
        outputs = [*state.carry, *scan.at(self.ys, number)]
        grads, inputs = self.saved[name].pull(kept, ready, self.consts, outputs)
        to_consts, to_carry, to_others = (
            inputs[:n],
            inputs[n : n + scan.carried],
            inputs[n + scan.carried :],
        )
        state = _State(
            typeful(to_carry),
            jax.tree.map(jnp.add, state.consts, typeful(to_consts)),
            scan.set(state.others, number, typeful(to_others)),
            state.grads,
        )
        return state, {path: g for path, g in grads.items() if scan.comms[path].trained}

    def _land(self, state: _State, number: Any, grads: Arrays) -> _State:
        """The landed gradients put into their slots."""
        arrived = land(self.scan.comms, self.pending, grads)
        slots = {path: state.grads[path] for path in arrived}
        return state._replace(grads=state.grads | self.scan.set(slots, number, arrived))


def _slot(tree: Any, number: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), tree)
