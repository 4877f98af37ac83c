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


def below(folder: object, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields for `refused`, of which a `where` that begins with "./" is a place below a folder."""
    where = fields.get("where", "")
    return fields | {"where": f"{folder}/{where[2:]}"} if where.startswith("./") else fields
