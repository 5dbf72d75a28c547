"""Verdicts, orders and names are the same whichever processor multiplies: products are moved by their rounding."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.perturbed import perturbed_products
from tests.support.plants.derivations import DERIVATIONS
from tests.support.plants.named_parts import read_weights, write_weights
from tests.support.small_llama import write_small_llama
from tests.support.two_layers import TWO_LAYERS
from weightscope.core.engine import ThisProcess
from weightscope.heads.circuits.names import head_names
from weightscope.pairs.atlas.atlas import AtlasOptions, make_atlas
from weightscope.pairs.lineage.lineage import lineage

ROOMS = ("core.compute", "model", "heads.audit", "heads.circuits", "heads.tensors", "pairs.atlas", "pairs.changes",
         "pairs.deeds", "pairs.lineage", "pairs.same")  # fmt: skip
PRESERVING = ("heads permuted", "basis of heads", "norms folded", "stream rotated", "stream permuted")
OTHERS = ("bfloat16", "drift 3 %", "last layers removed")


@pytest.fixture(scope="module")
def derived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounding")
    base = read_weights(write_small_llama(folder / "base", layers=3))
    for name in (*PRESERVING, *OTHERS):
        write_weights(DERIVATIONS[name].change(base), folder / name)
    return folder


def unchanged(say: Callable[[], object]) -> None:
    """The answer is the same with exact kernels and with two others."""
    answer = say()
    for salt in (1, 2):
        with perturbed_products(ROOMS, salt):
            assert say() == answer


def test_products_are_moved_within_the_block_alone(two_layers: ws.Model) -> None:
    head, x = two_layers.layer(0).head(0), np.ones((1, two_layers.config.d_model))
    before = x @ head.qk
    scores = two_layers.layer(0).scores(x)
    with perturbed_products(ROOMS, 1):
        moved = two_layers.layer(0).scores(x)
        np.testing.assert_allclose(moved, scores, rtol=1e-3)
        assert (moved != scores).any()
    np.testing.assert_array_equal(two_layers.layer(0).scores(x), scores)
    np.testing.assert_array_equal(x @ head.qk, before)


@pytest.mark.check
@pytest.mark.parametrize("name", [*PRESERVING, *OTHERS])
def test_what_same_says_does_not_depend_on_the_rounding_of_products(derived: Path, name: str) -> None:
    def say() -> object:
        same = ws.same(derived / "base", derived / name)
        return same.verdict, [(each.name, each.verdict, each.deed) for each in same.tensors]

    unchanged(say)


@pytest.mark.check
@pytest.mark.parametrize("name", [*PRESERVING, *OTHERS])
def test_what_lineage_says_does_not_depend_on_the_rounding_of_products(derived: Path, name: str) -> None:
    def say() -> object:
        result = lineage(derived / name, [derived / "base"], nonce="rounding")
        return result.verdict, result.came_first, [kind.kind for kind in result.kinds]

    unchanged(say)


@pytest.mark.check
def test_the_tree_of_an_atlas_does_not_depend_on_the_rounding_of_products(derived: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet", reason="pyarrow comes with the extra `atlas`")
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"{derived / name}\n" for name in ("base", *PRESERVING, *OTHERS)))
    runs = iter(range(9))

    def say() -> object:
        out = tmp_path / f"out{next(runs)}"
        with ThisProcess() as engine:
            make_atlas(listing, out, engine, AtlasOptions())
        with (out / "tree.csv").open(newline="") as file:
            return [(row["a"], row["b"], row["by"], row["first"]) for row in csv.DictReader(file)]

    unchanged(say)


def test_names_of_heads_do_not_depend_on_the_rounding_of_products() -> None:
    unchanged(lambda: head_names(ws.open_model(TWO_LAYERS)).tolist())
