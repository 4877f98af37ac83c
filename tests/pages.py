"""Reads pages: their tags and texts, and their drawings as XML."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

LOADS = r"https?:|//|url\(|@import|@font-face|<script|<link|<img|<iframe| src=| href="
"""What a page has that loads something from elsewhere."""
SVG = r"<svg(?:(?!<svg).)*?(?:<svg.*?</svg>.*?)?</svg>"  # a drawing may have another inside


class Outline(HTMLParser):
    """Collects tags and text; fails where tags do not nest."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append((self.open[-1] if self.open else "", data))

    def of(self, tag):
        return [text for within, text in self.text if within == tag]


def drawings(page):
    """Returns the drawings of a page by name; they are parsed as XML, which checks them."""
    found = re.findall(SVG, page, re.DOTALL)
    marks = [ElementTree.fromstring(svg) for svg in found]
    return {svg.get("aria-label"): svg for svg in marks}


def percent(text):
    assert text.endswith("%")
    return float(text[:-1])
