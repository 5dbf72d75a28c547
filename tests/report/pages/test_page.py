"""The page stands alone and shows names as text, whatever is in them."""

import json
import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from matplotlib.image import imread

from tests.support.browser import Page
from weightscope.core.files import Folder
from weightscope.core.formulas import coded, prose
from weightscope.core.tables import Table, templates
from weightscope.report.pages.page import Figure, Filed, Section, Terms, write_page
from weightscope.report.pages.style import Drawing, in_our_style, save, subplots

HOSTILE = '<script>alert("x")</script>\x1b[2J'


@pytest.fixture
def page(tmp_path: Path) -> str:
    table = Table.of_rows(("head", HOSTILE), [(0, HOSTILE), (np.int64(1), np.float64("nan")), (2, 0.123456)], HOSTILE)
    figure = Figure(Drawing('<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"></svg>'), HOSTILE)
    write_page(Folder(tmp_path), "report.html", HOSTILE, HOSTILE, [Section(HOSTILE, HOSTILE, [table, figure])])
    return (tmp_path / "report.html").read_text()


def test_names_are_escaped(page: str) -> None:
    assert page.count("<script>") == 1  # the page's own
    assert (
        page.count("&lt;script&gt;") == 11
    )  # title, heading, lead; section, text; header, cell, caption twice; figure, its description
    assert "\x1b" not in page


def test_nothing_is_fetched(page: str) -> None:
    assert re.findall(r'(?:src|href)\s*=\s*["\']?([^"\']{9})', page) == ["data:text"]  # the table's CSV
    assert "default-src 'none'" in page
    assert "<?xml" not in page


def test_numbers_sort_as_numbers_and_nan_is_empty(page: str) -> None:
    assert '<td class="number" data-value="0.123456' in page and ">0.1235</td>" in page
    assert '<td class="number" data-value="nan"></td>' in page


@pytest.mark.smoke
def test_columns_sort_both_ways_with_empty_cells_last(tab: Page, tmp_path: Path) -> None:
    rows = [("b", 10.0), ("", 9.0), ("a", float("nan")), ("c", -1.5)]
    write_page(Folder(tmp_path), "report.html", "", "", [Section("", "", [Table.of_rows(("name", "number"), rows)])])
    tab.open(tmp_path / "report.html", 1280)
    button = "document.querySelectorAll('th button')[{}]"

    def cells(column: int) -> list[str]:
        return tab.run(f"[...document.querySelectorAll('tbody tr')].map(row => row.cells[{column}].textContent)")

    tab.run(button.format(1) + ".click()")
    assert cells(1) == ["-1.5", "9", "10", ""]
    tab.run(button.format(1) + ".focus()")
    tab.press("Enter")
    assert cells(1) == ["10", "9", "-1.5", ""]
    assert tab.run("document.querySelectorAll('th')[1].getAttribute('aria-sort')") == "descending"
    for expected in (["a", "b", "c", ""], ["c", "b", "a", ""]):
        tab.run(button.format(0) + ".click()")
        assert cells(0) == expected
    assert tab.run("document.querySelectorAll('th[aria-sort]').length") == 1
    assert tab.complaints == []
    assert tab.requests == [(tmp_path / "report.html").as_uri()]


def test_a_long_table_shows_one_layer_when_asked(tab: Page, tmp_path: Path) -> None:
    long, short = ([(layer, f"layer {layer} o") for layer in layers] for layers in ([*range(12), 3], [0, 1]))
    tables = [Table.of_rows(("layer", "matrix"), rows) for rows in (long, short)]
    write_page(Folder(tmp_path), "report.html", "", "", [Section("", "", tables)])
    tab.open(tmp_path / "report.html", 390)
    assert tab.run("document.querySelectorAll('select').length") == 1
    seen = "[...document.querySelectorAll('table')[0].tBodies[0].rows].filter(row => row.checkVisibility())"
    tab.run("document.querySelector('select').value = 'L3'")
    tab.run("document.querySelector('select').dispatchEvent(new Event('change'))")
    assert tab.run(f"{seen}.map(row => row.cells[1].textContent)") == ["layer 3 o"] * 2
    tab.run("document.querySelector('select').selectedIndex = 0")
    tab.run("document.querySelector('select').dispatchEvent(new Event('change'))")
    assert tab.run(f"{seen}.length") == 13
    tab.run("document.querySelectorAll('th button')[1].click()")
    assert tab.run(f"{seen}.map(row => row.cells[1].textContent)") == [f"layer {n} o" for n in sorted([*range(12), 3])]


