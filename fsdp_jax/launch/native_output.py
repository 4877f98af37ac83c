"""Keeps what C++ prints off stdout: Gloo has a line for each group of devices."""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TextIO

STDOUT = 1  # the descriptor that C++ writes to


class NativeOutput:
    """Sends what is written to the descriptor of stdout to a file; Python's own output stays.

    From `redirect` to the end of the `with` block. It is held in a temporary file until `keep`
    names a place. Where `sys.stdout` is not that descriptor, as in a notebook, nothing happens.
    """

    def __init__(self) -> None:
        self._stdout: TextIO | None = None  # Python's, before
        self._own: TextIO | None = None  # and meanwhile
        self._held: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def redirect(self) -> None:
        """Begins; Python writes to a copy of the descriptor from here on."""
        stdout = sys.stdout
        with contextlib.suppress(OSError, ValueError, AttributeError):  # not a file, or closed
            if self._stdout is None and stdout.fileno() == STDOUT:
                stdout.flush()
                self._own = open(  # noqa: SIM115
                    os.dup(STDOUT),
                    "w",
                    encoding=stdout.encoding,
                    errors=stdout.errors,
                    buffering=1,
                )
                self._held = tempfile.TemporaryFile()  # noqa: SIM115
                os.dup2(self._held.fileno(), STDOUT)
                self._stdout, sys.stdout = stdout, self._own

    def keep(self, path: Path) -> None:
        """Appends what was written to a file at `path`, and from now on writes to it.

        Raises OSError if it cannot be opened or written.
        """
        if self._held is None:
            return
        with open(path, "ab", buffering=0) as file:
            self._held.seek(0)
            shutil.copyfileobj(self._held, file)
            os.dup2(file.fileno(), STDOUT)
        self._held.close()
        self._held = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._own is None or self._stdout is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._own.flush()
        os.dup2(self._own.fileno(), STDOUT)
        sys.stdout = self._stdout
        self._own.close()
        self._own = self._stdout = None
        if self._held is not None:
            self._held.close()
            self._held = None
