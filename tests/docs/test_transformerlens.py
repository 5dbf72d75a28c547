"""What docs/transformerlens.md says of a head's matrices, by NumPy from the tensors of the file."""

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_models import fixture


def stored(model: ws.Model) -> dict[str, np.ndarray]:
    return {name: tensor.read().astype(np.float64) for name, tensor in model.checkpoint.items()}


def test_a_gpt2_head_is_the_stored_one_with_its_norm_folded_in(two_layers: ws.Model) -> None:
    weights, r, d = stored(two_layers), 32, 256
    for layer, head in ((0, 6), (1, 3)):
        ours, of = two_layers.head(layer, head), f"transformer.h.{layer}."
        gamma, beta = weights[of + "ln_1.weight"], weights[of + "ln_1.bias"]
        fused, bias = weights[of + "attn.c_attn.weight"], weights[of + "attn.c_attn.bias"]
        for place, (name, b) in enumerate((("W_Q", ours.b_q), ("W_K", ours.b_k), ("W_V", ours.b_v))):
            columns = slice(place * d + head * r, place * d + (head + 1) * r)
            folded = gamma[:, None] * fused[:, columns]
            np.testing.assert_allclose(getattr(ours, name), folded - folded.mean(axis=0), atol=1e-6)
            np.testing.assert_allclose(b, beta @ fused[:, columns] + bias[columns], atol=1e-5)
        rows = weights[of + "attn.c_proj.weight"][head * r : (head + 1) * r]
        np.testing.assert_array_equal(ours.W_O, rows)
        qk, ov = ours.W_Q @ ours.W_K.T, ours.W_V @ ours.W_O
        np.testing.assert_allclose(ours.qk[:3, :3], qk[:3, :3], atol=1e-6)
        assert ours.qk.norm() == pytest.approx(np.linalg.norm(qk))
        assert ours.ov.trace() == pytest.approx(np.trace(ov), 1e-4)
        assert ours.scale == pytest.approx(1 / np.sqrt(r))


def test_grouped_heads_share_keys_and_values_and_rotate_with_distance() -> None:
    model = fixture("llama").model
    weights, r = stored(model), model.config.head_dim
    assert [head.kv_head for head in model.layer(0).heads] == [0, 0, 1, 1]
    prefix = next(name for name in weights if name.endswith("layers.0.self_attn.k_proj.weight"))
    of = prefix.removesuffix("self_attn.k_proj.weight")
    gamma = weights[of + "input_layernorm.weight"][:, None]
    for head in model.layer(0).heads:
        q = slice(head.index * r, (head.index + 1) * r)
        kv = slice(head.index // 2 * r, (head.index // 2 + 1) * r)
        np.testing.assert_allclose(head.W_Q, gamma * weights[of + "self_attn.q_proj.weight"][q].T, atol=1e-6)
        np.testing.assert_allclose(head.W_K, gamma * weights[of + "self_attn.k_proj.weight"][kv].T, atol=1e-6)
        np.testing.assert_allclose(head.W_V, gamma * weights[of + "self_attn.v_proj.weight"][kv].T, atol=1e-6)
        np.testing.assert_array_equal(head.W_O, weights[of + "self_attn.o_proj.weight"][:, q].T)
        half, frequencies = r // 2, 10000.0 ** (-2 * np.arange(r // 2) / r)
        for delta in (0, 1, 5):
            cos, sin = np.cos(delta * frequencies), np.sin(delta * frequencies)
            turned = np.hstack(  # as transformers turns a query that is delta after its key
                (
                    head.W_Q[:, :half] * cos - head.W_Q[:, half:] * sin,
                    head.W_Q[:, half:] * cos + head.W_Q[:, :half] * sin,
                )
            )
            np.testing.assert_allclose(head.qk_at(delta).dense(), turned @ head.W_K.T, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_scores_are_those_of_transformers_eager_attention(name: str) -> None:
    tried = fixture(name)
    arrays = tried.arrays
    for layer in tried.layers:
        scores, eager = tried.model.layer(layer).scores(arrays[f"x{layer}"]), arrays[f"scores{layer}"]
        shift = np.where(np.isfinite(eager), eager - scores, np.nan)  # terms constant in j may be dropped
        assert np.nanmax(np.abs(shift - np.nanmean(shift, axis=-1, keepdims=True))) < 1e-5
