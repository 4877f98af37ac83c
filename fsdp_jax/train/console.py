"""The log of a run: lines, and on a terminal a progress bar; processes other than 0 are silent.

Other lines are printed where they arise, by `Screen.say`: in `loop.py`, `resume.py`, `main.py`.
"""

import sys
import textwrap
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fsdp_jax.checkpoint import Lease
from fsdp_jax.checkpoint.manifest import package_versions
from fsdp_jax.compat.error_texts import is_disk_full
from fsdp_jax.errors import extra, human_bytes
from fsdp_jax.launch import is_lead
from fsdp_jax.lora import Adapters
from fsdp_jax.processes import host_of
from fsdp_jax.sharding.layout import Layout
from fsdp_jax.sharding.report import largest_replicated, totals_table
from fsdp_jax.tables import counted
from fsdp_jax.trackers import Trackers
from fsdp_jax.train.build import Run
from fsdp_jax.train.charts import sparkline
from fsdp_jax.train.goodput import STARTS, Goodput, Start, last_record
from fsdp_jax.train.metrics import JsonLines, StepRecord
from fsdp_jax.weights.adapters import stated_base

with extra("train"):
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table
    from rich.text import Text


LINE = 72  # characters of a sample in a line
MOST_STEPS = 1000  # whose mean a line shows
SPARKLINE = 16  # losses that the bar shows


class RemainingColumn(TimeRemainingColumn):
    """The time that remains; nothing while it is not known, as while the step compiles."""

    def render(self, task: Task) -> Text:
        """Formats the time of a task."""
        return super().render(task) if task.speed else Text()


class Screen:
    """Prints lines, unless `quiet`; on a terminal a bar stays below them while training.

    On a terminal lines are wrapped at words and labels stand out; elsewhere a line is one line.
    """

    def __init__(self, steps: int, *, quiet: bool):
        self._steps = steps
        self._quiet = quiet
        self._console = Console(
            file=sys.stdout,
            highlight=False,
            markup=False,
            emoji=False,
            # Open MPI gives each process a terminal, and writes what is on it to its log.
            force_terminal=False if jax.process_count() > 1 else None,
        )
        self._console.soft_wrap = not self._console.is_terminal
        self._bar: Progress | None = None
        self._losses: deque[float] = deque(maxlen=SPARKLINE)
        self._since_log: deque[StepRecord] = deque(maxlen=MOST_STEPS)

    def say(self, text: str) -> None:
        """Prints text on lines of its own; a warning in yellow, where there are colours."""
        self._print(Text(text, style="yellow" * text.startswith("warning")), plain=text)

    def say_rows(self, rows: Mapping[str, str]) -> None:
        """Prints a line for each label and its text."""
        grid = Table.grid(padding=(0, 2))
        for label, text in rows.items():
            grid.add_row(Text(label, style="bold"), Text(text))
        self._print(
            grid, plain="\n".join(f"{label + ':':<13}{text}" for label, text in rows.items())
        )

    def _print(self, shown: RenderableType, *, plain: str) -> None:
        """Prints `shown` on a terminal, and elsewhere `plain`."""
        if self._quiet:
            return
        try:
            if self._console.is_terminal:
                self._console.print(shown)
            else:
                self._console.print(plain)
            sys.stdout.flush()  # for a log that is followed through a pipe
        except OSError as error:
            if not is_disk_full(error):  # then the run goes on: checkpoints matter more
                raise

    def start_bar(self, step: int) -> None:
        """Shows a bar from now on, if stdout is a terminal; until the first step it compiles."""
        if self._console.is_terminal and not self._quiet:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=12),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                RemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.add_task("compiling", total=self._steps, completed=step)
            self._bar.start()

    def end_bar(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show_step(self, record: StepRecord, *, log: bool, more: Mapping[str, np.ndarray]) -> None:
        """Advances the bar; if `log`, prints a line of metrics, with the scalars in `more`."""
        self._losses.append(record.loss)
        self._since_log.append(record)
        if self._bar is not None:
            description = f"loss {record.loss:.4f} {sparkline(self._losses)}"
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=record.step, description=description)
        if log:
            self.say(self._step_line(record, more))
            self._since_log.clear()

    def _step_line(self, record: StepRecord, more: Mapping[str, np.ndarray]) -> str:
        """Formats the log line of a step, with the scalars of `more`, the loss's own metrics.

        Times are means over the steps since the line before. On a terminal it is cut to one line:
        what matters least is left out first.
        """
        steps = self._since_log
        seconds = sum(each.step_time_s for each in steps) / len(steps)
        seconds_left = round((self._steps - record.step) * seconds)
        speed = record.step_time_s / seconds  # of the mean against this step
        # Texts in the order of the line, each with its rank: 0 is never left out.
        fields = [
            (0, f"step {record.step:>{len(str(self._steps))}}/{self._steps}"),
            (0, f"loss {record.loss:.4f}"),
            *((1, f"{name} {value:.4g}") for name, value in more.items() if value.ndim == 0),
            (5, f"grad {record.grad_norm:.3g}"),
            (6, f"lr {record.learning_rate:.1e}"),
            (2, f"{seconds:.3g} s"),
            (1, f"{speed * record.tokens_per_s:,.0f} tok/s"),
            (4, self._data_wait(seconds)),
        ]
        if record.mfu is not None:
            fields.append((1, f"mfu {100 * speed * record.mfu:.1f}%"))
        elif record.memory_peak_bytes is not None:  # an accelerator whose peak is not known
            fields.append((3, f"{speed * record.tflops_per_device:.3g} TFLOP/s/dev"))
        if record.memory_peak_bytes is not None:
            fields.append((3, f"mem {human_bytes(record.memory_peak_bytes)}"))
        if record.skipped_steps:
            fields.append((1, f"skipped {record.skipped_steps}"))
        fields.append((2, f"eta {timedelta(seconds=seconds_left)}"))

        def line() -> str:
            return "  ".join(text for _, text in fields)

        while self._console.is_terminal and len(line()) > self._console.width:
            least = max(fields, key=lambda field: field[0])
            if least[0] == 0:
                break
            fields.remove(least)
        return line()

    def _data_wait(self, seconds: float) -> str:
        """Formats the share of a step's `seconds` in a wait for data, of the slowest process."""
        waits = []
        for record in self._since_log:
            wait = record.slowest_data_wait_s
            waits.append(record.data_wait_s if wait is None else wait)
        text = f"data {100 * sum(waits) / len(waits) / seconds:.0f}%"
        slowest = self._since_log[-1].slowest_process
        if slowest is not None:
            text += f" (slowest: process {slowest})"
        return text


