"""What sinks do: numbers of plain loops, kinds of token as transformers lays them out, planted sinks told apart."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.cases import Case, case_of
from tests.support.weights import shared

torch = pytest.importorskip("torch", reason="the runner needs the extra `runner`")
pytest.importorskip("transformers", reason="the runner needs the extra `runner`")

from tests.support.random_models import random_model  # noqa: E402
from tests.support.two_layers import FOLDER as EMBEDDED  # noqa: E402
from weightscope.core.files import Files  # noqa: E402
from weightscope.heads.sinks import figures  # noqa: E402
from weightscope.heads.sinks.mechanisms import (  # noqa: E402
    MEASURES,
    SinkInputs,
    SinkMechanisms,
    SinkObserver,
    first_pairs,
    own_coordinates,
    read_inputs,
    routing_measures,
    sink_mechanisms,
)
from weightscope.heads.sinks.page import write_mechanisms_page  # noqa: E402
from weightscope.model.layers.layer import Layer  # noqa: E402
from weightscope.model.layers.maps import Affine, Norm  # noqa: E402
from weightscope.model.text.kinds import ImageTokens, TextTokens, image_tokens, text_tokens  # noqa: E402
from weightscope.model.text.tokenizer import Tokenizer  # noqa: E402
from weightscope.runner import Activations, Runner, open_runner  # noqa: E402
from weightscope.runner.hooks import tower_of  # noqa: E402

pytestmark = pytest.mark.check

VISION = {
    "vit": ("CLS",),
    "dinov2": ("CLS",),
    "dinov2_with_registers": ("CLS", "register", "register", "register"),
    "dinov3_vit": ("CLS", "register", "register", "register"),
    "clip_vision": ("CLS",),
    "siglip_vision": (),
}
EVENT_COLUMNS = (
    "input", "layer", "head", "position", "token", "kind", "strength", "epsilon", "event_share", "ratio_out",
    "stable_rank", "norm_ratio", "mechanism", *(measure.name for measure in MEASURES),
)  # fmt: skip
HEAD_COLUMNS = (
    "layer", "head", "strength", "epsilon", "event_share", "events", "kind", "kind_share", "ratio_out", "stable_rank",
    "norm_ratio", "nop", "broadcast", "neither", "mechanism", "qk_gap", "qk_stable_rank",
    "sink_at_0.01", "sink_at_0.1", "sink_at_0.5", *(measure.name for measure in MEASURES),
)  # fmt: skip
ARRAYS = (
    "layers", "kinds", "position", "kind", "strength", "epsilon", "share", "ratio", "rank", "norm_ratio", "inflow",
    "between_before", "between_after", "through", "variance_before", "variance_after", "norm_mean", "norm_largest",
    "qk_singular_values", *(measure.name for measure in MEASURES),
)  # fmt: skip
TEXT = ("gpt2", "llama", "qwen3", "bert", "bloom")


def case_named(name: str) -> Case:
    return case_of(name)


def runner_of(case: Case, folder: Path) -> Runner:
    network = random_model(case)
    network.save_pretrained(folder)
    model = ws.open_model(folder, tower=case.tower or None)
    return Runner(model, tower_of(network, model))


def sequences_of(case: Case, n: int = 3) -> list[np.ndarray]:
    """Images, or token sequences of two lengths."""
    rng = np.random.default_rng(5)
    if case.name in VISION:
        return [rng.normal(size=(1, 12, 12)).astype(np.float32) for _ in range(n)]
    return [rng.integers(3, 20, size=length) for length in (9, 7, 9)[:n]]


def every_third_special(n: int = 24) -> TextTokens:
    """Kinds of made-up tokens: 0, 3, 6 ... special, 1, 4, 7 ... punctuation, the rest other."""
    return TextTokens(None, np.arange(n) % 3 + 1)


def tokens_for(case: Case, model: ws.Model) -> ImageTokens | TextTokens:
    return image_tokens(model) if case.name in VISION else every_third_special()


@pytest.mark.parametrize("name", [*VISION, *TEXT])
def test_every_number_matches_a_plain_loop(name: str, tmp_path: Path) -> None:
    """Strength, epsilon, shares, ratio, rank, inflow and similarity, all d coordinates of u_j at full length."""
    case = case_named(name)
    runner, sequences = runner_of(case, tmp_path), sequences_of(case)
    tokens = tokens_for(case, runner.model)
    sinks = sink_mechanisms(runner, SinkInputs(dict(enumerate(sequences)), tokens, ""))
    kept: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray, Layer]] = {}

    def keep(seen: Activations) -> None:
        for b, index in enumerate(seen.inputs):
            kept[int(index), seen.layer.index] = (seen.x[b], seen.attention[b], seen.output[b], seen.layer)

    runner.observe(sequences, keep)
    assert len(kept) == len(sequences) * len(sinks.layer_indices)
    for (i, index), (x, attention, output, layer) in kept.items():
        row = list(sinks.layer_indices).index(index)
        x, attention, output = (array.astype(float) for array in (x, attention, output))
        n, updates = len(x), layer.values(x)  # (H, n, d)
        kinds = tokens.kinds(sequences[i], n)
        for head in range(layer.n_heads):
            place = (i, row, head)
            a, u = attention[head], updates[head]
            strength = [sum(a[q, key] for q in range(n)) / n for key in range(n)]
            s = int(sinks.position[place])
            assert strength[s] == pytest.approx(max(strength), abs=1e-6)
            assert sinks.strength[place] == pytest.approx(strength[s], abs=1e-6)
            assert sinks.kind[place] == kinds[s]
            assert sinks.epsilon[place] == pytest.approx(1 - min(a[q, s] for q in range(n)), abs=1e-6)
            assert sinks.share[place] == pytest.approx(sum(a[q, s] >= 0.5 for q in range(n)) / n)
            other_lengths = [np.linalg.norm(u[j]) for j in range(n) if j != s]
            assert sinks.ratio[place] == pytest.approx(np.linalg.norm(u[s]) / np.mean(other_lengths), rel=1e-4)
            singular = np.linalg.svd(a @ u, compute_uv=False)
            assert sinks.rank[place] == pytest.approx((singular**2).sum() / singular[0] ** 2, rel=1e-4)
            norms = [np.linalg.norm(x[j]) for j in range(n) if j != s]
            assert sinks.norm_ratio[place] == pytest.approx(np.linalg.norm(x[s]) / np.mean(norms), rel=1e-4)
            by_kind = [sum(strength[j] for j in range(n) if kinds[j] == k) for k in range(len(sinks.kinds))]
            np.testing.assert_allclose(sinks.inflow[place], by_kind, atol=1e-6)
            for name_of, value in lemmas_by_loops(layer, head, x, a, u, s, text=name in TEXT).items():
                expected = pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True)
                assert sinks.measures[name_of][place] == expected, name_of
        for kind in range(len(sinks.kinds)):
            lengths = [float(np.linalg.norm(x[j])) for j in range(n) if kinds[j] == kind]
            expected = (np.mean(lengths), max(lengths)) if lengths else (np.nan, np.nan)
            got = sinks.norm_mean[i, row, kind], sinks.norm_largest[i, row, kind]
            assert got == pytest.approx(expected, rel=1e-5, nan_ok=True)
        assert sinks.variance_before[i, row] == pytest.approx(variance(x), rel=1e-5)
        assert sinks.variance_after[i, row] == pytest.approx(variance(x + output), rel=1e-5)
        for name_of, states in (("between_before", x), ("between_after", x + output)):
            cosines = [cosine(states[p], states[q]) for p in range(n) for q in range(n) if p != q]
            assert getattr(sinks, name_of)[i, row] == pytest.approx(np.mean(cosines), abs=1e-5)
        through = [cosine(x[p], x[p] + output[p]) for p in range(n)]
        assert sinks.through[i, row] == pytest.approx(np.mean(through), abs=1e-5)
    for row, index in enumerate(sinks.layer_indices):
        for head in runner.layers[int(index)].heads:
            spectrum = np.linalg.svd(head.qk.dense(), compute_uv=False)[: sinks.qk_singular_values.shape[-1]]
            np.testing.assert_allclose(sinks.qk_singular_values[row, head.index], spectrum, atol=1e-5 * spectrum[0])


def variance(x: np.ndarray) -> float:
    return float(sum(np.linalg.norm(row - x.mean(axis=0)) ** 2 for row in x) / len(x))


def lemmas_by_loops(
    layer: Layer, head: int, x: np.ndarray, a: np.ndarray, u: np.ndarray, s: int, *, text: bool
) -> dict[str, float]:  # fmt: skip
    """Every measure of one head, from whole vectors of the stream in float64."""
    n, kv = len(x), head // (layer.n_heads // layer.n_kv_heads)
    other_keys = [j for j in range(n) if j != s]
    written, to_sink = a @ u, a[:, s]
    length, (_, sigma, vt) = np.linalg.norm(written), np.linalg.svd(written)
    lengths, epsilon, root = np.linalg.norm(u, axis=-1), 1 - min(to_sink), np.sqrt(n)
    before, spread = variance(x), np.std(to_sink) * lengths[s]
    most = spread + epsilon * max(lengths[other_keys])
    gathered = np.linalg.norm(a @ layer.inner_values(x)[kv], axis=-1)
    keys, queries = np.linalg.norm(layer.keys(x)[kv], axis=-1), layer.queries(x)[head]
    tokens = layer.normalised(x)
    if layer.norm is not None and layer.norm.centred:
        tokens = tokens - tokens.mean(axis=-1, keepdims=True)
    u_1, s_1, v_1 = np.linalg.svd(layer.heads[head].qk.dense().astype(float))
    first = v_1[0]
    read = x if layer.norm is None else layer.norm(x)
    placed = layer.placed(layer.queries(x), layer.keys(x), np.arange(n)) if text else (layer.queries(x), layer.keys(x))
    q, k = placed[0][head], placed[1][kv]
    logits = np.log(np.maximum(a, 1e-300)) if layer.rotation and not text else layer.scores(x)[head]
    of_q, of_k = (scalars[row] for scalars, row in zip(layer.scalars(x), (head, kv), strict=True))

    def above_others(pair: Callable[[int, int], float]) -> tuple[float, float]:
        """Of the sink, and of the other keys: queries that see both, one after the other."""
        both = [i for i in range(n) if a[i, s] > 0 and any(a[i, j] > 0 for j in other_keys)]
        if not both:
            return np.nan, np.nan
        rest = [np.mean([pair(i, j) for j in other_keys if a[i, j] > 0]) for i in both]
        return float(np.mean([pair(i, s) for i in both])), float(np.mean(rest))

    def product(i: int, j: int) -> float:
        of_first = s_1[0] * (tokens[i] @ u_1[:, 0]) * (first @ tokens[j])
        return float(layer.scale * of_first * of_q[i] * of_k[j])

    query_key = above_others(lambda i, j: cosine(q[i], k[j]))
    along = [abs(cosine(token, first)) for token in tokens]
    return {
        "written": length,
        "distance": np.linalg.norm(written - u[s]) / length,
        "bound": root * epsilon * max(np.linalg.norm(u - u[s], axis=-1)) / length,
        "residual": np.linalg.norm(written - np.outer(to_sink, u[s])) / length,
        "residual_bound": root * epsilon * max(lengths[other_keys]) / length,
        "leading": np.linalg.norm(np.outer(to_sink, u[s])) / sigma[0],
        "leading_bound": (1 - epsilon) * root * lengths[s] / sigma[0],
        "along": abs(cosine(vt[0], u[s])),
        "cancelled": 2
        * sum(to_sink[i] * u[s] @ (to_sink[i] * u[s] - written[i]) for i in range(n))
        / sum(
            np.linalg.norm(to_sink[i] * u[s]) ** 2 + np.linalg.norm(written[i] - to_sink[i] * u[s]) ** 2
            for i in range(n)
        ),
        "against_stream": -np.mean([cosine(x[i], u[s]) for i in range(n)]),
        "variance_change": variance(x + written) / before - 1,
        "variance_sink": spread**2 / before,
        "variance_bound": (2 * np.sqrt(before) + most) * most / before,
        "key_ratio": keys[s] / np.mean(keys[other_keys]),
        "query_similarity": np.mean([cosine(queries[i], queries[j]) for i in range(n) for j in range(n) if i != j]),
        "update_spread": np.std(gathered) / np.mean(gathered),
        "alignment": along[s],
        "alignment_others": np.mean([along[j] for j in other_keys]),
        "read_ratio": np.linalg.norm(read[s]) / np.mean([np.linalg.norm(read[j]) for j in other_keys]),
        "query_key": query_key[0],
        "query_key_others": query_key[1],
        "logit_margin": np.subtract(*above_others(lambda i, j: float(logits[i, j]))),
        "first_margin": np.subtract(*above_others(product)),
    }


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize("name", ["llama", "dinov2", "qwen3_next", "deepseek_v2"])
def test_reduced_coordinates_keep_every_inner_product(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    model = runner_of(case, tmp_path).model
    layer = model.layer(model.attention_layers[0])
    x = np.random.default_rng(1).normal(size=(6, model.config.d_model))
    complete, reduced = layer.values(x), own_coordinates(layer).values(x)
    assert reduced.shape[-1] == min(layer.w_o.shape[1:])
    np.testing.assert_allclose(
        reduced @ reduced.swapaxes(1, 2), complete @ complete.swapaxes(1, 2), rtol=1e-4, atol=1e-5
    )


def first_states(runner: Runner, sequence: np.ndarray) -> np.ndarray:
    """What enters layer 0: (n, d)."""
    seen: list[np.ndarray] = []
    runner.observe([sequence], lambda each: seen.append(each.x[0].copy()), layers=[0])
    return seen[0]


@pytest.mark.parametrize("name", VISION)
def test_kinds_are_where_transformers_puts_the_embeddings(name: str, tmp_path: Path) -> None:
    """A learned CLS or register moved, or one patch painted over, changes those tokens at layer 0 and no others."""
    case = case_named(name)
    runner, (image, *_) = runner_of(case, tmp_path), sequences_of(case)
    tokens = image_tokens(runner.model)
    assert tokens.leading == VISION[name]
    before = first_states(runner, image)
    kinds = np.array(tokens.names)[tokens.kinds(image, len(before))]

    def moved(after: np.ndarray) -> list[int]:
        return np.flatnonzero(np.abs(after - before).max(axis=-1) > 1e-3).tolist()

    for kind, pattern in (("CLS", r"(cls_token|class_embedding)$"), ("register", r"register_tokens$")):
        learned = [p for name, p in runner.network.named_parameters() if re.search(pattern, name)]
        assert len(learned) == (kind in tokens.names)
        for parameter in learned:
            parameter.data += 1 + torch.arange(parameter.numel()).reshape(parameter.shape)  # a norm sees it too
            assert moved(first_states(runner, image)) == np.flatnonzero(kinds == kind).tolist()
            parameter.data -= 1 + torch.arange(parameter.numel()).reshape(parameter.shape)
    for row, column in ((0, 0), (1, 2), (2, 1)):
        painted = image.copy()
        painted[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 3
        (position,) = moved(first_states(runner, painted))
        assert kinds[position] == "patch"
        assert tokens.label(image, position) == f"patch {row}, {column}"


def test_leading_tokens_have_names_of_their_own() -> None:
    tokens = ImageTokens(("CLS", "register", "register"), patch=4)
    image = np.zeros((1, 8, 12))
    assert [tokens.label(image, i) for i in range(6)] == [
        "CLS", "register 1", "register 2", "patch 0, 0", "patch 0, 1", "patch 0, 2"
    ]  # fmt: skip
    assert tokens.names == ("CLS", "register", "patch")


def test_text_models_have_no_patches(two_layers: ws.Model) -> None:
    with pytest.raises(ws.CheckpointError, match="reads text and sees no images"):
        image_tokens(two_layers)


def test_texts_may_begin_with_their_own_first_token(two_layers: ws.Model) -> None:
    usual, own = (read_inputs(two_layers, n=2, length=16, own_first=each) for each in (False, True))
    for begun, text in zip(usual.sequences.values(), own.sequences.values(), strict=True):
        np.testing.assert_array_equal(begun[1:], text[:-1])
    assert "beginning with their own first token" in own.note
    with pytest.raises(ws.CheckpointError, match="sees images, not texts"):
        read_inputs(ws.open_model(Path(__file__).parents[3] / "analyses/toys/vit/vit-fashion-mnist"), own_first=True)


def test_tokens_of_a_text_are_first_special_punctuation_or_other() -> None:
    tokenizer = Tokenizer.load(EMBEDDED)
    tokens = text_tokens(tokenizer)
    end = tokenizer.ids["<|endoftext|>"]
    ids = np.array([end, *tokenizer.encode("A cat, mine.\n"), end])
    names = [tokens.names[kind] for kind in tokens.kinds(ids, len(ids))]
    assert names[0] == "first" and names[-1] == "special"
    for position, name in list(enumerate(names))[1:-1]:
        text = tokens.label(ids, position)
        assert name == ("other" if re.search(r"\w", text) else "punctuation"), text
    assert names.count("punctuation") == 3  # comma, period, newline


N, D, R = 12, 8, 4
SINK = 5


def planted(value_of_sink: Sequence[float], attention_to_sink: Sequence[float]) -> Activations:
    """Heads that give a sink a share of their attention, the rest spread evenly; token s is a long e_0.

    W_V of each head passes e_1 .. e_3, and so much of e_0 that the sink's value has the norm asked for; the values of
    the other tokens have norm 1.
    """
    rng = np.random.default_rng(2)
    x = np.zeros((N, D))
    x[:, 1:R] = rng.normal(size=(N, R - 1))
    x[:, 1:R] /= np.linalg.norm(x[:, 1:R], axis=-1, keepdims=True)
    x[SINK] = 10 * np.eye(D)[0]
    heads = len(value_of_sink)
    w_v = np.zeros((heads, D, R))
    w_v[:, range(1, R), range(1, R)] = 1
    w_v[:, 0, 0] = np.array(value_of_sink) / 10
    w_o = np.stack([np.linalg.qr(rng.normal(size=(D, R)))[0].T for _ in range(heads)])  # lengths stay
    attention = np.empty((heads, N, N))
    for head, share in enumerate(attention_to_sink):
        attention[head] = (1 - share) / (N - 1)
        attention[head, :, SINK] = share
    some, none = Affine(rng.normal(size=(heads, D, R)), np.zeros((heads, R))), np.zeros((heads, R))
    layer = Layer(some, some, Affine(w_v, none), w_o, np.zeros(D))
    output = layer.output(attention, x)
    return Activations(layer, np.array([0]), np.arange(N)[None], x[None], attention[None], output[None])


def at_work(x: np.ndarray, w_q: np.ndarray, w_k: np.ndarray, norm: Norm | None) -> Activations:
    """One head with these maps and its attention of tokens x (n, d); biases and values are nothing of interest."""
    none, some = np.zeros((1, w_q.shape[1])), np.ones((1, *w_q.shape))
    layer = Layer(*(Affine(w, none) for w in (w_q[None], w_k[None], some)), some.swapaxes(1, 2), np.zeros(x.shape[1]))
    layer = layer if norm is None else layer.after_norm(norm)
    scores = layer.scores(x)
    attention = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attention /= attention.sum(axis=-1, keepdims=True)
    return Activations(
        layer, np.array([0]), np.arange(len(x))[None], x[None], attention[None], layer.output(attention, x)[None]
    )


def routing(seen: Activations) -> dict[str, float]:
    """The measures of how the one head's queries find token `SINK`."""
    measures = routing_measures(seen, first_pairs(seen.layer), np.array([[SINK]]))
    return {name: float(values[0, 0]) for name, values in measures.items()}


