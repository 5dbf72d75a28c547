"""c^ee ... c^p against the paper's equations written out as loops."""

import numpy as np
import pytest
from scipy.special import rel_entr
from scipy.special import softmax as scipy_softmax

from weightscope.heads.detok.first_layer import ROWS, TERMS, Parts, SixTerms, six_terms, term_contributions


def random_terms(n: int = 7, r: int = 4, seed: int = 0) -> SixTerms:
    rng = np.random.default_rng(seed)
    return six_terms(*(Parts(*rng.normal(size=(3, n, r))) for _ in range(2)))


MASKS = {
    "causal": np.tri(2 * ROWS + 5, dtype=bool),  # three blocks of rows, the last one short
    "all keys": np.ones((ROWS + 1, ROWS + 1), bool),
    "a window": np.tri(ROWS + 9, dtype=bool) & ~np.tri(ROWS + 9, k=-5, dtype=bool),
}


@pytest.mark.parametrize("mask", MASKS)
def test_every_contribution_is_eqs_15_to_18_and_is_drawn_the_other_way_over_the_number_of_keys(mask: str) -> None:
    visible = MASKS[mask]
    terms = random_terms(len(visible))
    moved = term_contributions(terms, 0.5, visible)
    for name in TERMS:
        for i, keys in enumerate(visible):
            s, less = terms.total()[i, keys], getattr(terms, name)[i, keys]
            q, p = scipy_softmax(0.5 * s), scipy_softmax(0.5 * (s - less))
            np.testing.assert_allclose(moved.contributions[name][i], rel_entr(p, q).sum(), atol=1e-12)
            np.testing.assert_allclose(moved.attention[i, keys], q, atol=1e-12)
            q, p = scipy_softmax(s), scipy_softmax(s - less)
            np.testing.assert_allclose(moved.drawn[name][i], rel_entr(q, p).sum() / (i + 1), atol=1e-12)
    assert not moved.attention[~visible].any()


def test_what_is_constant_in_the_key_contributes_nothing() -> None:
    terms = random_terms()
    rest = np.broadcast_to(np.arange(7.0)[:, None], (7, 7))
    constant = SixTerms(**{**{name: getattr(terms, name) for name in TERMS}, "e": rest, "rest": terms.rest})
    np.testing.assert_allclose(
        term_contributions(constant, 1.0, np.tri(7, dtype=bool)).contributions["e"], 0, atol=1e-12
    )


def test_contributions_are_not_negative_and_zero_where_only_one_key_is_seen() -> None:
    for c in term_contributions(random_terms(seed=3), 2.0, np.tri(7, dtype=bool)).contributions.values():
        assert c.min() >= -1e-12
        assert abs(c[0]) < 1e-12
