"""Follows labels through traced programs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex

from fsdp_jax.program.equations import (
    bodies,
    body_of,
    branches_of,
    notes_of,
    split_scan,
    while_parts,
)
from fsdp_jax.program.primitives import COND, SCAN, WHILE, primitive_of

Labels = frozenset[str]
NONE: Labels = frozenset()


class DataFlow:
    """Follows labels through a program: a value has those of all that it is computed from.

    What a branch or a loop computes also has the labels of its condition. Subclasses say which
    operations are different.
    """

    def outputs(self, jaxpr: jex.Jaxpr, inputs: Sequence[Labels]) -> list[Labels]:
        """Computes the labels of each output, given those of each argument."""
        env: dict[Any, Labels] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atoms: Sequence[Any]) -> list[Labels]:
            return [labels or NONE for labels in notes_of(env, atoms)]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.results(eqn, read(eqn.invars)), strict=True))
        return read(jaxpr.outvars)

    def results(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels]:
        """Computes the labels of each result of an equation, given those of each operand.

        An operation that is not known here has those of all operands.
        """
        inside = self.results_inside(eqn, operands)
        return [NONE.union(*operands) for _ in eqn.outvars] if inside is None else inside

    def results_inside(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels] | None:
        """Finds the labels of each result of an equation that runs a program; None for others."""
        control_flow = {COND: self._cond, WHILE: self._while, SCAN: self._scan}
        follow = control_flow.get(primitive_of(eqn))
        if follow is not None:
            return follow(eqn, operands)
        inside = bodies(eqn)
        if len(inside) == 1 and len(inside[0].invars) == len(operands):  # jit, checkpoint, ...
            return self.outputs(inside[0], operands)
        return None

    def check_condition(
        self, eqn: jex.JaxprEqn, condition: Labels, programs: Sequence[jex.Jaxpr], kind: str
    ) -> None:
        """Checks the labels of a condition, by which `programs` run; `kind`: "branch" or "loop"."""

    def _cond(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels]:
        """Computes the labels of each result of a `cond`: of any branch, and of the condition."""
        condition, operands = operands[0], operands[1:]
        branches = [branch.jaxpr for branch in branches_of(eqn)]
        self.check_condition(eqn, condition, branches, "branch")
        of_branches = [self.outputs(branch, operands) for branch in branches]
        return [condition.union(*each) for each in zip(*of_branches, strict=True)]

    def _while(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels]:
        """Finds the labels of each carry of a `while` at its end, also those of its condition."""
        (cond, cond_consts), (body, body_consts), carry = while_parts(eqn, operands)

        def iterate(carry: list[Labels]) -> list[Labels]:
            (condition,) = self.outputs(cond, [*cond_consts, *carry])
            self.check_condition(eqn, condition, [cond, body], "loop")
            return [labels | condition for labels in self.outputs(body, [*body_consts, *carry])]

        return _fixed_point(iterate, carry)

    def _scan(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels]:
        """Computes the labels of each carry of a `scan` at its end, and of each stacked output."""
        body, _ = body_of(eqn)
        consts, carry, xs = split_scan(eqn, operands)
        return _fixed_point(lambda carry: self.outputs(body, [*consts, *carry, *xs]), carry)


def _fixed_point(
    iterate: Callable[[list[Labels]], list[Labels]], carry: list[Labels]
) -> list[Labels]:
    """Computes the labels of a loop's carry after any number of iterations, then its other results.

    `iterate`: the labels of the carry before an iteration -> those of its results, the carry first.
    At most one iteration for each label and value changes anything.
    """
    while True:
        results = iterate(carry)
        after = [a | b for a, b in zip(carry, results, strict=False)]
        if after == carry:
            return [*carry, *results[len(carry) :]]
        carry = after
