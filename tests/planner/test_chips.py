"""The table of chips is complete, consistent, and what the CUDA compiler takes."""

import re
from itertools import pairwise

import jax.numpy as jnp
import pytest
from refusals import refused

from fsdp_jax.planner import HARDWARE, fake_devices, hardware_of, parse_topology, peak_flops
from fsdp_jax.planner.machines.chips import TABLE, read_chips
from fsdp_jax.planner.machines.hardware import target_config
from fsdp_jax.step.float8_matmuls import check_float8_matmuls

REAL = [chip for chip in HARDWARE.values() if chip.platform != "cpu"]
GPUS = [chip for chip in REAL if chip.platform == "cuda"]
TPUS = [chip for chip in REAL if chip.platform == "tpu"]
PARSED = re.compile(r"(\w+): ([\d.]+)")


@pytest.mark.parametrize("chip", REAL, ids=lambda chip: chip.name)
def test_an_entry_is_complete(chip):
    assert chip.source
    assert chip.device_kinds
    assert 16 * 10**9 < chip.memory_bytes < 300 * 10**9
    # each step away from the chip is slower, by 2 at least and (off the compute) by 100 at most
    steps = [
        max(chip.peak_flops.values()),
        chip.memory_bandwidth,
        chip.link_bandwidth,
        chip.network_bandwidth,
    ]
    assert chip.network_bandwidth <= 2 * chip.host_bandwidth
    assert 10e9 < chip.host_bandwidth <= chip.link_bandwidth
    # the host of a full machine holds more than its devices do, but for the LPDDR5X of Grace
    assert 0.8 < chip.host_memory_bytes / (chip.host_devices * chip.memory_bytes) < 10
    assert 0.5 < chip.efficiency.host < 1
    assert all(near / far > 2 for near, far in pairwise(steps))
    assert all(near / far < 100 for near, far in pairwise(steps[1:]))
    assert {"bfloat16", "float16"} & set(chip.peak_flops)
    assert all(10**13 < rate < 10**16 for rate in chip.peak_flops.values())
    assert chip.host_devices in (4, 8, 16)


@pytest.mark.parametrize("chip", GPUS, ids=lambda chip: chip.name)
def test_a_gpu_is_behind_a_switch_and_has_a_target(chip):
    assert (chip.torus_dims, chip.axis_bandwidth, chip.slice_devices) == (0, None, None)
    # The compiler's own figures give the vendor's float32 rate outside the matrix units, within a
    # percent. Ampere and later are rated in TF32 here, whose ratio to it is the vendor's: 8 (A100),
    # 7.4 (Hopper), 13.8 to 15.6 (Blackwell); desktop cards of Ada: 1.
    gpu = chip.cuda
    plain = gpu["core_count"] * gpu["fpus_per_core"] * 2 * gpu["clock_rate_ghz"] * 1e9
    low, high = {7: (1, 1), 8: (8, 8), 9: (7.4, 7.4), 10: (13.8, 15.6)}[gpu["capability"][0]]
    if chip.name == "rtx4090":
        low = high = 1
    assert 0.99 * low < chip.peak_flops["float32"] / plain < 1.01 * high


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_a_tpu_is_in_a_torus(chip):
    assert chip.cuda is None
    assert chip.axis_bandwidth * chip.torus_dims == chip.link_bandwidth
    assert chip.axis_bandwidth / 2 in (50e9, 100e9)  # of a link
    assert chip.slice_devices in (256, 4096, 8960, 2 * 9216)


def test_no_two_chips_share_a_device_kind():
    kinds = [kind for chip in HARDWARE.values() for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))
    assert all(
        hardware_of(kind) is chip for chip in HARDWARE.values() for kind in chip.device_kinds
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 989.4e12),
        ("NVIDIA H100 80GB HBM3", jnp.float8_e4m3fn, 1978.9e12),
        ("NVIDIA B200", "float8_e5m2", 4.5e15),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("TPU v5 lite", "int8", 393e12),
        ("TPU v5", "bfloat16", 459e12),
        ("TPU v5p", "bfloat16", 459e12),
        ("NVIDIA H100 PCIe", "bfloat16", None),
        ("cpu", "float32", None),
        ("", "float32", None),
    ],
)
def test_the_peak_of_a_live_device(kind, dtype, peak):
    assert peak_flops(kind, dtype) == peak


@pytest.mark.parametrize("chip", GPUS, ids=lambda chip: chip.name)
def test_the_target_config_has_the_figures(chip):
    text = target_config(chip)
    assert text.count("{") == text.count("}") == 3
    assert f'device_description_str: "{chip.device_kinds[0]}"' in text
    figures = {name: float(value) for name, value in PARSED.findall(text)}
    assert figures["device_memory_size"] == chip.memory_bytes
    assert figures["memory_bandwidth"] == chip.memory_bandwidth
    assert figures["core_count"] == chip.cuda["core_count"]
    assert figures["clock_rate_ghz"] == chip.cuda["clock_rate_ghz"]
    assert figures["shared_memory_per_block"] < figures["shared_memory_per_block_optin"]
    assert figures["shared_memory_per_block_optin"] <= figures["shared_memory_per_core"]
    assert "major: {} minor: {}".format(*chip.cuda["capability"]) in text
    assert ("ACCELERATED" in text) == (chip.cuda["capability"][0] >= 9)


@pytest.mark.parametrize("chip", REAL, ids=lambda chip: chip.name)
def test_a_chip_with_float8_units_has_a_higher_rate_for_them(chip):
    sizes = {0: "4", 2: "2x2", 3: "2x2x1"}[chip.torus_dims]
    device = fake_devices(parse_topology(f"{chip.name}:{sizes}"))[0]
    is_faster = chip.peak_flops.get("float8", 0) > chip.peak_flops.get("bfloat16", 0)
    if is_faster:
        check_float8_matmuls(device)
        return
    with refused(where="precision.matmul"):
        check_float8_matmuls(device)


def test_an_entry_states_only_the_figures_in_which_it_differs():
    entry = """
        [h100-slow]
        like = "h100"
        device_kinds = ["Slow"]
        source = "a test"
        peak_flops.bfloat16 = 5e14
        peak_flops.int8 = 0
        cuda.core_count = 100
        efficiency.memory = 0.5
    """
    chip = read_chips(TABLE.read_text(encoding="utf-8") + entry)["h100-slow"]
    h100 = HARDWARE["h100"]
    rates = {dtype: rate for dtype, rate in h100.peak_flops.items() if dtype != "int8"}
    assert chip.peak_flops == rates | {"bfloat16": 5e14}
    assert chip.cuda == {**h100.cuda, "core_count": 100}
    assert (chip.efficiency.memory, chip.efficiency.cores) == (0.5, h100.efficiency.cores)
