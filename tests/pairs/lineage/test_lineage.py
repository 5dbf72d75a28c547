"""Where a checkpoint comes from: verdicts, kinds and layers of checkpoints that were made on purpose."""

import json
import os
import shutil
from dataclasses import replace
from random import Random

import numpy as np
import pytest

import weightscope as ws
from benchmarks.synthetic import Sizes, write
from tests.support.plants.derivations import DERIVATIONS, averaged, drifted, random_for, redrawn
from tests.support.plants.kinds import CASES, initial, judged, plants_of, tuned
from tests.support.plants.named_parts import read_weights, write_gguf, write_weights
from tests.support.slow import mostly_checked
from tests.support.small_llama import drawn, noisy, write_small_llama, written
from tests.support.tiny_models import FIXTURES
from tests.support.two_layers import TWO_LAYERS
from weightscope.cli import main
from weightscope.pairs.deeds import recomputed
from weightscope.pairs.lineage.neurons import counterparts_of, networks_of
from weightscope.pairs.lineage.sketches import fingerprint

FOUND = ("derived", "related")  # an origin in common; `derived` where the direction shows
PRESERVING = [name for name, made in DERIVATIONS.items() if made.preserving and "upcycled" not in name]


def layers_of(lineage):
    return [None if np.isnan(layer) else int(layer) for layer in lineage.alignment["base_layer"]]


@pytest.mark.parametrize("seed", mostly_checked(range(8), fast=[0, 5]))
def test_changes_that_keep_the_function_never_change_the_verdict(base, made, seed):
    folder, layers = made(*Random(seed).sample(PRESERVING, 3))
    lineage = ws.lineage(folder, base)
    assert (lineage.verdict in FOUND, layers_of(lineage)) == (True, layers)


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["copy"], {"same bytes"}),
        (["bfloat16"], {"cast to BF16"}),
        (["8 bits, rows"], {"quantised (255 values in a row)"}),
        (["rank 4, all"], {"low-rank update"}),
        (["depth upscaled", "drift 10 %"], {"layers repeated", "fine-tuned"}),
        (["middle layers removed", "bfloat16"], {"layers removed", "cast to BF16"}),
        (["two layers swapped"], {"layers reordered"}),
        (["stream rotated"], {"stream rotated", "norms folded"}),
        (["stream permuted"], {"stream permuted"}),
        (["heads permuted"], {"heads permuted"}),
        (["key-value heads in pairs"], {"heads grouped"}),
        (["basis of heads"], {"gauge: basis of heads changed"}),
        (["upcycled"], {"experts copied from one network"}),
        (["vocabulary cut"], {"vocabulary cut"}),
    ],
)
def test_each_kind_is_named(base, made, names, kinds):
    folder, layers = made(*names)
    lineage = ws.lineage(folder, base)
    named = {kind.kind for kind in lineage.kinds}
    # Gains of the small model are all one, so that folding them changes nothing.
    assert kinds - {"norms folded"} <= named <= kinds
    assert layers_of(lineage) == layers


def test_the_drift_of_each_layer_is_that_of_its_maps(base, made):
    folder, _ = made("drift 10 %")
    lineage = ws.lineage(folder, base)
    before, after = ws.open_model(base), ws.open_model(folder)
    for layer, drift in zip(lineage.alignment["layer"].tolist(), lineage.alignment["drift"], strict=True):
        changes = []
        for h in range(4):
            for name in ("qk", "vo"):
                a, b = (getattr(m.layer(layer).head(h), name).dense().astype(np.float64) for m in (before, after))
                changes.append(np.linalg.norm(b - a) / np.linalg.norm(a))
        assert drift == pytest.approx(np.median(changes), rel=1e-4)


@pytest.fixture
def stranger(base, tmp_path):
    """Another model of the same config, none of whose tensors are the base's."""
    folder = tmp_path / "stranger"
    weights = read_weights(base)
    rng = random_for(weights, 99)
    drawn = {part: w.std() * rng.standard_normal(w.shape) for part, w in weights.parts.items() if w.ndim == 2}
    gains = {part: rng.permutation(w) for part, w in weights.parts.items() if w.ndim == 1}
    write_weights(weights.but(drawn | gains), folder)
    return folder


