"""What a run measures, written as one JSON object per line."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fsdp_jax.io.atomic import write_durably


@dataclass(frozen=True)
class StepRecord:
    """A line of `metrics.jsonl`; what is unknown or not finite is written as null."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int  # since the start of the run
    step_time_s: float
    data_wait_s: float
    tokens_per_s: float
    tflops_per_device: float
    mfu: float | None  # model FLOPs utilization; None without a known peak
    memory_valley_bytes: int | None  # steady-state memory of the fullest device, between steps
    memory_peak_bytes: int | None
    skipped_steps: int
    checkpoint_blocked_s: float | None  # wait for a save before this step, background work excluded
    time: str


class JsonLines:
    """A file of one JSON object per line with ascending `step`, continued after step `after`.

    Lines beyond that step or cut short, from an earlier run, are dropped: each step occurs once.
    """

    def __init__(self, path: Path, *, after: int):
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        complete = [line for line in lines if line.endswith("}\n")]
        continued = "".join(line for line in complete if json.loads(line)["step"] <= after)
        write_durably(path, continued.encode())
        self._file = path.open("a", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one object; it is on disk when this returns, short of a crash of the machine."""
        plain = {name: _finite_or_none(value) for name, value in record.items()}
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def of_the_loss(values: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the field `metrics` of a record, for metrics of the loss's own; none without them."""
    return {"metrics": {name: value.tolist() for name, value in values.items()}} if values else {}


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite_or_none(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite_or_none(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def now() -> str:
    """Returns the time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def device_memory() -> tuple[int | None, int | None]:
    """Returns (bytes in use, peak bytes) of this process's fullest device, or None if unknown."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    in_use = [stat["bytes_in_use"] for stat in stats if "bytes_in_use" in stat]
    peak = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    return max(in_use, default=None), max(peak, default=None)
