"""The traced update of an optimizer: what each result depends on, and whether layers are apart.

`streaming` updates parts of the state by it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.extend.core as jex

from fsdp_jax.program.equations import (
    equations_for,
    is_transparent,
    keeps_rows,
    reads,
    shape_of,
    values_of,
    with_rows,
)
from fsdp_jax.program.evaluate import evaluate_inside, evaluate_replaced, evaluate_unchanged
from fsdp_jax.program.primitives import CHECKPOINT, primitive_of
from fsdp_jax.sharding.layout import Leaf
from fsdp_jax.step.finite import keep_finite
from fsdp_jax.tree import PyTree, suffixes

Arrays = dict[int, jax.Array]
"""Arrays by their number in the state's tree; gradients by that of their parameter."""
Update = Callable[[PyTree, PyTree, PyTree], PyTree]
"""(state, gradients, scalars) -> new state; the state begins with what gradients are of."""
# Elements up to which a value that depends on nothing in host memory is computed once, before.
SCALAR = 1
# Elements up to which state in device memory that belongs to no parameter may be read by all.
_SMALL = 256


class TracedUpdate:
    """The traced update, and which arrays each of its values depends on.

    Attributes:
        leaves: how each array of the state is stored.
        state: variables of the state, by number.
        gradients: variables of the gradients; those of the first parameters.
        outputs: variables of the new state, by number.

    """

    def __init__(
        self, update: Update, state: PyTree, gradients: PyTree, scalars: PyTree, leaves: list[Leaf]
    ) -> None:
        # What is in host memory is updated in device memory, and without padding.
        stored = zip(leaves, jax.tree.leaves(state), strict=True)
        own = [jax.ShapeDtypeStruct(leaf.shape, x.dtype) for leaf, x in stored]
        abstract = jax.tree.unflatten(jax.tree.structure(state), own)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), gradients)
        self.closed, _ = trace_without_calls(update, abstract, shapes, scalars)
        self.jaxpr = self.closed.jaxpr
        n_gradients = len(jax.tree.leaves(gradients))
        self.leaves, self.outputs = leaves, self.jaxpr.outvars
        self.state = self.jaxpr.invars[: len(leaves)]
        self.gradients = self.jaxpr.invars[len(leaves) : len(leaves) + n_gradients]
        self.scalars = self.jaxpr.invars[len(leaves) + n_gradients :]

    @cached_property
    def depends_on(self) -> dict[Any, frozenset[int]]:
        """Variable -> numbers of the state that it depends on, leaving out what is shared."""
        found = {
            variable: frozenset([number])
            for number, variable in enumerate(self.state)
            if not self._is_shared(self.leaves[number])
        }
        for eqn in self.jaxpr.eqns:
            sources = [found[v] for v in reads(eqn) if v in found]
            if sources:
                found |= dict.fromkeys(eqn.outvars, frozenset().union(*sources))
        return found

    def _is_shared(self, leaf: Leaf) -> bool:
        """Tells whether all updates may read an array as it was before the step.

        Counts, random keys and the coefficients of Muon: small arrays of no parameter.
        """
        of_none = leaf.part == "optimizer" and self._param_paths.isdisjoint(suffixes(leaf.path))
        return not leaf.on_host and prod(leaf.shape) <= (_SMALL if of_none else SCALAR)

    @cached_property
    def _param_paths(self) -> set[str]:
        """Paths of the parameters among the leaves."""
        return {leaf.path for leaf in self.leaves if leaf.part == "params"}

    @cached_property
    def scalars_before(self) -> list[Any]:
        """Scalar variables that depend on no array of the state: they are computed once, before."""
        outputs = [v for eqn in self.jaxpr.eqns for v in eqn.outvars]
        return [
            v
            for v in outputs
            if v not in self.depends_on and is_scalar(v) and not isinstance(v, jex.DropVar)
        ]

    def compute_before(self, state: Arrays, gradients: Arrays, scalars: Any) -> dict[Any, Any]:
        """Computes {variable: value} of all that needs no array of the state.

        Constants, the scalars that are given, and `scalars_before`.
        """
        env = dict(zip(self.jaxpr.constvars, self.closed.consts, strict=True))
        env |= zip(self.scalars, jax.tree.leaves(scalars), strict=True)
        env |= {v: state[n] for n, v in enumerate(self.state) if v not in self.depends_on}
        known = env | {v: gradients[n] for n, v in enumerate(self.gradients)}
        env |= {v: known[v] for v in self.gradients if is_scalar(v)}
        evaluate_unchanged(
            self.jaxpr, equations_for(self.jaxpr, self.scalars_before, known.__contains__), known
        )
        return env | {v: known[v] for v in self.scalars_before}

    def new_arrays(
        self,
        numbers: Sequence[int],
        env: Mapping[Any, Any],
        state: Arrays,
        gradients: Arrays,
        rows: tuple[int, int] | None = None,
    ) -> tuple[Arrays, jax.Array]:
        """Computes (updated arrays of these numbers, whether none of their numbers is kept, bool).

        What would not stay finite is kept. `env` is what `compute_before` returned.

        `rows`: (n, k) where all arrays have k rows in place of the n that were traced, and
        `is_row_wise` is true of them.
        """
        known = dict(env)
        known |= {self.state[n]: x for n, x in state.items()}
        known |= {self.gradients[n]: x for n, x in gradients.items()}

        def evaluate(numbers: Sequence[int]) -> list[Any]:
            variables = [self.outputs[number] for number in numbers]
            eqns = equations_for(self.jaxpr, variables, known.__contains__)
            if rows is not None:
                eqns = [with_rows(eqn, *rows) for eqn in eqns]
            evaluate_unchanged(self.jaxpr, eqns, known)
            return values_of(known, variables)

        # First the parameters and their moments, then copies of the parameters that are kept.
        own = [number for number in numbers if self.leaves[number].part != "other"]
        copies = [number for number in numbers if self.leaves[number].part == "other"]
        old, leaves = [state[number] for number in own], [self.leaves[number] for number in own]
        kept, finite = keep_finite(old, evaluate(own), leaves)
        new = dict(zip(own, kept, strict=True))
        known |= {v: new[n] for n in own if not isinstance(v := self.outputs[n], jex.Literal)}
        return new | dict(zip(copies, evaluate(copies), strict=True)), finite

    def is_row_wise(self, numbers: Sequence[int], n: int) -> bool:
        """Tells whether row i of each new array depends on row i of these arrays alone.

        Args:
            numbers: of arrays [n, ...] of the state.
            n: the number of rows, at least 2.
        """
        rows = {self.state[number] for number in numbers}
        rows |= {v for number, v in enumerate(self.gradients) if number in numbers}
        uniform: set[Any] = set()  # large arrays without rows, made of scalars
        outputs = [self.outputs[number] for number in numbers]
        known = {*rows, *self.scalars_before, *self.jaxpr.constvars, *self.scalars}

        def is_understood(v: Any) -> bool:
            # Constants may be literals of any size.
            is_literal = isinstance(v, jex.Literal)
            return is_scalar(v) or (not is_literal and (v in rows or v in uniform))

        for eqn in equations_for(self.jaxpr, outputs, known.__contains__):
            by_row = [v for v in reads(eqn) if v in rows]
            if not all(map(is_understood, eqn.invars)):
                return False
            if not by_row and all(map(is_scalar, eqn.outvars)):
                continue
            has_rows = all(shape_of(v)[:1] == (n,) for v in eqn.outvars)
            if not keeps_rows(eqn, by_row) or (by_row and not has_rows):
                return False
            (rows if has_rows else uniform).update(eqn.outvars)
        return all(not isinstance(v, jex.Literal) and v in rows for v in outputs)


