"""Layers one after another, each gathered while the one before it computes: a layer scan, or a chain of units.

Nothing here knows jaxprs or Flax: a layer is a function of its gathered parameters and its inputs. `prefetch.py` finds
them. See its note for what is moved where, and why.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fsdp_jax.travel import Route, fetch, reduce

Arrays = dict[str, jax.Array]
Layer = Callable[[Arrays, list[Any]], list[Any]]
"""(gathered parameters by path, inputs) -> outputs."""


def is_float(x: Any) -> bool:
    """Whether it has a cotangent."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floats(values: Iterable[Any]) -> list[Any]:
    return [x for x in values if is_float(x)]


def _typed(like: Sequence[Any], found: Iterable[Any]) -> list[Any]:
    """`found` for the floats of `like`, in order; for the rest the zeros without a type that JAX wants there."""
    rest = iter(found)
    return [next(rest) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in like]


class _Saved:
    """What `jax.vjp` of a layer keeps, less what the backward has anyway: gathered parameters and constants."""

    def __init__(self, pullback: Any, gathered: Arrays, consts: Sequence[Any], outputs: Sequence[Any]) -> None:
        leaves, self.treedef = jax.tree.flatten(pullback)
        self.outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
        self.sources: dict[int, tuple[str, str | int]] = {id(x): ("gathered", name) for name, x in gathered.items()}
        self.sources |= {id(x): ("const", number) for number, x in enumerate(consts)}
        self.kept: list[Any] = []
        for leaf in leaves:
            if id(leaf) not in self.sources:
                self.sources[id(leaf)] = ("kept", len(self.kept))
                self.kept.append(leaf)
        self.places = [self.sources[id(leaf)] for leaf in leaves]

    def pull(self, kept: Sequence[Any], gathered: Arrays, consts: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """(cotangents of the gathered parameters, of the inputs), given those of the outputs that are floats."""
        where: dict[str, Any] = {"kept": kept, "gathered": gathered, "const": consts}
        pullback = jax.tree.unflatten(self.treedef, [where[kind][key] for kind, key in self.places])
        return pullback(_typed(self.outputs, outputs))


def _forward(layer: Layer, gathered: Arrays, consts: list[Any], inputs: list[Any]) -> tuple[list[Any], _Saved]:
    out, pullback = jax.vjp(layer, gathered, [*consts, *inputs])
    return out, _Saved(pullback, gathered, consts, out)


def fetch_all(routes: Mapping[str, Route], values: Arrays) -> Arrays:
    """Parameters gathered."""
    return {path: fetch(routes[path], value) for path, value in values.items()}


def _after(values: Arrays, event: list[Any]) -> tuple[Arrays, list[Any]]:
    """Both, where what is made of `values` waits for `event`."""
    return lax.optimization_barrier((values, event)) if event else (values, event)


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
        routes: path -> how a layer's parameter travels.
        length: layers.
        carried: how many values are carried.
        reverse: the last layer first.
        pre: see the note on prefetch.

    """

    layer: Layer
    routes: Mapping[str, Route]
    length: int
    carried: int
    reverse: bool
    pre: bool

    def run(
        self, values: Arrays, pending: Arrays, consts: list[Any], carry: list[Any], others: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """(carry, ys).

        Args:
            values: path -> shards at rest, [length, ...].
            pending: path -> zeros [length, ...] whose cotangent is the gradient before its reduction.
            consts: what all layers see.
            carry: what goes from layer to layer.
            others: what is of each layer and not gathered, [length, ...].

        """
        saved: dict[str, _Saved] = {}

        @jax.custom_vjp
        def run(values: Arrays, pending: Arrays, consts: list[Any], carry: list[Any], others: list[Any]) -> Any:
            return self._forward(values, consts, carry, others, {})[:2]

        def forward(values: Arrays, pending: Arrays, consts: list[Any], carry: list[Any], others: list[Any]) -> Any:
            carry, ys, kept = self._forward(values, consts, carry, others, saved)
            return (carry, ys), (values, pending, consts, others, kept)

        def back(residual: Any, cotangent: Any) -> Any:
            values, pending, consts, others, kept = residual
            carry, ys = (_typeful(part) for part in cotangent)
            return self._backward(values, pending, consts, others, kept, saved, carry, ys)

        run.defvjp(forward, back)
        return run(values, pending, consts, carry, others)

    def at(self, tree: Any, layer: Any) -> Any:
        """The slot of the layer that is run as number `layer`."""
        place = self.length - 1 - layer if self.reverse else layer
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, place, keepdims=False), tree)

    def set(self, slots: Any, layer: Any, values: Any) -> Any:
        """The slots with that layer's filled."""
        place = self.length - 1 - layer if self.reverse else layer
        return jax.tree.map(lambda x, v: lax.dynamic_update_index_in_dim(x, v, place, 0), slots, values)

    def ready(self, values: Arrays, layer: Any) -> Arrays:
        """That layer's parameters, gathered."""
        return fetch_all(self.routes, self.at(values, layer))

    def _forward(
        self, values: Arrays, consts: list[Any], carry: list[Any], others: list[Any], saved: dict[str, _Saved]
    ) -> tuple[list[Any], list[Any], Any]:
        """(carry, ys, what the backward needs)."""

        def layer(name: str, number: Any, carry: list[Any], ready: Arrays) -> tuple[list[Any], list[Any], list[Any]]:
            out, saved[name] = _forward(self.layer, ready, consts, [*carry, *self.at(others, number)])
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
            carry, (ys, kept) = lax.scan(post, carry, jnp.arange(self.length))
            return carry, self._ordered(ys), (kept, [], {})
        start = carry, self.ready(values, 0)
        # The last layer has nothing to gather for: it stands behind the loop. Its parameters wait for the backward,
        # which begins with it.
        (carry, ready), (ys, kept) = lax.scan(pre, start, jnp.arange(self.length - 1))
        carry, last_ys, last_kept = layer("last", self.length - 1, carry, ready)
        ys = jax.tree.map(lambda stacked, last: jnp.concatenate([stacked, last[None]]), ys, last_ys)
        return carry, self._ordered(ys), (kept, last_kept, ready)

    def _ordered(self, ys: list[Any]) -> list[Any]:
        return [jnp.flip(y, 0) for y in ys] if self.reverse else ys

    def _backward(
        self, values: Arrays, pending: Arrays, consts: list[Any], others: list[Any], residual: Any,
        saved: dict[str, _Saved], carry: list[Any], ys: list[Any],
    ) -> Any:  # fmt: skip
        """Cotangents of the five arguments of `run`; None for what is no float."""
        back = _Backward(self, values, pending, consts, others, saved, ys)
        slots = {path: pending[path] if path in pending else values[path] for path in values}
        start = _State(carry, _zeros(_floats(consts)), _zeros(_floats(others)), _zeros(slots))
        state = back.pre(start, *residual) if self.pre else back.post(start, residual[0])
        to_values = {path: _zeros(value) if path in pending else state.grads[path] for path, value in values.items()}
        to_pending = {path: state.grads[path] for path in pending}
        carried = saved["loop"].outputs[: self.carried]
        return (
            to_values, to_pending, _optional(consts, state.consts), _optional(carried, state.carry),
            _optional(others, state.others),
        )  # fmt: skip


@dataclass(frozen=True)
class _Backward:
    """The way back through a layer scan."""

    scan: LayerScan
    values: Arrays
    pending: Arrays
    consts: list[Any]
    others: list[Any]
    saved: dict[str, _Saved]
    ys: list[Any]

    def pre(self, state: _State, kept: list[Any], last_kept: list[Any], ready: Arrays) -> _State:
        """Layer i computes while i-1 is gathered and the gradients of i+1 are reduced."""
        scan, last = self.scan, self.scan.length - 1
        coming = scan.ready(self.values, last - 1)
        state, grads = self._layer("last", last, state, ready, last_kept)

        def step(carried: Any, number: Any) -> Any:
            state, ready, grads = carried
            # First the one and then the other: the gradients are gone before the next parameters take their place.
            state = self._land(state, number + 1, grads)
            shards, landed = _after(scan.at(self.values, number - 1), list(state.grads.values()))
            state = state._replace(grads=dict(zip(state.grads, landed, strict=True)))
            coming = fetch_all(scan.routes, shards)
            state, grads = self._layer("loop", number, state, ready, scan.at(kept, number))
            return (state, coming, grads), None

        (state, ready, grads), _ = lax.scan(step, (state, coming, grads), jnp.arange(last - 1, 0, -1))
        state = self._land(state, 1, grads)
        state, grads = self._layer("loop", 0, state, ready, scan.at(kept, 0))
        return self._land(state, 0, grads)

    def post(self, state: _State, kept: list[Any]) -> _State:
        """Layer i-1 is gathered when i has computed, while the gradients of i are reduced."""
        scan, last = self.scan, self.scan.length - 1

        def step(carried: Any, number: Any) -> Any:
            state, ready = carried
            state, grads = self._layer("loop", number, state, ready, scan.at(kept, number))
            values, carry = _after(scan.at(self.values, number - 1), state.carry)
            coming = fetch_all(scan.routes, values)
            return (self._land(state._replace(carry=carry), number, grads), coming), None

        start = state, scan.ready(self.values, last)
        (state, ready), _ = lax.scan(step, start, jnp.arange(last, 0, -1))
        state, grads = self._layer("loop", 0, state, ready, scan.at(kept, 0))
        return self._land(state, 0, grads)

    def _layer(self, name: str, number: Any, state: _State, ready: Arrays, kept: list[Any]) -> tuple[_State, Arrays]:
        """(the state, gradients of the gathered parameters): those that cannot wait are in the state already."""
        scan, n = self.scan, len(self.consts)
        outputs = [*state.carry, *scan.at(self.ys, number)]
        grads, inputs = self.saved[name].pull(kept, ready, self.consts, outputs)
        to_consts, to_carry, to_others = inputs[:n], inputs[n : n + scan.carried], inputs[n + scan.carried :]
        state = _State(
            _typeful(to_carry),
            jax.tree.map(jnp.add, state.consts, _typeful(to_consts)),
            scan.set(state.others, number, _typeful(to_others)),
            state.grads,
        )
        # Under annotations a partial sum cannot be named, so it cannot be carried to the next layer.
        waiting = {path for path in grads if scan.routes[path].mode == "manual"}
        state = self._land(state, number, {path: g for path, g in grads.items() if path not in waiting})
        return state, {path: g for path, g in grads.items() if path in waiting}

    def _land(self, state: _State, number: Any, grads: Arrays) -> _State:
        """The gradients reduced, scattered and put into their slots; as they are where reduction is deferred."""
        scan = self.scan
        arrived = {
            path: g.astype(self.pending[path].dtype) if path in self.pending else reduce(scan.routes[path], g)
            for path, g in grads.items()
        }
        slots = {path: state.grads[path] for path in arrived}
        return state._replace(grads=state.grads | scan.set(slots, number, arrived))


def gather_behind(
    routes: Mapping[str, Route], values: Arrays, pending: Arrays, made: list[jax.Array]
) -> tuple[list[jax.Array], Arrays]:
    """(`made`, gathered parameters): what layers made, and what is used only behind them.

    On the way back the layers begin when the gradients of these parameters are reduced. Left alone, XLA computes them
    at the very end, and keeps the logits' gradient until then.
    """

    @jax.custom_vjp
    def run(values: Arrays, pending: Arrays, made: list[jax.Array]) -> tuple[list[jax.Array], Arrays]:
        return made, fetch_all(routes, values)

    def back(pending: Arrays, cotangents: tuple[list[jax.Array], Arrays]) -> Any:
        made, grads = cotangents
        landed = {p: g.astype(pending[p].dtype) if p in pending else reduce(routes[p], g) for p, g in grads.items()}
        landed, made = _after(landed, made)
        shapes = {path: jax.ShapeDtypeStruct(values[path].shape, values[path].dtype) for path in pending}
        to_values = {p: jnp.zeros(shapes[p].shape, shapes[p].dtype) if p in pending else landed[p] for p in grads}
        return to_values, {path: landed[path] for path in pending}, made

    run.defvjp(lambda values, pending, made: (run(values, pending, made), pending), back)
    return run(values, pending, made)


@dataclass(frozen=True)
class Stage:
    """One unit of a chain. Values that go between units are known by number: `ins` it takes, `outs` it makes."""

    layer: Layer
    ins: Sequence[int]
    outs: Sequence[int]


@dataclass(frozen=True)
class UnitChain:
    """Units one after another, each a program of its own.

    Attributes:
        stages: in their order.
        routes: path -> how a parameter travels.
        wanted: numbers of the values that the chain is run for.
        pre: see the note on prefetch.

    """

    stages: Sequence[Stage]
    routes: Mapping[str, Route]
    wanted: Sequence[int]
    pre: bool

    def run(self, values: list[Arrays], pending: list[Arrays], external: dict[int, Any]) -> list[Any]:
        """The wanted values.

        Args:
            values: of each stage, path -> shard at rest.
            pending: of each stage, path -> zeros whose cotangent is the gradient before its reduction.
            external: what the stages take that no stage makes, by number.

        """
        saved: list[_Saved] = []

        @jax.custom_vjp
        def run(values: list[Arrays], pending: list[Arrays], external: dict[int, Any]) -> list[Any]:
            return self._forward(values, external, [])[0]

        def forward(values: list[Arrays], pending: list[Arrays], external: dict[int, Any]) -> Any:
            out, ready = self._forward(values, external, saved)
            return out, (values, pending, external, ready, [each.kept for each in saved])

        run.defvjp(forward, lambda residual, cotangent: self._backward(saved, residual, _typeful(cotangent)))
        return run(values, pending, external)

    def _forward(self, values: list[Arrays], external: dict[int, Any], saved: list[_Saved]) -> tuple[list[Any], Arrays]:
        """(the wanted values, the parameters of the last stage where they wait for the backward)."""
        env = dict(external)
        coming = fetch_all(self.routes, values[0]) if self.pre else {}
        for number, stage in enumerate(self.stages):
            inputs = [env[i] for i in stage.ins]
            ready, following = coming, number + 1 if self.pre else number
            if following < len(self.stages):
                shards, inputs = _after_floats(values[following], inputs)
                coming = fetch_all(self.routes, shards)
            out, kept = _forward(stage.layer, ready if self.pre else coming, [], inputs)
            saved.append(kept)
            env.update(zip(stage.outs, out, strict=True))
        return [env[i] for i in self.wanted], coming if self.pre else {}

    def _backward(self, saved: list[_Saved], residual: Any, cotangent: list[Any]) -> Any:
        values, pending, external, ready, kept = residual
        last = len(self.stages) - 1
        made = {i: x for stage, each in zip(self.stages, saved, strict=True)
                for i, x in zip(stage.outs, each.outputs, strict=True)}  # fmt: skip
        sums = dict(zip([i for i in self.wanted if is_float(made[i])], cotangent, strict=True))
        found: list[Arrays] = [{} for _ in values]
        waiting: Arrays = {}
        coming = ready if self.pre else fetch_all(self.routes, values[last])
        for number in range(last, -1, -1):
            stage, ready = self.stages[number], coming
            floats = [i for i in stage.outs if is_float(made[i])]
            outputs = [sums.pop(i) if i in sums else _zeros(made[i]) for i in floats]
            if self.pre and number:
                shards, outputs = _after(values[number - 1], outputs)
                coming = fetch_all(self.routes, shards)
            if number < last:
                found[number + 1] |= self._landed(pending[number + 1], waiting)
            grads, inputs = saved[number].pull(kept[number], ready, [], outputs)
            for i, x in zip(stage.ins, inputs, strict=True):
                if x.dtype != jax.dtypes.float0:
                    sums[i] = sums[i] + x if i in sums else x
            waiting = {path: g for path, g in grads.items() if self.pre and self.routes[path].mode == "manual"}
            found[number] = self._landed(pending[number], {p: g for p, g in grads.items() if p not in waiting})
            if not self.pre and number:
                shards, inputs = _after(values[number - 1], [sums[i] for i in stage.ins if i in sums])
                sums |= dict(zip([i for i in stage.ins if i in sums], inputs, strict=True))
                coming = fetch_all(self.routes, shards)
        found[0] |= self._landed(pending[0], waiting)
        to_values = [{p: _zeros(v) if p in left else grads[p] for p, v in each.items()}
                     for each, left, grads in zip(values, pending, found, strict=True)]  # fmt: skip
        to_pending = [{p: grads[p] for p in left} for left, grads in zip(pending, found, strict=True)]
        to_external = {i: sums.get(i, _zeros(x)) if is_float(x) else None for i, x in external.items()}
        return to_values, to_pending, to_external

    def _landed(self, pending: Arrays, grads: Arrays) -> Arrays:
        return {p: g.astype(pending[p].dtype) if p in pending else reduce(self.routes[p], g) for p, g in grads.items()}


def _after_floats(values: Arrays, inputs: list[Any]) -> tuple[Arrays, list[Any]]:
    values, floats = _after(values, _floats(inputs))
    rest = iter(floats)
    return values, [next(rest) if is_float(x) else x for x in inputs]


def _zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


def _typeful(cotangents: Iterable[Any]) -> list[Any]:
    return [x for x in cotangents if x.dtype != jax.dtypes.float0]


def _optional(like: Sequence[Any], found: Iterable[Any]) -> list[Any]:
    """`found` for the floats of `like`, in order, and None for the rest."""
    rest = iter(found)
    return [next(rest) if is_float(x) else None for x in like]
