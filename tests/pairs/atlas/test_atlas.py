"""An atlas of a planted population: families, trees, neighbours, errors, and what a later run keeps."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import is_one_line, run
from weightscope.core.engine import ThisProcess
from weightscope.core.errors import CheckpointError
from weightscope.pairs.atlas import atlas as atlas_module
from weightscope.pairs.atlas.atlas import Atlas, AtlasOptions, make_atlas
from weightscope.pairs.lineage.sketches import fingerprint

pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow comes with the extra `atlas`")

FAMILY = {"base", "bfloat16", "drift-3-%", "heads-permuted", "last-layers-removed", "4-bits,-groups-of-32"}


def made(listing: Path | None, out: Path, **options: object) -> Atlas:
    with ThisProcess() as engine:
        return make_atlas(listing, out, engine, AtlasOptions(**options))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def tables(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".csv", ".parquet")}


@pytest.fixture(scope="module")
def out(population: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("atlas") / "out"
    made(population / "list.txt", folder)
    return folder


def test_families_are_those_that_were_planted(out: Path) -> None:
    families = [{Path(name).name for name in row["names"].split(", /")} for row in rows(out / "families.csv")]
    joined = [{name.replace(", ", ",") for name in family} for family in families]
    assert joined == [FAMILY, {"other", "other-bfloat16"}]
    of_names = {Path(row["name"]).name: row["family"] for row in rows(out / "checkpoints.csv")}
    assert of_names.keys() == FAMILY | {"other", "other-bfloat16", "alone"}
    assert list(of_names.values()).count(of_names["alone"]) == 1


def test_a_tree_has_an_order_only_where_something_was_lost(out: Path) -> None:
    edges = rows(out / "tree.csv")
    assert len(edges) == len(FAMILY) - 1 + 1
    ordered = {(Path(row["first"]).name, *sorted(Path(row[end]).name for end in "ab")) for row in edges if row["first"]}
    assert {pair for pair in ordered if "bfloat16" in pair[1:]} == {("base", "base", "bfloat16")}
    assert ("other", "other", "other-bfloat16") in ordered
    assert ("base", "base", "last-layers-removed") in ordered
    assert not any({"drift-3-%", "heads-permuted"} & {*pair[1:]} for pair in ordered)
    assert all(bool(row["how"]) == bool(row["first"]) for row in edges)


def test_what_cannot_be_read_is_one_row_each(population: Path, out: Path) -> None:
    problems = {Path(row["name"]).name: row["error"] for row in rows(out / "errors.csv")}
    assert problems.keys() == {"broken", "missing", "base"}
    assert "no such file or folder" in problems["missing"] and problems["base"] == atlas_module.TWICE


def test_the_table_of_heads_agrees_with_every_checkpoint(population: Path, out: Path) -> None:
    file = pq.ParquetFile(out / "heads.parquet")
    assert file.num_row_groups == len(rows(out / "checkpoints.csv"))
    table = file.read().to_pylist()
    for name in ("base", "last-layers-removed"):
        mine = [row for row in table if row["checkpoint"] == str(population / name)]
        print_of = fingerprint(population / name)
        assert [(row["layer"], row["head"]) for row in mine] == list(
            zip(print_of.layer.tolist(), print_of.head.tolist(), strict=True)
        )
        np.testing.assert_allclose([row["qk_frobenius"] for row in mine], print_of.norms[:, 0], rtol=1e-6)
        model = print_of.source
        for row in mine[:3]:
            s = model.layer(row["layer"]).head(row["head"]).vo.svdvals()
            assert row["vo_sigma1"] == pytest.approx(s[0], rel=2e-3)  # logarithms at 16 bits
            assert row["vo_stable_rank"] == pytest.approx((s**2).sum() / s[0] ** 2, rel=4e-3)
    permuted = [row for row in table if row["checkpoint"] == str(population / "heads-permuted")]
    assert all(row["relative"] and row["relative_likeness"] > 0.99 for row in permuted)
    assert all(row["relative_layer"] == row["layer"] for row in permuted)
    alone = [row for row in table if row["checkpoint"] == str(population / "alone")]
    assert not any(row["relative"] or row["stranger"] for row in alone)


def test_json_says_where_everything_comes_from(population: Path, out: Path) -> None:
    result = json.loads((out / "atlas.json").read_text())
    assert result["lead"].startswith("9 checkpoints") and result["version"] and "command" in result
    assert result["checkpoints"] == len(result["sources"]) == 9
    assert all(file["sha256"] for source in result["sources"] for file in source["files"])
    assert result["heads"] == pq.ParquetFile(out / "heads.parquet").metadata.num_rows


def test_a_later_run_reads_only_what_has_changed(
    population: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["base", "bfloat16", "other"]
    for name in names:
        (tmp_path / name).symlink_to(population / name)
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"{tmp_path / name}\n" for name in names))
    first = made(listing, tmp_path / "out")
    assert first.made == 3
    before = tables(tmp_path / "out")
    with pytest.raises(CheckpointError, match="has 3 fingerprints of an earlier run; `resume` keeps them"):
        made(listing, tmp_path / "out")
    monkeypatch.setattr(atlas_module, "find_direction", None)  # nor is any pair judged again
    again = made(listing, tmp_path / "out", resume=True)
    assert again.made == 0 and tables(tmp_path / "out") == before
    (tmp_path / "bfloat16").unlink()
    (tmp_path / "bfloat16").symlink_to(population / "other-bfloat16")
    monkeypatch.undo()
    changed = made(listing, tmp_path / "out", resume=True)
    assert changed.made == 1
    (family,) = [family for family in changed.families if len(family.members) > 1]
    assert {changed.members[place].name for place in family.members} == {
        str(tmp_path / "other"), str(tmp_path / "bfloat16"),
    }  # fmt: skip


def test_a_withdrawn_checkpoint_leaves_no_trace(population: Path, tmp_path: Path) -> None:
    listing = population / "list.txt"
    made(listing, tmp_path / "out", proved=0)
    name = str(population / "other")
    gone = made(None, tmp_path / "out", withdraw=(name,))
    assert gone.withdrawn == 1 and len(gone.members) == 8 and gone.provenance.command is None
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    text = "".join(path.read_text(errors="replace") for path in files)
    assert f"{name}\n" not in text and f"{name}," not in text and f"{name}<" not in text and f'{name}"' not in text
    assert name not in pq.read_table(tmp_path / "out" / "heads.parquet")["checkpoint"].to_pylist()
    assert len(made(listing, tmp_path / "out", resume=True, proved=0).members) == 8
    with pytest.raises(CheckpointError, match="no checkpoint 'x' in the list"):
        made(None, tmp_path / "out", withdraw=("x",))


def test_a_line_of_many_characters_does_not_hide_the_list(tmp_path: Path) -> None:
    """What a run has kept is read again whatever its list held."""
    (tmp_path / "list.txt").write_text(f"embedded\n{'x' * 5000}\n")
    assert len(made(tmp_path / "list.txt", tmp_path / "out").members) == 1
    gone = made(None, tmp_path / "out", withdraw=("embedded",))
    assert not gone.members and gone.withdrawn == 1
    assert not list((tmp_path / "out").rglob("print-*.npz"))


TAMPERED: dict[str, tuple[str, Any]] = {
    "sources that are a number": ("list.json", {"sources": 5}),
    "sources that are numbers": ("list.json", {"sources": [5]}),
    "errors that are a list": ("list.json", {"sources": [], "errors": ["x"]}),
    "errors that are numbers": ("list.json", {"sources": [], "errors": {"x": 1}}),
    "a list": ("list.json", []),
    "nested": ("list.json", "[" * 9999),
    "withdrawn that is a number": ("withdrawn.json", {"sha256": 5}),
    "withdrawn that are lists": ("withdrawn.json", {"sha256": [[]]}),
    "withdrawn that is no JSON": ("withdrawn.json", "{"),
}


@pytest.mark.parametrize("attack", TAMPERED)
def test_a_tampered_folder_is_one_clear_error(attack: str, tmp_path: Path) -> None:
    """Nothing is taken as empty: what was withdrawn would come back."""
    (tmp_path / "list.txt").write_text("embedded\n")
    made(tmp_path / "list.txt", tmp_path / "out")
    name, value = TAMPERED[attack]
    (file,) = [*(tmp_path / "out").rglob("list.json")]
    (file.parent / name).write_text(value if isinstance(value, str) else json.dumps(value))
    result = run("atlas", "--out", tmp_path / "out", "--withdraw", "embedded")
    assert is_one_line(result) and "was changed since the atlas was made" in result.stderr, result.output


@pytest.mark.parametrize("source", ["\ud800", "\0", "x" * 5000, "", "a\nb", "~x", "https://["])
def test_any_text_may_be_a_source_of_a_kept_list(source: str, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("embedded\n")
    made(tmp_path / "list.txt", tmp_path / "out")
    (file,) = [*(tmp_path / "out").rglob("list.json")]
    file.write_text(json.dumps({"sources": ["embedded", source], "errors": {source: source}}))
    result = run("atlas", "--out", tmp_path / "out", "--withdraw", "embedded")
    assert result.exit_code == 0 or is_one_line(result), result.output


def test_the_command_prints_json_or_where_the_pages_are(population: Path, tmp_path: Path) -> None:
    short = tmp_path / "list.txt"
    short.write_text(f"{population / 'base'}\nembedded\n")
    result = run("atlas", short, "--out", tmp_path / "a", "--prove", "0")
    assert result.exit_code == 0 and result.stdout.endswith(f"{tmp_path / 'a' / 'index.html'}\n")
    result = run("atlas", short, "--out", tmp_path / "a", "--resume", "--json", "--prove", "0")
    assert json.loads(result.stdout)["made"] == 0
    assert "LIST is missing" in run("atlas", "--out", tmp_path / "b").stderr
