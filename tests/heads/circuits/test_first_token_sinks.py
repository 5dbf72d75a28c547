"""What heads do with the first token of short random texts, against transformers' eager attention on the same texts."""

import csv
import html
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.cases import CASES
from tests.support.commands import run
from tests.support.two_layers import FOLDER, TWO_LAYERS
from weightscope.heads.circuits import names
from weightscope.heads.circuits.names import DRAWS, NAMED_AT_LEAST, SHORT, first_token_sinks
from weightscope.heads.circuits.stream import attend, follow_exactly, short_sequences
from weightscope.model.metrics.sinks import BROADCAST, NEITHER, NO_SINK, NOP, first_token_kind, massive_activation

by_name = {case.name: case for case in CASES}
FAMILIES = ("llama", "qwen2", "gemma", "gpt2", "gpt_neox", "gemma2", "gemma3", "qwen3", "phi3", "stablelm",
            "starcoder2", "opt", "olmo2", "bloom", "falcon_alibi", "cohere", "gptj", "gpt_neo", "codegen", "mistral",
            "phi")  # fmt: skip


def saved(name: str, folder: Path, **config: Any) -> Any:
    """A random model of a case, in a folder; windows are wider than the texts."""
    pytest.importorskip("transformers", reason="the eager models are transformers', which is not installed")
    from tests.support.random_models import random_model

    case = by_name[name]
    wide = {key: 64 for key in ("sliding_window", "window_size") if key in case.config}
    network = random_model(replace(case, config=case.config | wide | config))
    network.save_pretrained(folder)
    return network


def compared(name: str, folder: Path) -> None:
    """Attention of every head to every token is the eager model's; so is its mean from the last token to the first."""
    network = saved(name, folder, bos_token_id=3)
    torch = pytest.importorskip("torch")
    model = ws.open_model(folder)
    tokens = short_sequences(model, SHORT, DRAWS)
    assert tokens.shape == (2 * DRAWS, SHORT) and set(tokens[:DRAWS, 0]) == {3} and len(set(tokens[DRAWS:, 0])) > 3
    np.testing.assert_array_equal(tokens[:DRAWS, 1:], tokens[DRAWS:, 1:])
    with torch.inference_mode():
        expected = [each.numpy() for each in network(torch.tensor(tokens), output_attentions=True).attentions]
    last = len(expected) - 1
    for short, eager in zip(follow_exactly(model, tokens, last), expected, strict=True):
        np.testing.assert_allclose(short.attention, eager, rtol=0, atol=2e-5, err_msg=str(short.layer.index))
    sinks = first_token_sinks(model, model.attention_layers)
    assert not sinks.note
    named, unnamed = (np.array([each[start, :, -1, 0].mean(axis=0) for each in expected])
                      for start in (slice(DRAWS), slice(DRAWS, None)))  # fmt: skip
    start = named if named.mean() >= NAMED_AT_LEAST * unnamed.mean() else unnamed
    np.testing.assert_allclose(sinks.share, start, rtol=0, atol=2e-5)
    assert ((sinks.kind == NO_SINK) == (sinks.share < 0.5)).all()
    only_last = first_token_sinks(model, [last])
    np.testing.assert_allclose(only_last.share[0], sinks.share[last], rtol=0, atol=1e-6)


@pytest.mark.check
@pytest.mark.parametrize("name", FAMILIES)
def test_attention_to_the_first_token_is_the_eager_model_s(name: str, tmp_path: Path) -> None:
    compared(name, tmp_path)


def test_texts_side_by_side_do_not_see_each_other(two_layers: ws.Model) -> None:
    tokens = short_sequences(two_layers, SHORT, 4)
    together = list(follow_exactly(two_layers, tokens, 1))
    unit = np.sqrt(two_layers.config.d_model) * np.finfo(np.float32).eps  # of float32 sums as long as tokens are wide
    for number, text in enumerate(tokens):
        for short, alone in zip(together, follow_exactly(two_layers, text[None], 1), strict=True):
            # Four maps in a row make a token; the softmax moves by no more than its scores do.
            of_tokens, of_scores = (4 * unit * np.abs(each).max() for each in (alone.x, short.layer.scores(alone.x[0])))
            np.testing.assert_allclose(short.x[number], alone.x[0], rtol=0, atol=of_tokens)
            np.testing.assert_allclose(short.attention[number], alone.attention[0], rtol=0, atol=of_scores)
            plain = attend(short.layer, alone.x[0], causal=True)
            np.testing.assert_allclose(alone.attention[0], plain, rtol=0, atol=of_scores)


