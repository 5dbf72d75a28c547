"""AUROC against scikit-learn's, against its definition, and both ways of counting against each other."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import auc, roc_auc_score

from weightscope import CheckpointError
from weightscope.core.compute.device import open_device
from weightscope.model.metrics.auroc import (
    auroc_by_token,
    auroc_of_one_order,
    auroc_of_own_scores,
    auroc_with_specific,
    mean_auroc,
    roc_curve,
    weighted_auroc,
)

WAYS = [
    pytest.param({"compiled": False}, id="numpy"),
    pytest.param(
        {"compiled": True},
        id="numba",
        marks=pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed"),
    ),
    pytest.param({"device": replace(open_device("array_api_strict"), memory=1 << 22)}, id="device"),
]
every_way = pytest.mark.parametrize("way", WAYS)


def exact_auroc(scores, weights):
    """The definition, pair by pair, in integers; NaN without a positive or a negative."""
    positive, negative = scores[weights > 0], scores[weights == 0]
    c = weights[weights > 0].astype(object)
    twice = 2 * (negative < positive[:, None]).sum(axis=1) + (negative == positive[:, None]).sum(axis=1)
    pairs = 2 * c.sum() * len(negative)
    return float(c @ twice.astype(object)) / float(pairs) if pairs else np.nan


def random_counts(rng, shape, density, most=5):
    return rng.integers(1, most, shape, endpoint=True) * (rng.random(shape) < density)


def as_csr(counts):
    return scipy.sparse.csr_array(np.asarray(counts, np.int64))


def factors(rng, vocab, rank, kind):
    """Left and right factors of whole numbers: float32 holds their products exactly, in whatever order it adds."""
    most = {"ties": 3, "distinct": 1000}[kind]
    return (rng.integers(-most, most, (vocab, rank), endpoint=True).astype(np.float32) for _ in range(2))


def check_against_definition(left, right, counts, way):
    """Every row is the definition's on the very scores that the products give."""
    auroc = auroc_by_token(left, right, as_csr(counts), **way, threads=2)
    expected = [exact_auroc(row, weights) for row, weights in zip(left @ right.T, counts, strict=True)]
    np.testing.assert_array_equal(auroc, expected)
    return auroc


@st.composite
def rows(draw):
    """A row of scores with few distinct values, and weights with at least one positive and one negative."""
    n = draw(st.integers(2, 40))
    scores = draw(st.lists(st.integers(-4, 4), min_size=n, max_size=n))
    weights = draw(st.lists(st.one_of(st.just(0), st.integers(1, 10**9)), min_size=n - 2, max_size=n - 2))
    weights = draw(st.permutations([0, draw(st.integers(1, 7)), *weights]))
    return np.array(scores, np.float32), np.array(weights, np.int64)


