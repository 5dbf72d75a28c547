"""Which of two related checkpoints came first: claimed only where one can be recomputed from the other."""

from dataclasses import replace

import numpy as np
import pytest

import weightscope as ws
from analyses.derivations import DERIVATIONS, random_for
from analyses.named_parts import read_weights, write_weights


def written(weights, folder):
    write_weights(weights, folder)
    return folder


def noisy(weights, seed, share):
    """With noise of this share of the size of each matrix, as training would leave."""
    rng = np.random.default_rng(seed)
    matrices = sorted(((part, w) for part, w in weights.parts.items() if w.ndim == 2), key=str)
    return weights.but({part: w + share * w.std() * rng.standard_normal(w.shape) for part, w in matrices})


def redrawn_but(weights, *kept):
    """Another model of the same sizes, except for the parts whose names begin so."""
    rng = random_for(weights, 77)
    return weights.but({part: (w.ndim == 1) * w.mean() + w.std() * rng.standard_normal(w.shape)
                        for part, w in weights.parts.items() if not part[1].startswith(kept)})  # fmt: skip


@pytest.mark.parametrize("name", ["bfloat16", "float16", "Q4_0", "Q8_0", "4 bits, rows", "middle layers removed"])
def test_a_lossy_map_shows_which_came_first(base, made, name):
    folder, _ = made(name)
    assert ws.lineage(folder, base).verdict == "derived"
    backwards = ws.lineage(base, folder)
    assert backwards.verdict == "related"
    if name != "middle layers removed":
        assert "so base came first" in backwards.lead


def test_pruned_zeros_and_dropped_singular_values_show_which_came_first(base, tmp_path):
    weights = read_weights(base)
    pruned = {part: np.where(np.abs(w) < np.median(np.abs(w)), 0, w) for part, w in weights.within("up.w", "down.w")}
    cut = {}
    for part, w in weights.within("up.w", "down.w"):
        u, s, vt = np.linalg.svd(w, full_matrices=False)
        cut[part] = (u[:, :40] * s[:40]) @ vt[:40]
    for name, parts in (("pruned", pruned), ("rank cut", cut)):
        folder = written(weights.but(parts), tmp_path / name.replace(" ", "-"))
        found = ws.lineage(folder, base)
        assert (found.verdict, [kind.kind for kind in found.kinds]) == ("derived", [name])
        assert ws.lineage(base, folder).verdict == "related"


@pytest.mark.parametrize(
    "name", ["copy", "drift 3 %", "rank 4, all", "vocabulary cut", "vocabulary extended", "basis of heads",
             "stream rotated", "depth upscaled", "heads permuted"],
)  # fmt: skip
def test_what_reads_the_same_both_ways_is_related(base, made, name):
    folder, _ = made(name)
    for pair in ((folder, base), (base, folder)):
        found = ws.lineage(*pair)
        assert found.verdict == "related"
        assert "the weights do not show which came first" in found.lead


def test_relatives_share_an_origin_and_nothing_more(base, tmp_path):
    """Two fine-tunes of one base; so are two models that were trained from the same initial weights."""
    weights = read_weights(base)
    one, other = (written(noisy(weights, seed, 0.3), tmp_path / str(seed)) for seed in (1, 2))
    assert ws.lineage(one, other).verdict == ws.lineage(other, one).verdict == "related"


def test_an_upcast_loses_nothing(base, made, tmp_path):
    folder, _ = made("bfloat16")
    same = written(replace(read_weights(folder), dtype="float32"), tmp_path / "upcast")
    assert ws.lineage(same, folder).verdict == ws.lineage(folder, same).verdict == "related"


def test_layers_that_were_added_near_the_identity_prove_no_removal(base, tmp_path):
    """A deeper model that was made of a shallow one: its extra layers are copies that write nothing yet."""
    weights = read_weights(base)
    deeper = DERIVATIONS["each layer twice"].change(weights)
    silent = {part: 1e-3 * w for part, w in deeper.within("o.w", "down.w") if part[0] % 2}
    grown = written(deeper.but(silent), tmp_path / "grown")
    assert ws.lineage(base, grown).verdict == "related"


def test_everything_but_attention_is_evidence(base, tmp_path):
    folder = written(redrawn_but(read_weights(base), "tokens", "up", "down", "gate", "norm"), tmp_path / "taken")
    found = ws.lineage(folder, base)
    assert found.verdict == "related"
    assert "No shared attention heads were found" in found.lead and "equal, value by value" in found.lead


def test_embeddings_that_were_copied_and_tuned_are_evidence(base, tmp_path):
    weights = read_weights(base)
    other = redrawn_but(weights, "tokens")
    rng = np.random.default_rng(3)
    moved = {part: w + 0.05 * w.std() * rng.standard_normal(w.shape) for part, w in weights.within("tokens")}
    assert ws.lineage(written(other.but(moved), tmp_path / "copied"), base).verdict == "related"


def test_strangers_are_unrelated_only_after_every_part_was_compared(base, tmp_path):
    folder = written(redrawn_but(read_weights(base), "nothing"), tmp_path / "stranger")
    found = ws.lineage(folder, base)
    assert found.verdict == "unrelated"
    assert "Feed-forward networks, embeddings and norms were compared too" in found.lead
