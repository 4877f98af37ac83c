"""Matmuls of traced operations."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax.extend.core as jex

from fsdp_jax.hlo.parser import Shape
from fsdp_jax.planner.compiled.attention_kernels import attention_matmuls
from fsdp_jax.planner.compiled.cost import dot_matmul
from fsdp_jax.planner.machines.roofline import Matmul
from fsdp_jax.program.equations import (
    bodies,
    dot_dimensions,
    ffi_target,
    kernel_name,
    trips_of,
)
from fsdp_jax.program.primitives import DOT, FFI_CALL, PALLAS_CALL, primitive_of


def matmuls_of(eqn: jex.JaxprEqn, fused: bool = False) -> Iterable[Matmul]:
    """Yields the matmuls of one operation, run once; of an unknown Pallas kernel, by its grid.

    `fused`: it is inside a kernel, so that its results stay out of device memory.
    """
    if primitive_of(eqn) is DOT:
        (contracting, _), (batch, _) = dot_dimensions(eqn)
        left, right = _operand_shapes(eqn)
        yield replace(dot_matmul(left, right, batch, contracting), fused=fused)
        return
    is_kernel = primitive_of(eqn) is PALLAS_CALL
    if is_kernel:
        # an attention kernel is counted as in compiled programs: data may end its loops early
        attention = attention_matmuls(kernel_name(eqn), _operand_shapes(eqn))
        if attention is not None:
            yield from attention
            return
    if is_kernel or fused:
        trips = trips_of(eqn)
        for body in bodies(eqn):
            for inner in body.eqns:
                for matmul in matmuls_of(inner, fused=True):
                    matmul = replace(matmul, times=matmul.times * trips)
                    if is_kernel:
                        matmul = replace(matmul, assumed=kernel_name(eqn))
                    yield matmul


def uncounted_kernel(eqn: jex.JaxprEqn) -> str:
    """Names the kernel of an operation whose matmuls `matmuls_of` does not count; "" for others."""
    primitive = primitive_of(eqn)
    if primitive in (DOT, PALLAS_CALL):
        return ""
    if primitive is FFI_CALL:
        return str(ffi_target(eqn))
    return primitive.name * (primitive.matmul or primitive.fused_kernel)


def _operand_shapes(eqn: jex.JaxprEqn) -> list[Shape]:
    avals: list[Any] = [var.aval for var in eqn.invars]
    return [Shape(aval.dtype.name, tuple(aval.shape)) for aval in avals]
