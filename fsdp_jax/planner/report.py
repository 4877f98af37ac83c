"""A plan as a page: what a device holds at the peak, and what it computes, sends and waits for, to look at.

A page loads nothing: its style and its drawings are in it. Drawings place shapes in percent of their width and text in
pixels, so they stretch with the window and their text does not. What differs by colour differs by place, height or
label too.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

from fsdp_jax.errors import human_bytes
from fsdp_jax.planner.buffers import Kind
from fsdp_jax.planner.plan import Plan
from fsdp_jax.planner.timeline import COMPUTE, LINK, Event

STACK: tuple[Kind, ...] = ("params", "optimizer", "gradients", "activations", "gathered", "other")
"""State first, so that the valley lies where it ends."""
WIDTH = 720
"""Pixels that a drawing takes at least; a narrower window scrolls."""
LETTER = 7.2
"""Pixels that a letter takes at most, nearly always."""
PARTS = 300
"""Of a lane. Events that lie within one share a mark, which keeps a page small whatever a layer does."""
CLIP = 90
"""Letters of a name that a tooltip or a cell shows: names of what travels together are long."""
ROWS = 20
"""Collectives that a table shows, most bytes first."""

STYLE = """
.fsdp-plan{color-scheme:light dark;--ink:#1b1f24;--dim:#5c6570;--line:#d5dae0;--page:#fff;--free:#eef0f3;--good:#176f2c;
--bad:#b3261e;--busy:#77aadd;--hidden:#44bb99;--exposed:#d1495b;color:var(--ink);background:var(--page);
font:14px/1.45 system-ui,sans-serif;max-width:1100px;margin:0 auto;padding:1em}
@media (prefers-color-scheme:dark){.fsdp-plan{--ink:#e6e9ed;--dim:#9aa4af;--line:#3a424b;--page:#14181d;--free:#262c33;
--good:#6fd08c;--bad:#ff8a80;--exposed:#ff7b8b}}
.fsdp-plan h2{font-size:1.25em;margin:0 0 .6em}
.fsdp-plan h3{font-size:1.05em;margin:1.8em 0 .5em}
.fsdp-plan p{margin:.4em 0;color:var(--dim)}
.fsdp-plan .cards{display:flex;flex-wrap:wrap;gap:.6em;margin:0;padding:0;list-style:none}
.fsdp-plan .cards li{flex:1 1 9em;border:1px solid var(--line);border-radius:6px;padding:.5em .8em;margin:0}
.fsdp-plan .cards b{display:block;font-size:1.45em;font-weight:600}
.fsdp-plan .cards small,.fsdp-plan .cards span{color:var(--dim);display:block}
.fsdp-plan .good b{color:var(--good)}
.fsdp-plan .bad b{color:var(--bad)}
.fsdp-plan .wide{overflow-x:auto}
.fsdp-plan svg{display:block;width:100%;min-width:720px;font-size:12px}
.fsdp-plan svg text{fill:var(--ink)}
.fsdp-plan svg .in{fill:#14181d;text-anchor:middle}
.fsdp-plan svg rect{stroke:var(--page);stroke-width:.5}
.fsdp-plan svg line{stroke:var(--ink);stroke-width:1.5}
.fsdp-plan svg .tick{stroke:var(--line);stroke-width:1}
.fsdp-plan svg .limit{stroke:var(--bad);stroke-dasharray:5 3}
.fsdp-plan svg .free{fill:var(--free)}
.fsdp-plan svg .busy{fill:var(--busy)}
.fsdp-plan svg .hidden{fill:var(--hidden)}
.fsdp-plan svg .exposed{fill:var(--exposed)}
.fsdp-plan .c1{fill:#77aadd;background:#77aadd}
.fsdp-plan .c2{fill:#eedd88;background:#eedd88}
.fsdp-plan .c3{fill:#ee8866;background:#ee8866}
.fsdp-plan .c4{fill:#44bb99;background:#44bb99}
.fsdp-plan .c5{fill:#99ddff;background:#99ddff}
.fsdp-plan .c6{fill:#bbbbbb;background:#bbbbbb}
.fsdp-plan .legend{display:flex;flex-wrap:wrap;gap:.2em 1.6em;margin:.5em 0;padding:0;list-style:none}
.fsdp-plan .legend i{display:inline-block;width:1.5em;text-align:center;font-style:normal;color:#14181d;margin-right:.5em}
.fsdp-plan table{border-collapse:collapse;margin:.3em 0;font-variant-numeric:tabular-nums}
.fsdp-plan th,.fsdp-plan td{text-align:left;vertical-align:top;padding:.25em 1.4em .25em 0;white-space:pre-line;
border-bottom:1px solid var(--line);background:none;overflow-wrap:anywhere}
.fsdp-plan th{color:var(--dim);font-weight:600}
.fsdp-plan .right{text-align:right;white-space:pre}
.fsdp-plan details{margin:1em 0;border-top:1px solid var(--line);padding-top:.6em}
.fsdp-plan summary{cursor:pointer;font-weight:600}
"""


class Segment(NamedTuple):
    """A part of a whole: what it is, how much, and how that is said."""

    name: str
    value: float
    said: str


class Figure(NamedTuple):
    """A number of the headline, and what it is measured against."""

    name: str
    value: str
    note: str
    css: str = ""


def plan_html(plan: Plan) -> str:
    """The plan as a page of its own, which loads nothing."""
    return _page(plan.summary(), _sections(plan))


def plan_fragment(plan: Plan) -> str:
    """The plan as a part of a page, for notebooks."""
    return f"<div class='fsdp-plan'><style>{STYLE}</style>{_sections(plan)}</div>"


def compare_html(plans: Sequence[Plan]) -> str:
    """Plans side by side as a page: their figures, their memory on one scale, and each in full behind a click.

    Raises:
        ValueError: no plans.

    """
    if not plans:
        raise ValueError("no plans to compare")
    names = [f"{number}. {one.strategy} on {one.topology}" for number, one in enumerate(plans, 1)]
    scale = max(_scale(one) for one in plans)
    bars = "".join(f"<p>{escape(name)}</p>{_memory(one, scale)}" for name, one in zip(names, plans, strict=True))
    whole = "".join(f"<details><summary>{escape(one.summary())}</summary>{_sections(one)}</details>" for one in plans)
    title = f"{len(plans)} plans" if len(plans) > 1 else "1 plan"
    return _page(title, f"<h2>{title}</h2>{_compared(names, plans)}{_section('Memory at the peak', bars)}{whole}")


def _page(title: str, body: str) -> str:
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{escape(title)}</title>"
    # the window around the page follows the reader's scheme as the page does
    around = "<style>html{background:#fff}@media (prefers-color-scheme:dark){html{background:#14181d}}</style>"
    return (
        f"<!doctype html>\n<html lang='en'><head>{head}<style>{STYLE}</style>{around}</head>\n"
        f"<body class='fsdp-plan'>{body}</body></html>\n"
    )


def _sections(plan: Plan) -> str:
    """Everything there is to say of a plan; what it does not have takes no room."""
    return "\n".join([
        f"<h2>{escape(plan.summary())}</h2>{_cards(_figures(plan))}<p>{escape(_facts(plan))}</p>",
        _section("Memory at the peak", _memory(plan, _scale(plan))),
        _section("Time of a step", _time(plan)),
        _section("One layer, or the step where nothing loops", _timeline(plan.events)),
        _section(
            "To take less",
            _table(("change", "saves", "peak after", "costs"), plan.fix_rows(), right=("saves", "peak after")),
        ),
        _section(
            "Largest arrays at the peak", _table(("bytes", "for", "array", "of"), plan.buffer_rows(), right=("bytes",))
        ),
        _section("Collectives of a step", _collectives(plan)),
        _section("Notes", _list(plan.notes)),
        _section("Where figures come from", _list(plan.bases().split("; ") if plan.basis else ())),
    ])  # fmt: skip


def _section(title: str, body: str) -> str:
    return f"<section><h3>{escape(title)}</h3>{body}</section>" if body else ""


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """Rows of text; every cell is escaped, and numbers stand to the right."""
    if not rows:
        return ""
    css = [" class='right'" if name in right else "" for name in columns]
    head = "".join(f"<th{of}>{escape(name)}</th>" for name, of in zip(columns, css, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{of}>{escape(cell)}</td>" for cell, of in zip(row, css, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _figures(plan: Plan) -> list[Figure]:
    """The headline; figures that a plan lacks are left out."""
    room = plan.usable_bytes - plan.peak_bytes
    usable, capacity = human_bytes(plan.usable_bytes), human_bytes(plan.capacity_bytes)
    found = [
        Figure("verdict", "fits", f"{human_bytes(room)} to spare", "good")
        if plan.fits
        else Figure("verdict", "does not fit", f"{human_bytes(-room)} too much", "bad"),
        Figure("peak", human_bytes(plan.peak_bytes), f"of {usable} usable, {capacity} in all"),
        Figure("between steps", human_bytes(plan.valley_bytes), "of state"),
    ]
    if plan.time:
        found.append(Figure("a step", _took(plan.time.step_s), _basis(plan, "time")))
    if plan.tokens_per_s_per_device is not None:
        found.append(Figure("tokens/s a device", f"{plan.tokens_per_s_per_device:,.0f}", f"of {plan.devices} devices"))
    if plan.mfu is not None:
        found.append(Figure("MFU", f"{100 * plan.mfu:.1f}%", plan.convention))
    if plan.hfu is not None:
        found.append(Figure("HFU", f"{100 * plan.hfu:.1f}%", "with what is recomputed"))
    return found


def _basis(plan: Plan, name: str) -> str:
    return str(plan.basis.get(name, ""))


def _facts(plan: Plan) -> str:
    said = [f"{plan.parameters:,} parameters", f"{plan.devices} devices", f"peak {_basis(plan, 'peak_bytes')}".rstrip()]
    if plan.host_bytes:
        said.append(f"{human_bytes(plan.host_bytes)} of the host's memory for each device")
    if plan.compile_s is not None:
        said.append(f"compiled in {_took(plan.compile_s)}")
    return ", ".join(said)


def _cards(figures: Sequence[Figure]) -> str:
    cards = "".join(
        f"<li class='{one.css}'><span>{escape(one.name)}</span><b>{escape(one.value)}</b>"
        f"<small>{escape(one.note)}</small></li>"
        for one in figures
    )
    return f"<ul class='cards'>{cards}</ul>"


def _compared(names: Sequence[str], plans: Sequence[Plan]) -> str:
    """A column for each plan, a row for each figure that one of them has."""
    found = [{one.name: f"{one.value}\n{one.note}" for one in _figures(plan)} for plan in plans]
    rows = [(name, *(column.get(name, "-") for column in found)) for name in dict.fromkeys(n for f in found for n in f)]
    sent = [f"{human_bytes(plan.wire_bytes)}\n{human_bytes(plan.exposed_bytes)} of it waited for" for plan in plans]
    return _table(("", *names), [*rows, ("sent a step", *sent)])


def _scale(plan: Plan) -> float:
    """Bytes that the drawing of memory is wide: the capacity, or what does not fit into it."""
    return max(plan.capacity_bytes, sum(max(size, 0) for size in plan.breakdown.values()), 1)


def _memory(plan: Plan, scale: float) -> str:
    shares = {kind: share for kind, _, share in plan.memory_rows()}
    parts = [Segment(kind, plan.breakdown[kind], human_bytes(plan.breakdown[kind])) for kind in STACK]
    marks = [("usable", plan.usable_bytes, 12, 82, "limit"), ("peak", plan.peak_bytes, 28, 76, "")]
    marks.append(("between steps", plan.valley_bytes, 92, 36, ""))
    drawn = [_box(0, 100 * plan.capacity_bytes / scale, 36, 40, "free", f"capacity: {human_bytes(plan.capacity_bytes)}")]
    drawn += [_stack(parts, scale, 36, 40), *(_mark(name, size, scale, *at) for name, size, *at in marks)]
    gib = 2**30
    drawn += [_tick(at * gib, scale, 98, 104, human_bytes(at * gib)) for at in _round(scale / gib)]
    legend = [one._replace(said=f"{one.said}, {shares[one.name]}") for one in parts]
    return _drawing("memory at the peak", 122, drawn) + _legend(legend)


def _time(plan: Plan) -> str:
    """Parts of a step; their sum is the step, and links are busy beside them."""
    if plan.time is None or plan.time.step_s <= 0:
        return ""
    *rows, links = plan.time_rows()
    seconds = (plan.time.compute_s, plan.time.memory_s, plan.time.exposed_s)
    parts = [Segment(name, s, f"{took}, {share}") for (name, took, share), s in zip(rows, seconds, strict=True)]
    bar = _drawing("time of a step", 44, [_stack(parts, plan.time.step_s, 2, 40)])
    return f"{bar}{_legend(parts)}<p>{escape(links[0])}: {escape(links[1])}</p><p>{escape(plan.speed())}</p>"


def _collectives(plan: Plan) -> str:
    """What is sent; how much of it is hidden, only a compiled program tells."""
    known = _basis(plan, "collectives") == "compiled"
    rows = [
        (row["op"], row["dtype"], row["axis"], str(row["count"]), human_bytes(row["bytes"]),
         f"{100 * row['overlapped_bytes'] / row['bytes']:.0f}%" if known and row["bytes"] else "-",
         _clipped(row["where"]))
        for row in plan.collectives
    ]  # fmt: skip
    if len(rows) > ROWS:
        rest = human_bytes(sum(row["bytes"] for row in plan.collectives[ROWS:]))
        rows[ROWS:] = [(f"{len(rows) - ROWS} more", "", "", "", rest, "", "")]
    columns = ("op", "dtype", "axis", "times", "bytes", "hidden", "for")
    return f"<p>{escape(plan.wire())}</p>{_table(columns, rows, right=columns[3:6])}"


def _timeline(events: Sequence[Event]) -> str:
    """Lanes below each other on one axis of time."""
    span = max((one.end for one in events), default=0.0)
    if span <= 0:
        return ""
    exposed = _exposed(events, span)
    lanes = list(dict.fromkeys((COMPUTE, LINK, *(one.lane for one in events))))
    drawn, floor_ = [], 44 * len(lanes)
    drawn += [_tick(at, span, 0, floor_ + 6, _took(at)) for at in _round(span)]
    for top, lane in zip(range(0, floor_, 44), lanes, strict=True):
        busy = [one for one in events if one.lane == lane]
        said = f"{lane}: busy {_took(_sum(busy))} of {_took(span)}"
        if lane == LINK:  # what is hidden is half as high as what is exposed
            said += f", {_took(_sum(exposed))} of it exposed (high): nothing computes meanwhile"
            drawn += [_lane(busy, span, top + 30, 10, "hidden"), _lane(exposed, span, top + 20, 20, "exposed")]
        else:
            drawn.append(_lane(busy, span, top + 20, 20, "busy"))
        drawn.append(f"<text x='0' y='{top + 14}'>{escape(said)}</text>")
    return _drawing("timeline", floor_ + 26, drawn)


def _sum(events: Sequence[Event]) -> float:
    return sum(one.end - one.start for one in events)


def _exposed(events: Sequence[Event], span: float) -> list[Event]:
    """What of each collective nothing computes beside."""
    idle = _idle([one for one in events if one.lane == COMPUTE], span)
    ends = [end for _, end in idle]
    found = []
    for one in (one for one in events if one.lane == LINK):
        for index in range(bisect_right(ends, one.start), len(idle)):
            start, end = idle[index]
            if start >= one.end:
                break
            found.append(Event(LINK, max(start, one.start), min(end, one.end), f"waiting for {one.label}"))
    return found


def _idle(events: Sequence[Event], span: float) -> list[tuple[float, float]]:
    """(start, end) of what a lane's events leave free."""
    clock, found = 0.0, []
    for one in sorted(events, key=lambda one: one.start):
        if one.start > clock:
            found.append((clock, one.start))
        clock = max(clock, one.end)
    return [*found, (clock, span)] if clock < span else found


def _lane(events: Sequence[Event], span: float, top: float, height: float, css: str) -> str:
    drawn = []
    for group in _merged(events, span / PARTS):
        label = ", ".join(dict.fromkeys(one.label for one in group))
        labels = (label, label.partition(" ")[0]) if len(group) == 1 and height > 12 else ()
        title = f"{_clipped(label)}: {_took(_sum(group))}" + (f" ({len(group)} events)" if len(group) > 1 else "")
        at, end = group[0].start, max(one.end for one in group)
        drawn.append(_box(100 * at / span, 100 * (end - at) / span, top, height, css, title, labels))
    return "".join(drawn)


def _merged(events: Sequence[Event], least: float) -> Iterator[list[Event]]:
    """Neighbours that lie within `least` seconds, together."""
    group: list[Event] = []
    for one in sorted(events, key=lambda one: one.start):
        if group and one.end - group[0].start > least:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _drawing(name: str, height: int, shapes: Sequence[str]) -> str:
    return f"<div class='wide'><svg role='img' aria-label='{name}' height='{height}'>{''.join(shapes)}</svg></div>"


def _stack(parts: Sequence[Segment], whole: float, top: int, height: int) -> str:
    """Parts end to end, each with its name, or its number in the legend, where there is room."""
    drawn, at = [], 0.0
    for number, one in enumerate(parts, 1):
        share = 100 * max(one.value, 0) / whole  # less than nothing is left where a refusal beats the estimate
        labels = (f"{one.name} {one.said}", one.name, str(number))
        drawn.append(_box(at, share, top, height, f"c{number}", f"{one.name}: {one.said}", labels))
        at += share
    return "".join(drawn)


def _legend(parts: Sequence[Segment]) -> str:
    rows = [
        f"<li><i class='c{number}'>{number}</i>{escape(one.name)} <b>{escape(one.said)}</b></li>"
        for number, one in enumerate(parts, 1)
    ]
    return f"<ul class='legend'>{''.join(rows)}</ul>"


def _box(
    left: float, width: float, top: float, height: float, css: str, title: str, labels: Sequence[str] = ()
) -> str:  # fmt: skip
    """A rectangle, `left` and `width` in percent, with a tooltip, and inside it the first label that fits."""
    fits = next((label for label in labels if len(label) * LETTER + 8 <= width * WIDTH / 100), "")
    at = f"<text class='in' x='{left + width / 2:.2f}%' y='{top + height / 2 + 4:g}'>{escape(fits)}</text>" if fits else ""
    return (
        f"<g><title>{escape(title, quote=False)}</title><rect class='{css}' x='{left:.3f}%' y='{top:g}' "
        f"width='{width:.3f}%' height='{height:g}'/>{at}</g>"
    )


def _mark(name: str, size: int, scale: float, label: int, end: int, css: str) -> str:
    """A line from its label, at a height of its own, to the far end of the bar."""
    share, text = 100 * size / scale, escape(f"{name} {human_bytes(size)}")
    anchor, aside = ("end", -5) if share > 50 else ("start", 5)
    return (
        f"<line class='{css}' x1='{share:.3f}%' x2='{share:.3f}%' y1='{label - 9 if label < end else label}' y2='{end}'/>"
        f"<text x='{share:.3f}%' dx='{aside}' y='{label}' text-anchor='{anchor}'>{text}</text>"
    )


def _tick(at: float, whole: float, top: int, bottom: int, text: str) -> str:
    share = 100 * at / whole
    anchor = "start" if share < 3 else "end" if share > 97 else "middle"
    return (
        f"<line class='tick' x1='{share:.3f}%' x2='{share:.3f}%' y1='{top}' y2='{bottom}'/>"
        f"<text x='{share:.3f}%' y='{bottom + 12}' text-anchor='{anchor}'>{escape(text)}</text>"
    )


def _round(span: float) -> list[float]:
    """Round numbers from zero to `span`, at most eleven."""
    power = 10.0 ** floor(log10(span / 10))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= span / 10 * (1 - 1e-9))
    return [index * step for index in range(int(span / step + 1e-9) + 1)]


def _clipped(text: str) -> str:
    return text if len(text) <= CLIP else text[: CLIP - 1] + "…"


def _took(seconds: float) -> str:
    """Three digits, down to what a small kernel takes: `12.3 µs`."""
    for unit, times in (("s", 1.0), ("ms", 1e3)):
        if seconds * times >= 1:
            return f"{seconds * times:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0"
