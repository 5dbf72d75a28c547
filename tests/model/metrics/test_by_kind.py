"""Sums and means by token kind, against plain loops."""

import numpy as np
import pytest

from weightscope.model.metrics.lengths import MeanByKind, counts_by_kind, sums_by_kind

KINDS = np.array([[0, 2, 1, 2, 1], [0, 2, 2, 2, 1], [0, 2, 2, 1, 1]])


@pytest.mark.parametrize("between", [(), (4,), (4, 5)])
def test_sums_are_those_of_a_plain_loop(between: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal((3, *between, 5))
    sums = sums_by_kind(values, KINDS, 4)
    expected = np.zeros((3, *between, 4))
    for b in range(3):
        for token, kind in enumerate(KINDS[b]):
            expected[b, ..., kind] += values[b, ..., token]
    np.testing.assert_allclose(sums, expected, atol=1e-14)


def test_kinds_part_the_tokens() -> None:
    """Every token has one kind: counts add up to n, sums to the sum."""
    values = np.random.default_rng(1).standard_normal((3, 2, 5))
    assert counts_by_kind(KINDS, 3).sum(axis=-1).tolist() == [5, 5, 5]
    np.testing.assert_allclose(sums_by_kind(values, KINDS, 3).sum(axis=-1), values.sum(axis=-1), atol=1e-14)


def test_a_running_mean_does_not_depend_on_the_batches() -> None:
    values = np.random.default_rng(2).standard_normal((3, 2, 5)).astype(np.float32)
    together, parts = MeanByKind((2,), 4), MeanByKind((2,), 4)
    together.add(values, KINDS)
    for b in range(3):
        parts.add(values[b : b + 1], KINDS[b : b + 1])
    np.testing.assert_allclose(together.mean, parts.mean, rtol=1e-6)
    for kind in range(3):
        expected = np.moveaxis(values, 1, -1)[kind == KINDS].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(together.mean[:, kind], expected, rtol=1e-6)
    assert np.isnan(together.mean[:, 3]).all()
