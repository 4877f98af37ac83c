"""Matrix products of traced operations."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from fsdp_jax.hlo.parser import Shape
from fsdp_jax.planner.compiled.attention_kernels import kernel_products
from fsdp_jax.planner.machines.matmul import Product


def products_of(eqn: jex.JaxprEqn, fused: bool = False) -> Iterable[Product]:
    """The matrix products of one operation, run once; those of a kernel it does not know by its
    grid.
    """
    if eqn.primitive.name == "dot_general":
        (left, _), (batch, _) = eqn.params["dimension_numbers"]
        avals: list[Any] = [v.aval for v in eqn.invars]
        a, b = avals
        count, k = (prod(a.shape[dim] for dim in dims) for dims in (batch, left))
        m, n = prod(a.shape) // max(1, count * k), prod(b.shape) // max(1, count * k)
        yield Product(count, m, n, k, jnp.promote_types(a.dtype, b.dtype).name, fused=fused)
    elif eqn.primitive.name == "pallas_call" and (known := _known_kernel(eqn)) is not None:
        yield from known
    elif eqn.primitive.name == "pallas_call" or fused:
        grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
        turns = prod(size for size in grid if isinstance(size, int)) * eqn.params.get("length", 1)
        for inner in (inner for body in jex.jaxprs_in_params(eqn.params) for inner in body.eqns):
            yield from (
                replace(product, times=product.times * turns)
                for product in products_of(inner, fused=True)
            )


def _known_kernel(eqn: jex.JaxprEqn) -> tuple[Product, ...] | None:
    """Of an attention kernel, as the reader of compiled programs counts it: its loops may end where
    its data say.
    """
    avals: list[Any] = [v.aval for v in eqn.invars]
    shapes = [Shape(aval.dtype.name, tuple(aval.shape)) for aval in avals]
    return kernel_products(str(eqn.params.get("name", "")), shapes)
