"""A layer with two inputs on arrays: its norms on either side, and W_QK from one space to the other."""

from dataclasses import replace

import numpy as np
import pytest

import weightscope as ws
from weightscope.heads.audit.measure import measure_layer
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine, Norm

RNG = np.random.default_rng(0)
H, G, D, E, R, N, M = 4, 2, 8, 6, 3, 5, 7


def affine(count: int, width: int) -> Affine:
    return Affine(RNG.normal(size=(count, width, R)), RNG.normal(size=(count, R)))


def norm(width: int) -> Norm:
    return Norm(centred=True, eps=1e-3, gamma=RNG.normal(size=width), beta=RNG.normal(size=width))


PLAIN = Layer(
    affine(H, D), affine(G, E), affine(G, E), RNG.normal(size=(H, R, D)), RNG.normal(size=D), scale=0.5, cross=True
)
OF_STREAM, OF_MEMORY = norm(D), norm(E)
LAYER = PLAIN.after_norm(OF_STREAM).after_memory_norm(OF_MEMORY)
X, Y = 3 * RNG.normal(size=(N, D)) + 1, 5 * RNG.normal(size=(M, E)) - 2


def test_norms_fold_on_their_own_sides() -> None:
    attention = RNG.random(size=(H, N, M))
    x, y = OF_STREAM(X), OF_MEMORY(Y)
    np.testing.assert_allclose(LAYER.scores(X, memory=Y), PLAIN.scores(x, memory=y), atol=1e-12)
    np.testing.assert_allclose(LAYER.values(Y), PLAIN.values(y), atol=1e-12)
    np.testing.assert_allclose(LAYER.output(attention, X, memory=Y), PLAIN.output(attention, y), atol=1e-12)


def test_heads_lead_from_the_stream_to_the_memory_and_back() -> None:
    scores, values = LAYER.scores(X, memory=Y), LAYER.values(Y)
    x, y = LAYER.normalised(X), LAYER.normalised_memory(Y)
    for head in LAYER.heads:
        assert head.qk.shape == (D, E) and head.vo.shape == (E, D)
        of_query = (x @ head.w_q + head.b_q) @ head.b_k
        expected = head.scale * (x @ head.qk @ y.T + head.qk_bias @ y.T + of_query[:, None])
        np.testing.assert_allclose(scores[head.index], expected, atol=1e-12)
        np.testing.assert_allclose(values[head.index], y @ head.vo + head.vo_bias, atol=1e-12)


def test_what_it_attends_to_has_to_be_said() -> None:
    with pytest.raises(ws.CheckpointError, match="is cross-attention: say what to attend to"):
        LAYER.scores(X)
    with pytest.raises(ws.CheckpointError, match="has no memory"):
        replace(PLAIN, cross=False).scores(X, memory=Y)


def test_what_needs_one_space_is_not_measured() -> None:
    measured = measure_layer(LAYER, {})
    for head in LAYER.heads:
        wanted = np.linalg.svd(head.qk.dense(), compute_uv=False)[:R]
        np.testing.assert_allclose(measured["qk_singular_values"][head.index], wanted)
    for name in ("qk_symmetric_share", "qk_symmetric_eigenvalues", "vo_eigenvalues"):
        assert np.isnan(measured[name]).all()
