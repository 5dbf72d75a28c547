"""The README's first picture: drawn from the committed tables, legible on a phone, with colours for dark pages."""

import re
from pathlib import Path

from analyses.hero import picture

KEPT = Path(__file__).parents[2] / "figures" / "hero" / "hero.svg"


def test_the_picture_follows_a_dark_page_and_shows_the_edges_of_the_table() -> None:
    svg = picture()
    assert "prefers-color-scheme: dark" in svg and 'width="640"' in svg
    edges = len(re.findall(r"stroke: #9c5a1a", svg))
    assert edges == 20 + 1  # the strongest of the table; and the rule that lightens them
    assert len(re.findall(r"stroke: #9c5a1a", KEPT.read_text())) == edges, "make figures, then keep"
