"""Matmuls of traced operations."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import jax.extend.core as jex

from fsdp_jax.hlo.parser import Shape
from fsdp_jax.planner.compiled.attention_kernels import kernel_matmuls
from fsdp_jax.planner.machines.roofline import Matmul


def matmuls_of(eqn: jex.JaxprEqn, fused: bool = False) -> Iterable[Matmul]:
    """Yields the matmuls of one operation, run once; of an unknown kernel, by its grid."""
    avals: list[Any] = [var.aval for var in eqn.invars]
    if eqn.primitive.name == "dot_general":
        (contracting, _), (batch_dims, _) = eqn.params["dimension_numbers"]
        left, right = avals
        batch = prod(left.shape[dim] for dim in batch_dims)
        k = prod(left.shape[dim] for dim in contracting)
        m = prod(left.shape) // max(1, batch * k)
        n = prod(right.shape) // max(1, batch * k)
        wider = max(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
        dtype = wider.name  # the two of float8 have no common dtype
        yield Matmul(batch, m, n, k, dtype, fused=fused)
        return
    is_kernel = eqn.primitive.name == "pallas_call"
    if is_kernel:
        # an attention kernel is counted as in compiled programs: data may end its loops early
        shapes = [Shape(aval.dtype.name, tuple(aval.shape)) for aval in avals]
        attention = kernel_matmuls(str(eqn.params.get("name", "")), shapes)
        if attention is not None:
            yield from attention
            return
    if is_kernel or fused:
        grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
        trips = prod(size for size in grid if isinstance(size, int)) * eqn.params.get("length", 1)
        for body in jex.jaxprs_in_params(eqn.params):
            for inner in body.eqns:
                for matmul in matmuls_of(inner, fused=True):
                    yield replace(matmul, times=matmul.times * trips)
