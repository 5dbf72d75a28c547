"""Position curves: what is planted is found, and the real GPT-2 shows what the paper says of it."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import weightscope as ws
from analyses.recipes import gpt2_detok
from tests.support.commands import run, run_undrawn
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import fixture
from tests.support.two_layers import TWO_LAYERS
from tests.support.weights import shared
from weightscope.core.files import Files
from weightscope.heads.detok.first_layer import FirstLayer, position_terms
from weightscope.heads.detok.page import NEAR_ON_TEXT, longest, position_section, unexplained
from weightscope.heads.detok.positions import (
    Near,
    SigmaStatistics,
    Spread,
    in_runs,
    near_mass,
    position_numerators,
    recency,
    sigma_statistics,
    spread_over_tokens,
    trends,
)
from weightscope.model.layers.factored import Factored
from weightscope.model.metrics.outliers import undertrained_rows

NO_NORM = SigmaStatistics.of_no_norm(0, 256)


@settings(deadline=None, max_examples=60)
@given(st.floats(-2, 2), st.floats(8, 150), st.floats(0.1, 10), st.floats(0, 6.28), st.floats(-100, 100))
def test_a_planted_line_and_sinusoid_are_found(slope, period, amplitude, phase, offset) -> None:
    j = np.arange(300)
    curve = offset + slope * j + amplitude * np.sin(2 * np.pi * j / period + phase)
    table = trends(curve[None])
    assert table.period == pytest.approx(period, rel=0.06)
    assert table.linear_share + table.sinusoid_share == pytest.approx(1, abs=0.02)


@settings(deadline=None)
@given(st.floats(-5, 5).filter(lambda slope: abs(slope) > 1e-3), st.floats(-50, 50))
def test_a_line_alone_is_all_linear(slope, offset) -> None:
    table = trends((offset + slope * np.arange(64.0))[None])
    assert table.slope == pytest.approx(slope)
    assert table.linear_share == pytest.approx(1)
    assert table.sinusoid_share == pytest.approx(0, abs=1e-6)


def test_a_constant_has_no_trend() -> None:
    table = trends(np.full((1, 50), 3.7))
    assert (table.slope, table.linear_share, table.sinusoid_share) == (0, 0, 0)
    assert np.isnan(table.period)


@settings(deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=2, max_size=40, unique=True))
def test_recency_is_of_the_order_alone(scores) -> None:
    curve = np.array(scores)
    assert recency(curve) == pytest.approx(recency(curve.argsort().argsort().astype(float)))
    assert recency(np.sort(curve)) == pytest.approx(1)
    assert recency(-np.sort(curve)) == pytest.approx(-1)


def test_near_mass_of_even_attention_is_its_share() -> None:
    assert near_mass(np.full((3, 200), 1 / 200)) == pytest.approx(0.1)


def test_bands_are_the_percentiles_over_tokens() -> None:
    """Against the whole (position, token) table, for numerators of either sign."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((400, 8)).astype(np.float32)
    positions = rng.standard_normal((20, 8)).astype(np.float32)
    statistics = sigma_statistics(lambda: iter([(0, tokens)]), 400, positions, 1e-5)
    numerator = rng.standard_normal(20)
    table = numerator / np.sqrt((tokens[:, None] + positions).var(axis=-1) + 1e-5)  # (V, L)
    curve = spread_over_tokens(numerator, statistics)
    np.testing.assert_allclose(curve.mean, table.mean(axis=0), rtol=1e-4)
    low, high = np.quantile(table, [0.025, 0.975], axis=0, method="nearest")
    np.testing.assert_allclose(curve.low, low, rtol=2e-2)
    np.testing.assert_allclose(curve.high, high, rtol=2e-2)
    assert (curve.low <= curve.mean).all() and (curve.mean <= curve.high).all()


def test_numerators_are_the_bilinear_and_linear_forms() -> None:
    rng = np.random.default_rng(1)
    qk = Factored(rng.standard_normal((12, 3)), rng.standard_normal((12, 3)))
    bias, positions = rng.standard_normal(12), rng.standard_normal((30, 12))
    t_p, t_pp = position_numerators(qk, bias, positions, 17)
    np.testing.assert_allclose(t_p, [bias @ p for p in positions])
    np.testing.assert_allclose(t_pp, [positions[17] @ qk.dense() @ p for p in positions])