def test_one_singular_direction_makes_all_of_the_logit_that_it_makes() -> None:
    """Lemma 2: W_QK = sigma u v' alone gives the sink's whole logit (eq. 5); a second direction adds the rest."""
    rng = np.random.default_rng(6)
    (u, u_2), (v, v_2) = (np.linalg.qr(rng.normal(size=(D, 2)))[0].T for _ in range(2))
    x = rng.normal(size=(N, D))
    alone = routing(at_work(x, np.stack([4 * u, 0 * u], axis=1), np.stack([v, 0 * v], axis=1), None))
    assert alone["first_margin"] == pytest.approx(alone["logit_margin"]) and abs(alone["first_margin"]) > 0.1
    w_q, w_k = np.stack([4 * u, 3 * u_2], axis=1), np.stack([v, v_2], axis=1)
    both = routing(at_work(x, w_q, w_k, None))
    assert both["first_margin"] == pytest.approx(alone["first_margin"])
    second = 3 * (x @ u_2).mean() * (x[SINK] @ v_2 - np.delete(x, SINK, axis=0).mean(axis=0) @ v_2)
    assert both["logit_margin"] - both["first_margin"] == pytest.approx(second)


def test_a_norm_keeps_the_length_of_a_token_from_its_logit() -> None:
    """Lemma 2's second way, a long sink, is closed by an RMSNorm and open without one."""
    rng = np.random.default_rng(7)
    short, w_q, w_k = rng.normal(size=(N, D)), rng.normal(size=(D, R)), rng.normal(size=(D, R))
    long = short.copy()
    long[SINK] *= 100
    norm = Norm(centred=False, eps=0, gamma=rng.uniform(0.5, 2, D), beta=np.zeros(D))
    before, after = (routing(at_work(x, w_q, w_k, norm)) for x in (short, long))
    assert after == pytest.approx(before)
    free = routing(at_work(long, w_q, w_k, None))
    assert free["read_ratio"] > 50 and free["key_ratio"] > 50 and after["read_ratio"] < 3


