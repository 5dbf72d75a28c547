"""No score is larger than its head's bound: neither an eager model's nor one of inputs that look for the largest."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import EACH_MECHANISM, FIXTURES, NAMES, fixture
from weightscope.heads.audit.audit import logit_bounds
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.logits import LogitBounds, Reach, fixed_bound, turned_bound
from weightscope.model.text.corpus import read_documents
from weightscope.model.text.tokenizer import Tokenizer
from weightscope.runner.runner import Activations

ARCHITECTURES = FIXTURES.parent
TEXTS = Path(ws.__file__).parent / "model" / "text" / "public_domain"
BOOK = TEXTS / "ambrose-bierce-an-occurrence-at-owl-creek-bridge.txt.bz2"
ROUNDING = 1e-5  # scores are of float32


def bounds_of(name: str, index: int) -> tuple[str, np.ndarray]:
    """Why a fixture's layer has no bounds, and the bounds (H,)."""
    model = fixture(name).model
    bounds = LogitBounds(model.normed_layer(index), model.config.n_positions)
    return bounds.reason, np.array([bounds.of(head) for head in range(model.layer(index).n_heads)])


@pytest.mark.parametrize("name", NAMES)
def test_eager_scores_stay_within_their_bounds(name: str) -> None:
    tiny = fixture(name)
    for index in tiny.layers:
        reason, bounds = bounds_of(name, index)
        assert np.isnan(bounds).all() if reason else np.isfinite(bounds).all()
        for scores in (tiny.arrays[f"scores{index}"], tiny.model.layer(index).scores(tiny.arrays[f"x{index}"])):
            largest = np.abs(np.where(np.isfinite(scores), scores, 0)).max(axis=(1, 2))
            assert not (largest > (1 + ROUNDING) * bounds).any()


def climb(layer: Layer, head: int, apart: tuple[int, int], start: np.ndarray, steps: int = 60) -> float:
    """The largest |score| of a head that gradient ascent finds, of a query and a key at two positions: start (2, d)."""
    pair, best = start.astype(np.float64), 0.0
    d, step = pair.shape[1], 0.5
    positions = np.repeat(apart, d + 1)
    for _ in range(steps):
        pair *= 1e3 / np.abs(pair).max(axis=1, keepdims=True)  # so large that an epsilon does not matter
        moved = pair[:, None] + np.vstack((np.zeros(d), 0.1 * np.eye(d)))  # (2, 1 + d, d)
        # (1 + d, 1 + d): of the pair as it is, then moved along each axis
        scores = layer.scores(moved.reshape(-1, d), positions)[head, : d + 1, d + 1 :]
        best = max(best, float(np.abs(scores).max()))
        slopes = np.stack((scores[1:, 0], scores[0, 1:])) - scores[0, 0]  # (2, d)
        slopes *= np.sign(scores[0, 0]) / np.maximum(np.linalg.norm(slopes, axis=1, keepdims=True), 1e-30)
        pair += step * np.linalg.norm(pair, axis=1, keepdims=True) * slopes
        step *= 0.95
    return best


@pytest.mark.parametrize("name", EACH_MECHANISM)
def test_inputs_that_look_for_the_largest_score_stay_within_the_bound(name: str) -> None:
    tiny, rng = fixture(name), np.random.default_rng(0)
    for index in tiny.layers:
        layer, x = tiny.model.normed_layer(index), tiny.arrays[f"x{index}"]
        reason, bounds = bounds_of(name, index)
        for head in () if reason or layer.cross else range(layer.n_heads):
            for apart in ((len(x) - 1, len(x) - 1), (0, len(x) - 1), (len(x) - 1, 0)):
                largest = climb(layer, head, apart, rng.standard_normal((2, layer.q.shape[1])))
                assert largest <= (1 + ROUNDING) * bounds[head]


@pytest.mark.parametrize("name", ["bert", "albert", "modernbert", "electra", "opt_post_norm"])
def test_a_norm_that_the_stream_has_passed_is_folded_in(name: str) -> None:
    """A normed layer scores y as the layer scores the norm of y."""
    model, rng = fixture(name).model, np.random.default_rng(0)
    for index in fixture(name).layers:
        layer, normed = model.layer(index), model.normed_layer(index)
        if normed is layer:
            continue
        y = rng.standard_normal((5, normed.q.shape[1])).astype(np.float32)
        norm = model.stream_norm(index)
        x = model.ends.into_stream(y) if norm is None else norm(y)  # a projection follows the norm of the embeddings
        np.testing.assert_allclose(normed.scores(y), layer.scores(x), atol=1e-4)


