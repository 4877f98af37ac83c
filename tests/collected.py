"""Cases of one property in one test: it runs all of them, and names each that fails."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest


@contextmanager
def collected() -> Iterator[Callable[[object], AbstractContextManager[None]]]:
    """Gives `case`; a block `with case(name):` that fails does not end the test before its end."""
    failures = []

    @contextmanager
    def case(name: object) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")

    yield case
    assert not failures, "\n".join([f"{len(failures)} cases failed:", *failures])


def fields(said: str | dict[str, Any], folder: object = "") -> dict[str, Any]:
    """Arguments of `refused`; a text alone is a part of `got`.

    A `where` that begins with "./" is a place below the folder.
    """
    if isinstance(said, str):
        return {"got": said}
    where = said.get("where", "")
    return said | {"where": f"{folder}/{where[2:]}"} if where.startswith("./") else said
