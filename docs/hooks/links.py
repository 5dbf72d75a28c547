"""Translate links of the repository into links of the site.

Pages link files of the repository by relative paths, so that links work on a code host too. Linked
files outside docs/ are copied into the site under their path in the repository.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
CODE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$", re.DOTALL | re.MULTILINE)
SIBLING = re.compile(r'(?:href|src)="([^"#:/]+)"')
LINK = re.compile(
    r"(?P<text>\[(?:[^\[\]]|\[[^\[\]]*\])*\])\((?P<path>[^()\s#:]+)(?P<anchor>#[^()\s]*)?\)"
)


def source_of(page: str) -> str:
    """Path in the repository of one of the site's pages."""
    return next((file for file, name in PAGES.items() if name == page), f"docs/{page}")


class DeadLinkError(Exception):
    """A page links a file that does not exist."""


def within_site(text: str, page: str, bring: Callable[[str, str], None]) -> str:
    """The page's text with its links translated.

    Parameters
    ----------
    text : str
        Markdown, as in the repository.
    page : str
        Path in the site.
    bring : function of two str
        Called with the path in the repository and in the site of each file to copy.
    """
    folder = posixpath.dirname(source_of(page))

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        if path.startswith("docs/"):
            target = path.removeprefix("docs/")
        elif path in PAGES:
            target = PAGES[path]
        elif (ROOT / path).is_dir():
            return link["text"][1:-1]  # the site has no page for a folder
        elif (ROOT / path).is_file():
            target = path + ".txt" if path.endswith(".md") else path  # MkDocs makes pages of .md
            bring(path, target)
        else:
            raise DeadLinkError(f"{page}: {link[0]}")
        relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"{link['text']}({relative}{link['anchor'] or ''})"

    parts, end = [], 0
    for block in CODE.finditer(text):
        parts += [LINK.sub(moved, text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, LINK.sub(moved, text[end:])])


def companions(page: str) -> list[str]:
    """Files in the folder of an HTML page of the repository that the page links."""
    folder, text = posixpath.dirname(page), (ROOT / page).read_text(encoding="utf-8")
    return [posixpath.join(folder, name) for name in dict.fromkeys(SIBLING.findall(text))]
