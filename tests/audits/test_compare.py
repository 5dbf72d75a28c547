"""What moved between checkpoints is told by head, and nothing that changes no score is called a change."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import weightscope as ws
from tests.support.audits import undrawn
from tests.support.browser import Page
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import fixture
from weightscope.cli import main

WIDTH, HEADS = 24, 4  # of the tiny GPT-2; its heads are 6 wide


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> list[Path]:
    """Three checkpoints: head 2 of layer 1 gets louder queries, then head 0 of layer 0 other values too."""
    folder = tmp_path_factory.mktemp("run")
    weights = gpt2_weights()
    paths = [write_checkpoint(folder / "=step 0", weights)]
    weights["h.1.attn.c_attn.weight"][:, 12:18] *= 1.5
    weights["h.1.attn.c_attn.bias"][12:18] *= 1.5
    paths.append(write_checkpoint(folder / "step 1", weights))
    rng = np.random.default_rng(1)
    weights["h.0.attn.c_attn.weight"][:, 48:54] = rng.standard_normal((24, 6)).astype(np.float32)
    paths.append(write_checkpoint(folder / "step 2", weights))
    return paths


def test_the_heads_that_moved_and_how_far(run: list[Path]) -> None:
    found = ws.compare(*map(ws.open_model, run))
    first, last = found.from_first, found.from_previous
    assert first["qk_change"][0, 1, 2] == pytest.approx(0.5, rel=1e-5)
    assert last["qk_change"][1].max() == 0
    assert first["qk_left_angle"][0, 1, 2] < 1e-6  # louder, not turned
    moved = np.argwhere(last["vo_change"][1] > 0).tolist()
    assert moved == [[0, 0]]
    a, b = (ws.open_model(path).layer(0).head(0).vo.dense().astype(np.float64) for path in (run[0], run[2]))
    expected = np.linalg.norm(b - a) / np.linalg.norm(a)
    assert first["vo_change"][1, 0, 0] == pytest.approx(expected, rel=1e-5)
    assert first["vo_left_angle"][1, 0, 0] > 0.5
    assert first["vo_right_angle"][1, 0, 0] < 1e-6
    assert list(zip(found.heads["layer"], found.heads["head"], strict=True))[:2] == [(0, 0), (1, 2)]


def test_a_change_of_basis_within_heads_is_none(run: list[Path], tmp_path) -> None:
    weights = gpt2_weights()
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0].astype(np.float32)
    for part in (0, 1):  # queries and keys of head 3, layer 0
        columns = slice(24 * part + 18, 24 * part + 24)
        weights["h.0.attn.c_attn.weight"][:, columns] @= basis
        weights["h.0.attn.c_attn.bias"][columns] @= basis
    turned = write_checkpoint(tmp_path / "turned", weights)
    found = ws.compare(ws.open_model(run[0]), ws.open_model(turned))
    assert found.from_first["qk_change"].max() < 1e-6


@pytest.fixture(scope="module")
def out(run: list[Path], tmp_path_factory) -> Path:
    """The comparison on disk; the first checkpoint is named by a path that a spreadsheet would take for a formula."""
    folder = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run[0].parent)
        result = CliRunner().invoke(main, ["compare", *(path.name for path in run), "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def test_compare_writes_tables_spectra_figures_and_a_page(out: Path) -> None:
    with (out / "heads.csv").open(newline="") as file:
        heads = list(csv.DictReader(file))
    assert [(row["layer"], row["head"]) for row in heads][:2] == [("0", "0"), ("1", "2")]
    assert float(heads[1]["qk_sigma1_b"]) == pytest.approx(1.5 * float(heads[1]["qk_sigma1_a"]), rel=1e-5)
    with (out / "trajectory.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2 * HEADS
    at = {(row["checkpoint"], row["layer"], row["head"]): row for row in rows}
    assert float(at["step 1", "1", "2"]["qk_change_from_previous"]) == pytest.approx(0.5, rel=1e-5)
    assert float(at["step 2", "1", "2"]["qk_change_from_previous"]) == 0
    with np.load(out / "spectra.npz", allow_pickle=False) as spectra:
        assert spectra["qk_singular_values"].shape == (3, 2, HEADS, WIDTH // HEADS)
    names = {path.name for path in out.iterdir() if path.is_file()}
    figures = {f"{name}.{kind}" for name in ("changes", "spectra", "trajectories") for kind in ("png", "svg")}
    assert names == {"heads.csv", "trajectory.csv", "spectra.npz", "report.html"} | figures


def test_two_checkpoints_leave_no_trajectories_of_three(out: Path, run: list[Path], tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    assert (tmp_path / "trajectories.svg").exists()
    with undrawn():
        assert CliRunner().invoke(main, ["compare", *map(str, run[:2]), "--out", str(tmp_path)]).exit_code == 0
    assert not list(tmp_path.glob("trajectories.*"))
    assert (tmp_path / "trajectory.csv").exists()


def test_the_comparisons_page_loads_in_silence_and_fits(out: Path, tab: Page) -> None:
    for width in (1280, 390):
        tab.open(out / "report.html", width)
        assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []
    assert tab.run("document.querySelectorAll('figure svg').length") == 3


def test_a_label_cannot_become_a_formula(out: Path) -> None:
    cells = [line.split(",")[0] for line in (out / "trajectory.csv").read_text().splitlines()[1:]]
    assert set(cells) == {"'=step 0", "step 1", "step 2"}


def test_checkpoints_of_different_shapes_do_not_compare(run: list[Path], tmp_path) -> None:
    other = write_checkpoint(tmp_path / "deeper", gpt2_weights(n_layers=3))
    with pytest.raises(ws.CheckpointError, match="n_layers"):
        ws.compare(ws.open_model(run[0]), ws.open_model(other))
    result = CliRunner().invoke(main, ["compare", str(run[0]), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "two checkpoints" in result.output


def test_a_comparison_shows_itself(run: list[Path], out: Path) -> None:
    found = ws.compare(*map(ws.open_model, run))
    assert repr(found) == "Comparison(=step 0 -> step 1 -> step 2: 2 layers of 4 heads)"
    assert found.headline in str(found)
    assert "<table" in found._repr_html_()
    assert len(found.plot().axes) == 4
    assert (out / "heads.csv").read_text() == found.heads.csv()


@pytest.mark.parametrize("names", [("modernbert_biases", "bert"), ("bert", "modernbert_biases")])
def test_a_model_that_rotates_is_compared_with_one_that_does_not(names: tuple[str, str], tmp_path: Path) -> None:
    """Distances are measured of both; without a rotation W_QK is the same at all of them."""
    found = ws.compare(*(fixture(name).model for name in names))
    with undrawn():
        found.write(tmp_path)
    with np.load(tmp_path / "spectra.npz") as spectra:
        apart = spectra["qk_singular_values_delta1"] - spectra["qk_singular_values"]  # (2, L, H, r)
    moved = dict(zip(names, np.abs(apart).max(axis=(1, 2, 3)), strict=True))
    assert moved["bert"] < 1e-12 and moved["modernbert_biases"] > 1e-3
