"""Reads JSON that others wrote, strictly."""

import errno
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.io.folder_kinds import FIXES, kind_of_folder
from fsdp_jax.io.regular_files import read_regular


def parse_json(text: str, *, constants: bool = False) -> Any:
    """Parses a JSON text.

    Raises ValueError if it is not JSON, repeats a key, is nested too deeply, or has a number that
    is not finite; `constants` allows NaN and Infinity by these names, as Python writes them.
    """
    parse_number: Callable[[str], float] = float
    if not constants:
        parse_number = _parse_finite
    try:
        return json.loads(
            text,
            object_pairs_hook=_dict_without_repeats,
            parse_constant=parse_number,
            parse_float=parse_number,
        )
    except RecursionError:
        raise ValueError("too many nested lists or objects") from None


NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


def read_json_object(path: Path, what: str, *, fix: str = "") -> dict[str, Any]:
    """Reads the object of a JSON file.

    Raises ConfigError if there is no such file, and DamageError if it cannot be read or is no
    object; the first line of both is `what`. `fix`: where there is no such file.
    """
    try:
        content = parse_json(read_regular(path).decode())
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in NO_FILE:
            expected = "a folder with this file in it"
            kind = kind_of_folder(path.parent)
            got = f"{error}; the folder is {kind}" if kind in FIXES else str(error)
            fix = FIXES.get(kind, fix)
            raise ConfigError(what, where=str(path), expected=expected, got=got, fix=fix) from error
        raise DamageError(
            what,
            where=str(path),
            expected="an object of JSON",
            got=error,
            fix="copy or download the file again",
        ) from error
    return content


def _dict_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes the dict of a JSON object. Raises ValueError for a key that stands twice in it."""
    # Python would keep the last value in silence.
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {repeated!r} twice in one object")
    return values


def _parse_finite(text: str) -> float:
    """Parses the text of a number. Raises ValueError if it is not finite."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text}, which is not a finite number")
    return number
