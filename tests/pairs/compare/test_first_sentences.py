"""Planted pairs: the first sentence names what was done, the counts are of one set, and the gate sees what is lost."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run_undrawn
from tests.support.figures import undrawn
from tests.support.slow import mostly_checked
from tests.support.small_llama import write_small_llama
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.pairs.compare.page import heading
from weightscope.pairs.deeds.deed import What

Weights = dict[str, np.ndarray]
HEAD, TOKENS, FINAL = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
UNTIED = {"tie_word_embeddings": False}


def changed(weights: Weights, change: Callable[[np.ndarray], np.ndarray], where: str = "") -> Weights:
    """With every matrix whose name matches a pattern changed; all of them by default."""
    chosen = {name: w for name, w in weights.items() if re.search(where, name) and (where or w.ndim == 2)}
    return weights | {name: change(w) for name, w in chosen.items()}


def with_gains(weights: Weights) -> Weights:
    """With gains as training leaves them, about one."""
    rng = np.random.default_rng(2)
    return {name: rng.uniform(0.92, 1.06, w.shape) if w.ndim == 1 else w for name, w in weights.items()}


def noise(share: float) -> Callable[[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(3)
    return lambda w: w * (1 + share * rng.standard_normal(w.shape))


def cut(w: np.ndarray) -> np.ndarray:
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    most = 9 * len(s) // 10
    return np.asarray((u[:, :most] * s[:most]) @ vt[:most], w.dtype)


def pruned(w: np.ndarray) -> np.ndarray:
    return np.where(np.abs(w) < np.median(np.abs(w)), 0, w)


def head_times(factor: float, columns: bool = False) -> Callable[[np.ndarray], np.ndarray]:
    """The rows, or columns, of the second head of 16 dimensions times a factor."""
    scale = np.ones(64)
    scale[16:32] = factor
    return lambda w: w * (scale if columns else scale[:, None])


def with_pairs_exchanged(w: np.ndarray) -> np.ndarray:
    """Heads of 16 dimensions, with two of their eight rotary pairs in each other's place."""
    order = [0, 1, 2, 3, 4, 6, 5, 7]
    return w.reshape(-1, 2, 8, w.shape[1])[:, :, order].reshape(w.shape)


