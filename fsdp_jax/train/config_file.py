"""The configuration of a run: read from a YAML file, then overridden on the command line."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from fsdp_jax.errors import ConfigError, did_you_mean, extra
from fsdp_jax.io.regular_files import read_regular
from fsdp_jax.train.config import CheckpointConfig, ClusterConfig, Config
from fsdp_jax.train.renamed_keys import KEY_OF, as_config_errors, suggest_key
from fsdp_jax.train.typed_keys import aliases_of, dataclass_keys, split_arguments

with extra("train"):
    import yaml

KEYS = {key.name: key for key in dataclass_keys(Config, KEY_OF)}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, then applies dotted overrides such as `["--train.steps", "20"]`.

    Raises ConfigError for a file that cannot be read, an unknown key, or a value of the wrong type
    or out of range.
    """
    unnamed, values = split_arguments(overrides, KEYS)
    if unnamed:
        raise ConfigError(
            f"unexpected argument '{unnamed[0]}'", where="command line", expected="--key value"
        )
    return load_config_with(path, values)


def load_config_with(path: str | Path, values: dict[str, Any]) -> Config:
    """Reads a YAML file, then replaces the values of these dotted keys. Raises as `load_config`."""
    return replace_keys(Config(), _yaml_values(_find_file(path)) | values)


def _find_file(name: str | Path) -> Path:
    """Finds the file of a configuration: a path, or the name of one of `configs/`, `llama2_7b`.

    Raises ConfigError for a name that none of them has.
    """
    path = Path(name)
    if path.suffix or len(path.parts) != 1 or path.exists():
        return path
    # In an installed package the folder is inside of it, in a checkout beside it.
    package = Path(__file__).parents[1]
    shipped = {
        file.stem: file
        for folder in (package.parent / "configs", package / "configs")
        for file in folder.glob("*.yaml")
    }
    if path.name not in shipped:
        raise ConfigError(
            f"no file and no shipped configuration is called '{name}'",
            where="CONFIG",
            fix=did_you_mean(path.name, shipped),
        )
    return shipped[path.name]


def replace_keys(config: Config, values: dict[str, Any]) -> Config:
    """Replaces the values of these dotted keys in a configuration.

    Raises ConfigError for values that do not go together.
    """
    changed: dict[str, dict[str, Any]] = {}  # section -> {field: value}
    for key, value in values.items():
        section, _, name = KEYS[key].field.rpartition(".")
        changed.setdefault(section, {})[name] = value
    fields = changed.pop("", {})
    with as_config_errors():
        for section, its in changed.items():
            fields[section] = dataclasses.replace(getattr(config, section), **its)
    return dataclasses.replace(config, **fields)


def dump_config(config: Config) -> str:
    """Writes the configuration as YAML, which `load_config` reads back unchanged."""
    nested: dict[str, Any] = {}
    for key, value in key_values(config).items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    plain = json.loads(json.dumps(nested))  # lists for tuples
    return yaml.safe_dump(plain, sort_keys=False)


def key_values(config: Config) -> dict[str, Any]:
    """Lists the values of a configuration by dotted key."""
    return {name: attrgetter(key.field)(config) for name, key in KEYS.items()}


def config_digest(config: Config) -> str:
    """Hashes all keys but `output`, `train.programs` and the sections `cluster` and `checkpoint`.

    A resumed run tells of a digest that differs from that of its first start.
    """
    neutral = dataclasses.replace(
        config,
        output="",
        cluster=ClusterConfig(),
        checkpoint=CheckpointConfig(),
        train=dataclasses.replace(config.train, programs=None),
    )
    return hashlib.sha256(dump_config(neutral).encode()).hexdigest()[:16]


def _yaml_values(path: Path) -> dict[str, Any]:
    """Reads {dotted key: value} of a YAML file. Raises as `load_config`."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise ConfigError(
            "the configuration cannot be read",
            where=str(path),
            got=error,
            fix="a YAML file, configs/quickstart.yaml, or a shipped one by name, quickstart",
        ) from error
    values: dict[str, Any] = {}
    for name, value in _require_mapping(_parse_yaml(content, str(path)), str(path)).items():
        # a section is itself a mapping of keys
        section = {name: value}
        if name in SECTIONS:
            keys = _require_mapping(value, f"{path}: {name}")
            section = {f"{name}.{key}": item for key, item in keys.items()}
        # Keys must be known, and values of their types.
        for key, item in section.items():
            if key not in KEYS:
                fix = suggest_key(str(key), [*KEYS, *SECTIONS], aliases_of(KEYS))
                raise ConfigError(f"unknown key '{key}'", where=str(path), fix=fix)
            if key in values:  # `train.steps: 6` beside a section `train`
                raise _set_twice_error(key, str(path))
            values[key] = KEYS[key].convert(item, f"{path}: {key}")
    return values


def _parse_yaml(content: bytes, where: str) -> Any:
    """Parses a YAML text into dicts, lists and scalars; None if it is empty."""
    try:
        loader = _YamlLoader(content.decode())
        loader.name = where
        return loader.get_single_data()
    except ConfigError:
        raise
    except Exception as error:  # PyYAML has no type of its own for most of what it cannot read
        what, got = "the configuration is not YAML", str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            mark = error.problem_mark
            where += f", line {mark.line + 1}, column {mark.column + 1}"
            got = ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(what, where=where, got=got) from error


class _YamlLoader(yaml.SafeLoader):
    """Refuses a key that is set twice, of which PyYAML takes the last value in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Makes the dict of a mapping."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _set_twice_error(key.value, self.name, lines[key.value], line)
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def _set_twice_error(key: str, where: str, *lines: int) -> ConfigError:
    return ConfigError(
        f"the key '{key}' is set twice",
        where=where,
        got=f"lines {lines[0]} and {lines[1]}" if lines else "",
        fix="leave one of them out",
    )


def _require_mapping(content: Any, where: str) -> Mapping[str, Any]:
    """Checks that a section is a dict, or {} for None. Raises ConfigError for anything else."""
    if content is None:
        return {}
    if isinstance(content, dict):
        return content
    raise ConfigError(
        "keys were expected", where=where, expected="`key: value` lines", got=repr(content)
    )
