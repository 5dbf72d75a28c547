"""The site is built as `make docs` does: nothing dead, and nothing from a network."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[2]
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href"), ("image", "href")}


class Elements(HTMLParser):
    """A page's links, the files it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if (tag, name) in LOADED:
                self.loads.append(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.append(value or "")
            elif name in {"id", "name"}:
                self.ids.add(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` has just built in $SITE; built here where that is not set."""
    if "SITE" in os.environ:
        return ROOT / os.environ["SITE"]
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not built.returncode, built.stderr + built.stdout
    return out


@cache
def elements(page: Path) -> Elements:
    return Elements(page.read_text(encoding="utf-8"))


def pages(site: Path) -> Iterator[Path]:
    """Those that MkDocs makes; 404.html is for servers, and the commands' own pages have tests of their own."""
    return (page for page in site.glob("*.html") if page.name != "404.html")


def test_nothing_comes_from_a_network(site: Path) -> None:
    for page in pages(site):
        assert not [path for path in elements(page).loads if urlsplit(path).scheme not in {"", "data"}], page
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?https?:", style.read_text(encoding="utf-8")), style


def test_every_link_leads_somewhere(site: Path) -> None:
    for page in pages(site):
        for link in elements(page).links + elements(page).loads:
            parts = urlsplit(link)
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.is_file(), f"{page.name}: {link}"
            if parts.fragment and target.parent == site:
                assert unquote(parts.fragment) in elements(target).ids, f"{page.name}: {link}"


def test_every_page_is_in_the_navigation(site: Path) -> None:
    linked = {urlsplit(link).path for link in elements(site / "index.html").links} | {"index.html"}
    assert {page.name for page in pages(site)} <= linked