def is_scalar(variable: Any) -> bool:
    """Tells whether a variable of a jaxpr has at most one element."""
    return prod(shape_of(variable)) <= SCALAR


def trace_without_calls(fn: Callable[..., Any], *args: Any) -> tuple[jex.ClosedJaxpr, Any]:
    """Traces `fn(*args)` with the equations of its inner `jit`s among its own.

    As one equation, such as optax's bias correction of the whole tree, each result of a call would
    count as depending on all that the call reads. One number made of numbers may stay a call.
    Returns the jaxpr, and the shapes of the results.
    """

    def is_call(eqn: jex.JaxprEqn, _: object = None) -> bool:
        if not is_transparent(eqn) or primitive_of(eqn) is CHECKPOINT:
            return False
        return len(eqn.outvars) > 1 or not all(map(is_scalar, [*reads(eqn), *eqn.outvars]))

    def call(eqn: jex.JaxprEqn, args: Sequence[Any]) -> list[Any]:
        return evaluate_inside(eqn, args, evaluate)

    def evaluate(jaxpr: jex.Jaxpr, args: Sequence[Any]) -> list[Any]:
        return evaluate_replaced(jaxpr, args, is_call, call)

    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    if any(map(is_call, closed.jaxpr.eqns)):
        again = jax.make_jaxpr(lambda *xs: evaluate(closed.jaxpr, [*closed.consts, *xs]))
        return again(*jax.tree.leaves(args)), shapes
    return closed, shapes
