"""Reads files that others wrote: refuses a pipe or a device in their place, and never waits."""

import errno
import os
import stat
from collections.abc import Callable
from io import FileIO

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegularError(OSError):
    """A pipe, a device, a folder or an unwanted link is where a file should be."""


def open_regular(path: str | os.PathLike[str], *, follow_link: bool = True) -> FileIO:
    """Opens a regular file for reading, without a buffer; never waits for a pipe's writer.

    Raises NotRegularError for anything else, without `follow_link` for a link too; other OSErrors
    as `open` does.
    """
    return open(path, "rb", buffering=0, opener=regular_opener(follow_link=follow_link))


def read_regular(path: str | os.PathLike[str], *, follow_link: bool = True) -> bytes:
    """Reads the contents of a regular file. Raises OSError as `open_regular`."""
    with open_regular(path, follow_link=follow_link) as file:
        return file.read()


def read_into(file: int, view: memoryview, offset: int) -> int:
    """Fills `view` (bytes) from `offset` of an open file; returns how many bytes the file has.

    Fewer than asked for, where it ends before. Not by a memory map: a file that is cut short while
    it is mapped kills the process. Raises OSError.
    """
    count = 0
    # A read may stop early, at the latest after 2 GiB.
    while count < len(view):
        read = os.preadv(file, [view[count:]], offset + count)
        if not read:
            break
        count += read
    return count


def regular_opener(*, follow_link: bool, folder: int | None = None) -> Callable[[str, int], int]:
    """Makes an `opener` for Python's `open`, in any mode, that opens regular files alone.

    `folder` is the descriptor of the folder that a relative name is in.
    """

    def opener(name: str, flags: int) -> int:
        """Opens a file descriptor. Raises NotRegularError, and OSError as `os.open`."""
        # Opening a pipe would otherwise wait until another process opens its other end.
        flags |= os.O_NONBLOCK
        if not follow_link:
            flags |= os.O_NOFOLLOW
        try:
            handle = os.open(name, flags, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP and not follow_link:
                kind = "a link, which could lead anywhere"
                raise NotRegularError(error.errno, kind, name) from error
            if error.errno in (errno.EISDIR, errno.ENXIO):  # a folder or pipe, to be written
                raise NotRegularError(error.errno, "not a file", name) from error
            raise
        # By the open file: under its name another could appear meanwhile.
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            os.close(handle)
            kind = KINDS.get(stat.S_IFMT(mode), "something else")
            raise NotRegularError(errno.EINVAL, f"{kind}, not a file", name)
        return handle

    return opener