def test_a_stranger_of_the_same_config_is_not_accused(base, stranger):
    lineage = ws.lineage(stranger, base)
    assert (lineage.verdict, lineage.base, lineage.kinds) == ("unrelated", None, [])
    assert lineage.p_value > 1e-3
    assert np.isnan(lineage.alignment["base_layer"]).all()


def test_other_width_and_vocabulary_are_undecided(base):
    lineage = ws.lineage(TWO_LAYERS, base)
    assert lineage.verdict == "undecided"
    assert "width" in lineage.doubts[0]


def test_shares_of_a_merge_are_found_among_other_bases(base, stranger, tmp_path):
    weights = read_weights(base)
    tuned = drifted(weights, 0.1)
    write_weights(tuned, tmp_path / "tuned")
    write_weights(averaged([weights, tuned, read_weights(str(stranger))], [0.3, 0.5, 0.2]), tmp_path / "merged")
    lineage = ws.lineage(tmp_path / "merged", [base, tmp_path / "tuned", stranger])
    assert lineage.weights == pytest.approx({"base": 0.3, "tuned": 0.5, "stranger": 0.2}, abs=0.01)
    assert [kind.kind for kind in lineage.kinds] == ["merge"]


def test_layers_of_two_bases_are_told_apart(base, stranger, tmp_path):
    weights, second = read_weights(base), read_weights(str(stranger))
    taken = {part: (second if part[0] in (3, 4) else weights).parts[part] for part in weights.parts}
    write_weights(weights.but(taken), tmp_path / "stacked")
    lineage = ws.lineage(tmp_path / "stacked", [base, stranger])
    assert lineage.alignment["base"].tolist() == ["base"] * 3 + ["stranger"] * 2
    assert lineage.weights == {"base": 0.6, "stranger": 0.4}
    assert "merge" in lineage.kinds[0].kind


@pytest.mark.parametrize("name", ["drift 10 %", "stream rotated", "depth upscaled", "heads permuted", "bfloat16"])
def test_fingerprints_give_the_verdict_and_the_layers_of_weights(base, made, tmp_path, name):
    folder, layers = made(name)
    for source, file in ((base, "base.wsf"), (folder, "suspect.wsf")):
        fingerprint(source).save(tmp_path / file)
    lineage = ws.lineage(tmp_path / "suspect.wsf", tmp_path / "base.wsf")
    assert (lineage.verdict, layers_of(lineage)) == ("related", layers)


def test_the_nearest_of_a_registry_is_found(base, stranger, made, tmp_path):
    registry = tmp_path / "registry"
    registry.mkdir()
    for k in range(12):
        weights = read_weights(base)
        rng = random_for(weights, 200 + k)
        second = weights.but(
            {p: w.std() * rng.standard_normal(w.shape) for p, w in weights.parts.items() if w.ndim == 2}
        )
        write_weights(second, tmp_path / "other")
        fingerprint(tmp_path / "other").save(registry / f"other-{k}.wsf")
    fingerprint(base).save(registry / "the-base.wsf")
    folder, _ = made("heads permuted", "drift 30 %")
    lineage = ws.lineage(folder, registry)
    assert (lineage.verdict, lineage.base) == ("related", "base")
    assert lineage.comparisons == 13 * 3
    assert ws.lineage(stranger, registry).verdict == "undecided"  # fingerprints hold only heads


def test_a_direction_removed_from_what_layers_write_is_named(base, tmp_path):
    weights = read_weights(base)
    v = np.random.default_rng(5).standard_normal(weights.size("width"))
    v /= np.linalg.norm(v)
    cut = {part: w - np.outer(w @ v, v) for part, w in weights.within("o.w", "down.w") if part[0] in (1, 2, 3)}
    write_weights(weights.but(cut), tmp_path / "cut")
    lineage = ws.lineage(tmp_path / "cut", base)
    kinds = {kind.kind: kind.layers for kind in lineage.kinds}
    assert kinds == {"low-rank update": [1, 2, 3], "direction removed (low-rank update)": [1, 2, 3]}
    assert lineage.verdict == "derived" and "projecting out a direction" in lineage.lead


def test_bases_of_one_name_are_told_apart(base, stranger, tmp_path):
    for name, source in (("a", base), ("b", stranger)):
        shutil.copytree(source, tmp_path / name / "model")
    lineage = ws.lineage(base, [tmp_path / "a" / "model", tmp_path / "b" / "model"])
    assert lineage.base == str(tmp_path / "a" / "model")
    assert [compared.base.name for compared in lineage.compared] == [str(tmp_path / name / "model") for name in "ab"]