@pytest.mark.check
def test_gpt2s_head_7_is_as_fig_3_shows_it() -> None:
    """T^p rises with j, T^pp at 500 waves, and the last position was hardly ever trained."""
    model = ws.open_model(shared("gpt2-attention"))
    positions, head = model.positions, model.layer(0).head(7)
    assert undertrained_rows(positions).tolist() == [1023]
    t_p, t_pp = position_numerators(head.qk, head.qk_bias, positions, 500)
    table = trends(np.stack([t_p[:501], t_pp[:501]]))
    assert table.slope[0] > 0 and table.linear_share[0] > 0.9
    assert table.sinusoid_share[1] > 0.8 and 300 < table.period[1] < 501
    assert recency(t_p[:1023]) > 0.98


def half_trained(folder: Path, trained: int) -> Path:
    """A GPT-2 of whose 40 positions only the first were ever met."""
    rng = np.random.default_rng(0)
    weights = gpt2_weights(d=64, n_positions=40)
    weights["wpe.weight"][trained:] = 0.02 * rng.standard_normal((40 - trained, 64))
    return write_checkpoint(folder, weights, initializer_range=0.02)


def test_an_untrained_query_position_is_warned_of_on_stderr_and_on_the_page(tmp_path: Path) -> None:
    source, out = half_trained(tmp_path / "model", 15), tmp_path / "out"
    result = run_undrawn("positions", source, "--out", out, "--query", "30")
    assert result.exit_code == 0, result.output
    warning = "Query position 30 was hardly ever trained"
    assert f"weightscope: {warning}" in result.stderr and "the last trained position is 14" in result.stderr
    assert "25 positions hardly ever trained (15-39)" in result.stderr
    assert warning in (out / "report.html").read_text()
    assert np.load(out / "positions.npz")["undertrained"].tolist() == [*range(15, 40)]
    result = run_undrawn("positions", source, "--out", out, "--query", "14")
    assert result.exit_code == 0 and "Query position" not in result.stderr + (out / "report.html").read_text()


def test_too_few_trained_positions_for_a_trend_are_an_error_in_a_line(tmp_path: Path) -> None:
    source = half_trained(tmp_path / "model", 10)
    result = run_undrawn("positions", source, "--out", tmp_path / "out", "--query", "7")
    assert result.exit_code == 0, result.output
    weights = gpt2_weights(d=64, n_positions=40)
    weights["wpe.weight"][[1, 2, 3, 4]] *= 1e-3
    source = write_checkpoint(tmp_path / "early", weights)
    result = run_undrawn("positions", source, "--out", tmp_path / "out", "--query", "7")
    assert result.exit_code == 2
    assert "only 4 of the positions up to 7 look trained, and a trend needs 8; untrained are 1-4" in result.stderr


def test_indices_are_listed_in_runs() -> None:
    assert in_runs(np.array([3, 191, 192, 193, 500])) == "3, 191-193, 500"
    assert in_runs(np.arange(0, 99, 2)).endswith("22, ...")


@pytest.mark.parametrize(
    ("name", "instead"),
    [("llama", "`weightscope positions SOURCE` has its scores by distance"),
     ("bloom", "`weightscope positions SOURCE` has them"), ("t5_encoder", "`weightscope positions SOURCE` has them")],
)  # fmt: skip
def test_a_model_without_position_embeddings_is_told_what_to_use_instead(name: str, instead: str) -> None:
    with pytest.raises(ws.CheckpointError, match=re.escape(instead)):
        position_terms(FirstLayer(fixture(name).model))


def test_the_command_prints_its_result_as_a_sentence(tmp_path: Path) -> None:
    """The head named gives the nearest tenth of the positions the most attention."""
    lead = run_undrawn("positions", TWO_LAYERS, "--out", tmp_path).stdout.splitlines()[0]
    near = position_terms(FirstLayer(ws.open_model(TWO_LAYERS))).heads["near_mass"]
    assert f"head {near.argmax()} gives {near.max():.0%} of its attention to the nearest tenth" in lead


def test_a_last_position_that_was_trained_less_is_told(two_layers: ws.Model) -> None:
    terms = position_terms(ws.first_layer(two_layers))
    before, last = np.abs(terms.t_p[:, -2:]).T
    assert terms.cliff == pytest.approx(np.median(last / before)) and terms.cliff < 0.6
    assert terms.cautions[0].startswith(
        f"T^p of the last position, 255, is {terms.cliff:.2f} times T^p of position 254"
    )
    level = replace(terms, p_numerator=np.repeat(terms.p_numerator[:, :1], 256, axis=1), sigma=NO_NORM)
    assert level.cliff is None and level.cautions == ()


