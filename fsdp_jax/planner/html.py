"""Renders plans as self-contained pages: the templates' environment, and geometry of the drawings.

`plan.html.jinja` has the markup, `page.html.jinja` what pages of runs share with it. Plans are
typed loosely here, since `plan.py` imports this module.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any

from fsdp_jax.errors import human_bytes
from fsdp_jax.planner.compiled.peak_memory import Kind
from fsdp_jax.planner.compiled.timeline import COMPUTE, FROM_HOST, LINK, TO_HOST, Event
from fsdp_jax.planner.settings import differing_settings
from fsdp_jax.tables import shortened
from fsdp_jax.views.page import environment, round_step

STACK: tuple[Kind, ...] = ("params", "optimizer", "gradients", "activations", "gathered", "other")
"""Order of the memory drawing: state first, so that steady-state memory ends where state does."""
PLAN_PAGE, RUN_PAGE = "plan.html.jinja", "run.html.jinja"  # templates
WIDTH_PX = 720  # least width of a timeline; a narrower window scrolls
PHONE_PX = 350  # width of the other drawings in a narrow window
LETTER_PX = 7.2  # largest width of a letter in a drawing
LABEL_PX = 12  # room that a number takes
LANE_MARKS = 250  # events within this fraction of a lane share a mark, which keeps a page small
COLLECTIVES = 20  # how many collectives are listed
TEXT_LIMIT = 90  # longest name of a purpose: it may list every parameter of a model


@dataclass(frozen=True)
class Box:
    """A rectangle with a tooltip; `left` and `width` are fractions of the drawing's width.

    `css` is the class that colors it.
    """

    name: str
    text: str
    css: str
    left: float
    width: float
    top: int
    height: int
    label: str = ""


@dataclass(frozen=True)
class Mark:
    """A vertical line, `at` a fraction of the width, with its text at height `y`."""

    text: str
    at: float
    y: int
    top: int
    bottom: int
    css: str = ""


@dataclass(frozen=True)
class Drawing:
    """One SVG: ticks are drawn below the boxes, marks above them, and `parts` are the legend."""

    name: str
    height: int
    boxes: Sequence[Box]
    ticks: Sequence[Mark] = ()
    marks: Sequence[Mark] = ()
    captions: Sequence[tuple[str, int]] = ()
    parts: Sequence[Box] = ()


def render_page(title: str, plans: Sequence[Any], names: Sequence[str] = ()) -> str:
    """Renders a page of one plan, or a comparison of several plans with these names."""
    return page_template(PLAN_PAGE).render(title=title, plans=plans, names=names, fragment=False)


def render_fragment(plan: Any) -> str:
    """Renders a plan as an element to be put into a page, for notebooks."""
    return page_template(PLAN_PAGE).render(plans=[plan], fragment=True)


@cache
def page_template(name: str) -> Any:
    """Loads the template of a page, a file beside this one, with the functions that it calls."""
    pages = environment("fsdp_jax.planner")
    pages.filters |= {"percent": lambda share: f"{share:.3%}", "memory_scale": memory_scale}
    drawings = (memory_drawing, time_drawing, timeline_drawing)
    functions = (memory_scale, collective_rows, compared_rows, *drawings)
    pages.globals |= {each.__name__: each for each in functions} | {"WIDTH_PX": WIDTH_PX}
    return pages.get_template(name)


def compared_rows(plans: Sequence[Any]) -> list[tuple[str, ...]]:
    """Lists the settings that differ, then each headline figure; a cell for each plan."""
    columns = [
        {name: f"{value}\n{note}" for name, value, note in plan.headline()} for plan in plans
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return [
        *differing_settings(plans),
        *((name, *(column.get(name, "-") for column in columns)) for name in names),
    ]


def collective_rows(collectives: Sequence[Any], *, compiled: bool) -> list[tuple[str, ...]]:
    """Lists the first collectives: op, dtype, axis, count, bytes, share overlapped, purpose.

    Only a compiled program tells which share overlaps with compute.
    """
    # the first ones in full, and the sum of all others
    rows: list[tuple[str, ...]] = []
    for row in collectives[:COLLECTIVES]:
        what = row["op"], row["dtype"], row["axis"], str(row["count"])
        overlapped = "-"
        if compiled and row["bytes"]:
            overlapped = f"{row['overlapped_bytes'] / row['bytes']:.0%}"
        rows.append(
            (*what, human_bytes(row["bytes"]), overlapped, shortened(row["where"], TEXT_LIMIT))
        )
    if more := collectives[COLLECTIVES:]:
        size = human_bytes(sum(row["bytes"] for row in more))
        rows.append((f"{len(more)} more", "", "", "", size, "", ""))
    return rows


def memory_scale(plan: Any) -> int:
    """Computes the bytes that the memory drawing spans: the capacity, or the peak if larger."""
    return max(plan.capacity_bytes, sum(max(size, 0) for size in plan.breakdown.values()))


def memory_drawing(plan: Any, scale: int) -> Drawing:
    """Draws memory at the peak by kind, with the capacity, the limit and steady-state memory.

    `scale`: the bytes that the whole width stands for.
    """
    # the kinds of memory side by side, over a box of the capacity
    gib = 2**30
    texts = {kind: f"{size}, {share}" for kind, size, share in plan.memory_rows()}
    parts = boxes_end_to_end(
        [(kind, texts[kind], kind, plan.breakdown[kind]) for kind in STACK], scale, top=36
    )
    capacity = plan.capacity_bytes
    free = Box("capacity", human_bytes(capacity), "free", 0, capacity / scale, 36, 40)

    # texts at three heights, since the marks may be close to each other
    def mark(name: str, size: int, y: int, top: int, bottom: int, css: str = "") -> Mark:
        return Mark(f"{name} {human_bytes(size)}", size / scale, y, top, bottom, css)

    return Drawing(
        "memory at the peak",
        122,
        boxes=[free, *parts],
        ticks=[
            Mark(human_bytes(at * gib), at * gib / scale, 116, 98, 104, "tick")
            for at in _round_numbers(scale / gib)
        ],
        marks=[
            mark("usable", plan.usable_bytes, 12, 3, 82, "limit"),
            mark("peak", plan.peak_bytes, 28, 19, 76),
            mark("between steps", plan.valley_bytes, 92, 36, 92),
        ],
        parts=parts,
    )


def time_drawing(plan: Any) -> Drawing:
    """Draws a step's seconds end to end: compute, memory, exposed communication and transfers."""
    time = plan.time
    kinds = [(COMPUTE, time.compute_s), ("memory", time.memory_s), ("exposed", time.exposed_s)]
    if time.host_s:
        kinds.append(("host", time.host_exposed_s))
    segments = [
        (name, f"{seconds}, {share}", css, size)
        for (name, seconds, share), (css, size) in zip(plan.time_rows()[:-1], kinds, strict=True)
    ]
    parts = boxes_end_to_end(segments, time.step_s, top=2)
    return Drawing("time of a step", 44, parts, parts=parts)


