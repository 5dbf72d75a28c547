"""The interval of a sampled mean: it covers the exact one as often as it says."""

import numpy as np
import pytest

import weightscope as ws
from weightscope.heads.detok.heads import FEWEST, Stratified

DRAWS = 400


def covered(values: np.ndarray, by: np.ndarray, how_many: int) -> tuple[float, float]:
    """How often the interval holds the mean of all values, and its mean half width."""
    items, exact, hits, widths = np.arange(len(values)), values.mean(), 0, 0.0
    for seed in range(DRAWS):
        sample = Stratified.draw(items, by, how_many, seed)
        mean, low, high = sample.mean(values[sample.items])
        assert low <= mean <= high
        hits, widths = hits + (low <= exact <= high), widths + (high - low) / 2
    return hits / DRAWS, widths / DRAWS


def heads(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """AUROC of 4,000 tokens, and the counts it depends on: rare tokens are scored by few pairs, and so spread wide."""
    rng = np.random.default_rng(1)
    counts = (1e4 / np.arange(1, 4001)).astype(int) + 1
    spread = {"even": 0.1, "rare ones spread": 0.4 / np.sqrt(counts), "rare ones better": 0.02}[kind]
    centre = 0.5 + 0.3 * (kind == "rare ones better") * np.linspace(0, 1, 4000)
    return np.clip(centre + spread * rng.standard_normal(4000), 0, 1), counts


@pytest.mark.parametrize("kind", ["even", "rare ones spread", "rare ones better"])
def test_intervals_cover_the_exact_mean_95_times_in_100(kind: str) -> None:
    part, _ = covered(*heads(kind), how_many=300)
    assert 0.92 <= part <= 0.98  # of 400 draws: three standard errors on either side


def test_strata_narrow_the_interval_where_values_go_with_counts() -> None:
    values, counts = heads("rare ones better")
    unrelated = np.random.default_rng(0).random(len(values))
    assert covered(values, counts, 300)[1] < 0.5 * covered(values, unrelated, 300)[1]


def test_a_population_that_is_drawn_whole_has_its_own_mean_and_no_interval() -> None:
    values = np.random.default_rng(0).random(150)
    sample = Stratified.draw(np.arange(150), values, 1000)
    np.testing.assert_array_equal(sample.items, np.arange(150))
    assert sample.mean(values) == pytest.approx((values.mean(),) * 3, abs=1e-15)


def test_every_item_is_as_likely_as_another_and_none_is_drawn_twice() -> None:
    items = np.arange(1000) * 3
    drawn = np.concatenate([Stratified.draw(items, items % 7, 130, seed).items for seed in range(200)])
    assert len(drawn) == 200 * 130
    _, times = np.unique(drawn, return_counts=True)
    assert len(times) == 1000 and times.min() > 8 and times.max() < 50  # 26 +- 4.8


def test_a_sample_too_small_for_an_interval_is_refused() -> None:
    with pytest.raises(ws.CheckpointError, match="a sample of 99 is too small"):
        Stratified.draw(np.arange(500), np.arange(500), FEWEST - 1)
