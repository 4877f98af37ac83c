"""Errors: every one is a block that can be read, with the exit code of who can mend it."""

import errno
import json
import re
from pathlib import Path

import optax
import pytest

import fsdp_jax
from fsdp_jax.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    DamageError,
    FitError,
    OutOfMemoryError,
    error_block,
    exit_code,
    is_failure,
)


class PanicException(BaseException):
    """As pyo3 makes it of a panic in Rust: no Exception."""


def caused(error, reason):
    """The error as it is raised from a reason."""
    error.__cause__ = reason
    return error


def raised(error):
    """The error with a traceback, as the command meets it."""
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "code", "block"),
    [
        (ConfigError("no", where="a.b"), 2, r"error: no\n  where:    a\.b"),
        (ArgumentError("no", fix="yes"), 2, r"error: no\n  fix:      yes"),
        (DamageError("torn", where="x"), 3, r"error: torn\n  where:    x"),
        (FitError("too large"), 3, r"error: too large"),
        (OutOfMemoryError("too large", details="a\nb"), 71, r"error: too large\n\na\nb"),
        (OutOfMemoryError("beside others", step_fits=True), 1, r"error: beside others"),
        (CheckpointError("full"), 1, r"error: full"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/run/metrics"),
            1,
            r"error: the disk is full\n  where:    /run/metrics\n  got: +\[Errno 28\] No space",
        ),
        (OSError(errno.ENAMETOOLONG, "File name too long", "aaa"), 2, r"where:    aaa"),
        (caused(CheckpointError("no"), OSError(errno.ENAMETOOLONG, "too long")), 2, "error: no"),
        (caused(DamageError("no"), OSError(errno.ENAMETOOLONG, "too long")), 3, "error: no"),
        (MemoryError(), 1, r"error: this machine has too little memory\n  got: +no message"),
        (RuntimeError("of XLA"), 1, r"error: RuntimeError: of XLA\n  where: .*--debug for the"),
        (PanicException("index 3"), 1, r"error: PanicException: index 3\n  where: .*\n  fix:"),
        *(
            (
                kind("oh"),
                1,
                rf"error: {kind.__name__}: oh\n  where: .*test_errors.*\n  fix: .*",
            )
            for kind in (IndexError, TypeError, ValueError, RecursionError, OverflowError)
        ),
    ],
)
def test_every_failure_is_a_block_and_an_exit_code(error, code, block):
    error = raised(error)
    assert is_failure(error)
    assert exit_code(error) == code
    assert re.search(block, error_block(error), re.DOTALL)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_is_no_failure(kind):
    assert not is_failure(kind())


PACKAGE = Path(fsdp_jax.__file__).parent
OURS, LIBRARY, STANDARD = str(PACKAGE / "step" / "loss.py"), optax.__file__, json.__file__
USERS = "/home/me/fsdp_jax/train.py"


@pytest.mark.parametrize(
    ("files", "shown", "is_bug"),
    [
        ((OURS,), OURS, True),
        ((USERS, OURS), OURS, True),
        ((OURS, LIBRARY), OURS, True),
        ((OURS, USERS), USERS, False),
        ((OURS, LIBRARY, USERS, LIBRARY, STANDARD), USERS, False),
        ((USERS, LIBRARY), USERS, False),
    ],
)
def test_an_error_in_code_of_a_user_is_no_bug(files, shown, is_bug):
    """Each of the files calls the next one, and the last one raises."""

    call, does = None, "{}['tokens']"
    for file in reversed(files):
        call = eval(compile(f"lambda: {does}", file, "eval"), {"call": call})
        does = "call()"
    with pytest.raises(KeyError) as caught:
        call()
    block = error_block(caught.value)
    assert f"where:    {shown}, line 1, in <lambda>" in block
    assert ("a bug of fsdp_jax" in block) == is_bug
    assert ("report it" in block) == is_bug


def test_a_block_has_no_control_characters_and_an_end():
    text = error_block(ConfigError("\x1b[2J\0", got="a" * 9999, where=10**5000))
    assert "error: \\x1b[2J\\x00\n" in text
    assert "where:    a number of thousands of digits" in text
    assert text.endswith("a… (9,999 characters)")
