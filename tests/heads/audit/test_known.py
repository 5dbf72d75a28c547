"""Baselines and accepted findings: what is known stays, is marked, and fails no gate; what is new or worse fails."""

import csv
import json
import math
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import run_undrawn
from tests.support.figures import undrawn
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.two_layers import TWO_LAYERS
from weightscope.heads.audit.known_findings import (
    LARGEST,
    MOST_ALIKE,
    MOST_CELLS,
    MOST_ROWS,
    Entry,
    read_entries,
    with_known,
)
from weightscope.report.findings import Finding, Findings, Member


def write(folder: Path, *dead: int) -> Path:
    """A checkpoint with heads of layer 0 that write nothing."""
    weights = gpt2_weights()
    for head in dead:
        weights["h.0.attn.c_proj.weight"][6 * head : 6 * head + 6] = 0
    return write_checkpoint(folder, weights)


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A checkpoint with a dead head, its audit, and the same with another one dead."""
    folder = tmp_path_factory.mktemp("work")
    write(folder / "one", 1)
    write(folder / "two", 1, 2)
    assert run_undrawn("audit", folder / "one", "--out", folder / "earlier", "--fail-on", "warning").exit_code == 3
    return folder


@pytest.mark.parametrize(("name", "status"), [("one", 0), ("two", 3)])
def test_only_what_the_baseline_does_not_have_fails(work: Path, tmp_path: Path, name: str, status: int) -> None:
    gate = ("--baseline", work / "earlier", "--fail-on", "warning")
    result = run_undrawn("audit", work / name, "--out", tmp_path, *gate)
    assert result.exit_code == status, result.output
    known = [
        finding["known"]
        for finding in json.loads((tmp_path / "findings.json").read_text())
        if finding["kind"] == "zero_head"
    ]
    assert known == [["in the baseline"], [""]][status == 3]
    page = (tmp_path / "report.html").read_text()
    assert ('<small class="known">in the baseline</small>' in page) is (status == 0)
    assert (
        run_undrawn("audit", work / name, "--out", tmp_path, *gate, "--resume").exit_code == status
    )  # from what is kept


def test_rows_copied_from_findings_csv_are_accepted_and_an_entry_too_many_is_named(work: Path, tmp_path: Path) -> None:
    with (work / "earlier" / "findings.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "zero_head"]
    gone = dict.fromkeys(rows[0], "") | {"kind": "rank_collapsed", "layer": "3"}
    with (tmp_path / "accept.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows([*rows, gone])
    result = run_undrawn(
        "audit", work / "one", "--out", tmp_path / "o", "--accept", tmp_path / "accept.csv", "--fail-on=warning"
    )
    assert result.exit_code == 0, result.output
    assert "1 entry matches no finding (rank_collapsed layer 3)" in result.output.replace("\n", " ")
    audit = ws.audit(ws.open_model(work / "one"), accept=tmp_path / "accept.csv", directions=0)
    assert [finding.known for finding in audit.findings if finding.kind == "zero_head"] == ["accepted"]
    assert not audit.findings.that_fail(["warning"]) and "known" in audit.findings.headline
    assert audit.summary()["known"] == 1 and any("matches no finding" in note for note in audit.notes)


def test_a_short_file_says_where_and_why_and_an_empty_cell_is_any(work: Path, tmp_path: Path) -> None:
    (tmp_path / "accept.csv").write_text("kind,layer,reason\nzero_head,0,pruned on purpose\n")
    audit = ws.audit(ws.open_model(work / "two"), accept=tmp_path / "accept.csv", directions=0)
    assert [finding.known for finding in audit.findings if finding.kind == "zero_head"] == [
        "accepted: pruned on purpose"
    ]


@pytest.mark.parametrize(("number", "known"), [(7.9, True), (7.5, True), (5.0, False), (12.0, True)])
def test_what_is_worse_by_more_than_a_tenth_is_not_known(tmp_path: Path, number: float, known: bool) -> None:
    """The rank of a collapsed head was 7.9 where 50 is usual: lower is worse."""

    def finding(number: float) -> Finding:
        return Finding(kind="rank_collapsed", layer=3, head=1, map="qk", measure="rank", number=number, usual=50.0,
                       text="", members=(Member("head", 1, number=number),))  # fmt: skip

    (tmp_path / "earlier.json").write_text(json.dumps(Findings([finding(7.9)]).as_json()))
    (tmp_path / "earlier.csv").write_text(Findings([finding(7.9)]).table.csv())
    for name in ("earlier.json", "earlier.csv"):
        (marked,), left = with_known(Findings([finding(number)]), read_entries(tmp_path / name, "accepted"))
        assert bool(marked.known) is known and not left and ("Worse than it was" in marked.text) is not known


def test_an_entry_of_another_measure_covers_nothing(tmp_path: Path) -> None:
    """An unknown measure is no licence: the entry applies to no finding, and is named as one that does not."""
    finding = Finding(kind="rank_collapsed", text="", measure="rank", number=7.9, usual=50.0)
    for measure, known in (("rank", True), ("", True), ("anything", False)):
        path = tmp_path / "accept.csv"
        path.write_text(f"kind,measure,number,usual\nrank_collapsed,{measure},7.9,50\n")
        (marked,), left = with_known(Findings([finding]), read_entries(path, "accepted"))
        assert bool(marked.known) is known and bool(left) is not known and not marked.text


def test_the_findings_of_an_audit_are_all_in_it_as_its_own_baseline(tmp_path: Path) -> None:
    audit = ws.audit(ws.open_model(TWO_LAYERS), directions=0, all_tensors=True)
    assert audit.findings
    with undrawn():
        audit.write(tmp_path)
    again = ws.audit(ws.open_model(TWO_LAYERS), directions=0, all_tensors=True, baseline=tmp_path)
    assert {finding.known for finding in again.findings} == {"in the baseline"} and not again.findings.that_fail(
        ["note"]
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("kind,layer\nzero_heads,1\n", "kind 'zero_heads'; it is one of .*did you mean 'zero_head'"),
        ("layer,head\n1,2\n", "column kind; kind and any of"), ("kind,place\nzero_head,1\n", "column place"),
        ("kind\nzero_head,1\n", "line 2 has more cells"), ("", "column"), ('{"findings": 3}', "a list of findings"),
        ('[{"kind": "zero_head", "members": 3}]', "members are expected"), ("[" * 100_000, "findings"),
        ("\x00\xff", "findings"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_list_of_findings_is_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "accept").write_bytes(content.encode("latin-1"))
    with pytest.raises(ws.CheckpointError, match=said):
        ws.audit(ws.open_model(TWO_LAYERS), accept=tmp_path / "accept")


def known(entry: dict[str, object], number: float = 8.0, usual: float | None = None) -> bool:
    """Whether an entry of a list covers a finding of a collapsed rank."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "accept.json"
        path.write_text(json.dumps([{"kind": "rank_collapsed", **entry}]))
        entries = read_entries(path, "accepted")
    finding = Finding(kind="rank_collapsed", text="", measure="rank", number=number, usual=usual)
    return bool(with_known(Findings([finding]), entries)[0][0].known)


