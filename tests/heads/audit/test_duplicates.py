"""Heads with the same spaces: how alike two are, and layers that repeat others head by head."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.heads.audit.duplicates import duplicates, likeness_of
from weightscope.model.layers.factored import Factored
from weightscope.model.layers.read_layer import read_layer
from weightscope.model.metrics.moves import principal_angles

D, R = 64, 8


def near(size: float, seed: int = 0) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Two heads, the second the first one in another basis, and moved by `size`."""
    rng = np.random.default_rng(seed)
    left, right, *noise = (rng.standard_normal((D, R)) for _ in range(4))
    basis = rng.standard_normal((R, R))
    moved = Factored((left + size * noise[0]) @ basis, (right + size * noise[1]) @ np.linalg.inv(basis).T)
    return SimpleNamespace(qk=Factored(left, right)), SimpleNamespace(qk=moved)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1])
def test_likeness_is_that_of_exact_angles_and_of_the_dense_maps(size: float) -> None:
    first, second = near(size)
    overlap, angle, cosine, _ = likeness_of(first, second, "qk")
    a, b = first.qk, second.qk
    angles = [principal_angles(x, y) for x, y in ((a.left, b.left), (a.right, b.right))]
    assert overlap == pytest.approx(min((np.cos(side_angles) ** 2).mean() for side_angles in angles), abs=1e-12)
    # The angle comes from its cosine, 1 - angle²/2, and that from Gram matrices, which square the condition number.
    rounding = 4 * np.finfo(float).eps * max(np.linalg.cond(side) for side in (b.left, b.right)) ** 2
    assert angle**2 == pytest.approx(max(side_angles.max() for side_angles in angles) ** 2, rel=2e-3, abs=rounding)
    norms = np.linalg.norm(a.dense()) * np.linalg.norm(b.dense())
    assert cosine == pytest.approx((a.dense() * b.dense()).sum() / norms, abs=1e-12)


def test_unrelated_heads_are_not_alike_and_equal_ones_wholly() -> None:
    first, second = near(30.0)
    assert likeness_of(first, second, "qk") is None
    assert likeness_of(first, first, "qk") == (1.0, 0.0, 1.0, "")


@pytest.mark.parametrize("turned", [False, True])
def test_a_copy_moved_by_a_tenth_is_a_copy_and_its_negative_is_not(turned: bool) -> None:
    first, second = near(0.1)
    if turned:
        second.qk = Factored(-second.qk.left, second.qk.right)
    likeness = likeness_of(first, second, "qk")
    assert abs(likeness.cosine) > 0.95 and likeness.overlap > 0.95 and likeness.is_copy is not turned


def test_heads_that_differ_in_one_direction_entirely_are_no_copies() -> None:
    """Seven directions are the same, and carry nearly all of the map; the eighth, which is weak, is another."""
    first, second = near(1e-3)
    rng, strength = np.random.default_rng(1), np.array([10.0] * (R - 1) + [1.0])
    left, right = (np.linalg.qr(side)[0] for side in (first.qk.left, first.qk.right))
    elsewhere = left.copy()
    elsewhere[:, -1] = np.linalg.qr(np.column_stack([left, rng.standard_normal(D)]))[0][:, -1]
    first.qk, second.qk = Factored(left * strength, right), Factored(elsewhere * strength, right.copy() + 1e-9)
    likeness = likeness_of(first, second, "qk")
    assert likeness.cosine > 0.99 and np.degrees(likeness.angle) > 89 and not likeness.is_copy


def test_of_heads_that_share_their_values_the_outputs_alone_are_judged() -> None:
    """W_V reads one direction so strongly that the maps are alike whatever W_O does with the others."""
    rng = np.random.default_rng(2)
    w_v, w_o = (rng.standard_normal((D, R)) for _ in range(2))
    w_v[:, 0] *= 100
    mixed = np.eye(R)
    mixed[1:, 1:] = np.linalg.qr(rng.standard_normal((R - 1, R - 1)))[0]  # the same space, read by other directions
    first, second = (SimpleNamespace(vo=Factored(w_v, side)) for side in (w_o, w_o @ mixed))
    likeness = likeness_of(first, second, "vo")
    dense = (first.vo.dense() * second.vo.dense()).sum() / first.vo.frobenius() / second.vo.frobenius()
    cosine = (w_o * (w_o @ mixed)).sum() / np.linalg.norm(w_o) / np.linalg.norm(w_o @ mixed)
    assert likeness.unshared == "W_O" and likeness.cosine == pytest.approx(cosine)
    assert dense > 0.99 and likeness.overlap == pytest.approx(1) and not likeness.is_copy


def test_layers_that_repeat_others_are_a_finding_each(tmp_path: Path) -> None:
    """Layers 2 and 3 are 0 and 1 again, the last with its heads in another order."""
    weights = gpt2_weights(5, D, vocab=30, n_positions=8)
    for name in [name for name in weights if name.startswith("h.0.")]:
        weights[name.replace("h.0.", "h.2.")] = weights[name]
        weights[name.replace("h.0.", "h.3.")] = weights[name.replace("h.0.", "h.1.")].copy()
    columns = np.arange(D).reshape(-1, 16)[[2, 0, 3, 1]].ravel()  # four heads
    fused = weights["h.3.attn.c_attn.weight"].reshape(D, 3, D)
    weights["h.3.attn.c_attn.weight"] = np.ascontiguousarray(fused[:, :, columns].reshape(D, 3 * D))
    weights["h.3.attn.c_attn.bias"] = weights["h.3.attn.c_attn.bias"].reshape(3, D)[:, columns].ravel()
    weights["h.3.attn.c_proj.weight"] = weights["h.3.attn.c_proj.weight"][columns]
    audit = ws.audit(ws.open_model(write_checkpoint(tmp_path, weights)), directions=0)
    findings = [finding for finding in audit.findings if finding.kind == "duplicate_heads"]
    assert sorted((finding.map, finding.layer, finding.head) for finding in findings) == [
        ("qk", 0, None), ("qk", 1, None), ("vo", 0, None), ("vo", 1, None)
    ]  # fmt: skip
    for finding in findings:
        assert (
            len(finding.members) == 8
            and f"2 layers, {finding.layer}, {finding.layer + 2}, have the same spaces" in finding.text
        )
        assert finding.number == pytest.approx(1, abs=1e-6)


def test_layers_that_repeat_another_are_read_once_for_all_their_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = gpt2_weights(6, D, vocab=30, n_positions=8)
    for name in list(weights):
        if name.startswith(("h.0.", "h.1.")):
            for later in (2, 4):
                weights[name.replace(name[:4], f"h.{int(name[2]) + later}.")] = weights[name]
    model, reads = ws.open_model(write_checkpoint(tmp_path, weights)), []
    measured = ws.audit(model, directions=0).measured
    monkeypatch.setattr("weightscope.model.model.read_layer", lambda *of: reads.append(of[-1]) or read_layer(*of))
    findings = list(duplicates(model.unchecked(), measured))
    assert [finding.text.partition(" have")[0] for finding in findings] == [
        f"3 layers, {layers}," for layers in ("0, 2, 4", "1, 3, 5")
    ] * 2
    assert sorted(reads) == sorted([*range(6)] * 2)  # once per map, for four heads each
