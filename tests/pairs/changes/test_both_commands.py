"""`compare` and `lineage` call the same pair the same, on either side of each threshold that both use."""

import re
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.plants.derivations import DERIVATIONS
from tests.support.plants.named_parts import Weights, read_weights, write_weights
from tests.support.slow import mostly_checked
from tests.support.small_llama import write_small_llama
from weightscope.pairs.deeds.thresholds import UNMOVED


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("both") / "base", layers=3)


def both(base: Path, weights: Weights, folder: Path) -> tuple[str, list[str], str]:
    """What `compare` says was done, and the kinds and first sentence of `lineage`."""
    write_weights(weights, folder)
    lineage = ws.lineage(folder, base)
    return ws.compare(base, folder).lead, [kind.kind for kind in lineage.kinds], lineage.lead


@pytest.mark.parametrize("times", [0.9, 1.1])
def test_both_commands_call_the_same_heads_moved(times: float, base: Path, tmp_path: Path) -> None:
    """W_Q and W_V scaled, so that both maps of every head move by as much."""
    weights = read_weights(base)
    scaled = {part: w * np.float32(1 + times * UNMOVED) for part, w in weights.within("q.w", "v.w")}
    comparison, kinds, _ = both(base, weights.but(scaled), tmp_path / "b")
    if times > 1:
        assert kinds == ["fine-tuned"] and comparison.startswith("Fine-tuned: 6 of 12 attention matrices")
    else:
        assert kinds == ["same up to rounding"] and "No head moved" in comparison
        assert comparison.startswith("The same up to float32's rounding: 6 of 12 attention matrices")


def test_both_commands_name_another_basis_within_heads(base: Path, tmp_path: Path) -> None:
    comparison, kinds, _ = both(base, DERIVATIONS["basis of heads"].change(read_weights(base)), tmp_path / "b")
    assert kinds == ["gauge: basis of heads changed"] and comparison.startswith("Another basis within heads: each")
    evidence = ws.lineage(tmp_path / "b", base).kinds[0].evidence
    factors, maps = map(float, re.findall(r"(\S+) of their norm, their products by (\S+)\.", evidence)[0])
    assert factors > 0.5 and maps < UNMOVED


@pytest.mark.parametrize("deed", mostly_checked(["4 bits, groups of 32", "8 bits, rows", "Q8_0", "NF4"], fast=["Q8_0"]))
def test_both_commands_name_the_same_grid(deed: str, base: Path, tmp_path: Path) -> None:
    comparison, (kind,), _ = both(base, DERIVATIONS[deed].change(read_weights(base)), tmp_path / "b")
    grid = kind.removeprefix("quantised (").removesuffix(")")
    assert kind.startswith("quantised (") and f"attention matrices, most to {grid}, relative" in comparison


@pytest.mark.parametrize("rounds", [False, True])
def test_both_commands_name_a_low_rank_update(rounds, base: Path, tmp_path: Path) -> None:
    names = ["rank 8, queries and values", *(["bfloat16"] if rounds else [])]
    weights = read_weights(base)
    for name in names:
        weights = DERIVATIONS[name].change(weights)
    comparison, kinds, _ = both(base, weights, tmp_path / "b")
    assert kinds == [*(["cast to BF16"] if rounds else []), "low-rank update"]
    rest = "; 6 only rounded" if rounds else ""
    assert comparison.startswith("Changed by matrices of low rank, as by a merged LoRA: 6 of 12 attention matrices")
    assert f"rank 8{rest}." in comparison


@pytest.mark.parametrize("deed", ["bfloat16", "float16", "stream permuted", "norms folded", "heads permuted"])
def test_both_commands_name_the_deed(deed: str, base: Path, tmp_path: Path) -> None:
    names = {
        "bfloat16": ("cast to BF16", "Rounded to bfloat16"), "float16": ("cast to F16", "Rounded to float16"),
        "stream permuted": ("stream permuted", "Stream permuted"), "norms folded": ("norms folded", "Norms folded"),
        "heads permuted": ("heads permuted", "Heads in another order"),
    }  # fmt: skip
    comparison, kinds, _ = both(base, DERIVATIONS[deed].change(read_weights(base)), tmp_path / "b")
    assert (kinds, comparison[: len(names[deed][1])]) == ([names[deed][0]], names[deed][1])
