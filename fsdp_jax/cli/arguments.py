"""The words of a command line: flags, options and what is left. All functions take out of the list
what they read.
"""

from collections.abc import Iterable
from inspect import cleandoc

from fsdp_jax.errors import ConfigError, did_you_mean, message

SYNTAX = "a YAML file, then dotted overrides such as `--train.steps 20`"


def file_and_overrides(command: str, words: list[str]) -> tuple[str, list[str]]:
    """(the configuration file, dotted overrides). Raises ConfigError without a file."""
    if not words or words[0].startswith("-"):
        got = words[0] if words else "nothing"
        fix = f"fsdp-jax {command} configs/quickstart.yaml"
        raise ConfigError(
            message("no configuration", where="command line", expected=SYNTAX, got=got, fix=fix)
        )
    return words[0], words[1:]


def asks_help(words: list[str], description: str | None) -> bool:
    """Prints what a command does, if help is asked for."""
    asked = bool({"-h", "--help"} & set(words))
    if asked:
        print(cleandoc(description or ""))
    return asked


def only(
    command: str,
    name: str,
    meaning: str,
    words: list[str],
    *,
    flags: Iterable[str],
    example: str = "output/quickstart",
) -> str:
    """The one argument that is left. `flags` there are, for one that is misspelt; `example` of what
    to write.
    """
    for word in words:
        if word.startswith("--"):
            fix = did_you_mean(word.partition("=")[0], flags)
            raise ConfigError(message(f"unknown flag '{word}'", where="command line", fix=fix))
    if len(words) != 1:
        got, fix = " ".join(words) or "nothing", f"fsdp-jax {command} {example}"
        raise ConfigError(
            message(f"{name} is one path", where="command line", expected=meaning, got=got, fix=fix)
        )
    return words[0]


def flag(words: list[str], name: str) -> bool:
    """Whether the flag is there; it is taken out."""
    found = name in words
    words[:] = [word for word in words if word != name]
    return found


def option(words: list[str], name: str, kind: str = "FILE") -> str | None:
    """The value after an option; both are taken out."""
    words[:] = [
        part
        for word in words
        for part in (word.split("=", 1) if word.startswith(f"{name}=") else [word])
    ]
    if name not in words:
        return None
    at = words.index(name)
    if at + 1 == len(words) or words[at + 1].startswith("--"):
        raise ConfigError(
            message(f"{name} needs a value", where="command line", expected=f"{name} {kind}")
        )
    value = words[at + 1]
    del words[at : at + 2]
    return value
