"""Which checkpoints are one family, whatever order they come in and however many of them are alike."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.plants.derivations import DERIVATIONS
from tests.support.plants.named_parts import Weights, read_weights
from tests.support.small_llama import drawn, noisy, write_small_llama, written
from tests.support.tiny_models import fixture
from weightscope.model.sources import Source
from weightscope.pairs.atlas.families import COMPARED, NEAR, families_of
from weightscope.pairs.atlas.neighbours import neighbours_of
from weightscope.pairs.atlas.prints import Print, bits_of, make_print
from weightscope.pairs.atlas.sampling import MOST_WEIGHTS, keys_are_values
from weightscope.pairs.atlas.values import CHANCE, best_of_each, distinct, log_p_of, value_ranks


def print_of(folder: Path, most: int = MOST_WEIGHTS) -> Print:
    answer = make_print(Source.named(str(folder)), most=most)
    assert answer is not None
    return Print.of_arrays(answer[0], folder.name)


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> list[Print]:
    """Two branches of one family, each with more members than are compared by heads, and a stranger."""
    folder = tmp_path_factory.mktemp("branches")
    base = read_weights(write_small_llama(folder / "base", layers=4))
    permuted = DERIVATIONS["heads permuted"].change(base)
    prints = []
    for branch, weights in (("plain", base), ("permuted", permuted)):
        for seed in range(COMPARED + 2):
            prints.append(print_of(written(noisy(weights, seed, 0.001), folder / f"{branch}-{seed}")))
    prints.append(print_of(written(drawn(base, seed=5), folder / "stranger")))
    return prints


def test_branches_that_bits_do_not_join_are_joined_by_heads(branches: list[Print]) -> None:
    families = families_of([each.outline() for each in branches], branches.__getitem__)
    assert [len(family.members) for family in families] == [len(branches) - 1, 1]
    by_heads = [edge for edge in families[0].edges if np.isnan(edge.bits)]
    assert len(by_heads) == 1 and by_heads[0].likeness > 0.99
    assert max(edge.bits for edge in families[0].edges if not np.isnan(edge.bits)) < 2


def test_families_do_not_depend_on_the_order(branches: list[Print]) -> None:
    order = np.random.default_rng(0).permutation(len(branches)).tolist()
    shuffled = [branches[k] for k in order]
    families = families_of([each.outline() for each in shuffled], shuffled.__getitem__)
    assert {order[place] for place in families[0].members} == set(range(len(branches) - 1))


def test_the_neighbour_of_a_head_is_the_nearest_of_the_others(branches: list[Print]) -> None:
    """By hand: all cosines of all heads, one's own checkpoint left out."""
    outlines = [each.outline() for each in branches]
    (near,) = neighbours_of(outlines, branches.__getitem__, range(len(branches)))
    rows = np.concatenate([each.sketches.direct for each in branches])
    owner = np.concatenate([np.full(len(each.layer), k) for k, each in enumerate(outlines)])
    cosines = np.einsum("imk,jmk->ij", rows, rows) / 2
    cosines[owner[:, None] == owner] = -1
    stranger = owner == len(branches) - 1
    np.testing.assert_allclose(near.likeness[~stranger], cosines.max(axis=1)[~stranger], atol=2e-4)
    assert (near.place[stranger] == -1).all() and np.isnan(near.likeness[stranger]).all()


def test_blocks_of_strangers_differ_in_more_bits_than_relatives_may(branches: list[Print]) -> None:
    differ = np.bitwise_count(branches[0].blocks ^ branches[-1].blocks).mean()
    assert differ > NEAR + 1


def test_equal_blocks_of_zeros_show_nothing(branches: list[Print]) -> None:
    zeros = np.zeros_like(branches[0].blocks)
    blank = [Print(each.sketches, zeros, each.values, each.read) for each in (branches[0], branches[-1])]
    families = families_of([each.outline() for each in blank], blank.__getitem__)
    assert [len(family.members) for family in families] == [1, 1]


def test_values_are_rounded_to_bfloat16() -> None:
    """A bfloat16 is the upper half of a float32; the nearest one, and of two the even one."""
    values = np.array([[1.0], [1.00390625], [1.01171875], [-2.5], [3.3]], np.float32)
    assert bits_of(values)[:5].tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC020, 0x4053]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return read_weights(write_small_llama(tmp_path_factory.mktemp("base") / "base", layers=6))


