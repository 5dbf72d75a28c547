"""Large models: estimates from sketches, the bound on them, and the pairs that are computed all the same."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightscope as ws
from tests.support.commands import run
from tests.support.heads_by_hand import random_layer
from tests.support.two_layers import TWO_LAYERS
from tests.support.weights import shared
from weightscope.core.engine import Processes
from weightscope.core.files import Files
from weightscope.heads.circuits import passes
from weightscope.heads.circuits.passes import PROBES, WrittenRows, doubt, layer_spaces, pair_scores, sketched, wiring
from weightscope.heads.circuits.wiring import MEASURES, PROJECTIONS, strongest
from weightscope.model.sources import Source


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "EXACT_UP_TO", 0)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(lambda lambdas: sum(lambdas) > 1e-3),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_an_estimate_is_as_low_as_the_bound_says_or_less_often(lambdas: list[float], kept: int, seed: int) -> None:
    rng, n = np.random.default_rng(seed), 2000
    drawn = rng.chisquare(PROBES, (n, len(lambdas))) / PROBES
    drawn[:, :kept] = 1  # of directions that are kept
    doubts = doubt(drawn @ lambdas, np.array(sum(lambdas)), max(lambdas))
    for exponent in (0.7, 1.5, 3.0, 5.0):
        bound = np.exp(-exponent)
        assert (doubts >= exponent).mean() <= bound + 4 * np.sqrt(bound / n)


def test_doubt_grows_with_what_would_have_to_be_true() -> None:
    doubts = doubt(np.array(4.0), np.array([3.0, 4.0, 8.0, 16.0, 32.0]), 1.0)
    assert doubts[0] == doubts[1] == 0 and (np.diff(doubts[1:]) > 0).all()
    assert doubt(np.array(0.0), np.array(1.0), 1.0) == np.inf


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2)])
@pytest.mark.parametrize("kind", PROJECTIONS)
def test_estimates_are_right_in_the_mean(kind: str, sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    first, second = (layer_spaces(random_layer(rng, 48, 20, *sizes), centred=False) for _ in range(2))
    exact = pair_scores(WrittenRows.whole(first.written), second.read[kind])
    drawn = np.stack([pair_scores(sketched(first.written, seed), second.read[kind]) for seed in range(400)])
    error = (drawn.mean(axis=0) - exact) / (drawn.std(axis=0) / np.sqrt(len(drawn)))
    assert np.abs(error).max() < 4
    np.testing.assert_array_equal(sketched(first.written, 3).rows, sketched(first.written, 3).rows)


@pytest.mark.check
@pytest.mark.usefixtures("nothing_is_small")
def test_the_strongest_pairs_of_gpt2_are_found_and_exact_and_most_others_estimates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ws.open_model(shared("gpt2-attention"))
    layers = [2, 4, 5, 6]
    sketched = wiring(model, layers, top=3)
    monkeypatch.undo()
    exact_wiring = wiring(model, layers)
    for kind in PROJECTIONS:
        assert exact_wiring.exact[kind].sum() == np.isfinite(exact_wiring.pk[kind]).sum() == 6 * 144
        for measure in MEASURES:
            pairs = [edge.pair for edge in strongest(sketched, kind, measure, 3)]
            assert pairs == [edge.pair for edge in strongest(exact_wiring, kind, measure, 3)]
            assert all(sketched.exact[kind][pair] for pair in pairs)
        exact = sketched.exact[kind]
        np.testing.assert_allclose(sketched.pk[kind][exact], exact_wiring.pk[kind][exact], rtol=2e-5)
        np.testing.assert_allclose(sketched.cs[kind][exact], exact_wiring.cs[kind][exact], rtol=2e-5)
        assert exact.sum() < 6 * 144 and sketched.left == 0
        estimated = np.isfinite(exact_wiring.pk[kind]) & ~exact
        assert np.corrcoef(sketched.pk[kind][estimated], exact_wiring.pk[kind][estimated])[0, 1] > 0.8


@pytest.mark.usefixtures("nothing_is_small")
def test_where_too_many_are_alike_the_likeliest_are_computed_and_the_rest_counted(
    two_layers: ws.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "MOST_PAIRS", 10)
    circuits = ws.circuits(two_layers, top=5)
    assert circuits.wiring.left > 0
    assert any("estimates" in caveat for caveat in circuits.caveats)
    assert any("more pairs that may be among the strongest" in caveat for caveat in circuits.caveats)


@pytest.mark.check
@pytest.mark.usefixtures("nothing_is_small")
def test_other_processes_find_the_same(two_layers: ws.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    on_worker = Source.named(TWO_LAYERS).as_seen(two_layers).elsewhere
    with Processes(2) as engine:
        elsewhere = wiring(two_layers, top=5, engine=engine, on_worker=on_worker)
        here = wiring(two_layers, top=5)
        for kind in PROJECTIONS:
            np.testing.assert_allclose(here.pk[kind], elsewhere.pk[kind], rtol=2e-6)
            np.testing.assert_allclose(here.cs[kind], elsewhere.cs[kind], rtol=2e-6)
            np.testing.assert_array_equal(here.exact[kind], elsewhere.exact[kind])


@pytest.mark.check
def test_the_command_takes_an_engine_and_writes_the_same_bytes(two_layers: ws.Model, tmp_path: Path) -> None:
    result = run("circuits", TWO_LAYERS, "--out", tmp_path, "--jobs", "2")
    assert result.exit_code == 0, result.output
    here = Files()
    here.npz("wiring.npz", **wiring(two_layers).arrays())
    assert (tmp_path / "wiring.npz").read_bytes() == here.contents["wiring.npz"]
