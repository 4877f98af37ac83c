"""Types of numbers with limits, as settings have them: `Annotated[int, Range(1)]`."""

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """Smallest and largest value of a number, as in `Annotated[int, Range(1)]`."""

    least: float
    most: float = math.inf


# Steps, rows and tokens are counted in int32; bytes and parameters in int64.
INT32, INT64 = 2**31 - 1, 2**63 - 1
Positive = Annotated[int, Range(1, INT32)]
NonNegative = Annotated[int, Range(0, INT32)]
Size = Annotated[int, Range(1, INT64)]
NonNegativeFloat = Annotated[float, Range(0)]
Devices = Annotated[int, Range(1, 4096)]  # virtual ones; each has a thread of its own
MeshSize = Annotated[int, Range(-1, INT32)]