def test_no_causal_mask_is_claimed_of_an_encoder(two_layers: ws.Model) -> None:
    """BERT's last position is seen by every token, and its heads may look ahead."""
    assert not position_terms(ws.first_layer(fixture("bert").model)).causal
    terms = position_terms(ws.first_layer(two_layers))
    assert terms.causal and "no later token" in terms.lead
    lead = replace(terms, causal=False).lead
    assert "no later token" not in lead and "Only positions up to the query are compared" in lead


def test_where_a_curve_falls_and_peaks_is_in_its_table(two_layers: ws.Model) -> None:
    terms = position_terms(ws.first_layer(two_layers), query=100)
    names = ("head", "t_p_lowest_at", "t_p_falling", "t_pp_highest_at")
    for head, lowest, falling, highest in zip(*(terms.heads[name].tolist() for name in names), strict=True):
        t_p, t_pp = terms.t_p[head, :101], terms.t_pp[head, :101]
        assert t_p[lowest] == t_p.min() and t_pp[highest] == t_pp.max()
        assert falling == pytest.approx(sum(b < a for a, b in pairwise(t_p)) / 100)


def test_figures_and_tables_take_one_sigma_for_the_query(two_layers: ws.Model) -> None:
    """The mean of 1/sigma_i: what is drawn is T^pp's mean over tokens at i and j, and near_mass is of its softmax."""
    first = ws.first_layer(two_layers)
    terms, table = position_terms(first), two_layers.embeddings.tokens
    drawn = [terms.at_sigma(head, "mean") for head in range(len(first.heads))]
    np.testing.assert_allclose([each.attention for each in drawn], terms.attention(), rtol=1e-12)
    np.testing.assert_allclose(near_mass(terms.attention()), [near_mass(each.attention) for each in drawn], rtol=1e-12)
    i, j = terms.query, 100
    of_i, of_j = (
        1
        / np.sqrt(
            (table + two_layers.positions[place]).astype(float).var(axis=1) + two_layers.embeddings.first_norm.eps
        )
        for place in (i, j)
    )  # (vocab,) each
    np.testing.assert_allclose(drawn[1].pp.mean[j], terms.pp_numerator[1, j] * of_i.mean() * of_j.mean(), rtol=1e-5)
    ends = [terms.at_sigma(1, which).pp.mean[j] for which in ("maximum", "minimum")]
    expected = terms.pp_numerator[1, j] * of_j.mean() * np.array([of_i.min(), of_i.max()])
    np.testing.assert_allclose(ends, expected, rtol=1e-4)


@pytest.mark.parametrize("unscaled", [False, True])
def test_attention_to_near_positions_is_that_of_the_lines_of_fig_3(two_layers: ws.Model, unscaled: bool) -> None:
    """Fig. 4, left, against a plain softmax at each sigma_i, or spread; each is a sum over the nearest k."""
    terms = position_terms(ws.first_layer(two_layers), 100, unscaled=unscaled)
    sigma, head = terms.sigma, 6
    if unscaled:
        scales = [1 / np.sqrt(terms.spread.position_squares + (factor * 0.14) ** 2) for factor in (0.5, 1, 2)]
        pairs = [(of_j, of_j[100]) for of_j in scales]
    else:
        of_query = (1 / sigma.minimum[100], sigma.inverse_mean[100], 1 / sigma.maximum[100])
        pairs = [(sigma.inverse_mean, of_i) for of_i in of_query]
    for k in (1, 16, 101):
        given = []
        for of_j, of_i in pairs:
            scores = (terms.p_numerator[head] + terms.pp_numerator[head] * of_i) * of_j * terms.scale
            weights = np.exp(scores[:101] - scores[:101].max())
            given.append(weights[101 - k :].sum() / weights.sum())
        drawn = [values[head, k - 1] for values in terms.near]
        np.testing.assert_allclose(drawn, [given[1], min(given), max(given)], rtol=1e-9)


