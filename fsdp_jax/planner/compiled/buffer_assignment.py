"""Reads XLA's memory reports of a compiled program (`xla_dump_to`): the live values at the peak.

`peak_memory.py` tells the purpose of each value.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from fsdp_jax.errors import ArgumentError
from fsdp_jax.host_memory import HOST_SPACE

DEFAULT, ON_HOST = "default", "host"  # memory spaces of a report
SMALLEST_IDLE = 2**20  # bytes
_SPACE = re.compile(r"^Memory Space: (\S+) \(color=(\d+)\)\nTotal bytes: (\d+)", re.MULTILINE)
_RANGE = re.compile(r"^    (\S+)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_ALLOCATION = re.compile(r"allocation (\d+): size \d+(.*)")  # newer releases add `, page 0`
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)"
)
_FIX = (
    "compile one program into an empty folder:"
    " lowered.compile(compiler_options={'xla_dump_to': folder})"
)


class LiveBuffer(NamedTuple):
    """A value that is live at the peak."""

    name: str  # of the instruction in the program
    element: tuple[int, ...]  # its index in the instruction's tuple
    bytes: int  # that it takes, less what another value shares
    array: str  # as `bf16[8,64]`
    parameter: int | None  # number of the program's input whose memory it reuses


@dataclass(frozen=True)
class MemoryReport:
    """What XLA's reports state of the memory of one program."""

    spaces: dict[str, int]  # bytes by memory space
    live: list[LiveBuffer]  # in device memory at the peak; what several share is counted once
    # Values that take, at other times, what no value takes at the peak: the larger, the earlier.
    idle: list[LiveBuffer] = field(default_factory=list)


def read_memory_report(folder: Path) -> MemoryReport:
    """Reads the reports that XLA wrote for one program into its `xla_dump_to` folder.

    Raises ValueError if they are absent, are of several programs, or have another format.
    """
    usage = _read_report(folder, "memory-usage-report")
    # the GPU compiler prints host memory under another name
    spaces = {
        ON_HOST if int(color) == HOST_SPACE else name: int(size)
        for name, color, size in _SPACE.findall(usage)
    }
    # when each value lives, and then where: only the second report has its memory
    ranges = {
        (name, index): (int(start), int(end))
        for name, index, start, end in _RANGE.findall(_read_report(folder, "live-range"))
    }
    values = list(_device_values(_read_report(folder, "buffer-assignment"), ranges))
    if DEFAULT not in spaces or not values:
        raise ArgumentError(
            "XLA's memory reports have an unknown format", where=str(folder), fix=_FIX
        )
    peak = _values_at_peak(values)
    return MemoryReport(spaces, _without_sharing(peak), _idle_at_peak(values, peak))


def _read_report(folder: Path, report: str) -> str:
    """Reads the one file that XLA dumped under this name. Raises ValueError if it is missing."""
    paths = sorted(folder.glob(f"*-{report}.txt"))
    if len(paths) != 1:
        raise ArgumentError(
            f"XLA's {report} is missing",
            where=str(folder),
            expected="one",
            got=[path.name for path in paths] or "none",
            fix=_FIX,
        )
    return paths[0].read_text()


class _AssignedValue(NamedTuple):
    """A value, its live range in instructions (both ends inclusive), and its memory."""

    start: int
    end: int
    allocation: int
    offset: int
    live: LiveBuffer


def _device_values(
    assignment: str, ranges: Mapping[tuple[str, str], tuple[int, int]]
) -> Iterator[_AssignedValue]:
    """Yields the values in device memory that live while the program runs.

    `assignment`: the text of XLA's buffer assignment; `ranges`: (name, index in the tuple) ->
    (first, last) instruction.
    """
    allocation = 0
    parameter: int | None = None
    on_device = False
    for line in assignment.splitlines():
        # an allocation, and below it the values that it holds
        if head := _ALLOCATION.match(line):
            allocation = int(head[1])
            fields = dict(re.findall(r", (color|parameter) (\d+)", head[2]))
            on_device = fields.get("color", "0") == "0" and ", thread-local" not in head[2]
            parameter = None
            if "parameter" in fields:
                parameter = int(fields["parameter"])
        elif on_device and (value := _VALUE.match(line)):
            name, index, size, offset, array = value.groups(default="")
            if (name, index) in ranges:
                start, end = ranges[name, index]
                element = tuple(int(i) for i in index.split(",") if i)
                live = LiveBuffer(name, element, int(size), array.partition("{")[0], parameter)
                yield _AssignedValue(start, end, allocation, int(offset), live)


def _values_at_peak(values: list[_AssignedValue]) -> list[_AssignedValue]:
    """Finds the values that are live when most memory is used, where shared memory counts once.

    XLA's own list of the peak counts an operand beside the result that reuses its memory, and so
    may name the wrong instruction as the peak, by a fifth of the memory.
    """
    # the bytes that begin and end to live at each instruction
    changes: Counter[int] = Counter()
    for value in values:
        changes[value.start] += value.live.bytes
        changes[value.end + 1] -= value.live.bytes
    # their sums, an upper bound at each time: it counts shared memory twice
    times = sorted(changes)
    bounds = dict(zip(times, accumulate(changes[time] for time in times), strict=True))
    # from the largest bound down, until no other can exceed what was found
    peak: list[_AssignedValue] = []
    most = 0
    for time in sorted(times, key=lambda time: -bounds[time]):
        if bounds[time] <= most:
            break
        live = [value for value in values if value.start <= time <= value.end]
        size = sum(buffer.bytes for buffer in _without_sharing(live))
        if size > most:
            peak, most = live, size
    return peak


def _idle_at_peak(
    values: Sequence[_AssignedValue], peak: Sequence[_AssignedValue]
) -> list[LiveBuffer]:
    """Finds what holds memory that no value takes at the peak: XLA packs values with gaps.

    A gap counts for the largest value that takes it at another time; small ones are left out.
    """
    taken: dict[int, list[tuple[int, int]]] = {}
    for value in peak:
        taken.setdefault(value.allocation, []).append(_addresses(value))
    idle = []
    for value in sorted(values, key=lambda value: -value.live.bytes):
        if value.live.bytes < SMALLEST_IDLE:
            break
        ranges = taken.setdefault(value.allocation, [])
        free = _free_bytes(_addresses(value), ranges)
        if free >= SMALLEST_IDLE:
            ranges.append(_addresses(value))
            idle.append(value.live._replace(bytes=free))
    return idle


def _addresses(value: _AssignedValue) -> tuple[int, int]:
    return value.offset, value.offset + value.live.bytes


def _free_bytes(within: tuple[int, int], taken: Iterable[tuple[int, int]]) -> int:
    """Counts the bytes of a range of addresses that none of the other ranges has."""
    at, end = within
    free = 0
    for start, stop in sorted(taken):
        if stop <= at or start >= end:
            continue
        free += max(0, start - at)
        at = max(at, stop)
    return free + max(0, end - at)


def _without_sharing(values: Iterable[_AssignedValue]) -> list[LiveBuffer]:
    """Drops from each value the bytes that one before has, and values that are left with none."""
    # the memory of each allocation from low to high addresses; of values at one address the
    # largest counts, and of equal ones the last to start
    ends: dict[int, int] = {}
    buffers = []
    for value in sorted(
        values, key=lambda value: (value.allocation, value.offset, -value.live.bytes, -value.start)
    ):
        start = max(ends.get(value.allocation, 0), value.offset)
        end = max(start, value.offset + value.live.bytes)
        ends[value.allocation] = end
        if end > start:
            buffers.append(value.live._replace(bytes=end - start))
    return buffers
