"""Directions removed with any strength: `compare` and `lineage` give tensors, direction and strength."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import weightscope as ws
from tests.support.plants.named_parts import read_weights, write_weights
from tests.support.slow import mostly_checked
from tests.support.small_llama import write_small_llama
from tests.support.stacked_experts import saved, stacked_and_separate
from weightscope.pairs.changes.all_tensors import TensorChanges, compare_tensors

Weights = dict[str, np.ndarray]
Change = Callable[[str, np.ndarray], np.ndarray]
LAYERS, WIDTH = 5, 64
RNG = np.random.default_rng(11)
V = np.linalg.qr(RNG.standard_normal((WIDTH, 1)))[0][:, 0]
WRITERS = ("o_proj.weight", "down_proj.weight")
KERNEL = (0.2, 0.6, 1.0, 1.3, 0.7)  # strengths over depth


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("directions") / "base", layers=LAYERS)


def edited(base: Path, folder: Path, change: Change, dtype: str = "float32") -> Path:
    """The base with every tensor changed, stored in another dtype."""
    weights = {name: change(name, w.astype(np.float64)) for name, w in load_file(base / "model.safetensors").items()}
    config = json.loads((base / "config.json").read_text())
    folder.mkdir()
    saved(folder / "float32", {name: w.astype(np.float32) for name, w in weights.items()}, config)
    if dtype == "float32":
        return folder / dtype
    write_weights(replace(read_weights(folder / "float32"), dtype=dtype), folder / dtype)
    return folder / dtype


def layer_of(name: str) -> int:
    return int(name.split(".layers.")[1].split(".")[0])


def cut(strengths: tuple[float, ...], *more: str) -> Change:
    """Take a share of the direction out of what layers write, by layer, and out of other tensors wholly or as in 0."""

    def change(name: str, w: np.ndarray) -> np.ndarray:
        if name.endswith(WRITERS):
            return w - strengths[layer_of(name)] * np.outer(V, V @ w)
        return w - strengths[0] * np.outer(w @ V, V) if name.endswith(more or ("-",)) else w

    return change


def by_hand(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """Direction and strength by a full decomposition in float64: the witness, which shares no code."""
    u, _, vt = np.linalg.svd(b.astype(np.float64) - a)
    fits = []
    for direction, before, after in ((vt[0], a @ vt[0], b @ vt[0]), (u[:, 0], u[:, 0] @ a, u[:, 0] @ b)):
        (kept,), (off,), *_ = np.linalg.lstsq(before[:, None].astype(np.float64), after.astype(np.float64), rcond=None)
        fits.append((float(off) / float(((after - before) ** 2).sum()), direction, 1 - float(kept)))
    _, direction, strength = min(fits, key=lambda fit: fit[0])
    return direction, strength


STRENGTHS = [((s,) * LAYERS, "float32") for s in (0.1, 0.5, 0.8, 1.0, 1.3, 2.0)]
STRENGTHS += [(strengths, dtype) for strengths in ((1.0,) * LAYERS, KERNEL) for dtype in ("bfloat16", "float16")]
FEW = [((1.0,) * LAYERS, "float32"), ((2.0,) * LAYERS, "float32"), (KERNEL, "bfloat16")]


@pytest.mark.parametrize("case", mostly_checked(STRENGTHS, fast=FEW), ids=str)
def test_any_strength_is_found_in_every_tensor(base: Path, tmp_path: Path, case) -> None:
    strengths, dtype = case
    change = cut(strengths, "embed_tokens.weight")
    suspect = edited(base, tmp_path / "cut", change, dtype)
    models = [ws.open_model(path) for path in (base, suspect)]
    comparison = ws.compare(*models, all_tensors=True)
    (finding,) = [f for f in comparison.findings if "direction" in f.kind]
    assert finding.kind == "removed_direction" and len(finding.members) == 2 * LAYERS + 1
    for member in finding.members:
        expected = strengths[member.layer or 0]
        a, b = (model.checkpoint[member.name].weights() for model in models)
        direction, strength = by_hand(a, np.asarray(b, np.float32))
        assert member.number == pytest.approx(expected, abs=4e-3) == pytest.approx(strength, abs=4e-3)
        assert abs(direction @ V) > 0.999
    lineage = ws.lineage(suspect, base)
    table = lineage.along.directions
    assert table is not None and set(table["direction"]) == {"removed 1"} and len(table) == 2 * LAYERS + 1
    (vector,) = (lineage.along.direction_vectors or {}).values()
    assert abs(vector @ V) > 0.9999
    wholly = set(strengths) == {1.0}
    assert lineage.verdict == ("derived" if wholly else "related")
    how = {(0.1,): " in part", (0.5,): " in part", (0.8,): " in part", (1.0,): "", (1.3,): " past zero",
           (2.0,): " by reflection"}.get(tuple(set(strengths)), " unevenly")  # fmt: skip
    named = {kind.kind: kind.layers for kind in lineage.kinds}
    assert named[f"direction removed{how} (low-rank update)"] == [*range(LAYERS)]
    assert "fine-tuned" not in named


@pytest.mark.parametrize(("strength", "first"), [(1.0, True), (0.5, False), (1.3, False), (2.0, False)])
def test_only_a_whole_removal_shows_which_came_first(base: Path, tmp_path: Path, strength: float, first: bool) -> None:
    """Tried backwards, the original as the suspect: every other strength can be undone by one."""
    lineage = ws.lineage(base, edited(base, tmp_path / "cut", cut((strength,) * LAYERS)))
    assert lineage.verdict == "related" and ("so base came first" in lineage.lead) is first


@pytest.mark.parametrize("all_tensors", [False, True])
def test_another_direction_in_every_layer_is_one_finding(base: Path, tmp_path: Path, all_tensors: bool) -> None:
    directions = np.linalg.qr(RNG.standard_normal((WIDTH, LAYERS)))[0].T

    def change(name: str, w: np.ndarray) -> np.ndarray:
        if not name.endswith(WRITERS):
            return w
        v = directions[layer_of(name)]
        return w - 1.3 * np.outer(v, v @ w)

    comparison = ws.compare(base, edited(base, tmp_path / "cut", change), all_tensors=all_tensors)
    (finding,) = [f for f in comparison.findings if "direction" in f.kind]
    assert f"{LAYERS} directions" in finding.text and "strength 1.3" in finding.text
    vectors = list((comparison.along.direction_vectors or {}).values())
    assert np.abs(np.array(vectors) @ directions.T).max(axis=1) == pytest.approx(np.ones(LAYERS), abs=1e-6)


def rank_one(name: str, w: np.ndarray) -> np.ndarray:
    """A LoRA of rank one, of the size of a removal."""
    if w.ndim < 2:
        return w
    update = np.outer(*(RNG.standard_normal(n) for n in w.shape))
    return w + np.linalg.norm(w) / 8 * update / np.linalg.norm(update)


def added_along(name: str, w: np.ndarray) -> np.ndarray:
    """The same direction for all, but nothing of what the matrix has there."""
    return w + np.outer(V, RNG.standard_normal(w.shape[1])) / 8 if name.endswith(WRITERS) else w


def tuned(name: str, w: np.ndarray) -> np.ndarray:
    return w + 0.02 * w.std() * RNG.standard_normal(w.shape)


def amplified(name: str, w: np.ndarray) -> np.ndarray:
    return cut((-1.0,) * LAYERS)(name, w)


CHANGES: dict[str, tuple[Change, set[str]]] = {
    "rank one": (rank_one, set()), "tuned": (tuned, set()), "scaled": (lambda _, w: 0.9 * w, set()),
    "added along one": (added_along, {"shared_direction"}), "amplified": (amplified, {"shared_direction"}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", mostly_checked(["float32", "bfloat16"], fast=["bfloat16"]))
@pytest.mark.parametrize("name", CHANGES)
def test_no_other_change_is_called_a_removal(base: Path, tmp_path: Path, name: str, dtype: str) -> None:
    change, kinds = CHANGES[name]
    suspect = edited(base, tmp_path / "other", change, dtype)
    comparison = ws.compare(base, suspect, all_tensors=True)
    assert {f.kind for f in comparison.findings if "direction" in f.kind} == kinds
    lineage = ws.lineage(suspect, base)
    assert not any("direction removed" in kind.kind for kind in lineage.kinds)
    assert "projecting" not in lineage.lead


def of_experts(stacked: ws.Model, folder: Path, strength: float) -> ws.Model:
    """The stack with a direction removed from what experts write, whose matrices are (experts, in, out)."""
    v = V[: stacked.config.d_model] / np.linalg.norm(V[: stacked.config.d_model])
    weights = {name: np.asarray(tensor.weights()) for name, tensor in stacked.checkpoint.items()}
    for name, w in weights.items():
        if name.endswith("experts.down_proj"):
            weights[name] = (w - strength * (w @ v)[..., None] * v).astype(np.float32)
        if name.endswith("experts.gate_up_proj"):
            weights[name] = (w - strength * np.einsum("d,edf->ef", v, w)[:, None] * v[:, None]).astype(np.float32)
    return saved(folder, weights, dict(stacked.checkpoint.config))


@pytest.mark.parametrize("strength", [0.3, 1.0, 1.3])
def test_experts_lose_a_direction_stacked_or_not(tmp_path: Path, strength: float) -> None:
    stacked, separate = stacked_and_separate(tmp_path, count=3, inner=8)
    after = of_experts(stacked, tmp_path / "cut", strength)
    for before, tensors in ((stacked, 2), (separate, 9)):  # by layer: both stacks, or gate, up and down of each expert
        (shared,) = compare_tensors(before, after).shared
        assert shared.is_removal and len(shared.members) == tensors * stacked.config.n_layers
        assert list(shared.strengths.values()) == pytest.approx([strength] * len(shared.members), abs=1e-3)


def test_tables_and_json_name_direction_layer_and_strength(base: Path, tmp_path: Path) -> None:
    suspect = edited(base, tmp_path / "cut", cut(KERNEL))
    ws.compare(base, suspect).write(tmp_path / "compare")
    lineage = ws.lineage(suspect, base)
    lineage.write(tmp_path / "lineage")
    for folder, tensors in (("compare", LAYERS), ("lineage", 2 * LAYERS)):  # without --all only what heads are made of
        lines = (tmp_path / folder / "directions.csv").read_text().splitlines()
        assert lines[0].startswith("direction,tensor,layer,strength,left,cosine") and len(lines) == tensors + 1
        with np.load(tmp_path / folder / "directions.npz") as arrays:
            assert abs(arrays["removed 1"] @ V) == pytest.approx(1, abs=1e-6)
    records = lineage.as_json()["directions"]
    assert {r["layer"]: round(r["strength"], 4) for r in records} == dict(enumerate(KERNEL))
    (kind,) = [kind for kind in lineage.kinds if "direction" in kind.kind]
    assert "strengths 0.2 to 1.3" in kind.evidence


def test_what_is_not_removed_has_no_table(base: Path) -> None:
    nothing = TensorChanges([])
    assert nothing.directions is nothing.direction_vectors is None
    assert ws.lineage(base, base).as_json()["directions"] == []
