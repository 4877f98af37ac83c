"""XLA's memory reports of a compiled program (`xla_dump_to`): which values are in device memory at
the peak.

Only what the reports say lives here. What the values are for is for `buffers.py`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fsdp_jax.errors import message

DEFAULT, HOST = "default", "host"
_SPACE = re.compile(r"^Memory Space: (\S+) \(color=(\d+)\)\nTotal bytes: (\d+)", re.MULTILINE)
_RANGE = re.compile(r"^    (\S+)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_ALLOCATION = re.compile(
    r"allocation (\d+): size \d+(.*)"
)  # newer releases have `, page 0` before the rest
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)"
)
_FIX = "compile one program into an empty folder: lowered.compile(compiler_options={'xla_dump_to': folder})"


class Alive(NamedTuple):
    """A value at the peak: its name in the program, its place in a tuple, its bytes, the input
    whose memory it has.
    """

    name: str
    element: tuple[int, ...]
    bytes: int
    array: str
    parameter: int | None


@dataclass(frozen=True)
class Dump:
    """What XLA's reports say, as JSON can keep it: `Dump(**json.loads(json.dumps(asdict(dump))))`
    is the same.

    Attributes:
        spaces: bytes by memory space.
        alive: values in device memory at the peak; what shares memory is there once.

    """

    spaces: dict[str, int]
    alive: list[Alive]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "alive", [Alive(one[0], tuple(one[1]), *one[2:]) for one in self.alive]
        )


def dumped(folder: Path) -> Dump:
    """Reads what XLA wrote for one program into the folder that `xla_dump_to` named.

    Raises:
        ValueError: the reports are not there, or are of several programs, or XLA writes them
            another way.

    """
    spaces = {
        name: int(size) for name, _, size in _SPACE.findall(_only(folder, "memory-usage-report"))
    }
    live = _only(folder, "live-range")
    ranges = {(name, index): (int(a), int(b)) for name, index, a, b in _RANGE.findall(live)}
    placed = list(_placed(_only(folder, "buffer-assignment"), ranges))
    if DEFAULT not in spaces or not placed:
        raise ValueError(
            message("XLA's memory reports are not as they are known", where=str(folder), fix=_FIX)
        )
    return Dump(spaces, _peak(placed))


def _only(folder: Path, report: str) -> str:
    found = sorted(folder.glob(f"*-{report}.txt"))
    if len(found) != 1:
        got = [path.name for path in found] or "none"
        raise ValueError(
            message(
                f"XLA's {report} is missing", where=str(folder), expected="one", got=got, fix=_FIX
            )
        )
    return found[0].read_text()


class _Placed(NamedTuple):
    """A value, when it lives (in instructions, both ends within), and where."""

    start: int
    end: int
    allocation: int
    offset: int
    alive: Alive


def _placed(
    assignment: str, ranges: Mapping[tuple[str, str], tuple[int, int]]
) -> Iterator[_Placed]:
    """The values in device memory that live while the program runs."""
    allocation, parameter, ours = 0, None, False
    for line in assignment.splitlines():
        if head := _ALLOCATION.match(line):
            said = dict(re.findall(r", (color|parameter) (\d+)", head[2]))
            allocation, ours = (
                int(head[1]),
                said.get("color", "0") == "0" and ", thread-local" not in head[2],
            )
            parameter = int(said["parameter"]) if "parameter" in said else None
        elif ours and (value := _VALUE.match(line)):
            name, index, size, offset, array = (
                value[1],
                value[2] or "",
                int(value[3]),
                int(value[4]),
                value[5],
            )
            if (name, index) in ranges:
                element = tuple(int(i) for i in index.split(",") if i)
                alive = Alive(name, element, size, array.partition("{")[0], parameter)
                yield _Placed(*ranges[name, index], allocation, offset, alive)


def _peak(placed: list[_Placed]) -> list[Alive]:
    """What lives when most memory is taken; what shares memory is counted once, as the value that
    came last.

    XLA's own list of the peak counts an operand beside the result that takes its memory, and so may
    take the wrong instruction for the peak, by a fifth of the memory.
    """
    change: dict[int, int] = {}
    for one in placed:
        change[one.start] = change.get(one.start, 0) + one.alive.bytes
        change[one.end + 1] = change.get(one.end + 1, 0) - one.alive.bytes
    at, bound = 0, {}
    for time in sorted(change):
        at += change[time]
        bound[time] = at
    best: list[Alive] = []
    for time in sorted(bound, key=lambda time: -bound[time]):
        if bound[time] <= _bytes(best):  # a bound: what shares memory is in it twice
            break
        best = max(best, _once(one for one in placed if one.start <= time <= one.end), key=_bytes)
    return best


def _bytes(alive: Iterable[Alive]) -> int:
    return sum(one.bytes for one in alive)


def _once(placed: Iterable[_Placed]) -> list[Alive]:
    """Each with the bytes that none before it takes; those that are left with none are gone."""
    ends: dict[int, int] = {}
    found = []
    for one in sorted(
        placed, key=lambda one: (one.allocation, one.offset, -one.alive.bytes, -one.start)
    ):
        end = max(ends.get(one.allocation, 0), one.offset)
        ends[one.allocation] = max(end, one.offset + one.alive.bytes)
        if ends[one.allocation] > end:
            found.append(one.alive._replace(bytes=ends[one.allocation] - end))
    return found
