"""Projection kernel and composition score: what they are, on matrices made by hand, on every family and on GPT-2."""

import io
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightscope as ws
from benchmarks.synthetic import Sizes, write
from tests.support.heads_by_hand import dense_scores, layer_of, random_layer
from tests.support.tiny_models import NAMES, fixture
from weightscope.core.compute.device import CPU, Device, open_device
from weightscope.core.files import Files
from weightscope.heads.circuits import passes
from weightscope.heads.circuits.passes import Spaces, WrittenRows, layer_spaces, pair_scores, wiring
from weightscope.heads.circuits.wiring import PROJECTIONS, random_overlap
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.rotation import Rotation, inverse_powers
from weightscope.model.model import Model

seeds = st.integers(0, 2**32 - 1)


def measures(written: Spaces, read: Spaces, device: Device = CPU) -> tuple[np.ndarray, np.ndarray]:
    """PK and CS."""
    pk, squared = pair_scores(WrittenRows.whole(written, device), read, device)
    return pk, np.sqrt(squared)


def scores(first: Layer, second: Layer, kind: str) -> tuple[np.ndarray, np.ndarray]:
    centred = second.norm is not None and second.norm.centred
    return measures(layer_spaces(first, centred=centred).written, layer_spaces(second, centred=centred).read[kind])


@given(seeds, st.sampled_from(PROJECTIONS))
@settings(max_examples=20, deadline=None)
def test_a_head_that_reads_exactly_what_another_writes_has_pk_r(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    first, second = random_layer(rng, 24, 4), random_layer(rng, 24, 4)
    mixed = np.swapaxes(first.w_o, 1, 2) @ rng.standard_normal((2, 4, 4))  # the same columns, recombined
    second = replace(second, **{kind: replace(getattr(second, kind), stored=mixed)})
    pk, _ = scores(first, second, kind)
    assert np.diag(pk) == pytest.approx([4, 4], rel=1e-5)


def test_random_heads_have_pk_r_r_over_d_in_the_mean_with_the_stated_spread() -> None:
    rng = np.random.default_rng(0)
    d, r_a, r_b, heads = 40, 6, 4, 60
    w = rng.standard_normal
    first = layer_of(w((heads, d, r_a)), w((heads, d, r_a)), w((heads, d, r_a)), w((heads, r_a, d)))
    second = layer_of(w((heads, d, r_b)), w((heads, d, r_b)), w((heads, d, r_b)), w((heads, r_b, d)))
    random = random_overlap(r_a, r_a, r_b, r_b, d)
    pk, cs = scores(first, second, "k")
    assert random.mean == pytest.approx(r_a * r_b / d)
    assert pk.mean() == pytest.approx(random.mean, rel=0.03)
    assert pk.std() == pytest.approx(random.spread, rel=0.1)
    assert np.mean(cs**2) == pytest.approx(1 / d, rel=0.03)


def test_the_spread_of_cs_squared_is_that_of_matrices_turned_at_random() -> None:
    rng = np.random.default_rng(1)
    p, q, d = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.5]), 12
    turns = np.linalg.qr(rng.standard_normal((4000, d, d)))[0]
    drawn = np.einsum("i,nij,j->n", p, turns[:, :3, :2] ** 2, q)
    random = random_overlap(1.0, (p**2).sum(), 1.0, (q**2).sum(), d)
    assert drawn.mean() == pytest.approx(random.mean, rel=0.05)
    assert drawn.std() == pytest.approx(random.spread, rel=0.05)


