"""`fsdp-jax COMMAND CONFIG [--dotted.key VALUE ...]`: every error is one block on stderr."""

import contextlib
import io
import logging
import os
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fsdp_jax.errors import (
    INTERRUPTED,
    UNREAD,
    UNUSABLE,
    ConfigError,
    did_you_mean,
    error_block,
    exit_code,
    is_failure,
    message,
    printable,
)

USAGE = """usage: fsdp-jax COMMAND CONFIG [--dotted.key VALUE ...] [--debug]

Fully Sharded Data Parallel for JAX.

%s

CONFIG is %s;
verify and export take the output directory of a run, import a Hugging Face folder, tokenize a
corpus, launch a command to start.
`fsdp-jax COMMAND --help` lists every key. --debug shows tracebacks; `fsdp-jax --version` the
versions of this package and of jax.
Exit codes: 0 done; 1 a failure while running; 2 unusable arguments or configuration; 3 a contract
or a fit that does not hold, or a damaged file; 69 another process is lost; 71 out of memory on a
device; 75 stopped by a signal after saving (run the same command again to resume); 141 nobody reads
the output (| head)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code, which `USAGE` explains."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # What follows `--` is the command line of the processes that `launch` starts.
    end = [*arguments, "--"].index("--")
    debug = "--debug" in arguments[:end]
    arguments = [word for word in arguments[:end] if word != "--debug"] + arguments[end:]
    if argv is None:
        _prepare_process(debug)
    if not debug:
        # orbax and asyncio log tracebacks of hundreds of lines beside the one block
        for name in ("absl", "asyncio", "fsdp_jax.launch"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # Run the command; where it fails, print one block, and the traceback only if asked.
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _run_command(arguments)
            sys.stdout.flush()  # a full disk or a closed pipe shows here, not after the end
            return code
    except KeyboardInterrupt:  # of a run, before it handles signals
        print("interrupted: run the same command again", file=sys.stderr)
        return INTERRUPTED
    except BaseException as error:
        if not is_failure(error):
            raise
        # `fsdp-jax plan ... | head` has what it wants; a run that can no longer tell has not.
        if isinstance(error, BrokenPipeError) and _is_unread() and not _trains(arguments):
            _flush_stdout()
            return UNREAD
        if debug:
            traceback.print_exc()
        _flush_stdout()  # so that a log of both streams keeps their order
        with contextlib.suppress(OSError):  # nobody reads it
            print(error_block(error), file=sys.stderr)
        return exit_code(error)


def _prepare_process(debug: bool) -> None:
    """Makes this process print nothing but its own lines, also from threads and at its exit."""
    # Make stdout and stderr writable, whatever started this process.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    if debug:
        return
    # Libraries log tracebacks, and a log that cannot be written prints one.
    logging.raiseExceptions = False
    logging.Formatter.formatException = _format_exception  # type: ignore[assignment]

    def warn_of_failure(kind: str, error: BaseException | None, where: object) -> None:
        if error is not None and is_failure(error) and not sys.is_finalizing():
            what = f"{kind} failed: {type(error).__name__}: {error}"
            fix = "run again with --debug for the traceback"
            _show_warning(message(what, where=str(where), fix=fix))

    def thread_hook(failure: threading.ExceptHookArgs) -> None:
        name = "" if failure.thread is None else failure.thread.name
        warn_of_failure("a thread in the background", failure.exc_value, name)

    def unraisable_hook(failure: "sys.UnraisableHookArgs") -> None:
        if isinstance(failure.exc_value, KeyboardInterrupt) and not sys.is_finalizing():
            # Ctrl-C met a callback, such as jax's of the garbage collector, and Python drops it.
            # Half a second later: sent into this function, it would be dropped again.
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        warn_of_failure("cleaning up", failure.exc_value, failure.object)

    # Failures in other threads and in cleanup are printed as warnings: the run goes on.
    threading.excepthook = thread_hook
    sys.unraisablehook = unraisable_hook


def _format_exception(formatter: logging.Formatter, info: Any) -> str:
    """Formats type and message of a logged exception; replaces `logging.Formatter`'s method."""
    return "".join(traceback.format_exception_only(info[1])).rstrip()


def _trains(arguments: Sequence[str]) -> bool:
    """Tells whether a command line starts a run."""
    return arguments[:1] == ["train"] and not {"-h", "--help"} & set(arguments)


def _is_unread() -> bool:
    """Tells whether stdout or stderr is a pipe whose reader has gone."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no descriptor: a test's, or closed
            poll.register(stream.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _flush_stdout() -> None:
    """Flushes stdout; where nobody reads it, what it holds is dropped, now and at the exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)


def _run_command(arguments: list[str]) -> int:
    """Runs the command that the first argument names, or prints help; returns the exit code."""
    # Not before: the base install lacks what they import, and that error is one block too.
    from fsdp_jax.cli.commands import COMMANDS, OK
    from fsdp_jax.cli.options import SYNTAX, parse_command, print_help, split_at_dashes

    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [
            f"  {name:<9}{str(kind.__doc__).splitlines()[0]}" for name, kind in COMMANDS.items()
        ]
        print(USAGE % ("\n".join(lines), SYNTAX))
        return OK if arguments else UNUSABLE
    if arguments == ["--version"]:
        print(*(f"{name} {version(name)}" for name in ("fsdp_jax", "jax", "jaxlib")), sep=", ")
        return OK
    name, *rest = arguments
    if name not in COMMANDS:
        fix = did_you_mean(name, COMMANDS)
        if name.startswith("-"):
            fix = "the command comes first: fsdp-jax --help"
        raise ConfigError(f"unknown command '{name}'", where="command line", fix=fix)
    if {"-h", "--help"} & set(split_at_dashes(rest)[0]):
        print_help(COMMANDS[name], name, rest)
        return OK
    return parse_command(COMMANDS[name], name, rest).run()


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Prints a warning on stderr, without control codes; replaces `warnings.showwarning`."""
    text = "\n".join(printable(line) for line in str(message).split("\n"))
    with contextlib.suppress(OSError):
        print(f"warning: {text}", file=sys.stderr)
