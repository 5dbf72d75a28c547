"""AUROC of a sample of tokens: the values equal the full computation, and the intervals hold."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.bigram_counts import embedded_counts
from tests.support.commands import run, run_undrawn
from tests.support.tiny_models import fixture
from tests.support.two_layers import TWO_LAYERS
from weightscope.heads.detok import heads
from weightscope.heads.detok.first_layer import FirstLayer
from weightscope.heads.detok.heads import BigramAuroc, Stratified, seconds_of_all

DRAWS = 300


@pytest.fixture(scope="module")
def exact(two_layers: ws.Model) -> BigramAuroc:
    return ws.bigram_auroc(two_layers)


@pytest.mark.check
def test_values_are_those_of_the_whole_and_means_say_how_sure_they_are(
    two_layers: ws.Model, exact: BigramAuroc
) -> None:
    result = ws.bigram_auroc(two_layers, sample=400)
    drawn = np.flatnonzero(~np.isnan(result.auroc[0]))
    assert result.sample is not None and drawn.tolist() == result.sample.items.tolist() and len(drawn) == 400
    # Some kernels round a score by how many rows are scored together: a near tie may fall to the other side.
    np.testing.assert_allclose(result.auroc[:, drawn], exact.auroc[:, drawn], atol=1e-4)
    table = result.heads
    assert table["tokens_scored"].tolist() == [400] * 8
    assert (table["auroc_low"] < table["auroc"]).all() and (table["auroc"] < table["auroc_high"]).all()
    assert (np.abs(table["auroc"] - exact.heads["auroc"]) < 2 * (table["auroc_high"] - table["auroc_low"])).all()
    scored = exact.heads["tokens_scored"][0]
    np.testing.assert_allclose(table["auroc_paper"], table["auroc"] * scored / exact.auroc.shape[1])
    assert f"estimates from 400 current tokens of the {scored:,}" in result.lead
    assert "auroc_low" not in [column.name for column in exact.heads.columns]


def test_intervals_cover_each_head_s_exact_value_95_times_in_100(two_layers: ws.Model, exact: BigramAuroc) -> None:
    counts = embedded_counts().matrix(two_layers.embeddings.n_tokens)
    scored = np.flatnonzero(np.diff(counts.indptr))
    often = np.asarray(counts.sum(axis=1)).ravel()[scored]
    all_tokens, hits = exact.heads["auroc"], np.zeros(8)
    for seed in range(DRAWS):
        sample = Stratified.draw(scored, often, 400, seed)
        low, high = np.transpose([sample.mean(of_head)[1:] for of_head in exact.auroc[:, sample.items]])
        hits += (low <= all_tokens) & (all_tokens <= high)
    assert (hits / DRAWS > 0.91).all() and (hits / DRAWS < 0.985).all()  # three standard errors on either side
    assert hits.mean() / DRAWS == pytest.approx(0.95, abs=0.02)


def test_queries_of_chosen_tokens_are_rows_of_all_where_a_norm_is_in_between() -> None:
    first = FirstLayer(fixture("qwen3").model)
    tokens = np.array([3, 1, 17])
    np.testing.assert_allclose(first.query_rows(1, tokens), first.query_factor(1)[tokens], rtol=1e-5)


def test_the_command_takes_a_sample_and_refuses_one_that_is_too_small(tmp_path: Path) -> None:
    result = run_undrawn("detok", TWO_LAYERS, "--sample", "150", "--out", tmp_path / "out")
    assert result.exit_code == 0 and "95 % from" in result.output
    assert "150 of 8,000 tokens were drawn" in (tmp_path / "out" / "report.html").read_text()
    result = run("detok", TWO_LAYERS, "--sample", "9", "--out", tmp_path / "none")
    assert result.exit_code == 2 and "a sample of 9 is too small" in result.stderr
    assert not (tmp_path / "none").exists()


def test_long_runs_are_told_beforehand_and_short_ones_are_not(
    two_layers: ws.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, counts = FirstLayer(two_layers), embedded_counts()
    assert seconds_of_all(first, counts) == 0
    monkeypatch.setattr(heads, "SURELY_SHORT", 0)
    assert 0 < seconds_of_all(first, counts) < 100
    monkeypatch.setattr(heads, "products_a_second", lambda r: 8 * 6656 * 8000 * 32 / 1000)

    def measured(*_: object) -> None:
        raise ws.CheckpointError("enough")

    monkeypatch.setattr(heads, "measure_heads", measured)
    result = run("detok", TWO_LAYERS, "--out", tmp_path / "out")
    assert "the full vocabulary takes about 25 minutes on this machine; --sample 2000 estimates" in result.stderr
