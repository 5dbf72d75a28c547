"""What a user multiplies or hands over in the wrong shape is refused with the shapes found and expected."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import weightscope as ws
from weightscope.model.layers.factored import Factored
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.rotation import Rotation

W = Factored(np.ones((4, 2)), np.ones((6, 2)))

PRODUCTS: dict[str, tuple[Callable[[], object], str]] = {
    "a vector on the right": (lambda: W @ np.ones(5), r"@ y: y has shape \(5,\); expected \(6,\) or \(6, n\)$"),
    "a matrix on the right": (lambda: W @ np.ones((3, 6)), r"y has shape \(3, 6\); expected \(6,\) or \(6, n\)$"),
    "a number on the right": (lambda: W @ 3, r"y has shape \(\); expected \(6,\)"),
    "a vector on the left": (lambda: np.ones(5) @ W, r"x has shape \(5,\); expected \(4,\) or \(n, 4\)$"),
    "a matrix on the left": (lambda: np.ones((4, 3)) @ W, r"x has shape \(4, 3\); expected \(4,\) or \(n, 4\)$"),
    "words": (lambda: W @ ["a"] * 6, r"expected an array of numbers, not list of dtype <U1$"),
    "nothing": (lambda: W @ None, r"expected an array of numbers, not NoneType"),
    "rows of several lengths": (lambda: W @ [[1], [1, 2]], r"expected an array of numbers, not list"),
    "another of the kind": (lambda: W @ W, r"Factored\(4 x 6, .*\) @ Factored\(4 x 6, .*\): the second needs 6 rows$"),
    "factors of two ranks": (
        lambda: Factored(np.ones((4, 2)), np.ones((4, 3))),
        r"left has shape \(4, 2\) and right \(4, 3\)",
    ),
    "eigenvalues": (W.eigvals, "has no eigenvalues: it is not square$"),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_a_product_of_the_wrong_shape_is_refused_with_both_shapes(case: str) -> None:
    multiply, message = PRODUCTS[case]
    with pytest.raises(ValueError, match=message):
        multiply()


def test_products_of_the_right_shapes_are_not_refused() -> None:
    assert (W @ np.ones(6)).shape == (4,) and (W @ np.ones((6, 3))).shape == (4, 3)
    assert (np.ones(4) @ W).shape == (6,) and (np.ones((2, 3, 4)) @ W).shape == (2, 3, 6)
    assert (W @ W.T).shape == (4, 4) and (W @ np.ones((2, 6, 3), bool)).shape == (2, 4, 3)


X = np.random.default_rng(0).standard_normal((5, 256), np.float32)
EVEN = np.full((8, 5, 5), 0.2)
OF_A_LAYER: dict[str, tuple[Callable[[Layer], object], str]] = {
    "scores of a narrow stream": (lambda layer: layer.scores(X[:, 1:]), r"x has shape \(5, 255\)"),
    "scores at fewer positions": (
        lambda layer: layer.scores(X, np.arange(3)),
        r"positions has shape \(3,\) and dtype int64; x needs numbers of shape \(5,\) or \(5, axes\)$",
    ),
    "scores at no position": (lambda layer: layer.scores(X, []), r"positions has shape \(0,\)"),
    "scores at words": (lambda layer: layer.scores(X, ["a"] * 5), r"positions has shape \(5,\) and dtype <U1"),
    "queries of a narrow stream": (lambda layer: layer.queries(X[:, 1:]), r"shape \(5, 255\); .* \(tokens, 256\)$"),
    "values before W_O": (lambda layer: layer.inner_values(X[:, 1:]), r"shape \(5, 255\); .* \(tokens, 256\)$"),
    "values of a narrow stream": (lambda layer: layer.values(X[:, 1:]), r"x has shape \(5, 255\)"),
    "output of two heads": (
        lambda layer: layer.output(EVEN[:2], X),
        r"attention has shape \(2, 5, 5\); layer 0 needs \(8, queries, 5\)$",
    ),
    "output of one head": (lambda layer: layer.output(EVEN[0], X), r"attention has shape \(5, 5\)"),
    "output of fewer keys": (lambda layer: layer.output(EVEN[:, :, :3], X), r"\(8, 5, 3\); .* \(8, queries, 5\)$"),
    "a part of two heads": (
        lambda layer: layer.output(EVEN, X, EVEN[:2]),
        r"part has shape \(2, 5, 5\); layer 0 needs attention's, \(8, 5, 5\)$",
    ),
}


@pytest.mark.parametrize("case", OF_A_LAYER)
def test_a_layer_refuses_the_wrong_shape_with_both_shapes(case: str, two_layers: ws.Model) -> None:
    call, message = OF_A_LAYER[case]
    with pytest.raises(ValueError, match=message):
        call(two_layers.layer(0))


def test_attention_of_some_queries_gives_their_output(two_layers: ws.Model) -> None:
    layer = two_layers.layer(0)
    np.testing.assert_allclose(layer.output(EVEN[:, :2], X), layer.output(EVEN, X)[:2], rtol=1e-5)


def test_a_rotated_layer_refuses_positions_of_another_length(two_layers: ws.Model) -> None:
    rotated = replace(two_layers.layer(0), rotation=Rotation(np.ones(16)))
    with pytest.raises(ValueError, match=r"positions has shape \(3,\)"):
        rotated.scores(X, np.arange(3))


OF_THE_FIRST: dict[str, tuple[Callable[[ws.FirstLayer], object], type[Exception], str]] = {
    "no such head": (lambda first: first.query_factor(99), ws.CheckpointError, "no head 99: a layer has 8"),
    "no such head's rows": (lambda first: first.query_rows(99, [1]), ws.CheckpointError, "no head 99"),
    "no such head's neighbours": (lambda first: first.neighbours(5, heads=[99]), ws.CheckpointError, "no head 99"),
    "no such key-value head": (lambda first: first.key_factor(99), ws.CheckpointError, "no key-value head 99: .* 8$"),
    "no such tokens": (lambda first: first.query_factor(0, 9000), ws.CheckpointError, "the vocabulary has 8000"),
    "tokens the wrong way round": (lambda first: first.query_factor(0, 5, 2), ws.CheckpointError, "no tokens 5 to 2"),
    "tokens in a square": (lambda first: first.query_rows(0, [[1]]), ValueError, r"shape \(1, 1\); expected \(n,\)"),
    "half a token": (lambda first: first.query_rows(0, [0.5]), ValueError, "dtype float64; expected whole numbers"),
    "a token in words": (lambda first: first.token_scores("a"), ValueError, "tokens have dtype <U1; expected whole"),
    "words": (lambda first: first.terms(0, ["a"], [0]), ValueError, "tokens have dtype <U1; expected whole numbers"),
    "half a position": (lambda first: first.terms(0, [1], [0.5]), ValueError, "positions have dtype float64"),
}


@pytest.mark.parametrize("case", OF_THE_FIRST)
def test_the_first_layer_refuses_what_it_has_not(case: str, two_layers: ws.Model) -> None:
    call, error, message = OF_THE_FIRST[case]
    with pytest.raises(error, match=message):
        call(ws.first_layer(two_layers))


def test_the_terms_of_no_token_are_empty(two_layers: ws.Model) -> None:
    assert ws.first_layer(two_layers).terms(0, [], []).total().shape == (0, 0)