def test_a_lead_goes_on_after_its_heading(tmp_path: Path) -> None:
    numbers = Section("", parts=[Terms([("0.5", "largest $x_i$ of `A`")], large=True)])
    for lead, shown in (("b is a$b: `c` & d.", "<code>c</code> &amp; d."), ("b is a$bc.", "b is a$bc.")):
        write_page(Folder(tmp_path), "report.html", "b is a$b", lead, [numbers])
        page = (tmp_path / "report.html").read_text()
        assert f'<h1>b is a$b</h1><p class="lead">{shown}</p>' in page
        assert json.loads((tmp_path / "report.json").read_text())["lead"] == lead
    assert "<dt>0.5</dt>" in page and "<code>A</code></dd>" in page and "<h2>" not in page


def test_text_between_backticks_is_code_unless_it_is_a_token() -> None:
    text = "Run `compare --all` (`same` too), $x$ or `a`; tokens '`', 'b' and '`'."
    assert coded(text) == (
        "Run <code>compare --all</code> (<code>same</code> too), $x$ or <code>a</code>; "
        "tokens &#39;`&#39;, &#39;b&#39; and &#39;`&#39;."
    )
    assert str(prose(text)).count("<code>") == 3 and "<math>" in prose(text)


def test_a_table_is_a_click_from_its_csv(tab: Page, tmp_path: Path) -> None:
    table = Table.of_rows(("token", "n"), [("a,b", 1), ('=1+"', 2), ("%20 #é", 3)])
    write_page(Folder(tmp_path), "report.html", "", "", [Section("", "", [table, Filed(table, "all of it.csv")])])
    tab.open(tmp_path / "report.html", 1280)
    links = tab.run("[...document.querySelectorAll('figure a')].map(a => a.href)")
    assert unquote(links[0].removeprefix("data:text/csv;charset=utf-8,")) == table.csv()
    assert links[1] == (tmp_path / "all of it.csv").as_uri()


@pytest.mark.parametrize(
    "columns, width, wider", [(3, 1280, False), (3, 390, False), (40, 1280, True), (12, 390, True)]
)
def test_wide_tables_say_so_and_scroll_by_keyboard(
    tab: Page, tmp_path: Path, columns: int, width: int, wider: bool
) -> None:
    table = Table.of_rows([f"column {i}" for i in range(columns)], [range(columns)], "Rows of $x_i$.")
    write_page(Folder(tmp_path), "report.html", "", "", [Section("", "", [table])])
    tab.open(tmp_path / "report.html", width)
    tab.settle()
    region = "document.querySelector('.wide[role=group]')"
    assert tab.run(f"{region}.getAttribute('aria-label')") == "Table: Rows of x_i. It scrolls sideways."
    assert tab.run("document.querySelector('.hint').checkVisibility()") is wider
    assert tab.run("document.documentElement.scrollWidth") <= width
    tab.run(f"{region}.focus()")
    for _ in range(3):
        tab.press("ArrowRight")
    scrolled = f"new Promise(done => setTimeout(() => done({region}.scrollLeft > 0), 300))"
    assert tab.run(scrolled) is wider


def test_data_in_a_page_cannot_end_its_script_element() -> None:
    data = {"tokens": ["</script><script>alert(1)</script>", "<!--", "]]>", "\u2028", "'\"&"], "none": None}
    written = templates().from_string("{{ data | tojson }}").render(data=data)
    assert not set(written) & set("<>&'\u2028")
    assert json.loads(written) == data
    with pytest.raises(ValueError, match="not JSON compliant"):
        templates().from_string("{{ data | tojson }}").render(data=float("nan"))


@pytest.mark.parametrize(("dark", "light_share"), [(False, (0.8, 1)), (True, (0, 0.1))])
def test_a_figure_is_as_light_or_dark_as_the_page(
    dark: bool, light_share: tuple[float, float], tab: Page, tmp_path: Path
) -> None:
    with in_our_style():
        figure, axis = subplots(figsize=(3, 2))
        axis.plot([0, 1])
    files = Folder(tmp_path)
    write_page(files, "report.html", "", "", [Section("", "", [Figure(save(figure, files, "line"), "")])])
    tab.open(tmp_path / "report.html", 390, dark=dark)
    tab.screenshot(tmp_path / "page.png")
    left, top, width, height = tab.run(
        "(({x, y, width, height}) => [x, y, width, height].map(Math.floor))"
        "(document.querySelector('.drawing svg').getBoundingClientRect())"
    )
    pixels = imread(tmp_path / "page.png")[top : top + height, left : left + width, :3]
    assert light_share[0] <= (pixels.mean(axis=-1) > 0.9).mean() <= light_share[1]
    tab.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert tab.run("getComputedStyle(document.querySelector('.drawing svg')).filter") == "none"
    tab.call("Emulation.setEmulatedMedia", media="")
