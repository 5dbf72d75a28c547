"""What results show in a notebook: a sentence, a picture, tables, and nothing of a file is obeyed."""

from base64 import b64encode
from html import unescape
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.two_layers import TWO_LAYERS
from weightscope.core.results import notebook
from weightscope.report.findings import Findings

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def model() -> Any:
    return ws.open_model(TWO_LAYERS)


@pytest.fixture(scope="module", params=["head", "factored", "circuits"])
def pictured(model: Any, request: pytest.FixtureRequest) -> Any:
    """What a picture says more of than its table."""
    head = model.layer(0).head(6)
    shown = {"head": lambda: head, "factored": lambda: head.qk, "circuits": lambda: ws.circuits(model)}
    return shown[request.param]()


def test_notebook_shows_the_picture_above_the_table(pictured: Any) -> None:
    picture, html = pictured._repr_png_(), pictured._repr_html_()
    assert picture.startswith(PNG) and len(picture) < 200_000
    assert f"base64,{b64encode(picture).decode()}" in html
    assert html.index("<img") < html.index("<table")


def test_a_row_of_a_head_has_the_numbers_of_its_matrices(model: Any) -> None:
    head = model.layer(0).head(6)
    html = head._repr_html_()
    for w in (head.qk, head.vo):
        s = np.linalg.svd(w.dense(), compute_uv=False)
        for number in (s[0], s[1], np.linalg.norm(w.dense()), (s**2).sum() / s[0] ** 2):
            assert f">{number:.4g}</td>" in html


def test_a_matrix_of_rank_one_has_no_second_singular_value() -> None:
    factored = ws.Factored(np.ones((3, 1)), np.ones((3, 1)))
    assert ">3</td>" in factored._repr_html_() and factored._repr_png_().startswith(PNG)


def test_head_shows_its_caveats(model: Any) -> None:
    head = model.layer(0).head(6)
    assert head.lead == "Head(layer 0, head 6: width 256, head_dim 32). Scores are W_QK's times 0.177."
    object.__setattr__(head.layer, "caveats", ("a softcap",))
    try:
        assert "Not in these numbers: a softcap." in head._repr_html_()
    finally:
        object.__setattr__(head.layer, "caveats", ())


def test_position_terms_show_their_trends_and_draw_fig_3(model: Any) -> None:
    terms = ws.first_layer(model).positions()
    assert unescape(terms._repr_html_()).startswith(f"<p>{terms.lead}</p>") and "<table" in terms._repr_html_()
    assert terms.plot()._suptitle.get_text().startswith(f"head {terms.nearest_head()}: ")
    assert terms.plot(6)._suptitle.get_text().startswith("head 6")


def test_previous_tokens_are_asked_for_by_name_or_id(model: Any) -> None:
    first = ws.first_layer(model)
    table = first.neighbours("ibility", top=3, heads=[6])
    assert table["joined"].tolist() == [" responsibility", " insensibility", " whibility"]
    ids = table["token_id"].tolist()
    assert first.neighbours(*ids, top=1)["head"].tolist() == 3 * [*range(8)]
    with pytest.raises(ws.CheckpointError, match="is not one token"):
        first.neighbours("no such token")


def test_names_are_escaped_in_notebooks() -> None:
    assert notebook("<script>\x1b[31m $x$") == "<p>&lt;script&gt;\\x1b[31m $x$</p>\n"
    assert Findings()._repr_html_() == "<p>no findings</p>\n"
