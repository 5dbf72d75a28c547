"""The front of a head and a layer: names as in the papers, sequences, products, short words for what holds arrays."""

import gc
import weakref

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_models import NAMES, fixture


def test_layers_and_heads_are_sequences(two_layers: ws.Model) -> None:
    layers = two_layers.layers
    assert len(layers) == 2 and [layer.index for layer in layers] == [0, 1]
    assert layers[-1].index == 1 and [layer.index for layer in layers[1:]] == [1]
    heads = layers[0].heads
    assert len(heads) == 8 and heads[6].index == heads[-2].index == 6
    assert [head.index for head in heads[::3]] == [0, 3, 6]
    np.testing.assert_array_equal(two_layers.layer(0).head(6).w_q, heads[6].w_q)
    with pytest.raises(IndexError):
        layers[2]
    with pytest.raises(IndexError):
        heads[8]


def test_only_attention_layers_are_layers() -> None:
    model = fixture("qwen3_next").model
    assert [layer.index for layer in model.layers] == [1, 3]
    assert model.layers[1].index == model.layer(3).index == 3


def test_a_loop_over_all_layers_keeps_one_of_them(two_layers: ws.Model) -> None:
    seen = [weakref.ref(layer) for layer in two_layers.layers]
    gc.collect()
    assert [each() is None for each in seen] == [True, False]
    assert two_layers.layer(1) is seen[1]()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "qwen3", "deepseek_v3", "modernbert"])
def test_folded_weights_are_the_factors_of_the_heads_matrices(name: str) -> None:
    for layer in fixture(name).model.layers:
        for head in layer.heads:
            d, r = head.w_q.shape
            assert head.w_k.shape == (d, r) and head.b_q.shape == head.b_k.shape == (r,)
            assert head.w_v.shape == head.w_o.T.shape and head.b_v.shape == head.w_o.shape[:1]
            np.testing.assert_array_equal(head.vo.dense(), head.w_v @ head.w_o)
            np.testing.assert_array_equal(head.vo_bias, head.b_v @ head.w_o)
            if layer.rotation is None or layer.rotation.factor == 1:
                np.testing.assert_array_equal(head.qk.dense(), head.w_q @ head.w_k.T)
                np.testing.assert_array_equal(head.qk_bias, head.w_k @ head.b_q)


def test_a_heads_matrix_multiplies_as_matrices_do(two_layers: ws.Model) -> None:
    head, rng = two_layers.layers[0].heads[6], np.random.default_rng(0)
    dense, x = head.qk.dense(), rng.standard_normal((5, 256), np.float32)
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(x @ head.qk, x @ dense, **close)
    np.testing.assert_allclose(x[0] @ head.qk, x[0] @ dense, **close)
    np.testing.assert_allclose(head.qk @ x.T, dense @ x.T, **close)
    np.testing.assert_allclose(head.qk @ x[0], dense @ x[0], **close)
    np.testing.assert_allclose(head.qk.T @ x[0], dense.T @ x[0], **close)
    np.testing.assert_allclose(np.stack([x, x]) @ head.qk, np.stack([x, x]) @ dense, **close)
    np.testing.assert_allclose((head.vo @ head.qk).dense(), head.vo.dense() @ dense, **close)


def test_what_holds_arrays_is_told_in_a_line(two_layers: ws.Model) -> None:
    layer = two_layers.layers[0]
    head = layer.heads[6]
    assert repr(head.qk) == "Factored(256 x 256, rank <= 32)"
    assert repr(head) == "Head(layer 0, head 6: width 256, head_dim 32)"
    assert repr(layer) == "Layer(0: 8 heads of 32, width 256)"
    assert repr(layer.heads) == "<8 heads: 0, 1, 2, 3, 4, 5, ...>"
    assert repr(two_layers.layers) == "<2 attention layers: 0, 1>"
    assert repr(two_layers) == "Model(gpt2: 2 layers of 8 heads, width 256)"


def test_everything_of_a_layer_has_a_short_repr_and_compares_by_identity(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(fixture=name):
            layer = fixture(name).model.layers[0]
            head = layer.heads[0]
            for part in (layer, head, head.qk, layer.q, layer.norm, layer.q_norm, layer.rotation, layer.additive):
                assert len(repr(part)) < 300
                assert part == part and hash(part) == hash(part)
            assert (head.qk_at(1) == head.qk_at(1)) is False
            assert (layer.heads[0] == layer.heads[0]) is False


def test_a_heads_spectrum_is_drawn_without_pyplot(two_layers: ws.Model) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    figure = two_layers.layers[0].heads[6].plot_spectrum()
    drawn = figure.axes[0].lines[0].get_ydata()
    np.testing.assert_allclose(drawn, two_layers.layers[0].heads[6].qk.svdvals())
    assert dict(matplotlib.rcParams) == before
