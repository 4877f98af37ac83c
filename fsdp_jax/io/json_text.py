"""JSON that others wrote: whatever is wrong with it is a ValueError."""

import json
import math
from collections import Counter
from typing import Any


def parse_json(text: str, *, constants: bool = False) -> Any:
    """Returns the value of a JSON text.

    Raises ValueError if it is not JSON, repeats a key, is nested too deeply, or has a number that
    is not finite; `constants` allows NaN and Infinity by these names, as Python writes them.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_without_repeats,
            parse_constant=None if constants else _finite,
            parse_float=None if constants else _finite,
        )
    except RecursionError:
        raise ValueError("too many nested lists or objects") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {repeated!r} twice in one object")
    return values


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text}, which is not a finite number")
    return number