def mechanisms(seen: Activations) -> list[str]:
    observer = SinkObserver([seen.layer], SinkInputs({"text": np.arange(N)}, every_third_special(), ""))
    observer(seen)
    sinks = SinkMechanisms(
        model="planted", **observer.measured(), qk_singular_values=np.ones((1, seen.layer.n_heads, R))
    )
    assert (sinks.position[sinks.event] == SINK).all()
    return sinks.mechanism[0, 0].tolist()


def test_planted_sinks_are_told_apart() -> None:
    """A killed value is a NOP, a strong one a broadcast, one between neither; and without an event it is nothing."""
    killed, strong, between, weak = (0.0, 0.95), (2.0, 0.95), (0.35, 0.95), (2.0, 0.45)
    heads = [killed, strong, between, weak, (0.19, 0.6), (0.21, 0.6)]
    seen = planted([value for value, _ in heads], [share for _, share in heads])
    assert mechanisms(seen) == ["nop", "broadcast", "neither", "", "nop", "neither"]


def test_a_sink_whose_update_is_not_one_vector_is_no_broadcast() -> None:
    """Values as large, but every query adds one of its own, ten times the sink's: rank above 1.5."""
    seen = planted([2.0, 2.0], [0.55, 0.55])
    diagonal = 0.45 * np.eye(N)
    diagonal[SINK] = seen.attention[0, 1, SINK] - 0.55 * np.eye(N)[SINK]
    seen.attention[0, 1] = diagonal + 0.55 * np.eye(N)[SINK]
    seen.x[0, np.arange(N) != SINK, 1:R] *= 10
    seen.layer.v.w[:, 0, 0] *= 10  # the sink's value still has twice their norm in head 0 ...
    seen.layer.v.w[1, 0, 0] /= 4  # ... and half of it in head 1
    assert mechanisms(seen) == ["broadcast", "neither"]