@pytest.mark.parametrize("name", ["number", "usual"])
@pytest.mark.parametrize("value", ["nan", "abc", "0,5", "--", [3], {"a": 1}])
def test_a_number_that_is_none_is_refused(name: str, value: object) -> None:
    with pytest.raises(ws.CheckpointError, match=f"kind 'rank_collapsed' with the {name} '.*'; a number was expected"):
        known({name: value})


def test_infinity_covers_only_what_is_infinite() -> None:
    assert known({"number": "inf"}, number=math.inf) and not known({"number": 10**400}, number=8.0)
    assert not known({"number": "-inf"}, number=8.0)
    assert known({"number": 7.9, "usual": "inf"}, number=7.9, usual=50.0)
    assert not known({"number": 7.9, "usual": "inf"}, number=5.0, usual=50.0)
    assert known({"number": 7.9, "usual": "inf"}, number=7.9, usual=math.inf)


TOO_LONG = {
    "rows": (lambda: "kind\n" + "zero_head\n" * (MOST_ROWS + 1), f"has more than {MOST_ROWS} findings"),
    "members": (lambda: '[{"kind": "zero_head", "members": [' + "{}," * MOST_ROWS + "{}]}]", f"{MOST_ROWS} findings"),
    "objects": (lambda: "[" + "{}," * 2 * MOST_ROWS + "{}]", f"more than {2 * MOST_ROWS} '{{'"),
    "lists": (lambda: "[" + "[]," * 2 * MOST_ROWS + "[]]", f"more than {2 * MOST_ROWS} '\\['"),
    "cells": (lambda: "kind" + "," * (MOST_CELLS + 1), f"more than {MOST_CELLS} ','"),
    "bytes": (lambda: "\0" * (LARGEST + 1), "bytes; no more are read"),
    "alike": (lambda: "kind,number\n" + "".join(f"zero_head,{i}\n" for i in range(MOST_ALIKE + 1)), "the same thing"),
}


