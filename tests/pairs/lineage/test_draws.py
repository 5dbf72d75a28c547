"""What is said of two checkpoints whose weights are at hand does not depend on which probes were drawn."""

from itertools import combinations

import numpy as np
import pytest

import weightscope as ws
from tests.support.plants.derivations import redraws
from tests.support.plants.named_parts import read_weights
from tests.support.slow import mostly_checked
from tests.support.small_llama import drawn, noisy, write_small_llama, written
from tests.support.tiny_models import FIXTURES, changed
from weightscope.pairs.lineage.differences import structure_kinds
from weightscope.pairs.lineage.matching import matches
from weightscope.pairs.lineage.probes import drawn_probes
from weightscope.pairs.lineage.sketches import fingerprint
from weightscope.pairs.lineage.verdict import candidates, judge

EVERY = sorted(path.parent.name for path in FIXTURES.glob("*/model.safetensors"))


def said_of(suspect, base, nonce):
    """The route, layers, heads and kinds that one draw shows, and its match."""
    ((x, y),) = candidates(suspect, [base], nonce=nonce).pairs
    match = judge(x, y).match
    if match is None:
        return None, None
    kinds = [kind.kind for kind in structure_kinds(x, y, match)]
    return (match.route, match.layers, [order.tolist() for order in match.heads], kinds), match


@pytest.mark.parametrize("fixture", mostly_checked(EVERY, fast=["gpt2", "llama"], share=12))
def test_families_show_the_same_with_every_draw(fixture, tmp_path):
    rng = np.random.default_rng(0)
    moved = changed(fixture, tmp_path / "moved", lambda w: w + 0.2 * w.std() * rng.standard_normal(w.shape))
    stranger = changed(fixture, tmp_path / "other", lambda w: w.mean() + w.std() * rng.standard_normal(w.shape))
    for tower in [name for name, stack in ws.open_model(FIXTURES / fixture).stacks.items() if not stack.refusal]:
        base = ws.open_model(FIXTURES / fixture, tower=tower)
        for folder in (FIXTURES / fixture, moved, stranger):
            suspect = ws.open_model(folder, tower=tower)
            shown = [said_of(suspect, base, f"draw {k}")[0] for k in range(5)]
            assert all(each == shown[0] for each in shown), (tower, folder.name)
            assert folder is not stranger or shown[0] is None, tower


@pytest.mark.check
@pytest.mark.parametrize("seed", [2, 4])
def test_retrained_layers_are_never_called_counterparts(base, tmp_path, seed):
    """Sketches of a stranger's layer are within reach of chance once in 36 draws; its weights are not."""
    weights = read_weights(base)
    second = drawn(weights, seed)
    mixed = weights.but({part: w for part, w in second.parts.items() if part[0] in (1, 3)})
    folder = written(mixed, tmp_path / "mixed")
    for k in range(12):
        assert said_of(ws.open_model(folder), ws.open_model(base), f"n{k}")[0][1] == [0, None, 2, None, 4], k


def test_likeness_is_the_cosine_of_maps(base, tmp_path):
    """Of dense matrices without their traces; z and p follow, and are the same numbers with every draw."""
    folder = written(noisy(read_weights(base), 1, 0.5), tmp_path / "moved")
    models = [ws.open_model(each) for each in (folder, base)]
    matches = [said_of(*models, f"draw {k}")[1] for k in range(3)]
    for layer in models[0].attention_layers:
        cosines = []
        for heads in zip(*(model.layers[layer].heads for model in models), strict=True):
            for name in ("qk", "vo"):
                maps = [getattr(head, name) for head in heads]
                a, b = (w.left.astype(np.float64) @ w.right.T.astype(np.float64) for w in maps)
                a, b = (w - np.eye(len(w)) * w.trace() / len(w) for w in (a, b))
                cosines.append((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
        assert matches[0].likeness[layer, layer] == pytest.approx(np.mean(cosines), abs=1e-12)
    for match in matches[1:]:
        assert match.log_p == matches[0].log_p
        np.testing.assert_array_equal(match.z, matches[0].z)


@pytest.mark.check  # 12 models, 66 pairs, 8 draws
def test_strangers_are_not_accused_by_any_draw(tmp_path):
    """Redraws with a model's spectra, values or sizes: 528 judgements."""
    weights, judged = read_weights(write_small_llama(tmp_path / "base", layers=2)), 0
    folders = [written(made, tmp_path / f"{name} {seed}") for seed in range(4) for name, made in redraws(weights, seed)]
    models = [ws.open_model(folder) for folder in folders]
    for k in range(8):
        probes = drawn_probes(models, f"draw {k}")
        prints = [fingerprint(model, probes) for model in models]
        for x, y in combinations(prints, 2):
            sure = [match for match in matches(x, y).values() if match.is_sure]
            judged += 1
            assert not sure, (x.name, y.name, k)
    assert judged == 528
