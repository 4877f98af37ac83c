"""The measurements of a run, written as one JSON object per line."""

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fsdp_jax.errors import first_lines, message
from fsdp_jax.io.regular_files import NotRegularError, read_regular, regular_opener
from fsdp_jax.planner import Work


class HostTimes(NamedTuple):
    """What a step took of the host of this process; the fields are those of `StepRecord`."""

    data_wait_s: float
    host_s: float
    host_memory_bytes: int | None


@dataclass(frozen=True)
class StepRecord:
    """A line of `metrics.jsonl`; what is unknown or not finite is written as null.

    `Meter` fills it in, and `Screen` prints some of it (`console.py`).
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int  # since the start of the run
    step_time_s: float
    data_wait_s: float  # of process 0, in `host_s`
    host_s: float  # of process 0 between two waits for the devices, up to the step's dispatch
    host_memory_bytes: int | None  # resident memory of process 0
    tokens_per_s: float
    tflops_per_device: float
    mfu: float | None  # model FLOPs utilization; None without a known peak
    memory_valley_bytes: int | None  # steady-state memory of the fullest device, between steps
    memory_peak_bytes: int | None
    skipped_steps: int
    checkpoint_blocked_s: float | None  # wait for a save before this step, background work excluded
    time: str
    slowest_process: int | None = None  # whose host took longest for the step before; of several
    slowest_data_wait_s: float | None = None  # its `data_wait_s`
    slowest_host_s: float | None = None
    median_host_s: float | None = None  # over the processes
    most_host_memory_bytes: int | None = None  # of any process


@dataclass
class Meter:
    """Measures the steps of a run: their time, throughput and memory."""

    work: Work  # of a step
    learning_rate: Callable[[int], float]  # number of an update -> its learning rate
    devices: int
    peak_flops: float | None  # of a device; None where it is not known
    previous_finish: float = 0.0  # when the step before was done
    steady_bytes: int | None = None  # memory between steps

    def record(
        self,
        step: int,
        metrics: Mapping[str, float],
        updates: int,
        host: HostTimes,
        blocked: float | None,
        of_processes: np.ndarray,
    ) -> StepRecord:
        """Makes the record of a step that is done now, from the step's own metrics.

        `updates` were counted by the schedule before it; `host` is what the step took of
        this process, and seconds were `blocked` by a save. `of_processes`: see `Agreement`.
        """
        # The time since the step before was done, in which the devices ran this one.
        finish = time.perf_counter()
        seconds = finish - self.previous_finish
        self.previous_finish = finish
        tokens, flops = self.work.tokens, self.work.flops
        assert tokens is not None, "known of a run"
        assert flops is not None, "known of a run"
        flops_per_device = flops / seconds / self.devices
        return StepRecord(
            step=step,
            loss=metrics["loss"],
            grad_norm=metrics["grad_norm"],
            learning_rate=self.learning_rate(updates),
            tokens=step * tokens,
            step_time_s=seconds,
            **host._asdict(),
            tokens_per_s=tokens / seconds,
            tflops_per_device=flops_per_device / 1e12,
            mfu=flops_per_device / self.peak_flops if self.peak_flops else None,
            memory_valley_bytes=self.steady_bytes,
            memory_peak_bytes=device_memory()[1],
            skipped_steps=int(metrics["skipped"]),
            checkpoint_blocked_s=blocked,
            time=utc_timestamp(),
            **slowest_fields(of_processes),
        )


def slowest_fields(of_processes: np.ndarray) -> dict[str, Any]:
    """Makes the fields of a record that compare several processes; {} of one."""
    if len(of_processes) < 2:
        return {}
    data_wait, host, memory = of_processes.T
    slowest = int(np.argmax(host))
    return {
        "slowest_process": slowest,
        "slowest_data_wait_s": float(data_wait[slowest]),
        "slowest_host_s": float(host[slowest]),
        "median_host_s": float(np.median(host)),
        "most_host_memory_bytes": int(memory.max()),
    }


Say = Callable[[str], None]


class JsonLines:
    """A file of one JSON object per line with ascending `step`, continued after step `after`.

    Lines beyond that step, from an earlier run, are dropped, so that each step occurs once; a line
    that a kill cut short is dropped and told. A record is written as a whole or not at all: what
    the disk does not take is told, and training goes on. `where` is the path for messages.
    """

    def __init__(self, path: Path, *, after: int, say: Say, where: Path | None = None):
        self._path, self._after, self._say = path, after, say
        self._where = str(where or path)
        self.continued_at: int | None = None  # step of the last record that was there and was kept
        self._lost: list[int] = []  # steps
        self._told = False
        self._file: FileIO | None = None
        try:
            self._file = self._open_continued()
        except OSError as error:
            self._warn_once(error)

    def _open_continued(self) -> FileIO:
        """Opens the file, and cuts it off behind the last record up to step `after`."""
        content = b""
        if os.path.lexists(self._path):
            content = read_regular(self._path, follow_link=False)
        lines = list(parse_lines(content))
        damaged = [(end, start) for step, end, start in lines if step is None]
        ends = {step: end for step, end, _ in lines if step is not None}
        kept = [step for step in ends if step <= self._after]
        self.continued_at = max(kept, default=None)
        end = max((ends[step] for step in kept), default=0)
        if damaged:
            what = f"warning: {len(damaged)} lines of metrics cannot be read"
            got = first_lines([start for _, start in damaged], 5)
            dropped = sum(line_end > end for line_end, _ in damaged)
            fix = f"none: {dropped} at the end are dropped, others left as they are"
            self._say(message(what, where=self._where, got=got, fix=fix))
        file = FileIO(self._path, "ab", opener=regular_opener(follow_link=False))
        file.truncate(end)
        return file

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one object; it is on disk when this returns, short of a crash of the machine."""
        plain = {name: _finite_or_none(value) for name, value in record.items()}
        line = json.dumps(plain, allow_nan=False).encode() + b"\n"
        try:
            if self._file is None:
                self._file = self._open_continued()
            before = self._file.seek(0, os.SEEK_END)
            if self._file.write(line) != len(line):
                self._file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._where)
        except OSError as error:
            self._warn_once(error)
            self._lost.append(record["step"])

    def _warn_once(self, error: OSError) -> None:
        """Says that the metrics are not written, the first time that this happens."""
        if self._told:
            return
        self._told = True
        what = "warning: metrics are not written, but training goes on"
        fix = "free some space: later steps are written again"
        if isinstance(error, NotRegularError):
            fix = "move it away: later steps are written again"
        if error.filename is not None:
            error.filename = self._where
        self._say(message(what, where=self._where, got=error, fix=fix))

    def close(self) -> None:
        """Closes the file, and tells how many records are not in it."""
        if self._file is not None:
            self._file.close()
        if self._lost:
            got = f"{len(self._lost)} records, of steps {self._lost[0]} to {self._lost[-1]}"
            what = "warning: metrics are missing, which were not written"
            self._say(message(what, where=self._where, got=got))