class TestOneRow:
    @given(rows())
    def test_it_is_the_definition(self, row):
        scores, weights = row
        positives = np.flatnonzero(weights)
        assert weighted_auroc(scores, positives, weights[positives]) == exact_auroc(scores, weights)

    @pytest.mark.parametrize("tied", [False, True])
    def test_scikit_learn_agrees(self, tied):
        rng = np.random.default_rng(0)
        scores = rng.integers(0, 20, 500) if tied else rng.standard_normal(500)
        positives = rng.choice(500, 60, replace=False)
        weights = rng.integers(1, 50, 60)
        sample_weight = np.ones(500)
        sample_weight[positives] = weights
        truth = np.isin(np.arange(500), positives)
        expected = roc_auc_score(truth, scores, sample_weight=sample_weight)
        assert weighted_auroc(scores, positives, weights) == pytest.approx(expected, abs=1e-13)

    def test_a_weight_is_a_repeated_positive(self):
        """As the paper's code has it: a previous token seen c times is c positives."""
        rng = np.random.default_rng(1)
        scores = rng.integers(0, 30, 200)
        positives, weights = np.arange(20), rng.integers(1, 9, 20)
        repeated = np.concatenate([np.repeat(scores[:20], weights), scores[20:]])
        truth = np.arange(len(repeated)) < weights.sum()
        assert weighted_auroc(scores, positives, weights) == pytest.approx(roc_auc_score(truth, repeated), abs=1e-13)

    @given(rows(), st.sampled_from([np.arctan, np.exp, lambda s: s**3 + 7, lambda s: 1e-40 * s]))
    def test_a_monotone_map_of_the_scores_changes_nothing(self, row, monotone):
        scores, weights = row[0].astype(np.float64), row[1]
        positives = np.flatnonzero(weights)
        before, after = (weighted_auroc(s, positives, weights[positives]) for s in (scores, monotone(scores)))
        assert before == after

    @given(rows())
    def test_negated_scores_give_the_complement(self, row):
        scores, weights = row
        positives = np.flatnonzero(weights)
        up, down = (weighted_auroc(s, positives, weights[positives]) for s in (scores, -scores))
        assert up + down == pytest.approx(1, abs=1e-15)

    @pytest.mark.parametrize("positives", [[], [0, 1, 2]])
    def test_one_class_alone_has_none(self, positives):
        assert np.isnan(weighted_auroc(np.arange(3.0), np.array(positives, int), np.ones(len(positives), int)))

    def test_an_index_of_weight_0_is_a_negative(self):
        assert weighted_auroc(np.arange(3.0), np.array([2, 1]), np.array([4, 0])) == 1

    def test_infinite_scores_tie_with_each_other(self):
        scores = np.array([np.inf, np.inf, -np.inf, 0])
        assert weighted_auroc(scores, np.array([0]), np.array([1])) == pytest.approx(2.5 / 3)

    @pytest.mark.parametrize(
        ("scores", "positives", "weights", "error", "says"),
        [
            ([0, np.nan, 1], [0], [1], CheckpointError, "1 of 3 scores are NaN"),
            ([0, 1, 2], [0], [-1], CheckpointError, "negative"),
            ([0, 1, 2], [0], [0.5], CheckpointError, "whole"),
            ([0, 1, 2], [0], [2**62], CheckpointError, "exactly"),
            ([0, 1, 2], [0, 0], [1, 1], ValueError, "twice"),
            ([0, 1, 2], [3], [1], ValueError, "3 scores"),
        ],
    )
    def test_what_cannot_be_scored_is_refused(self, scores, positives, weights, error, says):
        with pytest.raises(error, match=says):
            weighted_auroc(np.array(scores), np.array(positives), np.array(weights))


class TestCurve:
    @given(rows())
    def test_the_area_under_it_is_the_auroc(self, row):
        scores, weights = row
        positives = np.flatnonzero(weights)
        fpr, tpr = roc_curve(scores, positives, weights[positives])
        assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
        assert (np.diff(fpr) >= 0).all()
        assert (np.diff(tpr) >= 0).all()
        assert auc(fpr, tpr) == pytest.approx(weighted_auroc(scores, positives, weights[positives]), abs=1e-12)

    def test_it_passes_through_every_threshold(self):
        """Weights 3 and 1 above and below one of two negatives."""
        fpr, tpr = roc_curve(np.array([4, 3, 2, 1]), np.array([0, 2]), np.array([3, 1]))
        np.testing.assert_array_equal(fpr, [0, 0, 0.5, 0.5, 1])
        np.testing.assert_array_equal(tpr, [0, 0.75, 0.75, 1, 1])

    def test_straight_runs_are_two_points(self):
        fpr, _ = roc_curve(np.arange(1000), np.array([999]), np.array([1]))
        assert len(fpr) == 3

    @pytest.mark.parametrize("positives", [[], [0, 1]])
    def test_one_class_alone_has_none(self, positives):
        with pytest.raises(CheckpointError, match="a positive and a negative"):
            roc_curve(np.arange(2.0), np.array(positives, int), np.ones(len(positives), int))


