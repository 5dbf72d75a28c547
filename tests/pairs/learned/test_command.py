"""`weightscope learned` as a user types it: planted updates are named, and words agree with the eager model."""

import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from benchmarks.synthetic import Sizes, write
from tests.support.commands import is_one_line, run
from tests.support.figures import undrawn
from tests.support.plants.families import random_llama
from tests.support.two_layers import FOLDER, TWO_LAYERS
from weightscope.heads.circuits.stream import ShortTexts, follow_exactly
from weightscope.pairs.learned.page import heading
from weightscope.pairs.learned.words import mean_probabilities

Weights = dict[str, np.ndarray]
PLANTED = random_llama()
RNG = np.random.default_rng(1)


def written(folder: Path, change: Callable[[Weights], None] = lambda _: None) -> Path:
    """A small Llama, changed first."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PLANTED.config))
    weights = {name: tensor.copy() for name, tensor in PLANTED.tensors.items()}
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def lora(rank: int, names: str = "proj") -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        for name in weights:
            if names in name:
                m, n = weights[name].shape
                left, right = RNG.standard_normal((m, rank)), RNG.standard_normal((rank, n))
                weights[name] += (0.02 * left @ right).astype(np.float32)

    return change


def full(weights: Weights) -> None:
    """Every value moves, and some directions more than noise has."""
    lora(2)(weights)
    for name in weights:
        weights[name] += 0.01 * RNG.standard_normal(weights[name].shape).astype(np.float32)


def half(weights: Weights) -> None:
    for name in weights:
        weights[name] = weights[name].astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(
    ("change", "kind", "rank"),
    [(lora(4), "low rank", 4), (lora(1, "q_proj"), "low rank", 1), (full, "full", None), (half, "conversion", None),
     (lambda weights: None, "none", None)],
)  # fmt: skip
def test_how_it_was_trained(change: Callable[[Weights], None], kind: str, rank: int | None, tmp_path: Path) -> None:
    result = ws.learned(written(tmp_path / "a"), written(tmp_path / "b", change))
    training = result.tunes[0].training
    assert (training.kind, training.rank) == (kind, rank), training.evidence
    assert training.evidence in result.lead


def renamed(weights: Weights) -> None:
    for name in [name for name in weights if ".layers.1." in name]:
        weights[name.replace("layers", "blocks")] = weights.pop(name)


@pytest.mark.parametrize("change", [renamed, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight")])
def test_tensors_without_a_counterpart_are_not_called_unchanged(
    change: Callable[[Weights], None], tmp_path: Path
) -> None:
    (tune,) = ws.learned(written(tmp_path / "a"), written(tmp_path / "b", change)).tunes
    assert tune.training.kind == "in part" and "these did not change. Only in the first: " in tune.lead


@pytest.mark.parametrize(("change", "kind", "rank"), [(lora(4), "low rank", 4), (full, "full", None)])
def test_how_it_was_trained_shows_in_16_bits(
    change: Callable[[Weights], None], kind: str, rank: int | None, tmp_path: Path
) -> None:
    def saved(weights: Weights) -> None:
        weights |= {name: tensor.astype(np.float16) for name, tensor in weights.items()}

    def changed(weights: Weights) -> None:
        change(weights)
        saved(weights)

    training = ws.learned(written(tmp_path / "a", saved), written(tmp_path / "b", changed)).tunes[0].training
    assert (training.kind, training.rank) == (kind, rank), training.evidence


def test_several_tunes_collide_where_they_share_spaces(tmp_path: Path) -> None:
    base, a, b = (written(tmp_path / name, change) for name, change in
                  (("base", lambda _: None), ("a", lora(2)), ("b", lora(2))))  # fmt: skip
    apart, same = ws.learned(base, a, b), ws.learned(base, a, a)
    assert "do not collide" in apart.lead and "cosine 1" in same.lead
    assert same.overlaps and all(each.reads == pytest.approx(1) for pairs in same.overlaps.values() for each in pairs)


def test_it_writes_its_page_and_tables(tmp_path: Path) -> None:
    base, tuned = written(tmp_path / "a"), written(tmp_path / "b", lora(3))
    with undrawn():
        result = run("learned", base, tuned, tuned, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed == json.loads((tmp_path / "out" / "learned.json").read_text())
    evidence = "a change of rank up to 3 in 21 of 21 matrices, as of a LoRA, or of a few steps of training"
    assert printed["tunes"][0]["training"] == {"kind": "low rank", "rank": 3, "evidence": evidence}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "no search for backdoors" in page and "Collisions" in page
    assert "<h1>2 tunes of a: 2 low rank</h1>" in page
    arrays = np.load(tmp_path / "out" / "directions.npz")
    name = "model.layers.1.mlp.down_proj.weight"
    d = load_file(tuned / "model.safetensors")[name] - PLANTED.tensors[name]
    s, u, v = (arrays[f"0 layer 1 down {what}"][:3] for what in ("s", "written", "read"))
    assert np.allclose((u * s[:, None]).T @ v, d, atol=1e-6)


def test_the_heading_of_one_tune_is_how_it_was_changed(tmp_path: Path) -> None:
    base, tuned = written(tmp_path / "a"), written(tmp_path / "b", lora(3))
    learned = ws.learned(base, tuned)
    assert heading(learned) == learned.tunes[0].how
    assert learned.lead.startswith(f"{heading(learned)}. ")


def test_counts_of_intruders_stand_out_from_their_cells(tmp_path: Path) -> None:
    base, tuned = written(tmp_path / "a"), written(tmp_path / "b", lora(3))
    axis = ws.learned(base, tuned).plot().axes[0]
    (cells,) = axis.collections
    shades = cells.cmap(cells.norm(cells.get_array()))[..., :3].mean(axis=-1)
    assert {text.get_color() for text in axis.texts} == {"black", "white"}
    for text in axis.texts:
        column, row = text.get_position()
        assert (text.get_color() == "black") == (shades[row, column] > 0.49)


def test_a_picture_shows_each_tune(tmp_path: Path) -> None:
    base, tuned = written(tmp_path / "a"), written(tmp_path / "b", lora(3))
    figure = ws.learned(base, tuned, tuned).plot()
    assert [axis.get_title() for axis in figure.axes[:2]] == ["b", "b"]
    assert "no matrix changed" in [text.get_text() for text in ws.learned(base, base).plot().axes[0].texts]


def test_printed_table_fits_80_characters(tmp_path: Path) -> None:
    base, a, b = (written(tmp_path / name, change) for name, change in
                  (("base", lambda _: None), ("a", lora(2)), ("b", full)))  # fmt: skip
    for tunes in ((a,), (a, b)):
        *_, table = ws.learned(base, *tunes).printed()
        assert {"matrix", "change", "rank", "intruders"} <= {*table.names}
        assert ("tune" in table.names) is (len(tunes) > 1)
        assert max(map(len, table.text().splitlines())) <= 80


def test_size_of_a_change_shares_its_brackets(tmp_path: Path) -> None:
    def scaled(weights: Weights) -> None:
        weights["model.layers.0.mlp.up_proj.weight"] *= 1.5

    result = ws.learned(written(tmp_path / "a"), written(tmp_path / "b", scaled))
    assert "'scaled by one number' in 1 of 1 changed tensor (1.5, relative change 0.5)." in result.lead


def test_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    assert is_one_line(run("learned", TWO_LAYERS, tmp_path / "missing"))
    assert run("learned", TWO_LAYERS).exit_code == 2


def test_layers_are_let_go_once_the_texts_have_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a 7B's size a layer is 270 MB."""
    seen, alive = [], []

    def followed(*arguments: Any) -> Iterator[ShortTexts]:
        for each in follow_exactly(*arguments):
            seen.append(weakref.ref(each.layer))
            alive.append(sum(layer() is not None for layer in seen))
            yield each

    monkeypatch.setattr(sys.modules[mean_probabilities.__module__], "follow_exactly", followed)
    model = ws.open_model(write(tmp_path / "deep", Sizes(layers=8, inner=96)))
    mean_probabilities(model, np.zeros((2, 4), int))
    assert len(alive) == 8 and max(alive) <= 3


