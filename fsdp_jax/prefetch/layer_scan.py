"""A scan over layers that gathers each layer while the previous one computes.

The note in `rewrite` explains which operations move where.

Where some of the layers stay gathered, those that run last, the scan runs in parts, a loop for
each: what a loop saves is the same in all of its iterations. The parts share the stacks, of which
they read slices, and whose cotangents the backward pass fills in place. Between two parts nothing
is carried but what the layers carry: XLA overlaps the end of one with the start of the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fsdp_jax.local_rows import rows_of_batch
from fsdp_jax.prefetch.partial_sums import SplitPullback
from fsdp_jax.prefetch.vjp import (
    Arrays,
    Gradients,
    Layer,
    LayerVjp,
    Operands,
    converted_all,
    gather_after,
    gather_all,
    kept_of,
    only_shards,
    operand_cotangents,
    order_after,
    reduce_gradients,
    run_layer,
    without_float0,
    zero_cotangent,
)
from fsdp_jax.units.collectives import (
    Prepared,
    fetch,
    reduce_over_replicas,
    scatter,
    shared_of_stack,
)
from fsdp_jax.units.comm import ParamComm


class _Cotangents(NamedTuple):
    """The cotangents that the backward pass carries.

    `others` and `gradients` have an entry for every layer, written as the layers run.
    """

    carry: list[Any]
    consts: list[Any]
    others: list[Any]
    gradients: Arrays


class _Splits(NamedTuple):
    """Pullbacks whose gradients may be partial sums, of a layer in the loop and of the last one."""

    in_loop: SplitPullback
    last: SplitPullback


class _Residuals(NamedTuple):
    """Residuals of the layers in the loop, stacked; of the last, which `pre` runs after it.

    And the gathered parameters that stay, of the same layers.
    """

    loop: list[Any]
    last: list[Any]
    kept: Arrays
    last_kept: Arrays


@dataclass(frozen=True)
class LayerScan:
    """A `lax.scan` over layers that gathers ahead, in forward and backward; or a part of one."""

    layer: Layer  # takes [*consts, *carry, *others of this layer], returns [*carry, *ys]
    comms: Mapping[str, ParamComm]  # of a layer's parameters, by path
    length: int  # number of layers
    carried: int  # number of carried values
    reverse: bool  # the last layer runs first
    unroll: int  # layers per iteration of the loop
    when: Literal["none", "post", "pre"]  # it gathers; see the note in `rewrite`
    keep_last: bool  # with `pre`, the last layer's gathered parameters, for the backward pass
    first: int = 0  # number of the first layer of a part
    stack: int = 0  # layers of the stacks, of which a part runs some
    shared: Arrays = field(default_factory=dict)  # of each layer, by path; see `Prepared`

    def run(
        self, operands: Operands, consts: list[Any], carry: list[Any], others: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Computes (carry, ys) of the scan; its VJP is the pipeline's backward pass.

        Args:
            operands: the arrays that the gathers read, each [length, ...].
            consts: arrays that all layers read.
            carry: arrays that each layer passes to the next.
            others: arrays [length, ...] of which each layer reads its slice, not gathered.

        """
        parts = self._parts(operands)
        # Of each part: that of a layer in the loop, and that of the last one.
        vjps: list[list[LayerVjp]] = []

        @jax.custom_vjp
        def run(*inputs: Any) -> Any:
            return forward(*inputs)[0]

        def forward(operands: Any, consts: Any, carry: Any, others: Any) -> Any:
            vjps[:] = [[] for _ in parts]
            shared = self._shared(operands)
            ready = [replace(part, shared=shared) for part in parts]
            carry, ys, saved = self._run_parts(ready, vjps, operands, consts, carry, others)
            return (carry, ys), (operands, consts, others, shared, saved)

        def backward(saved: Any, cotangents: Any) -> Any:
            operands, consts, others, shared, residuals = saved
            carry, ys = map(without_float0, cotangents)
            end = _cotangents_at_end(self.comms, operands, consts, carry, others)
            ready = [replace(part, shared=shared) for part in parts]
            passes = [
                _Backward(part, in_loop, last, ys, operands, consts, others, own)
                for part, (in_loop, last), own in zip(ready, vjps, residuals, strict=True)
            ][::-1]
            gathered = gather_all(self.comms, passes[0].last_shards)
            for each, following in zip(passes, [*passes[1:], None], strict=True):
                end, gathered = each.run(end, gathered, following)
            to_operands = operand_cotangents(operands, end.gradients)
            return to_operands, end.consts, end.carry, end.others

        run.defvjp(forward, backward)
        return run(operands, consts, carry, others)

    def _parts(self, operands: Operands) -> "list[LayerScan]":
        """Splits the scan into parts whose layers keep the same gathered parameters."""
        # Of other stacks than this one it is not known which of their layers this scan runs.
        split = {path for path in operands if self.comms[path].layers == self.length}
        starts = {self.length - self.comms[path].keeps for path in split}
        parts = []
        for first, end in pairwise(sorted({0, self.length, *starts})):
            comms = {
                path: comm.keeping(self.length - comm.keeps <= first) if path in split else comm
                for path, comm in self.comms.items()
            }
            # A single layer has no other to gather during its own computation.
            when = self.when
            if end - first == 1 and self.length > 1:
                when = "none"
            part = replace(
                self,
                comms=comms,
                length=end - first,
                when=when,
                # What follows begins the backward pass, and hides the gather.
                keep_last=self.keep_last and end == self.length,
                first=first,
                stack=self.length,
            )
            parts.append(part)
        return parts

    def _run_parts(
        self,
        parts: "Sequence[LayerScan]",
        vjps: list[list[LayerVjp]],
        operands: Operands,
        consts: list[Any],
        carry: list[Any],
        others: list[Any],
    ) -> tuple[list[Any], list[Any], list[_Residuals]]:
        """Runs the parts one after another. Returns (carry, ys, residuals of each)."""
        stacks, residuals = [], []
        for part, traced in zip(parts, vjps, strict=True):
            carry, ys, own = part._run_forward(traced, operands, consts, carry, others)
            stacks.append(ys)
            residuals.append(own)
        if len(parts) > 1:
            in_order = stacks[::-1] if self.reverse else stacks
            stacks = [jax.tree.map(lambda *each: jnp.concatenate(each), *in_order)]
        return carry, stacks[0], residuals

    @property
    def pre(self) -> bool:
        """Whether a layer's parameters are gathered while the one before it computes."""
        return self.when == "pre"

    @property
    def last(self) -> int:
        """The number of the layer that runs last."""
        return self.first + self.length - 1

    @property
    def sparse_core(self) -> bool:
        """Whether a TPU's SparseCores run the collectives, several at a time."""
        return not self.annotated and any(
            comm.axes_at_once == "sparse_cores" for comm in self.comms.values()
        )

    @property
    def annotated(self) -> bool:
        """Whether XLA inserts the collectives."""
        return any(comm.mode == "annotated" for comm in self.comms.values())

    def stack_index(self, layer: Any) -> Any:
        """Finds the index in the stacks of the layer that runs as number `layer`."""
        return self.stack - 1 - layer if self.reverse else layer

    def slice_of(self, stacks: Any, layer: Any) -> Any:
        """Takes the slice of stacked arrays for the layer that runs as number `layer`."""
        return _slice_at(stacks, self.stack_index(layer))

    def set_slice(self, stacks: Any, layer: Any, values: Any) -> Any:
        """Sets the slice of stacked arrays for that layer to these values."""
        index = self.stack_index(layer)
        return jax.tree.map(
            lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, index, 0), stacks, values
        )

    def gather_layer(self, operands: Operands, layer: Any, fetched: Arrays | None = None) -> Arrays:
        """Gathers the parameters of the layer that runs as number `layer`, by path.

        `fetched`: the result of `fetch_layer` for that layer; other shards are sliced here.
        """
        return gather_all(self.comms, self.shards_of_layer(operands, layer, fetched or {}))

    def shards_of_layer(self, operands: Operands, layer: Any, fetched: Arrays) -> Arrays:
        """Takes a layer's shards, by path: the fetched ones, and slices of the others."""
        stacks = only_shards(operands)
        sliced = {path: stack for path, stack in stacks.items() if path not in fetched}
        shards = self.slice_of(sliced, layer) | fetched
        # What stays gathered is converted at once: its stack is in the compute dtype. Of a kernel
        # that matmuls take as it was sent, XLA drops that stack, and keeps that of float8 values.
        ahead = {path: x for path, x in self.shared.items() if not self.comms[path].kept}
        shared = self.slice_of(ahead, layer)
        prepared = {path: Prepared(shards[path], x) for path, x in shared.items() if path in stacks}
        return {path: shards[path] for path in stacks} | prepared

    def _shared(self, operands: Operands) -> Arrays:
        """Computes what formats must know of all shards, of all layers before the first.

        In a layer's own gather this would be a collective before another: XLA begins neither early.
        Not of shards in host memory, of which the device has one layer at a time.
        """
        shared = {
            path: shared_of_stack(self.comms[path], stack)
            for path, stack in only_shards(operands).items()
            if not self.comms[path].on_host
        }
        return {path: x for path, x in shared.items() if x is not None}

    def fetch_layer(self, operands: Operands, layer: Any) -> Arrays:
        """Brings a layer's shards in host memory to the device, by path.

        This happens one iteration before they are gathered: in the same iteration, fetch and gather
        would be a chain, and only part of it could be hidden. A `layer` beyond the first or last is
        clamped.
        """
        stacks = only_shards(operands)
        on_host = {path: stack for path, stack in stacks.items() if self.comms[path].on_host}
        shards = self.slice_of(on_host, jnp.clip(layer, self.first, self.last))
        return {path: fetch(self.comms[path], shard) for path, shard in shards.items()}

    def _run_forward(
        self,
        vjps: list[LayerVjp],
        operands: Operands,
        consts: list[Any],
        carry: list[Any],
        others: list[Any],
    ) -> tuple[list[Any], list[Any], _Residuals]:
        """Runs the layers of a part. Returns (carry, ys, residuals).

        Sets `vjps` to those of a layer in the loop and of the last one, which are the same unless
        jax traced it again. The residuals of the loop are stacked in the order in which the layers
        run, also in a reversed scan.
        """

        # Traced once for the loop and for the last layer, unless jax tells their inputs apart.
        @partial(jax.jit, inline=True)
        def trace(gathered: Arrays, consts: list[Any], inputs: list[Any]) -> Any:
            outputs, residuals, vjp = run_layer(self.layer, gathered, consts, inputs)
            vjps.append(vjp)
            return outputs, residuals

        def run(
            layer: Any, carry: list[Any], gathered: Arrays
        ) -> tuple[list[Any], list[Any], list[Any]]:
            inputs = [*carry, *self.slice_of(others, layer)]
            whole = converted_all(self.comms, gathered)
            outputs, residuals = trace(whole, consts, inputs)
            return outputs[: self.carried], outputs[self.carried :], residuals

        def step(carried: Any, layer: Any) -> Any:
            """Carries (carry, with `pre` the layer's parameters, the next one's fetched shards)."""
            carry, gathered, fetched = carried
            following: Arrays = {}
            if self.pre:
                following = self.gather_layer(operands, layer + 1, fetched)
                fetched = self.fetch_layer(operands, layer + 2)
            else:
                gathered = self.gather_layer(operands, layer)
            carry, ys, residuals = run(layer, carry, gathered)
            kept = kept_of(self.comms, gathered)
            return (carry, following, fetched), (ys, residuals, kept)

        # With `pre` the loop has all layers but the last, and each gathers for the next.
        start: Any = carry, {}, {}
        if self.pre:
            gathered = self.gather_layer(operands, self.first)
            start = carry, gathered, self.fetch_layer(operands, self.first + 1)
        layers = jnp.arange(self.first, self.first + self.length - self.pre)
        (carry, gathered, _), stacks = lax.scan(step, start, layers, unroll=self.unroll)
        ys, loop, kept = stacks
        last: list[Any] = []
        last_kept: Arrays = {}
        of_loop = vjps[-1]
        if self.pre:
            # The last layer has no next layer to gather: it runs after the loop. Its parameters are
            # kept for the backward pass, which begins with it.
            carry, last_ys, last = run(self.last, carry, gathered)
            last_kept = gathered if self.keep_last else kept_of(self.comms, gathered)
            ys = jax.tree.map(lambda stack, last: jnp.concatenate([stack, last[None]]), ys, last_ys)
        ys = [jnp.flip(y, 0) for y in ys] if self.reverse else ys
        vjps[:] = of_loop, vjps[-1]
        return carry, ys, _Residuals(loop, last, kept, last_kept)