class TestOneOrder:
    """Rows that score the columns alike, whose AUROC one sort gives."""

    @pytest.mark.parametrize("few", [1 << 21, 7], ids=["whole", "in blocks"])
    @pytest.mark.parametrize("tied", [False, True])
    def test_every_row_is_that_of_one_row(self, tied, few, monkeypatch):
        monkeypatch.setattr("weightscope.model.metrics.auroc.PAIRS_A_BLOCK", few)
        rng = np.random.default_rng(20)
        scores = rng.integers(0, 9, 60).astype(float) if tied else rng.standard_normal(60)
        counts = random_counts(rng, (40, 60), 0.2)
        counts[[0, 7, 39]], counts[5] = 0, 2
        auroc = auroc_of_one_order(scores, as_csr(counts))
        np.testing.assert_allclose(auroc, [exact_auroc(scores, weights) for weights in counts], rtol=1e-14)
        assert np.isnan(auroc[[0, 5, 7, 39]]).all()

    @pytest.mark.parametrize("few", [1 << 21, 7], ids=["whole", "in blocks"])
    def test_positives_may_have_scores_of_their_own(self, few, monkeypatch):
        """As a frequency from which the row's own counts are left out."""
        monkeypatch.setattr("weightscope.model.metrics.auroc.PAIRS_A_BLOCK", few)
        rng = np.random.default_rng(21)
        counts = random_counts(rng, (50, 50), 0.3)
        total = counts.sum(axis=0)
        sparse = as_csr(counts)
        auroc = auroc_of_own_scores(total, total[sparse.indices] - sparse.data, sparse)
        expected = [
            roc_auc_score(row > 0, total - row, sample_weight=np.maximum(row, 1)) if row.any() else np.nan
            for row in counts
        ]
        np.testing.assert_allclose(auroc, expected, rtol=1e-13)

    def test_scores_of_another_vocabulary_are_refused(self):
        with pytest.raises(ValueError, match="59 scores of 60 columns"):
            auroc_of_one_order(np.zeros(59), as_csr(np.ones((1, 60))))


class TestMeans:
    def test_the_paper_counts_unscored_tokens_as_zero(self):
        assert mean_auroc(np.array([0.5, np.nan, 1, np.nan])) == (0.75, 0.375, 2)

    def test_no_token_scored(self):
        auroc, paper, scored = mean_auroc(np.full(3, np.nan))
        assert np.isnan(auroc)
        assert (paper, scored) == (0, 0)


