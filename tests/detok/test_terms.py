"""c^ee ... c^p against the paper's equations written out as loops."""

import numpy as np
from scipy.special import rel_entr
from scipy.special import softmax as scipy_softmax

from weightscope.detok.first_layer import (
    TERMS,
    Parts,
    SixTerms,
    drawn_contributions,
    six_terms,
    term_contributions,
)


def random_terms(n: int = 7, r: int = 4, seed: int = 0) -> SixTerms:
    rng = np.random.default_rng(seed)
    return six_terms(*(Parts(*rng.normal(size=(3, n, r))) for _ in range(2)))


def test_every_contribution_is_eqs_15_to_18() -> None:
    terms = random_terms()
    contributions = term_contributions(terms, 0.5, np.tri(7, dtype=bool))
    for name in TERMS:
        for i in range(7):
            s = terms.total()[i, : i + 1]
            q = scipy_softmax(0.5 * s)
            p = scipy_softmax(0.5 * (s - getattr(terms, name)[i, : i + 1]))
            np.testing.assert_allclose(contributions[name][i], rel_entr(p, q).sum(), atol=1e-12)


def test_what_the_paper_draws_is_the_divergence_the_other_way_over_the_number_of_keys() -> None:
    terms = random_terms()
    contributions = drawn_contributions(terms, np.tri(7, dtype=bool))
    for name in TERMS:
        for i in range(7):
            s = terms.total()[i, : i + 1]
            q, p = scipy_softmax(s), scipy_softmax(s - getattr(terms, name)[i, : i + 1])
            np.testing.assert_allclose(contributions[name][i], rel_entr(q, p).sum() / (i + 1), atol=1e-12)


def test_what_is_constant_in_the_key_contributes_nothing() -> None:
    terms = random_terms()
    rest = np.broadcast_to(np.arange(7.0)[:, None], (7, 7))
    constant = SixTerms(**{**{name: getattr(terms, name) for name in TERMS}, "e": rest, "rest": terms.rest})
    np.testing.assert_allclose(term_contributions(constant, 1.0, np.tri(7, dtype=bool))["e"], 0, atol=1e-12)


def test_contributions_are_not_negative_and_zero_where_only_one_key_is_seen() -> None:
    for c in term_contributions(random_terms(seed=3), 2.0, np.tri(7, dtype=bool)).values():
        assert c.min() >= -1e-12
        assert abs(c[0]) < 1e-12
