"""A run's curves as a view."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdp_jax.planner.html import page_template
from fsdp_jax.tables import text_table
from fsdp_jax.train.charts import Chart, Point, sparkline
from fsdp_jax.views.page import View

LETTERS = 20  # of a curve in a terminal


@dataclass(frozen=True, repr=False)
class Curves(View):
    """The curves of a run; `print` it, let a notebook show it, or `save` it.

    Attributes:
        summary: the run in one line.
        charts: the drawings of a page.
        values: {name: (step, value)} of what the text shows.
        notes: further lines, such as files that cannot be read.

    """

    summary: str
    charts: Sequence[Chart]
    values: Mapping[str, Sequence[Point]]
    notes: Sequence[str] = ()
    axes: Mapping[str, int] = field(default_factory=dict)

    template: ClassVar[str] = "curves.html.jinja"

    @property
    def title(self) -> str:
        """The run in one line."""
        return self.summary

    def lines(self, *, whole: bool, width: int | None = None) -> tuple[list[str], str, list[str]]:
        """Formats a line for each curve: its shape, the first, the last and the least value."""
        rows = []
        for name, points in self.values.items():
            known = [(step, value) for step, value in points if value is not None]
            if not known:
                continue
            # a letter for as many steps each; of these the newest
            every = -(-len(known) // LETTERS)
            drawn = sparkline([value for _, value in known[::-1][::every][::-1]])
            first, last = known[0][1], known[-1][1]
            least, at = min((value, step) for step, value in known)
            numbers = (*map(_number, (first, last, least)), f"{at:,}")
            rows.append((name, drawn, *numbers))
        table = ""
        columns = ("", "", "first", "last", "least", "at step")
        if rows:
            table = text_table(columns, rows, right=columns[2:])
        return [self.summary], table, [*self.notes]

    def _render(self, *, fragment: bool) -> str:
        """Renders the template: an element for notebooks if `fragment`, else a page."""
        template: Any = page_template(self.template)
        return template.render(view=self, fragment=fragment)


def _number(value: float) -> str:
    """Formats a number in four digits, a large one in full: `12,363`."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
