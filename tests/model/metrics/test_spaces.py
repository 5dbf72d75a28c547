"""Sketches, directions and what lies along them: statements about spaces, not about the vectors that span them."""

import numpy as np
import pytest

from weightscope.model.layers.factored import Factored
from weightscope.model.metrics.outliers import layer_medians, norm_outliers, off_trend, robust_z
from weightscope.model.metrics.spaces import alike, leading_directions, nearest_rows, probes, space_sketch

D, R = 60, 8


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def sketch(factor: np.ndarray) -> np.ndarray:
    return space_sketch(factor, np.linalg.qr(factor)[1], probes(len(factor)))


def test_a_sketch_belongs_to_the_space_and_unrelated_spaces_are_not_alike() -> None:
    factor = normal(D, R)
    same = factor @ normal(R, R, seed=1)
    assert sketch(factor) @ sketch(same) == pytest.approx(1, abs=1e-4)
    unrelated = np.stack([sketch(normal(D, R, seed=seed)) for seed in range(2, 60)])
    assert np.abs(unrelated @ sketch(factor)).max() < 0.5
    nearly = factor + 0.1 * normal(D, R, seed=3)
    assert sketch(factor) @ sketch(nearly) > 0.9


def pairs(first: np.ndarray, second: np.ndarray) -> list[tuple[int, int]]:
    pairs = list(alike(first, second, 0.7))
    assert all(len(later) == len(correlations) and correlations.min() >= 0.7 for _, later, correlations in pairs)
    return [(i, int(j)) for i, later, _ in pairs for j in later]


def test_alike_wants_both_spaces_and_knows_nothing_of_nan() -> None:
    a, b, third = sketch(normal(D, R)), sketch(normal(D, R, seed=1)), sketch(normal(D, R, seed=2))
    first = np.stack([a, third, a, a, np.full_like(a, np.nan)])
    second = np.stack([b, b, third, b, b])
    assert pairs(first, second) == [(0, 3)]


def test_alike_finds_pairs_across_its_blocks() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((600, 300))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[599] = rows[3]
    assert pairs(rows, rows) == [(3, 599)]


def test_dependent_columns_and_nearly_whole_spaces_are_not_sketched() -> None:
    assert np.isnan(sketch(np.ones((D, 3)))).all()
    assert np.isnan(sketch(normal(10, 10))).all()


def matrix_with(values: list[float]) -> Factored:
    """Singular values as given, along columns of random orthonormal matrices."""
    u, v = np.linalg.qr(normal(D, len(values)))[0], np.linalg.qr(normal(D, len(values), seed=1))[0]
    return Factored(u * values, v)


def test_directions_are_single_where_values_are_apart_and_blocks_where_not() -> None:
    w = matrix_with([5.0, 3.0, 2.999, 1.0])
    directions = leading_directions(w, 3)
    assert [(each.block.start, each.block.stop) for each in directions] == [(0, 1), (1, 3), (3, 4)]
    for each in directions:
        np.testing.assert_allclose(w.dense() @ each.right, each.left * each.block.values, atol=1e-2)
        np.testing.assert_allclose(each.left.T @ each.left, np.eye(each.block.stop - each.block.start), atol=1e-6)


def test_a_wide_block_names_no_tokens_and_the_null_space_no_direction() -> None:
    (wide,) = leading_directions(matrix_with([1.0] * 20), 1)
    assert (wide.block.start, wide.block.stop, wide.left.shape) == (0, 20, (D, 0))
    assert [each.block.stop for each in leading_directions(matrix_with([2.0, 1.0, 1e-17]), 5)] == [1, 2]
    assert leading_directions(Factored(np.full((D, 2), np.nan), normal(D, 2)), 2) == []
    assert leading_directions(Factored(np.zeros((D, 2)), normal(D, 2)), 2) == []


@pytest.mark.parametrize("centred", [False, True])
def test_nearest_rows_are_those_of_one_product_whatever_the_blocks(centred: bool) -> None:
    rows = normal(37, D, seed=5) + 0.5
    single, block = np.linalg.qr(normal(D, 1))[0], np.linalg.qr(normal(D, 3, seed=6))[0]
    (along, against), (within, none) = nearest_rows(
        ((start, rows[start : start + 5].astype(np.float32)) for start in range(0, 37, 5)), [single, block], 4, centred
    )
    seen = rows - rows.mean(axis=1, keepdims=True) if centred else rows
    seen = seen / np.linalg.norm(seen, axis=1, keepdims=True)
    cosines = (seen @ single)[:, 0]
    assert along.rows.tolist() == np.argsort(-cosines)[:4].tolist()
    assert against.rows.tolist() == np.argsort(cosines)[:4].tolist()
    np.testing.assert_allclose(against.scores, np.sort(cosines)[:4], atol=1e-6)
    lengths = np.linalg.norm(seen @ block, axis=1)
    assert within.rows.tolist() == np.argsort(-lengths)[:4].tolist()
    assert len(none.rows) == 0


def test_robust_z_is_not_moved_by_the_outlier_it_judges() -> None:
    values = np.append(normal(99), 50.0)
    assert robust_z(values)[-1] > 30
    assert np.abs(robust_z(values)[:-1]).max() < 5
    assert np.isnan(robust_z(np.full(3, np.nan))).all()
    assert np.abs(robust_z(1 + 1e-6 * normal(50))).max() < 1  # near-equal values have no outliers


def test_a_layer_is_judged_by_its_neighbours() -> None:
    logs = np.tile(np.linspace(0, 3, 12)[:, None], (1, 5))
    logs[6] += 2
    differences = off_trend(layer_medians(logs))
    assert np.nanargmax(np.abs(differences)) == 6
    assert differences[6] == pytest.approx(2, abs=0.3)
    assert np.isnan(layer_medians(np.full((1, 3), np.nan))).all()


def test_rows_are_judged_by_their_norms_on_a_log_scale() -> None:
    norms = np.append(np.exp(0.05 * normal(200)), [0.0, 0.01, 30.0])
    low, high = norm_outliers(norms, 8)
    assert low.tolist() == [200, 201]
    assert high.tolist() == [202]
