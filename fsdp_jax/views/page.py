"""What all views share: the templates' environment, colours of mesh axes, and the class `View`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import groupby, pairwise
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_jax.errors import ArgumentError, extra, human_bytes

if TYPE_CHECKING:
    import jinja2

# Told apart by people who are colour-blind; black letters are legible on each. They are also the
# colours of plan pages, in which they stand for kinds of memory.
COLORS = ("#77aadd", "#eedd88", "#44bb99", "#ee8866", "#99ddff", "#ee6677")
REPLICATED_COLOR = "#bbbbbb"
TERMINAL_COLORS = ("blue", "yellow", "green", "red", "cyan", "magenta")  # of the user's own theme


@cache
def environment(package: str) -> "jinja2.Environment":
    """Makes the environment of a package's templates, with those of `fsdp_jax.views` beside them.

    What is shown is escaped, and an undefined name is an error.
    """
    with extra("plan"):
        import jinja2
    folders = dict.fromkeys([package, "fsdp_jax.views"])
    pages = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(folder, ".") for folder in folders]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    pages.filters |= {"bytes": human_bytes, "ranges": number_ranges, "axes_color": axes_color}
    return pages


class View(ABC):
    """Something of a run to look at: `print` shows it as text, a notebook as HTML.

    `rich.print` shows the text with the mesh axes in colour.
    """

    template: ClassVar[str]  # has a macro `body(view)`
    axes: Mapping[str, int]  # mesh axes with their sizes

    @property
    @abstractmethod
    def title(self) -> str:
        """One line: what is shown."""

    @abstractmethod
    def lines(self, *, whole: bool, width: int | None = None) -> tuple[list[str], str, list[str]]:
        """Formats it as text: the lines above its table, the table, and the lines below.

        Where `whole` is False, rows of a long table are left out, and so are columns where the
        table has more than `width` characters.
        """

    def text(self) -> str:
        """Formats all of it as plain text."""
        return self._joined(whole=True)

    def _joined(self, *, whole: bool) -> str:
        above, table, below = self.lines(whole=whole)
        return "\n".join([*above, *[table] * bool(table), *below])

    def highlights(self) -> Iterator[tuple[str, str]]:
        """Yields (text, style of rich) of what has a colour in a terminal: the mesh axes."""
        for number, axis in enumerate(self.axes):
            yield f"'{axis}'", f"bold {TERMINAL_COLORS[number % len(TERMINAL_COLORS)]}"

    @property
    def kind(self) -> str:
        """The CSS class of what is shown."""
        return self.template.partition(".")[0]

    def page(self) -> str:
        """Renders a self-contained HTML page."""
        return self._render(fragment=False)

    def save(self, path: str | Path) -> None:
        """Writes a file: a page for `.html`, the text for `.txt`."""
        path = Path(path)
        writers = {".html": self.page, ".txt": lambda: self.text() + "\n"}
        if path.suffix not in writers:
            raise ArgumentError(
                "a view is saved as a page or as text",
                where="path",
                expected=", ".join(writers),
                got=path,
                fix=f"save('{path.with_suffix('.html')}')",
            )
        path.write_text(writers[path.suffix](), encoding="utf-8")

    def _render(self, *, fragment: bool) -> str:
        """Renders the template: an element for notebooks if `fragment`, else a page."""
        template = environment("fsdp_jax.views").get_template(self.template)
        return template.render(view=self, fragment=fragment)

    def __str__(self) -> str:
        return self._joined(whole=False)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self._render(fragment=True)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yields the text for rich, with colours; lines are wrapped, but for those of the table."""
        with extra("train"):
            from rich.text import Text
        (title, *above), table, below = self.lines(whole=False, width=options.max_width)
        shown = [Text("\n".join(lines)) for lines in (above, below)]
        shown.insert(1, Text(table, no_wrap=True, overflow="ellipsis"))
        yield Text(title, style="bold")
        for text in shown:
            for words, style in self.highlights():
                text.highlight_words([words], style=style)
            if text:
                yield text


def axes_color(axes: Iterable[str], order: Iterable[str]) -> str:
    """Makes the CSS background of what is sharded along mesh axes: stripes for several.

    `order`: all axes of the mesh, which have the colours in this order.
    """
    colors = dict(zip(order, COLORS * 8, strict=False))
    stripes = [colors[axis] for axis in axes]
    if len(stripes) < 2:
        color = (stripes or [REPLICATED_COLOR])[0]
        return f"linear-gradient({color} 0 0)"  # an image, as stripes are
    stops = ",".join(f"{c} {5 * n}px {5 * n + 5}px" for n, c in enumerate(stripes))
    return f"repeating-linear-gradient(135deg,{stops})"


def round_step(least: float) -> float:
    """Finds the smallest of 1, 2, 5 and 10 times a power of ten that is at least `least`."""
    power = 10.0 ** floor(log10(least))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= 0.999 * least)


def number_ranges(numbers: Iterable[int]) -> str:
    """Formats whole numbers in short: `0-3, 8`, and `0-56 by 8` for even distances."""
    numbers = sorted(numbers)
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}-{numbers[-1]} by {steps.pop()}"
    # numbers that follow each other have the same distance from their own place in the list
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(runs)
