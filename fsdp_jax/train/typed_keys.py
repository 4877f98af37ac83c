"""Typed keys: how values of a YAML file and of a command line become fields of a dataclass.

A key is the dotted path of a field (`train.steps`), the same in a file and on the command line,
where `--train.steps 20` and `--train.steps=20` set it. The comment on the field is the key's help.
argparse splits command lines and prints the help; values are converted here, so that an error is
the same for a file and for a command line.
"""

import argparse
import dataclasses
import functools
import inspect
import math
import types
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fsdp_jax.errors import ConfigError, did_you_mean
from fsdp_jax.limits import KeyNote, Range
from fsdp_jax.train.renamed_keys import suggest_key

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
PLACEHOLDERS = {int: "INT", float: "FLOAT", bool: "{True,False}", str: "TEXT"}  # in the help
LARGEST_FLOAT = 3.4e38  # above it float32, which computes with it, has infinity


@dataclass(frozen=True)
class Key:
    """A key of a configuration, or an option of a command, and the values that it takes."""

    name: str
    type: Any  # int, float, bool, str, a Literal or tuple[str, ...]
    takes_none: bool
    notes: tuple[Any, ...]  # what Annotated adds: a Range, a text in place of the placeholder
    owner: Any  # the dataclass that declares it
    field: str  # the dotted path of its field, such as `remat.policy` of the key `remat`
    takes_bool: bool = False  # a fraction of which true is all, and false none

    @classmethod
    def from_hint(cls, name: str, hint: Any, owner: Any, field: str) -> "Key":
        """Makes the key of a field with a type hint: `T`, `T | None`, `Annotated` of them.

        Of other unions it takes the first part that can be written down: `float` of
        `LossScale | float`, and of `float | bool`, which takes true for 1 and false for 0.
        """
        takes_none, takes_bool, notes = False, False, ()
        while get_origin(hint) in (Annotated, Union, types.UnionType):
            parts = get_args(hint)
            if get_origin(hint) is Annotated:
                hint, *added = parts
                notes += tuple(added)
            else:
                takes_none |= types.NoneType in parts
                takes_bool |= bool in parts
                # the part that a file can hold: a number, a text, a list of them
                lists = (Annotated, Literal, tuple)
                hint = next(p for p in parts if p in TYPE_NAMES or get_origin(p) in lists)
        return cls(name, hint, takes_none, notes, owner, field, takes_bool)

    @property
    def is_flag(self) -> bool:
        """Whether the option takes no value, such as `--json`: a bool outside any section."""
        return self.type is bool and "." not in self.name

    @property
    def option(self) -> str:
        """The key as a command line shows it: `--train.log_every`, `--held-out`."""
        return f"--{self.name}"

    @property
    def note(self) -> KeyNote:
        """The note on it, or one that says nothing."""
        return next((note for note in self.notes if isinstance(note, KeyNote)), KeyNote())

    @property
    def meaning(self) -> str:
        """The comment on the field."""
        return field_comments(self.owner)[self.field.rpartition(".")[2]]

    @property
    def placeholder(self) -> str:
        """The word for a value in the help: `INT`, `{none,full}`, `TEXT|None`, `FILE`."""
        told = [note for note in self.notes if isinstance(note, str)]
        if told:
            return told[0]
        if get_origin(self.type) is Literal:
            shown = "{" + ",".join(get_args(self.type)) + "}"
        else:
            shown = PLACEHOLDERS.get(self.type, "TEXT")
        return f"{shown}|None" if self.takes_none else shown

    @property
    def usage(self) -> str:
        """The option, its placeholder and meaning: `--html FILE: Also write a page.`"""
        option = self.option if self.is_flag else f"{self.option} {self.placeholder}"
        return f"{option}: {self.meaning}"

    def help(self, default: Any) -> str:
        """The meaning and the default, which the comment tells where there is no value."""
        if default is dataclasses.MISSING:
            return f"{self.meaning} (required)"
        if self.is_flag or (default in (None, ()) and "default" in self.meaning.lower()):
            return self.meaning
        shown = " ".join(default) or "none" if isinstance(default, tuple) else default
        return f"{self.meaning} (default: {shown})"

    def convert_text(self, value: Any) -> Any:
        """Converts what argparse has read: a text, a list of texts, or True for a flag.

        Raises ConfigError for another type or range.
        """
        if self.takes_none and value in ("None", "null"):
            value = None
        elif self.type is bool:
            value = {"true": True, "false": False}.get(str(value).lower(), value)
        elif self.type is int:
            value = _parse_number(int, value)
        return self.convert(value, self.option)

    def convert(self, value: Any, where: str) -> Any:
        """Converts a value of YAML to the field's type, such as a list to a tuple.

        Raises ConfigError, naming `where` it stands, for another type or range.
        """
        if value is None and self.takes_none:
            return None

        # Choices and lists of texts.
        if get_origin(self.type) is Literal:
            choices = get_args(self.type)
            if value in choices:
                return value
            raise ConfigError(
                f"unknown value '{value}'",
                where=where,
                expected=", ".join(choices),
                fix=did_you_mean(str(value), choices),
            )
        wrong_type = "a value of the wrong type"
        if get_origin(self.type) is tuple:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list) and all(isinstance(item, str) for item in items):
                return tuple(check_text(item, where) for item in items)
            raise _config_error(wrong_type, where, "a list of names", repr(value))

        # Numbers and texts.
        if self.type is float and self.takes_bool:
            value = {"true": 1.0, "false": 0.0}.get(str(value).lower(), value)
        if self.type is float and isinstance(value, int | str) and not isinstance(value, bool):
            value = _parse_number(float, value)  # YAML 1.1 reads 1e-3 as text
        if type(value) is not self.type:
            expected = TYPE_NAMES[self.type] + ", true or false" * self.takes_bool
            raise _config_error(wrong_type, where, expected, repr(value))
        if self.type is float and not abs(value) <= LARGEST_FLOAT:
            expected = f"from -{LARGEST_FLOAT} to {LARGEST_FLOAT}"
            raise _config_error("a number that is not finite in float32", where, expected, value)
        for limits in (note for note in self.notes if isinstance(note, Range)):
            limits.check(value, where, ConfigError)
        return check_text(value, where) if self.type is str else value


