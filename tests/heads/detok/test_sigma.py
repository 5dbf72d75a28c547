"""sigma and its statistics against the table they never form."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightscope.core.compute.device import CPU, open_device
from weightscope.heads.detok.positions import sigma_statistics
from weightscope.model.layers.maps import sigma


def in_blocks(tokens: np.ndarray, n_rows: int):
    def blocks():
        for start in range(0, len(tokens), n_rows):
            yield start, tokens[start : start + n_rows]

    return blocks


@pytest.mark.parametrize(
    "device", [CPU, replace(open_device("array_api_strict"), memory=150_000_000)], ids=["cpu", "device"]
)
@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 120),
    st.integers(1, 70),
    st.integers(12, 40),
    st.integers(1, 50),
    st.floats(-3, 3),
    st.integers(0, 99),
)
def test_statistics_are_those_of_the_whole_table(device, vocab, n_positions, d, n_rows, log_scale, seed) -> None:
    rng = np.random.default_rng(seed)
    tokens = (10**log_scale * rng.standard_normal((vocab, d))).astype(np.float32)
    positions = rng.standard_normal((n_positions, d)).astype(np.float32)
    eps = 1e-5
    dense = np.sqrt((tokens[:, None] + positions).astype(np.float64).var(axis=-1) + eps)  # (V, L)
    statistics = sigma_statistics(in_blocks(tokens, n_rows), vocab, positions, eps, device=device)
    close = {"rtol": 3e-4, "atol": 1e-6}
    np.testing.assert_allclose(statistics.token_mean, dense.mean(axis=1), **close)
    np.testing.assert_allclose(statistics.mean, dense.mean(axis=0), **close)
    np.testing.assert_allclose(statistics.minimum, dense.min(axis=0), **close)
    np.testing.assert_allclose(statistics.maximum, dense.max(axis=0), **close)
    np.testing.assert_allclose(statistics.inverse_mean, (1 / dense).mean(axis=0), **close)
    nearest = np.quantile(1 / dense, [0.025, 0.975], axis=0, method="nearest")
    if vocab % 20 != 1:  # where a rank falls half-way between two, rounding may take either
        np.testing.assert_allclose(statistics.inverse_low, nearest[0], **close)
        np.testing.assert_allclose(statistics.inverse_high, nearest[1], **close)


@pytest.mark.check
def test_sigma_is_what_layer_norm_divides_by() -> None:
    torch = pytest.importorskip("torch", reason="LayerNorm itself is PyTorch's, in the extra `runner`")
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    normed = torch.nn.functional.layer_norm(torch.from_numpy(x), (16,), eps=1e-5).numpy()
    np.testing.assert_allclose((x - x.mean(axis=1, keepdims=True)) / sigma(x, 1e-5)[:, None], normed, atol=1e-6)


def test_progress_adds_up_to_the_positions() -> None:
    seen: list[int] = []
    tokens, positions = np.ones((3, 4), np.float32), np.ones((70, 4), np.float32)
    sigma_statistics(in_blocks(tokens, 2), 3, positions, 1e-5, seen.append)
    assert sum(seen) == 70
