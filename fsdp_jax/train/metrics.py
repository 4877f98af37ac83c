"""What a run measures, a JSON object per line."""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from fsdp_jax.io.atomic import write_durably

FIELDS = (
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "step_time_s",
    "data_wait_s",
    "tokens_per_s",
    "tflops_per_device",
    "mfu",
    "memory_valley_bytes",
    "memory_peak_bytes",
    "skipped_steps",
    "checkpoint_blocked_s",
    "time",
)
"""Of `metrics.jsonl`. `tokens` counts from the start of the run; `checkpoint_blocked_s` is how long the loop stood
still for a save before this step, without what was written behind its back; what is unknown or not finite is null."""


class JsonLines:
    """A file of one JSON object per line with ascending `step`, continued after step `after`.

    What an earlier run wrote beyond that step, or did not finish writing, is dropped: each step
    occurs once.
    """

    def __init__(self, path: Path, *, after: int):
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= after]
        write_durably(path, "".join(line + "\n" for line in kept).encode())
        self._file = path.open("a", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one object; it is on disk when this returns, short of a crash of the machine."""
        self._file.write(
            json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False)
            + "\n"
        )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [
        line.rstrip("\n")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("}\n")
    ]


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def now() -> str:
    """UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def device_memory() -> tuple[int | None, int | None]:
    """(bytes held now, most ever held) of this process's fullest device; None where the backend
    does not tell.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    held, peak = (
        [stat[key] for stat in stats if key in stat]
        for key in ("bytes_in_use", "peak_bytes_in_use")
    )
    return max(held, default=None), max(peak, default=None)
