"""Shapes of a run: of the model, of a batch, and what a step of it does."""

import dataclasses
from typing import Any

import jax
import numpy as np

from fsdp_jax.errors import ConfigError, did_you_mean, message
from fsdp_jax.models import FAMILIES, Family
from fsdp_jax.planner import Work
from fsdp_jax.train.config import DataConfig, ModelConfig

Batch = dict[str, jax.ShapeDtypeStruct]
CONVENTION = "6 N + 12 L D T a token, attention in full"
KINDS = {"text": ("embedded", "text", "tokens", "instructions", "datasets"), "images": ("images",)}
KINDS["text to text"] = KINDS["text"]


def make_shape(model: ModelConfig, data: DataConfig, found: Any | None = None) -> Any:
    """The configuration of the model, of the class that its family has.

    Args:
        model: its keys.
        data: the sequence's length, which text models are made for.
        found: the configuration of the weights that it starts from, of any family.

    Raises:
        ConfigError: keys that do not go together.

    """
    family = FAMILIES[model.family]
    _check_data(model.family, family, data)
    fields = _fields(model, family)
    if found is not None:
        return _of_weights(model, family, data, found)
    name = model.preset or next(iter(family.presets))
    other = next(
        (name for name, each in FAMILIES.items() if model.preset in each.presets), model.family
    )
    if other != model.family:
        what, where = "family and preset do not go together", "model.preset"
        got, fix = f"{model.preset}, which is a {other}", f"set model.family to {other}"
        raise ConfigError(
            message(what, where=where, expected=f"a {model.family}", got=got, fix=fix)
        )
    if name not in family.presets:
        fix = did_you_mean(name, family.presets)
        raise ConfigError(message(f"unknown preset '{name}'", where="model.preset", fix=fix))
    return family.preset(name, **fields, **lengths(family, data))


def lengths(family: Family, data: DataConfig) -> dict[str, int]:
    """The lengths that a model of text is made for, as its configuration names them; none for
    images.
    """
    if family.task == "text":
        return {"sequence_length": data.sequence_length}
    if family.task == "text to text":
        return {"inputs_length": data.sequence_length, "targets_length": target_length(data)}
    return {}


def target_length(data: DataConfig) -> int:
    """Tokens that a t5 writes at most."""
    return data.target_length or max(1, data.sequence_length // 4)


def batch_shapes(family: Family, shape: Any, data: DataConfig, rows: int) -> Batch:
    """The arrays of a global batch."""
    T, integers, floats = data.sequence_length, np.dtype("int32"), np.dtype("float32")
    arrays: dict[str, tuple[tuple[int, ...], np.dtype]]
    if family.task == "images":
        arrays = {
            "images": ((shape.image_size, shape.image_size, 3), np.dtype("uint8")),
            "labels": ((), integers),
        }
    elif family.task == "text to text":
        U = target_length(data)
        arrays = {"inputs": ((T,), integers), "inputs_mask": ((T,), integers)}
        arrays |= {"targets": ((U,), integers), "mask": ((U,), floats)}
    else:
        arrays = {"tokens": ((T + 1,), integers)}
        if data.packing or data.kind == "instructions":
            arrays |= {
                "mask": ((T,), floats),
                "segments": ((T,), integers),
                "positions": ((T,), integers),
            }
    return {
        name: jax.ShapeDtypeStruct((rows, *dims), dtype) for name, (dims, dtype) in arrays.items()
    }


def work_of(family: Family, shape: Any, data: DataConfig, rows: int) -> Work:
    """What a step does, at the lengths that the data have."""
    at = dataclasses.replace(shape, **lengths(family, data))
    vocab = getattr(shape, "vocab_size", None)
    return Work(rows * family.positions(at), rows * family.flops(at), CONVENTION, vocab)


def _fields(model: ModelConfig, family: Family) -> dict[str, Any]:
    """What replaces a preset's fields. Raises ConfigError for keys that the family has not."""
    known = {field.name for field in dataclasses.fields(family.config)}
    sizes = {
        name: getattr(model, name) for name in ("layers", "width", "heads", "vocab_size", "classes")
    }
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if model.dropout:
        sizes["dropout"] = model.dropout
    for name, value in sizes.items():
        if name not in known:
            got, fix = f"{value} with {model.family}, which has none", "leave it out"
            raise ConfigError(
                message(f"{name} would be ignored", where=f"model.{name}", got=got, fix=fix)
            )
    if model.family == "t5" and "layers" in sizes:
        sizes["decoder_layers"] = sizes["layers"]
    return {"scan_layers": model.scan_layers, **sizes}


def _of_weights(model: ModelConfig, family: Family, data: DataConfig, found: Any) -> Any:
    """The shape of the weights, checked against what is asked for."""
    kind = next(name for name, each in FAMILIES.items() if isinstance(found, each.config))
    if kind != model.family:
        fix = f"set model.family to {kind}"
        raise ConfigError(
            message(
                "the weights are of another family",
                where="model.weights",
                expected=model.family,
                got=kind,
                fix=fix,
            )
        )
    asked = {"preset": model.preset} | {
        name: getattr(model, name) for name in ("layers", "width", "heads")
    }
    asked |= {"vocab_size": model.vocab_size}
    given = sorted(
        name
        for name, value in asked.items()
        if value is not None and value != getattr(found, name, None)
    )
    if given:
        got, fix = ", ".join(f"model.{name} {asked[name]}" for name in given), "leave them out"
        raise ConfigError(
            message(
                "the weights have a shape of their own", where="model.weights", got=got, fix=fix
            )
        )
    for name, length in lengths(family, data).items():
        # T5's positions are relative, Llama's are computed; GPT-2's are a table, which cannot be
        # longer
        if length > getattr(found, name) and family.task == "text":
            got, fix = (
                f"{length}",
                f"use {getattr(found, name)}, the length that the weights were made for",
            )
            raise ConfigError(
                message("the sequence is too long", where="data.sequence_length", got=got, fix=fix)
            )
    changes: dict[str, Any] = {"scan_layers": model.scan_layers}
    if family.task == "text to text":
        changes |= lengths(family, data)
    if model.classes is not None:  # a new head: see `initial_params`
        changes |= {"classes": model.classes}
    if model.dropout:
        changes |= {"dropout": _fields(model, family)["dropout"]}
    return dataclasses.replace(found, **changes)


def _check_data(name: str, family: Family, data: DataConfig) -> None:
    kinds = KINDS[family.task]
    if data.kind not in kinds:
        fix, what = f"set data.kind to {kinds[0]}", "family and data do not go together"
        expected = f"{' or '.join(kinds)}, for {name}"
        raise ConfigError(
            message(what, where="data.kind", expected=expected, got=data.kind, fix=fix)
        )
    ignored = [
        key
        for key, given in (("packing", data.packing), ("target_length", data.target_length))
        if given
    ]
    ignored = [
        key
        for key in ignored
        if {"packing": "text", "target_length": "text to text"}[key] != family.task
    ]
    if ignored:
        fix = f"leave it out, or choose another family than {name}"
        raise ConfigError(
            message(f"{ignored[0]} would be ignored", where=f"data.{ignored[0]}", got=name, fix=fix)
        )
