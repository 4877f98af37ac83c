"""The kinds of model that weights are exchanged of, by the name that their `config.json` gives
them.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_jax.errors import ConfigError, message
from fsdp_jax.models.cait import CaiTConfig
from fsdp_jax.models.gpt import GPTConfig
from fsdp_jax.models.huggingface import cait, gpt2, llama, t5, vit
from fsdp_jax.models.huggingface.config_json import (
    CONFIG,
    TOKENS,
    Json,
    Tokens,
    read_json,
    unknown_kind,
)
from fsdp_jax.models.huggingface.table import Table
from fsdp_jax.models.llama import LlamaConfig
from fsdp_jax.models.t5 import T5Config
from fsdp_jax.models.vit import ViTConfig


@dataclass(frozen=True)
class Exchanged:
    """A family.

    Attributes:
        kind: of our config.
        table: of a config.
        read: (content of `config.json`, its place) -> our config.
        write: the way back, without `model_type`.
        tokens: which of `TOKENS` its `config.json` has.
        read_images: folder -> fields of our config that another file there says.
        write_images: the way back, {name: content}.

    """

    kind: type
    table: Callable[[Any], Table]
    read: Callable[[Json, object], Any]
    write: Callable[[Any], Json]
    tokens: tuple[str, ...] = TOKENS
    read_images: Callable[[Path], dict[str, Any]] = lambda folder: {}
    write_images: Callable[[Any], dict[str, Json]] = lambda config: {}


CAIT = "cait"  # timm says no `model_type` but an `architecture`
EXCHANGED = {
    "gpt2": Exchanged(GPTConfig, gpt2.table, gpt2.read, gpt2.write),
    "llama": Exchanged(LlamaConfig, llama.table, llama.read, llama.write),
    "t5": Exchanged(T5Config, t5.table, t5.read, t5.write),
    "vit": Exchanged(
        ViTConfig, vit.table, vit.read, vit.write, (), vit.read_images, vit.write_images
    ),
    CAIT: Exchanged(CaiTConfig, cait.table, cait.read, cait.write, ()),
}


def read_config(folder: str | os.PathLike[str], **fields: Any) -> Any:
    """Our config of the model whose `config.json` lies there: GPTConfig, LlamaConfig, T5Config,
    ViTConfig, CaiTConfig.

    How images are normalised is taken over, a ViT's from the `preprocessor_config.json` beside it.
    `fields` of it are replaced: `scan_layers`, `dtype`, `sequence_length`. Dropout rates are
    settings of a training run and not taken over. Nothing in the folder is run.

    Raises:
        ConfigError: no such file, a model of no family here, or one that computes what we do not:
            every key by name.

    """
    found, where = read_json(Path(folder)), Path(folder) / CONFIG
    kind = (
        CAIT if "model_type" not in found and "architecture" in found else found.get("model_type")
    )
    if "auto_map" in found:
        what = "a model whose code lies in its folder, which is never run"
        raise ConfigError(message(what, where=str(where), got=found["auto_map"]))
    if kind not in EXCHANGED or (kind == CAIT and "architecture" not in found):
        raise unknown_kind(kind, list(EXCHANGED), where)
    try:
        family = EXCHANGED[kind]
        return dataclasses.replace(
            family.read(found, where), **family.read_images(Path(folder)) | fields
        )
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # numbers that are none, or that do not fit together
        raise ConfigError(
            message("a model that is not one of ours", where=str(where), got=error)
        ) from error


def config_json(config: Any, *, dtype: str | None = None, tokens: Tokens | None = None) -> Json:
    """The content of `config.json`.

    Args:
        config: of ours.
        dtype: of the weights.
        tokens: ids by the names in `TOKENS`; those of a model of text that are not given are
            written as null, since transformers takes a number of its own where there is none.

    Raises:
        ConfigError: a config of no family, or that its family cannot say; tokens that it has none
            of, or computes with as other numbers, as T5 with its padding.

    """
    kind, family = _of(config)
    written = dict.fromkeys(family.tokens) | family.write(config)
    for name, given in (tokens or {}).items():
        if name not in family.tokens or written[name] not in (None, given):
            expected = written.get(name, " or ".join(family.tokens) or f"none, for {kind}")
            raise ConfigError(
                message("a token's id that cannot be", where=name, expected=expected, got=given)
            )
        written[name] = given
    if kind == CAIT:
        return written
    return written | {"model_type": kind} | ({} if dtype is None else {"torch_dtype": dtype})


def config_files(
    config: Any, *, dtype: str | None = None, tokens: Tokens | None = None
) -> dict[str, bytes]:
    """{name: content} of all that `read_config` reads; `config.json` is the last. As `config_json`."""
    contents = _of(config)[1].write_images(config) | {
        CONFIG: config_json(config, dtype=dtype, tokens=tokens)
    }
    return {
        name: (json.dumps(content, indent=2) + "\n").encode() for name, content in contents.items()
    }


def token_ids(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Those of `TOKENS` that the folder's `config.json` knows, as numbers or lists of them. Raises
    ConfigError.
    """
    found = read_json(Path(folder))
    return {name: found[name] for name in TOKENS if found.get(name) is not None}


def table_of(config: Any) -> Table:
    """Which of a model's parameters is which tensor. Raises ConfigError for a config of no family."""
    return _of(config)[1].table(config)


def _of(config: Any) -> tuple[str, Exchanged]:
    found = [(name, each) for name, each in EXCHANGED.items() if type(config) is each.kind]
    if not found:
        raise unknown_kind(
            type(config).__name__, [each.kind.__name__ for each in EXCHANGED.values()], "config"
        )
    return found[0]
