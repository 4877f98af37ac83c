"""Command lines as dataclasses: the first field is the positional argument, the others are options.

tyro prints the help but does not parse: its errors wrap in a box at the width of the terminal, name
no expected type for optional values and suggest no value, whereas ours are the same for a key in a
file and on the command line. `SubcommandApp` builds every command's parser before the configuration
file, which holds the defaults, is known.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from inspect import cleandoc
from typing import Annotated, Any, Protocol, get_args, get_type_hints

import tyro
from tyro.conf import FlagConversionOff, FlagCreatePairsOff, arg

from fsdp_jax.errors import ConfigError, message
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import KEY_TYPES, load
from fsdp_jax.train.typed_keys import convert, metavar, option_name, read_option, split_arguments

SYNTAX = "a YAML file, then dotted overrides such as `--train.steps 20`"


@dataclass(frozen=True)
class Argument:
    """The positional argument of a command: its name, meaning and an example of what follows."""

    name: str
    meaning: str
    example: str


@dataclass(frozen=True)
class Meaning:
    """What the value of a required option is, for the error that the option is missing."""

    text: str


CONFIG = Argument("CONFIG", SYNTAX, "configs/quickstart.yaml")
RUN = Argument("RUN", "the output directory of a run", "output/quickstart")


@dataclass(frozen=True)
class ConfigFile:
    """A configuration as a command line names it; `path` is None where it names none."""

    path: str | None
    overrides: tuple[str, ...]

    def load(self) -> Config:
        """Reads the file and applies the overrides. Raises ConfigError for what is unusable."""
        assert self.path is not None, "parse_command checks it"
        return load(self.path, self.overrides)


class Command(Protocol):
    """A parsed command line that can be run."""

    def run(self) -> int:
        """Runs the command and returns the exit code."""


def parse_command(kind: type[Any], name: str, argv: Sequence[str]) -> Command:
    """Returns the command that `argv`, what follows `fsdp-jax NAME`, describes.

    Raises:
        ConfigError: an unknown option, a missing or malformed value, or a missing argument.

    """
    argument, kinds = _argument_and_options(kind)
    known = kinds | KEY_TYPES if argument is CONFIG else kinds
    positional, given = split_arguments(argv, known)

    # `plan --compare A B` names its configurations by an option.
    needed = 0 if "compare" in given else 1
    if len(positional) != needed:
        what = f"{argument.name} is one path"
        if argument is CONFIG and not positional:
            what = "no configuration"
        got = " ".join(positional) or "nothing"
        fix = f"fsdp-jax {name} {argument.example}"
        where, expected = "command line", argument.meaning
        raise ConfigError(message(what, where=where, expected=expected, got=got, fix=fix))

    # The options of the command itself.
    values = {
        key: read_option(key, kinds[key], texts) for key, texts in given.items() if key in kinds
    }
    for field in fields(kind)[1:]:
        if field.default is MISSING and field.name not in values:
            option = option_name(field.name)
            hint = kinds[field.name]
            meanings = [part.text for part in get_args(hint) if isinstance(part, Meaning)]
            expected = ", ".join([f"{option} {metavar(hint)}", *meanings])
            what = f"{option} is missing"
            raise ConfigError(message(what, where="command line", expected=expected))

    path = convert(str, positional[0], argument.name) if positional else None
    if argument is not CONFIG:
        return kind(path, **values)

    # All other keys are overrides of the configuration.
    overrides: list[str] = []
    for key, texts in given.items():
        if key not in kinds:
            overrides += ["=".join([f"--{key}", *texts[:1]]), *texts[1:]]
    return kind(ConfigFile(path, tuple(overrides)), **values)


def print_help(kind: type[Any], name: str, argv: Sequence[str]) -> None:
    """Prints what a command does, and every option and key with its type, default and meaning.

    The defaults of keys are those of the configuration file, if `argv` begins with one.
    """
    argument, _ = _argument_and_options(kind)
    required = [field.name for field in fields(kind)[1:] if field.default is MISSING]
    first = ConfigFile(None, ()) if argument is CONFIG else ""
    default: Any = kind(first, **dict.fromkeys(required, tyro.MISSING))
    shown: Any = kind
    if argument is CONFIG:
        default = (default, Config() if argv[0].startswith("-") else load(argv[0]))
        keys = Annotated[Config, arg(name=""), FlagConversionOff]
        shown = tuple[Annotated[kind, arg(name="")], keys]  # type: ignore[valid-type]
    with contextlib.suppress(SystemExit):
        tyro.cli(
            shown,
            args=["--help"],
            default=default,
            prog=f"fsdp-jax {name} {argument.name}",
            description=cleandoc(kind.__doc__ or ""),
            use_underscores=argument is CONFIG,
            config=(FlagCreatePairsOff,),
        )


def _argument_and_options(kind: type[Any]) -> tuple[Argument, dict[str, Any]]:
    """Returns the positional argument of a command, and the type of each option."""
    (_, hint), *options = get_type_hints(kind, include_extras=True).items()
    return next(part for part in get_args(hint) if isinstance(part, Argument)), dict(options)
