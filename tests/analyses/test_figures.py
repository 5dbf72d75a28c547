"""`make figures` writes under out/, which git ignores; figures/ keeps pictures shown, small tables and hashes."""

import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from analyses import figures, made

pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def tracked(folder: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("git lists the committed files, and this is no checkout")
    return subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A drawing of two tables and two pictures; a page shows one picture, and the hashes are recorded."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(figures, "DRAWN", tmp_path / "out" / "figures")
    monkeypatch.setattr(figures, "SUMS", tmp_path / "figures" / "SHA256SUMS")
    monkeypatch.setattr(made, "KEPT", tmp_path / "figures" / "MADE.csv")
    (tmp_path / "README.md").write_text("![heads](figures/audit-gpt2/heads.png)")
    (tmp_path / "figures").mkdir()
    out = tmp_path / "out" / "figures" / "audit-gpt2"
    out.mkdir(parents=True)
    for name, text in {"heads.csv": "layer,norm\n0,1.25\n", "spectra.csv": "sigma\n2\n"}.items():
        (out / name).write_text(text)
    for name in ("heads.png", "depth.png"):
        Image.new("RGB", (2, 2)).save(out / name)
    assert run("--keep", "--only", "audit-gpt2") == (0, "")
    return out


def run(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(figures.main, options)
    return result.exit_code, result.output


def test_the_repository_keeps_what_pages_show_and_small_tables() -> None:
    names = [name.removeprefix("figures/") for name in tracked("figures")]
    assert set(names) == {"SHA256SUMS", made.KEPT.name, *figures.kept(names)}
    assert figures.pictures_shown() <= set(names)
    assert sum((figures.FIGURES / name).stat().st_size for name in names) < 6_000_000


def test_every_kept_table_has_the_recorded_hash() -> None:
    sums = figures.read_sums()
    tables = {
        name.removeprefix("figures/")
        for name in tracked("figures")
        if Path(name).suffix in figures.TABLES and Path(name).name not in (figures.EARLIER, made.KEPT.name)
    }
    assert {name: figures.hash_of(figures.FIGURES / name) for name in tables} == {name: sums[name] for name in tables}


def test_every_folder_of_the_hashes_has_its_drawing_and_the_other_way_round() -> None:
    folders = {drawing.folder for drawing in figures.DRAWINGS}
    owners = {name: [folder for folder in folders if name.startswith(f"{folder}/")] for name in figures.read_sums()}
    assert all(len(owner) == 1 for owner in owners.values())
    assert {folder for owner in owners.values() for folder in owner} == folders - {"hero"}  # one picture, and no table


def test_a_drawing_is_kept_in_part(drawn: Path) -> None:
    kept = {path.relative_to(figures.FIGURES).as_posix() for path in figures.FIGURES.rglob("*") if path.is_file()}
    assert kept == {"SHA256SUMS", "MADE.csv", "audit-gpt2/heads.csv", "audit-gpt2/heads.png"}
    checked = subprocess.run(["sha256sum", "--check", figures.SUMS], cwd=figures.DRAWN, capture_output=True, text=True)
    assert checked.stdout.splitlines() == ["audit-gpt2/heads.csv: OK", "audit-gpt2/spectra.csv: OK"]


def test_the_check_passes_where_nothing_changed(drawn: Path) -> None:
    assert run("--check", "--only", "audit-gpt2") == (0, "audit-gpt2: 2 tables, no differences\n")


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("heads.csv", "layer,norm\n0,1.26\n", "heads.csv: differs (by 7.9e-03 of a value at most)"),
        ("heads.csv", "layer,norm\n0,nan\n", "heads.csv: differs ('1.25' in figures/, 'nan' drawn)"),
        ("heads.csv", "layer,rank\n0,1.25\n", "heads.csv: differs ('norm' in figures/, 'rank' drawn)"),
        ("heads.csv", "layer,norm\n", "heads.csv: differs (4 cells in figures/, 2 drawn)"),
        ("heads.csv", None, "heads.csv: not written"),
        ("spectra.csv", "sigma\n3\n", "spectra.csv: differs"),
        ("findings.json", "{}", "findings.json: no recorded hash"),
    ],
)
def test_the_check_names_what_differs(drawn: Path, name: str, text: str | None, message: str) -> None:
    (drawn / name).unlink() if text is None else (drawn / name).write_text(text)
    code, output = run("--check", "--only", "audit-gpt2")
    assert code == 1 and output.splitlines()[1:] == [f"audit-gpt2/{message}"]


def test_no_recipe_writes_where_git_looks() -> None:
    for recipe in (ROOT / "analyses").rglob("*.py"):
        for folder in re.findall(r'@out_option\("(.*)"\)', recipe.read_text()):
            assert folder.startswith("out/"), recipe
    assert "/out/" in (ROOT / ".gitignore").read_text().splitlines()


def test_help_lists_every_target_with_its_time() -> None:
    listed = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True).stdout
    for target in re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", MAKEFILE, re.M)[1].replace("\\\n", " ").split():
        line = next(line for line in listed.splitlines() if line.split()[:1] == [target])
        assert len(line.split()) > 2
        # These take seconds, or as long as what was changed.
        if target not in ("help", "bench-compare", "lint", "clean"):
            assert re.search(r"\([^()]*(?:minute|hour)[^()]*\)$", line), line


def test_a_drawing_without_its_input_is_skipped() -> None:
    assert run("--only", "audit-gpt2") == (0, "audit-gpt2: skipped, it needs --gpt2\n")
