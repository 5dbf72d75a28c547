"""Sinks changed while a model runs: losses equal transformers' with gathered values changed by plain
loops; what replaces a sink is of other texts; heads are grouped as their mechanisms say."""

import csv
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.cases import case_of
from tests.support.commands import run

torch = pytest.importorskip("torch", reason="the runner needs the extra `runner`")
pytest.importorskip("transformers", reason="the runner needs the extra `runner`")

from tests.support.random_models import random_model, runner_of  # noqa: E402
from tests.support.two_layers import TWO_LAYERS  # noqa: E402
from weightscope.core.tables import Column, Table  # noqa: E402
from weightscope.heads.sinks import mechanisms  # noqa: E402
from weightscope.heads.sinks.causal import (  # noqa: E402
    CHANGES,
    Group,
    Replacements,
    causal_table,
    changing,
    groups,
    replacements,
    sinks_and_changes,
)
from weightscope.model.metrics.sinks import BROADCAST, NOP  # noqa: E402
from weightscope.model.text.sequences import Framing, read_texts, token_windows  # noqa: E402
from weightscope.runner import Runner, open_runner  # noqa: E402
from weightscope.runner.framing import tokenizer_of  # noqa: E402
from weightscope.runner.runner import Activations, Intervention, losses_under  # noqa: E402

pytestmark = pytest.mark.check

FAMILIES = ("llama", "gpt2", "qwen2")  # grouped values; biases and no rotation; biases and both
HEADS = [(0, 1), (1, 0), (1, 3)]
TEXTS = [np.random.default_rng(seed).integers(3, 20, n) for seed, n in enumerate((11, 8, 11))]


