"""Positions that are added to what queries and keys are made of, against the sums of section A.3 of DETR's paper."""

import numpy as np
import pytest

import weightscope as ws
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine, Norm
from weightscope.model.layers.positions import Added

RNG = np.random.default_rng(0)
H, D, R, SCALE = 3, 8, 4, 0.5
X, Y = RNG.normal(size=(5, D)), RNG.normal(size=(7, D))
P, OF_Y = RNG.normal(size=X.shape), RNG.normal(size=Y.shape)
NORM = Norm(True, 1e-5, RNG.normal(size=D), RNG.normal(size=D))


def affine(width: int = R) -> Affine:
    return Affine(RNG.normal(size=(H, D, width)), RNG.normal(size=(H, width)))


def without_bias(affine: Affine) -> Affine:
    return Affine(affine.w, np.zeros_like(affine.b))


def layer(added: Added, q: Affine, k: Affine, cross: bool = False) -> Layer:
    w_o = RNG.normal(size=(H, R, D))
    return Layer(q, k, affine(), w_o, RNG.normal(size=D), index=2, scale=SCALE, cross=cross, added=added)


def products(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return SCALE * q @ k.transpose(0, 2, 1)


@pytest.mark.parametrize("norm", [None, NORM], ids=["post-norm", "pre-norm"])
def test_queries_and_keys_are_made_of_the_stream_and_positions(norm: Norm | None) -> None:
    q, k = affine(), affine()
    bare = layer(Added(without_bias(q), without_bias(k)), q, k)
    adding, z = (bare, X) if norm is None else (bare.after_norm(norm), norm(X))
    np.testing.assert_allclose(adding.scores(X, added=P), products(q(z + P), k(z + P)))
    np.testing.assert_allclose(adding.scores(X, added=0), products(q(z), k(z)))
    np.testing.assert_allclose(adding.inner_values(X), bare.v(z))  # values know nothing of positions


def test_each_side_of_cross_attention_adds_its_positions() -> None:
    q, k = affine(), affine()
    both = layer(Added(without_bias(q), without_bias(k)), q, k, cross=True)
    scores = both.scores(X, memory=Y, added=P, added_to_memory=OF_Y)
    np.testing.assert_allclose(scores, products(q(X + P), k(Y + OF_Y)))
    queries = layer(Added(without_bias(q)), q, k, cross=True)
    np.testing.assert_allclose(queries.scores(X, memory=Y, added=P), products(q(X + P), k(Y)))


def test_appended_positions_meet_only_positions() -> None:
    """Conditional DETR: [c_q | p_q] . [c_k | p_k] = c_q . c_k + p_q . p_k."""
    q, k, of_p, of_y = (affine() for _ in range(4))
    appended = [
        Affine(np.concatenate((np.zeros_like(part.w), part.w), -1), np.hstack((np.zeros_like(part.b), part.b)))
        for part in (of_p, of_y)
    ]
    scores = layer(Added(*appended), q, k, cross=True).scores(X, memory=Y, added=P, added_to_memory=OF_Y)
    np.testing.assert_allclose(scores, products(q(X), k(Y)) + products(of_p(P), of_y(OF_Y)))


def test_content_and_positions_share_one_form() -> None:
    q, k = affine(), affine()
    adding = layer(Added(without_bias(q), without_bias(k)), q, k)
    swapped = adding.scores(P, added=X)
    np.testing.assert_allclose(adding.scores(X, added=P), swapped)
    w, b = adding.head(1).qk.dense(), adding.head(1).qk_bias
    terms = sum(a @ w @ c.T for a in (X, P) for c in (X, P)) + (X + P) @ b
    centred = [
        scores - scores.mean(axis=-1, keepdims=True) for scores in (SCALE * terms, swapped[1])
    ]  # but terms of the query
    np.testing.assert_allclose(*centred, atol=1e-9)


def test_positions_that_the_layer_does_not_add_are_refused() -> None:
    q, k = affine(), affine()
    adding, plain = layer(Added(without_bias(q), without_bias(k)), q, k), layer(Added(), q, k)
    crossing = layer(Added(without_bias(q), without_bias(k)), q, k, cross=True)
    for refusing, given, problem in (
        (adding, {}, "layer 2 adds positions to what its queries and keys are made of: say which, `added=`, or 0"),
        (adding, {"added": P, "added_to_memory": P}, "layer 2 adds no such positions: leave `added_to_memory` out"),
        (adding, {"added": P[:3]}, r"layer 2 adds positions of shape \(5, 8\), and was given \(3, 8\)"),
        (plain, {"added": P}, "layer 2 adds no such positions: leave `added` out"),
        (crossing, {"memory": Y, "added": P}, "say which, `added_to_memory=`, or 0 for none"),
    ):
        with pytest.raises(ws.CheckpointError, match=problem):
            refusing.scores(X, **given)
