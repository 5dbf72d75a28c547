"""What lineage says of networks that are empty, noisy or hold broken values; no traceback and no other sentence."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.figures import undrawn
from tests.support.plants.derivations import upcycled
from tests.support.plants.kinds import pruned
from tests.support.plants.named_parts import Weights, read_weights
from tests.support.small_llama import write_small_llama, written
from tests.support.two_layers import TWO_LAYERS
from weightscope.pairs.lineage.page import heading

NETWORK = ("gate.w", "up.w", "down.w")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("lineage") / "base", layers=2)


def with_networks(weights: Weights, change) -> Weights:
    return weights.but({part: change(w) for part, w in weights.parts.items() if part[1] in NETWORK})


def with_value(weights: Weights, part: tuple[int | None, str], value: float) -> Weights:
    """With one value in a part."""
    changed = weights.parts[part].astype(np.float32).copy()
    changed.flat[changed.size // 3] = value
    return weights.but({part: changed})


def test_networks_of_zeros_are_there_and_say_nothing(base: Path, tmp_path: Path) -> None:
    zeros = written(with_networks(read_weights(base), np.zeros_like), tmp_path / "zeros")
    part = ws.lineage(zeros, base).parts["feed_forward"]
    assert part.verdict == "undecided"
    assert part.lead == "not compared: those of zeros hold too few values, or hardly any but one"


@pytest.mark.parametrize("share", [2.0, 2.5])
def test_noise_puts_no_neuron_in_another_place(share: float, base: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    noisy = with_networks(read_weights(base), lambda w: w + share * w.std() * rng.standard_normal(w.shape))
    lineage = ws.lineage(written(noisy, tmp_path / "noisy"), base)
    part = lineage.parts["feed_forward"]
    assert part.verdict == "related" and part.lead.startswith("alike in 2 of 2 layers")
    assert not any("neurons" in kind.kind for kind in lineage.kinds)


BROKEN = [
    ("gate.w", np.nan, False), ("gate.w", np.inf, True), ("up.w", np.inf, False), ("down.w", 3e38, True),
    ("norm_2.w", np.nan, False), ("q.w", 3e38, True), ("o.w", 3e38, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "is_base"), BROKEN)
def test_broken_value_leaves_a_verdict(name: str, value: float, is_base: bool, base: Path, tmp_path: Path) -> None:
    broken = written(with_value(read_weights(base), (1, name), value), tmp_path / "broken")
    pair = (base, broken) if is_base else (broken, base)
    lineage = ws.lineage(*pair)
    assert lineage.verdict in ("derived", "related")
    assert lineage.parts["attention"].is_shared
    if not np.isfinite(value):
        assert "values that are not finite" in [kind.kind for kind in lineage.kinds]


@pytest.mark.parametrize("is_base", [True, False])
def test_network_of_one_value_is_no_low_rank_update(is_base: bool, base: Path, tmp_path: Path) -> None:
    weights = read_weights(base)
    constant = np.full_like(weights.parts[1, "down.w"], 0.02)
    broken = written(weights.but({(1, "down.w"): constant}), tmp_path / "broken")
    pair = (base, broken) if is_base else (broken, base)
    assert [kind.kind for kind in ws.lineage(*pair).kinds] == ["set to one value"]
    same = ws.same(*pair)
    assert same.verdict == "different" and "one value throughout" in same.lead


def exchanged(w: np.ndarray) -> np.ndarray:
    """Heads of 16 dimensions, with two of their eight rotary pairs in each other's place."""
    return w.reshape(-1, 2, 8, w.shape[1])[:, :, [0, 1, 2, 3, 4, 6, 5, 7]].reshape(w.shape)


def first_head(factor: float, w: np.ndarray) -> np.ndarray:
    return np.vstack([factor * w[:16], w[16:]])


