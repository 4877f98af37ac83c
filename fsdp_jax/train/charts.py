"""Curves of a run as charts: scales, ticks, and a few hundred points of any number of steps.

`planner/page.html.jinja` draws them. A position along x is a fraction of the width, one along y is
in pixels from the top, so that a window stretches shapes and not texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

from fsdp_jax.views.page import round_step

SPAN = 1000  # units of the width in the points of a line
BUCKETS = 200  # a line has at most two points in each, the least and the greatest
TOP_PX, BOTTOM_PX = 18, 22  # above the plot, for marks; below it, for the steps
LOG_RATIO = 5  # values that differ by more have a logarithmic scale
NEAR = 0.03  # marks nearer than this fraction of the width share a label
SPARKS = "▁▂▃▄▅▆▇█"

Point = tuple[int, float | None]
"""(step, value); None where the value is not finite or not known."""
Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """A polyline; `points` are those of SVG, x of `SPAN`, y in pixels."""

    css: str
    points: str


@dataclass(frozen=True)
class Dot:
    """A circle with a tooltip."""

    at: float
    y: float
    text: str


@dataclass(frozen=True)
class Tick:
    """A text at a place of an axis: `at` is a fraction of the width, or pixels from the top."""

    at: float
    text: str


@dataclass(frozen=True)
class StepMark:
    """A vertical line at a step, with a short label above it and a tooltip."""

    at: float
    label: str
    text: str


@dataclass(frozen=True)
class Chart:
    """One SVG of lines over steps; `caption` says what is drawn, and how."""

    name: str
    caption: str
    height: int
    lines: Sequence[Line]
    dots: Sequence[Dot]
    values: Sequence[Tick]
    steps: Sequence[Tick]
    marks: Sequence[StepMark]


@dataclass(frozen=True)
class _Scale:
    """Maps values between `low` and `high` to fractions, by their logarithms if `log`."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Computes the fraction of a value."""
        if self.log:
            low, high = log10(self.low), log10(self.high)
            return (log10(value) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int) -> list[float]:
        """Lists about `count` round values within the scale."""
        if not self.log:
            step = round_step((self.high - self.low) / count)
            first, last = ceil(self.low / step), floor(self.high / step)
            return [index * step for index in range(first, last + 1)]
        # Powers of ten; of few decades also their doubles and fives.
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        times = (1, 2, 5) if len(decades) <= 3 else (1,)
        every = max(1, len(decades) // count)
        values = [each * 10.0**power for power in decades[::every] for each in times]
        return [value for value in values if self.low <= value <= self.high]


def make_chart(
    name: str,
    lines: Sequence[tuple[str, Sequence[Point]]],
    *,
    caption: str = "",
    dots: Sequence[Point] = (),
    marks: Sequence[tuple[int, str, str]] = (),
    formatted: Format = "{:.4g}".format,
    log: bool = True,
    zero: bool = False,
    height: int = 160,
) -> Chart | None:
    """Makes the chart of values over steps; None if none of them is known.

    `lines`: (css class, points in the order of their steps) of each. `dots`: points that are drawn
    one by one. `marks`: (step, label, tooltip) of vertical lines. `log` allows a logarithmic scale,
    where values differ much. With `zero` the scale begins there.
    """
    series = (*(points for _, points in lines), dots)
    known = [(x, y) for points in series for x, y in points if y is not None]
    if not known:
        return None
    # The scales: all steps from the first to the last, and all values with some room around them.
    steps = [x for x, _ in known] + [x for x, *_ in marks]
    across = _Scale(min(steps), max(max(steps), min(steps) + 1))
    up = _value_scale([y for _, y in known], log=log, zero=zero)
    if up.log:
        caption = "; ".join(filter(None, (caption, "logarithmic scale")))

    def y_px(value: float) -> float:
        return round(TOP_PX + (1 - up.place(value)) * (height - TOP_PX - BOTTOM_PX), 1)

    # Lines of few points, each part of them between two gaps.
    drawn = []
    for css, points in lines:
        for part in thinned(points):
            placed = [f"{across.place(x) * SPAN:.1f},{y_px(y)}" for x, y in part]
            if len(placed) == 1:  # which shows as a point
                placed *= 2
            drawn.append(Line(css, " ".join(placed)))
    circles = [
        Dot(across.place(x), y_px(y), f"step {x:,}: {formatted(y)}")
        for part in thinned(dots)
        for x, y in part
    ]
    return Chart(
        name=name,
        caption=caption,
        height=height,
        lines=drawn,
        dots=circles,
        values=[Tick(y_px(value), formatted(value)) for value in up.ticks(4)],
        steps=_step_ticks(across),
        marks=_placed_marks(across, marks),
    )


def thinned(points: Sequence[Point]) -> list[list[tuple[int, float]]]:
    """Splits points at gaps, and keeps of many the least and the greatest of each bucket.

    So no spike is lost. The first and the last point are kept.
    """
    width = max(1, ceil(len(points) / BUCKETS))
    parts: list[list[tuple[int, float]]] = [[]]
    for start in range(0, len(points), width):
        bucket = [(x, y) for x, y in points[start : start + width] if y is not None]
        # A bucket without values is a gap.
        if not bucket:
            parts.append([])
            continue
        ends = [bucket[0]] if start == 0 else []
        if start + width >= len(points):
            ends.append(bucket[-1])
        least, greatest = (choose(bucket, key=lambda point: point[1]) for choose in (min, max))
        parts[-1] += sorted({least, greatest, *ends})
    return [part for part in parts if part]


def sparkline(values: Sequence[float]) -> str:
    """Draws values as bars of one character each, from the smallest to the largest of them."""
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    scale = (len(SPARKS) - 1) / (span or 1.0)
    return "".join(SPARKS[round((value - low) * scale)] for value in finite)


def _value_scale(values: Sequence[float], *, log: bool, zero: bool) -> _Scale:
    """Finds the scale of values, with some room below and above them."""
    low, high = min(values), max(values)
    if log and low > 0 and high / low > LOG_RATIO:
        return _Scale(low / 1.2, high * 1.2, log=True)
    if zero and low >= 0:
        low = 0.0
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return _Scale(low if zero and low == 0 else low - room, high + room)


def _step_ticks(scale: _Scale) -> list[Tick]:
    """Lists at most six steps, all of them whole; the first says what they are."""
    step = max(round_step((scale.high - scale.low) / 5), 1)
    first, last = ceil(scale.low / step), floor(scale.high / step)
    return [
        Tick(scale.place(index * step), "step " * (index == first) + f"{index * step:,.0f}")
        for index in range(first, last + 1)
    ]


def _placed_marks(scale: _Scale, marks: Sequence[tuple[int, str, str]]) -> list[StepMark]:
    """Places marks; one that is close to the label before it has no label."""
    placed: list[StepMark] = []
    labeled = -1.0
    for step, label, text in marks:
        at = scale.place(step)
        shown = label
        if at - labeled < NEAR:
            shown = ""
        else:
            labeled = at
        placed.append(StepMark(at, shown, text))
    return placed
