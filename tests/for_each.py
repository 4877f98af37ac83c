"""Cases of one property in one test: it runs all of them, and names each that fails."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest


def for_each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[..., Any]:
    """Runs a test for each case, as `pytest.mark.parametrize` does, but as one test.

    Its fixtures are those of the test: one `tmp_path` or `monkeypatch` for all cases.
    """
    single = isinstance(names, str)
    cases = [(case,) if single else case for case in cases]
    names = (names,) if single else names

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run_all(**fixtures: Any) -> None:
            failures = []
            for case in cases:
                try:
                    test(**fixtures, **dict(zip(names, case, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"{case}: {type(error).__name__}: {error}")
            assert not failures, "\n".join([f"{len(failures)} cases failed:", *failures])

        signature = inspect.signature(test)
        others = [each for name, each in signature.parameters.items() if name not in names]
        run_all.__signature__ = signature.replace(parameters=others)
        return run_all

    return decorate