@pytest.mark.parametrize("change", ["stream rotated", "stream permuted", "width cut"])
@pytest.mark.parametrize("most", [MOST_WEIGHTS, 50_000], ids=["all", "one head per layer"])
def test_another_stream_is_joined_by_the_order_of_values(base: Weights, change: str, most: int, tmp_path: Path) -> None:
    derived = DERIVATIONS[change].change(base)
    folders = [written(each, tmp_path / str(k)) for k, each in enumerate((base, derived, drawn(base, seed=3)))]
    prints = [print_of(folder, most) for folder in folders]
    assert all(print_of.outline().is_in_part == (most < MOST_WEIGHTS) for print_of in prints)
    family, alone = families_of([each.outline() for each in prints], prints.__getitem__)
    assert family.members == [0, 1] and alone.members == [2]
    (edge,) = family.edges
    assert edge.by == "values" and edge.p < CHANCE and edge.likeness > 0.8 and np.isnan(edge.bits)


def test_ranks_are_those_of_the_folded_values(base: Weights, tmp_path: Path) -> None:
    """By hand: norms of rows of W_V times the gain of the layer's norm, ranked in each head, and summed."""
    layer = ws.open_model(written(base, tmp_path / "base")).layer(2)
    w = (base.parts[2, "v.w"] * base.parts[2, "norm_1.w"][:, None]).reshape(len(base.parts[2, "v.w"]), 4, -1)
    order = np.linalg.norm(w.astype(np.float64), axis=0).argsort(axis=1).argsort(axis=1)  # (heads, r)
    np.testing.assert_array_equal(value_ranks(layer), 2 * (order + 1).sum(axis=0))


@pytest.mark.parametrize("width, heads, layers", [(16, 1, 4), (16, 4, 8), (64, 8, 12)])
def test_strangers_p_is_a_p_value_whatever_values_are_like(width: int, heads: int, layers: int) -> None:
    """Heavy tails and a trend over dimensions that both share, each in an order of its own; and the tail's bound."""
    rng = np.random.default_rng(width)
    usual = np.exp(np.linspace(-2, 2, width)) * (1 + rng.pareto(1, (layers, heads, width)))

    def rows() -> np.ndarray:
        ranks = rng.permuted(usual, axis=-1).argsort(axis=-1).argsort(axis=-1).sum(axis=1) - heads * (width - 1) / 2
        return ranks / np.linalg.norm(ranks, axis=1, keepdims=True)

    theirs = [rows() for _ in range(400)]
    counts = np.full(len(theirs), layers)
    stacked = np.concatenate(theirs)
    log_p = np.concatenate([log_p_of(best_of_each(rows(), stacked, counts), counts, width) for _ in range(50)])
    for level in (0.1, 0.01, 0.001):
        assert (log_p < np.log(level)).mean() < 1.2 * level + 1e-4  # of 20,000
    assert log_p_of(best_of_each(theirs[0], theirs[0], counts[:1]), counts[:1], width)[0] < -8


def test_layers_that_repeat_are_counted_once() -> None:
    rows = np.linalg.qr(np.random.default_rng(0).standard_normal((32, 4)))[0].T
    np.testing.assert_array_equal(distinct(np.concatenate([rows, rows[1:3]])), rows)


def test_strangers_whose_values_are_sorted_stay_apart(base: Weights, tmp_path: Path) -> None:
    """As a decomposition of W_VO sorts them."""
    prints = []
    for seed in (3, 4):
        weights = drawn(base, seed)
        values = {part: w.reshape(len(w), 4, -1) for part, w in weights.parts.items() if part[1] == "v.w"}
        ordered = {part: np.take_along_axis(w, np.linalg.norm(w, axis=0).argsort(axis=1)[None], 2).reshape(len(w), -1)
                   for part, w in values.items()}  # fmt: skip
        prints.append(print_of(written(weights.but(ordered), tmp_path / str(seed))))
    assert len(families_of([each.outline() for each in prints], prints.__getitem__)) == 2


def test_values_that_are_keys_and_values_that_are_equal_show_nothing(base: Weights, tmp_path: Path) -> None:
    gemma = fixture("gemma4").model
    assert [keys_are_values(gemma, i) for i in gemma.attention_layers] == [False, True, True]
    pruned = base.but({part: 0 * w for part, w in base.parts.items() if part[1] == "v.w"})
    assert not print_of(written(pruned, tmp_path / "pruned")).values.any()
