"""Sizes as bars: a row for each thing, split by kind, with a mark where a size is expected."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from fsdp_jax.errors import human_bytes
from fsdp_jax.tables import fitted_table, shortened, text_table
from fsdp_jax.views.page import COLORS, REPLICATED_COLOR, TERMINAL_COLORS, View, number_ranges

BAR = 16  # characters
NAME = 32  # longest name of a row in a terminal
SHOWN = 40  # rows that `print` shows; `text()` and files have all
GLYPHS = "█░▓▒▚▞▪▫"  # of the kinds in a terminal, told apart without colour
MARK = "|"
LABELED = 0.05  # a part of a bar below this fraction of the longest has no room for its number
# A number that is a name of its own in a path, as of `layers/12` or `Block_12`.
NUMBER = re.compile(r"(?:(?<=^)|(?<=[/_]))\d+(?=/|$)")


@dataclass(frozen=True)
class Kind:
    """What a part of a bar stands for.

    `color`: its place in the colours of all views; None is grey. `pale`: a second kind in a colour.
    """

    name: str
    color: int | None
    pale: bool = False

    @property
    def background(self) -> str:
        """Its colour in CSS."""
        if self.color is None:
            return REPLICATED_COLOR
        return COLORS[self.color % len(COLORS)]


@dataclass(frozen=True)
class BarRow:
    """A bar with its name: `parts` is {kind: bytes}.

    `expected`: bytes at which the mark is. `cells`: text in further columns. `count`: how many
    things it stands for. Rows that are `alike`, and in all of their names but numbers, are shown as
    one.
    """

    name: str
    parts: Mapping[str, int]
    expected: int | None = None
    cells: tuple[str, ...] = ()
    count: int = 1
    alike: Hashable = None

    @property
    def label(self) -> str:
        """The name, with how many things it stands for."""
        return self.name + f" x {self.count}" * (self.count > 1)

    @cached_property
    def total(self) -> int:
        """Bytes of the whole bar."""
        return sum(self.parts.values())


@dataclass(frozen=True, repr=False)
class Bars(View):
    """Sizes as bars; `print` it, let a notebook show it, or `save` it.

    Attributes:
        summary: what is shown, in one line.
        kinds: the parts of the bars, in their order.
        bars: the rows.
        size: what the bars measure, such as `sent per step`.
        expected: what the marks are, such as `declared`; empty without marks.
        columns: headers of the rows' cells.
        notes: further lines.
        cards: (name, value, note) of totals, at the top of a page.
        axes: {mesh axis: size}.

    """

    summary: str
    kinds: Sequence[Kind]
    bars: Sequence[BarRow]
    size: str
    expected: str = ""
    columns: Sequence[str] = ()
    notes: Sequence[str] = ()
    cards: Sequence[tuple[str, str, str]] = ()
    axes: Mapping[str, int] = field(default_factory=dict)

    template: ClassVar[str] = "bars.html.jinja"
    shown: ClassVar[int] = SHOWN

    @property
    def title(self) -> str:
        """What is shown, in one line."""
        return self.summary

    @cached_property
    def scale(self) -> int:
        """Bytes of the longest bar or mark."""
        sizes = [size for bar in self.bars for size in (bar.total, bar.expected or 0)]
        return max([1, *sizes])

    @cached_property
    def used_kinds(self) -> list[Kind]:
        """The kinds that some bar has."""
        return [kind for kind in self.kinds if any(bar.parts.get(kind.name) for bar in self.bars)]

    @property
    def has_kind_columns(self) -> bool:
        """Whether each kind has a column of its own; of many kinds the legend has the bytes."""
        return 1 < len(self.used_kinds) <= 3

    def headers(self) -> list[str]:
        """Lists the headers of the columns beside the bar."""
        kinds = [kind.name for kind in self.used_kinds] if self.has_kind_columns else []
        return [self.size, *[self.expected] * bool(self.expected), *kinds, *self.columns]

    def cells(self, bar: BarRow) -> list[str]:
        """Formats a row's text for each of the `headers`."""
        cells = [human_bytes(bar.total)]
        if self.expected:
            cells.append("" if bar.expected is None else human_bytes(bar.expected))
        if self.has_kind_columns:
            sizes = [bar.parts.get(kind.name, 0) for kind in self.used_kinds]
            cells += [human_bytes(size) if size else "" for size in sizes]
        return [*cells, *bar.cells]

    def kind_rows(self) -> list[list[str]]:
        """Lists, where the kinds are many, the bytes of each in each of the bars."""
        if self.has_kind_columns or len(self.used_kinds) < 2 or len(self.bars) > 3:
            return []
        return [
            [kind.name, *(human_bytes(bar.parts.get(kind.name, 0)) for bar in self.bars)]
            for kind in self.used_kinds
        ]

    def is_labeled(self, size: int) -> bool:
        """Whether a part of a bar has room for its number on a page."""
        return size >= LABELED * self.scale

    def lines(self, *, whole: bool, width: int | None = None) -> tuple[list[str], str, list[str]]:
        """Formats the bars, with the legend and the notes below them."""
        shown = self.bars
        if not whole:
            shown = self.bars[: self.shown]
        rows = [
            [shortened(bar.label, NAME), self._bar_text(bar), *self.cells(bar)] for bar in shown
        ]
        headers = self.headers()
        table, left_out = fitted_table(
            ["", "", *headers],
            rows,
            right=headers[: len(headers) - len(self.columns)],
            width=width,
            optional=headers[:0:-1],
        )
        below = []
        if rest := self.bars[len(shown) :]:
            below.append(
                f"… {len(rest)} more, {human_bytes(sum(bar.total for bar in rest))} in all; "
                ".text() and files have them"
            )
        if left_out:
            below.append(f"in a wider window also: {'; '.join(left_out[::-1])}")
        if self.kind_rows():
            names = ["", *(bar.name for bar in self.bars)]
            marked = [
                [f"{glyph} {row[0]}", *row[1:]]
                for glyph, row in zip(GLYPHS, self.kind_rows(), strict=False)
            ]
            below.append(text_table(names, marked, right=names[1:]))
        else:
            kinds = zip(GLYPHS * 8, self.used_kinds, strict=False)
            legend = [f"{glyph} {kind.name}" for glyph, kind in kinds]
            below.append("   ".join(legend + [f"{MARK} {self.expected}"] * bool(self.expected)))
        return [self.summary], table, [line for line in [*below, *self.notes] if line]

    def _bar_text(self, bar: BarRow) -> str:
        """Draws a bar in characters."""
        drawn = ""
        end = 0
        for glyph, kind in zip(GLYPHS * 8, self.used_kinds, strict=False):
            end += bar.parts.get(kind.name, 0)
            drawn += glyph * (round(BAR * end / self.scale) - len(drawn))
        drawn += "·" * (BAR - len(drawn))
        if bar.expected is not None:
            at = min(BAR, round(BAR * bar.expected / self.scale))
            drawn = drawn + " "
            drawn = drawn[:at] + MARK + drawn[at + 1 :]
        return drawn

    def highlights(self) -> Iterator[tuple[str, str]]:
        """Yields (text, style of rich) of the parts of the bars."""
        for glyph, kind in zip(GLYPHS, self.used_kinds, strict=False):
            if kind.color is not None:
                yield glyph, TERMINAL_COLORS[kind.color % len(TERMINAL_COLORS)]


