"""Errors: every one is a block that can be read, with the exit code of who can mend it."""

import errno
import re

import pytest

from fsdp_jax.errors import (
    CheckpointError,
    ConfigError,
    DamageError,
    FitError,
    error_block,
    exit_code,
    is_failure,
    message,
)


class PanicException(BaseException):
    """As pyo3 makes it of a panic in Rust: no Exception."""


def raised(error):
    """The error with a traceback, as the command meets it."""
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "code", "block"),
    [
        (ConfigError(message("no", where="a.b")), 2, r"error: no\n  where:    a\.b"),
        (ValueError(message("no", fix="yes")), 2, r"error: no\n  fix:      yes"),
        (DamageError(message("torn", where="x")), 3, r"error: torn\n  where:    x"),
        (FitError("too large"), 3, r"error: too large"),
        (CheckpointError(message("full")), 1, r"error: full"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/run/metrics"),
            1,
            r"error: the disk is full\n  where:    /run/metrics\n  got: +\[Errno 28\] No space",
        ),
        (OSError(errno.ENAMETOOLONG, "File name too long", "aaa"), 2, r"where:    aaa"),
        (MemoryError(), 1, r"error: this machine has too little memory\n  got: +no message"),
        (RuntimeError("of XLA"), 1, r"error: RuntimeError: of XLA\n  where: .*--debug for the"),
        (PanicException("index 3"), 1, r"error: PanicException: index 3\n  where: .*\n  fix:"),
        *(
            (
                kind("oh"),
                1,
                rf"error: a bug of fsdp_jax, or .*: {kind.__name__}: (.*\n)+.*report it",
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


def test_a_bug_is_shown_with_the_last_line_of_this_package():
    with pytest.raises(AttributeError) as caught:
        exit_code(None).bit_length().no_such_thing  # noqa: B018
    assert f"where:    {__file__}, line" in error_block(caught.value)
    with pytest.raises(TypeError) as caught:
        message()
    assert ", in test_a_bug" in error_block(caught.value)


def test_a_block_has_no_control_characters_and_an_end():
    text = error_block(ConfigError(message("\x1b[2J\0", got="a" * 9999, where=10**5000)))
    assert "error: \\x1b[2J\\x00\n" in text
    assert "where:    a number of thousands of digits" in text
    assert text.endswith("a… (9,999 characters)")
