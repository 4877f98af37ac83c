"""One layer's timeline as a view: what a device computes and sends, when, and for which parameter.

`html.py` has the geometry of its drawing, which plan pages share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fsdp_jax.planner.compiled.timeline import COMPUTE, LINK, Event
from fsdp_jax.planner.html import page_template, seconds_text, timeline_drawing
from fsdp_jax.tables import shortened, text_table
from fsdp_jax.views.page import View

BAR = 24  # characters
NAME = 60  # longest name of an event in a terminal
SHOWN = 40  # events that `print` shows, the longest; `text()` and files have all

GLYPHS = {COMPUTE: "█", LINK: "░"}  # of bars in a terminal; other lanes have "▒"


@dataclass(frozen=True, repr=False)
class Timeline(View):
    """The events of one layer; `print` it, let a notebook show it, or `save` it.

    Attributes:
        summary: of what, in one line.
        events: in seconds from the start of the layer.
        axes: {mesh axis: size}.

    """

    summary: str
    events: Sequence[Event]
    axes: Mapping[str, int]

    template: ClassVar[str] = "timeline.html.jinja"

    @property
    def title(self) -> str:
        """Of what, in one line."""
        return self.summary

    @cached_property
    def span(self) -> float:
        """Seconds from the start to the end of the last event."""
        return max((event.end for event in self.events), default=0.0)

    def rows(self) -> list[tuple[str, ...]]:
        """Lists (lane, start, seconds, name) of the events, in order."""
        return [
            (
                event.lane,
                seconds_text(event.start),
                seconds_text(event.end - event.start),
                event.label,
            )
            for event in sorted(self.events, key=lambda event: (event.start, event.lane))
        ]

    def lines(self, *, whole: bool, width: int | None = None) -> tuple[list[str], str, list[str]]:
        """Formats the events in the order of their starts; if not `whole`, the longest."""
        longest = sorted(self.events, key=lambda event: event.start - event.end)
        if not whole:
            longest = longest[:SHOWN]
        rows = []
        for event in sorted(longest, key=lambda event: (event.start, event.lane)):
            first = int(BAR * event.start / self.span)
            last = max(first + 1, round(BAR * event.end / self.span))
            glyph = GLYPHS.get(event.lane, "▒")
            bar = "·" * first + glyph * (last - first) + "·" * (BAR - last)
            seconds = seconds_text(event.end - event.start)
            rows.append((event.lane, bar[:BAR], seconds, shortened(event.label, NAME)))
        table, below = "", []
        if not rows:
            below.append("no schedule: analytic plans have none, plan without analytic=True")
        else:
            table = text_table(("", "", "takes", "for"), rows, right=("takes",))
        if more := len(self.events) - len(rows):
            below.append(f"… {more} shorter events; .text() and files have them")
        return [self.summary], table, below

    def _render(self, *, fragment: bool) -> str:
        """Renders the template: an element for notebooks if `fragment`, else a page."""
        drawing = timeline_drawing(self.events)
        template = page_template(self.template)
        return template.render(view=self, fragment=fragment, timeline=drawing)
