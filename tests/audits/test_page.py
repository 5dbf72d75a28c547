"""The audit's page in a browser: it loads in silence, a click shows a head, it fits a phone, and names stay text."""

import json
import re
from html import escape
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.browser import Page, browser
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.cli import main

HOSTILE = "<img src=x onerror=alert(1)>&\"'"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    """The page of a checkpoint with a hostile name, a NaN and a spike, four layers of six heads."""
    weights = gpt2_weights(n_layers=4, d=48, vocab=60)
    weights["h.2.attn.c_attn.weight"][3, 9] = np.nan
    for columns in (slice(8, 16), slice(48 + 8, 48 + 16)):  # queries and keys of head 1
        weights["h.1.attn.c_attn.weight"][:, columns] += 3 * np.outer(np.linspace(-1, 1, 48), np.ones(8)).astype(
            np.float32
        )
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / HOSTILE, weights, n_head=6)
    out = tmp_path_factory.mktemp("out")
    result = CliRunner().invoke(main, ["audit", str(folder), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out / "report.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_the_page_is_one_file_that_asks_for_nothing(page_file: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    assert not re.search(
        r"(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest", text.replace(escape(HOSTILE), ""), re.IGNORECASE
    )
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', text, re.DOTALL).group(1))
    assert np.shape(facts["spectra"]["qk_singular_values"]) == (4, 6, 8)


def test_findings_stand_before_everything_else(page_file: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    assert text.index('id="findings"') < text.index('id="heads"') < text.index('id="table"')
    assert text.index('id="not_finite"') < text.index('id="spectral_spike"')
    assert "Read the tensor again from its source" in text


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_the_page_loads_in_silence_and_fits(width: int, dark: bool, page: Page, page_file: Path) -> None:
    page.complaints.clear()
    page.requests.clear()
    page.open(page_file, width, dark=dark)
    assert page.run("document.querySelectorAll('#maps canvas').length") == len(
        page.run("facts.measures.map(m => m.name)")
    )
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.complaints == []
    assert page.requests == [page_file.resolve().as_uri()]
    light = sum(map(int, re.findall(r"\d+", page.run("getComputedStyle(document.body).backgroundColor"))[:3]))
    assert (light < 200) == dark


def test_names_from_a_checkpoint_stay_text(page: Page, page_file: Path) -> None:
    page.open(page_file, 1280)
    assert page.run("document.querySelector('h1').textContent") == f"The heads of {HOSTILE}"
    assert page.run("document.images.length") == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_a_click_on_a_map_shows_that_heads_spectra(width: int, page: Page, page_file: Path) -> None:
    page.open(page_file, width)
    page.run("document.querySelector('canvas[data-measure=vo_sigma1]').scrollIntoView({block: 'center'})")
    rectangle = "document.querySelector('canvas[data-measure=vo_sigma1]').getBoundingClientRect()"
    box = page.run(f"(r => [r.x, r.y, r.width, r.height])({rectangle})")
    page.click(box[0] + box[2] * (4 + 0.5) / 6, box[1] + box[3] * (3 + 0.5) / 4)
    assert page.run("document.getElementById('chosen').textContent") == "Layer 3, head 4"
    assert page.run("document.querySelectorAll('#spectra svg').length") == 2
    points = page.run("document.querySelector('#spectra .line').getAttribute('d').split('L').length")
    assert points == 8
    assert page.run("document.getElementById('measures').textContent.includes('qk_sigma1')")
    assert page.complaints == []


def test_a_finding_leads_to_its_head_and_a_head_to_its_findings(page: Page, page_file: Path) -> None:
    page.open(page_file, 1280)
    page.run("document.querySelector('#spectral_spike button.where').click()")
    assert page.run("document.getElementById('chosen').textContent") == "Layer 1, head 1"
    assert "times the second" in page.run("document.getElementById('remarks').textContent")


def test_a_head_that_is_not_finite_has_no_spectrum_and_breaks_nothing(page: Page, page_file: Path) -> None:
    page.complaints.clear()
    page.open(page_file, 1280)
    page.run("choose(2, 1, false)")
    assert "no finite singular value" in page.run("document.getElementById('spectra').textContent")
    assert page.complaints == []


def test_the_table_sorts_both_ways_and_a_row_shows_its_head(page: Page, page_file: Path) -> None:
    page.open(page_file, 1280)
    column = page.run("columns.indexOf('qk_sigma1')")

    def cells() -> list[float | None]:
        texts = page.run(f"[...document.querySelectorAll('#rows tbody tr')].map(r => r.cells[{column}].textContent)")
        return [float(text) if text else None for text in texts]

    for order in (True, False):
        page.run(f"document.querySelectorAll('#rows th button')[{column}].click()")
        values = cells()
        assert values[-1] is None  # the head that is not finite
        assert values[:-1] == sorted(values[:-1], reverse=order)
    page.run("document.querySelectorAll('#rows tbody tr')[2].click()")
    layer, head = page.run(
        "[...document.querySelectorAll('#rows tbody tr')[2].cells].slice(0, 2).map(c => c.textContent)"
    )
    assert page.run("document.getElementById('chosen').textContent") == f"Layer {layer}, head {head}"
