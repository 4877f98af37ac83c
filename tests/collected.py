"""Cases of one property in one test: it runs all of them, and names each that fails."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@contextmanager
def collected() -> Iterator[Callable[[object], AbstractContextManager[None]]]:
    """Gives `case`; a block `with case(name):` that fails does not end the test before its end."""
    failures: list[BaseException] = []
    count = 0

    @contextmanager
    def case(name: object) -> Iterator[None]:
        nonlocal count
        count += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"in the case {name}")
            failures.append(error)

    try:
        yield case
    finally:  # also where an error ends the test between two cases
        if failures:
            raise BaseExceptionGroup(f"{len(failures)} of {count} cases failed", failures)
    assert count, "no case ran"