def test_a_head_outside_the_band_is_not_explained_by_position() -> None:
    """By more than a hundredth of attention, at the nearest 16 of the authors' measurements."""
    measured = np.array(NEAR_ON_TEXT[16])
    band = np.zeros((3, 12, 20))
    band[:, :, 15] = measured + np.array([[0.0], [-0.05], [0.05]])
    assert unexplained(Near(*band)) == []
    band[:, 4, 15], band[:, 9, 15], band[:, 2, 15] = measured[4] + 0.011, measured[9] - 0.011, measured[2] + 0.009
    assert unexplained(Near(*band)) == [4, 9]
    np.testing.assert_allclose(Near(*band).beyond(16, measured)[[4, 9, 2, 0]], [0.011, 0.011, 0.009, 0], atol=1e-12)


def test_measurements_stand_beside_the_papers_model_alone(two_layers: ws.Model) -> None:
    """At the position where its authors measured, and its panels are grey by the rule."""
    terms = position_terms(ws.first_layer(two_layers), 100, unscaled=True)
    curve = np.linspace(0, 1, 501)[None].repeat(12, axis=0)
    gpt2 = replace(terms, query=500, p_numerator=curve, pp_numerator=0 * curve, sigma=Spread(0.1, curve[0] * 0).sigma,
                   spread=Spread(0.1, curve[0] * 0), undertrained=np.array([], int))  # fmt: skip
    for query, model, named in ((500, "openai-community/gpt2", True), (499, "gpt2", False), (500, "other", False)):
        section = position_section(Files(), replace(gpt2, query=query), [0], model)
        text = " ".join(part.caption for part in section.parts[:-1])
        assert ("more than 0.01 outside the band (heads 0-11)" in text) is named
        assert "$s$ = 0.05 to 0.2" in text


def test_a_share_under_a_tenth_has_no_sentence(two_layers: ws.Model) -> None:
    """Head 1's T^pp is 1 % wave; the paper's caption and its authors' code differ in what the lines are of."""
    terms = position_terms(ws.first_layer(two_layers))
    assert terms.heads["t_pp_sinusoid_share"][1] == pytest.approx(0.01, abs=0.005)
    wave = terms.pp_numerator.copy()
    wave[0] = np.sin(np.arange(256) / 4)
    for head, described in ((1, False), (0, True)):
        caption = position_section(Files(), replace(terms, pp_numerator=wave), [head]).parts[0].caption
        assert ("A sinusoid of period" in caption) is described
        assert "caption says $σ_j$; its authors' code takes $σ_i$" in caption


def test_a_period_as_long_as_the_window_is_called_a_bound(two_layers: ws.Model) -> None:
    terms = position_terms(ws.first_layer(two_layers), query=100)
    assert longest(101.0, terms) == "at least 101"
    assert longest(89.8, terms) == "90"
    slow = replace(terms, pp_numerator=np.sin(np.arange(256) / 80)[None].repeat(8, axis=0), sigma=NO_NORM)
    assert slow.heads["t_pp_period"].tolist() == [101.0] * 8
    meanings = {column.name: column.meaning for column in terms.heads.columns}
    assert "101, the window's own length, is a lower bound" in meanings["t_pp_period"]


def without_tokens(folder: Path, n_positions: int = 40) -> Path:
    """A GPT-2 whose token embedding is not in the file."""
    weights = gpt2_weights(d=64, n_positions=n_positions)
    del weights["wte.weight"]
    return write_checkpoint(folder, weights)


