"""Matrix products by their shape: what a step computes, and what most of its time goes into."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """`times` products of [batch, m, k] with [batch, k, n] on one device, in one step.

    Attributes:
        dtype: numpy name of the operands' dtype, the wider of the two.
        times: how often a step runs it, loops counted.
        fused: it stands inside an attention kernel, whose m x n intermediate never reaches device
            memory.

    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    times: int = 1
    fused: bool = False

    @property
    def flops(self) -> int:
        """Multiplications and additions of one of them, two for each pair."""
        return 2 * self.batch * self.m * self.n * self.k
