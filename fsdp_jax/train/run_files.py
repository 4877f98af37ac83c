"""Reads the directory of a run, which may be damaged or still be written.

What cannot be read is named in `RunFiles.problems`, and left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from fsdp_jax.checkpoint.manifest import list_steps, read_manifest
from fsdp_jax.errors import ConfigError, DamageError, ReadableError, first_lines
from fsdp_jax.io.json_text import parse_json, read_json_object
from fsdp_jax.io.regular_files import read_regular
from fsdp_jax.train.communication import COMMUNICATION, MEASURED, StepFigures, comparison
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import load_config
from fsdp_jax.train.goodput import METRICS, STARTS, Goodput, read_goodput

EVALS, LAYOUT, CONFIG, CHECKPOINTS = "evals.jsonl", "layout.json", "config.yaml", "checkpoints"
LARGEST = 1e300  # number that is read, so that sums and ratios of two are finite
LOG_BYTES = 4000  # of the end of a process's output
Record = dict[str, Any]


@dataclass(frozen=True)
class LayoutRow:
    """An array of the training state, as `layout.json` has it."""

    path: str
    part: str
    shape: str
    dtype: str
    spec: str
    bytes: int
    bytes_per_device: int


@dataclass(frozen=True)
class RunLayout:
    """The layout of a run: its strategy and mesh, and its arrays, the largest first."""

    strategy: str
    mesh: dict[str, int]
    totals: dict[str, dict[str, int]]  # part, or `total` -> bytes, bytes per device
    rows: tuple[LayoutRow, ...]


@dataclass(frozen=True)
class RunCommunication:
    """What the program of a run sends, as `communication.json` has it."""

    summary: str
    device: str
    time: str
    collectives: tuple[Record, ...]
    violations: tuple[str, ...]


@dataclass(frozen=True)
class RunMeasured:
    """The program of a run as it was planned, and what its first steps took: `measured.json`."""

    planned: StepFigures
    measured: StepFigures
    first_step: int
    last_step: int
    device: str
    time: str

    @property
    def summary(self) -> str:
        """Both in one line, with their ratios."""
        return comparison(self.planned, self.measured)


@dataclass
class RunFiles:
    """The contents of a run's directory; what is missing is None or empty, and in `problems`.

    Lines of the files of metrics are in the order of their steps, starts in that of the file.
    """

    directory: Path
    problems: list[str] = field(default_factory=list)
    steps: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    starts: list[Record] = field(default_factory=list)
    layout: RunLayout | None = None
    config: Config | None = None
    communication: RunCommunication | None = None  # not a problem where it is missing
    measured: RunMeasured | None = None  # likewise
    checkpoints: dict[int, Record | None] = field(default_factory=dict)  # None: damaged
    outputs: dict[str, str] = field(default_factory=dict)  # file -> its last lines
    goodput: Goodput | None = None


def read_run(directory: Path) -> RunFiles:
    """Reads the files of a run. Raises ConfigError if none of them is in the directory."""
    if not _is_run(directory):
        fix = "the `output` of `train`, where a run has started"
        # The user may have passed a folder inside the run's.
        for parent in directory.absolute().parents:
            if _is_run(parent):
                fix = f"pass {parent}"
                break
        raise ConfigError(
            "no run there",
            where=str(directory),
            expected=f"a run's output directory, with {METRICS} or {LAYOUT} in it",
            fix=fix,
        )
    files = RunFiles(directory)
    # What was measured: each step once.
    files.steps = _by_step(_read_lines(files, METRICS))
    files.evaluations = _by_step(_read_lines(files, EVALS))
    files.starts = list(_read_lines(files, STARTS))
    try:
        files.goodput = read_goodput(directory)
    except (ValueError, TypeError, OverflowError) as error:
        files.problems.append(f"{METRICS}, {STARTS}: no goodput: {error}")
    # What was planned, and what is kept.
    files.layout = _read_layout(files)
    files.communication = _read_communication(files)
    files.measured = _read_measured(files)
    try:
        files.config = load_config(directory / CONFIG)
    except ReadableError as error:
        files.problems.append(f"{CONFIG}: {_in_a_line(error)}")
    files.checkpoints = _read_manifests(files)
    for log in sorted(directory.glob("process-*.log")):
        try:
            files.outputs[log.name] = read_regular(log)[-LOG_BYTES:].decode(errors="replace")
        except OSError as error:
            files.problems.append(f"{log.name}: {error.strerror}")
    return files


def figure(record: Record, name: str) -> float | None:
    """Reads a number of a record; None if there is none, or it is not finite."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None
    return float(value)


def _is_run(directory: Path) -> bool:
    files = any((directory / name).is_file() for name in (METRICS, STARTS, LAYOUT))
    return files or bool(list_steps(directory / CHECKPOINTS)[0])


def _by_step(records: Iterator[Record]) -> list[Record]:
    """Sorts records by their steps, of which each counts once."""
    return sorted({record["step"]: record for record in records}.values(), key=itemgetter("step"))


