"""Statistics taken batch by batch: moments against NumPy's of all numbers, a sample against the pairs it is of."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weightscope.core.tables import Table
from weightscope.heads.norms.measure import NormAnalysis, PairSample, RunningMoments
from weightscope.model.metrics.rank_correlation import Spearman


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_moments_do_not_depend_on_the_batches(rng: np.random.Generator) -> None:
    """Numbers far from zero relative to their deviation: sums of squares would lose every digit."""
    values = 1e6 + rng.random((2, 3, 50))
    moments = RunningMoments((2, 3))
    for layer in range(2):
        for part in np.split(values[layer], [1, 20, 45], axis=-1):
            moments.add(part, layer)
    mean, sd, cv, largest, smallest = np.moveaxis(moments.table(), -1, 0)
    np.testing.assert_allclose(mean, values.mean(axis=-1), rtol=1e-14)
    np.testing.assert_allclose(sd, values.std(axis=-1), rtol=1e-7)
    np.testing.assert_allclose(cv, values.std(axis=-1) / values.mean(axis=-1), rtol=1e-7)
    np.testing.assert_array_equal([smallest, largest], [values.min(axis=-1), values.max(axis=-1)])
    pooled = moments.pooled()
    np.testing.assert_allclose(pooled.table()[:2], [values.mean(), values.std()], rtol=1e-7)
    assert (pooled.count, pooled.smallest, pooled.largest) == (300, values.min(), values.max())


def test_sample_holds_existing_pairs_and_has_the_wanted_size(rng: np.random.Generator) -> None:
    first, second = rng.random((4, 3, 20, 20), np.float32), rng.random((4, 3, 20), np.float32)
    first[:, :, :10, 10:] = 0  # masked
    groups = np.where(np.arange(20) < 5, 0, 1)[None].repeat(4, axis=0)
    every, some = PairSample(np.ones(3), 5000), PairSample(np.array([0.5, 0.1, 0.5]), 5000, seed=3)
    for sample in (every, some):
        sample.add(first, second, groups)
    pairs = np.stack(np.broadcast_arrays(first, second[:, :, None]), axis=-1)
    for group, (kept, drawn) in enumerate(zip(every.pairs(), some.pairs(), strict=True)):
        columns = np.flatnonzero(groups[0] == group)
        expected = pairs[:, :, :, columns].reshape(-1, 2)
        expected = expected[expected[:, 0] > 0]
        assert set(map(tuple, kept)) == set(map(tuple, expected))
        assert len(kept) == len(expected)
        assert set(map(tuple, drawn)) <= set(map(tuple, expected))
        assert len(drawn) == pytest.approx(some.shares[group] * len(expected), abs=4 * np.sqrt(len(expected)) / 2)
    again, less = PairSample(some.shares, 5000, seed=3), PairSample(some.shares, 7, seed=3)
    for sample in (again, less):
        sample.add(first, second, groups)
    np.testing.assert_array_equal(again.pairs()[1], some.pairs()[1])
    np.testing.assert_array_equal(less.pairs()[1], some.pairs()[1][:7])


def test_lead_names_kinds_that_never_occur() -> None:
    rows = [("BOS", 0.2, 0.1), (". or ,", 0.0, 0.0), ("other", 0.8, 0.9)]
    ranks = [Spearman(pairs, float("nan"), 0.0) for pairs in (10, 0, 90)]
    shares = Table.of_rows(("kind", "weight", "length"), rows)
    norms: Any = SimpleNamespace(shares=shares, ranks=ranks, n_sequences=1, n_tokens=9, source="a text")
    beginning = (
        "BOS takes 20.0% of the attention weight and gives 10.0% of the length of what is added up; no token is . or ,;"
    )
    assert NormAnalysis.lead.__get__(norms).startswith(beginning)
