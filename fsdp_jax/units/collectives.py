"""How a parameter travels between rest and compute, and its gradient back.

[Note: how a parameter travels]
At rest a parameter is sharded and in its own dtype. On its way into a model it is

1. cast to the compute dtype *on the shard*,
2. gathered.

The gradient comes back over the same road through a custom VJP: reduced in the reduce dtype,
scattered, cast to the parameter's dtype. `Route` holds what the road needs to know.

[Note: two ways to say it] `manual` says it inside `shard_map` with explicit collectives; the model
sees its local batch. `annotate` says it with sharding constraints, between which XLA inserts
collectives; the model sees the global batch, and batch statistics mean what they mean on one
device. There the cast is pinned to the shard and fenced by an optimization barrier: with neither,
XLA moves it past the gather and the weights travel in float32, at twice the bytes. Only the first
can leave a gradient unreduced (`no_sync`), reduce it in another dtype than it was computed in, or
scatter it along a torus. `train_step(local_batch=...)` chooses.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax.errors import message
from fsdp_jax.sharding.mesh import axes_of, batch_axes

Mode = Literal["annotate", "manual"]
SITE, REDUCED = (
    "fsdp.gather[{}]",
    "fsdp.reduce[{}]",
)  # names in the program, with the parameter's path
_SITE = re.compile(re.escape(SITE).replace(re.escape("{}"), "(.*)"))


@dataclass(frozen=True)
class Route:
    """How one parameter travels between rest and compute, and its gradient back.

    Attributes:
        path: of the parameter.
        unit: path of the module that gathers it; None where it is gathered on entering the model.
        ndim: of the stored array; inside a layer scan the leading dims are gone.
        rest: how it is sharded at rest.
        work: how its gradient is sharded.
        compute: dtype that it is gathered in.
        reduce: dtype that its gradient is reduced in.
        param: dtype at rest, and of the gradient that arrives.
        stacked: how many leading dims of the stored array stack layers.
        hops: gathered and scattered along one mesh axis at a time, as a torus wants it.
        trained: it has a gradient.
        arrived: already gathered, once for the whole step; the unit finds it as it needs it.

    """

    path: str
    unit: str | None
    ndim: int
    mesh: Mesh
    rest: PartitionSpec
    work: PartitionSpec
    compute: np.dtype
    reduce: np.dtype
    param: np.dtype
    mode: Mode
    stacked: int = 0
    hops: bool = False
    trained: bool = True
    arrived: bool = False

    def sliced(self, spec: PartitionSpec, ndim: int) -> PartitionSpec:
        """The spec of an array that a layer scan took its leading dims from."""
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        dropped, kept = entries[: self.ndim - ndim], entries[self.ndim - ndim :]
        if any(dropped):
            fix = "name the stack, stacked=('path',), or give the parameter a rule that shards another dim"
            raise ValueError(
                message(
                    "a layer scan slices a sharded dim",
                    where=self.path,
                    expected="its layer dim whole",
                    got=spec,
                    fix=fix,
                )
            )
        return PartitionSpec(*kept)


def gather(route: Route, value: jax.Array, pending: jax.Array | None = None) -> jax.Array:
    """The whole parameter in the compute dtype; its gradient is reduced and scattered on the way
    back.

    With `pending` the gradient is not reduced: it becomes the cotangent of `pending`, local to the
    device. What is not trained has none: a custom derivative that nothing differentiates would be
    saved by the unit's checkpoint.
    """
    if route.mode == "annotate":
        return gather_annotated([route], [value])[0]
    if not route.trained:

        def still(value: jax.Array) -> jax.Array:
            return fetch(route, lax.stop_gradient(value))

        still.__name__ = SITE.format(route.path)
        return jax.jit(still)(value)

    @jax.custom_vjp
    def there(value: jax.Array, pending: jax.Array | None) -> jax.Array:
        return fetch(route, value)

    def forward(value: jax.Array, pending: jax.Array | None) -> tuple[jax.Array, None]:
        return fetch(route, value), None

    def back(_: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        if pending is None:
            return reduce(route, cotangent), None
        return jnp.zeros(value.shape, value.dtype), cotangent.astype(pending.dtype)

    there.defvjp(forward, back)
    # By this name prefetch finds the gather in the traced model.
    there.__name__ = SITE.format(route.path)  # type: ignore[attr-defined]
    return jax.jit(there)(value, pending)


def gather_annotated(routes: Sequence[Route], values: Sequence[jax.Array]) -> list[jax.Array]:
    """`gather` of several parameters in mode `annotate`, with one custom derivative: each takes
    time to trace.
    """
    trained = [route for route in routes if route.trained]

    def whole(shards: list[jax.Array]) -> list[jax.Array]:
        return [fetch(route, shard) for route, shard in zip(trained, shards, strict=True)]

    def back(_: None, cotangents: list[jax.Array]) -> tuple[list[jax.Array]]:
        return (
            [
                reduce(route, cotangent)
                for route, cotangent in zip(trained, cotangents, strict=True)
            ],
        )

    there = jax.custom_vjp(whole)
    there.defvjp(lambda shards: (whole(shards), None), back)
    shards = [value for route, value in zip(routes, values, strict=True) if route.trained]
    found = iter(there(shards) if trained else ())
    return [
        next(found) if route.trained else fetch(route, lax.stop_gradient(value))
        for route, value in zip(routes, values, strict=True)
    ]


def site_of(eqn: JaxprEqn) -> str | None:
    """The path of the parameter that this eqn of a traced model gathers; None where it is something
    else.
    """
    found = _SITE.fullmatch(str(eqn.params.get("name", "")))
    return found.group(1) if found else None


def fetch(route: Route, value: jax.Array) -> jax.Array:
    """As `gather`, without its gradient."""
    with jax.named_scope(SITE.format(route.path)):
        return _gather(route, value)


def _gather(route: Route, value: jax.Array) -> jax.Array:
    spec = route.sliced(route.rest, value.ndim)
    value = value.astype(route.compute)
    if not any(spec):
        return value
    if route.mode == "manual":
        for dim, entry in enumerate(spec):
            value = _as_stored(value) if dim and axes_of(entry) else value
            for axes in reversed(_hops(route, entry)):
                value = lax.all_gather(value, axes, axis=dim, tiled=True)
        return value
    value = lax.with_sharding_constraint(value, NamedSharding(route.mesh, spec))
    value = lax.optimization_barrier(value)
    return lax.with_sharding_constraint(value, NamedSharding(route.mesh, PartitionSpec()))


def _hops(route: Route, entry: Any) -> list[tuple[str, ...]]:
    """The axes that a dim is scattered along, in the order of the collectives; see the note on
    `data`'s axes.
    """
    axes = axes_of(entry)
    return [(axis,) for axis in axes] if route.hops else [axes] if axes else []


TILE = (8, 128)  # the last two dims of what a TPU stores come in such tiles


def _scatter(route: Route, gradient: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Reduces and scatters one dim along these axes.

    In hops the parts lie along a dim of their own, outside the tiles that a TPU stores: cut inside
    a tiled dim it pads every part (9% more bytes for 4096 rows in 16 parts) or gives up on the
    scatter. Parts that do not fill their tiles are sent as rows of whole ones.
    """
    if not route.hops:
        return lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
    parts, size = prod(route.mesh.shape[axis] for axis in axes), gradient.shape[dim]
    shape = (*gradient.shape[:dim], parts, size // parts, *gradient.shape[dim + 1 :])
    blocks = jnp.moveaxis(gradient.reshape(shape), dim, 0)
    part = blocks.shape[1:]
    if len(part) < 2:
        return lax.psum_scatter(blocks, axes)
    if prod(part[:-1]) % TILE[0] == 0 and part[-1] % TILE[1] == 0:
        rows = blocks.reshape(parts, -1, part[-1])  # of more dims than these, XLA gives up again
    else:
        rows = jnp.pad(blocks.reshape(parts, -1), ((0, 0), (0, -prod(part) % prod(TILE)))).reshape(
            parts, -1, *TILE
        )
    return lax.psum_scatter(rows, axes).reshape(-1)[: prod(part)].reshape(part)


def _as_stored(value: jax.Array) -> jax.Array:
    """Pins a shard's memory layout to the order of its dims.

    A collective wants its dim outermost in memory. Left alone, XLA gives the whole stack of layers
    that layout, by a transposed copy of it before the loop: 1.75 GiB for a 7B model on 8 devices.
    So the copy is made of one layer.
    """
    return with_layout_constraint(value, Layout(tuple(range(value.ndim))))


def reduce(route: Route, gradient: jax.Array) -> jax.Array:
    """A gradient of the gathered shape, summed over the batch axes, scattered, in the parameter's
    dtype.
    """
    with jax.named_scope(REDUCED.format(route.path)):
        return _reduce(route, gradient)


def _reduce(route: Route, gradient: jax.Array) -> jax.Array:
    spec = route.sliced(route.work, gradient.ndim)
    gradient = gradient.astype(route.reduce)
    if route.mode == "manual":
        for dim, entry in enumerate(spec):
            for axes in _hops(route, entry):
                gradient = _scatter(route, gradient, axes, dim)
            gradient = _as_stored(gradient) if dim and axes_of(entry) else gradient
        scattered = {axis for entry in spec for axis in axes_of(entry)}
        rest = tuple(axis for axis in batch_axes(route.mesh) if axis not in scattered)
        gradient = lax.psum(gradient, rest) if rest else gradient
    else:
        gradient = lax.with_sharding_constraint(gradient, NamedSharding(route.mesh, spec))
    return gradient.astype(route.param)
