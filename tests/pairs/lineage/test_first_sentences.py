"""What lineage says of networks that are empty, noisy or hold broken values; no traceback and no other sentence."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.plants.named_parts import Weights, read_weights
from tests.support.small_llama import write_small_llama, written

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


def exchanged(w: np.ndarray) -> np.ndarray:
    """Heads of 16 dimensions, with two of their eight rotary pairs in each other's place."""
    return w.reshape(-1, 2, 8, w.shape[1])[:, :, [0, 1, 2, 3, 4, 6, 5, 7]].reshape(w.shape)


def first_head(factor: float, w: np.ndarray) -> np.ndarray:
    return np.vstack([factor * w[:16], w[16:]])


NO_TRAINING = {  # the parts that change, how, and the name
    "rotary pairs exchanged": (("q.w", "k.w"), exchanged, "rows or columns in another order"),
    "queries of a head times 1.5": (("q.w",), lambda w: first_head(1.5, w), "multiplied by factors"),
    "queries of a head erased": (("q.w",), lambda w: first_head(0.0, w), "values set to zero"),
    "all times 1.001": (("q.w", "k.w", "v.w", "o.w"), lambda w: 1.001 * w, "multiplied by factors"),
    "queries transposed": (("q.w",), lambda w: w.T, "transposed"),
    "queries drawn again": (("q.w",), lambda w: w.std() * np.random.default_rng(3).standard_normal(w.shape),
                            "attention matrices unlike the base's"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_TRAINING)
def test_what_is_no_training_is_not_named_so(name: str, base: Path, tmp_path: Path) -> None:
    parts, change, kind = NO_TRAINING[name]
    weights = read_weights(base)
    changed = {part: np.ascontiguousarray(change(w)) for part, w in weights.parts.items() if part[1] in parts}
    assert len(changed) == 2 * len(parts)
    assert [each.kind for each in ws.lineage(written(weights.but(changed), tmp_path / "b"), base).kinds] == [kind]