def test_a_layer_scale_that_silences_the_sinks_direction_makes_a_nop() -> None:
    """LayerScale is in W_O: what counts is what reaches the residual stream."""
    seen = planted([2.0], [0.95])
    seen.layer.w_o[:] = np.eye(R, D)[None]
    assert mechanisms(seen) == ["broadcast"]
    seen.layer.w_o[:, :, 0] *= 0.01  # v_s = 2 e_0 goes to coordinate 0 of the stream alone
    assert mechanisms(seen) == ["nop"]


@pytest.fixture(scope="module")
def sinks_of_embedded() -> SinkMechanisms:
    """Of the checkpoint that comes along, on four texts of different lengths."""
    tokenizer = Tokenizer.load(EMBEDDED)
    text = "It was the best of times, it was the worst of times. " * 4
    texts = {f"text {n}": np.array([0, *tokenizer.encode(text[n:])])[: 30 - n] for n in range(4)}
    return sink_mechanisms(
        open_runner(ws.open_model(EMBEDDED)), SinkInputs(texts, text_tokens(tokenizer), "four texts")
    )


def read_csv(files: Files, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(files.contents[name].decode())))


def test_the_tables_agree_with_the_arrays_and_with_each_other(sinks_of_embedded: SinkMechanisms) -> None:
    sinks, files = sinks_of_embedded, Files()
    sinks.write_tables(files)
    assert sorted(files.contents) == ["events.csv", "heads.csv", "layers.csv", "sinks.npz"]
    events = read_csv(files, "events.csv")
    assert tuple(events[0]) == EVENT_COLUMNS and len(events) == sinks.event.size
    for row, place in zip(events, np.ndindex(*sinks.event.shape), strict=True):
        name, sequence = list(sinks.inputs.sequences.items())[place[0]]
        assert (row["input"], int(row["layer"]), int(row["head"])) == (name, sinks.layer_indices[place[1]], place[2])
        assert int(row["position"]) == sinks.position[place] and row["mechanism"] == sinks.mechanism[place]
        assert float(row["ratio_out"]) == pytest.approx(sinks.ratio[place], rel=1e-5)
        assert row["token"].lstrip("'") == sinks.inputs.tokens.label(sequence, int(row["position"]))
    heads = read_csv(files, "heads.csv")
    assert tuple(heads[0]) == HEAD_COLUMNS and len(heads) == sinks.sink_heads.size
    for row in heads:
        number = {key: float(value) for key, value in row.items() if key not in ("kind", "mechanism")}
        members = [e for e in events if (e["layer"], e["head"]) == (row["layer"], row["head"])]
        with_event = [e for e in members if e["mechanism"]] or members
        assert number["events"] == pytest.approx(np.mean([e["mechanism"] != "" for e in members]))
        assert number["events"] == pytest.approx(number["nop"] + number["broadcast"] + number["neither"])
        assert number["strength"] == pytest.approx(np.mean([float(e["strength"]) for e in members]), rel=1e-4)
        assert number["epsilon"] == pytest.approx(np.median([float(e["epsilon"]) for e in members]), rel=1e-4)
        for name in ("ratio_out", "stable_rank", "norm_ratio"):
            assert number[name] == pytest.approx(np.median([float(e[name]) for e in with_event]), rel=1e-4)
        assert number["kind_share"] == pytest.approx(np.mean([e["kind"] == row["kind"] for e in members]))
        assert (row["mechanism"] != "") == (number["events"] >= 0.5)
    for row in read_csv(files, "layers.csv"):
        members = [e for e in events if e["layer"] == row["layer"]]
        for column in ("kind", "token"):
            share = np.mean([e[column] == row[column] for e in members])
            assert float(row[f"{column}_share"]) == pytest.approx(share, rel=1e-4)
            assert share == max(np.mean([e[column] == member[column] for e in members]) for member in members)
    with np.load(io.BytesIO(files.contents["sinks.npz"])) as arrays:
        assert tuple(arrays) == ARRAYS
        np.testing.assert_array_equal(arrays["ratio"], sinks.ratio)
        assert arrays["kinds"].tolist() == list(sinks.kinds)


