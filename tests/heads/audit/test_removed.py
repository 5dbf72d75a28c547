"""An audit finds directions that were removed from what layers write or read, and none where none was."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.slow import mostly_checked
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.heads.audit import removed_directions
from weightscope.heads.audit.audit import Audit
from weightscope.heads.audit.removed_directions import (
    GAPS,
    RANKS,
    SHIFT,
    agreeing,
    gap_scores,
    least_eigenvectors,
    least_of,
)
from weightscope.pairs.deeds.rounding import CASTS
from weightscope.report.findings import Finding

LAYERS, D = 12, 96
RNG = np.random.default_rng(3)
DIRECTION = RNG.standard_normal(D) / np.sqrt(D)
DIRECTION /= np.linalg.norm(DIRECTION)
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def base() -> Weights:
    return gpt2_weights(n_layers=LAYERS, d=D, vocab=60)


def cut(weights: Weights, layers, strength: float = 1.0, name: str = "attn.c_proj", along=DIRECTION) -> Weights:
    """The weights with a direction removed from some layers, as bfloat16."""
    changed = {key: value.copy() for key, value in weights.items()}
    p = strength * np.outer(along, along)
    for layer in layers:
        key = f"h.{layer}.{name}.weight"
        w = changed[key].astype(np.float64)
        changed[key] = (w - (w @ p if name == "attn.c_proj" else p @ w)).astype(np.float32)
    return {key: CASTS["BF16"](value) for key, value in changed.items()}


def audited(folder: Path, weights: Weights, **options) -> Audit:
    return ws.audit(write_checkpoint(folder, weights), directions=0, **options)


def removals(audit: Audit) -> list[Finding]:
    return [finding for finding in audit.findings if finding.kind == "removed_direction"]


def random_gram(rng: np.random.Generator, rows: int = 600, d: int = 300, sizes=1.0, along=None) -> np.ndarray:
    """The Gram matrix of a random matrix whose dimensions have these sizes, without the directions `along` (d, k)."""
    w = rng.standard_normal((rows, d)) * sizes
    w = w if along is None else w - (w @ along) @ along.T
    return (w.T @ w).astype(np.float32)


def test_least_eigenvectors_are_those_of_a_dense_float64_decomposition() -> None:
    gram = random_gram(RNG) / 600
    values, vectors = np.linalg.eigh(gram.astype(np.float64))
    least, directions = least_eigenvectors(gram.copy(), 20)
    assert least[:8] == pytest.approx(values[:8], rel=1e-3) and least == pytest.approx(values[:20], rel=0.05)
    assert np.linalg.svd(vectors[:, :8].T @ directions[:, :8], compute_uv=False).min() > 0.999


def test_the_score_bounds_the_chance_of_a_gap() -> None:
    """Gaps of independent exponential variables exceed s with probability 10^-s, gaps of random matrices less often."""
    rng, n = np.random.default_rng(0), 4000
    logs = np.sort(rng.exponential(size=(n, 200)), axis=1)[:, : RANKS + GAPS + 1]  # the k-th gap times (200 - k)
    gaps = np.diff(logs, axis=1) * (200 - np.arange(1, RANKS + GAPS + 1)) / np.arange(1, RANKS + GAPS + 1)
    spectra = np.exp(np.concatenate([np.zeros((n, 1)), gaps.cumsum(axis=1)], axis=1))
    scores = np.array([gap_scores(spectrum)[0] for spectrum in spectra])
    for limit in (0.5, 1.0, 2.0):
        expected = 10**-limit
        assert (scores > limit).mean() == pytest.approx(expected, abs=4 * np.sqrt(expected / n))
    of_matrices = [least_of(random_gram(rng, 300, 150), centred=False).score for _ in range(40)]
    assert max(of_matrices) < 1.2


@pytest.mark.parametrize("rank", [1, 3])
def test_removed_directions_are_found_where_dimensions_differ_in_size(rank: int) -> None:
    rng = np.random.default_rng(rank)
    along = np.linalg.qr(rng.standard_normal((300, rank)))[0]
    sizes = np.exp(rng.normal(size=300))
    least = least_of(random_gram(rng, sizes=sizes, along=along), centred=False)
    assert least.score > 5 and least.directions.shape == (300, rank) and least.ratio < 1e-3
    assert np.linalg.svd(along.T @ least.directions, compute_uv=False).min() > 0.99


def test_what_layer_norms_never_read_and_padding_are_no_findings() -> None:
    rng, ones = np.random.default_rng(4), np.full((300, 1), 300**-0.5)
    gram = random_gram(rng, along=ones)
    assert least_of(gram.copy(), centred=True).score < 1.2 and least_of(gram, centred=False).score > 5
    sizes = np.ones(300)
    sizes[-20:] = 0
    assert least_of(random_gram(rng, sizes=sizes), centred=False).score < 1.2


def test_layers_anywhere_whose_least_directions_agree_are_a_set() -> None:
    rng = np.random.default_rng(5)
    along = np.linalg.qr(rng.standard_normal((300, 1)))[0]
    grams = [random_gram(rng, 300, along=along if i in (1, 4, 8) else None) for i in range(10)]
    assert agreeing([gram / np.trace(gram) for gram in grams], False) == [(1, 4, 8)]


@pytest.mark.parametrize("layers", [range(LAYERS), range(3, 8), (0, 2, 5, 8, 11)])
@pytest.mark.parametrize("kept", [removed_directions.KEPT, 0])
def test_an_audit_finds_the_layers_and_the_direction(base: Weights, tmp_path: Path, monkeypatch, layers, kept) -> None:
    """Wide streams, whose Gram matrices are not kept, show runs of layers."""
    monkeypatch.setattr(removed_directions, "KEPT", kept)
    audit = audited(tmp_path, cut(base, layers))
    if not kept and layers == (0, 2, 5, 8, 11):
        assert not removals(audit)
        return
    (finding,) = removals(audit)
    assert finding.severity == "warning" and finding.number < 0.02
    assert set(finding.items) == set(layers)
    assert {member.name for member in finding.members if member.what == "tensor"} == {
        f"h.{layer}.attn.c_proj.weight" for layer in layers
    }
    (removed,) = audit.removed
    assert abs(removed.least.directions[:, 0] @ DIRECTION) > 0.99 and "along it: " in finding.text
    exact = [base[f"h.{layer}.attn.c_proj.weight"].astype(np.float64) for layer in range(LAYERS) if layer not in layers]
    energies = [float(((w @ removed.least.directions) ** 2).sum() / ((w**2).sum() / D)) for w in exact]
    assert [removed.energies[i] for i in range(LAYERS) if i not in layers] == pytest.approx(energies, rel=0.02)


def test_most_of_a_direction_may_be_left(base: Weights, tmp_path: Path) -> None:
    (finding,) = removals(audited(tmp_path / "most", cut(base, range(LAYERS), 0.8)))
    assert finding.number == pytest.approx(0.2, abs=0.05)
    assert not removals(audited(tmp_path / "half", cut(base, range(LAYERS), 0.3)))


def test_nothing_is_found_where_nothing_was_removed(base: Weights, tmp_path: Path) -> None:
    audit = audited(tmp_path, base, all_tensors=True)
    assert not removals(audit) and not audit.removed


@pytest.mark.parametrize("factor", mostly_checked([0.0, 1e-4, 1e-3, 0.1, 1e3], fast=[1e-3]))
@pytest.mark.parametrize("dimensions", [[40], [3, 17, 40, 41, 95]])
@pytest.mark.parametrize("layers", [range(LAYERS), range(6)])
def test_scaling_dimensions_of_a_layer_norm_model_is_no_removal(
    base: Weights, tmp_path: Path, factor: float, dimensions: list[int], layers
) -> None:
    """As in trained models, hardly anything is written along the vector of ones; it is no single direction then."""
    weights = {name: w - w.mean(axis=1, keepdims=True) if "c_proj.weight" in name else w for name, w in base.items()}
    for layer in layers:
        weights[f"h.{layer}.attn.c_proj.weight"][:, dimensions] *= np.float32(factor)
    audit = audited(tmp_path, weights)
    assert not removals(audit) and not any("removed" in note for note in audit.notes)


@pytest.mark.parametrize("factor", [0.0, 1e-3])
def test_a_removed_direction_is_found_beside_a_scaled_dimension(base: Weights, tmp_path: Path, factor: float) -> None:
    weights = {name: w - w.mean(axis=1, keepdims=True) if "c_proj.weight" in name else w for name, w in base.items()}
    weights = cut(weights, range(LAYERS))
    for layer in range(LAYERS):
        weights[f"h.{layer}.attn.c_proj.weight"][:, 40] *= np.float32(factor)
    audit = audited(tmp_path, weights)
    assert len(removals(audit)) == 1
    (removed,) = audit.removed
    elsewhere = np.delete(removed.least.directions[:, 0], 40)
    assert abs(elsewhere @ np.delete(DIRECTION, 40)) > 0.9 * np.linalg.norm(elsewhere)


def test_what_is_read_is_looked_at_with_all_tensors(base: Weights, tmp_path: Path) -> None:
    weights = cut(base, range(LAYERS), name="attn.c_attn")
    assert not removals(audited(tmp_path / "a", weights))
    (finding,) = removals(audited(tmp_path / "b", weights, all_tensors=True))
    assert "what attention reads" in finding.text and len(finding.items) == LAYERS


@pytest.mark.parametrize("kept", [removed_directions.KEPT, 0])
def test_weights_that_are_not_finite_are_left_out(base: Weights, tmp_path: Path, monkeypatch, kept: int) -> None:
    monkeypatch.setattr(removed_directions, "KEPT", kept)
    weights = {name: np.full_like(w, np.nan) if "c_proj.weight" in name else w for name, w in base.items()}
    audit = audited(tmp_path, weights)
    assert not removals(audit) and any("removed" in note and "finite" in note for note in audit.notes)


def test_a_layer_that_is_not_finite_hides_nothing_of_the_others(base: Weights, tmp_path: Path) -> None:
    weights = cut(base, range(LAYERS))
    weights["h.0.attn.c_proj.weight"][3, 4] = np.nan
    (finding,) = removals(audited(tmp_path, weights))
    assert set(finding.items) == set(range(1, LAYERS))


def test_why_nothing_can_be_said(base: Weights, tmp_path: Path) -> None:
    narrow = audited(tmp_path / "narrow", gpt2_weights(n_layers=4, d=48, vocab=50))
    assert any("the stream has 48 dimensions" in note for note in narrow.notes)
    layer_three = audited(tmp_path / "one", base, layers=[3])
    assert any("fewer than two of these layers" in note for note in layer_three.notes)
    model = ws.open_model(write_checkpoint(tmp_path / "bits", base))
    (side,) = removed_directions.sides(model, model.attention_layers, everything=False)
    assert not removed_directions.judge(side, D, centred=True).why
    coarse = type("Coarse", (removed_directions.StreamSide,), {"bits": 2.6})(side.what, side.writes, side.layers)
    hidden = "rounding to 2.6 bits leaves more along any direction than a removal would"
    assert removed_directions.judge(coarse, D, centred=True).why == hidden


def test_rounding_is_blamed_only_where_weights_were_rounded(base: Weights, tmp_path: Path) -> None:
    """In float32, W_O of half the rank leaves many directions unwritten, and one more would not be noticed."""
    half = np.linalg.qr(RNG.standard_normal((D, D // 2)))[0]
    weights = {name: (w @ half @ half.T).astype(np.float32) if "c_proj.weight" in name else w
               for name, w in base.items()}  # fmt: skip
    (note,) = [note for note in audited(tmp_path, weights).notes if "cannot be told" in note]
    assert note.endswith("layers write next to nothing along so many directions that one more would not stand out.")


def test_a_gram_matrix_that_rounding_makes_indefinite_has_a_root() -> None:
    w = np.random.default_rng(6).standard_normal((40, 300)).astype(np.float32)
    gram = w.T @ w / 40
    values, _ = least_eigenvectors(gram - 1e-5 * np.eye(300, dtype=np.float32), 10)
    assert np.abs(values).max() < 1e-3 and SHIFT < 1e-5


@pytest.mark.check
def test_a_cut_by_a_public_tool_is_found(tmp_path: Path) -> None:
    """What ablate-llm writes, in bfloat16: all matrices that write into the stream, the embedding included."""
    torch = pytest.importorskip("torch", reason="ablate-llm needs PyTorch")
    transformers = pytest.importorskip("transformers", reason="ablate-llm needs transformers")
    tool = pytest.importorskip("ablate.weights", reason="ablate-llm is not installed")
    sizes = {"hidden_size": D, "intermediate_size": 2 * D, "num_attention_heads": 4, "num_hidden_layers": 6}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, num_key_value_heads=4, **sizes))
    tool.bake_direction(model, torch.tensor(DIRECTION))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    audit = ws.audit(tmp_path, directions=0, all_tensors=True)
    writers = [removed for removed in audit.removed if removed.side.writes]
    assert len(writers) == len(audit.removed) == 2 and all(removed.layers == [*range(6)] for removed in writers)
    assert all(abs(removed.least.directions[:, 0] @ DIRECTION) > 0.99 for removed in writers)
