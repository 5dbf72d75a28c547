"""Every family against transformers' eager attention: scores, probabilities and values of a tiny model's layers."""

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_models import EACH_MECHANISM, NAMES, centred, fixture, softmax
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.rotation import GridRotation

TOLERANCE = 1e-5
LATENT = ("deepseek", "sarvam_mla")

each_fixture = pytest.mark.parametrize("name", NAMES)


def close(ours: np.ndarray, expected: np.ndarray, scale: float = 1.0) -> None:
    """Equal to TOLERANCE, relative to the larger of 1 and the largest number expected times `scale`."""
    bound = TOLERANCE * max(1.0, scale * float(np.abs(expected).max()))
    np.testing.assert_allclose(ours, expected, atol=bound, rtol=0)


@each_fixture
def test_scores_and_attention_are_the_eager_models(name: str) -> None:
    tiny = fixture(name)
    assert len(tiny.layers) >= 2
    for index in tiny.layers:
        layer, expected = tiny.model.layer(index), tiny.arrays[f"scores{index}"]
        scores = layer.scores(tiny.arrays[f"x{index}"])
        seen = np.isfinite(expected)
        assert scores.shape == expected.shape and not np.allclose(centred(expected, seen), 0, atol=1e-2)
        close(centred(scores, seen), centred(expected, seen))
        close(softmax(np.where(seen, scores, -np.inf), layer.sinks), tiny.arrays[f"attention{index}"])


@each_fixture
def test_values_add_up_to_the_eager_models_output(name: str) -> None:
    tiny = fixture(name)
    for index in tiny.layers:
        layer, x = tiny.model.layer(index), tiny.arrays[f"x{index}"]
        attention, expected = tiny.arrays[f"attention{index}"], tiny.arrays[f"output{index}"]
        close(layer.output(attention, x), expected)
        if not layer.modulated:
            close(np.einsum("hij,hjd->id", attention, layer.values(x)) + layer.output_bias, expected)
        else:
            assert any("gather" in caveat for caveat in layer.caveats)


@pytest.mark.parametrize("name", EACH_MECHANISM)
def test_heads_are_the_layer_as_matrices(name: str) -> None:
    """Every pair's score is scale times qk_at(delta) with its biases and the scalars named; every value is vo's."""
    tiny = fixture(name)
    layer = tiny.model.layer(tiny.layers[-1])
    x = tiny.arrays[f"x{layer.index}"].astype(np.float64)
    if layer.rotation is not None and layer.rotation.stretched is not None:
        x = x[: layer.rotation.longest]  # longer sequences turn slower, as the caveat says
    z, values, scores = layer.normalised(x), layer.values(x), layer.scores(x)
    of_query, of_key = layer.scalars(x)
    of_value = np.ones((1, len(x))) if layer.v_norm is None else layer.v_norm.scalars(z)
    apart = np.subtract.outer(np.arange(len(x)), np.arange(len(x)))
    for head in layer.heads:
        if layer.clip is not None:
            assert any("clipped" in caveat for caveat in head.caveats)
            continue
        scalars = of_value[head.kv_head if len(of_value) > 1 else 0]
        close((z @ head.vo.dense() + head.vo_bias) * scalars[:, None], values[head.index])
        if (layer.q_norm and layer.q_norm.shift is not None) or layer.gain is not None or name.startswith(LATENT):
            continue  # what the next two tests look at
        for i, j in np.ndindex(*apart.shape):
            delta = steps(layer, i, j, len(x))
            if delta is None:
                continue
            score = z[i] @ head.qk_at(delta).left @ (head.qk_at(delta).right.T @ z[j])
            w_q, b_q = head.query_at(delta)
            score += z[j] @ head.qk_bias_at(delta) + (z[i] @ w_q + b_q) @ head.b_k
            score *= head.scale * of_query[head.index, i] * of_key[head.kv_head, j]
            if layer.temperature is not None:
                score *= layer.temperature(np.arange(len(x)))[i]
            for term in layer.relative:
                tokens = layer.keys(x)[head.kv_head, j] if term.of_keys else layer.queries(x)[head.index, i]
                met = term.vectors(term.apart(np.arange(len(x)))[i, j].reshape(1))
                score += head.scale * tokens @ met[head.index if len(met) > 1 else 0, 0]
            if layer.additive is not None:
                bias = layer.additive.between(np.array([i]), np.array([j]))
                score += layer.additive.times * bias[head.index, 0, 0]
            if layer.softcap is not None:
                score = layer.softcap * np.tanh(score / layer.softcap)
            assert score == pytest.approx(scores[head.index, i, j], abs=TOLERANCE)