def lemmas_hold(found: SinkMechanisms) -> bool:
    """Up to float32's rounding of attention and updates."""
    m, slack = found.measures, 1e-4
    return all((
        (m["distance"] <= m["bound"] + slack).all(),
        (m["residual"] <= m["residual_bound"] + slack).all(),
        (m["leading"] >= m["leading_bound"] - slack).all(),
        (np.abs(m["variance_change"]) <= m["variance_bound"] + slack).all(),
        (np.abs(m["leading"] - 1) <= np.sqrt(found.rank) * m["residual"] + slack).all(),  # Weyl, in units of sigma_1
    ))  # fmt: skip


def test_lemmas_hold_of_a_trained_model_and_of_learned_sinks(sinks_of_embedded: SinkMechanisms, tmp_path: Path) -> None:
    assert lemmas_hold(sinks_of_embedded)
    case = case_named("gpt_oss")  # its rows do not sum to one
    runner = runner_of(case, tmp_path)
    assert lemmas_hold(
        sink_mechanisms(runner, SinkInputs(dict(enumerate(sequences_of(case))), every_third_special(), ""))
    )


def test_a_page_shows_registers_where_there_are_some(tmp_path: Path) -> None:
    for name, some in (("dinov2", False), ("dinov2_with_registers", True)):
        runner, files = runner_of(case_named(name), tmp_path / name), Files()
        images = dict(enumerate(sequences_of(case_named(name))))
        sinks = sink_mechanisms(runner, SinkInputs(images, image_tokens(runner.model), ""))
        write_mechanisms_page(files, sinks)
        drawn = {name.removesuffix(".png") for name in files.contents if name.endswith(".png")}
        assert drawn - {"registers"} == {
            "sink-tokens", "head-map", "norms", "plane", "lemmas", "similarity", "spectra", "angles", "routing"
        }  # fmt: skip
        assert ("registers" in drawn) == some == ("norm_mean_register" in sinks.layers.names)
        assert (b"Fig. 8." in files.contents["report.html"]) == some


