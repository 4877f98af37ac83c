"""How a parameter travels between rest and compute, and its gradient back.

[Note: how a parameter travels]
At rest a parameter is sharded and in its own dtype. On its way into a model it is

1. cast to the compute dtype *on the shard*,
2. gathered.

The gradient comes back over the same road through a custom VJP: reduced in the reduce dtype,
scattered, cast to the parameter's dtype. `ParamComm` holds what the road needs to know.

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
class ParamComm:
    """How one parameter travels between rest and compute, and its gradient back.

    Attributes:
        path: of the parameter.
        unit: path of the module that gathers it; None where it is gathered on entering the model.
        ndim: of the stored array; inside a layer scan the leading dims are gone.
        param_spec: how the parameter is sharded between steps.
        grad_spec: how its gradient is sharded.
        compute: dtype that it is gathered in.
        reduce: dtype that its gradient is reduced in.
        param: dtype at rest, and of the gradient that arrives.
        stacked: how many leading dims of the stored array stack layers.
        per_axis: gathered and scattered along one mesh axis at a time, as a torus wants it.
        trained: it has a gradient.
        already_gathered: already gathered, once for the whole step; the unit finds it as it needs it.

    """

    path: str
    unit: str | None
    ndim: int
    mesh: Mesh
    param_spec: PartitionSpec
    grad_spec: PartitionSpec
    compute: np.dtype
    reduce: np.dtype
    param: np.dtype
    mode: Mode
    stacked: int = 0
    per_axis: bool = False
    trained: bool = True
    already_gathered: bool = False

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


def gather(comm: ParamComm, value: jax.Array, pending: jax.Array | None = None) -> jax.Array:
    """The whole parameter in the compute dtype; its gradient is reduced and scattered on the way
    back.

    With `pending` the gradient is not reduced: it becomes the cotangent of `pending`, local to the
    device. What is not trained has none: a custom derivative that nothing differentiates would be
    saved by the unit's checkpoint.
    """
    if comm.mode == "annotate":
        return gather_annotated([comm], [value])[0]
    if not comm.trained:

        def still(value: jax.Array) -> jax.Array:
            return fetch(comm, lax.stop_gradient(value))

        still.__name__ = SITE.format(comm.path)
        return jax.jit(still)(value)

    @jax.custom_vjp
    def there(value: jax.Array, pending: jax.Array | None) -> jax.Array:
        return fetch(comm, value)

    def forward(value: jax.Array, pending: jax.Array | None) -> tuple[jax.Array, None]:
        return fetch(comm, value), None

    def back(_: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        if pending is None:
            return reduce(comm, cotangent), None
        return jnp.zeros(value.shape, value.dtype), cotangent.astype(pending.dtype)

    there.defvjp(forward, back)
    # By this name prefetch finds the gather in the traced model.
    there.__name__ = SITE.format(comm.path)  # type: ignore[attr-defined]
    return jax.jit(there)(value, pending)


def gather_annotated(comms: Sequence[ParamComm], values: Sequence[jax.Array]) -> list[jax.Array]:
    """`gather` of several parameters in mode `annotate`, with one custom derivative: each takes
    time to trace.
    """
    trained = [comm for comm in comms if comm.trained]

    def whole(shards: list[jax.Array]) -> list[jax.Array]:
        return [fetch(comm, shard) for comm, shard in zip(trained, shards, strict=True)]

    def back(_: None, cotangents: list[jax.Array]) -> tuple[list[jax.Array]]:
        return (
            [reduce(comm, cotangent) for comm, cotangent in zip(trained, cotangents, strict=True)],
        )

    there = jax.custom_vjp(whole)
    there.defvjp(lambda shards: (whole(shards), None), back)
    shards = [value for comm, value in zip(comms, values, strict=True) if comm.trained]
    found = iter(there(shards) if trained else ())
    return [
        next(found) if comm.trained else fetch(comm, lax.stop_gradient(value))
        for comm, value in zip(comms, values, strict=True)
    ]


def site_of(eqn: JaxprEqn) -> str | None:
    """The path of the parameter that this eqn of a traced model gathers; None where it is something
    else.
    """
    found = _SITE.fullmatch(str(eqn.params.get("name", "")))
    return found.group(1) if found else None


def fetch(comm: ParamComm, value: jax.Array) -> jax.Array:
    """As `gather`, without its gradient."""
    with jax.named_scope(SITE.format(comm.path)):
        return _gather(comm, value)


def _gather(comm: ParamComm, value: jax.Array) -> jax.Array:
    spec = comm.sliced(comm.param_spec, value.ndim)
    value = value.astype(comm.compute)
    if not any(spec):
        return value
    if comm.mode == "manual":
        for dim, entry in enumerate(spec):
            value = _as_stored(value) if dim and axes_of(entry) else value
            for axes in reversed(_hops(comm, entry)):
                value = lax.all_gather(value, axes, axis=dim, tiled=True)
        return value
    value = lax.with_sharding_constraint(value, NamedSharding(comm.mesh, spec))
    value = lax.optimization_barrier(value)
    return lax.with_sharding_constraint(value, NamedSharding(comm.mesh, PartitionSpec()))


def _hops(comm: ParamComm, entry: Any) -> list[tuple[str, ...]]:
    """The axes that a dim is scattered along, in the order of the collectives; see the note on
    `data`'s axes.
    """
    axes = axes_of(entry)
    return [(axis,) for axis in axes] if comm.per_axis else [axes] if axes else []


TILE = (8, 128)  # the last two dims of what a TPU stores come in such tiles


def _scatter(comm: ParamComm, gradient: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Reduces and scatters one dim along these axes.

    In hops the parts lie along a dim of their own, outside the tiles that a TPU stores: cut inside
    a tiled dim it pads every part (9% more bytes for 4096 rows in 16 parts) or gives up on the
    scatter. Parts that do not fill their tiles are sent as rows of whole ones.
    """
    if not comm.per_axis:
        return lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
    parts, size = prod(comm.mesh.shape[axis] for axis in axes), gradient.shape[dim]
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


def reduce(comm: ParamComm, gradient: jax.Array) -> jax.Array:
    """A gradient of the gathered shape, summed over the batch axes, scattered, in the parameter's
    dtype.
    """
    with jax.named_scope(REDUCED.format(comm.path)):
        return _reduce(comm, gradient)


def _reduce(comm: ParamComm, gradient: jax.Array) -> jax.Array:
    spec = comm.sliced(comm.grad_spec, gradient.ndim)
    gradient = gradient.astype(comm.reduce)
    if comm.mode == "manual":
        for dim, entry in enumerate(spec):
            for axes in _hops(comm, entry):
                gradient = _scatter(comm, gradient, axes, dim)
            gradient = _as_stored(gradient) if dim and axes_of(entry) else gradient
        scattered = {axis for entry in spec for axis in axes_of(entry)}
        rest = tuple(axis for axis in batch_axes(comm.mesh) if axis not in scattered)
        gradient = lax.psum(gradient, rest) if rest else gradient
    else:
        gradient = lax.with_sharding_constraint(gradient, NamedSharding(comm.mesh, spec))
    return gradient.astype(comm.param)
