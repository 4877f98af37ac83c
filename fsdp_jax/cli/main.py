"""`fsdp-jax COMMAND CONFIG [--dotted.key VALUE ...]`: every error is one block on stderr."""

import logging
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from fsdp_jax.cli.commands import BROKEN, COMMANDS, OK
from fsdp_jax.cli.options import SYNTAX, parse_command, print_help
from fsdp_jax.errors import (
    CheckpointError,
    ConfigError,
    DamageError,
    FitError,
    did_you_mean,
    message,
)

FAILED, UNUSABLE = 1, 2
INTERRUPTED = 130  # as shells report SIGINT
USAGE = f"""usage: fsdp-jax COMMAND CONFIG [--dotted.key VALUE ...] [--debug]

Fully Sharded Data Parallel for JAX.

%s

CONFIG is {SYNTAX};
verify and export take the output directory of a run, import a Hugging Face folder, tokenize a
corpus.
`fsdp-jax COMMAND --help` lists every key. --debug shows tracebacks.
Exit codes: 0 done; 1 a failure while running; 2 unusable arguments or configuration; 3 a contract,
a fit or a checkpoint that does not hold; 75 stopped by a signal after saving (run the same command
again to resume)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code, which `USAGE` explains."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if not debug:
        # orbax and asyncio log tracebacks of hundreds of lines beside the one block
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _run(arguments)
    except KeyboardInterrupt:  # before the run handles signals
        print("interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        sys.stdout.flush()  # so that a log of both streams keeps their order
        print(_block(error), file=sys.stderr)
        return _exit_code(error)


def _run(arguments: list[str]) -> int:
    """Runs the command that the first argument names."""
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [
            f"  {name:<9}{str(kind.__doc__).splitlines()[0]}" for name, kind in COMMANDS.items()
        ]
        print(USAGE % "\n".join(lines))
        return OK if arguments else UNUSABLE
    name, *rest = arguments
    if name not in COMMANDS:
        fix = did_you_mean(name, COMMANDS)
        raise ConfigError(message(f"unknown command '{name}'", where="command line", fix=fix))
    if {"-h", "--help"} & set(rest):
        print_help(COMMANDS[name], name, rest)
        return OK
    return parse_command(COMMANDS[name], name, rest).run()


def _exit_code(error: Exception) -> int:
    if isinstance(error, ConfigError):
        return UNUSABLE
    return BROKEN if isinstance(error, DamageError | FitError) else FAILED


def _block(error: Exception) -> str:
    from fsdp_jax.step.compiled_step import NonFiniteError
    from fsdp_jax.step.loss_spikes import LossSpikeError

    told = ConfigError | FitError | CheckpointError | NonFiniteError | LossSpikeError
    if isinstance(error, told):
        return f"error: {error}"
    first = str(error).strip() or "no message"
    what = f"error: {type(error).__name__}: {first}"
    return message(what, fix="run again with --debug for the traceback")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
