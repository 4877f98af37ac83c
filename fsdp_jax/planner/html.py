"""A plan as a page: what a device holds at the peak, and what it computes, sends and waits for, to
look at.

A page loads nothing: its style and drawings are in it. Shapes stand at percents of a drawing's
width and text is sized in pixels: a window stretches the one and not the other. What differs by
colour differs by place, height or label too.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate
from math import floor, log10

from fsdp_jax.errors import human_bytes
from fsdp_jax.planner.compiled.peak_memory import Kind
from fsdp_jax.planner.compiled.timeline import COMPUTE, LINK, Event
from fsdp_jax.planner.figures import Figures

STACK: tuple[Kind, ...] = ("params", "optimizer", "gradients", "activations", "gathered", "other")
"""State first, so that what is held between steps ends where state does."""
PIXELS, LETTER = (
    720,
    7.2,
)  # of a drawing at least (a narrower window scrolls), of a letter in it at most
PARTS = 250  # of a lane: events that lie within one share a mark, which keeps a page small whatever a layer does
ROWS, LETTERS = (
    20,
    90,
)  # of a table of collectives, and of what one is for, which may be every parameter of a model

STYLE = """.fsdp-plan{--ink:#1b1f24;--dim:#5c6570;--line:#d5dae0;--page:#fff;--free:#eef0f3;--good:#172;--bad:#b32;
@media (prefers-color-scheme:dark){--ink:#e6e9ed;--dim:#9aa4af;--line:#3a424b;--page:#14181d;--free:#262c33;
--good:#6d8;--bad:#f98} max-width:1100px;margin:0 auto;padding:1em;font:14px/1.45 system-ui,sans-serif;
color-scheme:light dark;color:var(--ink);background:var(--page);
h2{font-size:1.25em;margin:0 0 .6em} h3{font-size:1.05em;margin:1.8em 0 .5em} p{margin:.4em 0;color:var(--dim)}
.legend{display:flex;flex-wrap:wrap} .cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(8em,1fr))}
.cards,.legend{gap:.5em 1.2em;margin:.5em 0;padding:0;list-style:none}
.cards li{margin:0;border-left:3px solid var(--line);padding-left:.7em;color:var(--dim)}
.cards b{display:block;font-size:1.45em;color:var(--ink)} .cards small{white-space:pre-line}
.good li:first-child b{color:var(--good)} .bad li:first-child b{color:var(--bad)} .wide{overflow-x:auto}
i{display:inline-block;width:1.5em;text-align:center;font-style:normal;color:#14181d;margin-right:.5em}
svg{display:block;width:100%;font-size:12px} rect{stroke:var(--page);stroke-width:.5}
text{fill:var(--ink);stroke:var(--page);stroke-width:3;paint-order:stroke}
text.in{fill:#14181d;stroke:none;text-anchor:middle} line{stroke:var(--ink);stroke-width:1.5}
line.tick{stroke:var(--line);stroke-width:1} line.limit{stroke:var(--bad);stroke-dasharray:5 3} .free{fill:var(--free)}
.params,.compute{fill:#7ad;background:#7ad} .optimizer{fill:#ed8;background:#ed8} .gradients{fill:#e86;background:#e86}
.activations{fill:#4b9;background:#4b9} .gathered,.link{fill:#9df;background:#9df}
.other,.memory{fill:#bbb;background:#bbb} .exposed{fill:#e67;background:#e67}
table{border-collapse:collapse;font:inherit;font-variant-numeric:tabular-nums;color:inherit} th{color:var(--dim)}
th,td{text-align:left;vertical-align:top;padding:.25em 1.4em .25em 0;white-space:pre-line;background:var(--page);
border-bottom:1px solid var(--line)} .right{text-align:right;white-space:pre} details{margin:1em 0} }"""
Part = tuple[str, float, str, str]
"""Of a whole: what it is, its size, how that is said, and the class that colours it."""


def plan_html(plan: Figures) -> str:
    """The plan as a page of its own, which loads nothing."""
    return _page(plan.summary(), _sections(plan))


def plan_fragment(plan: Figures) -> str:
    """The plan as a part of a page, for notebooks."""
    return f"<div class='fsdp-plan'><style>{STYLE}</style>{_sections(plan)}</div>"


def compare_html(plans: Sequence[Figures]) -> str:
    """Plans side by side, at least one: their figures, their memory on one scale, and each in full
    behind a click.
    """
    if not plans:
        raise ValueError("no plans to compare")
    names = [f"{number}. {one.strategy} on {one.topology}" for number, one in enumerate(plans, 1)]
    columns = [{name: f"{value}\n{note}" for name, value, note in _figures(plan)} for plan in plans]
    told = dict.fromkeys(name for column in columns for name in column)
    figures = _table(
        ("", *names), [(name, *(column.get(name, "-") for column in columns)) for name in told]
    )
    scale = max(map(_scale, plans))
    bars = "".join(
        f"<p>{escape(name)}</p>{_memory(plan, scale)}"
        for name, plan in zip(names, plans, strict=True)
    )
    full = "".join(
        f"<details><summary>{escape(one.summary())}</summary>{_sections(one)}</details>"
        for one in plans
    )
    return _page(
        f"plans: {'; '.join(names)}", figures + _section("Memory at the peak", bars) + full
    )


def _page(title: str, body: str) -> str:
    head = (
        f"<head><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style></head>"
    )
    return (
        f"<!doctype html>\n<html lang='en'>{head}\n<body class='fsdp-plan'>{body}</body></html>\n"
    )


def _sections(plan: Figures) -> str:
    """Everything there is to say of a plan; what it does not have takes no room."""
    told = ([escape(text) for text in figure] for figure in _figures(plan))
    cards = "".join(
        f"<li>{name}<b>{value}</b><small>{note}</small></li>" for name, value, note in told
    )
    fixes = _table(
        ("change", "saves", "peak after", "fits", "costs"),
        plan.fix_rows(),
        right=("saves", "peak after"),
    )
    arrays = _table(("bytes", "for", "array", "of"), plan.buffer_rows(), right=("bytes",))
    notes = "".join(
        f"<li>{escape(line)}</li>" for line in (*plan.notes, *plan.bases().split("; ")) if line
    )
    return "\n".join(
        [
            f"<h2>{escape(plan.summary())}</h2><ul class='cards {'good' if plan.fits else 'bad'}'>{cards}</ul>",
            _section("Memory at the peak", _memory(plan, _scale(plan))),
            _section("Time of a step", _time(plan)),
            _section("One layer, or the step where nothing loops", _timeline(plan.events)),
            _section("To take less", fixes),
            _section("Largest arrays at the peak", arrays),
            _section("Collectives of a step", _collectives(plan)),
            _section("Notes, and where figures come from", f"<ul>{notes}</ul>" if notes else ""),
        ]
    )


def _section(title: str, body: str) -> str:
    return f"<section><h3>{title}</h3>{body}</section>" if body else ""


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
) -> str:
    """Every cell is escaped; `right` are the columns of numbers."""
    if not rows:
        return ""
    css = ["right" if name in right else "" for name in columns]
    lines = [
        "".join(
            f"<{tag} class='{of}'>{escape(cell)}</{tag}>" for cell, of in zip(row, css, strict=True)
        )
        for tag, row in (("th", columns), *(("td", row) for row in rows))
    ]
    return f"<div class='wide'><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table></div>"


def _figures(plan: Figures) -> Iterator[tuple[str, str, str]]:
    """(what, value, against what) of the headline; what a plan lacks is left out."""
    spare = human_bytes(abs(plan.usable_bytes - plan.peak_bytes))
    yield (
        ("verdict", "fits", f"{spare} to spare")
        if plan.fits
        else ("verdict", "does not fit", f"{spare} too much")
    )
    of = f"of {human_bytes(plan.usable_bytes)} usable, {human_bytes(plan.capacity_bytes)} in all"
    yield "peak", human_bytes(plan.peak_bytes), f"{of}\n{plan.basis.get('peak_bytes', '')}"
    yield (
        "between steps",
        human_bytes(plan.valley_bytes),
        f"of state\n{plan.parameters:,} parameters",
    )
    if plan.host_bytes:
        yield "memory of the host", human_bytes(plan.host_bytes), "for each device"
    if plan.time:
        yield "a step", _took(plan.time.step_s), plan.basis.get("time", "")
    if plan.tokens_per_s_per_device is not None:
        yield (
            "tokens/s a device",
            f"{plan.tokens_per_s_per_device:,.0f}",
            f"times {plan.devices} devices",
        )
    if plan.mfu is not None:
        yield "MFU", f"{plan.mfu:.1%}", plan.convention
    if plan.hfu is not None:
        yield "HFU", f"{plan.hfu:.1%}", "with what is recomputed"
    if plan.wire_bytes:
        yield (
            "sent a step",
            human_bytes(plan.wire_bytes),
            f"{human_bytes(plan.exposed_bytes)} of it waited for",
        )


def _scale(plan: Figures) -> int:
    """Bytes that a drawing of memory is wide: the capacity, or what does not fit into it."""
    return max(plan.capacity_bytes, sum(max(size, 0) for size in plan.breakdown.values()))


def _memory(plan: Figures, scale: int) -> str:
    said = {kind: f"{size}, {share}" for kind, size, share in plan.memory_rows()}
    parts: list[Part] = [(kind, plan.breakdown[kind], said[kind], kind) for kind in STACK]
    gib = 2**30
    shapes = [
        _line(human_bytes(at * gib), at * gib / scale, 116, (98, 104), "tick")
        for at in _round(scale / gib)
    ]
    shapes += [
        _box(
            0,
            plan.capacity_bytes / scale,
            36,
            40,
            "free",
            f"capacity: {human_bytes(plan.capacity_bytes)}",
        ),
        _stack(parts, scale, 36),
        _line(
            f"usable {human_bytes(plan.usable_bytes)}",
            plan.usable_bytes / scale,
            12,
            (3, 82),
            "limit",
        ),
        _line(f"peak {human_bytes(plan.peak_bytes)}", plan.peak_bytes / scale, 28, (19, 76)),
        _line(
            f"between steps {human_bytes(plan.valley_bytes)}",
            plan.valley_bytes / scale,
            92,
            (36, 92),
        ),
    ]
    return _drawing("memory at the peak", 122, shapes) + _legend(parts)


def _time(plan: Figures) -> str:
    """The parts of a step, whose sum it is, and beside them how long links are busy."""
    if plan.time is None or plan.time.step_s <= 0:
        return ""
    *rows, links = plan.time_rows()
    kinds = (
        (COMPUTE, plan.time.compute_s),
        ("memory", plan.time.memory_s),
        ("exposed", plan.time.exposed_s),
    )
    parts = [
        (row[0], size, ", ".join(row[1:]), css)
        for row, (css, size) in zip(rows, kinds, strict=True)
    ]
    bar = _drawing("time of a step", 44, [_stack(parts, plan.time.step_s, 2)])
    return f"{bar}{_legend(parts)}<p>{escape(': '.join(links[:2]))}</p>"


def _collectives(plan: Figures) -> str:
    """What is sent. How much of it is hidden, only a compiled program tells."""
    known = plan.basis.get("collectives") == "compiled"
    rows = [
        (
            row["op"],
            row["dtype"],
            row["axis"],
            str(row["count"]),
            human_bytes(row["bytes"]),
            f"{100 * row['overlapped_bytes'] / row['bytes']:.0f}%"
            if known and row["bytes"]
            else "-",
            _clipped(row["where"]),
        )
        for row in plan.collectives[:ROWS]
    ]
    if rest := plan.collectives[ROWS:]:
        rows.append(
            (
                f"{len(rest)} more",
                "",
                "",
                "",
                human_bytes(sum(row["bytes"] for row in rest)),
                "",
                "",
            )
        )
    columns = ("op", "dtype", "axis", "times", "bytes", "hidden", "for")
    return f"<p>{escape(plan.wire())}</p>{_table(columns, rows, right=columns[3:6])}"


def _timeline(events: Sequence[Event]) -> str:
    """Lanes below each other on one axis of time; of collectives, what is exposed stands twice as
    high.
    """
    span = max((one.end for one in events), default=0.0)
    if span <= 0:
        return ""
    events = sorted(events, key=lambda one: one.start)
    lanes = {
        lane: [one for one in events if one.lane == lane]
        for lane in sorted({one.lane for one in events})
    }
    exposed = _exposed(lanes.get(COMPUTE, []), lanes.get(LINK, []), span)
    bottom = 44 * len(lanes)
    shapes = [
        _line(_took(at), at / span, bottom + 18, (0, bottom + 6), "tick") for at in _round(span)
    ]
    for top, (lane, busy) in zip(range(0, bottom, 44), lanes.items(), strict=True):
        said = f"{lane}: busy {_took(_sum(busy))} of {_took(span)}"
        if lane == LINK:
            said += f"; low: beside compute; high: exposed, {_took(_sum(exposed))}"
            shapes += [
                _lane(busy, span, top + 30, 10, LINK),
                _lane(exposed, span, top + 20, 20, "exposed"),
            ]
        else:
            shapes += [_lane(busy, span, top + 20, 20, COMPUTE)]
        shapes += [f"<text x='0' y='{top + 14}'>{escape(said)}</text>"]
    return _drawing("timeline", bottom + 24, shapes)


def _exposed(computed: Sequence[Event], sent: Sequence[Event], span: float) -> list[Event]:
    """What of each collective nothing computes beside; both lanes are in order of time."""
    done = accumulate((one.end for one in computed), max, initial=0.0)
    idle = [
        pair
        for pair in zip(done, (*(one.start for one in computed), span), strict=True)
        if pair[0] < pair[1]
    ]
    starts, ends = [start for start, _ in idle], [end for _, end in idle]
    return [
        Event(LINK, max(start, one.start), min(end, one.end), f"waiting for {one.label}")
        for one in sent
        for start, end in idle[bisect_right(ends, one.start) : bisect_left(starts, one.end)]
    ]


def _sum(events: Sequence[Event]) -> float:
    return sum(one.end - one.start for one in events)


def _lane(events: Sequence[Event], span: float, top: int, height: int, css: str) -> str:
    marks = []
    for group in _merged(events, span / PARTS):
        name = ", ".join(dict.fromkeys(one.label for one in group))
        many = f" in {len(group)} events" if len(group) > 1 else ""
        start, end = group[0].start, max(one.end for one in group)
        title = f"{_clipped(name)}: {_took(_sum(group))}{many}, from {_took(start)}"
        marks.append(_box(start / span, (end - start) / span, top, height, css, title, (name,)))
    return "".join(marks)


def _merged(events: Sequence[Event], least: float) -> Iterator[list[Event]]:
    """Neighbours that lie within `least` seconds, together."""
    group: list[Event] = []
    for one in events:
        if group and one.end - group[0].start > least:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _drawing(name: str, height: int, shapes: Sequence[str]) -> str:
    size = f"height='{height}' style='min-width:{PIXELS}px'"
    return f"<div class='wide'><svg role='img' aria-label='{name}' {size}>{''.join(shapes)}</svg></div>"


def _stack(parts: Sequence[Part], whole: float, top: int) -> str:
    """Parts end to end, each with its name, or its number in the legend, where there is room."""
    shares = [
        max(size, 0) / whole for _, size, *_ in parts
    ]  # `other` is negative where a refusal beats the estimate
    boxes = []
    for number, ((name, _, said, css), share) in enumerate(zip(parts, shares, strict=True), 1):
        labels = (f"{name} {said}", name, str(number))
        boxes.append(
            _box(sum(shares[: number - 1]), share, top, 40, css, f"{name}: {said}", labels)
        )
    return "".join(boxes)


def _legend(parts: Sequence[Part]) -> str:
    items = (
        f"<li><i class='{css}'>{number}</i>{escape(name)} <b>{escape(said)}</b></li>"
        for number, (name, _, said, css) in enumerate(parts, 1)
    )
    return f"<ul class='legend'>{''.join(items)}</ul>"


def _box(
    left: float,
    width: float,
    top: int,
    height: int,
    css: str,
    title: str,
    labels: Sequence[str] = (),
) -> str:
    """A rectangle, `left` and `width` of the drawing's, with a tooltip and the first label that
    there is room for.
    """
    room = (width * PIXELS - 8) / LETTER if height > 12 else 0
    label = next((escape(one) for one in labels if len(one) <= room), "")
    inside = (
        f"<text class='in' x='{left + width / 2:.2%}' y='{top + height // 2 + 4}'>{label}</text>"
        if label
        else ""
    )
    return (
        f"<g><title>{escape(title, quote=False)}</title>"
        f"<rect class='{css}' x='{left:.3%}' y='{top}' width='{width:.3%}' height='{height}'/>{inside}</g>"
    )


def _line(text: str, at: float, height: int, ends: tuple[int, int], css: str = "") -> str:
    """A line down the drawing, `at` of its width; texts of other heights cannot collide."""
    tick = css == "tick"
    anchor = "middle" if tick and 0.03 < at < 0.97 else "end" if at > 0.5 else "start"
    aside = 0 if tick else -5 if at > 0.5 else 5
    return (
        f"<line class='{css}' x1='{at:.3%}' x2='{at:.3%}' y1='{ends[0]}' y2='{ends[1]}'/>"
        f"<text x='{at:.3%}' dx='{aside}' y='{height}' text-anchor='{anchor}'>{escape(text)}</text>"
    )


def _round(span: float) -> list[float]:
    """Round numbers from zero to `span`, at most eleven."""
    power = 10.0 ** floor(log10(span / 10))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= 0.999 * span / 10)
    return [index * step for index in range(int(span / step) + 1)]


def _clipped(text: str) -> str:
    return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"


def _took(seconds: float) -> str:
    """Three digits, down to what a small kernel takes: `12.3 µs`."""
    unit, times = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * times:.3g} {unit}" if seconds else "0"
