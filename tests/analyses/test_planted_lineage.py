"""The loop over planted lineages: a stand-in for `ws.lineage` that compares W_Q is judged as it deserves."""

import csv
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import weightscope as ws
from analyses.experiments import planted_lineage
from analyses.study import judge_each
from tests.support.plants.named_parts import read_weights
from tests.support.two_layers import TWO_LAYERS
from weightscope.core.tables import Column, Table

pytestmark = pytest.mark.check
TEXTS = ["It was a dark night. The rain fell in torrents.\n" * 400, "Another book says other things. " * 200]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every tiny model, after one step."""
    pytest.importorskip("torch", reason="training needs the extra `runner`")
    from analyses.toys.train_lineage import train_all

    folder = tmp_path_factory.mktemp("work") / "trained"
    train_all(TEXTS, folder, steps=1)
    return folder


def lineage(suspect: str, bases: list[str]) -> SimpleNamespace:
    """Matches every layer with the one whose stored W_Q is nearest; all that it names is a change of depth."""
    theirs = read_weights(suspect)
    cosines = []
    for base in bases:
        ours = read_weights(base)
        for layer in theirs.layers():
            for base_layer in ours.layers():
                a, b = theirs.parts[layer, "q.w"].ravel(), ours.parts[base_layer, "q.w"].ravel()
                cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b) if a.shape == b.shape else 0.0
                cosines.append((layer, base, base_layer, cosine))
    best = [max((row for row in cosines if row[0] == layer), key=lambda row: row[3]) for layer in theirs.layers()]
    likeness = np.array([row[3] for row in best])
    is_derived = likeness.mean() > 0.5
    kinds = {1: "layers repeated", -1: "layers removed"}
    change = np.sign(len(best) - ours.size("layers")) if is_derived else 0
    columns = dict(zip(("layer", "base", "base_layer", "likeness"), zip(*best, strict=True), strict=True))
    return SimpleNamespace(
        verdict="derived" if is_derived else "unrelated",
        base=best[0][1] if is_derived else None,
        p_value=float(np.exp(-20 * likeness.mean())),
        kinds=[SimpleNamespace(kind=kinds[change])] if change else [],
        weights={},
        compared=[SimpleNamespace(matches={"stored": SimpleNamespace(likeness=likeness[:, None])})],
        alignment=Table([Column(name, values) for name, values in columns.items()]),
    )


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_what_a_stand_in_can_tell_is_counted_right(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(ws, "lineage", lineage, raising=False)
    arguments = ["--work", trained.parent, "--model", TWO_LAYERS, "--only", "gpt2", "--out", tmp_path / "out"]
    run = CliRunner().invoke(planted_lineage.main, [str(word) for word in arguments], catch_exceptions=False)
    assert run.exit_code == 0, run.output
    rows = {row["name"]: row for row in table(tmp_path / "out" / "planted.csv")}
    upscaled = rows["gpt2: depth upscaled"]
    assert upscaled["verdict"] == "derived" and upscaled["named_base"] == "True" and upscaled["named"] == "True"
    assert upscaled["map_exact"] == "True" and upscaled["others"] == ""
    assert rows["gpt2: two layers swapped"]["map_exact"] == "True"
    assert rows["gpt2: two layers swapped"]["named"] == "False"
    assert rows["gpt2: stream permuted"]["verdict"] == "unrelated"
    kinds = {row["kind"]: row for row in table(tmp_path / "out" / "kinds.csv")}
    assert kinds["layers removed"]["planted"] == kinds["layers removed"]["map_exact"]
    assert kinds["fine-tuned"]["named"] == "0"
    assert int(kinds["all"]["planted"]) == len(rows) > 60
    groups = {row["strangers"]: row for row in table(tmp_path / "out" / "groups.csv")}
    assert groups["another seed"]["pairs"] == groups["another seed"]["unrelated"] == "20"
    aurocs = [float(line.rsplit(": ", 1)[1]) for line in run.output.splitlines() if line.startswith("AUROC of ")]
    assert len(aurocs) == 2 and all(0.8 < area < 1 for area in aurocs)  # it sees no permutation
    assert (tmp_path / "out" / "planted.svg").exists()


def test_a_second_run_judges_nothing_again(trained, tmp_path):
    pairs = [pair for pair in planted_lineage.planted(trained, (TWO_LAYERS,), (), None) if "swapped" in pair.name]
    first = judge_each(pairs, planted_lineage.judge_by(lineage), "derived", kept=tmp_path)
    assert first == judge_each(pairs, None, "derived", kept=tmp_path)


def test_the_sets_are_as_large_as_the_question_asks(trained):
    """At least 200 of each, of names that do not repeat."""
    for pairs in (
        list(planted_lineage.planted(trained, (TWO_LAYERS,), (), "mergekit-yaml")),
        list(planted_lineage.strangers(trained, (TWO_LAYERS,), ())),
    ):
        assert len({pair.name for pair in pairs}) == len(pairs) > 200


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("layers repeated (depth upscaling)", "layers repeated"),
        ("layers removed", "layers removed"),
        ("heads removed", "heads removed"),
        ("heads permuted", "heads permuted"),
        ("permuted residual stream", "stream permuted"),
        ("basis of heads changed (gauge)", "gauge"),
        ("quantised: Q4_K", "quantised"),
        ("something else", "something else"),
    ],
)
def test_a_found_kind_is_recognised_by_the_words_it_has_to_say(words, kind):
    assert planted_lineage.kind_of(words) == kind


def test_a_gguf_file_holds_the_weights_that_were_written(trained, tmp_path):
    pairs = planted_lineage.in_gguf(str(trained / "llama-0"), ())
    pair = next(pair for pair in pairs if pair.name.endswith("F16"))
    written, given = read_weights(pair.make(tmp_path).suspect), read_weights(trained / "llama-0")
    for part, w in given.parts.items():
        np.testing.assert_array_equal(written.parts[part], w.astype(np.float16) if w.ndim == 2 else w)
