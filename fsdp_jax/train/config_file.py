"""The configuration of a run: read from a YAML file, then overridden on the command line."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from fsdp_jax.errors import ConfigError, did_you_mean, extra
from fsdp_jax.io.regular_files import open_regular
from fsdp_jax.train.config import CheckpointConfig, ClusterConfig, Config
from fsdp_jax.train.renamed_keys import KEY_OF, as_config_errors, suggest_key
from fsdp_jax.train.typed_keys import dataclass_keys, split_arguments

with extra("train"):
    import yaml

KEYS = {key.name: key for key in dataclass_keys(Config, KEY_OF)}
# A configuration of all keys has 3 kB, 150 nodes and a depth of 4.
LONGEST_FILE, MOST_NODES, DEEPEST = 2**18, 10_000, 8
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
    return replace_keys(Config(), dict(_yaml_values(_find_file(path))) | values)


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
    """Hashes all keys but `output` and the sections `cluster` and `checkpoint`.

    A resumed run tells of a digest that differs from that of its first start.
    """
    neutral = dataclasses.replace(
        config, output="", cluster=ClusterConfig(), checkpoint=CheckpointConfig()
    )
    return hashlib.sha256(dump_config(neutral).encode()).hexdigest()[:16]


def _yaml_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of a YAML file. Raises as `load_config`."""
    try:
        with open_regular(path) as file:
            content = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(
            "the configuration cannot be read",
            where=str(path),
            got=error,
            fix="a YAML file, configs/quickstart.yaml, or a shipped one by name, quickstart",
        ) from error
    for name, value in _require_mapping(_parse_yaml(content, str(path)), str(path)).items():
        where = f"{path}: {name}"
        # a section is itself a mapping of keys
        section = {name: value}
        if name in SECTIONS:
            section = {
                f"{name}.{key}": value for key, value in _require_mapping(value, where).items()
            }
        # Keys must be known, and values of their types.
        for key, item in section.items():
            if key not in KEYS:
                raise ConfigError(
                    f"unknown key '{key}'",
                    where=str(path),
                    fix=suggest_key(str(key), [*KEYS, *SECTIONS]),
                )
            yield key, KEYS[key].convert(item, f"{path}: {key}")


def _parse_yaml(content: bytes, where: str) -> Any:
    """Parses a YAML text into dicts, lists and scalars; None if it is empty."""
    if len(content) > LONGEST_FILE:
        raise ConfigError(
            "the configuration is too large",
            where=where,
            expected=f"{LONGEST_FILE:,} bytes at most",
        )
    # Check the nodes before they become values: YAML's references can nest without end.
    try:
        loader = yaml.SafeLoader(content.decode())
        root = loader.get_single_node()
        if root is None:
            return None
        _check_yaml_nodes(root, where)
        return loader.construct_document(root)
    except ConfigError:
        raise
    except RecursionError:
        raise _too_nested_error(where) from None
    except Exception as error:  # PyYAML has no type of its own for most of what it cannot read
        what, got = "the configuration is not YAML", str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            mark = error.problem_mark
            where += f", line {mark.line + 1}, column {mark.column + 1}"
            got = ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(what, where=where, got=got) from error


def _check_yaml_nodes(root: yaml.Node, where: str) -> None:
    """Raises ConfigError for too many or too deeply nested nodes, and for keys set twice."""
    lines: dict[str, int] = {}  # of the keys
    count = 0
    # Nodes with their depth, and what the names of their keys begin with; None: they have no names.
    pending: list[tuple[yaml.Node, int, str | None]] = [(root, 1, "")]
    while pending:
        node, depth, prefix = pending.pop()
        count += 1
        if depth > DEEPEST or count > MOST_NODES:
            raise _too_nested_error(where)
        if isinstance(node, yaml.SequenceNode):
            pending += [(item, depth + 1, None) for item in node.value]
        elif isinstance(node, yaml.MappingNode):
            # PyYAML itself takes the last of two values of a key, in silence.
            for key, value in node.value:
                inner = None
                if prefix is not None and isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    name, line = prefix + key.value, key.start_mark.line + 1
                    if name in lines:
                        raise ConfigError(
                            f"the key '{name}' is set twice",
                            where=where,
                            got=f"lines {lines[name]} and {line}",
                            fix="leave one of them out",
                        )
                    lines[name] = line
                    inner = f"{name}."
                pending += [(key, depth + 1, None), (value, depth + 1, inner)]


def _too_nested_error(where: str) -> ConfigError:
    what, expected = "the configuration is nested too deeply, or too large", "sections of keys"
    return ConfigError(what, where=where, expected=expected)


def _require_mapping(content: Any, where: str) -> Mapping[str, Any]:
    """Checks that a section is a dict, or {} for None. Raises ConfigError for anything else."""
    if content is None:
        return {}
    if isinstance(content, dict):
        return content
    raise ConfigError(
        "keys were expected", where=where, expected="`key: value` lines", got=repr(content)
    )
