"""Goodput: the share of a run's wall time that its steps took, over all starts, from its files.

`starts.jsonl` has a line for each start of a run; `metrics.jsonl` has one for each step that
counts, since the lines of steps that are done again are dropped as a run resumes.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

from fsdp_jax.io.regular_files import read_regular
from fsdp_jax.tables import counted

STARTS, METRICS = "starts.jsonl", "metrics.jsonl"


@dataclass(frozen=True)
class Start:
    """A line of `starts.jsonl`: one start of a run, by process 0."""

    step: int  # that it resumes from, 0 for a new run
    time: str  # when it started, in UTC, before it joins other processes
    processes: int
    devices: int
    last_step: int | None  # whose metrics were written before; None for a new run
    last_time: str | None  # when they were


@dataclass(frozen=True)
class Goodput:
    """Where the wall time of a run went, from its first start to its newest step, in seconds."""

    starts: int
    wall_s: float
    steps_s: float  # in steps that count
    starting_s: float  # until the first step of each start: joining, restoring, compiling
    repeated_s: float  # in what a later start did again, as it resumed from an older step
    down_s: float  # from the last step before each start to that start
    repeated_steps: int

    @property
    def goodput(self) -> float:
        """The share of the wall time in steps that count, 0 to 1."""
        return self.steps_s / self.wall_s

    @property
    def other_s(self) -> float:
        """The rest of the wall time: evaluations, and what saves did not hide."""
        spent = self.steps_s + self.starting_s + self.repeated_s + self.down_s
        return max(self.wall_s - spent, 0.0)

    def as_json(self) -> dict[str, float]:
        """Converts it to JSON values, the goodput and the rest among them."""
        return {**asdict(self), "goodput": self.goodput, "other_s": self.other_s}

    def __str__(self) -> str:
        share = f"goodput {100 * self.goodput:.1f}%"
        parts = [
            f"{share}: {self.steps_s:,.1f} s of {self.wall_s:,.1f} s in training steps",
            f"{self.starting_s:,.1f} s starting",
            f"{self.other_s:,.1f} s evaluating, saving and other",
        ]
        if self.starts > 1:
            restarts = counted(self.starts - 1, "restart")
            parts.append(f"{self.down_s:,.1f} s down ({restarts})")
            parts.append(f"{self.repeated_s:,.1f} s repeating {self.repeated_steps} steps")
        return "; ".join(parts)


def read_goodput(output: str | Path) -> Goodput | None:
    """Computes the goodput of a run from the files in its directory; None before its first step."""
    output = Path(output)
    steps = _objects(output / METRICS, ("step", "time", "step_time_s"))
    starts = _objects(output / STARTS, ("step", "time"))
    if not steps or not starts:
        return None
    finished = {line["step"]: _seconds(line["time"]) for line in steps}
    seconds = {line["step"]: line["step_time_s"] for line in steps}
    order = sorted(finished)
    newest = order[-1]
    starting = repeated = down = 0.0
    repeated_steps = 0
    for start, following in zip_longest(starts, starts[1:]):
        began = _seconds(start["time"])
        kept_to, end = newest, finished[newest]
        # It ended before the next start, which resumed from one of its steps or an older one.
        if following is not None:
            kept_to = following["step"]
            end = max(_seconds(following.get("last_time") or start["time"]), began)
            down += max(_seconds(following["time"]) - end, 0)
            repeated_steps += max((following.get("last_step") or 0) - kept_to, 0)
        # The time until its first step, and after the last one that counts.
        first = start["step"] + 1
        if kept_to >= first and first in finished and kept_to in finished:
            # A line may be written long after its step ended, so that the seconds from its first
            # step to some later one tell best when the first began.
            kept = order[bisect_left(order, first) : bisect_right(order, kept_to)]
            spent = accumulate(seconds[step] for step in kept)
            started = min(finished[step] - done for step, done in zip(kept, spent, strict=True))
            starting += max(started - began, 0)
            repeated += max(end - finished[kept_to], 0)
        else:
            repeated += max(end - began, 0)
    return Goodput(
        starts=len(starts),
        wall_s=max(finished[newest] - _seconds(starts[0]["time"]), 1e-9),
        steps_s=sum(seconds.values()),
        starting_s=starting,
        repeated_s=repeated,
        down_s=down,
        repeated_steps=repeated_steps,
    )


def last_record(output: Path) -> tuple[int | None, str | None]:
    """Reads (step, time) of the newest line of a run's metrics; None twice if there is none."""
    steps = _objects(output / METRICS, ("step", "time"))
    if not steps:
        return None, None
    return steps[-1]["step"], steps[-1]["time"]


def _objects(file: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Reads the JSON objects of a file that have all `names`; other lines are left out."""
    found = []
    try:
        content = read_regular(file)
    except OSError:
        return []
    for line in content.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and all(value.get(name) is not None for name in names):
            found.append(value)
    return found


def _seconds(time: str) -> float:
    """Converts a time as the files have it to seconds."""
    return datetime.fromisoformat(time).timestamp()