@dataclass
class RunLog:
    """The output of a run: lines on the screen and, of process 0, the files of its metrics."""

    lease: Lease  # of the directory with the files
    screen: Screen
    metrics: JsonLines | None = None
    evals: JsonLines | None = None
    trackers: Trackers | None = None  # in process 0

    def write_step(self, record: Mapping[str, Any]) -> None:
        """Writes what was measured in a step, in process 0."""
        if self.metrics is not None:
            self.metrics.write(record)
            self._track(record["step"], record)

    def write_evaluation(self, record: Mapping[str, Any]) -> None:
        """Writes what an evaluation has measured, in process 0."""
        if self.evals is not None:
            self.evals.write(record)
            # Under a name of its own: `tokens` and the loss's metrics are in a step's record too.
            measured = {name: value for name, value in record.items() if name != "step"}
            self._track(record["step"], {"evaluation": measured})

    def _track(self, step: int, values: Mapping[str, Any]) -> None:
        if self.trackers is not None:
            self.trackers.log(step, values)

    def open(self, step: int, *, evaluates: bool = False) -> None:
        """Opens the files of metrics in process 0, without the lines after this step.

        Where the run `evaluates` this step next, its held-out loss is dropped too.
        """
        if is_lead():
            self.lease.require_held()
            self.metrics = self._open_file("metrics.jsonl", step)
            self.evals = self._open_file("evals.jsonl", step - evaluates)

    def note_start(self, started: str, resumed: int | None) -> None:
        """Adds a line to `starts.jsonl` in process 0; `started` is when the run did, in UTC.

        Before `open`, which drops the metrics of steps that are done again.
        """
        if not is_lead():
            return
        self.lease.require_held()
        last_step, last_time = last_record(self.lease.anchor)
        start = Start(
            step=resumed or 0,
            time=started,
            processes=jax.process_count(),
            devices=jax.device_count(),
            last_step=last_step,
            last_time=last_time,
        )
        file = self._open_file(STARTS, sys.maxsize)
        file.write(vars(start))
        file.close()

    def _open_file(self, name: str, after: int) -> JsonLines:
        """Opens a file of metrics, continued after step `after`."""
        where = self.lease.directory / name
        path = self.lease.anchor / name
        return JsonLines(path, after=after, say=self.screen.say, where=where)

    def close(self) -> None:
        """Closes the files of metrics."""
        for file in (self.metrics, self.evals):
            if file is not None:
                file.close()


