"""The report of a run, from its files: figures as text and JSON, and a self-contained page."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from fsdp_jax.errors import human_bytes
from fsdp_jax.planner.html import RUN_PAGE, Drawing, boxes_end_to_end, page_template, seconds_text
from fsdp_jax.tables import text_table
from fsdp_jax.train.charts import Chart, Point, make_chart
from fsdp_jax.train.config import Config
from fsdp_jax.train.config_file import key_values
from fsdp_jax.train.curves_view import Curves
from fsdp_jax.train.run_files import Record, RunFiles, figure, read_run

RECENT = 100  # newest steps, over which speed is taken
LARGEST = 15  # arrays that are listed
SAMPLED = 12  # steps whose numbers are listed
MANY = 50  # starts, evaluations and skipped steps that are listed, the newest
Row = tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What the files of a run tell of it, formatted."""

    files: RunFiles

    @property
    def title(self) -> str:
        """The name of the run's directory."""
        return str(self.files.directory)

    @cached_property
    def newest(self) -> Record:
        """The record of the newest step; {} before the first."""
        return self.files.steps[-1] if self.files.steps else {}

    @cached_property
    def skipped(self) -> list[int]:
        """The steps whose updates were skipped, by the counts of the records."""
        counts = [(0, 0.0), *_known(self.points("skipped_steps"))]
        return [step for (_, before), (step, now) in pairwise(counts) if now > before]

    @property
    def restarts(self) -> list[Record]:
        """The starts that resumed, or began again."""
        return self.files.starts[1:]

    def points(self, name: str) -> list[Point]:
        """Lists (step, value) of a field of the steps' records."""
        return [(record["step"], figure(record, name)) for record in self.files.steps]

    def held_out(self) -> list[Point]:
        """Lists (step, held-out loss) of the evaluations."""
        records = self.files.evaluations
        return [(record["step"], figure(record, "held_out_loss")) for record in records]

    def figures(self) -> Iterator[tuple[str, str, str]]:
        """Yields (name, value, note) of the main figures that are known."""
        files = self.files
        # Progress and losses.
        if "step" in self.newest:
            note = ""
            if files.config is not None:
                note = f"of {files.config.train.steps:,}"
            yield "steps", f"{self.newest['step']:,}", note
        for name, points in (("loss", self.points("loss")), ("held-out loss", self.held_out())):
            if known := _known(points):
                step, least = min(known, key=lambda point: point[1])
                yield name, f"{known[-1][1]:.4f}", f"lowest {least:.4f}, at step {step:,}"
        # Speed and memory.
        tokens = figure(self.newest, "tokens")
        if (speed := self._recent("tokens_per_s")) is not None:
            note = f"median of {min(RECENT, len(files.steps))} steps"
            if tokens is not None:
                note += f", {_count_text(tokens)} in all"
            yield "tokens/s", f"{speed:,.0f}", note
        if (seconds := self._recent("step_time_s")) is not None:
            yield "time of a step", seconds_text(seconds), "median, likewise"
        if (mfu := self._recent("mfu")) is not None:
            yield "MFU", f"{mfu:.1%}", "median, likewise"
        for name, text, of in (
            ("memory_peak_bytes", "peak memory", "of a device"),
            ("host_memory_bytes", "host memory", "of process 0, at most"),
        ):
            if known := _known(self.points(name)):
                yield text, human_bytes(max(value for _, value in known)), of
        # What went wrong, or took time.
        if files.goodput is not None:
            note = f"of {_duration(files.goodput.wall_s)} in steps that count"
            yield "goodput", f"{files.goodput.goodput:.1%}", note
        if files.starts:
            repeated = sum(row["steps_done_again"] for row in self.starts())
            yield "starts", str(len(files.starts)), f"{repeated:,} steps done again"
        if files.steps:
            note = f"newest: {self.skipped[-1]:,}" if self.skipped else ""
            yield "skipped steps", f"{len(self.skipped):,}", note

    def curves(self) -> Curves:
        """Shows the curves of the run: losses, speed, memory."""
        names = {"loss": "loss", "gradient norm": "grad_norm", "learning rate": "learning_rate"}
        names |= {"tokens/s": "tokens_per_s", "MFU": "mfu"}
        values = {name: self.points(field) for name, field in names.items()}
        values["peak memory, GiB"] = [
            (step, value and value / 2**30) for step, value in self.points("memory_peak_bytes")
        ]
        loss = _loss_chart(self)
        charts = [*_other_charts(self)]
        if loss is not None:
            charts.insert(0, loss)
        steps = len(self.files.steps)
        return Curves(
            summary=f"{self.title}: {steps:,} steps",
            charts=charts,
            values={"loss": values.pop("loss"), "held-out loss": self.held_out(), **values},
            notes=[f"warning: {problem}" for problem in self.files.problems],
        )

    def _recent(self, name: str) -> float | None:
        """Computes the median of a field over the newest steps; None where it is not known."""
        values = [value for _, value in _known(self.points(name)[-RECENT:])]
        return median(values) if values else None

    def starts(self) -> list[dict[str, Any]]:
        """Lists the starts: when, from which step, processes, devices, steps done again."""
        return [
            {
                "start": number,
                "time": str(start.get("time", "")),
                "step": start["step"],
                "processes": start.get("processes"),
                "devices": start.get("devices"),
                "steps_done_again": int(max((figure(start, "last_step") or 0) - start["step"], 0)),
            }
            for number, start in enumerate(self.files.starts, 1)
        ]

    def start_rows(self) -> list[Row]:
        """Lists the newest starts as rows of a table."""
        return [
            (
                str(row["start"]),
                row["time"][:19].replace("T", " "),
                f"{row['step']:,}",
                str(row["processes"]),
                str(row["devices"]),
                f"{row['steps_done_again']:,}",
            )
            for row in self.starts()[-MANY:]
        ]

    def time_parts(self) -> list[tuple[str, float, str]]:
        """Lists (what, seconds, css class) of where the wall time went."""
        goodput = self.files.goodput
        if goodput is None:
            return []
        return [
            ("steps that count", goodput.steps_s, "compute"),
            ("starting", goodput.starting_s, "optimizer"),
            ("steps done again", goodput.repeated_s, "exposed"),
            ("down", goodput.down_s, "gradients"),
            ("evaluations, saves and the rest", goodput.other_s, "other"),
        ]

    def checkpoint_rows(self) -> list[Row]:
        """Lists the checkpoints: step, bytes, files, arrays, the mesh that saved it."""
        rows: list[Row] = []
        for step, manifest in self.files.checkpoints.items():
            if manifest is None:
                rows.append((f"{step:,}", "damaged", "", "", ""))
                continue
            sizes = [file["bytes"] for file in manifest["files"].values()]
            arrays = str(len(manifest["leaves"]))
            mesh = manifest["metadata"].get("mesh")
            mesh_text = "-"
            if isinstance(mesh, dict):
                mesh_text = ", ".join(f"{axis} {size}" for axis, size in mesh.items())
            counts = human_bytes(sum(sizes)), str(len(sizes)), arrays
            rows.append((f"{step:,}", *counts, mesh_text))
        return rows

    def measured_rows(self) -> list[Row]:
        """Lists the memory and the time of a step: planned, measured, their ratio."""
        if self.files.measured is None:
            return []
        both = self.files.measured.planned, self.files.measured.measured
        rows: list[Row] = []
        for name, text, (planned, measured) in (
            ("peak memory of a device", human_bytes, [each.peak_bytes for each in both]),
            ("time of a step", seconds_text, [each.step_s for each in both]),
        ):
            ratio = f"{measured / planned:.2f}" if planned and measured else "-"
            cells = [text(value) if value else "-" for value in (planned, measured)]
            rows.append((name, *cells, ratio))
        return rows

    def environment(self) -> dict[str, str]:
        """Lists the versions of the packages that wrote the newest checkpoint; {} if unknown."""
        for manifest in reversed(self.files.checkpoints.values()):
            if manifest is not None and isinstance(manifest.get("packages"), dict):
                return {str(name): str(text) for name, text in manifest["packages"].items()}
        return {}

    def total_rows(self) -> list[Row]:
        """Lists the bytes of each part of the state: unsharded, and per device."""
        if self.files.layout is None:
            return []
        names = ("bytes", "bytes_per_device", "host_bytes_per_device")
        return [
            (part, *(human_bytes(counts.get(name, 0)) for name in names))
            for part, counts in self.files.layout.totals.items()
        ]

    def array_rows(self) -> list[Row]:
        """Lists the largest arrays on a device: path, part, shape, dtype, spec, bytes."""
        if self.files.layout is None:
            return []
        return [
            (
                *(row.path, row.part, row.shape, row.dtype, row.spec),
                *map(human_bytes, (row.bytes, row.bytes_per_device)),
            )
            for row in self.files.layout.rows[:LARGEST]
        ]

    def changed_keys(self) -> dict[str, tuple[Any, Any]]:
        """Lists {key: (value, default)} of the configuration's keys that have another value."""
        return {key: pair for key, pair in self._keys().items() if pair[0] != pair[1]}

    def default_keys(self) -> dict[str, Any]:
        """Lists {key: value} of the configuration's keys that have their default."""
        return {key: value for key, (value, default) in self._keys().items() if value == default}

    def _keys(self) -> dict[str, tuple[Any, Any]]:
        if self.files.config is None:
            return {}
        defaults = key_values(Config())
        return {key: (each, defaults[key]) for key, each in key_values(self.files.config).items()}

    def step_rows(self) -> list[Row]:
        """Lists the numbers of some steps, evenly over the run, the newest among them."""
        steps = self.files.steps
        every = max(1, -(-len(steps) // SAMPLED))
        names = ("loss", "grad_norm", "learning_rate", "tokens_per_s", "step_time_s")
        return [
            (f"{record['step']:,}", *(_number(figure(record, name)) for name in names))
            for record in steps[::-1][::every][::-1]
        ]

    def evaluation_rows(self) -> list[Row]:
        """Lists the newest evaluations: step and held-out loss."""
        return [(f"{step:,}", _number(value)) for step, value in self.held_out()[-MANY:]]

    def to_json(self) -> dict[str, Any]:
        """Converts the figures to JSON values, those of single steps excepted."""
        files = self.files
        goodput, layout, communication, measured = None, None, None, None
        if files.goodput is not None:
            goodput = files.goodput.as_json()
        if files.communication is not None:
            communication = asdict(files.communication)
        if files.measured is not None:
            measured = asdict(files.measured)
        if files.layout is not None:
            largest = [asdict(row) for row in files.layout.rows[:LARGEST]]
            layout = {
                "strategy": files.layout.strategy,
                "mesh": files.layout.mesh,
                "totals": files.layout.totals,
                "largest": largest,
            }
        return {
            "directory": str(files.directory),
            "newest_step": self.newest or None,
            "median": {name: self._recent(name) for name in ("step_time_s", "tokens_per_s", "mfu")},
            "held_out_losses": [
                {"step": step, "held_out_loss": value} for step, value in self.held_out()
            ],
            "skipped_steps": self.skipped,
            "goodput": goodput,
            "starts": self.starts(),
            "layout": layout,
            "communication": communication,
            "measured": measured,
            "changed_keys": {
                key: {"value": value, "default": default}
                for key, (value, default) in self.changed_keys().items()
            },
            "checkpoints": [
                {"step": step, "damaged": manifest is None}
                for step, manifest in files.checkpoints.items()
            ],
            "environment": self.environment(),
            "problems": files.problems,
        }

    def __str__(self) -> str:
        blocks = [self.title, text_table(("figure", "value", "note"), list(self.figures()))]
        if self.files.goodput is not None:
            blocks.append(str(self.files.goodput))
        if self.files.communication is not None:
            blocks.append(f"communication: {self.files.communication.summary}")
        if self.files.measured is not None:
            blocks.append(f"planned against measured: {self.files.measured.summary}")
        if self.files.starts:
            right = START_COLUMNS[2:]
            blocks.append(text_table(START_COLUMNS, self.start_rows(), right=right))
        blocks += [f"warning: {problem}" for problem in self.files.problems]
        return "\n\n".join(blocks)


START_COLUMNS = ("start", "time", "from step", "processes", "devices", "steps done again")


def report_run(directory: str | Path) -> Report:
    """Reads the files of a run. Raises ConfigError if it is no run."""
    return Report(read_run(Path(directory)))


def run_curves(directory: str | Path) -> Curves:
    """Shows the curves of a run, from the files in its directory: losses, speed, memory.

    `print` them, let a notebook show them, or `.save("curves.html")`. `fsdp-jax report --html`
    writes a page of all of a run.

    Raises:
        ConfigError: there is no run.

    """
    return report_run(directory).curves()


def render_report(report: Report) -> str:
    """Renders the page of a run."""
    return page_template(RUN_PAGE).render(
        report=report,
        loss=_loss_chart(report),
        charts=list(_other_charts(report)),
        wall=_wall_drawing(report),
        start_columns=START_COLUMNS,
        yaml=_yaml_text,
    )


def _loss_chart(report: Report) -> Chart | None:
    """Draws the loss of the steps, the held-out losses, and a mark at each restart."""
    marks = [
        (row["step"], str(row["start"]), f"start {row['start']} resumed from step {row['step']:,}")
        for row in report.starts()[1:]
    ]
    captions = ["line: loss of a step"]
    held_out = report.held_out()
    if _known(held_out):
        captions.append("circles: held-out loss")
    if marks:
        captions.append("dotted lines: the run was resumed, by the number of the start")
    return make_chart(
        "loss",
        [("", report.points("loss"))],
        dots=held_out,
        marks=sorted(marks),
        caption="; ".join(captions),
        height=280,
    )


def _other_charts(report: Report) -> Iterator[Chart]:
    """Yields the charts of what else the records of the steps have."""

    def draw(name: str, *fields: str, unit: int = 1, **options: Any) -> Chart | None:
        lines = [
            (css, [(step, value and value / unit) for step, value in report.points(each)])
            for css, each in zip(("", "second"), fields, strict=False)
        ]
        return make_chart(name, lines, **options)

    speed = partial(draw, log=False, zero=True)  # and other values that are read from zero
    memory = partial(speed, unit=2**30, formatted="{:.3g} GiB".format)
    charts = [
        draw("gradient norm", "grad_norm"),
        speed("learning rate", "learning_rate"),
        speed("tokens/s", "tokens_per_s", formatted=_count_text),
        speed("MFU", "mfu", formatted="{:.1%}".format),
        memory(
            "memory of the fullest device",
            "memory_peak_bytes",
            "memory_valley_bytes",
            caption="line: peak; dashed: between steps",
        ),
        memory("host memory of process 0", "host_memory_bytes"),
    ]
    yield from (chart for chart in charts if chart is not None)


def _wall_drawing(report: Report) -> Drawing | None:
    """Draws where the wall time went, end to end."""
    goodput, parts = report.files.goodput, report.time_parts()
    total = sum(seconds for _, seconds, _ in parts)
    if goodput is None or total <= 0:
        return None
    segments = [
        (name, f"{_duration(seconds)}, {seconds / total:.1%}", css, seconds)
        for name, seconds, css in parts
    ]
    boxes = boxes_end_to_end(segments, total, top=2)
    return Drawing("wall time", 44, boxes, parts=boxes)


def _known(points: Sequence[Point]) -> list[tuple[int, float]]:
    """Keeps the points whose values are known."""
    return [(step, value) for step, value in points if value is not None]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _count_text(count: float) -> str:
    """Formats a large number in three digits: `3.81M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def _duration(seconds: float) -> str:
    """Formats seconds, of long times as hours, minutes and seconds: `6:41:40`."""
    if seconds < 1000:
        return seconds_text(round(seconds, 3))
    return str(timedelta(seconds=round(seconds)))


def _yaml_text(value: object) -> str:
    """Formats a value of the configuration about as YAML has it."""
    if value is None or value == "":
        return "null" if value is None else "''"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "[]"
    return str(value)
