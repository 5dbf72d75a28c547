"""A layer on arrays: groups share their keys, and the terms by distance are what their papers say."""

from dataclasses import replace

import numpy as np
import pytest

import weightscope as ws
from weightscope.model.layers.distances import alibi
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine
from weightscope.model.layers.positions import Buckets, Slopes

RNG = np.random.default_rng(0)


def grouped_layer(heads: int = 6, groups: int = 2, d: int = 8, r: int = 4) -> Layer:
    def affine(count: int) -> Affine:
        return Affine(RNG.normal(size=(count, d, r)), RNG.normal(size=(count, r)))

    w_o = RNG.normal(size=(heads, r, d))
    return Layer(affine(heads), affine(groups), affine(groups), w_o, RNG.normal(size=d), scale=0.5)


def test_grouped_queries_are_what_repeated_keys_would_be() -> None:
    layer, x = grouped_layer(), RNG.normal(size=(5, 8))
    k, v = (Affine(np.repeat(a.w, 3, axis=0), np.repeat(a.b, 3, axis=0)) for a in (layer.k, layer.v))
    repeated = replace(layer, k=k, v=v)
    np.testing.assert_allclose(layer.scores(x), repeated.scores(x))
    np.testing.assert_allclose(layer.values(x), repeated.values(x))
    attention = RNG.random(size=(6, 5, 5))
    np.testing.assert_allclose(layer.output(attention, x), repeated.output(attention, x))


def test_heads_of_a_group_share_one_key_map() -> None:
    layer = grouped_layer()
    assert [head.kv_head for head in layer.heads] == [0, 0, 0, 1, 1, 1]
    for head in layer.heads:
        assert np.shares_memory(head.qk.right, layer.k.w)
        assert np.shares_memory(head.vo.left, layer.v.w)
    with pytest.raises(ws.CheckpointError, match="no head 6: a layer has 6"):
        layer.head(6)


def test_without_rotation_distance_changes_nothing() -> None:
    head = grouped_layer().head(1)
    np.testing.assert_array_equal(head.qk_at(7).left, head.qk.left)
    forms = head.forms(deltas=(0, 7), window=3)
    for name in ("delta7", "mean3", "free"):
        np.testing.assert_allclose(forms[name].dense(), head.qk.dense())
    assert forms["turning"].rank_bound == 0
    assert not np.any(head.layer.position_bias(np.arange(4)))


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [2.0**-i for i in range(1, 9)]),  # ALiBi, section 3
        (6, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]),  # its code: of 4, then every other of 8
    ],
)
def test_alibis_slopes(heads: int, slopes: list[float]) -> None:
    class Config:
        n_heads = heads

    np.testing.assert_allclose(alibi(None, Config(), 0).slopes, slopes)


def test_alibi_falls_with_distance() -> None:
    np.testing.assert_allclose(Slopes(np.array([0.5, 0.25]))(np.array([0, 1, 4])), [[0, -0.5, -2], [0, -0.25, -1]])


def test_relative_buckets_are_exact_nearby_and_shared_far_away() -> None:
    bias = Buckets(np.arange(32.0)[:, None])
    back, ahead = bias(np.arange(200))[0], bias(-np.arange(200))[0]
    np.testing.assert_array_equal(back[:8], np.arange(8))
    np.testing.assert_array_equal(ahead[1:8], 16 + np.arange(1, 8))
    assert np.all(np.diff(back) >= 0) and back[127] == back[199] == 15 and ahead[199] == 31


def test_causal_buckets_are_all_of_the_past() -> None:
    bias = Buckets(np.arange(32.0)[:, None], causal=True)
    back = bias(np.arange(200))[0]
    np.testing.assert_array_equal(back[:16], np.arange(16))
    assert np.all(np.diff(back) >= 0) and back[127] == back[199] == 31 and not bias(-np.arange(9)).any()
