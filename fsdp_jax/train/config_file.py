"""The configuration of a run, read from a YAML file and then from the command line.

Keys are the dotted paths of the fields (`train.steps`), the same in both places. Only `run` reads
these objects; what lies below gets plain arguments.
"""

import contextlib
import dataclasses
import hashlib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
import yaml

from fsdp_jax.errors import ConfigError, did_you_mean, message
from fsdp_jax.train.config import LEAST, CheckpointConfig, ClusterConfig, Config


def load(
    path: str | Path, overrides: Sequence[str] = (), *, prog: str = "fsdp-jax train CONFIG"
) -> Config:
    """Reads a YAML file, then applies dotted overrides such as `--train.steps 20`.

    Raises ConfigError for a file that cannot be read, an unknown key or a value of the wrong kind.
    A malformed value among the overrides is reported by the parser, which exits with 2; `--help`
    prints every key and exits with 0.
    """
    config = _filled(Config, _read(Path(path)), str(path), "")
    config = parse(overrides, default=config, prog=prog)
    _check_least(config)
    return config


def parse(overrides: Sequence[str], *, default: Config, prog: str, description: str = "") -> Config:
    """`default` with dotted overrides applied."""
    known = dict(flat(default))
    for word in overrides:
        key = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and key not in known and key != "help":
            later = (
                "not in this release; plans say what it would save"
                if key.startswith("offload.")
                else ""
            )
            fix = later or did_you_mean(key, known)
            raise ConfigError(message(f"unknown key '{key}'", where="command line", fix=fix))
    return tyro.cli(
        Config,
        args=overrides,
        default=default,
        prog=prog,
        description=description or None,
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
    )


def parse_help(command: str, words: Sequence[str], description: str | None) -> bool:
    """Prints every key with its type, default (the file's, if given) and meaning, if help is asked
    for.
    """
    if not {"-h", "--help"} & set(words):
        return False
    given = words[0] if not words[0].startswith("-") else None
    default = _filled(Config, _read(Path(given)), given, "") if given else Config()
    with contextlib.suppress(SystemExit):
        parse(
            ["--help"],
            default=default,
            prog=f"fsdp-jax {command} CONFIG",
            description=description or "",
        )
    return True


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every key."""
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from flat(value, key + ".")
        else:
            yield key, value


def dump(config: Config) -> str:
    """The configuration as YAML that `load` reads back to the same."""
    plain = dataclasses.asdict(
        config,
        dict_factory=lambda pairs: {k: list(v) if isinstance(v, tuple) else v for k, v in pairs},
    )
    return yaml.safe_dump(plain, sort_keys=False)


def digest(config: Config) -> str:
    """A short hash of what decides the numbers: not of where and when the run saves, nor of which
    process this is.
    """
    neutral = dataclasses.replace(
        config, output="", cluster=ClusterConfig(), checkpoint=CheckpointConfig()
    )
    return hashlib.sha256(dump(neutral).encode()).hexdigest()[:16]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        fix = "give the path of a YAML file, such as configs/quickstart.yaml"
        raise ConfigError(
            message("the configuration cannot be read", where=str(path), got=error, fix=fix)
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            message("the configuration is not YAML", where=str(path), got=error)
        ) from error
    return _mapping(content, str(path))


def _mapping(content: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(content or {}, dict):
        raise ConfigError(
            message(
                "keys were expected", where=where, expected="`key: value` lines", got=repr(content)
            )
        )
    return content or {}


def _filled(kind: type, content: Mapping[str, Any], file: str, prefix: str) -> Any:
    """An instance of this dataclass from what the YAML holds; defaults elsewhere."""
    hints = get_type_hints(kind)
    given = {}
    for name, value in content.items():
        where = f"{file}: {prefix}{name}"
        if name not in hints:
            fix = did_you_mean(
                prefix + str(name),
                [*(prefix + key for key in hints), *(key for key, _ in flat(Config()))],
            )
            raise ConfigError(message(f"unknown key '{prefix}{name}'", where=file, fix=fix))
        if dataclasses.is_dataclass(hints[name]):
            given[name] = _filled(hints[name], _mapping(value, where), file, f"{prefix}{name}.")
        else:
            given[name] = _converted(hints[name], value, where)
    return kind(**given)


def _converted(kind: Any, value: Any, where: str) -> Any:
    """A YAML value as a field of type `kind`."""
    if get_origin(kind) in (Union, types.UnionType):
        inner = next(part for part in get_args(kind) if part is not type(None))
        return None if value is None else _converted(inner, value, where)
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        choices = get_args(kind)
        fix = did_you_mean(str(value), choices)
        raise ConfigError(
            message(f"unknown value '{value}'", where=where, expected=", ".join(choices), fix=fix)
        )
    if get_origin(kind) is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise _wrong_type("a list of names", value, where)
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 takes 1e-3 for text
        except ValueError:
            raise _wrong_type("a number", value, where) from None
    if type(value) is not kind:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise _wrong_type(names[kind], value, where)
    return value


def _wrong_type(expected: str, value: Any, where: str) -> ConfigError:
    return ConfigError(
        message("a value of the wrong kind", where=where, expected=expected, got=repr(value))
    )


def _check_least(config: Config) -> None:
    for key, value in flat(config):
        if value is not None and key in LEAST and not value >= LEAST[key]:
            raise ConfigError(
                message(
                    "a value is too small", where=key, expected=f"{LEAST[key]} or more", got=value
                )
            )
    if sum(map(bool, (config.units.classes, config.units.min_params, config.units.scan))) > 1:
        raise ConfigError(
            message(
                "units are chosen in one way", where="units", expected="classes, min_params or scan"
            )
        )
