"""Directories as orbax takes them: any name that it can write and read again, no other."""

import glob
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from orbax.checkpoint import v1 as orbax

from fsdp_jax.errors import ConfigError

log = logging.getLogger("fsdp_jax.checkpoint")

_PathOfOrbax: Any = type(orbax.Context().file.path_class("/"))
# What orbax or tensorstore takes for something else: a separator, an address in a cloud; and what
# Python has in place of bytes that are not UTF-8.
UNUSABLE_NAME = re.compile(r"\\|gs:/|^/(gs|s3|az|hf)(/|$)|(?P<bytes>[\ud800-\udfff])")


class LiteralPath(_PathOfOrbax):
    """A path for orbax: its own `[`, `*` and `?` mean themselves, and `mkdir` does not fail."""

    def mkdir(self, *args: Any, **options: Any) -> None:
        """Creates the directory; if it cannot, leaves the error to whoever writes there.

        Orbax creates it in the background, and if that fails, the threads that were to write wait
        for 300 s, exit included. Without it they fail at once.
        """
        try:
            super().mkdir(*args, **options)
        except OSError as error:
            log.warning("%s could not be created: %s", self, error)

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yields the paths below this one that match."""
        for name in glob.iglob(pattern, root_dir=os.fspath(self)):
            yield self / name


def require_usable(directory: Path) -> None:
    """Raises ConfigError for a directory that orbax would take for another, or cannot name."""
    found = UNUSABLE_NAME.search(f"{directory}/")
    if found:
        raise ConfigError(
            "checkpoints cannot be written under this name",
            where=ascii(str(directory)),
            got="bytes that are not UTF-8" if found["bytes"] else repr(found[0]),
            fix="use another directory, or a link with a plain name",
        )
