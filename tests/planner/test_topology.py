"""Names of machines, errors in them, and programs compiled for absent machines."""

from math import prod

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from refusals import refused

import fsdp_jax
from fsdp_jax.errors import ConfigError
from fsdp_jax.planner import HARDWARE, parse_topology
from fsdp_jax.planner.machines import topology as topology_module

GPUS = [chip.name for chip in HARDWARE.values() if chip.platform == "cuda"]
TPUS = [chip.name for chip in HARDWARE.values() if chip.platform == "tpu"]


@pytest.mark.parametrize(
    ("name", "shape", "slices", "size"),
    [
        ("cpu:8", (8,), 1, 8),
        ("h100:8", (1, 8), 1, 8),
        ("h100:64x8", (64, 8), 1, 512),
        ("a100-80gb:2x8", (2, 8), 1, 16),
        ("v5p:2x2x2", (2, 2, 2), 1, 8),
        ("v5p:16x20x28", (16, 20, 28), 1, 8960),
        ("v5e:16x16*2", (16, 16), 2, 512),
        ("v6e:16x16*1", (16, 16), 1, 256),
        (" H100:8 ", (1, 8), 1, 8),
    ],
)
def test_names(name, shape, slices, size):
    topology = parse_topology(name)
    assert (topology.shape, topology.slices, topology.size) == (shape, slices, size)
    assert topology.name == name.strip().lower()
    assert topology.hardware is HARDWARE[topology.name.split(":")[0]]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("h100", r"not a topology: 'h100'\n(.*\n)+.*CHIP:SHAPE, such as cpu:8, h100:8"),
        ("", "not a topology"),
        ("h100:-8", "not a topology"),
        ("v5e:4x4*", "not a topology"),
        ("h10:8", r"unknown hardware 'h10'\n(.*\n)+.*did you mean 'h100'"),
        ("a100:8", r"unknown hardware 'a100'\n(.*\n)+.*one of: a100-40gb, a100-80gb"),
        ("cpu:0", r"1 or more devices\n  got: +cpu:0\n.*cpu:8"),
        ("h100:0", r"1 or more hosts, and GPUs of each\n  got: +h100:0\n.*h100:8"),
        ("v5e:4x4*0", r"1 or more chips along each dim, and slices\n  got: +v5e:4x4\*0\n.*v5e:2x2"),
        ("cpu:2x4", r"a number of virtual devices\n.*\n.*cpu:8"),
        ("h100:8*2", r"no slices: only TPUs have them\n.*\n.*h100:2x8"),
        ("h100:2x2x2", "hosts x GPUs of each"),
        ("h100:64", r"at most 8 GPUs per host\n.*\n.*h100:8x8 for 64"),
        ("h100:12", r"at most 8 GPUs per host\n.*\n.*h100:2x8 for 16"),
        ("v5e:8", r"2 dims: a slice is a 2-D torus\n.*\n.*v5e:2x2"),
        ("v5p:4x4", r"3 dims: a slice is a 3-D torus\n.*\n.*v5p:2x2x2"),
        ("v5e:3x4", "even first and second dims: a host has 2x2 chips"),
        ("v5e:16x32", r"at most 256 chips per slice\n.*\n.*several slices, as v5e:2x2\*2"),
    ],
)
def test_wrong_names(name, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_topology(name)


@settings(deadline=None)
@given(
    st.sampled_from(TPUS), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 9)
)
def test_any_slice_is_made_of_full_hosts_or_refused(chip, shape, slices):
    name = f"{chip}:{'x'.join(map(str, shape))}*{slices}"
    hardware = HARDWARE[chip]
    fits = len(shape) == hardware.torus_dims and not shape[0] % 2 and not shape[1] % 2
    devices = prod(shape) * hardware.chip_devices
    if fits and devices <= hardware.slice_devices:
        assert parse_topology(name).size == devices * slices
    else:
        with refused(chip, error=ConfigError, where="topology", got=name):
            parse_topology(name)


@settings(deadline=None)
@given(st.text(alphabet="h10v5ex:*- 2", max_size=12))
def test_unknown_chips_are_refused(text):
    if text.strip().partition(":")[0] in HARDWARE:
        return  # the tests above
    with refused(error=ConfigError, where="topology"):
        parse_topology(text)


def test_virtual_devices():
    assert parse_topology("cpu:4").devices() == jax.devices()[:4]
    with pytest.raises(
        ConfigError, match=r"expected: +64 for cpu:64\n.*8\n.*use_virtual_devices\(64\)"
    ):
        parse_topology("cpu:64").devices()


@pytest.mark.parametrize(("name", "extra"), [("h100:8", "cuda-aot"), ("v5e:4x4", "tpu-aot")])
def test_a_missing_plugin_is_one_line(name, extra, monkeypatch):
    monkeypatch.setattr(topology_module, "installed_plugins", set)
    with pytest.raises(ConfigError) as caught:
        parse_topology(name).devices()
    assert str(caught.value).count("\n") == 0
    assert str(caught.value).endswith(f"pip install 'fsdp_jax[{extra}]'")


def program(topology):
    """Returns the compiled text of a matmul and a sum over the entire machine."""
    mesh = fsdp_jax.make_mesh(devices=topology.devices())
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((topology.size * 128, 128), jnp.float32, sharding=rows)
    return jax.jit(lambda x: jnp.tanh(x.T @ x)).lower(x).compile().as_text()


@pytest.mark.needs_plugin
@pytest.mark.parametrize("name", ["h100:64x8", *(f"{chip}:4" for chip in GPUS)])
def test_programs_for_gpus(name):
    topology = parse_topology(name)
    assert "all-reduce" in program(topology)
    devices = topology.devices()
    assert {device.device_kind for device in devices} == {topology.hardware.device_kinds[0]}
    assert len({device.process_index for device in devices}) == topology.shape[0]


@pytest.mark.needs_plugin
@pytest.mark.parametrize(
    ("name", "hosts"),
    [("v5e:16x16", 64), ("v5p:2x2x2", 2), ("v4:2x2x2", 2), ("v6e:4x4", 4), ("v5e:4x4*2", 8)],
)
def test_programs_for_tpus(name, hosts):
    topology = parse_topology(name)
    assert "all-reduce" in program(topology)
    devices = topology.devices()
    assert {device.device_kind for device in devices} <= set(topology.hardware.device_kinds)
    assert len({device.process_index for device in devices}) == hosts
    assert len({getattr(device, "slice_index", None) for device in devices}) == topology.slices


@pytest.mark.needs_plugin
def test_a_host_is_along_data_on_many_hosts():
    mesh = fsdp_jax.make_mesh(data=8, replica=64, devices=parse_topology("h100:64x8").devices())
    assert all(len({device.process_index for device in host}) == 1 for host in mesh.devices)
