"""Model configurations as `config.json`, for every family."""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from fsdp_jax.errors import ConfigError, did_you_mean
from fsdp_jax.io.json_text import read_json_object
from fsdp_jax.models.families import FAMILIES, Family, family_of
from fsdp_jax.models.huggingface.config_json import (
    CONFIG,
    NO_MODEL,
    TOKENS,
    Json,
    TokenIds,
    refuse_unsupported,
)
from fsdp_jax.models.huggingface.table import Table

LARGEST = (1 << 31) - 1
"""The largest size of a dim."""
MOST_LAYERS = 100_000
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""How Hugging Face names a model: `ORGANIZATION/NAME`."""


def read_config(folder: str | os.PathLike[str], **fields: Any) -> Any:
    """Reads our configuration of the model in a folder with a `config.json`.

    It has the normalization of images too, a ViT's from the `preprocessor_config.json` in the
    folder. Dropout rates are settings of a training run, and are not read. No code from the folder
    is run.

    Args:
        folder: of Hugging Face's or timm's layout.
        **fields: of the configuration, to be replaced: `scan_layers`, `dtype`, `sequence_length`.

    Returns:
        The configuration of a model of any family, such as a GPTConfig.

    Raises:
        ConfigError: no such file, an unknown kind of model, or one that computes what we do not
            implement: every key by name.
        DamageError: a file that is not JSON.

    """
    directory = Path(folder)
    where = directory / CONFIG
    if not directory.exists() and HUB_NAME.fullmatch(str(folder)):
        raise ConfigError(
            "no such folder, and nothing is downloaded",
            where=str(folder),
            fix=f"hf download {folder} --local-dir weights, and then the folder weights",
        )
    content = read_json_object(where, NO_MODEL)
    if "auto_map" in content:
        raise ConfigError(
            "a model with its own code in the folder, which is never run",
            where=str(where),
            got=content["auto_map"],
        )
    # the family's own reader, other files of the folder, and the fields that the caller replaces
    try:
        weight_format = _family_by_content(content, where).weight_format
        config = weight_format.read(content, where)
        config = dataclasses.replace(config, **weight_format.read_preprocessor(directory) | fields)
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # values that are not numbers, or do not fit together
        got: object = error
        if not isinstance(error, ValueError):  # its text alone may be a number or a name
            got = f"{type(error).__name__}: {error}"
        raise ConfigError("a model that is not supported", where=str(where), got=got) from error
    refuse_unsupported(list(_impossible_values(config)), where)
    return config


def config_json(config: Any, *, dtype: str | None = None, tokens: TokenIds | None = None) -> Json:
    """Makes the content of `config.json` for one of our configurations.

    Args:
        config: of any family.
        dtype: of the weights.
        tokens: ids by the names in `TOKENS`; those of a text model that are not given are written
            as null, because transformers has defaults for absent ones.

    Raises:
        ConfigError: a configuration of no family, or one that the format cannot express; tokens
            that the family does not have, or computes with under other ids, as T5 its padding.

    """
    family = family_of(config)
    weight_format = family.weight_format
    content = dict.fromkeys(weight_format.tokens) | weight_format.write(config)
    # an id that the format has written already is computed with: no other can be stated
    for token, given in (tokens or {}).items():
        if token not in weight_format.tokens or content[token] not in (None, given):
            names = " or ".join(weight_format.tokens) or f"none, for {family.name}"
            raise ConfigError(
                "not a valid token id", where=token, expected=content.get(token, names), got=given
            )
        content[token] = given
    # timm's has neither key
    if weight_format.model_type is None:
        return content
    content["model_type"] = weight_format.model_type
    if dtype is not None:
        content["torch_dtype"] = dtype
    return content


def config_files(
    config: Any, *, dtype: str | None = None, tokens: TokenIds | None = None
) -> dict[str, bytes]:
    """Makes {name: content} of all files that `read_config` reads, `config.json` last.

    Arguments and errors are those of `config_json`.
    """
    contents = family_of(config).weight_format.write_preprocessor(config)
    contents = contents | {CONFIG: config_json(config, dtype=dtype, tokens=tokens)}
    return {
        name: (json.dumps(content, indent=2) + "\n").encode() for name, content in contents.items()
    }


def token_ids(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the ids of the `TOKENS` from the folder's `config.json`: {name: id or ids}.

    Raises ConfigError.
    """
    content = read_json_object(Path(folder) / CONFIG, NO_MODEL)
    return {name: content[name] for name in TOKENS if content.get(name) is not None}


def table_of(config: Any) -> Table:
    """Looks up the weight table for `config`. Raises ConfigError for one of no family."""
    return family_of(config).weight_format.table(config)


def _impossible_values(config: Any) -> Iterator[str]:
    """Yields a line for each field of a configuration with a wrong type or an absurd number.

    A file may have anything there, and a table of weights is as long as there are layers.
    """
    # types by identity: True is an int for `isinstance`, and no size
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        limit = LARGEST
        if name.endswith("layers"):
            limit = MOST_LAYERS
        possible = {
            int: type(value) is int and 0 < value <= limit,
            float: type(value) in (int, float) and abs(value) <= sys.float_info.max,
            bool: type(value) is bool,
        }
        if not possible.get(hint, True):
            yield f"{name}: {value!r} is not a possible {hint.__name__}"


def _family_by_content(content: Json, where: Path) -> Family:
    """Finds the family of a `config.json`: by `model_type`, or timm's by its `architecture`."""
    model_type = content.get("model_type")
    types = {name: family.weight_format.model_type for name, family in FAMILIES.items()}
    for name, known in types.items():
        if known == model_type and (known or "architecture" in content):
            return FAMILIES[name]
    # timm's files have no `model_type`, so the fix names their families otherwise
    what = "an unknown kind of model"
    fix = did_you_mean(str(model_type), [known or name for name, known in types.items()])
    if timm := ", ".join(name for name, known in types.items() if not known and name in fix):
        fix += f" ({timm}: as timm saves it, by an `architecture` in place of a `model_type`)"
    raise ConfigError(what, where=str(where), got=model_type, fix=fix)
