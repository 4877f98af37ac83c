"""A scan over layers that gathers each layer while the previous one computes.

The note in `rewrite` explains which operations move where.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

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
    gather_after,
    gather_all,
    only_shards,
    operand_cotangents,
    reduce_gradients,
    run_layer,
    without_float0,
    zero_cotangent,
)
from fsdp_jax.units.collectives import fetch, reduce_over_replicas, scatter
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
    """Residuals of the layers in the loop, stacked; of the last, which `pre` runs after it."""

    loop: list[Any]
    last: list[Any]


@dataclass(frozen=True)
class LayerScan:
    """A `lax.scan` over layers that gathers ahead, in forward and backward."""

    layer: Layer  # takes [*consts, *carry, *others of this layer], returns [*carry, *ys]
    comms: Mapping[str, ParamComm]  # of a layer's parameters, by path
    length: int  # number of layers
    carried: int  # number of carried values
    reverse: bool  # the last layer runs first
    unroll: int  # layers per iteration of the loop
    pre: bool  # see the note in `rewrite`
    keep_last: bool  # with `pre`, the last layer's gathered parameters, for the backward pass

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
        vjps: list[LayerVjp] = []  # of a layer in the loop, and of the last one

        @jax.custom_vjp
        def run(*inputs: Any) -> Any:
            return self._run_forward([], *inputs)[:2]

        def forward(operands: Any, consts: Any, carry: Any, others: Any) -> Any:
            results = self._run_forward(vjps, operands, consts, carry, others)
            carry, ys, residuals, gathered = results
            kept = gathered if self.keep_last else {}
            return (carry, ys), (operands, consts, others, residuals, kept)

        def backward(saved: Any, cotangents: Any) -> Any:
            carry, ys = map(without_float0, cotangents)
            in_loop, last = vjps
            return _Backward(self, in_loop, last, ys, *saved).run(carry)

        run.defvjp(forward, backward)
        return run(operands, consts, carry, others)

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
        return self.length - 1 - layer if self.reverse else layer

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
        return {path: shards[path] for path in stacks}

    def fetch_layer(self, operands: Operands, layer: Any) -> Arrays:
        """Brings a layer's shards in host memory to the device, by path.

        This happens one iteration before they are gathered: in the same iteration, fetch and gather
        would be a chain, and only part of it could be hidden. A `layer` beyond the first or last is
        clamped.
        """
        stacks = only_shards(operands)
        on_host = {path: stack for path, stack in stacks.items() if self.comms[path].on_host}
        shards = self.slice_of(on_host, jnp.clip(layer, 0, self.length - 1))
        return {path: fetch(self.comms[path], shard) for path, shard in shards.items()}

    def _run_forward(
        self,
        vjps: list[LayerVjp],
        operands: Operands,
        consts: list[Any],
        carry: list[Any],
        others: list[Any],
    ) -> tuple[list[Any], list[Any], _Residuals, Arrays]:
        """Runs the layers. Returns (carry, ys, residuals, with `pre` the last layer's parameters).

        Sets `vjps` to those of a layer in the loop and of the last one, which are the same unless
        jax traced it again. The residuals of the loop are stacked in the order in which the layers
        run, also in a reversed scan.
        """

        # Traced once for the loop and for the last layer, unless jax tells their inputs apart.
        @partial(jax.jit, inline=True)
        def trace(gathered: Arrays, consts: list[Any], inputs: list[Any]) -> Any:
            outputs, vjp = run_layer(self.layer, gathered, consts, inputs)
            vjps.append(vjp)
            return outputs, vjp.residuals

        def run(
            layer: Any, carry: list[Any], gathered: Arrays
        ) -> tuple[list[Any], list[Any], list[Any]]:
            inputs = [*carry, *self.slice_of(others, layer)]
            outputs, residuals = trace(gathered, consts, inputs)
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
            return (carry, following, fetched), (ys, residuals)

        # With `pre` the loop has all layers but the last, and each gathers for the next.
        start: Any = carry, {}, {}
        if self.pre:
            start = carry, self.gather_layer(operands, 0), self.fetch_layer(operands, 1)
        layers = jnp.arange(self.length - self.pre)
        (carry, gathered, _), (ys, loop) = lax.scan(step, start, layers, unroll=self.unroll)
        last: list[Any] = []
        of_loop = vjps[-1]
        if self.pre:
            # The last layer has no next layer to gather: it runs after the loop. Its parameters are
            # kept for the backward pass, which begins with it.
            carry, last_ys, last = run(self.length - 1, carry, gathered)
            ys = jax.tree.map(lambda stack, last: jnp.concatenate([stack, last[None]]), ys, last_ys)
        ys = [jnp.flip(y, 0) for y in ys] if self.reverse else ys
        vjps[:] = of_loop, vjps[-1]
        return carry, ys, _Residuals(loop, last), gathered


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
    last_gathered: Arrays

    def run(self, carry: list[Any]) -> Any:
        """Computes the cotangents of the arguments of `LayerScan.run`, given the carry's."""
        stacks = {
            path: jnp.zeros_like(read[-1])
            for path, read in self.operands.items()
            if self.scan.comms[path].trained
        }
        consts, others = (list(map(zero_cotangent, x)) for x in (self.consts, self.others))
        start = _Cotangents(carry, consts, others, stacks)
        cotangents, gathered = (
            self._pull_back_pre(start) if self.scan.pre else self._pull_back_post(start)
        )
        cotangents, gradients = self._pull_back_layer(0, cotangents, gathered)
        end = self._reduce_into_entries(cotangents, 0, gradients)
        return operand_cotangents(self.operands, end.gradients), end.consts, end.carry, end.others

    def _pull_back_pre(self, cotangents: _Cotangents) -> tuple[_Cotangents, Arrays]:
        """Runs all layers but the first backward; during i, gathers i-1 and reduces i+1.

        Returns the cotangents of the first layer's outputs, and its gathered parameters.
        """
        scan, operands = self.scan, self.operands
        last = scan.length - 1

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
            cotangents, gradients = self._pull_back_layer(layer, cotangents, gathered, split)
            return (cotangents, previous, fetched, gradients, scattered), None

        gathered = self.last_gathered or scan.gather_layer(operands, last)
        split, rows = None, rows_of_batch()
        if scan.annotated and rows:
            split = self._split_pullbacks(cotangents.carry, rows, gathered)
        previous = scan.gather_layer(operands, last - 1)
        fetched = scan.fetch_layer(operands, last - 2)
        cotangents, gradients = self._pull_back_layer(
            last, cotangents, gathered, split, after_loop=True
        )
        # Zeros at first, which go into the entry of the last layer before its gradients do.
        _, abstract = jax.eval_shape(self._reduce_or_scatter, cotangents, last, gradients)
        scattered = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
        start = cotangents, previous, fetched, gradients, scattered
        layers = jnp.arange(last - 1, 0, -1)
        end, _ = lax.scan(step, start, layers, unroll=scan.unroll)
        cotangents, gathered, _, gradients, scattered = end
        cotangents = self._sum_into_entries(cotangents, 2, scattered)
        return self._reduce_into_entries(cotangents, 1, gradients), gathered

    def _pull_back_post(self, cotangents: _Cotangents) -> tuple[_Cotangents, Arrays]:
        """Runs all layers but the first backward; after i, gathers i-1 and reduces i.

        Returns the same as `_pull_back_pre`.
        """
        scan, operands = self.scan, self.operands
        last = scan.length - 1

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

        start = cotangents, scan.gather_layer(self.operands, last)
        end, _ = lax.scan(step, start, jnp.arange(last, 0, -1), unroll=scan.unroll)
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
            gathered: its parameters.
            split: the pullbacks, in parts.
            after_loop: it is the last layer, which the forward pass of `pre` ran after its loop.

        """
        scan, n_consts = self.scan, len(self.consts)
        vjp, residuals = self.last_vjp, self.residuals.last
        if not after_loop:
            vjp, residuals = self.vjp, _slice_at(self.residuals.loop, layer)
        to_outputs = [*cotangents.carry, *scan.slice_of(self.ys, layer)]
        args = residuals, gathered, self.consts, to_outputs
        gradients: Gradients
        if split is None:
            unreduced, to_inputs = vjp.pull_back(*args)
            gradients = {path: g for path, g in unreduced.items() if scan.comms[path].trained}
        else:
            pullback = split.last if after_loop else split.in_loop
            gradients, whole, to_inputs = pullback.pull_back(*args)
            cotangents = self._reduce_into_entries(cotangents, layer, whole)
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
        return self._write_layer(cotangents, jnp.minimum(layer, self.scan.length - 1), summed)

    def _write_layer(self, cotangents: _Cotangents, layer: Any, reduced: Arrays) -> _Cotangents:
        """Puts reduced gradients of a layer into their entries of the cotangents."""
        stacks = {path: cotangents.gradients[path] for path in reduced}
        filled = self.scan.set_slice(stacks, layer, reduced)
        return cotangents._replace(gradients=cotangents.gradients | filled)


def _slice_at(tree: Any, index: Any) -> Any:
    """Takes each array of a tree at an index of its first dim."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)
