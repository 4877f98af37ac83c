"""One writer per output directory: two of them would mix their steps and destroy both runs."""

import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Self

from fsdp_jax.errors import ConfigError, message


class Lease:
    """Holds `DIRECTORY/lease.json` for as long as the `with` block runs; only the lead process of a
    run takes it.

    The file names the owner (`host`, `pid`, `process`, `started`), but what counts is the kernel's
    lock on it, which goes with its owner: the file of a killed run keeps nobody out. Readers never
    look at the lease.

    Raises ConfigError on entry, at once, if another run holds it.
    """

    def __init__(self, directory: str | os.PathLike[str], *, process: int = 0):
        self.path = Path(directory) / "lease.json"
        self._process = process
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._lock()
        self._file.truncate(0)
        json.dump(self._owner(), self._file)
        self._file.flush()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        if _is_at(self._file, self.path):  # not a file that someone put there after removing ours
            self.path.unlink()
        self._file.close()  # gives the lock back: after the removal, so that nobody locks a file about to vanish
        self._file = None

    def _lock(self) -> IO[str]:
        while True:
            file = self.path.open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    raise self._taken(file) from None
            except OSError:
                file.close()
                raise
            if _is_at(file, self.path):
                return file
            file.close()  # its owner removed it between our open and our lock: this lock is on a file nobody sees

    def _taken(self, file: IO[str]) -> ConfigError:
        file.seek(0)
        try:
            owner = "host {host}, pid {pid}, process {process}, since {started}".format(
                **json.load(file)
            )
        except (ValueError, KeyError):  # locked, and not written yet
            owner = "a run that is just starting"
        return ConfigError(
            message(
                "another run is writing to this directory",
                where=str(self.path),
                got=owner,
                fix="choose another `output`, or stop that run",
            )
        )

    def _owner(self) -> dict[str, str | int]:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": self._process,
            "started": started,
        }


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether `path` still leads to this open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