def test_fingerprint_in_a_checkpoint_folder_makes_no_registry(base, tmp_path):
    shutil.copytree(base, tmp_path / "model")
    fingerprint(base).save(tmp_path / "model" / "base.wsf")
    lineage = ws.lineage(base, tmp_path / "model")
    assert [kind.kind for kind in lineage.kinds] == ["same bytes"]


CONTRACT = {"verdict", "base", "p_value", "kinds", "weights"}


def test_the_command_writes_what_it_prints(base, made, tmp_path, capsys):
    folder, _ = made("two layers swapped")
    main(["lineage", str(folder), str(base), "--out", str(tmp_path / "out"), "--json"], standalone_mode=False)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "lineage.json").read_text())
    assert set(printed) >= CONTRACT
    assert set(printed["kinds"][0]) == {"kind", "layers", "evidence", "strength"}
    header, *rows = (tmp_path / "out" / "alignment.csv").read_text().splitlines()
    assert header.startswith("layer,base,base_layer,likeness,z")
    assert [row.split(",")[2] for row in rows] == ["0", "3", "2", "1", "4"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "layers reordered" in page and "<script src" not in page and "<link" not in page


def test_the_command_makes_fingerprints_of_a_list(base, stranger, tmp_path, capsys):
    (tmp_path / "list.txt").write_text(f"{base}\n{stranger}\n{tmp_path / 'absent'}\n")
    with pytest.raises(SystemExit, match="2"):
        main(["fingerprint", str(tmp_path / "list.txt"), "--out", str(tmp_path / "prints")], standalone_mode=False)
    assert sorted(path.name for path in (tmp_path / "prints").iterdir()) == ["base.wsf", "stranger.wsf"]
    assert "absent" in capsys.readouterr().err


def test_no_base_is_one_clear_error():
    with pytest.raises(ws.CheckpointError, match="at least one base"):
        ws.lineage(TWO_LAYERS, [])


def test_stranger_drawn_anew_is_not_undecided(base, tmp_path):
    write_weights(redrawn(drifted(read_weights(base), 1.0)), tmp_path / "redrawn")
    assert ws.lineage(tmp_path / "redrawn", base).verdict != "undecided"


@pytest.mark.parametrize(
    "seed", mostly_checked(range(4), fast=[0])
)  # what is left of a fit with two copies depends on rounding
def test_base_given_twice_is_no_merge(base, tmp_path, seed):
    folder = written(drawn(read_weights(base), seed), tmp_path / "model")
    shutil.copytree(folder, tmp_path / "copy")
    assert [kind.kind for kind in ws.lineage(folder, [folder, tmp_path / "copy"]).kinds] == ["same bytes"]


def test_sums_of_what_two_tuned_models_learnt_are_merges(base, tmp_path):
    """Task arithmetic: base + (A - base) - (B - base) and base + (A - base) + (B - base)."""
    weights = read_weights(base)
    a, b = noisy(weights, 1, 0.1), noisy(weights, 2, 0.1)
    folders = [base, written(a, tmp_path / "a"), written(b, tmp_path / "b")]
    for shares in ([1, 1, -1], [-1, 1, 1]):
        lineage = ws.lineage(written(averaged([weights, a, b], shares), tmp_path / "sum"), folders)
        assert lineage.weights == pytest.approx(dict(zip(("base", "a", "b"), shares, strict=True)), abs=0.01)


def test_repeated_key_value_heads_are_no_grid(base, tmp_path):
    few = DERIVATIONS["key-value heads in pairs"].change(read_weights(base))
    copied = {part: np.repeat(w.reshape(len(w), 2, 16), 2, axis=1).reshape(len(w), 64) for part, w in
              few.within("k.w", "v.w")}  # fmt: skip
    folder = written(few.but(copied).resized(kv_heads=4), tmp_path / "own")
    lineage = ws.lineage(folder, written(few, tmp_path / "few"))
    assert (lineage.verdict, [kind.kind for kind in lineage.kinds]) == ("related", ["heads grouped: the base"])


def test_a_change_of_sign_permutes_no_neurons(base, tmp_path):
    weights = read_weights(base)
    turned = weights.but({part: -w for part, w in weights.within("q.w", "k.w", "up.w", "down.w")})
    lineage = ws.lineage(written(turned, tmp_path / "turned"), base)
    assert {kind.kind for kind in lineage.kinds} == {"gauge: basis of heads changed"}


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(layers=24, width=64, heads=4, head_dim=16, kv_heads=4, vocabulary=5, inner=0),
        Sizes(layers=24, width=8, heads=1, head_dim=8, kv_heads=1, vocabulary=400, inner=0),
    ],
    ids=["five tokens", "a stream of 8 dimensions"],
)
def test_strangers_of_few_dimensions_are_not_accused(sizes, tmp_path):
    """Among many layers, some are alike by chance where they are seen through few tokens or in a narrow stream."""
    weights = read_weights(write(tmp_path / "first", sizes))
    first, second = (written(drawn(weights, seed), tmp_path / str(seed)) for seed in (1, 2))
    assert ws.lineage(first, second).verdict not in FOUND
    assert ws.lineage(first, first).verdict == "related"