def _read_lines(files: RunFiles, name: str) -> Iterator[Record]:
    """Yields the objects of a file that have a step; lines that cannot be read are problems."""
    try:
        lines = read_regular(files.directory / name).splitlines()
    except OSError as error:
        files.problems.append(f"{name}: {error.strerror}")
        return
    damaged = []
    for number, line in enumerate(lines, 1):
        try:
            value = parse_json(line.decode())
            step = value.get("step") if isinstance(value, dict) else None
            readable = type(step) is int and 0 <= step < 1 << 63
        except ValueError:
            readable = False
        if readable:
            yield value
        else:
            damaged.append(f"line {number}: {ascii(line[:60])[2:-1]}")
    if damaged:
        what = f"{name}: {len(damaged)} of {len(lines)} lines cannot be read"
        files.problems.append(f"{what}\n{first_lines(damaged, 5)}")


def _read_layout(files: RunFiles) -> RunLayout | None:
    """Reads `layout.json`; None if it is missing or damaged."""
    try:
        fields = read_json_object(files.directory / LAYOUT, "the layout cannot be read")
        rows = [
            LayoutRow(
                path=str(leaf["path"]),
                part=str(leaf["part"]),
                shape=str(list(leaf["shape"])),
                dtype=str(leaf["dtype"]),
                spec=", ".join("+".join(axes or ["-"]) for axes in leaf["spec"]),
                bytes=int(leaf["bytes"]),
                bytes_per_device=int(leaf["bytes_per_device"]),
            )
            for leaf in fields["leaves"]
        ]
        totals = {
            str(part): {str(name): int(count) for name, count in counts.items()}
            for part, counts in fields["totals"].items()
        }
        mesh = {str(axis): int(size) for axis, size in fields["mesh"].items()}
        strategy = str(fields["strategy"])
    except ReadableError as error:
        files.problems.append(f"{LAYOUT}: {_in_a_line(error)}")
        return None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        files.problems.append(f"{LAYOUT}: not a layout: {type(error).__name__} {error}")
        return None
    rows.sort(key=lambda row: (-row.bytes_per_device, row.path))
    return RunLayout(strategy, mesh, totals, tuple(rows))


def _read_communication(files: RunFiles) -> RunCommunication | None:
    """Reads `communication.json`; None if it is damaged, or missing, as on CPUs."""
    file = files.directory / COMMUNICATION
    if not file.exists():
        return None
    try:
        fields = read_json_object(file, "it cannot be read")
        collectives = [
            {name: str(row[name]) for name in ("op", "dtype", "axis", "count", "where")}
            | {name: int(row[name]) for name in ("bytes", "overlapped_bytes")}
            for row in fields["collectives"]
        ]
        return RunCommunication(
            summary=str(fields["summary"]),
            device=str(fields["device"]),
            time=str(fields["time"]),
            collectives=tuple(collectives),
            violations=tuple(map(str, fields["contract"]["violations"])),
        )
    except ReadableError as error:
        files.problems.append(f"{COMMUNICATION}: {_in_a_line(error)}")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        files.problems.append(f"{COMMUNICATION}: {type(error).__name__} {error}")
    return None


def _read_measured(files: RunFiles) -> RunMeasured | None:
    """Reads `measured.json`; None if it is damaged, or missing, as on CPUs."""
    file = files.directory / MEASURED
    if not file.exists():
        return None
    try:
        fields = read_json_object(file, "it cannot be read")
        planned, measured = (
            StepFigures(**{name: figure(fields[what], name) for name in ("peak_bytes", "step_s")})
            for what in ("planned", "measured")
        )
        return RunMeasured(
            planned=planned,
            measured=measured,
            first_step=int(fields["first_step"]),
            last_step=int(fields["last_step"]),
            device=str(fields["device"]),
            time=str(fields["time"]),
        )
    except ReadableError as error:
        files.problems.append(f"{MEASURED}: {_in_a_line(error)}")
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        files.problems.append(f"{MEASURED}: {type(error).__name__} {error}")
    return None


def _read_manifests(files: RunFiles) -> dict[int, Record | None]:
    """Reads the manifest of each checkpoint, not its files; None for one that is damaged."""
    directory = files.directory / CHECKPOINTS
    found: dict[int, Record | None] = {}
    for step in list_steps(directory)[0]:
        try:
            found[step] = read_manifest(directory / str(step))
        except DamageError as error:
            if (directory / str(step)).exists():  # a run that trains deletes old ones
                found[step] = None
                files.problems.append(f"{CHECKPOINTS}/{step}: {_in_a_line(error)}")
    return found


def _in_a_line(error: ReadableError) -> str:
    """Formats an error about a file, without the file's name: the key in it, and what is wrong."""
    key = error.where.rpartition(": ")[2]
    if "/" in key or key == CONFIG:
        key = ""
    return ", ".join(part for part in (key, error.what, error.got) if part)
