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
from fsdp_jax.program.dataflow import NONE, DataFlow, Labels
from fsdp_jax.program.equations import (
    all_eqns,
    body_of,
    collective_axes,
    collective_groups,
    scopes_of,
    shard_map_arguments,
)
from fsdp_jax.program.primitives import AXIS_INDEX, SHARD_MAP, primitive_of
from fsdp_jax.sharding.mesh import axes_of


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
    eqn = next(eqn for eqn in all_eqns(program) if primitive_of(eqn) is SHARD_MAP)
    mesh, specs = shard_map_arguments(eqn).values()
    inputs = [frozenset(axis for entry in spec for axis in axes_of(entry)) for spec in specs]
    # Along an axis of one device nothing varies; the step names such axes too.
    single = frozenset(axis for axis, size in mesh.shape.items() if size == 1)
    variation = _VaryingAxes(single)
    outputs = variation.outputs(body_of(eqn)[0], [axes - single for axes in inputs])
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
        """Finds the axes along which each result of an equation varies.

        `operands`: those of each operand. Raises ValueError for mutable arrays.
        """
        primitive = primitive_of(eqn)
        if primitive.mutates:
            raise ArgumentError(
                "a mutable array (jax.new_ref) cannot be followed from device to device",
                where=scopes_of(eqn) or primitive.name,
                fix="leave local_batch out",
            )
        if primitive.collective == "same" and not collective_groups(eqn):
            return [axes - self._collective_axes(eqn) for axes in operands] or [NONE]
        if primitive.collective:
            return [NONE.union(*operands) | self._collective_axes(eqn) for _ in eqn.outvars]
        return super().results(eqn, operands)

    def _collective_axes(self, eqn: jex.JaxprEqn) -> Labels:
        """Reads the mesh axes of a collective; none for any other operation."""
        if not primitive_of(eqn).collective:
            return NONE
        axes = axes_of(collective_axes(eqn))
        return frozenset(axis for axis in axes if isinstance(axis, str)) - self.single

    def check_condition(
        self, eqn: jex.JaxprEqn, condition: Labels, programs: Sequence[jex.Jaxpr], kind: str
    ) -> None:
        """Raises ValueError for a collective along an axis on which devices may not all run it.

        `condition`: the axes along which the choice of a branch, or the end of a loop, varies;
        `programs`: what it decides on; `kind`: "branch" or "loop".
        """
        for collective in chain.from_iterable(map(all_eqns, programs)):
            primitive = primitive_of(collective)
            if primitive is not AXIS_INDEX and self._collective_axes(collective) & condition:
                where = scopes_of(collective)
                where = where or f"{primitive.name} in a `{primitive_of(eqn).name}`"
                raise ArgumentError(
                    f"devices may take this {kind} differently, and it has a collective inside",
                    where=where,
                    expected=(
                        "a condition that is the same on every device: not computed from the "
                        "batch, nor from random numbers, which are each device's own"
                    ),
                    fix="leave local_batch out; or compute both sides and select with jnp.where",
                )