def timeline_drawing(events: Sequence[Event]) -> Drawing | None:
    """Draws lanes for compute, links and the host; exposed parts of links are twice as high."""
    # the events of each lane, and those parts of the links' that nothing runs beside
    span = max((event.end for event in events), default=0.0)
    if span <= 0:
        return None
    events = sorted(events, key=lambda event: event.start)
    lanes = {
        lane: [event for event in events if event.lane == lane]
        for lane in sorted({event.lane for event in events})
    }
    exposed = _exposed_events(lanes.get(COMPUTE, []), lanes.get(LINK, []), span)
    # a lane takes 44 pixels: its caption, and below it the boxes
    bottom = 44 * len(lanes)
    boxes: list[Box] = []
    captions = []
    for top, (lane, busy) in zip(range(0, bottom, 44), lanes.items(), strict=True):
        caption = f"{lane}: busy {seconds_text(_total_seconds(busy))} of {seconds_text(span)}"
        if lane == LINK:
            waits = seconds_text(_total_seconds(exposed))
            caption += f"; short bars: overlapped; tall bars: exposed, {waits}"
            boxes += _lane_boxes(busy, span, top + 30, 10, LINK)
            boxes += _lane_boxes(exposed, span, top + 20, 20, "exposed")
        elif lane in (FROM_HOST, TO_HOST):
            boxes += _lane_boxes(busy, span, top + 20, 20, "host")
        else:
            boxes += _lane_boxes(busy, span, top + 20, 20, COMPUTE)
        captions.append((caption, top + 14))
    ticks = [
        Mark(seconds_text(at), at / span, bottom + 18, 0, bottom + 6, "tick")
        for at in _round_numbers(span)
    ]
    return Drawing("timeline", bottom + 24, boxes, ticks, captions=captions)


