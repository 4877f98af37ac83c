"""Bars: every byte is drawn, rows that are alike are one, pages are sound, columns fit."""

import re

import pytest
from pages import LOADS, Outline, percent
from rich.console import Console

from fsdp_jax.views.bars import BarRow, Bars, Kind, collapsed

KINDS = [Kind("data, exposed", 0), Kind("data, hidden", 0, pale=True), Kind("other", None)]


def bars(rows, **kw):
    return Bars("a summary", KINDS, rows, "sent", expected="declared", columns=("sends",), **kw)


def row(name, *sizes, expected=None, cell="", alike=None):
    parts = {kind.name: size for kind, size in zip(KINDS, sizes, strict=False)}
    return BarRow(name, parts, expected, (cell,), alike=alike)


def of_tag(page, tag):
    return [attrs for name, attrs in Outline(page).tags if name == tag]


def test_layers_that_are_alike_are_one_row():
    rows = [row(f"layers/{n}/up", 10, n, expected=20, cell="a", alike=4) for n in range(6)]
    rows += [row("layers/6/up", 10, expected=20, alike=5), row("ln_1/w", 1), row("ln_2/w", 1)]
    first, *rest = collapsed(rows)
    assert first.label == "layers/0-5/up x 6"
    assert (first.total, first.expected, first.cells) == (60 + 15, 120, ("a",))
    assert [each.label for each in rest] == ["layers/6/up", "ln_1/w", "ln_2/w"]
    # Linen's names; a number within a word is none of a layer
    names = ["Block_0/q2", "Block_1/q2", "Block_2/q2", "Block_0/q3"]
    assert [r.label for r in collapsed(map(row, names))] == ["Block_0-2/q2 x 3", "Block_0/q3"]
    assert [r.label for r in collapsed([row("0/w", 1), row("1/w", 1)])] == ["0-1/w x 2"]


def test_text_tells_the_kinds_apart_without_colour():
    shown = bars([row("a", 50, 25, 25, expected=100), row("b", 50, expected=75), row("c")])
    summary, header, _, a, b, c, legend = str(shown).splitlines()
    assert summary == "a summary"
    columns = ["sent", "declared", "data, exposed", "data, hidden", "other", "sends"]
    assert re.split("  +", header.strip()) == columns
    assert "████████░░░░▓▓▓▓|" in a
    assert "████████····|···" in b
    assert c.split() == ["c", "·" * 16, "0", "B"]
    assert legend == "█ data, exposed   ░ data, hidden   ▓ other   | declared"


def test_many_rows_are_cut_on_the_screen_and_whole_in_files():
    names = [f"path_of_{'abcdefghij'[n % 10] * 30}{n}x" for n in range(2000)]
    shown = bars([row(name, 10, 5) for name in names])
    assert "… 1960 more, 28.7 KiB in all; .text() and files have them" in str(shown)
    assert len(shown.text().splitlines()) == 2004
    page = shown.page()
    assert len(of_tag(page, "s")) == 1  # the legend's: none of these rows has a mark
    assert len(of_tag(page, "u")) == 4000
    assert of_tag(page, "details") == [{}]
    assert len(page.encode()) < 1_500_000


def test_columns_that_a_terminal_has_no_room_for_are_named():
    shown = bars([row("name " * 6, 60, 40, cell="all-gather")], notes=["a note " * 20])
    console = Console(width=80, color_system="standard", force_terminal=True)
    with console.capture() as capture:
        console.print(shown)
    text = capture.get()
    assert "\x1b[34m█" in text
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert max(map(len, plain.splitlines())) <= 80
    assert "in a wider window also: data, hidden; sends" in plain
    assert plain.split().count("note") == 20


def test_pages_are_well_formed_and_draw_every_byte():
    bad = """</div><script>alert('1')</script>"""
    shown = bars([row(bad, 30, 20, 10, expected=120, cell=bad), row("b", 1)], notes=[bad])
    for page in (shown.page(), shown._repr_html_()):
        assert not re.search(LOADS, page)
        widths = [re.search(r"width:(.*)", attrs["style"]).group(1) for attrs in of_tag(page, "u")]
        assert [percent(width) for width in widths] == pytest.approx(
            [25, 100 / 6, 10 / 1.2, 1 / 1.2], rel=1e-3
        )
        texts = [text for _, text in Outline(page).text]
        assert sum(bad in text for text in texts) >= 3
        assert "color-scheme:light dark" in page
    assert "fsdp-view bars" in page
    assert "class='row'" not in page  # which the site's theme has rules for


def test_nothing_to_show():
    shown = bars([])
    assert "a summary" in str(shown)
    Outline(shown.page())


def test_of_few_bars_and_many_kinds_the_legend_has_the_bytes():
    kinds = [Kind(name, place) for place, name in enumerate("abcd")]
    rows = [BarRow("between steps", {"a": 2**20}), BarRow("at the peak", dict.fromkeys("abcd", 1))]
    shown = Bars("memory", kinds, rows, "bytes")
    assert shown.kind_rows()[0] == ["a", "1 MiB", "1 B"]
    assert "█ a" in str(shown)
    assert Outline(shown.page()).of("td")[:3] == ["a", "1 MiB", "1 B"]
