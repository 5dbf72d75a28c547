"""Positions that are added to what queries and keys are made of, against the sums of section A.3 of DETR's paper."""

import numpy as np
import pytest

import weightscope as ws
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine
from weightscope.attention.norms import Norm
from weightscope.attention.positions import Added

RNG = np.random.default_rng(0)
H, D, R, SCALE = 3, 8, 4, 0.5
X, Y = RNG.normal(size=(5, D)), RNG.normal(size=(7, D))
P, OF_Y = RNG.normal(size=X.shape), RNG.normal(size=Y.shape)
NORM = Norm(True, 1e-5, RNG.normal(size=D), RNG.normal(size=D))


def affine(width: int = R) -> Affine:
    return Affine(RNG.normal(size=(H, D, width)), RNG.normal(size=(H, width)))


def alone(of: Affine) -> Affine:
    return Affine(of.w, np.zeros_like(of.b))


def layer(added: Added, q: Affine, k: Affine, cross: bool = False) -> Layer:
    w_o = RNG.normal(size=(H, R, D))
    return Layer(q, k, affine(), w_o, RNG.normal(size=D), index=2, scale=SCALE, cross=cross, added=added)


def products(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return SCALE * q @ k.transpose(0, 2, 1)


@pytest.mark.parametrize("norm", [None, NORM], ids=["post-norm", "pre-norm"])
def test_queries_and_keys_are_made_of_the_stream_and_positions(norm: Norm | None) -> None:
    q, k = affine(), affine()
    bare = layer(Added(alone(q), alone(k)), q, k)
    one, z = (bare, X) if norm is None else (bare.after_norm(norm), norm(X))
    np.testing.assert_allclose(one.scores(X, added=P), products(q(z + P), k(z + P)))
    np.testing.assert_allclose(one.scores(X, added=0), products(q(z), k(z)))
    np.testing.assert_allclose(one.inner_values(X), bare.v(z))  # values know nothing of positions


def test_each_side_of_cross_attention_has_positions_of_its_own() -> None:
    q, k = affine(), affine()
    both = layer(Added(alone(q), alone(k)), q, k, cross=True)
    found = both.scores(X, memory=Y, added=P, added_to_memory=OF_Y)
    np.testing.assert_allclose(found, products(q(X + P), k(Y + OF_Y)))
    queries = layer(Added(alone(q)), q, k, cross=True)
    np.testing.assert_allclose(queries.scores(X, memory=Y, added=P), products(q(X + P), k(Y)))


def test_positions_beside_content_meet_positions_alone() -> None:
    """Conditional DETR: [c_q | p_q] . [c_k | p_k] = c_q . c_k + p_q . p_k."""
    q, k, of_p, of_y = (affine() for _ in range(4))
    beside = [
        Affine(np.concatenate((np.zeros_like(of.w), of.w), -1), np.hstack((np.zeros_like(of.b), of.b)))
        for of in (of_p, of_y)
    ]
    found = layer(Added(*beside), q, k, cross=True).scores(X, memory=Y, added=P, added_to_memory=OF_Y)
    np.testing.assert_allclose(found, products(q(X), k(Y)) + products(of_p(P), of_y(OF_Y)))


def test_the_form_of_content_is_that_of_positions() -> None:
    q, k = affine(), affine()
    one = layer(Added(alone(q), alone(k)), q, k)
    swapped = one.scores(P, added=X)
    np.testing.assert_allclose(one.scores(X, added=P), swapped)
    w, b = one.head(1).qk.dense(), one.head(1).qk_bias
    terms = sum(a @ w @ c.T for a in (X, P) for c in (X, P)) + (X + P) @ b
    centred = [of - of.mean(axis=-1, keepdims=True) for of in (SCALE * terms, swapped[1])]  # but terms of the query
    np.testing.assert_allclose(*centred, atol=1e-9)


def test_what_is_given_is_what_the_layer_adds() -> None:
    q, k = affine(), affine()
    one, plain = layer(Added(alone(q), alone(k)), q, k), layer(Added(), q, k)
    crossing = layer(Added(alone(q), alone(k)), q, k, cross=True)
    for of, given, problem in (
        (one, {}, "layer 2 adds positions to what its queries and keys are made of: say which, `added=`, or 0"),
        (one, {"added": P, "added_to_memory": P}, "layer 2 adds no such positions: leave `added_to_memory` out"),
        (one, {"added": P[:3]}, r"layer 2 adds positions of shape \(5, 8\), and was given \(3, 8\)"),
        (plain, {"added": P}, "layer 2 adds no such positions: leave `added` out"),
        (crossing, {"memory": Y, "added": P}, "say which, `added_to_memory=`, or 0 for none"),
    ):
        with pytest.raises(ws.CheckpointError, match=problem):
            of.scores(X, **given)
