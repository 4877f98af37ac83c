"""Finds the line of the user's code that made an operation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import jax
from jax.extend.source_info_util import summarize

import fsdp_jax.errors

# Folders of code that is not the user's.
_LIBRARIES = tuple(
    str(Path(str(module.__file__)).parent) for module in (jax, flax, fsdp_jax.errors)
)


def source_line(source_info: Any) -> str:
    """Formats the line of the user's code that made an equation: `model.py:12 (Net.__call__)`.

    `source_info`: of an equation, or `jax.extend.source_info_util.current()`.
    """
    for frame in _frames(source_info):
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{Path(frame.file_name).name}:{frame.line_num} ({frame.function_name})"
    return summarize(source_info)


def _frames(source_info: Any) -> Iterator[Any]:
    """Yields the frames of a traceback, the innermost first."""
    traceback = source_info.traceback
    yield from () if traceback is None else traceback.frames
