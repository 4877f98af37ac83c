"""The configuration of a run: read from a YAML file, then overridden on the command line."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fsdp_jax.errors import ConfigError, did_you_mean, message
from fsdp_jax.train.config import CheckpointConfig, ClusterConfig, Config
from fsdp_jax.train.typed_keys import (
    convert,
    key_types,
    read_option,
    split_arguments,
    with_values,
)

KEY_TYPES = dict(key_types(Config))
SECTIONS = {key.partition(".")[0] for key in KEY_TYPES if "." in key}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, then applies dotted overrides such as `--train.steps 20`.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, or a value of the wrong type or
            below its limit.

    """
    config = with_values(Config(), dict(_file_values(Path(path))))
    unnamed, options = split_arguments(overrides, KEY_TYPES)
    if unnamed:
        what, expected = f"unexpected argument '{unnamed[0]}'", "--key value"
        raise ConfigError(message(what, where="command line", expected=expected))
    values = {key: read_option(key, KEY_TYPES[key], texts) for key, texts in options.items()}
    config = with_values(config, values)
    units = config.units
    if sum(map(bool, (units.classes, units.min_params, units.scan))) > 1:
        what, expected = "units are set in more than one way", "classes, min_params or scan"
        raise ConfigError(message(what, where="units", expected=expected))
    return config


def dump(config: Config) -> str:
    """Returns the configuration as YAML, which `load` reads back unchanged."""
    plain = dataclasses.asdict(
        config,
        dict_factory=lambda pairs: {k: list(v) if isinstance(v, tuple) else v for k, v in pairs},
    )
    return yaml.safe_dump(plain, sort_keys=False)


def digest(config: Config) -> str:
    """Returns a short hash of the keys that determine the numbers of a run.

    Left out are the output directory, the checkpoints and which process this is.
    """
    neutral = dataclasses.replace(
        config, output="", cluster=ClusterConfig(), checkpoint=CheckpointConfig()
    )
    return hashlib.sha256(dump(neutral).encode()).hexdigest()[:16]


def _file_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of a YAML file."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        fix = "give the path of a YAML file, such as configs/quickstart.yaml"
        what = "the configuration cannot be read"
        raise ConfigError(message(what, where=str(path), got=error, fix=fix)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        what = "the configuration is not YAML"
        raise ConfigError(message(what, where=str(path), got=error)) from error
    for name, value in _mapping(content, str(path)).items():
        where = f"{path}: {name}"
        # a section is itself a mapping of keys
        section = {name: value}
        if name in SECTIONS:
            section = {f"{name}.{key}": value for key, value in _mapping(value, where).items()}
        for key, item in section.items():
            if key not in KEY_TYPES:
                fix = did_you_mean(str(key), [*KEY_TYPES, *SECTIONS])
                raise ConfigError(message(f"unknown key '{key}'", where=str(path), fix=fix))
            yield key, convert(KEY_TYPES[key], item, f"{path}: {key}")


def _mapping(content: Any, where: str) -> Mapping[str, Any]:
    if isinstance(content or {}, dict):
        return content or {}
    what, expected = "keys were expected", "`key: value` lines"
    raise ConfigError(message(what, where=where, expected=expected, got=repr(content)))