def test_the_recipe_names_what_works_without_token_embeddings(tmp_path: Path) -> None:
    options = ["--model", str(without_tokens(tmp_path / "model")), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(gpt2_detok.main, options)
    assert result.exit_code and result.output.count("\n") == 1
    assert "`weightscope positions --unscaled` draws Figs 3 and 4, left, without" in result.output


def test_a_spread_divides_each_part_by_its_own_sigma(tmp_path: Path) -> None:
    """Eq. 14 with sigma_j^2 = s^2 + Var p_j: T^p by sigma_j, T^pp by sigma_i sigma_j. The file keeps the numerators."""
    source = without_tokens(tmp_path / "model")
    result = run_undrawn(
        "positions", source, "--out", tmp_path / "out", "--unscaled", "--spread", "0.3", "--query", "30"
    )
    assert result.exit_code == 0, result.output
    model = ws.open_model(source)
    wpe, heads = model.positions.astype(float), model.layer(0).heads
    sigma = np.sqrt(0.3**2 + wpe.var(axis=1) + 1e-5)
    t_p = np.stack([wpe @ head.qk_bias for head in heads])
    t_pp = np.stack([wpe @ (head.qk.dense().astype(float).T @ wpe[30]) for head in heads])
    with np.load(tmp_path / "out" / "positions.npz") as arrays:
        np.testing.assert_allclose(arrays["t_p"], t_p, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(arrays["t_pp"], t_pp, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(arrays["sigma"], sigma, rtol=1e-5)
        assert arrays["spread"] == 0.3
    terms = position_terms(FirstLayer(model), 30, unscaled=True, spread=0.3)
    total = (t_p / sigma + t_pp / (sigma * sigma[30]))[:, :31]
    weights = np.exp(total * heads[0].scale)
    near = weights[:, -3:].sum(axis=1) / weights.sum(axis=1)
    np.testing.assert_allclose(terms.heads["near_mass"], near, rtol=1e-5)
    assert terms.nearest_head() == near.argmax()
    assert f"none gives more than {near.max():.1%} of its attention to the nearest tenth" in result.stdout
    sentence = "s = 0.3 (0.15 and 0.6 shown too) replaces the token embeddings: this holds where they are"
    assert sentence in result.stderr and sentence in (tmp_path / "out" / "report.html").read_text()
    low, high = (terms.heads[f"near_mass_{end}"] for end in ("low", "high"))
    assert (low <= near + 1e-6).all() and (near <= high + 1e-6).all()


def test_the_head_drawn_is_the_nearest_after_the_softmax_and_not_the_steadiest(two_layers: ws.Model) -> None:
    """A shallow line rises at every step, a late cliff falls first; the softmax attends to near tokens by the cliff."""
    terms = position_terms(ws.first_layer(two_layers), unscaled=True)
    line = np.linspace(0, 0.1, 256)
    cliff = np.where(np.arange(256) > terms.query - 5, 100.0, -line)
    flat = replace(terms, p_numerator=np.stack([line, cliff]), pp_numerator=np.zeros((2, 256)))
    assert recency(flat.t_p[0]) > recency(flat.t_p[1])
    assert flat.nearest_head() == 1 and "head 1 gives 100% of its attention" in flat.headline


def test_no_head_favours_near_tokens_by_next_to_nothing(two_layers: ws.Model) -> None:
    """Terms that rise by a thousandth leave attention even."""
    terms = position_terms(ws.first_layer(two_layers), unscaled=True)
    even = replace(terms, p_numerator=np.stack([np.linspace(0, 1e-3, 256)] * 2), pp_numerator=np.zeros((2, 256)))
    assert (even.heads["near_mass"] > 0.1).all()
    assert even.headline.startswith("Position alone makes no head favour near tokens: none gives more than 10.")


def test_the_spread_of_the_tokens_gives_nearly_what_the_tokens_give(two_layers: ws.Model) -> None:
    """What is left out is their correlation with positions and how far their variances differ."""
    first, tokens = ws.first_layer(two_layers), two_layers.embeddings.tokens.astype(float)
    spread = float(np.sqrt(tokens.var(axis=1).mean()))
    exact, stood_in = (terms.heads["near_mass"] for terms in (first.positions(), first.positions(None, True, spread)))
    np.testing.assert_allclose(stood_in, exact, atol=0.05)


@pytest.mark.parametrize(
    ("given", "says"),
    [(["--spread", "0.2"], "--spread is for --unscaled"), (["--unscaled", "--spread", "0"], "not in the range x>0"),
     (["--unscaled", "--spread", "nan"], "nan is no standard deviation")],
)  # fmt: skip
def test_a_spread_that_is_none_is_refused(given: list[str], says: str, tmp_path: Path) -> None:
    result = run("positions", TWO_LAYERS, "--out", tmp_path / "out", *given)
    assert result.exit_code == 2 and says in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.check
def test_gpt2s_nearest_heads_are_those_that_were_measured() -> None:
    """3, 4 and 7 give positions 485 to 500 over 0.99 of their attention on text; the numerators' order says 0, 2, 8."""
    terms = position_terms(FirstLayer(ws.open_model(shared("gpt2-attention"))), 500, unscaled=True, spread=0.144)
    near = terms.attention()[:, 485:].sum(axis=1)
    assert set(np.argsort(-near)[:3]) == {3, 4, 7} and near[[3, 4, 7]].min() > 0.9
    rising = [recency(curve) for curve in (terms.p_numerator + terms.pp_numerator)[:, :501]]
    assert not {3, 4, 7} & set(np.argsort(rising)[-3:].tolist())
