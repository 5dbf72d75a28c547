"""GPT-2 read by weightscope against the eager transformers model, and the six terms against both."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.weights import shared
from weightscope.core.embedded import FOLDER
from weightscope.heads.detok.first_layer import FirstLayer


@pytest.fixture(scope="module", params=["tiny", "embedded", "inverse layer scale"])
def eager(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A model by weightscope, and per layer the eager model's input, scaled masked scores' softmax and output."""
    torch = pytest.importorskip("torch", reason="the eager model needs the extra `runner`")
    transformers = pytest.importorskip("transformers", reason="the eager model needs the extra `runner`")
    folder = FOLDER
    if request.param != "embedded":
        inverse = request.param != "tiny"
        folder = write_checkpoint(
            tmp_path_factory.mktemp("eager"), gpt2_weights(), scale_attn_by_inverse_layer_idx=inverse, vocab_size=50
        )
    model = transformers.GPT2Model.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    ids = torch.randint(50, (1, 30), generator=torch.Generator().manual_seed(0))
    outputs = []
    for block in model.h:
        block.attn.register_forward_hook(lambda module, args, out: outputs.append(out[0][0].detach().numpy()))
    with torch.no_grad():
        result = model(ids, output_hidden_states=True, output_attentions=True)
    states = [state[0].numpy() for state in result.hidden_states]
    attention = [weights[0].numpy() for weights in result.attentions]
    return ws.open_model(folder), ids[0].numpy(), states, attention, outputs


def causal_softmax(scores: np.ndarray) -> np.ndarray:
    n = scores.shape[-1]
    shifted = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf).astype(np.float64)
    shifted = np.exp(shifted - shifted.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


@pytest.mark.check
def test_scores_give_the_eager_models_attention(eager) -> None:
    model, _, states, attention, _ = eager
    for i in range(model.config.n_layers):
        np.testing.assert_allclose(causal_softmax(model.layer(i).scores(states[i])), attention[i], atol=1e-5)


@pytest.mark.check
def test_values_give_the_eager_models_attention_output(eager) -> None:
    model, _, states, attention, outputs = eager
    for i in range(model.config.n_layers):
        layer = model.layer(i)
        update = np.einsum("hij,hjd->id", attention[i], layer.values(states[i])) + layer.output_bias
        np.testing.assert_allclose(update, outputs[i], atol=1e-5)


@pytest.mark.check
def test_a_heads_matrices_give_its_scores_and_values(eager) -> None:
    """Eq. 14 from `qk` and `qk_bias`, up to a constant in j; f(x) from `vo` and `vo_bias`."""
    model, _, states, _, _ = eager
    layer, x = model.layer(1), states[1].astype(np.float64)
    z = x / np.sqrt(x.var(axis=-1, keepdims=True) + model.config.norm_eps)
    scores, values = layer.scores(states[1]), layer.values(states[1])
    for head in layer.heads:
        bilinear = head.scale * (z @ head.qk.dense() @ z.T + head.qk_bias @ z.T)
        difference = scores[head.index] - bilinear
        np.testing.assert_allclose(difference - difference[:, :1], 0, atol=2e-5)
        np.testing.assert_allclose(z @ head.vo.dense() + head.vo_bias, values[head.index], atol=1e-5)


@pytest.mark.check
def test_the_six_terms_add_up_to_the_models_logits(eager) -> None:
    """Up to a constant in j, which the softmax cannot tell (detokenization paper, eqs 12-14)."""
    model, ids, states, attention, _ = eager
    first, positions = FirstLayer(model), np.arange(len(ids))
    scores = model.layer(0).scores(states[0])
    for head in range(model.config.n_heads):
        total = first.terms(head, ids, positions).total() * model.layer(0).head(head).scale
        difference = total - scores[head]
        np.testing.assert_allclose(difference - difference[:, :1], 0, atol=1e-5)
        np.testing.assert_allclose(causal_softmax(total), attention[0][head], atol=1e-5)


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


def test_prefix_of_tensor_names_is_optional(tmp_path: Path) -> None:
    weights = gpt2_weights()
    bare = ws.open_model(write_checkpoint(tmp_path / "bare", weights))
    masks = {"transformer.h.0.attn.bias": np.tril(np.ones((1, 1, 32, 32), np.float32))}
    named = {f"transformer.{name}": weight for name, weight in weights.items()} | masks
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 24, "n_positions": 32}
    folder = tmp_path / "named"
    write_checkpoint(folder, named | {"wpe.weight": weights["wpe.weight"]}, **sizes)
    prefixed = ws.open_model(folder)
    for index in range(4):
        without, with_prefix = bare.layer(0).head(index), prefixed.layer(0).head(index)
        np.testing.assert_array_equal(without.qk.dense(), with_prefix.qk.dense())


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


def test_a_wrong_shape_names_what_was_found_and_expected(tmp_path: Path) -> None:
    weights = gpt2_weights()
    weights["h.0.attn.c_attn.weight"] = weights["h.0.attn.c_attn.weight"][:, :-4]
    model = ws.open_model(write_checkpoint(tmp_path, weights))
    expected = r"tensor 'h.0.attn.c_attn.weight' has shape \(24, 68\); gpt2 .* needs \(24, 72\)"
    with pytest.raises(ws.CheckpointError, match=expected):
        model.layer(0)


@pytest.mark.check
def test_checkpoint_without_token_embedding_says_so() -> None:
    model = ws.open_model(shared("gpt2-attention"))
    with pytest.raises(ws.CheckpointError, match=r"no token embedding in this checkpoint .*wte\.weight"):
        _ = model.embeddings
    assert model.layer(11).head(11).qk.shape == (768, 768)
