"""Attention and updates of one head, drawn for properties that hold of any."""

import numpy as np
from hypothesis import strategies as st


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@st.composite
def a_head(draw) -> tuple[np.ndarray, np.ndarray]:
    """Attention (m, n) with rows summing to one, spread or sharp, and updates (n, d)."""
    m, n, d = (draw(st.integers(2, 8)) for _ in range(3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.normal(size=(m, n)) * draw(st.floats(0, 5))
    scores[:, draw(st.integers(0, n - 1))] += draw(st.floats(0, 20))
    return softmax(scores), rng.normal(size=(n, d)) * draw(st.floats(1e-6, 1e6))
