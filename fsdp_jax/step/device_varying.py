"""Finds the values of a traced `shard_map` program that differ between devices.

A value *varies* along a mesh axis if devices along it may hold different values (JAX calls these
axes `vma`). Two things go wrong without a message where a value varies: a branch or loop that it
decides, with a collective inside (some devices wait for others that never come), and model state
that is declared the same on all devices. Both are refused.

Why not `shard_map(check_vma=True)`: it refuses models whose own scans start from `jnp.zeros`, and
it does not look at branches. An operation that this module does not know is taken to vary wherever
any of its operands does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import jax.extend.core as jex

from fsdp_jax.errors import ArgumentError
from fsdp_jax.jaxprs import NONE, DataFlow, Labels, all_eqns
from fsdp_jax.sharding.mesh import axes_of

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
            raise ArgumentError(
                (
                    "the model's state is computed from the batch, of which a device sees its own "
                    "rows alone"
                ),
                where=path,
                expected="state that is the same on every device",
                got=f"a value that differs along {' and '.join(sorted(axes))}",
                fix=(
                    "leave local_batch out: without it, batch statistics are those of the global "
                    "batch"
                ),
            )


@dataclass(frozen=True)
class _VaryingAxes(DataFlow):
    """Finds the mesh axes along which the values of a program vary.

    `single`: axes of one device, along which nothing does.
    """

    single: Labels

    def results(self, eqn: jex.JaxprEqn, operands: list[Labels]) -> list[Labels]:
        """Returns the axes along which each result of an equation varies.

        `operands`: those of each operand. Raises ValueError for mutable arrays.
        """
        name = eqn.primitive.name
        if name in MUTATING:
            raise ArgumentError(
                "a mutable array (jax.new_ref) cannot be followed from device to device",
                where=str(eqn.source_info.name_stack) or name,
                fix="leave local_batch out",
            )
        if name in SAME_AFTER and eqn.params.get("axis_index_groups") is None:
            return [axes - self._collective_axes(eqn) for axes in operands] or [NONE]
        if name in SAME_AFTER | DIFFERENT_AFTER:
            return [NONE.union(*operands) | self._collective_axes(eqn) for _ in eqn.outvars]
        return super().results(eqn, operands)

    def _collective_axes(self, eqn: jex.JaxprEqn) -> Labels:
        """Returns the mesh axes of a collective; none for any other operation."""
        if eqn.primitive.name not in SAME_AFTER | DIFFERENT_AFTER:
            return NONE
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        return frozenset(axis for axis in axes_of(axes) if isinstance(axis, str)) - self.single

    def check_condition(
        self, eqn: jex.JaxprEqn, condition: Labels, programs: Sequence[jex.Jaxpr], kind: str
    ) -> None:
        """Raises ValueError for a collective along an axis on which devices may not all run it.

        `condition`: the axes along which the choice of a branch, or the end of a loop, varies;
        `programs`: what it decides on; `kind`: "branch" or "loop".
        """
        for collective in chain.from_iterable(map(all_eqns, programs)):
            name = collective.primitive.name
            if name != "axis_index" and self._collective_axes(collective) & condition:
                where = str(collective.source_info.name_stack)
                where = where or f"{name} in a `{eqn.primitive.name}`"
                raise ArgumentError(
                    f"devices may take this {kind} differently, and it has a collective inside",
                    where=where,
                    expected=(
                        "a condition that is the same on every device: not computed from the "
                        "batch, nor from random numbers, which are each device's own"
                    ),
                    fix="leave local_batch out; or compute both sides and select with jnp.where",
                )