@given(seeds, st.sampled_from([(2, 2), (4, 2), (4, 1)]), st.booleans())
@settings(max_examples=15, deadline=None)
def test_the_gauge_does_not_matter(seed: int, sizes: tuple[int, int], centred: bool) -> None:
    """W_Q R with W_K R^-T, and W_V S with S^-1 W_O, are the same head."""
    rng = np.random.default_rng(seed)
    h, g = sizes
    d, r = 20, 4
    q, k, v, o = (rng.standard_normal(shape) for shape in ((h, d, r), (g, d, r), (g, d, r), (h, r, d)))
    turn, value_turn = (rng.standard_normal((g, r, r)) / 4 + np.eye(r) for _ in range(2))

    def of_heads(x: np.ndarray) -> np.ndarray:
        return np.repeat(x, h // g, axis=0)

    again = layer_of(
        q @ of_heads(turn), k @ np.swapaxes(np.linalg.inv(turn), 1, 2), v @ value_turn,
        of_heads(np.linalg.inv(value_turn)) @ o,
        centred=centred,
    )  # fmt: skip
    first = layer_of(q, k, v, o, centred=centred)
    for kind in PROJECTIONS:
        np.testing.assert_allclose(scores(first, again, kind), scores(first, first, kind), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["zero column", "equal columns", "nearly equal", "zero head", "wider than d"])
def test_factors_of_low_rank_count_by_their_rank(change: str) -> None:
    rng = np.random.default_rng(3)
    d, r = (6, 8) if change == "wider than d" else (24, 4)
    first, second = random_layer(rng, d, r), random_layer(rng, d, r)
    if change == "zero column":
        second.k.stored[0, :, 1] = 0
    elif change == "equal columns":
        first.w_o[0, 2] = first.w_o[0, 1]
        first = replace(first, w_o=first.w_o.astype(np.float32))
    elif change == "nearly equal":  # too ill-conditioned to be made orthonormal in float32
        first.w_o[0, 2] = first.w_o[0, 1] + 1e-3 * first.w_o[0, 2]
        first = replace(first, w_o=first.w_o.astype(np.float32))
    elif change == "zero head":
        first.w_o[0] = 0
    spaces = layer_spaces(first, centred=False).written, layer_spaces(second, centred=False).keys
    ranks = {
        "zero column": [4, 4, 3, 4], "equal columns": [3, 4, 4, 4], "nearly equal": [4] * 4,
        "zero head": [0, 4, 4, 4], "wider than d": [6] * 4,
    }  # fmt: skip
    assert [*spaces[0].rank, *spaces[1].rank] == ranks[change]
    pk, cs = measures(*spaces)
    for a, b in product(range(2), repeat=2):
        if change == "zero head" and a == 0:
            assert pk[a, b] == cs[a, b] == 0
        else:
            dense = dense_scores(first.head(a), second.head(b))["k"]
            assert (pk[a, b], cs[a, b]) == pytest.approx(dense, rel=1e-4)


def test_what_a_rotated_head_reads_is_the_same_space_at_every_position() -> None:
    """W_K R(p) has the columns of W_K, recombined: PK is the same as of a space closed under the rotation."""
    rng = np.random.default_rng(4)
    first, second = random_layer(rng, 24, 4), random_layer(rng, 24, 4)
    rotation = Rotation(inverse_powers(100.0, 4))
    for position in (1, 7, 50):
        keys = np.stack([rotation.rotate(w, np.full(24, position)) for w in second.k.w])
        turned = replace(second, k=replace(second.k, stored=keys))
        np.testing.assert_allclose(scores(first, turned, "k")[0], scores(first, second, "k")[0], rtol=1e-5)


def test_how_strongly_a_rotated_head_uses_its_space_is_that_of_distance_0() -> None:
    rng = np.random.default_rng(4)
    first, second = random_layer(rng, 24, 4), random_layer(rng, 24, 4)
    second = replace(second, rotation=Rotation(inverse_powers(100.0, 2), factor=1.3))  # half of the pairs turn
    for a, b, kind in product(range(2), range(2), PROJECTIONS):
        dense = dense_scores(first.head(a), second.head(b))[kind]
        assert scores(first, second, kind)[1][a, b] == pytest.approx(dense[1], rel=1e-4)


# The weight, less what is added to it, of the norm that attention's output passes, where there is one.
GAINS = {
    **dict.fromkeys(("gemma2", "gemma3"), ("post_attention_layernorm", 1)),
    **dict.fromkeys(("olmo2", "olmo3"), ("post_attention_layernorm", 0)),
    "glm4": ("post_self_attn_layernorm", 0),
}


def with_gain(model: Model, layer: Layer) -> Layer:
    """The layer with the gain of that norm in W_O."""
    if model.family.name not in GAINS:
        return layer
    name, plus = GAINS[model.family.name]
    (stored,) = (tensor for key, tensor in model.checkpoint.items() if key.endswith(f"s.{layer.index}.{name}.weight"))
    return replace(layer, w_o=np.asarray(layer.w_o) * (stored.read() + np.float32(plus)))


def check_against_dense(model: Model) -> None:
    wired, layers = wiring(model), model.own_layers
    for i, j in combinations(range(len(layers)), 2):
        first, second = (with_gain(model, model.layer(layers[index])) for index in (i, j))
        for a, b in product(range(first.n_heads), range(second.n_heads)):
            dense = dense_scores(first.head(a), second.head(b))
            for kind in PROJECTIONS:
                got = wired.pk[kind][i, a, j, b], wired.cs[kind][i, a, j, b]
                assert got == pytest.approx(dense[kind], rel=2e-4, abs=1e-6), (i, a, j, b, kind)


def test_every_family_against_matrices_of_d_by_d(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(fixture=name):
            model = fixture(name).model
            if len(model.own_layers) == 1:  # the other layers are not attention
                assert np.isnan(wiring(model).pk["k"]).all()
            check_against_dense(model)


def test_the_embedded_checkpoint_against_matrices_of_d_by_d(two_layers: ws.Model) -> None:
    check_against_dense(two_layers)


def test_pairs_that_are_not_in_order_are_nan_and_layers_can_be_chosen(two_layers: ws.Model) -> None:
    wired = wiring(two_layers)
    assert wired.pk["q"].shape == (2, 8, 2, 8)
    assert np.isfinite(wired.pk["q"][0, :, 1]).all()
    assert np.isnan(wired.pk["q"][:, :, 0]).all() and np.isnan(wired.pk["q"][1]).all()
    assert wiring(two_layers, [1]).pk["q"].shape == (1, 8, 1, 8)


def test_wiring_npz_holds_what_people_s_scripts_read(two_layers: ws.Model) -> None:
    files = Files()
    files.npz("wiring.npz", **wiring(two_layers).arrays())
    arrays = np.load(io.BytesIO(files.contents["wiring.npz"]))
    for measure, kind in product(("pk", "cs"), PROJECTIONS):
        assert arrays[f"{measure}_o{kind}"].shape == (2, 8, 2, 8)
    assert arrays["layers"].tolist() == [0, 1]


def test_a_checkpoint_that_does_not_fit_is_gone_through_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fixture("gpt2").model
    complete = wiring(model)
    monkeypatch.setattr(passes, "WRITTEN_BYTES", 1)
    monkeypatch.setattr(passes, "PRODUCT_BYTES", 1)
    in_parts = wiring(model)
    for kind in PROJECTIONS:
        np.testing.assert_allclose(in_parts.pk[kind], complete.pk[kind], rtol=1e-5)
        np.testing.assert_allclose(in_parts.z("cs", kind), complete.z("cs", kind), rtol=1e-3)


def test_other_array_libraries_give_the_same() -> None:
    rng = np.random.default_rng(5)
    first, second = random_layer(rng, 24, 4, 4, 2), random_layer(rng, 24, 4, 4, 2)
    strict = open_device("array_api_strict")
    for kind in PROJECTIONS:
        spaces = layer_spaces(first, centred=False).written, layer_spaces(second, centred=False).read[kind]
        np.testing.assert_allclose(measures(*spaces, strict), measures(*spaces), rtol=1e-5)


def test_small_layers_that_are_multiplied_together_give_what_each_gives_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ws.open_model(write(tmp_path, Sizes(layers=9, width=48, heads=4, kv_heads=2)))
    products_made = []
    monkeypatch.setattr(passes, "pair_scores", lambda *args: products_made.append(1) or pair_scores(*args))
    together = wiring(model)
    assert len(products_made) == len(PROJECTIONS) * 8  # one for all layers below, by queries, keys and values
    monkeypatch.setattr(passes, "SMALL_BYTES", 0)
    alone = wiring(model)
    assert len(products_made) == len(PROJECTIONS) * (8 + 9 * 8 // 2)
    for kind in PROJECTIONS:
        np.testing.assert_allclose(together.pk[kind], alone.pk[kind], rtol=1e-5)
        np.testing.assert_allclose(together.cs[kind], alone.cs[kind], rtol=1e-5)
