"""What chips achieve of their peaks: the constants of the roofline, each with where it comes from.

One constant, `product`, is fitted on published training runs for h100, a100 and v6e
(`scripts/validate_plan.py` says on which, and holds the planner against others). All else is
measurements of others, or by analogy where it is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from types import MappingProxyType
from typing import NamedTuple

from fsdp_jax.planner.machines.hardware import Hardware
from fsdp_jax.planner.machines.matmul import Product

MICRO = 1e-6


class Protocol(NamedTuple):
    """A way to send; the fastest for a size is taken.

    Attributes:
        base: seconds of any collective.
        link: of a step inside a host, or to the next chip.
        network: of a step between hosts, or slices.
        share: of the bandwidth that it reaches.

    """

    base: float
    link: float
    network: float
    share: float


@dataclass(frozen=True)
class Constants:
    """Of one kind of chip; fractions are of the `Hardware`'s peaks.

    Attributes:
        product: of the peak rate, by a product that fills the chip.
        tiles: (m, n, share of `product`) of what a product is cut into; the best is taken.
        cores: how many tiles run at once.
        ramp: length of k at which half a tile's time is filling and draining.
        attention: of the peak rate, by an attention kernel, as its algorithm counts (5 products in
            the backward).
        bandwidth: of the memory's, by fused elementwise chains.
        link: of the links' bandwidth, by large rings.
        network: of the network's.
        tree: of a ring's rate, by an all-reduce over trees.
        protocols: latencies.
        launch: seconds of a kernel beside its work.
        source: where the figures come from.

    """

    product: float
    tiles: tuple[tuple[int, int, float], ...]
    cores: int
    ramp: int
    attention: float
    bandwidth: float
    link: float
    network: float
    tree: float
    protocols: tuple[Protocol, ...]
    launch: float
    source: str


# NCCL's own tuning table (src/graph/tuning.cc): LL128 and Simple rings, NVLink and network.
_NCCL = (
    Protocol(14.0 * MICRO, 1.9 * MICRO, 4.0 * MICRO, 0.92),
    Protocol(8.4 * MICRO, 3.4 * MICRO, 14.0 * MICRO, 1.0),
)
# "How To Scale Your Model": about 1 us a hop; slices are joined through their hosts.
_ICI = (Protocol(3 * MICRO, 1 * MICRO, 30 * MICRO, 1.0),)
_TILES = (
    (128, 256, 1.0),
    (128, 128, 0.93),
    (64, 128, 0.8),
    (64, 64, 0.6),
)  # cuBLAS's kernels, best shapes first

_H100 = Constants(
    product=0.57, tiles=_TILES, cores=132, ramp=128, attention=0.46, bandwidth=0.88, link=370 / 450, network=0.92,
    tree=0.92, protocols=_NCCL, launch=1.8 * MICRO,
    source="product: fitted on MosaicML's runs; alone such products reach 0.70-0.80 (ml-engineering's accelerator"
    " benchmarks), in steps the chip is short of power; attention: cuDNN in FlashAttention-3's figures (causal, head"
    " dim 128, T 4k, both ways); bandwidth: BabelStream triad, Azure ND_H100_v5 (0.87-0.95); link: 370 GB/s of 450,"
    " nccl-tests issue 212; network: 46-48 GB/s of a 400 Gb port, nccl-tests issue 290; launch: How To Scale Your"
    " Model, GPUs",
)  # fmt: skip
_A100 = replace(
    _H100, product=0.78, cores=108, attention=0.52, bandwidth=0.81, link=230 / 300,
    source="product: fitted on MosaicML's runs; alone 0.80-0.87 (ml-engineering, Azure ND_A100_v4); attention:"
    " FlashAttention-2, section 4; bandwidth: BabelStream, Azure ND_A100_v4 (0.79-0.86); link: 230"
    " GB/s of 300, nccl-tests issue 149; network: 96 of 100, nccl-tests issue 119",
)  # fmt: skip
_TPU = Constants(
    product=0.92, tiles=((8, 128, 1.0),), cores=1, ramp=128, attention=0.50, bandwidth=0.88, link=0.85, network=0.8,
    tree=1.0, protocols=_ICI, launch=1.5 * MICRO,
    source="product: 80-90% of simple kernels, JAX's Pallas TPU matmul tutorial, XLA above it; link: 0.82 measured on"
    " an open v5e axis, How To Scale Your Model, sharding",
)  # fmt: skip

CONSTANTS: Mapping[str, Constants] = MappingProxyType(
    {
        "h100": _H100,
        "h200": replace(_H100, bandwidth=0.86, source=f"{_H100.source}; bandwidth: BabelStream, Azure ND_H200_v5"),
        "b200": replace(
            _H100, cores=148, attention=0.45, bandwidth=0.90, link=650 / 900,
            source="by analogy with h100, whose products alone reach as much (0.776, ml-engineering); not measured",
        ),
        "a100-40gb": _A100,
        "a100-80gb": _A100,
        "v100": replace(
            _A100, product=0.72, tiles=((128, 128, 1.0), (64, 128, 0.85), (64, 64, 0.65)), cores=80, attention=0.30,
            bandwidth=0.85, link=120 / 150, network=0.9,
            source="product: alone 101 of 112 TFLOP/s on a PCIe card, an NVIDIA forum thread, less what a100's is below"
            " its own; link: 6 of NCCL's 20 GB/s; others by analogy with a100",
        ),
        "v4": _TPU,
        "v5e": _TPU,
        "v5p": _TPU,
        "v6e": replace(_TPU, tiles=((8, 256, 1.0),), ramp=256, attention=0.35),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Efficiency:
    """Rates that a chip is reckoned to achieve."""

    chip: Hardware
    constants: Constants
    _seconds: dict[Product, float] = field(default_factory=dict, compare=False, repr=False)

    def seconds(self, product: Product) -> float:
        """Of all `times` of a product."""
        if product not in self._seconds:
            self._seconds[product] = product.times * product.flops / self.rate(product)
        return self._seconds[product]

    def rate(self, product: Product) -> float:
        """FLOP/s of a product of this shape and dtype."""
        peaks = self.chip.peak_flops
        kind = "float8" if product.dtype.startswith("float8") else product.dtype
        wider = ("bfloat16", "float16", "float32") if kind in ("float8", "int8") else ("float32",)
        peak = next(
            peaks[each] for each in (kind, *wider) if each in peaks
        )  # widened where there is no unit
        return peak * (
            self.constants.attention
            if product.fused
            else self.constants.product * self.share(product)
        )

    def share(self, product: Product) -> float:
        """Of the largest product's rate: what edges of tiles, idle cores and short k leave."""
        c = self.constants
        filled = max(share * _filled(product, m, n, c.cores) for m, n, share in c.tiles)
        return filled * product.k / (product.k + c.ramp)

    @property
    def memory_rate(self) -> float:
        """Bytes/s of device memory."""
        assert self.chip.memory_bandwidth is not None
        return self.chip.memory_bandwidth * self.constants.bandwidth


def efficiency_of(chip: Hardware) -> Efficiency:
    """What a chip of the hardware table achieves; virtual CPU devices have no constants."""
    return Efficiency(chip, CONSTANTS[chip.name])


def _filled(product: Product, m: int, n: int, cores: int) -> float:
    """The part of the tiles that holds values, times the part of the cores that has a tile."""
    tiles = product.batch * ceil(product.m / m) * ceil(product.n / n)
    values = product.batch * product.m * product.n / (tiles * m * n)
    return values * tiles / (ceil(tiles / cores) * cores)
