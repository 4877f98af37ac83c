"""How one family's weights and configuration are stored by Hugging Face or timm."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_jax.models.huggingface.config_json import TOKENS, Json
from fsdp_jax.models.huggingface.table import Table


@dataclass(frozen=True)
class WeightFormat:
    """The files of a family.

    Attributes:
        model_type: of `config.json`; None for timm, whose `config.json` has an `architecture`.
        table: our configuration -> the weight table.
        read: (content of `config.json`, its path) -> our configuration; raises ConfigError, and
            ValueError for sizes that do not fit together.
        write: our configuration -> the content of `config.json`, without `model_type`, for any
            version of transformers.
        tokens: which of `TOKENS` its `config.json` has.
        read_images: folder -> fields of our configuration from another file there.
        write_images: our configuration -> {name of that file: content}.

    """

    model_type: str | None
    table: Callable[[Any], Table]
    read: Callable[[Json, object], Any]
    write: Callable[[Any], Json]
    tokens: tuple[str, ...] = TOKENS
    read_images: Callable[[Path], dict[str, Any]] = lambda folder: {}
    write_images: Callable[[Any], dict[str, Json]] = lambda config: {}
