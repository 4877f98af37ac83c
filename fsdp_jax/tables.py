"""Rows of text as a table: for terminals, and for notebooks."""

from collections.abc import Sequence
from html import escape


def text_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()
) -> str:
    """Columns as wide as their content, never wrapped: what a user can search, cut and diff."""
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    aligned = [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([aligned[0], "  ".join("-" * width for width in widths), *aligned[1:]])


def html_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str = ""
) -> str:
    """A plain table; every cell is escaped."""
    head = "".join(f"<th style='text-align:left'>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td style='text-align:left'>{escape(str(cell))}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
