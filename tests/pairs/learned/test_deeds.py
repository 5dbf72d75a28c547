"""What `learned` says of changes that are no training, or another one than a LoRA, planted in a small Llama."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.plants.families import random_llama
from tests.support.rounding import rounded
from tests.support.slow import mostly_checked
from tests.support.small_llama import write_small_llama
from weightscope.pairs.learned.words import ShuffledChange, shuffled_tune

Weights = dict[str, np.ndarray]
PLANTED = random_llama()
HEADS, GROUPS, SIZE = 4, 2, 16
LAYERS = sorted({name.split(".")[2] for name in PLANTED.tensors if ".layers." in name})


def projections(weights: Weights) -> list[str]:
    return [name for name in weights if name.endswith("_proj.weight")]


def each(
    change: Callable[[np.ndarray, np.random.Generator], np.ndarray], ends: str = "_proj.weight"
) -> Callable[[Weights], None]:
    """A change of every tensor whose name ends so."""

    def do(weights: Weights) -> None:
        rng = np.random.default_rng(5)
        for name in weights:
            if name.endswith(ends):
                weights[name] = change(weights[name], rng).astype(np.float32)

    return do


def scaled_to(share: float, d: np.ndarray, w: np.ndarray) -> np.ndarray:
    return share * np.linalg.norm(w) / np.linalg.norm(d) * d


def lora(rank: int, w: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return w + scaled_to(0.02, rng.standard_normal((len(w), rank)) @ rng.standard_normal((rank, w.shape[1])), w)


def dora(rank: int, w: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """As PEFT merges one: rows have magnitudes of their own."""
    after = lora(rank, w, rng)
    lengths = np.linalg.norm(w, axis=1, keepdims=True) * (1 + 0.02 * rng.standard_normal((len(w), 1)))
    return lengths * after / np.linalg.norm(after, axis=1, keepdims=True)


def lokr(w: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    inner = rng.standard_normal((len(w) // 8, w.shape[1] // 8))
    return w + scaled_to(0.02, np.kron(rng.standard_normal((8, 8)), inner), w)


def lokr_of_many_ranks(w: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Half of the changes lack ranks."""
    outer, inner = rng.standard_normal((8, 8)), rng.standard_normal((len(w) // 8, w.shape[1] // 8))
    outer[0] = outer[1] if rng.random() < 0.5 else outer[0]
    return w + scaled_to(0.02, np.kron(outer, inner), w)


def trained(w: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Some directions stand out of a full change, as of any training."""
    if w.ndim < 2:
        return w + 0.01 * rng.standard_normal(w.shape)
    d = rng.standard_normal(w.shape) / np.sqrt(max(w.shape))
    return w + scaled_to(
        0.02, d + 2 * np.outer(rng.standard_normal(len(w)), rng.standard_normal(w.shape[1])) / len(w), w
    )


def one_step(weights: Weights) -> None:
    """Gradients of a few tokens: of their rank in matrices, and everything else moves too."""
    each(partial(lora, 11))(weights)
    each(trained, "norm.weight")(weights)
    weights["model.embed_tokens.weight"][[3, 7, 20]] += 0.01


def heads(order: list[int], weights: Weights) -> None:
    """Heads of queries in another order, with what W_O reads of them, within their groups."""
    for name in projections(weights):
        w = weights[name]
        if "q_proj" in name:
            weights[name] = w.reshape(HEADS, SIZE, -1)[order].reshape(w.shape)
        if "o_proj" in name:
            weights[name] = w.reshape(len(w), HEADS, SIZE)[:, order].reshape(w.shape)


def neurons(weights: Weights) -> None:
    for layer in LAYERS:
        stem = f"model.layers.{layer}.mlp."
        order = np.random.default_rng(int(layer)).permutation(len(weights[f"{stem}up_proj.weight"]))
        for part in ("up", "gate"):
            weights[f"{stem}{part}_proj.weight"] = weights[f"{stem}{part}_proj.weight"][order]
        weights[f"{stem}down_proj.weight"] = weights[f"{stem}down_proj.weight"][:, order]


def one_head(weights: Weights) -> None:
    weights["model.layers.1.self_attn.q_proj.weight"][SIZE : 2 * SIZE] *= 1.5


def one_layer(weights: Weights) -> None:
    for name in projections(weights):
        if ".layers.1." in name:
            each(trained, name)(weights)


def ranks_by_role(weights: Weights) -> None:
    each(partial(lora, 2), "q_proj.weight")(weights)
    each(partial(lora, 5), "down_proj.weight")(weights)


def cut(w: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    half = len(s) // 2
    return np.asarray((u[:, :half] * s[:half]) @ vt[:half], w.dtype)


def pruned(w: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(np.abs(w) < np.median(np.abs(w)), 0, w)


def quantised(w: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    step = np.abs(w).max(axis=1, keepdims=True) / 7
    return np.rint(w / step) * step


def half_of_a_stranger(w: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return 0.5 * w + 0.5 * w.std() * rng.standard_normal(w.shape)


def heads_and_lora(weights: Weights) -> None:
    heads([1, 0, 2, 3], weights)
    each(partial(lora, 4), "down_proj.weight")(weights)


def scaled_but_one_value(weights: Weights) -> None:
    """All queries times a factor, and one value of a matrix of keys moved."""
    each(lambda w, _: 1.5 * w, "q_proj.weight")(weights)
    weights["model.layers.1.self_attn.k_proj.weight"][3, 5] += 0.5


def doubled_but_one_row(w: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.vstack([2 * w[:-1], 2 * w[-1:] + 0.5 * w.std() * rng.standard_normal(w.shape[1])])


def doubled_but_one_value(w: np.ndarray, _: np.random.Generator) -> np.ndarray:
    return 2 * w + 0.5 * (np.arange(w.size) == 200).reshape(w.shape)


def cut_to_bfloat16(w: np.ndarray, _: np.random.Generator) -> np.ndarray:
    return (np.ascontiguousarray(rounded(w, "float16")).view("<u4") & np.uint32(0xFFFF0000)).view("<f4")


def quantised_and_transposed(weights: Weights) -> None:
    each(quantised)(weights)
    each(lambda w, _: w.T, "q_proj.weight")(weights)


def scaled_and_one_lora(weights: Weights) -> None:
    each(lambda w, _: 1.5 * w, "q_proj.weight")(weights)
    each(partial(lora, 2), "1.mlp.down_proj.weight")(weights)


SAID: dict[str, tuple[Callable[[Weights], None], str, str]] = {
    "heads in another order": (partial(heads, [1, 0, 3, 2]), "same function", "with heads in another order"),
    "two heads exchanged": (partial(heads, [1, 0, 2, 3]), "same function", "with heads in another order"),
    "neurons in another order": (neurons, "same function", "with neurons in another order"),
    "transposed": (each(lambda w, _: w.T, "q_proj.weight"), "deed", "'transposed' in 3 of 3 changed tensors"),
    "times 1.001": (each(lambda w, _: 1.001 * w, "weight"), "deed", "'scaled by one number' in"),
    "one head's queries times 1.5": (one_head, "deed", "1 of 1 changed tensor (16 of 64, from 16, factor 1.5, "),
    "queries scaled, and one value of keys": (scaled_but_one_value, "mixed", "no deed explains 1 matrix that changed"),
    "doubled, but a row": (each(doubled_but_one_row), "mixed", "but for some values' in 21 of 21 changed tensors"),
    "doubled, but a value": (each(doubled_but_one_value), "mixed", "changed in several ways: 'scaled by one number"),
    "rounded to float16, then cut to bfloat16": (each(cut_to_bfloat16, "weight"), "conversion", "21 matrices"),
    "quantised, queries transposed": (quantised_and_transposed, "conversion", "'transposed' in 3 of 3 changed tensors"),
    "queries scaled, and one low-rank update": (scaled_and_one_lora, "mixed", "no deed explains 1 matrix that changed"),
    "cut to half their rank": (each(cut), "deed", "'smallest singular values dropped' in 21 of 21 changed tensors"),
    "pruned": (each(pruned), "deed", "'some values zeroed' in 21 of 21 changed tensors"),
    "drawn again": (each(lambda w, rng: w.std() * rng.standard_normal(w.shape)), "unrelated", "no longer resemble"),
    "noise": (each(lambda w, rng: w + 0.03 * w.std() * rng.standard_normal(w.shape)), "noise", "no training shows"),
    "half of a stranger": (each(half_of_a_stranger), "merge", "0.5 times the base's weights and others in each of 21"),
    "LoRA of rank 4": (each(partial(lora, 4)), "low rank", "of rank up to 4 in 21 of 21 matrices, as of a LoRA ("),
    "LoRA of rank 40": (each(partial(lora, 40)), "low rank",
                        "a change of rank up to 40 in 21 of 21 matrices, as of a LoRA, or of a few steps of training"),
    "two ranks": (ranks_by_role, "low rank", "of rank up to 5 in 6 of 6 matrices (5 in down, 2 in q)"),
    "heads exchanged, and a LoRA": (heads_and_lora, "low rank",
                                    "of rank up to 4 in 3 of 3 matrices, as of a LoRA; besides, "
                                    "'heads in another order (columns)' in 3 of 9 changed tensors"),
    "DoRA": (each(partial(dora, 4)), "full", "of rank up to 4 and a factor for each row, as of a DoRA, in 21 of 21"),
    "LoKr": (each(lokr), "full", "a Kronecker product, as of a LoKr, in 21 of 21 matrices"),
    "LoKr, some without a rank": (each(lokr_of_many_ranks), "full",
                                       "a Kronecker product, as of a LoKr, in 21 of 21 matrices"),
    "trained in full": (each(trained, "weight"), "full", "of full rank in 21 of 21 matrices"),
    "one step on few tokens": (one_step, "low rank", "11 in 21 of 21 matrices, as a few steps of training"),
    "embeddings alone": (each(trained, "embed_tokens.weight"), "embeddings", "Also changed: token embeddings ("),
    "norms alone": (each(trained, "norm.weight"), "vectors", "changed in biases and norms only"),
    "one layer alone": (one_layer, "full", "of full rank in 7 of 7 matrices"),
    "rounded": (each(lambda w, _: w.astype(np.float16), "weight"), "conversion", "was rounded or quantised"),
    "quantised": (each(quantised), "conversion", "was rounded or quantised"),
    "nothing": (lambda _: None, "none", "nothing was trained"),
}  # fmt: skip


def written(folder: Path, change: Callable[[Weights], None] = lambda _: None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PLANTED.config))
    weights = {name: tensor.copy() for name, tensor in PLANTED.tensors.items()}
    change(weights)
    stored = {name: np.ascontiguousarray(w) for name, w in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", mostly_checked(SAID, fast=[*SAID][::2]))
def test_what_was_done_is_said(name: str, tmp_path: Path) -> None:
    change, kind, words = SAID[name]
    result = ws.learned(written(tmp_path / "a"), written(tmp_path / "b", change))
    (tune,) = result.tunes
    assert tune.training.kind == kind, result.lead
    assert words in result.lead, result.lead
    assert ("LoRA" in result.lead) == ("LoRA" in name), result.lead
    assert "Tokens that" not in result.lead


def test_queries_and_keys_exchanged_are_no_other_weights(tmp_path: Path) -> None:
    base = write_small_llama(tmp_path / "base", layers=2)
    weights = load_file(base / "model.safetensors")
    for name in [name for name in weights if "q_proj" in name]:
        keys = name.replace("q_proj", "k_proj")
        weights[name], weights[keys] = weights[keys], weights[name]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(weights, tmp_path / "b" / "model.safetensors")
    (tune,) = ws.learned(base, tmp_path / "b").tunes
    assert tune.training.kind == "deed"
    assert "'another role's tensor: q' in 2 of 4 changed tensors" in tune.lead


@pytest.mark.parametrize("then", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_halves_rounded_another_way_hold_no_training(scale: float, then: str, tmp_path: Path) -> None:
    """In bfloat16 and in float16, or up and down at random; float16's smallest values may be flushed to zero."""

    def halves(w: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        w = (scale * w).astype(np.float32)
        if then == "float16":
            return rounded(w, "float16")
        bits = w.view("<u4") + rng.integers(0, 1 << 16, w.shape, dtype=np.uint32)
        return (bits & np.uint32(0xFFFF0000)).view("<f4")

    def flushed(w: np.ndarray, _: np.random.Generator) -> np.ndarray:
        half = rounded((scale * w).astype(np.float32), "bfloat16")
        return np.where(np.abs(half) < 2.0**-14, 0, half)

    a = written(tmp_path / "a", each(lambda w, _: rounded((scale * w).astype(np.float32), "bfloat16")))
    for name, change in (("b", halves), ("c", flushed)):
        (tune,) = ws.learned(a, written(tmp_path / name, each(change))).tunes
        assert not tune.training.is_training, tune.lead


def test_norms_and_embeddings_are_in_the_sentence(tmp_path: Path) -> None:
    lead = ws.learned(written(tmp_path / "a"), written(tmp_path / "b", one_step)).lead
    assert "Also changed: token embeddings (" in lead and " 7 norms (" in lead


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 0.0, 1e30])
def test_broken_weights_are_no_training(value: float, tmp_path: Path) -> None:
    """Either way round."""
    a, b = written(tmp_path / "a"), written(tmp_path / "b", each(lambda w, _: 0 * w + value))
    for pair in ((a, b), (b, a)):
        (tune,) = ws.learned(*pair).tunes
        assert tune.training.kind in ("deed", "unrelated") or value > 1, tune.lead
        assert tune.words is None


def test_rows_of_a_shuffled_embedding_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of it costs as much as all: a read for each run of tokens took nine tenths of `learned`."""
    base = ws.open_model("embedded")
    model, reads = shuffled_tune(base, base, 0), []
    read = ShuffledChange.read
    monkeypatch.setattr(ShuffledChange, "read", lambda self: reads.append(self.name) or read(self))
    tokens = np.array([[7, 2, 9], [2, 400, 7]])
    few = model.embeddings.rows(tokens)
    assert reads.count(model.embeddings.token_tensor.name) == 1
    assert np.array_equal(few, base.embeddings.rows(tokens))  # nothing changed that could be shuffled
    assert model.embeddings.rows(np.array([], int)).shape == (0, few.shape[-1])
