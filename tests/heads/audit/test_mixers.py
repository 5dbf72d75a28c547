"""Heads of layers without a softmax in an audit, against dense matrices and formulas of the tensors by name."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.audit import audit_of, names_in
from tests.support.tiny_models import fixture
from weightscope.heads.audit.mixers import rank_of_random

FILES = {"mixers.csv", "mixers.png", "mixers.svg"}


def effective_rank(w: np.ndarray) -> float:
    s = np.linalg.svd(w, compute_uv=False)
    p = s[s > 1e-12 * s[0]] / s.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def test_the_table_is_that_of_the_dense_matrices() -> None:
    """Nemotron-H's layer 0 is Mamba 2: in_proj has rows of the gate, x, B, C and the step."""
    folder = fixture("nemotron_h").folder
    config = json.loads((folder / "config.json").read_text())
    layer = {
        name.removeprefix("backbone.layers.0."): tensor.astype(np.float64)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    table = ws.audit(folder).of_mixers
    assert table is not None
    heads, width, groups, n = (
        config[key] for key in ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
    )
    rows = layer["mixer.in_proj.weight"] * layer["norm.weight"]
    sizes = [heads * width, heads * width, groups * n, groups * n]
    _, x, b, c, _ = np.split(rows, np.cumsum(sizes))
    out = layer["mixer.out_proj.weight"] * layer["mixer.norm.weight"]
    steps = np.maximum(np.log1p(np.exp(layer["mixer.dt_bias"])), config["time_step_min"])
    assert table["layer"].tolist() == [0] * heads
    assert {*table["kind"]} == {"Mamba 2"}
    np.testing.assert_allclose(table["time_scale"], 1 / (np.exp(layer["mixer.A_log"]) * steps), rtol=1e-5)
    for head in range(heads):
        group, mine = head * groups // heads, slice(head * width, (head + 1) * width)
        shared = slice(group * n, (group + 1) * n)
        for name, w in (("qk", c[shared].T @ b[shared]), ("vo", x[mine].T @ out[:, mine].T)):
            assert table[f"{name}_sigma1"][head] == pytest.approx(np.linalg.norm(w, 2), rel=1e-5)
            assert table[f"{name}_effective_rank"][head] == pytest.approx(effective_rank(w), rel=1e-5)
            values = np.linalg.eigvals(w)
            score = np.maximum(values.real, 0).sum() / np.abs(values).sum()
            assert name == "qk" or table["vo_copying_score"][head] == pytest.approx(score, rel=1e-4)


def test_an_audit_shows_both_kinds_of_heads(tmp_path: Path) -> None:
    for name, where in (("nemotron_h", "Mamba 2 in layer 0"), ("falcon_h1", "Mamba 2 in layers 0-1")):
        result = audit_of(fixture(name).folder, tmp_path / name)
        assert result.exit_code == 0
        assert {*names_in(tmp_path / name)} >= FILES
        assert "tokens, median time scale of the heads without a softmax (" in result.output
        page = (tmp_path / name / "report.html").read_text()
        assert "Heads without a softmax" in page
        assert where in page
        records = ws.audit(fixture(name).folder).as_json()["mixers"]
        assert len(ws.load(tmp_path / name).tables["mixers.csv"]) == len(records) > 0


def test_a_model_with_a_softmax_everywhere_has_no_such_table(tmp_path: Path) -> None:
    audit = ws.audit("embedded", directions=0)
    assert audit.mixers is None and audit.of_mixers is None and "mixers" not in audit.as_json()
    audit.write(tmp_path / "out")
    assert not FILES & {*names_in(tmp_path / "out")}


def changed(folder: Path, to: Path, name: str, tensor: np.ndarray | None) -> Path:
    """A copy of a checkpoint with one tensor replaced, or left out."""
    to.mkdir()
    tensors = load_file(folder / "model.safetensors") | {name: tensor}
    save_file({key: each for key, each in tensors.items() if each is not None}, to / "model.safetensors")
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return to


def test_broken_and_missing_tensors_end_no_audit(tmp_path: Path) -> None:
    folder = fixture("nemotron_h").folder
    rows = load_file(folder / "model.safetensors")["backbone.layers.0.mixer.in_proj.weight"]
    rows[-1] = np.nan  # of a step, which no map has
    rows[0] = np.inf  # of the gate
    table = ws.audit(changed(folder, tmp_path / "step", "backbone.layers.0.mixer.in_proj.weight", rows)).of_mixers
    assert table is not None and np.isfinite(table["qk_sigma1"]).all()
    rows[:] = np.nan
    broken = ws.audit(changed(folder, tmp_path / "nan", "backbone.layers.0.mixer.in_proj.weight", rows)).of_mixers
    assert broken is not None and np.isnan(broken["vo_sigma1"]).all() and np.isfinite(broken["time_scale"]).all()
    without = ws.audit(changed(folder, tmp_path / "without", "backbone.layers.0.mixer.dt_bias", None))
    assert without.of_mixers is None
    assert "layer 0: could not be read: " in without.lead and "no tensor of the role mixer.dt_bias" in without.lead


def test_random_factors_have_the_rank_of_random_matrices() -> None:
    """Every head of the fixtures is random, and their medians are near the control's."""
    table = ws.audit(fixture("falcon_h1").folder).of_mixers
    assert table is not None
    assert np.median(table["qk_effective_rank"] / table["qk_effective_rank_random"]) == pytest.approx(1, abs=0.1)
    rng = np.random.default_rng(1)
    drawn = [effective_rank(rng.standard_normal((300, 24)) @ rng.standard_normal((24, 300))) for _ in range(8)]
    assert rank_of_random(300, 24) == pytest.approx(np.mean(drawn), rel=0.02)


def test_the_page_has_a_row_for_each_layer() -> None:
    mixers = ws.audit(fixture("falcon_h1").folder).mixers
    assert mixers is not None
    table, layers = mixers.table, mixers.by_layer
    assert layers["layer"].tolist() == [0, 1]
    for row, layer in enumerate(layers["layer"]):
        scales = table["time_scale"][table["layer"] == layer]
        assert layers["heads"][row] == len(scales)
        assert [layers[f"time_scale{end}"][row] for end in ("", "_min", "_max")] == [
            np.median(scales), scales.min(), scales.max()
        ]  # fmt: skip


def test_layers_named_for_an_audit_are_the_ones_measured() -> None:
    table = ws.audit(fixture("falcon_h1").folder, layers=[1]).of_mixers
    assert table is not None and {*table["layer"]} == {1}
    assert ws.audit(fixture("nemotron_h").folder, layers=[1]).of_mixers is None


def test_circuits_say_what_they_leave_out() -> None:
    caveats = ws.circuits(fixture("nemotron_h").model).caveats
    assert any("no softmax in layer 0: it reads the stream" in each for each in caveats)
    assert not any("no softmax" in each for each in ws.circuits("embedded").caveats)
