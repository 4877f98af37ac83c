"""What jax asks of a device that is not there, and what devices tell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mend import relied_on

from fsdp_jax.compat.jax_devices import (
    FakeClient,
    FakeDevice,
    FakeMemory,
    slice_index,
    torus_coordinates,
)
from fsdp_jax.planner import fake_devices, parse_topology

pytestmark = pytest.mark.releases

HOST = "pinned_host"


def fake_mesh():
    devices = [FakeDevice(number, number // 4, "tpu", "TPU v5e") for number in range(8)]
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def test_fake_device():
    """All that the package does with a step which is not compiled."""
    with relied_on(
        "jax", "jax_devices.FakeDevice", "what jax asks of a device, without a compiler"
    ):
        mesh = fake_mesh()
        sharding = NamedSharding(mesh, P("data"))
        assert sharding.shard_shape((16, 2)) == (2, 2)
        assert len(sharding.addressable_devices) == 4, "those of the first host"
        x = jax.ShapeDtypeStruct((16, 2), jnp.float32, sharding=sharding)
        constrained = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, sharding))
        assert constrained.trace(x).out_info.shape == (16, 2)


def test_fake_memory():
    with relied_on("jax", "jax_devices.FakeMemory", "memories are compared with names of kinds"):
        sharding = NamedSharding(fake_mesh(), P("data"), memory_kind=HOST)
        assert sharding.memory_kind == HOST
        assert FakeMemory(HOST).kind == HOST
        with pytest.raises(ValueError, match="memory"):
            NamedSharding(fake_mesh(), P("data"), memory_kind="nothing like this")


def test_fake_client():
    with relied_on("jax", "jax_devices.FakeClient", "the process that a device's client is in"):
        assert [device.id for device in fake_mesh().local_devices] == [0, 1, 2, 3]
    assert FakeClient() == FakeClient()


@pytest.mark.needs_plugin
def test_slice_index_and_torus_coordinates_of_tpus():
    """Those of the devices that jax makes for the compiler of TPUs."""
    for name in ("v5e:4x4", "v5p:2x2x2*2"):
        topology = parse_topology(name)
        with relied_on("libtpu", "jax_devices.slice_index", "the number of a device's slice"):
            devices = topology.devices()
            assert {slice_index(device) for device in devices} == set(range(topology.slices))
        with relied_on("libtpu", "jax_devices.torus_coordinates", "`coords` and `core_on_chip`"):
            found = [torus_coordinates(device) for device in devices]
            assert len(set(found)) == len(devices)
            assert sorted(found) == sorted(map(torus_coordinates, fake_devices(topology)))


def test_slice_index_where_there_are_none():
    assert slice_index(jax.devices()[0]) == 0