def by_block(w: np.ndarray) -> np.ndarray:
    """A factor near one for every 32 neighbours, as of scales in another order."""
    factors = 1 + 0.1 * np.random.default_rng(4).standard_normal((len(w), w.shape[1] // 32, 1))
    return (w.reshape(len(w), -1, 32) * factors).reshape(w.shape)


def quantised(w: np.ndarray) -> np.ndarray:
    step = np.abs(w).max(axis=1, keepdims=True) / 7
    return np.rint(w / step) * step


def with_column_erased(w: np.ndarray) -> np.ndarray:
    return np.where(np.arange(w.shape[1]) == 7, 0, w)


def with_nan(w: np.ndarray) -> np.ndarray:
    broken = w.copy()
    broken[3, 2] = np.nan
    return broken


def folded(weights: Weights, parts: str) -> Weights:
    """The gain before attention in these of its matrices, and ones in its place."""
    done = dict(weights)
    for i in range(3):
        gain = f"model.layers.{i}.input_layernorm.weight"
        names = [f"model.layers.{i}.self_attn.{part}_proj.weight" for part in parts]
        done |= {name: weights[name] * weights[gain] for name in names} | {gain: np.ones(64)}
    return done


def without(weights: Weights, name: str) -> Weights:
    return {each: w for each, w in weights.items() if each != name}


def drawn_like(w: np.ndarray) -> np.ndarray:
    return w.std() * np.random.default_rng(4).standard_normal(w.shape)


# name: (change of the weights, change of the config, words of the first sentence, exit status with --max-change 0)
PAIRS = {
    "vocabulary cut": (
        lambda w: changed(w, lambda x: x[:310], "embed_tokens|lm_head"), {"vocab_size": 310},
        r"Only in the first: 90 of 400 rows of", 3),
    "vocabulary extended": (
        lambda w: changed(w, lambda x: np.vstack([x, x[:8]]), "embed_tokens|lm_head"), {"vocab_size": 408},
        r"Only in the last: 8 of 408 rows of", 3),
    "final norm missing": (lambda w: without(w, FINAL), {}, r"Only in the first: model\.norm\.weight\.", 3),
    "copy": (lambda w: w, {}, r"Identical: all", 0),
    "a tenth of each matrix's singular values dropped": (
        lambda w: changed(w, cut), {}, r"Smallest singular values dropped: \d+", 3),
    "half of each matrix pruned": (
        lambda w: changed(w, pruned), {}, r"Values set to zero: \d+ tensors, 0\.5 of the values", 3),
    "one matrix pruned": (
        lambda w: changed(w, pruned, "1.self_attn.o_proj"), {}, r"Values set to zero: 1 tensor, 0\.5 of the values", 3),
    "all times 1.001": (
        lambda w: changed(w, lambda x: 1.001 * x), {}, r"Multiplied by one factor: \d+ tensors, by 1\.001;", 3),
    "all negated": (lambda w: changed(w, lambda x: -x), {}, r"Multiplied by one factor: \d+ tensors, by -1;", 3),
    "queries of one head times 1.5": (
        lambda w: changed(w, head_times(1.5), re.escape(QUERY)), {},
        rf"Multiplied by one factor: 1 tensor, by 1\.5 in 16 of 64 rows of {re.escape(QUERY)};", 3),
    "output of one head halved": (
        lambda w: changed(w, head_times(0.5, columns=True), "1.self_attn.o_proj"), {},
        r"Multiplied by one factor: 1 tensor, by 0\.5 in 16 of 64 columns of model\.layers\.1\.self_attn\.o_proj\.", 3),
    "queries of one head redrawn": (
        lambda w: w | {QUERY: np.vstack([w[QUERY][:16], drawn_like(w[QUERY][:16]), w[QUERY][32:]])}, {},
        r"Changed in some rows or columns of 1 of 12 attention matrices\.", 3),
    "gains set to one": (
        lambda w: changed(w, np.ones_like, r"norm\.weight"), {}, r"Set to one value: 7 tensors, to 1;", 3),
    "tokens set to zero": (
        lambda w: changed(w, np.zeros_like, "embed_tokens"), {}, r"Values set to zero: 1 tensor, all values", 3),
    "gains trained": (
        lambda w: changed(w, noise(0.01), r"norm\.weight|_proj"), {}, r"Fine-tuned: 12 of 12 attention matrices", 3),
    "noise of float32": (
        lambda w: changed(w, noise(1e-7), "_proj"), {}, r"The same up to float32's rounding: ", 3),
    "NaN": (lambda w: changed(w, with_nan, re.escape(QUERY)), {}, r"11 of 12 heads did not move\.", 3),
    "folded into q, k and v": (
        lambda w: folded(w, "qkv"), {}, r"Norms folded: .* in 3 of 3 layers; every head computes the same\.", 0),
    "folded into q and k": (lambda w: folded(w, "qk"), {},
        r"Rows or columns multiplied by factors: 6 of 12 attention matrices, columns by 0.92", 3),
    "tuned": (lambda w: changed(w, noise(0.05), "_proj"), {}, r"Fine-tuned: 12 of 12", 3),
    "tuned, then pruned in one layer": (
        lambda w: changed(changed(w, noise(0.05), "0.*_proj"), pruned, "1.*_proj"), {},
        r"Changed in several ways: 8 of 12 attention matrices, 4 fine-tuned, 4 with values set to zero", 3),
    "rotary pairs exchanged": (
        lambda w: changed(w, with_pairs_exchanged, "[qk]_proj"), {},
        r"Rows or columns in another order: 6 of 12 attention matrices, and heads moved\. W_QK moved between", 3),
    "rotary pairs of queries exchanged": (
        lambda w: changed(w, with_pairs_exchanged, "q_proj"), {},
        r"Rows or columns in another order: 3 of 12 attention matrices, and heads moved\.", 3),
    "blocks of neighbours scaled": (
        lambda w: changed(w, by_block, "_proj"), {},
        r"Scaled by block: scales of the wrong axis or in another order: 12 of 12 attention matrices\. W_QK", 3),
    "norms stored with 1 more": (
        lambda w: changed(w, lambda x: x + 1, r"norm\.weight"), {},
        r"Norm: 1 added: 7 tensors; no other compared tensor changed\.", 3),
    "quantised, and a column erased": (
        lambda w: changed(changed(w, quantised, "_proj"), with_column_erased, re.escape(QUERY)), {},
        r"Changed in several ways: 12 of 12 attention matrices, 11 quantised, 1 quantised, with other values in", 3),
    "quantised, and a column erased in each": (
        lambda w: changed(w, lambda x: with_column_erased(quantised(x)), "_proj"), {},
        r"Quantised, with other values in some places: 12 of 12 attention matrices\.", 3),
    "quantised, and queries transposed": (
        lambda w: changed(changed(w, quantised, "_proj"), np.transpose, "q_proj"), {},
        r"Changed in several ways: 12 of 12 attention matrices, 9 quantised, 3 transposed\.", 3),
    "quantised, and rotary pairs exchanged": (
        lambda w: changed(changed(w, quantised, "_proj"), with_pairs_exchanged, "[qk]_proj"), {},
        r"Changed in several ways: 12 of 12 attention matrices, 6 ", 3),
    "head redrawn": (lambda w: w | {HEAD: drawn_like(w[HEAD])}, {}, r"No head moved\.", 3),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A Llama with a head of its own and gains about one."""
    folder = write_small_llama(tmp_path_factory.mktemp("first") / "drawn", layers=3)
    return write(folder.parent / "base", with_gains(load_file(folder / "model.safetensors")), config_of(folder))


@pytest.fixture(scope="module")
def tied(base: Path) -> Path:
    """The same without a head."""
    weights = load_file(base / "model.safetensors")
    return write(base.parent / "tied", without(weights, HEAD), config_of(base) | {"tie_word_embeddings": True})


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def write(folder: Path, weights: Weights, config: dict) -> Path:
    folder.mkdir()
    stored = {name: np.ascontiguousarray(w.astype(np.float32)) for name, w in weights.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def compared(a: Path, b: Path, *options: str) -> tuple[dict, int]:
    result = run_undrawn("compare", a, b, "--out", b.parent / "out", "--json", "--max-change", "0", *options)
    return json.loads(result.stdout), result.exit_code


def counts_add_up(lead: str) -> bool:
    """No sentence counts more of a set than it has, and the counts of all tensors add up to their number."""
    shares = re.findall(r"\b(\d+) of (\d+) ", lead)
    of_all = re.search(r"Of (\d+) tensors: (.*?)\.(?= |$)", re.sub(r"\([^()]*\)", "", lead))
    parts = [int(n) for n in re.findall(r"(?:^|, )(\d+) ", of_all[2])] if of_all else []
    return all(int(n) <= int(total) for n, total in shares) and (not of_all or sum(parts) == int(of_all[1]))


@pytest.mark.parametrize("name", mostly_checked(PAIRS, fast=[*PAIRS][::2]))
def test_first_sentence_and_gate_are_right(name: str, base: Path, tmp_path: Path) -> None:
    change, config, words, status = PAIRS[name]
    weights = change(load_file(base / "model.safetensors"))
    b = write(tmp_path / "b", weights, config_of(base) | config)
    for options in ([], ["--all"]):
        result, exit_status = compared(base, b, *options)
        assert re.match(words, result["lead"]), result["lead"]
        assert exit_status == status
        assert counts_add_up(result["lead"]), result["lead"]
        assert not re.search(r"LoRA|other tensors? changed.*Of \d", result["lead"])
        assert "vocab_size" not in result["lead"]
        assert "not finite" not in result["lead"] or "W_QK did not move" not in result["lead"]
        assert "same up to" not in result["lead"] or "fine-tuned" not in result["lead"]


@pytest.mark.parametrize("options", [[], ["--all"]])
def test_tied_head_that_is_written_out_decides_no_other_computation(options, tied: Path, tmp_path: Path) -> None:
    weights = load_file(tied / "model.safetensors")
    b = write(tmp_path / "b", weights | {HEAD: weights[TOKENS]}, config_of(tied) | UNTIED)
    for pair in ((tied, b), (b, tied)):
        result, status = compared(*pair, *options)
        assert status == 0 and result["lead"].startswith("Identical: all") and counts_add_up(result["lead"])
        assert not result["findings"] and "another computation" not in result["lead"]


@pytest.mark.parametrize("options", [[], ["--all"]])
def test_stored_head_is_compared_as_the_unembedding(options, tied: Path, tmp_path: Path) -> None:
    weights = load_file(tied / "model.safetensors")
    head = weights[TOKENS] + 0.62 * drawn_like(weights[TOKENS])
    b = write(tmp_path / "b", weights | {HEAD: head}, config_of(tied) | UNTIED)
    result, status = compared(tied, b, *options)
    assert status == 3 and "embed_tokens" not in result["lead"] and counts_add_up(result["lead"])
    assert result["lead"].startswith("The config of") and "tie_word_embeddings" in result["lead"]
    assert options or "1 of 6 other tensors changed, unembedding by 0.6" in result["lead"]
    assert result["largest_change"] == pytest.approx(0.62, abs=0.02)


def test_rotated_stream_counts_one_set(base: Path, tmp_path: Path) -> None:
    """The embedding is in both roles of a tied model, and is counted once."""
    weights, turn = (
        load_file(base / "model.safetensors"),
        np.linalg.qr(np.random.default_rng(5).normal(size=(64, 64)))[0],
    )
    b = write(tmp_path / "b", weights | {TOKENS: weights[TOKENS] @ turn}, config_of(base))
    for options in ([], ["--all"]):
        assert counts_add_up(compared(base, b, *options)[0]["lead"])


def test_equal_neighbours_of_several_steps_are_named(base: Path, tmp_path: Path) -> None:
    weights, config = load_file(base / "model.safetensors"), config_of(base)
    moved = changed(weights, noise(0.05), "_proj")
    steps = [write(tmp_path / f"step{k}", each, config) for k, each in enumerate((weights, moved, moved, weights))]
    lead = ws.compare(*steps, labels=["s0", "s1", "s2", "s3"]).lead
    assert "s1 and s2 are equal in every compared tensor." in lead
    assert lead.count("are equal") == 1 and "are equal" not in ws.compare(*steps[:2]).lead


def test_page_without_findings_does_not_say_that_nothing_stands_out(base: Path, tmp_path: Path) -> None:
    w = load_file(base / "model.safetensors")
    rng = np.random.default_rng(6)
    lora = {name: x + 0.1 * rng.normal(size=(64, 2)) @ rng.normal(size=(2, 64))
            for name, x in w.items() if re.search("[qv]_proj", name)}  # fmt: skip
    comparison = ws.compare(base, write(tmp_path / "lora", w | lora, config_of(base)))
    assert comparison.lead.startswith("Changed by matrices of low rank, as by a merged LoRA: 6 of 12")
    assert not comparison.findings
    with undrawn():
        comparison.write(tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"<h1>12 of 12 heads moved from {comparison.labels[0]} to {comparison.labels[1]}</h1>" in page
    assert "Nothing in these weights" not in page and "None besides what the first sentence says." in page


def test_heading_of_a_page_says_what_moved_where_no_head_did(tied: Path, tmp_path: Path) -> None:
    weights, config = load_file(tied / "model.safetensors"), config_of(tied)
    changes = {
        "": (weights, config),
        ", but other tensors did": (weights | {FINAL: weights[FINAL] * 1.1}, config),
        ", but the config changed": (weights, config | {"rms_norm_eps": 0.5}),
    }
    for number, (rest, changed_to) in enumerate(changes.items()):
        b = write(tmp_path / str(number), *changed_to)
        for options in ({}, {"all_tensors": True}):
            comparison = ws.compare(tied, b, **options)
            first, last = comparison.labels
            assert heading(comparison) == f"No head moved from {first} to {last}{rest}"
            assert all(part if isinstance(part, str) else len(part) for part in comparison.printed())


def test_bias_that_moved_alone_is_said(tmp_path: Path) -> None:
    """No matrix moved, and the gate fails: the sentence says why."""
    weights = gpt2_weights(n_layers=2)
    biased = {name: w + 0.5 if name.endswith("attn.c_attn.bias") else w for name, w in weights.items()}
    a, b = write_checkpoint(tmp_path / "a", weights), write_checkpoint(tmp_path / "b", biased)
    comparison = ws.compare(a, b)
    assert comparison.largest_change() > 0.01
    assert "W_QK did not move, but its bias did, by up to " in comparison.lead
    assert "W_VO did not move, but its bias did, by up to " in comparison.lead


@pytest.mark.parametrize(("axis", "detail"), [(0, "rows"), (1, "columns")])
def test_rows_in_another_order_are_no_tuning(axis: int, detail: str, base: Path, tmp_path: Path) -> None:
    """Nor are the values of a norm's gains."""
    weights = load_file(base / "model.safetensors")
    order = np.random.default_rng(6)
    moved = changed(weights, lambda w: order.permutation(w, axis=axis), "up_proj")
    moved = changed(moved, order.permutation, "post_attention_layernorm")
    changes = ws.compare(base, write(tmp_path / "b", moved, config_of(base)), all_tensors=True).everything
    assert changes is not None and changes.kinds == {What.REORDERED: 6, What.IDENTICAL: 24}
    assert {c.detail for c in changes.changes if "up_proj" in c.name and c.kind is What.REORDERED} == {detail}