def test_an_input_along_the_first_direction_attains_the_bound() -> None:
    """Without rotation and biases the bound is a maximum; with gains of q/k-norms and any rotation it is their cap."""
    layer = replace(fixture("nemotron_h").model.layer(1), additive=None)
    bounds = LogitBounds(layer)
    for head in layer.heads:
        u, _, vt = head.qk.svd()
        scores = layer.scores(1e4 * np.stack((u[:, 0], vt[0])))
        assert scores[head.index, 0, 1] == pytest.approx(bounds.of(head.index), rel=1e-5)
    capped = fixture("qwen3").model.layer(1)
    gains = LogitBounds(capped)
    q, k = (np.sqrt(np.diag(gains._queries(0, None).gram)), np.sqrt(np.diag(gains._keys(0, None).gram)))
    pairs = np.array(range(capped.head_dim)).reshape(2, -1)  # (2, m)
    cap = max(q[pair].max() * k[pair].max() for pair in pairs.T) * capped.scale
    assert gains.of(0) == pytest.approx(cap, rel=1e-6)


def test_reach_is_what_an_affine_map_of_a_ball_has() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((9, 4)), rng.standard_normal(4)
    c, e = rng.standard_normal((9, 4)), rng.standard_normal(4)
    q, k = Reach(a.T @ a, b), Reach(c.T @ c, e)
    u, v = (rng.standard_normal((20_000, 9)) for _ in range(2))
    u, v = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (u, v))
    products = np.abs(np.einsum("nr,nr->n", u @ a + b, v @ c + e)).max()
    exact = np.linalg.svd(a @ c.T, compute_uv=False)[0]
    assert exact <= fixed_bound(q, k) and products <= fixed_bound(q, k)
    assert fixed_bound(q, k) == pytest.approx(fixed_bound(q, k, exact), rel=1e-9)
    partner = np.array([1, 0, 2, 3])
    angles = rng.uniform(0, 2 * np.pi, 20_000)
    turned = u @ a + b
    first, second = turned[:, 0].copy(), turned[:, 1].copy()
    turned[:, 0], turned[:, 1] = (
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
    )
    assert np.abs(np.einsum("nr,nr->n", turned, v @ c + e)).max() <= turned_bound(q, k, partner)


@pytest.mark.check
def test_scores_on_text_stay_within_the_bounds(two_layers: ws.Model) -> None:
    """What enters each layer of the GPT-2 of two layers as transformers runs it on text, and the scores there."""
    pytest.importorskip("torch", reason="the model is run by torch, which is not installed")
    pytest.importorskip("transformers", reason="the model is run by transformers, which is not installed")
    shares: dict[int, list[float]] = {0: [], 1: []}

    def watch(seen: Activations) -> None:
        bounds = [logit_bounds(two_layers, seen.layer.index).of(head) for head in range(seen.layer.n_heads)]
        for x in seen.x:
            shares[seen.layer.index].append((np.abs(seen.layer.scores(x)).max(axis=(1, 2)) / bounds).max())

    tokenizer = Tokenizer.at_hand(two_layers)
    assert tokenizer is not None
    tokens = np.array(tokenizer.encode(read_documents([BOOK], most=1)[0][:4000]))
    ws.open_runner(two_layers).observe([tokens[start : start + 128] for start in range(0, 512, 128)], watch)
    assert all(len(ratios) == 4 and 0.05 < max(ratios) < 1 for ratios in shares.values())


