"""GPT-2's heads: all pairs against float64, and the circuits that are known."""

import numpy as np
import pytest

import weightscope as ws
from tests.support.heads_by_hand import dense_scores
from tests.support.weights import shared
from weightscope.heads.circuits.passes import wiring
from weightscope.heads.circuits.wiring import Wiring

pytestmark = pytest.mark.check

INDUCTION = [(5, 1), (6, 9), (5, 5), (7, 2), (7, 10)]  # published scores 0.91, 0.91, 0.93, 0.83, 0.91


@pytest.fixture(scope="module")
def gpt2() -> ws.Model:
    return ws.open_model(shared("gpt2-attention"))


@pytest.fixture(scope="module")
def links(gpt2: ws.Model) -> Wiring:
    return wiring(gpt2)


def strongest(scores: np.ndarray, n: int) -> list[tuple[int, ...]]:
    order = np.argsort(-np.nan_to_num(scores), axis=None, kind="stable")[:n]
    return [tuple(int(i) for i in np.unravel_index(index, scores.shape)) for index in order]


def test_the_heads_whose_keys_read_most_of_4_11_are_the_five_strongest_induction_heads(links: Wiring) -> None:
    assert strongest(links.pk["k"][4, 11], 5) == INDUCTION
    values = [links.pk["k"][4, 11, m, b] for m, b in INDUCTION]
    assert values == pytest.approx([39.1, 38.1, 34.3, 30.6, 30.2], abs=0.05)  # measured elsewhere in float64


def test_the_strongest_edges_are_those_measured_elsewhere(links: Wiring) -> None:
    assert strongest(links.pk["q"], 2) == [(4, 7, 5, 6), (4, 11, 5, 6)]
    assert strongest(links.pk["v"], 3) == [(3, 10, 4, 7), (4, 7, 5, 2), (8, 10, 9, 3)]
    assert links.pk["v"][3, 10, 4, 7] == pytest.approx(22.1, abs=0.05)
    assert strongest(links.cs["v"], 1) == [(1, 10, 11, 8)]
    assert links.cs["v"][1, 10, 11, 8] == pytest.approx(0.289, abs=5e-4)


def test_all_pairs_against_float64(gpt2: ws.Model, links: Wiring) -> None:
    """Bases by LAPACK's QR, the composition from W_O W_X between the factors' triangles: no turn, no shares."""
    layers = [gpt2.layer(i) for i in range(12)]
    written, of_vo = [], []
    for layer in layers:
        w_o = np.swapaxes(layer.w_o, 1, 2).astype(np.float64)
        basis, triangle = np.linalg.qr(w_o - w_o.mean(axis=1, keepdims=True))
        of_value = np.linalg.qr(layer.v.w.astype(np.float64), mode="r")
        written.append(basis)
        of_vo.append(of_value @ np.swapaxes(triangle, 1, 2))  # W_VO = Q_v of_vo Q_o'
    for m, layer in enumerate(layers[1:], start=1):
        (q, r_q), (k, r_k), (v, _) = (np.linalg.qr(x.w.astype(np.float64)) for x in (layer.q, layer.k, layer.v))
        readers = {
            "q": (q, r_q @ np.swapaxes(r_k, 1, 2)), "k": (k, r_k @ np.swapaxes(r_q, 1, 2)), "v": (v, of_vo[m])
        }  # fmt: skip
        for kind, (basis, core) in readers.items():
            right = basis.transpose(1, 0, 2).reshape(768, -1)
            for i in range(m):
                between = np.swapaxes(written[i], 1, 2).reshape(-1, 768) @ right
                between = between.reshape(12, 64, 12, 64).transpose(0, 2, 1, 3)  # U'V of every pair
                pk = (between**2).sum(axis=(2, 3))
                composed = np.linalg.norm(of_vo[i][:, None] @ between @ core, axis=(2, 3))
                sizes = np.linalg.norm(of_vo[i], axis=(1, 2))[:, None] * np.linalg.norm(core, axis=(1, 2))
                np.testing.assert_allclose(links.pk[kind][i, :, m], pk, rtol=2e-5)
                np.testing.assert_allclose(links.cs[kind][i, :, m], composed / sizes, rtol=2e-5)


def test_some_pairs_against_matrices_of_d_by_d(gpt2: ws.Model, links: Wiring) -> None:
    for (i, a), (j, b) in (((4, 11), (5, 1)), ((1, 10), (11, 8)), ((0, 0), (1, 0))):
        for kind, dense in dense_scores(gpt2.layer(i).head(a), gpt2.layer(j).head(b)).items():
            assert (links.pk[kind][i, a, j, b], links.cs[kind][i, a, j, b]) == pytest.approx(dense, rel=1e-4)


def test_what_heads_write_is_centred_and_what_that_changes(gpt2: ws.Model, links: Wiring) -> None:
    """PK with W_O as stored, over PK with W_O centred, of all pairs."""
    layers = [gpt2.layer(i) for i in range(12)]
    stored = [np.linalg.qr(np.swapaxes(layer.w_o, 1, 2).astype(np.float64))[0] for layer in layers]  # (12, 768, 64)
    changes = []
    for m, layer in enumerate(layers[1:], start=1):
        for kind in ("q", "k", "v"):
            read = np.linalg.qr(getattr(layer, kind).w.astype(np.float64))[0].transpose(1, 0, 2).reshape(768, -1)
            for i in range(m):
                between = (np.swapaxes(stored[i], 1, 2).reshape(-1, 768) @ read).reshape(12, 64, 12, 64)
                pk = (between**2).sum(axis=(1, 3))
                changes.append(np.abs(pk / links.pk[kind][i, :, m] - 1))
    assert np.mean(changes) == pytest.approx(7e-4, rel=0.05)
    assert np.max(changes) == pytest.approx(0.022, rel=0.05)