@pytest.mark.parametrize("seed", mostly_checked(range(6), fast=[0]))
def test_retrained_layers_have_no_counterpart(base, tmp_path, seed):
    weights = read_weights(base)
    second = drawn(weights, seed)
    mixed = weights.but({part: w for part, w in second.parts.items() if part[0] in (1, 3)})
    lineage = ws.lineage(written(mixed, tmp_path / "mixed"), base)
    assert (lineage.verdict, layers_of(lineage)) == ("related", [0, None, 2, None, 4])
    assert {kind.kind for kind in lineage.kinds} == {"layers removed", "layers replaced or added"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes")
def test_pipe_in_a_registry_is_refused(base, tmp_path):
    os.mkfifo(tmp_path / "pipe.wsf")
    for bases in (tmp_path, tmp_path / "pipe.wsf"):
        with pytest.raises(ws.CheckpointError, match="not a regular file"):
            ws.lineage(base, bases)


def test_evidence_of_training_names_what_moved(base, tmp_path):
    weights = read_weights(base)
    moved = weights.but({(2, "up.w"): noisy(weights, 1, 0.1).parts[2, "up.w"]})
    (kind,) = ws.lineage(written(moved, tmp_path / "moved"), base).kinds
    assert (kind.kind, kind.layers) == ("fine-tuned", [2])
    assert "1 other tensor in layers differ by 0.1" in kind.evidence and "Heads" not in kind.evidence


def test_another_tower_is_undecided(tmp_path):
    """A fingerprint says which attention stack it is of; T5's encoder and decoder share nothing but tokens."""
    for tower in ("encoder", "decoder"):
        fingerprint(ws.open_model(FIXTURES / "t5_encoder", tower=tower)).save(tmp_path / f"{tower}.wsf")
    lineage = ws.lineage(tmp_path / "encoder.wsf", tmp_path / "decoder.wsf")
    assert lineage.verdict == "undecided"
    assert "encoder tower was compared with the base's decoder tower" in lineage.doubts[0]


def test_an_empty_name_is_no_registry(base, tmp_path, monkeypatch):
    fingerprint(base).save(tmp_path / "base.wsf")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ws.CheckpointError, match="no such file"):
        ws.lineage(base, "")


def test_fingerprints_alone_do_not_claim_that_nothing_changed(base, made, tmp_path):
    fingerprint(base).save(tmp_path / "base.wsf")
    folder, _ = made("drift 3 %")
    assert "compare the weights" in ws.lineage(folder, tmp_path / "base.wsf").lead


@pytest.mark.parametrize(
    "common",
    [
        lambda w: w + 2 * w.std() if w.ndim == 2 else np.ones_like(w),
        lambda w: np.where(np.arange(w.size) == 7, 60.0, 1.0) if w.ndim == 1 else w,
        lambda w: np.exp(2 * np.random.default_rng(5).standard_normal(w.size)) if w.ndim == 1 else w,
    ],
    ids=["a mean of all weights", "a gain of one dimension", "uneven gains"],
)
def test_traits_of_all_heads_accuse_no_stranger(base, stranger, common, tmp_path):
    """Heads that are not counterparts are alike too then, and the verdict is undecided."""
    folders = [tmp_path / "suspect", tmp_path / "other"]
    for source, folder in zip((base, stranger), folders, strict=True):
        weights = read_weights(source)
        write_weights(weights.but({part: common(w) for part, w in weights.parts.items()}), folder)
    lineage = ws.lineage(*folders)
    assert lineage.verdict == "undecided"
    assert "alike even if they are not counterparts" in lineage.doubts[0]


