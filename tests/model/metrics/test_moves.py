"""Changes and angles by products against dense maps and whole factors."""

import numpy as np
import pytest

from weightscope.model.layers.factored import Factored
from weightscope.model.metrics.moves import Moved, moved_angles, norms_of_product, principal_angles, relative_change

D, R = 60, 8


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("angle", [1e-9, 1e-4, 0.3, 1.5])
def test_principal_angles_are_those_the_spaces_were_made_with(angle: float) -> None:
    q = np.linalg.qr(normal(D, 4))[0]
    turned = np.cos(angle) * q[:, 0] + np.sin(angle) * q[:, 3]
    a, b = q[:, :2], np.stack([turned, q[:, 1]], axis=1)
    angles = principal_angles(a @ normal(2, 2, seed=1), b @ normal(2, 2, seed=2))
    np.testing.assert_allclose(np.sort(angles), [0, angle], atol=1e-14, rtol=1e-6)


def angles_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return moved_angles(Moved.of(a, b), a, b)


MOVES = {  # of a factor w (d, r)
    "far": lambda w, noise: noise,
    "moved": lambda w, noise: w + 0.3 * noise,
    "hardly moved": lambda w, noise: w + 1e-9 * noise,
    "one column": lambda w, noise: np.where(np.arange(R) == 2, noise, w),
    "rank one": lambda w, noise: w + noise[:, :1] @ noise[:1],
    "longer": lambda w, noise: 2 * w,
    "another basis": lambda w, noise: w @ noise[:R],
    "dependent columns": lambda w, noise: w[:, [0, 0, *range(2, R)]],
    "nearly dependent": lambda w, noise: np.append(w[:, :-1], w[:, :1] + 1e-7 * noise[:, :1], axis=1),
    "the same": lambda w, noise: w.copy(),
}


@pytest.mark.parametrize("move", MOVES)
def test_angles_by_products_are_those_by_whole_factors(move: str) -> None:
    before = normal(D, R)
    after = MOVES[move](before, normal(D, R, seed=1))
    whole = principal_angles(before, after)
    np.testing.assert_allclose(angles_of(before, after), whole, rtol=1e-6, atol=max(1e-14, 1e-7 * whole.max()))


@pytest.mark.parametrize("move", MOVES)
def test_norms_by_products_are_those_of_dense_maps(move: str) -> None:
    rng = np.random.default_rng(2)
    w, right = normal(D, R), normal(D, R, seed=3)
    after = MOVES[move](w, normal(D, R, seed=1))
    later = right + 1e-3 * normal(D, R, seed=4)
    turns = [np.linalg.qr(rng.standard_normal((R, R)))[0] for _ in range(2)]
    for t, u in ((np.eye(R), np.eye(R)), turns, (turns[0], turns[0])):
        size, moved = norms_of_product(Moved.of(w, after).times(t, u), Moved.of(right, later))
        a, b = w @ t @ right.T, after @ u @ later.T
        np.testing.assert_allclose([size, moved], [np.linalg.norm(a), np.linalg.norm(b - a)], rtol=1e-9)


def test_a_head_that_was_resized_has_changes_and_angles() -> None:
    a, b = Factored(normal(D, R), normal(D, R, seed=1)), Factored(normal(D, 3, seed=2), normal(D, 3, seed=3))
    expected = np.linalg.norm(b.dense() - a.dense()) / np.linalg.norm(a.dense())
    assert relative_change(a, b) == pytest.approx(expected)
    np.testing.assert_allclose(angles_of(a.left, b.left), principal_angles(a.left, b.left))


def test_change_is_that_of_the_product_and_blind_to_the_basis_within_a_head() -> None:
    a = Factored(normal(D, R), normal(D, R, seed=1))
    b = Factored(normal(D, R, seed=2), normal(D, R, seed=3))
    expected = np.linalg.norm(b.dense() - a.dense()) / np.linalg.norm(a.dense())
    assert relative_change(a, b) == pytest.approx(expected)
    assert relative_change(a, a) == 0
    basis = normal(R, R, seed=4)
    turned = Factored(a.left @ basis, a.right @ np.linalg.inv(basis).T)
    assert relative_change(a, turned) < 1e-6
    assert angles_of(a.left, turned.left).max() < 1e-6
    small = Factored(a.left * (1 + 1e-9), a.right)
    assert relative_change(a, small) == pytest.approx(1e-9, rel=1e-6)  # no cancellation
    zero = Factored(0 * a.left, a.right)
    assert relative_change(zero, a) == np.inf
    assert relative_change(zero, zero) == 0
