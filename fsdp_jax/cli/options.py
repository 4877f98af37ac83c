"""Command lines as dataclasses: the first field is the positional argument, the others are options.

A text in the `Annotated` of a field stands for its value in the help, such as FILE.
"""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, get_type_hints

from fsdp_jax.errors import ConfigError
from fsdp_jax.train.typed_keys import Key, check_text, field_comments, make_parser, split_arguments

if TYPE_CHECKING:
    from fsdp_jax.train.config import Config

SYNTAX = (
    "a YAML file or the name of a shipped one, then dotted overrides such as `--train.steps 20`"
)


@dataclass(frozen=True)
class Argument:
    """The positional argument of a command: its name, meaning and an example of what follows.

    `count`: how many paths it is; a command gets two as a tuple.
    """

    name: str
    meaning: str
    example: str
    count: int = 1


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

    def words(self) -> list[str]:
        """Spells it as the words of a command line."""
        from fsdp_jax.train.config_file import KEYS

        words = [str(self.path)]
        for name, value in self.overrides.items():
            words += [KEYS[name].option, *_texts_of(value)]
        return words


def _texts_of(value: Any) -> list[str]:
    """Spells the value of a key on a command line; a tuple is several words."""
    if isinstance(value, tuple):
        return [str(each) for each in value]
    return [str(value)]


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
    needed = argument.count
    if len(given.get("compare", ())) > 1 or argument is COMMAND:
        needed = 0
    if len(positional) != needed or (argument is COMMAND and not command_line):
        what = f"{argument.name} is {'one path' if needed == 1 else 'two paths'}"
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
    paths = tuple(check_text(each, argument.name) for each in positional)
    path = paths[0] if paths else None

    # The options of the command itself; all other keys are overrides of the configuration.
    values = {options[name].field: value for name, value in given.items() if name in options}
    for key in options.values():
        if not hasattr(command, key.field) and key.field not in values:
            raise ConfigError(f"{key.option} is missing", where="command line", expected=key.usage)
    if argument is COMMAND:
        return command(tuple(command_line), **values)
    if argument is not CONFIG:
        return command(path if argument.count == 1 else paths, **values)
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
    argument, keys = _argument_and_options(command)
    defaults = {key.name: getattr(command, key.field, MISSING) for key in keys.values()}
    sections: dict[str, str] = {}
    indent = 28
    if argument is CONFIG:
        from fsdp_jax.train.config import Config
        from fsdp_jax.train.config_file import KEYS, SECTIONS, key_values, load_config

        config = Config() if argv[0].startswith("-") else load_config(argv[0])
        comments = field_comments(Config)
        keys, defaults = keys | KEYS, defaults | key_values(config)
        sections = {each: comments[each] or getattr(config, each).__doc__ for each in SECTIONS}
        indent = 8  # options are long: their meaning is in the line below
    parser = make_parser(
        keys,
        defaults,
        sections,
        usage=f"fsdp-jax {name} {argument.name} [OPTIONS]",
        description=cleandoc(command.__doc__ or ""),
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=indent),
    )
    print(parser.format_help(), end="")


def _argument_and_options(command: type[Any]) -> tuple[Argument, dict[str, Key]]:
    """Reads (the positional argument, {name: option}) of a command."""
    first, *options = (
        Key.from_hint(name.rstrip("_").replace("_", "-"), hint, command, name)
        for name, hint in get_type_hints(command, include_extras=True).items()
    )
    argument = next(note for note in first.notes if isinstance(note, Argument))
    return argument, {key.name: key for key in options}