def changed_by_loops(name: str, runner: Runner, how: str, given: dict[tuple[int, int], Any], patch: Any) -> np.ndarray:
    """Losses of transformers' model if its attention gathers other values in `HEADS`: given by head, (r,) values."""
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    plain = module.eager_attention_forward

    def gathered(attention: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        output, weights = plain(attention, query, key, value, *args, **options)  # (1, n, H, r), (1, H, n, n)
        output, n, layer = output.clone(), output.shape[1], attention.layer_idx
        for head in [head for index, head in HEADS if index == layer]:
            a, v = weights[0, head], value[0, head * value.shape[1] // weights.shape[1]]
            sink = max(range(n), key=lambda j: sum(float(a[i, j]) for i in range(n)))
            for i in range(n):
                if i == sink:
                    continue
                rest = sum(float(a[i, j]) for j in range(n) if j != sink)
                total = torch.zeros_like(v[0])
                for j in range(n):
                    if j != sink:
                        share = a[i, j] / rest if how == "redirected" and rest else a[i, j]
                        total += share * v[j]
                    elif how in given[layer, head]:
                        total += a[i, j] * torch.from_numpy(given[layer, head][how])
                output[0, i, head] = total
        return output, weights

    patch.setattr(module, "eager_attention_forward", gathered)
    return np.array([runner.losses([text])[0] for text in TEXTS])


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_are_those_of_the_model_with_other_gathered_values(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, rng = runner_of(name, tmp_path), np.random.default_rng(0)
    values, given = {}, {}
    for layer, head in HEADS:
        w_o = runner.layers[layer].head(head).w_o  # (r, d)
        drawn = {each: rng.normal(size=len(w_o)).astype(np.float32) for each in ("mean", "ordinary")}
        values[layer, head] = drawn
        given[layer, head] = Replacements(drawn["mean"] @ w_o, (drawn["ordinary"] @ w_o)[None])
    plain, together = losses_under(runner, TEXTS, [Intervention([0, 1], changing(CHANGES[how][0], HEADS, given))])
    expected = changed_by_loops(name, runner, how, values, monkeypatch)
    np.testing.assert_allclose(together, expected, rtol=2e-5)
    assert np.abs(together - plain).max() > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_replacements_are_the_sinks_mean_and_other_tokens(name: str, tmp_path: Path) -> None:
    runner = runner_of(name, tmp_path)
    updates: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = {head: [] for head in HEADS}

    def keep(seen: Activations) -> None:
        for x, attention in seen.each():
            for layer, head in HEADS:
                if layer == seen.layer.index:
                    received = attention[head].sum(axis=0)
                    updates[layer, head].append((int(received.argmax()), seen.layer.values(x)[head]))

    runner.observe(TEXTS, keep)
    for head, given in replacements(runner, HEADS, TEXTS).items():
        mean = sum(u[sink] for sink, u in updates[head]) / len(TEXTS)
        np.testing.assert_allclose(given.mean, mean, atol=1e-5)
        for row, (sink, u) in zip(given.ordinary, updates[head], strict=True):
            nearest = np.abs(u - row).max(axis=1)
            assert nearest.argmin() != sink and nearest.min() < 1e-5


def test_a_constant_sink_is_replaced_by_itself(tmp_path: Path) -> None:
    """Token 0 of a causal model sees itself alone: its mean over texts with the same first token is its update."""
    runner = runner_of("llama", tmp_path)
    texts = [np.array([5, *text]) for text in TEXTS]
    place = next(
        (layer, head)
        for layer in (0, 1) for head in range(4)
        if all(sink == 0 for sink in sinks_on(runner, texts, layer, head))
    )  # fmt: skip
    given = replacements(runner, [place], texts)
    plain, changed = losses_under(
        runner, texts, [Intervention([place[0]], changing(CHANGES["mean"][0], [place], given))]
    )
    np.testing.assert_allclose(changed, plain, rtol=1e-6)


def sinks_on(runner: Runner, texts: list[np.ndarray], layer: int, head: int) -> list[int]:
    found: list[int] = []
    runner.observe(texts, lambda seen: found.extend(a[head].sum(axis=0).argmax() for _, a in seen.each()), [layer])
    return found


def test_bidirectional_attention_is_refused(tmp_path: Path) -> None:
    runner = runner_of("bert", tmp_path)
    with pytest.raises(ws.CheckpointError, match="layer 0: attention is not causal"):
        replacements(runner, [(0, 0)], TEXTS)


def test_heads_are_grouped_by_what_their_sinks_do() -> None:
    heads = Table([
        Column("layer", [0, 0, 0, 0, 1, 1, 1, 1]),
        Column("head", [0, 1, 2, 3] * 2),
        Column("strength", [0.9, 0.2, 0.1, 0.8, 0.3, 0.7, 0.4, 0.5]),
        Column("mechanism", [NOP, "", "", NOP, "", BROADCAST, "", ""]),
    ])  # fmt: skip
    assert groups(SimpleNamespace(heads=heads)) == [  # type: ignore[arg-type]
        Group("0.0", NOP, [(0, 0)]),
        Group("0.3", NOP, [(0, 3)]),
        Group("1.1", BROADCAST, [(1, 1)]),
        Group("every NOP", NOP, [(0, 0), (0, 3)]),
        Group("every broadcast", BROADCAST, [(1, 1)]),
        Group("every sink head", "", [(0, 0), (0, 3), (1, 1)]),
        Group("weakest heads beside them", "", [(0, 2), (0, 1), (1, 0)]),
    ]
    without = heads.where(heads["mechanism"] == "")
    assert groups(SimpleNamespace(heads=without)) == []  # type: ignore[arg-type]


def test_table_has_changes_of_perplexity_with_intervals() -> None:
    tokens, plain = np.array([10, 20]), np.array([30.0, 60.0])
    changed = [Group("0.0", NOP, [(0, 0)]), Group("every sink head", "", [(0, 0), (0, 1)])]
    losses = np.stack([plain, *(plain + more * tokens for more in range(len(changed) * len(CHANGES)))])
    table = causal_table(changed, losses, tokens, "")
    assert list(table["number"]) == [1, 2]
    for row in (0, 1):
        for place, name in enumerate(CHANGES):
            expected = np.exp(3 + len(CHANGES) * row + place) - np.exp(3)
            for column in (name, f"{name}_low", f"{name}_high"):  # both texts change alike
                assert table[column][row] == pytest.approx(expected)


@pytest.mark.parametrize("planted", [True, False], ids=["sink heads", "none"])
def test_command_writes_the_table_where_there_are_sink_heads(
    planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted:
        monkeypatch.setattr(mechanisms, "SINK_HEAD", 0)  # every head counts as one
    for name in ("one", "two"):
        words = f"A single man in possession of a good fortune must be in want of a {name} wife, or of a dog. "
        (tmp_path / f"{name}.txt").write_text("\n\n".join([4 * words] * 3))
    texts = [option for name in ("one", "two") for option in ("--text", str(tmp_path / f"{name}.txt"))]
    options = [*texts, "--inputs", "2", "--length", "12", "--causal", "1", "--out", str(tmp_path / "out")]
    done = run("sinks", TWO_LAYERS, "--question", "kind", *options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "causal.csv").exists() == planted
    page = (tmp_path / "out" / "report.html").read_text()
    assert ("What the sinks are needed for" in page) == planted
    if planted:
        with (tmp_path / "out" / "causal.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["heads"] for row in rows[:16]] == [f"{layer}.{head}" for layer in (0, 1) for head in range(8)]
        assert float(rows[-1]["zero_low"]) <= float(rows[-1]["zero"]) <= float(rows[-1]["zero_high"])
        assert "Changed on 1 text of 12 tokens" in page


def test_texts_that_are_changed_may_begin_with_their_own_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms, "SINK_HEAD", 0)
    model, texts = ws.open_model(TWO_LAYERS), read_texts()
    runner = open_runner(model, language=True)
    inputs = mechanisms.read_inputs(model, n=2, length=12, own_first=True)
    table = sinks_and_changes(runner, inputs, texts, n=1, length=12, own_first=True).causal
    assert table is not None
    window = token_windows(Framing(tokenizer_of(model)), texts.texts[1::2], 1, 12)
    np.testing.assert_allclose(table["perplexity"], np.exp(runner.losses(window)[0] / 11), rtol=1e-6)


def test_images_have_no_perplexity(tmp_path: Path) -> None:
    random_model(case_of("vit")).save_pretrained(tmp_path)
    command = ["sinks", str(tmp_path), "--question", "kind", "--causal", "2", "--out", str(tmp_path / "out")]
    done = run(*command)
    assert done.exit_code == 2
    assert "sees images; this needs one that reads text" in done.output