def parse_lines(content: bytes) -> Iterator[tuple[int | None, int, str]]:
    """Yields (step, end, excerpt) of each line of a file of metrics.

    `step` is None unless the line is whole, and a JSON object with a step; `end` is the offset of
    the next line in bytes; `excerpt` is the number and the beginning of the line, for a message.
    """
    end = 0
    for number, line in enumerate(BytesIO(content), 1):
        end += len(line)
        try:
            step = json.loads(line)["step"]
        except (ValueError, LookupError, TypeError, RecursionError):
            step = None
        is_record = line.endswith(b"\n") and type(step) is int
        yield step if is_record else None, end, f"line {number}: {ascii(line[:60])[2:-1]}"


def loss_metrics_field(values: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Makes a field of a record, {"metrics": the loss's own metrics}; {} if there are none."""
    return {"metrics": {name: value.tolist() for name, value in values.items()}} if values else {}


def _finite_or_none(value: Any) -> Any:
    """Replaces NaN and infinity by None in a value, or in a dict or list of values."""
    if isinstance(value, dict):
        return {name: _finite_or_none(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite_or_none(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def utc_timestamp() -> str:
    """Formats the time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def host_memory_bytes() -> int | None:
    """Reads the resident memory of this process, in bytes; None where Linux does not tell it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def device_memory() -> tuple[int | None, int | None]:
    """Reads (bytes in use, peak bytes) of this process's fullest device; None if unknown."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    in_use = [stat["bytes_in_use"] for stat in stats if "bytes_in_use" in stat]
    peak = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    return max(in_use, default=None), max(peak, default=None)
