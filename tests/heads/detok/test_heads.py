"""`ws.bigram_auroc`: a model and counts in, Table 2 out, in every form that a user may want."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from sklearn.metrics import roc_auc_score

import weightscope as ws
from analyses.recipes import detok_tables
from tests.support.bigram_counts import embedded_counts
from tests.support.slow import mostly_checked
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import fixture
from tests.support.two_layers import FOLDER, TWO_LAYERS
from tests.support.weights import shared
from weightscope.heads.detok.first_layer import FirstLayer, ranked
from weightscope.heads.detok.heads import BigramAuroc, roc_curves
from weightscope.model.metrics.auroc import weighted_auroc
from weightscope.model.text.counts import Counts
from weightscope.model.text.tokenizer import Tokenizer

VOCAB = 50


@pytest.fixture
def counts() -> Counts:
    """Token t follows t + 1 and, twice as often, t + 2; the last ten follow none."""
    n = VOCAB - 10
    indices = np.stack([np.arange(n) + 1, np.arange(n) + 2], axis=1).ravel()
    indptr = np.minimum(2 * np.arange(VOCAB + 1), 2 * n)
    return Counts(indptr, indices, np.tile([1, 2], n), "made up", ("made up",), 1, 1000)


@pytest.fixture(scope="module")
def embedded_auroc(two_layers: ws.Model) -> BigramAuroc:
    return ws.bigram_auroc(two_layers)


def test_every_value_is_the_auroc_of_t_ee(tiny_gpt2: Path, counts: Counts) -> None:
    model = ws.open_model(tiny_gpt2)
    result = ws.bigram_auroc(model, counts)
    assert result.auroc.shape == (4, VOCAB)
    first = FirstLayer(model)
    for token in (0, 17, 39):
        scores, (previous, weights) = first.token_scores(token), counts.row(token)
        expected = [weighted_auroc(row, previous, weights) for row in scores]
        np.testing.assert_allclose(result.auroc[:, token], expected, atol=1e-6)
    assert np.isnan(result.auroc[:, 40:]).all()
    heads = result.heads
    np.testing.assert_allclose(heads["auroc"], np.nanmean(result.auroc, axis=1))
    np.testing.assert_allclose(heads["auroc_paper"], np.nan_to_num(result.auroc).mean(axis=1))
    assert heads["tokens_scored"].tolist() == [40] * 4


def test_the_controls_are_those_of_dense_scores(tiny_gpt2: Path, counts: Counts) -> None:
    """Float64 matrices and scikit-learn: T^ee less its mean over the tokens scored, that mean, and frequency alone."""
    model = ws.open_model(tiny_gpt2)
    result, first = ws.bigram_auroc(model, counts), FirstLayer(model)
    dense, scored = counts.matrix(VOCAB).toarray(), range(40)

    def sklearn(scores: np.ndarray, row: np.ndarray) -> float:
        return roc_auc_score(row > 0, scores, sample_weight=np.maximum(row, 1))

    for head in range(4):
        t_ee = first.query_factor(head).astype(float) @ first.key_factor(head).astype(float).T
        mean = t_ee[:40].mean(axis=0)
        specific = [sklearn(t_ee[token] - mean, dense[token]) for token in scored]
        constant = [sklearn(mean, dense[token]) for token in scored]
        np.testing.assert_allclose(result.specific[head, :40], specific, atol=1e-6)
        np.testing.assert_allclose(result.constant[head, :40], constant, atol=1e-6)
        assert result.heads["auroc_specific"][head] == pytest.approx(np.mean(specific), abs=1e-6)
        assert result.heads["auroc_constant"][head] == pytest.approx(np.mean(constant), abs=1e-6)
    frequency = dense.sum(axis=0)
    baseline = [sklearn(frequency - dense[token], dense[token]) for token in scored]
    np.testing.assert_allclose(result.baseline[:40], baseline, atol=1e-12)
    assert result.auroc_baseline == pytest.approx(np.mean(baseline))
    for values in (result.specific[0], result.constant[0], result.baseline):
        assert np.isnan(values[40:]).all()


def test_norms_of_queries_are_in_the_mean_that_is_taken_out() -> None:
    model = fixture("qwen3").model
    n_tokens = model.embeddings.n_tokens
    rng = np.random.default_rng(0)
    follows = scipy.sparse.csr_array(rng.integers(0, 3, (n_tokens, n_tokens)) * (rng.random((n_tokens, 1)) < 0.7))
    counts = Counts(follows.indptr, follows.indices, follows.data, "", ("made up",), 1, 1000)
    result, first = ws.bigram_auroc(model, counts), FirstLayer(model)
    scored = np.diff(follows.indptr) > 0
    head = first.heads[1]
    t_ee = first.query_factor(1).astype(float) @ first.key_factor(head.kv_head).astype(float).T
    specific = t_ee - t_ee[scored].mean(axis=0)
    for token in np.flatnonzero(scored)[:5]:
        previous, weights = counts.row(token)
        expected = weighted_auroc(specific[token], previous, weights)
        assert result.specific[1, token] == pytest.approx(expected, abs=1e-6)


def test_rows_of_another_width_than_the_model_are_averaged_too() -> None:
    """ELECTRA projects its embeddings before layer 0."""
    model = fixture("electra").model
    n_tokens = model.embeddings.n_tokens
    follows = scipy.sparse.csr_array(np.random.default_rng(0).integers(0, 2, (n_tokens, n_tokens)))
    result = ws.bigram_auroc(model, Counts(follows.indptr, follows.indices, follows.data, "", ("made up",), 1, 1000))
    assert np.isfinite(result.heads["auroc_specific"]).all()


def test_counts_of_nothing_score_nothing(tiny_gpt2: Path) -> None:
    none = Counts(np.zeros(VOCAB + 1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), "", ("made up",), 1, 1)
    result = ws.bigram_auroc(ws.open_model(tiny_gpt2), none)
    assert np.isnan(result.heads["auroc_specific"]).all() and np.isnan(result.auroc_baseline)


def test_a_head_that_only_scores_the_previous_token_keeps_nothing(embedded_auroc: BigramAuroc) -> None:
    """Heads 5 and 0 are above chance by what is the same for all current tokens; head 6, which joins words, is not."""
    specific, constant = (embedded_auroc.heads[f"auroc_{part}"] for part in ("specific", "constant"))
    assert specific[6] > 0.7 and specific[[5, 0]].max() < 0.6 and constant[[5, 0]].min() > 0.7
    assert embedded_auroc.auroc_baseline > embedded_auroc.heads["auroc"].max()
    for said in (f"frequency alone has {embedded_auroc.auroc_baseline:.2f}", f"head 6 has the highest AUROC, "
                 f"{specific[6]:.2f}"):  # fmt: skip
        assert said in embedded_auroc.lead


def test_the_baseline_is_in_the_json_the_caption_and_the_figure(embedded_auroc: BigramAuroc, tmp_path: Path) -> None:
    embedded_auroc.write(tmp_path)
    baseline = embedded_auroc.auroc_baseline
    assert json.loads((tmp_path / "report.json").read_text())["auroc_baseline"] == pytest.approx(baseline, rel=1e-5)
    assert f"AUROC {baseline:.3f}" in embedded_auroc.heads.caption
    (axis,) = embedded_auroc.plot().axes
    assert any(list(line.get_xdata()) == [baseline, baseline] for line in axis.get_lines())


@pytest.mark.check
def test_counts_may_be_a_path(two_layers: ws.Model, embedded_auroc: BigramAuroc, tmp_path: Path) -> None:
    embedded_counts().save(tmp_path / "counts.npz")
    scores = ws.bigram_auroc(two_layers, str(tmp_path / "counts.npz"))
    np.testing.assert_array_equal(scores.auroc, embedded_auroc.auroc)


def test_a_model_without_counts_and_tokenizer_says_how_to_make_them(tiny_gpt2: Path) -> None:
    with pytest.raises(ws.CheckpointError, match=r"needs bigram counts \(.*tokenizer.*\); `weightscope bigrams CORPUS"):
        ws.bigram_auroc(ws.open_model(tiny_gpt2))


@pytest.mark.parametrize("copied", mostly_checked([False, True], fast=[True]))
def test_without_counts_the_works_that_come_along_are_counted_and_named(tmp_path: Path, copied: bool) -> None:
    """Files in another folder are a checkpoint like any other, with a tokenizer."""
    if copied:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            shutil.copy(FOLDER / name, tmp_path)
    model = ws.open_model(tmp_path if copied else TWO_LAYERS)
    scores = ws.bigram_auroc(model, sample=100)
    expected = ws.bigram_auroc(model, embedded_counts(), sample=100)
    np.testing.assert_array_equal(scores.auroc, expected.auroc)
    corpus = "in the 8 works in the public domain that come with weightscope"
    assert corpus in scores.lead and corpus in str(scores)


def test_counts_of_another_vocabulary_are_refused(tiny_gpt2: Path, tmp_path: Path) -> None:
    embedded_counts().save(tmp_path / "counts.npz")
    with pytest.raises(ws.CheckpointError, match=r"counts\.npz: counted over a vocabulary of 8000 tokens"):
        ws.bigram_auroc(ws.open_model(tiny_gpt2), tmp_path / "counts.npz")


def test_a_checkpoint_without_tokens_says_so_before_counts_are_read(tmp_path: Path) -> None:
    weights = gpt2_weights()
    del weights["wte.weight"]
    with pytest.raises(ws.CheckpointError, match="no token embedding in this checkpoint"):
        ws.bigram_auroc(ws.open_model(write_checkpoint(tmp_path, weights)), tmp_path / "nowhere.npz")


def test_a_result_is_short_in_words_and_a_table_in_a_notebook(embedded_auroc: BigramAuroc) -> None:
    assert repr(embedded_auroc) == "BigramAuroc(two-layers, layer 0: 8 heads, the best is head 6 with 0.81)"
    assert str(embedded_auroc).splitlines()[1].split()[:2] == ["6", "0.811"]
    assert "<table" in embedded_auroc._repr_html_()
    assert embedded_auroc.ranked["head"][0] == 6
    assert embedded_auroc.heads["head"].tolist() == list(range(8))


def test_a_result_plots_a_figure(embedded_auroc: BigramAuroc) -> None:
    (axis,) = embedded_auroc.plot().axes
    assert axis.get_yticklabels()[0].get_text() == "head 6"


@pytest.mark.check
def test_nothing_is_said_unless_progress_is_asked_for() -> None:
    """Bars come after two seconds, on a terminal; with no delay at all there would still be none."""
    code = (
        "import sys; sys.stderr.isatty = lambda: True\n"
        "import weightscope.core.progress as p; p.DELAY = 0\n"
        "import weightscope as ws; ws.bigram_auroc(ws.open_model('embedded'), progress={})"
    )
    silent, shown = (
        subprocess.run([sys.executable, "-c", code.format(progress)], capture_output=True, text=True, check=True)
        for progress in (False, True)
    )
    assert (silent.stdout, silent.stderr) == ("", "")
    assert "sigma" in shown.stderr and "AUROC" in shown.stderr


def test_the_papers_model_stands_beside_the_papers_numbers(embedded_auroc: BigramAuroc) -> None:
    from dataclasses import replace

    from weightscope.core.files import Files
    from weightscope.heads.detok.page import auroc_sections, present

    (section,) = auroc_sections(Files(), replace(embedded_auroc, model="openai-community/gpt2@main"))
    table = section.parts[1]
    printed = dict(zip(table["head"].tolist(), table["auroc_printed"].tolist(), strict=True))
    assert (printed[7], printed[5]) == (0.876, 0.286)
    noted = dict(zip(table["head"].tolist(), table["auroc_by_frequency_noted"].tolist(), strict=True))
    assert (noted[7], noted[5]) == (0.865, 0.613)
    np.testing.assert_allclose(table["auroc_paper_differs"] + table["auroc_printed"], table["auroc_paper"])
    assert present([7, 3, 7, 11], 8) == [7, 3]
    (section,) = auroc_sections(Files(), embedded_auroc)
    assert "auroc_printed" not in section.parts[1].table


def test_the_mean_by_frequency_is_that_over_the_places_of_the_text(embedded_auroc: BigramAuroc) -> None:
    """The authors' notes weight a token's AUROC by how often it occurs."""
    counts = embedded_counts()
    n = np.diff(counts.indptr)
    places = np.repeat(np.repeat(np.arange(len(n)), n), counts.data)  # the current token of every place in text
    for row, head in enumerate(embedded_auroc.heads["head"].tolist()):
        mean = np.nanmean(embedded_auroc.auroc[head][places])
        assert embedded_auroc.heads["auroc_by_frequency"][row] == pytest.approx(mean, abs=1e-9)
    of_head = embedded_auroc.heads["auroc_by_frequency"]
    assert of_head[[6, 5, 0]] == pytest.approx([0.743, 0.512, 0.492], abs=1e-3)


def test_printed_ranks_stand_beside_ranks_by_sorting(embedded_auroc: BigramAuroc) -> None:
    model = ws.open_model(TWO_LAYERS)
    first, tokenizer = FirstLayer(model), Tokenizer.load(model.source)
    table = detok_tables.printed_ranks(first, tokenizer)
    assert len(table) and "contradict each other" in table.caption
    for head, token, previous, rank in zip(
        *(table[name].tolist() for name in ("head", "token", "previous", "rank")), strict=True
    ):
        ids = detok_tables.single_tokens(tokenizer, [token, previous])
        order = np.argsort(-first.token_scores(ids[token])[head], kind="stable")
        assert order[rank - 1] == ids[previous]


def test_shared_scores_are_the_mean_over_the_tokens_that_follow_some(tiny_gpt2: Path, counts: Counts) -> None:
    first, matrix = FirstLayer(ws.open_model(tiny_gpt2)), counts.matrix(VOCAB)
    mean = np.mean([first.token_scores(token) for token in range(VOCAB - 10)], axis=0)
    np.testing.assert_allclose(detok_tables.shared_scores(first, matrix), mean, atol=1e-4)
    table = ranked(first, None, [17], top=1, heads=[2], less=mean)
    assert table["token_id"][0] == (first.token_scores(17) - mean)[2].argmax()
    listed = detok_tables.with_counts(ranked(first, None, [17, 3], top=VOCAB, heads=[2, 0]), [17, 3], matrix)
    counted = dict(
        zip(zip(listed["current"], listed["head"], listed["token_id"], strict=True), listed["count"], strict=True)
    )
    assert counted["#17", 2, 18] == counted["#17", 0, 18] == 1 and counted["#3", 2, 5] == 2
    assert sum(listed["count"]) == 2 * (1 + 2 + 1 + 2)


def test_word_endings_are_those_of_most_different_tokens_before_them() -> None:
    """As 1 / sum of squared shares: 3 for "ement", 2 for "ishop" and near 1 for "riety", which has three too."""
    tokenizer = Tokenizer.load(TWO_LAYERS)
    rows = {"ement": [1, 1, 1], "ishop": [1, 1], "riety": [1, 1, 98], " the": [1] * 9, "'t": [1] * 9, "..": [1] * 9}
    ids = detok_tables.single_tokens(tokenizer, rows)
    matrix = scipy.sparse.lil_array((8000, 8000), dtype=np.int64)
    for text, token in ids.items():
        matrix[token, : len(rows[text])] = rows[text]
    matrix = matrix.tocsr()
    arrays = (part.astype(np.int64) for part in (matrix.indptr, matrix.indices, matrix.data))
    counts = Counts(*arrays, "made up", ("made up",), 1, 1000)
    assert [*detok_tables.word_endings(tokenizer, counts)] == ["ement", "ishop", "riety"]


def test_the_auroc_by_distance_is_that_of_heads_asked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detok_tables, "SAMPLED", 100)
    monkeypatch.setattr(detok_tables, "DISTANCES", (1, 8))
    model = fixture("llama").model
    n = model.embeddings.n_tokens
    row = np.arange(n)
    counts = Counts(np.arange(n + 1), row[::-1].copy(), np.full(n, 2), "made up", ("made up",), 1, 2 * n)
    table = detok_tables.by_distance(FirstLayer(model), counts)
    for delta in (1, 8):
        of_heads = ws.bigram_auroc(model, counts, delta=delta, sample=100).heads
        asked = table["distance"] == delta
        for name in ("auroc", "auroc_specific"):
            assert table[name][asked].tolist() == of_heads[name].tolist()
    assert table["auroc"][table["distance"] == 1].tolist() != table["auroc"][table["distance"] == 8].tolist()


def test_the_printed_tables_are_the_papers() -> None:
    """Every row of Tables 1 and 3 in the paper's text, with its rank."""
    text = (shared("../papers") / "detokenization.md").read_text().replace("_", " ")
    rows = re.findall(r"^(\d+)\t([^\t]+)\t([^\t]+) \((\d+)\)\t", text, re.MULTILINE)
    printed = [
        (head, token, previous, n) for _, head, token, ranks in detok_tables.RANKS for previous, n in ranks.items()
    ]
    assert sorted((int(head), token, previous, int(n)) for head, token, previous, n in rows) == sorted(printed)


def test_a_token_that_follows_none_has_no_roc_curve(tiny_gpt2: Path, counts: Counts) -> None:
    first = FirstLayer(ws.open_model(tiny_gpt2))
    (token,) = roc_curves(first, counts, {"three": 3})
    assert len(token.curves) == 4
    with pytest.raises(ws.CheckpointError, match="'forty' follows no token in these counts"):
        roc_curves(first, counts, {"forty": 40})