def steps(layer: Layer, i: int, j: int, n: int) -> int | tuple[int, ...] | None:
    """i - j; between patches frames, rows and columns from j to i, 0 among other tokens, None between the two kinds."""
    if not isinstance(layer.rotation, GridRotation):
        return i - j
    place, other_place = layer.rotation.places(np.arange(n))[[i, j]]
    if (place[-1] < 0) != (other_place[-1] < 0):
        return None
    return 0 if place[-1] < 0 else tuple(int(step) for step in place - other_place)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(LATENT)])
def test_latent_attention_is_a_position_free_and_a_rotary_part(name: str) -> None:
    """The key's scalar is on the position-free part alone; the query's, where queries have a latent, on both."""
    tiny = fixture(name)
    layer = tiny.model.layer(1)
    config, x = tiny.model.config, tiny.arrays["x1"].astype(np.float64)
    z, scores = layer.normalised(x), layer.scores(x)
    of_query, of_key = layer.scalars(x)
    assert any("latents" in caveat for caveat in layer.caveats)
    for head in layer.heads:
        forms = head.forms()
        free = forms["free"]
        assert free.rank_bound == config["qk_nope_head_dim"]
        assert forms["turning"].rank_bound == config["qk_rope_head_dim"]
        close(free.dense() + forms["turning"].dense(), head.qk.dense())
        if np.any(head.qk_bias) or np.any(head.query_at(0)[0] @ head.b_k):
            continue
        for i, j in np.ndindex(*scores.shape[1:]):
            of_latent, complete = (z[i] @ part @ z[j] for part in (free, head.qk_at(i - j)))
            turning = complete - of_latent
            score = head.scale * of_query[head.index, i] * (of_key[head.kv_head, j] * of_latent + turning)
            assert score == pytest.approx(scores[head.index, i, j], abs=TOLERANCE)


def test_gammas_after_rotation_are_a_mean_over_pairs_and_a_term_in_i_plus_j() -> None:
    """What qk_at leaves of the scores is W_Q R(i) D R(-j) W_K', where D changes its sign within every pair."""
    tiny = fixture("hunyuan")
    layer = tiny.model.layer(1)
    x = tiny.arrays["x1"].astype(np.float64)
    z, (of_query, of_key), scores = layer.normalised(x), layer.scalars(x), layer.scores(x)
    assert layer.gain is not None and layer.rotation is not None
    assert any("i + j" in caveat for caveat in layer.caveats)
    np.testing.assert_allclose(layer.rotation.over_pairs(layer.gain), 1, rtol=1e-5)
    reflected = layer.gain[0] - 1
    for head in layer.heads:
        for i, j in np.ndindex(len(x), len(x)):
            kept = z[i] @ head.qk_at(i - j).left @ (head.qk_at(i - j).right.T @ z[j])
            summed = (head.query_at(i + j)[0].T @ z[i] * reflected) @ (head.w_k.T @ z[j])
            factor = head.scale * of_query[head.index, i] * of_key[head.kv_head, j]
            assert factor * (kept + summed) == pytest.approx(scores[head.index, i, j], abs=TOLERANCE)


def test_caveat_names_the_beta_of_a_qk_norm() -> None:
    layer = fixture("phi_qk_norm").model.layer(0)
    assert layer.q_norm is not None and np.any(layer.q_norm.shift)
    assert any("beta" in caveat for caveat in layer.caveats)


@each_fixture
def test_first_layer_acts_on_embeddings(name: str) -> None:
    """(e_t + p_p) / sigma through the first layer's heads gives the eager model's layer-0 scores."""
    tiny = fixture(name)
    if tiny.case.tower == "vision" or "tokens" not in tiny.arrays:
        with pytest.raises(ws.CheckpointError, match="no token embedding"):
            tiny.model.embeddings  # noqa: B018
        return
    if 0 not in tiny.layers:
        with pytest.raises(ws.CheckpointError, match=r"layer 0 is linear_attention, not attention; 1, [23] are"):
            tiny.model.first_layer  # noqa: B018
        return
    embeddings, first, tokens = tiny.model.embeddings, tiny.model.first_layer, tiny.arrays["tokens"]
    positions = np.arange(len(tokens))
    rows = embeddings.tokens[tokens]
    entering = rows if embeddings.positions is None else rows + embeddings.positions[positions]
    expected = tiny.arrays["scores0"]
    seen = np.isfinite(expected)
    close(centred(first.scores(entering), seen), centred(expected, seen))
    sigma = embeddings.sigma(tokens, positions)
    np.testing.assert_allclose(entering / sigma[:, None], first.normalised(entering), rtol=1e-6)
    blocks = np.concatenate([block for _, block in embeddings.blocks()])
    np.testing.assert_allclose(blocks, embeddings.tokens, rtol=1e-5, atol=1e-6)
    if first is tiny.model.layer(0):
        close(entering, tiny.arrays["x0"])
