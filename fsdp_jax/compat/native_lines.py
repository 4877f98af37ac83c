"""Lines that native libraries print on stdout."""

import re

GLOO_PARTS = ("[Gloo] Rank ", " is connected to ", " peer ranks. ", "peer ranks is : ")
"""Texts of the line that Gloo prints of each group of devices that it has connected."""
_GLOO = re.compile(
    r"(\[Gloo\] Rank ?|\d+| ?is connected to ?| ?peer ranks\. ?"
    r"|Expected number of connected peer ranks is : ?| )*"
)


def is_of_gloo(line: str, after: bool = False) -> bool:
    """Tells whether a line is what Gloo prints of its connections, or parts of it.

    Threads print into each other's lines, so that the parts come in any order, with empty lines
    and numbers alone behind them. `after`: whether the line before was Gloo's.
    """
    known = "[Gloo] Rank" in line or "peer ranks" in line or after
    return known and _GLOO.fullmatch(line) is not None
