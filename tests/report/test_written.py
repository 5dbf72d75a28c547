"""`ws.load` opens every folder that a command wrote, of this version and of 0.1.0, and nothing else."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.bigram_counts import embedded_counts
from tests.support.figures import undrawn
from tests.support.tiny_models import fixture
from tests.support.two_layers import FOLDER, TWO_LAYERS
from weightscope.core.files import HIDDEN, OutputFolder
from weightscope.core.results import Result, questions
from weightscope.core.tables import Column, Link, Table
from weightscope.heads.detok.kernels import position_kernels
from weightscope.report.written import Written, declared

OLD = Path(__file__).parents[1] / "fixtures" / "written"  # by 0.1.0; make_written.py says how
FINDING = b"""[{"kind": "zero_head", "layer": 0, "head": 7, "map": null, "measure": "x", "number": 1, "usual": null,
"text": "", "members": []}]"""
RESULTS: dict[str, Callable[[Path], Result]] = {  # of the model of two layers with a head that is zero
    "audit": lambda broken: ws.audit(broken, directions=1, all_tensors=True),
    "compare": lambda broken: ws.compare(TWO_LAYERS, broken, all_tensors=True),
    "lineage": lambda broken: ws.lineage(broken, TWO_LAYERS),
    "same": lambda broken: ws.same(TWO_LAYERS, broken),
    "circuits": lambda broken: ws.circuits(broken),
    "detok": lambda broken: ws.bigram_auroc(broken, embedded_counts(), sample=100),
    "positions": lambda broken: position_kernels(fixture("llama").model),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of two layers with a head whose queries are zero."""
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(FOLDER, folder)
    weights = load_file(folder / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    weights[name] = weights[name].copy()
    weights[name][:, :32] = 0
    save_file(weights, folder / "model.safetensors")
    return folder


def agrees(table: Table, stored: Table) -> None:
    """The same names and cells, numbers to six digits."""
    assert stored.names == table.names
    for name in table.names:
        cells, read = table[name], stored[name]
        if cells.dtype.kind == "f":
            assert np.allclose(read.astype(float), cells, rtol=5e-6, atol=0, equal_nan=True), name
        elif cells.dtype.kind in "iub" and len(cells):
            assert read.dtype.kind == cells.dtype.kind and (read == cells).all(), name


@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_is_read_back(kind: str, broken: Path, tmp_path: Path) -> None:
    result = RESULTS[kind](broken)
    with undrawn():
        result.write(tmp_path / "out")
    stored = ws.load(tmp_path / "out")
    assert stored.kind == kind and stored.lead == result.lead and stored.page["title"]
    assert stored.provenance == result.provenance
    for name, content_of in result.TABLES.items():
        content = content_of(result)
        if content is None:
            assert name not in stored.files
        elif name.endswith(".csv"):
            agrees(content, stored.tables[name])
        elif name.endswith(".npz"):
            arrays = stored.arrays(name)
            assert arrays.keys() == content.keys()
            for key, array in content.items():
                assert np.array_equal(arrays[key], array, equal_nan=np.asarray(array).dtype.kind == "f"), key
        else:
            assert stored.json(name) == content
    if findings := getattr(result, "findings", []):
        assert [finding.as_json() for finding in stored.findings] == [finding.as_json() for finding in findings]
        assert repr(stored.findings) == repr(findings)
    assert kind in repr(stored) and (len(stored.heads) if kind not in ("lineage", "same") else True)
    assert "<p>" in stored._repr_html_()


def test_questions_declare_what_they_write_and_load_nothing_for_it() -> None:
    """A file tells one command; one that several write counts only where none of these is there."""
    own = [sign for question in questions() for sign in getattr(question, "SIGNS", {})]
    shared = [sign for question in questions() for sign in getattr(question, "SHARED_SIGNS", {})]
    signs = declared("SIGNS", "SHARED_SIGNS")
    assert len({*own, *shared}) == len(own) + len(shared) and [*signs] == own + shared
    assert {*RESULTS} <= {*signs.values()} and {*declared("HEADS")} <= {*signs.values()}
    code = "import sys, weightscope.report.written as w; w.declared('SIGNS'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"matplotlib", "torch", "scipy", "weightscope.heads.audit.audit"} & {*loaded}


@pytest.mark.parametrize("folder", sorted(OLD.iterdir()), ids=lambda folder: folder.name)
def test_a_folder_of_the_version_before_is_read(folder: Path) -> None:
    stored = ws.load(folder)
    assert stored.kind == folder.name.partition("-")[0].replace("sink", "sinks")
    assert len(stored.tables) and stored.lead == "" and stored.provenance is None and stored.page == {}
    for name in stored.files:
        if name.endswith(".npz") and (folder / name).exists():
            assert stored.arrays(name)
        if name.endswith(".csv"):
            assert stored.tables[name].names and (len(stored.tables[name]) or folder.name == "outliers")


def test_an_audit_of_the_version_before_has_its_numbers_and_findings() -> None:
    stored = ws.load(OLD / "audit")
    assert stored.heads["qk_sigma1"][0] == 0 and (stored.heads["qk_sigma1"][1:] > 0).all()
    spectra = stored.arrays("spectra.npz")["qk_singular_values"]
    assert np.allclose(spectra[..., 0].ravel(), stored.heads["qk_sigma1"], rtol=1e-5)
    (finding,) = stored.findings
    assert finding.kind == "zero_head" and (finding.layer, finding.head) == (0, 0) and finding.severity == "warning"
    assert stored.findings.that_fail(["warning"])


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    shutil.copytree(OLD / "audit", tmp_path / "audit")
    return tmp_path / "audit"


def test_what_no_command_wrote_is_refused(audit: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path, audit / "heads.csv"):
        with pytest.raises(ws.CheckpointError, match="holds no results"):
            ws.load(folder)
    for source in (TWO_LAYERS, FOLDER, FOLDER / "model.safetensors"):
        with pytest.raises(ws.CheckpointError, match="is a checkpoint, not results; `open_model` opens it"):
            ws.load(source)
    shutil.rmtree(audit / HIDDEN)
    with pytest.raises(ws.CheckpointError, match="hidden files included"):
        ws.load(audit)


def test_a_run_that_has_not_ended_is_refused(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    folder.begin()
    folder.text("spectra.npz", "")
    folder.release()
    with pytest.raises(ws.CheckpointError, match="has ended"):
        ws.load(tmp_path / "out")


def rewrite(audit: Path, name: str, content: bytes) -> Written:
    """The audit with other content of a file, listed in its manifest as if a command had written it."""
    with OutputFolder(audit, names=()) as folder:
        for kept in ("heads.csv", "spectra.npz", "findings.json"):
            folder.bytes(kept, content if kept == name else (OLD / "audit" / kept).read_bytes())
    return ws.load(audit)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("heads.csv", b""),
        ("heads.csv", b"layer,head\n0\n"),
        ("heads.csv", b"layer,layer\n0,0\n"),
        ("heads.csv", b"layer\n\xff\n"),
        ("heads.csv", b'layer\n"' + b"1" * 200_000 + b'"\n'),
        ("findings.json", b"[" * 100_000),
        ("findings.json", b"{}{"),
        ("findings.json", b'{"kind": 1}'),
        ("findings.json", b"[1]"),
        ("findings.json", b"null"),
        ("findings.json", b'[{"kind": "zero_head"}]'),
        ("findings.json", FINDING.replace(b"0", b"1e999", 1)),
        ("findings.json", FINDING.replace(b"7", b"1e999", 1)),
        ("spectra.npz", b"PK"),
        ("spectra.npz", (OLD / "audit" / "spectra.npz").read_bytes()[:-30]),
    ],
)
def test_a_damaged_file_is_named(audit: Path, name: str, content: bytes) -> None:
    stored = rewrite(audit, name, content)
    read = {"heads.csv": lambda: stored.heads, "findings.json": lambda: stored.findings}
    with pytest.raises(ws.CheckpointError, match=f"{name}.*is not as weightscope writes it"):
        read.get(name, lambda: stored.arrays(name))()


