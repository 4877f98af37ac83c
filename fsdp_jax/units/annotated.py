"""Collectives by sharding annotations: constraints between which XLA inserts them."""

from math import prod

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax.errors import ArgumentError
from fsdp_jax.sharding.explicit_style import as_seen, constrain
from fsdp_jax.sharding.mesh import axes_of, shards_of, spec_axes
from fsdp_jax.units.comm import ParamComm
from fsdp_jax.units.explicit import row_major


class Annotated:
    """The collectives that XLA inserts for global arrays; see `collectives.Collectives`."""

    def gather(self, comm: ParamComm, shard: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Gathers a parameter of `spec` by constraints; sharding along the model's axes stays.

        In a loop the memory layout of a shard is pinned: otherwise XLA transposes the whole stack,
        or all parameters before the microbatches, and keeps the copy through the step.
        """
        _check_not_manual(comm)
        shard = constrain(shard, NamedSharding(comm.mesh, spec))
        shard = lax.optimization_barrier(shard)  # the cast stays before the gather
        inner = comm.axes.batch_spec_axes(PartitionSpec(None, *spec[1:]))
        if comm.in_loop and comm.axes_at_once == "all" and inner:
            shard = self.pin(comm, shard, spec)
        return constrain(shard, NamedSharding(comm.mesh, comm.axes.model_spec(spec)))

    def scatter(self, comm: ParamComm, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Sums and scatters a gradient by constraints.

        On a torus, uses one constraint for each mesh axis in turn: XLA:TPU makes a reduce-scatter
        along one dim of the torus, but an all-reduce, which sends twice the bytes, along several at
        once. Meanwhile the devices' parts are stacked along a separate dim, as in `explicit`.
        """
        sharding = NamedSharding(comm.mesh, spec)
        for dim, entry in enumerate(spec) if comm.axes_at_once == "one" else ():
            axes = axes_of(entry)
            parts = prod(comm.mesh.shape[axis] for axis in axes)
            if not set(axes) <= set(comm.axes.data) or len(axes) < 2 or gradient.shape[dim] % parts:
                continue
            before, after = spec[:dim], spec[dim + 1 :]
            shape = gradient.shape
            stacked = gradient.reshape(*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
            for count in range(1, len(axes) + 1):
                staged = PartitionSpec(*before, axes[:count], None, *after)
                stacked = constrain(stacked, NamedSharding(comm.mesh, staged))
            gradient = stacked.reshape(shape)
        return constrain(gradient, sharding)

    def pin(self, comm: ParamComm, shard: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Pins the memory layout of each device's shard, unless the shards are uneven.

        Each device pins its own: XLA would gather a sharded array for it.
        """
        parts = (shards_of(comm.mesh, entry) for entry in spec)
        if any(size % count for size, count in zip(shard.shape, parts, strict=False)):
            return shard
        around = jax.sharding.get_abstract_mesh()  # the model's view, or that of a `shard_map`
        mesh = comm.mesh.abstract_mesh if around.empty else around
        spec, axes = as_seen(NamedSharding(comm.mesh, spec)).spec, frozenset(mesh.auto_axes)
        pin = jax.shard_map(row_major, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes)
        pinned: jax.Array = pin(shard)
        return pinned

    def sum_over_replicas(self, comm: ParamComm, shard: jax.Array) -> jax.Array:
        """Returns the shard: `scatter` has summed along all batch axes."""
        del comm
        return shard


def _check_not_manual(comm: ParamComm) -> None:
    """Raises ValueError inside a `shard_map` over axes that shard the parameter."""
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    if manual.intersection(spec_axes(comm.shard_spec)):
        raise ArgumentError(
            "a unit is called inside a shard_map over the axes that shard its parameters",
            where=comm.path,
            expected="a unit on the global batch, or inside a shard_map over other axes",
            got=f"shard_map over {sorted(manual)}",
            fix=(
                "call the unit outside, or make_train_step(..., local_batch=True), which runs the "
                "loss on each device's rows; or strategy='shard_grad_op', which gathers before"
            ),
        )