def test_what_nothing_bounds_is_nan_with_a_reason(tmp_path: Path) -> None:
    """ALiBi without a longest sequence, a stream without a norm, another stack's output, positions given to layers."""
    for folder, tower, reason in (
        ("fixtures/bloom", "", "grows with distance"),
        ("fixtures/opt_post_norm", "", "queries are made of a residual stream that has passed no norm"),
        ("golden/t5", "cross", "keys are made of a memory that has passed no norm"),
        ("golden/detr", "encoder", "positions that are handed to the layer"),
    ):
        audit = ws.audit(ws.open_model(ARCHITECTURES / folder, tower=tower or None), directions=0, sinks=False)
        assert reason in audit.lead and "Nothing bounds the logits: in layer" in audit.lead
        assert np.isnan(audit.measured.grid("qk_logit_bound")[0]).all()
    weights = gpt2_weights()
    weights["h.1.attn.c_attn.weight"][3, 3] = np.nan
    bounds = ws.audit(ws.open_model(write_checkpoint(tmp_path, weights)), directions=0).measured.grid("qk_logit_bound")
    assert np.isnan(bounds).sum() == 1 and np.isnan(bounds[1, 0])


def test_logits_beyond_float16_are_a_finding(tmp_path: Path) -> None:
    weights = gpt2_weights()
    plain = ws.audit(ws.open_model(write_checkpoint(tmp_path / "plain", weights)), directions=0)
    r = plain.measured.arrays["qk_singular_values"].shape[-1]
    times = 2 * 65_504 / (plain.measured.grid("qk_logit_bound")[1, 1] * np.sqrt(r))
    for part in ("weight", "bias"):
        weights[f"h.1.attn.c_attn.{part}"][..., r : 2 * r] *= times  # queries of head 1
    loud = ws.audit(ws.open_model(write_checkpoint(tmp_path / "loud", weights)), directions=0)
    (found,) = (finding for finding in loud.findings if finding.kind == "large_logits")
    assert (found.layer, found.head) == (1, 1) and "products of queries and keys of up to 131,00" in found.text
    assert not [finding for finding in plain.findings if finding.kind == "large_logits"]


def test_clip_is_muonclips_factor_of_the_bound(two_layers: ws.Model) -> None:
    heads = ws.audit(two_layers, directions=0, sinks=False, clip=100).heads
    np.testing.assert_allclose(heads["qk_clip"], np.minimum(1, 100 / heads["qk_logit_bound"]))
    assert 0 < heads["qk_clip"].min() < 1 == heads["qk_clip"].max()
    with pytest.raises(ws.CheckpointError, match="clip is -1; it is the largest logit to allow"):
        ws.audit(two_layers, clip=-1)


TOKENS_ALONE = [
    "llama", "gptj", "nemotron_h", "qwen3", "gemma2", "olmo", "deepseek_v3", "t5_encoder", "llama4", "gpt_oss",
]  # fmt: skip


@pytest.mark.parametrize("name", TOKENS_ALONE)
def test_the_first_layers_tokens_reach_their_largest_score_and_no_more(name: str) -> None:
    """Every pair of the vocabulary at many distances, by the layer itself."""
    model = fixture(name).model
    layer = model.layer(model.attention_layers[0])
    bounds = LogitBounds(model.normed_layer(layer.index), model.config.n_positions)
    x = model.ends.into_stream(model.embeddings.tokens)
    largest = bounds.of_tokens(x)
    reached = np.zeros(layer.n_heads)
    for start in (0, 1, 3, 7, 11):
        positions = np.concatenate((np.full(len(x), start), np.zeros(len(x), int)))
        reached = np.maximum(reached, np.abs(layer.scores(np.concatenate((x, x)), positions)).max(axis=(1, 2)))
    assert (reached <= (1 + ROUNDING) * largest).all()
    assert (largest <= (1 + ROUNDING) * np.array([bounds.of(head) for head in range(layer.n_heads)])).all()
    if layer.rotation is None and layer.additive is None:
        np.testing.assert_allclose(reached, largest, rtol=1e-5)
    else:
        assert (reached > 0.5 * largest).all()


def test_an_audit_has_the_tokens_largest_score_where_they_alone_enter(two_layers: ws.Model) -> None:
    table = ws.audit(fixture("llama").model, directions=0, sinks=False).heads
    first = table["layer"] == 0
    assert np.isfinite(table["qk_token_logit"][first]).all() and np.isnan(table["qk_token_logit"][~first]).all()
    assert (table["qk_token_logit"][first] < table["qk_logit_bound"][first]).all()
    assert "qk_token_logit" not in ws.audit(two_layers, directions=0, sinks=False).heads  # tokens have positions added
