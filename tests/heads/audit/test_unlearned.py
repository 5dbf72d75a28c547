"""Matrices drawn by any law count as untrained even where gains look trained; no trained layer does."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.slow import mostly_checked
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.two_layers import FOLDER, TWO_LAYERS
from tests.support.weights import shared
from weightscope.model.metrics.matrix_spectra import like_its_shuffled_entries
from weightscope.report.findings import Finding

Weights = dict[str, np.ndarray]
Draw = Callable[[np.random.Generator, int], np.ndarray]
D = 64


def orthogonal(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((n, n)))[0]


LAWS: dict[str, Draw] = {
    "normal": lambda rng, n: rng.standard_normal((n, n)),
    "uniform": lambda rng, n: rng.uniform(-1, 1, (n, n)),
    "orthogonal": orthogonal,
    "sparse": lambda rng, n: rng.standard_normal((n, n)) * (rng.random((n, n)) < 0.1),
    "heavy-tailed": lambda rng, n: rng.standard_t(2, (n, n)),
    "ternary": lambda rng, n: rng.integers(-1, 2, (n, n)).astype(float),
    "rows of other sizes": lambda rng, n: rng.standard_normal((n, n)) * np.exp(0.5 * rng.standard_normal((n, 1))),
}


def drawn(law: str, weights: Weights, seed: int = 0) -> Weights:
    """The weights with the matrices of attention drawn anew; gains and biases stay."""
    rng, made = np.random.default_rng(seed), dict(weights)
    for name, w in weights.items():
        if name.endswith(("attn.c_attn.weight", "attn.c_proj.weight")):
            squares = [0.02 * LAWS[law](rng, len(w)) for _ in range(w.shape[1] // len(w))]
            made[name] = np.concatenate(squares, axis=1).astype(np.float32)
    return made


def untrained_in(folder: Path | str) -> list[Finding]:
    return [finding for finding in ws.audit(folder, directions=0).findings if finding.kind == "untrained"]


@pytest.mark.parametrize("seed", mostly_checked(range(2), fast=[0]))
@pytest.mark.parametrize("law", LAWS)
def test_any_law_is_told_beside_gains_that_moved(law: str, seed: int, tmp_path: Path) -> None:
    rng, weights = np.random.default_rng(seed), drawn(law, gpt2_weights(4, D, seed=seed), seed)
    for name, w in weights.items():
        if w.ndim == 1:
            weights[name] = (name.endswith("weight") + 0.1 * rng.standard_normal(w.shape)).astype(np.float32)
    (warned,) = untrained_in(write_checkpoint(tmp_path / "m", weights))
    assert warned.severity == "warning" and len(warned.members) > 2


@pytest.mark.parametrize("law", ["normal", "orthogonal", "heavy-tailed"])
def test_a_trained_model_whose_matrices_were_not_loaded_is_told(law: str, tmp_path: Path) -> None:
    weights = load_file(FOLDER / "model.safetensors")
    (tmp_path / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    save_file(drawn(law, weights), tmp_path / "model.safetensors")
    assert len(untrained_in(tmp_path)) == 1


@pytest.mark.parametrize("loaded", [pytest.param(2, marks=pytest.mark.check), 5])
def test_a_model_of_which_less_than_half_was_loaded_is_told(loaded: int, tmp_path: Path) -> None:
    weights = load_file(shared("gpt2-attention") / "model.safetensors")
    new = drawn("normal", weights)
    kept = {n: w if any(f"h.{i}." in n for i in range(loaded)) else new[n] for n, w in weights.items()}
    folder = tmp_path / "m"
    folder.mkdir()
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_bytes((shared("gpt2-attention") / "config.json").read_bytes())
    (warned,) = untrained_in(folder)
    assert [member.layer for member in warned.members] == [*range(loaded, 12)]


def test_no_trained_layer_is_like_its_entries_shuffled() -> None:
    """In one of the four factors at least a singular value is beyond what shuffling leaves."""
    for source in (TWO_LAYERS, shared("vit-tiny")):
        for layer in ws.open_model(source).layers:
            heads = list(layer.heads)
            factors = [np.concatenate([getattr(h, w) for h in heads], axis=1) for w in ("w_q", "w_k", "w_v")]
            factors.append(np.concatenate([head.w_o.T for head in heads], axis=1))
            assert not all(map(like_its_shuffled_entries, factors)), layer
        assert not untrained_in(source)


@pytest.mark.parametrize("name", ["h.1.attn.c_attn.weight", "h.1.attn.c_proj.weight"])
def test_a_matrix_a_thousand_times_its_siblings_is_told(name: str, tmp_path: Path) -> None:
    """FP8 codes read without their scales are about so much too large."""
    weights = gpt2_weights(3, D)
    columns = slice(0, D)  # W_Q of the fused matrix
    weights[name][:, columns] *= 2048
    audit = ws.audit(write_checkpoint(tmp_path / "m", weights), directions=0)
    out_of_scale = [finding for finding in audit.findings if finding.kind == "out_of_scale"]
    assert [finding.layer for finding in out_of_scale] == [1] and "may have lost its scales" in out_of_scale[0].text
    weights[name][:, columns] /= 16
    audit = ws.audit(write_checkpoint(tmp_path / "less", weights), directions=0)
    assert "out_of_scale" not in audit.findings.kinds


def test_so_is_a_matrix_of_the_feed_forward_network(tmp_path: Path) -> None:
    weights = load_file(FOLDER / "model.safetensors")
    (tmp_path / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    name = "transformer.h.1.mlp.c_fc.weight"
    save_file(weights | {name: weights[name] * np.float32(3000)}, tmp_path / "model.safetensors")
    audit = ws.audit(tmp_path, directions=0, all_tensors=True)
    (warned,) = [finding for finding in audit.findings if finding.kind == "out_of_scale"]
    assert [member.name for member in warned.members] == [name]
    assert "out_of_scale" not in ws.audit(TWO_LAYERS, directions=0, all_tensors=True).findings.kinds
