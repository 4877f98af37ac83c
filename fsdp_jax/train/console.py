"""The log of a run: lines, and on a terminal a progress bar; processes other than 0 are silent."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import jax
import numpy as np

from fsdp_jax.checkpoint import Lease
from fsdp_jax.checkpoint.manifest import package_versions
from fsdp_jax.compat.error_texts import is_disk_full
from fsdp_jax.errors import extra, human_bytes
from fsdp_jax.launch import is_lead
from fsdp_jax.processes import host_of
from fsdp_jax.sharding.layout import Layout
from fsdp_jax.sharding.report import largest_replicated, totals_table
from fsdp_jax.train.build import Run
from fsdp_jax.train.goodput import STARTS, Goodput, Start, last_record
from fsdp_jax.train.metrics import JsonLines, StepRecord

with extra("train"):
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )


class Screen:
    """Prints lines, unless `quiet`; on a terminal a bar stays below them while training."""

    def __init__(self, steps: int, *, quiet: bool):
        self._steps = steps
        self._quiet = quiet
        self._console = Console(
            file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._bar: Progress | None = None

    def say(self, text: str) -> None:
        """Prints text on lines of its own."""
        if self._quiet:
            return
        try:
            self._console.print(text)
            sys.stdout.flush()  # for a log that is followed through a pipe
        except OSError as error:
            if not is_disk_full(error):  # then the run goes on: checkpoints matter more
                raise

    def start_bar(self, step: int) -> None:
        """Shows a progress bar from now on, if stdout is a terminal."""
        if self._console.is_terminal and not self._quiet:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.add_task("", total=self._steps, completed=step)
            self._bar.start()

    def end_bar(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show_step(self, record: StepRecord, *, log: bool, more: Mapping[str, np.ndarray]) -> None:
        """Advances the bar; if `log`, prints a line of metrics, with the scalars in `more`."""
        if self._bar is not None:
            description = f"loss {record.loss:.4f}  {record.tokens_per_s:,.0f} tok/s"
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=record.step, description=description)
        if log:
            self.say(self._step_line(record, more))

    def _step_line(self, record: StepRecord, more: Mapping[str, np.ndarray]) -> str:
        """Formats the log line of a step, with the scalars of `more`, the loss's own metrics."""
        seconds_left = round((self._steps - record.step) * record.step_time_s)
        fields = [
            f"step {record.step:>{len(str(self._steps))}}/{self._steps}",
            f"loss {record.loss:.4f}",
            *(f"{name} {value:.4g}" for name, value in more.items() if value.ndim == 0),
            f"grad {record.grad_norm:.4f}",
            f"lr {record.learning_rate:.2e}",
            f"{record.step_time_s:.3f} s",
            f"{record.tokens_per_s:,.0f} tok/s",
            f"{record.tflops_per_device:.3g} TFLOP/s/dev",
            self._data_wait(record),
        ]
        if record.mfu is not None:
            fields.append(f"mfu {100 * record.mfu:.1f}%")
        if record.memory_peak_bytes is not None:
            fields.append(f"mem {human_bytes(record.memory_peak_bytes)}")
        if record.skipped_steps:
            fields.append(f"skipped {record.skipped_steps}")
        return "  ".join([*fields, f"eta {timedelta(seconds=seconds_left)}"])

    def _data_wait(self, record: StepRecord) -> str:
        """Formats the share of a step's time that a process waited for data, the slowest one."""
        if record.slowest_process is None or record.slowest_data_wait_s is None:
            return f"data {100 * record.data_wait_s / record.step_time_s:.0f}%"
        share = 100 * record.slowest_data_wait_s / record.step_time_s
        return f"data {share:.0f}% (process {record.slowest_process})"


@dataclass
class RunLog:
    """The output of a run: lines on the screen and, of process 0, the files of its metrics."""

    lease: Lease  # of the directory with the files
    screen: Screen
    metrics: JsonLines | None = None
    evals: JsonLines | None = None

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
) -> str:
    """Formats the text before the first step of a run: versions, devices, parameters, data, ...

    `corpus` describes the data, `checkpoints` is their directory, `weights` where the run starts
    from, None for random ones, and `resumed` is the step that it resumed from, None for a new run.
    """
    # The machine.
    layout = run.sharded.layout
    devices = layout.mesh.devices.flatten()
    mesh = " x ".join(f"{name}={size}" for name, size in layout.axes.shape.items())

    # Parameters, and how many of them are trained.
    sizes = {path: leaf.bytes // leaf.dtype.itemsize for path, leaf in layout.by_path.items()}
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
        weights = f"of the checkpoint (the run started from {weights})"
        start = f"resumes at step {resumed}"

    # One line for each.
    versions = package_versions() | {"python": sys.version.split()[0]}
    shown = ("fsdp_jax", "jax", "flax", "python")
    examples, tokens = run.rows, run.work.tokens
    rows = {
        "versions": ", ".join(f"{name} {versions[name]}" for name in shown),
        "devices": f"{len(devices)} {devices[0].device_kind} {_where(list(devices))}, mesh {mesh}",
        "parameters": count,
        "weights": weights,
        "state": layout.summary(),
        "replicated": replicated or "nothing larger than a counter",
        "rules": _rule_matches(layout),
        "data": corpus,
        "batch": f"{_batch_size(examples, list(devices))}, {tokens:,} tokens per step",
        "checkpoints": f"{checkpoints}: {start}",
    }
    return "\n".join(f"{name + ':':<13}{text}" for name, text in rows.items())


def _where(devices: list[jax.Device]) -> str:
    """Formats where devices are: `on 2 hosts, in 4 processes`; processes only if there are more."""
    hosts = len({host_of(device) for device in devices})
    processes = len({device.process_index for device in devices})
    text = f"on {hosts} host{'s' * (hosts > 1)}"
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
    layout: Layout, held_out: float | None, unit: str, sample: str | None, goodput: Goodput | None
) -> str:
    """Formats the text at the end of a run: held-out loss in nats per `unit`, memory, a sample.

    The loss, the sample and the goodput are None where there is none.
    """
    loss = "no held-out data"
    if held_out is not None:
        loss = f"held-out loss {held_out:.4f} nats per {unit}"
    parts = [loss, f"memory per device, {layout.strategy.name}\n{totals_table(layout)}"]
    if goodput is not None:
        parts.append(str(goodput))
    if sample is not None:
        # Control codes would reach the terminal.
        printable = "".join(c if c.isprintable() or c == "\n" else " " for c in sample)
        text = "\n".join("  | " + line for line in printable.split("\n"))
        title = "a sample that continues held-out text"
        if unit == "image":
            title = "predictions for held-out images"
        parts.append(f"{title}\n{text}")
    return "\n\n".join(parts)
