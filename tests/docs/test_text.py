"""Pages read as plain Markdown: outputs, tables and pictures are what today's code makes (`make docs-text`)."""

import re
from pathlib import Path

import pytest

from docs.text.pages import BLOCK, PAGES, ROOT, TABLE, refreshed

pytestmark = pytest.mark.docs
ASSETS = ROOT / "docs" / "assets"


def made(page: Path) -> bool:
    text = page.read_text(encoding="utf-8")
    return bool(TABLE.search(text)) or any(not block["not_run"] for block in BLOCK.finditer(text))


@pytest.mark.parametrize("page", [page for page in PAGES if made(page)], ids=lambda page: page.name)
def test_blocks_print_what_stands_below_them(page: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers come with the extra `bigrams`")
    text, pictures = refreshed(page)
    assert page.read_text(encoding="utf-8") == text
    assert all(path.is_file() for path in pictures)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_no_page_is_a_template(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(?<!\$)\{\{", text)  # ${{ }} is an expression of GitHub's
    assert text.count("<!-- table: ") == text.count("<!-- end -->")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_block_checks_holds(page: Path) -> None:
    blocks = BLOCK.finditer(page.read_text(encoding="utf-8"))
    checks = [block[0] for block in blocks if block["language"] == "python" and not block["not_run"]]
    assert not [block for block in checks if re.search(r"\bFalse\b", block.partition("```text")[2])]


def test_every_picture_of_docs_is_shown_and_small() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    kept = [path for path in ASSETS.rglob("*") if path.suffix in {".png", ".svg"}]
    assert all(f"assets/{path.relative_to(ASSETS).as_posix()})" in text for path in kept)
    assert sum(path.stat().st_size for path in kept) < 1e6