@pytest.mark.check
@pytest.mark.parametrize("name", ["llama", "qwen3", "bloom", "gpt2"])
def test_preferred_distances_are_those_of_the_scores_of_pairs(name: str, tmp_path: Path) -> None:
    """Every token after the first as query at each distance from every such token as key."""
    saved(name, tmp_path, bos_token_id=3)
    model = ws.open_model(tmp_path)
    sinks = first_token_sinks(model, model.attention_layers)
    for place, short in enumerate(follow_exactly(model, short_sequences(model, SHORT, DRAWS), 1)):
        layer, x = short.layer, short.x[:, 1:].reshape(-1, short.x.shape[-1])
        n = len(x)
        if name == "gpt2":  # its positions are in its tokens
            assert np.isnan(sinks.peak[place]).all() and np.isnan(sinks.fast[place]).all()
            continue
        curve = np.stack([
            layer.scores(np.tile(x, (2, 1)), np.repeat([delta, 0], n))[:, :n, n:].mean(axis=(1, 2))
            for delta in range(min(128, model.config.n_positions or 128))
        ])  # fmt: skip
        np.testing.assert_array_equal(sinks.peak[place], curve.argmax(axis=0))
        if layer.rotation is None:
            assert np.isnan(sinks.fast[place]).all()
            continue
        first, second = (np.arange(layer.head_dim)[part] for part in layer.rotation.pairs)
        q, k = (np.square(made(x), dtype=float).mean(axis=1) for made in (layer.queries, layer.keys))
        for head in range(layer.n_heads):
            of_key = k[head * len(k) // layer.n_heads]
            used = [
                np.sqrt((q[head, a] + q[head, b]) * (of_key[a] + of_key[b])) for a, b in zip(first, second, strict=True)
            ]
            turns = 2 * np.pi / np.asarray(layer.rotation.frequencies)
            fast = sum(size for size, turn in zip(used, turns, strict=True) if turn <= 32)
            assert sinks.fast[place, head] == pytest.approx(fast / sum(used), rel=1e-5)


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mixtral", "the place of the feed-forward network in mixtral models is not known here"),
        ("bert", "attention is not causal"),
    ],
)
def test_models_that_cannot_be_followed_say_why(name: str, reason: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    model = ws.open_model(tmp_path)
    sinks = first_token_sinks(model, model.attention_layers)
    assert np.isnan(sinks.share).all() and sinks.share.shape == (len(model.attention_layers), model.config.n_heads)
    assert reason in sinks.note


def test_an_audit_has_the_columns_whether_or_not_they_are_known(
    two_layers: ws.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ws.audit(two_layers, directions=0)
    assert known.heads.names[-2:] == ["sink_share", "sink_kind"]
    assert (known.heads["sink_share"] > 0).all() and (known.heads["sink_share"] < 1).all()
    assert not any("Sinks" in note for note in known.notes)
    unasked = ws.audit(two_layers, directions=0, sinks=False)
    assert np.isnan(unasked.heads["sink_share"]).all() and unasked.heads.csv().splitlines()[1].endswith(",,")
    assert "Sinks at the first token are not known: they were not asked for." in unasked.notes
    monkeypatch.setattr(names, "UNASKED", 1000)
    large = ws.audit(two_layers, directions=0)
    assert any("feed-forward networks are read only if asked for" in note for note in large.notes)
    asked = ws.audit(two_layers, directions=0, sinks=True)
    np.testing.assert_array_equal(asked.heads["sink_share"], known.heads["sink_share"])


def test_a_broken_network_leaves_the_audit_whole(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FOLDER / name, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("h.0.mlp.c_proj.weight"))
    for change, reason in ((weights[name] * np.nan, "not finite"), (weights[name][:-1].copy(), "has shape")):
        save_file(weights | {name: change}, tmp_path / "model.safetensors")
        audit = ws.audit(tmp_path, directions=0)
        assert np.isnan(audit.heads["sink_share"]).all()
        assert any(note.startswith("Sinks at the first token are not known") and reason in note for note in audit.notes)


def test_a_first_token_that_the_vocabulary_lacks_gives_no_kind_of_sink(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "model.safetensors", tmp_path)
    config = json.loads((FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"bos_token_id": 60000, "eos_token_id": 0}))
    audit = ws.audit(tmp_path, directions=0)
    assert all(isinstance(kind, float) and np.isnan(kind) for kind in audit.heads["sink_kind"])
    assert any("bos_token_id of config.json is 60,000, and the vocabulary has" in note for note in audit.notes)


def planted(folder: Path, weight: float) -> ws.Model:
    """The model of two layers with one large entry in the down-projection of layer 0, of a unit on at first."""
    shutil.copy(FOLDER / "config.json", folder)
    weights = load_file(FOLDER / "model.safetensors")
    up, bias, down = (next(name for name in weights if name.endswith(f"h.0.mlp.{end}"))
                      for end in ("c_fc.weight", "c_fc.bias", "c_proj.weight"))  # fmt: skip
    weights[up], weights[bias], weights[down] = (weights[name].copy() for name in (up, bias, down))
    weights[up][:, 7], weights[bias][7] = 0, 10  # the unit is 10 for every token
    weights[down][7, 5] = weight
    save_file(weights, folder / "model.safetensors")
    return ws.open_model(folder)


def test_the_weight_that_makes_a_massive_activation_is_found(tmp_path: Path) -> None:
    model = planted(tmp_path, 3000)
    sinks = first_token_sinks(model, model.attention_layers)
    assert sinks.massive is not None and sinks.super_weight is not None
    assert (sinks.massive.dimension, sinks.massive.layer) == (5, 1)
    assert sinks.massive.value == pytest.approx(30_000, rel=0.01) and sinks.massive.times_median > 1000
    assert sinks.super_weight[:4] == (0, 7, 5, 3000)
    assert sinks.super_weight.share == pytest.approx(1, abs=0.01)
    assert any("entry (5, 7) of layer 0's down-projection, 3e+03," in note for note in ws.audit(model).notes)
    without = planted(tmp_path, 0)
    assert first_token_sinks(without, without.attention_layers).massive is None


def test_massive_activations_are_large_and_larger_than_the_rest() -> None:
    first = np.ones((4, 6))
    first[1:, 2] = 30, 900, -1200
    assert massive_activation(first, np.full(4, 0.5)) == (2, 2, -1200, 2400)
    assert massive_activation(first, np.full(4, 1.3)) is None
    assert massive_activation(first / 20, np.full(4, 0.01)) is None


def head_of(rng: np.random.Generator, first: float) -> tuple[np.ndarray, np.ndarray]:
    """Attention of 9 texts of 3 tokens that is 0.9 at the first, and updates; the first's is `first` times as long."""
    attention = np.zeros((9, 3, 3))
    attention[:, 0, 0], attention[:, 1, :2], attention[:, 2] = 1, (0.9, 0.1), (0.9, 0.05, 0.05)
    updates = rng.normal(size=(9, 3, 5))
    updates /= np.linalg.norm(updates, axis=-1, keepdims=True)
    updates[:, 0] = first * updates[0, 0]
    return attention, updates


@pytest.mark.parametrize(("first", "kind"), [(0.1, NOP), (2.0, BROADCAST), (0.3, NEITHER)])
def test_a_head_that_was_built_for_a_kind_has_it(first: float, kind: str) -> None:
    attention, updates = head_of(np.random.default_rng(0), first)
    assert first_token_kind(0.9, attention, updates) == kind
    assert first_token_kind(0.49, attention, updates) == NO_SINK


def test_a_first_token_whose_value_differs_from_text_to_text_is_no_broadcast() -> None:
    attention, updates = head_of(np.random.default_rng(0), 1.0)
    assert first_token_kind(0.9, attention, updates) == BROADCAST
    updates[:, 0] = np.eye(5)[np.arange(9) % 5]
    assert first_token_kind(0.9, attention, updates) == NEITHER


def audited(source: object, out: Path, *more: str) -> tuple[list[dict[str, str]], str]:
    """The rows of heads.csv that the command writes, and the text of its page."""
    command = ["audit", str(source), "--out", str(out), "--directions", "0", *more]
    done = run(*command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    with (out / "heads.csv").open(newline="") as file:
        return list(csv.DictReader(file)), html.unescape((out / "report.html").read_text())


def shares(rows: list[dict[str, str]]) -> list[str]:
    return [row["sink_share"] for row in rows]


@pytest.mark.check
def test_the_option_reads_networks_that_are_too_large_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = sum(array.nbytes for name, array in load_file(FOLDER / "model.safetensors").items() if is_network(name))
    monkeypatch.setattr(names, "UNASKED", stored)  # as many bytes are read unasked
    known, page = audited(TWO_LAYERS, tmp_path / "default")
    assert all(0 < float(share) < 1 for share in shares(known)) and "Sinks at the first token" not in page
    monkeypatch.setattr(names, "UNASKED", stored - 1)
    unknown, page = audited(TWO_LAYERS, tmp_path / "large")
    assert set(shares(unknown)) == {""} == {row["sink_kind"] for row in unknown}
    assert "of feed-forward networks are read only if asked for" in page
    asked, page = audited(TWO_LAYERS, tmp_path / "asked", "--sinks")
    assert shares(asked) == shares(known) and "Sinks at the first token" not in page


def is_network(name: str) -> bool:
    return name.endswith(("mlp.c_fc.weight", "mlp.c_proj.weight"))


def test_networks_elsewhere_are_fetched_only_if_asked_for(
    two_layers: ws.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(two_layers.checkpoint), "bytes_to_fetch", lambda checkpoint, tensors: len(list(tensors)))
    unasked = first_token_sinks(two_layers, [0, 1])
    assert np.isnan(unasked.share).all()
    assert "feed-forward networks are not on this machine; `weightscope audit --sinks` follows" in unasked.note
    asked = first_token_sinks(two_layers, [0, 1], asked=True)
    assert not asked.note and np.isfinite(asked.share).all()


@pytest.mark.check
@pytest.mark.parametrize("more", [(), ("--sinks",)], ids=["default", "asked"])
def test_the_option_cannot_help_where_no_network_is_known(more: tuple[str, ...], tmp_path: Path) -> None:
    saved("mixtral", tmp_path / "model")
    rows, page = audited(tmp_path / "model", tmp_path / "out", *more)
    assert set(shares(rows)) == {""}
    reason = "the place of the feed-forward network in mixtral models is not known here"
    assert f"Sinks at the first token are not known: {reason}." in page
