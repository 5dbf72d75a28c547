"""Folded norms do what the norms did, for any weights."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from weightscope.folding import Affine, InverseRms
from weightscope.metrics.sigma import rms, sigma

NUMBERS = st.floats(-2, 2).filter(lambda x: x == 0 or abs(x) > 1e-3)
X = arrays(np.float64, (3, 6), elements=NUMBERS)
W = arrays(np.float64, (2, 6, 4), elements=NUMBERS)
B = arrays(np.float64, (2, 4), elements=NUMBERS)
GAIN = arrays(np.float64, (6,), elements=NUMBERS)


@given(X, W, B, GAIN, GAIN)
def test_a_layer_norm_folds(x: np.ndarray, w: np.ndarray, b: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> None:
    """LN(x) W + b = (x / sigma) W' + b'."""
    normed = (x - x.mean(axis=1, keepdims=True)) / sigma(x, 1e-5)[:, None] * gamma + beta
    folded = Affine(w, b).after_norm(gamma, beta, centred=True)
    np.testing.assert_allclose(folded(x / sigma(x, 1e-5)[:, None]), Affine(w, b)(normed), atol=1e-9)


@given(X, W, B, GAIN)
def test_an_rms_norm_folds(x: np.ndarray, w: np.ndarray, b: np.ndarray, gamma: np.ndarray) -> None:
    normed = x / rms(x, 1e-5)[:, None] * gamma
    folded = Affine(w, b).after_norm(gamma, np.zeros(6), centred=False)
    np.testing.assert_allclose(folded(x / rms(x, 1e-5)[:, None]), Affine(w, b)(normed), atol=1e-9)


@given(X, W, B, arrays(np.float64, (2, 4), elements=NUMBERS))
def test_a_norm_of_outputs_folds_but_for_its_scalar(
    x: np.ndarray, w: np.ndarray, b: np.ndarray, gain: np.ndarray
) -> None:
    """A LayerNorm of each head's queries is the centred and scaled map times one number a token and head."""
    q = Affine(w, b)(x)
    normed = (q - q.mean(axis=-1, keepdims=True)) / sigma(q, 1e-5)[..., None] * gain[:, None]
    centred = Affine(w, b).scaled(np.ones((1, 4)), centred=True)
    found = centred.scaled(gain, centred=False)(x) * InverseRms(centred, 1e-5)(x)[..., None]
    np.testing.assert_allclose(found, normed, atol=1e-9)


@given(X, W, B, arrays(np.float64, (5, 6), elements=NUMBERS), GAIN)
def test_maps_compose(x: np.ndarray, w: np.ndarray, b: np.ndarray, before: np.ndarray, shift: np.ndarray) -> None:
    y = x[:, :5]
    np.testing.assert_allclose(Affine(w, b).after(before, shift)(y), Affine(w, b)(y @ before + shift), atol=1e-9)
