"""Model configurations as `config.json`, for every family."""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

from fsdp_jax.errors import ConfigError, DamageError, did_you_mean
from fsdp_jax.io.json_text import parse_json, read_json_object
from fsdp_jax.io.model_files import CONFIG, MODEL_FILES
from fsdp_jax.io.regular_files import read_regular
from fsdp_jax.models.families import FAMILIES, Family, family_of
from fsdp_jax.models.huggingface.config_json import (
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
QUANTIZATION = "quantization_config"
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
    # How bitsandbytes has stored weights in 4 bits, which an import reads from them.
    stored = content.get(QUANTIZATION)
    if not isinstance(stored, dict):
        stored = {}
    if stored.get("quant_method") == "bitsandbytes" and stored.get("load_in_4bit"):
        del content[QUANTIZATION]
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


def config_json(
    config: Any,
    *,
    dtype: str | None = None,
    tokens: TokenIds | None = None,
    like: str | os.PathLike[str] | None = None,
) -> Json:
    """Makes the content of `config.json` for one of our configurations.

    Args:
        config: of any family.
        dtype: of the weights.
        tokens: ids by the names in `TOKENS`. Without `like`, those of a text model that are not
            given are written as null, because transformers has defaults for absent ones.
        like: a folder whose `config.json` is written again: all its keys as they are, but for
            those of what `config` has otherwise, and the class of the model.

    Raises:
        ConfigError: a configuration of no family, or one that the format cannot express; tokens
            that the family does not have, or computes with under other ids, as T5 its padding;
            those of `read_config` for `like`.
        DamageError: a file of `like` cannot be read.

    """
    family = family_of(config)
    weight_format = family.weight_format
    written = weight_format.write(config)
    content = dict.fromkeys(weight_format.tokens) | written
    if like is not None:
        source = read_json_object(Path(like) / CONFIG, NO_MODEL)
        before = weight_format.write(_read_config_of(family, like))
        content = _with_changes(source, before, written, weight_format.descriptive)
        content |= {key: written[key] for key in ("architectures",) if key in written}
        content.pop(QUANTIZATION, None)  # what is written has no codes
    # an id that the format has written already is computed with: no other can be stated
    for token, given in (tokens or {}).items():
        if token not in weight_format.tokens or written.get(token) not in (None, given):
            names = " or ".join(weight_format.tokens) or f"none, for {family.name}"
            raise ConfigError(
                "not a valid token id", where=token, expected=written.get(token, names), got=given
            )
        content[token] = given
    # timm's has neither key
    if weight_format.model_type is None:
        return content
    content["model_type"] = weight_format.model_type
    if dtype is not None:  # by the name that is there: releases of transformers prefer their own
        names_of_dtype = [key for key in ("dtype", "torch_dtype") if key in content]
        content |= dict.fromkeys(names_of_dtype or ["torch_dtype"], dtype)
    return content


def _read_config_of(family: Family, like: str | os.PathLike[str]) -> Any:
    """Reads the configuration in a folder. Raises ConfigError if it is of another family."""
    config = read_config(like)
    found = family_of(config).name
    if found != family.name:
        what = "a configuration of another family"
        raise ConfigError(what, where=str(like), expected=family.name, got=found)
    return config


def _with_changes(source: Json, before: Json, after: Json, kept: Collection[str] = ()) -> Json:
    """Sets in `source` the keys whose values differ between `before` and `after`, but `kept`."""
    return source | {
        key: value
        for key, value in after.items()
        if key not in kept and (key not in before or value != before[key])
    }


def config_files(
    config: Any,
    *,
    dtype: str | None = None,
    tokens: TokenIds | None = None,
    like: str | os.PathLike[str] | None = None,
) -> dict[str, bytes]:
    """Makes {name: content} of all files that `read_config` reads, `config.json` last.

    With `like` also the others of `MODEL_FILES` in that folder, as they are: a tokenizer's, and how
    texts are continued. Arguments and errors are those of `config_json`.
    """
    family = family_of(config)
    contents = family.weight_format.write_preprocessor(config)
    sources = {}
    if like is not None:
        sources = read_files(Path(like), MODEL_FILES)
        before = family.weight_format.write_preprocessor(_read_config_of(family, like))
        for name in contents.keys() & sources.keys():
            source = read_json_object(Path(like) / name, NO_MODEL)
            contents[name] = _with_changes(source, before[name], contents[name])
    contents = contents | {CONFIG: config_json(config, dtype=dtype, tokens=tokens, like=like)}
    # the bytes of a source that says the same
    files = {name: content for name, content in sources.items() if name not in contents}
    for name, content in contents.items():
        files[name] = (json.dumps(content, indent=2) + "\n").encode()
        if name in sources and parse_json(sources[name].decode()) == content:
            files[name] = sources[name]
    return files


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Reads those of the files that a folder has: {name: content}. Raises DamageError."""
    files = {}
    for file in (folder / name for name in names):
        try:
            if file.exists():
                files[file.name] = read_regular(file)
        except OSError as error:
            what = "a file beside the weights cannot be read"
            raise DamageError(what, where=str(file), got=error) from error
    return files


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
