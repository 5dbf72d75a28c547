"""Roles of heads: in an audit's findings and page, and between checkpoints."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.browser import Page
from tests.support.embedded_heads import permuted, real
from tests.support.tiny_gpt2 import write_checkpoint
from tests.support.weights import shared
from weightscope.core.files import Files
from weightscope.heads.audit.findings import with_roles
from weightscope.heads.circuits import names
from weightscope.heads.circuits.names import affordable_names, affordable_wiring
from weightscope.report.findings import Finding, Findings, Member


@pytest.mark.check
def test_findings_of_gpt2_call_its_heads_by_their_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ws.open_model(shared("gpt2-attention"))
    audit = ws.audit(model, layers=[4], directions=0)
    assert audit.roles[4, 11] == "feeds keys" and audit.roles[5, 1] == "keys read a head"
    wired = affordable_wiring(model)
    assert wired is not None and np.array_equal(names.head_names(model), wired[1])  # from queries of a few pairs alone
    monkeypatch.setattr(names, "AFFORDABLE", 0)
    assert affordable_names(model) == {}


def test_heads_that_tokens_name_need_no_wiring(two_layers: ws.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    wired = affordable_wiring(two_layers)
    assert wired is not None
    monkeypatch.setattr(names, "wiring_by_keys", None)
    assert np.array_equal(names.head_names(two_layers), wired[1])


def test_a_head_that_stands_out_is_named_where_its_finding_is() -> None:
    members = (Member("head", 2, number=3.0), Member("head", 5, number=4.0), Member("dimension", 5))
    spike = {"kind": "spectral_spike", "map": "qk", "measure": "qk_gap", "number": 4.0, "usual": 1.1, "text": ""}
    several = Finding(layer=1, members=members, **spike)
    single = Finding(layer=4, head=11, members=(Member("head", 11, number=4.0),), **spike)
    findings = with_roles(Findings([several, single]), {(4, 11): "previous token", (1, 5): "induction"})
    assert [finding.where for finding in findings] == ["layer 1 heads 2, 5 (5: induction) qk",
                                                    "layer 4 head 11 (previous token) qk"]  # fmt: skip
    assert [member.name for member in findings[0].members] == ["", "induction", ""]


def test_the_page_names_a_head_that_is_chosen(
    two_layers: ws.Model, tab: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = np.full((2, 8), "", object)
    roles[1, 4] = "previous token"
    monkeypatch.setattr(names, "head_names", lambda model: roles)
    audit = ws.audit(two_layers, directions=0)
    assert audit.roles == {(1, 4): "previous token"}
    audit.write(tmp_path)
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', (tmp_path / "report.html").read_text()).group(1))
    ((place, role), *_) = facts["roles"].items()
    layer, head = map(int, place.split("."))
    tab.open(tmp_path / "report.html", 390)
    tab.run(f"choose({layer}, {head})")
    assert tab.run("document.getElementById('chosen').textContent") == f"Layer {layer}, head {head} ({role})"


def opened(folder: Path, weights: dict[str, np.ndarray]) -> ws.Model:
    return ws.open_model(write_checkpoint(folder, weights, n_head=8))


def test_roles_and_edges_that_moved_are_those_that_were_moved(tmp_path: Path) -> None:
    """The keys of 1.6 are made to read what 0.3 writes, and the heads of layer 1 are permuted."""
    changed, order = dict(real()), [3, 0, 1, 2, 7, 6, 5, 4]
    attention = changed["h.1.attn.c_attn.weight"].copy()
    columns = slice(256 + 32 * 6, 256 + 32 * 7)
    attention[:, columns] = (real()["h.0.attn.c_proj.weight"][32 * 3 : 32 * 4] / real()["h.1.ln_1.weight"]).T
    changed["h.1.attn.c_attn.weight"] = attention
    before, after = opened(tmp_path / "a", real()), opened(tmp_path / "b", permuted(changed, 1, order))
    comparison = ws.compare(before, after)
    assert comparison.circuits is not None
    edges = comparison.circuits.edges
    first = {name: edges[name][0] for name in edges.names}
    assert (first["kind"], first["from_head"], first["to_head"]) == ("k", 3, 6)
    assert first["pk_b"] == pytest.approx(32, rel=1e-3) and first["pk_change"] > 20
    assert {(row_kind, head) for row_kind, head in zip(edges["kind"], edges["to_head"], strict=True)} == {("k", 6)}
    heads = comparison.circuits.roles
    assert (1, 6, "", "keys read a head") in zip(*(heads[name] for name in heads.names), strict=True)
    files = Files()
    comparison.write_files(files)
    assert {"roles.csv", "edges.csv"} <= set(files.contents)


def test_the_same_heads_in_another_order_have_the_same_roles_and_edges(tmp_path: Path) -> None:
    before = opened(tmp_path / "a", real())
    after = opened(tmp_path / "b", permuted(real(), 1, [3, 0, 1, 2, 7, 6, 5, 4]))
    changes = ws.compare(before, after).circuits
    assert changes is not None and len(changes.roles) == len(changes.edges) == 0


def test_a_large_model_s_circuits_are_not_compared(two_layers: ws.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "AFFORDABLE", 0)
    assert ws.compare(two_layers, two_layers).circuits is None
