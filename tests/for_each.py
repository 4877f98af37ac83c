"""A decorator that runs a test for each of many cases, as one test."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest
from collected import collected


def for_each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[..., Any]:
    """Runs a test for each case, as `pytest.mark.parametrize` does, but as one test.

    Its fixtures are those of the test: one `tmp_path` or `monkeypatch` for all cases.
    """
    single = isinstance(names, str)
    cases = [(case,) if single else case for case in cases]
    assert not any(isinstance(case, type(pytest.param())) for case in cases), "marks would be lost"
    names = (names,) if single else names

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run_all(**fixtures: Any) -> None:
            with collected() as attempt:
                for case in cases:
                    with attempt(case):
                        test(**fixtures, **dict(zip(names, case, strict=True)))

        signature = inspect.signature(test)
        others = [each for name, each in signature.parameters.items() if name not in names]
        run_all.__signature__ = signature.replace(parameters=others)
        return run_all

    return decorate
