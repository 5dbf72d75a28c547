"""The wiring's benchmark runs, and believes a peer only that finds our numbers."""

from collections.abc import Callable

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import circuits
from benchmarks.peers import PeerCost
from weightscope.core.embedded import FOLDER


def dense_scores(key: str, factors: dict[str, np.ndarray]) -> np.ndarray:
    """PK or CS by keys of every head with every head, from whole matrices in float64."""
    q, k, v, o = (factors[name].astype(float).reshape(-1, *factors[name].shape[2:]) for name in "qkvo")
    if key == "pk":
        written, read = np.linalg.qr(o)[0], np.linalg.qr(k)[0]
        scores = np.square(np.einsum("adr,bds->abrs", written, read)).sum(axis=(2, 3))
    else:
        vo, kq = v @ o.transpose(0, 2, 1), k @ q.transpose(0, 2, 1)
        lengths = np.linalg.norm(vo, axis=(1, 2))[:, None] * np.linalg.norm(kq, axis=(1, 2))
        scores = np.linalg.norm(vo[:, None] @ kq, axis=(2, 3)) / lengths
    layers, heads = factors["q"].shape[:2]
    return scores.reshape(layers, heads, layers, heads)


def run_with(
    monkeypatch: pytest.MonkeyPatch, peer: Callable[[str, str, dict[str, np.ndarray]], PeerCost | None]
) -> str:
    monkeypatch.setattr(circuits, "peer_cost", peer)
    return CliRunner().invoke(circuits.main, [str(FOLDER), "--rounds", "1", "--peer-python", "python"]).output


def test_a_peer_is_given_the_factors_that_our_numbers_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    output = run_with(monkeypatch, lambda key, _, factors: PeerCost(1.0, 1.0, dense_scores(key, factors)))
    assert "| the bare float32 products |" in output
    assert output.count("| ours |") == 2


def test_a_peer_that_finds_other_numbers_is_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    output = run_with(monkeypatch, lambda key, _, factors: PeerCost(1.0, 1.0, dense_scores(key, factors) + 0.01))
    assert "projection kernel (float32): differs from ours by 0.01" in output


def test_a_peer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not installed (pip install transformer-lens)" in run_with(monkeypatch, lambda *_: None)