def test_a_file_that_was_changed_missing_or_never_written_is_refused(audit: Path) -> None:
    stored = ws.load(audit)
    with (audit / "heads.csv").open("a") as file:
        file.write("1,2\n")
    (audit / "spectra.npz").unlink()
    for read in (lambda: stored.heads, lambda: stored.arrays("spectra.npz")):
        with pytest.raises(ws.CheckpointError, match="is missing, or was changed"):
            read()
    with pytest.raises(ws.CheckpointError, match="no such file was written"):
        stored.json("../secret.json")


def test_a_kind_of_finding_of_another_version_is_refused(audit: Path) -> None:
    entries = json.loads((audit / "findings.json").read_text())
    stored = rewrite(audit, "findings.json", json.dumps([entries[0] | {"kind": "from_the_future"}]).encode())
    with pytest.raises(ws.CheckpointError, match="'from_the_future', which this version does not know"):
        stored.findings  # noqa: B018


def test_arrays_and_files_past_the_limit_are_refused(audit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = ws.load(audit)
    for name, limit in (("LARGEST", 100), ("LARGEST_ARRAYS", 100)):
        monkeypatch.setattr(f"weightscope.report.written.{name}", limit)
    with pytest.raises(ws.CheckpointError, match="has more than 100 bytes"):
        stored.heads  # noqa: B018
    with pytest.raises(ws.CheckpointError, match="bytes of arrays; at most 100"):
        stored.arrays("spectra.npz")


def test_cells_are_read_as_they_were(tmp_path: Path) -> None:
    table = Table(
        [
            Column("head", [0, -1, 2]),
            Column("size", [1e-30, np.nan, -np.inf]),
            Column("token", ["=1+1", "'quoted", "1_000"]),
            Column("link", [Link("a.html", "a"), "nan", ""]),
            Column("tied", [True, False, True]),
        ]
    )
    with OutputFolder(tmp_path) as folder:
        folder.table("heads.csv", table)
        folder.text("spectra.npz", "")
    stored = ws.load(tmp_path).heads
    assert [stored[name].tolist() for name in ("head", "token", "link", "tied")] == [
        [0, -1, 2], ["=1+1", "'quoted", "1_000"], ["a", "nan", ""], [True, False, True],
    ]  # fmt: skip
    assert np.array_equal(stored["size"], table["size"], equal_nan=True)