LOSSY = [
    "bfloat16",
    "float16",
    "4 bits, groups of 32",
    "4 bits, groups of 32, with minima",
    "8 bits, rows",
    "NF4",
    "Q8_0",
    "Q5_0",
    "Q4_0",
    "Q4_1",
    "middle layers removed",
]
BOTH_WAYS = ["copy", "drift 10 %", "rank 4, all", "vocabulary extended", "vocabulary cut", "depth upscaled",
             "heads permuted", "basis of heads", "stream rotated", "neurons permuted", "heads silenced"]  # fmt: skip


@pytest.mark.parametrize("name", mostly_checked(LOSSY, fast=["bfloat16", "NF4", "Q4_0", "middle layers removed"]))
def test_lossy_change_shows_the_direction_and_its_reverse_is_never_derived(base, made, name):
    folder, _ = made(name)
    there, back = ws.lineage(folder, base), ws.lineage(base, folder)
    assert (there.verdict, back.verdict) == ("derived", "related")
    assert " was derived from " in there.lead and " was derived from " not in back.lead
    if "removed" not in name:
        assert "so base came first" in back.lead
        assert not any(kind.kind.startswith(("fine-tuned", "cast to")) for kind in back.kinds)


def as_gguf(weights, path, kind):
    weights.config["max_position_embeddings"] = 64
    write_gguf(weights, path, kind)
    return path


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_gguf_file_whose_values_lie_in_their_cells_was_derived(base, tmp_path, kind):
    """Of one whose every value is nearest on the grid that its block stores, the original came first."""
    file = as_gguf(read_weights(base), tmp_path / "model.gguf", kind)
    there, back = ws.lineage(file, base), ws.lineage(base, file)
    assert (there.verdict, back.verdict) == ("derived", "related")
    assert [[kind.kind for kind in lineage.kinds] for lineage in (there, back)] == [
        [f"quantised (stored as {kind})"],
        ["quantised: the base"],
    ]
    assert "so base came first" in back.lead


def test_values_of_a_gguf_file_in_another_format_lost_nothing(base, tmp_path):
    file = as_gguf(read_weights(base), tmp_path / "model.gguf", "Q4_1")
    wide = written(replace(read_weights(file), dtype="float32"), tmp_path / "wide")
    for pair in ((wide, file), (file, wide)):
        lineage = ws.lineage(*pair)
        assert lineage.verdict == "related"
        assert [kind.kind for kind in lineage.kinds] == ["same values in another format"]


def test_a_quantiser_that_does_not_round_to_the_nearest_proves_nothing(base, tmp_path):
    """As with an importance matrix: some values lie outside their cells; backwards it is no training either."""
    weights = read_weights(base)
    file = as_gguf(weights, tmp_path / "model.gguf", "Q4_1")
    rng = np.random.default_rng(7)
    off = {p: w + 0.03 * w.std() * rng.standard_normal(w.shape) for p, w in weights.parts.items() if w.ndim == 2}
    moved = written(weights.but(off), tmp_path / "moved")
    there, back = ws.lineage(file, moved), ws.lineage(moved, file)
    assert (there.verdict, back.verdict) == ("related", "related")
    assert [kind.kind for kind in there.kinds] == ["quantised (stored as Q4_1)"]
    assert [kind.kind for kind in back.kinds] == ["quantised: the base"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("heads removed", "heads added"),
        ("heads silenced", "heads added"),
        ("upcycled", "experts copied from one network: the base"),
        ("key-value heads in pairs", "heads grouped: the base"),
    ],
)
def test_changes_of_the_base_are_named(base, made, name, kind):
    folder, _ = made(name)
    lineage = ws.lineage(base, folder)
    assert (lineage.verdict, [each.kind for each in lineage.kinds]) == ("related", [kind])
    assert "Nothing differs" not in lineage.lead


def test_tensors_in_only_one_are_a_difference(base, tmp_path):
    weights = read_weights(base)
    parts = {part: w for part, w in weights.parts.items() if part != (None, "unembedding")}
    lineage = ws.lineage(base, written(replace(weights, parts=parts), tmp_path / "less"))
    assert "Nothing differs" not in lineage.lead and "1 more are in only one of the two" in lineage.lead


