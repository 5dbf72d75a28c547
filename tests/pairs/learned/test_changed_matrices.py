"""Directions, intruder dimensions, shared directions and overlaps, against plain linear algebra."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.two_layers import TWO_LAYERS
from weightscope.model.model import open_model
from weightscope.pairs.changes.counterparts import counterparts
from weightscope.pairs.deeds.catalogue import compare_pairs
from weightscope.pairs.deeds.deed import Deed, What
from weightscope.pairs.learned.changed_matrices import TOP, Update, intruders_of, leading, updates_of
from weightscope.pairs.learned.spaces import overlap, shared_directions

RNG = np.random.default_rng(0)


def by_definition(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """PEFT's loop, as `reduce_intruder_dimension` has it, in float64."""
    u_base = np.linalg.svd(before.astype(np.float64), full_matrices=False)[0]
    u_merged = np.linalg.svd(after.astype(np.float64), full_matrices=False)[0]
    return np.array([max(abs(u_merged[:, j] @ u_base[:, i]) for i in range(u_base.shape[1])) for j in range(TOP)])


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (40, 40)])
@pytest.mark.parametrize("size", [0.1, 3.0])
def test_intruders_are_those_of_the_definition(shape: tuple[int, int], size: float) -> None:
    before = RNG.standard_normal(shape).astype(np.float32)
    low = RNG.standard_normal((shape[0], 2)) @ RNG.standard_normal((2, shape[1]))
    after = (before + size * low).astype(np.float32)
    intruders = intruders_of(before, after)
    assert np.allclose(intruders.cosines, by_definition(before, after), atol=1e-9)
    assert intruders.count == (by_definition(before, after) < 0.5).sum()


def test_a_planted_strong_direction_is_an_intruder_and_rounding_is_none() -> None:
    before = RNG.standard_normal((64, 64))
    u, v = RNG.standard_normal((2, 64))
    assert intruders_of(before, before + np.outer(u, v)).count == 1
    assert intruders_of(before, before.astype(np.float16).astype(np.float64)).count == 0


@pytest.mark.parametrize("rank", [3, 20])
def test_leading_directions_of_a_low_rank_are_exact(rank: int) -> None:
    d = RNG.standard_normal((90, rank)) @ RNG.standard_normal((rank, 70))
    s, written, read = leading(d, 16)
    true = np.linalg.svd(d, compute_uv=False)[: len(s)]
    assert np.allclose(s, true, atol=1e-9 * true[0])
    assert np.allclose(written @ d, s[:, None] * read, atol=1e-8 * true[0])


def test_leading_singular_values_of_a_full_change_are_near() -> None:
    d = RNG.standard_normal((200, 150)) * np.exp(-np.arange(150) / 20)
    s, _, _ = leading(d, 8)
    assert np.allclose(s, np.linalg.svd(d, compute_uv=False)[:8], rtol=1e-3)


def update(label: str, layer: int, written: np.ndarray, read: np.ndarray, s: np.ndarray) -> Update:
    return Update(label, label, "o", layer, (written.shape[1], read.shape[1]), 0.1, len(s), float(np.linalg.norm(s)),
                  0.0, s, written, read, None)  # fmt: skip


def rows(n: int, d: int) -> np.ndarray:
    return np.linalg.qr(RNG.standard_normal((d, n)))[0].T


def test_a_direction_that_layers_share_is_found_and_random_ones_are_not() -> None:
    shared = rows(1, 64)
    random = [update(f"layer {i} o", i, rows(2, 64), rows(2, 64), np.ones(2)) for i in range(6)]
    assert not shared_directions(random)
    planted = [replace(each, written=np.concatenate([shared, rows(1, 64)])) for each in random]
    (found,) = shared_directions(planted)
    assert found.side == "writes" and found.layers == (0, 1, 2, 3, 4, 5)
    assert abs(found.direction @ shared[0]) > 0.9
    assert found.strength > found.chance


def test_overlap_is_one_for_one_space_and_chance_for_random_ones() -> None:
    a = update("o", 0, rows(4, 64), rows(4, 64), np.ones(4))
    same, opposite = overlap(a, a), overlap(a, replace(a, read=-a.read))
    assert (same.reads, same.writes, same.cosine) == pytest.approx((1, 1, 1))
    assert (opposite.reads, opposite.cosine) == pytest.approx((1, -1))
    many = [overlap(a, update("o", 0, rows(4, 64), rows(4, 64), np.ones(4))) for _ in range(200)]
    assert np.mean([each.reads for each in many]) == pytest.approx(4 / 64, rel=0.15)
    assert many[0].chance_reads == 4 / 64


def test_a_conv1d_is_judged_as_it_is_stored() -> None:
    """PEFT takes the left vectors of a Conv1D's weight, (in, out)."""
    model = open_model(TWO_LAYERS)
    entry = next(each for each in counterparts(model, model) if each.label == "layer 1 up")
    stored = model.checkpoint["transformer.h.1.mlp.c_fc.weight"].read()
    assert entry.a is not None and entry.a.shape == stored.T.shape
    pair = entry.pair()
    assert pair is not None
    (change,) = compare_pairs(model.checkpoint, model.checkpoint, [pair])
    moved = entry.a.array() + 2 * np.outer(*np.random.default_rng(1).standard_normal((2, 1024, 1))[:, :, 0])[:, :256]
    after = replace(entry.a, read=lambda _: moved)
    (found,) = updates_of(entry._replace(b=after), replace(change, deed=Deed(What.TUNED)))
    assert found.intruders is not None
    assert np.allclose(found.intruders.cosines, by_definition(stored, moved.T), atol=1e-9)
