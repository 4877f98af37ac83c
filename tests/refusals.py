"""Asserts that an error is of a type and has certain fields, whatever its text.

The text of a message is asserted once, in the test of the place that writes it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fsdp_jax.errors import ArgumentError, ReadableError


@contextmanager
def refused(
    what: str = "",
    *,
    error: type[ReadableError] = ArgumentError,
    where: str | None = None,
    expected: str = "",
    got: str = "",
    fix: str = "",
) -> Iterator[pytest.ExceptionInfo[ReadableError]]:
    """Fails unless the block raises `error` with these fields.

    `where` is the whole field; of the others, the given text is a part.
    """
    with pytest.raises(error) as caught:
        yield caught
    found = caught.value
    if where is not None:
        assert found.where == where, found
    parts = {"what": what, "expected": expected, "got": got, "fix": fix}
    for name, part in parts.items():
        assert part in getattr(found, name), f"{part!r} is not in {name!r} of:\n{found}"


def fields(said: str | dict[str, Any], folder: object = "") -> dict[str, Any]:
    """Makes arguments of `refused` for a table of cases.

    A text alone is a part of `got`. A `where` that begins with "./" is a path in the folder.
    """
    if isinstance(said, str):
        return {"got": said}
    where = said.get("where", "")
    return said | {"where": f"{folder}/{where[2:]}"} if where.startswith("./") else said


def not_refused(cases):
    """The cases that are not refused as they should be, with what became of them.

    `cases`: {name: (function, fields of its ArgumentError)}; `where` is the whole field, of the
    others the given text is a part.
    """
    found = {}
    for name, (call, fields) in cases.items():
        try:
            found[name] = f"accepted: {call()}"
        except ArgumentError as error:
            for field, text in fields.items():
                value = getattr(error, field)
                if not (text == value if field == "where" else text in value):
                    found[name] = f"{field!r} is not {text!r} in {error}"
    return found
