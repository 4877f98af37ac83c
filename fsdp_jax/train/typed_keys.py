"""Typed keys: how values of a YAML file and of a command line become fields of a dataclass.

A key is the dotted path of a field (`train.steps`), the same in a file and on the command line,
where `--train.steps 20` and `--train.steps=20` set it.
"""

import dataclasses
import math
import types
import unicodedata
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fsdp_jax.errors import ConfigError, did_you_mean, message
from fsdp_jax.train.config import AtLeast, AtMost

T = TypeVar("T")
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
LARGEST_FLOAT = 3.4e38  # above it float32, which computes with it, has infinity
LONGEST_TEXT = 4096  # characters, as of a path


def key_types(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, type) for the fields of a dataclass and of the dataclasses in it."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from key_types(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def key_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for the fields of a dataclass and of the dataclasses in it."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from key_values(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def with_values(config: T, values: Mapping[str, Any]) -> T:
    """Returns a copy of a dataclass with the fields at these dotted keys replaced."""
    for key, value in values.items():
        config = _replace(config, key.split("."), value)
    return config


def _replace(config: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    if rest:
        value = _replace(getattr(config, name), rest, value)
    return dataclasses.replace(config, **{name: value})


def convert(kind: Any, value: Any, where: str) -> Any:
    """Returns a YAML value as a field of type `kind`; raises ConfigError if it is of another."""
    if get_origin(kind) is Annotated:
        inner, *limits = get_args(kind)
        converted = convert(inner, value, where)
        for limit in limits:
            if isinstance(limit, AtLeast) and not converted >= limit.value:
                what, expected = "a value is too small", f"{limit.value} or more"
                raise ConfigError(message(what, where=where, expected=expected, got=value))
            if isinstance(limit, AtMost) and not converted <= limit.value:
                what, expected = "a value is too large", f"{limit.value:,} or less"
                raise ConfigError(message(what, where=where, expected=expected, got=value))
        return converted
    if get_origin(kind) in (Union, types.UnionType):
        inner = next(part for part in get_args(kind) if part is not type(None))
        return None if value is None else convert(inner, value, where)
    if get_origin(kind) is Literal:
        return _convert_choice(get_args(kind), value, where)
    if get_origin(kind) is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return tuple(_checked_text(item, where) for item in items)
        raise _wrong_type("a list of names", value, where)
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            value = float(value)  # YAML 1.1 reads 1e-3 as text
        except ValueError:
            raise _wrong_type(TYPE_NAMES[float], value, where) from None
        except OverflowError:  # an int of more than 308 digits
            value = math.inf
    if type(value) is not kind:
        raise _wrong_type(TYPE_NAMES[kind], value, where)
    if kind is float and not abs(value) <= LARGEST_FLOAT:
        what = "a number that is not finite in float32"
        expected = f"from -{LARGEST_FLOAT} to {LARGEST_FLOAT}"
        raise ConfigError(message(what, where=where, expected=expected, got=value))
    return _checked_text(value, where) if kind is str else value


def _checked_text(text: str, where: str) -> str:
    """Returns a text; raises ConfigError for one that can be no path, name or pattern."""
    what = ""
    if not text.strip():
        what = "an empty text"
    elif len(text) > LONGEST_TEXT:
        what = f"a text of more than {LONGEST_TEXT} characters"
    elif any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        what = "a text with control characters, or one that is not UTF-8"
    if what:
        raise ConfigError(message(what, where=where, got=ascii(text[:80])))
    return text


def _convert_choice(choices: Sequence[Any], value: Any, where: str) -> Any:
    if value in choices:
        return value
    what, fix = f"unknown value '{value}'", did_you_mean(str(value), choices)
    raise ConfigError(message(what, where=where, expected=", ".join(choices), fix=fix))


def _wrong_type(expected: str, value: Any, where: str) -> ConfigError:
    what = "a value of the wrong type"
    return ConfigError(message(what, where=where, expected=expected, got=repr(value)))


def inner_type(kind: Any) -> tuple[Any, bool]:
    """Returns (T, whether None is allowed) of `T`, `T | None` and `Annotated` forms of them."""
    optional = False
    while get_origin(kind) in (Annotated, Union, types.UnionType):
        if get_origin(kind) is not Annotated:
            optional = True
        kind = next(part for part in get_args(kind) if part is not type(None))
    return kind, optional


def split_arguments(
    argv: Sequence[str], kinds: Mapping[str, Any]
) -> tuple[list[str], dict[str, list[str]]]:
    """Splits a command line into positional arguments and the values of each `--key`.

    A tuple takes all values up to the next key, a bool without a dot (the flag of a command) none,
    any other key one. Hyphens and underscores of a key are the same.

    Raises:
        ConfigError: an unknown key, one without its value, or one that is given again after a value
            of the wrong type.

    """
    positional: list[str] = []
    options: dict[str, list[str]] = {}
    remaining = deque(argv)
    while remaining:
        argument = remaining.popleft()
        if not argument.startswith("--"):
            positional.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        key = name.replace("-", "_")
        if key not in kinds:
            raise _unknown_option(key, kinds)
        texts = [value] if equals else []
        most = _most_values(key, kinds[key])
        while remaining and not remaining[0].startswith("--") and len(texts) < most:
            texts.append(remaining.popleft())
        if most == 1 and not texts:
            expected = f"--{name} {metavar(kinds[key])}"
            raise ConfigError(
                message(f"--{name} needs a value", where="command line", expected=expected)
            )
        if key in options:  # the last one counts, but each has to be one
            read_option(key, kinds[key], options[key])
        options[key] = texts
    return positional, options


def _most_values(key: str, kind: Any) -> float:
    inner, _ = inner_type(kind)
    if get_origin(inner) is tuple:
        return float("inf")
    return 0 if is_flag(key, inner) else 1


def is_flag(key: str, kind: Any) -> bool:
    """Returns whether an option takes no value, such as `--json`: a bool outside any section.

    Args:
        key: without the hyphens.
        kind: its type, without `| None` and `Annotated`.

    """
    return kind is bool and "." not in key


def option_name(key: str) -> str:
    """Returns a key as a command line shows it: `--train.log_every`, `--held-out`."""
    return f"--{key if '.' in key else key.replace('_', '-')}"


def metavar(kind: Any) -> str:
    """Returns how the value of an option is named, as in `--html FILE`."""
    named = [part.metavar for part in get_args(kind) if hasattr(part, "metavar")]
    return named[0] if named else "VALUE"


def _unknown_option(key: str, kinds: Mapping[str, Any]) -> ConfigError:
    # Keys of a section are suggested as in a file, others as they are written on a command line.
    choices = [choice if "." in choice else option_name(choice) for choice in kinds]
    fix = did_you_mean(key if "." in key else option_name(key), choices)
    return ConfigError(message(f"unknown key '{key}'", where="command line", fix=fix))


def read_option(key: str, kind: Any, texts: Sequence[str]) -> Any:
    """Returns the value of an option of type `kind` from its texts on the command line.

    `None` and `null` are None where the type allows it; `true` and `True` are the same.

    Raises:
        ConfigError: a text that is not of that type.

    """
    value: Any = list(texts)
    inner, optional = inner_type(kind)
    if is_flag(key, inner) and not texts:
        value = True
    elif get_origin(inner) is not tuple:
        value = _read_text(inner, texts[0])
        if optional and value in ("None", "null"):
            value = None
    return convert(kind, value, option_name(key))


def _read_text(kind: Any, text: str) -> Any:
    """Returns the number or bool that a text spells, or the text itself for `convert` to check."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind is int:
        try:
            return int(text)
        except ValueError:
            return text
    return text
