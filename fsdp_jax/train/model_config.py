"""The configuration of the model itself, such as a GPTConfig, from the keys of a run."""

import dataclasses
from pathlib import Path
from typing import Any

from fsdp_jax.data.checks import ignored_key_error
from fsdp_jax.data.options import DataOptions, kinds_for
from fsdp_jax.errors import ConfigError, did_you_mean
from fsdp_jax.models import FAMILIES, Family
from fsdp_jax.models.families import family_of
from fsdp_jax.train.config import ModelConfig
from fsdp_jax.train.shapes import length_fields
from fsdp_jax.weights import read_config

# The keys of `model` that replace fields of a family's configuration, but for those that any
# weights may be used with.
_SIZES = [
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.name not in ("dropout", "scan_layers")
    and any(
        field.name in {each.name for each in dataclasses.fields(family.config)}
        for family in FAMILIES.values()
    )
]


def make_model_config(model: ModelConfig, data: DataOptions) -> Any:
    """Makes the configuration of a preset or of `model.weights`, with the keys that override it.

    It is of the family's own type, such as GPTConfig. Raises ConfigError for keys that do not fit.
    """
    family = FAMILIES[model.family]
    _check_data_keys(family, data)
    fields = _field_overrides(model, family)
    if model.weights is not None:
        weights = read_config(Path(model.weights).expanduser())
        return _config_of_weights(model, family, data, weights, fields)
    preset = model.preset or next(iter(family.presets))
    if preset not in family.presets:
        _refuse_preset(family, preset)
    return family.preset(preset, **fields, **length_fields(family, data))


def _field_overrides(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Selects {field: value} of the set keys that replace a preset's fields.

    Raises ConfigError for keys that the family does not have.
    """
    known = {field.name for field in dataclasses.fields(family.config)}
    fields = {name: getattr(model, name) for name in _SIZES if getattr(model, name) is not None}
    if model.dropout:
        fields["dropout"] = model.dropout
    for name, value in fields.items():
        if name not in known:
            got = f"{value} with {model.family}, which has none"
            raise ignored_key_error(f"model.{name}", got)
    if "layers" in fields and "decoder_layers" in known:
        fields["decoder_layers"] = fields["layers"]
    return {"scan_layers": model.scan_layers, **fields}


def _config_of_weights(
    model: ModelConfig, family: Family, data: DataOptions, weights: Any, overrides: dict[str, Any]
) -> Any:
    """Applies the allowed overrides to `weights`, the configuration of the weights.

    Raises ConfigError for keys that contradict it, and for sequences that are too long for it.
    """
    name, where = family_of(weights).name, "model.weights"
    if name != model.family:
        raise ConfigError(
            "the weights are of another family",
            where=where,
            expected=model.family,
            got=name,
            fix=f"set model.family to {name}",
        )

    # Keys that contradict the shape of the weights.
    # A larger vocabulary has new rows, see `initial_params`.
    keys = ["preset", *(name for name in _SIZES if name != "classes")]
    if (model.vocab_size or 0) > getattr(weights, "vocab_size", 0):
        keys.remove("vocab_size")
    differing = [
        f"model.{key} {getattr(model, key)}"
        for key in keys
        if getattr(model, key) not in (None, getattr(weights, key, None))
    ]
    if differing:
        raise ConfigError(
            "the weights have a shape of their own",
            where=where,
            got=", ".join(differing),
            fix="leave them out",
        )

    # Keys that change it; another number of classes has a new head: see `initial_params`.
    changeable = ("scan_layers", "classes", "dropout", "vocab_size")
    changes = {name: overrides[name] for name in changeable if name in overrides}
    for name, length in length_fields(family, data).items():
        longest = getattr(weights, name)
        if family.task.any_length:
            changes[name] = length
        elif length > longest:
            raise ConfigError(
                "the sequence is too long",
                where="data.sequence_length",
                got=length,
                fix=f"use {longest}, the length that the weights were made for",
            )
    return dataclasses.replace(weights, **changes)


def _refuse_preset(family: Family, preset: str) -> None:
    """Raises ConfigError for a preset that the family does not have."""
    where = "model.preset"
    for other, each in FAMILIES.items():
        if preset in each.presets:
            raise ConfigError(
                "family and preset do not go together",
                where=where,
                expected=f"a {family.name}",
                got=f"{preset}, which is a {other}",
                fix=f"set model.family to {other}",
            )
    fix = did_you_mean(preset, family.presets)
    raise ConfigError(f"unknown preset '{preset}'", where=where, fix=fix)


def _check_data_keys(family: Family, data: DataOptions) -> None:
    """Raises ConfigError for `data` of another task, or keys of it that the task does not read."""
    name, kinds = family.name, kinds_for(family.task.name)
    if data.kind not in kinds:
        raise ConfigError(
            "family and data do not go together",
            where="data.kind",
            expected=f"{' or '.join(kinds)}, for {name}",
            got=data.kind,
            fix=f"set data.kind to {kinds[0]}",
        )
    every_key = {key for each in FAMILIES.values() for key in each.task.data_keys}
    for key in sorted(every_key.difference(family.task.data_keys)):
        if getattr(data, key):
            fix = f"leave it out, or choose another family than {name}"
            raise ignored_key_error(f"data.{key}", name, fix)