@pytest.mark.parametrize("what", TOO_LONG)
def test_a_list_that_would_take_long_is_refused(what: str, tmp_path: Path) -> None:
    content, message = TOO_LONG[what]
    (tmp_path / "accept").write_text(content())
    with pytest.raises(ws.CheckpointError, match=message):
        read_entries(tmp_path / "accept", "accepted")


def test_a_baseline_is_as_an_audit_wrote_it(work: Path, tmp_path: Path) -> None:
    """Not a file that somebody put into a folder, nor one that was changed since."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "findings.csv").write_text("kind\nzero_head\n")
    shutil.copytree(work / "earlier", tmp_path / "changed")
    with (tmp_path / "changed" / "findings.csv").open("a") as file:
        file.write(",,not_finite" + "," * 11 + "\n")
    for name in ("planted", "changed"):
        result = run_undrawn("audit", work / "one", "--out", tmp_path / "out", "--baseline", tmp_path / name)
        assert result.exit_code == 2, result.output
        assert result.stderr == (
            "weightscope: findings.csv: does not match .weightscope/manifest.json; copy the whole "
            "folder of an audit, or give a list of your own as --accept\n"
        )


def test_a_list_takes_the_baseline_of_each_from_the_folder_of_its_name(work: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"{work / 'one'}\n")
    assert run_undrawn("audit", tmp_path / "list.txt", "--out", tmp_path / "a", "--fail-on", "warning").exit_code == 3
    gate = ("--baseline", tmp_path / "a", "--fail-on", "warning")
    assert run_undrawn("audit", tmp_path / "list.txt", "--out", tmp_path / "b", *gate).exit_code == 0
    (tmp_path / "more.txt").write_text(f"{work / 'one'}\n{work / 'two'}\n")
    result = run_undrawn("audit", tmp_path / "more.txt", "--out", tmp_path / "c", *gate)
    assert result.exit_code == 3 and "two: " in result.stderr.splitlines()[-1]
    assert "one folder" in run_undrawn("audit", tmp_path / "list.txt", "--out", tmp_path / "a", *gate).stderr
    assert np.sum([path.name == "report.html" for path in (tmp_path / "c").glob("*/*")]) == 2


def test_a_vocabulary_of_rows_is_looked_up_and_not_searched() -> None:
    """Each of 8,000 rows has its own entry: comparing all with all would take 64 million looks."""
    members = tuple(Member("token", i, number=1.0) for i in range(8_000))
    finding = Finding(kind="undertrained_rows", measure="token_norm", number=1.0, usual=5.0, text="", members=members)
    entries = [Entry({"kind": finding.kind, "item": "token", "index": str(i)}, "accepted") for i in range(7_999)]
    (marked,), left = with_known(Findings([finding]), entries)
    assert not marked.known and not left
    (marked,), left = with_known(
        Findings([finding]), [*entries, Entry({"kind": finding.kind, "index": "7999"}, "seen")]
    )
    assert marked.known and not left
