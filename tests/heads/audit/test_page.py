"""The page of an audit in a browser: it loads without errors, shows a clicked head, fits a phone, escapes names."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from markupsafe import escape

import weightscope as ws
from tests.support.browser import Page
from tests.support.commands import run
from tests.support.figures import undrawn, unsaved
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.two_layers import TWO_LAYERS
from weightscope.heads.audit import figures

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
    result = run("audit", folder, "--out", out)
    assert result.exit_code == 0, result.output
    return out / "report.html"


def test_the_page_is_one_file_that_asks_for_nothing(page_file: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    assert not re.search(
        r"src\s*=|@import|url\(|fetch\(|XMLHttpRequest", text.replace(escape(HOSTILE), ""), re.IGNORECASE
    )
    links = re.findall(r'href\s*=\s*"([^",]*)', text)
    figures = {f"{name}.{kind}" for name in ("heads", "spectra", "depth") for kind in ("png", "svg")}
    tables = {"heads.csv", "findings.csv", "percentiles.csv", "spectra.csv", "data:text/csv;charset=utf-8"}
    assert set(links) == figures | tables | {"#spectra"}  # of the chosen head, made when it is asked for
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', text, re.DOTALL).group(1))
    assert np.shape(facts["spectra"]["qk_singular_values"]) == (4, 6, 8)


def test_of_a_large_model_the_spectra_of_one_head_in_so_many_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = ws.audit(TWO_LAYERS, directions=0).measured  # 2 layers of 8 heads
    monkeypatch.setattr(figures, "MOST_CURVES", 6)
    drawn = figures.spectra(heads).axes[0]
    assert drawn.get_title() == "one head in 3" and len(drawn.lines) == 6
    tenth = heads.arrays["qk_singular_values"][1, 1]  # heads 0, 3, 6, 9 = 8 + 1 ...
    np.testing.assert_array_equal(drawn.lines[3].get_ydata(), tenth / tenth[0])


def test_findings_stand_before_everything_else(page_file: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    assert text.index('id="findings"') < text.index('id="heads"') < text.index('id="table"')
    assert text.index('id="not_finite"') < text.index('id="spectral_spike"')
    assert "Read the tensor again from its source" in text


def test_the_verdict_and_five_numbers_stand_first(tab: Page, tmp_path: Path) -> None:
    audit = ws.audit(TWO_LAYERS, directions=0)
    with unsaved():
        audit.write(tmp_path)
    tab.open(tmp_path / "report.html", 390)
    assert tab.run("document.querySelector('h1').textContent") == audit.findings.verdict
    read = "[...document.querySelectorAll('.numbers li')].map(e => [e.querySelector('b').textContent, e.textContent])"
    shown = dict(tab.run(read))
    qk, bound = (np.nanmax(audit.heads[name]) for name in ("qk_sigma1", "qk_logit_bound"))
    assert [*shown] == ["16", f"{qk:.3g}", f"{bound:.3g}", "0", "none"]
    assert "largest bound on a logit" in shown[f"{bound:.3g}"] and "massive activation" in shown["none"]
    tops = "['.numbers', '#deeds', '#findings', '#heads', 'footer ul'].map(e => document.querySelector(e).offsetTop)"
    assert tab.run(tops) == sorted(tab.run(tops))
    assert audit.coverage and "Attention only" in tab.run("document.querySelector('footer').textContent")
    assert "Attention only" not in tab.run("document.querySelector('header').textContent")
    assert tab.run("document.querySelector('#findings').textContent.includes('`')") is False
    assert tab.complaints == []


def test_numbers_that_were_not_computed_are_left_out() -> None:
    audit = ws.audit(TWO_LAYERS, directions=0, sinks=False)
    assert [number.meaning.split()[0] for number in audit.numbers] == ["heads", "largest", "largest"]
    assert any("not asked for" in remark for remark in audit.remarks)
    lines = str(audit).splitlines()
    assert lines[0] == audit.findings.headline and lines[-1] == " ".join(audit.remarks)


def test_a_map_of_zeros_is_not_drawn(page_file: Path, tmp_path: Path) -> None:
    weights = gpt2_weights(n_layers=2, d=48, vocab=60)
    for layer in range(2):
        weights[f"h.{layer}.attn.c_attn.bias"][:] = 0
        weights[f"h.{layer}.ln_1.bias"][:] = 0
    audit = ws.audit(write_checkpoint(tmp_path / "unbiased", weights, n_head=6), directions=0)
    with undrawn():
        audit.write(tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert not audit.heads["vo_bias_norm"].any() and "not drawn: qk_bias_norm, vo_bias_norm" in page
    assert 'data-measure="vo_bias_norm"' not in page and 'data-measure="vo_bias_norm"' in page_file.read_text()


def test_a_click_on_what_heads_do_and_on_a_findings_picture_shows_the_head(tab: Page, page_file: Path) -> None:
    tab.open(page_file, 1280)
    assert "has a finding" in tab.run("document.querySelector('#deeds ul').textContent")
    for picture in ("#deeds canvas", "#spectral_spike .picture canvas"):
        tab.run(f"choose(0, 0); document.querySelector('{picture}').scrollIntoView({{block: 'center'}})")
        box = tab.run(
            f"(r => [r.x, r.y, r.width, r.height])(document.querySelector('{picture}').getBoundingClientRect())"
        )
        tab.click(box[0] + box[2] * (4 + 0.5) / 6, box[1] + box[3] * (3 + 0.5) / 4)
        assert tab.run("document.getElementById('chosen').textContent") == "Layer 3, head 4"
    assert tab.complaints == []


def test_the_maps_that_show_a_finding_stand_first_and_name_it(page_file: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    maps = re.findall(r'<figure>\s*<figcaption>(.*?)</figcaption>.*?data-measure="(\w+)"', text, re.DOTALL)
    shows = ["shows:" in caption for caption, _ in maps]
    assert any(shows) and shows == sorted(shows, reverse=True)
    captions = {name: caption for caption, name in maps}
    assert "spectral spike (layer 1 head 1" in captions["qk_gap"] and "shows:" not in captions["vo_bias_norm"]
    assert text.index('id="findings"') < text.index("shows:") < text.index("Figures and their numbers")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_the_page_loads_in_silence_and_fits(width: int, dark: bool, tab: Page, page_file: Path) -> None:
    tab.open(page_file, width, dark=dark)
    assert tab.run("document.querySelectorAll('#maps canvas').length") == len(
        tab.run("facts.measures.map(m => m.name)")
    )
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []
    assert tab.requests == [page_file.resolve().as_uri()]
    light = sum(map(int, re.findall(r"\d+", tab.run("getComputedStyle(document.body).backgroundColor"))[:3]))
    assert (light < 200) == dark


def test_names_from_a_checkpoint_stay_text(tab: Page, page_file: Path) -> None:
    tab.open(page_file, 1280)
    assert tab.run("document.querySelector('header .lead').textContent") == f"The heads of {HOSTILE}"
    assert tab.run("document.images.length") == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_a_click_on_a_map_shows_that_heads_spectra(width: int, tab: Page, page_file: Path) -> None:
    tab.open(page_file, width)
    tab.run("document.querySelector('canvas[data-measure=vo_sigma1]').scrollIntoView({block: 'center'})")
    rectangle = "document.querySelector('canvas[data-measure=vo_sigma1]').getBoundingClientRect()"
    box = tab.run(f"(r => [r.x, r.y, r.width, r.height])({rectangle})")
    tab.click(box[0] + box[2] * (4 + 0.5) / 6, box[1] + box[3] * (3 + 0.5) / 4)
    assert tab.run("document.getElementById('chosen').textContent") == "Layer 3, head 4"
    assert tab.run("document.querySelectorAll('#spectra svg').length") == 2
    points = tab.run("document.querySelector('#spectra .line').getAttribute('d').split('L').length")
    assert points == 8
    assert tab.run("document.getElementById('measures').textContent.includes('qk_sigma1')")
    assert tab.complaints == []


def test_a_finding_leads_to_its_head_and_a_head_to_its_findings(tab: Page, page_file: Path) -> None:
    tab.open(page_file, 1280)
    tab.run("document.querySelector('#spectral_spike button.where').click()")
    assert tab.run("document.getElementById('chosen').textContent") == "Layer 1, head 1"
    assert "times the second" in tab.run("document.getElementById('remarks').textContent")


def test_a_head_that_is_not_finite_has_no_spectrum_and_breaks_nothing(tab: Page, page_file: Path) -> None:
    tab.open(page_file, 1280)
    tab.run("choose(2, 1, false)")
    assert "no finite singular value" in tab.run("document.getElementById('spectra').textContent")
    assert tab.complaints == []


def test_a_head_of_zeros_has_no_curve_and_breaks_nothing(tab: Page, tmp_path: Path) -> None:
    weights = gpt2_weights(n_layers=2, d=48, vocab=60)
    weights["h.1.attn.c_attn.weight"][:, :8] = 0  # queries of head 0
    weights["h.1.attn.c_attn.bias"][:8] = 0
    audit = ws.audit(write_checkpoint(tmp_path / "zeros", weights, n_head=6), directions=0)
    with undrawn():
        audit.write(tmp_path / "out")
    tab.open(tmp_path / "out" / "report.html", 1280, fragment="L1H0")
    assert tab.run("document.querySelectorAll('#spectra path').length") > 0
    assert tab.complaints == []


def test_a_number_stands_beside_those_of_other_checkpoints(tab: Page, page_file: Path) -> None:
    tab.open(page_file, 1280)
    tab.run("choose(0, 2, false)")
    row = "[...document.querySelectorAll('#measures tbody tr')].find(row => row.cells[0].textContent === 'vo_sigma1')"
    short, words = tab.run(f"(cell => [cell.textContent, cell.title])({row}.cells[2])")
    assert short and re.fullmatch(
        r"(higher than \d+% of the heads|(higher|lower) than every head) of \d+ other checkpoints?", words
    )
    column = tab.run("facts.measures.findIndex(measure => measure.name === 'vo_sigma1')") + 2
    in_table = f"document.querySelector('#rows tr[data-at=\"0.2\"]').cells[{column}].title"
    assert tab.run(in_table) == words
    assert tab.complaints == []


def test_arrow_keys_on_the_maps_go_from_head_to_head(tab: Page, page_file: Path) -> None:
    tab.open(page_file, 1280)
    tab.run("choose(0, 4); document.getElementById('maps').focus()")
    chosen = "document.getElementById('chosen').textContent"
    frame = "(s => [s.left, s.top].map(parseFloat))(document.querySelector('#maps .frame').style)"
    for key, layer, head in (
        ("ArrowRight", 0, 5), ("ArrowRight", 0, 5), ("ArrowDown", 1, 5), ("ArrowLeft", 1, 4), ("ArrowUp", 0, 4)
    ):  # fmt: skip
        tab.press(key)
        assert tab.run(chosen) == f"Layer {layer}, head {head}"
        assert tab.run(frame) == pytest.approx([100 * head / 6, 100 * layer / 4], abs=1e-3)
    assert tab.run("document.activeElement.id") == "maps"
    assert tab.complaints == []


def test_an_address_that_names_a_head_survives_a_reload(tab: Page, page_file: Path) -> None:
    chosen, address = "document.getElementById('chosen').textContent", "location.hash"
    tab.open(page_file, 1280)
    at_first = tab.run(chosen)
    assert tab.run(address) == ""
    tab.run("document.querySelectorAll('#rows tbody tr')[0].click()")
    assert tab.run(address) == "#L0H0"
    tab.open(page_file, 1280, fragment="L3H4")
    assert tab.run(chosen) == "Layer 3, head 4"
    tab.run("document.getElementById('maps').focus()")
    tab.press("ArrowLeft")
    assert tab.run(address) == "#L3H3"
    tab.open(page_file, 1280, fragment="L3H3")
    assert tab.run(chosen) == "Layer 3, head 3"
    tab.run("location.hash = '#L1H2'")
    tab.settle()
    assert tab.run(chosen) == "Layer 1, head 2"
    for nowhere in ("L4H0", "L0H6", "findings", "L0H1x"):
        tab.open(page_file, 1280, fragment=nowhere)
        assert tab.run(chosen) == at_first
    assert tab.complaints == []


def test_the_table_is_scrolled_by_keyboard_and_the_focus_is_seen(tab: Page, page_file: Path) -> None:
    tab.open(page_file, 390)
    tab.settle()
    tab.run("document.querySelector('#table .wide').focus()")
    tab.press("ArrowRight")
    tab.run("new Promise(scrolled => document.activeElement.addEventListener('scrollend', scrolled))")
    assert tab.run("document.activeElement.scrollLeft") > 0
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert tab.run("document.activeElement.getAttribute('aria-label')") == "Table of every head"


def test_the_table_sorts_both_ways_and_a_row_shows_its_head(tab: Page, page_file: Path) -> None:
    tab.open(page_file, 1280)
    column = tab.run("[...document.querySelectorAll('#rows th')].findIndex(th => th.textContent === 'qk_sigma1')")

    def cells() -> list[float | None]:
        texts = tab.run(f"[...document.querySelectorAll('#rows tbody tr')].map(r => r.cells[{column}].textContent)")
        return [float(text) if text else None for text in texts]

    for order in (True, False):
        tab.run(f"document.querySelectorAll('#rows th button')[{column}].click()")
        values = cells()
        assert values[-1] is None  # the head that is not finite
        assert values[:-1] == sorted(values[:-1], reverse=order)
    tab.run("document.querySelectorAll('#rows tbody tr')[2].click()")
    layer, head = tab.run(
        "[...document.querySelectorAll('#rows tbody tr')[2].cells].slice(0, 2).map(c => c.textContent)"
    )
    assert tab.run("document.getElementById('chosen').textContent") == f"Layer {layer}, head {head}"


def test_findings_of_whole_layers_have_a_picture_by_layer(tab: Page, tmp_path: Path) -> None:
    weights = gpt2_weights(n_layers=8, d=48, vocab=60)
    weights["h.3.attn.c_attn.weight"][:, :96] *= 4  # queries and keys
    weights["h.5.ln_1.weight"][7] = 40
    audit = ws.audit(write_checkpoint(tmp_path / "scaled", weights, n_head=6), directions=0)
    with undrawn():
        audit.write(tmp_path / "out")
    (off,) = (finding for finding in audit.findings if finding.kind == "layer_off_trend")
    assert off.whole_layers == {3: off.number}
    for width in (1280, 390):
        tab.open(tmp_path / "out" / "report.html", width)
        for kind, measure in (("layer_off_trend", off.measure), ("outlier_dimension", "norm_gain")):
            texts = tab.run(
                f"[...document.querySelectorAll('#{kind} .picture')]"
                ".map(p => [p.querySelector('.title').textContent, p.querySelectorAll('.dots').length])"
            )
            assert measure in dict(texts), texts
            assert dict(texts)[measure] == (1 if kind == "layer_off_trend" else 2)  # the rest of a gain is not known
        assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []
