"""Results of make targets lie under out/, which git ignores; figures/ is drawn by one command."""

import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from analyses import figures

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def tracked(folder: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("what is committed is asked of git, and this is no checkout")
    return subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def test_every_folder_of_figures_has_its_drawing():
    folders = {drawing.folder for drawing in figures.DRAWINGS}
    strays = [file for file in tracked("figures") if not any(file.startswith(f"figures/{name}/") for name in folders)]
    assert strays == []


def test_no_recipe_writes_where_git_looks():
    for recipe in (ROOT / "analyses").rglob("*.py"):
        for folder in re.findall(r'@out_option\("(.*)"\)', recipe.read_text()):
            assert folder.startswith("out/"), recipe
    assert "/out/" in (ROOT / ".gitignore").read_text().splitlines()


def test_help_lists_every_target_with_its_time():
    listed = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True).stdout
    for target in re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", MAKEFILE, re.M)[1].replace("\\\n", " ").split():
        line = next(line for line in listed.splitlines() if line.split()[:1] == [target])
        assert len(line.split()) > 2
        # These take seconds, or as long as what was changed.
        if target not in ("help", "bench-compare", "lint", "clean"):
            assert re.search(r"\([^()]*(?:minute|hour)[^()]*\)$", line), line


def test_a_drawing_without_its_input_is_left_out(tmp_path):
    result = CliRunner().invoke(figures.main, ["--only", "audit-gpt2"])
    assert result.exit_code == 0 and result.output == "audit-gpt2: left out, it needs --gpt2\n"


def test_what_git_ignores_is_not_kept(tmp_path):
    made = tmp_path / "events.csv"
    made.write_text("layer\n")
    tracked("figures")  # or skip
    figures.keep(made, ROOT / "figures" / "sink-mechanisms" / "vit" / "events.csv")
    assert not (ROOT / "figures" / "sink-mechanisms" / "vit" / "events.csv").exists()