def test_no_panel_of_the_head_map_is_empty(sinks_of_embedded: SinkMechanisms) -> None:
    """Without a sink head there is nothing to say of their mechanisms."""
    for share, panels in ((0, 2), (1, 3)):
        sinks = replace(sinks_of_embedded, share=np.full_like(sinks_of_embedded.share, share))
        drawn = [axis for axis in figures.head_map_figure(sinks).axes if axis.get_label() != "<colorbar>"]
        assert len(drawn) == panels == sum(bool(axis.images) for axis in drawn)


def test_angles_of_every_head_are_those_of_its_table(sinks_of_embedded: SinkMechanisms) -> None:
    share = np.zeros_like(sinks_of_embedded.share)
    share[:, 1] = 1
    sinks = replace(sinks_of_embedded, share=share)
    axis = figures.angles_figure(sinks).axes[0]
    points = np.concatenate([dots.get_offsets() for dots in axis.collections])
    heads = np.stack([sinks.heads["query_key_others"], sinks.heads["query_key"]], axis=1)
    assert sorted(points.tolist()) == sorted(heads.tolist())
    assert len(axis.collections[0].get_offsets()) == (sinks.heads["mechanism"] == "").sum() == 8


def test_medians_of_a_head_are_over_its_events(sinks_of_embedded: SinkMechanisms) -> None:
    """Head 0 has events on two texts of four, head 1 on none."""
    sinks = sinks_of_embedded
    share = np.zeros_like(sinks.share)
    share[:2, 0, 0] = 1
    sinks = replace(sinks, share=share)
    assert sinks.heads["ratio_out"][0] == np.median(sinks.ratio[:2, 0, 0])
    assert sinks.heads["ratio_out"][1] == np.median(sinks.ratio[:, 0, 1])
    assert sinks.heads["events"].tolist() == [0.5] + [0] * 15


