"""Links of a page as they stand in the repository, and as they lead within the site.

A page may link whatever the repository holds, by its path from the page, so that links work where the repository is
read. What lies outside docs/ comes along into the site under the path that it has in the repository.
"""

import posixpath
import re
from collections.abc import Callable, Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
CODE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$", re.DOTALL | re.MULTILINE)
BESIDE = re.compile(r'(?:href|src)="([^"#:/]+)"')
LINK = re.compile(r"(?P<text>\[(?:[^\[\]]|\[[^\[\]]*\])*\])\((?P<path>[^()\s#:]+)(?P<anchor>#[^()\s]*)?\)")


def source_of(page: str) -> str:
    """Path in the repository of a page of the site."""
    return next((file for file, name in PAGES.items() if name == page), f"docs/{page}")


class DeadLinkError(Exception):
    """A page links what is not there."""


def within_site(text: str, page: str, made: Collection[str], bring: Callable[[str, str], None]) -> str:
    """The page's text with links that lead within the site.

    Parameters
    ----------
    text : str
        Markdown, as it is in the repository.
    page : str
        Its path in the site.
    made : collection of str
        Files that the page's own examples wrote.
    bring : function of two str
        Called with the path of each file that is to come along, in the repository and in the site.
    """
    folder = posixpath.dirname(source_of(page))

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        if path.startswith("docs/"):
            target = path.removeprefix("docs/")
        elif path in PAGES:
            target = PAGES[path]
        elif (ROOT / path).is_dir():
            return link["text"][1:-1]  # the site holds files
        elif (ROOT / path).is_file():
            target = path + ".txt" if path.endswith(".md") else path  # no page of this site
            bring(path, target)
        elif link["path"] in made:
            return link[0]
        else:
            raise DeadLinkError(f"{page}: {link[0]}")
        return f"{link['text']}({posixpath.relpath(target, posixpath.dirname(page) or '.')}{link['anchor'] or ''})"

    return outside_code(text, lambda part: LINK.sub(moved, part))


def companions(page: str) -> list[str]:
    """Files of the repository that one of its pages in HTML links beside itself."""
    folder, text = posixpath.dirname(page), (ROOT / page).read_text(encoding="utf-8")
    return [posixpath.join(folder, name) for name in dict.fromkeys(BESIDE.findall(text))]


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with all of it changed but blocks of code."""
    return walked(text, CODE, lambda code: code[0], change)


def walked(
    text: str, blocks: re.Pattern[str], within: Callable[[re.Match[str]], str], beside: Callable[[str], str]
) -> str:
    """The text with one change to each block that a pattern finds, and another to what lies before and between."""
    parts, end = [], 0
    for block in blocks.finditer(text):
        parts += [beside(text[end : block.start()]), within(block)]
        end = block.end()
    return "".join([*parts, beside(text[end:])])
