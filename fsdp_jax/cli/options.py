"""Command lines as dataclasses: the first field is the positional argument, the others are options.

tyro prints the help, and `split_arguments` of `train/typed_keys.py` parses: tyro's errors wrap in a
box at the width of the terminal, name no expected type for optional values and suggest no value,
whereas ours are the same for a key in a file and on the command line. `SubcommandApp` builds every
command's parser before the configuration file, which holds the defaults, is known.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, make_dataclass
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from fsdp_jax.errors import ConfigError, extra
from fsdp_jax.train.typed_keys import Key, check_text, field_comments, split_arguments

if TYPE_CHECKING:
    from fsdp_jax.train.config import Config

with extra("train"):
    import tyro
    from tyro.conf import FlagConversionOff, FlagCreatePairsOff, Suppress, arg

__all__ = ["Suppress", "arg"]  # for the commands
SYNTAX = (
    "a YAML file or the name of a shipped one, then dotted overrides such as `--train.steps 20`"
)


@dataclass(frozen=True)
class Argument:
    """The positional argument of a command: its name, meaning and an example of what follows."""

    name: str
    meaning: str
    example: str


CONFIG = Argument("CONFIG", SYNTAX, "configs/quickstart.yaml")
COMMAND = Argument(
    "-- COMMAND",
    "`--`, then `train CONFIG ...` or a program, such as `python SCRIPT`",
    "--nproc 2 -- train configs/quickstart.yaml",
)
RUN = Argument("RUN", "the output directory of a run", "output/quickstart")


@dataclass(frozen=True)
class ConfigFile:
    """A configuration as a command line names it; `path` is None where it names none."""

    path: str | None
    overrides: dict[str, Any]

    def load(self) -> "Config":
        """Reads the file and applies the overrides. Raises ConfigError for what is unusable."""
        from fsdp_jax.train.config_file import load_config_with

        assert self.path is not None, "parse_command checks it"
        return load_config_with(self.path, self.overrides)


def parse_command(command: type[Any], name: str, argv: Sequence[str]) -> Any:
    """Makes `command`, a class in `COMMANDS`, with the fields that `argv` after its name sets.

    Raises ConfigError for an unknown option, or a missing or malformed value or argument.
    """
    # Split the arguments by all keys that are valid for this command.
    argument, options = _argument_and_options(command)
    known = options
    if argument is CONFIG:
        from fsdp_jax.train.config_file import KEYS

        known = options | KEYS
    own, command_line = split_at_dashes(argv)
    if argument is not COMMAND:
        own = argv
    positional, given = split_arguments(own, known)

    # `plan --compare A B` names both of its configurations by an option, `--compare B` one.
    needed = int(len(given.get("compare", ())) < 2 and argument is not COMMAND)
    if len(positional) != needed or (argument is COMMAND and not command_line):
        what = f"{argument.name} is one path"
        if argument is COMMAND and command_line:
            what = "words before `--` that are no options"
        elif argument is COMMAND:
            what = "no command to start"
        if argument is CONFIG and not positional:
            what = "no configuration"
        fix = f"fsdp-jax {name} {argument.example}"
        # `launch --nproc 2 script.py`
        if positional and positional[0].endswith(".py") and argument is COMMAND:
            fix = f"fsdp-jax {name} --nproc 2 -- python {' '.join(positional)}"
        raise ConfigError(
            what,
            where="command line",
            expected=argument.meaning,
            got=" ".join(positional) or "nothing",
            fix=fix,
        )
    path = check_text(positional[0], argument.name) if positional else None

    # The options of the command itself; all other keys are overrides of the configuration.
    values = {key: value for key, value in given.items() if key in options}
    for key in _required_options(command):
        if key not in values:
            raise ConfigError(
                f"{options[key].option} is missing",
                where="command line",
                expected=options[key].usage,
            )
    if argument is COMMAND:
        return command(tuple(command_line), **values)
    if argument is not CONFIG:
        return command(path, **values)
    overrides = {key: value for key, value in given.items() if key not in options}
    return command(ConfigFile(path, overrides), **values)


def split_at_dashes(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits a command line at `--` into its own arguments, and those of a command to start."""
    if "--" not in argv:
        return argv, ()
    at = list(argv).index("--")
    return argv[:at], argv[at + 1 :]


def print_help(command: type[Any], name: str, argv: Sequence[str]) -> None:
    """Prints what a command does, and every option and key with its type, default and meaning.

    The defaults of keys are those of the configuration file, if `argv` begins with one.
    """
    argument, _ = _argument_and_options(command)
    first: Any = ""
    if argument is CONFIG:
        first = ConfigFile(None, {})
    elif argument is COMMAND:
        first = ()
    default: Any = command(first, **dict.fromkeys(_required_options(command), tyro.MISSING))
    shown: Any = command
    if argument is CONFIG:
        keys = _keys_to_show(None if argv[0].startswith("-") else argv[0])
        default = (default, keys())
        settings = Annotated[keys, arg(name=""), FlagConversionOff]  # type: ignore[valid-type]
        shown = tuple[Annotated[command, arg(name="")], settings]  # type: ignore[valid-type]
    with contextlib.suppress(SystemExit):
        tyro.cli(
            shown,
            args=["--help"],
            default=default,
            prog=f"fsdp-jax {name} {argument.name}",
            description=cleandoc(command.__doc__ or ""),
            use_underscores=argument is CONFIG,
            config=(FlagCreatePairsOff,),
        )


def _keys_to_show(path: str | None) -> type[Any]:
    """Builds a dataclass, nested as keys are, of their types, comments and values in a file.

    The fields of `Config` are not all named and nested as its keys.
    """
    from fsdp_jax.train.config import Config
    from fsdp_jax.train.config_file import KEYS, key_values, load_config

    config = Config() if path is None else load_config(path)
    comments = {kind: field_comments(kind) for kind in {Config, *(k.owner for k in KEYS.values())}}
    sections: dict[str, list[Any]] = {"": []}  # section -> fields, as of `make_dataclass`
    for name, value in key_values(config).items():
        section, _, last = name.rpartition(".")
        key = KEYS[name]
        text = comments[key.owner][key.field.rpartition(".")[2]]
        hint = key.type | None if key.takes_none else key.type
        shown = Annotated[hint, arg(help=text)]  # type: ignore[valid-type]
        sections.setdefault(section, []).append((last, shown, value))
    top = sections.pop("")
    for section, keys in sections.items():
        what = comments[Config].get(section) or getattr(config, section).__doc__
        kind = make_dataclass(section, keys, frozen=True, namespace={"__doc__": what})
        top.append((section, kind, kind()))
    return make_dataclass("keys", top, frozen=True, namespace={"__doc__": Config.__doc__})


def _required_options(command: type[Any]) -> list[str]:
    """Lists the names of a command's options without a default."""
    return [field.name for field in fields(command)[1:] if field.default is MISSING]


def _argument_and_options(command: type[Any]) -> tuple[Argument, dict[str, Key]]:
    """Reads (the positional argument, {name: option}) of a command."""
    first, *options = (
        Key.from_hint(*each) for each in get_type_hints(command, include_extras=True).items()
    )
    argument = next(note for note in first.notes if isinstance(note, Argument))
    return argument, {key.name: key for key in options}