@every_way
class TestFullVocabulary:
    @pytest.mark.parametrize("kind", ["ties", "distinct"])
    @pytest.mark.parametrize(("vocab", "density"), [(1, 1), (7, 0.5), (64, 0.1), (129, 0.02), (301, 0.3), (700, 0.01)])
    def test_every_row_is_the_definition(self, way, kind, vocab, density):
        rng = np.random.default_rng(vocab)
        left, right = factors(rng, vocab, 5, kind)
        check_against_definition(left, right, random_counts(rng, (vocab, vocab), density), way)

    def test_a_vocabulary_of_many_blocks(self, way):
        rng = np.random.default_rng(2)
        left, right = factors(rng, 9001, 6, "distinct")
        few = np.zeros((9001, 9001), np.int8)
        few[::300] = random_counts(rng, (31, 9001), rng.choice([0.0003, 0.01, 0.1, 0.9], (31, 1)))
        auroc = auroc_by_token(left, right, scipy.sparse.csr_array(few), **way)
        expected = [exact_auroc(row, weights) for row, weights in zip(left[::300] @ right.T, few[::300], strict=True)]
        np.testing.assert_array_equal(auroc[::300], expected)
        assert mean_auroc(auroc).tokens_scored == 31

    def test_scikit_learn_agrees(self, way):
        rng = np.random.default_rng(3)
        left, right = factors(rng, 150, 16, "distinct")
        counts = random_counts(rng, (150, 150), 0.05, most=1000)
        auroc = auroc_by_token(left, right, as_csr(counts), **way)
        expected = [
            roc_auc_score(weights > 0, row, sample_weight=np.maximum(weights, 1))
            for row, weights in zip(left @ right.T, counts, strict=True)
        ]
        np.testing.assert_allclose(auroc, expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("kind", ["ties", "distinct"])
    @pytest.mark.parametrize("vocab", [1, 7, 129, 700])
    def test_the_specific_part_is_of_the_scores_without_the_means(self, way, kind, vocab):
        """Scores and means are whole numbers, which float32 holds exactly."""
        rng = np.random.default_rng(vocab)
        left, right = factors(rng, vocab, 5, kind)
        mean = rng.integers(-3, 4, 5).astype(np.float32)
        counts = random_counts(rng, (vocab, vocab), 0.1)
        counts[vocab // 2] = 0
        both, specific = auroc_with_specific(left, right, mean, as_csr(counts), **way, threads=2)
        np.testing.assert_array_equal(both, auroc_by_token(left, right, as_csr(counts), **way))
        scores = left.astype(float) @ right.T - mean.astype(float) @ right.T
        expected = [exact_auroc(row, weights) for row, weights in zip(scores, counts, strict=True)]
        np.testing.assert_array_equal(specific, expected)

    @settings(deadline=None, max_examples=60)
    @given(
        seed=st.integers(0, 2**32 - 1),
        vocab=st.integers(1, 200),
        scale=st.sampled_from([1e-42, 1e-30, 1e-3, 1, 1e12]),
        offset=st.sampled_from([0, 1, 1000]),
        density=st.sampled_from([0.01, 0.1, 0.5, 0.97]),
        few_values=st.booleans(),
    )
    def test_scores_of_any_size_and_spread(self, way, seed, vocab, scale, offset, density, few_values):
        """Rank 1: the scores are the right factor's numbers, so every spread a float32 has can be asked for."""
        rng = np.random.default_rng(seed)
        right = rng.integers(-5, 6, vocab) if few_values else rng.standard_cauchy(vocab)
        right = ((right + offset) * scale).astype(np.float32)[:, None]
        left = rng.choice([-1, 0, 1, 1e-3, 1e15], (vocab, 1)).astype(np.float32)
        check_against_definition(left, right, random_counts(rng, (vocab, vocab), density, most=10**9), way)

    @pytest.mark.parametrize(
        "scores",
        [
            pytest.param(np.zeros(300), id="all equal"),
            pytest.param(np.where(np.arange(300) % 2, 0.0, -0.0), id="zeros of both signs"),
            pytest.param(np.arange(300) * 1e-45, id="denormal"),
            pytest.param(np.geomspace(1e-45, 1e37, 300), id="eighty-two decades"),
            pytest.param(np.linspace(-4e37, 4e37, 300), id="a range near float32's own"),
            pytest.param(np.append(np.linspace(0, 1, 299), 1e30), id="one outlier"),
            pytest.param(1 + np.arange(300) * 2.0**-23, id="neighbouring floats"),
            pytest.param(np.repeat([-1e20, -1e-20, 1e-20], 100), id="three values"),
        ],
    )
    def test_awkward_scores(self, way, scores, subtests):
        scores = scores.astype(np.float32)
        positives = {
            "lowest": np.arange(10),
            "highest": np.arange(290, 300),
            "both ends": np.array([0, 299]),
            "middle": np.arange(140, 160),
            "one": np.array([150]),
            "all but one": np.delete(np.arange(300), 77),
            "random": np.random.default_rng(4).choice(300, 40, replace=False),
        }
        for place, chosen in positives.items():
            with subtests.test(place=place):
                counts = np.zeros((300, 300), np.int64)
                counts[np.ix_([0, 5, 299], chosen)] = 1 + np.arange(len(chosen))
                auroc = check_against_definition(np.ones((300, 1), np.float32), scores[:, None], counts, way)
                assert np.isnan(auroc[1])
                if not np.ptp(scores):
                    assert auroc[0] == 0.5

    def test_a_step_is_found_wherever_it_falls_in_a_bucket(self, way):
        """Positives and negatives alternate between neighbouring floats, so that every bucket with steps has both."""
        rng = np.random.default_rng(5)
        near = 1 + np.arange(10) * 2.0**-23
        scores = np.concatenate([near * 2.0**k for k in range(-12, 12)] * 3).astype(np.float32)  # (720,)
        counts = np.stack([random_counts(rng, 720, density) for density in rng.uniform(0.01, 0.6, 720)])
        check_against_definition(np.ones((720, 1), np.float32), scores[:, None], counts, way)

    @pytest.mark.parametrize(("vocab", "most", "much_more"), [(150, 10**9, 10**4), (600, 10**4, 10**3), (10, 2**53, 1)])
    def test_counts_past_int32(self, way, vocab, most, much_more):
        """Of one token, of all that are counted together, or of a row times the columns that are added up in int32."""
        rng = np.random.default_rng(6)
        left, right = factors(rng, vocab, 3, "ties")
        counts = random_counts(rng, (vocab, vocab), 0.6) * most
        counts[3] *= much_more
        check_against_definition(left, right, counts, way)

    def test_no_vocabulary(self, way):
        assert not len(auroc_by_token(np.ones((0, 2)), np.ones((0, 2)), as_csr(np.zeros((0, 0))), **way))

    def test_negated_scores_give_the_complement(self, way):
        rng = np.random.default_rng(9)
        left, right = factors(rng, 300, 4, "ties")
        counts = as_csr(random_counts(rng, (300, 300), 0.1))
        up, down = (auroc_by_token(side, right, counts, **way) for side in (left, -left))
        np.testing.assert_allclose(up + down, 1, rtol=0, atol=1e-15)

    def test_threads_and_tiles_change_nothing(self, way, monkeypatch):
        rng = np.random.default_rng(10)
        left, right = factors(rng, 500, 4, "ties")
        counts = as_csr(random_counts(rng, (500, 500), 0.05))
        alone = auroc_by_token(left, right, counts, **way, threads=1)
        for most in ("COUNTED_ROWS", "SORTED_ROWS"):
            monkeypatch.setattr(f"weightscope.model.metrics.auroc.{most}", 7)
        np.testing.assert_array_equal(auroc_by_token(left, right, counts, **way, threads=3), alone)

    def test_a_row_without_positives_or_without_negatives_is_nan(self, way):
        rng = np.random.default_rng(11)
        left, right = factors(rng, 90, 4, "ties")
        counts = random_counts(rng, (90, 90), 0.2)
        counts[[0, 4, 5, 89]], counts[[3, 88]] = 0, 2
        auroc = check_against_definition(left, right, counts, way)
        assert np.isnan(auroc[[0, 3, 4, 5, 88, 89]]).all()
        assert mean_auroc(auroc).tokens_scored == 84

    def test_no_counts_at_all(self, way):
        auroc = auroc_by_token(np.ones((5, 2)), np.ones((5, 2)), as_csr(np.zeros((5, 5))), **way)
        assert np.isnan(auroc).all()

    def test_counts_need_not_be_canonical(self, way):
        """Unsorted, given in parts and with zeros stored: the same counts, and left as they were."""
        rng = np.random.default_rng(12)
        left, right = factors(rng, 40, 3, "distinct")
        dense = random_counts(rng, (40, 40), 0.3)
        row, column = np.nonzero(dense)
        order = rng.permutation(2 * len(row))
        order = order[np.argsort(row[order % len(row)], kind="stable")]  # mixed within rows
        value = np.concatenate([dense[row, column] - 1, np.ones(len(row), np.int64)])
        indptr = np.append(0, np.cumsum(2 * (dense > 0).sum(axis=1)))
        parts = scipy.sparse.csr_array((value[order], np.tile(column, 2)[order], indptr), shape=(40, 40))
        stored = scipy.sparse.csr_array((np.zeros(3, np.int64), [5, 1, 30], [0, *[3] * 40]), shape=(40, 40))
        expected = auroc_by_token(left, right, as_csr(dense), **way)
        np.testing.assert_array_equal(auroc_by_token(left, right, parts, **way), expected)
        np.testing.assert_array_equal(auroc_by_token(left, right, parts.tocoo(), **way), expected)
        assert np.isnan(auroc_by_token(left, right, stored, **way)).all()
        np.testing.assert_array_equal(stored.indices, [5, 1, 30])

    def test_progress_adds_up_to_the_vocabulary(self, way):
        rng = np.random.default_rng(13)
        left, right = factors(rng, 600, 2, "distinct")
        steps = []
        auroc_by_token(left, right, as_csr(random_counts(rng, (600, 600), 0.002)), progress=steps.append, **way)
        assert sum(steps) == 600
        assert len(steps) > 2

    def test_an_error_in_progress_comes_through(self, way):
        def stop(done):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            auroc_by_token(np.ones((9, 2)), np.ones((9, 2)), as_csr(np.eye(9)), progress=stop, **way)


class TestRefusals:
    @pytest.mark.parametrize("side", [0, 1])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_factors_that_are_not_finite(self, side, value):
        sides = [np.ones((6, 2), np.float32), np.ones((6, 2), np.float32)]
        sides[side][4, 1] = value
        with pytest.raises(CheckpointError, match=f"{('left', 'right')[side]} factor.*1 of 6 rows.*row 4"):
            auroc_by_token(*sides, as_csr(np.eye(6)))

    def test_scores_that_leave_float32(self):
        with pytest.raises(CheckpointError, match="float32"):
            auroc_by_token(np.full((3, 2), 1e20), np.full((3, 2), 1e20), as_csr(np.eye(3)))

    @pytest.mark.parametrize(
        ("counts", "says"),
        [
            (as_csr(np.eye(4)), "shape"),
            (as_csr(-np.eye(3)), "negative"),
            (as_csr(np.eye(3)).astype(np.float64), "whole"),
            (as_csr(np.eye(3) * 2**61), "exactly"),
        ],
    )
    def test_counts_that_are_none(self, counts, says):
        with pytest.raises(CheckpointError, match=says):
            auroc_by_token(np.ones((3, 2)), np.ones((3, 2)), counts)
