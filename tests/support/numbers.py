"""Numbers that a page shows, and numbers that a JSON holds."""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from decimal import Decimal
from html.parser import HTMLParser
from typing import Any

NUMBER = re.compile(r"(?<![\w.,⁻])(?<![A-Za-z]-)[-−+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w…])(?:[  ]?%)?")
UNREAD = {
    "style",
    "script",
    "svg",
    "math",
    "form",
}  # figures have files of numbers; formulas and controls measure nothing


class ShownNumbers(HTMLParser):
    """What a page shows: `text` and tooltips, `cells` of tables to full precision, `facts` that its script draws."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.cells: list[float] = []
        self.facts: Any = None
        self._within: list[str] = []
        self._is_facts = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attributes}
        if tag in UNREAD:
            self._within.append(tag)
            self._is_facts = given.get("id") == "facts"
        self.text += [given[key] for key in ("title", "aria-label") if key in given and not self._within]
        if "data-value" in given:
            self.cells.append(float(given["data-value"]))

    def handle_endtag(self, tag: str) -> None:
        if self._within and tag == self._within[-1]:
            self._within.pop()
            self._is_facts = False

    def handle_data(self, text: str) -> None:
        if self._is_facts:
            self.facts = json.loads(text)
        elif not self._within:
            self.text.append(text)


def leaves(value: Any) -> Iterator[Any]:
    """The numbers and texts of a JSON value, keys of objects included."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield value


def plain(number: str) -> Decimal:
    """A number as it is printed, with the digits that it is printed to."""
    return Decimal(number.replace(",", "").replace("−", "-").strip("%").strip())


class Held:
    """The numbers that a JSON holds, in numbers and in sentences."""

    def __init__(self, value: Any) -> None:
        self.numbers = sorted({float(leaf) for leaf in leaves(value) if not isinstance(leaf, str)})
        texts = (leaf for leaf in leaves(value) if isinstance(leaf, str))
        self.printed = {plain(number) for text in texts for number in NUMBER.findall(text)}

    def has(self, number: float) -> bool:
        """Whether this very number is held."""
        place = bisect_left(self.numbers, number)
        return place < len(self.numbers) and self.numbers[place] == number

    def rounds_to(self, printed: str) -> bool:
        """Whether a number that is printed is held as it is, or is one that is held, rounded."""
        value = plain(printed)
        if value in self.printed:
            return True
        factor = 100 if printed.endswith("%") else 1
        unit = Decimal(1).scaleb(int(value.as_tuple().exponent))
        least, most = ((float(value + side * unit / 2)) / factor for side in (-1, 1))
        slack = 1e-12 * max(abs(least), abs(most))
        place = bisect_left(self.numbers, least - slack)
        return place < len(self.numbers) and self.numbers[place] <= most + slack


def missing(page: str, value: Any) -> list[str]:
    """Numbers that a page shows and its JSON does not hold."""
    shown, held = ShownNumbers(page), Held(value)
    cells = [repr(cell) for cell in shown.cells if cell == cell and abs(cell) != float("inf") and not held.has(cell)]
    facts = [leaf for leaf in leaves(shown.facts) if not isinstance(leaf, str) and not held.has(leaf)]
    texts = [text for text in shown.text for number in NUMBER.findall(text) if not held.rounds_to(number)]
    return [*cells, *map(repr, facts), *texts]