def test_norms_that_round_to_the_bases_are_not_a_cast(base, made):
    """Gains near one round to the one that they were."""
    folder, _ = made("drift 1 %")
    assert [kind.kind for kind in ws.lineage(base, folder).kinds] == ["fine-tuned"]


@pytest.mark.parametrize("name", mostly_checked(BOTH_WAYS, fast=BOTH_WAYS[::4]))
def test_symmetric_changes_are_related(base, made, name):
    folder, _ = made(name)
    for pair in ((folder, base), (base, folder)):
        lineage = ws.lineage(*pair)
        assert lineage.verdict == "related"
        assert "the weights do not show which came first" in lineage.lead


def test_two_tunes_of_one_base_are_related(base, tmp_path):
    first, second = (written(noisy(read_weights(base), seed, 0.1), tmp_path / str(seed)) for seed in (1, 2))
    assert ws.lineage(first, second).verdict == ws.lineage(second, first).verdict == "related"


def test_an_upcast_loses_nothing(base, tmp_path):
    weights = read_weights(base)
    narrow = written(replace(weights, dtype="bfloat16"), tmp_path / "narrow")
    wide = written(replace(read_weights(narrow), dtype="float32"), tmp_path / "wide")
    assert ws.lineage(wide, narrow).verdict == ws.lineage(narrow, wide).verdict == "related"


def test_small_noise_around_rounded_values_is_not_rounding(base, tmp_path):
    """As after a low-rank update was added and taken away again: rounding gives the other, which came first."""
    narrow = written(replace(read_weights(base), dtype="bfloat16"), tmp_path / "narrow")
    weights = replace(read_weights(narrow), dtype="float32")
    near = weights.but({part: w * np.float32(1 + 2e-7) for part, w in weights.parts.items() if w.ndim == 2})
    assert ws.lineage(narrow, written(near, tmp_path / "near")).verdict == "related"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scattered_zeros_show_the_direction(base, tmp_path, dtype):
    weights = read_weights(base)
    inside = {part: w for part, w in weights.parts.items() if w.ndim == 2 and part[0] is not None}
    cut = {part: np.where(np.abs(w) < np.median(np.abs(w)), 0, w) for part, w in inside.items()}
    folder = written(replace(weights.but(cut), dtype=dtype), tmp_path / "pruned")
    there, back = ws.lineage(folder, base), ws.lineage(base, folder)
    assert (there.verdict, back.verdict) == ("derived", "related")
    assert "pruned" in [kind.kind for kind in there.kinds]


def test_dropped_singular_values_show_the_direction(base, tmp_path, monkeypatch):
    weights, cut = read_weights(base), {}
    for part, w in weights.within("q.w", "up.w"):
        u, s, vt = np.linalg.svd(w.astype(np.float64), full_matrices=False)
        cut[part] = (u[:, :40] * s[:40]) @ vt[:40]
    folder = written(weights.but(cut), tmp_path / "cut")
    there, back = ws.lineage(folder, base), ws.lineage(base, folder)
    assert (there.verdict, back.verdict) == ("derived", "related")
    assert "rank cut" in [kind.kind for kind in there.kinds]
    monkeypatch.setattr(recomputed, "LARGEST_SVD", 64 * 64 - 1)  # larger matrices are not read whole
    assert ws.lineage(folder, base).verdict == "related"


def test_layers_added_to_the_base_were_not_removed(base, tmp_path):
    """The base has copies that write nothing between its layers (LLaMA Pro); it was made of the suspect."""
    weights = DERIVATIONS["each layer twice"].change(read_weights(base))
    silent = {part: 0 * w for part, w in weights.within("o.w", "down.w") if part[0] % 2}
    expanded = written(weights.but(silent), tmp_path / "expanded")
    assert ws.lineage(base, expanded).verdict == "related"


@pytest.mark.parametrize("noise", [0.0, 0.06])
def test_shared_tensors_are_found_without_shared_heads(base, stranger, tmp_path, noise):
    """Embeddings, norms and feed-forward networks of one model with the attention of another."""
    weights, second = read_weights(base), read_weights(str(stranger))
    heads = {part: w for part, w in second.parts.items() if part[1] in ("q.w", "k.w", "v.w", "o.w")}
    taken = noisy(weights, 3, noise) if noise else weights
    lineage = ws.lineage(written(taken.but(heads), tmp_path / "taken"), base)
    assert (lineage.verdict, lineage.base) == ("related", "base")
    assert "No shared attention heads were found" in lineage.lead and "share an origin" in lineage.lead


