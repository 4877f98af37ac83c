"""Opens files that others wrote: a pipe or a device in their place is refused, not awaited."""

import errno
import os
import stat
from typing import BinaryIO

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | os.PathLike[str], *, follow_link: bool = True) -> BinaryIO:
    """Opens a regular file for reading, without a buffer; never waits for a pipe's writer.

    Raises OSError as `open` does, also for a pipe, a device or a folder; without `follow_link` for
    a link, too.
    """

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW))
        try:
            require_regular(handle, name)
        except OSError:
            os.close(handle)
            raise
        return handle

    try:
        return open(path, "rb", buffering=0, opener=opener)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_link:
            what = "a link, which could lead anywhere"
            raise OSError(errno.ELOOP, what, os.fspath(path)) from error
        raise


def read_regular(path: str | os.PathLike[str], *, follow_link: bool = True) -> bytes:
    """Returns the contents of a regular file. Raises OSError as `open_regular`."""
    with open_regular(path, follow_link=follow_link) as file:
        return file.read()


def require_regular(handle: int, path: str | os.PathLike[str]) -> None:
    """Raises OSError, naming `path`, if an open handle is not of a regular file."""
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"{kind}, not a file", os.fspath(path))