def _cotangents_at_end(
    comms: Mapping[str, ParamComm],
    operands: Operands,
    consts: list[Any],
    carry: list[Any],
    others: list[Any],
) -> _Cotangents:
    """Makes the cotangents as the backward pass begins, given the carry's: zeros but for those."""
    stacks = {path: jnp.zeros_like(read[-1]) for path, read in operands.items()}
    stacks = {path: x for path, x in stacks.items() if comms[path].trained}
    to_consts, to_others = (list(map(zero_cotangent, x)) for x in (consts, others))
    return _Cotangents(carry, to_consts, to_others, stacks)


@dataclass(frozen=True)
class _Backward:
    """The backward pass of a layer scan: the cotangents of ys, and the forward pass's residuals."""

    scan: LayerScan
    vjp: LayerVjp  # of a layer in the loop
    last_vjp: LayerVjp  # of the last one, outside it
    ys: list[Any]
    operands: Operands
    consts: list[Any]
    others: list[Any]
    residuals: _Residuals

    def run(
        self, start: _Cotangents, gathered: Arrays, following: "_Backward | None"
    ) -> tuple[_Cotangents, Arrays]:
        """Computes the cotangents before the first layer, given those behind the last.

        Args:
            start: the cotangents behind the last layer.
            gathered: `last_shards`, gathered.
            following: the part that runs next.

        Returns (cotangents, `last_shards` of `following`, gathered).
        """
        if self.scan.when == "none":
            start, ahead = _gather_ahead(following, start)
            return self._pull_back_none(start, gathered), ahead
        pull_back = self._pull_back_pre if self.scan.pre else self._pull_back_post
        cotangents, gathered = pull_back(start, gathered)
        # What does not depend on the loop, XLA computes before it, beside all that stays gathered:
        # the next part's first gather, what it recomputes, a copy of the first layer's slice.
        cotangents, ahead = _gather_ahead(following, cotangents)
        after_loop, cotangents = self._reading_kept_after(cotangents)
        first = self.scan.first
        cotangents, gradients = after_loop._pull_back_layer(first, cotangents, gathered)
        return self._reduce_into_entries(cotangents, first, gradients), ahead

    def _reading_kept_after(self, cotangents: _Cotangents) -> "tuple[_Backward, _Cotangents]":
        """Makes what stays gathered of the loop's layers wait for these cotangents."""
        kept, carry = order_after(self.residuals.kept, cotangents.carry)
        waiting = replace(self, residuals=self.residuals._replace(kept=kept))
        return waiting, cotangents._replace(carry=carry)

    @property
    def last_shards(self) -> Arrays:
        """The last layer's shards, by path, unless the loop gathers them, or they stay gathered."""
        scan = self.scan
        if scan.when == "none" and scan.length > 1:
            return {}
        kept = self.residuals.last_kept
        missing = {path: read for path, read in self.dropped.items() if path not in kept}
        return scan.shards_of_layer(missing, scan.last, {})

    @property
    def dropped(self) -> Operands:
        """What the gathers read of the parameters that are gathered again."""
        comms = self.scan.comms
        return {path: read for path, read in self.operands.items() if not comms[path].kept}

    def _pull_back_none(self, cotangents: _Cotangents, gathered: Arrays) -> _Cotangents:
        """Runs all layers backward, each of which gathers and reduces its own.

        `gathered`: the parameters of a single layer: a loop of one trip orders nothing.
        """
        scan = self.scan
        if scan.length == 1:
            cotangents, gradients = self._pull_back_layer(scan.first, cotangents, gathered)
            return self._reduce_into_entries(cotangents, scan.first, gradients)

        def step(cotangents: _Cotangents, layer: Any) -> tuple[_Cotangents, None]:
            gathered = scan.gather_layer(self.dropped, layer)
            cotangents, gradients = self._pull_back_layer(layer, cotangents, gathered)
            return self._reduce_into_entries(cotangents, layer, gradients), None

        layers = jnp.arange(scan.last, scan.first - 1, -1)
        end, _ = lax.scan(step, cotangents, layers, unroll=scan.unroll)
        return end

    def _pull_back_pre(
        self, cotangents: _Cotangents, gathered: Arrays
    ) -> tuple[_Cotangents, Arrays]:
        """Runs all layers but the first backward; during i, gathers i-1 and reduces i+1.

        `gathered`: the last layer's parameters, but for those that stayed gathered.
        Returns the cotangents of the first layer's outputs, and its gathered parameters.
        """
        scan, operands = self.scan, self.dropped
        last = scan.last

        def step(carried: Any, layer: Any) -> Any:
            """Carries (cotangents, parameters, fetched shards, gradients, scattered).

            Parameters of this layer, shards of the next, gradients of the previous one;
            `scattered`: gradients of the layer before that, still to be summed over replicas.
            """
            cotangents, gathered, fetched, gradients, scattered = carried
            cotangents = self._sum_into_entries(cotangents, layer + 2, scattered)
            cotangents, scattered = self._reduce_or_scatter(cotangents, layer + 1, gradients)
            values = scan.shards_of_layer(operands, layer - 1, fetched)
            fetched = scan.fetch_layer(operands, layer - 2)
            if scan.sparse_core:
                previous = gather_all(scan.comms, values)
            else:
                # One collective runs at a time. Reduce first and then gather: this frees the
                # gradients before the next parameters are allocated.
                event = cotangents.gradients, scattered
                previous, (reduced, scattered) = gather_after(scan.comms, values, event)
                cotangents = cotangents._replace(gradients=reduced)
            cotangents, gradients = in_loop._pull_back_layer(layer, cotangents, gathered, split)
            return (cotangents, previous, fetched, gradients, scattered), None

        split, rows = None, rows_of_batch()
        if scan.annotated and rows:
            whole = converted_all(scan.comms, gathered | self.residuals.last_kept)
            split = self._split_pullbacks(cotangents.carry, rows, whole)
        values = scan.shards_of_layer(operands, last - 1, {})
        if scan.last < scan.stack - 1:
            # Not while a part behind this one still holds what it keeps.
            values, carry = order_after(values, cotangents.carry)
            cotangents = cotangents._replace(carry=carry)
        previous = gather_all(scan.comms, values)
        fetched = scan.fetch_layer(operands, last - 2)
        cotangents, gradients = self._pull_back_layer(
            last, cotangents, gathered, split, after_loop=True
        )
        # Zeros at first, which go into the entry of the last layer before its gradients do.
        _, abstract = jax.eval_shape(self._reduce_or_scatter, cotangents, last, gradients)
        scattered = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
        layers = jnp.arange(last - 1, scan.first, -1)
        in_loop = self
        if len(layers) == 1:  # a loop of one trip orders nothing
            in_loop, cotangents = self._reading_kept_after(cotangents)
        start = cotangents, previous, fetched, gradients, scattered
        end, _ = lax.scan(step, start, layers, unroll=scan.unroll)
        cotangents, gathered, _, gradients, scattered = end
        cotangents = self._sum_into_entries(cotangents, scan.first + 2, scattered)
        return self._reduce_into_entries(cotangents, scan.first + 1, gradients), gathered

    def _pull_back_post(
        self, cotangents: _Cotangents, gathered: Arrays
    ) -> tuple[_Cotangents, Arrays]:
        """Runs all layers but the first backward; after i, gathers i-1 and reduces i.

        `gathered`: as in `_pull_back_pre`. Returns the same as that.
        """
        scan, operands = self.scan, self.dropped
        last = scan.last

        def step(carried: Any, layer: Any) -> Any:
            """Carries (cotangents, the layer's parameters)."""
            cotangents, gathered = carried
            # Fetched while this layer computes: before the barrier, which is for the gather.
            fetched = scan.fetch_layer(operands, layer - 1)
            cotangents, gradients = self._pull_back_layer(layer, cotangents, gathered)
            values = scan.shards_of_layer(operands, layer - 1, fetched)
            previous, carry = gather_after(scan.comms, values, cotangents.carry)
            cotangents = self._reduce_into_entries(
                cotangents._replace(carry=carry), layer, gradients
            )
            return (cotangents, previous), None

        start = cotangents, gathered
        layers = jnp.arange(last, scan.first, -1)
        end, _ = lax.scan(step, start, layers, unroll=scan.unroll)
        return end

    def _split_pullbacks(self, carry: list[Any], rows: int, gathered: Arrays) -> _Splits:
        """Splits the pullbacks of a layer in the loop, and of the last one.

        The same gradients are partial sums in both. `carry`: the cotangents of what the last layer
        returns; `rows`: of the global microbatch; `gathered`: parameters of the last layer.
        """
        comms = self.scan.comms
        ys = jax.eval_shape(lambda: _slice_at(self.ys, 0))
        trained = {path for path, comm in comms.items() if comm.trained}
        axes = next(iter(comms.values())).axes

        def split(vjp: LayerVjp, residuals: list[Any]) -> SplitPullback:
            args = residuals, gathered, self.consts, [*carry, *ys]
            return SplitPullback.of(vjp, trained, axes, rows, *args)

        last = split(self.last_vjp, self.residuals.last)
        if self.vjp is self.last_vjp:
            return _Splits(last, last)
        in_loop = split(self.vjp, jax.eval_shape(lambda: _slice_at(self.residuals.loop, 0)))
        if in_loop.split != last.split:
            in_loop, last = (replace(each, split=[]) for each in (in_loop, last))
        return _Splits(in_loop, last)

    def _pull_back_layer(
        self,
        layer: Any,
        cotangents: _Cotangents,
        gathered: Arrays,
        split: _Splits | None = None,
        *,
        after_loop: bool = False,
    ) -> tuple[_Cotangents, Gradients]:
        """Computes (cotangents before a layer, unreduced gradients of its trained parameters).

        If the pullback is split, only gradients that are partial sums are returned unreduced: the
        others are already in the entries of the cotangents.

        Args:
            layer: its number.
            cotangents: those behind it.
            gathered: its parameters, but for those that stayed gathered.
            split: the pullbacks, in parts.
            after_loop: it is the last layer, which the forward pass of `pre` ran after its loop.

        """
        scan, n_consts = self.scan, len(self.consts)
        vjp, residuals, kept = self.last_vjp, self.residuals.last, self.residuals.last_kept
        if not after_loop:
            in_loop = self.residuals.loop, self.residuals.kept
            vjp, (residuals, kept) = self.vjp, _slice_at(in_loop, layer - scan.first)
        to_outputs = [*cotangents.carry, *scan.slice_of(self.ys, layer)]
        whole = converted_all(scan.comms, gathered | kept)
        args = residuals, whole, self.consts, to_outputs
        gradients: Gradients
        if split is None:
            unreduced, to_inputs = vjp.pull_back(*args)
            gradients = {path: g for path, g in unreduced.items() if scan.comms[path].trained}
        else:
            pullback = split.last if after_loop else split.in_loop
            gradients, others, to_inputs = pullback.pull_back(*args)
            cotangents = self._reduce_into_entries(cotangents, layer, others)
        to_consts, to_carry = to_inputs[:n_consts], to_inputs[n_consts : n_consts + scan.carried]
        updated = _Cotangents(
            to_carry,
            jax.tree.map(jnp.add, cotangents.consts, to_consts),
            scan.set_slice(cotangents.others, layer, to_inputs[n_consts + scan.carried :]),
            cotangents.gradients,
        )
        return updated, gradients

    def _reduce_into_entries(
        self, cotangents: _Cotangents, layer: Any, gradients: Gradients
    ) -> _Cotangents:
        """Reduces a layer's gradients, and puts them into their entries of the cotangents."""
        reduced = reduce_gradients(self.scan.comms, self.operands, gradients)
        return self._write_layer(cotangents, layer, reduced)

    def _reduce_or_scatter(
        self, cotangents: _Cotangents, layer: Any, gradients: Gradients
    ) -> tuple[_Cotangents, Gradients]:
        """Reduces a layer's gradients as `_reduce_into_entries` does, but some only in part.

        A gradient that needs two collectives is only scattered. Returns (cotangents, the gradients
        that are still to be summed over replicas). The second collective depends on the first: in
        one iteration no matmul could hide it, so it waits for the next.
        """
        comms = self.scan.comms
        in_two = [path for path in gradients if comms[path].reduced_in_two]
        at_once = {path: g for path, g in gradients.items() if path not in in_two}
        scattered = {path: scatter(comms[path], gradients[path]) for path in in_two}
        return self._reduce_into_entries(cotangents, layer, at_once), scattered

    def _sum_into_entries(
        self, cotangents: _Cotangents, layer: Any, scattered: Gradients
    ) -> _Cotangents:
        """Sums scattered gradients, of this or the last layer, over replicas into their entries."""
        comms, operands = self.scan.comms, self.operands
        summed = {
            path: reduce_over_replicas(comms[path], shard).astype(operands[path][-1].dtype)
            for path, shard in scattered.items()
        }
        return self._write_layer(cotangents, jnp.minimum(layer, self.scan.last), summed)

    def _write_layer(self, cotangents: _Cotangents, layer: Any, reduced: Arrays) -> _Cotangents:
        """Puts reduced gradients of a layer into their entries of the cotangents."""
        stacks = {path: cotangents.gradients[path] for path in reduced}
        filled = self.scan.set_slice(stacks, layer, reduced)
        return cotangents._replace(gradients=cotangents.gradients | filled)


def _gather_ahead(
    following: _Backward | None, cotangents: _Cotangents
) -> tuple[_Cotangents, Arrays]:
    """Gathers the last layer of the part that runs next, once these cotangents are there."""
    if following is None:
        return cotangents, {}
    shards = following.last_shards
    gathered, carry = gather_after(following.scan.comms, shards, cotangents.carry)
    return cotangents._replace(carry=carry), gathered


def _slice_at(tree: Any, index: Any) -> Any:
    """Takes each array of a tree at an index of its first dim."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)