def collapsed(rows: Iterable[BarRow]) -> list[BarRow]:
    """Puts rows together that are alike in all but numbers in their names; their bytes add up.

    The rows are then in the order of their bytes, the most first.
    """
    groups: dict[Any, list[BarRow]] = {}
    for row in rows:
        groups.setdefault((NUMBER.sub("#", row.name), row.alike), []).append(row)
    merged = []
    for members in groups.values():
        # `ln_1` and `ln_2` are rather two names than two of a kind
        if len(members) == 1 or (len(members) == 2 and "_" in _numbered(members)):
            merged += members
        else:
            merged.append(_sum_of(members))
    return sorted(merged, key=lambda row: -row.total)


def _numbered(members: Sequence[BarRow]) -> str:
    """Finds the characters before the numbers in which names differ."""
    first, second = (NUMBER.finditer(row.name) for row in members[:2])
    return "".join(
        one.string[one.start() - 1 : one.start()]
        for one, other in zip(first, second, strict=True)
        if one.group() != other.group()
    )


def _sum_of(members: Sequence[BarRow]) -> BarRow:
    """Makes one row of several that are alike: `layers/0-31/up x 32`."""
    places = zip(*(NUMBER.findall(row.name) for row in members), strict=True)
    ranges = [number_ranges(set(map(int, numbers))) for numbers in places]
    name = NUMBER.sub(lambda _: ranges.pop(0), members[0].name)
    parts: Counter[str] = Counter()
    for row in members:
        parts.update(row.parts)
    expected = None
    if any(row.expected is not None for row in members):
        expected = sum(row.expected or 0 for row in members)
    # texts in which they differ are all listed, each once
    columns = zip(*(row.cells for row in members), strict=True)
    cells = tuple("; ".join(dict.fromkeys(filter(None, texts))) for texts in columns)
    return replace(
        members[0],
        name=name,
        parts=dict(parts),
        expected=expected,
        cells=cells,
        count=sum(row.count for row in members),
    )
