"""Gradients that wait for their reduction, where XLA inserts the collectives.

[Note: partial sums] With explicit collectives an unreduced gradient is an array of one device. With
annotations an array has one value for all devices. So before a loop carries a gradient to its next
iteration, XLA reduces it: at the end of the iteration, with no compute left to hide the reduction.

So a gradient is split by rows of the batch. A weight's gradient is a matmul that sums over the
rows, a bias's a sum over them. Taken over the rows of one device at a time, they make one partial
sum for each device. A loop can carry the stack of these, sharded along its first dim, and each
device holds and computes the same as before. The sum over the stack is the gradient, and XLA
reduces it as it would have reduced the matmul.

A gradient is split only if such sums, rearranged or added, are all that it is made of. Any other is
reduced in the iteration that computes it. Of the dims that are summed over, the batch is taken to
be the one with as many elements as the batch has rows; otherwise the first, if it is a multiple
(rows times positions). A wrong guess changes no result: XLA reduces the whole stack in that
iteration.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax.prefetch.vjp import Arrays, LayerVjp
from fsdp_jax.program.equations import (
    bind,
    dot_dimensions,
    inputs_of,
    named_scope_of,
    reads,
    shape_of,
    summed_dims,
    values_of,
    without_literals,
)
from fsdp_jax.program.evaluate import evaluate_inlined, evaluate_unchanged, reevaluated
from fsdp_jax.program.primitives import DOT, SUM, primitive_of
from fsdp_jax.sharding.explicit_style import constrain
from fsdp_jax.sharding.mesh import MeshAxes
from fsdp_jax.units.collectives import PartialSums


@dataclass(frozen=True)
class SplitPullback:
    """The pullback of a layer, some of whose gradients can be partial sums; see the note.

    Attributes:
        jaxpr: that of `LayerVjp.pull_back`, whose arguments are its inputs.
        consts: the values of its constants.
        gradients: path -> variable, for the trained parameters.
        to_inputs: variables of the cotangents of constants and inputs; None for those without one.
        axes: of the mesh.
        rows: of the global microbatch.
        split: paths of the gradients that become partial sums.

    """

    jaxpr: jex.Jaxpr
    consts: Sequence[Any]
    gradients: Mapping[str, Any]
    to_inputs: Sequence[Any]
    axes: MeshAxes
    rows: int
    split: Sequence[str]

    @classmethod
    def of(
        cls, vjp: LayerVjp, trained: Set[str], axes: MeshAxes, rows: int, *args: Any
    ) -> "SplitPullback":
        """Traces the pullback of a layer.

        `trained`: paths of the parameters that have a gradient; `rows`: of the global microbatch;
        `args`: the arguments of `vjp.pull_back`, or their shapes.
        """
        inlined = reevaluated(vjp.pull_back, evaluate_inlined)
        closed, shapes = jax.make_jaxpr(inlined, return_shape=True)(*args)
        results = jax.tree.unflatten(jax.tree.structure(shapes), closed.jaxpr.outvars)
        gradients = {path: v for path, v in results[0].items() if path in trained}
        # Split all gradients that can be; a literal is a gradient that is always zero.
        variables = [path for path, v in gradients.items() if without_literals([v])]
        whole = cls(closed.jaxpr, closed.consts, gradients, results[1], axes, rows, variables)
        found = whole._partial_sums
        return replace(whole, split=[path for path in variables if gradients[path] in found])

    def pull_back(self, *args: Any) -> tuple[dict[str, PartialSums], Arrays, list[Any]]:
        """Computes the gradients of a layer, given the arguments of `LayerVjp.pull_back`.

        Returns:
            (partial sums by path; the other gradients by path; cotangents of constants and inputs).

        """
        inputs = inputs_of(self.jaxpr)
        env = dict(zip(inputs, [*self.consts, *jax.tree.leaves(args)], strict=True))
        partial_sums = self._partial_sums
        # First evaluate the equations that are not split: they read no partial sums.
        evaluate_unchanged(self.jaxpr, self._without(partial_sums), env)
        # Then the sums by rows, and for each device the equations that rearrange or add their
        # results.
        by_rows = [eqn for eqn in self.jaxpr.eqns if not partial_sums.isdisjoint(eqn.outvars)]
        sums = [eqn for eqn in by_rows if partial_sums.isdisjoint(reads(eqn))]
        rest = [eqn for eqn in by_rows if not partial_sums.isdisjoint(reads(eqn))]
        variables = [self.gradients[path] for path in self.split]

        def of_one_device(parts: list[Any]) -> list[Any]:
            results = {eqn.outvars[0]: x for eqn, x in zip(sums, parts, strict=True)}
            evaluate_unchanged(self.jaxpr, rest, results)
            return values_of(results, variables)

        stacks = [self._sum_by_rows(eqn, values_of(env, eqn.invars)) for eqn in sums]
        stacks = jax.vmap(of_one_device, axis_size=self.axes.batch_shards)(stacks)
        at_once = [path for path in self.gradients if path not in self.split]
        whole = values_of(env, [self.gradients[path] for path in at_once])
        to_inputs = [None if v is None else values_of(env, [v])[0] for v in self.to_inputs]
        sizes = [self.axes.mesh.shape[axis] for axis in self.axes.batch]
        parts = {
            path: PartialSums(stack.reshape(*sizes, *stack.shape[1:]))
            for path, stack in zip(self.split, stacks, strict=True)
        }
        return parts, dict(zip(at_once, whole, strict=True)), to_inputs

    @cached_property
    def _partial_sums(self) -> set[Any]:
        """Finds the variables that are partial sums, if only the gradients in `split` may be.

        Only equations that make other partial sums may read them.
        """
        whole = [v for path, v in self.gradients.items() if path not in self.split]
        whole += [v for v in self.to_inputs if v is not None]
        read_whole = set(without_literals(whole))
        while True:
            found = self._made_of_sums(read_whole)
            more = {v for eqn in self._without(found) for v in reads(eqn)} & found
            if not more:
                return found
            read_whole |= more

    def _made_of_sums(self, read_whole: Set[Any]) -> set[Any]:
        """Finds the variables made of sums over rows, or by linear operations on such variables."""
        found: set[Any] = set()
        for eqn in self.jaxpr.eqns:
            operands = reads(eqn)
            if found.isdisjoint(operands):
                is_partial = bool(self._dims_of_rows(eqn))
            else:
                # A literal is not a partial sum: each device would add it once.
                all_found = found.issuperset(operands) and len(operands) == len(eqn.invars)
                is_partial = primitive_of(eqn).linear and all_found
            if is_partial and read_whole.isdisjoint(eqn.outvars):
                found.update(eqn.outvars)
        return found

    def _without(self, partial_sums: Set[Any]) -> list[jex.JaxprEqn]:
        """Lists the equations that make none of the partial sums."""
        return [eqn for eqn in self.jaxpr.eqns if partial_sums.isdisjoint(eqn.outvars)]

    def _dims_of_rows(self, eqn: jex.JaxprEqn) -> tuple[int, ...]:
        """Finds the dim of each operand of a sum that holds the batch's rows; () for none."""
        summed: list[tuple[int, ...]] = []  # the dims of the operands that are summed together
        if primitive_of(eqn) is DOT:
            # With batch dims it is one matmul for each of a model's experts, which mix the rows.
            contracted, batched = dot_dimensions(eqn)
            summed = [] if batched[0] else sorted(zip(*contracted, strict=True))
        elif primitive_of(eqn) is SUM:
            summed = sorted((dim,) for dim in summed_dims(eqn))
        sizes = [shape_of(eqn.invars[0])[dims[0]] for dims in summed]
        if self.rows in sizes:
            return summed[sizes.index(self.rows)]
        return summed[0] if sizes and sizes[0] % self.rows == 0 else ()

    def _sum_by_rows(self, eqn: jex.JaxprEqn, operands: list[Any]) -> jax.Array:
        """Computes the partial sums of an equation: [batch shards, *shape of its result]."""
        shards, dims = self.axes.batch_shards, self._dims_of_rows(eqn)
        # Give the rows of each device a separate dim.
        operands = [
            x.reshape(*x.shape[:dim], shards, x.shape[dim] // shards, *x.shape[dim + 1 :])
            for x, dim in zip(operands, dims, strict=True)
        ]
        with named_scope_of(eqn):
            [stack] = jax.vmap(partial(bind, eqn), in_axes=dims)(*operands)
        # The model's own axes may shard the other dims.
        others = [PartitionSpec.UNCONSTRAINED] * (stack.ndim - 1)
        spec = PartitionSpec(self.axes.batch, *others)
        return constrain(stack, NamedSharding(self.axes.mesh, spec))
