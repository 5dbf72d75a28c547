"""GPT-2: its six terms by loops, its published numbers, and a broken weight."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.weights import shared
from weightscope.heads.detok.first_layer import FirstLayer


def test_each_term_is_what_eq_14_says(tiny_gpt2: Path) -> None:
    """Against float64 loops over the raw tensors: folding, sigma and all."""
    weights = {k: v.astype(np.float64) for k, v in gpt2_weights().items()}
    d, r, head = 24, 6, 2
    gamma, beta = weights["h.0.ln_1.weight"], weights["h.0.ln_1.bias"]
    fused, bias = weights["h.0.attn.c_attn.weight"], weights["h.0.attn.c_attn.bias"]
    centring = np.eye(d) - np.full((d, d), 1 / d)
    q_columns, k_columns = slice(head * r, (head + 1) * r), slice(d + head * r, d + (head + 1) * r)
    w_q, w_k = (centring @ np.diag(gamma) @ fused[:, columns] for columns in (q_columns, k_columns))
    b_q = beta @ fused[:, q_columns] + bias[q_columns]
    w_qk, b_qk = w_q @ w_k.T, b_q @ w_k.T
    tokens, positions = np.array([3, 17, 17, 40]), np.array([5, 0, 31, 2])
    e, p = weights["wte.weight"][tokens], weights["wpe.weight"][positions]
    sigma = [np.sqrt(np.var(e[i] + p[i]) + 1e-5) for i in range(4)]
    terms = FirstLayer(ws.open_model(tiny_gpt2)).terms(head, tokens, positions)
    for i in range(4):
        for j in range(4):
            both = sigma[i] * sigma[j]
            assert terms.ee[i, j] == pytest.approx(e[i] @ w_qk @ e[j] / both, abs=1e-5)
            assert terms.pp[i, j] == pytest.approx(p[i] @ w_qk @ p[j] / both, abs=1e-5)
            assert terms.pe[i, j] == pytest.approx(p[i] @ w_qk @ e[j] / both, abs=1e-5)
            assert terms.ep[i, j] == pytest.approx(e[i] @ w_qk @ p[j] / both, abs=1e-5)
        assert terms.e[3 - i, i] == pytest.approx(b_qk @ e[i] / sigma[i], abs=1e-5)
        assert terms.p[3 - i, i] == pytest.approx(b_qk @ p[i] / sigma[i], abs=1e-5)


@pytest.mark.check
def test_gpt2s_published_numbers() -> None:
    """Values that others have published of the real weights: wpe's first entries, and largest eigenvalues of W'W."""
    checkpoint = ws.open_model(shared("gpt2-attention")).checkpoint
    np.testing.assert_allclose(checkpoint["wpe.weight"].rows(0, 1)[0, :3], [-0.01882, -0.19742, 0.00403], atol=1e-5)
    for name, eigenvalue in {
        "wpe.weight": 3837.188332,
        "h.0.attn.c_attn.weight": 2002.124419,
        "h.0.attn.c_proj.weight": 712.127195,
    }.items():
        assert np.linalg.norm(checkpoint[name].read().astype(np.float64), 2) ** 2 == pytest.approx(eigenvalue, abs=1e-3)


@pytest.mark.parametrize("tensor", ["h.1.attn.c_attn.weight", "h.1.ln_1.bias", "wpe.weight"])
def test_a_nan_in_a_weight_is_one_clear_error(tmp_path: Path, tensor: str) -> None:
    weights = gpt2_weights()
    weights[tensor].flat[7] = np.nan
    model = ws.open_model(write_checkpoint(tmp_path, weights))
    with pytest.raises(
        ws.CheckpointError, match=rf"model.safetensors: tensor '{tensor}' holds 1 value that is not finite"
    ):
        _ = model.layer(1), model.positions
