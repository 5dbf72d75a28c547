"""A page of thousands of heads stays small: what a browser has to read and to lay out is bounded."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.browser import Page
from tests.support.figures import unsaved
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.heads.circuits import page as circuits_page

pytestmark = pytest.mark.check

LAYERS, HEADS = 16, 64  # a quarter of a 70B's heads
BYTES, NODES = 3_000_000, 6_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ws.Model:
    weights = gpt2_weights(n_layers=LAYERS, d=2 * HEADS, vocab=40)
    return ws.open_model(write_checkpoint(tmp_path_factory.mktemp("large"), weights, n_head=HEADS))


def test_the_audit_of_a_thousand_heads_is_bounded(model: ws.Model, tab: Page, tmp_path: Path) -> None:
    audit = ws.audit(model, directions=0)
    for name, values in audit.measured.arrays.items():  # as long as a large model's
        if "singular_values" in name:
            audit.measured.arrays[name] = np.repeat(values[..., :1], 128, axis=2) * np.exp(-np.arange(128) / 20)
    with unsaved():
        audit.write(tmp_path)
    page = tmp_path / "report.html"
    assert page.stat().st_size < BYTES
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    assert facts["places"]["qk_singular_values"][:: len(facts["places"]["qk_singular_values"]) - 1] == [0, 127]
    tab.open(page, 1280)
    assert tab.run("document.querySelectorAll('*').length") < NODES
    assert tab.complaints == []


def test_the_circuits_of_a_thousand_heads_are_bounded(
    model: ws.Model, tab: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    circuits = ws.circuits(model)
    circuits.roles.names[:] = "previous token"  # the most that could be listed
    with unsaved():
        circuits.write(tmp_path)
    page = tmp_path / "report.html"
    assert page.stat().st_size < BYTES
    tab.open(page, 1280)
    dots = 2 * LAYERS * HEADS  # each with its title
    assert tab.run("document.querySelectorAll('*').length") < NODES + dots
    assert tab.run("document.querySelectorAll('#names button').length") == circuits_page.ROWS
    assert tab.complaints == []
