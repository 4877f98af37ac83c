"""Copies of replicated arrays: any bit that differs is found, and named with its device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flips import flip
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fsdp_jax import ReplicaError, make_mesh, require_equal_replicas

MESH = make_mesh(data=4, replica=2)  # devices 0 to 3, and their copies 4 to 7
WHOLE = P()


def put(values, spec=WHOLE):
    return jax.device_put(values, NamedSharding(MESH, spec))


DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flipped_bit_of_a_copy_is_named_with_its_device(dtype):
    arrays = {"a": put(np.zeros((8, 4), dtype)), "b": put(np.ones((8, 4), dtype))}
    require_equal_replicas(arrays)
    arrays["b"] = flip(arrays["b"], device=5)
    with pytest.raises(ReplicaError) as raised:
        require_equal_replicas(arrays)
    assert raised.value.where == "b: device 5 (process 0)"


@pytest.mark.parametrize("bit", [0, 15, 22, 31])
def test_a_bit_of_a_nan_and_a_sign_of_zero_count(bit):
    for value in (np.nan, 0.0):
        same = put(np.full((8,), value, np.float32))
        require_equal_replicas([same])
        with pytest.raises(ReplicaError, match="device 2 "):
            require_equal_replicas([flip(same, device=2, bit=bit)])


def test_of_two_copies_of_a_shard_both_are_named():
    shards = put(np.arange(32.0).reshape(8, 4), P(None, "data"))
    own = put(np.arange(32.0).reshape(8, 4), P("data", "replica"))
    keys = put(jax.random.split(jax.random.key(0), 4), P("data"))
    state = {"shards": shards, "own": own, "keys": keys, "number": 3, "host": np.zeros(2)}
    require_equal_replicas(state)
    # Of an array that is sharded over all devices there is one copy alone.
    require_equal_replicas(state | {"own": flip(own, device=2)})
    with pytest.raises(ReplicaError) as raised:
        require_equal_replicas(state | {"shards": flip(shards, device=6)})
    assert raised.value.where == "shards: device 2 (process 0), device 6 (process 0)"


def test_differences_that_a_float_does_not_show_are_seen():
    arrays = {f"layer{n}": put(jnp.full((1000,), 1e30)) for n in range(12)}
    differing = {path: flip(array, device=7) for path, array in arrays.items()}
    with pytest.raises(ReplicaError) as raised:
        require_equal_replicas(differing)
    assert raised.value.got == "12 arrays that differ"
    assert raised.value.where.endswith("and 2 more")


def test_under_an_ambient_mesh_with_explicit_axes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        for array in (put(np.ones(8)), jax.device_put(np.ones(8), NamedSharding(mesh, P()))):
            require_equal_replicas([array])
            with pytest.raises(ReplicaError, match="device 1 "):
                require_equal_replicas([flip(array, device=1)])
