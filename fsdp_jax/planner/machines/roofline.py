"""Matmuls by their shape, and how long a chip takes for them."""

from dataclasses import dataclass
from functools import cache, partial
from math import ceil

import jax.numpy as jnp

from fsdp_jax.planner.machines.hardware import Hardware


@dataclass(frozen=True)
class Matmul:
    """`times` products of [batch, m, k] with [batch, k, n] on one device, in one step."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str  # numpy name of the operands' dtype, the wider of the two
    times: int = 1  # how often a step runs it, loop trips counted
    fused: bool = False  # of an attention kernel: the m x n intermediate stays out of device memory
    keys: int = 0  # that a query of a known attention kernel sees, in the mean; 0 elsewhere
    assumed: str = ""  # the name of its kernel, whose work is assumed and not read; "" elsewhere

    @property
    def flops(self) -> int:
        """Multiplications and additions of one product; `times` is not counted."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Operands and results in device memory, of all `times` products."""
        elements = self.m * self.k + self.k * self.n
        if not self.fused:
            elements += self.m * self.n
        return self.times * self.batch * jnp.dtype(self.dtype).itemsize * elements


class Roofline:
    """Rates that a chip achieves, as its `Efficiency` says: FLOP/s and bytes/s."""

    def __init__(self, chip: Hardware) -> None:
        assert chip.efficiency is not None, f"{chip.name} has no efficiency"
        assert chip.memory_bandwidth is not None
        assert chip.host_bandwidth is not None
        self.chip = chip
        self.efficiency = chip.efficiency
        self.memory_rate = chip.memory_bandwidth * chip.efficiency.memory
        self.host_rate = chip.host_bandwidth * chip.efficiency.host  # in one direction
        self.seconds = cache(self._matmul_seconds)
        self.seconds_beside_collective = cache(
            partial(self._matmul_seconds, beside_collective=True)
        )

    def _matmul_seconds(self, matmul: Matmul, *, beside_collective: bool = False) -> float:
        """Computes the seconds of a matmul, run as often as its `times`.

        `beside_collective`: on the cores that a collective leaves it.
        """
        cores = self.efficiency.cores
        if beside_collective:
            cores -= self.efficiency.collective_cores
        return matmul.times * matmul.flops / self.rate(matmul, cores)

    def rate(self, matmul: Matmul, cores: int | None = None) -> float:
        """Computes the FLOP/s of a matmul of this shape and dtype, on all or some cores."""
        all_cores = self.efficiency.cores
        cores = cores or all_cores
        peaks = self.chip.peak_flops
        dtype = matmul.dtype
        if dtype.startswith("float8"):
            dtype = "float8"
        # a dtype without a matrix unit is widened
        wider: tuple[str, ...] = ("float32",)
        if dtype in ("float8", "int8"):
            wider = ("bfloat16", "float16", "float32")
        peak = next(peaks[each] for each in (dtype, *wider) if each in peaks)
        if matmul.fused:
            rate = peak * self.efficiency.attention
            if matmul.keys:
                rate *= matmul.keys / (matmul.keys + self.efficiency.attention_ramp)
            return rate * cores / all_cores
        rate = peak * self.efficiency.matmul * self.utilization(matmul, cores)
        return rate * cores / all_cores

    def utilization(self, matmul: Matmul, cores: int | None = None) -> float:
        """Computes the fraction of the rate that tile edges, idle cores and a short k leave."""
        # of the sizes that the library has for tiles, the best for this shape
        efficiency = self.efficiency
        utilization = max(
            share * _tile_utilization(matmul, m, n, cores or efficiency.cores)
            for m, n, share in efficiency.tiles
        )
        return utilization * matmul.k / (matmul.k + efficiency.ramp)


def _tile_utilization(matmul: Matmul, m: int, n: int, cores: int) -> float:
    """Computes the fraction of all tile elements, over all cores and waves, that hold values.

    `m`, `n`: sizes of a tile; `cores`: how many tiles run at once.
    """
    # tiles at the edges are computed whole, and the last wave as long as the others
    tiles = matmul.batch * ceil(matmul.m / m) * ceil(matmul.n / n)
    waves = ceil(tiles / cores)
    return matmul.batch * matmul.m * matmul.n / (waves * cores * m * n)
