"""Reads from a program's text the line of the model or loss that an operation comes from.

Tables above the program list files, places in them and stack frames, the caller of each; an
operation's metadata name a frame by its number.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from fsdp_jax.errors import OWN_FOLDER, STANDARD_LIBRARY
from fsdp_jax.hlo.parser import Instruction

_TABLES = re.compile(
    r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n?)+)", re.M
)
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_LOCATION = re.compile(r"file_name_id=(\d+) .*?line=(\d+)")
_PARENT = re.compile(r"file_location_id=(\d+) parent_frame_id=(\d+)")
_INSTALLED = {"site-packages", "dist-packages"}
_MODELS = OWN_FOLDER / "models"
_TRACES = str(OWN_FOLDER / "step" / "compiled_step.py")  # calls the step's function, as it traces


class SourceFrames:
    """The tables of stack frames of a program's text."""

    def __init__(self, text: str) -> None:
        self._tables = dict(_TABLES.findall(text))

    def line(self, instruction: Instruction) -> str:
        """Finds the line of an operation, `/home/me/model.py:12`; "" where the text has none.

        It is the innermost one of a file that is neither of an installed package, nor ours, other
        than the models that we bring; what calls the step is not of the model.
        """
        found = _FRAME.search(instruction.attributes)
        if found is None:
            return ""
        for path, line in self._callers(found[1]):
            if path == _TRACES:
                break
            if _is_of_model(path):
                return f"{path}:{line}"
        return ""

    def _callers(self, frame: str) -> Iterator[tuple[str, str]]:
        """Yields (file, line) of a frame and its callers, the innermost first."""
        number = int(frame)
        while number in self._frames:
            location, parent = self._frames[number]
            if location in self._locations:
                file, line = self._locations[location]
                yield self._files.get(file, ""), line
            if parent >= number:  # a caller is listed before what it calls
                return
            number = parent

    @cached_property
    def _files(self) -> dict[str, str]:
        return {number: rest.strip('"') for number, rest in self._rows("FileNames")}

    @cached_property
    def _locations(self) -> dict[str, tuple[str, str]]:
        rows = ((number, _LOCATION.search(rest)) for number, rest in self._rows("FileLocations"))
        return {number: (match[1], match[2]) for number, match in rows if match}

    @cached_property
    def _frames(self) -> dict[int, tuple[str, int]]:
        """{number of a frame: (its location, number of its caller, 0 for none)}."""
        rows = ((int(number), _PARENT.search(rest)) for number, rest in self._rows("StackFrames"))
        frames = {number: (match[1], int(match[2])) for number, match in rows if match}
        # Some releases print the number of the caller plus one, so that the first calls itself.
        plus = int(any(number == parent for number, (_, parent) in frames.items()))
        return {number: (location, parent - plus) for number, (location, parent) in frames.items()}

    def _rows(self, table: str) -> Iterator[tuple[str, str]]:
        """Yields (number, the rest) of the rows of a table."""
        for row in self._tables.get(table, "").splitlines():
            number, _, rest = row.partition(" ")
            yield number, rest


def without_frames(text: str) -> str:
    """Returns a program's text without the tables of its stack frames."""
    return _TABLES.sub("", text)


def _is_of_model(path: str) -> bool:
    """Tells whether a file is the user's own, or one of our models."""
    if not path or path.startswith(("<", STANDARD_LIBRARY)):
        return False
    file = Path(path)
    if file.is_relative_to(OWN_FOLDER):
        return file.is_relative_to(_MODELS)
    return not _INSTALLED & {*file.parts}