def banner(
    run: Run, corpus: str, checkpoints: str, weights: str | None, resumed: int | None
) -> dict[str, str]:
    """Describes a run before its first step, by label: versions, devices, parameters, data, ...

    `corpus` describes the data, `checkpoints` is their directory, `weights` where the run starts
    from, None for random ones, and `resumed` is the step that it resumed from, None for a new run.
    """
    # The machine.
    layout = run.sharded.layout
    devices = layout.mesh.devices.flatten()
    mesh = " x ".join(f"{name}={size}" for name, size in layout.axes.shape.items())

    # Parameters, and how many of them are trained.
    sizes = {path: prod(leaf.model_shape) for path, leaf in layout.by_path.items()}
    parameters = sum(sizes.values())
    trained = sum(size for path, size in sizes.items() if layout.by_path[path].trainable)
    count = f"{parameters:,}"
    if trained != parameters:
        count += f", of which {trained:,} are trained ({100 * trained / parameters:.2g}%)"
    replicated = ", ".join(
        f"{leaf.path} {human_bytes(leaf.bytes)}" for leaf in largest_replicated(layout, 3)
    )

    # Where the parameters come from.
    weights = weights or "random"
    start = "starts at step 0"
    if resumed is not None:
        weights = f"from the checkpoint (the run started from {weights})"
        start = f"resumes at step {resumed}"

    versions = package_versions() | {"python": sys.version.split()[0]}
    shown = ("fsdp_jax", "jax", "flax", "python")
    examples, tokens = run.rows, run.work.tokens
    return {
        "versions": ", ".join(f"{name} {versions[name]}" for name in shown),
        "devices": f"{len(devices)} {devices[0].device_kind} {_where(list(devices))}, mesh {mesh}",
        "parameters": count,
        "weights": weights,
        **_adapters(run.adapters),
        "state": f"{layout.summary()}{_memory_bar(layout)}",
        "replicated": replicated or "nothing larger than a counter",
        "rules": _rule_matches(layout),
        "data": corpus,
        "batch": f"{_batch_size(examples, list(devices))}, {tokens:,} tokens per step",
        "checkpoints": f"{checkpoints}: {start}",
    }


def _adapters(adapters: Adapters) -> dict[str, str]:
    """Describes adapters, where they are from, and how the base is stored, by label."""
    if adapters.rank is None:
        return {}
    assert adapters.scale is not None
    text = f"rank {adapters.rank}, alpha {adapters.scale * adapters.rank:g}"
    if adapters.weights is not None:
        base = stated_base(Path(adapters.weights).expanduser())
        text = f"{adapters.weights} ({text}, made for {base or 'weights that it does not name'})"
    rows = {"adapters": text}
    if adapters.base is not None:
        rows["base"] = f"{adapters.base}, scales in {adapters.base_scales}"
    return rows


def _memory_bar(layout: Layout) -> str:
    """Draws the share of a device's memory that the state takes; empty where it is not known."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return ""
    share = layout.per_device() / stats["bytes_limit"]
    filled = min(round(share * 10), 10)
    bar = "█" * filled + "░" * (10 - filled)
    return f"; {bar} {100 * share:.0f}% of {human_bytes(stats['bytes_limit'])}"


def _where(devices: list[jax.Device]) -> str:
    """Formats where devices are: `on 2 hosts, in 4 processes`; processes only if there are more."""
    hosts = len({host_of(device) for device in devices})
    processes = len({device.process_index for device in devices})
    text = f"on {counted(hosts, 'host')}"
    if processes > 1:
        text += f", in {processes} processes"
    return text


def _batch_size(examples: int, devices: list[jax.Device]) -> str:
    """Formats the global batch: `32 examples`, or `2 processes x 16 rows = 32 examples`."""
    processes = len({device.process_index for device in devices})
    if processes == 1:
        return f"{examples} examples"
    return f"{processes} processes x {examples // processes} rows = {examples} examples"


def _rule_matches(layout: Layout) -> str:
    """Counts the parameters that each sharding rule matched, and those that it sharded."""
    matched: dict[str, list[bool]] = {}
    for leaf in layout.by_path.values():
        matched.setdefault(leaf.rule, []).append(not leaf.is_replicated)
    return "; ".join(
        f"'{rule}' matched {len(sharded)} ({sum(sharded)} sharded)"
        for rule, sharded in matched.items()
    )


def closing_summary(
    layout: Layout,
    unit: str,
    sample: str | None,
    goodput: Goodput | None,
    output: Path,
    *,
    has_adapters: bool,
) -> str:
    """Formats the text at the end of a run: memory, goodput, a sample, and what to do next.

    The sample and the goodput are None where there is none; `unit` is what the loss is measured
    per, and `output` the run's directory. Without a format adapters are exported as they are here.
    """
    parts = [f"memory per device, {layout.strategy.name}\n{totals_table(layout)}"]
    if goodput is not None:
        parts.append(str(goodput))
    if sample is not None:
        # Control codes would reach the terminal.
        printable = "".join(c if c.isprintable() or c == "\n" else " " for c in sample)
        lines = [textwrap.wrap(line, LINE, drop_whitespace=False) for line in printable.split("\n")]
        text = "\n".join("  | " + part for line in lines for part in line or [""])
        title = "a sample that continues held-out text"
        if unit == "image":
            title = "predictions for held-out images"
        parts.append(f"{title}\n{text}")
    files = f"{output}: metrics.jsonl, evals.jsonl, layout.json, checkpoints"
    page = f"fsdp-jax report {output} --html run.html"
    export = f"fsdp-jax export {output} --to weights"
    if has_adapters:
        export += " --format huggingface (merged) or peft (the adapters alone)"
    parts.append(f"results in {files}\nnext: {page}, {export}")
    return "\n\n".join(parts)
