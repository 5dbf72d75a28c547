"""The working directory may be a downloaded checkpoint: nothing in it is taken for a module or chooses what is run."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.commands import run

pytestmark = pytest.mark.check
PROGRAM = "import sys; sys.path.remove(''); sys.argv[0] = 'weightscope'; from weightscope.__main__ import main; main()"
AUROC = """
import os, sys
from pathlib import Path
sys.path.remove("")
import numpy as np, scipy.sparse
from weightscope.model.metrics import auroc
def run():
    factor, counts = np.eye(2, 3, dtype=np.float32), scipy.sparse.csr_array([[0, 1], [1, 0]])
    return auroc.auroc_by_token(factor, factor, counts)
{first}
Path(".numba_config.yaml").write_text("cache_dir: planted\\ndump_bytecode: 1\\n")
print(run().tolist(), "numba" in sys.modules)
"""


def python(program: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=cwd)


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.parametrize("first", ["", "import numba"], ids=["before", "after"])
def test_settings_for_numba_are_not_read(first: str, tmp_path: Path) -> None:
    """They could name a cache, which numba unpickles: neither when numba is imported nor later when it compiles."""
    done = python(AUROC.format(first=first), cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"[0.0, 0.0] {bool(first)}\n", "")
    assert [path.name for path in tmp_path.iterdir()] == [".numba_config.yaml"]


def test_modules_are_not_imported(tmp_path: Path) -> None:
    """By no process of `--jobs` either: Python looks for modules here first when it starts one."""
    for name in ("joblib", "numpy", "weightscope"):
        (tmp_path / f"{name}.py").write_text("from pathlib import Path\nPath('ran').touch()\nraise SystemExit(9)\n")
    done = python(PROGRAM, "audit", "embedded", "--jobs", "2", "--out", "out", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


def test_the_module_is_as_safe_as_the_command_with_python_p(tmp_path: Path) -> None:
    """As docs/files.md says; an installed command has its own folder first, not the working directory."""
    for name in ("inspect", "resource", "numpy", "click"):
        (tmp_path / f"{name}.py").write_text("from pathlib import Path\nPath('ran').touch()\nraise SystemExit(9)\n")
    commands = [[sys.executable, "-P", "-m", "weightscope"]]
    if (installed := Path(sys.executable).with_name("weightscope")).exists():
        commands.append([str(installed)])
    for command in commands:
        done = subprocess.run([*command, "inspect", "embedded"], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0 and not (tmp_path / "ran").exists(), done.stderr


@pytest.mark.parametrize("kind", ["bytes", "pipe"])
@pytest.mark.parametrize("place", [".", "MPLCONFIGDIR", "MATPLOTLIBRC"])
def test_settings_for_matplotlib_that_cannot_be_read_end_in_a_line(kind: str, place: str, tmp_path: Path) -> None:
    """Before anything is measured; a pipe is not waited for."""
    folder = tmp_path if place == "." else tmp_path / "settings"
    folder.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / "matplotlibrc")
    else:
        (folder / "matplotlibrc").write_bytes(b"font.size: 9  # \xff")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        if place != ".":
            patch.setenv(place, str(folder))
        result = run("audit", "embedded", "--out", "out")
    problem = "is not a regular file" if kind == "pipe" else "is not UTF-8, and Matplotlib reads it to draw figures"
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"weightscope: matplotlibrc: {problem}")
    assert not (tmp_path / "out").exists()
