"""Finds the values of a traced `shard_map` program that differ between devices.

A value *varies* along a mesh axis if devices along it may hold different values (JAX calls these
axes `vma`). Two things go wrong without a message where a value varies: a branch or loop that it
decides, with a collective inside (some devices wait for others that never come), and model state
that is declared the same on all devices. Both are refused.

Why not `shard_map(check_vma=True)`: it refuses models whose own scans start from `jnp.zeros`, and
it does not look at branches. An operation that this module does not know is taken to vary wherever
any of its operands does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax.extend.core as jex

from fsdp_jax.errors import message
from fsdp_jax.jaxprs import all_eqns, scan_arguments
from fsdp_jax.sharding.mesh import axes_of

Axes = frozenset[str]
NONE: Axes = frozenset()

# Collectives whose result is the same along their axes.
SAME_AFTER = {"all_gather", "psum", "psum_invariant", "pmax", "pmin", "all_gather_invariant"}
# Collectives whose result varies along their axes.
DIFFERENT_AFTER = {
    *("reduce_scatter", "psum_scatter", "ppermute", "all_to_all", "ragged_all_to_all"),
    "axis_index",
}
# Operations on mutable arrays.
MUTATING = {"new_ref", "ref", "get", "swap", "addupdate", "freeze"}


def check_local_program(program: jex.Jaxpr, state: Sequence[str]) -> None:
    """Checks what all devices must agree on in the `shard_map` of a step with local batches.

    Args:
        program: of the step, with one `shard_map` in it whose last outputs are the model's state.
        state: paths of the model's state.

    Raises:
        ValueError: the new state is computed from a device's own rows, or devices may disagree on
            what to run.

    """
    # The first one: kernels may have others inside, and an optimizer after it.
    eqn = next(eqn for eqn in all_eqns(program) if eqn.primitive.name == "shard_map")
    specs = eqn.params["in_specs"]
    inputs = [frozenset(axis for entry in spec for axis in axes_of(entry)) for spec in specs]
    # Along an axis of one device nothing varies; the step names such axes too.
    single = frozenset(axis for axis, size in eqn.params["mesh"].shape.items() if size == 1)
    variation = _VaryingAxes(single)
    outputs = variation.outputs(eqn.params["jaxpr"], [axes - single for axes in inputs])
    for path, axes in zip(state, outputs[len(outputs) - len(state) :], strict=True):
        if axes:
            what = "the model's state is computed from the batch, "
            what += "of which a device sees its own rows alone"
            expected = "state that is the same on every device"
            got = f"a value that differs along {' and '.join(sorted(axes))}"
            fix = "leave local_batch out: without it, "
            fix += "batch statistics are those of the global batch"
            raise ValueError(message(what, where=path, expected=expected, got=got, fix=fix))


@dataclass(frozen=True)
class _VaryingAxes:
    """Finds the mesh axes along which the values of a program vary.

    `single`: axes of one device, along which nothing does.
    """

    single: Axes

    def outputs(self, jaxpr: jex.Jaxpr, varying: Sequence[Axes]) -> list[Axes]:
        """Returns the axes along which each output varies, given those of each argument.

        Raises:
            ValueError: a branch or loop that varies has a collective inside.

        """
        env: dict[Any, Axes] = dict.fromkeys(jaxpr.constvars, NONE)
        env |= zip(jaxpr.invars, varying, strict=True)

        def read(variable: Any) -> Axes:
            return NONE if isinstance(variable, jex.Literal) else env[variable]

        for eqn in jaxpr.eqns:
            outputs = self._eqn_outputs(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _eqn_outputs(self, eqn: jex.JaxprEqn, varying: list[Axes]) -> list[Axes]:
        """Returns the axes along which each result of an equation varies.

        `varying`: those of each operand. Raises ValueError for mutable arrays.
        """
        name = eqn.primitive.name
        any_operand = NONE.union(*varying)
        if name in MUTATING:
            what = "a mutable array (jax.new_ref) cannot be followed from device to device"
            where = str(eqn.source_info.name_stack) or name
            raise ValueError(message(what, where=where, fix="leave local_batch out"))
        if name in SAME_AFTER and eqn.params.get("axis_index_groups") is None:
            return [axes - self._collective_axes(eqn) for axes in varying] or [NONE]
        if name in SAME_AFTER | DIFFERENT_AFTER:
            return [any_operand | self._collective_axes(eqn) for _ in eqn.outvars]
        control_flow = {
            "cond": self._cond_outputs,
            "while": self._while_outputs,
            "scan": self._scan_outputs,
        }
        if name in control_flow:
            return control_flow[name](eqn, varying)
        inner = list(jex.jaxprs_in_params(eqn.params))
        if len(inner) == 1 and len(inner[0].invars) == len(varying):  # jit, checkpoint, other calls
            return self.outputs(inner[0], varying)
        return [any_operand for _ in eqn.outvars]

    def _cond_outputs(self, eqn: jex.JaxprEqn, varying: list[Axes]) -> list[Axes]:
        """Returns the axes of each result of a `cond`: of any branch, and of the condition."""
        condition, operands = varying[0], varying[1:]
        branches = [branch.jaxpr for branch in eqn.params["branches"]]
        self._refuse_collectives(eqn, condition, branches, "branch")
        of_branches = [self.outputs(branch, operands) for branch in branches]
        return [condition.union(*each) for each in zip(*of_branches, strict=True)]

    def _while_outputs(self, eqn: jex.JaxprEqn, varying: list[Axes]) -> list[Axes]:
        """Returns the axes of each carry of a `while` at its end, also those of its condition."""
        cond, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        body_start = eqn.params["cond_nconsts"]
        carry_start = body_start + eqn.params["body_nconsts"]
        cond_consts, body_consts = varying[:body_start], varying[body_start:carry_start]

        def iterate(carry: list[Axes]) -> list[Axes]:
            (condition,) = self.outputs(cond, [*cond_consts, *carry])
            self._refuse_collectives(eqn, condition, [cond, body], "loop")
            return [axes | condition for axes in self.outputs(body, [*body_consts, *carry])]

        return _fixed_point(iterate, varying[carry_start:])

    def _scan_outputs(self, eqn: jex.JaxprEqn, varying: list[Axes]) -> list[Axes]:
        """Returns the axes of each carry of a `scan` at its end, and of each stacked output."""
        consts, carry, xs = scan_arguments(eqn.params, varying)

        def iterate(carry: list[Axes]) -> list[Axes]:
            return self.outputs(eqn.params["jaxpr"].jaxpr, [*consts, *carry, *xs])

        carry = _fixed_point(lambda carry: iterate(carry)[: len(carry)], carry)
        return [*carry, *iterate(carry)[len(carry) :]]

    def _collective_axes(self, eqn: jex.JaxprEqn) -> Axes:
        """Returns the mesh axes of a collective; none for any other operation."""
        if eqn.primitive.name not in SAME_AFTER | DIFFERENT_AFTER:
            return NONE
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        return frozenset(axis for axis in axes_of(axes) if isinstance(axis, str)) - self.single

    def _refuse_collectives(
        self, eqn: jex.JaxprEqn, condition: Axes, programs: Sequence[jex.Jaxpr], kind: str
    ) -> None:
        """Raises ValueError for a collective along an axis on which devices may not all run it.

        `condition`: the axes along which the choice of a branch, or the end of a loop, varies;
        `programs`: what it decides on; `kind`: "branch" or "loop".
        """
        for collective in chain.from_iterable(map(all_eqns, programs)):
            name = collective.primitive.name
            if name != "axis_index" and self._collective_axes(collective) & condition:
                what = f"devices may take this {kind} differently, and it has a collective inside"
                where = str(collective.source_info.name_stack)
                where = where or f"{name} in a `{eqn.primitive.name}`"
                expected = "a condition that is the same on every device: not computed from the "
                expected += "batch, nor from random numbers, which are each device's own"
                fix = "leave local_batch out; or compute both sides and select with jnp.where"
                raise ValueError(message(what, where=where, expected=expected, fix=fix))


def _fixed_point(iterate: Callable[[list[Axes]], list[Axes]], carry: list[Axes]) -> list[Axes]:
    """Returns the axes along which a loop's carry varies after any number of iterations.

    `iterate`: the axes before an iteration -> those after it. At most one iteration for each axis
    and value changes anything.
    """
    while True:
        after = [a | b for a, b in zip(carry, iterate(carry), strict=True)]
        if after == carry:
            return carry
        carry = after