def _config_error(what: str, where: str, expected: str, got: object) -> ConfigError:
    return ConfigError(what, where=where, expected=expected, got=got)


def dataclass_keys(kind: Any, names: Mapping[str, str | None], prefix: str = "") -> Iterator[Key]:
    """Yields the keys of a dataclass and of the dataclasses in it.

    `names`: dotted path of a field -> its key, None for none; other keys are named as their fields.
    """
    for name, hint in get_type_hints(kind, include_extras=True).items():
        field = prefix + name
        key = names.get(field, field)
        if dataclasses.is_dataclass(hint):
            yield from dataclass_keys(hint, names, f"{field}.")
        elif key is not None:
            yield Key.from_hint(key, hint, kind, field)


@functools.cache
def field_comments(kind: type) -> dict[str, str]:
    """Reads {field: the comment beside or above it} from the source of a dataclass."""
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        code, _, comment = line.partition("#")
        name = code.partition(":")[0].strip()
        if comment and not code.strip():
            above.append(comment.strip())
            continue
        if name in kind.__annotations__ and name not in comments:
            comments[name] = comment.strip() or " ".join(above)
        above = []
    return comments


def aliases_of(keys: Mapping[str, Key]) -> dict[str, str]:
    """Lists {another word for a key: the key}."""
    return {alias: key.name for key in keys.values() for alias in key.note.aliases}


def make_parser(
    keys: Mapping[str, Key],
    defaults: Mapping[str, Any] | None = None,
    sections: Mapping[str, str] | None = None,
    **texts: Any,
) -> argparse.ArgumentParser:
    """Makes the parser of a command line with these keys, in a group for each section.

    With `defaults`, by key, and a description of each section it also prints the help, with the
    `texts` of `ArgumentParser`.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False, add_help=False, exit_on_error=False, **texts
    )
    groups: dict[str, Any] = {"": parser}
    for key in keys.values():
        section = key.name.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section, (sections or {}).get(section))
        settings: dict[str, Any] = {"dest": key.name, "default": argparse.SUPPRESS}
        if key.is_flag:
            settings["action"] = "store_true"
        else:
            settings["metavar"] = key.placeholder
        if get_origin(key.type) is tuple:
            settings["nargs"] = "*"
        if defaults is not None:
            # argparse formats the text, in which % begins a field
            settings["help"] = key.help(defaults.get(key.name)).replace("%", "%%")
        groups[section].add_argument(key.option, **settings)
    return parser


def split_arguments(
    argv: Sequence[str], keys: Mapping[str, Key]
) -> tuple[list[str], dict[str, Any]]:
    """Splits a command line into positional arguments and the values of each `--key`.

    A tuple takes all texts up to the next key, a flag none, any other key one. Hyphens and
    underscores of a key are the same. Of a key that is repeated the last value counts.

    Raises ConfigError for an unknown key, one without its value, or a value of the wrong type.
    """
    # Spell each option as the parser does: `--train.log-every`, `--steps`, `--log_dir`.
    aliases = aliases_of(keys)
    spelled = {f"__{alias}": f"--{key}" for alias, key in aliases.items()}
    spelled |= {key.option.replace("-", "_"): key.option for key in keys.values()}
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        words.append(spelled.get(name.replace("-", "_"), name) + equals + value)

    # The parser knows no positional arguments: these are left, as are unknown options.
    try:
        given, positional = make_parser(keys).parse_known_args(words)
    except argparse.ArgumentError as error:
        key = keys[str(error.argument_name)[2:]]
        raise ConfigError(
            f"{key.option}: {error.message}", where="command line", expected=key.usage
        ) from None
    for word in positional:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            fix = suggest_key(name, keys, aliases, "--")
            raise ConfigError(f"unknown key '{name}'", where="command line", fix=fix)
    values = {}
    for name, text in vars(given).items():
        # argparse makes an empty list of the text of `--key=--`
        is_dropped = text == [] and get_origin(keys[name].type) is not tuple
        values[name] = keys[name].convert_text("--" if is_dropped else text)
    return positional, values


def check_text(text: str, where: str) -> str:
    """Checks a text, and returns it; raises ConfigError if it can be no path, name or pattern."""
    what = ""
    if not text.strip():
        what = "an empty text"
    elif any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        what = "a text with control characters, or one that is not UTF-8"
    if what:
        raise ConfigError(what, where=where, got=ascii(text[:80]))
    return text


def _parse_number(kind: type[int] | type[float], value: str | int) -> float | str:
    """Parses the number that a text spells; keeps any other text for `Key.convert` to refuse."""
    try:
        return kind(value)
    except ValueError:
        return value
    except OverflowError:  # an int of more than 308 digits
        return math.inf
