"""What a run shows: a bar on a terminal, plain lines elsewhere, nothing on processes other than 0."""

import sys
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Self

import flax
import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fsdp_jax.errors import human_bytes
from fsdp_jax.sharding.layout import Layout
from fsdp_jax.sharding.mesh import shape_of
from fsdp_jax.sharding.report import largest_replicated, totals_table


class Screen:
    """Prints lines; on a terminal a bar stays below them while training."""

    def __init__(self, steps: int, *, quiet: bool):
        self._steps, self._quiet = steps, quiet
        self._console = Console(
            file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_bar()

    def say(self, text: str) -> None:
        """Text on lines of its own."""
        if not self._quiet:
            self._console.print(text)
            sys.stdout.flush()  # a log that is followed through a pipe

    def start_bar(self, step: int) -> None:
        """From here on steps advance a bar, on a terminal."""
        if self._console.is_terminal and not self._quiet:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(
                *columns, TimeRemainingColumn(), console=self._console, transient=True
            )
            self._bar.add_task("", total=self._steps, completed=step)
            self._bar.start()

    def end_bar(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def step(self, record: Mapping[str, Any], *, log: bool) -> None:
        """One step's metrics: a line where `log`, and the bar."""
        if self._bar is not None:
            description = f"loss {_number(record['loss'])}  {record['tokens_per_s']:,.0f} tok/s"
            self._bar.update(
                self._bar.task_ids[0], completed=record["step"], description=description
            )
        if log:
            self.say(self._line(record))

    def _line(self, record: Mapping[str, Any]) -> str:
        left = timedelta(seconds=round((self._steps - record["step"]) * record["step_time_s"]))
        wait = 100 * record["data_wait_s"] / record["step_time_s"]
        fields = [
            f"step {record['step']:>{len(str(self._steps))}}/{self._steps}",
            f"loss {_number(record['loss'])}",
            f"grad {_number(record['grad_norm'])}",
            f"lr {record['learning_rate']:.2e}",
            f"{record['step_time_s']:.3f} s",
            f"{record['tokens_per_s']:,.0f} tok/s",
            f"{record['tflops_per_device']:.3g} TFLOP/s/dev",
            f"data {wait:.0f}%",
        ]
        if record["mfu"] is not None:
            fields.append(f"mfu {100 * record['mfu']:.1f}%")
        if record["memory_peak_bytes"] is not None:
            fields.append(f"mem {human_bytes(record['memory_peak_bytes'])}")
        if record["skipped_steps"]:
            fields.append(f"skipped {record['skipped_steps']}")
        return "  ".join([*fields, f"eta {left}"])


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def banner(
    layout: Layout,
    *,
    weights: str | None,
    corpus: str,
    batch: int,
    tokens: int,
    checkpoints: str,
    resumed: int | None,
) -> str:
    """What a run is about to do."""
    devices = layout.mesh.devices.flatten()
    hosts = len({device.process_index for device in devices})
    sizes = {path: leaf.bytes // leaf.dtype.itemsize for path, leaf in layout.by_path.items()}
    parameters = sum(sizes.values())
    trained = sum(size for path, size in sizes.items() if layout.by_path[path].trainable)
    share = (
        ""
        if trained == parameters
        else f", of which {trained:,} are trained ({100 * trained / parameters:.2g}%)"
    )
    origin = "random" if weights is None else weights
    mesh = " x ".join(f"{name}={size}" for name, size in shape_of(layout.mesh).items())
    whole = ", ".join(
        f"{leaf.path} {human_bytes(leaf.bytes)}" for leaf in largest_replicated(layout, 3)
    )
    start = "starts at step 0" if resumed is None else f"resumes at step {resumed}"
    rows = {
        "versions": f"fsdp_jax {version('fsdp_jax')}, jax {jax.__version__}, flax {flax.__version__}, "
        f"python {sys.version.split()[0]}",
        "devices": f"{hosts} hosts x {len(devices) // hosts} {devices[0].device_kind}, mesh {mesh}",
        "parameters": f"{parameters:,}{share}",
        "weights": origin
        if resumed is None
        else f"of the checkpoint (the run started from {origin})",
        "state": layout.summary(),
        "replicated": whole or "nothing larger than a counter",
        "rules": _rules(layout),
        "data": corpus,
        "batch": f"{batch} examples, {tokens:,} tokens per step",
        "checkpoints": f"{checkpoints}: {start}",
    }
    return "\n".join(f"{name + ':':<13}{text}" for name, text in rows.items())


def _rules(layout: Layout) -> str:
    """How many parameters each rule placed, and how many of them it sharded."""
    counts: dict[str, list[bool]] = {}
    for leaf in layout.by_path.values():
        counts.setdefault(leaf.rule, []).append(not leaf.replicated)
    return "; ".join(
        f"'{rule}' placed {len(hits)} ({sum(hits)} sharded)" for rule, hits in counts.items()
    )


def last_screen(layout: Layout, held_out: float | None, unit: str, sample: str | None) -> str:
    """What is left when a run is done. `unit`: what the loss is per, a byte, a token or an image."""
    loss = (
        "nothing is held out"
        if held_out is None
        else f"held-out loss {held_out:.4f} nats per {unit}"
    )
    parts = [loss, f"memory per device, {layout.strategy.name}\n{totals_table(layout)}"]
    if sample is not None:
        shown = "".join(
            char if char.isprintable() or char == "\n" else " " for char in sample
        )  # no control codes
        text = "\n".join("  | " + line for line in shown.split("\n"))
        head = (
            "predictions for what is held out"
            if unit == "image"
            else "a sample that goes on from what is held out"
        )
        parts.append(f"{head}\n{text}")
    return "\n\n".join(parts)
