"""The base of the model configurations, and presets by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from fsdp_jax.errors import PACKAGE, ArgumentError, did_you_mean

C = TypeVar("C")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """Base of the configurations: the sizes and settings that all models have.

    Raises ValueError for an int below 1, a float that is not above 0, and a `dropout` that is no
    probability below 1; not for fields that a user's subclass adds.
    """

    layers: int
    width: int
    heads: int
    scan_layers: bool = True
    """Stack the blocks' parameters and compile one block per kind; False keeps lists of blocks."""
    dtype: str | None = None  # compute dtype by name; None follows the parameters and inputs

    def __post_init__(self) -> None:
        # the fields of the nearest class of this package, not those of a user's subclass
        own = [each for each in type(self).__mro__ if each.__module__.startswith(PACKAGE)]
        for field in dataclasses.fields(own[0]):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name == "dropout":
                self.require(field.name, 0 <= value < 1, "at least 0 and below 1")
            elif field.type is int:
                self.require(field.name, value >= 1, "at least 1")
            elif field.type is float:
                self.require(field.name, value > 0, "above 0")

    def require(self, name: str, holds: bool, expected: str) -> None:
        """Raises ValueError with the value of the field `name` unless `holds`."""
        if not holds:
            raise ArgumentError(
                f"{type(self).__name__}.{name} must be {expected}, got {getattr(self, name)}",
                where="model",
            )

    def require_multiple(self, name: str, divisor: str) -> None:
        """Raises ValueError unless the field `name` is a multiple of the field `divisor`."""
        size, unit = getattr(self, name), getattr(self, divisor)
        if size % unit:
            raise ArgumentError(
                (
                    f"{type(self).__name__}.{name} must be a multiple of {divisor}, got {name} "
                    f"{size}, {divisor} {unit}"
                ),
                where="model",
            )


def from_preset(presets: Mapping[str, C], name: str, **overrides: Any) -> C:
    """Looks up the preset `name`, and replaces fields of it.

    Raises ValueError for an unknown name or field, with the closest known one.
    """
    _check_known("preset", name, presets)
    config: Any = presets[name]
    for field in overrides:
        _check_known(f"{type(config).__name__} field", field, config.__dataclass_fields__)
    return dataclasses.replace(config, **overrides)


def _check_known(kind: str, name: str, known: Mapping[str, Any]) -> None:
    """Raises ValueError, with the closest known name, unless `name` is a key of `known`."""
    if name not in known:
        raise ArgumentError(f"unknown {kind} '{name}'; {did_you_mean(name, known)}", where="model")
