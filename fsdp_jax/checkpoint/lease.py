"""Keeps a second writer out of an output directory: two would destroy each other's steps."""

import fcntl
import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Self

import jax

from fsdp_jax.errors import ConfigError
from fsdp_jax.io.regular_files import NotRegularError, regular_opener
from fsdp_jax.processes import in_any_process, raise_together

LAG = 10.0  # seconds that a network file system may take to show a new file


class Lease:
    """Holds `DIRECTORY/lease.json` inside a `with` block, for all processes of a run.

    Every process of a run enters the block: process 0 takes the lease, and the others wait until it
    has. A process that states its number as `process` takes the lease for itself, without waiting.

    The file names the owner (`host`, `pid`, `process`, `started`), but the lease is the kernel's
    lock on the file, which ends with its owner: the file of a killed run keeps no other run out.
    Readers never look at the lease.

    Raises ConfigError on entry, at once and in every process, if another run holds it, or if a link
    or a pipe has its name: the target of a link is never written.
    """

    def __init__(self, directory: str | os.PathLike[str], *, process: int | None = None):
        self.path = Path(directory) / "lease.json"
        self._process = process or 0
        self._together = process is None
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        # A process that has not joined others does not start jax for a lease.
        if not self._together or not jax.distributed.is_initialized():
            self._take()
            return self
        # All processes raise if process 0 does.
        what, got = "the lease was not taken", "an error in process 0, which takes it for all"
        with raise_together(ConfigError(what, where=str(self.path), got=got)):
            if jax.process_index() == 0:
                self._take()
        # A process on another file system would write its shards to a directory of its own.
        if in_any_process(not self._is_seen()):
            self.__exit__()
            raise ConfigError(
                "not every process sees this directory",
                where=str(self.path.parent),
                expected="a directory on a file system that all processes share",
                got=f"{self.path.name} of process 0 is not seen by all",
                fix="choose another `output`",
            )
        return self

    def _is_seen(self) -> bool:
        """Tells whether this process sees the file; waits, as a network file system may lag."""
        deadline = time.monotonic() + LAG
        while not (seen := self.path.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return seen

    def _take(self) -> None:
        """Takes the lease: creates the directory, locks the file and writes its owner in."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open_locked()
        # A killed run's file has its owner still.
        self._file.truncate(0)
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": self._process,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        json.dump(owner, self._file)
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        if _is_file_at(self._file, self.path):  # else someone removed ours and created it anew
            self.path.unlink()
        # The lock is released after the removal, so that nobody locks a file about to vanish.
        self._file.close()
        self._file = None

    def _open_locked(self) -> IO[str]:
        """Opens and locks the file. Raises ConfigError at once if another run has it locked."""
        while True:
            file = self._open_file()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    raise self._held_error(file) from None
            except OSError:
                file.close()
                raise
            if _is_file_at(file, self.path):
                return file
            # Its owner removed it between our open and our lock: nobody else sees this file.
            file.close()

    def _open_file(self) -> IO[str]:
        """Opens the file, and no other under its name. Raises ConfigError for a link or a pipe."""
        try:
            handle = regular_opener(follow_link=False)(str(self.path), os.O_RDWR | os.O_CREAT)
        except NotRegularError as error:
            raise self._not_a_lease_error(error.strerror or "") from error
        # A hard link is the user's file under another name: to truncate it would destroy that.
        if os.fstat(handle).st_nlink > 1:
            os.close(handle)
            raise self._not_a_lease_error("a file that has another name too")
        return os.fdopen(handle, "r+")

    def _not_a_lease_error(self, got: str) -> ConfigError:
        what, fix = "something else has the name of the lease", "remove it"
        return ConfigError(what, where=str(self.path), got=got, fix=fix)

    def _held_error(self, file: IO[str]) -> ConfigError:
        """Makes the error for a file that another run has locked, with the owner it names."""
        file.seek(0)
        try:
            owner = "host {host}, pid {pid}, process {process}, since {started}".format(
                **json.load(file)
            )
        except (ValueError, KeyError):  # locked, and not written yet
            owner = "a run that is just starting"
        what = "another run is writing to this directory"
        fix = "choose another `output`, or stop that run"
        return ConfigError(what, where=str(self.path), got=owner, fix=fix)


def _is_file_at(file: IO[str], path: Path) -> bool:
    """Tells whether `path` names this open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False