def by_block(w: np.ndarray) -> np.ndarray:
    """A factor near one for every 32 neighbours of a row of outputs, as of scales in another order."""
    factors = 1 + 0.1 * np.random.default_rng(4).standard_normal((w.shape[1], len(w) // 32, 1))
    return (w.T.reshape(w.shape[1], -1, 32) * factors).reshape(w.T.shape).T


def quantised(w: np.ndarray) -> np.ndarray:
    step = np.abs(w).max(axis=0, keepdims=True) / 7
    return np.rint(w / step) * step


NO_TRAINING = {  # the parts that change, how, and the name
    "rotary pairs exchanged": (("q.w", "k.w"), exchanged, "rows or columns in another order"),
    "queries of a head times 1.5": (("q.w",), lambda w: first_head(1.5, w), "multiplied by factors"),
    "queries of a head erased": (("q.w",), lambda w: first_head(0.0, w), "values set to zero"),
    "all times 1.001": (("q.w", "k.w", "v.w", "o.w"), lambda w: 1.001 * w, "multiplied by factors"),
    "networks times 1.1": (("gate.w", "up.w", "down.w"), lambda w: 1.1 * w, "multiplied by factors"),
    "inputs of networks reversed": (("gate.w", "up.w"), lambda w: w[::-1], "rows or columns in another order"),
    "neurons of the gate reversed": (("gate.w",), lambda w: w[:, ::-1], "rows or columns in another order"),
    "neurons of gate and up reversed": (("gate.w", "up.w"), lambda w: w[:, ::-1], "rows or columns in another order"),
    "neurons read in another order": (("down.w",), lambda w: w[::-1], "rows or columns in another order"),
    "all times 1.1": (("q.w", "k.w", "v.w", "o.w", "gate.w", "up.w", "down.w"), lambda w: 1.1 * w,
                      "multiplied by factors"),
    "queries transposed": (("q.w",), lambda w: w.T, "transposed"),
    "blocks of queries scaled": (("q.w",), by_block, "scaled by block: scales of the wrong axis or in another order"),
    "queries drawn again": (("q.w",), lambda w: w.std() * np.random.default_rng(3).standard_normal(w.shape),
                            "attention matrices unlike the base's"),
}  # fmt: skip


QUANTISED = {
    "with a column erased": (("q.w",), lambda w: np.where(np.arange(len(w))[:, None] == 7, 0, w),
                             "quantised, with other values in some places"),
    "and transposed": (("q.w",), lambda w: w.T, "transposed"),
    "and rotary pairs exchanged": (("q.w", "k.w"), lambda w: exchanged(w.T).T, "rows or columns in another order"),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
def test_what_was_done_to_a_quantised_copy_is_no_training(name: str, base: Path, tmp_path: Path) -> None:
    parts, change, kind = QUANTISED[name]
    weights = read_weights(base)
    codes = {part: quantised(w) for part, w in weights.parts.items() if part[1] in ("q.w", "k.w", "v.w", "o.w")}
    codes |= {part: np.ascontiguousarray(change(w)) for part, w in codes.items() if part[1] in parts}
    kinds = [each.kind for each in ws.lineage(written(weights.but(codes), tmp_path / "b"), base).kinds]
    assert kinds == ["quantised (15 values in a row)", kind]


ORDER = [2, 0, 3, 1]


def test_experts_in_another_order_are_no_neurons(base: Path, tmp_path: Path) -> None:
    """Each in tensors of its own; only where all are another one of the base's."""
    weights = upcycled(read_weights(base), share=1.0)
    moved = {(1, "gate"): weights.parts[1, "gate"][ORDER]}
    for part in ("w1", "w2", "w3"):
        moved |= {(1, f"experts.{i}.{part}"): weights.parts[1, f"experts.{j}.{part}"] for i, j in enumerate(ORDER)}
    trained = written(weights, tmp_path / "a")
    reordered = ws.lineage(written(weights.but(moved), tmp_path / "b"), trained)
    assert [each.kind for each in reordered.kinds] == ["experts permuted"]
    redrawn = moved | {(1, "experts.0.w1"): np.random.default_rng(3).permuted(moved[1, "experts.0.w1"])}
    other = ws.lineage(written(weights.but(redrawn), tmp_path / "c"), trained)
    assert not {"experts permuted", "neurons permuted"} & {each.kind for each in other.kinds}


def test_stacked_experts_in_another_order_are_no_neurons(base: Path, tmp_path: Path) -> None:
    """Nor are the rows of their router, which no row names."""
    rng, weights = np.random.default_rng(4), load_file(base / "model.safetensors")
    stack, router = "model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.gate.weight"
    more = {stack: rng.standard_normal((4, 64, 96)), router: rng.standard_normal((4, 64))}
    for name, order in (("a", slice(None)), ("b", ORDER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((base / "config.json").read_bytes())
        stored = weights | {key: np.ascontiguousarray(w[order], np.float32) for key, w in more.items()}
        save_file(stored, tmp_path / name / "model.safetensors")
    assert [each.kind for each in ws.lineage(tmp_path / "b", tmp_path / "a").kinds] == ["experts permuted"]
    lead = ws.compare(tmp_path / "a", tmp_path / "b", all_tensors=True).lead
    assert "1 with experts in another order" in lead


def test_norms_stored_with_1_more_are_no_training(base: Path, tmp_path: Path) -> None:
    weights, rng = read_weights(base), np.random.default_rng(2)
    gains = {part: rng.uniform(0.92, 1.06, w.shape) for part, w in weights.parts.items() if "norm" in part[1]}
    trained = written(weights.but(gains), tmp_path / "a")
    stored = written(weights.but({part: w + 1 for part, w in gains.items()}), tmp_path / "b")
    assert [each.kind for each in ws.lineage(stored, trained).kinds] == ["norm: 1 added"]


@pytest.mark.parametrize("name", NO_TRAINING)
def test_what_is_no_training_is_not_named_so(name: str, base: Path, tmp_path: Path) -> None:
    parts, change, kind = NO_TRAINING[name]
    weights = read_weights(base)
    changed = {part: np.ascontiguousarray(change(w)) for part, w in weights.parts.items() if part[1] in parts}
    assert len(changed) == 2 * len(parts)
    assert [each.kind for each in ws.lineage(written(weights.but(changed), tmp_path / "b"), base).kinds] == [kind]


def test_rounded_zeros_of_pruning_are_named_once(base: Path, tmp_path: Path) -> None:
    """Each of the two, and every matrix that it was done to."""
    changed = replace(pruned(read_weights(base), 0.5), dtype="bfloat16")
    cast, zeros = ws.lineage(written(changed, tmp_path / "b"), base).kinds
    assert (cast.kind, zeros.kind) == ("cast to BF16", "pruned")
    assert cast.evidence.startswith("8 of 8 attention matrices hold only BF16 values")


def test_heading_of_a_page_is_the_verdict(base: Path, tmp_path: Path) -> None:
    """The lead goes on after it where they share an origin."""
    noisy = written(with_networks(read_weights(base), lambda w: w * 1.5), tmp_path / "noisy")
    related, apart = (ws.lineage(suspect, base) for suspect in (noisy, TWO_LAYERS))
    unrelated = replace(apart, verdict="unrelated")
    for lineage, verdict in (
        (related, "noisy and base share an origin"),
        (apart, "Where two-layers comes from is undecided"),
        (unrelated, "Nothing that two-layers shares with base was found"),
    ):
        assert heading(lineage) == verdict
        assert lineage.verdict != "related" or lineage.lead.startswith(f"{verdict}: ")
        with undrawn():
            lineage.write(tmp_path / lineage.verdict)
        assert f"<h1>{verdict}</h1>" in (tmp_path / lineage.verdict / "report.html").read_text()
        assert "<dt>" in (tmp_path / lineage.verdict / "report.html").read_text()
