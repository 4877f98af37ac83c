"""Collectives by sharding annotations: constraints between which XLA inserts them."""

from math import prod

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax.sharding.explicit_style import as_seen, constrain
from fsdp_jax.sharding.mesh import axes_of, shards_of
from fsdp_jax.units.comm import ParamComm
from fsdp_jax.units.explicit import row_major


class Annotated:
    """The collectives that XLA inserts for global arrays; see `collectives.Collectives`."""

    def gather(self, comm: ParamComm, shard: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Gathers a parameter of `spec` by constraints; sharding along the model's axes stays."""
        shard = constrain(shard, NamedSharding(comm.mesh, spec))
        shard = lax.optimization_barrier(shard)  # the cast stays before the gather
        if comm.axes_at_once == "all":
            shard = _pin(shard, NamedSharding(comm.mesh, spec), comm)
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

    def sum_over_replicas(self, comm: ParamComm, shard: jax.Array) -> jax.Array:
        """Returns the shard: `scatter` has summed along all batch axes."""
        del comm
        return shard


def _pin(shard: jax.Array, sharding: NamedSharding, comm: ParamComm) -> jax.Array:
    """Pins the memory layout of each device's shard, as `row_major` does, where it can be cut.

    Each device pins its own: XLA would gather a sharded array for it. A trace of a model on an
    explicit mesh has no devices to do so on.
    """
    spec = sharding.spec
    inner = comm.axes.batch_spec_axes(PartitionSpec(None, *spec[1:]))
    cut = all(
        size % shards_of(comm.mesh, entry) == 0
        for size, entry in zip(shard.shape, spec, strict=False)
    )
    if not inner or not cut or as_seen(sharding) is not sharding:
        return shard
    return jax.shard_map(row_major, mesh=comm.mesh, in_specs=spec, out_specs=spec)(shard)
