"""Links of a page as they stand in the repository, and as they lead within the site.

A page may link whatever the repository holds, by its path from the page, so that links work where the repository is
read. What lies outside docs/ comes along into the site under the path that it has in the repository.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
CODE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?P<text>\[(?:[^\[\]]|\[[^\[\]]*\])*\])\((?P<path>[^()\s#:]+)(?P<anchor>#[^()\s]*)?\)")


def source_of(page: str) -> str:
    """Path in the repository of a page of the site."""
    return next((file for file, name in PAGES.items() if name == page), f"docs/{page}")


def within_site(text: str, page: str, bring: Callable[[str, str], None]) -> str:
    """The page's text with links that lead within the site.

    Parameters
    ----------
    text : str
        Markdown, as it is in the repository.
    page : str
        Its path in the site.
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
        else:
            return link[0]  # a file that the page itself makes, or a dead link, which fails the build
        return f"{link['text']}({posixpath.relpath(target, posixpath.dirname(page) or '.')}{link['anchor'] or ''})"

    return outside_code(text, lambda part: LINK.sub(moved, part))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with all of it changed but code."""
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])
