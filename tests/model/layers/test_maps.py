"""Folded norms do what the norms did, for any weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightscope.core.compute.half import Half
from weightscope.model.layers.maps import Affine, InnerNorm, Norm, rms, sigma

EPS = 1e-5


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.random.Generator, np.ndarray, Affine]:
    """A source of more numbers, inputs x (3, d), and an affine map of two heads (2, d, r)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    d, r = draw(st.integers(2, 9)), draw(st.integers(2, 6))
    size = 10 ** draw(st.floats(-3, 3))
    return rng, size * rng.normal(size=(3, d)), Affine(rng.normal(size=(2, d, r)), rng.normal(size=(2, r)))


@given(cases())
def test_a_layer_norm_folds(case: tuple[np.random.Generator, np.ndarray, Affine]) -> None:
    """LN(x) W + b = (x / sigma) W' + b'."""
    rng, x, affine = case
    gamma, beta = rng.normal(size=(2, x.shape[1]))
    size = sigma(x, EPS)[:, None]
    normed = (x - x.mean(axis=1, keepdims=True)) / size * gamma + beta
    norm = Norm(True, EPS, gamma, beta)
    np.testing.assert_allclose(norm(x), normed, atol=1e-9)
    np.testing.assert_allclose(affine.after_norm(norm)(x / size), affine(normed), atol=1e-9)


@given(cases())
def test_an_rms_norm_folds(case: tuple[np.random.Generator, np.ndarray, Affine]) -> None:
    rng, x, affine = case
    gamma = rng.normal(size=x.shape[1])
    z = x / rms(x, EPS)[:, None]
    folded = affine.after_norm(Norm(False, EPS, gamma, np.zeros_like(gamma)))
    np.testing.assert_allclose(folded(z), affine(z * gamma), atol=1e-9)


@pytest.mark.parametrize("centred", [False, True])
@given(case=cases())
def test_a_norm_of_outputs_folds_but_for_its_scalar(
    centred: bool, case: tuple[np.random.Generator, np.ndarray, Affine]
) -> None:
    """A norm of each head's queries is the centred and scaled map times one number a token and head."""
    rng, x, affine = case
    gain = rng.normal(size=affine.b.shape)
    q = affine(x)
    size = sigma(q, EPS) if centred else rms(q, EPS)
    normed = (q - q.mean(axis=-1, keepdims=True) * centred) / size[..., None] * gain[:, None]
    seen = affine.centred(jointly=False) if centred else affine
    rebuilt = seen.scaled(gain)(x) * InnerNorm(seen, EPS).scalars(x)[..., None]
    np.testing.assert_allclose(rebuilt, normed, atol=1e-8)


@given(cases())
def test_maps_compose(case: tuple[np.random.Generator, np.ndarray, Affine]) -> None:
    rng, x, affine = case
    before, shift = rng.normal(size=(5, x.shape[1])), rng.normal(size=x.shape[1])
    y = rng.normal(size=(3, 5))
    np.testing.assert_allclose(affine.after(before, shift)(y), affine(y @ before + shift), atol=1e-9)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_head_folds_alone_as_with_all_and_leaves_the_weights_alone(half: bool, centred: bool) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((2, 5, 3)).astype(np.float16)
    plain = Affine(Half(w) if half else w.astype(np.float32), rng.standard_normal((2, 3), np.float32))
    gamma, beta = rng.standard_normal((2, 5), np.float32)
    folded = plain.after_norm(Norm(centred, EPS, gamma, beta))
    alone = [folded.of(head) for head in range(2)]
    np.testing.assert_array_equal(np.asarray(plain.stored), w.astype(np.float32))
    np.testing.assert_allclose([b for _, b in alone], folded.b, rtol=0, atol=1e-6 * np.abs(folded.b).max())
    np.testing.assert_array_equal([w for w, _ in alone], folded.w)
    np.testing.assert_array_equal([folded.of(head)[0] for head in range(2)], folded.w)  # from all heads, now kept
    np.testing.assert_array_equal(plain.w, w.astype(np.float32))


@given(cases())
def test_a_norm_before_a_folded_norm_folds_too(case: tuple[np.random.Generator, np.ndarray, Affine]) -> None:
    rng, x, affine = case
    first, second = rng.normal(size=(2, x.shape[1]))
    twice = affine.after_norm(Norm(False, EPS, first, 0 * first)).after_norm(Norm(False, EPS, second, 0 * second))
    np.testing.assert_allclose(twice(x), affine(x * second * first), atol=1e-9)
