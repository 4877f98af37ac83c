"""Compares the copies of replicated arrays: silent corruption is found, not averaged.

A strategy that replicates state keeps it equal by computing the same on every device. Where one
device computes or stores a wrong bit, nothing brings its copy back: the gradients of all are then
averaged over different parameters, and the loss shows it late or never.
"""

from collections import Counter, defaultdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax.errors import ReadableError, first_lines
from fsdp_jax.host_memory import HOST, to_device
from fsdp_jax.io.array_specs import is_prng_key
from fsdp_jax.sharding.mesh import shards_of, spec_axes
from fsdp_jax.sharding.padding import stored_array
from fsdp_jax.tree import PyTree, flatten

SHOWN = 10  # arrays listed before the rest is only counted


class ReplicaError(ReadableError, RuntimeError):
    """Copies of one replicated array differ between devices; none of them can be trusted."""


def require_equal_replicas(state: PyTree) -> None:
    """Checks that devices that hold the same shard of an array hold the same bits.

    Reads every replicated array of the state once, a `TrainState` or any pytree, and sends one
    uint32 per array and device: the sum of its bits. Every process of the devices must call this,
    and each raises the same error. Sharded arrays, of which there is one copy, are not read.

    Raises ReplicaError, which names the arrays, and the devices and processes whose copy is not
    that of the majority; all of them where there is none, as of two replicas.

    Example:
        >>> fsdp.require_equal_replicas(state)
    """
    # One program for all arrays in device memory; those in host memory pass through it one by one.
    groups: defaultdict[Any, dict[str, jax.Array]] = defaultdict(dict)
    shardings: dict[str, NamedSharding] = {}
    for path, leaf in flatten(state).items():
        array = stored_array(leaf)
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not array.size:
            continue
        if shards_of(sharding.mesh, spec_axes(sharding.spec)) == sharding.mesh.size:
            continue  # each device holds another shard
        alone = None
        if sharding.memory_kind == HOST:
            alone = path
        shardings[path] = sharding
        groups[sharding.mesh, alone][path] = array
    problems: list[str] = []
    for (mesh, _), arrays in groups.items():
        specs = tuple(shardings[path].spec for path in arrays)
        # Each table is waited for: XLA's CPU devices can wait for one another in programs that
        # overlap.
        with jax.set_mesh(mesh):  # another may be ambient, in which jax refuses this one
            sums = np.asarray(_checksums(mesh, specs, list(arrays.values())))
        for path, column in zip(arrays, sums.T, strict=True):
            differing = _differing_devices(shardings[path], column)
            if differing:
                ordered = sorted(differing, key=lambda device: device.id)
                texts = [f"device {each.id} (process {each.process_index})" for each in ordered]
                problems.append(f"{path}: {', '.join(texts)}")
    if problems:
        raise ReplicaError(
            "copies of replicated arrays differ between devices",
            where=first_lines(problems, SHOWN),
            expected="the same bits on every device that holds the same shard",
            got=f"{len(problems)} arrays that differ",
            fix="resume from a checkpoint, and without these devices if it happens again",
        )


@partial(jax.jit, static_argnums=(0, 1))
def _checksums(mesh: Mesh, specs: tuple[PartitionSpec, ...], arrays: list[jax.Array]) -> jax.Array:
    """Sums the bits of each device's shard of each array: uint32 [devices, arrays], replicated.

    Devices are in the order of the mesh. `specs`: of the arrays.
    """
    # The data of PRNG keys have one more dim, which is not sharded.
    data = [jax.random.key_data(array) if is_prng_key(array) else array for array in arrays]

    def sum_own(shards: list[jax.Array]) -> jax.Array:
        sums = jnp.stack([_sum_bits(shard) for shard in shards])
        return lax.all_gather(sums, mesh.axis_names)

    sum_all = jax.shard_map(
        sum_own, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(), check_vma=False
    )
    return sum_all(to_device(data))


def _sum_bits(array: jax.Array) -> jax.Array:
    """Sums the bits of an array, as unsigned integers, modulo 2**32: uint32 []."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return _sum_bits(array.real) + _sum_bits(array.imag)
    if array.dtype == bool:
        bits = array
    elif array.dtype.itemsize == 8:
        bits = lax.bitcast_convert_type(array, jnp.uint32)
    else:
        width = jax.dtypes.itemsize_bits(array.dtype)
        bits = lax.bitcast_convert_type(array, jnp.dtype(f"uint{width}"))
    return jnp.sum(bits, dtype=jnp.uint32)


def _differing_devices(sharding: NamedSharding, sums: np.ndarray) -> list[jax.Device]:
    """Finds the devices whose copy of a shard is not that of the majority.

    All devices of a shard without a majority. `sums`: [devices], of the bits of each device's
    shard.
    """
    # Group by shard: [shards, copies].
    mesh = sharding.mesh
    used = [mesh.axis_names.index(axis) for axis in spec_axes(sharding.spec)]
    order = used + [dim for dim in range(mesh.devices.ndim) if dim not in used]
    shape = (shards_of(mesh, spec_axes(sharding.spec)), -1)
    devices = mesh.devices.transpose(order).reshape(shape)
    copies = sums.reshape(mesh.devices.shape).transpose(order).reshape(shape)
    # In each shard with several sums, the minority.
    differing: list[jax.Device] = []
    for shard in np.flatnonzero((copies != copies[:, :1]).any(axis=1)):
        common, votes = Counter(copies[shard].tolist()).most_common(1)[0]
        is_minority = copies[shard] != common
        if 2 * votes <= len(is_minority):
            is_minority[:] = True
        differing += devices[shard, is_minority].tolist()
    return differing
