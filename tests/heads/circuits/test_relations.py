"""MAPS scores of a relation: against the dense product, a head that was made to map it, and permuted pairs."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run
from tests.support.two_layers import FOLDER
from weightscope.heads.circuits.relations import Pairs, read_pairs, relation, relation_scores, score_alone
from weightscope.model.text.tokenizer import Tokenizer, TokenList

TOP = 10
N = 30


@pytest.fixture(scope="module")
def pairs(two_layers: ws.Model) -> Pairs:
    rng = np.random.default_rng(3)
    ids = rng.choice(two_layers.embeddings.n_tokens, 2 * N, replace=False)
    return Pairs(ids[:N], ids[N:], N)


def planted(folder: Path, pairs: Pairs, head: int) -> ws.Model:
    """The model of two layers whose layer 1 has a head that writes the target of each source, not its own output."""
    weights = dict(load_file(FOLDER / "model.safetensors"))
    model = ws.open_model(FOLDER)
    unembedding = np.concatenate([rows for _, rows in model.unembedding.blocks()])
    x = model.embeddings.rows(pairs.sources).astype(np.float64)  # (n, d)
    gamma = model.layer(1).norm.gamma.astype(np.float64)
    seen = (x - x.mean(axis=1, keepdims=True)) * gamma
    r, d = 32, 256
    cut = d * np.finfo(np.float32).eps  # a centred unembedding has no direction of ones but by rounding
    gram = unembedding.T.astype(np.float64) @ unembedding
    wanted = unembedding[pairs.targets] @ np.linalg.pinv(gram, rcond=cut, hermitian=True)
    u, s, vt = np.linalg.svd(np.linalg.pinv(seen, rcond=cut) @ wanted)  # (d, d), of rank n
    stem = next(name for name in weights if name.endswith("h.1.attn.c_attn.weight")).removesuffix("c_attn.weight")
    columns = slice(2 * d + head * r, 2 * d + (head + 1) * r)
    weights[f"{stem}c_attn.weight"] = weights[f"{stem}c_attn.weight"].copy()
    weights[f"{stem}c_attn.weight"][:, columns] = u[:, :r] * (s[:r] / s[0])  # within float16; no score depends on it
    weights[f"{stem}c_proj.weight"] = weights[f"{stem}c_proj.weight"].copy()
    weights[f"{stem}c_proj.weight"][head * r : (head + 1) * r] = vt[:r]
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    return ws.open_model(folder)


def test_scores_are_those_of_the_dense_product(two_layers: ws.Model, pairs: Pairs) -> None:
    """As MAPS computes them: the `top` largest of e_s W_VO U' for each source, and of its negative."""
    table = relation_scores(two_layers, pairs, TOP, permutations=20)
    unembedding = np.concatenate([rows for _, rows in two_layers.unembedding.blocks()])
    x = two_layers.embeddings.rows(pairs.sources)
    for layer, head, score, suppressed in zip(
        *(table[name] for name in ("layer", "head", "score", "score_suppressed")), strict=True
    ):
        logits = (x @ two_layers.layer(int(layer)).head(int(head)).vo) @ unembedding.T  # (n, V)
        for sign, expected in ((1, score), (-1, suppressed)):
            first = np.argsort(-sign * logits, axis=1)[:, :TOP]
            assert (first == pairs.targets[:, None]).any(axis=1).mean() == pytest.approx(expected)
    assert len(table) == 16


def test_embeddings_alone_map_what_is_nearest_to_them(two_layers: ws.Model, pairs: Pairs) -> None:
    unembedding = np.concatenate([rows for _, rows in two_layers.unembedding.blocks()])
    logits = two_layers.embeddings.rows(pairs.sources) @ unembedding.T  # (n, V)
    second = np.argsort(-logits, axis=1)[:, 1]
    assert score_alone(two_layers, pairs._replace(targets=second), TOP) == 1
    assert score_alone(two_layers, pairs._replace(targets=second), 1) == 0


def test_a_head_that_was_made_to_map_pairs_is_beyond_chance_and_no_other(pairs: Pairs, tmp_path: Path) -> None:
    table = relation_scores(planted(tmp_path / "planted", pairs, 5), pairs, TOP)
    assert (table["layer"][0], table["head"][0]) == (1, 5)
    assert table["score"][0] > 0.9 and table["p_model"][0] < 0.002 and table["random"][0] < 0.2
    assert table["p_model"][1:].min() > 0.05 and table["p_model_suppressed"].min() > 0.05


def test_words_are_found_in_a_list_of_tokens(tmp_path: Path) -> None:
    """As a GGUF file has it: with its spelling of spaces, without rules that split a text."""
    file = tmp_path / "pairs.csv"
    file.write_text("".join(f"{word},{word.title()}\n" for word in ("one", "two", "six", "ten", "four", "nine")))
    words = ["\u0120one", "One", "one", *(f"\u0120{word}" for word in ("two", "six", "ten", "four", "Two", "Six"))]
    tokens = TokenList("list", [*words, "Ten", "Four"], "BPE")
    pairs = read_pairs(file, tokens)
    assert (pairs.sources.tolist(), pairs.targets.tolist(), pairs.given) == ([0, 3, 4, 5, 6], [1, 7, 8, 9, 10], 6)


def test_a_head_that_maps_everything_to_the_same_tokens_is_no_relation(two_layers: ws.Model, pairs: Pairs) -> None:
    """All pairs have one second token: permuting changes nothing, and no score is beyond chance."""
    same = Pairs(pairs.sources, np.full(N, pairs.targets[0]), N)
    table = relation_scores(two_layers, same, TOP, permutations=50)
    np.testing.assert_allclose(table["score"], table["random"])
    assert (table["p"] == 1).all()


def test_the_command_reads_pairs_and_names_heads(tmp_path: Path, pairs: Pairs) -> None:
    model = planted(tmp_path / "planted", pairs, 5)
    tokenizer = Tokenizer.at_hand(model)
    assert tokenizer is not None
    texts = [(tokenizer.text(int(a)), tokenizer.text(int(b))) for a, b in zip(*pairs[:2], strict=True)]
    kept = [(a.strip(), b.strip()) for a, b in texts if a.strip().isalpha() and b.strip().isalpha()]
    file = tmp_path / "pairs.csv"
    file.write_text("".join(f"{a},{b}\n" for a, b in [*kept, ("no single token here at all", "x")]))
    out = tmp_path / "out"
    arguments = ["circuits", str(tmp_path / "planted"), "--out", str(out), "--top", "2", "--pairs", str(file)]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert f"Relation: {len(read_pairs(file, tokenizer).sources)} of {len(kept) + 1} pairs" in result.output
    assert (out / "relations.csv").read_text().startswith("layer,head,score,random,p,p_model,score_suppressed")
    assert "1.5 (" in relation(model, file).lead


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("France\n", "row 1 has 1 cell; two texts are expected"),
        ("France,\n", "row 1 has 2 cells; two texts are expected"),
        ("zzqx,qqzx\n" * 9, "has 0 pairs of single tokens, of 9; at least 5 are needed"),
        ("a,b\n" * 1001, "has 1,001 pairs; at most 1,000 are read"),
        ('"a,b\n', "cannot be read as CSV"),
    ],
)
def test_bad_pairs_are_refused_in_a_line(content: str, said: str, two_layers: ws.Model, tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text(content)
    with pytest.raises(ws.CheckpointError, match=said):
        relation(two_layers, file)
