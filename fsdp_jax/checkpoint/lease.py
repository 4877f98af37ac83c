"""Keeps a second writer out of an output directory: two would destroy each other's steps."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Self

import jax
import numpy as np

from fsdp_jax.errors import ArgumentError, ConfigError, DirectoryLostError
from fsdp_jax.io.regular_files import NotRegularError, regular_opener
from fsdp_jax.processes import gather_from_processes, in_any_process, raise_together

LEASE = "lease.json"
ROUNDS = 20  # tries to give a directory the same number in every process
LAG = 10.0  # seconds that a network file system may take to show a new file
# Errors which say that a directory is not where it was; others may pass.
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)


class Lease:
    """Holds `DIRECTORY/lease.json` inside a `with` block, for all processes of a run.

    Every process of a run enters the block: process 0 takes the lease, and the others wait until it
    has. A process that states its number as `process` takes the lease for itself, without waiting.

    The file names the owner (`host`, `pid`, `process`, `started`), but the lease is the kernel's
    lock on the file, which ends with its owner: the file of a killed run keeps no other run out.
    Readers never look at the lease.

    A directory can be removed, moved or replaced under a run, and another run be admitted where it
    was. So whoever writes or deletes there calls `require_held` before, in any process and thread,
    and writes below `anchor`.

    Raises ConfigError on entry, at once and in every process, if another run holds it, or if a link
    or a pipe has its name: the target of a link is never written.

    Attributes:
        directory: absolute path.
        path: of the file in it.
        anchor: a path of the directory that stays its own: by the open directory itself, on Linux,
            so that what is written and deleted below it is never in a directory that took its
            place. Elsewhere, and outside the `with` block, the path of the directory.

    """

    def __init__(self, directory: str | os.PathLike[str], *, process: int | None = None):
        self.directory = Path(directory).absolute()
        self.path = self.directory / LEASE
        self.anchor = self.directory
        self._process = process or 0
        self._together = process is None
        self._owner = False
        self._folder: int | None = None  # descriptor of the directory
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
        self._number_alike()
        return self

    def _number_alike(self) -> None:
        """Gives the open directory the same number in every process: orbax wants one path of all.

        Where they find none, they use the path of the directory.
        """
        for _ in range(ROUNDS):
            numbers = gather_from_processes(np.array(self._folder))
            if (numbers == numbers[0]).all():
                return
            # The largest, or the next one that is free here; none where the system allows no more.
            assert self._folder is not None, "every process has seen the directory"
            if self._folder != numbers.max():
                with suppress(OSError):
                    handle = fcntl.fcntl(self._folder, fcntl.F_DUPFD_CLOEXEC, int(numbers.max()))
                    self._close_folder()
                    self._use_folder(handle)
        self.anchor = self.directory

    def _is_seen(self) -> bool:
        """Opens the file that process 0 has locked; tells whether this process sees it.

        Waits, as a network file system may lag.
        """
        deadline = time.monotonic() + LAG
        while self._file is None:
            try:
                self._open_folder()
                self._file = self._open_file(os.O_RDONLY)
            except OSError:  # of any kind: all processes are told, by the caller
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.1)
        return True

    def _take(self) -> None:
        """Takes the lease: creates the directory, locks the file and writes its owner in."""
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self._file = self._open_locked()
        except BaseException:
            self._close_folder()
            raise
        self._owner = True
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
        # In the open directory: at its path there may be another one, with another run's lease.
        if self._owner and self._is_in_folder():
            os.unlink(LEASE, dir_fd=self._folder)
        # The lock is released after the removal, so that nobody locks a file about to vanish.
        self._owner = False
        if self._file is not None:
            self._file.close()
        self._file = None
        self._close_folder()

    # While it is held

    def require_held(self) -> None:
        """Raises DirectoryLostError if the directory was removed, moved or replaced meanwhile.

        Costs two system calls. An error of the disk that says nothing of this raises nothing: the
        write that follows meets it too.
        """
        if self._file is None:
            raise ArgumentError(
                "the lease is not held", where=str(self.path), fix="enter its `with` block before"
            )
        try:
            if _is_file_at(self._file, self.path):
                return
            got = self._describe_loss(self._folder)
        except OSError as error:
            if error.errno not in GONE:
                return
            got = str(error)
            if error.errno != errno.ESTALE:  # which each further call would raise too
                got = self._describe_loss(self._folder)
        raise DirectoryLostError(
            "this run has lost its directory",
            where=str(self.directory),
            expected="the directory that the run began in, with its lease",
            got=got,
            fix="nothing more is written or deleted; to go on, run the same command with the "
            "directory of its steps as `output`, or another `output`",
        )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Calls `require_held` before the block, and where an OSError ends it.

        An error of the disk names its file below `directory`, not below `anchor`.
        """
        self.require_held()
        try:
            yield
        except OSError as error:
            self.require_held()
            if isinstance(error.filename, str):
                error.filename = self.readable(error.filename)
            raise

    def readable(self, text: str) -> str:
        """Writes the path of the directory in place of `anchor`, in a text for people."""
        return text.replace(str(self.anchor), str(self.directory))

    def _describe_loss(self, folder: int | None) -> str:
        """Tells what is at the path of the directory, and what became of the open `folder`."""
        assert folder is not None, "the lease is held"
        own = os.fstat(folder)
        # The run's own directory, which the system knows by its new name.
        fate = "the run's own was removed"
        if self.anchor == self.directory:
            fate = "the run's own was removed or moved"
        with suppress(OSError):
            now = os.readlink(self.anchor)
            if os.path.samestat(own, os.stat(now)):
                fate = f"the run's own is at {now}"
        # What took its place, if anything.
        try:
            found = self.directory.stat()
        except OSError as error:
            return f"{error.strerror}; {fate}"
        if os.path.samestat(own, found):
            fate = f"its {LEASE} was removed or replaced"
        try:
            handle = regular_opener(follow_link=False)(str(self.path), os.O_RDONLY)
        except OSError:
            if os.path.samestat(own, found):
                return fate
            return f"another directory is there; {fate}"
        with os.fdopen(handle) as other:
            return f"another lease is there, of {_read_owner(other)}; {fate}"

    # Opening

    def _open_locked(self) -> IO[str]:
        """Opens and locks the file. Raises ConfigError at once if another run has it locked."""
        while True:
            self._open_folder()
            file = self._open_file(os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    raise self._held_error(file) from None
            except OSError:
                file.close()
                raise
            with suppress(FileNotFoundError):
                if _is_file_at(file, self.path):
                    return file
            # Its owner removed it between our open and our lock: nobody else sees this file.
            file.close()

    def _open_folder(self) -> None:
        """Opens the directory, in place of one that was opened before."""
        self._close_folder()
        self._use_folder(os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY))

    def _use_folder(self, handle: int) -> None:
        """Takes a descriptor of the directory, and the path by it."""
        self._folder = handle
        # Linux has a path of it that no other directory can take; elsewhere there is none.
        anchor = Path(f"/proc/self/fd/{handle}")
        with suppress(OSError):
            if os.path.samestat(anchor.stat(), os.fstat(handle)):
                self.anchor = anchor

    def _close_folder(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
        self._folder = None
        self.anchor = self.directory

    def _open_file(self, flags: int) -> IO[str]:
        """Opens the file, and no other under its name. Raises ConfigError for a link or a pipe."""
        try:
            handle = regular_opener(follow_link=False, folder=self._folder)(LEASE, flags)
        except NotRegularError as error:
            raise self._not_a_lease_error(error.strerror or "") from error
        # A hard link is the user's file under another name: to truncate it would destroy that.
        if os.fstat(handle).st_nlink > 1:
            os.close(handle)
            raise self._not_a_lease_error("a file that has another name too")
        return os.fdopen(handle, "r" if flags == os.O_RDONLY else "r+")

    def _is_in_folder(self) -> bool:
        """Tells whether the open file still has its name in the open directory."""
        assert self._file is not None, "the lease is held"
        try:
            named = os.stat(LEASE, dir_fd=self._folder, follow_symlinks=False)
            return os.path.samestat(os.fstat(self._file.fileno()), named)
        except OSError:
            return False

    def _not_a_lease_error(self, got: str) -> ConfigError:
        what, fix = "something else has the name of the lease", "remove it"
        return ConfigError(what, where=str(self.path), got=got, fix=fix)

    def _held_error(self, file: IO[str]) -> ConfigError:
        """Makes the error for a file that another run has locked, with the owner it names."""
        what = "another run is writing to this directory"
        fix = "choose another directory (`output`), or stop that run; processes of one run join "
        fix += "first: under a scheduler, by the keys of `cluster`, and in a script by "
        fix += "fsdp_jax.launch.join_cluster(): see docs/clusters.md"
        return ConfigError(what, where=str(self.path), got=_read_owner(file), fix=fix)


def _read_owner(file: IO[str]) -> str:
    """Formats the owner that the file of a lease names."""
    file.seek(0)
    try:
        return "host {host}, pid {pid}, process {process}, since {started}".format(
            **json.load(file)
        )
    except (ValueError, KeyError, TypeError):  # locked, and not written yet
        return "a run that is just starting"


def _is_file_at(file: IO[str], path: Path) -> bool:
    """Tells whether `path` names this open file. Raises OSError where it cannot be looked up."""
    return os.path.samestat(os.fstat(file.fileno()), path.lstat())
