"""Formats rows of text as tables: for terminals, and for notebooks."""

import textwrap
from collections.abc import Sequence
from html import escape


def text_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()
) -> str:
    """Formats rows under a header, in columns as wide as their widest cell; no line is wrapped.

    `right`: names of the columns to align to the right.
    """
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    pads = [str.rjust if name in right else str.ljust for name in columns]

    def line(row: Sequence[str]) -> str:
        padded = [pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)]
        return "  ".join(padded).rstrip()

    head, *body = map(line, cells)
    return "\n".join([head, "  ".join("-" * width for width in widths), *body])


def fitted_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Sequence[str] = (),
    width: int | None,
    optional: Sequence[str],
) -> tuple[str, list[str]]:
    """Formats a table as `text_table` does, in at most `width` characters where that is possible.

    Columns are left out for it, in the order of `optional`; their names are the second result.
    """
    left_out: list[str] = []
    while True:
        kept = [place for place, name in enumerate(columns) if name not in left_out]
        cells = [[row[place] for place in kept] for row in rows]
        table = text_table([columns[place] for place in kept], cells, right=right)
        fits = width is None or max(map(len, table.splitlines())) <= width
        if fits or len(left_out) == len(optional):
            return table, left_out
        left_out.append(optional[len(left_out)])


def html_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str = ""
) -> str:
    """Formats rows under a header as an HTML table; every cell is escaped."""

    def line(tag: str, row: Sequence[object]) -> str:
        cells = (f"<{tag} style='text-align:left'>{escape(str(cell))}</{tag}>" for cell in row)
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f"<table><caption>{escape(caption)}</caption>"
        f"<thead>{line('th', columns)}</thead><tbody>{body}</tbody></table>"
    )


def wrapped(text: str, width: int) -> str:
    """Wraps the long lines of a text at words; rows of tables stay, whose cells are spaced out."""
    lines = []
    for line in text.splitlines():
        if len(line) > width and "  " not in line.strip():
            lines += textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)
        else:
            lines.append(line)
    return "\n".join(lines)


def counted(number: int, what: str) -> str:
    """Formats a number of things: `1 slice`, `8 slices`."""
    return f"{number} {what}" + "s" * (number != 1)


def shortened(text: str, width: int) -> str:
    """Shortens a text to at most `width` characters; an ellipsis stands for the rest."""
    if len(text) <= width:
        return text
    return text[: width - 1] + "…"
