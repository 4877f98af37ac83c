"""The roofline: shares of the peak that chips achieve, by shape and dtype."""

from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jax.planner.machines.chips import HARDWARE
from fsdp_jax.planner.machines.roofline import Matmul, Roofline

REAL = [chip for chip in HARDWARE.values() if chip.platform != "cpu"]
DTYPES = ["bfloat16", "float16", "float32", "float64", "int8", "float8_e4m3fn", "float8_e5m2"]
sizes = st.integers(1, 20_000)
chips = st.sampled_from(REAL)


def rate(name: str, dtype: str = "bfloat16", *, fused: bool = False) -> float:
    """Returns the rate of a matmul that fills every chip: multiples of tiles and cores, long k."""
    square = 256 * 132 * 27 * 5 * 37
    return Roofline(HARDWARE[name]).rate(Matmul(1, square, square, 10**9, dtype, fused=fused))


def test_every_chip_but_virtual_devices_has_an_efficiency():
    for chip in REAL:
        one = chip.efficiency
        assert 0.7 * chip.memory_bandwidth < Roofline(chip).memory_rate < chip.memory_bandwidth
        shares = [one.matmul, one.attention, one.memory, one.link, one.network, one.tree]
        shares += [share for *_, share in one.tiles] + [
            protocol.share for protocol in one.protocols
        ]
        assert all(0 < share <= 1 for share in shares)
        assert max(share for *_, share in one.tiles) == 1
        assert one.source
        assert all(0 < latency < 1e-4 for protocol in one.protocols for latency in protocol[:3])
    with pytest.raises(AssertionError, match="cpu has no efficiency"):
        Roofline(HARDWARE["cpu"])


@settings(deadline=None)
@given(
    chip=chips, batch=st.integers(1, 512), m=sizes, n=sizes, k=sizes, dtype=st.sampled_from(DTYPES)
)
def test_shares_are_at_most_one_and_rates_at_most_the_peak(chip, batch, m, n, k, dtype):
    efficiency = Roofline(chip)
    matmul = Matmul(batch, m, n, k, dtype)
    assert 0 < efficiency.utilization(matmul) <= 1
    assert 0 < efficiency.rate(matmul) <= max(chip.peak_flops.values())
    assert efficiency.seconds(matmul) == pytest.approx(matmul.flops / efficiency.rate(matmul))


@settings(deadline=None)
@given(chip=chips, batch=st.integers(1, 64), m=sizes, n=sizes, k=sizes, times=st.integers(1, 99))
def test_seconds_count_all_times_and_larger_matmuls_take_longer(chip, batch, m, n, k, times):
    efficiency = Roofline(chip)
    once = efficiency.seconds(Matmul(batch, m, n, k, "float32"))
    assert efficiency.seconds(Matmul(batch, m, n, k, "float32", times)) == pytest.approx(
        times * once
    )
    for larger in (
        (batch + 1, m, n, k),
        (batch, m + 1, n, k),
        (batch, m, n + 1, k),
        (batch, m, n, k + 1),
    ):
        assert efficiency.seconds(Matmul(*larger, "float32")) > 0.999 * once


@pytest.mark.parametrize("chip", REAL, ids=lambda chip: chip.name)
def test_larger_matmuls_run_at_a_better_rate_on_average(chip):
    efficiency = Roofline(chip)
    scales = [[size + 97 * i for i in range(20)] for size in (100, 500, 2500, 12500)]
    means = [
        fmean(efficiency.utilization(Matmul(1, m, m, m, "bfloat16")) for m in scale)
        for scale in scales
    ]
    assert means == sorted(means)
    assert means[-1] > 0.9


@pytest.mark.parametrize("chip", REAL, ids=lambda chip: chip.name)
def test_the_largest_matmul_runs_at_the_fitted_rate(chip):
    kind = "bfloat16" if "bfloat16" in chip.peak_flops else "float16"
    efficiency = chip.efficiency
    assert rate(chip.name, kind) == pytest.approx(
        efficiency.matmul * chip.peak_flops[kind], rel=1e-3
    )
    assert rate(chip.name, kind, fused=True) == pytest.approx(
        efficiency.attention * chip.peak_flops[kind]
    )


@pytest.mark.parametrize(
    ("name", "dtype", "runs_as"),
    [
        ("h100", "float8_e4m3fn", "float8"),
        ("h100", "float8_e5m2", "float8"),
        ("h100", "int8", "int8"),
        ("h100", "float32", "float32"),
        ("a100-80gb", "float8_e4m3fn", "bfloat16"),  # no unit: XLA casts it to a wider one
        ("v4", "float8_e4m3fn", "bfloat16"),
        ("v100", "bfloat16", "float32"),
        ("v100", "float8_e4m3fn", "float16"),
        ("v100", "int8", "float16"),
        ("v5e", "float16", "float32"),
        ("v5e", "int8", "int8"),
    ],
)
def test_a_dtype_without_a_unit_is_widened(name, dtype, runs_as):
    expected = HARDWARE[name].efficiency.matmul * HARDWARE[name].peak_flops[runs_as]
    assert rate(name, dtype) == pytest.approx(expected, rel=1e-3)


def test_edges_of_tiles_idle_cores_and_a_short_k_cost():
    h100 = Roofline(HARDWARE["h100"])
    # one tile for each of 132 cores
    full = h100.utilization(Matmul(1, 128 * 12, 256 * 11, 4096, "bfloat16"))
    assert full == pytest.approx(4096 / (4096 + 128))
    # a second wave
    assert h100.utilization(Matmul(1, 128 * 12 + 1, 256 * 11, 4096, "bfloat16")) < 0.85 * full
    assert h100.utilization(Matmul(1, 128 * 12, 256 * 11, 64, "bfloat16")) < 0.4
    # a batch fills the cores as well
    assert h100.utilization(Matmul(132, 128, 256, 4096, "bfloat16")) == full
    v5e = Roofline(HARDWARE["v5e"])
    # half of 128 lanes
    assert v5e.utilization(Matmul(1, 4096, 64, 4096, "bfloat16")) == pytest.approx(0.5, rel=0.05)


def test_attention_of_short_sequences_is_slower():
    """FlashAttention-2's TFLOP/s without a mask (flash-attention pull 2688): 204 to 302."""
    roofline = Roofline(HARDWARE["h100"])
    measured = {512: 204, 1024: 252, 2048: 275, 4096: 288, 8192: 302}

    def rate_of(keys):
        return roofline.rate(Matmul(8, keys, keys, 128, "bfloat16", 2, fused=True, keys=keys))

    for keys, tflops in measured.items():
        assert rate_of(keys) / rate_of(8192) == pytest.approx(tflops / 302, rel=0.06)
    tpu = Roofline(HARDWARE["v5p"])
    short, long = (Matmul(8, n, n, 128, "bfloat16", 2, fused=True, keys=n) for n in (256, 8192))
    assert tpu.rate(short) == tpu.rate(long)
