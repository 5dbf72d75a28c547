"""Which dimensions stand out: what the rule promises."""

import numpy as np
import pytest

from weightscope.heads.outliers.measure import dimension_z, outlier_dimensions

MEANS = np.random.default_rng(0).standard_normal((13, 768))


def test_normal_means_have_no_outliers() -> None:
    assert not len(outlier_dimensions(dimension_z(MEANS)))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_planted_outliers_are_found_whatever_the_scale_and_sign_and_farthest_first(scale: float) -> None:
    means = MEANS.copy()
    means[3, 308], means[7, 381], means[12, 180] = -40, 60, 20
    outliers = outlier_dimensions(dimension_z(scale * means + 5 * scale))
    assert outliers.tolist() == [381, 308, 180]


def test_outliers_do_not_hide_each_other() -> None:
    """A tenth of the dimensions far out would pull a mean and a standard deviation along, not median and MAD."""
    means = MEANS[:1].copy()
    means[0, :76] += 50
    assert set(outlier_dimensions(dimension_z(means))) == set(range(76))


def test_kinds_without_tokens_and_constant_layers_have_none() -> None:
    means = np.concatenate((np.full((1, 768), np.nan), np.zeros((1, 768)), np.ones((1, 768)), MEANS[:1]))
    means[3, 5] = 100
    assert outlier_dimensions(dimension_z(means)).tolist() == [5]
