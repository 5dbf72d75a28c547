"""What README and CONTRIBUTING tell a newcomer to do is done: commands, code, and files that have to be there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import run
from tests.support.figures import undrawn
from weightscope.heads.audit import measure

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
MAKEFILE = (ROOT / "Makefile").read_text()


def blocks(page: str, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


COMMANDS = [line.split("#")[0].split() for block in blocks(README) for line in block.splitlines()]
IN_BARE = re.findall(r"`(\w+)`", re.search(r"^\| `pip install \.` \| (.+) \|$", README, re.M)[1])  # type: ignore[index]
BARE = """
import runpy, sys
class NoExtras:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in "pyarrow zstandard numba gguf torch distributed cryptography".split():
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, NoExtras())
runpy.run_module("weightscope", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[:1] == ["weightscope"]], ids=" ".join)
def test_a_command_of_the_readme(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    embedded = ["embedded" if word in {"SOURCE", "A", "B", "gpt2"} else word for word in words[1:]]
    with undrawn():
        result = run(*embedded)
    assert result.exit_code == 0, result.output
    if "--out" in words:
        assert (Path(words[-1]) / "report.html").exists()


@pytest.mark.parametrize("command", IN_BARE)
def test_a_command_needs_no_extra(command: str, tmp_path: Path) -> None:
    """Run in a process in which no package of an extra can be imported."""
    two = command in {"compare", "same", "learned", "lineage"}
    options = {
        "inspect": [],
        "neighbours": [" ship"],
        "rank": ["--for", "peft"],
        "fingerprint": ["--out", "embedded.wsf"],
        "id": ["--out", "embedded.id.json"],
        "card": ["--out", "README.md"],
    }
    out = options.get(command, ["--out", "out"])
    typed = [sys.executable, "-c", BARE, command, "embedded", *(["embedded"] if two else []), *out]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(typed, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?m)(?:^|`)make ([a-z0-9-]+)", README + CONTRIBUTING))))
def test_a_target_of_make_is_there(target: str) -> None:
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


def test_what_contributing_names_is_there() -> None:
    named = re.findall(r"(?:`|\s)((?:weightscope|tests|docs|analyses|figures)/[\w./-]*|[a-z]+\.py)", CONTRIBUTING)
    assert len(named) > 15
    a_question = ROOT / "weightscope" / "heads" / "norms"
    for path in named:
        assert any((folder / path.rstrip(".")).exists() for folder in (ROOT, a_question)), path


def test_a_row_is_all_that_a_measure_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks(CONTRIBUTING, "python")
    row = eval(code, {"Measure": measure.Measure})
    monkeypatch.setattr(measure, "_SPECTRUM", (*measure._SPECTRUM, row))
    audit = ws.audit(ws.open_model("embedded"), directions=0)
    for name in ("qk", "vo"):
        sums = audit.measured.spectra()[f"{name}_singular_values"].sum(axis=-1)
        np.testing.assert_allclose(audit.heads[f"{name}_nuclear"], sums.ravel())
