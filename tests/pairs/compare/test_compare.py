"""A comparison reports what moved by head, and does not count what changes no score."""

import csv
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.browser import Page
from tests.support.embedded_heads import of_heads, permuted, real
from tests.support.figures import undrawn
from tests.support.small_llama import write_small_llama
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import fixture
from weightscope.cli import main
from weightscope.core.files import REPORT
from weightscope.pairs.compare import figures
from weightscope.pairs.compare.compare import Comparison

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


def test_moved_heads_come_first_with_their_sizes(run: list[Path]) -> None:
    comparison = ws.compare(*map(ws.open_model, run))
    first, last = comparison.from_first, comparison.from_previous
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
    assert list(zip(comparison.heads["layer"], comparison.heads["head"], strict=True))[:2] == [(0, 0), (1, 2)]


def test_change_of_basis_within_heads_moves_no_head(run: list[Path], tmp_path) -> None:
    weights = gpt2_weights()
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0].astype(np.float32)
    for part in (0, 1):  # queries and keys of head 3, layer 0
        columns = slice(24 * part + 18, 24 * part + 24)
        weights["h.0.attn.c_attn.weight"][:, columns] @= basis
        weights["h.0.attn.c_attn.bias"][columns] @= basis
    turned = write_checkpoint(tmp_path / "turned", weights)
    comparison = ws.compare(ws.open_model(run[0]), ws.open_model(turned))
    assert comparison.from_first["qk_change"].max() < 1e-6


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
    places = {(row["checkpoint"], row["layer"], row["head"]): row for row in rows}
    assert float(places["step 1", "1", "2"]["qk_change_from_previous"]) == pytest.approx(0.5, rel=1e-5)
    assert float(places["step 2", "1", "2"]["qk_change_from_previous"]) == 0
    with np.load(out / "spectra.npz", allow_pickle=False) as spectra:
        assert spectra["qk_singular_values"].shape == (3, 2, HEADS, WIDTH // HEADS)
    names = {path.name for path in out.iterdir() if path.is_file()}
    figures = {
        f"{name}.{kind}" for name in ("changes", "spectra", "trajectories") for kind in ("png", "svg", "figure.csv")
    }
    tables = {"findings.csv", "heads.csv", "trajectory.csv", "roles.csv", "edges.csv"}
    assert names == tables | {"findings.json", "spectra.npz", *REPORT} | figures


def test_comparison_of_two_removes_old_trajectories(out: Path, run: list[Path], tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    assert (tmp_path / "trajectories.svg").exists()
    with undrawn():
        assert CliRunner().invoke(main, ["compare", *map(str, run[:2]), "--out", str(tmp_path)]).exit_code == 0
    assert not list(tmp_path.glob("trajectories.*"))
    assert (tmp_path / "trajectory.csv").exists()


def test_a_switch_shows_what_did_not_change(tab: Page, tmp_path: Path) -> None:
    weights = gpt2_weights(n_layers=3)
    changed = weights | {"h.1.attn.c_proj.weight": weights["h.1.attn.c_proj.weight"] * np.float32(1.1)}
    pair = [write_checkpoint(tmp_path / name, each) for name, each in (("a", weights), ("b", changed))]
    comparison = ws.compare(*pair, all_tensors=True)
    with undrawn():
        comparison.write(tmp_path / "out")
    tab.open(tmp_path / "out" / "report.html", 1280)
    rows = "[...document.querySelectorAll('{} tbody tr')].filter(row => row.checkVisibility())"
    seen = rows + ".map(row => row.cells[0].textContent)"
    heads, tensors = (seen.format(f'figure:has([href="{name}.csv"])') for name in ("heads", "tensors"))
    assert set(tab.run(heads)) == {"1"} and tab.run(tensors) == ["h.1.attn.c_proj.weight"]
    tab.run("document.querySelectorAll('.only-changed input').forEach(input => input.click())")
    n_heads = comparison.measured[0].n_heads
    assert sorted(tab.run(heads)) == [layer for layer in "012" for _ in range(n_heads)]
    assert len(tab.run(tensors)) == min(len(comparison.everything.changes), 1 + 40)
    tab.run("document.querySelectorAll('figure:has(.only-changed) th button').forEach(button => button.click())")
    tab.run("document.querySelectorAll('.only-changed input').forEach(input => input.click())")
    assert set(tab.run(heads)) == {"1"}
    assert tab.complaints == []


def test_page_loads_without_errors_and_fits_a_phone(out: Path, tab: Page) -> None:
    for width in (1280, 390):
        tab.open(out / "report.html", width)
        assert tab.run("document.documentElement.scrollWidth") <= width
        columns = "[...document.querySelectorAll('table')].map(table => table.parentElement.scrollWidth)"
        drawn = "[...document.querySelectorAll('.drawing')].map(own => own.scrollWidth - own.clientWidth)"
        assert tab.run(drawn) == [0, 0, 0]  # figures are whole on a phone, and not shrunk: they are drawn for it
        assert width < 1280 or max(tab.run(columns)) <= tab.run("document.querySelector('main').clientWidth")
    assert tab.complaints == []
    assert tab.run("document.querySelectorAll('figure svg').length") == 3


def test_label_cannot_become_a_formula(out: Path) -> None:
    cells = [line.split(",")[0] for line in (out / "trajectory.csv").read_text().splitlines()[1:]]
    assert set(cells) == {"'=step 0", "step 1", "step 2"}


def test_checkpoints_of_different_shapes_are_refused(run: list[Path], tmp_path) -> None:
    deeper = write_checkpoint(tmp_path / "deeper", gpt2_weights(n_layers=3))
    with pytest.raises(ws.CheckpointError, match="have 2 and 3 layers; "):
        ws.compare(ws.open_model(run[0]), ws.open_model(deeper))
    result = CliRunner().invoke(main, ["compare", str(run[0]), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "two checkpoints" in result.output


def test_comparison_has_repr_text_html_and_plot(run: list[Path], out: Path) -> None:
    comparison = ws.compare(*map(ws.open_model, run))
    assert repr(comparison) == "Comparison(=step 0 -> step 1 -> step 2: 2 layers of 4 heads)"
    assert comparison.headline in str(comparison)
    assert "<table" in comparison._repr_html_()
    assert len(comparison.plot().axes) == 3  # two maps and one colour bar
    assert (out / "heads.csv").read_text() == comparison.heads.csv()


@pytest.mark.parametrize("names", [("modernbert_biases", "bert"), ("bert", "modernbert_biases")])
def test_a_model_that_rotates_is_compared_with_one_that_does_not(names: tuple[str, str], tmp_path: Path) -> None:
    """Distances are measured of both; without a rotation W_QK is the same at all of them."""
    comparison = ws.compare(*(fixture(name).model for name in names), across_families=True)
    with undrawn():
        comparison.write(tmp_path)
    with np.load(tmp_path / "spectra.npz") as spectra:
        apart = spectra["qk_singular_values_delta1"] - spectra["qk_singular_values"]  # (2, L, H, r)
    moved = dict(zip(names, np.abs(apart).max(axis=(1, 2, 3)), strict=True))
    assert moved["bert"] < 1e-12 and moved["modernbert_biases"] > 1e-3


def gauged(weights: dict[str, np.ndarray], layer: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The same functions: W_Q R and W_K R^-T in every head of a layer, and so for values and outputs."""
    turned = {name: values.astype(np.float64) for name, values in weights.items()}
    stem = f"h.{layer}.attn."
    for head in range(8):
        turns, stretch = np.linalg.qr(rng.standard_normal((32, 32)))[0], np.exp(rng.uniform(-1, 1, 32))
        query, value = turns * stretch, turns / stretch
        for part, gauge in ((0, query), (1, np.linalg.inv(query).T), (2, value)):
            columns = of_heads(part, [head])
            turned[f"{stem}c_attn.weight"][:, columns] @= gauge
            turned[f"{stem}c_attn.bias"][columns] @= gauge
        rows = of_heads(0, [head])
        turned[f"{stem}c_proj.weight"][rows] = np.linalg.inv(value) @ turned[f"{stem}c_proj.weight"][rows]
    return {name: values.astype(np.float32) for name, values in turned.items()}


def compared(before: dict[str, np.ndarray], *after: dict[str, np.ndarray], n_head: int = 8) -> Comparison:
    with TemporaryDirectory() as folder:
        paths = [
            write_checkpoint(Path(folder) / str(step), weights, n_head=n_head)
            for step, weights in enumerate((before, *after))
        ]
        return ws.compare(*map(ws.open_model, paths))


@settings(max_examples=3, deadline=None)
@given(order=st.permutations(range(8)), seed=st.integers(0, 1000))
def test_the_same_heads_in_another_order_and_another_basis_have_not_moved(order, seed) -> None:
    turned = gauged(permuted(real(), 1, order), 1, np.random.default_rng(seed))
    comparison = compared(real(), turned)
    assert max(values.max() for name, values in comparison.from_first.items() if "change" in name) < 1e-5
    assert comparison.unmoved.all() and len(comparison.moved_most(10)) == 0
    assert "each computes the same. No head moved." in comparison.lead
    assert comparison.order[-1].tolist() == [list(range(8)), np.argsort(order).tolist()]
    places = [h for h in range(8) if order[h] != h]
    if places:
        (finding,) = comparison.findings
        assert (finding.kind, finding.layer, list(finding.items)) == ("permuted_heads", 1, places)
    else:
        assert not comparison.findings
    here, there = (comparison.measured[k].grid("vo_copying_score") for k in (0, 1))
    np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-4)  # measures are of the same heads


def test_moved_head_among_permuted_ones_is_compared_with_itself() -> None:
    """One head gets other values, then all are permuted; a later step keeps the order and changes another head."""
    moved = {name: values.copy() for name, values in real().items()}
    stem = "h.0.attn.c_attn."
    moved[f"{stem}weight"][:, of_heads(2, [3])] *= 1.5
    order = [1, 2, 3, 4, 5, 6, 7, 0]
    later = {name: values.copy() for name, values in moved.items()}
    later[f"{stem}weight"][:, of_heads(2, [5])] *= 3
    comparison = compared(real(), permuted(moved, 0, order), permuted(later, 0, order))
    assert comparison.order[:, 0].tolist() == [np.argsort(order).tolist()] * 2
    assert comparison.from_first["vo_change"][:, 0, 3] == pytest.approx([0.5, 0.5], rel=1e-5)
    assert comparison.from_previous["vo_change"][1, 0, 5] == pytest.approx(2, rel=1e-5)
    assert (comparison.unmoved == [[h not in {3, 5} for h in range(8)], [True] * 8]).all()
    by_kind = {finding.kind: finding for finding in comparison.findings}
    assert by_kind["permuted_heads"].items == (0, 1, 2, 4, 6, 7)
    assert by_kind["unmoved_layers"].items == (1,)
    assert "head_b" in comparison.heads


@settings(max_examples=4, deadline=None)
@given(
    factors=st.lists(st.floats(0.25, 8), min_size=2, max_size=3),
    layer=st.integers(0, 1),
    head=st.integers(0, 7),
    order=st.permutations(range(8)),
)
def test_the_bound_on_logits_grows_by_what_queries_were_multiplied_with(factors, layer, head, order) -> None:
    """Queries and their bias grow by a factor each step, in one head; the last step also permutes the heads."""
    steps = [real()]
    for factor in factors:
        weights = {name: values.copy() for name, values in steps[-1].items()}
        for kind in ("weight", "bias"):
            weights[f"h.{layer}.attn.c_attn.{kind}"][..., of_heads(0, [head])] *= np.float32(factor)
        steps.append(weights)
    trajectory = compared(*steps[:-1], permuted(steps[-1], layer, order)).trajectory
    growth = trajectory["qk_logit_bound_growth"].reshape(len(steps), 2, 8)  # (checkpoints, layers, heads)
    expected = np.ones(growth.shape)
    expected[1:, layer, head] = factors
    np.testing.assert_allclose(growth, expected, rtol=2e-3)
    bounds = trajectory["qk_logit_bound"].reshape(growth.shape)
    np.testing.assert_allclose(bounds[-1], bounds[0] * growth.prod(axis=0), rtol=1e-6)
    labels = trajectory["checkpoint"].reshape(growth.shape)
    assert [len({*step.ravel()}) for step in labels] == [1] * len(steps)


def test_permuted_key_value_groups_are_found_with_their_queries(tmp_path: Path) -> None:
    llama = fixture("llama")
    weights, config = load_file(llama.folder / "model.safetensors"), llama.model.config
    shared = config.n_heads // config.n_kv_heads
    order = np.roll(np.arange(config.n_heads), shared)  # whole groups, one on
    groups = np.roll(np.arange(config.n_kv_heads), 1)
    for name, heads, axis in (("q", order, 0), ("k", groups, 0), ("v", groups, 0), ("o", order, 1)):
        rows = np.concatenate([np.arange(config.head_dim * h, config.head_dim * (h + 1)) for h in heads])
        for stored in (f"model.layers.1.self_attn.{name}_proj.{kind}" for kind in ("weight", "bias")):
            if stored in weights and (weights[stored].ndim > axis):
                weights[stored] = np.ascontiguousarray(np.take(weights[stored], rows, axis=axis))
    shutil.copy(llama.folder / "config.json", tmp_path)
    save_file(weights, tmp_path / "model.safetensors")
    comparison = ws.compare(llama.model, ws.open_model(tmp_path))
    assert comparison.order[-1, 1].tolist() == np.argsort(order).tolist()
    assert comparison.unmoved.all() and [finding.kind for finding in comparison.findings] == ["permuted_heads"]
    assert "qk_change_delta1" in comparison.heads  # under rotation a head is looked at a distance on as well


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_head_that_is_not_finite_has_an_unknown_change(which: int, broken: float) -> None:
    both = [gpt2_weights(), gpt2_weights()]
    both[which]["h.1.attn.c_attn.weight"][3, 2 * WIDTH + 7] = broken  # a value of head 1
    comparison = compared(*both, n_head=HEADS)
    assert not np.isfinite(comparison.from_first["vo_change"][0, 1, 1])
    assert comparison.from_first["qk_change"].max() == 0 and comparison.from_first["vo_change"][0, 0].max() == 0
    first = comparison.findings[0]
    assert (first.kind, first.severity, first.layer, first.head, first.map) == ("not_finite", "error", 1, 1, "vo")
    assert f"head 1 of {which}" in first.text and first.text in str(comparison)
    assert "not finite in 1 head" in comparison.headline and "changed by 0" not in str(comparison)
    assert not comparison.unmoved[1, 1] and np.isnan(comparison.largest_change())
    assert (comparison.heads["layer"][0], comparison.heads["head"][0]) == (1, 1)  # stands first
    assert comparison.heads.csv().splitlines()[1].startswith("1,1,1,0,")


def test_nan_that_reaches_no_number_is_still_a_finding() -> None:
    broken = gpt2_weights()
    broken["h.1.attn.c_proj.bias"][3] = np.nan
    (finding,) = compared(gpt2_weights(), broken, n_head=HEADS).findings
    assert (finding.kind, finding.severity, finding.layer) == ("not_finite", "error", None)
    assert "h.1.attn.c_proj.bias of 1" in finding.text


def test_zero_head_that_becomes_nan_has_an_unknown_change() -> None:
    zero, broken = gpt2_weights(), gpt2_weights()
    for weights, value in ((zero, 0.0), (broken, np.nan)):
        weights["h.0.attn.c_proj.weight"][:6] = value
    assert np.isnan(compared(zero, broken, n_head=HEADS).from_first["vo_change"][0, 0, 0])


def test_findings_name_outstanding_heads() -> None:
    """Every head of 11 layers moves a little; one much farther, one becomes zero, and one bias alone moves."""
    before, after = (gpt2_weights(n_layers=12) for _ in range(2))
    rng = np.random.default_rng(0)
    for i in range(1, 12):
        weights = after[f"h.{i}.attn.c_attn.weight"]
        weights *= (1 + 0.01 * rng.standard_normal(weights.shape)).astype(np.float32)
    after["h.4.attn.c_attn.weight"][:, 6:12] *= 3
    after["h.6.attn.c_proj.weight"][12:18] = 0
    after["h.0.attn.c_attn.bias"][2 * WIDTH : 2 * WIDTH + 6] *= 2
    comparison = compared(before, after, n_head=HEADS)
    heads = {(finding.kind, finding.layer, finding.head, finding.map) for finding in comparison.findings}
    assert {("moved_most", 4, 1, "qk"), ("zero_head", 6, 2, "vo")} <= heads
    assert not comparison.unmoved[0, 0] and comparison.unmoved[0, 1:].all()
    assert comparison.from_first["vo_bias_change"][0, 0, 0] > 0.1 and comparison.from_first["vo_change"][0, 0, 0] == 0
    assert "3 of 48 heads did not move." in comparison.headline
    assert len(comparison.moved_most(100)) == 45


def test_different_families_compare_only_when_asked(tmp_path: Path) -> None:
    llama, qwen2 = (fixture(name) for name in ("llama", "qwen2"))
    with pytest.raises(ws.CheckpointError, match="`across_families`"):
        ws.compare(llama.model, qwen2.model)
    arguments = ["compare", str(llama.folder), str(qwen2.folder), "--out", str(tmp_path)]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2 and "--across-families" in refused.stderr and refused.stderr.count("\n") == 1
    with undrawn():
        assert CliRunner().invoke(main, [*arguments, "--across-families"]).exit_code == 0
    (finding,) = (
        row for row in csv.DictReader((tmp_path / "findings.csv").open()) if row["kind"] == "different_families"
    )
    assert finding["severity"] == "warning"


def test_unmoved_heads_are_drawn_and_listed_as_unmoved(run: list[Path]) -> None:
    """White where a head did not move; only those that did are among the heads that moved most."""
    comparison = ws.compare(*map(ws.open_model, run[:2]))
    assert [tuple(row[:2]) for row in comparison.moved_most(10).rows()] == [(1, 2)]
    (image, _) = (axis.images[0] for axis in comparison.plot().axes[:2])
    shown = image.cmap(image.norm(image.get_array()))  # (L, H, 4)
    white = (shown == 1).all(axis=-1)
    assert (white == comparison.unmoved).all() and white.sum() == 7


def test_figures_have_no_scale_where_no_head_moved(run: list[Path], tmp_path: Path) -> None:
    """Nor is a head shown as one that moved most; the figures are there all the same."""
    model = ws.open_model(run[0])
    same = ws.compare(model, model)
    assert len(figures.changes(same).axes) == 2  # and no colour bar
    assert len(figures.changes(ws.compare(model, ws.open_model(run[-1]))).axes) == 3
    with undrawn():
        same.write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "No head moved." in page and "moved most" not in page
    assert {path.suffix for path in tmp_path.glob("changes.*")} >= {".png", ".svg"}


def test_figures_draw_differences_and_say_where_there_is_none(run: list[Path]) -> None:
    """Queries half as loud again: every singular value of W_QK grows by 50 %, and W_VO did not move."""
    comparison = ws.compare(*map(ws.open_model, run[:2]))
    qk, vo = figures.spectra_before_and_after(comparison).axes
    assert qk.get_title().startswith("layer 1 head 2") and "%" in qk.get_ylabel()
    np.testing.assert_allclose(qk.get_lines()[-1].get_ydata(), 50, rtol=1e-3)
    assert [text.get_text() for text in vo.texts] == ["did not move"]
    _, empty, *_ = figures.changes(comparison).axes
    assert [text.get_text() for text in empty.texts] == ["no head moved"]


@pytest.mark.parametrize(("later", "scale"), [(1, "linear"), (2, "symlog")])
def test_all_panels_of_a_comparison_have_one_scale(later: int, scale: str, run: list[Path]) -> None:
    """The second step has singular values that more than doubled: on a linear scale the others would not show."""
    comparison = ws.compare(ws.open_model(run[0]), ws.open_model(run[later]))
    maps = [axis.images[0] for axis in figures.changes(comparison).axes if axis.images]
    largest = max(comparison.from_first[f"{name}_change"].max() for name in figures.MAPS)
    assert [image.get_clim()[1] for image in maps] == pytest.approx([largest] * 2)
    panels = figures.spectra_before_and_after(comparison).axes
    assert len(panels) == 2 * later and len({panel.get_ylim() for panel in panels}) == 1
    assert {panel.get_yscale() for panel in panels} == {scale}


def test_slow_rotary_pairs_in_another_order_are_a_move(tmp_path: Path) -> None:
    """Heads are equal at distances 0 and 1, and not at those where the pairs have turned."""
    folder = write_small_llama(tmp_path / "before", layers=2)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_theta": 1e8, "rope_type": "default"}
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1e8, "rope_parameters": rope}))
    shutil.copytree(folder, tmp_path / "after")
    weights = load_file(folder / "model.safetensors")
    order = [0, 1, 2, 3, 4, 5, 7, 6, 8, 9, 10, 11, 12, 13, 15, 14]  # the last two of eight pairs
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight"))]:
        weights[name] = np.ascontiguousarray(weights[name].reshape(-1, 16, 64)[:, order].reshape(weights[name].shape))
    save_file(weights, tmp_path / "after" / "model.safetensors")
    comparison = ws.compare(folder, tmp_path / "after")
    assert comparison.largest_change() > 1e-3 and not comparison.unmoved.any()
    assert (
        "Heads are equal for near tokens alone" in comparison.lead and "W_QK moved at long distances" in comparison.lead
    )
