"""Checks of model configurations, and presets by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from fsdp_jax.errors import did_you_mean, message

C = TypeVar("C")


def check_sizes(config: Any, *names: str) -> None:
    """Raises ValueError where one of these fields is below 1."""
    for name in names:
        _require(config, name, getattr(config, name) >= 1, "at least 1")


def check_positive(config: Any, *names: str) -> None:
    """Raises ValueError where one of these fields is not above 0."""
    for name in names:
        _require(config, name, getattr(config, name) > 0, "above 0")


def check_multiple(config: Any, name: str, divisor: str) -> None:
    """Raises ValueError unless the field `name` is a multiple of the field `divisor`."""
    size, unit = getattr(config, name), getattr(config, divisor)
    if size % unit:
        what = f"{type(config).__name__}.{name} must be a multiple of {divisor}"
        what += f", got {name} {size}, {divisor} {unit}"
        raise ValueError(message(what, where="model"))


def check_dropout(config: Any) -> None:
    """Raises ValueError unless `dropout` is a probability below 1."""
    _require(config, "dropout", 0 <= config.dropout < 1, "at least 0 and below 1")


def _require(config: Any, name: str, holds: bool, expected: str) -> None:
    if not holds:
        got = getattr(config, name)
        what = f"{type(config).__name__}.{name} must be {expected}, got {got}"
        raise ValueError(message(what, where="model"))


def from_preset(presets: Mapping[str, C], name: str, **overrides: Any) -> C:
    """Returns the preset `name` with fields replaced.

    Raises ValueError for an unknown name or field, with the closest known one.
    """
    _check_known("preset", name, presets)
    config: Any = presets[name]
    for field in overrides:
        _check_known(f"{type(config).__name__} field", field, config.__dataclass_fields__)
    return dataclasses.replace(config, **overrides)


def _check_known(kind: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        what = f"unknown {kind} '{name}'; {did_you_mean(name, known)}"
        raise ValueError(message(what, where="model"))