def test_unrelated_needs_every_part_compared(base, stranger, tmp_path):
    complete = ws.lineage(stranger, base)
    assert complete.verdict == "unrelated"
    assert "Feed-forward networks, embeddings and norms were compared too" in complete.lead
    fingerprint(base).save(tmp_path / "base.wsf")
    part = ws.lineage(stranger, tmp_path / "base.wsf")
    assert part.verdict == "undecided" and "a fingerprint does not hold them" in part.lead


HEADS, NETWORKS = ("q.w", "k.w", "v.w", "o.w"), ("gate.w", "up.w", "down.w")
PLANTED = {  # by the parts that are taken from another model
    "attention": HEADS,
    "feed_forward": NETWORKS,
    "tokens": ("tokens",),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_part_that_was_taken_has_a_verdict_of_its_own(base, stranger, tmp_path, name):
    weights, second = read_weights(base), read_weights(str(stranger))
    taken = {part: w for part, w in weights.parts.items() if part[1] in PLANTED[name]}
    lineage = ws.lineage(written(second.but(taken), tmp_path / "taken"), base)
    expected = {part: "related" if part == name else "unrelated" for part in ("attention", "feed_forward", "tokens")}
    assert {part: lineage.parts[part].verdict for part in expected} == expected
    assert lineage.verdict == "related" and "same values" in lineage.lead
    assert lineage.as_json()["parts"][name] == {"verdict": "related", "lead": lineage.parts[name].lead}


@pytest.mark.parametrize(
    ("names", "lead"),
    [
        (["neurons permuted"], "the same neurons in another order in 5 of 5 layers"),
        (["drift 30 %"], "alike in 5 of 5 layers"),
        (["two layers swapped"], "same values in 5 of 5 layers; layer 1 was 3, 3 was 1 in the base"),
        (["neurons permuted", "two layers swapped", "drift 10 %"], "another order in 5 of 5 layers"),
        (["norms folded"], "alike in 5 of 5 layers"),
        (["stream rotated"], "alike in 5 of 5 layers"),
    ],
)
def test_feed_forward_networks_are_found_without_their_heads(base, stranger, made, tmp_path, names, lead):
    weights, second = read_weights(str(made(*names)[0])), read_weights(str(stranger))
    rotated = "stream rotated" in names  # the rotation is found from the embeddings, with shared heads alone
    heads = {} if rotated else {part: w for part, w in second.parts.items() if part[1] in (*HEADS, "tokens")}
    lineage = ws.lineage(written(weights.but(heads), tmp_path / "taken"), base)
    assert lead in lineage.parts["feed_forward"].lead
    assert (lineage.parts["attention"].verdict, lineage.verdict) == ("related" if rotated else "unrelated", "related")


def test_neurons_are_matched_as_two_assignments_agree(base, made):
    """Zhu et al. (arXiv 2502.12292): rows of gate and of up are assigned apart; of one network both agree."""
    from scipy.optimize import linear_sum_assignment
    from scipy.stats import spearmanr

    suspect, original = ws.open_model(made("neurons permuted", "drift 10 %")[0]), ws.open_model(base)
    matched = counterparts_of(networks_of(suspect), networks_of(original))
    for i in range(5):
        for j in range(5):
            orders = []
            for role in ("gate", "up"):
                x, y = (model.tensors[f"layer {k} {role}"].array() for model, k in ((suspect, i), (original, j)))
                x, y = (w / np.linalg.norm(w, axis=1, keepdims=True) for w in (x, y))
                orders.append(linear_sum_assignment(-(x @ y.T))[1])
            assert (spearmanr(*orders).pvalue < 1e-6) == (i == j)
        match = matched[i, None]
        assert (match.place, match.likeness.is_sure, match.in_place) == ((i, None), True, False)


def test_neurons_of_strangers_match_nothing(base, stranger):
    matched = counterparts_of(networks_of(ws.open_model(stranger)), networks_of(ws.open_model(base)))
    assert len(matched) == 5 and all(abs(each.likeness.z) < 5 for each in matched.values())


@pytest.mark.parametrize("roles", ["kq", "v"])
def test_a_gain_moved_into_some_matrices_is_no_training(roles, tmp_path):
    found = read_weights(write_small_llama(tmp_path / "drawn_again", layers=3))
    rng = np.random.default_rng(0)
    weights = found.but({p: 1 + 0.2 * rng.standard_normal(w.shape) for p, w in found.parts.items() if w.ndim == 1})
    gains = {i: weights.parts[i, "norm_1.w"] for i in range(3)}
    moved = {(i, name): w * gains[i][:, None] for (i, name), w in weights.within(*(f"{role}.w" for role in roles))}
    ones = {(i, "norm_1.w"): np.ones_like(gain) for i, gain in gains.items()}
    lineage = ws.lineage(written(weights.but(moved | ones), tmp_path / "suspect"), written(weights, tmp_path / "base"))
    (kind,) = lineage.kinds
    assert kind.kind == "gains moved into weights"
    assert "In 3 layers, matrices times the gain before them are unchanged" in kind.evidence
    assert "Heads differ by up to 0." in kind.evidence


def test_an_embedding_with_its_rows_in_another_order_is_found(base, stranger, tmp_path):
    weights = read_weights(base)
    order = np.random.default_rng(3).permutation(weights.size("vocabulary"))
    shuffled = read_weights(str(stranger)).but({(None, "tokens"): weights.parts[None, "tokens"][order]})
    lineage = ws.lineage(written(shuffled, tmp_path / "shuffled"), base)
    assert "the same rows in another order" in lineage.parts["tokens"].lead


WRONG_ONCE = [name for name in CASES if name in {
    "80 % pruned", "50 % pruned", "2 of 4 pruned", "rank cut to 1/4", "trained from an initialisation",
    "two of one initialisation", "gains moved into weights", "vocabulary replaced", "vocabulary replaced, same size",
    "tokenizer swapped", "another model's networks", "2 bits in groups of 32", "3 bits in groups of 32",
    "Q4_0 by gguf", "two layers tuned", "slerp", "DARE", "only the embedding tuned", "LoRA subtracted",
    "LLaMA-Pro undone", "layers repeated, undone", "stranger, pruned",
}]  # fmt: skip


def judged_case(name, base, stranger, folder):
    plant = plants_of(read_weights(base), read_weights(str(stranger)))[name]
    return judged(plant, plant.make(folder))


@pytest.mark.parametrize("name", mostly_checked(WRONG_ONCE, fast=WRONG_ONCE[::5]))
def test_kinds_and_directions_that_are_easily_taken_for_others(base, stranger, name, tmp_path):
    row = judged_case(name, base, stranger, tmp_path)
    assert (row["named"], row["nothing_else"], row["right"]) == (1, 1, 1), row


def test_a_sum_of_two_tunes_names_both_where_their_base_is_not_given(base, stranger, tmp_path):
    row = judged_case("task arithmetic without the base", base, stranger, tmp_path)
    assert (row["named"], row["nothing_else"], row["right"]) == (1, 1, 1), row


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("trained from an initialisation", "They share an initialisation: base0 is as initialised"),
        ("two of one initialisation", "They may share only an initialisation"),
        ("two tunes of one base", "the weights do not show which came first"),
    ],
)
def test_a_common_initialisation_has_a_sentence_of_its_own(base, stranger, tmp_path, name, sentence):
    made = plants_of(read_weights(base), read_weights(str(stranger)))[name].make(tmp_path)
    lineage = ws.lineage(made.suspect, made.bases)
    assert lineage.verdict == "related" and sentence in lineage.lead


def test_no_norms_were_folded_where_training_began(base, tmp_path):
    begun = initial(read_weights(base), 7)
    rng = np.random.default_rng(0)
    gains = {p: w * (1 + 0.015 * rng.standard_normal(w.shape)) for p, w in begun.parts.items() if w.ndim == 1}
    learnt = tuned(begun, 1, 0.2)
    against = {(i, name): w / gains[i, "norm_1.w"][:, None] for (i, name), w in learnt.within("q.w", "k.w", "v.w")}
    trained = written(learnt.but(gains | against), tmp_path / "trained")
    lineage = ws.lineage(trained, written(begun, tmp_path / "begun"))
    assert [kind.kind for kind in lineage.kinds] == ["fine-tuned"]
