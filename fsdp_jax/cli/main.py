"""`fsdp-jax COMMAND CONFIG [--dotted.key VALUE ...]`. Every error is one block on stderr; see the
exit codes.
"""

import logging
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

from fsdp_jax.cli.arguments import SYNTAX, flag
from fsdp_jax.cli.commands import BROKEN, COMMANDS, OK
from fsdp_jax.errors import (
    CheckpointError,
    ConfigError,
    DamageError,
    FitError,
    did_you_mean,
    message,
)

FAILED, UNUSABLE, STOPPED = 1, 2, 75
"""Exit codes, with OK and BROKEN: done (0); a failure while running; unusable arguments or configuration; a contract, a
fit or a checkpoint that does not hold (3); stopped by a signal after saving (run the same command again to go on)."""

INTERRUPTED = 130  # as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = flag(words, "--debug")
    for name in (
        () if debug else ("absl", "asyncio")
    ):  # orbax's own tracebacks, hundreds of lines around our one block
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_usage())
            return OK if words else UNUSABLE
        name, *arguments = words
        if name not in COMMANDS:
            raise ConfigError(
                message(
                    f"unknown command '{name}'",
                    where="command line",
                    fix=did_you_mean(name, COMMANDS),
                )
            )
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return COMMANDS[name](arguments)
    except SystemExit as leaving:  # of the parser: help, or a malformed value that it has reported
        return leaving.code if isinstance(leaving.code, int) else UNUSABLE
    except KeyboardInterrupt:  # before the run listens to signals
        print("interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        sys.stdout.flush()  # what was said before stands before it in a log of both
        print(_block(error), file=sys.stderr)
        return _exit_code(error)


def _usage() -> str:
    lines = [
        f"  {name:<9}{(command.__doc__ or '').splitlines()[0]}"
        for name, command in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: fsdp-jax COMMAND CONFIG [--dotted.key VALUE ...] [--debug]",
            "",
            "Fully Sharded Data Parallel for JAX.",
            "",
            *lines,
            "",
            f"CONFIG is {SYNTAX}; verify and export take the output directory of a run,",
            "import a folder as on Hugging Face, tokenize a corpus.",
            "`fsdp-jax COMMAND --help` lists every key. --debug shows tracebacks.",
            "Exit codes: 0 done; 1 a failure while running; 2 unusable arguments or configuration; 3 a contract, a fit",
            "or a checkpoint that does not hold; 75 stopped by a signal after saving (run the same command again).",
        ]
    )


def _exit_code(error: Exception) -> int:
    if isinstance(error, ConfigError):
        return UNUSABLE
    return BROKEN if isinstance(error, DamageError | FitError) else FAILED


def _block(error: Exception) -> str:
    from fsdp_jax.step.compiled_step import NonFiniteError

    if isinstance(error, ConfigError | FitError | CheckpointError | NonFiniteError):
        return f"error: {error}"
    first = str(error).strip() or "no message"
    return message(
        f"error: {type(error).__name__}: {first}", fix="run again with --debug for the traceback"
    )


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"warning: {message}", file=sys.stderr)