@pytest.mark.check
def test_mean_probabilities_are_those_of_the_eager_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch comes with the extra `runner`")
    from weightscope.runner.loading import load_eager

    for source in (TWO_LAYERS, written(tmp_path / "a")):
        model = ws.open_model(source)
        texts = np.random.default_rng(0).integers(0, model.embeddings.n_tokens, (3, 9))
        with torch.no_grad():
            logits = load_eager(model, language=True)(torch.tensor(texts)).logits
        expected = logits.double().softmax(-1).mean((0, 1)).numpy()
        assert np.allclose(mean_probabilities(model, texts), expected, atol=1e-7, rtol=1e-4)


@pytest.mark.check
def test_a_token_whose_logit_is_raised_is_first_among_the_words(tmp_path: Path) -> None:
    """The final norm's bias of GPT-2 raises one token everywhere."""
    weights = load_file(ws.open_model(TWO_LAYERS).checkpoint.files[0].path)
    (tmp_path / "b").mkdir()
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / "b" / file).write_bytes((FOLDER / file).read_bytes())
    row = weights["transformer.wte.weight"][700].astype(np.float32)
    bias = weights["transformer.ln_f.bias"]
    weights["transformer.ln_f.bias"] = (bias + 3 * row / np.linalg.norm(row)).astype(bias.dtype)
    weights["transformer.h.0.mlp.c_proj.weight"] = weights["transformer.h.0.mlp.c_proj.weight"] * np.float16(1.01)
    save_file(weights, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    in_words = ws.learned(TWO_LAYERS, tmp_path / "b").tunes[0].words
    assert in_words is not None and 700 in in_words.top[:3]