def test_attention_flows_to_some_kind_of_token(sinks_of_embedded: SinkMechanisms) -> None:
    sinks = sinks_of_embedded
    np.testing.assert_allclose(sinks.inflow.sum(axis=-1), 1, atol=1e-6)
    assert (sinks.strength <= sinks.inflow.max(axis=-1) + 1e-9).all()


def test_a_text_of_one_token_is_refused(sinks_of_embedded: SinkMechanisms) -> None:
    inputs = SinkInputs({"short": np.array([3])}, sinks_of_embedded.inputs.tokens, "")
    with pytest.raises(ws.CheckpointError, match="two-layers: short has one token; sinks need several"):
        sink_mechanisms(open_runner(ws.open_model(EMBEDDED)), inputs)


def test_results_are_short_in_a_notebook(sinks_of_embedded: SinkMechanisms) -> None:
    assert repr(sinks_of_embedded) == "SinkMechanisms(two-layers: 2 layers of 8 heads, 4 inputs)"


def test_sinks_of_a_real_vision_transformer_pass_from_cls_to_patches() -> None:
    """The transition of Fig. 4, on photographs: the strongest keys are CLS early and patches late."""
    model = ws.open_model(shared("vit-tiny"))
    sinks = sink_mechanisms(open_runner(model), read_inputs(model, n=4))
    cls = sinks.kinds.index("CLS")
    assert (sinks.kind[:, 0] == cls).all()
    assert lemmas_hold(sinks)
    assert (sinks.kind[:, -4:] != cls).all()
