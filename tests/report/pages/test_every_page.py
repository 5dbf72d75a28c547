"""Every kind of page that a command writes, in a browser: nothing in the way of any reader, and it fits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.browser import Page
from tests.support.commands import run
from tests.support.figures import unsaved
from tests.support.two_layers import FOLDER, TWO_LAYERS

pytestmark = pytest.mark.check

TEXT = "\n\n".join(f"On day {n} the crew of the ship saw land again, and sailed on." for n in range(40))
# Sizes at which a study of the embedded checkpoint takes a second.
PAGES: dict[str, list[str]] = {
    "atlas": ["atlas", "LIST.txt", "--prove", "0"],
    "audit": ["audit", TWO_LAYERS, "--all"],
    "audits": ["audit", "LIST.txt"],
    "circuits": ["circuits", TWO_LAYERS],
    "compare": ["compare", TWO_LAYERS, "MOVED", "--all"],
    "detok": ["detok", TWO_LAYERS, "--sample", "100", "--token", " the"],
    "learned": ["learned", TWO_LAYERS, "MOVED"],
    "lineage": ["lineage", "MOVED", TWO_LAYERS],
    "positions": ["positions", TWO_LAYERS],
    "same": ["same", TWO_LAYERS, "MOVED"],
}
STUDIES: dict[str, list[str]] = {
    "norms": ["norms", TWO_LAYERS, "--text", "TEXT.txt", "--inputs", "2", "--length", "16"],
    "outliers": ["outliers", TWO_LAYERS, "--text", "TEXT.txt", "--inputs", "8", "--sample", "2", "--length", "16"],
    "sink-bias": ["sinks", TWO_LAYERS, "--question", "bias", "--inputs", "2", "--length", "32", "--evaluated", "1"],
    "sink-kind": ["sinks", TWO_LAYERS, "--question", "kind", "--inputs", "2", "--length", "32"],
}
MADE = {"LIST.txt", "TEXT.txt", "MOVED"}
LOOKS = [(1280, False), (1280, True), (390, False), (390, True)]
LIKE_OTHERS = "tbody tr:nth-child(n+4)"  # rows that look as the first do, and would take most of the time
RULES = (
    f"axe.run({{{{exclude: ['{LIKE_OTHERS}']}}}}, {{{{resultTypes: ['violations']{{only}}}}}})"
    ".then(found => JSON.stringify(found.violations.map({told})))"
)
HELP = "v => [v.impact, v.id, v.nodes.map(n => n.html.slice(0, 200))]"
CONTRAST = ", runOnly: ['color-contrast']"  # all that another scheme can change; widths move things too


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The page of a name, its figures put together and left white: their drawing is no question of the page."""
    out = tmp_path_factory.mktemp("pages")
    (out / "LIST.txt").write_text("embedded\nnowhere\n")
    (out / "TEXT.txt").write_text(TEXT)
    shutil.copytree(FOLDER, out / "MOVED")
    weights = load_file(FOLDER / "model.safetensors")
    weights["transformer.h.1.attn.c_attn.weight"] = weights["transformer.h.1.attn.c_attn.weight"] * np.float16(1.5)
    save_file(weights, out / "MOVED" / "model.safetensors")

    def write(name: str) -> Path:
        if not (out / name).exists():
            if name in STUDIES:
                pytest.importorskip("torch", reason="PyTorch comes with the extra `runner`")
            words = (PAGES | STUDIES)[name]
            with unsaved():
                result = run(*(out / word if word in MADE else word for word in words), "--out", out / name)
            assert (out / name).exists(), result.output
        names = ("report.html", "summary.html", "index.html")
        return next(page for page in (out / name / page for page in names) if page.exists())

    return write


@pytest.fixture(scope="module")
def axe() -> str:
    """axe-core, which knows what keeps a screen reader or a keyboard out."""
    package = pytest.importorskip("axe_playwright_python", reason="axe-core comes with the extra `dev`")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*PAGES, *STUDIES])
def test_pages_are_accessible_and_fit_the_window(
    name: str, written: Callable[[str], Path], axe: str, tab: Page
) -> None:
    page = written(name)
    for look, (width, dark) in enumerate(LOOKS):
        tab.open(page, width, dark=dark)
        tab.run(f"{axe};0")
        only = CONTRAST if look in {1, 3} else ""
        assert json.loads(tab.run(RULES.format(only=only, told=HELP))) == [], f"{width} {'dark' if dark else 'light'}"
        assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []


@pytest.mark.parametrize("name", [*PAGES, *STUDIES])
def test_a_figure_is_a_click_from_its_files_and_says_what_it_shows(
    name: str, written: Callable[[str], Path], tab: Page
) -> None:
    page = written(name)
    tab.open(page, 1280)
    links = tab.run("[...document.querySelectorAll('.aside a')].map(a => a.getAttribute('href'))")
    files = {link for link in links if not link.startswith(("data:", "#"))}
    assert all((page.parent / link).exists() for link in files)
    for drawn in page.parent.glob("*.svg"):
        assert {drawn.name, f"{drawn.stem}.png"} <= files
    for figure, caption in tab.run(
        "[...document.querySelectorAll('.drawing [role=img]')]"
        ".map(d => [d.getAttribute('aria-label'), d.closest('figure').querySelector('figcaption').textContent])"
    ):
        assert figure and "Model: " in caption
        assert "from" in figure or name in {"learned", "same"}  # their maps have no numbered axes


SHEET = 703  # pixels: A4 less the margins of print.css
SEEN = "[...document.querySelectorAll('{}')].filter(e => e.checkVisibility()).length"


@pytest.mark.parametrize("name", [*PAGES, *STUDIES])
def test_a_page_prints_light_open_and_whole(name: str, written: Callable[[str], Path], tab: Page) -> None:
    """What a sheet of paper cannot do is not on it, and nothing is cut or folded away, whatever the screen showed."""
    tab.open(written(name), 1280, dark=True)
    tab.run("document.querySelectorAll('details').forEach(d => { d.open = false })")
    tab.run("dispatchEvent(new Event('beforeprint'))")
    tab.call("Emulation.setDeviceMetricsOverride", width=SHEET, height=1000, deviceScaleFactor=1, mobile=True)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    tab.call("Emulation.setEmulatedMedia", media="print", features=dark)
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.run("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert tab.run(SEEN.format("select, input, .aside, .hint, #more")) == 0
    assert tab.run(SEEN.format("details > :not(summary)")) == tab.run(
        "document.querySelectorAll('details > :not(summary)').length"
    )
    assert tab.run("document.documentElement.scrollWidth") <= SHEET
    cut = "w.scrollWidth > w.clientWidth + 1 || w.scrollHeight > w.clientHeight + 1"
    assert tab.run(f"[...document.querySelectorAll('.wide')].filter(w => {cut}).map(w => w.ariaLabel)") == []
    tab.call("Emulation.setEmulatedMedia", media="")