def _exposed_events(computed: Sequence[Event], sent: Sequence[Event], span: float) -> list[Event]:
    """Finds the parts of collectives that no compute runs beside, an event for each.

    `computed`, `sent`: the events of both lanes, in order; `span`: seconds of all of the timeline.
    """
    # the times in which nothing computes: from the latest end so far to the next start
    ends = accumulate((event.end for event in computed), max, initial=0.0)
    starts = (*(event.start for event in computed), span)
    idle = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
    # of each collective the parts within them; both are in order, so a search finds the first
    exposed = []
    for event in sent:
        first = bisect_right(idle, event.start, key=itemgetter(1))
        last = bisect_left(idle, event.end, key=itemgetter(0))
        for start, end in idle[first:last]:
            label = f"waiting for {event.label}"
            exposed.append(Event(LINK, max(start, event.start), min(end, event.end), label))
    return exposed


def _total_seconds(events: Sequence[Event]) -> float:
    """Sums the time within at least one event: the links of a torus may be busy at once."""
    total = until = 0.0
    for event in sorted(events, key=attrgetter("start")):
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total


def _lane_boxes(
    events: Sequence[Event], span: float, top: int, height: int, css: str
) -> Iterator[Box]:
    """Yields the boxes of a lane's events, of which near ones share one.

    `span`: seconds of all of the timeline; `top`, `height`: pixels; `css`: class of the boxes.
    """
    for group in _merged_neighbors(events, span / LANE_MARKS):
        start = group[0].start
        width = (max(event.end for event in group) - start) / span
        name = "; ".join(dict.fromkeys(event.label for event in group))
        text = seconds_text(_total_seconds(group))
        if len(group) > 1:
            text += f" in {len(group)} events"
        text += f", from {seconds_text(start)}"
        label = ""
        if height > 12:  # a flat box has no room for letters
            letters = (width * WIDTH_PX - 8) / LETTER_PX
            label = next((each for each in _shorter_names(name) if len(each) <= letters), "")
        yield Box(shortened(name, TEXT_LIMIT), text, css, start / span, width, top, height, label)


def _shorter_names(name: str) -> list[str]:
    """Lists a name, and shorter ones: without the first parts of its path, at last `up`."""
    names = [name]
    while names[-1].count("/") > 1:
        names.append(names[-1].partition("/")[2])
    if ";" not in name:  # it is of one event
        names.append(names[-1].partition(",")[0].removesuffix("/kernel"))
    return names


def _merged_neighbors(events: Sequence[Event], within: float) -> Iterator[list[Event]]:
    """Yields groups of consecutive events, each `within` this many seconds of its first event."""
    group: list[Event] = []
    for event in events:
        if group and event.end - group[0].start > within:
            yield group
            group = []
        group.append(event)
    if group:
        yield group


def boxes_end_to_end(
    segments: Sequence[tuple[str, str, str, float]], total: float, top: int
) -> list[Box]:
    """Places boxes side by side, labeled by their numbers in the legend.

    `segments`: (name, text, css, size) of each; `total`: the size of the whole width; `top`:
    pixels.
    """
    boxes = []
    left = 0.0
    for number, (name, text, css, size) in enumerate(segments, 1):
        # `other` is negative where the analytic estimate exceeds the peak that XLA reports
        width = max(size, 0) / total
        label = str(number) if width * PHONE_PX > LABEL_PX else ""
        boxes.append(Box(name, text, css, left, width, top, 40, label))
        left += width
    return boxes


def _round_numbers(span: float) -> list[float]:
    """Lists at most eleven round numbers from zero to `span`, for ticks."""
    step = round_step(span / 10)
    return [index * step for index in range(int(span / step) + 1)]


def seconds_text(seconds: float) -> str:
    """Formats seconds in three digits with a unit, down to those of a small kernel: `12.3 µs`."""
    if not seconds:
        return "0"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    milliseconds = 1e3 * seconds
    if milliseconds >= 1:
        return f"{milliseconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs"
