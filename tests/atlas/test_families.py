"""Which checkpoints are one family, whatever order they come in and however many of them are alike."""

from pathlib import Path

import numpy as np
import pytest

from analyses.experiments.derivations import DERIVATIONS
from analyses.experiments.named_parts import read_weights
from tests.support.small_llama import drawn, noisy, write_small_llama, written
from weightscope.atlas.families import COMPARED, NEAR, families_of
from weightscope.atlas.neighbours import neighbours_of
from weightscope.atlas.prints import Print, bits_of, make_print
from weightscope.sources import Source


def print_of(folder: Path) -> Print:
    answer = make_print(Source.named(str(folder)))
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
    blank = [Print(each.sketches, zeros, each.read) for each in (branches[0], branches[-1])]
    families = families_of([each.outline() for each in blank], blank.__getitem__)
    assert [len(family.members) for family in families] == [1, 1]


def test_values_are_rounded_to_bfloat16() -> None:
    """A bfloat16 is the upper half of a float32; the nearest one, and of two the even one."""
    values = np.array([[1.0], [1.00390625], [1.01171875], [-2.5], [3.3]], np.float32)
    assert bits_of(values)[:5].tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC020, 0x4053]
