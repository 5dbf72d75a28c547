"""Render formulas between dollar signs as MathML, as `weightscope.core.formulas` does."""

import re

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

from weightscope.core.formulas import mathml

FORMULA = r"(?<![\\$])(\$\$?)(?=[^\s$])(.{1,200}?)(?<![\\\s])\1(?!\d)"
AFTER_CODE = 185  # Markdown gives code priority 190 and escaped characters 180


class Formula(InlineProcessor):
    """One formula."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: N802
        html = str(mathml(m[2], block=m[1] == "$$"))
        return self.md.htmlStash.store(html), m.start(0), m.end(0)


class Mathematics(Extension):
    """The Markdown extension."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802, Markdown's name
        md.inlinePatterns.register(Formula(FORMULA, md), "mathml", AFTER_CODE)
